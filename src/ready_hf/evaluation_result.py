"""What an evaluation found: every text, and the figures that are computed from them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ready_hf.break_even import BreakEven
from ready_hf.intervals import Estimate, bootstrap, ratio
from ready_hf.statistics import Round


PLAIN = "plain"


@dataclass(frozen=True)
class Text:
    """One decoded text.

    Args:
        prompt (`int`), task (`str`): Which prompt it continues, and what that counts for.
        temperature (`float`): 0 for greedy.
        row (`str`): Name of the drafter, or `"plain"`.
        num_tokens (`int`): New tokens.
        seconds (`float`): Wall time of `generate`.
        is_looping (`bool`): Whether it ends in a loop.
        first_difference (`int`, *optional*): First new token in which a greedy text differs from the plain one.
        log (`tuple[Round]`): Its verify forwards; none for plain decoding.
    """

    prompt: int
    task: str
    temperature: float
    row: str
    num_tokens: int
    seconds: float
    is_looping: bool = False
    first_difference: int | None = None
    log: tuple[Round, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Position:
    """One position in the block.

    Args:
        drafted (`int`): Drafts verified there.
        reached (`int`): Of these, with all before them accepted and the text not yet at its end.
        accepted (`int`): Of these, accepted.
    """

    drafted: int
    reached: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Share of verified drafts that were accepted; NaN without any."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def conditional(self) -> float:
        """Share accepted of those with all before them accepted; NaN without any."""
        return self.accepted / self.reached if self.reached else float("nan")


def positions(log: Iterable[Round]) -> list[Position]:
    """Counts by position, of rounds with one row each."""
    counts: list[list[int]] = []
    for entry in log:
        counts.extend([0, 0, 0] for _ in range(entry.num_drafts - len(counts)))
        accepted = len(entry.accepted)
        ended = entry.tokens == accepted  # with a draft: the drafts after it were not judged
        for k in range(entry.num_drafts):
            counts[k][0] += 1
            counts[k][1] += k < accepted or (k == accepted and not ended)
            counts[k][2] += k < accepted
    return [Position(*count) for count in counts]


def survival(found: Sequence[Position]) -> list[float]:
    """P(draft k and all before it are accepted), by position, as if no block had been cut: products of conditional
    shares, as Kaplan and Meier estimate it. Ends before the first position that no round has reached."""
    shares: list[float] = []
    for position in found:
        if not position.reached:
            break
        shares.append((shares[-1] if shares else 1.0) * position.conditional)
    return shares


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`.

    Args:
        texts (`tuple[Text]`): Everything that was decoded.
        rows (`tuple[str]`): `"plain"`, then the drafters.
        context_edges (`tuple[int]`): Borders of the context lengths.
        seed, resamples (`int`): Of the bootstrap.
        setting (`Mapping`): What was run, for the reader.
        break_evens (`Mapping[str, BreakEven]`): By drafter, where round times were measured.
    """

    texts: tuple[Text, ...]
    rows: tuple[str, ...]
    context_edges: tuple[int, ...]
    seed: int = 0
    resamples: int = 2000
    setting: Mapping[str, Any] = field(default_factory=dict)
    break_evens: Mapping[str, BreakEven] = field(default_factory=dict)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters."""
        return self.rows[1:]

    @property
    def temperatures(self) -> list[float]:
        """In the order in which they were run."""
        return list(dict.fromkeys(text.temperature for text in self.texts))

    @cached_property
    def _by_key(self) -> dict[tuple[float, str, int], Text]:
        return {(text.temperature, text.row, text.prompt): text for text in self.texts}

    def prompts(self, temperature: float, looping: bool = False) -> list[int]:
        """Prompts without a looping text at this temperature, or (`looping`) those with one."""
        found = [text for text in self.texts if text.temperature == temperature]
        loops = {text.prompt for text in found if text.is_looping}
        return [i for i in dict.fromkeys(text.prompt for text in found) if (i in loops) == looping]

    def of(self, temperature: float, row: str, looping: bool = False) -> list[Text]:
        """The texts of a row, in the order of `prompts`."""
        if row not in self.rows:
            raise ValueError(f"there is no row {row!r}; rows are {', '.join(map(repr, self.rows))}")
        return [self._by_key[temperature, row, i] for i in self.prompts(temperature, looping)]

    def accepted_length(self, temperature: float, row: str, looping: bool = False) -> dict[str, Estimate]:
        """Tokens per verify forward by task, and the mean of the tasks; empty without prompts."""
        texts = self.of(temperature, row, looping)
        return self._bootstrap([_rounds(text) for text in texts], texts, ratio(0, 1))

    def difference(self, temperature: float, row: str, against: str) -> dict[str, Estimate]:
        """Accepted length of a row minus that of another, by task; prompts are drawn in pairs."""
        texts, others = self.of(temperature, row), self.of(temperature, against)
        quantities = [[*_rounds(text), *_rounds(other)] for text, other in zip(texts, others, strict=True)]
        mine, theirs = ratio(0, 1), ratio(2, 3)
        return self._bootstrap(quantities, texts, lambda totals: mine(totals) - theirs(totals))

    def speed(self, temperature: float, row: str, looping: bool = False) -> dict[str, Estimate]:
        """Tokens per second over those of plain decoding, by task; prompts are drawn in pairs."""
        texts, plain = self.of(temperature, row, looping), self.of(temperature, PLAIN, looping)
        quantities = [
            [float(text.num_tokens), text.seconds, float(other.num_tokens), other.seconds]
            for text, other in zip(texts, plain, strict=True)
        ]
        mine, theirs = ratio(0, 1), ratio(2, 3)
        return self._bootstrap(quantities, texts, lambda totals: mine(totals) / theirs(totals))

    def drafts(self, temperature: float, row: str) -> tuple[int, int]:
        """Drafts that were verified, and verify forwards, of all prompts that do not loop."""
        log = [entry for text in self.of(temperature, row) for entry in text.log]
        return sum(entry.num_drafts for entry in log), len(log)

    def tokens_per_second(self, temperature: float, row: str) -> float:
        """Of all prompts that do not loop; NaN without any."""
        texts = self.of(temperature, row)
        seconds = sum(text.seconds for text in texts)
        return sum(text.num_tokens for text in texts) / seconds if seconds else float("nan")

    def identical(self, row: str) -> tuple[int, int]:
        """Greedy texts equal to those of plain decoding, and greedy texts; looping ones count too."""
        texts = [text for text in self.texts if text.row == row and text.temperature == 0]
        return sum(text.first_difference is None for text in texts), len(texts)

    @property
    def is_identical(self) -> bool:
        """Whether every greedy text is that of plain decoding."""
        return all(text.first_difference is None for text in self.texts)

    def positions(self, temperature: float, row: str, context: int | None = None) -> list[Position]:
        """Acceptance by position in the block, of all rounds or of one range of context lengths (`contexts`)."""
        log = (entry for text in self.of(temperature, row) for entry in text.log)
        if context is None:
            return positions(log)
        return positions(entry for entry in log if self.context_of(entry.context) == context)

    @property
    def contexts(self) -> list[str]:
        """Names of the ranges of context lengths, in tokens."""
        edges = self.context_edges
        if not edges:
            return ["all"]
        middle = [f"{low} to {high - 1}" for low, high in zip(edges, edges[1:], strict=False)]
        return [f"below {edges[0]}", *middle, f"{edges[-1]} and more"]

    def context_of(self, length: int) -> int:
        """Index of the range that a context length is in."""
        return sum(length >= edge for edge in self.context_edges)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, for JSON."""
        from ready_hf.evaluation_report import to_dict

        return to_dict(self)

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """The report."""
        from ready_hf.evaluation_report import blocks, markdown

        return markdown(blocks(self))

    def _repr_html_(self) -> str:
        from ready_hf.evaluation_report import blocks, html

        return html(blocks(self))

    def _bootstrap(self, quantities: list[list[float]], texts: list[Text], statistic: Any) -> dict[str, Estimate]:
        if not texts:
            return {}
        tasks = [text.task for text in texts]
        return bootstrap(quantities, tasks, statistic, seed=self.seed, resamples=self.resamples)


def _rounds(text: Text) -> list[float]:
    """Tokens and forwards after the prefill; of plain decoding one token each."""
    if text.row == PLAIN:
        return [text.num_tokens - 1.0, text.num_tokens - 1.0]
    return [float(sum(entry.tokens for entry in text.log)), float(len(text.log))]
