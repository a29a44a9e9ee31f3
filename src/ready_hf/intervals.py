"""Bootstrap intervals of ratios of totals, over prompts, by task and as the mean of the tasks.

Figures such as tokens per forward are ratios of totals (tokens of all prompts over forwards of all prompts), so the
bootstrap draws prompts and adds up again. Prompts are drawn within their task: a task keeps its size. Quantities of
two drafters on one prompt are drawn together (paired), which takes the prompts' own spread out of their difference.

Letters: P prompts, C quantities per prompt, R resamples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


MACRO = "macro mean"  # row of the mean over tasks
Statistic = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval.

    Args:
        value (`float`): Of the prompts as they are.
        low, high (`float`): 2.5 % and 97.5 % percentiles of the bootstrap; NaN if a task has a single prompt.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def is_above_zero(self) -> bool:
        """Whether the whole interval is."""
        return self.low > 0

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which has no NaN: `None` in its place."""
        return {name: finite(getattr(self, name)) for name in ("value", "low", "high")}

    def text(self, form: str = ".2f") -> str:
        """`1.23 [1.10, 1.35]`; `n/a` without a value, the value alone without an interval."""
        if math.isnan(self.value):
            return "n/a"
        if math.isnan(self.low):
            return f"{self.value:{form}}"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def bootstrap(
    quantities: Sequence[Sequence[float]],
    tasks: Sequence[str],
    statistic: Statistic,
    *,
    seed: int = 0,
    resamples: int = 2000,
) -> dict[str, Estimate]:
    """A statistic of totals, by task and as the unweighted mean of the tasks (`MACRO`).

    Args:
        quantities (`Sequence` of P `Sequence` of C `float`): What is added up, per prompt.
        tasks (`Sequence[str]`): Task of every prompt.
        statistic (`Callable`): Totals `[..., C]` to figures `[...]`; NaN where it has no value.
        seed (`int`): Of the bootstrap: the same prompts are drawn for every statistic.
        resamples (`int`): R.

    Returns:
        `dict`: an `Estimate` by task, in order of appearance, and `MACRO` at the end.

    Raises:
        ValueError: no prompts, lists of different lengths, a task named like the mean, or fewer than one resample.
    """
    if not quantities or len(quantities) != len(tasks):
        raise ValueError(
            f"need one task per prompt, at least one prompt; got {len(quantities)} and {len(tasks)} tasks"
        )
    if MACRO in tasks:
        raise ValueError(f"a task must not be called {MACRO!r}, which is the row of the mean over tasks")
    if resamples < 1:
        raise ValueError(f"`resamples` must be at least 1, got {resamples}")
    table = torch.tensor(quantities, dtype=torch.float64)  # [P, C]
    generator = torch.Generator().manual_seed(seed)
    found, values, draws = {}, [], []
    for task in dict.fromkeys(tasks):
        rows = table[[i for i, name in enumerate(tasks) if name == task]]
        chosen = torch.randint(len(rows), (resamples, len(rows)), generator=generator)
        value = statistic(rows.sum(0)[None])[0]
        # the bootstrap of a single prompt would be a point
        drawn = statistic(_totals(rows, chosen)) if len(rows) > 1 else torch.full((resamples,), math.nan)
        found[task] = _estimate(value, drawn)
        values.append(value)
        draws.append(drawn)
    found[MACRO] = _estimate(torch.stack(values).mean(), torch.stack(draws).mean(0))
    return found


def ratio(numerator: int, denominator: int) -> Statistic:
    """Total of one quantity over that of another; NaN where the latter is 0."""

    def statistic(totals: torch.Tensor) -> torch.Tensor:
        below = totals[..., denominator]
        return torch.where(below > 0, totals[..., numerator] / below, math.nan)

    return statistic


def finite(value: float) -> float | None:
    """The value, `None` for NaN and infinities."""
    return value if math.isfinite(value) else None


def _totals(rows: torch.Tensor, chosen: torch.Tensor, most: int = 4_000_000) -> torch.Tensor:
    """Totals `[R, C]` of the chosen `[R, n]` of n rows `[n, C]`, in parts that fit into memory."""
    step = max(1, most // chosen.shape[1])
    return torch.cat([rows[part].sum(1) for part in chosen.split(step)])


def _estimate(value: torch.Tensor, draws: torch.Tensor) -> Estimate:
    draws = draws.to(torch.float64)
    draws = draws[draws.isfinite()]
    if not len(draws):
        return Estimate(float(value))
    low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(value), low, high)
