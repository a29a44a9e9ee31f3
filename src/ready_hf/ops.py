"""Which implementation advances states and windows: Triton kernels for all layers at once, or torch layer by layer.

`"auto"` (the default) takes kernels for CUDA tensors if Triton is installed. `set_kernels("triton")`, or
`READY_HF_KERNELS=triton` in the environment, forces them: a call that cannot run them raises. `"torch"` does without.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ready_hf import kernels


_backend = os.environ.get("READY_HF_KERNELS", "auto")


def set_kernels(backend: str) -> None:
    """Chooses the implementation for this process, from the next decoding round on.

    Args:
        backend (`str`): `"auto"`, `"triton"` or `"torch"`.

    Raises:
        ValueError: anything else.
    """
    global _backend
    _backend = _checked(backend)


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors of this device go through Triton kernels.

    Raises:
        ValueError: `READY_HF_KERNELS` holds something that is not allowed.
        RuntimeError: kernels are forced, and cannot run there.
    """
    if _checked(_backend) == "triton":
        try:
            kernels.require_kernels(device)
        except RuntimeError as error:
            hint = (
                'kernels are forced; `ready_hf.set_kernels("auto")` and READY_HF_KERNELS=auto leave the choice to us'
            )
            raise RuntimeError(f"{error} ({hint})") from None
        return True
    return _backend == "auto" and device.type == "cuda" and kernels.has_kernels(device)


def takes(dtype: torch.dtype) -> bool:
    """Whether the kernels take tensors of this dtype.

    Raises:
        ValueError: they do not, and are forced.
    """
    if dtype not in kernels.FLOATS and _backend == "triton":
        raise ValueError(f"kernels are forced, and take float32, bfloat16 and float16; the target has {dtype}")
    return dtype in kernels.FLOATS


@dataclass
class StateCommit:
    """One state to advance by the accepted tokens of a block.

    Args:
        key, value, g, beta (`torch.Tensor`): One layer of `ready_hf.kernels.Records`: `[B, T, Hk, K]`, `[B, T, H, V]`,
            `[B, T, H]` or `[B, T, H, K]`, `[B, T, H]`.
        base (`torch.Tensor` of shape `[B, H, K, V]`): State before the block. Not changed.
        out (`torch.Tensor` of shape `[B, H, K, V]`, *optional*): Where to write; `None` for a new tensor.
        delta (`bool`): A delta rule; `False` for Mamba-2.
        l2norm (`bool`): Whether the rule normalises its keys.
    """

    key: torch.Tensor
    value: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    base: torch.Tensor
    out: torch.Tensor | None
    delta: bool = True
    l2norm: bool = True

    def is_supported(self) -> bool:
        """Whether the kernels take these dtypes.

        Raises:
            ValueError: they do not, and are forced.
        """
        return all(takes(x.dtype) for x in (self.key, self.value, self.g, self.beta, self.base))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Commits of one kind go into one launch."""
        tensors = (self.key, self.value, self.g, self.beta, self.base, self.out)
        layouts = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        return (self.delta, self.l2norm, *layouts)


def commit_states(commits: list[StateCommit], keep: int | torch.Tensor) -> list[torch.Tensor]:
    """States after the first `keep` tokens, one launch for all commits of a kind.

    Args:
        commits (`list[StateCommit]`): What to advance.
        keep (`int` or `torch.Tensor` of shape `[B]`): Tokens to keep, 0..T.

    Returns:
        `list[torch.Tensor]` of shape `[B, H, K, V]`: The written tensors, in the order of `commits`.
    """
    found: list[Any] = [None] * len(commits)
    for members in _grouped(commit.kind for commit in commits):
        group = [commits[i] for i in members]
        records = kernels.Records(*([getattr(c, name) for c in group] for name in kernels.Records._fields))
        bases = [commit.base for commit in group]
        outs: Any = [commit.out for commit in group]
        if outs[0] is None:
            outs = [torch.empty_like(base, memory_format=torch.contiguous_format) for base in bases]
        accepted = _lengths(keep, bases[0])
        kernels.commit_and_read(
            bases, records, accepted, out=outs, delta=group[0].delta, l2norm=group[0].l2norm, backend="triton"
        )
        for i, out in zip(members, outs, strict=True):
            found[i] = out
    return found


def commit_windows(windows: list[torch.Tensor], keep: int | torch.Tensor, kernel_size: int) -> list[torch.Tensor]:
    """Convolution windows `[B, D, kernel_size]` after `keep` tokens, from uncut ones `[B, D, kernel_size + T]`."""
    found: list[Any] = [None] * len(windows)
    for members in _grouped((x.shape, x.stride(), x.dtype, x.device) for x in windows):
        group = [windows[i] for i in members]
        cut = kernels.conv_commit(group, _lengths(keep, group[0]), kernel_size, backend="triton")
        for i, window in zip(members, cut, strict=True):
            found[i] = window
    return found


def _grouped(kinds: Iterable[Any]) -> list[list[int]]:
    """Indices of equal elements."""
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    return list(groups.values())


def _lengths(keep: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`keep` per row, `[B]`, int32, on the device of `like`."""
    if isinstance(keep, int):
        return torch.full((like.shape[0],), keep, dtype=torch.int32, device=like.device)
    return keep.to(like.device, torch.int32)


def _checked(backend: str) -> str:
    if backend not in kernels.BACKENDS:
        raise ValueError(f"kernels must be one of {', '.join(kernels.BACKENDS)} (READY_HF_KERNELS), got {backend!r}")
    return backend
