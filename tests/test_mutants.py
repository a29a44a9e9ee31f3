"""The tests notice a broken package: each mutant changes one place of its source, and a check must then fail.

A mutant replaces the code object of the real function, so that everybody who has imported it runs the mutant.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import pytest
import torch

import checks
from ready_hf import acceptance, block_records, candidates, decoding, rollback, statistics


@dataclass
class Mutant:
    """One fault.

    Args:
        fault (`str`): What is wrong, in a few words.
        check (`Callable`): Must fail.
        edits (`list`): `(function, snippet, replacement)`; the snippet occurs exactly once.
        arguments (`tuple`): Of the check.
    """

    fault: str
    check: Callable[..., None]
    edits: list[tuple[Any, str, str]]
    arguments: tuple[Any, ...] = ()


def mutate(monkeypatch: pytest.MonkeyPatch, function: Any, *edits: tuple[str, str]) -> None:
    """Runs `function` with the snippets of its source replaced, until the test ends."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    for snippet, replacement in edits:
        assert source.count(snippet) == 1, (
            f"{snippet!r} occurs {source.count(snippet)} times in {function.__qualname__}"
        )
        source = source.replace(snippet, replacement)
    namespace = dict(function.__globals__)
    exec(compile(source, f"<mutant of {function.__qualname__}>", "exec"), namespace)
    mutant = inspect.unwrap(namespace[function.__name__])
    assert isinstance(mutant, FunctionType)
    monkeypatch.setattr(function, "__code__", mutant.__code__)


pytestmark = pytest.mark.slow
STATES, WINDOWS = rollback._commit_states, rollback._commit_windows
LOOP = decoding.speculative_decoding
COLUMNS = acceptance.verified_columns
BREAK = "if sequences.append(column):\n                    break"
AFTER_BLOCK = "# 4. commit\n"
DRAW_DRAFT = "torch.multinomial(warped.softmax(-1), 1).squeeze(1)"
DRAW_RESIDUAL = "torch.multinomial(residual, 1).squeeze(1)"
INVERSE_CDF = "warped.softmax(-1).cumsum(-1) < _noise(lambda: torch.rand(len(warped)))[:, None]"
GUMBEL = "-(-torch.rand_like(warped).clamp_min(1e-30).log()).log()"
GUMBEL_DRAFT = f"(warped.log_softmax(-1) + _noise(lambda: {GUMBEL})).argmax(-1)"
KEPT_STATE = "window_state(window, self.base, keep)"
TRANSPOSED = (block_records.Record.state_after, KEPT_STATE, f"{KEPT_STATE}.mT")

STATE_MUTANTS = [
    Mutant(
        "no rollback at all",
        checks.check_lossless,
        [(LOOP, "rollback.commit(keep)", "rollback.commit(length)")],
    ),
    Mutant(
        "recurrent state not rolled back",
        checks.check_lossless,
        [(STATES, "if isinstance(keep, int) and keep == length and not record.is_frozen:", "if True:")],
    ),
    Mutant(
        "conv window not rolled back",
        checks.check_lossless,
        [(WINDOWS, "_conv_window(window, keep, ", "_conv_window(window, window.shape[-1] - 4, ")],
    ),
    Mutant(
        "state one token too early",
        checks.check_lossless,
        [(STATES, "record.state_after(keep)", "record.state_after(max(keep - 1, 1))")],
    ),
    Mutant(
        "state one token too late",
        checks.check_lossless,
        [(STATES, "record.state_after(keep)", "record.state_after(keep + 1)")],
    ),
    Mutant(
        "keys and values not cut",
        checks.check_lossless,
        [(rollback.Rollback.commit, "self._length - longest)", "0)")],
    ),
    Mutant("state transposed, K = V", checks.check_lossless, [TRANSPOSED], arguments=("kimi_linear",)),
    Mutant("state transposed, K != V", checks.check_lossless, [TRANSPOSED]),
    Mutant(
        "recording of past conv inputs left on",
        checks.check_returned_cache,
        [(rollback.Rollback._forget_block, "layer.record_past = False", "layer.record_past = True")],
    ),
]

SAMPLING_MUTANTS = [
    Mutant(
        "draft probabilities from before the warpers",
        checks.check_drafted_token,
        [(candidates.choose_drafts, ".squeeze(1), warped", ".squeeze(1), logits.float()")],
    ),
    Mutant(
        "replacement drawn from the target's distribution, not from the residual",
        checks.check_drafted_token,
        [(acceptance.accept, "(p_rejected - q_rejected).clamp_min(0.0)", "p_rejected")],
    ),
    Mutant(
        "sampled drafts taken for certain ones, so that fewer are accepted",
        checks.check_drafted_token,
        [(COLUMNS, "q = None if draft_logits is None else", "q = None if True else")],
    ),
    Mutant(
        "draft noise reused for the residual",
        checks.check_drafted_token,
        [
            (candidates.choose_drafts, DRAW_DRAFT, GUMBEL_DRAFT),
            (COLUMNS, DRAW_RESIDUAL, "(residual.log() + _noise.kept[start + together - num_drafts]).argmax(-1)"),
        ],
    ),
    Mutant(
        "draft noise reused for the acceptance",
        checks.check_drafted_token,
        [
            (candidates.choose_drafts, DRAW_DRAFT, f"({INVERSE_CDF}).sum(-1).clamp_max(7)"),
            (COLUMNS, "torch.rand(drafts.shape, device=logits.device)", "torch.stack(_noise.kept[-num_drafts:], 1)"),
        ],
    ),
    Mutant(
        "fresh sample in rows that another row holds back",
        checks.check_truncated_rows,
        [
            (
                COLUMNS,
                "torch.where(own_draft, drafts[:, start + together], other)",
                "torch.where(own_draft, torch.multinomial(scores[:, together].softmax(-1), 1).squeeze(1), other)",
            )
        ],
    ),
    Mutant(
        "sample from the residual in rows that another row holds back",
        checks.check_truncated_rows,
        [(COLUMNS, "torch.where(own_draft, drafts[:, start + together], other)", "other")],
    ),
]

LOOP_MUTANTS = [
    Mutant(
        "accepted drafts not counted",
        checks.check_statistics,
        [(statistics.DecodingStats.count_accepted, "+= rows", "+= 0")],
    ),
    Mutant(
        "rounds not counted",
        checks.check_statistics,
        [
            (statistics.DecodingStats.count_round, "self.rounds += 1", "self.rounds += 0"),
            (statistics.DecodingStats.count_round, "self.row_rounds += rows", "self.row_rounds += 0"),
        ],
    ),
    Mutant(
        "drafts not counted",
        checks.check_statistics,
        [(statistics.DecodingStats.count_round, "[position] += rows", "[position] += 0")],
    ),
    Mutant(
        "stopping criteria asked only at the end of a block",
        checks.check_criterion_inside_block,
        [
            (LOOP, BREAK, "_append_unasked(sequences, column)"),
            (LOOP, AFTER_BLOCK, "_ask(sequences)\n"),
        ],
    ),
    Mutant(
        "block goes on after an end-of-sequence token",
        checks.check_eos_inside_block,
        [(LOOP, BREAK, "sequences.append(column)")],
    ),
    Mutant(
        "streamer called once per block",
        checks.check_streamer,
        [
            (decoding._Sequences.append, "self._streamer.put(tokens.cpu())", "pass"),
            (LOOP, AFTER_BLOCK, "streamer.put(sequences.ids[:, -keep:].cpu())\n"),
        ],
    ),
]
MUTANTS = STATE_MUTANTS + SAMPLING_MUTANTS + LOOP_MUTANTS


class KeptNoise:
    """Noise that a mutant draws once and uses twice."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def __call__(self, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        self.kept.append(draw())
        return self.kept[-1]


def append_unasked(sequences: Any, column: Any) -> None:
    criteria, sequences._stopping_criteria = (
        sequences._stopping_criteria,
        lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool),
    )
    sequences.append(column)
    sequences._stopping_criteria = criteria


def ask(sequences: Any) -> None:
    sequences.unfinished = sequences.unfinished & ~sequences._stopping_criteria(sequences.ids, None)
    sequences.num_unfinished = int(sequences.unfinished.sum())


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that mutants use, in the modules they live in."""
    noise = KeptNoise()
    for module, name, value in (
        (candidates, "_noise", noise),
        (acceptance, "_noise", noise),
        (decoding, "_append_unasked", append_unasked),
        (decoding, "_ask", ask),
    ):
        monkeypatch.setattr(module, name, value, raising=False)


@pytest.mark.usefixtures("helpers")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault.replace(" ", "_"))
def test_mutant_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in {id(edit[0]): edit[0] for edit in mutant.edits}.values():
        mutate(monkeypatch, function, *[edit[1:] for edit in mutant.edits if edit[0] is function])
    with pytest.raises(AssertionError):
        mutant.check(*mutant.arguments)


@pytest.mark.parametrize(
    ("check", "arguments"),
    {(mutant.check, mutant.arguments): None for mutant in MUTANTS},
    ids=lambda value: getattr(value, "__name__", None) or "-".join(value),
)
def test_check_passes_without_mutant(check: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    check(*arguments)


@pytest.mark.usefixtures("helpers")
@pytest.mark.parametrize(
    ("function", "snippet", "replacement"),
    [
        (candidates.choose_drafts, DRAW_DRAFT, GUMBEL_DRAFT),
        (COLUMNS, DRAW_RESIDUAL, "(residual / torch.empty_like(residual).exponential_()).argmax(-1)"),
    ],
    ids=["draft", "residual"],
)
def test_other_way_to_draw_is_no_fault(
    function: Any, snippet: str, replacement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the noise mutants change besides the reuse does not by itself make the check fail."""
    mutate(monkeypatch, function, (snippet, replacement))
    checks.check_drafted_token()
