"""The recurrences that can be rolled back, named by the functions of transformers that their mixers call."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recurrence:
    """One family of recurrent layers, named by the module-level functions its mixers call.

    Args:
        name (`str`): `"gated_delta_rule"`, `"kda"` or `"mamba2"`.
        block_function (`str`): Function for several tokens, in the model's modeling module.
        step_function (`str`): Function for one token.
        head_attributes (`tuple` of `str`): Mixer attributes that give `(H, K, V)`.
        step_takes_blocks (`bool`): Whether the GPU kernel behind the step function takes several tokens too.
    """

    name: str
    block_function: str
    step_function: str
    head_attributes: tuple[str, str, str]
    step_takes_blocks: bool


GATED_DELTA_RULE = Recurrence(
    "gated_delta_rule",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    ("num_v_heads", "head_k_dim", "head_v_dim"),
    step_takes_blocks=True,
)
KDA = Recurrence(
    "kda",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    ("num_heads", "head_dim", "head_dim"),
    step_takes_blocks=True,
)
MAMBA2 = Recurrence(
    "mamba2",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    ("num_heads", "ssm_state_size", "head_dim"),
    step_takes_blocks=False,  # it updates the state in place, one token at a time
)
RECURRENCES = (GATED_DELTA_RULE, KDA, MAMBA2)

# Recurrent, but the stock multi-token cached forward is wrong: it restarts from a zero state.
MAMBA1_FUNCTION = "mamba_selective_scan"
# No recurrence, but the same crash on CPU tensors once a GPU build of causal_conv1d is installed.
CPU_ROUTED_FUNCTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
