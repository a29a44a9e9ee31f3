"""What a drafted decoding call did: rounds, accepted drafts by position, seconds by phase.

with ready_hf.record_stats() as stats:
    target.generate(**inputs, assistant_model=drafter)
print(stats.tokens_per_forward)

A recorder sees the calls of its own thread (and context) only.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields

import torch


@dataclass
class Round:
    """One verify forward.

    Args:
        context (`int`): Tokens before the anchor: what the cache had seen, padding included.
        num_drafts (`int`): Drafts that were verified.
        rows (`int`): Rows that were not padding.
        accepted (`list[int]`): In how many of them draft 1, 2, ... was accepted and emitted; ends where none was.
        tokens (`int`): Emitted tokens per row: the accepted drafts and one of the target's own, unless the text ended
            with a draft.
    """

    context: int
    num_drafts: int
    rows: int
    accepted: list[int] = field(default_factory=list)
    tokens: int = 0


@dataclass
class DecodingStats:
    """Counts and times of one or more drafted decoding calls.

    Args:
        calls (`int`): `generate` calls.
        rounds (`int`): Verify forwards of the target (the prefill is not one).
        new_tokens (`int`): Emitted tokens, padding of finished rows left out, the one after the prefill included.
        round_tokens (`int`): The same without the tokens after a prefill.
        row_rounds (`int`): Verify forwards summed over the rows of the batch that were not padding.
        drafted_by_position (`list[int]`): How often draft 1, 2, ... was verified, summed over these rows.
        accepted_by_position (`list[int]`): How often draft 1, 2, ... was accepted and emitted.
        prefill_seconds, draft_seconds, verify_seconds, commit_seconds (`float`): Wall time by phase. Inside
            `record_stats` the device is waited for at every border of a phase; otherwise times of an asynchronous
            device blur into the next phase.
        log (`list[Round]`): Every verify forward, in order; not printed.
    """

    calls: int = 0
    rounds: int = 0
    new_tokens: int = 0
    round_tokens: int = 0
    row_rounds: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    log: list[Round] = field(default_factory=list, repr=False)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens per verify forward and row: 1 is plain decoding; the field calls it accepted length."""
        return self.round_tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of verified drafts that were accepted, by position in the block."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_by_position, self.drafted_by_position, strict=True)]

    def count_round(self, num_drafts: int, rows: int, context: int = 0) -> None:
        """Counts a verify forward over `num_drafts` drafts in `rows` rows, with `context` tokens in the cache."""
        self.log.append(Round(context, num_drafts, rows))
        self.rounds += 1
        self.row_rounds += rows
        for counts in (self.drafted_by_position, self.accepted_by_position):
            counts.extend([0] * (num_drafts - len(counts)))
        for position in range(num_drafts):
            self.drafted_by_position[position] += rows

    def count_accepted(self, position: int, rows: int) -> None:
        """Counts draft `position` (0 is the first) as emitted by `rows` rows."""
        self.accepted_by_position[position] += rows
        if rows:
            self.log[-1].accepted.append(rows)

    def count_tokens(self, rows: int) -> None:
        """Counts one token of a round in `rows` rows."""
        self.new_tokens += rows
        self.round_tokens += rows
        self.log[-1].tokens += 1

    def add(self, other: "DecodingStats") -> None:
        """Adds another call's counts and times."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name == "log":
                mine.extend(theirs)
            elif isinstance(mine, list):
                mine.extend([0] * (len(theirs) - len(mine)))
                for position, count in enumerate(theirs):
                    mine[position] += count
            else:
                setattr(self, item.name, mine + theirs)


_recorder: ContextVar[DecodingStats | None] = ContextVar("ready_hf_stats", default=None)


@contextmanager
def record_stats() -> Iterator[DecodingStats]:
    """Collects the statistics of every drafted `generate` call inside the block, also of calls that fail.

    Blocks nest: the outer one counts the calls of the inner one too.
    """
    stats, outer = DecodingStats(), _recorder.get()
    token = _recorder.set(stats)
    try:
        yield stats
    finally:
        _recorder.reset(token)
        if outer is not None:
            outer.add(stats)


class CallStats:
    """Statistics of one decoding call while it runs; handed to the active recorder at the end.

    Args:
        device (`torch.device`): Waited for at the borders of a phase, if somebody records.
    """

    def __init__(self, device: torch.device):
        self.stats = DecodingStats(calls=1)
        self._recorder = _recorder.get()
        self._device = device if self._recorder is not None and device.type == "cuda" else None

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to `{phase}_seconds`."""
        start = self._now()
        try:
            yield
        finally:
            name = f"{phase}_seconds"
            setattr(self.stats, name, getattr(self.stats, name) + self._now() - start)

    def close(self) -> None:
        """Hands the counts over."""
        if self._recorder is not None:
            self._recorder.add(self.stats)

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
