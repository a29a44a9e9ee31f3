"""Collects what a drafter's confidence head predicts in real decoding, and what becomes of the drafts.

records = collect_confidences(target, drafter, prompts)
set_temperatures(drafter, fit_temperatures(records))
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ready_hf.calibration import ConfidenceRecords
from ready_hf.candidates import DraftContext
from ready_hf.drafting import DraftingMixin, DraftSession
from ready_hf.evaluation import decode
from ready_hf.ways import NAMES


class _ConfidenceSession(DraftSession):
    """A session that never cuts a block, and writes down the logits `[n]` of the confidences of every block."""

    def __init__(self, drafter: Any, target: PreTrainedModel, sink: list[torch.Tensor]):
        super().__init__(drafter, target)
        self._threshold, self._sink = 0.0, sink

    def _tokens(
        self, hidden_states: torch.Tensor, logits: torch.Tensor, context: DraftContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        tokens, warped = super()._tokens(hidden_states, logits, context)
        count = tokens.shape[1]
        if count:
            previous = torch.cat([context.input_ids[:, -1:], tokens[:, :-1]], dim=1).to(hidden_states.device)
            found = self._drafter.confidence_logits(hidden_states[:, :count], self.known(previous))
            self._sink.append(found[0].cpu())
        return tokens, warped


class _ConfidenceDrafter(DraftingMixin):
    """A ReaDy drafter for `assistant_model=`, with a `_ConfidenceSession` in each call."""

    def __init__(self, drafter: Any):
        self.drafter, self.config = drafter, drafter.config
        self.sink: list[torch.Tensor] = []

    def make_session(self, target: PreTrainedModel) -> DraftSession:
        return _ConfidenceSession(self.drafter, target, self.sink)


def collect_confidences(
    target: PreTrainedModel,
    drafter: Any,
    prompts: Sequence[Mapping[str, torch.Tensor]],
    *,
    temperature: int = 0,
    max_new_tokens: int = 128,
    seed: int = 0,
) -> ConfidenceRecords:
    """Decodes prompts with whole blocks, whatever the drafter's threshold.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`ReadyDrafterModel`): One with a confidence head.
        prompts (`Sequence`): Arguments for `generate`, each with one prompt.
        temperature (`int`): Of the decoding, 0 or 1; a drafter is calibrated for one of them.
        max_new_tokens (`int`): Per text.
        seed (`int`): First of the seeds of the samples.

    Raises:
        TypeError: not a drafter.
        ValueError: no confidence head, no prompts, a batch, or an option that is not allowed.
    """
    if not isinstance(drafter, DraftingMixin):
        raise TypeError(
            f"expected a ReaDy drafter, got {type(drafter).__name__}: the order is target, drafter, prompts"
        )
    if not drafter.config.enable_confidence_head:
        raise ValueError(
            "this drafter has no confidence head (`enable_confidence_head=False`), so nothing to calibrate"
        )
    if not prompts or any("input_ids" not in x or x["input_ids"].shape[0] != 1 for x in prompts):
        raise ValueError(f"need prompts of one sequence each, as dicts with `input_ids`; got {len(prompts)}")
    if temperature not in NAMES:
        raise ValueError(f"`temperature` must be 0 or 1, got {temperature}")
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}")
    wrapped, rounds = _ConfidenceDrafter(drafter), []
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for index, inputs in enumerate(tqdm(prompts, desc="confidences", leave=False, disable=None)):
            found = decode(target, inputs, wrapped, temperature, seed + 1000 * index, max_new_tokens)
            rounds += [entry for entry in found.log if entry.num_drafts]
    logits = torch.full((len(rounds), drafter.config.block_size), torch.nan)
    for row, values in zip(logits, wrapped.sink, strict=True):
        row[: len(values)] = values
    accepted = torch.tensor([len(entry.accepted) for entry in rounds], dtype=torch.long)
    ended = torch.tensor([entry.tokens == len(entry.accepted) for entry in rounds], dtype=torch.bool)
    return ConfidenceRecords(logits, accepted, ended)
