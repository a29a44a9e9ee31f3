"""Torch reference of the recurrent-state kernels: a window of tokens, its outputs, and the state after any prefix of
it.

All three recurrences of the supported targets add, per token and head, one outer product to a decayed matrix state::

    S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T          o_t = S_t^T q_t

They differ in `g` (one value per head, or one per key channel) and in the update vector `u`:

    gated delta rule, KDA   u_t = beta_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)      arXiv 2412.06464 (Yang), eq. 10
    Mamba-2                 u_t = dt_t x_t, k_t = B_t, g_t = dt_t A, q_t = C_t       arXiv 2405.21060 (Dao, Gu), sec. 2

`u_t` depends on tokens up to t only. So a window computed once holds the state after *every* prefix of it: that is
what makes rolling back a rejected draft cheap and exact.

A decay from token i to token t is `exp(g_{i+1} + ... + g_t)`, each sum taken over its own tokens. The difference of
two sums from the start of the window would lose what a large `|g|` outside the interval rounds away, and is NaN for
a `g` of minus infinity.

Letters: B rows, T tokens of the window, H state heads, Hk key heads, K key channels, V value channels, G Mamba-2
groups. Everything is computed in float32 or, for float64 inputs, in float64. Any device; standard library and torch
only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Window(NamedTuple):
    """The state updates of T consecutive tokens.

    Args:
        keys (`torch.Tensor` of shape `[B, H, T, K]`): Normalised keys `k_t` (Mamba-2: `B_t`).
        updates (`torch.Tensor` of shape `[B, H, T, V]`): Update vectors `u_t`.
        g (`torch.Tensor` of shape `[B, H, T, 1]` or `[B, H, T, K]`): Log decay of each token.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    g: torch.Tensor


def interval_decays(g: torch.Tensor) -> torch.Tensor:
    """Decay over every interval of tokens, O(T^2) memory.

    Args:
        g (`torch.Tensor` of shape `[..., T]`): Log decay, <= 0, minus infinity allowed.

    Returns:
        `torch.Tensor` of shape `[..., T, T + 1]`: `exp(g_i + ... + g_t)` at `[t, i]`, that is from before token i to
        after token t; 1 for the empty interval i = t + 1, 0 behind it.
    """
    length = g.shape[-1]
    sums = g[..., None].expand(*g.shape, length + 1).tril().cumsum(-2)  # entries before the start are 0
    return sums.exp_().tril_(1)


def gated_delta_window(
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    use_qk_l2norm: bool = True,
) -> Window:
    """Solves the update vectors of a window of the gated delta rule (scalar decay) or of KDA (decay per key channel).

    Uses the triangular form `(I + A) U = diag(beta) (V - (D_t0 * K) S_0)`, `A_ti = beta_t (k_t D_ti) . k_i` for
    i < t, where `D_ti` is the decay from after token i (from the start) to after token t.

    Args:
        key (`torch.Tensor` of shape `[B, T, Hk, K]`): Keys as the model passes them, Hk divides H.
        value (`torch.Tensor` of shape `[B, T, H, V]`): Values.
        g (`torch.Tensor` of shape `[B, T, H]` or `[B, T, H, K]`): Log decay, <= 0.
        beta (`torch.Tensor` of shape `[B, T, H]`): Write strength.
        initial_state (`torch.Tensor` of shape `[B, H, K, V]`, *optional*): State before the window; `None` is zero.
        use_qk_l2norm (`bool`): Normalise the keys, as the model's own rule does in its kernel.

    Returns:
        `Window`: keys, update vectors and log decay.
    """
    heads = value.shape[2]
    k = _per_head(_normalised(key) if use_qk_l2norm else _wide(key), heads)  # [B, H, T, K]
    v, b = _per_head(_wide(value), heads), _wide(beta).transpose(1, 2)[..., None]
    g = _gates(g)
    system = b * decayed_scores(k, k, g)  # [B, H, T, T], read strictly below its diagonal
    target = v if initial_state is None else v - (k * g.cumsum(2).exp()) @ initial_state.to(k.dtype)
    updates = torch.linalg.solve_triangular(system, b * target, upper=False, unitriangular=True)
    return Window(k, updates, g)


def gated_delta_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    use_qk_l2norm: bool = True,
) -> tuple[torch.Tensor, Window]:
    """Outputs and window of a short block of the gated delta rule, scalar decay only: as `gated_delta_window` and
    `window_outputs` give them, in half as many operations.

    Keys and queries are normalised, multiplied with the keys and read from the state together; a scalar decay is
    applied to the products.

    Args:
        query (`torch.Tensor` of shape `[B, T, Hk, K]`): Queries as the model passes them.
        key, value, g, beta, initial_state, use_qk_l2norm: As in `gated_delta_window`, with `g` of shape `[B, T, H]`.

    Returns:
        `tuple`: outputs `[B, T, H, V]` in float32, and the `Window`.
    """
    batch, length, heads, v_dim = value.shape
    k_dim, group = key.shape[3], heads // key.shape[2]
    both = _wide(torch.cat([key, query], dim=1))  # [B, 2T, Hk, K]
    if use_qk_l2norm:
        norm = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
        both = both * torch.rsqrt(norm * norm + 1e-6)
    both = both.transpose(1, 2)
    both = both if group == 1 else both.repeat_interleave(group, dim=1)
    both = both.reshape(-1, 2 * length, k_dim)  # [B * H, 2T, K]
    keys = both[:, :length]
    g = _wide(g).transpose(1, 2).reshape(-1, length)
    decay = interval_decays(g)  # [B * H, T, 1 + T]
    scores = torch.bmm(both, keys.mT)
    strength = _wide(beta).transpose(1, 2).reshape(-1, length, 1)
    target = _wide(value).transpose(1, 2).reshape(-1, length, v_dim)
    if initial_state is not None:
        factor = decay[..., :1]
        reads = torch.bmm(both, initial_state.to(both.dtype).reshape(-1, k_dim, v_dim))
        target = torch.addcmul(target, reads[:, :length], factor, value=-1)
    # a unitriangular solve reads what lies strictly below the diagonal
    system = scores[:, :length] * decay[..., 1:] * strength
    updates = torch.linalg.solve_triangular(system, target * strength, upper=False, unitriangular=True)
    outputs = torch.bmm(scores[:, length:] * decay[..., 1:], updates)
    if initial_state is not None:
        outputs = outputs.addcmul_(reads[:, length:], factor)
    keys, updates, g, outputs = (x.unflatten(0, (batch, heads)) for x in (keys, updates, g[..., None], outputs))
    return outputs.transpose(1, 2) * k_dim**-0.5, Window(keys, updates, g)


def mamba2_window(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Window:
    """Update vectors of a window of Mamba-2: known without the state, since nothing is subtracted.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, T, H, V]`): `x` (V is the head dimension).
        dt (`torch.Tensor` of shape `[B, T, H]`): Step sizes before bias, softplus and limit.
        A (`torch.Tensor` of shape `[H]`): Negative decay rates.
        B (`torch.Tensor` of shape `[B, T, G, K]`): Input projections (K is the state size), G divides H.
        dt_bias, dt_softplus, dt_limit: As in the model's own scan.

    Returns:
        `Window`: `B_t` as keys, `dt_t x_t` as updates, `dt_t A` as log decay.
    """
    heads = hidden_states.shape[2]
    step, g = mamba2_steps(dt, A, dt_bias, dt_softplus, dt_limit)
    keys = _per_head(_wide(B), heads)
    updates = _per_head(_wide(hidden_states), heads) * step.transpose(1, 2)[..., None]
    return Window(keys, updates, _gates(g))


def mamba2_steps(
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step sizes of Mamba-2 and its log decay `dt A`, both `[B, T, H]`, at least float32.

    Args:
        dt, A, dt_bias, dt_softplus, dt_limit: As in `mamba2_window`.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    step = _wide(dt.clamp(dt_limit[0], dt_limit[1]))
    return step, step * A.to(step.dtype)


def window_outputs(query: torch.Tensor, window: Window, initial_state: torch.Tensor | None) -> torch.Tensor:
    """Outputs `o_t = S_t^T q_t` of every token of a window, without forming the states.

    Args:
        query (`torch.Tensor` of shape `[B, H, T, K]`): Scaled queries, float32 (Mamba-2: `C_t`).
        window (`Window`): The window.
        initial_state (`torch.Tensor` of shape `[B, H, K, V]`, *optional*): State before the window.

    Returns:
        `torch.Tensor` of shape `[B, H, T, V]`, float32.
    """
    output = decayed_scores(query, window.keys, window.g) @ window.updates
    if initial_state is not None:
        output = output + (query * window.g.cumsum(2).exp()) @ initial_state.to(query.dtype)
    return output


def window_state(window: Window, initial_state: torch.Tensor | None, length: int | torch.Tensor) -> torch.Tensor:
    """State after the first `length` tokens of a window: `S_n = D_n0 S_0 + sum_{i<=n} (D_ni k_i) u_i^T`, where `D_ni`
    is the decay from after token i (from the start) to after token n.

    Args:
        window (`Window`): The window.
        initial_state (`torch.Tensor` of shape `[B, H, K, V]`, *optional*): State before the window. Not changed.
        length (`int` or `torch.LongTensor` of shape `[B]`): Tokens to keep, the same for all rows or one number per
            row, 0..T.

    Returns:
        `torch.Tensor` of shape `[B, H, K, V]`, float32.
    """
    keys, updates, g = window
    if isinstance(length, int):
        keys, updates, g = keys[:, :, :length], updates[:, :, :length], g[:, :, :length]
    else:
        dropped = torch.arange(keys.shape[2], device=keys.device) >= length[:, None]  # [B, T]
        # a rejected suffix may hold anything, NaN included; a token that neither decays nor writes changes nothing
        keys, updates, g = (x.masked_fill(dropped[:, None, :, None], 0.0) for x in window)
    # summed from the end: 0 for the last token, over all tokens for the state before the window; [B, H, n + 1, 1|K]
    decays = F.pad(g.flip(2), (0, 0, 1, 0)).cumsum(2).exp_().flip(2)
    state = (keys * decays[:, :, 1:]).mT @ updates
    if initial_state is not None:
        state.addcmul_(initial_state.to(state.dtype), decays[:, :, :1].mT)  # in place: no third state
    return state


def scaled_query(query: torch.Tensor, heads: int, use_qk_l2norm: bool = True) -> torch.Tensor:
    """Queries of the delta rules: `[B, T, Hk, K]` -> normalised, scaled by `K^-1/2`, per state head `[B, H, T, K]`."""
    q = _normalised(query) if use_qk_l2norm else _wide(query)
    return _per_head(q, heads) * query.shape[-1] ** -0.5


def grouped_query(query: torch.Tensor, heads: int) -> torch.Tensor:
    """Read vectors of Mamba-2 (`C`): `[B, T, G, K]` -> one per state head, `[B, H, T, K]`, float32."""
    return _per_head(_wide(query), heads)


def decayed_scores(rows: torch.Tensor, columns: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """`sum_d rows_td columns_id D_tid` for i <= t, 0 elsewhere; `[B, H, T, T]`.

    `D_tid` is the decay from after token i to after token t, for `g` of shape `[B, H, T, 1]` the same for all
    channels. It is taken pairwise: factored into `exp(G_t) exp(-G_i)` it would overflow float32 once `|G|` passes 88.
    A decay per channel therefore takes memory for `[B, H, T, T, K]`, which the T of a drafted block (up to 33) keeps
    small.
    """
    if g.shape[-1] == 1:
        return (rows @ columns.mT) * interval_decays(g.squeeze(-1))[..., 1:]
    length = rows.shape[2]
    is_outside = torch.ones(length, length, dtype=torch.bool, device=rows.device).triu()  # [t, i]: t is not after i
    decay = g.unsqueeze(3).masked_fill(is_outside[..., None], 0.0).cumsum(2).exp_()  # [B, H, T, T, K]
    return torch.einsum("bhtk,bhik,bhtik->bhti", rows, columns, decay).tril()


def _wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _normalised(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    x = _wide(x)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[B, T, Hx, D]` -> `[B, H, T, D]`: each key head (or group) serves `H / Hx` consecutive state heads."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _gates(g: torch.Tensor) -> torch.Tensor:
    """Log decay `[B, T, H(, K)]` -> `[B, H, T, 1|K]`."""
    g = _wide(g).transpose(1, 2)
    return g[..., None] if g.dim() == 3 else g
