"""200 calls of `generate` with random options: drafted decoding gives what plain decoding gives, whatever is asked.

Greedy: the same ids, scores, streamed tokens and caches, or the same error. Sampled: the same seed gives the same
text, another seed another one; that the text follows the target is what `test_sampling.py` shows.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from random_calls import DRAFTERS, Call, Outcome, calls, drafter, outcome
from support import cache_of, states, worst_error


pytestmark = pytest.mark.lossless
RANDOM = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": (Phase.explicit, Phase.generate),  # to make a failing call smaller takes minutes
    "suppress_health_check": list(HealthCheck),
}


def assert_close(got, want, bound: float) -> None:
    """Scores or logits of every token; `None` where they were not asked for."""
    assert (got is None) == (want is None)
    for one, other in zip(got or (), want or (), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound, equal_nan=True)


def seen(cache, length: int) -> dict[str, torch.Tensor]:
    """States, and keys and values of the tokens seen: a static cache has room for more, which nobody looks at."""
    found = states(cache)
    return {name: x[:, :, :length] if name.endswith(("keys", "values")) else x for name, x in found.items()}


def assert_same(drafted: Outcome, plain: Outcome, bound: float) -> None:
    assert drafted.ids == plain.ids
    assert drafted.events == plain.events
    for got, want in zip(drafted.turns, plain.turns, strict=True):
        assert_close(got.scores, want.scores, bound)
        assert_close(got.logits, want.logits, bound)
        length = cache_of(want).get_seq_length()
        assert cache_of(got).get_seq_length() == length
        assert worst_error(seen(cache_of(got), length), seen(cache_of(want), length)) <= bound


def check(call: Call, bound: float = 1e-4) -> None:
    """A drafted call against the plain one; under sampling, against itself, for its distribution is that of plain."""
    plain = outcome(call.run)
    references = plain.turns if isinstance(plain, Outcome) else []

    def with_drafter(turn):
        reference = references[turn].sequences if references else call.inputs["input_ids"]
        return drafter(call.target, call.kind, reference)

    drafted = outcome(lambda: call.run(with_drafter))
    if not isinstance(plain, Outcome) or not isinstance(drafted, Outcome):
        assert drafted == plain
    elif call.options["do_sample"]:
        assert outcome(lambda: call.run(with_drafter)).ids == drafted.ids
        assert [len(output.sequences) for output in drafted.turns] == [len(call.starts)] * len(drafted.turns)
    else:
        assert_same(drafted, plain, bound)


@pytest.mark.slow
@settings(max_examples=130, **RANDOM)
@given(call=calls("tiny", longest=9, sample=False))
def test_greedy_calls_on_the_tiny_target(call):
    check(call)


@pytest.mark.slow
@settings(max_examples=44, **RANDOM)
@given(call=calls("tiny", longest=7, sample=True))
def test_sampled_calls_on_the_tiny_target(call):
    check(call)


@pytest.mark.slow
@settings(max_examples=16, **RANDOM)
@given(call=calls("small", longest=9, sample=False))
def test_greedy_calls_of_the_shipped_drafters(call):
    check(call)


@pytest.mark.slow
@settings(max_examples=10, **RANDOM)
@given(call=calls("small", longest=8, sample=True))
def test_sampled_calls_of_the_shipped_drafters(call):
    check(call)


@pytest.mark.parametrize("kind", sorted({*DRAFTERS["tiny"], "ready"}))
def test_another_seed_gives_another_text(kind):
    call = Call("small" if kind == "ready" else "tiny", kind, (40,), (12,), {"do_sample": True, "max_new_tokens": 9})

    def text(seed):
        reference = call.inputs["input_ids"]
        return replace(call, seed=seed).run(lambda turn: drafter(call.target, kind, reference)).ids[0][0]

    assert text(0) == text(0) != text(1)
