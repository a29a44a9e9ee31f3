"""The block-parallel trunk of a DSpark drafter: Qwen3-type layers whose keys and values include target features.

Every slot of a block attends to the context, that is to the fused features of all positions before the anchor, and
to all slots of its own block: K = [W_K H_ctx; W_K H_d], V alike (DSpark paper, backbone). Keys and values of the
context can be kept in a transformers cache from round to round; the block's never are.

Shapes: B batch, Q = A * G queries (A blocks of G slots), n new context rows, C context rows in all, d hidden size.
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, eager_attention_forward, rotate_half

from ready_hf.configuration_ready import ReadyDrafterConfig


Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of new context and block, [B, n + Q, head_dim]


class BlockAttention(nn.Module):
    """Attention of a block over the context and itself."""

    def __init__(self, config: ReadyDrafterConfig, layer_idx: int):
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        rotation: Rotation,
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[B, Q, d]` and the attention weights, from normed hidden states `[B, Q, d]` and new context `[B, n, d]`."""
        rows = context.shape[1]
        queries = _rotated(
            self._heads(self.q_proj(hidden_states), self.q_norm), (rotation[0][:, rows:], rotation[1][:, rows:])
        )
        inputs = torch.cat([context, hidden_states], dim=1)
        keys = _rotated(self._heads(self.k_proj(inputs), self.k_norm), rotation)
        values = self._heads(self.v_proj(inputs))
        if cache is not None:  # of the context only
            kept = cache.update(keys[:, :, :rows], values[:, :, :rows], self.layer_idx)
            keys, values = (
                torch.cat([old, new[:, :, rows:]], dim=2) for old, new in zip(kept, (keys, values), strict=True)
            )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights

    def _heads(self, projected: torch.Tensor, norm: nn.Module | None = None) -> torch.Tensor:
        """`[B, T, heads * head_dim]` to `[B, heads, T, head_dim]`."""
        split = projected.unflatten(-1, (-1, self.head_dim))
        return (split if norm is None else norm(split)).transpose(1, 2)


class DrafterLayer(GradientCheckpointingLayer):
    """Attention over context and block, then a gated MLP; pre-normed, with residuals."""

    def __init__(self, config: ReadyDrafterConfig, layer_idx: int):
        super().__init__()
        self.self_attn = BlockAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor,
        rotation: Rotation,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[B, Q, d]` to `[B, Q, d]`; see `BlockAttention`. The context is normed already (`hidden_norm`)."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states), context, rotation, attention_mask, cache, **kwargs
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def block_mask(
    anchor_rows: torch.Tensor,
    block_size: int,
    num_rows: int,
    num_seen: int,
    window: int | None,
    context_attention_mask: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Which keys every slot sees: context before its anchor (within the window), and the slots of its own block.

    Args:
        anchor_rows (`torch.LongTensor` of shape `[B, A]`): Row of each anchor, counted over all context rows seen.
        block_size (`int`): G.
        num_rows (`int`): C, the context rows at hand: the last of `num_seen`.
        num_seen (`int`): Context rows ever seen.
        window (`int`, *optional*): A slot sees rows at a distance below this.
        context_attention_mask (`torch.Tensor` of shape `[B, num_seen]`, *optional*): 0 hides a row.
        attention_mask (`torch.Tensor` of shape `[B, A * G]`, *optional*): 0 hides a slot from the others; it still
            sees itself, so that no row of the attention is empty.

    Returns:
        `torch.BoolTensor` of shape `[B, 1, A * G, C + A * G]`.
    """
    device, (batch, anchors) = anchor_rows.device, anchor_rows.shape
    rows = torch.arange(num_seen - num_rows, num_seen, device=device)
    anchor = anchor_rows.repeat_interleave(block_size, dim=1)[..., None]  # [B, Q, 1]
    visible = rows < anchor
    if window is not None:
        slot = torch.arange(block_size, device=device).repeat(anchors)[:, None]
        visible = visible & (anchor + slot - rows < window)
    if context_attention_mask is not None:
        visible = visible & context_attention_mask[:, None, num_seen - num_rows :].bool()
    block = torch.arange(anchors, device=device).repeat_interleave(block_size)
    own = (block[:, None] == block).expand(batch, -1, -1)
    if attention_mask is not None:
        itself = torch.eye(len(block), dtype=torch.bool, device=device)
        own = own & (attention_mask[:, None].bool() | itself)
    return torch.cat([visible, own], dim=-1)[:, None]


def _rotated(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = rotation[0][:, None], rotation[1][:, None]
    return heads * cos + rotate_half(heads) * sin
