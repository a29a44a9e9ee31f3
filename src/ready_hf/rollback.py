"""Exact rollback: a verify forward over T tokens, then the cache as if only the first n of them had ever been fed.

    rollback = Rollback(cache)
    with rollback.recording(length):        # T tokens
        model(**inputs)                     # with position_ids: not every model derives them from the cache
    rollback.commit(keep)                   # n tokens stay
    ...
    rollback.close()                        # the cache is an ordinary one again

While recording, every recurrent layer keeps the state before the block and the tensors of its recurrence call, by
reference. On commit the state after n tokens is rebuilt from these, by one kernel for all layers or in closed form
(`ready_hf.ops`); convolution windows and key/value caches are cut. No layer ever holds more than two recurrent states.
The prefill is not recorded. Mixers that `fused_mixer` knows run their block in two launches, and leave the state as it
was until the commit.

A state cannot be cropped, only rebuilt; so an update that left no record is an error, never a guess.
"""

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import __version__ as transformers_version
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from ready_hf import fused_mixer, ops
from ready_hf.block_records import Record, block_length, recorded
from ready_hf.target import MixerCall, RecurrenceCall, UnsupportedTargetError, observing_recurrence


class RollbackLayer(LinearAttentionCacheLayerMixin):
    """Mixed in front of a linear-attention cache layer class; instances share the original layer's `__dict__`."""

    is_croppable = True
    _rollback: "Rollback"
    _records: dict[int, Record]
    _uncut: dict[int, torch.Tensor]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        rollback = self._rollback
        if not rollback.is_recording:
            return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        record = rollback.take_record()
        record.base = self.recurrent_states[state_idx]
        self._records[state_idx] = record
        # replaced, not copied into: the old state stays valid in the record
        self.recurrent_states[state_idx] = _like(recurrent_states, record.base)
        self.is_recurrent_states_initialized[state_idx] = True
        return self.recurrent_states[state_idx]

    def uncut_windows(self) -> list[int]:
        """Convolution windows that are to be cut by a commit; they are kept until then."""
        found = [i for i, window in self.conv_states.items() if window is not None]
        self._uncut.update({i: self.conv_states[i] for i in found})
        return found

    def abort(self) -> None:
        """Puts back the states from before the last block; layers that the block did not reach are left alone."""
        for state_idx, record in self._records.items():
            self.recurrent_states[state_idx] = record.base
            self.is_recurrent_states_initialized[state_idx] = record.base is not None
        for state_idx, window in (self.conv_states | self._uncut).items():
            kernel_size = self.conv_kernel_size[state_idx]
            if window is not None and window.shape[-1] > kernel_size:
                self.conv_states[state_idx] = _conv_window(window, 0, kernel_size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """An ordinary layer of the original class: a copy of the cache has nothing to do with this decoding call."""
        plain: Any = object.__new__(type(self).__mro__[2])
        memo[id(self)] = plain
        own = ("_rollback", "_records", "_uncut")
        plain.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name not in own}
        for state_idx, record in self._records.items():
            if record.is_frozen:  # keys and windows are those of the whole block: so must the state be
                state = record.state_after(record.length)
                plain.recurrent_states[state_idx] = state.to(plain.recurrent_states[state_idx].dtype)
        return plain

    def has_missed_update(self, length: int) -> bool:
        """Whether a recurrent state was not updated through a recorded call over the last block of `length` tokens."""
        lengths = {i: record.length for i, record in self._records.items()}
        return any(done and lengths.get(i) != length for i, done in self.is_recurrent_states_initialized.items())


class Rollback:
    """Rollback of one cache, for one decoding call in one thread.

    The model's recurrence must have been wrapped by `ready_hf.ensure_patched(model)`; `generate` does that itself.

    Args:
        cache (`Cache`): A cache that has seen at least the prompt. Its linear-attention layers are exchanged for
            layers that roll back and share their tensors; `close` puts the original objects back.
        stack (`ExitStack`, *optional*): Calls `close`, and is told so before anything is exchanged: an interrupt may
            come between any two lines.

    Raises:
        UnsupportedTargetError: no cache, or a kind of cache that cannot be cut back (quantized, offloaded,
        encoder-decoder).
    """

    def __init__(self, cache: Cache | None, stack: ExitStack | None = None):
        self.cache = check_cache(cache)
        self.is_recording = False
        self._length = 0  # tokens of a recorded, uncommitted block
        self._record: Record | None = None
        self._past_recorders: list[Any] = []
        self._lengths_before: dict[int, int] = {}
        self._indexers_before: dict[int, dict[str, Any]] = {}
        self._positions_before: torch.Tensor | None = None
        self._originals: dict[int, Any] = {}
        if any(isinstance(layer, RollbackLayer) for layer in self.cache.layers):
            raise RuntimeError("this cache is in use by another drafted call; every call needs a cache of its own")
        if stack is not None:
            close_surely(stack, self.close)
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                self._originals[index] = layer
                self.cache.layers[index] = self._exchanged(layer)

    @contextmanager
    def recording(self, length: int) -> Iterator[None]:
        """Records the forward over `length` >= 2 tokens that runs inside; if it fails, the cache is as before.

        One token needs no record: it is the anchor, which is always kept.
        """
        if self._length:
            raise RuntimeError("the last recorded block was neither committed nor aborted")
        if length < 2:
            raise ValueError(f"a recorded block has at least 2 tokens, got {length}: one token is always kept")
        self._length, self.is_recording = length, True
        try:
            self._start_past_recording()
            with observing_recurrence(self._observe, self._observe_mixer):
                yield
            self._check_records()
        except BaseException:
            self.abort()
            raise
        finally:
            self.is_recording = False
            self._record = None

    @torch.no_grad()
    def commit(self, keep: int | torch.Tensor) -> torch.Tensor | None:
        """Makes the cache that of the first `keep` tokens of the recorded block.

        Args:
            keep (`int` or `torch.LongTensor` of shape `[B]`): Tokens to keep, 1..T; one number for all rows, or one
                per row.

        Returns:
            `torch.LongTensor` of shape `[B]` or `None`: With one number per row, how far each row's keys and values
            were moved to the right, so that all rows end at the same index. The caller masks as many positions at the
            left of that row.
        """
        if not self._length:
            raise RuntimeError("no recorded block to commit")
        if not isinstance(keep, torch.Tensor):
            shortest = longest = keep = operator.index(keep)
        elif keep.dim() != 1:
            raise ValueError(f"`keep` must be an integer or have shape [B], got shape {tuple(keep.shape)}")
        else:
            shortest, longest = torch.stack(keep.aminmax()).tolist()
        if not 1 <= shortest <= longest <= self._length:
            raise ValueError(f"`keep` must be 1..{self._length} tokens of the recorded block, got {keep}")
        shift = None if isinstance(keep, int) else longest - keep
        if shift is not None:
            _check_alignable(self.cache)
        exchanged = [layer for layer in self.cache.layers if isinstance(layer, RollbackLayer)]
        try:
            _commit_states(exchanged, keep, self._length)
            _commit_windows(exchanged, keep)
            for layer in self.cache.layers:
                _cut_keys_and_values(layer, self._length - longest)
                if shift is not None:
                    _align_right(layer, shift)
        except BaseException:
            self.abort()
            raise
        self._set_positions(longest)
        self._finish()
        return shift

    def abort(self) -> None:
        """Makes the cache what it was before the recorded block; harmless without one."""
        if not self._length:
            return
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, RollbackLayer):
                layer.abort()
            if index in self._lengths_before:
                _cut_keys_and_values(layer, layer.get_seq_length() - self._lengths_before[index])
            vars(layer).update(self._indexers_before.get(index, {}))
        self._set_positions(0)
        self._finish()

    def close(self) -> None:
        """Undoes an uncommitted block and turns the cache's layers back into what they were."""
        self.abort()
        self._forget_block()
        for index, original in self._originals.items():
            self.cache.layers[index] = original
            for name in ("_rollback", "_records", "_uncut"):
                vars(original).pop(name, None)
        self._originals.clear()

    def take_record(self) -> Record:
        """The record of the recurrence call that the calling cache layer belongs to."""
        record, self._record = self._record, None
        if record is None:
            raise UnsupportedTargetError(_NO_RECORD)
        return record

    def _observe(self, call: RecurrenceCall) -> Any:
        # compiled code would be compiled again for every length: `_check_records` looks
        if not torch.compiler.is_compiling() and block_length(call) != self._length:
            return call.run()  # leaves no record: the cache layer refuses the update
        result, self._record = recorded(call)
        return result

    def _observe_mixer(self, call: MixerCall) -> torch.Tensor | None:
        if call.cache is not self.cache:  # another cache, another model, or no cache at all
            return None
        layer = self.cache.layers[call.mixer.layer_idx]
        if not isinstance(layer, RollbackLayer) or not fused_mixer.fits(call, layer, self._length):
            return None
        found = fused_mixer.run(call, layer)
        if found is None:
            return None
        output, layer._records[0], layer.conv_states[0] = found
        return output

    def _set_positions(self, keep: int) -> None:
        """Cuts the positions that qwen4_exp keeps beside the layers in transformers 5.17."""
        if self._positions_before is not None:
            length = self._positions_before.shape[-1] + keep
            vars(self.cache)["position_ids"] = vars(self.cache)["position_ids"][..., :length]

    def _start_past_recording(self) -> None:
        self._positions_before = vars(self.cache).get("position_ids")
        for index, layer in enumerate(self.cache.layers):
            if getattr(layer, "record_past", True) is False:
                self._past_recorders.append(layer)  # first, in case an interrupt comes between
                layer.record_past = True
            if _holds_keys(layer):
                # a static layer hands out its counter itself
                self._lengths_before[index] = int(layer.get_seq_length())
                self._indexers_before[index] = _indexer(layer)

    def _check_records(self) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, RollbackLayer) and layer.has_missed_update(self._length):
                raise UnsupportedTargetError(_NO_RECORD)

    def _finish(self) -> None:
        self._length = 0  # first: from here on an interrupt cannot have half of the block undone
        self._forget_block()

    def _forget_block(self) -> None:
        for layer in self._past_recorders:
            layer.record_past = False
        self._past_recorders.clear()
        self._lengths_before.clear()
        self._indexers_before.clear()
        self._positions_before = None
        for layer in self.cache.layers:
            if isinstance(layer, RollbackLayer):
                layer._records.clear()
                layer._uncut.clear()

    def _exchanged(self, layer: Any) -> RollbackLayer:
        exchanged = object.__new__(_rollback_class(type(layer)))  # type: ignore[arg-type]
        exchanged.__dict__ = layer.__dict__
        exchanged._rollback = self
        exchanged._records, exchanged._uncut = {}, {}
        return exchanged


def close_surely(stack: ExitStack, close: Callable[[], Any]) -> None:
    """Has a stack call `close` twice, the second time for what an interrupt in the middle of the first has left."""
    stack.callback(close)
    stack.callback(close)


_NO_RECORD = (
    "a recurrent state was updated over several tokens without a record of the recurrence, so it cannot be rolled "
    "back. Does a kernel replace the whole layer (load the model with `use_kernels=False`), or was "
    "`ready_hf.ensure_patched(model)` not called, or `ready_hf.unhook()` called meanwhile?"
)


def check_cache(cache: Cache | None) -> Cache:
    """Returns the cache if it can be rolled back, refuses it by name otherwise."""
    supported = (
        "Supported are dynamic caches (the default) and static caches as far as transformers can cut them back "
        f"(here {transformers_version}; 5.24 can)."
    )
    if cache is None:
        raise UnsupportedTargetError(f"drafting needs a cache; got none (`use_cache=False`?). {supported}")
    # a class with a `crop` of its own (encoder-decoder, MiniMax) holds more than its layers
    if not isinstance(cache, Cache) or type(cache).crop is not Cache.crop:
        raise UnsupportedTargetError(f"{type(cache).__name__} cannot be rolled back. {supported}")
    if getattr(cache, "offloading", False):
        raise UnsupportedTargetError(f"an offloaded {type(cache).__name__} cannot be rolled back. {supported}")
    for layer in cache.layers:
        # in 5.17 quantized layers inherit `is_croppable` from the dynamic layer
        if isinstance(layer, CacheLayerMixin) and (not _can_cut(layer) or "Quantized" in type(layer).__name__):
            raise UnsupportedTargetError(f"a cache with {type(layer).__name__} cannot be rolled back. {supported}")
    return cache


def _commit_states(layers: list[RollbackLayer], keep: int | torch.Tensor, length: int) -> None:
    """Rebuilds the recurrent states after the first `keep` of the `length` tokens of the last block."""
    by_kernel = []
    for layer in layers:
        for state_idx, record in layer._records.items():
            if isinstance(keep, int) and keep == length and not record.is_frozen:
                continue
            state = layer.recurrent_states[state_idx]
            commit = record.as_commit(state)
            if commit is not None:
                by_kernel.append((layer, state_idx, commit))
                continue
            dtype = state.dtype
            layer.recurrent_states[state_idx] = state = None  # freed before its successor is allocated
            layer.recurrent_states[state_idx] = record.state_after(keep).to(dtype)
    found = ops.commit_states([commit for _, _, commit in by_kernel], keep)
    for (layer, state_idx, commit), state in zip(by_kernel, found, strict=True):
        if commit.out is None:
            layer.recurrent_states[state_idx] = state


def _commit_windows(layers: list[RollbackLayer], keep: int | torch.Tensor) -> None:
    """Cuts the convolution windows to what they were after the first `keep` tokens of the last block."""
    by_kernel: dict[int, list[tuple[RollbackLayer, int]]] = {}  # by kernel size
    for layer in layers:
        for state_idx in layer.uncut_windows():
            window, kernel_size = layer.conv_states[state_idx], layer.conv_kernel_size[state_idx]
            if window.dim() == 3 and ops.uses_kernels(window.device) and ops.takes(window.dtype):
                by_kernel.setdefault(kernel_size, []).append((layer, state_idx))
            else:
                layer.conv_states[state_idx] = _conv_window(window, keep, kernel_size)
    for kernel_size, members in by_kernel.items():
        windows = ops.commit_windows([layer.conv_states[i] for layer, i in members], keep, kernel_size)
        for (layer, i), window in zip(members, windows, strict=True):
            layer.conv_states[i] = window


def _like(state: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    return state if reference is None else state.to(reference.dtype)


def _conv_window(window: torch.Tensor, keep: int | torch.Tensor, kernel_size: int) -> torch.Tensor:
    """The last inputs `[B, C, kernel_size]` after `keep` tokens; `window` holds `kernel_size + T` of them."""
    if isinstance(keep, int):
        return window[..., keep : keep + kernel_size].contiguous()
    index = keep[:, None] + torch.arange(kernel_size, device=keep.device)  # [B, kernel_size]
    shape = (window.shape[0], *[1] * (window.dim() - 2), kernel_size)
    return window.gather(-1, index.view(shape).expand(*window.shape[:-1], kernel_size))


def _holds_keys(layer: Any) -> bool:
    return isinstance(layer, CacheLayerMixin) and bool(layer.is_initialized)


def _indexer(layer: Any) -> dict[str, Any]:
    """What a layer of indexed attention keeps beside keys and values, which a failing forward may leave longer."""
    names = ("indexer_keys", "indexer_position_ids", "indexer_cumulative_length")
    found = {name: vars(layer)[name] for name in names if name in vars(layer)}
    if isinstance(found.get("indexer_cumulative_length"), torch.Tensor):  # a counter that is changed in place
        found["indexer_cumulative_length"] = found["indexer_cumulative_length"].clone()
    return found


def _cut_keys_and_values(layer: Any, tokens: int) -> None:
    """Removes the last `tokens` positions; with 0, sliding layers still shrink back to their window."""
    if not _holds_keys(layer):
        return
    positions = getattr(layer, "indexer_position_ids", None)
    _attention_class(type(layer)).crop(layer, -tokens)  # type: ignore[arg-type]
    if positions is not None and tokens and layer.indexer_position_ids is positions:  # static layers leave them
        layer.indexer_position_ids = positions[..., :-tokens]


def _can_cut(layer: Any) -> bool:
    """Whether keys and values of a layer can be cut, whatever the layer says of a recurrent state beside them."""
    attention = _attention_class(type(layer))  # type: ignore[arg-type]
    can = getattr(attention, "is_croppable", False)
    return bool(can.__get__(layer) if isinstance(can, property) else can)


def _check_alignable(cache: Cache) -> None:
    for layer in cache.layers:
        # a `crop` of its own cuts more than keys and values
        if _holds_keys(layer) and _attention_class(type(layer)).crop is not DynamicLayer.crop:  # type: ignore[arg-type]
            raise UnsupportedTargetError(f"{type(layer).__name__} cannot keep a different number of tokens per row")


def _align_right(layer: Any, shift: torch.Tensor) -> None:
    """Moves row b of keys and values `shift[b]` to the right; what falls off the end comes in at the left."""
    if not _holds_keys(layer) or not bool(shift.any()):
        return
    length = layer.keys.shape[-2]
    index = (torch.arange(length, device=shift.device) - shift[:, None]) % length  # [B, S]
    index = index[:, None, :, None]
    layer.keys = layer.keys.gather(-2, index.expand_as(layer.keys))
    layer.values = layer.values.gather(-2, index.expand_as(layer.values))


@functools.cache
def _attention_class(layer_class: type) -> Any:
    """The class that cuts keys and values: for layers that are linear and attention at once, the attention half.

    `None` if transformers cannot cut that half.
    """
    if not issubclass(layer_class, LinearAttentionCacheLayerMixin):
        return layer_class
    halves = (
        c
        for c in layer_class.__mro__
        if issubclass(c, CacheLayerMixin) and not issubclass(c, LinearAttentionCacheLayerMixin) and "crop" in vars(c)
    )
    return next(halves, None)


@functools.cache
def _rollback_class(layer_class: type) -> type[RollbackLayer]:
    return type(f"Rollback{layer_class.__name__}", (RollbackLayer, layer_class), {})
