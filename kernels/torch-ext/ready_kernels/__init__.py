"""Kernels over the recurrent states of hybrid linear-attention models, each beside its torch reference.

Standard library and torch only, and Triton where it is installed, so that the folder is a Hub kernel repository and
the package `ready_hf.kernels` at once.
"""

from __future__ import annotations

from . import layers
from ._checks import MOST_QUERIES
from ._launch import FLOATS, has_kernels, launches, require_kernels
from .api import BACKENDS, commit_and_read, conv_commit, state_read, verify
from .records import Records
from .reference import (
    Window,
    gated_delta_block,
    gated_delta_window,
    grouped_query,
    mamba2_steps,
    mamba2_window,
    scaled_query,
    window_outputs,
    window_state,
)
from .verify_reference import Verified


__all__ = [
    "BACKENDS",
    "FLOATS",
    "MOST_QUERIES",
    "Records",
    "Verified",
    "Window",
    "commit_and_read",
    "conv_commit",
    "gated_delta_block",
    "gated_delta_window",
    "grouped_query",
    "has_kernels",
    "launches",
    "layers",
    "mamba2_steps",
    "mamba2_window",
    "require_kernels",
    "scaled_query",
    "state_read",
    "verify",
    "window_outputs",
    "window_state",
]
