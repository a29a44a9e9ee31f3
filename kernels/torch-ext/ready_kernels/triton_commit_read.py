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

from ._launch import (
    FLOATS,
    Layers,
    check_same_device,
    check_shape,
    launches,
    on_device,
    power_of_2,
    require_kernels,
    tiles,
)
from .records import Records, Stacked


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
    RECORD_TABLE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    DELTA: tl.constexpr,
    L2NORM: tl.constexpr,
    READ: tl.constexpr,
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
    n = tl.minimum(tl.load(accepted + i_b).to(tl.int32), num_tokens)

    if STATE_TABLE:  # 16-byte aligned, as the launcher checks: else every access would be 4 bytes wide
        p_s = tl.multiple_of(tl.load(tables + i_l).to(state.dtype), 16)
        p_w = tl.multiple_of(tl.load(tables + num_layers + i_l).to(out.dtype), 16)
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

    s = tl.load(p_s, mask=m_s, other=0.0).to(tl.float32)  # [BK, BV]

    # the records of token t + 1 are on their way while token t is applied; the last one is fetched twice
    next_k = tl.load(p_key, mask=m_k, other=0.0).to(tl.float32)
    next_v = tl.load(p_value, mask=m_v, other=0.0).to(tl.float32)
    next_b = tl.load(p_beta).to(tl.float32)
    if PER_CHANNEL:
        next_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    else:
        next_g = tl.load(p_g).to(tl.float32)
    t = 0
    while t < n:
        k = next_k
        v = next_v
        b = next_b
        decay = tl.exp(next_g)
        t += 1
        ahead = tl.minimum(t, n - 1)
        next_k = tl.load(p_key + ahead * k_t, mask=m_k, other=0.0).to(tl.float32)
        next_v = tl.load(p_value + ahead * v_t, mask=m_v, other=0.0).to(tl.float32)
        next_b = tl.load(p_beta + ahead * b_t).to(tl.float32)
        if PER_CHANNEL:
            next_g = tl.load(p_g + ahead * g_t, mask=m_k, other=0.0).to(tl.float32)
            s = s * decay[:, None]
        else:
            next_g = tl.load(p_g + ahead * g_t).to(tl.float32)
            s = s * decay
        # the norm goes into the two vectors of values, which are shorter than the key a thread holds
        norm = 1.0
        if L2NORM:
            norm = 1.0 / tl.sqrt(tl.sum(k * k) + 1e-6)
        if DELTA:
            v = v - tl.sum(s * k[:, None], 0) * norm
        s = s + k[:, None] * (v * (b * norm))[None, :]

    if IN_PLACE:
        if n > 0:  # a row that accepts nothing keeps its state bit for bit
            tl.store(p_w, s.to(out.dtype.element_ty), mask=m_s)
    else:
        tl.store(p_w, s.to(out.dtype.element_ty), mask=m_s)
    if READ:
        p_query = query + i_l * q_l + i_b * q_b + i_h * q_h + o_j[:, None] * q_j + o_k[None, :] * q_k
        q = tl.load(p_query, mask=(o_j < J)[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        read = tl.dot(q, s, input_precision=PRECISION)  # [BJ, BV]
        tl.store(p_reads, read.to(reads.dtype.element_ty), mask=m_reads)


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
    num_rows, num_tokens, (heads, k_dim, v_dim) = _check(state, written, fields, accepted, queries, slots)
    per_channel = len(g.shape) == 4
    state_table = state.is_table or written.is_table
    record_table = any(field.is_table for field in fields.values())
    if tables is None:
        needed = state_table or record_table
        tables = address_tables(states, out, records) if needed else accepted  # unused
    if queries is None:
        reads, num_queries = None, 1
        q_strides: tuple[int, ...] = (0, 0, 0, 0, 0)
    else:
        num_queries, strides = queries.shape[-2], queries.stride()
        q_strides = (strides[-4], 0 if queries.dim() == 4 else strides[0], *strides[-3:])
        reads = accepted.new_empty((num_rows, num_queries, state.count, heads, v_dim), dtype=read_dtype)
    sizes = tiles("commit_and_read", state.tensor.device, (k_dim, v_dim), state.count * num_rows * heads)
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
            BJ=power_of_2(num_queries, 16),
            STATE_TABLE=state_table,
            RECORD_TABLE=record_table,
            HAS_SLOTS=slots is not None,
            IN_PLACE=out is None,
            PER_CHANNEL=per_channel,
            DELTA=delta,
            L2NORM=l2norm,
            READ=reads is not None,
            PRECISION=precision,
            enable_fp_fusion=True,
            **sizes,
        )
    launches["commit_and_read"] += 1
    return reads


def address_tables(states: Stacked, out: Stacked | None, records: Records) -> torch.Tensor:
    """Addresses `[6, L]` of states, out and the four records, int64, on their device; valid as long as they live.

    Raises:
        ValueError: a state that does not start at a multiple of 16 bytes.
    """
    state = Layers("states", states)
    rows = [state.addresses(), (state if out is None else Layers("out", out)).addresses()]
    if any(address % 16 for row in rows for address in row):
        raise ValueError("states in a list must start at multiples of 16 bytes: a slice of a larger tensor may not")
    rows += [Layers(f"records.{name}", x).addresses() for name, x in records._asdict().items()]
    on_host = torch.tensor(rows, dtype=torch.int64)
    if state.tensor.device.type == "cuda":  # pinned, so that the copy does not wait for the device
        return on_host.pin_memory().to(state.tensor.device, non_blocking=True)
    return on_host.to(state.tensor.device)


def _check(
    state: Layers,
    written: Layers,
    fields: dict[str, Layers],
    accepted: torch.Tensor,
    queries: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> tuple[int, int, tuple[int, int, int]]:
    """Raises ValueError unless everything fits; returns B, T and (H, K, V)."""
    if len(state.shape) != 4:
        raise ValueError(
            f"`states` must be [L, N, H, K, V] or L tensors [N, H, K, V], got {list(state.shape)} a layer"
        )
    num_slots, heads, k_dim, v_dim = state.shape
    key, value, g, beta = fields.values()
    if len(key.shape) != 4 or heads % key.shape[2]:
        raise ValueError(
            f"`records.key` must be [B, T, Hk, {k_dim}] a layer, Hk dividing {heads}, got {list(key.shape)}"
        )
    num_rows, num_tokens = key.shape[:2]
    expected = {
        "key": [num_rows, num_tokens, key.shape[2], k_dim],
        "value": [num_rows, num_tokens, heads, v_dim],
        "g": [num_rows, num_tokens, heads, *([k_dim] if len(g.shape) == 4 else [])],
        "beta": [num_rows, num_tokens, heads],
    }
    for name, field in fields.items():
        check_shape(f"records.{name}", field.tensor if field.is_table else field.tensor[0], expected[name])
        if field.count != state.count:
            raise ValueError(f"`states` has {state.count} layers and `records.{name}` {field.count}")
    if written.count != state.count or written.shape != state.shape:
        raise ValueError(
            f"`out` must have the {state.count} layers and the shape of `states`, got {list(written.shape)}"
        )
    if any(written.strides[i] == 0 and size > 1 for i, size in enumerate(written.shape)):
        raise ValueError("`out`, or `states` in place, must not be an expanded tensor: its elements overlap")
    check_vector("accepted", accepted, num_rows)
    if slots is not None:
        check_vector("slots", slots, num_rows, below=num_slots)
    elif num_slots != num_rows:
        raise ValueError(f"`states` has {num_slots} rows and the records {num_rows}: pass `slots`")
    check_queries(queries, state.count, num_rows, heads, k_dim)
    tensors = {name: field.tensor for name, field in fields.items()}
    check_same_device(
        states=state.tensor, out=written.tensor, accepted=accepted, queries=queries, slots=slots, **tensors
    )
    return num_rows, num_tokens, (heads, k_dim, v_dim)


def check_vector(name: str, tensor: torch.Tensor, num_rows: int, below: int | None = None) -> None:
    """Raises ValueError unless `tensor` holds one int32 or int64 per row, next to each other.

    On the CPU, where looking costs nothing, also if a value is not less than `below`.
    """
    if (
        tensor.dtype not in (torch.int32, torch.int64)
        or list(tensor.shape) != [num_rows]
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"`{name}` must be a contiguous int32 or int64 tensor of shape [{num_rows}], got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    if below is not None and num_rows and tensor.device.type == "cpu" and int(tensor.max()) >= below:
        raise ValueError(f"`{name}` must be below {below}, got {int(tensor.max())}")


def check_queries(queries: torch.Tensor | None, num_layers: int, num_rows: int, heads: int, k_dim: int) -> None:
    """Raises ValueError unless queries are `[L, H, J, K]` or `[B, L, H, J, K]`."""
    if queries is None:
        return
    rows = [] if queries.dim() == 4 else [num_rows]
    expected = [*rows, num_layers, heads, queries.shape[-2], k_dim] if queries.dim() in (4, 5) else None
    if expected is None or list(queries.shape) != expected or not queries.shape[-2] or queries.dtype not in FLOATS:
        raise ValueError(
            f"`queries` must be [{num_layers}, {heads}, J, {k_dim}], or the same with {num_rows} rows in front, "
            f"J >= 1, in float32, bfloat16 or float16; got {queries.dtype} {list(queries.shape)}"
        )
