"""Bootstrap intervals against closed forms and hand-made numbers, and the break-even calculator against arithmetic."""

import math

import pytest
import torch

from ready_hf.break_even import break_even
from ready_hf.intervals import MACRO, Estimate, bootstrap, ratio


def mean(totals):
    """Total over the number of prompts, which is the second quantity."""
    return totals[..., 0] / totals[..., 1]


def test_interval_of_a_mean_is_that_of_the_normal_approximation():
    torch.manual_seed(0)
    values = torch.randn(400, dtype=torch.float64) * 3 + 10
    found = bootstrap([[v, 1.0] for v in values.tolist()], ["a"] * 400, mean, resamples=20_000)["a"]
    error = 1.96 * float(values.std(correction=0)) / 20
    assert found.value == pytest.approx(float(values.mean()))
    assert found.low == pytest.approx(found.value - error, abs=0.03)
    assert found.high == pytest.approx(found.value + error, abs=0.03)


def test_two_prompts_have_the_percentiles_that_can_be_counted():
    # means 1 (a quarter), 2 (half), 3 (a quarter)
    found = bootstrap([[1.0, 1.0], [3.0, 1.0]], ["a", "a"], mean)["a"]
    assert (found.value, found.low, found.high) == (2.0, 1.0, 3.0)


def test_totals_are_divided_not_ratios_averaged():
    found = bootstrap([[10.0, 1.0], [10.0, 9.0]], ["a", "a"], ratio(0, 1))["a"]
    assert found.value == 2.0  # the mean of the ratios is 5.6


def test_macro_mean_weighs_tasks_alike_and_draws_within_them():
    rows = [[1.0, 1.0]] * 6 + [[3.0, 1.0]] * 2
    tasks = ["large"] * 6 + ["small"] * 2
    found = bootstrap(rows, tasks, ratio(0, 1))
    assert list(found) == ["large", "small", MACRO]
    # prompts of a task are alike, so that a draw across tasks would have a width
    assert found[MACRO] == Estimate(2.0, 2.0, 2.0)


def test_paired_differences_are_narrower_than_unpaired_ones():
    torch.manual_seed(1)
    base = (torch.rand(60) * 10).tolist()
    rows = [[value + 0.5, 1.0, value, 1.0] for value in base]
    mine, theirs = ratio(0, 1), ratio(2, 3)
    paired = bootstrap(rows, ["a"] * 60, lambda totals: mine(totals) - theirs(totals))["a"]
    assert (paired.low, paired.high) == (pytest.approx(0.5), pytest.approx(0.5))
    assert paired.is_above_zero
    assert not bootstrap(rows, ["a"] * 60, lambda totals: theirs(totals) - mine(totals))["a"].is_above_zero


def test_a_single_prompt_has_no_interval_nor_has_a_mean_that_includes_it():
    found = bootstrap([[2.0, 1.0], [4.0, 1.0], [6.0, 1.0]], ["a", "b", "b"], ratio(0, 1))
    assert found["a"].value == 2.0
    assert math.isnan(found["a"].low)
    assert not math.isnan(found["b"].low)
    assert found[MACRO].value == 3.5
    assert math.isnan(found[MACRO].low)
    assert found["a"].text() == "2.00"
    assert found["a"].to_dict() == {"value": 2.0, "low": None, "high": None}


def test_the_seed_decides():
    torch.manual_seed(2)
    rows = [[value, 1.0] for value in torch.rand(30).tolist()]
    first, again, other = (bootstrap(rows, ["a"] * 30, mean, seed=seed, resamples=200)["a"] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_resamples_in_parts_are_the_same(monkeypatch):
    from ready_hf import intervals

    rows = [[float(i), 1.0] for i in range(10)]
    whole = bootstrap(rows, ["a"] * 10, mean, resamples=100)
    totals = intervals._totals
    monkeypatch.setattr(intervals, "_totals", lambda rows, chosen: totals(rows, chosen, most=30))
    assert bootstrap(rows, ["a"] * 10, mean, resamples=100) == whole


def test_what_has_no_value_is_no_number():
    found = bootstrap([[0.0, 0.0], [0.0, 0.0]], ["a", "a"], ratio(0, 1))["a"]
    assert math.isnan(found.value)
    assert found.text() == "n/a"


@pytest.mark.parametrize(
    ("rows", "tasks", "resamples", "message"),
    [
        ([], [], 10, "need one task per prompt"),
        ([[1.0]], ["a", "b"], 10, "got 1 and 2 tasks"),
        ([[1.0]], [MACRO], 10, "must not be called 'macro mean'"),
        ([[1.0]], ["a"], 0, "`resamples` must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_of_the_bootstrap(rows, tasks, resamples, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(rows, tasks, ratio(0, 0), resamples=resamples)


def test_break_even_is_arithmetic():
    found = break_even([0.8, 0.5, 0.1], draft=1.0, verify=[5.0, 6.0, 9.0], other=0.5, plain=5.0)
    assert [x.num_drafts for x in found.lengths] == [1, 2, 3]
    assert [x.tokens for x in found.lengths] == pytest.approx([1.8, 2.3, 2.4])
    assert [x.round_time for x in found.lengths] == [6.5, 7.5, 10.5]
    assert [x.speed for x in found.lengths] == pytest.approx([9 / 6.5, 11.5 / 7.5, 12 / 10.5])
    assert [x.needed for x in found.lengths] == [1.3, 1.5, 2.1]
    assert found.best.num_drafts == 2
    assert found.is_worth_it
    assert found.verdict.startswith("worth it: 1.53x at 2 drafts per round")
    assert found.table().splitlines()[3] == "| 2 | 2.30 | 1.50 | 1.53x |"
    assert found.to_dict()["best"]["num_drafts"] == 2


def test_a_round_that_takes_as_long_as_its_tokens_is_not_worth_it():
    assert not break_even([1.0], draft=0.0, verify=2.0, plain=1.0).is_worth_it
    assert break_even([1.0], draft=0.0, verify=1.99, plain=1.0).is_worth_it
    assert "not worth it: at best 1.00x" in break_even([1.0], draft=0.0, verify=2.0, plain=1.0).verdict


def test_block_lengths_can_be_chosen():
    found = break_even([0.9, 0.8, 0.7], draft=1.0, verify=[4.0, 2.0], plain=2.0, num_drafts=[3, 1])
    assert [(x.num_drafts, x.round_time) for x in found.lengths] == [(1, 3.0), (3, 5.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": []}, "at least one position"),
        ({"acceptance": [1.2]}, "shares from 0 to 1, got 1.2 at position 1"),
        ({"acceptance": [math.nan]}, "shares from 0 to 1"),
        ({"acceptance": [0.5, 0.6]}, "must not rise from one position to the next, got 0.5 then 0.6 at position 2"),
        ({"verify": -1.0}, "`verify` must be finite times of at least 0"),
        ({"verify": [1.0]}, "`verify` must be one time, or one per block length"),
        ({"draft": math.inf}, "`draft` must be finite"),
        ({"plain": 0.0}, "`plain` must be above 0"),
        ({"verify": 0.0}, "takes no time"),
        ({"num_drafts": [3]}, "`num_drafts` must be block lengths from 1 to 2"),
        ({"num_drafts": [0]}, "`num_drafts` must be block lengths from 1 to 2"),
    ],
)
def test_wrong_arguments_of_break_even(options, message):
    given = {"acceptance": [0.5, 0.4], "draft": 0.0, "verify": 1.0, "plain": 1.0, **options}
    with pytest.raises(ValueError, match=message):
        break_even(given.pop("acceptance"), **given)
