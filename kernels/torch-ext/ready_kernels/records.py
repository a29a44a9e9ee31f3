"""What a verify forward leaves behind, so that the states after any prefix of its tokens can be rebuilt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Union

import torch


Stacked = Union[torch.Tensor, Sequence[torch.Tensor]]  # [L, ...], or L tensors [...]


class Records(NamedTuple):
    """The inputs of the recurrence at T tokens, exactly as the model computed them, for all layers.

    Letters: L layers, B rows, T tokens, H state heads, Hk key heads (Hk divides H), K key channels, V value channels.
    Every field is one tensor with a leading L or a list of L tensors, with any strides.

    Args:
        key (`[L, B, T, Hk, K]`): Keys after the convolution, not yet normalised. Mamba-2: `B`.
        value (`[L, B, T, H, V]`): Values after the convolution. Mamba-2: `x`.
        g (`[L, B, T, H]` or `[L, B, T, H, K]`): Log decay; one per key channel for KDA. Mamba-2: `dt * A`.
        beta (`[L, B, T, H]`): Write strength. Mamba-2: `dt`, after bias, softplus and limits.
    """

    key: Stacked
    value: Stacked
    g: Stacked
    beta: Stacked
