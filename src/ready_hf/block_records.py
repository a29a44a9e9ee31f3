"""What a recurrent layer keeps of a verified block, and the state after any prefix of it.

The tensors of the recurrence call are kept by reference. Three ways lead from them to a state: kernels for all layers
at once (`Record.as_commit`), the kernel of the one-token rule over the first tokens, and closed forms in torch.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ready_hf.kernels import (
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
from ready_hf.ops import StateCommit, uses_kernels
from ready_hf.recurrences import GATED_DELTA_RULE, MAMBA2
from ready_hf.target import RecurrenceCall


# Blocks up to this length bypass the block function, which pads them to a chunk of 64 or more: where the step function
# is a kernel that takes blocks they run through that, and where there is no kernel at all, in closed form.
SHORT_BLOCK = 33


@dataclass
class Record:
    """What one recurrent layer needs to rebuild the state after any prefix of a block.

    Args:
        call (`RecurrenceCall`): The recurrence call, its tensors by reference.
        length (`int`): Tokens of the block.
        window (`Window`, *optional*): The block's updates, if the forward already computed them.
        base (`torch.Tensor` of shape `[B, H, K, V]`, Mamba-2 `[B, H, V, K]`, *optional*): State before the block.
        is_frozen (`bool`): The block did not advance the state: it is still `base`.
    """

    call: RecurrenceCall
    length: int
    window: Window | None = None
    base: torch.Tensor | None = None
    is_frozen: bool = False

    def state_after(self, keep: int | torch.Tensor) -> torch.Tensor:
        """State after the first `keep` tokens (all rows alike, or one number per row), in the cache's layout."""
        if self.window is None and self.call.step_rule is not None:
            return _by_step_rule(self.call, keep)[1]
        window = self.window if self.window is not None else _window(self.call)
        if self.call.recurrence is MAMBA2:
            # one decay per head: keys and updates may swap places, which gives the transposed state
            window = Window(window.updates, window.keys, window.g)
        return window_state(window, self.base, keep)

    def as_commit(self, state: torch.Tensor) -> StateCommit | None:
        """The same for the kernels, writing into `state`, which the block left; `None` where they are not used.

        Raises:
            ValueError: kernels are forced, and do not take these dtypes.
        """
        if not uses_kernels(state.device):
            return None
        a, out = self.call.arguments, None if self.is_frozen else state
        base = torch.zeros_like(state) if self.base is None else self.base
        if self.call.recurrence is MAMBA2:
            step, g = mamba2_steps(a["dt"], a["A"], **_given(a, "dt_bias", "dt_softplus", "dt_limit"))
            out = None if out is None else out.mT
            commit = StateCommit(a["B"], a["hidden_states"], g, step, base.mT, out, False, False)
        else:
            l2norm = a.get("use_qk_l2norm_in_kernel", False)
            commit = StateCommit(a["key"], a["value"], a["g"], a["beta"], base, out, True, l2norm)
        return commit if commit.is_supported() else None


def recorded(call: RecurrenceCall) -> tuple[Any, Record]:
    """Runs a recurrence call over a block: what the mixer gets back, and the record."""
    call, length = _as_single_tokens(call), block_length(call)
    if length > SHORT_BLOCK or (call.has_kernel and call.step_rule is None):
        return call.run(), Record(call, length)
    if call.step_rule is not None:
        return _by_step_rule(call, length), Record(call, length)
    result, window = _short_block(call)
    return result, Record(call, length, window)


def _as_single_tokens(call: RecurrenceCall) -> RecurrenceCall:
    """A call with the rule of plain decoding: Mamba-2's step function knows no limits on the time step."""
    if call.arguments.get("dt_limit") is None:
        return call
    limit = {"dt_limit": (0.0, float("inf"))}
    run = functools.partial(call.run, **limit)
    return RecurrenceCall(call.recurrence, call.arguments | limit, run, call.has_kernel, call.step_rule)


def _given(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: arguments[name] for name in names if name in arguments}


def _window(call: RecurrenceCall) -> Window:
    a = call.arguments
    if call.recurrence is MAMBA2:
        optional = _given(a, "dt_bias", "dt_softplus", "dt_limit")
        return mamba2_window(a["hidden_states"], a["dt"], a["A"], a["B"], **optional)
    l2norm = a.get("use_qk_l2norm_in_kernel", False)
    return gated_delta_window(a["key"], a["value"], a["g"], a["beta"], a["initial_state"], l2norm)


def _short_block(call: RecurrenceCall) -> tuple[tuple[torch.Tensor, torch.Tensor], Window]:
    """Outputs and final state of a short block in closed form, as the block function returns them, and its window."""
    a = call.arguments
    if call.recurrence is MAMBA2:
        window, base = _window(call), None if a["initial_states"] is None else a["initial_states"].mT
        x = a["hidden_states"].float()  # [B, T, H, V]
        output = window_outputs(grouped_query(a["C"], x.shape[2]), window, base).transpose(1, 2)
        if a.get("D") is not None:
            output = output + a["D"][..., None] * x
        return (output.contiguous(), window_state(window, base, x.shape[1]).mT.contiguous()), window
    base, length, l2norm = a["initial_state"], a["value"].shape[1], a.get("use_qk_l2norm_in_kernel", False)
    if call.recurrence is GATED_DELTA_RULE:
        output, window = gated_delta_block(a["query"], a["key"], a["value"], a["g"], a["beta"], base, l2norm)
    else:
        query, window = scaled_query(a["query"], a["value"].shape[2], l2norm), _window(call)
        output = window_outputs(query, window, base).transpose(1, 2)
    return (output.contiguous().to(a["query"].dtype), window_state(window, base, length)), window


def _by_step_rule(call: RecurrenceCall, keep: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of the first `keep` tokens by the step kernel."""
    a = call.arguments
    query, key, value, g, beta = (a[name] for name in ("query", "key", "value", "g", "beta"))
    if isinstance(keep, int):
        query, key, value, g, beta = (x[:, :keep] for x in (query, key, value, g, beta))
    else:  # a token that neither decays nor writes changes nothing
        dropped = torch.arange(value.shape[1], device=keep.device) >= keep[:, None]  # [B, T]
        g = g.masked_fill(dropped.view(*dropped.shape, *[1] * (g.dim() - 2)), 0.0)
        beta = beta.masked_fill(dropped[..., None], 0.0)
        key, value = (x.masked_fill(dropped[..., None, None], 0.0) for x in (key, value))  # may be NaN
    l2norm = a.get("use_qk_l2norm_in_kernel", False)
    options = {"initial_state": a["initial_state"], "output_final_state": True, "use_qk_l2norm_in_kernel": l2norm}
    # query, key and value by position: kernels name them q, k, v
    return call.step_rule(query, key, value, g=g, beta=beta, **options)  # type: ignore[misc]


def block_length(call: RecurrenceCall) -> int:
    return int(call.arguments["hidden_states" if call.recurrence is MAMBA2 else "value"].shape[1])
