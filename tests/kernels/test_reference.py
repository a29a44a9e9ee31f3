"""The window functions against the recurrence itself, one token at a time in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ready_hf.kernels import (
    Window,
    gated_delta_block,
    gated_delta_window,
    grouped_query,
    mamba2_window,
    scaled_query,
    window_outputs,
    window_state,
)


BATCH, LENGTH, HEADS, KEYS, VALUES = 3, 9, 4, 6, 10  # K != V, so that a transposed state cannot pass
RULES = [
    "gated_delta",
    "gated_delta_grouped",
    "gated_delta_unnormalised",
    "kda",
    "mamba2",
    "mamba2_limited",
    "mamba2_plain",
]
STRONG = [200.0, 1600.0, float("inf")]  # decay of a token, minus g
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}
with_and_without_state = pytest.mark.parametrize("has_state", [True, False], ids=["state", "no_state"])
every_rule = pytest.mark.parametrize("rule", RULES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@dataclass
class Problem:
    """A window of one rule: what the model passes, and the rule's options."""

    rule: str
    inputs: dict[str, torch.Tensor]  # query and per-token tensors, [B, T, ...]
    initial_state: torch.Tensor | None
    options: dict

    @property
    def window(self) -> Window:
        inputs = {name: x for name, x in self.inputs.items() if name != "query"}
        if self.rule.startswith("mamba2"):
            return mamba2_window(**inputs, **self.options)
        return gated_delta_window(**inputs, initial_state=self.initial_state, **self.options)

    @property
    def query(self) -> torch.Tensor:
        if self.rule.startswith("mamba2"):
            return grouped_query(self.inputs["query"], HEADS)
        return scaled_query(self.inputs["query"], HEADS, **self.options)

    def poisoned(self, start: int) -> "Problem":
        """The same, with NaN in every tensor from token `start` on."""
        inputs = {name: x.clone() for name, x in self.inputs.items()}
        for x in inputs.values():
            x[:, start:] = float("nan")
        return replace(self, inputs=inputs)

    def decayed_by(self, strength: float, tokens: list[int]) -> "Problem":
        """The same, but the state before each of `tokens` is decayed by exp(-strength); of KDA, every other channel.

        Mamba-2 makes its log decay of two factors: infinity times 0 is none, so there every token decays as strongly.
        """
        inputs, options = dict(self.inputs), dict(self.options)
        if not self.rule.startswith("mamba2"):
            inputs["g"] = inputs["g"].clone()
            inputs["g"][:, tokens, :, *([slice(None, None, 2)] if self.rule == "kda" else [])] = -strength
            return replace(self, inputs=inputs)
        assert self.rule == "mamba2_plain", "here `dt` is the step size itself"
        options["A"] = torch.full_like(options["A"], -strength)
        inputs["dt"] = inputs["dt"] / min(strength, 1e3)
        inputs["dt"][:, tokens] = 1.0
        return replace(self, inputs=inputs, options=options)


def make_problem(
    rule: str, dtype: torch.dtype, has_state: bool = True, decay: float = 1.0, length: int = LENGTH
) -> Problem:
    generator = torch.Generator().manual_seed(RULES.index(rule))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    state = randn(BATCH, HEADS, KEYS, VALUES) if has_state else None
    if rule.startswith("mamba2"):
        inputs = {
            "query": randn(BATCH, length, 2, KEYS),
            "hidden_states": randn(BATCH, length, HEADS, VALUES),
            "dt": randn(BATCH, length, HEADS),
            "B": randn(BATCH, length, 2, KEYS),
        }
        options = {"A": -decay * randn(HEADS).exp(), "dt_bias": randn(HEADS), "dt_softplus": True}
        if rule == "mamba2_limited":
            options["dt_limit"] = (0.3, 1.2)
        if rule == "mamba2_plain":
            inputs["dt"] = inputs["dt"].abs()
            options = {"A": options["A"]}
        return Problem(rule, inputs, state, options)
    key_heads = 2 if rule == "gated_delta_grouped" else HEADS
    inputs = {
        "query": randn(BATCH, length, key_heads, KEYS),
        "key": randn(BATCH, length, key_heads, KEYS),
        "value": randn(BATCH, length, HEADS, VALUES),
        "g": -decay * F.softplus(randn(BATCH, length, HEADS, *([KEYS] if rule == "kda" else []))),
        "beta": randn(BATCH, length, HEADS).sigmoid(),
    }
    if rule == "gated_delta_unnormalised":
        inputs["key"] = inputs["key"] / KEYS
    return Problem(rule, inputs, state, {"use_qk_l2norm": rule != "gated_delta_unnormalised"})


def recurrence(problem: Problem) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs `[B, H, T, V]` and the states after 0, 1, ..., T tokens, token by token in float64."""
    x = {name: tensor.double() for name, tensor in problem.inputs.items()}
    state = torch.zeros(BATCH, HEADS, KEYS, VALUES, dtype=torch.float64)
    if problem.initial_state is not None:
        state = problem.initial_state.double()
    outputs, states = [], [state]
    for t in range(x["query"].shape[1]):
        q, k, g, update = _token(problem, {name: tensor[:, t] for name, tensor in x.items()})
        state = state * g.exp()
        state = state + k[..., :, None] * update(state, k)[..., None, :]
        outputs.append((state * q[..., :, None]).sum(-2))
        states.append(state)
    return torch.stack(outputs, 2), states


def _token(problem, x):
    """Query and key `[B, H, K]`, log decay, and the update vector as a function of the decayed state."""
    if problem.rule.startswith("mamba2"):
        options = problem.options
        dt = x["dt"] + options.get("dt_bias", torch.zeros(1)).double()
        dt = F.softplus(dt) if options.get("dt_softplus") else dt
        dt = dt.clamp(*options.get("dt_limit", (0.0, float("inf"))))
        q, k = x["query"].repeat_interleave(HEADS // 2, 1), x["B"].repeat_interleave(HEADS // 2, 1)
        g = (dt * options["A"].double())[..., None, None]
        return q, k, g, lambda state, k: dt[..., None] * x["hidden_states"]
    q, k = x["query"], x["key"]
    if problem.options["use_qk_l2norm"]:
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(HEADS // y.shape[1], 1) for y in (q / KEYS**0.5, k))
    g = x["g"][..., None] if x["g"].dim() == 3 else x["g"][..., None, None]
    return q, k, g, lambda state, k: x["beta"][..., None] * (x["value"] - (state * k[..., :, None]).sum(-2))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())


@both_dtypes
@with_and_without_state
@every_rule
def test_outputs_equal_those_of_the_recurrence(rule, has_state, dtype):
    problem = make_problem(rule, dtype, has_state)
    want, _ = recurrence(problem)
    got = window_outputs(problem.query, problem.window, problem.initial_state)
    assert got.dtype == dtype
    assert relative_error(got, want) <= TOLERANCE[dtype]


@both_dtypes
@with_and_without_state
@every_rule
def test_state_after_every_prefix_equals_that_of_the_recurrence(rule, has_state, dtype):
    problem = make_problem(rule, dtype, has_state)
    window, (_, states) = problem.window, recurrence(problem)
    for length in range(1, LENGTH + 1):
        got = window_state(window, problem.initial_state, length)
        assert got.dtype == dtype
        assert relative_error(got, states[length]) <= TOLERANCE[dtype], length


@pytest.mark.parametrize("lengths", [(1, 5, 9), (0, 9, 3), (4, 4, 4), (0, 0, 0)], ids=str)
@both_dtypes
@with_and_without_state
@every_rule
def test_rows_may_keep_different_numbers_of_tokens(rule, has_state, dtype, lengths):
    problem = make_problem(rule, dtype, has_state)
    _, states = recurrence(problem)
    got = window_state(problem.window, problem.initial_state, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        want = states[length][row]
        if length == 0:
            assert torch.equal(got[row].double(), want), "a row that keeps nothing must not change"
        else:
            assert relative_error(got[row], want) <= TOLERANCE[dtype]


@with_and_without_state
@every_rule
def test_keeping_no_token_of_any_row_gives_the_initial_state(rule, has_state):
    problem = make_problem(rule, torch.float64, has_state)
    _, states = recurrence(problem)
    assert torch.equal(window_state(problem.window, problem.initial_state, 0), states[0])


@pytest.mark.parametrize("length", [LENGTH - 1, 1])
@every_rule
def test_a_rejected_suffix_of_nan_never_reaches_the_kept_state(rule, length):
    clean = make_problem(rule, torch.float32)
    poisoned = clean.poisoned(length)
    want = window_state(clean.window, clean.initial_state, length)
    rows = torch.full((BATCH,), length)
    for keep in (length, rows):
        assert relative_error(window_state(poisoned.window, poisoned.initial_state, keep), want.double()) <= 1e-6
    rows[0] = 0
    assert torch.equal(window_state(poisoned.window, poisoned.initial_state, rows)[0], clean.initial_state[0])


@both_dtypes
@every_rule
def test_strong_decay_does_not_overflow(rule, dtype):
    problem = make_problem(rule, dtype, decay=60.0)
    window, (want, states) = problem.window, recurrence(problem)
    assert window.g.sum(2).min() < -3 * 88  # exp(88.8) is the largest number of float32
    assert relative_error(window_outputs(problem.query, window, problem.initial_state), want) <= TOLERANCE[dtype]
    for length in range(1, LENGTH + 1):
        assert relative_error(window_state(window, problem.initial_state, length), states[length]) <= TOLERANCE[dtype]


def assert_close_to_recurrence(problem: Problem, bound: float = 1e-6) -> None:
    """Outputs, and the state after every prefix, of all rows and of each row."""
    (want, states), window = recurrence(problem), problem.window
    length = want.shape[2]
    assert relative_error(window_outputs(problem.query, window, problem.initial_state), want) <= bound
    for keep in range(1, length + 1):
        rows = torch.tensor([keep, length, 1])
        per_row = torch.stack([states[n][row] for row, n in enumerate(rows.tolist())])
        assert relative_error(window_state(window, problem.initial_state, keep), states[keep]) <= bound, keep
        assert relative_error(window_state(window, problem.initial_state, rows), per_row) <= bound, keep
    if problem.rule.startswith("gated_delta"):
        output, block = gated_delta_block(**problem.inputs, initial_state=problem.initial_state, **problem.options)
        assert relative_error(output.transpose(1, 2), want) <= bound
        for mine, other in zip(block, window, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [[0], [4], [8], [1, 4, 5], [0, 8]], ids=str)
@pytest.mark.parametrize("strength", STRONG)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("mamba2", "mamba2_limited")])
def test_a_token_that_decays_everything_costs_no_digits_elsewhere(rule, strength, tokens):
    """Sums of g over other intervals must not pass through the sum with that token in it."""
    problem = make_problem(rule, torch.float32).decayed_by(strength, tokens)
    assert_close_to_recurrence(problem)
    if rule != "kda" and strength > 1000:  # nothing from before the token is left
        first = tokens[-1] + 1
        state = window_state(problem.window, problem.initial_state, first)
        without = window_state(problem.window, torch.zeros_like(problem.initial_state), first)
        assert torch.equal(state, without)


@pytest.mark.parametrize("strength", [1.0, *STRONG])
@pytest.mark.parametrize("rule", ["gated_delta", "kda", "mamba2_plain"])
def test_long_blocks_with_strong_decay(rule, strength):
    assert_close_to_recurrence(make_problem(rule, torch.float32, decay=0.1, length=33).decayed_by(strength, [3, 16]))


@given(
    g=st.lists(st.sampled_from([0.0, -1e-3, -0.3, -3.0, -60.0, -200.0, -1600.0, -1e30, -torch.inf]), max_size=33),
    is_vector=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_decays(g, is_vector, seed):
    problem = make_problem("kda" if is_vector else "gated_delta", torch.float32, length=len(g) + 1)
    decays, generator = problem.inputs["g"], torch.Generator().manual_seed(seed)
    is_drawn = torch.rand(decays[:, 1:].shape, generator=generator) < 0.7  # the others, and the first, are ordinary
    drawn = torch.tensor(g).view(1, -1, *[1] * (decays.dim() - 2))
    decays[:, 1:] = torch.where(is_drawn, drawn, decays[:, 1:])
    assert_close_to_recurrence(problem)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 70])
@every_rule
def test_windows_of_any_length(rule, length):
    problem = make_problem(rule, torch.float32, length=length)
    want, states = recurrence(problem)
    assert relative_error(window_outputs(problem.query, problem.window, problem.initial_state), want) <= 3e-6
    assert relative_error(window_state(problem.window, problem.initial_state, length), states[-1]) <= 3e-6


@every_rule
def test_a_window_does_not_depend_on_later_tokens(rule):
    problem = make_problem(rule, torch.float64)
    prefix = replace(problem, inputs={name: x[:, :4] for name, x in problem.inputs.items()})
    for whole, part in zip(problem.window, prefix.window, strict=True):
        torch.testing.assert_close(whole[:, :, :4], part, rtol=1e-12, atol=1e-14)


@every_rule
def test_inputs_and_initial_state_are_left_alone(rule):
    problem = make_problem(rule, torch.float32)
    before = {name: x.clone() for name, x in problem.inputs.items()} | {"state": problem.initial_state.clone()}
    window = problem.window
    window_outputs(problem.query, window, problem.initial_state)
    window_state(window, problem.initial_state, 3)
    window_state(window, problem.initial_state, torch.tensor([0, 3, LENGTH]))
    after = problem.inputs | {"state": problem.initial_state}
    assert all(torch.equal(x, after[name]) for name, x in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_rule
def test_half_precision_inputs_are_computed_in_float32(rule, dtype):
    problem = make_problem(rule, dtype)
    if rule.startswith("mamba2"):  # what the model rounds before the rule is the model's own affair
        problem.inputs["dt"] = problem.inputs["dt"].float()
        problem.options = {n: x.float() if isinstance(x, torch.Tensor) else x for n, x in problem.options.items()}
    want, states = recurrence(problem)
    got = window_outputs(problem.query, problem.window, problem.initial_state)
    assert got.dtype == torch.float32
    assert relative_error(got, want) <= 3e-6
    state = window_state(problem.window, problem.initial_state, LENGTH)
    assert state.dtype == torch.float32
    assert relative_error(state, states[-1]) <= 3e-6
