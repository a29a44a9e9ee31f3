"""Reads recurrent states with learned queries, o = S^T q, and the gradient with respect to the queries.

The read alone: for the first round after a prompt, for training, and for engines that keep a snapshot of every token.
One program holds a tile of one state; every state is read from memory once.

Letters: L layers, B rows, H state heads, K key channels, V value channels, J queries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from ._checks import check_read
from ._launch import Layers, address_table, launches, on_device, power_of_2, require_kernels, tiles, versions
from ._products import read_state
from .records import Stacked


@triton.jit
def state_read_kernel(
    state, tables, slots, query, reads,
    num_layers, num_rows,
    s_l, s_b, s_h, s_k, s_v,
    q_l, q_b, q_h, q_j, q_k,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr,
    STATE_TABLE: tl.constexpr, ALIGNED: tl.constexpr, HAS_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v = pid % NV
    i_h = (pid // NV) % H
    i_b = ((pid // (NV * H)) % num_rows).to(tl.int64)
    i_l = ((pid // (NV * H)) // num_rows).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_j = tl.arange(0, BJ)
    m_k = o_k < K
    m_v = o_v < V
    p_reads = reads + ((i_b * J + o_j[:, None]) * num_layers + i_l) * (H * V) + i_h * V + o_v[None, :]
    m_reads = (o_j < J)[:, None] & m_v[None, :]
    slot = i_b
    if HAS_SLOTS:
        slot = tl.load(slots + i_b).to(tl.int64)
    if slot < 0:  # padding
        tl.store(p_reads, tl.zeros([BJ, BV], tl.float32).to(reads.dtype.element_ty), mask=m_reads)
        return
    if STATE_TABLE:
        p_s = tl.load(tables + i_l).to(state.dtype)
        if ALIGNED:
            p_s = tl.multiple_of(p_s, 16)
    else:
        p_s = state + i_l * s_l
    p_s += slot * s_b + i_h * s_h + o_k[:, None] * s_k + o_v[None, :] * s_v
    s = tl.load(p_s, mask=m_k[:, None] & m_v[None, :], other=0.0).to(tl.float32)  # [BK, BV]
    p_query = query + i_l * q_l + i_b * q_b + i_h * q_h + o_j[:, None] * q_j + o_k[None, :] * q_k
    q = tl.load(p_query, mask=(o_j < J)[:, None] & m_k[None, :], other=0.0)
    read = read_state(q, s, PRECISION)  # [BJ, BV]
    tl.store(p_reads, read.to(reads.dtype.element_ty), mask=m_reads)


@triton.jit
def state_read_bwd_kernel(
    state, tables, slots, grad_reads, grad_query,
    num_layers, num_rows,
    s_l, s_b, s_h, s_k, s_v,
    r_b, r_j, r_l, r_h, r_v,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, J: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BJ: tl.constexpr,
    STATE_TABLE: tl.constexpr, ALIGNED: tl.constexpr, HAS_SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    i_k = pid % NK
    i_h = (pid // NK) % H
    i_b = ((pid // (NK * H)) % num_rows).to(tl.int64)
    i_l = ((pid // (NK * H)) // num_rows).to(tl.int64)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    o_j = tl.arange(0, BJ)
    m_k = o_k < K
    m_v = o_v < V
    p_out = grad_query + (((i_b * num_layers + i_l) * H + i_h) * J + o_j[:, None]) * K + o_k[None, :]
    m_out = (o_j < J)[:, None] & m_k[None, :]
    slot = i_b
    if HAS_SLOTS:
        slot = tl.load(slots + i_b).to(tl.int64)
    if slot < 0:
        tl.store(p_out, tl.zeros([BJ, BK], tl.float32), mask=m_out)
        return
    if STATE_TABLE:
        p_s = tl.load(tables + i_l).to(state.dtype)
        if ALIGNED:
            p_s = tl.multiple_of(p_s, 16)
    else:
        p_s = state + i_l * s_l
    p_s += slot * s_b + i_h * s_h + o_k[None, :] * s_k + o_v[:, None] * s_v
    s = tl.load(p_s, mask=m_k[None, :] & m_v[:, None], other=0.0).to(tl.float32)  # [BV, BK]
    p_grad = grad_reads + i_b * r_b + o_j[:, None] * r_j + i_l * r_l + i_h * r_h + o_v[None, :] * r_v
    grad = tl.load(p_grad, mask=(o_j < J)[:, None] & m_v[None, :], other=0.0).to(tl.float32)  # [BJ, BV]
    tl.store(p_out, tl.dot(grad, s, input_precision=PRECISION), mask=m_out)


@torch.compiler.disable  # addresses, versions and pinned memory are no matter for a compiler
def state_read(
    states: Stacked,
    queries: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    read_dtype: torch.dtype = torch.float32,
    precision: str = "tf32",
    tables: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ready_kernels.state_read`. `tables` may hand in what `_launch.address_table` made of them."""
    state = Layers("states", states)
    require_kernels(state.tensor.device)
    num_rows = check_read(state, queries, slots)
    return _StateRead.apply(queries, state, slots, num_rows, read_dtype, precision, tables)


class _StateRead(torch.autograd.Function):
    """The states belong to a frozen target: they get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        state: Layers,
        slots: torch.Tensor | None,
        num_rows: int,
        read_dtype: torch.dtype,
        precision: str,
        tables: torch.Tensor | None,
    ) -> torch.Tensor:
        _, heads, k_dim, v_dim = state.shape
        num_queries = queries.shape[-2]
        tables = address_table([state]) if tables is None and state.is_table else tables
        ctx.state, ctx.slots, ctx.precision, ctx.tables = state, slots, precision, tables
        ctx.versions = versions(state.layers) if ctx.needs_input_grad[0] else None
        ctx.is_shared, ctx.query_dtype = queries.dim() == 4, queries.dtype
        reads = queries.new_empty((num_rows, num_queries, state.count, heads, v_dim), dtype=read_dtype)
        strides = queries.stride()
        q_strides = (strides[-4], 0 if ctx.is_shared else strides[0], *strides[-3:])
        sizes = tiles("state_read", queries.device, (k_dim, v_dim), state.count * num_rows * heads)
        with on_device(queries):
            state_read_kernel[(triton.cdiv(v_dim, sizes["BV"]) * heads * num_rows * state.count,)](
                state.tensor,
                queries if tables is None else tables,
                queries if slots is None else slots,
                queries,
                reads,
                state.count,
                num_rows,
                *(state.stride, *state.strides),
                *q_strides,
                H=heads,
                K=k_dim,
                V=v_dim,
                J=num_queries,
                BK=power_of_2(k_dim, 16),
                BJ=power_of_2(num_queries, 8),
                STATE_TABLE=state.is_table,
                ALIGNED=not state.is_table or state.is_aligned,
                HAS_SLOTS=slots is not None,
                PRECISION=precision,
                enable_fp_fusion=True,
                **sizes,
            )
        launches["state_read"] += 1
        return reads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_reads,) = grads  # [B, J, L, H, V]
        if versions(ctx.state.layers) != ctx.versions:
            raise RuntimeError("the states were changed between reading them and the backward pass: read a copy")
        state, slots, tables = ctx.state, ctx.slots, ctx.tables
        num_rows, num_queries = grad_reads.shape[:2]
        _, heads, k_dim, v_dim = state.shape
        found = grad_reads.new_empty((num_rows, state.count, heads, num_queries, k_dim), dtype=torch.float32)
        sizes = tiles("state_read_bwd", grad_reads.device, (k_dim, v_dim), state.count * num_rows * heads)
        with on_device(grad_reads):
            state_read_bwd_kernel[(triton.cdiv(k_dim, sizes["BK"]) * heads * num_rows * state.count,)](
                state.tensor,
                grad_reads if tables is None else tables,
                grad_reads if slots is None else slots,
                grad_reads,
                found,
                state.count,
                num_rows,
                *(state.stride, *state.strides),
                *grad_reads.stride(),
                H=heads,
                K=k_dim,
                V=v_dim,
                J=num_queries,
                BV=power_of_2(v_dim, 16),
                BJ=power_of_2(num_queries, 16),
                STATE_TABLE=state.is_table,
                ALIGNED=not state.is_table or state.is_aligned,
                HAS_SLOTS=slots is not None,
                PRECISION="tf32" if ctx.precision == "bf16" else ctx.precision,
                enable_fp_fusion=True,
                **sizes,
            )
        launches["state_read_bwd"] += 1
        grad = found.sum(0) if ctx.is_shared else found
        return grad.to(ctx.query_dtype), None, None, None, None, None, None
