"""The hidden states that a drafter reads from a target: outputs of chosen decoder layers, `[B, T, hidden]` each.

Taken by hooks on the layers, since the indices of `output_hidden_states=[...]` changed their meaning. Targets with
hyper-connections carry several streams from layer to layer; a drafter reads their mean.
"""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ready_hf.target import UnsupportedTargetError, announce_reading, ensure_patched, text_decoder


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a text or composite model.

    Raises:
        UnsupportedTargetError: the decoder does not call them `layers`.
    """
    layers = getattr(text_decoder(model), "layers", None)
    if layers is None:
        raise UnsupportedTargetError(
            f"no decoder layers found in {type(model).__name__}: features are read from the `layers` of its decoder. "
            "Use a drafter that reads none."
        )
    return layers


def matrix_shape(module: nn.Module) -> tuple[int, int]:
    """Rows and columns `(V, d)` of embeddings or an output head; a packed weight has another shape of its own."""
    while hasattr(module, "base_layer"):  # an adapter, which names the sizes of embeddings differently
        module = module.base_layer  # type: ignore[assignment]
    weight = module._parameters.get("weight")  # not the attribute, which may be computed
    if type(weight) is nn.Parameter and weight.is_floating_point() and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]  # whatever the module was made with
    names = (
        ("num_embeddings", "embedding_dim") if hasattr(module, "embedding_dim") else ("out_features", "in_features")
    )
    shape = [getattr(module, name) for name in names] if hasattr(module, names[1]) else module.weight.shape
    return int(shape[0]), int(shape[1])  # type: ignore[index]


class FeatureCapture:
    """Collects the outputs of chosen decoder layers, for the thread that made it, while active and until closed.

    Args:
        model (`PreTrainedModel`): The target.
        target_layer_ids (`list[int]`): Indices of decoder layers whose output is read (0 is the first layer).
        attach (`bool`): Hook the layers now. Else by `attach()`, once somebody is sure to call `close`.

    Raises:
        ValueError: an index beyond the last layer.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: list[int], attach: bool = True):
        layers = decoder_layers(model)
        wrong = [i for i in target_layer_ids if not 0 <= i < len(layers)]
        if wrong:
            raise ValueError(
                f"`target_layer_ids` {wrong} are not decoder layers of {type(model).__name__}: allowed are "
                f"0..{len(layers) - 1}"
            )
        ensure_patched(model)
        self._chunks: dict[int, list[torch.Tensor]] = {i: [] for i in target_layer_ids}
        self._hidden_size = matrix_shape(model.get_input_embeddings())[1]
        self._layers = {i: layers[i] for i in self._chunks}
        self._taps: dict[int, _Tap] = {}
        self._is_active = False
        if attach:
            self.attach()
            self.is_active = True

    def attach(self) -> None:
        """Hooks the layers, unless they are hooked already."""
        for i, layer in self._layers.items():
            if i not in self._taps:
                self._taps[i] = _connected_tap(layer, i, self._hidden_size, self)

    @property
    def is_active(self) -> bool:
        """Whether outputs are collected; set by the thread whose forwards are meant."""
        return self._is_active

    @is_active.setter
    def is_active(self, is_active: bool) -> None:
        self._is_active = is_active
        for tap in self._taps.values():
            others = tuple(capture for capture in tap.active.captures if capture is not self)
            tap.active.captures = (*others, self) if is_active else others
        others = tuple(capture for capture in _active.captures if capture is not self)
        _active.captures = (*others, self) if is_active else others
        announce_reading(tuple(i for capture in _active.captures for i in capture._chunks))

    def take(self, length: int | None = None) -> dict[int, torch.Tensor]:
        """Hands over what came since the last call: `{layer id: [B, T, hidden]}`, cut to the first `length` tokens."""
        taken = {i: torch.cat(chunks, dim=1)[:, :length] for i, chunks in self._chunks.items() if chunks}
        for chunks in self._chunks.values():
            chunks.clear()
        return taken

    def close(self) -> None:
        """Removes the hooks and drops what was collected."""
        self.is_active = False
        for index, layer in self._layers.items():
            _disconnect_tap(layer, index, self)
        self._layers.clear()
        self._taps.clear()
        for chunks in self._chunks.values():
            chunks.clear()

    def __enter__(self) -> "FeatureCapture":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Active(threading.local):
    """Captures that are active in this thread."""

    def __init__(self) -> None:
        self.captures: tuple[FeatureCapture, ...] = ()


_active = _Active()


class _Tap:
    """The hook of a decoder layer: hands its outputs `[B, T, hidden]` to the captures of the thread that runs it.

    Captures come and go with every `generate` call, and a compiled target is compiled again for a hook that is another
    object, or has another key. So every layer keeps its tap and its key.
    """

    def __init__(self, index: int, hidden_size: int):
        self.index, self.hidden_size, self.active = index, hidden_size, _Active()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        captures = self.active.captures
        if captures:
            hidden_states = _one_stream(output[0] if isinstance(output, tuple) else output, self.hidden_size)
            for capture in captures:
                capture._chunks[self.index].append(hidden_states)

    def __reduce__(self) -> Any:
        return _Tap, (self.index, self.hidden_size)  # that of a copied layer has no captures


@dataclass
class _Connection:
    tap: _Tap
    key: int
    captures: set[int] = field(default_factory=set)  # of `id`, as captures hold their layers


_lock = threading.Lock()
# by the index under which a layer is read: two models may hold it at two places, and layers may be cut off
_connections: "weakref.WeakKeyDictionary[nn.Module, dict[int, _Connection]]" = weakref.WeakKeyDictionary()


def _connected_tap(layer: nn.Module, index: int, hidden_size: int, capture: FeatureCapture) -> _Tap:
    with _lock:
        connections = _connections.setdefault(layer, {})
        if index not in connections:
            key = RemovableHandle(layer._forward_hooks).id  # one that no other hook has
            connections[index] = _Connection(_Tap(index, hidden_size), key)
        connection = connections[index]
        connection.captures.add(id(capture))  # first, in case an interrupt comes between: `close` undoes what follows
        layer._forward_hooks[connection.key] = connection.tap
        return connection.tap


def _disconnect_tap(layer: nn.Module, index: int, capture: FeatureCapture) -> None:
    with _lock:
        connection = _connections.get(layer, {}).get(index)
        if connection is None:
            return
        if connection.captures <= {id(capture)}:
            layer._forward_hooks.pop(connection.key, None)
        connection.captures.discard(id(capture))


def _one_stream(hidden_states: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """A layer's output as `[B, T, hidden]`: hyper-connections carry several streams, of which this is the mean."""
    if hidden_states.shape[2:].numel() == hidden_size:  # [B, T, hidden]
        return hidden_states
    return hidden_states.flatten(2).unflatten(2, (-1, hidden_size)).mean(2)  # [B, T, S, hidden] or [B, T, S * hidden]
