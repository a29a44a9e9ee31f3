"""Kernels over the recurrent states of hybrid linear-attention models: torch references now, Triton kernels beside
them later.

Standard library and torch only, so that the folder is a Hub kernel repository and the package `ready_hf.kernels` at
once.
"""

from __future__ import annotations

from .reference import (
    Window,
    gated_delta_block,
    gated_delta_window,
    grouped_query,
    mamba2_window,
    scaled_query,
    window_outputs,
    window_state,
)


__all__ = [
    "Window",
    "gated_delta_block",
    "gated_delta_window",
    "grouped_query",
    "mamba2_window",
    "scaled_query",
    "window_outputs",
    "window_state",
]
