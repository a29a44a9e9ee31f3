"""Compiled code of targets: whether there is any, and decoding without it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it runs compiled code.

    By `compile()`, `part = torch.compile(part)` or `forward = torch.compile(forward)`.
    """
    return any(
        module._compiled_call_impl is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


class _Stance:
    """torch's stance, which is one for all threads: set by the first that needs it, put back by the last."""

    def __init__(self) -> None:
        self.lock, self.num_users = threading.Lock(), 0
        self.current: Any = None

    def enter(self) -> None:
        with self.lock:
            if not self.num_users:
                self.current = torch.compiler.set_stance("force_eager")  # from here on
            self.num_users += 1

    def leave(self) -> None:
        with self.lock:
            self.num_users -= 1
            if not self.num_users:
                self.current.__exit__(None, None, None)


_stance = _Stance()


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Inside, no thread runs compiled code."""
    _stance.enter()
    try:
        yield
    finally:
        _stance.leave()
