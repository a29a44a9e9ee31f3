"""Rows that finish early: padded after an end-of-sequence token, otherwise going on as in plain `generate`."""

from typing import Any

import pytest
import torch

from ready_hf import DraftContext, record_stats
from support import VOCAB_SIZE, RecordingCriterion, ScriptedDrafter, random_prompt, tiny_target


PROMPT_LENGTH = 6
NEW_TOKENS = 24


class WrongInRow(ScriptedDrafter):
    """Every draft is right, except in one row, where none is."""

    def __init__(self, reference: torch.Tensor, row: int):
        super().__init__(reference)
        self.row = row

    def draft(self, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        drafts, logits = super().draft(context)
        drafts[self.row] = (drafts[self.row] + 3) % VOCAB_SIZE
        return drafts, logits


def generate(**options: Any) -> torch.Tensor:
    prompt = random_prompt(PROMPT_LENGTH, 2)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return tiny_target("qwen3_5").generate(prompt, attention_mask=torch.ones_like(prompt), **options)


def first_row_stops(input_ids: torch.Tensor) -> torch.Tensor:
    return torch.tensor([input_ids.shape[1] >= PROMPT_LENGTH + 5, False])


@pytest.mark.lossless
@pytest.mark.parametrize("wrong_row", [0, 1])
def test_row_that_a_criterion_finished_goes_on_as_in_plain_generate(wrong_row: int) -> None:
    """Without an end-of-sequence token nothing is padded: plain `generate` goes on with the target's own tokens."""
    reference = generate(stopping_criteria=[RecordingCriterion(first_row_stops)])
    assert torch.equal(reference, generate())
    drafter = WrongInRow(reference, wrong_row)
    with record_stats() as stats:
        got = generate(stopping_criteria=[RecordingCriterion(first_row_stops)], assistant_model=drafter)
    assert torch.equal(got, reference)
    assert all(a <= d for a, d in zip(stats.accepted_by_position, stats.drafted_by_position, strict=True))


@pytest.mark.lossless
@pytest.mark.parametrize("wrong_row", [0, 1])
def test_row_after_its_end_of_sequence_token_is_padded_and_holds_nobody_back(wrong_row: int) -> None:
    plain = generate()
    eos = int(plain[0, PROMPT_LENGTH + 4])
    assert eos not in plain[1]
    reference = generate(eos_token_id=eos, pad_token_id=1)
    assert reference[0, PROMPT_LENGTH + 5 :].tolist() == [1] * (NEW_TOKENS - 5)
    drafter = WrongInRow(reference, wrong_row)
    with record_stats() as stats:
        got = generate(eos_token_id=eos, pad_token_id=1, assistant_model=drafter)
    assert torch.equal(got, reference)
    assert stats.new_tokens == NEW_TOKENS + 5
    if wrong_row == 0:  # none of its own drafts is right, but it stops after five tokens
        with_both, alone = 4, 3  # rounds; then blocks of 9 tokens, 9, and the last one without a draft
        assert stats.rounds == with_both + alone
        assert stats.row_rounds == 2 * with_both + alone
        assert stats.drafted_by_position[0] == stats.row_rounds - 1
        assert stats.accepted_by_position[0] == stats.rounds - 1
