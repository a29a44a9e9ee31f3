"""One launch for all layers: cut the convolution windows to what they were after the accepted tokens of every row.

A verify forward leaves the last W inputs before the block and the T inputs of the block, W + T columns. After n
accepted tokens the window is columns n .. n + W - 1; n differs from row to row and is only known to the device.

Letters: L layers, B rows, D channels, W columns of a window, T tokens of the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ._checks import check_windows
from ._launch import Layers, address_table, launches, on_device, require_kernels, tiles
from .records import Stacked


@triton.jit
def conv_commit_kernel(
    uncut, tables, accepted, window,
    num_rows, num_channels, num_columns,
    x_l, x_b, x_d, x_w,
    W: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_tiles = tl.cdiv(num_channels, BD)
    i_d = pid % num_tiles
    i_b = ((pid // num_tiles) % num_rows).to(tl.int64)
    i_l = ((pid // num_tiles) // num_rows).to(tl.int64)
    o_d = i_d * BD + tl.arange(0, BD)
    o_w = tl.arange(0, BW)
    mask = (o_d < num_channels)[:, None] & (o_w < W)[None, :]
    n = tl.maximum(tl.minimum(tl.load(accepted + i_b), num_columns - W), 0).to(tl.int32)
    if TABLE:
        p_x = tl.load(tables + i_l).to(uncut.dtype)
    else:
        p_x = uncut + i_l * x_l
    x = tl.load(p_x + i_b * x_b + o_d[:, None] * x_d + (n + o_w)[None, :] * x_w, mask=mask)
    p_out = window + ((i_l * num_rows + i_b) * num_channels + o_d[:, None]) * W + o_w[None, :]
    tl.store(p_out, x, mask=mask)


@torch.compiler.disable  # addresses, versions and pinned memory are no matter for a compiler
def conv_commit(uncut: Stacked, accepted: torch.Tensor, kernel_size: int) -> torch.Tensor:
    """See `ready_kernels.conv_commit`."""
    layers = Layers("uncut", uncut)
    require_kernels(layers.tensor.device)
    num_rows, num_channels, num_columns = check_windows(layers, accepted, kernel_size)
    tables = address_table([layers]) if layers.is_table else accepted  # unused
    window = layers.tensor.new_empty((layers.count, num_rows, num_channels, kernel_size))
    sizes = tiles("conv_commit", accepted.device, (kernel_size, num_channels), layers.count * num_rows)
    grid = (triton.cdiv(num_channels, sizes["BD"]) * num_rows * layers.count,)
    with on_device(accepted):
        conv_commit_kernel[grid](
            layers.tensor,
            tables,
            accepted,
            window,
            num_rows,
            num_channels,
            num_columns,
            *(layers.stride, *layers.strides),
            W=kernel_size,
            BW=max(2, 1 << (kernel_size - 1).bit_length()),
            TABLE=layers.is_table,
            **sizes,
        )
    launches["conv_commit"] += 1
    return window
