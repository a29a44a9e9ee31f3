"""Calibration against hand-made numbers and closed forms, and what the drafter does with its temperatures."""

import functools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf.calibration import (
    ConfidenceRecords,
    auc,
    calibration,
    calibration_error,
    fit_temperatures,
    reliability,
    set_temperatures,
    threshold_sweep,
)
from ready_hf.confidence_records import collect_confidences
from ready_hf.demo_prompts import read_prompts
from ready_hf.evaluation import decode
from support import drafter_for, random_prompt, tiny_target


def logit(p):
    return math.log(p / (1 - p))


def records(rows):
    """From `(logits, accepted, ended)` per round."""
    logits, accepted, ended = zip(*rows, strict=True)
    return ConfidenceRecords(torch.tensor(logits), torch.tensor(accepted), torch.tensor(ended))


def test_reliability_and_ece_are_counted():
    confidences = torch.tensor([0.05, 0.15, 0.15, 0.95, 1.0])
    accepted = torch.tensor([False, True, False, True, True])
    bins = reliability(confidences, accepted)
    assert [(entry.low, entry.count, entry.accepted) for entry in bins] == [
        (0.0, 1, 0.0),
        (0.1, 2, 0.5),
        (0.9, 2, 1.0),
    ]
    assert [entry.confidence for entry in bins] == pytest.approx([0.05, 0.15, 0.975])
    assert calibration_error(bins) == pytest.approx((0.05 + 2 * 0.35 + 2 * 0.025) / 5)
    assert math.isnan(calibration_error([]))


def test_auc_is_the_share_of_ordered_pairs():
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.3])
    accepted = torch.tensor([False, True, False, True, False])
    pairs = [(a, r) for a in (0.4, 0.8) for r in (0.1, 0.4, 0.3)]
    expected = sum(1.0 if a > r else 0.5 if a == r else 0.0 for a, r in pairs) / len(pairs)
    assert auc(scores, accepted) == pytest.approx(expected)
    assert auc(-scores, accepted) == pytest.approx(1 - expected)
    assert auc(torch.zeros(4), torch.tensor([True, False, True, False])) == 0.5
    assert math.isnan(auc(scores, torch.ones(5, dtype=torch.bool)))


def test_only_drafts_that_were_judged_count():
    nan = math.nan
    found = records(
        [
            ([2.0, 1.0, 0.5], 1, False),  # judged: yes, no
            ([2.0, 1.0, 0.5], 1, True),  # the text ended with draft 1: draft 2 was not judged
            ([-1.0, nan, nan], 1, False),  # one draft, accepted
            ([0.0, 3.0, nan], 0, False),
        ]
    )
    assert found.num_drafts.tolist() == [3, 3, 1, 2]
    assert [found.judged(k)[1].tolist() for k in range(3)] == [[True, True, True, False], [False], []]
    # survival of draft 2: unknown where the text ended, and where there was no draft 2
    assert [found.survived(k)[1].tolist() for k in range(3)] == [[True, True, True, False], [False, False], [False]]
    positions = calibration(found)
    assert [entry.count for entry in positions] == [4, 1, 0]
    assert positions[0].auc == 1 / 3 * 2
    assert math.isnan(positions[2].ece)


def test_temperatures_have_their_closed_form():
    """Logits +-3 and +-2 with shares of 80 % and 60 %: T = 3 / logit(0.8), then 2 / logit(0.6)."""
    rows = []
    for first, sign in ((3.0, 1), (-3.0, -1)):
        for second, other in ((2.0, 1), (-2.0, -1)):
            for i in range(5):
                for j in range(5):
                    one = i < (4 if sign > 0 else 1)
                    two = j < (3 if other > 0 else 2)
                    rows.append(([first, second], 0 if not one else 2 if two else 1, False))
    found = fit_temperatures(records(rows))
    assert found == pytest.approx([3 / logit(0.8), 2 / logit(0.6)], rel=1e-4)


def test_temperatures_are_fitted_in_order():
    """A first position that cannot be right by itself is made up for by the next: its product has to fit."""
    # first logit always 4 where half are accepted: T_1 goes to the hottest, where c_1 = sigmoid(4 / 20) = 0.55
    rows = [([4.0, 1.0], 2 if i < 4 else 0, False) for i in range(8)]
    first, second = fit_temperatures(records(rows))
    assert first == pytest.approx(20.0, rel=1e-3)
    survival = 0.5 / (1 / (1 + math.exp(-4 / first)))
    assert second == pytest.approx(1 / logit(survival), rel=1e-3)


def test_a_position_with_nothing_to_fit_keeps_one():
    first, second = fit_temperatures(records([([1.0, 1.0], 2, False), ([2.0, math.nan], 0, False)]))
    assert first != 1.0
    assert second == 1.0
    assert fit_temperatures(records([([1.0, math.nan], 1, False), ([2.0, math.nan], 1, False)])) == [1.0, 1.0]


def test_fitted_temperatures_lower_the_ece_of_other_rounds():
    torch.manual_seed(0)
    true = torch.randn(4000) * 1.5 + 0.5

    def sample():
        accepted = (torch.rand(4000) < torch.sigmoid(true)).long()
        return ConfidenceRecords((true * 3)[:, None], accepted, torch.zeros(4000, dtype=torch.bool))

    found = fit_temperatures(sample())
    assert found == pytest.approx([3.0], rel=0.1)
    test = sample()
    before, after = calibration(test)[0], calibration(test, found)[0]
    assert after.ece < 0.3 * before.ece
    assert after.auc == before.auc  # the order stays


def test_threshold_sweep_is_counted():
    half, ninth = logit(0.5), logit(0.9)
    found = records(
        [([ninth, half, half], 2, False), ([half, half, half], 0, False), ([ninth, ninth, ninth], 3, True)]
    )
    # survival: 0.9 0.45 0.225 | 0.5 0.25 0.125 | 0.9 0.81 0.729
    points = threshold_sweep(found, [0.0, 0.3, 0.6, 0.95])
    assert [p.drafted for p in points] == pytest.approx([3, 6 / 3, 4 / 3, 0])
    assert [p.accepted for p in points] == pytest.approx([5 / 3, 5 / 3, 4 / 3, 0])
    assert [p.wasted for p in points] == pytest.approx([4 / 3, 1 / 3, 0, 0])
    # the third text ended with a draft; cut before it, a token of the target's own ends it
    assert [p.tokens for p in points] == pytest.approx([7 / 3, 7 / 3, 6 / 3, 1])
    hot = threshold_sweep(found, [0.3], [100.0, 100.0, 100.0])[0]
    assert hot.drafted == 1  # every confidence is about a half


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reliability(torch.tensor([0.5]), torch.tensor([True]), 0), "`num_bins` must be at least 1"),
        (lambda: reliability(torch.tensor([1.5]), torch.tensor([True])), "must be from 0 to 1"),
        (lambda: reliability(torch.tensor([0.5]), torch.tensor([True, False])), "two lists of one length"),
        (lambda: records([([1.0], 2, False)]), "`accepted` must be from 0"),
        (lambda: ConfidenceRecords(torch.zeros(2), torch.zeros(2), torch.zeros(2)), r"`logits` must be \[R, G\]"),
        (lambda: calibration(records([([1.0], 1, False)]), [1.0, 1.0]), "must be 1 positive numbers"),
        (lambda: calibration(records([([1.0], 1, False)]), [0.0]), "must be 1 positive numbers"),
        (lambda: threshold_sweep(records([([1.0], 1, False)]), [1.0]), r"`thresholds` must be in \[0, 1\)"),
        (
            lambda: fit_temperatures(
                ConfidenceRecords(
                    torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
                )
            ),
            "no rounds to fit",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@functools.cache
def shipped_models():
    path = ready_hf.small_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [p.encode(tokenizer) for p in read_prompts(Path(path) / "prompts.jsonl")[:2]]
    return target, prompts


def shipped_drafter():
    return AutoModel.from_pretrained(ready_hf.small_drafter_path("ready"), dtype=torch.float32).eval()


def test_records_of_real_decoding_are_those_of_its_rounds():
    target, prompts = shipped_models()
    drafter = shipped_drafter()
    drafter.config.confidence_threshold = 0.9  # blocks are collected whole all the same
    found = collect_confidences(target, drafter, prompts, max_new_tokens=24)
    assert drafter.config.confidence_threshold == 0.9
    drafter.config.confidence_threshold = 0.0
    logs = [decode(target, inputs, drafter, 0, 0, 24).log for inputs in prompts]
    rounds = [entry for log in logs for entry in log if entry.num_drafts]
    assert found.num_drafts.tolist() == [entry.num_drafts for entry in rounds]
    assert found.accepted.tolist() == [len(entry.accepted) for entry in rounds]
    assert not found.ended.any()
    # a shipped confidence head knows something
    logits, accepted = (torch.cat(parts) for parts in zip(*(found.judged(k) for k in range(8)), strict=True))
    assert auc(logits, accepted) > 0.6


def test_confidences_are_those_that_the_threshold_is_compared_with():
    """The block is cut where the product of the collected confidences falls below the threshold."""
    target, prompts = shipped_models()
    drafter = shipped_drafter()
    found = collect_confidences(target, drafter, prompts[:1], max_new_tokens=12)
    for temperatures in (None, [3.0] * 8, [1.0, 0.2, *[1.0] * 6]):
        scales = torch.tensor(temperatures or [1.0] * 8)
        survival = torch.sigmoid(found.logits[0] / scales).cumprod(0)
        set_temperatures(drafter, temperatures)
        for threshold in (0.2, 0.5):
            drafter.config.confidence_threshold = threshold
            log = decode(target, prompts[0], drafter, 0, 0, 12).log
            expected = int((survival >= threshold).long().cumprod(0).sum())
            assert log[0].num_drafts == expected, (temperatures, threshold)


def test_temperatures_change_no_token_and_survive_saving(tmp_path):
    target, prompts = shipped_models()
    drafter = shipped_drafter()
    assert drafter.config.confidence_temperatures is None
    plain = decode(target, prompts[0], None, 0, 0, 16).tokens
    set_temperatures(drafter, [2.0] * 8)
    drafter.config.confidence_threshold = 0.5
    assert decode(target, prompts[0], drafter, 0, 0, 16).tokens == plain
    drafter.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.confidence_temperatures == [2.0] * 8


@pytest.mark.parametrize("temperatures", [[1.0], [0.0] * 6, [-1.0] * 6, [math.inf] * 6, [math.nan] * 6, []])
def test_wrong_temperatures_are_refused_and_the_drafter_stays_as_it_was(temperatures):
    drafter = drafter_for(tiny_target("qwen3_5"))
    with pytest.raises(ValueError, match="`confidence_temperatures` must be 6 numbers above 0"):
        set_temperatures(drafter, temperatures)
    assert drafter.config.confidence_temperatures is None


def test_without_a_confidence_head_there_is_nothing_to_calibrate():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target, enable_confidence_head=False)
    inputs = [{"input_ids": random_prompt(5)}]
    with pytest.raises(ValueError, match="no confidence head"):
        collect_confidences(target, drafter, inputs)
    with pytest.raises(ValueError, match="needs `enable_confidence_head=True`"):
        set_temperatures(drafter, [1.0] * 6)
    with pytest.raises(TypeError, match="expected a ReaDy drafter"):
        collect_confidences(target, ready_hf.PromptLookupDrafter(), inputs)
    with pytest.raises(ValueError, match="prompts of one sequence"):
        collect_confidences(target, drafter_for(target), [])


def test_collected_logits_are_those_of_drafting(monkeypatch):
    """Draft by draft: the same as where a threshold that never cuts asks for them."""
    target, prompts = shipped_models()
    drafter = shipped_drafter()
    found = collect_confidences(target, drafter, prompts[:1], max_new_tokens=8)
    asked, confidence_logits = [], drafter.confidence_logits

    def recorded(hidden_states, previous_ids):
        asked.append(confidence_logits(hidden_states, previous_ids))
        return asked[-1]

    monkeypatch.setattr(drafter, "confidence_logits", recorded)
    drafter.config.confidence_threshold = 1e-12
    decode(target, prompts[0], drafter, 0, 0, 8)
    torch.testing.assert_close(torch.cat(asked), found.logits[~found.logits.isnan()])
