"""Torch reference of `verify`, the CPU path: what a gated-delta mixer computes between its input projections and its
gated norm, for a few tokens, without touching the recurrent state.

    x = activation(causal depthwise convolution of the last W inputs and the new ones)      split into q, k, v
    beta = sigmoid(b)          g = -exp(A_log) softplus(a + dt_bias)
    o_t = S_t^T q_t            S_t as in `reference`, from the state before the block

Rounding follows the mixers of Qwen3-Next and Qwen3.5 in transformers: the convolution and its activation each round to
the dtype of the weight, beta rounds to the dtype of `b`, everything after is float32. Source of the rule: Yang et al.,
arXiv 2412.06464, eq. 10.

Letters: B rows, T tokens, D convolution channels, W taps, H state heads, Hk key heads, K key and V value channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ._launch import check_same_device, check_shape
from .reference import _wide, gated_delta_block


MAX_TOKENS = 32  # the gates of all tokens are held by one warp
ACTIVATIONS = ("silu", "swish")  # two names of one function


class Verified(NamedTuple):
    """What `verify` returns. `key` and `value` may be views of one tensor `[B, T, D]`.

    Args:
        output (`torch.Tensor` of shape `[B, T, H, V]`): Outputs before the gated norm; dtype of `mixed_qkv`.
        key (`torch.Tensor` of shape `[B, T, Hk, K]`): Keys after convolution and activation; dtype of `mixed_qkv`.
        value (`torch.Tensor` of shape `[B, T, H, V]`): Values, likewise.
        g (`torch.Tensor` of shape `[B, T, H]`): Log decay, float32.
        beta (`torch.Tensor` of shape `[B, T, H]`): Write strength; dtype of `b`.
        window (`torch.Tensor` of shape `[B, D, W + T]`): Inputs of the convolution, the old ones and the new; dtype of
            `mixed_qkv`, not contiguous.
    """

    output: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    window: torch.Tensor


def verify(
    mixed_qkv: torch.Tensor,
    conv_state: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor | None,
    *,
    num_key_heads: int,
    activation: str = "silu",
    head_k_dim: int | None = None,
) -> Verified:
    """Outputs and records of a block of 1..32 tokens of a gated-delta layer. Nothing is written to its inputs.

    Args:
        mixed_qkv (`torch.Tensor` of shape `[B, T, D]`): Projected queries, keys and values, D = 2 Hk K + H V.
        conv_state (`torch.Tensor` of shape `[B, D, W]`, *optional*): The last W inputs of the convolution before the
            block, as the cache holds them, in the dtype of `mixed_qkv`; `None` is zero.
        conv_weight (`torch.Tensor` of shape `[D, W]`): Taps, the oldest input first.
        conv_bias (`torch.Tensor` of shape `[D]`, *optional*): Bias of the convolution.
        a (`torch.Tensor` of shape `[B, T, H]`): Projection that gives the decay.
        b (`torch.Tensor` of shape `[B, T, H]`): Projection that gives the write strength.
        A_log, dt_bias (`torch.Tensor` of shape `[H]`): Parameters of the decay.
        state (`torch.Tensor` of shape `[B, H, K, V]`, *optional*): State before the block; `None` is zero.
        num_key_heads (`int`): Hk, divides H.
        activation (`str`): `"silu"`, also called `"swish"`.
        head_k_dim (`int`, *optional*): K. Needed without a `state`; with one, it must agree, which catches most states
            that are transposed.

    Returns:
        `Verified`: outputs, records and the uncut window; with float64 inputs, g and all sums are float64.

    Raises:
        ValueError: more than 32 tokens or none, an unknown activation, a shape, dtype or device that does not fit.
    """
    k_dim, v_dim = check_inputs(
        mixed_qkv,
        conv_state,
        conv_weight,
        conv_bias,
        a,
        b,
        A_log,
        dt_bias,
        state,
        num_key_heads,
        activation,
        head_k_dim,
    )
    batch, length, channels = mixed_qkv.shape
    if conv_state is None:
        conv_state = mixed_qkv.new_zeros(batch, channels, conv_weight.shape[1])
    window = torch.cat([conv_state.transpose(1, 2), mixed_qkv], dim=1).transpose(1, 2)  # [B, D, W + T]

    taps = _wide(window.to(conv_weight.dtype)).unfold(2, conv_weight.shape[1], 1)[:, :, 1:]  # [B, D, T, W]
    convolved = (taps * _wide(conv_weight)[:, None]).sum(-1)
    if conv_bias is not None:
        convolved = convolved + _wide(conv_bias)[:, None]
    x = F.silu(convolved.to(conv_weight.dtype)).to(mixed_qkv.dtype).transpose(1, 2)  # [B, T, D]

    keys = num_key_heads * k_dim
    query, key, value = x.split([keys, keys, channels - 2 * keys], dim=-1)
    query, key = (y.reshape(batch, length, num_key_heads, k_dim) for y in (query, key))
    value = value.reshape(batch, length, -1, v_dim)
    beta = b.sigmoid()
    g = -_wide(A_log).exp() * F.softplus(_wide(a) + dt_bias)
    output, _ = gated_delta_block(query, key, value, g, beta, state)
    return Verified(output.to(mixed_qkv.dtype), key, value, g, beta, window)


def check_inputs(
    mixed_qkv: torch.Tensor,
    conv_state: torch.Tensor | None,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor | None,
    num_key_heads: int,
    activation: str,
    head_k_dim: int | None,
) -> tuple[int, int]:
    """Raises ValueError unless the inputs of `verify` fit; returns (K, V)."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    for name, tensor, dims in (
        ("mixed_qkv", mixed_qkv, "B, T, D"),
        ("a", a, "B, T, H"),
        ("conv_weight", conv_weight, "D, W"),
    ):
        if tensor.dim() != dims.count(",") + 1:
            raise ValueError(f"`{name}` must have shape [{dims}], got {list(tensor.shape)}")
    batch, length, channels = mixed_qkv.shape
    if not 1 <= length <= MAX_TOKENS:
        raise ValueError(f"a block has 1 to {MAX_TOKENS} tokens, got `mixed_qkv` of shape {list(mixed_qkv.shape)}")
    heads, taps = a.shape[2], conv_weight.shape[1]
    if num_key_heads < 1 or heads < 1 or heads % num_key_heads:
        raise ValueError(f"`num_key_heads` must divide the {heads} heads of `a`, got {num_key_heads}")
    if state is not None:
        if state.dim() != 4:
            raise ValueError(f"`state` must have shape [B, H, K, V], got {list(state.shape)}")
        if head_k_dim not in (None, state.shape[2]):
            raise ValueError(f"`head_k_dim` is {head_k_dim}, but `state` has shape {list(state.shape)}")
        head_k_dim = state.shape[2]
    elif head_k_dim is None:
        raise ValueError("without a `state`, `head_k_dim` must be given: D = 2 Hk K + H V does not tell K from V")
    v_dim, rest = divmod(channels - 2 * num_key_heads * head_k_dim, heads)
    if head_k_dim < 1 or v_dim < 1 or rest or (state is not None and state.shape[3] != v_dim):
        shape = "no state" if state is None else f"a `state` {list(state.shape)}"
        raise ValueError(
            f"`mixed_qkv` has {channels} channels, which are not 2 Hk K + H V for Hk = {num_key_heads}, H = {heads}, "
            f"K = {head_k_dim} and {shape}"
        )
    check_shape("a", a, [batch, length, heads])
    check_shape("b", b, [batch, length, heads])
    check_shape("conv_weight", conv_weight, [channels, taps])
    optional = {"conv_state": conv_state, "conv_bias": conv_bias, "state": state}
    shapes = {
        "conv_state": [batch, channels, taps],
        "conv_bias": [channels],
        "state": [batch, heads, head_k_dim, v_dim],
    }
    for name, given in optional.items():
        if given is not None:
            check_shape(name, given, shapes[name])
    check_shape("A_log", A_log, [heads])
    check_shape("dt_bias", dt_bias, [heads])
    if conv_state is not None and conv_state.dtype != mixed_qkv.dtype:
        raise ValueError(f"`conv_state` must have the dtype of `mixed_qkv`, {mixed_qkv.dtype}, got {conv_state.dtype}")
    check_same_device(mixed_qkv=mixed_qkv, conv_weight=conv_weight, a=a, b=b, A_log=A_log, dt_bias=dt_bias, **optional)
    return head_k_dim, v_dim
