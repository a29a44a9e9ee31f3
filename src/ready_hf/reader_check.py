"""Does a drafter use the recurrent states it reads? Its accepted length, with the real ones and with three replaced.

The same prompts are decoded with the same drafter and the same seeds; only what the reader gets differs:

    real             the committed states
    zeros            nothing
    other prompt     those of the last round of another prompt
    one round old    those of the round before (in a first round, which has none before it: the real ones)

If a reader helps, each replacement shortens what is accepted. A drafter whose reader has learned nothing, or only a
constant, does as well with the wrong states. Nothing of the drafter or of its training takes part in the verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ready_hf.candidates import DraftContext
from ready_hf.drafting import DraftingMixin, DraftSession
from ready_hf.statistics import record_stats
from ready_hf.target import committed_states
from ready_hf.ways import DECODING


REAL, ZEROS, OTHER, OLD = "real", "zeros", "other prompt", "one round old"
REPLACED = (ZEROS, OTHER, OLD)
RULE = (
    "The reader helps if, greedily and at temperature 1, the 95 % interval of real minus replaced lies above 0 for "
    "all three replacements."
)


class StatesSession(DraftSession):
    """A session whose reader gets other states than the committed ones.

    Args:
        drafter (`ReadyDrafterModel`), target (`PreTrainedModel`): See `DraftSession`.
        kind (`str`): `"real"`, `"zeros"`, `"other prompt"` or `"one round old"`.
        other (`torch.Tensor` of shape `[B, N, H, K, V]`, *optional*): The states for `"other prompt"`.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, kind: str, other: torch.Tensor | None = None):
        super().__init__(drafter, target)
        self.kind, self.other = kind, other
        self.newest: torch.Tensor | None = None  # the real states of the last round

    def states(self, context: DraftContext) -> torch.Tensor | None:
        """What the reader gets in this round; see the module docstring."""
        if not self._state_layers:
            return None
        real = committed_states(context.cache, self._state_layers)  # a copy: it is kept for the next round
        previous, self.newest = self.newest, real
        if self.kind == ZEROS:
            return torch.zeros_like(real)
        if self.kind == OTHER:
            assert self.other is not None
            return self.other.to(real)
        if self.kind == OLD and previous is not None:
            return previous
        return real


class StatesDrafter(DraftingMixin):
    """A ReaDy drafter for `assistant_model=`, with a `StatesSession` in each call.

    Args:
        drafter (`ReadyDrafterModel`): The model.
        kind, other: See `StatesSession`.
    """

    def __init__(self, drafter: Any, kind: str = REAL, other: torch.Tensor | None = None):
        self.drafter, self.kind, self.other = drafter, kind, other
        self.config = drafter.config
        self.session: StatesSession | None = None  # of the last call

    def make_session(self, target: PreTrainedModel) -> DraftSession:
        """See `DraftingMixin`."""
        self.session = StatesSession(self.drafter, target, self.kind, self.other)
        return self.session


@dataclass(frozen=True)
class Difference:
    """Mean over prompts of (accepted length with real states - with replaced ones) and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


@dataclass(frozen=True)
class ReaderCheck:
    """Result of `check_reader`.

    Args:
        lengths (`dict`): Accepted length (tokens per verify forward) by way of decoding, states and prompt; NaN where
            a text ended before its first verify forward.
        differences (`dict`): Real minus replaced, by way of decoding and states.
        max_new_tokens, repeats, seed, resamples (`int`): As given to `check_reader`.
    """

    lengths: dict[str, dict[str, tuple[float, ...]]]
    differences: dict[str, dict[str, Difference]]
    max_new_tokens: int
    repeats: int
    seed: int
    resamples: int

    @property
    def num_prompts(self) -> int:
        """How many prompts were decoded."""
        return len(self.lengths["greedy"][REAL])

    @property
    def helps(self) -> bool:
        """Whether the reader helps, by `RULE`."""
        return all(found.low > 0 for kinds in self.differences.values() for found in kinds.values())

    @property
    def verdict(self) -> str:
        """One sentence; if the reader does not help, the weakest difference is its reason."""
        found = [(d.low, d, kind, name) for name, kinds in self.differences.items() for kind, d in kinds.items()]
        _, weakest, kind, name = min(found, key=lambda item: -math.inf if math.isnan(item[0]) else item[0])
        reason = f"{name}, real minus {kind} is {weakest} tokens per verify forward"
        if self.helps:
            return f"the reader helps: every interval lies above 0, the weakest ({reason})."
        return (
            f"the reader does not help yet, as far as {self.num_prompts} prompts can show: not every interval lies "
            f"above 0 ({reason}). More prompts make the intervals narrower."
        )

    def table(self) -> str:
        """Accepted lengths and differences as lines of text."""
        rows = [["states", *(cell for name in DECODING for cell in (name, "real minus this [95 %]"))]]
        for kind in (REAL, *REPLACED):
            row = [kind]
            for name in DECODING:
                difference = "" if kind == REAL else str(self.differences[name][kind])
                row += [f"{_mean(self.lengths[name][kind]):.3f}", difference]
            rows.append(row)
        return aligned(rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for a model card."""
        ways = {
            name: {
                "accepted_length": {kind: round(_mean(values), 4) for kind, values in kinds.items()},
                "real_minus_replaced": {
                    kind: {"mean": round(d.mean, 4), "low": round(d.low, 4), "high": round(d.high, 4)}
                    for kind, d in self.differences[name].items()
                },
            }
            for name, kinds in self.lengths.items()
        }
        settings = {name: getattr(self, name) for name in ("max_new_tokens", "repeats", "seed", "resamples")}
        return {"prompts": self.num_prompts, **settings, **ways, "rule": RULE, "helps": self.helps}


def check_reader(
    target: PreTrainedModel,
    drafter: Any,
    prompts: Sequence[Mapping[str, torch.Tensor]],
    *,
    max_new_tokens: int = 96,
    repeats: int = 1,
    seed: int = 0,
    resamples: int = 10_000,
) -> ReaderCheck:
    """Decodes every prompt with real and with replaced states, greedily and at temperature 1.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`ReadyDrafterModel`): One with a reader.
        prompts (`Sequence`): Arguments for `generate`, each with one prompt; at least two prompts.
        max_new_tokens (`int`): Per text.
        repeats (`int`): Texts per prompt at temperature 1, each with a seed of its own.
        seed (`int`): First of the seeds, and that of the bootstrap.
        resamples (`int`): Of the prompts, for the interval (paired bootstrap, percentiles).

    Raises:
        TypeError: not a drafter.
        ValueError: a drafter without reader, fewer than two prompts, a batch, or a number below 1.
    """
    if not isinstance(drafter, DraftingMixin):
        raise TypeError(
            f"expected a ReaDy drafter, got {type(drafter).__name__}: the order is target, drafter, prompts"
        )
    if not drafter.config.has_reader:
        raise ValueError("this drafter reads no states (`state_layer_ids` is unset), so there is no reader to check")
    if any("input_ids" not in inputs for inputs in prompts):
        raise ValueError("every prompt must be a dict with `input_ids`, as a tokenizer returns it")
    if len(prompts) < 2 or any(inputs["input_ids"].shape[0] != 1 for inputs in prompts):
        raise ValueError(f"the reader is checked on two or more prompts of one sequence each, got {len(prompts)}")
    for name, value in (("max_new_tokens", max_new_tokens), ("repeats", repeats), ("resamples", resamples)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
    lengths: dict[str, dict[str, tuple[float, ...]]] = {}
    steps = len(DECODING) * (1 + len(REPLACED)) * len(prompts)
    devices = [target.device] if target.device.type == "cuda" else []
    with tqdm(total=steps, desc="reader check", leave=False, disable=None) as bar, torch.random.fork_rng(devices):
        for name, options in DECODING.items():
            times = repeats if options["do_sample"] else 1
            finals: list[torch.Tensor | None] = []  # of the real runs, which come first
            lengths[name] = {}
            for kind in (REAL, *REPLACED):
                found = []
                for index, inputs in enumerate(prompts):
                    other = _states_of_another(finals, index) if kind == OTHER else None
                    if kind == OTHER and other is None:  # no other text got as far as a draft
                        found.append(math.nan)
                        bar.update()
                        continue
                    wrapped, newest = StatesDrafter(drafter, kind, other), None
                    with record_stats() as stats:
                        for repeat in range(times):
                            torch.manual_seed(seed + 1000 * index + repeat)
                            target.generate(
                                **inputs, assistant_model=wrapped, max_new_tokens=max_new_tokens, **options
                            )
                            if wrapped.session is not None and wrapped.session.newest is not None:
                                newest = wrapped.session.newest
                    found.append(stats.tokens_per_forward if stats.rounds else math.nan)
                    if kind == REAL:
                        finals.append(newest)
                    bar.update()
                lengths[name][kind] = tuple(found)
    differences = {
        name: {kind: paired_difference(kinds[REAL], kinds[kind], seed, resamples) for kind in REPLACED}
        for name, kinds in lengths.items()
    }
    return ReaderCheck(lengths, differences, max_new_tokens, repeats, seed, resamples)


def paired_difference(
    real: Sequence[float], replaced: Sequence[float], seed: int = 0, resamples: int = 10_000
) -> Difference:
    """Mean of real minus replaced, with the 2.5 % and 97.5 % percentiles of its bootstrap; without pairs with NaN.

    A single pair has a mean and no interval: its bootstrap would be a point.
    """
    values = torch.tensor(real, dtype=torch.float64) - torch.tensor(replaced, dtype=torch.float64)
    values = values[values.isfinite()]
    if len(values) < 2:
        return Difference(values.item() if len(values) else math.nan, math.nan, math.nan)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(values), (resamples, len(values)), generator=generator)
    low, high = torch.quantile(values[chosen].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Difference(values.mean().item(), low, high)


def _states_of_another(finals: Sequence[torch.Tensor | None], index: int) -> torch.Tensor | None:
    """The states that the next prompt left behind which left any; `None` if no other one did."""
    others = [*finals[index + 1 :], *finals[:index]]
    return next((states for states in others if states is not None), None)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines with columns two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan
