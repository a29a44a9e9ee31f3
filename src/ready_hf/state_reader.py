"""Reads the target's committed recurrent states into the draft, as a residual.

For slot j of a block, recurrent layer l, head h:   o = S^T q,   q = q_static[j, l, h] (+ terms from the anchor's
embedding, the last context feature and the slot's own hidden state). S is the *committed* state: it has consumed every
token before the anchor and nothing of any rejected draft. Reads of all layers and heads are mapped down, then up into
the drafter's hidden size; the up map starts at zero, so that an untrained reader changes nothing.

Shapes: B batch, A anchors, G slots, N recurrent layers that are read, H heads, R queries per head, K key and V value
channels of a state.
What a reader reads is ReaDy's (arXiv 2610.20503); the form of queries, maps, normalisation and gate is ours.
"""

import torch
from torch import nn
from transformers.activations import ACT2FN

from ready_hf import kernels
from ready_hf.anchor_states import AnchorStates
from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.ops import takes, uses_kernels


class StateReader(nn.Module):
    """Queries, read and map; see the module docstring.

    Args:
        config (`ReadyDrafterConfig`): With `state_layer_ids` and `state_shape`.
    """

    def __init__(self, config: ReadyDrafterConfig):
        super().__init__()
        assert config.state_layer_ids is not None
        assert config.state_shape is not None
        assert config.reader_rank is not None
        layers, (heads, keys, values) = len(config.state_layer_ids), config.state_shape
        self.num_queries = config.reader_num_queries
        heads *= self.num_queries
        self.query_shape = (layers, heads, keys)
        self.conditioning = tuple(sorted(set(config.reader_conditioning or ()) - {"slot"}))
        self.normalization, self.eps = config.reader_normalization, config.rms_norm_eps
        self.num_outputs = config.num_hidden_layers if config.reader_injection == "layers" else 1
        self.query = nn.Parameter(torch.empty(config.block_size, *self.query_shape))
        outputs, rank, act = layers * heads * keys, config.reader_query_rank, config.reader_query_act
        if self.conditioning:
            self.query_proj = _low_rank(len(self.conditioning) * config.hidden_size, rank, outputs, act)
        self.slot_proj = _low_rank(config.hidden_size, rank, outputs, act) if config.reads_by_slot else None
        if config.reader_projection == "bilinear":
            self.head_map = nn.Parameter(torch.empty(layers, heads, values, config.reader_rank))
            latent = layers * heads * config.reader_rank
        else:
            self.down_proj = nn.Linear(layers * heads * values, config.reader_rank, bias=False)
            latent = config.reader_rank
        self.gate_inputs = tuple(sorted(set(config.reader_gate_inputs or ())))
        gated = config.hidden_size * len(self.gate_inputs)
        self.gate_proj = _low_rank(gated, config.reader_gate_rank, latent, bias=True) if config.reader_gate else None
        self.mix_proj = None
        if config.reader_output_rank is not None:
            self.mix_proj = nn.Linear(latent, config.reader_output_rank, bias=False)
            latent = config.reader_output_rank
        self.up_proj = nn.Linear(latent, self.num_outputs * config.hidden_size, bias=False)

    def queries(
        self, anchor_embeds: torch.Tensor, context_features: torch.Tensor, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Queries `[B, A, G, N, H * R, K]`; shapes of the arguments as in `forward`."""
        queries = self.query.expand(*anchor_embeds.shape[:2], *self.query.shape)
        if self.conditioning:
            added = self.query_proj(self._inputs(self.conditioning, anchor_embeds, context_features))
            queries = queries + added.view(*added.shape[:2], 1, *self.query_shape)
        if self.slot_proj is not None:
            assert slots is not None
            queries = queries + self.slot_proj(_unit_rms(slots, self.eps)).unflatten(-1, self.query_shape)
        return queries

    def reads_in_place(self, state: torch.Tensor) -> bool:
        """Whether states like this one can be handed over as a list, to be read by a kernel where they lie."""
        return uses_kernels(state.device) and takes(state.dtype)

    def read(self, queries: torch.Tensor, states: torch.Tensor | list[torch.Tensor] | AnchorStates) -> torch.Tensor:
        """o = S^T q: `[B, A, Q, N, H, V]` from queries `[B, A, Q, N, H, K]` and states `[B, A, N, H, K, V]`.

        Q is G * R. For one anchor, also from N states `[B, H, K, V]` that lie anywhere; or from `AnchorStates`, layer
        by layer.
        """
        if isinstance(states, AnchorStates):
            reads = states.read_all(queries)
            if self.normalization == "state":
                norms = torch.stack([states.norms(i) for i in range(queries.shape[3])], dim=2)  # [B, A, N, H]
                reads = reads * torch.rsqrt(norms.square() + self.eps)[:, :, None, ..., None]
            return _unit_rms(reads, self.eps) if self.normalization == "read" else reads
        if isinstance(states, list):
            by_layer = queries[:, 0].permute(0, 2, 3, 1, 4)  # [B, N, H, G, K]
            backend = "triton" if self.reads_in_place(states[0]) else "torch"
            parts = by_layer.split(kernels.MOST_QUERIES, dim=3)
            reads = torch.cat([kernels.state_read(states, part, backend=backend) for part in parts], dim=1)[:, None]
            if self.normalization == "state":
                norms = torch.stack([x.float().square().sum((-1, -2)) for x in states], dim=1)  # [B, N, H]
                reads = reads * torch.rsqrt(norms + self.eps)[:, None, None, ..., None]
            return _unit_rms(reads, self.eps) if self.normalization == "read" else reads
        if self.normalization == "state":
            states = states / (states.float().square().sum((-1, -2), keepdim=True) + self.eps).sqrt().to(states.dtype)
        reads = torch.einsum("bagnhk,banhkv->bagnhv", queries.to(states.dtype), states)
        return _unit_rms(reads, self.eps) if self.normalization == "read" else reads

    def project(
        self, reads: torch.Tensor, anchor_embeds: torch.Tensor, context_features: torch.Tensor
    ) -> torch.Tensor:
        """Residuals `[num_outputs, B, A, G, d]` from reads `[B, A, G, N, H * R, V]`; the others as in `forward`."""
        if hasattr(self, "head_map"):
            latent = torch.einsum("bagnhv,nhvr->bagnhr", reads, self.head_map).flatten(3)
        else:
            latent = self.down_proj(reads.flatten(3))
        if self.gate_proj is not None:
            gate = self.gate_proj(self._inputs(self.gate_inputs, anchor_embeds, context_features))
            latent = latent * torch.sigmoid(gate)[:, :, None]
        if self.mix_proj is not None:
            latent = self.mix_proj(latent)
        return torch.stack(self.up_proj(latent).chunk(self.num_outputs, dim=-1))

    def forward(
        self,
        states: torch.Tensor | list[torch.Tensor] | AnchorStates,
        anchor_embeds: torch.Tensor,
        context_features: torch.Tensor,
        slots: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Residuals `[num_outputs, B, A, G, d]`: one for the whole block, or one per drafter layer.

        Args:
            states (`torch.Tensor` of shape `[B, A, N, H, K, V]`, `AnchorStates`, or N tensors `[B, H, K, V]`):
                Committed states before every anchor, any float dtype.
            anchor_embeds (`torch.Tensor` of shape `[B, A, d]`): The target's embeddings of the anchors.
            context_features (`torch.Tensor` of shape `[B, A, d]`): The fused feature of the position before each.
            slots (`torch.Tensor` of shape `[B, A, G, d]`, *optional*): Hidden states where reads will be added; only
                for queries that come from them too.
        """
        dtype = self.query.dtype  # a quantized `up_proj` has weights of another dtype than its inputs
        states = states.float() if isinstance(states, torch.Tensor) else states
        queries = self.queries(anchor_embeds, context_features, slots).float()
        block_size, count = queries.shape[2], self.num_queries
        if count > 1:  # [B, A, G, N, H * R, K] to [B, A, G * R, N, H, K]: a state is read once for all of them
            queries = queries.unflatten(4, (-1, count)).movedim(5, 3).flatten(2, 3)
        reads = self.read(queries, states)
        if count > 1:
            reads = reads.unflatten(2, (block_size, count)).movedim(3, 5).flatten(4, 5)
        return self.project(reads.to(dtype), anchor_embeds, context_features)

    def _inputs(self, names: tuple[str, ...], anchor_embeds: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """`[B, A, len(names) * d]`."""
        inputs = {"anchor": _unit_rms(anchor_embeds, self.eps), "context": context}
        return torch.cat([inputs[name] for name in names], dim=-1)


def _low_rank(inputs: int, rank: int | None, outputs: int, act: str | None = None, bias: bool = False) -> nn.Module:
    """A linear map, of full rank for `None`; with an activation between its two parts if there is one."""
    if rank is None:
        return nn.Linear(inputs, outputs, bias=bias)
    down, up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias)
    return nn.Sequential(down, up) if act is None else nn.Sequential(down, ACT2FN[act], up)


def _unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
