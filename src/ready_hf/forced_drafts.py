"""Drafters for checks: drafts right up to a chosen position, and a look at the committed cache of any drafter."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator

from ready_hf.candidates import DraftContext, Drafter, ReadyCandidateGenerator
from ready_hf.target import cache_in


CacheCheck = Callable[[torch.Tensor, Cache], None]


class ForcedDrafter:
    """Drafts a known continuation; in every block one draft is wrong, so that verification rejects just there.

    The drafts behind the wrong one are right again: what they leave in a state must go, too.

    Args:
        reference (`torch.LongTensor` of shape `[1, L]`): Prompt and continuation.
        block_size (`int`): Drafts per round.
        num_right (`int`): Right drafts before the wrong one; `block_size` for no wrong one.
        vocab_size (`int`): Wrong drafts are other ids below it.
    """

    is_ready_drafter = True
    target_layer_ids: list[int] = []

    def __init__(self, reference: torch.Tensor, block_size: int, num_right: int, vocab_size: int):
        self.reference, self.block_size = reference, block_size
        self.num_right, self.vocab_size = num_right, vocab_size
        self._rounds = 0

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ) -> CandidateGenerator:
        """See `ready_hf.Drafter`."""
        return ReadyCandidateGenerator(self, target, generation_config, logits_processor)

    def draft(self, context: DraftContext) -> tuple[torch.Tensor, None]:
        """See `ready_hf.candidates.BlockDrafter`."""
        length = context.input_ids.shape[1]
        drafts = self.reference[:, length : length + context.num_drafts].clone()
        if self.num_right < drafts.shape[1]:
            offset = 1 + self._rounds % min(7, self.vocab_size - 1)
            drafts[:, self.num_right] = (drafts[:, self.num_right] + offset) % self.vocab_size
        self._rounds += 1
        return drafts, None


class ObservedDrafter:
    """A drafter whose committed cache is shown to a check in every round.

    Args:
        drafter (`Drafter`): The drafter.
        check (`Callable[[torch.LongTensor, Cache], None]`): Gets the tokens that the cache has seen `[1, n]`, and the
            cache.
    """

    is_ready_drafter = True

    def __init__(self, drafter: Drafter, check: CacheCheck):
        self.drafter, self.check = drafter, check

    def get_candidate_generator(self, *args: Any, **kwargs: Any) -> CandidateGenerator:
        """See `ready_hf.Drafter`."""
        return _ObservedGenerator(self.drafter.get_candidate_generator(*args, **kwargs), self.check)


class _ObservedGenerator(CandidateGenerator):
    requires_model_outputs = True

    def __init__(self, inner: CandidateGenerator, check: CacheCheck):
        self.inner, self.check = inner, check
        self.model_kwargs_overrides = getattr(inner, "model_kwargs_overrides", {})

    def __getattr__(self, name: str) -> Any:  # `close`, `reading_target` and the like, where the generator has them
        return getattr(self.__dict__["inner"], name)

    def get_candidates(self, input_ids: Any, **context: Any) -> Any:
        self.check(input_ids[:, :-1], cache_in(context["model_kwargs"]))
        return self.inner.get_candidates(input_ids, **(context if self.inner.requires_model_outputs else {}))

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> Any:
        return self.inner.update_candidate_strategy(input_ids, scores, num_matches)
