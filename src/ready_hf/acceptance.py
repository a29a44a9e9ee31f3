"""Which drafts of a block are accepted, and what follows the last accepted one.

Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318): draft x with
draft probability q(x) is kept with probability min(1, p(x) / q(x)); the first rejected position is drawn from the
normalised max(0, p - q). The result is distributed exactly as the target's own p, for any q.

`p` and `q` are probabilities *after* all logits processors and warpers. Drafts, `uniforms` and the draw from the
residual must come from independent noise: reusing the draft's noise in any of them biases the result without any
visible error.

Letters: B rows, N positions of the block, V vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process


# These look at one position's scores only, so they may run on all positions at once, rejected ones included.
POSITIONWISE_PROCESSORS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)


class Acceptance(NamedTuple):
    """Outcome of a block, per row.

    Args:
        num_accepted (`torch.LongTensor` of shape `[B]`): Drafts accepted from the left, 0..N.
        residual (`torch.Tensor` of shape `[B, V]`): Distribution of the token that replaces the first rejected draft;
            of no meaning for rows without a rejection.
    """

    num_accepted: torch.Tensor
    residual: torch.Tensor


def accept(p: torch.Tensor, q: torch.Tensor | None, drafts: torch.Tensor, uniforms: torch.Tensor) -> Acceptance:
    """Accepts or rejects the drafts of a block; pure, float32.

    Args:
        p (`torch.Tensor` of shape `[B, N, V]`): Target probabilities at the drafted positions.
        q (`torch.Tensor` of shape `[B, N, V]`, *optional*): Probabilities the drafts were sampled from; `None` for
            drafts that were not sampled (a point mass on the draft).
        drafts (`torch.LongTensor` of shape `[B, N]`): Drafted tokens, N >= 1.
        uniforms (`torch.Tensor` of shape `[B, N]`): Independent uniform noise in [0, 1).

    Returns:
        `Acceptance`: number of accepted drafts and the residual distribution at the first rejection.
    """
    p = p.float()
    q = torch.zeros_like(p).scatter_(-1, drafts[..., None], 1.0) if q is None else q.float()
    p_draft = p.gather(-1, drafts[..., None]).squeeze(-1)
    q_draft = q.gather(-1, drafts[..., None]).squeeze(-1)
    # u q < p is u < p / q without dividing by a q that may have underflowed
    num_accepted = leading_true(uniforms * q_draft < p_draft)
    rejected = num_accepted.clamp_max(drafts.shape[1] - 1)[:, None, None].expand(-1, 1, p.shape[-1])
    p_rejected, q_rejected = p.gather(1, rejected).squeeze(1), q.gather(1, rejected).squeeze(1)
    residual = (p_rejected - q_rejected).clamp_min(0.0)
    total = residual.sum(-1, keepdim=True)
    # p = q up to rounding leaves nothing: a rejection there is rounding too, and the target's own distribution is
    # right
    residual = torch.where(total > 0, residual / total.clamp_min(torch.finfo(p.dtype).tiny), p_rejected)
    return Acceptance(num_accepted, residual)


def leading_true(hits: torch.Tensor) -> torch.Tensor:
    """Number of `True` from the left, per row: `[B, N]` -> `[B]`."""
    return hits.long().cumprod(dim=1).sum(dim=1)


class Column(NamedTuple):
    """One token for every row.

    Args:
        tokens (`torch.LongTensor` of shape `[B]`): The token each row emits.
        scores (`torch.Tensor` of shape `[B, V]`): Processed scores, float32.
        logits (`torch.Tensor` of shape `[B, V]`): Unprocessed logits, float32.
        is_draft (`torch.BoolTensor` of shape `[B]`): Whether the token is an active row's own accepted draft.
        num_drafts (`int`): Rows for which it is.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor
    is_draft: torch.Tensor
    num_drafts: int


def verified_columns(
    sequences: torch.Tensor,
    num_drafts: int,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    active: torch.Tensor,
    logits_processor: LogitsProcessorList,
    do_sample: bool,
) -> Iterator[Column]:
    """Yields the tokens that a verified block adds: the drafts up to the first rejection in any active row, then one
    token more.

    Rows are kept together, so a row may have been accepted further than the block goes. Such a row emits its own
    accepted draft in the last column, never a fresh sample: that it was accepted is part of its distribution.

    Processors that look at the sequence run lazily, left to right, on exactly the prefixes that plain `generate` shows
    them.

    Args:
        sequences (`torch.LongTensor` of shape `[B, L + num_drafts]`): Tokens so far and the drafts.
        num_drafts (`int`): N, may be 0.
        logits (`torch.Tensor` of shape `[B, N + 1, V]`): Target logits after the last token so far and after every
            draft.
        draft_logits (`torch.Tensor` of shape `[B, N, V]`, *optional*): Processed logits the drafts were sampled from.
        active (`torch.BoolTensor` of shape `[B]`): Rows that can reject; the others are padding.
        logits_processor (`LogitsProcessorList`): The target's processors and warpers.
        do_sample (`bool`): Speculative sampling, or greedy match.
    """
    length, drafts = sequences.shape[1] - num_drafts, sequences[:, sequences.shape[1] - num_drafts :]
    positionwise = all(type(processor) in POSITIONWISE_PROCESSORS for processor in logits_processor)
    uniforms = torch.rand(drafts.shape, device=logits.device) if do_sample and num_drafts else None
    num_active = 1 if len(active) == 1 else int(active.sum())

    def processed(start: int, stop: int) -> torch.Tensor:
        block = logits[:, start:stop].clone()  # [B, n, V]
        if not logits_processor:
            return block
        if positionwise:
            return logits_processor(sequences, block.flatten(0, 1)).view_as(block)
        return logits_processor(sequences[:, : length + start], block[:, 0])[:, None]

    step = num_drafts if positionwise else 1
    for start in range(0, num_drafts, max(step, 1)):
        stop = start + step
        scores = processed(start, stop)
        if uniforms is None:
            chosen = scores.argmax(-1)  # [B, n]
            num_accepted = leading_true(chosen == drafts[:, start:stop])
        else:
            q = None if draft_logits is None else draft_logits[:, start:stop].float().softmax(-1)
            num_accepted, residual = accept(scores.softmax(-1), q, drafts[:, start:stop], uniforms[:, start:stop])
        together = int(num_accepted.masked_fill(~active, step).min())
        for k in range(together):
            yield Column(drafts[:, start + k], scores[:, k], logits[:, start + k], active, num_active)
        if together < step:
            own_draft = num_accepted > together
            other = chosen[:, together] if uniforms is None else torch.multinomial(residual, 1).squeeze(1)
            tokens = torch.where(own_draft, drafts[:, start + together], other)
            is_draft = own_draft & active
            num_own = int(is_draft.sum()) if num_active > 1 else 0  # a single active row has rejected
            yield Column(tokens, scores[:, together], logits[:, start + together], is_draft, num_own)
            return
    scores = processed(num_drafts, num_drafts + 1)[:, 0]
    tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1) if do_sample else scores.argmax(-1)
    yield Column(tokens, scores, logits[:, num_drafts], torch.zeros_like(active), 0)
