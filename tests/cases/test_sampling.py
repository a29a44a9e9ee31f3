"""Cases C05, C18, C48, C49 and C50: what users of other projects met under sampling."""

import functools

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from prefix_tree import PrefixTree, TreeDrafter, sample
from ready_hf.acceptance import accept
from support import VOCAB_SIZE, random_prompt, tiny_target
from toys import (
    LEVEL,
    TOY_SIZE,
    WARPERS,
    assert_distributed,
    bigram_logits,
    histogram,
    p_value,
    toy_drafts,
    toy_pairs,
    warped,
)


ROWS = 200_000
PROMPT = random_prompt(6)
TARGET, DRAFT = bigram_logits(5), bigram_logits(6)
TIGHT = LogitsProcessorList(
    [
        logits_process.TemperatureLogitsWarper(0.7),
        logits_process.TopKLogitsWarper(2),
        logits_process.TopPLogitsWarper(0.9),
    ]
)


def test_c05_pairs_with_and_without_drafter_cannot_be_told_apart() -> None:
    """Temperature 0.7, top-k 2, top-p 0.9: 200,000 pairs with a drafter against as many without."""
    torch.manual_seed(5)
    p = warped(TARGET, TIGHT)
    drafted = histogram(toy_pairs(TARGET, DRAFT, ROWS, TIGHT))
    first = torch.multinomial(p[0], ROWS, replacement=True)
    plain = histogram(torch.stack([first, torch.multinomial(p[first], 1)[:, 0]], dim=1))
    assert p_value(drafted, p[0][:, None] * p) > LEVEL
    assert torch.equal(drafted > 0, plain > 0)
    both = (drafted + plain)[plain > 0].double()  # two-sample test: cells of both halves against their mean
    halves = torch.stack([drafted[plain > 0], plain[plain > 0]]).double()
    statistic = ((halves - both / 2).square() / (both / 2)).sum()
    assert torch.special.gammaincc(torch.tensor((len(both) - 1) / 2).double(), statistic / 2) > LEVEL


def test_c05_returned_draft_distribution_is_the_one_sampled_from() -> None:
    torch.manual_seed(6)
    for token in range(TOY_SIZE):
        draft = DRAFT[token].expand(TOY_SIZE, -1)
        sequences, logits = toy_drafts(draft, ROWS // TOY_SIZE, 1, TIGHT)
        q = logits[0, 0].softmax(-1)
        assert int((q > 0).sum()) <= 2
        torch.testing.assert_close(q, warped(DRAFT[token], TIGHT))
        assert_distributed(sequences[:, 1], q)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("is_forced", [False, True], ids=["drawn", "forced_rejection"])
def test_c18_drafter_with_the_distribution_of_the_target(temperature: float, is_forced: bool) -> None:
    """Nothing is left of p - q: the replacement comes from p, without NaN."""
    torch.manual_seed(18)
    p = (TARGET[0] / temperature).softmax(-1).expand(1000, 1, -1)
    drafts = torch.multinomial(p[:, 0], 1)
    uniforms = torch.full((1000, 1), 2.0) if is_forced else torch.rand(1000, 1)
    num_accepted, residual = accept(p, p.clone(), drafts, uniforms)
    assert num_accepted.tolist() == [0 if is_forced else 1] * 1000
    assert torch.equal(residual, p[:, 0])
    assert_distributed(torch.multinomial(residual, 1)[:, 0], p[0, 0])


def tree_of(depth: int, *warpers: logits_process.LogitsProcessor) -> PrefixTree:
    return PrefixTree(tiny_target("qwen3_5"), PROMPT, depth, LogitsProcessorList(warpers))


@functools.cache
def greedy_tree() -> PrefixTree:
    return tree_of(8, logits_process.TopKLogitsWarper(1))


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1e-6}, {"temperature": 1e-4}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 100.0, "top_k": 1}],
    ids=str,
)
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("batch", [1, 3])
def test_c48_settings_that_leave_one_token_are_greedy_in_draft_and_verify(options, noise: float, batch: int) -> None:
    torch.manual_seed(48)
    (greedy,) = greedy_tree().paths
    options = {"top_k": 0, **options}
    sequences, stats = sample(greedy_tree(), TreeDrafter(greedy_tree(), (noise,)), batch, 1, 8, **options)
    assert sequences[:, PROMPT.shape[1] :].tolist() == [list(greedy)] * batch
    if noise == 0:
        assert stats.acceptance_by_position == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 100.0])
def test_c48_scores_are_finite_and_tokens_valid_at_extreme_temperatures(temperature: float) -> None:
    drafter = TreeDrafter(greedy_tree(), (0.5,))
    for seed in range(10):
        torch.manual_seed(seed)
        output = tiny_target("qwen3_5").generate(
            PROMPT,
            assistant_model=drafter,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_new_tokens=8,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert all(scores.isfinite().all() for scores in output.scores)
        assert output.sequences.shape == (1, PROMPT.shape[1] + 8)
        assert 0 <= output.sequences.min() <= output.sequences.max() < VOCAB_SIZE


@pytest.mark.slow
def test_c49_flat_target_gives_many_first_tokens_at_the_right_frequencies() -> None:
    """300 seeds at temperature 1: first tokens, then accepted drafts and corrections apart."""
    tree = tree_of(2)
    drafter = TreeDrafter(tree, (1.0,), block_size=1)
    samples = []
    for seed in range(300):
        torch.manual_seed(seed)
        samples.append(sample(tree, drafter, 10, 1, 3, temperature=1.0, top_k=0)[0][:, PROMPT.shape[1] :])
    first, second = torch.cat(samples)[:, :2].unbind(1)
    drafted = torch.cat(drafter.drafted)[:, 0]  # the only draft of every call
    p = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for (one, two), probability in tree.paths.items():
        p[one, two] = probability
    assert len(set(first.tolist())) > 80
    assert_distributed(first, p.sum(1))
    assert_distributed(second, p.sum(0))

    logits = torch.stack([tree.logits[(token,)] for token in range(VOCAB_SIZE)])
    q = p.sum(1)[:, None] * (logits + drafter.table).softmax(-1)
    is_accepted = second == drafted
    assert 0.3 < is_accepted.float().mean() < 0.9
    for tokens, probabilities in (
        (second[is_accepted], torch.minimum(p, q).sum(0)),
        (second[~is_accepted], (p - q).clamp_min(0).sum(0)),
    ):
        assert len(set(tokens.tolist())) > 60
        assert_distributed(tokens, probabilities / probabilities.sum())


@pytest.mark.parametrize("warpers", [LogitsProcessorList(), WARPERS], ids=["plain", "warped"])
def test_c50_deterministic_drafts_are_a_point_mass(warpers: LogitsProcessorList) -> None:
    torch.manual_seed(50)
    p = warped(TARGET, warpers)
    assert_distributed(toy_pairs(TARGET, DRAFT, ROWS, warpers, samples=False), p[0][:, None] * p)
