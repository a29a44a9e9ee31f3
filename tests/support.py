"""Targets and drafters shared by the tests.

Tiny random models of every supported family, the trained fixture, scripted drafters.
"""

import copy
import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    StoppingCriteria,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation.streamers import BaseStreamer

import ready_hf
from composites import COMPOSITES
from families import CONVOLUTIONS, FAMILIES, MORE_FAMILIES, VOCAB_SIZE
from families_table import ABSENT
from ready_hf import DraftContext, ReadyCandidateGenerator, ReadyDrafterConfig, ReadyDrafterModel
from ready_hf.target import CACHE_NAME, cache_in
from ready_hf.target import cache_argument as model_cache_argument


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]  # the second only where there is one


def existing(make: Callable[[], Any]) -> Any:
    """What `make` gives; skips the test where this transformers does not have a class that it needs."""
    try:
        return make()
    except AttributeError as error:
        if "module transformers has no attribute" not in str(error):
            raise
        pytest.skip(f"{ABSENT} {transformers.__version__}: {error}")


def tiny_target(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a family, float32, with weights large enough that its logits are not flat."""
    model = _tiny_target(family, seed)
    ready_hf.ensure_patched(model)  # with a GPU package installed, stock transformers crashes on the CPU
    return model


@functools.cache
def _tiny_target(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = (FAMILIES | MORE_FAMILIES | CONVOLUTIONS)[family]()
    return with_lively_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)


def image_target(family: str, seed: int = 0) -> PreTrainedModel:
    """A random image-and-text model around a recurrent one, float32."""
    model = _image_target(family, seed)
    ready_hf.ensure_patched(model)
    return model


@functools.cache
def _image_target(family: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(COMPOSITES[family](), dtype=torch.float32)
    return with_lively_weights(model, seed)


def with_lively_weights(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Gives a model weights large enough that its logits are not flat, and no end-of-sequence token."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 - 1.0)
            elif parameter.dim() == 3 and "conv" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            elif parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        embedding = model.get_input_embeddings().weight
        embedding.copy_(torch.randn(embedding.shape, generator=generator))
    model.generation_config.eos_token_id = None  # qwen4_exp needs one in its configuration
    return model.eval()


def trained_target() -> PreTrainedModel:
    """The trained fixture, float32."""
    model = _trained_target()
    ready_hf.ensure_patched(model)
    return model


@functools.cache
def _trained_target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(ready_hf.tiny_target_path(), dtype=torch.float32).eval()


@functools.cache
def trained_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ready_hf.tiny_target_path())


def random_prompt(length: int, batch: int = 1, seed: int = 5, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(3, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def cache_of(outputs: Any) -> Any:
    """The cache of a model or `generate` output."""
    return cache_in(outputs)


def cache_argument(cache: Any) -> dict[str, Any]:
    """The cache as a keyword argument, by the name that this transformers uses."""
    return {CACHE_NAME: cache}


def states(cache: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a cache by name, cloned: recurrent and conv states, keys and values."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind in ("recurrent_states", "conv_states"):
                for i, state in getattr(layer, kind).items():
                    if state is not None:
                        found[f"{index}.{kind}.{i}"] = state.clone()
        for kind in ("keys", "values", "indexer_keys", "indexer_position_ids"):
            if isinstance(getattr(layer, kind, None), torch.Tensor) and layer.get_seq_length():
                found[f"{index}.{kind}"] = getattr(layer, kind).clone()
    return found


def fresh_states(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The states after one plain forward over `ids`."""
    with torch.no_grad():
        return states(cache_of(model(ids, use_cache=True, **kwargs)))


def worst_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest relative L2 error over all tensors of two caches."""
    assert got.keys() == want.keys(), (sorted(got), sorted(want))
    errors = []
    for name, reference in want.items():
        assert got[name].shape == reference.shape, (name, got[name].shape, reference.shape)
        value, reference = got[name].float(), reference.float()  # some windows hold token ids
        norm = reference.norm()
        errors.append(float((value - reference).norm() / norm) if norm > 0 else float(value.norm()))
    return max(errors)


class ScriptedDrafter:
    """Drafts from a given continuation, so that verification and rollback are the real ones.

    Args:
        reference (`torch.LongTensor` of shape `[B, L]`): Prompt and continuation.
        block_size (`int`): Drafts per round.
        is_right (`Callable[[int, int], bool]`): Whether the draft at `(round, position)` is the reference's token.
        check (`Callable[[DraftContext], None]`, *optional*): Looks at the context of every round.
    """

    is_ready_drafter = True
    target_layer_ids: list[int] = [0, 2]

    def __init__(
        self,
        reference: torch.Tensor,
        block_size: int = 8,
        is_right: Callable[[int, int], bool] = lambda round_, position: True,
        check: Callable[[DraftContext], None] | None = None,
    ):
        self.reference, self.block_size, self.is_right, self.check = reference, block_size, is_right, check
        self.rounds = 0

    def get_candidate_generator(self, target, input_ids, generation_config, logits_processor):
        self.rounds = 0
        return ReadyCandidateGenerator(self, target, generation_config, logits_processor)

    def draft(self, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.check is not None:
            self.check(context)
        length = context.input_ids.shape[1]
        drafts = self.reference[:, length : length + context.num_drafts].clone()
        for position in range(drafts.shape[1]):
            if not self.is_right(self.rounds, position):
                drafts[:, position] = (drafts[:, position] + 1 + self.rounds % 7) % VOCAB_SIZE
        self.rounds += 1
        return drafts, None


def oracle(reference: torch.Tensor, block_size: int = 8) -> ScriptedDrafter:
    """ORACLE: every draft is right."""
    return ScriptedDrafter(reference, block_size)


def k_right(reference: torch.Tensor, k: int, block_size: int = 8) -> ScriptedDrafter:
    """K-RIGHT: the first k drafts of every block are right, the others wrong."""
    return ScriptedDrafter(reference, block_size, lambda round_, position: position < k)


def partly_right(reference: torch.Tensor, share: float, block_size: int = 8, seed: int = 0) -> ScriptedDrafter:
    """Every draft is right with probability `share`, by a hash of round and position."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(1000, 64, generator=generator) < share
    return ScriptedDrafter(reference, block_size, lambda round_, position: bool(table[round_ % 1000, position]))


def drafter_for(target, seed=0, **options) -> ReadyDrafterModel:
    """A random drafter whose reader and sequential head do something."""
    torch.manual_seed(seed)
    options = {"mask_token_id": 1, "block_size": 6, "intermediate_size": 64, "markov_rank": 8, **options}
    drafter = ReadyDrafterModel(ReadyDrafterConfig.for_target(target, **options)).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith(("up_proj.weight", "markov_w2.weight")) and "mlp" not in name:
                parameter.normal_(std=0.3)
    return drafter


@functools.cache
def plain_ids(family: str, new_tokens: int = 96, prompt_length: int = 12) -> torch.Tensor:
    """REF: prompt and greedy continuation of a tiny target. Shared by tests: never written to."""
    prompt = random_prompt(prompt_length)
    return tiny_target(family).generate(prompt, max_new_tokens=new_tokens, do_sample=False)


class StateCheck:
    """For `ScriptedDrafter.check`: compares the committed cache with a fresh forward, in every `every`-th round.

    The forward runs on a twin of the target, so that feature hooks of the call under test do not see it.
    """

    def __init__(self, model: PreTrainedModel, every: int = 1, inputs: dict[str, torch.Tensor] | None = None):
        self.twin, self.inputs = copy.deepcopy(model), inputs or {}  # of the prompt, beside its ids: an image
        self.every, self.rounds, self.worst = every, 0, 0.0

    def __call__(self, context: DraftContext) -> None:
        if self.rounds % self.every == 0:
            kwargs = dict(self.inputs)
            if "mm_token_type_ids" in kwargs:
                new = context.input_ids.shape[1] - 1 - kwargs["mm_token_type_ids"].shape[1]
                kwargs["mm_token_type_ids"] = torch.nn.functional.pad(kwargs["mm_token_type_ids"], (0, new))
            if context.attention_mask is not None and not self.inputs:  # the positions of an image are its model's own
                mask = context.attention_mask[:, :-1]
                kwargs |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
            fresh = fresh_states(self.twin, context.input_ids[:, :-1], **kwargs)
            self.worst = max(self.worst, worst_error(states(context.cache), fresh))
        self.rounds += 1


class RecordingStreamer(BaseStreamer):
    """Keeps what it was given: `("put", ids)` and `("end",)`, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(("put", value.tolist()))

    def end(self) -> None:
        self.events.append(("end",))


class RecordingCriterion(StoppingCriteria):
    """Keeps the lengths (and numbers of scores) it was called with; stops where `stops` says so."""

    def __init__(self, stops: Callable[[torch.Tensor], torch.Tensor | bool] = lambda input_ids: False):
        self.stops = stops
        self.calls: list[tuple[int, int | None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((input_ids.shape[1], None if scores is None else len(scores)))
        return torch.as_tensor(self.stops(input_ids)).expand(input_ids.shape[0])


@contextmanager
def counting_forwards(model: torch.nn.Module) -> Iterator[list[int]]:
    """Collects the number of tokens of every forward of `model` that runs inside."""
    lengths: list[int] = []

    def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        lengths.append(-1 if ids is None else int(ids.shape[1]))

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


@functools.cache
def char_tokenizer() -> PreTrainedTokenizerFast:
    """One printable character per token of the tiny targets' vocabulary."""
    characters = [chr(code) for code in range(32, 127)] + ["\n", "<pad>"]
    assert len(characters) == VOCAB_SIZE
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", clean_up_tokenization_spaces=False)


def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor, start: int, stop: int, **kwargs: Any) -> Any:
    """A forward over tokens `start` .. `stop - 1` of `ids`, at these positions; `cache` has seen the earlier ones."""
    positions = torch.arange(start, stop).expand(ids.shape[0], -1)
    inputs = {"position_ids": positions, "use_cache": True, **model_cache_argument(model, cache), **kwargs}
    with torch.no_grad():
        return model(ids[:, start:stop], **inputs)


class FeatureCheck:
    """For `ScriptedDrafter.check`: collects the feature rows that the drafter is shown, in order."""

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {}

    def __call__(self, context: DraftContext) -> None:
        for index, features in context.features.items():
            self.rows.setdefault(index, []).append(features.clone())

    def worst(self, model: PreTrainedModel, ids: torch.Tensor, start: int = 0, **kwargs: Any) -> float:
        """Largest difference to one forward over `ids`, of which the drafter was shown a part, from `start` on."""
        with ready_hf.FeatureCapture(model, list(self.rows)) as capture, torch.no_grad():
            model(ids, **kwargs)
            want = capture.take()
        got = {index: torch.cat(rows, dim=1) for index, rows in self.rows.items()}
        shown = {index: want[index][:, start : start + rows.shape[1]] for index, rows in got.items()}
        assert all(got[index].shape == shown[index].shape for index in got)
        return max(float((got[index] - shown[index]).abs().max()) for index in got)


def contract(what: str) -> Callable[[Callable], Callable]:
    """Marks a test as a contract; its failures name the version of transformers and what no longer holds."""

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def checked(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                message = f"transformers {transformers.__version__} breaks a contract: {what}"
                raise AssertionError(f"{message} ({type(error).__name__}: {error})") from error

        return pytest.mark.contract(checked)

    return decorate


def torch_rule(function: Any) -> Callable[..., Any]:
    """transformers' torch implementation behind a function of a modeling module, whatever kernels are installed."""
    if isinstance(function, torch.nn.Module):  # the `kernels` package makes a module of it, which calls the function
        function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return inspect.unwrap(function)


def num_tensors() -> int:
    """Tensors that somebody still holds."""
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def num_hooks(model: torch.nn.Module) -> int:
    """Forward hooks on all modules. transformers leaves some of its own there once outputs have been captured."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
