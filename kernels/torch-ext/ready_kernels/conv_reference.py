"""Torch reference of `conv_commit`; the CPU path."""

from __future__ import annotations

import torch

from .records import Stacked


def conv_commit(uncut: Stacked, accepted: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """See `ready_kernels.conv_commit`."""
    index = accepted[:, None] + torch.arange(kernel_size, device=accepted.device)  # [B, W]
    return torch.stack([x.gather(-1, index[:, None].expand(-1, x.shape[1], -1)) for x in uncut])
