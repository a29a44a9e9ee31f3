"""Times of a round, measured in real decoding at several block lengths, for `break_even`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from ready_hf.break_even import BreakEven, break_even
from ready_hf.evaluation import decode
from ready_hf.statistics import record_stats


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of a plain step, and of a round by block length.

    Args:
        plain (`float`): Of a plain step, the prefill left out.
        num_drafts (`tuple[int]`): Block lengths, in order.
        draft, verify, other (`tuple[float]`): Of a round, by block length; `other` is commit and Python.
    """

    plain: float
    num_drafts: tuple[int, ...]
    draft: tuple[float, ...]
    verify: tuple[float, ...]
    other: tuple[float, ...]

    def break_even(self, survival: Sequence[float]) -> BreakEven:
        """Speed at every block length that was measured and that `survival` reaches.

        Raises:
            ValueError: none is left.
        """
        used = [i for i, n in enumerate(self.num_drafts) if n <= len(survival)]
        draft, verify, other = ([times[i] for i in used] for times in (self.draft, self.verify, self.other))
        lengths = [self.num_drafts[i] for i in used]
        return break_even(survival, draft=draft, verify=verify, other=other, plain=self.plain, num_drafts=lengths)


def measure_round_times(
    target: PreTrainedModel,
    drafter: Any,
    inputs: Mapping[str, torch.Tensor],
    num_drafts: Sequence[int],
    max_new_tokens: int = 32,
    repeats: int = 3,
) -> RoundTimes:
    """Decodes a prompt greedily, plainly and with `num_assistant_tokens` set to every block length.

    Args:
        target (`PreTrainedModel`), drafter (`Drafter`): What is measured.
        inputs (`Mapping`): Arguments for `generate`, one prompt; its length is the context that times are of.
        num_drafts (`Sequence[int]`): Block lengths.
        max_new_tokens (`int`): Per text, at least 2.
        repeats (`int`): How often everything is measured, in turn; the medians count.

    Raises:
        ValueError: block lengths or a number of tokens or repeats that are not allowed, or a text that ends at once.
    """
    if not num_drafts or min(num_drafts) < 1:
        raise ValueError(f"`num_drafts` must be block lengths of at least 1, got {list(num_drafts)}")
    if max_new_tokens < 2:
        raise ValueError(f"`max_new_tokens` must be at least 2, got {max_new_tokens}")
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, got {repeats}")
    lengths = sorted(set(num_drafts))
    steps, rounds = [], []
    for _ in range(repeats):
        steps.append(_plain_step(target, inputs, max_new_tokens))
        rounds.append([_round(target, drafter, inputs, n, max_new_tokens) for n in lengths])
    # [repeats, lengths, phases] -> [phases, lengths]
    draft, verify, other = torch.tensor(rounds, dtype=torch.float64).median(0).values.T.tolist()
    return RoundTimes(median(steps), tuple(lengths), tuple(draft), tuple(verify), tuple(other))


def _plain_step(target: PreTrainedModel, inputs: Mapping[str, torch.Tensor], limit: int) -> float:
    prefill = decode(target, inputs, None, 0, 0, 1)
    whole = decode(target, inputs, None, 0, 0, limit)
    if len(whole.tokens) < 2:
        raise ValueError("the text ends with its first token, so there is no step to time: choose another prompt")
    return max(whole.seconds - prefill.seconds, 0.0) / (len(whole.tokens) - 1)


def _round(target: PreTrainedModel, drafter: Any, inputs: Any, n: int, limit: int) -> list[float]:
    """Seconds to draft, to verify and for the rest of one round."""
    with record_stats() as stats:  # waits for the device at every border of a phase
        found = decode(target, inputs, drafter, 0, 0, limit, num_assistant_tokens=n)
    rest = found.seconds - stats.prefill_seconds - stats.draft_seconds - stats.verify_seconds
    return [part / stats.rounds for part in (stats.draft_seconds, stats.verify_seconds, max(rest, 0.0))]
