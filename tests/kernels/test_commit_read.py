"""`commit_and_read` and `state_read` against the token-by-token reference in float64, in Triton's interpreter."""

import importlib
from dataclasses import dataclass

import pytest
import torch

from ready_hf.kernels import Records, commit_and_read, launches, state_read


pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_outputs")

RULES = {  # decay per channel, delta, l2norm, key heads (of 2)
    "gated_delta": (False, True, True, 1),
    "gated_delta_unnormalised": (False, True, False, 2),
    "kda": (True, True, True, 2),
    "mamba2": (False, False, False, 1),
}
every_rule = pytest.mark.parametrize("rule", RULES)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Problem:
    """States, records, accepted lengths and queries, and the rule's options."""

    states: torch.Tensor
    records: Records
    accepted: torch.Tensor
    queries: torch.Tensor
    options: dict

    def wide(self) -> "Problem":
        """The same in float64."""
        records = Records(*(x.double() for x in self.records))
        return Problem(self.states.double(), records, self.accepted, self.queries.double(), self.options)

    def run(self, **kwargs) -> torch.Tensor:
        return commit_and_read(self.states, self.records, self.accepted, self.queries, **self.options, **kwargs)


def problem(
    rule="gated_delta",
    length=4,
    accepted=None,
    shape=(32, 48),
    layers=2,
    heads=2,
    dtype=torch.float32,
    state_dtype=torch.float32,
    num_queries=3,
    conditioned=False,
    seed=0,
):
    per_channel, delta, l2norm, key_heads = RULES[rule]
    accepted = torch.tensor([length, 0, (length + 1) // 2] if accepted is None else accepted, dtype=torch.int32)
    rows, (keys, values) = len(accepted), shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    key = normal(layers, rows, length, key_heads, keys)
    if not l2norm:
        key = key * keys**-0.5
    gate = [keys] if per_channel else []
    g = -0.2 * torch.rand(layers, rows, length, heads, *gate, generator=generator)  # float32, as models compute it
    records = Records(
        key, normal(layers, rows, length, heads, values), g, normal(layers, rows, length, heads).sigmoid()
    )
    states = torch.randn(layers, rows, heads, keys, values, generator=generator).to(state_dtype)
    queries = normal(*([rows] if conditioned else []), layers, heads, num_queries, keys)
    moved = [x.to(DEVICE) for x in (states, *records, accepted, queries)]
    return Problem(moved[0], Records(*moved[1:5]), *moved[5:], {"delta": delta, "l2norm": l2norm})


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2."""
    assert torch.isfinite(found).all()
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


def check(case: Problem, tolerance=3e-6, read_tolerance=3e-6, **kwargs) -> None:
    """Kernel against reference: states in place, and reads."""
    wide, before = case.wide(), launches["commit_and_read"]
    expected = wide.run(backend="torch", read_dtype=torch.float64)
    reads = case.run(backend="triton", precision="ieee", **kwargs)
    assert launches["commit_and_read"] == before + 1
    assert error(reads, expected) <= read_tolerance
    assert error(case.states, wide.states) <= tolerance


@every_rule
@pytest.mark.parametrize("length", range(1, 17))
def test_every_accepted_length(rule, length):
    check(problem(rule, length, accepted=range(length + 1), shape=(32, 32), layers=1))


@pytest.mark.parametrize("length", [1, 8, 16, 32])
@pytest.mark.parametrize("shape", [(60, 100), (96, 32), (128, 128)], ids=str)
def test_sizes_that_are_no_power_of_two_and_full_size(shape, length):
    check(problem("gated_delta", length, [length, length // 2], shape, layers=1, num_queries=15))


@pytest.mark.parametrize("rule", ["kda", "mamba2"])
def test_full_size_of_the_other_rules(rule):
    check(problem(rule, 16, [16, 7], (128, 64), layers=1))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes_of_inputs_and_states(dtype, state_dtype):
    """A state in bfloat16 is rounded once, on the way back."""
    check(problem("gated_delta", dtype=dtype, state_dtype=state_dtype), 3e-6 if state_dtype.itemsize == 4 else 4e-3)


@every_rule
@pytest.mark.parametrize("strength", [-3.0, -20.0, -120.0, float("-inf")])
def test_decay_that_forgets_nearly_all_or_all(rule, strength):
    """A decay of 0, or nearly, in the middle of a block."""
    case = problem(rule, length=6, accepted=[6, 5, 1])
    case.records.g[:, :, 1::2] = strength
    check(case)


@every_rule
def test_what_was_rejected_is_never_looked_at(rule):
    clean, poisoned = problem(rule), problem(rule)
    for field in poisoned.records:
        for row, n in enumerate(poisoned.accepted.tolist()):
            field[:, row, n:] = float("nan")
    reads = [case.run(backend="triton") for case in (clean, poisoned)]
    assert torch.equal(*reads)
    assert torch.equal(clean.states, poisoned.states)


@every_rule
def test_a_row_that_accepts_nothing_keeps_its_state_bit_for_bit(rule):
    case = problem(rule, state_dtype=torch.bfloat16)
    before = case.states.clone()
    case.run(backend="triton")
    assert torch.equal(case.states[:, 1], before[:, 1])
    assert not torch.equal(case.states[:, 0], before[:, 0])


@every_rule
def test_transposed_states(rule):
    """Mamba-2 caches and other engines keep `[V, K]`."""
    case = problem(rule)
    case.states = case.states.mT.contiguous().mT
    check(case)


def test_lists_of_layers_and_strided_records():
    """Keys and values of transformers are views of a convolution output whose tokens lie next to each other."""
    case = problem("gated_delta")
    expected = problem("gated_delta").wide()
    reads = expected.run(backend="torch")
    case.records = Records(*(list(x.transpose(2, -1).contiguous().transpose(2, -1)) for x in case.records))
    case.states = list(case.states.clone())
    found = case.run(backend="triton", precision="ieee")
    assert error(found, reads) <= 3e-6
    assert error(torch.stack(case.states), expected.states) <= 3e-6


def test_slots():
    """Rows may lie anywhere; padding touches nothing and reads zeros; other slots stay as they are."""
    case, expected = problem(), problem()
    for one in (case, expected):
        one.states = torch.cat([one.states, one.states + 1], dim=1)
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=DEVICE)
    before = case.states.clone()
    wide = expected.wide()
    reads = wide.run(backend="torch", slots=slots)
    found = case.run(backend="triton", slots=slots, precision="ieee")
    assert error(found, reads) <= 3e-6
    assert not found[1].any()
    assert error(case.states, wide.states) <= 3e-6
    assert torch.equal(case.states[:, [1, 2, 3, 5]], before[:, [1, 2, 3, 5]])


def test_out_of_place():
    case = problem()
    before, out = case.states.clone(), torch.full_like(case.states, float("nan"))
    wide = case.wide()
    wide.run(backend="torch")
    case.run(backend="triton", out=out)
    assert torch.equal(case.states, before)
    assert error(out, wide.states) <= 3e-6


def in_one_buffer(case: Problem, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States, and a tensor of their shape that begins `offset` elements after them in the same memory."""
    size, first = case.states.numel(), max(-offset, 0)
    buffer = torch.zeros(abs(offset) + size, dtype=case.states.dtype, device=DEVICE)
    out = buffer[first + offset :][:size].view_as(case.states)
    case.states = buffer[first:][:size].view_as(case.states).copy_(case.states)
    return case.states, out


LAYER = problem().states[0].numel()


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("as_lists", [False, True], ids=["stacked", "lists"])
@pytest.mark.parametrize("offset", [1, LAYER, 2 * LAYER - 1, -1, -LAYER, 1 - 2 * LAYER])
def test_out_must_not_overlap_the_states_in_part(offset, as_lists, backend):
    """An offset of `LAYER`: what is written of a layer is the next layer of the states."""
    case = problem()
    states, out = in_one_buffer(case, offset)
    before = states.clone()
    if as_lists:
        case.states, out = list(states), list(out)
    with pytest.raises(ValueError, match="`out` overlaps `states` in memory"):
        case.run(out=out, backend=backend)
    assert torch.equal(states, before)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_another_view_of_the_states_is_no_place_to_write(backend):
    case = problem(shape=(32, 32))
    for out in (case.states.mT, list(case.states)[::-1]):
        with pytest.raises(ValueError, match="`out` overlaps `states` in memory"):
            case.run(out=out, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("place", ["behind", "same", "one the same"])
def test_out_behind_the_states_or_the_very_same(place, backend):
    case = problem()
    wide = case.wide()
    wide.run(backend="torch")
    states, behind = in_one_buffer(case, 2 * LAYER)
    out = {"behind": behind, "same": states.view_as(states), "one the same": [states[0], behind[1]]}[place]
    case.run(out=out, backend=backend)
    assert error(torch.stack(list(out)), wide.states) <= 3e-6


@pytest.mark.parametrize("precision", ["ieee", "bf16"])
def test_queries_loaded_before_the_replay(precision, monkeypatch):
    """As the tile sizes of some devices have it; `bf16` rounds queries and state to 8 bits for the product."""
    module = importlib.import_module("ready_hf.kernels.triton_commit_read")
    sizes = {"BV": 32, "num_warps": 1, "num_stages": 2, "EARLY_QUERY": 1}
    monkeypatch.setattr(module, "tiles", lambda *_: dict(sizes))
    case = problem(length=5, accepted=[5, 4, 0])
    expected = case.wide().run(backend="torch", read_dtype=torch.float64)
    found = case.run(backend="triton", precision=precision)
    bound = 3e-6 if precision == "ieee" else 1e-2
    assert bound / 1e3 < error(found, expected) <= bound
    alone = state_read(case.states, case.queries, backend="triton", precision=precision)
    assert bound / 1e3 < error(alone, expected) <= bound


@pytest.mark.parametrize("num_queries", [1, 8, 17])
def test_queries_that_differ_from_row_to_row(num_queries):
    check(problem(conditioned=True, num_queries=num_queries, dtype=torch.bfloat16))


def test_without_queries_nothing_is_read():
    case, wide = problem(), problem().wide()
    case.queries = wide.queries = None
    assert wide.run(backend="torch") is None
    assert case.run(backend="triton") is None
    assert error(case.states, wide.states) <= 3e-6


def test_rounds_of_drafting_equal_plain_decoding():
    """Six rounds of random lengths, states committed in place, against the same tokens one block."""
    generator, case = torch.Generator().manual_seed(1), problem()
    plain = case.wide()
    for seed in range(6):
        block = problem(length=5, accepted=torch.randint(0, 6, (3,), generator=generator).tolist(), seed=10 + seed)
        case.records, case.accepted = block.records, block.accepted
        wide = block.wide()
        plain.records, plain.accepted = wide.records, wide.accepted
        plain.run(backend="torch")
        case.run(backend="triton")
    assert error(case.states, plain.states) <= 3e-6


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("shape", [(32, 48), (60, 100)], ids=str)
def test_state_read_and_its_gradient(shape, conditioned):
    case = problem(shape=shape, conditioned=conditioned)
    wide = case.wide()
    queries = [x.clone().requires_grad_() for x in (case.queries, wide.queries)]
    found = state_read(case.states, queries[0], backend="triton", precision="ieee")
    expected = state_read(wide.states, queries[1], backend="torch", read_dtype=torch.float64)
    assert error(found, expected) <= 3e-6
    weights = torch.randn(expected.shape, dtype=torch.float64).to(DEVICE)
    (found * weights.float()).sum().backward()
    (expected * weights).sum().backward()
    assert error(queries[0].grad, queries[1].grad) <= 3e-6


def test_state_read_of_slots_lists_and_bfloat16():
    case = problem(state_dtype=torch.bfloat16)
    slots = torch.tensor([2, -1, 0, 0], device=DEVICE)
    expected = state_read(case.states.double(), case.queries.double(), slots=slots)
    for states in (case.states, list(case.states.clone()), case.states.mT.contiguous().mT):
        found = state_read(states, case.queries, slots=slots, backend="triton", precision="ieee")
        assert error(found, expected) <= 3e-6
        assert not found[1].any()


def test_reads_in_bfloat16():
    case = problem()
    found = case.run(backend="triton", read_dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert error(found, state_read(case.states.double(), case.queries.double())) <= 1e-2


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: setattr(c, "accepted", c.accepted.float()), "`accepted` must be a contiguous int32 or int64"),
        (lambda c: setattr(c, "accepted", c.accepted[:2]), r"shape \[3\]"),
        (lambda c: setattr(c, "states", c.states[:1]), "1 layers and `records.key` 2"),
        (lambda c: setattr(c, "states", c.states[0]), "`states` must be"),
        (lambda c: setattr(c, "states", c.states.long()), "float32, bfloat16 or float16, got torch.int64"),
        (lambda c: setattr(c, "states", c.states[:, :2]), "pass `slots`"),
        (lambda c: setattr(c, "states", []), "is empty"),
        (lambda c: setattr(c, "states", [c.states[0], c.states[1].mT.contiguous().mT]), "one set of strides"),
        (lambda c: setattr(c, "queries", c.queries[..., :-1]), r"`queries` must be \[2, 2, J, 32\]"),
        (lambda c: setattr(c, "records", c.records._replace(beta=c.records.beta[:, :, :-1])), "`records.beta` must"),
        (lambda c: setattr(c, "records", c.records._replace(key=c.records.key.repeat(1, 1, 1, 3, 1))), "Hk"),
        (lambda c: c.options.update(out=c.states[:, :1]), "`out` must have"),
        (lambda c: c.options.update(slots=torch.zeros(2, dtype=torch.int32)), "`slots` must be a contiguous"),
        (lambda c: c.options.update(backend="cuda"), "`backend` must be one of"),
        (
            lambda c: setattr(c, "states", c.states[:1].expand(2, -1, -1, -1, -1)[:, :1].expand(-1, 3, -1, -1, -1)),
            "overlap",
        ),
        (lambda c: c.options.update(slots=torch.tensor([0, 1, 3])), "must be below 3, got 3"),
        (lambda c: c.queries.requires_grad_(), "has no gradient"),
        (lambda c: c.options.update(slots=torch.tensor([0, 1, 1])), "must not name a slot twice"),
        (lambda c: setattr(c, "accepted", torch.tensor([1, 5, 2])), "`accepted` must be below 5, got 5"),
        (lambda c: setattr(c, "states", [c.states[0], c.states[0]]), "one tensor twice"),
        (lambda c: setattr(c, "states", c.states[:1].expand(2, -1, -1, -1, -1)), "overlap"),
        (lambda c: setattr(c, "records", Records(*(x[:, :, :0] for x in c.records))), "tokens"),
        (lambda c: setattr(c, "queries", c.queries[:, :, :1].repeat(1, 1, 200, 1)), "J from 1 to 128"),
        (lambda c: setattr(c, "states", c.states[:0]), "is empty"),
    ],
    ids=range(24),
)
def test_tensors_that_do_not_fit_are_refused_before_any_launch(change, message, backend):
    case = problem()
    before = case.states.clone(), launches["commit_and_read"]
    change(case)
    given = {"backend": backend} | {k: case.options.pop(k) for k in ("backend",) if k in case.options}
    with pytest.raises(ValueError, match=message):
        case.run(**given)
    assert launches["commit_and_read"] == before[1]
    assert torch.equal(problem().states, before[0])


def test_unknown_options_are_refused():
    for backend in ("triton", "torch"):
        with pytest.raises(TypeError, match="precison"):
            problem().run(backend=backend, precison="ieee")
        with pytest.raises(ValueError, match="must be one of tf32, ieee, bf16, got 'fp8'"):
            problem().run(backend=backend, precision="fp8")


def test_states_in_a_list_need_not_be_aligned():
    """They then take narrower loads."""
    case, expected = problem(shape=(32, 48)), problem(shape=(32, 48)).wide()
    reads = expected.run(backend="torch")
    size = case.states[0].numel()
    whole = torch.zeros(2, size + 1, device=DEVICE)
    for row, state in zip(whole, case.states, strict=True):
        row[1:] = state.flatten()
    case.states = [row[1:].view_as(expected.states[0]) for row in whole]
    assert case.states[0].data_ptr() % 16
    assert error(case.run(backend="triton", precision="ieee"), reads) <= 3e-6
    assert error(torch.stack(case.states), expected.states) <= 3e-6
    found = state_read(case.states, case.queries, backend="triton", precision="ieee")
    assert error(found, state_read(expected.states, expected.queries)) <= 3e-6


def test_states_that_change_before_the_backward_pass():
    """The gradient is computed from the states themselves, so a change is an error, as autograd has it elsewhere."""
    case = problem()
    reads = state_read(case.states, case.queries.requires_grad_(), backend="triton")
    with torch.no_grad():
        case.queries = None
        case.run(backend="triton")  # the kernel's own change counts too
    with pytest.raises(RuntimeError, match="were changed between"):
        reads.sum().backward()


def test_states_get_no_gradient():
    case = problem()
    with pytest.raises(ValueError, match="states get no gradient"):
        state_read(case.states.requires_grad_(), case.queries)
