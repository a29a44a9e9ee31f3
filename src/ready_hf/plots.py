"""Plots of what `record_stats` has counted. They need matplotlib, which only the extra `plot` installs.

A plot goes into the axes it is given, or into new ones, and returns them:

    axes = plot_acceptance({"ReaDy": stats})
    axes.figure.savefig("acceptance.png")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ready_hf.statistics import DecodingStats


def require_matplotlib() -> None:
    """Says what to install if matplotlib is missing.

    Raises:
        ImportError: naming the extra.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "plots need matplotlib, which is not installed: it is in the extra `plot`, pip install 'ready_hf[plot]'"
        ) from None


def plot_acceptance(stats_by_name: Mapping[str, DecodingStats], ax: Any = None) -> Any:
    """How often the 1st, 2nd, ... draft of a block was accepted, one line per drafter.

    Args:
        stats_by_name (`Mapping[str, DecodingStats]`): What the legend says, and the counts.
        ax (`matplotlib.axes.Axes`, *optional*): Where to draw; default: new axes.

    Returns:
        `matplotlib.axes.Axes`: where it was drawn.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_matplotlib()
    if ax is None:
        from matplotlib import pyplot

        _, ax = pyplot.subplots()
    for name, stats in stats_by_name.items():
        shares = stats.acceptance_by_position
        ax.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    longest = max((len(stats.acceptance_by_position) for stats in stats_by_name.values()), default=0)
    ax.set_xticks(range(1, longest + 1))
    ax.set_ylim(0, 1)
    ax.set_xlabel("position in the block")
    ax.set_ylabel("share of verified drafts accepted")
    if stats_by_name:
        ax.legend()
    return ax


def save_acceptance(stats_by_name: Mapping[str, DecodingStats], path: str | Path, title: str = "") -> None:
    """Writes `plot_acceptance` to a file, without a display or a window.

    Args:
        stats_by_name (`Mapping[str, DecodingStats]`): See `plot_acceptance`.
        path (`str` or `Path`): Its ending says the format.
        title (`str`): Stands above the plot.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = plot_acceptance(stats_by_name, figure.subplots())
    axes.set_title(title)
    figure.savefig(path, dpi=150)


def plot_acceptance_by_context(evaluation: Any, row: str, temperature: float = 0, ax: Any = None) -> Any:
    """Acceptance by position in the block, one line per range of context lengths.

    Args:
        evaluation (`Evaluation`): Result of `ready_hf.evaluation.evaluate`.
        row (`str`): Which drafter.
        temperature (`float`): One that was evaluated.
        ax (`matplotlib.axes.Axes`, *optional*): Where to draw; default: new axes.

    Returns:
        `matplotlib.axes.Axes`: where it was drawn.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_matplotlib()
    by_context = {}
    for index, name in enumerate(evaluation.contexts):
        found = _counts(evaluation.positions(temperature, row, index))
        if found.drafted_by_position:
            by_context[f"{name} tokens"] = found
    ax = plot_acceptance(by_context, ax)
    ax.set_title(row)
    return ax


def save_evaluation(evaluation: Any, path: str | Path, temperature: float = 0) -> None:
    """Writes acceptance by position of all drafters, and of each by context length, to a file.

    Args:
        evaluation (`Evaluation`): Result of `ready_hf.evaluation.evaluate`.
        path (`str` or `Path`): Its ending says the format.
        temperature (`float`): One that was evaluated.

    Raises:
        ImportError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = evaluation.drafters
    figure = Figure(figsize=(5 * (1 + len(rows)), 4), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(rows))
    plot_acceptance({row: _counts(evaluation.positions(temperature, row)) for row in rows}, first)
    first.set_title("all")
    for row, axes in zip(rows, others, strict=True):
        plot_acceptance_by_context(evaluation, row, temperature, axes)
    figure.savefig(path, dpi=150)


def _counts(positions: Any) -> DecodingStats:
    return DecodingStats(
        drafted_by_position=[position.drafted for position in positions],
        accepted_by_position=[position.accepted for position in positions],
    )
