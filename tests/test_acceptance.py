"""`accept` alone: whatever the draft's distribution, the emitted tokens follow the target's; 200,000 draws each.

Letters: B rows, N drafts of a block, V = 8 tokens.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ready_hf.acceptance import accept, leading_true
from toys import (
    LEVEL,
    NO_WARPERS,
    TOY_SIZE,
    WARPERS,
    assert_distributed,
    bigram_logits,
    histogram,
    p_value,
    toy_pairs,
    warped,
)


ROWS = 200_000
ALMOST_ONE = 1 - 2**-24  # the largest number below 1 in float32


def distribution(seed: int, temperature: float = 1.0, zeros: tuple[int, ...] = ()) -> torch.Tensor:
    logits = bigram_logits(seed)[0] / temperature
    logits[list(zeros)] = -torch.inf
    return logits.softmax(-1)


def emitted(p: torch.Tensor, q: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """The token at one drafted position, per row: the draft, or its replacement."""
    num_accepted, residual = accept(
        p.expand(ROWS, 1, -1), None if q is None else q.expand(ROWS, 1, -1), drafts[:, None], torch.rand(ROWS, 1)
    )
    return torch.where(num_accepted == 1, drafts, torch.multinomial(residual, 1)[:, 0])


def sampled(q: torch.Tensor, rows: int = ROWS) -> torch.Tensor:
    return torch.multinomial(q, rows, replacement=True)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("seed", range(3))
def test_emitted_token_follows_target(seed: int, temperature: float) -> None:
    torch.manual_seed(seed)
    p, q = distribution(2 * seed, temperature), distribution(2 * seed + 1, temperature)
    assert_distributed(emitted(p, q, sampled(q)), p)


@pytest.mark.parametrize(
    ("p_zeros", "q_zeros"),
    [
        ((), (0, 1, 2)),
        ((0, 1, 2), ()),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((0, 2, 4), (0, 1, 2, 3)),
        ((1, 2, 3, 4, 5, 6, 7), ()),
    ],
    ids=["q_smaller", "p_smaller", "disjoint", "overlapping", "p_point_mass"],
)
def test_supports_may_differ(p_zeros: tuple[int, ...], q_zeros: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    p, q = distribution(0, zeros=p_zeros), distribution(1, zeros=q_zeros)
    assert_distributed(emitted(p, q, sampled(q)), p)


@pytest.mark.parametrize("draft", range(TOY_SIZE))
def test_draft_without_probabilities_is_a_point_mass(draft: int) -> None:
    torch.manual_seed(draft)
    p = distribution(0)
    drafts = torch.full((ROWS,), draft)
    tokens = emitted(p, None, drafts)
    assert_distributed(tokens, p)
    accepted = (tokens == draft).float().mean()  # a replacement is never the rejected draft
    assert abs(accepted - p[draft]) < 6 * (p[draft] / ROWS).sqrt()


def test_point_mass_is_the_same_as_one_hot_probabilities() -> None:
    torch.manual_seed(0)
    p, drafts, uniforms = torch.rand(50, 4, 8).softmax(-1), torch.randint(8, (50, 4)), torch.rand(50, 4)
    one_hot = torch.nn.functional.one_hot(drafts, 8).float()
    for got, want in zip(accept(p, None, drafts, uniforms), accept(p, one_hot, drafts, uniforms), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 1e-3, 1e-6])
def test_draft_from_target_distribution_is_always_accepted(temperature: float) -> None:
    p = (bigram_logits(0) / temperature).softmax(-1)[:, None]  # [8, 1, V]
    for draft in range(TOY_SIZE):
        drafts = torch.full((8, 1), draft)
        drawable = p[:, 0, draft] > torch.finfo(torch.float32).tiny
        num_accepted, residual = accept(p, p, drafts, torch.full((8, 1), ALMOST_ONE))
        assert bool((num_accepted[drawable] == 1).all())
        assert torch.equal(residual, p[:, 0])


def test_forced_rejection_of_a_draft_from_target_distribution_falls_back_to_target() -> None:
    p = bigram_logits(0).softmax(-1)[:, None]
    num_accepted, residual = accept(p, p, torch.zeros(8, 1, dtype=torch.long), torch.full((8, 1), 2.0))
    assert num_accepted.tolist() == [0] * 8
    assert torch.equal(residual, p[:, 0])


def test_almost_equal_distributions_leave_a_valid_residual() -> None:
    torch.manual_seed(0)
    p = torch.randn(1000, 1, 8).softmax(-1)
    q = (p * (1 + 1e-7 * torch.randn_like(p))).clamp_min(0)
    residual = accept(p, q, torch.zeros(1000, 1, dtype=torch.long), torch.full((1000, 1), 2.0)).residual
    assert_close_to_one(residual.sum(-1))
    assert bool((residual >= 0).all())
    torch.multinomial(residual, 1)


@pytest.mark.parametrize("warpers", [NO_WARPERS, WARPERS], ids=["plain", "warped"])
@pytest.mark.parametrize("sample", [True, False], ids=["sampled", "deterministic"])
@pytest.mark.parametrize("seed", range(2))
def test_two_tokens_of_a_block_are_jointly_right(seed: int, sample: bool, warpers) -> None:
    torch.manual_seed(seed)
    target, draft = bigram_logits(10 + seed), bigram_logits(20 + seed)
    p = warped(target, warpers)
    assert_distributed(toy_pairs(target, draft, ROWS, warpers, sample), p[0][:, None] * p)


def test_num_accepted_counts_from_the_left_only() -> None:
    hits = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    assert leading_true(hits).tolist() == [3, 2, 1, 0, 0]
    p = torch.where(hits[..., None], torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))  # [5, 3, 2]
    num_accepted, residual = accept(p, None, torch.zeros(5, 3, dtype=torch.long), torch.full((5, 3), 0.5))
    assert num_accepted.tolist() == [3, 2, 1, 0, 0]
    assert residual[1:].tolist() == [[0.0, 1.0]] * 4  # of the position of the first rejection


def test_residual_is_that_of_the_first_rejection() -> None:
    torch.manual_seed(0)
    p, q = torch.randn(64, 5, 8).softmax(-1), torch.randn(64, 5, 8).softmax(-1)
    drafts, uniforms = torch.randint(8, (64, 5)), torch.rand(64, 5)
    num_accepted, residual = accept(p, q, drafts, uniforms)
    assert set(num_accepted.tolist()) == set(range(6))
    for row in range(64):
        position = int(num_accepted[row])
        for k in range(min(position, 4) + 1):
            ratio = p[row, k, drafts[row, k]] / q[row, k, drafts[row, k]]
            assert bool(uniforms[row, k] < ratio) == (k < position)
        if position < 5:
            left = (p[row, position] - q[row, position]).clamp_min(0)
            torch.testing.assert_close(residual[row], left / left.sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_float32_and_leaves_everything_else_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    p, q = torch.randn(6, 3, 8).softmax(-1).to(dtype), torch.randn(6, 3, 8).softmax(-1).to(dtype)
    drafts, uniforms = torch.randint(8, (6, 3)), torch.rand(6, 3)
    inputs = (p, q, drafts, uniforms)
    copies, noise = [tensor.clone() for tensor in inputs], torch.get_rng_state()
    first, second = accept(*inputs), accept(*inputs)
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))
    assert first.residual.dtype == torch.float32
    assert first.num_accepted.dtype == torch.long
    assert torch.equal(first.residual, second.residual)
    assert torch.equal(first.num_accepted, second.num_accepted)
    want = accept(p.float(), q.float(), drafts, uniforms)
    assert torch.equal(first.residual, want.residual)
    assert torch.equal(first.num_accepted, want.num_accepted)


def assert_close_to_one(total: torch.Tensor) -> None:
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)


logits = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.sampled_from([-torch.inf, 0.0])),
    min_size=TOY_SIZE - 1,
    max_size=TOY_SIZE - 1,
)
position = st.tuples(logits, logits, st.integers(0, TOY_SIZE - 1), st.floats(0, ALMOST_ONE, width=32))
blocks = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(position, min_size=n, max_size=n), min_size=1, max_size=3)
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(block=blocks, temperature=st.sampled_from([1.0, 0.1, 1e-3, 100.0]))
def test_whatever_the_inputs(block: list[list[tuple]], temperature: float) -> None:
    """The residual is a distribution inside the target's support; a rejected draft was overestimated."""

    def probabilities(index: int) -> torch.Tensor:
        values = torch.tensor([[[0.0, *entry[index]] for entry in row] for row in block])
        return (values / temperature).softmax(-1)

    p, q = probabilities(0), probabilities(1)
    drafts = torch.tensor([[entry[2] for entry in row] for row in block])
    uniforms = torch.tensor([[entry[3] for entry in row] for row in block], dtype=torch.float32)
    num_accepted, residual = accept(p, q, drafts, uniforms)
    assert bool(residual.isfinite().all())
    assert bool((residual >= 0).all())
    assert_close_to_one(residual.sum(-1))
    p_draft, q_draft = (x.gather(-1, drafts[..., None])[..., 0] for x in (p, q))
    for row, count in enumerate(num_accepted.tolist()):
        rejected = min(count, drafts.shape[1] - 1)
        assert not bool((residual[row] > 0)[p[row, rejected] == 0].any())
        assert bool((p_draft[row, :count] > 0).all())
        if count < drafts.shape[1]:
            assert p_draft[row, count] <= q_draft[row, count]
            if p_draft[row, count] < q_draft[row, count]:
                fallback = not bool((p[row, rejected] > q[row, rejected]).any())
                assert residual[row, drafts[row, count]] == 0 or fallback
    torch.multinomial(residual, 1)


def test_the_judge_itself() -> None:
    """The chi-square test sees a shift of 1 % in 200,000 samples and something impossible in one, and nothing else."""
    torch.manual_seed(0)
    p = distribution(0)
    assert p_value(histogram(sampled(p)), p) > 1e-3
    shifted = p * torch.where(torch.arange(8) % 2 == 0, 1.02, 0.98)
    assert p_value(histogram(sampled(shifted)), p) < LEVEL
    impossible = torch.tensor([0.0, *[1 / 7] * 7])
    counts = histogram(sampled(impossible))
    assert p_value(counts, impossible) > 1e-3
    counts[0] += 1
    assert p_value(counts, impossible) == 0.0
