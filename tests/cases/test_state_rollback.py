"""Cases of the category state-rollback: C01, C04, C06, C10, C37, C38, C93."""

import itertools

import pytest
import torch

from families import MORE_FAMILIES
from support import (
    FAMILIES,
    ScriptedDrafter,
    StateCheck,
    cache_of,
    existing,
    feed,
    fresh_states,
    image_target,
    k_right,
    plain_ids,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"do_sample": False} | kwargs)


def checked(model, drafter: ScriptedDrafter, every: int = 5) -> StateCheck:
    drafter.check = StateCheck(model, every)
    return drafter.check


@pytest.mark.lossless
@pytest.mark.parametrize("family", FAMILIES)
def test_c01_three_right_drafts_every_round(family):
    model, reference = tiny_target(family), plain_ids(family)
    drafter = k_right(reference, 3)
    check = checked(model, drafter, every=1 if family == "qwen3_5" else 4)
    got = generate(model, reference[:, :12], assistant_model=drafter, max_new_tokens=64)
    assert got.tolist() == reference[:, : 12 + 64].tolist()
    assert check.rounds == 16
    assert check.worst <= 1e-5


@pytest.mark.contract
@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_c04_stock_forward_with_a_cache_agrees_with_one_forward(family):
    # the text model of glm5_next has no head of its own
    model = existing(lambda: image_target(family) if family == "glm5_next" else tiny_target(family))
    ids = random_prompt(15)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :10], use_cache=True)
        second = feed(model, cache_of(first), ids, 10, 15)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [0, 2, 8])
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_c06_prompts_shorter_than_the_convolution(family, length, k):
    model = tiny_target(family)
    reference = generate(model, random_prompt(length), max_new_tokens=20)
    drafter = k_right(reference, k)
    check = checked(model, drafter, every=1)
    got = generate(model, reference[:, :length], assistant_model=drafter, max_new_tokens=20)
    assert got.tolist() == reference.tolist()
    assert check.worst <= 1e-5  # of equal shape too: the convolution window has its full width


@pytest.mark.parametrize("family", FAMILIES)
def test_c10_left_padding_changes_nothing(family):
    model, reference = tiny_target(family), plain_ids(family, 24, 9)
    pad = torch.full((1, 3), 2)
    padded = torch.cat([pad, reference], dim=1)
    mask = (torch.arange(12) >= 3).long()[None]
    got = generate(model, padded[:, :12], attention_mask=mask, assistant_model=k_right(padded, 2), max_new_tokens=24)
    assert got.tolist() == padded.tolist()


class Scheduled(ScriptedDrafter):
    """Every round drafts as many tokens as its entry of `widths` says, `right` of them right."""

    def __init__(self, reference, widths, right):
        super().__init__(reference, block_size=8, is_right=lambda round_, position: position < right)
        self.widths = itertools.cycle(widths)

    def draft(self, context):
        drafts, logits = super().draft(context)
        return drafts[:, : next(self.widths)], logits


@pytest.mark.parametrize("family", FAMILIES)
def test_c37_rounds_without_candidates(family):
    model, reference = tiny_target(family), plain_ids(family)
    drafter = Scheduled(reference, (0, 8), right=5)
    check = checked(model, drafter, every=1)
    got = generate(model, reference[:, :12], assistant_model=drafter, max_new_tokens=40)
    assert got.tolist() == reference[:, :52].tolist()
    assert check.worst <= 1e-5


@pytest.mark.parametrize("right", [2, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_c38_blocks_cut_by_the_budget_or_by_confidence(family, right):
    model, reference = tiny_target(family), plain_ids(family)
    for limit in (4, 5):  # the first new token is the prefill's, so there is room for 2 drafts, and for 3
        options = {"max_new_tokens": limit, "return_dict_in_generate": True}
        cut = generate(model, reference[:, :12], assistant_model=k_right(reference, right), **options)
        assert cut.sequences.tolist() == reference[:, : 12 + limit].tolist()
        assert worst_error(states(cache_of(cut)), fresh_states(model, reference[:, : 11 + limit])) <= 1e-5

    drafter = Scheduled(reference, range(1, 8), right)
    check = checked(model, drafter, every=1)
    got = generate(model, reference[:, :12], assistant_model=drafter, max_new_tokens=30)
    assert got.tolist() == reference[:, :42].tolist()
    assert check.worst <= 1e-5


def test_c93_full_acceptance_and_rejection_in_turn():
    model, reference = tiny_target("nemotron_h"), plain_ids("nemotron_h", 200)
    ks = [k for right in range(1, 8) for k in (8, right)]
    drafter = ScriptedDrafter(reference, 8, lambda round_, position: position < ks[round_ % len(ks)])
    check = checked(model, drafter, every=1)
    got = generate(model, reference[:, :12], assistant_model=drafter, max_new_tokens=200)
    assert got.tolist() == reference.tolist()
    assert check.worst <= 1e-5
