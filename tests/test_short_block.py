"""What runs short blocks instead of the block function, the closed form or the step function, gives the same."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_5 import modeling_qwen3_5

from ready_hf.block_records import Record, _by_step_rule, _short_block
from ready_hf.recurrences import GATED_DELTA_RULE, KDA, MAMBA2
from ready_hf.target import RecurrenceCall
from support import torch_rule


MODULES = {GATED_DELTA_RULE: modeling_qwen3_5, KDA: modeling_kimi_linear, MAMBA2: modeling_bamba}
BATCH, HEADS, KEYS, VALUES = 2, 4, 12, 10
every_recurrence = pytest.mark.parametrize("recurrence", MODULES, ids=lambda r: r.name)
every_delta_rule = pytest.mark.parametrize("recurrence", [GATED_DELTA_RULE, KDA], ids=lambda r: r.name)
with_and_without_state = pytest.mark.parametrize("has_state", [True, False], ids=["state", "no_state"])


def stock_rule(recurrence):
    return torch_rule(getattr(MODULES[recurrence], recurrence.block_function))


def make_call(recurrence, length: int, has_state: bool, dtype: torch.dtype = torch.float32) -> RecurrenceCall:
    generator = torch.Generator().manual_seed(length)

    def randn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    state = randn(BATCH, HEADS, KEYS, VALUES, dtype=torch.float32) if has_state else None
    if recurrence is MAMBA2:
        arguments = {
            "hidden_states": randn(BATCH, length, HEADS, VALUES),
            "dt": randn(BATCH, length, HEADS),
            "A": -randn(HEADS, dtype=torch.float32).exp(),
            "B": randn(BATCH, length, 2, KEYS),
            "C": randn(BATCH, length, 2, KEYS),
            "chunk_size": 16,
            "D": randn(HEADS),
            "dt_bias": randn(HEADS),
            "initial_states": None if state is None else state.mT.contiguous(),
            "dt_softplus": True,
            "return_final_states": True,
        }
    else:
        gate = (BATCH, length, HEADS, KEYS) if recurrence is KDA else (BATCH, length, HEADS)
        arguments = {
            "query": randn(BATCH, length, HEADS, KEYS),
            "key": randn(BATCH, length, HEADS, KEYS),
            "value": randn(BATCH, length, HEADS, VALUES),
            "g": -F.softplus(randn(*gate, dtype=torch.float32)),
            "beta": randn(BATCH, length, HEADS).sigmoid(),
            "initial_state": state,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
        }
    return RecurrenceCall(recurrence, arguments, lambda: stock_rule(recurrence)(**arguments))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("length", [2, 8, 17, 33])
@with_and_without_state
@every_recurrence
def test_short_rule_equals_the_stock_rule(recurrence, has_state, length):
    call = make_call(recurrence, length, has_state)
    (output, state), _ = _short_block(call)
    want_output, want_state = call.run()
    assert relative_error(output, want_output) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5
    assert output.is_contiguous()
    assert state.is_contiguous()


@pytest.mark.parametrize("length", [2, 17])
@every_recurrence
def test_short_rule_in_bfloat16_rounds_as_the_stock_rule(recurrence, length):
    call = make_call(recurrence, length, True, torch.bfloat16)
    (output, state), _ = _short_block(call)
    want_output, want_state = call.run()
    assert relative_error(output, want_output) <= 2**-9  # half a unit in the last place
    assert relative_error(state, want_state) <= 1e-5  # the state is float32


@every_recurrence
def test_record_after_all_tokens_is_the_stock_final_state(recurrence):
    call = make_call(recurrence, 9, True)
    _, want = call.run()
    base = call.arguments["initial_states" if recurrence is MAMBA2 else "initial_state"]
    for keep in (9, torch.tensor([9, 9])):
        assert relative_error(Record(call, 9, base=base).state_after(keep), want) <= 1e-5


@every_recurrence
def test_record_after_a_prefix_is_the_stock_final_state_of_the_prefix(recurrence):
    call, prefix = make_call(recurrence, 9, True), {}
    for name, x in call.arguments.items():
        is_per_token = isinstance(x, torch.Tensor) and x.dim() >= 3 and not name.startswith("initial")
        prefix[name] = x[:, :4] if is_per_token else x
    _, want = stock_rule(recurrence)(**prefix)
    base = call.arguments["initial_states" if recurrence is MAMBA2 else "initial_state"]
    for keep in (4, torch.tensor([4, 4])):
        assert relative_error(Record(call, 9, base=base).state_after(keep), want) <= 1e-5


def test_stock_rule_without_key_normalisation():
    call = make_call(GATED_DELTA_RULE, 8, True)
    call.arguments.update(use_qk_l2norm_in_kernel=False, key=call.arguments["key"] / KEYS)
    (output, state), _ = _short_block(call)
    want_output, want_state = call.run()
    assert relative_error(output, want_output) <= 1e-5
    assert relative_error(state, want_state) <= 1e-5


def with_step_rule(call: RecurrenceCall) -> RecurrenceCall:
    """The same call where a step kernel takes blocks; transformers' own step function stands in for it."""
    module, name = MODULES[call.recurrence], call.recurrence.step_function
    return replace(call, has_kernel=True, step_rule=torch_rule(getattr(module, name)))


@pytest.mark.parametrize("length", [2, 33])
@with_and_without_state
@every_delta_rule
def test_step_rule_equals_the_block_rule(recurrence, has_state, length):
    call = with_step_rule(make_call(recurrence, length, has_state))
    for got, want in zip(_by_step_rule(call, length), call.run(), strict=True):
        assert relative_error(got, want) <= 1e-5


@every_delta_rule
def test_step_rule_after_a_prefix_equals_the_closed_form(recurrence):
    call = make_call(recurrence, 9, True)
    for keep in (1, 4, 9, torch.tensor([2, 9]), torch.tensor([5, 1])):
        want = Record(call, 9, base=call.arguments["initial_state"]).state_after(keep)
        assert relative_error(Record(with_step_rule(call), 9).state_after(keep), want) <= 1e-5


@every_delta_rule
def test_step_rule_keeps_a_rejected_suffix_of_nan_out_of_the_state(recurrence):
    call, poisoned = make_call(recurrence, 9, True), make_call(recurrence, 9, True)
    for name in ("query", "key", "value", "g", "beta"):
        poisoned.arguments[name][:, 4:] = float("nan")
    for keep in (4, torch.tensor([4, 2])):
        want = Record(with_step_rule(call), 9).state_after(keep)
        assert torch.equal(Record(with_step_rule(poisoned), 9).state_after(keep), want)
