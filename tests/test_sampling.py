"""Sampling through `generate` with a drafter: the first four tokens follow the target's exact distribution.

Acceptance is 30 to 90 %, blocks have three drafts, so that accepted, corrected and held-back tokens all occur. Rows of
a batch are independent samples: only how far a block goes is shared.
"""

import functools
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from prefix_tree import PrefixTree, TreeDrafter, sample
from support import random_prompt, tiny_target


DEPTH = 4
NEW_TOKENS = DEPTH + 1  # the last token is never drafted
WARPING = {"temperature": 0.7, "top_k": 3, "top_p": 0.95}
PENALTY = {"repetition_penalty": 3.0}


@functools.cache
def tree(penalised: bool = False) -> PrefixTree:
    processors = [
        logits_process.TemperatureLogitsWarper(WARPING["temperature"]),
        logits_process.TopKLogitsWarper(WARPING["top_k"]),
        logits_process.TopPLogitsWarper(WARPING["top_p"]),
    ]
    if penalised:
        processors.insert(0, logits_process.RepetitionPenaltyLogitsProcessor(PENALTY["repetition_penalty"]))
    return PrefixTree(tiny_target("qwen3_5"), random_prompt(6), DEPTH, LogitsProcessorList(processors))


def run(
    drafter: TreeDrafter, batch: int, calls: int, seed: int = 0, **options: Any
) -> tuple[torch.Tensor, list[float]]:
    """Samples, and the acceptance by position."""
    torch.manual_seed(seed)
    sequences, stats = sample(drafter.tree, drafter, batch, calls, NEW_TOKENS, **WARPING, **options)
    assert stats.calls == calls
    assert stats.new_tokens == batch * calls * NEW_TOKENS
    return sequences, stats.acceptance_by_position


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "calls", "noise"), [(250, 6, 0.4), (8, 80, 0.15), (1, 300, 0.4)], ids=["batch", "small_batch", "single"]
)
def test_sampled_drafts_do_not_change_the_distribution(batch: int, calls: int, noise: float) -> None:
    sequences, acceptance = run(TreeDrafter(tree(), (noise,)), batch, calls)
    tree().assert_distributed(sequences)
    assert 0.3 < acceptance[0] < 0.9
    assert batch == 250 or 0.1 < acceptance[1] < acceptance[0]


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "calls"), [(250, 2), (1, 120)], ids=["batch", "single"])
def test_deterministic_drafts_do_not_change_the_distribution(batch: int, calls: int) -> None:
    sequences, acceptance = run(TreeDrafter(tree(), samples=False), batch, calls)
    tree().assert_distributed(sequences)
    assert 0.3 < acceptance[0] < 0.9


@pytest.mark.parametrize(("batch", "calls"), [(250, 2), (1, 80)], ids=["batch", "single"])
def test_processors_that_look_at_the_sequence_keep_the_distribution(batch: int, calls: int) -> None:
    """The drafter knows nothing of the penalty."""
    assert tree(penalised=True).paths.keys() != tree().paths.keys()
    sequences, acceptance = run(TreeDrafter(tree(penalised=True), (0.4,)), batch, calls, **PENALTY)
    tree(penalised=True).assert_distributed(sequences)
    assert 0.3 < acceptance[0] < 0.9


@pytest.mark.slow
def test_rows_with_a_good_and_a_bad_drafter_are_both_right() -> None:
    """The bad row holds the good one back; both keep the target's distribution."""
    good, bad = 0.1, 1.5
    sequences, _ = run(TreeDrafter(tree(), (good, bad)), 2, 100)
    many, _ = run(TreeDrafter(tree(), (good, bad)), 200, 4)
    for row in range(2):
        tree().assert_distributed(torch.cat([sequences[row::2], many[row::2]]))
        _, acceptance = run(TreeDrafter(tree(), ((good, bad)[row],)), 100, 1)
        assert acceptance[0] > 0.75 if row == 0 else acceptance[0] < 0.3


def test_same_seed_same_tokens() -> None:
    drafter = TreeDrafter(tree(), (0.4,))
    first, again, other = (run(drafter, 4, 2, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_drafts_are_drawn_from_the_warped_distribution() -> None:
    """A drafter that has the target's own logits and warpers is always accepted."""
    _, acceptance = run(TreeDrafter(tree()), 1, 20)
    assert acceptance == [1.0, 1.0, 1.0]
    _, acceptance = run(TreeDrafter(tree()), 8, 5)
    assert acceptance == [1.0, 1.0, 1.0]
