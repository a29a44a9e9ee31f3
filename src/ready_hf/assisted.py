"""Assisted generation on hybrid targets without a trained drafter: transformers' own generators in our loop.

`ready_hf.enable_assisted_generation()` routes `generate(assistant_model=...)` here. An *assistant* is a causal
language model with the target's vocabulary; it drafts by its own `generate`, on a cache of its own. After a round,
that cache is put back to what it was before the first draft, whatever its layers hold (keys, windows, recurrent
states); the tokens accepted since are fed together with the next one, which takes no forward more.

An assistant with `speculation_type="dflash"` drafts a block from features of the target, which come from the same
hooks as those of a ReaDy drafter.
"""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator, CandidateGenerator

from ready_hf.candidates import DraftContext, ReadyCandidateGenerator
from ready_hf.drafting import device_of
from ready_hf.target import CACHE_NAME, UnsupportedTargetError, check_target, ensure_patched


# Arguments of `generate` that an assistant, which is shown token ids and their mask, would not know about.
NOT_TEXT = ("inputs_embeds", "pixel_values", "pixel_values_videos", "input_features")


class AssistantDrafter:
    """Drafts with an ordinary causal language model: attention or hybrid, of the target's vocabulary.

    How many tokens it drafts is up to `assistant.generation_config` (`num_assistant_tokens` and its schedule,
    `assistant_confidence_threshold`), as in transformers; `num_assistant_tokens` of the call caps it.

    Args:
        assistant (`PreTrainedModel`): The model that drafts. May be the target itself.
    """

    is_ready_drafter = True

    def __init__(self, assistant: PreTrainedModel):
        self.assistant = assistant

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ) -> CandidateGenerator:
        """transformers' generator. Processors given as objects run on the target side only, since they may keep state.

        Raises:
            TypeError, ValueError: the assistant cannot draft for this target or these inputs.
        """
        _check_one_row(input_ids)
        check_assistant(target, self.assistant)
        ensure_patched(self.assistant)
        return AssistantCandidateGenerator(self.assistant, input_ids, generation_config)


class DFlashDrafter:
    """Drafts with a DFlash assistant, which reads features of the target: `speculation_type="dflash"`.

    Args:
        assistant (`PreTrainedModel`): A model such as `MuseGlimmerAssistantModel`.
    """

    is_ready_drafter = True

    def __init__(self, assistant: PreTrainedModel):
        self.assistant = assistant

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ) -> CandidateGenerator:
        """transformers' generator, on features from our hooks.

        Raises:
            TypeError, ValueError: the assistant cannot draft for this target or these inputs.
        """
        _check_one_row(input_ids)
        _check_dflash(target, self.assistant)
        block = _DFlashBlock(self.assistant, target, generation_config)
        return ReadyCandidateGenerator(block, target, generation_config, logits_processor)


class AssistantCandidateGenerator(AssistedCandidateGenerator):
    """transformers' generator, for an assistant whose cache may not be croppable."""

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}
    num_assistant_tokens: int

    def __init__(self, assistant: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig):
        cache = DynamicCache(config=assistant.config.get_text_config(decoder=True))
        self._before_drafts = _BeforeDrafts(cache)
        processors = LogitsProcessorList([self._before_drafts])
        super().__init__(input_ids, assistant, generation_config, {}, logits_processor=processors)
        self.assistant_kwargs[CACHE_NAME] = cache
        # the assistant's cache is the one above, also if the target has a static one
        self.generation_config.cache_implementation = self.generation_config.compile_config = None
        self._unset = _options_of_its_own(assistant, self.generation_config)

    def get_candidates(
        self, input_ids: torch.LongTensor, *, model_kwargs: dict[str, Any], num_drafts: int, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts at most `num_drafts` tokens after the last one; see `CandidateGenerator.get_candidates`."""
        mask = model_kwargs.get("attention_mask")
        # beside a cache of an earlier turn, the ids may be those of the last turn alone
        mask = torch.ones_like(input_ids) if mask is None else mask[:, -input_ids.shape[1] :]
        self.assistant_kwargs["attention_mask"] = mask.to(self.assistant_model.device)
        scheduled = self.num_assistant_tokens
        self.num_assistant_tokens = min(int(scheduled), num_drafts)
        try:
            return super().get_candidates(input_ids)
        finally:
            self.num_assistant_tokens = scheduled

    def _update_past_and_masks(self, *args: Any, **kwargs: Any) -> bool:
        self._before_drafts.restore()
        return True

    def _prepare_generation_args(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self._unset | super()._prepare_generation_args(*args, **kwargs)


def _options_of_its_own(assistant: PreTrainedModel, config: GenerationConfig) -> dict[str, Any]:
    """Options to unset: what the target's leave open, `generate` would take from the assistant's own configuration.

    Stop strings, beams, a kind of cache, another assistance: these are for texts, and the assistant only drafts.
    """
    names = set(vars(assistant.generation_config)) & set(vars(GenerationConfig()))
    names -= {"max_length", "max_new_tokens", "min_length", "min_new_tokens"}
    defaults = GenerationConfig._get_default_generation_params()
    is_open = [name for name in names if not name.startswith("_") and getattr(config, name, None) is None]
    return {name: defaults.get(name) for name in is_open}


class _BeforeDrafts(LogitsProcessor):
    """Keeps the assistant's cache as it is after the first forward of a round: it has seen every token but no draft.

    A processor, since these run between two forwards; it changes no score.
    """

    def __init__(self, cache: Cache):
        self._cache = cache
        self._kept: list[dict[str, Any]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._kept:
            self._kept = [_contents(layer) for layer in self._cache.layers]
        return scores

    def restore(self) -> None:
        """Makes the cache what it was; nothing in the first round."""
        for layer, contents in zip(self._cache.layers, self._kept, strict=bool(self._kept)):
            vars(layer).update(contents)
        self._kept = []


def _contents(layer: Any) -> dict[str, Any]:
    """What a dynamic cache layer holds. Keys grow out of place, states are overwritten: these are copied."""
    contents = dict(vars(layer))
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            contents[name] = {i: None if x is None else x.clone() for i, x in contents[name].items()}
        for name in ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized"):
            contents[name] = dict(contents[name])
    return contents


class _DFlashBlock:
    """A DFlash generator as a block drafter; one per `generate` call."""

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel, generation_config: GenerationConfig):
        self.block_size = assistant.config.block_size - 1  # its first position is the anchor
        self.target_layer_ids = list(assistant.config.target_layer_ids)
        # processors with state must see the target's tokens alone; the warpers come with every context
        self._generator = candidate_generator.DFlashTokenCandidateGenerator(
            assistant_model=assistant,
            main_model_input_embeddings=target.get_input_embeddings(),
            main_model_output_embeddings=target.get_output_embeddings(),
            generation_config=generation_config,
        )

    def draft(self, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts one block; see `BlockDrafter.draft`."""
        ids = context.input_ids
        mask = torch.ones_like(ids) if context.attention_mask is None else context.attention_mask
        features = [context.features[i] for i in self.target_layer_ids]
        # transformers has changed which index of the hidden states is the output of which layer
        indices = self._generator.model_kwargs_overrides["output_hidden_states"]
        self._generator.logits_processor = context.warpers
        candidates, logits = self._generator.get_candidates(
            ids,
            model_kwargs={"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)},
            model_outputs=SimpleNamespace(hidden_states=dict(zip(indices, features, strict=True))),
            is_first_iteration=False,
            n_last_matches=features[0].shape[1] - 1,
        )
        drafts = candidates[:, ids.shape[1] :][:, : context.num_drafts]
        sampled = context.do_sample and logits is not None
        return drafts, logits[:, : drafts.shape[1]] if sampled else None


def check_inputs(call: dict[str, Any], is_dflash: bool) -> None:
    """Refuses arguments of a `generate` call that an assistant cannot honour.

    Raises:
        ValueError: naming the argument.
    """
    if call.get("assistant_tokenizer") is not None:
        raise ValueError(
            "`assistant_tokenizer` was given, but on hybrid targets an assistant must have the target's own tokenizer "
            "and vocabulary. Use such an assistant, or prompt lookup."
        )
    given = next((name for name in NOT_TEXT if call.get(name) is not None), None)
    if given is not None:
        raise ValueError(
            f"`{given}` was given, but on hybrid targets an assistant sees token ids only. Use prompt lookup, or call "
            "`generate` without `assistant_model`."
        )
    cache = next((call[name] for name in ("cache", "past_key_values") if call.get(name) is not None), None)
    if is_dflash and cache is not None and cache.get_seq_length():
        raise ValueError(
            f"a cache of {cache.get_seq_length()} tokens was given, but a DFlash assistant needs the target's "
            "features of the whole prompt. Call `generate` without the cache, or with an ordinary assistant."
        )


def check_assistant(target: PreTrainedModel, assistant: Any) -> None:
    """Refuses a model that cannot draft for a target.

    Raises:
        TypeError: not a model that generates.
        ValueError: another vocabulary, no weights, or no attention layer.
    """
    if not getattr(assistant, "can_generate", lambda: False)():
        raise TypeError(
            f"`assistant_model` must be a causal language model that can `generate`, got {type(assistant).__name__}"
        )
    device_of(assistant)  # refuses weights that are shapes only
    name = type(assistant).__name__
    try:
        check_target(assistant)
    except UnsupportedTargetError as error:
        raise UnsupportedTargetError(f"`assistant_model` cannot draft: {error}") from error
    own = assistant.config.get_text_config(decoder=True)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if own.vocab_size != vocab_size:
        raise ValueError(
            f"`assistant_model` {name} has a vocabulary of {own.vocab_size} tokens, the target one of {vocab_size}; "
            "on hybrid targets both must have the same tokenizer. Use such an assistant, or prompt lookup."
        )
    if not any(hasattr(layer, "keys") for layer in DynamicCache(config=own).layers):
        raise UnsupportedTargetError(
            f"`assistant_model` {name} has no attention layer, so transformers cannot tell how many tokens its cache "
            "has seen. Use an assistant with at least one."
        )


def _check_dflash(target: PreTrainedModel, assistant: PreTrainedModel) -> None:
    if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
        raise ValueError('`speculation_type="dflash"` needs a newer transformers')
    config = getattr(assistant, "config", None)
    names = ("target_layer_ids", "block_size", "mask_token_id", "hidden_size")
    missing = [name for name in names if getattr(config, name, None) is None]
    if missing:
        raise TypeError(
            f'`speculation_type="dflash"` needs a DFlash assistant, got {type(assistant).__name__}, whose config '
            f"has no {', '.join(missing)}"
        )
    device_of(assistant)  # refuses weights that are shapes only
    own, target_config = assistant.config, target.config.get_text_config(decoder=True)
    if own.hidden_size != target_config.hidden_size or own.mask_token_id >= target_config.vocab_size:
        raise ValueError(
            f"the DFlash assistant has hidden size {own.hidden_size} and mask token {own.mask_token_id}, the target "
            f"hidden size {target_config.hidden_size} and {target_config.vocab_size} tokens: it was trained for "
            "another target"
        )


def _check_one_row(input_ids: torch.Tensor) -> None:
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"an assistant drafts for one sequence at a time, got a batch of {input_ids.shape[0]}: call `generate` "
            "once per prompt, or without `assistant_model`"
        )
