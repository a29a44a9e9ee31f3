"""Are a drafter's confidences right, and which threshold pays? From what it predicted and what became of it.

The confidence head predicts c_k = P(draft k is accepted | all before it are); the product c_1 ... c_k is the
probability that draft k *survives*, which `confidence_threshold` cuts a block by. Asked here, by position:

- reliability: mean confidence against the share accepted, in bins; ECE is their mean distance weighted by the counts;
- AUC: the probability that an accepted draft has a higher confidence than a rejected one;
- one temperature T_k per position, so that sigmoid(logit / T_k) is right, fitted from left to right: T_k makes the
  binary cross entropy of "draft k survives" smallest with the temperatures before it fixed, so that the products fit.

Letters: R rounds, G positions of the block.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


COLDEST, HOTTEST = 0.05, 20.0  # temperatures that are tried


@dataclass(frozen=True)
class ConfidenceRecords:
    """What was predicted in every round, and what became of it.

    Args:
        logits (`torch.Tensor` of shape `[R, G]`): Logits of the confidences, before any temperature; NaN where nothing
            was drafted.
        accepted (`torch.LongTensor` of shape `[R]`): Drafts accepted.
        ended (`torch.BoolTensor` of shape `[R]`): Whether the text ended with an accepted draft: those behind it were
            not judged.

    Raises:
        ValueError: shapes that do not fit, or more drafts accepted than there are.
    """

    logits: torch.Tensor
    accepted: torch.Tensor
    ended: torch.Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.logits.shape)
        if len(shape) != 2 or tuple(self.accepted.shape) != shape[:1] or tuple(self.ended.shape) != shape[:1]:
            raise ValueError(
                f"`logits` must be [R, G], `accepted` and `ended` [R]; got {shape}, {tuple(self.accepted.shape)} and "
                f"{tuple(self.ended.shape)}"
            )
        if bool((self.accepted > self.num_drafts).any()) or bool((self.accepted < 0).any()):
            raise ValueError("`accepted` must be from 0 to the number of drafts of the round")

    @property
    def num_drafts(self) -> torch.Tensor:
        """Drafts of every round, `[R]`: positions before the first NaN."""
        return (~self.logits.isnan()).long().cumprod(1).sum(1)

    def judged(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[n]` at position k (0 is the first) of rounds that got there, and whether it was accepted `[n]`."""
        reached = (self.num_drafts > k) & ((self.accepted > k) | ((self.accepted == k) & ~self.ended))
        return self.logits[reached, k].double(), self.accepted[reached] > k

    def survived(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[n, k + 1]` of rounds with a draft at position k, and whether it survived `[n]`."""
        known = (self.num_drafts > k) & ((self.accepted > k) | ~self.ended)
        return self.logits[known, : k + 1].double(), self.accepted[known] > k


@dataclass(frozen=True)
class Bin:
    """A bin of a reliability diagram: its borders, how many drafts, their mean confidence, the share accepted."""

    low: float
    high: float
    count: int
    confidence: float
    accepted: float


@dataclass(frozen=True)
class PositionCalibration:
    """One position of the block.

    Args:
        position (`int`): 1 is the first.
        count (`int`): Drafts that were judged.
        ece (`float`): Expected calibration error; NaN without drafts.
        auc (`float`): NaN unless some were accepted and some rejected.
        bins (`tuple[Bin]`): The diagram, bins without drafts left out.
    """

    position: int
    count: int
    ece: float
    auc: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class ThresholdPoint:
    """One threshold: drafts verified, accepted and wasted per round, and the tokens of a round.

    Drafts do not depend on where a block is cut, so the same rounds are looked at for every threshold; with another
    threshold, decoding would start its rounds elsewhere.
    """

    threshold: float
    drafted: float
    accepted: float
    wasted: float
    tokens: float


def reliability(confidences: torch.Tensor, accepted: torch.Tensor, num_bins: int = 10) -> list[Bin]:
    """A reliability diagram with bins of equal width, those without drafts left out.

    Args:
        confidences (`torch.Tensor` of shape `[n]`): From 0 to 1.
        accepted (`torch.BoolTensor` of shape `[n]`): What became of each.
        num_bins (`int`): Bins from 0 to 1.

    Raises:
        ValueError: fewer than one bin, tensors of different shapes, or confidences outside of 0 to 1.
    """
    if num_bins < 1:
        raise ValueError(f"`num_bins` must be at least 1, got {num_bins}")
    if confidences.shape != accepted.shape or confidences.dim() != 1:
        raise ValueError(f"need two lists of one length, got {tuple(confidences.shape)} and {tuple(accepted.shape)}")
    if not bool(((confidences >= 0) & (confidences <= 1)).all()):
        raise ValueError("`confidences` must be from 0 to 1")
    index = (confidences * num_bins).long().clamp_max(num_bins - 1)
    found = []
    for i in range(num_bins):
        members = index == i
        count = int(members.sum())
        if count:
            mean, share = float(confidences[members].double().mean()), float(accepted[members].double().mean())
            found.append(Bin(i / num_bins, (i + 1) / num_bins, count, mean, share))
    return found


def calibration_error(bins: Sequence[Bin]) -> float:
    """ECE: mean distance of confidence and share accepted, weighted by the counts; NaN without drafts."""
    total = sum(entry.count for entry in bins)
    if not total:
        return math.nan
    return sum(entry.count * abs(entry.confidence - entry.accepted) for entry in bins) / total


def auc(scores: torch.Tensor, accepted: torch.Tensor) -> float:
    """P(score of an accepted draft > that of a rejected one), ties count half; NaN if there is only one kind."""
    positive, negative = int(accepted.sum()), int((~accepted).sum())
    if not positive or not negative:
        return math.nan
    _, index, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0).double()[index]  # from 1; equal scores share their mean rank
    return float((ranks[accepted].sum() - positive * (positive + 1) / 2) / (positive * negative))


def calibration(
    records: ConfidenceRecords, temperatures: Sequence[float] | None = None, num_bins: int = 10
) -> list[PositionCalibration]:
    """Reliability, ECE and AUC by position.

    Args:
        records (`ConfidenceRecords`): What was predicted, and what became of it.
        temperatures (`Sequence[float]` of length G, *optional*): What logits are divided by; default: 1.
        num_bins (`int`): Of the diagrams.
    """
    scales = _checked(temperatures, records.logits.shape[1])
    found = []
    for k, scale in enumerate(scales):
        logits, accepted = records.judged(k)
        confidences = torch.sigmoid(logits / scale)
        bins = reliability(confidences, accepted, num_bins)
        found.append(
            PositionCalibration(k + 1, len(logits), calibration_error(bins), auc(logits, accepted), tuple(bins))
        )
    return found


def fit_temperatures(records: ConfidenceRecords) -> list[float]:
    """One temperature per position, from left to right; see the module docstring.

    A position without drafts, or where all survived or none, keeps 1: its best temperature would be a limit.

    Args:
        records (`ConfidenceRecords`): Of prompts that are not used to judge the result.

    Raises:
        ValueError: no rounds.
    """
    if not len(records.logits):
        raise ValueError("there are no rounds to fit temperatures to: decode prompts that are drafted for")
    found: list[float] = []
    for k in range(records.logits.shape[1]):
        logits, survived = records.survived(k)
        if survived.all() or not survived.any():  # also without rounds
            found.append(1.0)
            continue
        before = torch.nn.functional.logsigmoid(logits[:, :k] / torch.tensor(found, dtype=torch.float64)).sum(1)
        found.append(_smallest(functools.partial(_cross_entropy, before, logits[:, k], survived)))
    return found


def threshold_sweep(
    records: ConfidenceRecords, thresholds: Sequence[float], temperatures: Sequence[float] | None = None
) -> list[ThresholdPoint]:
    """Accepted against wasted drafts for every `confidence_threshold`.

    Args:
        records (`ConfidenceRecords`): Of blocks that were not cut.
        thresholds (`Sequence[float]`): Each in [0, 1).
        temperatures (`Sequence[float]` of length G, *optional*): As for `calibration`.

    Raises:
        ValueError: a threshold that is not allowed, or no rounds.
    """
    if not all(0 <= threshold < 1 for threshold in thresholds):
        raise ValueError(f"`thresholds` must be in [0, 1), got {list(thresholds)}")
    if not len(records.logits):
        raise ValueError("there are no rounds to look at")
    scales = torch.tensor(_checked(temperatures, records.logits.shape[1]), dtype=torch.float64)
    survival = torch.sigmoid(records.logits.double() / scales).cumprod(1)  # [R, G]
    found = []
    for threshold in thresholds:
        kept = (survival >= threshold).long().cumprod(1).sum(1)  # NaN is cut
        accepted = torch.minimum(records.accepted, kept)
        drafted, mean = float(kept.double().mean()), float(accepted.double().mean())
        # a text that ended with a draft got no token after it
        tokens = mean + float((~(records.ended & (kept >= records.accepted))).double().mean())
        found.append(ThresholdPoint(threshold, drafted, mean, drafted - mean, tokens))
    return found


def set_temperatures(drafter: Any, temperatures: Sequence[float] | None) -> None:
    """Makes a drafter use temperatures from now on; `save_pretrained` saves them with its configuration.

    Raises:
        ValueError: the drafter has no confidence head, or they are not one positive number per position; it is left
        as it was.
    """
    before = drafter.config.confidence_temperatures
    drafter.config.confidence_temperatures = None if temperatures is None else [float(t) for t in temperatures]
    try:
        drafter.config.validate_architecture()
    except ValueError:
        drafter.config.confidence_temperatures = before
        raise


def _checked(temperatures: Sequence[float] | None, size: int) -> list[float]:
    scales = [1.0] * size if temperatures is None else [float(t) for t in temperatures]
    if len(scales) != size or not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise ValueError(f"`temperatures` must be {size} positive numbers, got {scales}")
    return scales


def _cross_entropy(before: torch.Tensor, logits: torch.Tensor, survived: torch.Tensor, temperature: float) -> float:
    """Binary cross entropy of survival with probability exp(before) * sigmoid(logits / temperature)."""
    log_p = before + torch.nn.functional.logsigmoid(logits / temperature)
    log_not = torch.log((-torch.expm1(log_p)).clamp_min(torch.finfo(torch.float64).tiny))
    return float(-torch.where(survived, log_p, log_not).mean())


def _smallest(loss: Callable[[float], float], points: int = 121, steps: int = 60) -> float:
    """Temperature of the smallest loss: on a grid of logarithms, then by golden section around the best point."""
    low, high = math.log(COLDEST), math.log(HOTTEST)
    grid = [low + (high - low) * i / (points - 1) for i in range(points)]
    best = min(range(points), key=lambda i: loss(math.exp(grid[i])))
    left, right = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(steps):
        a, b = right - golden * (right - left), left + golden * (right - left)
        if loss(math.exp(a)) <= loss(math.exp(b)):
            right = b
        else:
            left = a
    return math.exp((left + right) / 2)
