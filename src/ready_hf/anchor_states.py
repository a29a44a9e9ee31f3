"""Recurrent states at all anchors of a training batch, without storing every one of them.

A state at an anchor follows from the state at the start of its chunk and from what was written since:

    S_a = D_0 S_chunk + sum_{i < a} D_{i+1} k_i w_i^T     (sum within the chunk, D_i the decay from token i to a)

so a read is  S_a^T q = D_0 S_chunk^T q + sum_i D_{i+1} (k_i . q) w_i  and needs no S_a. States of chunks, keys and
writes are kept once for all anchors; states exist for a few anchors of one layer at a time. Gradients flow into
queries alone, and their formula is the same one with K and V exchanged, so nothing is kept for it either.

Where few anchors stand in a long row, or the recurrence is another one, a layer keeps its states at the anchors.

Shapes: B rows, A anchors, Q queries of an anchor, N layers that are read, H heads, K key and V value channels, C
tokens of a chunk, n chunks, H_k heads of keys (H is a multiple of it).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


MOST_ELEMENTS = 2**24  # of the states that exist at once: 64 MB


class ChunkScan(NamedTuple):
    """What is kept of one layer of the gated delta rule, all in float32.

    Args:
        starts (`torch.Tensor` of shape `[n, B, H, K, V]`): States before each chunk.
        keys (`torch.Tensor` of shape `[n, B, H_k, C, K]`): Keys.
        writes (`torch.Tensor` of shape `[n, B, H, C, V]`): Values that are written along the keys.
        decay (`torch.Tensor` of shape `[n, B, H, C]`): Log decay of each token, minus infinity included.
    """

    starts: torch.Tensor
    keys: torch.Tensor
    writes: torch.Tensor
    decay: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Chunk states `[B, A, H, K, V]`, decayed, and keys, writes and weights `[B, A, H, C, .]` of their chunks.

        Args:
            positions (`torch.LongTensor` of shape `[B, A]`): Tokens consumed.
        """
        chunk_size, repeats = self.keys.shape[-2], self.decay.shape[2] // self.keys.shape[2]
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        chunk, taken = positions // chunk_size, (positions % chunk_size)[:, :, None, None]
        is_taken = torch.arange(chunk_size, device=positions.device) < taken
        picked = self.decay[chunk, rows].masked_fill(~is_taken, 0.0)  # [B, A, H, C]
        # of a token and all after it: summed, because a difference of sums would lose digits to a strong decay
        since = picked.flip(-1).cumsum(-1).flip(-1)
        weights = F.pad(since[..., 1:], (0, 1)).exp().masked_fill(~is_taken, 0.0)[..., None]
        keys = self.keys[chunk, rows].repeat_interleave(repeats, dim=2)
        starts = self.starts[chunk, rows].mul_(since[..., :1, None].exp())
        return starts, keys, self.writes[chunk, rows], weights

    def states(self, positions: torch.Tensor) -> torch.Tensor:
        """States `[B, A, H, K, V]` after `positions` `[B, A]` tokens."""
        starts, keys, writes, weights = self.at(positions)
        return starts.add_((keys * weights).transpose(-1, -2) @ writes)

    def read(self, queries: torch.Tensor, positions: torch.Tensor, is_transposed: bool) -> torch.Tensor:
        """S^T q `[B, A, H, Q, V]` from `[B, A, H, Q, K]`; transposed, S q `[B, A, H, Q, K]` from `[B, A, H, Q, V]`."""
        starts, keys, writes, weights = self.at(positions)
        asked, given = (writes, keys) if is_transposed else (keys, writes)
        starts = starts.mT if is_transposed else starts
        return queries @ starts + (queries @ asked.mT * weights.mT) @ given


class AnchorStates:
    """States `[B, A, N, H, K, V]` in float32, as a `StateReader` reads them: layer by layer, some anchors at a time.

    Args:
        layers (`Sequence`): Of each layer a `ChunkScan`, or its states `[B, A, H, K, V]`.
        positions (`torch.LongTensor` of shape `[B, A]`): Tokens that a state has consumed.
        most_elements (`int`): Most numbers of states that exist at once while they are read.

    Raises:
        ValueError: no layer at all.
    """

    def __init__(
        self,
        layers: Sequence[ChunkScan | torch.Tensor],
        positions: torch.Tensor,
        most_elements: int = MOST_ELEMENTS,
    ):
        if not layers:
            raise ValueError("states of no layer at all: a drafter without a reader takes `states=None`")
        self.layers, self.positions, self.most_elements = list(layers), positions, most_elements

    @property
    def shape(self) -> torch.Size:
        """`[B, A, N, H, K, V]`."""
        first = self.layers[0]
        state = first.starts if isinstance(first, ChunkScan) else first
        return torch.Size([*self.positions.shape, len(self.layers), *state.shape[2:]])

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(x.nbytes for layer in self.layers for x in (layer if isinstance(layer, ChunkScan) else (layer,)))

    def layer(self, index: int) -> torch.Tensor:
        """States `[B, A, H, K, V]` of one layer; not to be written to."""
        layer = self.layers[index]
        if isinstance(layer, torch.Tensor):
            return layer
        batch, anchors, _, *shape = self.shape
        out = layer.starts.new_empty(batch, anchors, *shape)
        for part in self._parts():
            out[:, part] = layer.states(self.positions[:, part])
        return out

    def stack(self) -> torch.Tensor:
        """All of them, `[B, A, N, H, K, V]`, which is what the rest of this class avoids."""
        return torch.stack([self.layer(index) for index in range(len(self.layers))], dim=2)

    def norms(self, index: int) -> torch.Tensor:
        """Frobenius norms `[B, A, H]` of one layer."""
        return torch.cat([x.square().sum((-1, -2)).sqrt() for _, x in self._pieces(index)], dim=1)

    def read(self, index: int, queries: torch.Tensor) -> torch.Tensor:
        """S^T q of one layer, `[B, A, Q, H, V]` from queries `[B, A, Q, H, K]`, in float32 also under autocast."""
        return _Read.apply(queries.unsqueeze(3), self, (index,), False).squeeze(3)

    def read_all(self, queries: torch.Tensor) -> torch.Tensor:
        """S^T q of all layers, `[B, A, Q, N, H, V]` from queries `[B, A, Q, N, H, K]`."""
        return _Read.apply(queries, self, tuple(range(len(self.layers))), False)

    def _parts(self) -> Iterator[slice]:
        """Of the anchors."""
        batch, anchors, _, heads, keys, values = self.shape
        size = max(1, self.most_elements // (batch * heads * keys * values))
        return (slice(start, start + size) for start in range(0, anchors, size))

    def _pieces(self, index: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some anchors, and their states."""
        layer = self.layers[index]
        for part in self._parts():
            yield part, layer[:, part] if isinstance(layer, torch.Tensor) else layer.states(self.positions[:, part])

    def _read_part(self, index: int, queries: torch.Tensor, part: slice, is_transposed: bool) -> torch.Tensor:
        """As `ChunkScan.read`, of any layer."""
        layer = self.layers[index]
        if isinstance(layer, ChunkScan):
            return layer.read(queries, self.positions[:, part], is_transposed)
        states = layer[:, part]
        return queries @ (states.mT if is_transposed else states)


class _Read(torch.autograd.Function):
    """S^T q of some layers, in pieces. The gradient of the queries is S applied to that of the reads."""

    @staticmethod
    def forward(
        queries: torch.Tensor, states: AnchorStates, indices: tuple[int, ...], is_transposed: bool
    ) -> torch.Tensor:
        """`[B, A, Q, N, H, V]` from `[B, A, Q, N, H, K]`; transposed, the other way round."""
        width = states.shape[-2 if is_transposed else -1]
        out = torch.empty(*queries.shape[:-1], width, dtype=torch.float32, device=queries.device)
        with torch.autocast(queries.device.type, enabled=False):
            for column, index in enumerate(indices):
                for part in states._parts():
                    asked = queries[:, part, :, column].float().transpose(2, 3)
                    out[:, part, :, column] = states._read_part(index, asked, part, is_transposed).transpose(2, 3)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keeps no tensor of its own: the states are constants, and the reads are linear in the queries."""
        queries, ctx.states, ctx.indices, ctx.is_transposed = inputs
        ctx.dtype = queries.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Differentiable itself."""
        (gradient,) = gradients
        return _Read.apply(gradient, ctx.states, ctx.indices, not ctx.is_transposed).to(ctx.dtype), None, None, None
