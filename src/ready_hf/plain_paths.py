"""What plain decoding computes, to hold drafted decoding against: greedy tokens, caches and near ties.

A cache after n tokens can be computed plainly in two ways, by one forward over all of them, or by the prompt and then
token by token, as `generate` does. In exact arithmetic both are the same; how far they differ in a dtype is the
measure of what that dtype can tell apart.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from ready_hf.target import cache_argument, cache_in


FLOAT32_BOUND = 1e-5  # largest relative error of a tensor that rounding explains in float32
NUDGES = 4

Snapshot = dict[str, torch.Tensor]


@dataclass(frozen=True)
class NearTie:
    """Where greedy texts part: how close the two best tokens were.

    Args:
        position (`int`): New token, 0 is the first.
        margin (`float`): Best logit minus the second best.
        spread (`float`): Largest difference of any logit between the two plain ways to compute them.
    """

    position: int
    margin: float
    spread: float

    @property
    def is_near(self) -> bool:
        """Whether plain decoding itself might have chosen otherwise: either logit may be off by the spread."""
        return self.margin <= 2 * self.spread


class PlainPath:
    """Plain greedy decoding of one prompt.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`Mapping`): Arguments for `generate`: one sequence without padding.
        max_new_tokens (`int`): Of the text.
    """

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], max_new_tokens: int):
        self.model, self.inputs, self.max_new_tokens = model, inputs, max_new_tokens
        self.prompt_length = inputs["input_ids"].shape[1]
        output: Any = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        self.ids: torch.Tensor = output  # [1, L + N]
        self._fresh: dict[int, Snapshot] = {}
        self._stepped: dict[int, Snapshot] = {}
        self._nudged_logits: list[torch.Tensor] = []  # [N - 1, V] each, of the text after the prompt

    def fresh(self, ids: torch.Tensor) -> Snapshot:
        """The cache after one forward over `ids` `[1, n]`; kept on the CPU for prefixes of the plain text."""
        length = ids.shape[1]
        is_prefix = torch.equal(ids, self.ids[:, :length])
        if is_prefix and length in self._fresh:
            return self._fresh[length]
        with torch.no_grad():
            found = snapshot(cache_in(self.model(ids, use_cache=True)))
        if is_prefix:
            self._fresh[length] = found
        return found

    def difference(self) -> float:
        """Largest error of the caches step by step against one forward, over all prefixes."""
        worst = 0.0
        for length, cache, _ in self._steps(self.ids.shape[1] - 1):
            self._stepped[length] = snapshot(cache)
            worst = max(worst, cache_error(cache, self.fresh(self.ids[:, :length])))
        return worst

    def jumps(self) -> float:
        """Largest error of the cache of the text if its embeddings are off by as much as rounding explains.

        Layers that round their inputs to 8 bits or fewer are steps: where a number lies between two of them, a
        rounding error becomes a jump. A text may or may not meet one on the two plain ways.
        """
        ids, worst = self.ids[:, :-1], 0.0
        for seed in range(NUDGES):
            with _nudged(self.model, seed), torch.no_grad():
                output = self.model(ids, use_cache=True)
            self._nudged_logits.append(output.logits[0, self.prompt_length - 1 :].float())
            worst = max(worst, cache_error(cache_in(output), self.fresh(ids)))
        return worst

    def error(self, ids: torch.Tensor, cache: Cache) -> float:
        """Error of a cache that has seen `ids` `[1, n]`, against the nearer of the two plain ways.

        They may be far apart: kernels of GPUs multiply a prompt in tf32, and single tokens in float32. Step by step is
        known after `difference`, for prefixes of the plain text.
        """
        error, length = cache_error(cache, self.fresh(ids)), ids.shape[1]
        if length in self._stepped and torch.equal(ids, self.ids[:, :length]):
            error = min(error, cache_error(cache, self._stepped[length]))
        return error

    def tie(self, position: int) -> NearTie:
        """Margin and spread at new token `position`, which must be one of the text."""
        length = self.prompt_length + position
        *_, (_, _, logits) = self._steps(length)
        with torch.no_grad():
            whole = self.model(self.ids[:, :length]).logits[0, -1].float()
        best = logits.topk(2).values
        others = [whole, *(nudged[position] for nudged in self._nudged_logits)]
        return NearTie(position, float(best[0] - best[1]), max(float((logits - x).abs().max()) for x in others))

    @torch.no_grad()
    def _steps(self, stop: int) -> Any:
        """Yields length, cache and last logits `[V]` after the prompt and after every further token up to `stop`."""
        cache, start = None, 0
        for length in range(self.prompt_length, stop + 1):
            positions = torch.arange(start, length, device=self.ids.device)[None]
            past = cache_argument(self.model, cache)
            output = self.model(self.ids[:, start:length], position_ids=positions, use_cache=True, **past)
            cache, start = cache_in(output), length
            yield length, cache, output.logits[0, -1].float()


@contextmanager
def _nudged(model: PreTrainedModel, seed: int) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)

    def nudge(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=generator).to(output.device)
        return (output * (1 + max(FLOAT32_BOUND, torch.finfo(output.dtype).eps) * noise)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()


def snapshot(cache: Cache) -> Snapshot:
    """Every tensor of a cache on the CPU, by layer and name: recurrent states, convolution windows, keys, values."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            for kind in ("recurrent_states", "conv_states"):
                for number, state in getattr(layer, kind).items():
                    if state is not None:
                        found[f"layer {index}, {kind} {number}"] = state.to("cpu", copy=True)
        for kind in ("keys", "values"):
            if isinstance(getattr(layer, kind, None), torch.Tensor) and layer.get_seq_length():
                name = f"layer {index}, {'sliding ' if getattr(layer, 'is_sliding', False) else ''}{kind}"
                found[name] = getattr(layer, kind).to("cpu", copy=True)
    return found


def cache_error(cache: Cache, reference: Snapshot) -> float:
    """Largest relative L2 error of any tensor of a cache; infinite if it holds others than the reference."""
    found = snapshot(cache)
    if found.keys() != reference.keys():
        return math.inf
    return max((_error(name, found[name], reference[name]) for name in reference), default=0.0)


def _error(name: str, found: torch.Tensor, reference: torch.Tensor) -> float:
    if "sliding" in name:  # a cache that can be cut back keeps more than the window
        length = min(found.shape[-2], reference.shape[-2])
        found, reference = found[..., -length:, :], reference[..., -length:, :]
    if found.shape != reference.shape:
        return math.inf
    found, reference = found.float(), reference.float()
    norm = reference.norm()
    error = float(found.norm()) if norm == 0 else float((found - reference).norm() / norm)
    return math.inf if math.isnan(error) else error
