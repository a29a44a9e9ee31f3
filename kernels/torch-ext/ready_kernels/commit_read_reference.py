"""Torch reference of `commit_and_read` and `state_read`, one token at a time; the CPU path.

    S_t = diag(exp(g_t)) S_{t-1} + k_t (beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t))^T     gated delta rule, KDA
    S_t = exp(g_t) S_{t-1} + k_t (beta_t v_t)^T                                               Mamba-2 (`delta=False`)
    o_j = S_n^T q_j                                                                           the read, after n tokens

Everything is computed in float32 or, for float64 states, in float64. Sources: Yang et al., arXiv 2412.06464, eq. 10;
Dao and Gu, arXiv 2405.21060, section 2. The read is ReaDy's (arXiv 2610.20503).
"""

from __future__ import annotations

import torch

from .records import Records, Stacked


def commit_and_read(
    states: Stacked,
    records: Records,
    accepted: torch.Tensor,
    queries: torch.Tensor | None = None,
    *,
    out: Stacked | None = None,
    slots: torch.Tensor | None = None,
    delta: bool = True,
    l2norm: bool = True,
) -> torch.Tensor | None:
    """See `ready_kernels.commit_and_read`."""
    in_place, out = out is None, states if out is None else out
    wide = torch.float64 if states[0].dtype == torch.float64 else torch.float32
    found = []
    for layer in range(len(states)):
        before, after = states[layer], out[layer]
        advanced = before.to(wide, copy=True)
        for row, slot in _rows(accepted, slots):
            length = int(accepted[row])
            if length or not in_place:
                advanced[slot] = _advanced(before[slot], records, layer, row, length, delta, l2norm)
                after[slot] = advanced[slot].to(after.dtype)
        found.append(advanced)  # read before it is rounded, as the kernel reads it
    return None if queries is None else state_read(found, queries, slots=slots)


def state_read(states: Stacked, queries: torch.Tensor, *, slots: torch.Tensor | None = None) -> torch.Tensor:
    """See `ready_kernels.state_read`."""
    shared = queries.dim() == 4
    wide = torch.float64 if states[0].dtype == torch.float64 else torch.float32
    index = torch.arange(states[0].shape[0], device=queries.device) if slots is None else slots.long()
    reads = []
    for layer in range(len(states)):
        state = states[layer][index.clamp_min(0)].to(wide)  # [B, H, K, V]
        query = (queries[layer][None] if shared else queries[:, layer]).to(wide)  # [1 or B, H, J, K]
        read = (query @ state).masked_fill((index < 0)[:, None, None, None], 0.0)  # [B, H, J, V]
        reads.append(read.transpose(1, 2))
    return torch.stack(reads, dim=2)  # [B, J, L, H, V]


def _rows(accepted: torch.Tensor, slots: torch.Tensor | None) -> list[tuple[int, int]]:
    """(row, slot) of all rows that are no padding."""
    found = range(len(accepted)) if slots is None else slots.tolist()
    return [(row, slot) for row, slot in enumerate(found) if slot >= 0]


def _advanced(
    state: torch.Tensor, records: Records, layer: int, row: int, length: int, delta: bool, l2norm: bool
) -> torch.Tensor:
    """`state` `[H, K, V]` after the first `length` tokens of a row's records."""
    state = state if state.dtype == torch.float64 else state.float()
    key, value, g, beta = (field[layer][row].to(state.dtype) for field in records)
    group = state.shape[0] // key.shape[1]
    for t in range(length):
        k = key[t]
        if l2norm:
            k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        k = k.repeat_interleave(group, dim=0)  # [H, K]
        decay = g[t].exp()
        state = state * (decay[..., None] if decay.dim() == 2 else decay[:, None, None])
        update = value[t] - (k[:, None] @ state)[:, 0] if delta else value[t]  # [H, V]
        state = state + k[..., None] * (beta[t][:, None] * update)[:, None]
    return state
