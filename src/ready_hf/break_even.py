"""Is drafting worth it? From acceptance by position and the times of a round, the speed at every block length.

A round over n drafts emits 1 + a_1 + ... + a_n tokens on average, where a_k is the share of rounds in which draft k is
accepted, and takes the time to draft, to verify and the rest; plain decoding emits one token per step. So

    speed(n) = (1 + a_1 + ... + a_n) * plain step / (draft(n) + verify(n) + other(n))

and drafting is worth it at block length n if that is above 1. Times are in any unit, the same for all.

    print(break_even([0.8, 0.6, 0.4], draft=2.0, verify=11.0, plain=10.0).table())
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


Times = float | Sequence[float]


@dataclass(frozen=True)
class BlockLength:
    """One block length.

    Args:
        num_drafts (`int`): Drafts per round, n.
        tokens (`float`): Tokens per round at the given acceptance.
        round_time (`float`): Time of a round.
        speed (`float`): Against plain decoding.
        needed (`float`): Tokens per round at which the speed would be 1.
    """

    num_drafts: int
    tokens: float
    round_time: float
    speed: float
    needed: float


@dataclass(frozen=True)
class BreakEven:
    """Result of `break_even`: every block length, the shortest first."""

    lengths: tuple[BlockLength, ...]

    @property
    def best(self) -> BlockLength:
        """The fastest block length; of several the shortest."""
        return max(self.lengths, key=lambda length: length.speed)

    @property
    def is_worth_it(self) -> bool:
        """Whether any block length is faster than plain decoding."""
        return self.best.speed > 1

    @property
    def verdict(self) -> str:
        """One sentence."""
        best = self.best
        figures = f"{best.tokens:.2f} tokens per round, {best.needed:.2f} needed"
        if self.is_worth_it:
            return f"worth it: {best.speed:.2f}x at {best.num_drafts} drafts per round ({figures})"
        return f"not worth it: at best {best.speed:.2f}x, at {best.num_drafts} drafts per round ({figures})"

    def table(self) -> str:
        """As a Markdown table."""
        lines = ["| drafts per round | tokens per round | needed | speed |", "| --- | --- | --- | --- |"]
        lines += [f"| {x.num_drafts} | {x.tokens:.2f} | {x.needed:.2f} | {x.speed:.2f}x |" for x in self.lengths]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"worth_it": self.is_worth_it, "best": asdict(self.best), "lengths": [asdict(x) for x in self.lengths]}


def break_even(
    acceptance: Sequence[float],
    *,
    draft: Times,
    verify: Times,
    plain: float,
    other: Times = 0.0,
    num_drafts: Sequence[int] | None = None,
) -> BreakEven:
    """Speed against plain decoding, by block length.

    Args:
        acceptance (`Sequence[float]` of length G): Share of rounds in which draft 1, 2, ... is accepted: as
            `DecodingStats.acceptance_by_position`, it does not rise from one position to the next.
        draft, verify, other (`float` or `Sequence[float]`): Times of a round: one for all block lengths, or one per
            entry of `num_drafts`. With the time of the longest block for all of them, speeds of shorter ones are lower
            bounds.
        plain (`float`): Time of a plain step.
        num_drafts (`Sequence[int]`, *optional*): Block lengths, each 1 to G. Default: 1, 2, ..., G.

    Raises:
        ValueError: a share outside of 0 to 1 or above the one before it, a time that is negative or not finite, a
        plain step without duration, or lists that do not fit.
    """
    shares = [float(share) for share in acceptance]
    for position, share in enumerate(shares):
        if not 0 <= share <= 1:
            raise ValueError(f"`acceptance` must be shares from 0 to 1, got {share} at position {position + 1}")
        if position and share > shares[position - 1] + 1e-9:
            raise ValueError(
                f"`acceptance` must not rise from one position to the next, got {shares[position - 1]} then {share} "
                f"at position {position + 1}: a draft is accepted only with all before it, so pass shares of all "
                "rounds, not those given that the draft before was accepted"
            )
    if not shares:
        raise ValueError("`acceptance` must have at least one position")
    lengths = list(range(1, len(shares) + 1)) if num_drafts is None else list(num_drafts)
    if not lengths or not all(1 <= n <= len(shares) for n in lengths):
        raise ValueError(f"`num_drafts` must be block lengths from 1 to {len(shares)}, got {lengths}")
    plain = _times("plain", plain, 1)[0]
    if plain == 0:
        raise ValueError("`plain` must be above 0: without the time of a plain step there is nothing to compare with")
    parts = [
        _times(name, time, len(lengths)) for name, time in (("draft", draft), ("verify", verify), ("other", other))
    ]
    found = []
    for n, times in zip(lengths, zip(*parts, strict=True), strict=True):
        tokens, whole = 1 + sum(shares[:n]), sum(times)
        if whole == 0:
            raise ValueError(f"a round of {n} drafts takes no time: pass the times to draft and to verify")
        found.append(BlockLength(n, tokens, whole, tokens * plain / whole, whole / plain))
    return BreakEven(tuple(sorted(found, key=lambda length: length.num_drafts)))


def _times(name: str, times: Times, count: int) -> list[float]:
    if isinstance(times, int | float):
        times = [times] * count
    times = [float(time) for time in times]
    if len(times) != count:
        raise ValueError(f"`{name}` must be one time, or one per block length ({count}), got {len(times)}")
    if not all(math.isfinite(time) and time >= 0 for time in times):
        raise ValueError(f"`{name}` must be finite times of at least 0, got {times}")
    return times
