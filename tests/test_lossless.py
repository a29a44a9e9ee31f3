"""Drafted greedy decoding gives the ids of plain `generate` on the trained target; see also `test_families.py`.

The negative control at the end shows that the comparison fails as soon as states are not rolled back.
"""

import functools

import pytest
import torch

import ready_hf
from support import (
    ScriptedDrafter,
    StateCheck,
    partly_right,
    trained_target,
    trained_tokenizer,
)


pytestmark = pytest.mark.lossless

NEW_TOKENS = 96
WORST_STATE_ERROR = 1e-5

CODE = '''def read_table(path, separator=","):
    """Return the rows of a text file as lists of words."""
    rows = []
    with open(path) as source:
        for line in source:
            words = line.strip().split(separator)
            if words and not words[0].startswith("#"):
                rows.append(words)
    return rows


def column_sum(rows, index):
    total = 0
    for row in rows:
        total += int(row[index])
    return total'''
TASK = f"<file>\n{CODE}\n</file>\n# Rename rows to entries\n<edited>\n"  # what the trained target has learned to do


@functools.cache
def trained_ids() -> torch.Tensor:
    """REF of the trained target, which edits a piece of code."""
    prompt = trained_tokenizer()(TASK, return_tensors="pt").input_ids
    return trained_target().generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)


def drafted(model: torch.nn.Module, reference: torch.Tensor, drafter: ScriptedDrafter) -> torch.Tensor:
    prompt = reference[:, :-NEW_TOKENS]
    return model.generate(prompt, assistant_model=drafter, max_new_tokens=NEW_TOKENS, do_sample=False)


def test_trained_reference_is_text_that_does_not_loop():
    new = trained_ids()[0, -NEW_TOKENS:].tolist()
    four_grams = list(zip(new, new[1:], new[2:], new[3:], strict=False))
    assert len(set(four_grams)) >= 0.9 * len(four_grams)
    assert "def read_table(path, separator" in trained_tokenizer().decode(new)


@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.85, 1.0])
def test_trained_target_ids_equal_plain(share, block_size):
    drafter = partly_right(trained_ids(), share, block_size)
    drafter.check = check = StateCheck(trained_target(), every=40)

    assert torch.equal(drafted(trained_target(), trained_ids(), drafter), trained_ids())
    assert check.worst <= WORST_STATE_ERROR


@pytest.mark.parametrize("num_tokens", [4, 8, 16])
def test_trained_target_ids_equal_plain_with_prompt_lookup(num_tokens):
    with ready_hf.record_stats() as stats:
        ids = drafted(trained_target(), trained_ids(), ready_hf.PromptLookupDrafter(num_tokens))
    assert torch.equal(ids, trained_ids())
    assert stats.tokens_per_forward > 2
    assert 0 < sum(stats.accepted_by_position) < sum(stats.drafted_by_position)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.85])
def test_negative_control_without_rollback_the_trained_target_goes_wrong(share, monkeypatch):
    monkeypatch.setattr("ready_hf.rollback._commit_states", lambda layers, keep, length: None)
    drafter = partly_right(trained_ids(), share)
    drafter.check = check = StateCheck(trained_target(), every=25)

    assert not torch.equal(drafted(trained_target(), trained_ids(), drafter), trained_ids())
    assert check.worst > 1000 * WORST_STATE_ERROR
