"""The operations of this package: Triton on a GPU, torch everywhere else, one signature.

Letters: L layers, N slots (B without `slots`), B rows, T tokens, H state heads, Hk key heads, K key channels, V value
channels, J queries, D convolution channels, W columns of a convolution window.
"""

from __future__ import annotations

from typing import Any

import torch

from . import commit_read_reference, conv_reference, verify_reference
from ._checks import check_commit, check_read, check_windows
from ._launch import Layers, has_kernels, require_kernels
from .records import Records, Stacked
from .verify_reference import Verified


BACKENDS = ("auto", "triton", "torch")
PRECISIONS = ("tf32", "ieee", "bf16")


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
    backend: str = "auto",
    **options: Any,
) -> torch.Tensor | None:
    """Advances the states of all layers by the first `accepted` tokens of a verified block, and reads the result.

    Args:
        states (`[L, N, H, K, V]` or L tensors `[N, H, K, V]`): States before the block, any float dtype, any strides.
        records (`Records`): The recurrence's inputs at the T tokens of the block.
        accepted (`torch.Tensor` of shape `[B]`, int32 or int64): Tokens to keep, 0..T per row, on the device. A row
            that keeps none keeps its state bit for bit. What the records hold beyond them changes nothing. On a GPU
            values are not checked, which would wait for the device; they count as if cut to 0..T.
        queries (`[L, H, J, K]` or `[B, L, H, J, K]`, *optional*): Queries of a reader, the same for all rows or not.
        out (as `states`, *optional*): Where to write. Default: in place. A layer is the same view as in `states`, or
            shares no memory with them; judged by first and last byte, so views that interleave are refused too.
        slots (`torch.Tensor` of shape `[B]`, *optional*): Slot of every row in `states`, all different and below N
            (on a GPU not checked); -1 marks a row of padding, which touches nothing and reads zeros.
        delta (`bool`): The (gated) delta rule; `False` for Mamba-2, whose update subtracts nothing.
        l2norm (`bool`): Normalise the keys, where the model's own rule does it.
        read_dtype (`torch.dtype`): Of what is returned.
        backend (`str`): `"triton"`, `"torch"`, or `"auto"`: Triton on CUDA, torch elsewhere.
        **options: Of the Triton kernel: `precision` of the products with queries (`"tf32"`, `"ieee"` or `"bf16"`),
            and `tables`, addresses made beforehand. The states themselves are always advanced in float32.

    Returns:
        `torch.Tensor` of shape `[B, J, L, H, V]` or `None`: `S_n^T q_j`, contiguous, if there are queries; of the
        state in float32, before it is rounded to its own dtype.

    Raises:
        ValueError: tensors that do not fit, or that need a gradient, before any launch.
        RuntimeError: `backend="triton"` where Triton does not run.
    """
    if queries is not None and queries.requires_grad and torch.is_grad_enabled():
        raise ValueError("`commit_and_read` has no gradient: read with `state_read`, or pass `queries.detach()`")
    _refuse_gradients("commit_and_read", states, *records, *(() if out is None else (out,)))
    _check_options(options)
    keywords: dict[str, Any] = {"out": out, "slots": slots, "delta": delta, "l2norm": l2norm}
    if _use_triton(backend, accepted):
        from .triton_commit_read import commit_and_read as launch

        return launch(states, records, accepted, queries, **keywords, read_dtype=read_dtype, **options)
    state = Layers("states", states, exact=True)
    fields = {name: Layers(f"records.{name}", x, exact=True) for name, x in records._asdict().items()}
    check_commit(state, state if out is None else Layers("out", out, exact=True), fields, accepted, queries, slots)
    reads = commit_read_reference.commit_and_read(states, records, accepted, queries, **keywords)
    return None if reads is None else reads.to(read_dtype)


def state_read(
    states: Stacked,
    queries: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    read_dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    **options: Any,
) -> torch.Tensor:
    """Reads states with queries, `o = S^T q`; differentiable with respect to the queries.

    Args:
        states, queries, slots, read_dtype, backend, **options: As in `commit_and_read`.

    Returns:
        `torch.Tensor` of shape `[B, J, L, H, V]`, contiguous.

    Raises:
        ValueError: tensors that do not fit, before any launch.
        RuntimeError: `backend="triton"` where Triton does not run.
    """
    _check_options(options)
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        raise ValueError("states get no gradient, only queries do: pass `states.detach()`")
    if _use_triton(backend, queries):
        from .triton_state_read import state_read as launch

        return launch(states, queries, slots=slots, read_dtype=read_dtype, **options)
    check_read(Layers("states", states, exact=True), queries, slots)
    return commit_read_reference.state_read(states, queries, slots=slots).to(read_dtype)


def conv_commit(uncut: Stacked, accepted: torch.Tensor, kernel_size: int, *, backend: str = "auto") -> torch.Tensor:
    """The convolution windows of all layers after the first `accepted` tokens of a block.

    Args:
        uncut (`[L, B, D, W + T]` or L tensors `[B, D, W + T]`): The window before the block and the block's inputs.
        accepted (`torch.Tensor` of shape `[B]`, int32 or int64): Tokens to keep, 0..T per row, on the device.
        kernel_size (`int`): W.
        backend (`str`): As in `commit_and_read`.

    Returns:
        `torch.Tensor` of shape `[L, B, D, W]`, contiguous.

    Raises:
        ValueError: tensors that do not fit, or that need a gradient, before any launch.
        RuntimeError: `backend="triton"` where Triton does not run.
    """
    _refuse_gradients("conv_commit", uncut)
    if _use_triton(backend, accepted):
        from .triton_conv import conv_commit as launch

        return launch(uncut, accepted, kernel_size)
    check_windows(Layers("uncut", uncut, exact=True), accepted, kernel_size)
    return conv_reference.conv_commit(uncut, accepted, kernel_size)


def verify(mixed_qkv: torch.Tensor, *args: Any, backend: str = "auto", **kwargs: Any) -> Verified:
    """A block of tokens through a gated delta layer, from the input of its convolution to the output of its rule.

    The state is not advanced: what `commit_and_read` needs to do so is part of the result.

    Args:
        mixed_qkv (`torch.Tensor` of shape `[B, T, 2 * Hk * K + H * V]`): Queries, keys, values before the convolution.
        *args, **kwargs: See `ready_kernels.verify_reference.verify`.
        backend (`str`): As in `commit_and_read`.

    Raises:
        ValueError: tensors that do not fit, or that need a gradient, before any launch.
        RuntimeError: `backend="triton"` where Triton does not run.
    """
    _refuse_gradients("verify", *(x for x in (mixed_qkv, *args, *kwargs.values()) if isinstance(x, torch.Tensor)))
    if _use_triton(backend, mixed_qkv):
        from .triton_verify import verify as launch

        return launch(mixed_qkv, *args, **kwargs)
    return verify_reference.verify(mixed_qkv, *args, **kwargs)


def _refuse_gradients(name: str, *tensors: Stacked) -> None:
    """Raises ValueError if a gradient would be needed of an operation that has none."""
    if not torch.is_grad_enabled():
        return
    single = (layers for x in tensors for layers in ([x] if isinstance(x, torch.Tensor) else x))
    if any(x.requires_grad for x in single):
        raise ValueError(f"`{name}` has no gradient: call it under `torch.no_grad()`")


def _check_options(options: dict[str, Any]) -> None:
    unknown = sorted(set(options) - {"precision", "tables"})
    if unknown:
        raise TypeError(f"unknown options {unknown}: allowed are precision and tables")
    if options.get("precision", "tf32") not in PRECISIONS:
        raise ValueError(f"`precision` must be one of {', '.join(PRECISIONS)}, got {options['precision']!r}")


def _use_triton(backend: str, tensor: torch.Tensor) -> bool:
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {BACKENDS}, got {backend!r}")
    if backend == "triton":
        require_kernels(tensor.device)
    return backend == "triton" or (backend == "auto" and tensor.device.type == "cuda" and has_kernels(tensor.device))
