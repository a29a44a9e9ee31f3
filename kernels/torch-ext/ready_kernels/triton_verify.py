"""Verifies a block in two launches a layer: the convolution, then gates, normalisation and the gated delta rule.

The first launch convolves the last W inputs and the new ones, and keeps both as the uncut window. In the second, one
program holds a tile `[K, BV]` of one state in registers, in float32, and runs the recurrence over the T tokens. The
state is read from memory once and never written: it is rebuilt from the records once it is known how many drafts were
accepted.

Letters: B rows, T tokens, D convolution channels, W taps, H state heads, Hk key heads, K key and V value channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._launch import check_float, launches, on_device, power_of_2, require_kernels, tiles
from .verify_reference import MAX_TOKENS, Verified, check_inputs


@triton.jit(do_not_specialize=["num_tokens"])
def verify_conv_kernel(
    x, old, weight, bias,
    mixed, window,
    num_tokens,
    x_b, x_t, x_d,
    c_b, c_d, c_w,
    w_d, w_w, bias_d,
    D: tl.constexpr, W: tl.constexpr, BD: tl.constexpr,
    HAS_OLD: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    t = ((pid // ND) % num_tokens).to(tl.int64)
    i_b = ((pid // ND) // num_tokens).to(tl.int64)
    o_d = (pid % ND).to(tl.int64) * BD + tl.arange(0, BD)
    m_d = o_d < D
    p_x = x + i_b * x_b + o_d * x_d
    p_old = old + i_b * c_b + o_d * c_d
    p_window = window + i_b * (W + num_tokens) * D + o_d  # [B, W + T, D]

    total = tl.zeros([BD], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + o_d * bias_d, mask=m_d, other=0.0).to(tl.float32)
    for j in tl.static_range(W):
        column = t + 1 + j  # of the window; its first one is only history
        # a mask of two bounds instead of `m_d & (column >= W)`: the interpreter of Triton 3.9 makes integers of that
        value = tl.load(p_x + (column - W) * x_t, mask=o_d < tl.where(column < W, 0, D), other=0.0)
        if HAS_OLD:
            before = tl.load(p_old + column * c_w, mask=o_d < tl.where(column < W, D, 0), other=0.0)
            value = tl.where(column < W, before, value)
        if j == W - 1:
            tl.store(p_window + column * D, value, mask=m_d)
        tap = tl.load(weight + o_d * w_d + j * w_w, mask=m_d, other=0.0).to(tl.float32)
        total += value.to(weight.dtype.element_ty).to(tl.float32) * tap
    total = total.to(weight.dtype.element_ty).to(tl.float32)  # the model rounds before the activation, and after
    total = (total / (1.0 + tl.exp(-total))).to(weight.dtype.element_ty)
    p_mixed = mixed + (i_b * num_tokens + t) * D + o_d
    tl.store(p_mixed, total.to(tl.float32).to(mixed.dtype.element_ty), mask=m_d)

    if t == 0:
        for j in tl.static_range(W):
            before = tl.zeros([BD], tl.float32).to(window.dtype.element_ty)
            if HAS_OLD:
                before = tl.load(p_old + j * c_w, mask=m_d, other=0.0)
            tl.store(p_window + j * D, before, mask=m_d)


@triton.jit
def _softplus(x):
    """`log(1 + exp(x))` to float32 accuracy: `log1p(e) = 2 artanh(e / (2 + e))`, by its series for e <= 1."""
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    y = z * z
    series = 1.0 / 11 + y * (1.0 / 13 + y * (1.0 / 15))
    series = 1.0 + y * (1.0 / 3 + y * (1.0 / 5 + y * (1.0 / 7 + y * (1.0 / 9 + y * series))))
    return tl.maximum(x, 0.0) + 2.0 * z * series


@triton.jit
def _token(p_q, p_v, t, stride, to_key, m_k, m_v):
    """Query, key and value of token t, float32."""
    q = tl.load(p_q + t * stride, mask=m_k, other=0.0).to(tl.float32)
    k = tl.load(p_q + t * stride + to_key, mask=m_k, other=0.0).to(tl.float32)
    v = tl.load(p_v + t * stride, mask=m_v, other=0.0).to(tl.float32)
    return q, k, v


@triton.jit
def _inverse_norm(x):
    """1 / |x|."""
    return tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _gates(decays, strengths, o_t, t):
    """Decay and strength of token t; of a token that is not there, 0."""
    return tl.sum(tl.where(o_t == t, decays, 0.0)), tl.sum(tl.where(o_t == t, strengths, 0.0))


@triton.jit(do_not_specialize=["num_tokens"])
def verify_rule_kernel(
    mixed, a, b, A_log, dt_bias, state,
    output, g, beta,
    num_tokens,
    scale,
    a_b, a_t, a_h,
    b_b, b_t, b_h,
    log_h, bias_h,
    s_b, s_h, s_k, s_v,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    D: tl.constexpr = 2 * HK * K + H * V
    pid = tl.program_id(0)
    i_v = pid % NV  # tiles of one head are neighbours: their queries and keys are in the cache
    i_h = ((pid // NV) % H).to(tl.int64)
    i_b = ((pid // NV) // H).to(tl.int64)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_t = o_t < num_tokens
    m_k = o_k < K
    m_v = o_v < V

    if HAS_STATE:
        p_s = state + i_b * s_b + i_h * s_h + o_k.to(tl.int64)[:, None] * s_k + o_v.to(tl.int64)[None, :] * s_v
        s = tl.load(p_s, mask=m_k[:, None] & m_v[None, :], other=0.0).to(tl.float32)  # [BK, BV]
    else:
        s = tl.zeros([BK, BV], tl.float32)

    # the gates of all tokens at once
    row = i_b * num_tokens
    wide_t = o_t.to(tl.int64)
    x = tl.load(a + i_b * a_b + wide_t * a_t + i_h * a_h, mask=m_t, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + i_h * log_h).to(tl.float32))
    log_decay = -rate * _softplus(x + tl.load(dt_bias + i_h * bias_h).to(tl.float32))
    x = tl.load(b + i_b * b_b + wide_t * b_t + i_h * b_h, mask=m_t, other=0.0).to(tl.float32)
    rounded = (1.0 / (1.0 + tl.exp(-x))).to(beta.dtype.element_ty)  # as the model does
    if i_v == 0:
        p_gates = (row + o_t) * H + i_h
        tl.store(g + p_gates, log_decay, mask=m_t)
        tl.store(beta + p_gates, rounded, mask=m_t)
    decays = tl.exp(log_decay)
    strengths = rounded.to(tl.float32)

    p_q = mixed + row * D + (i_h // (H // HK)) * K + o_k
    p_v = mixed + row * D + 2 * HK * K + i_h * V + o_v
    p_o = output + (row * H + i_h) * V + o_v
    last = num_tokens - 1
    # Two tokens a step, a and b: all four sums over the state are of the state before both, so that none waits for
    # another. With S the state before and u the update of an unscaled key,
    #     S_a^T q_a = decay_a S^T q_a + (k_a . q_a) u_a
    #     S_b^T q_b = decay_b (decay_a S^T q_b + (k_a . q_b) u_a) + (k_b . q_b) u_b
    # The next two tokens are on their way, and their norms computed, meanwhile. Where the number of tokens is odd, the
    # last b is the last token once more, and nothing of it is kept.
    qa, ka, va = _token(p_q, p_v, 0, D, HK * K, m_k, m_v)
    qb, kb, vb = _token(p_q, p_v, tl.minimum(1, last), D, HK * K, m_k, m_v)
    norm_ka, norm_qa, norm_kb, norm_qb = _inverse_norm(ka), _inverse_norm(qa), _inverse_norm(kb), _inverse_norm(qb)
    ka_qa, ka_kb, ka_qb, kb_qb = tl.sum(ka * qa), tl.sum(ka * kb), tl.sum(ka * qb), tl.sum(kb * qb)
    decay_a, strength_a = _gates(decays, strengths, o_t, 0)
    decay_b, strength_b = _gates(decays, strengths, o_t, 1)
    t = 0
    while t < num_tokens:
        s_ka, s_qa = tl.sum(s * ka[:, None], 0), tl.sum(s * qa[:, None], 0)
        s_kb, s_qb = tl.sum(s * kb[:, None], 0), tl.sum(s * qb[:, None], 0)
        ua = (va - s_ka * (decay_a * norm_ka)) * (strength_a * norm_ka)
        ub = (vb - (s_kb * decay_a + ua * ka_kb) * (decay_b * norm_kb)) * (strength_b * norm_kb)
        read_a = (s_qa * decay_a + ua * ka_qa) * (norm_qa * scale)
        read_b = ((s_qb * decay_a + ua * ka_qb) * decay_b + ub * kb_qb) * (norm_qb * scale)
        tl.store(p_o + t * (H * V), read_a.to(output.dtype.element_ty), mask=m_v)
        tl.store(p_o + (t + 1) * (H * V), read_b.to(output.dtype.element_ty), mask=o_v < tl.where(t < last, V, 0))
        s = s * (decay_a * decay_b) + ka[:, None] * (ua * decay_b)[None, :] + kb[:, None] * ub[None, :]
        t += 2
        qa, ka, va = _token(p_q, p_v, tl.minimum(t, last), D, HK * K, m_k, m_v)
        qb, kb, vb = _token(p_q, p_v, tl.minimum(t + 1, last), D, HK * K, m_k, m_v)
        norm_ka, norm_qa, norm_kb, norm_qb = _inverse_norm(ka), _inverse_norm(qa), _inverse_norm(kb), _inverse_norm(qb)
        ka_qa, ka_kb, ka_qb, kb_qb = tl.sum(ka * qa), tl.sum(ka * kb), tl.sum(ka * qb), tl.sum(kb * qb)
        decay_a, strength_a = _gates(decays, strengths, o_t, t)
        decay_b, strength_b = _gates(decays, strengths, o_t, t + 1)


@torch.compiler.disable  # addresses, versions and pinned memory are no matter for a compiler
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
    """See `verify_reference.verify`; inputs are float32, bfloat16 or float16 of any strides.

    `key` and `value` of the result are views of one tensor, and `window` is the transpose of a contiguous one.

    Raises:
        ValueError: as the reference does, and for other dtypes.
        RuntimeError: the kernels cannot run on this device.
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
    required = {"mixed_qkv": mixed_qkv, "conv_weight": conv_weight, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    for name, tensor in {**required, "conv_bias": conv_bias, "state": state}.items():
        if tensor is not None:
            check_float(name, tensor)
    require_kernels(mixed_qkv.device)

    batch, length, channels = mixed_qkv.shape
    heads, taps, keys = a.shape[2], conv_weight.shape[1], num_key_heads * k_dim
    mixed = torch.empty((batch, length, channels), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    window = torch.empty((batch, taps + length, channels), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    output = torch.empty((batch, length, heads, v_dim), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    g = torch.empty((batch, length, heads), dtype=torch.float32, device=mixed_qkv.device)
    beta = torch.empty((batch, length, heads), dtype=b.dtype, device=mixed_qkv.device)
    conv_tiles = tiles("verify_conv", mixed_qkv.device, (taps, channels), batch * length)
    rule_tiles = tiles("verify", mixed_qkv.device, (k_dim, v_dim), batch * heads)
    rule_tiles["BV"] = min(rule_tiles["BV"], power_of_2(v_dim))
    with on_device(mixed_qkv):
        verify_conv_kernel[(triton.cdiv(channels, conv_tiles["BD"]) * length * batch,)](
            mixed_qkv,
            mixed_qkv if conv_state is None else conv_state,
            conv_weight,
            conv_weight if conv_bias is None else conv_bias,
            mixed,
            window,
            length,
            *mixed_qkv.stride(),
            *((0, 0, 0) if conv_state is None else conv_state.stride()),
            *conv_weight.stride(),
            0 if conv_bias is None else conv_bias.stride(0),
            D=channels,
            W=taps,
            HAS_OLD=conv_state is not None,
            HAS_BIAS=conv_bias is not None,
            enable_fp_fusion=True,
            **conv_tiles,
        )
        verify_rule_kernel[(triton.cdiv(v_dim, rule_tiles["BV"]) * heads * batch,)](
            mixed,
            a,
            b,
            A_log,
            dt_bias,
            mixed if state is None else state,
            output,
            g,
            beta,
            length,
            k_dim**-0.5,
            *a.stride(),
            *b.stride(),
            A_log.stride(0),
            dt_bias.stride(0),
            *((0, 0, 0, 0) if state is None else state.stride()),
            H=heads,
            HK=num_key_heads,
            K=k_dim,
            V=v_dim,
            BT=MAX_TOKENS,
            BK=power_of_2(k_dim),
            HAS_STATE=state is not None,
            enable_fp_fusion=True,
            **rule_tiles,
        )
    launches["verify_conv"] += 1
    launches["verify_rule"] += 1
    key, value = mixed[..., keys : 2 * keys], mixed[..., 2 * keys :]
    return Verified(
        output,
        key.unflatten(2, (num_key_heads, k_dim)),
        value.unflatten(2, (heads, v_dim)),
        g,
        beta,
        window.transpose(1, 2),
    )
