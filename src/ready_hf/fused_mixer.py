"""A verify forward of a mixer in two launches, for the mixers of which we know every line.

transformers runs a block of a gated delta layer as a convolution, an activation, copies, gates and a rule, two dozen
launches in all. `ready_hf.kernels.verify` does the same in two and leaves the state as it was. It stands in for a
mixer's own forward only while a block is recorded, only where kernels run, and only if nothing about the layer or the
call is unusual; otherwise the mixer runs as always. `tests/test_fused_mixer.py` compares the two.
"""

from typing import Any

import torch

from ready_hf import kernels
from ready_hf.block_records import Record
from ready_hf.kernels.verify_reference import ACTIVATIONS, MAX_TOKENS
from ready_hf.ops import uses_kernels
from ready_hf.target import GATED_DELTA_RULE, MixerCall, RecurrenceCall, is_untouched


# by name and module: a subclass, or a remote-code copy, may do something else
KNOWN_MIXERS = {
    ("transformers.models.qwen3_5.modeling_qwen3_5", "Qwen3_5GatedDeltaNet"),
    ("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),
}


def fits(call: MixerCall, layer: Any, length: int) -> bool:
    """Whether a mixer call is one that `run` does exactly.

    Args:
        call (`MixerCall`): The call.
        layer (`LinearAttentionCacheLayerMixin`): Its cache layer.
        length (`int`): Tokens of the block that is recorded.
    """
    mixer, hidden_states = call.mixer, call.hidden_states
    if (type(mixer).__module__, type(mixer).__name__) not in KNOWN_MIXERS or not uses_kernels(hidden_states.device):
        return False
    state, window = layer.recurrent_states[0], layer.conv_states[0]
    return (
        hidden_states.shape[1] == length <= MAX_TOKENS
        and not call.has_packed_sequences
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
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
    state, mixed_qkv = layer.recurrent_states[0], mixer.in_proj_qkv(hidden_states)
    if mixed_qkv.dtype != layer.conv_states[0].dtype:
        return None
    found = kernels.verify(
        mixed_qkv,
        layer.conv_states[0],
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        mixer.in_proj_a(hidden_states),
        mixer.in_proj_b(hidden_states),
        mixer.A_log,
        mixer.dt_bias,
        state,
        num_key_heads=mixer.num_k_heads,
        head_k_dim=mixer.head_k_dim,
        backend="triton",
    )
    gate = mixer.in_proj_z(hidden_states).reshape(-1, mixer.head_v_dim)
    output = mixer.norm(found.output.reshape(-1, mixer.head_v_dim), gate)
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


def _not_run() -> None:
    raise AssertionError("a block that ran through kernels is not run again")
