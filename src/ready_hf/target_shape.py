"""The dimensions of a target that a drafter must fit, read from a model or from its configuration alone.

A configuration is turned into a model on the `meta` device, which allocates nothing: both ways read the same modules.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from ready_hf.target import UnsupportedTargetError, check_target, output_head
from ready_hf.target_features import decoder_layers, matrix_shape


@dataclass(frozen=True)
class TargetShape:
    """What a drafter has to know about its target.

    Args:
        name (`str`): Class and model type, for messages.
        vocab_size (`int`): Rows of the embedding and of the head.
        hidden_size (`int`): Width of embeddings and features.
        num_layers (`int`): Decoder layers.
        state_layer_ids (`tuple[int, ...]`): Decoder layers that keep a recurrent state.
        state_shapes (`tuple`): `(H, K, V)` of each of them.
        text_config (`PreTrainedConfig`): The configuration of the text decoder.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    state_layer_ids: tuple[int, ...]
    state_shapes: tuple[tuple[int, int, int], ...]
    text_config: PreTrainedConfig

    @property
    def rope_theta(self) -> float:
        """Base of the target's rotary embedding; 10000 if it has none."""
        parameters = getattr(self.text_config, "rope_parameters", None) or {}
        return float(parameters.get("rope_theta", 10000.0))


def target_shape(target: PreTrainedModel | PreTrainedConfig) -> TargetShape:
    """The dimensions of a target.

    Args:
        target (`PreTrainedModel` or `PreTrainedConfig`): A causal language model, text-only or composite (image and
            text), or the configuration of one. Nothing is allocated for a configuration.

    Raises:
        TypeError: something else.
        UnsupportedTargetError: not a target that ready_hf can decode with.
    """
    if isinstance(target, PreTrainedConfig):
        target = _on_meta(target)
    if not isinstance(target, PreTrainedModel):
        raise TypeError(
            f"expected a transformers model or its configuration, got {type(target).__name__}: load one with "
            "AutoModelForCausalLM.from_pretrained(...) or AutoConfig.from_pretrained(...)"
        )
    if getattr(target, "is_ready_drafter", False):
        raise TypeError(f"expected a target, got {type(target).__name__}, which is a drafter: are the two swapped?")
    layers = check_target(target)
    embedding, head = target.get_input_embeddings(), output_head(target)
    if embedding is None or head is None:
        raise UnsupportedTargetError(
            f"{type(target).__name__} (model type {target.config.model_type!r}) has no output head: a drafter shares "
            "the target's embeddings and head. Load it with AutoModelForCausalLM."
        )
    vocab_size, hidden_size = matrix_shape(head)
    return TargetShape(
        name=f"{type(target).__name__} (model type {target.config.model_type!r})",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=len(decoder_layers(target)),
        state_layer_ids=tuple(layer.layer_idx for layer in layers),
        state_shapes=tuple(layer.state_shape for layer in layers),
        text_config=target.config.get_text_config(decoder=True),
    )


def special_token_ids(config: PreTrainedConfig) -> dict[str, Any]:
    """bos, eos and pad ids of a configuration, wherever a composite one keeps them."""
    text = config.get_text_config(decoder=True)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    own = {name: getattr(config, name, None) for name in names}
    return {name: getattr(text, name, None) if value is None else value for name, value in own.items()}


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    text = config.get_text_config(decoder=True)
    last_error: Exception | None = None
    ways = ((AutoModelForCausalLM, config), (AutoModelForCausalLM, text), (AutoModelForImageTextToText, config))
    for auto_class, candidate in ways:
        try:
            with torch.device("meta"):
                return auto_class.from_config(candidate)
        except ValueError as error:  # no such model is registered for this configuration
            last_error = error
    raise UnsupportedTargetError(
        f"no causal language model belongs to a configuration of model type {config.model_type!r}"
    ) from last_error


def check_token_ids(target: PreTrainedModel, input_ids: torch.Tensor, whose: str) -> None:
    """Refuses ids that the target has no row for, which it would find out about deep inside, or on a GPU too late.

    Raises:
        ValueError: naming `whose` ids they are, one of them, and the limit.
    """
    config: Any = target.config.get_text_config(decoder=True)
    illegal = input_ids[(input_ids < 0) | (input_ids >= config.vocab_size)]
    if illegal.numel():
        raise ValueError(
            f"{whose} has the token id {int(illegal[0])}, allowed are 0 to {config.vocab_size - 1} (the target's "
            f"vocabulary has {config.vocab_size} rows): use the target's own tokenizer"
        )
