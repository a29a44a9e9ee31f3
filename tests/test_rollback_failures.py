"""What goes wrong leaves the cache as it was, and what cannot be rolled back is refused."""

import contextlib

import pytest
import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer, QuantizedLayer
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from ready_hf import Rollback, UnsupportedTargetError, recurrent_layers
from ready_hf.block_records import Record
from ready_hf.recurrences import GATED_DELTA_RULE, KDA, MAMBA2
from ready_hf.rollback import check_cache
from ready_hf.target import _modeling_modules, _thread
from support import FAMILIES, cache_of, feed, fresh_states, random_prompt, states, tiny_target, worst_error


PROMPT, LENGTH = 5, 8
every_family = pytest.mark.parametrize("family", FAMILIES)
every_recurrence = pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "bamba"])


class Stop(Exception):
    """Raised by the tests' own hooks."""


def prefilled(family: str, cache: Cache | None = None):
    model, ids = tiny_target(family), random_prompt(60)
    return model, ids, cache_of(feed(model, cache, ids, 0, PROMPT))


def verify(model, ids, rollback: Rollback, start: int = PROMPT, length: int = LENGTH):
    with rollback.recording(length):
        return feed(model, rollback.cache, ids, start, start + length)


@contextlib.contextmanager
def raising(module: torch.nn.Module, error: BaseException, before: bool = False):
    def hook(*args):
        raise error

    handle = module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("error", [Stop(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("layer", range(4))
@every_family
def test_a_verify_forward_that_raises_leaves_no_trace(family, layer, error):
    model, ids, cache = prefilled(family)
    before, layers = states(cache), list(cache.layers)
    rollback = Rollback(cache)
    with pytest.raises(type(error)), raising(model.model.layers[layer], error):
        verify(model, ids, rollback)
    assert_same(states(cache), before)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert _thread.observer is None
    rollback.close()
    assert all(now is then and type(now) is type(then) for now, then in zip(cache.layers, layers, strict=True))
    assert not any(name in vars(layer) for layer in layers for name in ("_rollback", "_records"))


@every_recurrence
def test_decoding_goes_on_after_a_verify_forward_that_raised(family):
    model, ids, cache = prefilled(family)
    rollback = Rollback(cache)
    with pytest.raises(Stop), raising(model.model.layers[3], Stop(), before=True):
        verify(model, ids, rollback)
    verify(model, ids, rollback)
    rollback.commit(3)
    want = fresh_states(model, ids[:, : PROMPT + 3], position_ids=torch.arange(PROMPT + 3)[None])
    assert worst_error(states(cache), want) <= 1e-5


@pytest.mark.parametrize("end", ["abort", "close"])
@every_recurrence
def test_a_block_that_is_not_committed_is_undone(family, end):
    model, ids, cache = prefilled(family)
    before, rollback = states(cache), Rollback(cache)
    verify(model, ids, rollback)
    getattr(rollback, end)()
    assert_same(states(cache), before)
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


@every_recurrence
def test_after_close_the_cache_is_an_ordinary_one(family):
    model, ids, cache = prefilled(family)
    layers, rollback = list(cache.layers), Rollback(cache)
    verify(model, ids, rollback)
    rollback.commit(LENGTH)
    rollback.close()
    assert all(now is then for now, then in zip(cache.layers, layers, strict=True))
    feed(model, cache, ids, PROMPT + LENGTH, PROMPT + LENGTH + 1)
    seen = PROMPT + LENGTH + 1
    assert (
        worst_error(states(cache), fresh_states(model, ids[:, :seen], position_ids=torch.arange(seen)[None])) <= 1e-5
    )


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=repr)
def test_a_commit_that_raises_leaves_nothing_switched_on(error, monkeypatch):
    model, ids, cache = prefilled("qwen3_5")
    layers, rollback = list(cache.layers), Rollback(cache)

    def state_after(*args):
        raise error

    verify(model, ids, rollback)
    monkeypatch.setattr(Record, "state_after", state_after)
    with pytest.raises(type(error)):
        rollback.commit(3)
    rollback.close()
    assert all(now is then for now, then in zip(cache.layers, layers, strict=True))
    assert not any(getattr(layer, "record_past", False) for layer in layers)
    assert not any(name in vars(layer) for layer in layers for name in ("_rollback", "_records"))


def test_a_cache_that_is_in_use_is_refused():
    *_, cache = prefilled("qwen3_5")
    first = Rollback(cache)
    with pytest.raises(RuntimeError, match="in use"):
        Rollback(cache)
    first.close()
    Rollback(cache).close()


@every_recurrence
def test_committing_twice_raises_and_changes_nothing(family):
    model, ids, cache = prefilled(family)
    rollback = Rollback(cache)
    verify(model, ids, rollback)
    rollback.commit(3)
    before = states(cache)
    with pytest.raises(RuntimeError, match="record"):
        rollback.commit(3)
    assert_same(states(cache), before)


@every_recurrence
def test_recording_twice_without_commit_raises_and_changes_nothing(family):
    model, ids, cache = prefilled(family)
    rollback = Rollback(cache)
    verify(model, ids, rollback)
    before = states(cache)
    with pytest.raises(RuntimeError, match="committed"):
        verify(model, ids, rollback, PROMPT + LENGTH)
    assert_same(states(cache), before)


@pytest.mark.parametrize("keep", [0, LENGTH + 1, -1, torch.tensor([0]), torch.tensor([LENGTH + 1])], ids=str)
@every_recurrence
def test_a_number_of_tokens_that_cannot_be_kept_is_refused(family, keep):
    model, ids, cache = prefilled(family)
    before, rollback = states(cache), Rollback(cache)
    verify(model, ids, rollback)
    with pytest.raises(ValueError, match="keep"):
        rollback.commit(keep)
    rollback.close()
    assert_same(states(cache), before)


@every_recurrence
def test_a_block_of_one_token_is_refused_before_it_runs(family):
    model, ids, cache = prefilled(family)
    before, rollback = states(cache), Rollback(cache)
    with pytest.raises(ValueError, match="2"):
        verify(model, ids, rollback, length=1)
    assert_same(states(cache), before)


@every_recurrence
def test_a_block_function_replaced_after_patching_is_noticed(family, monkeypatch):
    model, ids, cache = prefilled(family)
    before, rollback = states(cache), Rollback(cache)
    for module in _modeling_modules(model):
        for recurrence in (GATED_DELTA_RULE, KDA, MAMBA2):
            wrapper = getattr(module, recurrence.block_function, None)
            if wrapper is not None:
                monkeypatch.setattr(module, recurrence.block_function, wrapper.__wrapped__)
    with pytest.raises(UnsupportedTargetError, match="without a record"):
        verify(model, ids, rollback)
    assert_same(states(cache), before)


@pytest.mark.parametrize("updates", [True, False], ids=["through_the_cache", "not_at_all"])
@every_recurrence
def test_a_mixer_that_bypasses_the_block_function_is_noticed(family, updates, monkeypatch):
    model, ids, cache = prefilled(family)
    before, rollback = states(cache), Rollback(cache)
    layer = recurrent_layers(model)[1]

    def whole_layer_kernel(hidden_states, *args, **kwargs):
        if updates:
            old = cache.layers[layer.layer_idx].recurrent_states[0]
            cache.layers[layer.layer_idx].update_recurrent_state(old + 1.0)
        return hidden_states

    monkeypatch.setattr(layer.mixer, "forward", whole_layer_kernel)
    with pytest.raises(UnsupportedTargetError, match="without a record"):
        verify(model, ids, rollback)
    assert_same(states(cache), before)


@every_recurrence
def test_a_forward_over_another_number_of_tokens_than_announced_is_noticed(family):
    model, ids, cache = prefilled(family)
    before, rollback = states(cache), Rollback(cache)
    with pytest.raises(UnsupportedTargetError, match="without a record"), rollback.recording(LENGTH):
        feed(model, cache, ids, PROMPT, PROMPT + LENGTH - 1)
    assert_same(states(cache), before)


@every_recurrence
def test_a_static_cache_is_rolled_back_where_transformers_can_cut_it(family):
    cache = StaticCache(config=tiny_target(family).config, max_cache_len=64)
    try:
        check_cache(cache)
    except UnsupportedTargetError as error:
        assert "StaticLayer" in str(error)  # noqa: PT017
        pytest.skip("this transformers cannot cut static caches")
    model, ids, cache = prefilled(family, cache)
    before, rollback = cache.get_seq_length().item(), Rollback(cache)
    with pytest.raises(Stop), raising(model.model.layers[3], Stop()):
        verify(model, ids, rollback)
    assert cache.get_seq_length().item() == before
    verify(model, ids, rollback)
    rollback.commit(3)
    rollback.close()
    logits = feed(model, cache, ids, PROMPT + 3, PROMPT + 6).logits
    want = feed(model, None, ids, 0, PROMPT + 6).logits[:, -3:]
    assert float((logits - want).norm() / want.norm()) <= 1e-5


class StubQuantizedLayer(QuantizedLayer):
    _quantize = _dequantize = staticmethod(lambda *args: args[0])


def offloaded() -> Cache:
    cache = DynamicCache()
    cache.offloading = True  # as `DynamicCache(offloading=True)`, which wants an accelerator
    return cache


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: None, "use_cache=False"),
        (lambda: Cache(layers=[LinearAttentionLayer(), StubQuantizedLayer()]), "StubQuantizedLayer"),
        (MiniMaxCache, "MiniMaxCache"),
        (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), "EncoderDecoderCache"),
        (offloaded, "offloaded DynamicCache"),
        (lambda: ((torch.zeros(1), torch.zeros(1)),), "tuple"),
    ],
    ids=["none", "quantized", "own_crop", "encoder_decoder", "offloaded", "legacy_tuple"],
)
def test_caches_that_cannot_be_cut_are_refused_by_name(make, name):
    with pytest.raises(UnsupportedTargetError, match=name) as error:
        Rollback(make())
    assert "dynamic caches" in str(error.value), "says what is supported"
