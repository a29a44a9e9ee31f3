"""Where drafts come from: what a drafter is, and the candidate generators that the decoding loop drives.

A *drafter* is any object with the marker `is_ready_drafter = True` and a method `get_candidate_generator` that returns
a transformers `CandidateGenerator`. A *block drafter* (ReaDy and its relatives) additionally reads the target:
`ReadyCandidateGenerator` hands it the committed cache, whose recurrent states have consumed every token before the
newest one and nothing of any rejected draft, and the target features of every newly committed position.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

from ready_hf.compiled_code import is_compiled, without_compiled_code
from ready_hf.target import cache_in, checks_reading
from ready_hf.target_features import FeatureCapture


SAMPLING_WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
)


@runtime_checkable
class Drafter(Protocol):
    """What `assistant_model=` and `ready_hf.speculate` accept."""

    is_ready_drafter: bool

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ) -> CandidateGenerator:
        """A new generator for one `generate` call.

        Args:
            target (`PreTrainedModel`): The model that verifies.
            input_ids (`torch.LongTensor` of shape `[B, L]`): The prompt.
            generation_config (`GenerationConfig`): The prepared configuration of the call.
            logits_processor (`LogitsProcessorList`): The target's processors; a drafter may use `sampling_warpers` of
                it, no more.
        """
        ...


def is_drafter(candidate: object) -> bool:
    """Whether an object carries the marker; by attribute, since a remote-code copy of a class is another class.

    Raises:
        TypeError: the marker is there, but it is a class or has no method that gives a generator.
    """
    if getattr(candidate, "is_ready_drafter", False) is not True:
        return False
    if isinstance(candidate, type) or not callable(getattr(candidate, "get_candidate_generator", None)):
        raise TypeError(
            f"{candidate!r} has the marker of a ready_hf drafter but cannot draft: pass an instance that has a method "
            "`get_candidate_generator`"
        )
    return True


def sampling_warpers(logits_processor: LogitsProcessorList) -> LogitsProcessorList:
    """The processors a drafter applies before it samples: temperature, top-k, top-p and the like.

    Others (penalties, constraints, users' own) run on the target side only: they may keep state per call, and any
    draft distribution is right.
    """
    return LogitsProcessorList(p for p in logits_processor if type(p) in SAMPLING_WARPERS)


def choose_drafts(
    logits: torch.Tensor, do_sample: bool, warpers: LogitsProcessorList
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turns draft logits into tokens and the logits they were drawn from.

    Args:
        logits (`torch.Tensor` of shape `[B, V]`): Draft logits of one position, any float dtype.
        do_sample (`bool`): Sample, or take the largest.
        warpers (`LogitsProcessorList`): From `sampling_warpers`.

    Returns:
        `tuple`: tokens `[B]`, and the *warped* logits `[B, V]` in float32 when sampling, `None` when not. The verifier
        compares these with the target's processed logits; unwarped ones would bias the result.
    """
    if not do_sample:
        return logits.argmax(-1), None
    warped = warpers(None, logits.float()) if warpers else logits.float()
    return torch.multinomial(warped.softmax(-1), 1).squeeze(1), warped


def own_positions(position_ids: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
    """One position per token, `[B, L]`, of a target that has one or several.

    Args:
        position_ids (`torch.LongTensor` of shape `[B, L]`, or `[1, B, L]`, `[3, B, L]`, `[4, B, L]`, *optional*): As
            `generate` keeps them. Of four rows the first only counts tokens; the others are time, height and width,
            alike for text. The largest counts, since text behind an image goes on from there.
        num_rows (`int`): B.
    """
    if position_ids is not None and position_ids.dim() == 3:
        position_ids = position_ids[-3:].amax(0)
    return None if position_ids is None else position_ids.expand(num_rows, -1)


@dataclass
class DraftContext:
    """What a block drafter may read in one round.

    Args:
        input_ids (`torch.LongTensor` of shape `[B, L]`): All tokens so far. The last one is the anchor: chosen, not
            yet fed.
        cache (`Cache`): The committed cache of the target: it has seen exactly the first L - 1 tokens. Read only.
        features (`dict` of `int` to `torch.Tensor` of shape `[B, n, hidden]`): Outputs of the `target_layer_ids`
            layers at the n positions committed since the last round (first round: of the prompt), ending with position
            L - 2.
        attention_mask (`torch.LongTensor` of shape `[B, L]`, *optional*): 0 for padding; `None` without padding.
        num_drafts (`int`): Most drafts that can be used this round.
        do_sample (`bool`): Whether drafts are to be sampled.
        warpers (`LogitsProcessorList`): What to apply before sampling.
        position_ids (`torch.LongTensor` of shape `[B, L]`, *optional*): The target's own positions: behind an image
            they go on from its largest, not from its number of tokens. `None` if `generate` leaves them to the model.
    """

    input_ids: torch.Tensor
    cache: Cache
    features: dict[int, torch.Tensor]
    attention_mask: torch.Tensor | None
    num_drafts: int
    do_sample: bool
    warpers: LogitsProcessorList
    position_ids: torch.Tensor | None = None


class BlockDrafter(Protocol):
    """What `ReadyCandidateGenerator` drives."""

    block_size: int
    target_layer_ids: list[int]

    def draft(self, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts one block.

        Returns:
            `tuple`: tokens `[B, n]`, n <= `context.num_drafts`; the warped logits `[B, n, V]` they were sampled from,
            or `None` for drafts that were not sampled.
        """
        ...


class ReadyCandidateGenerator(CandidateGenerator):
    """Drives a block drafter and exposes the target's committed cache and features to it.

    Args:
        drafter (`BlockDrafter`): Proposes a block per round.
        target (`PreTrainedModel`): The model that verifies; its `drafter.target_layer_ids` layers are read by hooks
            until `close`.
        generation_config (`GenerationConfig`): Prepared configuration of the call.
        logits_processor (`LogitsProcessorList`): The target's processors.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(
        self,
        drafter: BlockDrafter,
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ):
        self.drafter = drafter
        self.most_drafts = drafter.block_size
        self.do_sample = bool(generation_config.do_sample)
        self.warpers = sampling_warpers(logits_processor)
        self._features: list[dict[int, torch.Tensor]] = []
        self._is_first_round = True
        ids = drafter.target_layer_ids
        self._capture = FeatureCapture(target, ids, attach=False) if ids else None
        # compiled code does not look for hooks by itself
        self._needs_eager = self._capture is not None and is_compiled(target) and not checks_reading(target)

    def get_candidates(
        self, input_ids: torch.LongTensor, *, model_kwargs: dict[str, Any], num_drafts: int, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts at most `num_drafts` tokens after the last one; see `CandidateGenerator.get_candidates`."""
        if self._is_first_round:
            self._collect(None)
        context = DraftContext(
            input_ids=input_ids,
            cache=cache_in(model_kwargs),
            features=self._taken_features(),
            attention_mask=model_kwargs.get("attention_mask"),
            num_drafts=min(self.drafter.block_size, num_drafts),
            do_sample=self.do_sample,
            warpers=self.warpers,
            position_ids=own_positions(model_kwargs.get("position_ids"), input_ids.shape[0]),
        )
        drafts, logits = self.drafter.draft(context)
        return torch.cat([input_ids, drafts], dim=1), logits

    @contextmanager
    def reading_target(self) -> Iterator[None]:
        """The loop's own forwards run inside; those of a processor, or of the drafter itself, are not captured."""
        self._set_active(True)
        try:
            with without_compiled_code() if self._needs_eager else nullcontext():
                yield
        finally:
            self._set_active(False)

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Keeps the features of the anchor and of the `num_matches` accepted drafts of the last block."""
        self._collect(num_matches + 1)

    def close(self) -> None:
        """Removes the hooks."""
        if self._capture is not None:
            self._capture.close()

    def _set_active(self, is_active: bool) -> None:
        if self._capture is not None:
            if is_active:  # the loop's first forward: it is sure to call `close` by now
                self._capture.attach()
            self._capture.is_active = is_active

    def _collect(self, length: int | None) -> None:
        self._is_first_round = False
        if self._capture is None:
            return
        features = self._capture.take(length)
        missing = sorted(set(self.drafter.target_layer_ids) - features.keys())
        if missing:
            raise RuntimeError(
                f"the target's last forward gave no outputs of layers {missing}, which the drafter reads: does "
                "compiled code run that knows no hooks? Call `torch.compiler.reset()`, or do not compile the target"
            )
        self._features.append(features)

    def _taken_features(self) -> dict[int, torch.Tensor]:
        taken, self._features = self._features, []
        return {i: torch.cat([features[i] for features in taken], dim=1) for i in taken[0]} if taken else {}


class PromptLookupDrafter:
    """Drafts what followed the last n-gram earlier in the text; no training, good for editing and summarising the
    prompt.

    Args:
        num_tokens (`int`): Drafts per round.
        max_matching_ngram_size (`int`): Longest n-gram to look for.

    Raises:
        ValueError: a size below 1, or (when used) more than one sequence.
    """

    is_ready_drafter = True

    def __init__(self, num_tokens: int = 10, max_matching_ngram_size: int = 3):
        for name, value in (("num_tokens", num_tokens), ("max_matching_ngram_size", max_matching_ngram_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}")
        self.num_tokens = num_tokens
        self.max_matching_ngram_size = max_matching_ngram_size

    @property
    def config(self) -> Any:
        """Read by pipelines, which compare the models they are built with; lookup is no model.

        Raises:
            TypeError: always, saying how to use the drafter in a pipeline.
        """
        raise TypeError("pass prompt lookup to the call of a pipeline: `pipe(text, assistant_model=drafter)`")

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ) -> CandidateGenerator:
        """transformers' own generator, without the processors: these run on the target side only."""
        if input_ids.shape[0] > 1:
            raise ValueError(
                f"prompt lookup drafts for one sequence at a time, got a batch of {input_ids.shape[0]}: call "
                "`generate` once per prompt, or without a drafter"
            )
        return PromptLookupCandidateGenerator(
            eos_token_id=generation_config._eos_token_tensor,
            num_output_tokens=self.num_tokens,
            max_matching_ngram_size=self.max_matching_ngram_size,
            max_length=generation_config.max_length,
        )
