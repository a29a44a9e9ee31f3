"""What a drafter's training needs where its parameters are sharded over processes, or its target over devices.

The loss calls the drafter's heads outside of its forward. With FSDP 2 they belong to the root, whose parameters stay
whole from the forward to the end of the backward, so that this works; other ways of sharding give them back before.
"""

from typing import Any

from transformers import PreTrainedModel


def check_sharding(state: Any) -> None:
    """Refuses what would train wrongly or save nothing.

    Args:
        state (`accelerate.state.AcceleratorState`): Of the training.

    Raises:
        ValueError: FSDP 1, sharded checkpoints, or DeepSpeed ZeRO-3.
    """
    fsdp, deepspeed = (getattr(state, name, None) for name in ("fsdp_plugin", "deepspeed_plugin"))
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise ValueError(
            "FSDP 1 frees the weights of a drafter's heads before the loss needs them: take FSDP 2 (`fsdp_version: 2` "
            "in the configuration of accelerate, as in examples/accelerate/fsdp.yaml, or `--fsdp True`)"
        )
    if fsdp is not None and "FULL" not in str(fsdp.state_dict_type):
        raise ValueError(
            f"with {fsdp.state_dict_type} no drafter would be saved that can be loaded: take FULL_STATE_DICT "
            "(`fsdp_state_dict_type` in the configuration of accelerate, as in examples/accelerate/fsdp.yaml)"
        )
    if deepspeed is not None and deepspeed.zero_stage == 3:
        raise ValueError(
            "DeepSpeed ZeRO-3 frees the weights of a drafter's heads before the loss needs them: take a lower stage, "
            "FSDP 2 (examples/accelerate/fsdp.yaml), or one whole drafter per GPU (examples/accelerate/one_node.yaml)"
        )


def is_spread(target: PreTrainedModel) -> bool:
    """Whether a `device_map` has put the layers of `target` on more than one device.

    Args:
        target (`PreTrainedModel`): Any model.
    """
    return len(set((getattr(target, "hf_device_map", None) or {}).values())) > 1


def hide_missing_embeddings(drafter: PreTrainedModel) -> None:
    """Lets accelerate's FSDP 2 ask the drafter for its embeddings, which would raise: `None` is an answer it takes.

    Args:
        drafter (`ReadyDrafterModel`): The drafter, before it is sharded.
    """
    drafter.get_input_embeddings = _none


def _none() -> None:
    return None
