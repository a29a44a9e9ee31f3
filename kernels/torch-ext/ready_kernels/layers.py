"""Layers for `kernelize` of the `kernels` library, which puts their `forward` in place of a model's own.

The library demands layers without state: no constructor, no members beside `forward` and two flags. `has_backward`
says whether training may use the layer, `can_torch_compile` (false where absent) whether torch.compile may. A layer
is found as an attribute of this module, and this module as an attribute of the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class StateRead(nn.Module):
    """Reads the states of L layers with J queries a head, whatever the module it is put into holds.

    Letters: L layers, B rows, H heads, J queries, K key and V value channels.
    """

    has_backward = False  # queries get a gradient, states do not

    def forward(self, states: torch.Tensor | Sequence[torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
        """Multiplies every state, transposed, with the queries of its layer and head.

        Args:
            states (`torch.Tensor` of shape `[L, B, H, K, V]`, or list of L `[B, H, K, V]`): Recurrent states.
            queries (`torch.Tensor` of shape `[L, H, J, K]`): Queries, the same for every row.

        Returns:
            `torch.Tensor` of shape `[B, J, L, H, V]`: The reads.
        """
        from . import api  # at the call, so that the package may import its modules in any order

        return api.state_read(states, queries)
