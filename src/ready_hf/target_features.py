"""The hidden states that a drafter reads from a target: outputs of chosen decoder layers, `[B, T, hidden]` each.

Taken by hooks on the layers, since the indices of `output_hidden_states=[...]` changed their meaning. Targets with
hyper-connections carry several streams from layer to layer; a drafter reads their mean.
"""

import functools
import threading
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ready_hf.target import UnsupportedTargetError, ensure_patched, text_decoder


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
        self.is_active = True
        self._thread_id = threading.get_ident()
        self._hidden_size = int(model.get_input_embeddings().weight.shape[1])
        self._chunks: dict[int, list[torch.Tensor]] = {i: [] for i in target_layer_ids}
        self._layers = {i: layers[i] for i in self._chunks}
        self._handles: list[Any] = []
        if attach:
            self.attach()

    def attach(self) -> None:
        """Hooks the layers, unless they are hooked already."""
        if not self._handles:
            for i, layer in self._layers.items():
                self._handles.append(layer.register_forward_hook(functools.partial(self._collect, i)))

    def _collect(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if self.is_active and threading.get_ident() == self._thread_id:
            hidden_states = output[0] if isinstance(output, tuple) else output
            self._chunks[index].append(_one_stream(hidden_states, self._hidden_size))

    def take(self, length: int | None = None) -> dict[int, torch.Tensor]:
        """Hands over what came since the last call: `{layer id: [B, T, hidden]}`, cut to the first `length` tokens."""
        taken = {i: torch.cat(chunks, dim=1)[:, :length] for i, chunks in self._chunks.items() if chunks}
        for chunks in self._chunks.values():
            chunks.clear()
        return taken

    def close(self) -> None:
        """Removes the hooks and drops what was collected."""
        for handle in self._handles:
            handle.remove()
        for chunks in self._chunks.values():
            chunks.clear()

    def __enter__(self) -> "FeatureCapture":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _one_stream(hidden_states: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """A layer's output as `[B, T, hidden]`: hyper-connections carry several streams, of which this is the mean."""
    if hidden_states.shape[2:].numel() == hidden_size:  # [B, T, hidden]
        return hidden_states
    return hidden_states.flatten(2).unflatten(2, (-1, hidden_size)).mean(2)  # [B, T, S, hidden] or [B, T, S * hidden]
