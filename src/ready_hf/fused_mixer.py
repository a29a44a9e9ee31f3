"""A verify forward of a mixer in two launches, for the mixers of which we know every line.

transformers runs a block of a gated delta layer as a convolution, an activation, copies, gates and a rule, two dozen
launches in all. `ready_hf.kernels.verify` does the same in two and leaves the state as it was. It stands in for a
mixer's own forward only while a block is recorded, only where kernels run, and only if nothing about the layer or the
call is unusual; otherwise the mixer runs as always. `tests/test_fused_mixer.py` compares the two.
"""

from collections.abc import Callable
from typing import Any

import torch

from ready_hf import kernels
from ready_hf.block_records import Record
from ready_hf.kernels.verify_reference import ACTIVATIONS, MAX_TOKENS
from ready_hf.ops import uses_kernels
from ready_hf.recurrences import GATED_DELTA_RULE
from ready_hf.target import MixerCall, RecurrenceCall, is_untouched


Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _separate(mixer: Any, x: torch.Tensor) -> Projections:
    return mixer.in_proj_qkv(x), mixer.in_proj_z(x), mixer.in_proj_b(x), mixer.in_proj_a(x)


def _interleaved(mixer: Any, x: torch.Tensor) -> Projections:
    """Every key head lies next to the value heads that share it."""
    *qkv, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))
    return torch.cat([y.flatten(2) for y in qkv], dim=-1), z, b, a


# What comes before the convolution, from hidden states `[B, T, hidden]`: queries, keys and values `[B, T, D]`, gate of
# the norm `[B, T, H * V]` or `[B, T, H, V]`, and what gives write strength and decay, `[B, T, H]` each. Beyond that
# these mixers differ at most in their norm, which is called as it is. By name and module: a subclass, or a remote-code
# copy, may do something else.
KNOWN_MIXERS: dict[tuple[str, str], Callable[[Any, torch.Tensor], Projections]] = {
    ("transformers.models.lara_mini.modeling_lara_mini", "LaraMiniGatedDeltaNet"): _separate,
    ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet"): _separate,
    ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"): _separate,
    ("transformers.models.qwen3_next.modeling_qwen3_next", "Qwen3NextGatedDeltaNet"): _interleaved,
    ("transformers.models.qwen4_exp.modeling_qwen4_exp", "Qwen4ExpTextGatedDeltaNet"): _separate,
}


def fits(call: MixerCall, layer: Any, length: int) -> bool:
    """Whether a mixer call is one that `run` does exactly.

    Args:
        call (`MixerCall`): The call.
        layer (`LinearAttentionCacheLayerMixin`): Its cache layer.
        length (`int`): Tokens of the block that is recorded.
    """
    mixer, hidden_states = call.mixer, call.hidden_states
    # `is_compiling` comes first: what is asked after it, compiled code would be bound to
    if torch.compiler.is_compiling() or _name(mixer) not in KNOWN_MIXERS or not uses_kernels(hidden_states.device):
        return False
    state, window = layer.recurrent_states[0], layer.conv_states[0]
    return (
        hidden_states.shape[1] == length <= MAX_TOKENS
        and not call.has_packed_sequences
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(hidden_states.device.type)
        and state is not None
        and window is not None
        and window.shape[-1] == mixer.conv_kernel_size
        and mixer.activation in ACTIVATIONS
        and not hasattr(mixer.conv1d, "_hf_hook")  # accelerate moves its weight in when it is called
        and window.dtype == hidden_states.dtype
        and all(x.dtype in kernels.FLOATS for x in (window, mixer.conv1d.weight, state, mixer.A_log, mixer.dt_bias))
        and is_untouched(mixer, GATED_DELTA_RULE)
        and state.device == window.device == hidden_states.device == mixer.conv1d.weight.device
    )


def run(call: MixerCall, layer: Any) -> tuple[torch.Tensor, Record, torch.Tensor] | None:
    """The mixer's output, the record of its block, and the uncut convolution window `[B, D, W + T]`.

    `None` if a projection turns out to compute in another dtype than the cache holds.

    Args:
        call (`MixerCall`): A call that `fits`.
        layer (`LinearAttentionCacheLayerMixin`): Its cache layer. Not changed.
    """
    mixer, hidden_states = call.mixer, call.masked_hidden_states()
    batch, length, _ = hidden_states.shape
    state = layer.recurrent_states[0]
    mixed_qkv, z, b, a = KNOWN_MIXERS[_name(mixer)](mixer, hidden_states)
    if mixed_qkv.dtype != layer.conv_states[0].dtype:
        return None
    found = kernels.verify(
        mixed_qkv,
        layer.conv_states[0],
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        a,
        b,
        mixer.A_log,
        mixer.dt_bias,
        state,
        num_key_heads=mixer.num_k_heads,
        head_k_dim=mixer.head_k_dim,
        backend="triton",
    )
    output = mixer.norm(found.output.reshape(-1, mixer.head_v_dim), z.reshape(-1, mixer.head_v_dim))
    arguments = {
        "query": None,
        "key": found.key,
        "value": found.value,
        "g": found.g,
        "beta": found.beta,
        "initial_state": state,
        "use_qk_l2norm_in_kernel": True,
    }
    recurrence = RecurrenceCall(GATED_DELTA_RULE, arguments, _not_run)
    record = Record(recurrence, length, base=state, is_frozen=True)
    return mixer.out_proj(output.reshape(batch, length, -1)), record, found.window


def _name(mixer: Any) -> tuple[str, str]:
    return type(mixer).__module__, type(mixer).__name__


def _not_run() -> None:
    raise AssertionError("a block that ran through kernels is not run again")
