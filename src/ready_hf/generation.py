"""How `generate` reaches the decoding loop: the hook behind `assistant_model=`, and the patch-free `speculate`.

`import ready_hf` wraps the one public symbol `GenerationMixin.generate`. A call without a ready_hf drafter goes to the
original unchanged; one with a drafter goes there too, with the drafter routed through the public `custom_generate`
argument. `unhook()` undoes it.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMixin, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from ready_hf.assisted import AssistantDrafter, DFlashDrafter, check_inputs
from ready_hf.candidates import Drafter, PromptLookupDrafter, is_drafter
from ready_hf.decoding import check_options, speculative_decoding
from ready_hf.target import check_target, ensure_patched, recurrent_layers, unpatch


# What `generate` fills in when the caller sets nothing; then the drafter's own block size decides.
DEFAULT_NUM_ASSISTANT_TOKENS = GenerationConfig._get_default_generation_params().get("num_assistant_tokens")


# Positional parameters of `generate` after `self`. Not read from its signature: what we wrap may be a wrapper itself.
GENERATE_PARAMETERS = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)


class Speculation:
    """A decoding method for `generate(custom_generate=...)`, made by `speculate`."""

    def __init__(self, drafter: Drafter, streamer: BaseStreamer | None, num_assistant_tokens: int | None):
        if not is_drafter(drafter):
            raise TypeError(
                f"{type(drafter).__name__} is not a ready_hf drafter (no `is_ready_drafter = True`). Pass a ReaDy "
                "drafter or a `ready_hf.PromptLookupDrafter`."
            )
        self.drafter = drafter
        self.streamer = streamer
        self.num_assistant_tokens = num_assistant_tokens

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Any,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        num_assistant_tokens: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        # `generate` hands over an argument of a callable's own only if the caller has set it
        if num_assistant_tokens is None:
            num_assistant_tokens = self.num_assistant_tokens
        if num_assistant_tokens is None and generation_config.num_assistant_tokens != DEFAULT_NUM_ASSISTANT_TOKENS:
            num_assistant_tokens = generation_config.num_assistant_tokens
        try:
            return speculative_decoding(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                drafter=self.drafter,
                streamer=self.streamer,
                num_assistant_tokens=num_assistant_tokens,
                **model_kwargs,
            )
        except BaseException as error:
            _end_streamer(self.streamer, error)
            raise


def speculate(
    drafter: Drafter, *, streamer: BaseStreamer | None = None, num_assistant_tokens: int | None = None
) -> Speculation:
    """Decoding with a drafter, for `target.generate(**inputs, custom_generate=ready_hf.speculate(drafter))`.

    Works with nothing patched, after `unhook()` too. Then give the streamer here as well as to `generate` (which sends
    it the prompt, but drops it for callables), and pass a `StopStringCriteria` instead of `stop_strings`.

    Args:
        drafter (`Drafter`): A ReaDy drafter, a `PromptLookupDrafter`, or any object with the marker.
        streamer (`BaseStreamer`, *optional*): Gets every token.
        num_assistant_tokens (`int`, *optional*): Most drafts to verify per round; default: as many as the drafter
            proposes. After `unhook()`, a value of 20 in a generation config counts as unset, since `generate` fills
            it in: pass it here.

    Raises:
        TypeError: not a drafter.
    """
    return Speculation(drafter, streamer, num_assistant_tokens)


class _HookState:
    is_enabled = True
    assists_hybrids = False


_state = _HookState()


def hook() -> None:
    """Makes `generate(assistant_model=drafter)` work; `import ready_hf` calls it. Idempotent."""
    _state.is_enabled = True
    if _is_ours(GenerationMixin.generate):
        return
    GenerationMixin.generate = _hooked(GenerationMixin.generate)


def unhook() -> None:
    """Undoes `hook`, `enable_assisted_generation` and everything wrapped in modeling modules.

    If somebody has wrapped `generate` after us, their wrapper stays and ours inside it turns into a pass-through.
    """
    _state.is_enabled = False
    _state.assists_hybrids = False
    unpatch()
    if _is_ours(GenerationMixin.generate):
        GenerationMixin.generate = GenerationMixin.generate.__wrapped__


def enable_assisted_generation() -> None:
    """Makes transformers' own assisted generation work on hybrid targets, through our loop and rollback.

    That is `generate(prompt_lookup_num_tokens=...)`, `generate(assistant_model=...)` with any causal language model of
    the same vocabulary, attention or hybrid, and `speculation_type="dflash"`.

    Opt-in, since it changes calls that have nothing to do with ready_hf drafters: stock transformers refuses them.
    Pure attention models keep the stock loop.
    """
    hook()
    _state.assists_hybrids = True


def disable_assisted_generation() -> None:
    """Undoes `enable_assisted_generation`."""
    _state.assists_hybrids = False


def _hooked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _state.is_enabled:
            return original(self, *args, **kwargs)
        if _is_stateful(self):
            ensure_patched(self)
        call = dict(zip(GENERATE_PARAMETERS, args, strict=False)) | kwargs
        if len(call) < len(args) + len(kwargs):  # an argument too many or given twice: the original says so
            return original(self, *args, **kwargs)
        try:
            drafter = _requested_drafter(self, call)
            if drafter is not None:
                return _drafted_generate(original, self, drafter, call)
        except BaseException as error:
            _end_streamer(call.get("streamer"), error)
            raise
        return original(self, *args, **kwargs)

    generate._ready_hf_hook = generate  # type: ignore[attr-defined]
    return generate


def _is_stateful(model: Any) -> bool:
    return bool(getattr(model, "_is_stateful", False))


def _end_streamer(streamer: BaseStreamer | None, error: BaseException) -> None:
    """Ends a streamer once per failed call: whoever iterates over it would wait for ever."""
    if streamer is not None and not getattr(error, "_ready_hf_streamer_ended", False):
        error._ready_hf_streamer_ended = True  # type: ignore[attr-defined]
        with suppress(Exception):
            streamer.end()


def _is_ours(function: Any) -> bool:
    """Whether a `generate` is our wrapper itself: one put around it by `functools.wraps` copies our attribute."""
    return getattr(function, "_ready_hf_hook", None) is function


def _requested_drafter(model: PreTrainedModel, call: dict[str, Any]) -> Drafter | None:
    """The drafter that a `generate` call asks for, removed from its arguments."""
    assistant, method = call.get("assistant_model"), call.get("custom_generate")
    if isinstance(assistant, str) and _is_stateful(model):
        raise TypeError(f"`assistant_model` must be a loaded drafter, got the string {assistant!r}: load it first")
    if is_drafter(assistant):
        if method is not None:
            raise ValueError(
                "got both `assistant_model` (a ready_hf drafter) and `custom_generate`: each is a way of decoding. "
                "Pass one of them."
            )
        return call.pop("assistant_model")
    if isinstance(method, Speculation) and assistant is None:
        for name, value in (("streamer", method.streamer), ("num_assistant_tokens", method.num_assistant_tokens)):
            if call.get(name) is None and value is not None:
                call[name] = value
        del call["custom_generate"]
        return method.drafter
    # one whose recurrence is unknown as well: it is refused by name
    if _state.assists_hybrids and method is None and (_is_stateful(model) or recurrent_layers(model)):
        return _requested_assistance(model, call)
    return None


def _requested_assistance(model: PreTrainedModel, call: dict[str, Any]) -> Drafter | None:
    """What transformers calls assisted generation, as a drafter, removed from the arguments of a call."""
    if (_effective(model, call, "num_beams") or 1) > 1:  # stock warns and searches without assistance
        return None
    assistant = call.get("assistant_model")
    if assistant is not None:
        is_dflash = _effective(model, call, "speculation_type") == "dflash"
        check_inputs(call, is_dflash)
        for name in ("assistant_model", "assistant_tokenizer"):
            call.pop(name, None)
        if not is_dflash:
            return AssistantDrafter(assistant)
        _clear(model, call, "speculation_type")
        return DFlashDrafter(assistant)
    num_tokens = _effective(model, call, "prompt_lookup_num_tokens")
    if num_tokens is None:
        _refuse_assistance_of_its_own(model, call)
        return None
    ngram_size = _effective(model, call, "max_matching_ngram_size") or 2
    _clear(model, call, "prompt_lookup_num_tokens")
    return PromptLookupDrafter(num_tokens, ngram_size)


def _refuse_assistance_of_its_own(model: PreTrainedModel, call: dict[str, Any]) -> None:
    for name in ("assistant_early_exit", "use_mtp"):
        value = _effective(model, call, name)
        if value:
            raise ValueError(
                f"`{name}={value!r}` is not supported on hybrid targets: use `prompt_lookup_num_tokens`, an "
                "`assistant_model` or a drafter"
            )


def _drafted_generate(original: Callable[..., Any], model: Any, drafter: Drafter, call: dict[str, Any]) -> Any:
    if call.get("synced_gpus"):
        raise ValueError(
            "`synced_gpus=True` cannot be combined with a drafter: processes would run different numbers of rounds"
        )
    if call.get("inputs_embeds") is not None and _effective(model, call, "prefill_chunk_size") is not None:
        raise ValueError(
            "`prefill_chunk_size` cuts a prompt of token ids into pieces; transformers cannot cut `inputs_embeds`: "
            "drop one of them"
        )
    # the loop checks these too, but `generate` may run an encoder or another way of decoding before it gets there
    check_target(model)
    check_options(functools.partial(_effective, model, call))
    num_assistant_tokens = _effective(model, call, "num_assistant_tokens")
    call.pop("num_assistant_tokens", None)
    _build_stop_strings(model, call)
    return original(model, custom_generate=Speculation(drafter, call.get("streamer"), num_assistant_tokens), **call)


def _effective(model: PreTrainedModel, call: dict[str, Any], name: str) -> Any:
    """A generation option as the caller set it: argument, then `generation_config`, then the model's; else `None`."""
    if name in call:
        return call[name]
    for config in (call.get("generation_config"), model.generation_config):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def _clear(model: PreTrainedModel, call: dict[str, Any], name: str) -> None:
    """Unsets a generation option for one call, wherever it is set; nothing of the caller's is changed."""
    call.pop(name, None)
    config = call.get("generation_config")
    if getattr(config, name, None) is not None:
        call["generation_config"] = copy.deepcopy(config)
        setattr(call["generation_config"], name, None)
    if getattr(model.generation_config, name, None) is not None:
        call[name] = None


def _build_stop_strings(model: PreTrainedModel, call: dict[str, Any]) -> None:
    """Turns `stop_strings` into a criterion: `generate` drops the tokenizer when the decoding method is a callable."""
    stop_strings, tokenizer = _effective(model, call, "stop_strings"), call.get("tokenizer")
    if stop_strings is None or tokenizer is None:
        return  # without a tokenizer `generate` says so itself
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    if not any(
        isinstance(criterion, StopStringCriteria) for criterion in criteria
    ):  # the caller's own takes precedence
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    call["stopping_criteria"] = criteria
    _clear(model, call, "stop_strings")
