"""Training in stages: a reader for a drafter that has none, its own learning rate, and the rest of the drafter frozen
while the reader learns.

A reader that starts beside a trained drafter disturbs it before it helps. So it starts as the function that is zero,
learns alone for some steps at a rate of its own, and then together with the rest. (Ours, not the paper's.)
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel

from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.modeling_ready import ReadyDrafterModel


IS_READER = "is_reader"  # marks the optimizer's groups; saved with its state


def add_reader(drafter: ReadyDrafterModel, target: PreTrainedModel, **options: Any) -> ReadyDrafterModel:
    """A drafter with the weights of `drafter` and a new reader, which adds nothing until it is trained.

    It comes in training mode, with all of its parameters trainable.

    Args:
        drafter (`ReadyDrafterModel`): Without a reader, such as a trained DSpark. Not changed.
        target (`PreTrainedModel`): Its target.
        options: Fields of `ReadyDrafterConfig` that concern the reader, such as `state_layer_ids` or `reader_rank`.

    Raises:
        ValueError: the drafter has a reader, or was not made for this target; an option of something else.
    """
    if drafter.config.has_reader:
        raise ValueError("this drafter has a reader already: train it as it is, or start from one without")
    names = [f.name for f in fields(ReadyDrafterConfig) if f.name.startswith(("reader_", "state_"))]
    others = sorted(set(options) - set(names))
    if others:
        raise ValueError(f"only {', '.join(names)} can be chosen for a reader, got {', '.join(others)}")
    drafter.config.check_target(target)
    wanted = ReadyDrafterConfig.for_target(target, mask_token_id=drafter.config.mask_token_id, **options)
    if not wanted.has_reader:
        raise ValueError("`state_layer_ids` names no layer, so there would be no reader: leave it out for all of them")
    config = copy.deepcopy(drafter.config)
    for name in names:
        setattr(config, name, getattr(wanted, name))
    config.validate_architecture()  # the reader's options beside the drafter's own
    made = ReadyDrafterModel(config).to(drafter.device, drafter.dtype)
    for name, parameter in drafter.named_parameters():  # which need not be of one dtype
        made.get_parameter(name).data = torch.empty_like(parameter)
    missing, unexpected = made.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("reader.") for name in missing), missing
    return made


def split_reader_groups(optimizer: torch.optim.Optimizer, reader: Iterable[torch.nn.Parameter], lr: float) -> None:
    """Puts the reader's parameters into groups of their own, with the other settings of the groups they were in.

    Args:
        optimizer (`torch.optim.Optimizer`): Fresh: without any state.
        reader (`Iterable[torch.nn.Parameter]`): The reader's parameters.
        lr (`float`): Their learning rate.
    """
    known = {id(parameter) for parameter in reader}
    for group in list(optimizer.param_groups):
        mine = [p for p in group["params"] if id(p) in known]
        if not mine:
            continue
        group["params"] = [p for p in group["params"] if id(p) not in known]
        optimizer.add_param_group({**group, "params": mine, "lr": lr, IS_READER: True})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def freeze_rest(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> None:
    """Sets the learning rate of everything but the reader to 0 for the first `steps` steps.

    At a rate of 0 weights stay as they are to the last bit. Gradients flow, so that the optimizer's averages are not
    empty when the rest starts to move.

    Args:
        optimizer (`torch.optim.Optimizer`): After `split_reader_groups`.
        scheduler (`LRScheduler`): Of it; not stepped yet.
        steps (`int`): Optimizer steps.

    Raises:
        ValueError: a scheduler that does not compute rates from the step, such as `reduce_lr_on_plateau`.
    """
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            "`freeze_backbone_steps` needs a learning rate that depends on the step alone, and "
            f"{type(scheduler).__name__} has none: take a `lr_scheduler_type` such as linear, cosine, constant or "
            "constant_with_warmup"
        )
    if not any(group.get(IS_READER) for group in optimizer.param_groups):
        raise ValueError("no group of the optimizer is the reader's: nothing would learn while the rest is frozen")
    for i, group in enumerate(optimizer.param_groups):
        if not group.get(IS_READER):
            scheduler.lr_lambdas[i] = _delayed(scheduler.lr_lambdas[i], steps)
            group["lr"] = scheduler.base_lrs[i] * scheduler.lr_lambdas[i](scheduler.last_epoch)


def _delayed(schedule: Callable[[int], float], start: int) -> Callable[[int], float]:
    """A function, not an object: the scheduler would save an object's fields, and load old ones over new."""
    return lambda step: 0.0 if step < start else schedule(step)
