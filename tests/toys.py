"""Toy language models over 8 tokens, and the chi-square test that samples from them are judged by.

Letters: B rows, N drafts of a block, V vocabulary.
"""

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from ready_hf.acceptance import Column, accept, verified_columns
from ready_hf.candidates import choose_drafts


# A right implementation fails a chi-square test at this level once in ten million seeds.
LEVEL = 1e-7
TOY_SIZE = 8
WARPERS = LogitsProcessorList(
    [
        logits_process.TemperatureLogitsWarper(0.7),
        logits_process.TopKLogitsWarper(5),
        logits_process.TopPLogitsWarper(0.9),
    ]
)
NO_WARPERS = LogitsProcessorList()


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test of counts against a distribution; 0 if something impossible was counted.

    Cells with fewer than 10 expected samples are counted with the next larger one.
    """
    counts, expected = counts.double().flatten(), probabilities.double().flatten()
    if counts[expected == 0].sum() > 0:
        return 0.0
    expected, order = (expected / expected.sum() * counts.sum()).sort(descending=True)
    counts = counts[order]
    last = max(int((expected >= 10).sum()) - 1, 0)
    counts = torch.cat([counts[:last], counts[last:].sum()[None]])
    expected = torch.cat([expected[:last], expected[last:].sum()[None]])
    if last == 0:
        return 1.0  # one cell
    statistic = ((counts - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(last / 2).double(), statistic / 2))


def total_variation(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    return float((counts / counts.sum() - probabilities).abs().sum() / 2)


def histogram(tokens: torch.Tensor, vocab_size: int = TOY_SIZE) -> torch.Tensor:
    """Joint counts `[V, ..., V]` of rows of tokens `[B, n]` (or `[B]`)."""
    tokens = tokens.reshape(tokens.shape[0], -1)
    index = torch.zeros(tokens.shape[0], dtype=torch.long)
    for column in tokens.unbind(1):
        index = index * vocab_size + column
    return torch.bincount(index, minlength=vocab_size ** tokens.shape[1]).view([vocab_size] * tokens.shape[1])


def assert_distributed(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Rows of tokens `[B, n]` are drawn from the joint distribution `[V, ..., V]`."""
    counts = histogram(tokens, probabilities.shape[0])
    p = p_value(counts, probabilities)
    assert p > LEVEL, (
        f"p = {p:.1e}, total variation {total_variation(counts, probabilities):.4f} over {len(tokens)} samples"
    )


def bigram_logits(seed: int, scale: float = 1.5) -> torch.Tensor:
    """A toy language model: logits `[V, V]` of the next token by the last one."""
    return torch.randn(TOY_SIZE, TOY_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def warped(logits: torch.Tensor, warpers: LogitsProcessorList) -> torch.Tensor:
    """Probabilities `[..., V]` after the warpers."""
    return warpers(None, logits.reshape(-1, logits.shape[-1])).view_as(logits).softmax(-1)


def toy_drafts(
    draft: torch.Tensor, rows: int, num_drafts: int, warpers: LogitsProcessorList
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts after token 0 from a bigram table: sequences `[B, 1 + N]` and draft logits `[B, N, V]`."""
    sequences, logits = torch.zeros(rows, 1, dtype=torch.long), []
    for _ in range(num_drafts):
        tokens, warped_logits = choose_drafts(draft[sequences[:, -1]], True, warpers)
        sequences = torch.cat([sequences, tokens[:, None]], dim=1)
        logits.append(warped_logits)
    return sequences, torch.stack(logits, dim=1)


def toy_block(
    target: torch.Tensor, sequences: torch.Tensor, draft_logits: torch.Tensor | None, processors: LogitsProcessorList
) -> list[Column]:
    """The columns of one verified block, under sampling, all rows active; the target is a bigram table."""
    active = torch.ones(len(sequences), dtype=torch.bool)
    num_drafts = sequences.shape[1] - 1
    return list(verified_columns(sequences, num_drafts, target[sequences], draft_logits, active, processors, True))


def toy_pairs(
    target: torch.Tensor, draft: torch.Tensor, rows: int, warpers: LogitsProcessorList, samples: bool = True
) -> torch.Tensor:
    """Two tokens after token 0, `[B, 2]`: from a block of two drafts, what is missing from the target alone."""
    if samples:
        sequences, draft_logits = toy_drafts(draft, rows, 2, warpers)
        q: torch.Tensor | None = draft_logits.softmax(-1)
    else:
        best = draft.argmax(-1)
        sequences, q = torch.tensor([0, best[0], best[best[0]]]).expand(rows, 3), None
    p, drafts = warped(target, warpers), sequences[:, 1:]
    num_accepted, residual = accept(p[sequences[:, :2]], q, drafts, torch.rand(rows, 2))
    replacement = torch.multinomial(residual, 1)[:, 0]
    first = torch.where(num_accepted > 0, drafts[:, 0], replacement)
    alone = torch.multinomial(p[first], 1)[:, 0]
    second = torch.where(num_accepted == 2, drafts[:, 1], torch.where(num_accepted == 1, replacement, alone))
    return torch.stack([first, second], dim=1)
