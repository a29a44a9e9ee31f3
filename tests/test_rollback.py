"""After every commit, the cache is that of a forward over the accepted prefix: states, windows, keys and values."""

import weakref

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import ready_hf.block_records
import ready_hf.rollback
import ready_hf.target
from ready_hf import Rollback, recurrent_layers
from ready_hf.block_records import SHORT_BLOCK
from support import (
    FAMILIES,
    VOCAB_SIZE,
    cache_of,
    feed,
    fresh_states,
    oracle,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


TOLERANCE = 1e-5  # relative L2, float32
ONE_PER_RECURRENCE = ["qwen3_5", "kimi_linear", "bamba"]
every_family = pytest.mark.parametrize("family", FAMILIES)
every_recurrence = pytest.mark.parametrize("family", ONE_PER_RECURRENCE)
one_round = st.integers(1, 18).flatmap(lambda length: st.tuples(st.just(length), st.integers(1, length)))


class Session:
    """A target, random tokens, and a cache under rollback that has seen the first `seen` of them."""

    def __init__(self, family: str, prompt: int = 5, batch: int = 1):
        self.model = tiny_target(family)
        self.ids = random_prompt(400, batch)
        self.cache = cache_of(feed(self.model, None, self.ids, 0, prompt))
        self.rollback = Rollback(self.cache)
        self.seen = prompt

    def verify(self, length: int):
        """A recorded forward over the next `length` tokens."""
        with self.rollback.recording(length):
            return feed(self.model, self.cache, self.ids, self.seen, self.seen + length)

    def commit(self, keep: int | torch.Tensor) -> None:
        self.rollback.commit(keep)
        self.seen += int(keep)

    def round(self, length: int, keep: int) -> None:
        if length == 1:  # a round without drafts needs no record
            feed(self.model, self.cache, self.ids, self.seen, self.seen + 1)
            self.seen += 1
            return
        self.verify(length)
        self.commit(keep)

    def error(self) -> float:
        return worst_error(
            states(self.cache), fresh_states(self.model, self.ids[:, : self.seen], **positions(self.seen))
        )

    def recurrent_states(self) -> list[torch.Tensor]:
        return [self.cache.layers[layer.layer_idx].recurrent_states[0] for layer in recurrent_layers(self.model)]


def positions(length: int) -> dict[str, torch.Tensor]:
    return {"position_ids": torch.arange(length)[None]}


@pytest.mark.lossless
@every_family
@settings(deadline=None, derandomize=True, database=None, max_examples=6)
@given(prompt=st.sampled_from([1, 2, 3, 4, 13]), rounds=st.lists(one_round, min_size=1, max_size=4))
@example(prompt=1, rounds=[(18, 1), (2, 1), (1, 1), (17, 17)])
@example(prompt=13, rounds=[(2, 2), (18, 17), (8, 1), (8, 8)])
def test_committed_cache_equals_that_of_a_fresh_forward(family, prompt, rounds):
    session = Session(family, prompt)
    for length, keep in rounds:
        session.round(length, keep)
        assert session.error() <= TOLERANCE


@pytest.mark.lossless
@every_recurrence
def test_error_does_not_grow_over_100_rounds(family):
    session, errors = Session(family), []
    for round_ in range(100):
        session.round(8, 1 + round_ * 7 % 3)
        errors.append(session.error() if round_ < 10 or round_ >= 90 else 0.0)
    first, last = max(errors[:10]), max(errors[90:])
    assert last <= min(3 * first, TOLERANCE), (first, last)


@pytest.mark.lossless
@pytest.mark.parametrize("length", [2, SHORT_BLOCK, SHORT_BLOCK + 1, 70])
@every_recurrence
def test_verify_forward_and_commit_at_the_border_of_the_short_rule(family, length):
    session = Session(family)
    logits = session.verify(length).logits
    want = feed(session.model, None, session.ids, 0, 5 + length).logits[:, -length:]
    assert float((logits - want).norm() / want.norm()) <= TOLERANCE
    session.commit(length // 2)
    assert session.error() <= TOLERANCE


@pytest.mark.lossless
@pytest.mark.parametrize("keep", [1, 5, torch.tensor([3])], ids=str)
@every_recurrence
def test_commit_where_a_kernel_is_behind_the_recurrence(family, keep, monkeypatch):
    monkeypatch.setattr(ready_hf.target, "_has_kernel", lambda recurrence, device: True)
    session = Session(family)
    session.verify(8)
    for layer in recurrent_layers(session.model):
        (record,) = session.cache.layers[layer.layer_idx]._records.values()
        assert record.window is None
        assert (record.call.step_rule is None) == (family == "bamba"), "its step function takes one token only"
    session.commit(keep)
    assert session.error() <= TOLERANCE


@every_family
@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_convolution_windows_keep_their_width(family, prompt):
    session = Session(family, prompt)
    for length, keep in ((8, 1), (2, 2), (1, 1), (3, 2)):
        session.round(length, keep)
        widths = [s.shape[-1] for name, s in states(session.cache).items() if "conv" in name]
        assert widths == [4] * len(recurrent_layers(session.model))


@every_family
def test_full_acceptance_keeps_the_state_that_the_forward_produced(family, monkeypatch):
    session, produced = Session(family), []
    observe = session.rollback._observe

    def spy(call):
        result = observe(call)
        produced.append(result[1].data_ptr())
        return result

    monkeypatch.setattr(session.rollback, "_observe", spy)
    session.verify(8)
    session.commit(8)
    assert [state.data_ptr() for state in session.recurrent_states()] == produced


class LiveStates(TorchDispatchMode):
    """The most tensors with the shape of a recurrent state (in either layout) that were alive after any operation."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.shapes = {known[0].shape, known[0].mT.shape}
        self.tensors = [weakref.ref(state) for state in known]
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.tensors += [weakref.ref(x) for x in tree_leaves(result) if getattr(x, "shape", None) in self.shapes]
        alive = {state.untyped_storage().data_ptr() for state in (ref() for ref in self.tensors) if state is not None}
        self.peak = max(self.peak, len(alive))
        return result


@every_recurrence
@pytest.mark.parametrize("keep", [3, torch.tensor([3])], ids=["all_rows", "per_row"])
def test_at_most_two_states_per_layer_are_alive(family, keep):
    session = Session(family)
    session.verify(5)
    layers = [session.cache.layers[layer.layer_idx] for layer in recurrent_layers(session.model)]
    known = session.recurrent_states() + [layer._records[0].base for layer in layers]
    assert len({state.data_ptr() for state in known}) == 2 * len(layers)
    live = LiveStates(known)
    del known
    with live:
        session.commit(keep)
    assert live.peak <= 2 * len(layers)


@every_recurrence
@pytest.mark.parametrize("length", [8, 40])
def test_states_that_are_committed_outside_no_grad_need_no_gradient(family, length):
    session = Session(family)
    session.verify(length)
    assert torch.is_grad_enabled()
    session.commit(3)
    assert not any(state.requires_grad for state in session.recurrent_states())


@every_recurrence
def test_a_record_holds_the_tensors_of_the_forward_itself(family):
    session = Session(family)
    session.verify(8)
    for layer in recurrent_layers(session.model):
        (record,) = session.cache.layers[layer.layer_idx]._records.values()
        recorded = record.call.arguments["hidden_states" if family == "bamba" else "value"]
        assert recorded.untyped_storage().nbytes() > recorded.nbytes, (
            "a copy, not the slice of the convolution's output"
        )


@every_recurrence
def test_prefill_is_not_recorded(family, monkeypatch):
    lengths, record = [], ready_hf.block_records.Record
    monkeypatch.setattr(ready_hf.block_records, "Record", lambda *a: lengths.append(a[1]) or record(*a))
    prompt = random_prompt(30)
    output = tiny_target(family).generate(
        prompt, assistant_model=oracle(prompt.repeat(1, 3), block_size=4), max_new_tokens=12, do_sample=False
    )
    assert output.shape == (1, 42)
    assert lengths
    assert set(lengths) <= {2, 3, 4, 5}


@pytest.mark.lossless
def test_sliding_window_layers_shrink_back_to_their_window():
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=6,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = random_prompt(60)
    cache, seen = cache_of(feed(model, None, ids, 0, 3)), 3
    rollback = Rollback(cache)
    for length, keep in ((2, 1), (4, 4), (9, 2), (3, 3), (8, 5)):
        with rollback.recording(length):
            feed(model, cache, ids, seen, seen + length)
        rollback.commit(keep)
        seen += keep
        assert worst_error(states(cache), fresh_states(model, ids[:, :seen], **positions(seen))) <= TOLERANCE


KEEP = torch.tensor([2, 5, 8])


@pytest.mark.lossless
@every_recurrence
def test_rows_may_keep_different_numbers_of_tokens(family):
    session = Session(family, batch=3)
    session.verify(8)
    shift = session.rollback.commit(KEEP)
    assert shift.tolist() == [6, 3, 0]
    got = states(session.cache)
    for row, keep in enumerate(KEEP.tolist()):
        want = fresh_states(session.model, session.ids[row : row + 1, : 5 + keep], **positions(5 + keep))
        recurrent = {name: state for name, state in want.items() if "states" in name}
        assert worst_error({name: got[name][row : row + 1] for name in recurrent}, recurrent) <= TOLERANCE


@pytest.mark.lossless
@pytest.mark.parametrize("length", [1, 4])
@every_recurrence
def test_after_a_commit_per_row_the_shift_is_masked_at_the_left(family, length):
    session = Session(family, batch=3)
    session.verify(8)
    shift = session.rollback.commit(KEEP)
    starts = 5 + KEEP
    tokens = torch.stack([session.ids[row, start : start + length] for row, start in enumerate(starts.tolist())])
    mask = (torch.arange(13 + length) >= shift[:, None]).long()
    where = {"position_ids": starts[:, None] + torch.arange(length), "attention_mask": mask}
    logits = feed(session.model, session.cache, tokens, 0, length, **where).logits
    for row, start in enumerate(starts.tolist()):
        want = feed(session.model, None, session.ids[row : row + 1], 0, start + length).logits[:, -length:]
        assert float((logits[row] - want).norm() / want.norm()) <= TOLERANCE
