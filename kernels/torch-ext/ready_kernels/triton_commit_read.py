"""One launch for all layers: replay the accepted tokens on every state, write it back, read it with the queries.

One program holds a tile `[K, BV]` of one state in registers, in float32. It replays the accepted tokens from their
records, stores the tile and multiplies it with the J queries. So a committed state is read from memory once and
written once, and the read of ReaDy costs no traffic of its own. How many tokens a row accepted is only known to the
device; the grid does not depend on it, so a graph can capture the launch.

Letters: L layers, B rows, T tokens, H state heads, Hk key heads, K key channels, V value channels, J queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_commit
from ._launch import Layers, address_table, increment_versions, launches, on_device, power_of_2, require_kernels, tiles
from ._products import read_state
from .records import Records, Stacked


@triton.jit
def _record(p_key, p_value, p_g, p_beta, t, k_t, v_t, g_t, b_t, m_k, m_v, PER_CHANNEL: tl.constexpr):
    """Key, value, log decay and strength of token t, float32."""
    k = tl.load(p_key + t * k_t, mask=m_k, other=0.0)
    v = tl.load(p_value + t * v_t, mask=m_v, other=0.0)
    b = tl.load(p_beta + t * b_t)
    if PER_CHANNEL:
        g = tl.load(p_g + t * g_t, mask=m_k, other=0.0)
    else:
        g = tl.load(p_g + t * g_t)
    return k.to(tl.float32), v.to(tl.float32), g.to(tl.float32), b.to(tl.float32)


@triton.jit
def _inverse_norm(k, L2NORM: tl.constexpr):
    """1 / |k|, or 1."""
    norm = 1.0
    if L2NORM:
        norm = 1.0 / tl.sqrt(tl.sum(k * k) + 1e-6)
    return norm


@triton.jit
def _step(s, k, v, decay, strength, DELTA: tl.constexpr, L2NORM: tl.constexpr):
    """The state after one token. The norm goes into the vectors of values, which are shorter than the keys."""
    s = s * decay
    norm = _inverse_norm(k, L2NORM)
    if DELTA:
        v = v - tl.sum(s * k[:, None], 0) * norm
    return s + k[:, None] * (v * (strength * norm))[None, :]


@triton.jit
def commit_read_kernel(
    state,
    out,
    tables,
    accepted,
    slots,
    key,
    value,
    g,
    beta,
    query,
    reads,
    num_layers,
    num_rows,
    num_tokens,
    s_l, s_b, s_h, s_k, s_v,
    w_l, w_b, w_h, w_k, w_v,
    k_l, k_b, k_t, k_h, k_d,
    v_l, v_b, v_t, v_h, v_d,
    g_l, g_b, g_t, g_h, g_d,
    b_l, b_b, b_t, b_h,
    q_l, q_b, q_h, q_j, q_k,
    H: tl.constexpr,
    HK: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    J: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BJ: tl.constexpr,
    STATE_TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    RECORD_TABLE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    READ: tl.constexpr,
    EARLY_QUERY: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV  # tiles of one head are neighbours: their keys and gates are in the cache
    i_h = (pid // NV) % H
    i_b = ((pid // (NV * H)) % num_rows).to(tl.int64)
    i_l = ((pid // (NV * H)) // num_rows).to(tl.int64)
    i_hk = i_h // (H // HK)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_j = tl.arange(0, BJ)
    m_k = o_k < K
    m_v = o_v < V
    m_s = m_k[:, None] & m_v[None, :]
    p_reads = reads + ((i_b * J + o_j[:, None]) * num_layers + i_l) * (H * V) + i_h * V + o_v[None, :]
    m_reads = (o_j < J)[:, None] & m_v[None, :]

    slot = i_b
    if HAS_SLOTS:
        slot = tl.load(slots + i_b).to(tl.int64)
    if slot < 0:  # padding: nothing is touched, and the read is zero
        if READ:
            tl.store(p_reads, tl.zeros([BJ, BV], tl.float32).to(reads.dtype.element_ty), mask=m_reads)
        return
    n = tl.maximum(tl.minimum(tl.load(accepted + i_b), num_tokens), 0).to(tl.int32)

    if STATE_TABLE:
        p_s = tl.load(tables + i_l).to(state.dtype)
        p_w = tl.load(tables + num_layers + i_l).to(out.dtype)
        if ALIGNED:  # else every access is 4 bytes wide
            p_s = tl.multiple_of(p_s, 16)
            p_w = tl.multiple_of(p_w, 16)
    else:
        p_s = state + i_l * s_l
        p_w = out + i_l * w_l
    if RECORD_TABLE:
        p_key = tl.load(tables + 2 * num_layers + i_l).to(key.dtype)
        p_value = tl.load(tables + 3 * num_layers + i_l).to(value.dtype)
        p_g = tl.load(tables + 4 * num_layers + i_l).to(g.dtype)
        p_beta = tl.load(tables + 5 * num_layers + i_l).to(beta.dtype)
    else:
        p_key = key + i_l * k_l
        p_value = value + i_l * v_l
        p_g = g + i_l * g_l
        p_beta = beta + i_l * b_l
    p_s += slot * s_b + i_h * s_h + o_k[:, None] * s_k + o_v[None, :] * s_v
    p_w += slot * w_b + i_h * w_h + o_k[:, None] * w_k + o_v[None, :] * w_v
    p_key += i_b * k_b + i_hk * k_h + o_k * k_d
    p_value += i_b * v_b + i_h * v_h + o_v * v_d
    p_beta += i_b * b_b + i_h * b_h
    p_g += i_b * g_b + i_h * g_h
    if PER_CHANNEL:
        p_g += o_k * g_d

    # All loads are on their way before anything waits for one: ptxas would put those of the state last, and those of
    # the records behind the branch on n, were it not for the barrier. Tokens beyond n are loaded and not used.
    last = num_tokens - 1
    k0, v0, g0, b0 = _record(p_key, p_value, p_g, p_beta, 0, k_t, v_t, g_t, b_t, m_k, m_v, PER_CHANNEL)
    k1, v1, g1, b1 = k0, v0, g0, b0
    if not PER_CHANNEL:
        second = tl.minimum(1, last)
        k1, v1, g1, b1 = _record(p_key, p_value, p_g, p_beta, second, k_t, v_t, g_t, b_t, m_k, m_v, PER_CHANNEL)
    s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)  # [BK, BV]
    tl.debug_barrier()
    if READ:
        p_query = query + i_l * q_l + i_b * q_b + i_h * q_h + o_j[:, None] * q_j + o_k[None, :] * q_k
        m_query = (o_j < J)[:, None] & m_k[None, :]
        if EARLY_QUERY:
            q = tl.load(p_query, mask=m_query, other=0.0)

    t = 0
    if PER_CHANNEL:
        while t < n:
            k, v, decay, strength = k0, v0, tl.exp(g0), b0
            t += 1
            ahead = tl.minimum(t, last)
            k0, v0, g0, b0 = _record(p_key, p_value, p_g, p_beta, ahead, k_t, v_t, g_t, b_t, m_k, m_v, PER_CHANNEL)
            s = _step(s, k, v, decay[:, None], strength, DELTA, L2NORM)
    else:
        # Two tokens a step: both sums over the state are of the state before the first, so they do not wait for one
        # another. S_1^T k_2 needs the first update u_1 only through k_1 . k_2.
        while t + 1 < n:
            ka, va, decay_a, strength_a = k0, v0, tl.exp(g0), b0
            kb, vb, decay_b, strength_b = k1, v1, tl.exp(g1), b1
            t += 2
            ahead = tl.minimum(t, last)
            k0, v0, g0, b0 = _record(p_key, p_value, p_g, p_beta, ahead, k_t, v_t, g_t, b_t, m_k, m_v, PER_CHANNEL)
            ahead = tl.minimum(t + 1, last)
            k1, v1, g1, b1 = _record(p_key, p_value, p_g, p_beta, ahead, k_t, v_t, g_t, b_t, m_k, m_v, PER_CHANNEL)
            norm_a = _inverse_norm(ka, L2NORM)
            norm_b = _inverse_norm(kb, L2NORM)
            if DELTA:
                va = va - tl.sum(s * ka[:, None], 0) * (decay_a * norm_a)
            ua = va * (strength_a * norm_a)
            if DELTA:
                vb = vb - (tl.sum(s * kb[:, None], 0) * decay_a + ua * tl.sum(ka * kb)) * (decay_b * norm_b)
            ub = vb * (strength_b * norm_b)
            s = s * (decay_a * decay_b) + ka[:, None] * (ua * decay_b)[None, :] + kb[:, None] * ub[None, :]
        if t < n:
            s = _step(s, k0, v0, tl.exp(g0), b0, DELTA, L2NORM)

    if IN_PLACE:
        if n > 0:  # a row that accepts nothing keeps its state bit for bit
            tl.store(p_w, s.to(out.dtype.element_ty), mask=m_s)
    else:
        tl.store(p_w, s.to(out.dtype.element_ty), mask=m_s)
    if READ:
        if not EARLY_QUERY:
            q = tl.load(p_query, mask=m_query, other=0.0)
        read = read_state(q, s, PRECISION)  # [BJ, BV]
        tl.store(p_reads, read.to(reads.dtype.element_ty), mask=m_reads)


@torch.compiler.disable  # addresses, versions and pinned memory are no matter for a compiler
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
    read_dtype: torch.dtype = torch.float32,
    precision: str = "tf32",
    tables: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """See `ready_kernels.commit_and_read`. `tables` may hand in what `address_tables` made of the same tensors."""
    state = Layers("states", states)
    written = state if out is None else Layers("out", out)
    fields = {name: Layers(f"records.{name}", x) for name, x in records._asdict().items()}
    key, value, g, beta = fields.values()
    require_kernels(state.tensor.device)
    num_rows, num_tokens, (heads, k_dim, v_dim) = check_commit(state, written, fields, accepted, queries, slots)
    per_channel = len(g.shape) == 4
    state_table = state.is_table or written.is_table
    record_table = any(field.is_table for field in fields.values())
    if tables is None:
        needed = state_table or record_table
        tables = address_table([state, written, *fields.values()]) if needed else accepted  # unused
    if queries is None:
        reads, num_queries = None, 1
        q_strides: tuple[int, ...] = (0, 0, 0, 0, 0)
    else:
        num_queries, strides = queries.shape[-2], queries.stride()
        q_strides = (strides[-4], 0 if queries.dim() == 4 else strides[0], *strides[-3:])
        reads = accepted.new_empty((num_rows, num_queries, state.count, heads, v_dim), dtype=read_dtype)
    sizes = tiles("commit_and_read", state.tensor.device, (k_dim, v_dim), state.count * num_rows * heads)
    # few queries find room in registers beside the state, so they are loaded before the tokens are replayed
    early_query = bool(sizes.pop("EARLY_QUERY", 0)) and num_queries * k_dim <= 1024
    grid = (triton.cdiv(v_dim, sizes["BV"]) * heads * num_rows * state.count,)
    with on_device(state.tensor):
        commit_read_kernel[grid](
            state.tensor,
            written.tensor,
            tables,
            accepted,
            accepted if slots is None else slots,
            key.tensor,
            value.tensor,
            g.tensor,
            beta.tensor,
            state.tensor if queries is None else queries,
            state.tensor if reads is None else reads,
            state.count,
            num_rows,
            num_tokens,
            *(state.stride, *state.strides),
            *(written.stride, *written.strides),
            *(key.stride, *key.strides),
            *(value.stride, *value.strides),
            *(g.stride, *g.strides, *(() if per_channel else (0,))),
            *(beta.stride, *beta.strides),
            *q_strides,
            H=heads,
            HK=key.shape[2],
            K=k_dim,
            V=v_dim,
            J=num_queries,
            BK=power_of_2(k_dim, 16),
            BJ=power_of_2(num_queries, 8),
            STATE_TABLE=state_table,
            ALIGNED=not state_table or (state.is_aligned and written.is_aligned),
            RECORD_TABLE=record_table,
            HAS_SLOTS=slots is not None,
            IN_PLACE=out is None,
            PER_CHANNEL=per_channel,
            DELTA=delta,
            L2NORM=l2norm,
            READ=reads is not None,
            EARLY_QUERY=early_query,
            PRECISION=precision,
            enable_fp_fusion=True,
            **sizes,
        )
    launches["commit_and_read"] += 1
    increment_versions(states if out is None else out)
    return reads


def address_tables(states: Stacked, out: Stacked | None, records: Records) -> torch.Tensor:
    """Addresses `[6, L]` of states, out and the four records, int64, on their device; valid as long as they live."""
    state = Layers("states", states)
    written = state if out is None else Layers("out", out)
    return address_table([state, written, *(Layers(f"records.{name}", x) for name, x in records._asdict().items())])
