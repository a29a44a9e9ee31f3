"""Anchors of a training step, row by row.

The anchors of a row follow from the seed, the row's tokens and the epoch, and from nothing else: not from the process
that has the row, its place in the batch, what it is padded to, or how a step is split into accumulated parts. So two
processes of batch 4 learn from the blocks of one process of batch 8, and a resumed run from those of a straight one.

Shapes: B rows, T tokens, A anchors.
"""

import hashlib

import torch

from ready_hf.features import choose_anchors


def anchors_of_rows(
    legal: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    num_anchors: int,
    seed: int,
    epoch: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Different random anchors for every row, the same for the same row wherever it stands.

    Two rows of the same tokens in one epoch have the same anchors.

    Args:
        legal (`torch.BoolTensor` of shape `[B, T]`): From `legal_anchors`.
        input_ids (`torch.LongTensor` of shape `[B, T]`): Tokens; padding on the right.
        attention_mask (`torch.Tensor` of shape `[B, T]`): 0 for padding.
        num_anchors (`int`): A, at most; fewer if no row has as many tokens.
        seed (`int`): Of the data.
        epoch (`int`): Times that every row was seen before.

    Returns:
        `tuple`: positions `[B, A]` and mask `[B, A]`, as from `choose_anchors`, on the device of `legal`.
    """
    device, count = legal.device, min(num_anchors, legal.shape[1])
    rows = zip(legal.cpu(), input_ids.cpu(), attention_mask.cpu().bool(), strict=True)
    positions = torch.zeros(legal.shape[0], count, dtype=torch.long)
    mask = torch.zeros(legal.shape[0], count, dtype=torch.bool)
    for i, (places, ids, is_text) in enumerate(rows):
        length = int(is_text.sum())
        generator = torch.Generator().manual_seed(row_seed(ids[is_text], seed, epoch))
        chosen, is_chosen = choose_anchors(places[None, :length], num_anchors, generator)
        if chosen.numel():
            positions[i, -chosen.shape[1] :], mask[i, -chosen.shape[1] :] = chosen[0], is_chosen[0]
    return positions.to(device), mask.to(device)


def row_seed(ids: torch.Tensor, seed: int, epoch: int) -> int:
    """A number of 63 bits that tells rows `[n]`, seeds and epochs apart, alike on every machine."""
    text = f"{seed} {epoch} ".encode() + ids.to(torch.int64).contiguous().numpy().astype("<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
