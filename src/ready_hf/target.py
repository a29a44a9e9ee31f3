"""All we need to know about a target model, and the only module that touches its insides.

A hybrid target keeps a recurrent state per *recurrent layer*. Its mixers call a module-level recurrence function
(several tokens: the block function; one token: the step function). `ensure_patched` puts a wrapper around these
functions that

- hands the call to an observer, if this thread has set one with `observing_recurrence` (that is how `rollback` records
a verify forward);
- otherwise runs transformers' torch rule for tensors on the CPU, which an installed GPU kernel package would crash on;
- otherwise changes nothing.

The mixers' own `forward` gets a wrapper too, which lets an observer stand in for it.

This module knows nothing of drafting or decoding.
"""

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils.import_utils import is_flash_linear_attention_available, is_mamba_2_ssm_available

from ready_hf.cache_tensors import unknown_tensors
from ready_hf.recurrences import (
    CPU_ROUTED_FUNCTIONS,
    GATED_DELTA_RULE,
    MAMBA1_FUNCTION,
    MAMBA2,
    RECURRENCES,
    Recurrence,
)


# transformers 5.24 renamed `past_key_values` to `cache` in model inputs and outputs; earlier versions know only the
# old name.
CACHE_NAME = "cache" if "cache" in GenerateDecoderOnlyOutput.__annotations__ else "past_key_values"


def cache_in(holder: Any) -> Any:
    """The cache among a model's outputs or keyword arguments; `None` without one.

    Args:
        holder (`ModelOutput` or `dict`): Where transformers has put it: in 5.17, pure Mamba models have a name of
            their own for it.
    """
    get = holder.get if isinstance(holder, dict) else functools.partial(getattr, holder)
    return next((get(name, None) for name in (CACHE_NAME, "cache_params") if get(name, None) is not None), None)


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """A cache as a keyword argument of a model's forward; none without a cache."""
    if cache is None:
        return {}
    names = inspect.signature(model.forward).parameters
    return {"cache_params" if CACHE_NAME not in names and "cache_params" in names else CACHE_NAME: cache}


class UnsupportedTargetError(ValueError):
    """The target model (or how it was set up) cannot be rolled back exactly."""


@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent layer of a target.

    Args:
        layer_idx (`int`): Index of the decoder layer, and of its cache layer.
        recurrence (`Recurrence`): Which rule its mixer runs.
        mixer (`nn.Module`): The token mixer.
    """

    layer_idx: int
    recurrence: Recurrence
    mixer: nn.Module = field(repr=False)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """`(H, K, V)`: heads, key channels (Mamba-2: state size), value channels (Mamba-2: head dimension)."""
        heads, keys, values = (int(getattr(self.mixer, name)) for name in self.recurrence.head_attributes)
        return heads, keys, values


def recurrent_layers(model: PreTrainedModel) -> list[RecurrentLayer]:
    """The recurrent layers of a target, in layer order; empty for a pure attention model.

    A mixer is recognised by what its `forward` calls, so wrappers (PEFT, accelerate) and composite models need no
    special case.
    """
    found = []
    for module in model.modules():
        recurrence = _recurrence_of(type(module))  # type: ignore[arg-type]
        if recurrence is not None:
            found.append(RecurrentLayer(int(module.layer_idx), recurrence, module))
    return sorted(found, key=lambda layer: layer.layer_idx)


def check_target(model: PreTrainedModel) -> list[RecurrentLayer]:
    """Returns the recurrent layers of a target that can be rolled back; refuses any other by name.

    Raises:
        UnsupportedTargetError: encoder-decoder model, Mamba-1, an unknown recurrence, a kernel that replaces a whole
        layer, or an adapter that puts tokens of its own in front.
    """
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    if model.config.is_encoder_decoder:
        raise UnsupportedTargetError(
            f"{name} is an encoder-decoder model; ready_hf speeds up decoder-only models. "
            "Call `generate` without a drafter."
        )
    if any(_calls(type(module), MAMBA1_FUNCTION) for module in model.modules()):  # type: ignore[arg-type]
        raise UnsupportedTargetError(
            f"{name} has Mamba-1 layers. Their multi-token forward in transformers ignores the cached state, "
            f"so drafts cannot be verified exactly. Supported recurrences: {_supported()}. Call `generate` without "
            "a drafter."
        )
    layers = recurrent_layers(model)
    known = {layer.layer_idx for layer in layers}
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    unknown = [i for i, kind in enumerate(layer_types) if kind == "linear_attention" and i not in known]
    is_stateful = getattr(model, "_is_stateful", False) and not layers and not _is_conv_only(model)
    if is_stateful or unknown:
        raise UnsupportedTargetError(_unknown_recurrence(name, unknown))
    for layer in layers:
        _refuse_replaced_forward(name, layer)
    _refuse_prompt_learning(name, model)
    return layers


def check_cached_states(model: PreTrainedModel, layers: list[RecurrentLayer], cache: Cache) -> None:
    """Refuses a target that has put states into its cache which a rollback would leave as they are.

    That is recurrent states where no recurrent layer was found, and tensors beside those of transformers' classes.

    Args:
        model (`PreTrainedModel`): The target.
        layers (`list[RecurrentLayer]`): Its recurrent layers.
        cache (`Cache`): Its cache, which has seen the prompt.

    Raises:
        UnsupportedTargetError: naming the model, and the layers or tensors.
    """
    known = {layer.layer_idx for layer in layers}
    unknown = [
        i
        for i, layer in enumerate(cache.layers)
        if any(getattr(layer, "is_recurrent_states_initialized", {}).values()) and i not in known
    ]
    name = f"{type(model).__name__} (model type {model.config.model_type!r})"
    if unknown:
        raise UnsupportedTargetError(_unknown_recurrence(name, unknown))
    tensors = unknown_tensors(cache)
    if tensors:
        raise UnsupportedTargetError(
            f"{name} keeps tensors in its {type(cache).__name__} that ready_hf does not know how to roll back: "
            f"{', '.join(tensors)}. Known are keys and values, convolution windows and the states of "
            f"{_supported()}. Call `generate` without a drafter, or, in a layer of keys and values alone, give its "
            "class a `crop` that cuts them back."
        )


def text_decoder(model: PreTrainedModel) -> Any:
    """The decoder of a text or composite model, without a head."""
    decoder = model.get_decoder()  # of some composite models, a whole causal language model
    return decoder if hasattr(decoder, "layers") or not hasattr(decoder, "get_decoder") else decoder.get_decoder()


def output_head(model: PreTrainedModel) -> Any:
    """The layer that gives a target's logits, wherever a composite model keeps it; `None` without one."""
    heads = (getattr(holder, "get_output_embeddings", lambda: None)() for holder in (model, model.get_decoder()))
    return next((head for head in heads if head is not None), None)


def committed_states(cache: Cache, layers: list[RecurrentLayer]) -> torch.Tensor:
    """The recurrent states of some layers, copied out of a cache, `[B, N, H, K, V]` in the dtype they are kept in.

    Raises:
        ValueError: a layer has no state yet.
    """
    return torch.stack(state_views(cache, layers), dim=1)


def state_views(cache: Cache, layers: list[RecurrentLayer]) -> list[torch.Tensor]:
    """The recurrent states of some layers where they lie in a cache, N tensors `[B, H, K, V]`.

    Mamba-2 caches hold the transposed matrix; here all recurrences have one layout.

    Raises:
        ValueError: a layer has no state yet.
    """
    found = []
    for layer in layers:
        state = cache.layers[layer.layer_idx].recurrent_states[0]
        if state is None:
            raise ValueError(f"layer {layer.layer_idx} of the cache has no recurrent state yet: run the prompt first")
        found.append(state.transpose(-1, -2) if layer.recurrence is MAMBA2 else state)
    return found


@dataclass(frozen=True)
class RecurrenceCall:
    """One call of a block function, as an observer sees it.

    Args:
        recurrence (`Recurrence`): Whose block function was called.
        arguments (`dict`): The call's arguments by the names of the torch rule.
        run (`Callable`): Runs the call as the model meant it, but for arguments that are given by name.
        has_kernel (`bool`): Whether something else than transformers' torch rule runs the call.
        step_rule (`Callable`, *optional*): The recurrence's step function, if a kernel is behind it that takes several
            tokens too: one launch, and the arithmetic of plain decoding. Same arguments.
    """

    recurrence: Recurrence
    arguments: dict[str, Any]
    run: Callable[..., Any]
    has_kernel: bool = False
    step_rule: Callable[..., Any] | None = None


@dataclass(frozen=True)
class MixerCall:
    """One call of a recurrent layer's mixer, as an observer sees it.

    Args:
        mixer (`nn.Module`): The mixer.
        hidden_states (`torch.Tensor` of shape `[B, T, hidden]`): Its input.
        attention_mask (`torch.Tensor`, *optional*): Its mask.
        options (`dict`): Its other arguments.
    """

    mixer: Any
    hidden_states: torch.Tensor
    attention_mask: torch.Tensor | None
    options: dict[str, Any]

    @property
    def cache(self) -> Any:
        """The cache it reads and writes; `None` without one."""
        names = ("cache", "cache_params", "past_key_values")  # the last ones in transformers 5.17
        return next((self.options[name] for name in names if self.options.get(name) is not None), None)

    @property
    def has_packed_sequences(self) -> bool:
        """Whether several sequences lie in one row."""
        return any(self.options.get(name) is not None for name in ("cu_seq_lens_q", "seq_idx"))

    def masked_hidden_states(self) -> torch.Tensor:
        """The input with padding zeroed, as the mixer does it."""
        apply: Any = vars(sys.modules[type(self.mixer).__module__])["apply_mask_to_padding_states"]
        return apply(self.hidden_states, self.attention_mask)


Observer = Callable[[RecurrenceCall], Any]
MixerObserver = Callable[[MixerCall], torch.Tensor | None]


class _ThreadState(threading.local):
    # set here, once per thread: compiled code does not notice what hides a default of the class
    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.mixer_observer: MixerObserver | None = None
        self.read_layers: tuple[int, ...] = ()


_thread = _ThreadState()
_lock = threading.RLock()
_patched_functions: dict[tuple[ModuleType, str], tuple[Any, Any]] = {}  # (module, name) -> (wrapper, original)
_patched_mixers: dict[Any, tuple[Any, Any]] = {}  # mixer class -> (wrapper, original)
_patched_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


@contextmanager
def observing_recurrence(observer: Observer, mixer_observer: MixerObserver | None = None) -> Iterator[None]:
    """Inside, calls of block functions in *this thread* go to `observer(call)`, which returns what they would.

    Calls of whole mixers go to `mixer_observer(call)` first, which returns their output, or `None` to let them run.
    """
    previous = _thread.observer, _thread.mixer_observer
    try:
        try:
            _thread.observer, _thread.mixer_observer = observer, mixer_observer
            yield
        finally:
            _thread.observer, _thread.mixer_observer = previous
    finally:  # again, for an interrupt may have come just before
        _thread.observer, _thread.mixer_observer = previous


def announce_reading(layer_ids: tuple[int, ...]) -> None:
    """Says whose outputs hooks read in this thread: compiled code checks this, since it does not look for hooks."""
    _thread.read_layers = layer_ids


def checks_reading(model: PreTrainedModel) -> bool:
    """Whether compiled code of a target checks what `announce_reading` says.

    It does so in recurrent layers. Kernel packages are not compiled: they cut the code to pieces, of which those
    without a recurrent layer do not check.
    """
    layers = recurrent_layers(model)
    return bool(layers) and not any(_has_kernel(layer.recurrence, model.device) for layer in layers)


def ensure_patched(model: PreTrainedModel) -> None:
    """Wraps the recurrence functions that `model` calls; idempotent, thread-safe, undone by `ready_hf.unhook()`.

    `generate`, feature capture and verification call it themselves. Call it yourself only to run `model(...)` on the
    CPU, before any `generate`, on a machine where flash-linear-attention is installed but no GPU is there.
    """
    if model in _patched_models:
        return
    with _lock:
        for module in _modeling_modules(model):
            for recurrence in RECURRENCES:
                _patch(module, recurrence.block_function, recurrence)
                _patch(module, recurrence.step_function)
            for name in CPU_ROUTED_FUNCTIONS:
                _patch(module, name)
        deltas = [layer for layer in recurrent_layers(model) if layer.recurrence is GATED_DELTA_RULE]
        for mixer_class in {type(layer.mixer) for layer in deltas}:
            if "forward" in vars(mixer_class) and mixer_class not in _patched_mixers:
                original = mixer_class.forward
                mixer_class.forward = wrapper = _wrap_mixer(original)
                _patched_mixers[mixer_class] = (wrapper, original)
        _patched_models.add(model)


def unpatch() -> None:
    """Puts every wrapped function back, unless somebody else has replaced it since."""
    with _lock:
        for (module, name), (wrapper, original) in _patched_functions.items():
            if getattr(module, name, None) is wrapper:
                setattr(module, name, original)
        for mixer_class, (wrapper, original) in _patched_mixers.items():
            if mixer_class.forward is wrapper:
                mixer_class.forward = original
        _patched_functions.clear()
        _patched_mixers.clear()
        _patched_models.clear()


def is_untouched(mixer: nn.Module, recurrence: Recurrence) -> bool:
    """Whether everything that a mixer's forward calls by name is transformers' own: nobody changed rule or forward."""
    wrapper, forward = _patched_mixers.get(type(mixer), (None, None))
    if wrapper is None or type(mixer).forward is not wrapper or "forward" in vars(mixer):
        return False
    while forward is not None:
        if _is_foreign(forward):
            return False
        forward = getattr(forward, "__wrapped__", None)
    module = sys.modules[type(mixer).__module__]
    for name in (recurrence.block_function, recurrence.step_function, *CPU_ROUTED_FUNCTIONS):
        patched, original = _patched_functions.get((module, name), (None, None))
        if getattr(module, name, None) is not patched or _is_foreign(original):
            return False
    return True


def _patch(module: ModuleType, name: str, recurrence: Recurrence | None = None) -> None:
    original = getattr(module, name, None)
    if original is None or original is _patched_functions.get((module, name), (None, None))[0]:
        return
    wrapper = _wrap(original, module, recurrence)
    setattr(module, name, wrapper)
    _patched_functions[module, name] = (wrapper, original)


def _wrap(original: Any, module: ModuleType, recurrence: Recurrence | None) -> Callable[..., Any]:
    torch_rule = _torch_rule(original)
    names = list(inspect.signature(torch_rule).parameters)

    @functools.wraps(torch_rule)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # positional arguments stay positional: the kernels behind `original` name theirs differently
        first = args[0] if args else next(iter(kwargs.values()))
        # packed sequences need a kernel package: left to transformers, which says so
        packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        run = functools.partial(torch_rule if first.device.type == "cpu" and not packed else original, *args, **kwargs)
        bool(_thread.read_layers)  # see `announce_reading`
        if recurrence is None or packed or _thread.observer is None:
            return run()
        arguments = dict(zip(names, args, strict=False)) | kwargs
        # somebody's own rule is run as it is, like a kernel
        has_kernel = _has_kernel(recurrence, first.device) or _is_foreign(original)
        use_step_rule = has_kernel and recurrence.step_takes_blocks and not _is_foreign(original)
        step_rule = getattr(module, recurrence.step_function) if use_step_rule else None
        return _thread.observer(RecurrenceCall(recurrence, arguments, run, has_kernel, step_rule))

    return wrapper


def _wrap_mixer(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # with more by position the mixer is left alone: only it knows their order
        if _thread.mixer_observer is not None and len(args) + ("hidden_states" in kwargs) == 1:
            options = {name: x for name, x in kwargs.items() if name not in ("hidden_states", "attention_mask")}
            hidden_states = args[0] if args else kwargs["hidden_states"]
            call = MixerCall(self, hidden_states, kwargs.get("attention_mask"), options)
            output = _thread.mixer_observer(call)
            if output is not None:
                return output
        return original(self, *args, **kwargs)

    return forward


def _has_kernel(recurrence: Recurrence, device: torch.device) -> bool:
    """Whether transformers runs this recurrence by a kernel package on this device."""
    if device.type == "cpu":
        return False
    return bool(is_mamba_2_ssm_available() if recurrence is MAMBA2 else is_flash_linear_attention_available())


def _is_foreign(function: Any) -> bool:
    """Whether a function is not of transformers or a remote-code model: a profiler's wrapper, or a changed rule."""
    return inspect.isfunction(function) and not function.__globals__.get("__name__", "").startswith("transformers")


def _torch_rule(original: Any) -> Callable[..., Any]:
    """transformers' own torch implementation behind a module-level function, whatever kernel stands in front."""
    if inspect.isfunction(original):
        while hasattr(original, "__wrapped__") and not _is_foreign(original):
            original = original.__wrapped__
        return original
    # with the `kernels` package installed the "function" is a module whose `forward` calls it
    function = inspect.getclosurevars(type(original).forward).nonlocals.get("func")
    return inspect.unwrap(function) if inspect.isfunction(function) else original.forward


def _modeling_modules(model: nn.Module) -> list[ModuleType]:
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


@functools.cache
def _calls(module_class: type[nn.Module], function: str) -> bool:
    forward = inspect.unwrap(module_class.forward)
    return function in getattr(getattr(forward, "__code__", None), "co_names", ())


@functools.cache
def _recurrence_of(module_class: type[nn.Module]) -> Recurrence | None:
    return next((r for r in RECURRENCES if _calls(module_class, r.block_function)), None)  # type: ignore[arg-type]


def _is_conv_only(model: PreTrainedModel) -> bool:
    """Short-convolution hybrids (lfm2): a window of inputs, which the stock cache rolls back exactly."""
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    return "conv" in layer_types and set(layer_types) <= {"conv", "full_attention", "sliding_attention"}


def _unknown_recurrence(name: str, layer_ids: list[int]) -> str:
    where = f" in layers {layer_ids}" if layer_ids else ""
    return (
        f"{name} keeps a recurrent state{where} that ready_hf does not know how to roll back (transformers "
        f"{transformers_version}). Supported recurrences: {_supported()}. Call `generate` without a drafter, or "
        "open an issue naming this model."
    )


def _refuse_replaced_forward(name: str, layer: RecurrentLayer) -> None:
    # accelerate also replaces `forward`, but calls the original from it
    if "forward" in vars(layer.mixer) and not hasattr(layer.mixer, "_hf_hook"):
        raise UnsupportedTargetError(
            f"{name}: the forward of {type(layer.mixer).__name__} in layer {layer.layer_idx} was replaced (a "
            "whole-layer kernel from the Hub?), so its recurrence cannot be recorded. Load the model "
            "with `use_kernels=False`."
        )


def _refuse_prompt_learning(name: str, model: nn.Module) -> None:
    # while PEFT generates, the model inside prepares its inputs by the method of the wrapper
    wrapper = getattr(getattr(model, "prepare_inputs_for_generation", None), "__self__", None)
    config: Any = getattr(wrapper, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        kind = str(config.peft_type).rpartition(".")[2]
        raise UnsupportedTargetError(
            f"{name} has an adapter of PEFT's type {kind}, which puts tokens of its own into forwards, so a block of "
            "drafts is not what is fed. Call `generate` without a drafter, or use an adapter that changes weights, "
            "such as LoRA."
        )


def _supported() -> str:
    return ", ".join(recurrence.name for recurrence in RECURRENCES)
