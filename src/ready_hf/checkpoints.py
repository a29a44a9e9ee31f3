"""Which checkpoint of an interrupted training to go on from.

transformers takes the one with the highest number, even if a kill in the middle of saving left it empty. The trainer's
state is written last, so a folder with a readable one and whole files is complete.
"""

import json
import logging
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ready_hf.schedules import IS_READER
from ready_hf.weight_files import BrokenCheckpointError, check_index_names, check_whole


logger = logging.getLogger(__name__)

FSDP_OPTIMIZER_NAME = "optimizer.bin"  # a format of accelerate's own
ANOTHER = "Name another checkpoint, or start without `resume_from_checkpoint`"
_NAME = re.compile(r"checkpoint-(\d+)")


def last_complete_checkpoint(folder: str | Path) -> Path:
    """The newest complete checkpoint in an output folder; newer ones that are not are named in a warning.

    Args:
        folder (`str` or `Path`): `output_dir` of the training.

    Raises:
        ValueError: none, and why not.
    """
    found = sorted(
        (int(match[1]), path)
        for path in (Path(folder).iterdir() if Path(folder).is_dir() else ())
        if path.is_dir() and (match := _NAME.fullmatch(path.name))
    )
    skipped: list[str] = []
    for _, path in reversed(found):
        problem = incomplete(path)
        if problem is None:
            missing = [name for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if not (path / name).is_file()]
            if OPTIMIZER_NAME in missing and (path / FSDP_OPTIMIZER_NAME).is_file():
                missing.remove(OPTIMIZER_NAME)
            if missing:
                logger.warning(
                    "ready_hf: %s has no %s (saved with `save_only_model`?): optimizer, learning rate and stages "
                    "start anew",
                    path.name,
                    " and no ".join(missing),
                )
            if skipped:
                logger.warning("ready_hf: going on from %s; skipped %s", path.name, "; ".join(skipped))
            return path
        skipped.append(f"{path.name} ({problem})")
    reason = f"none is complete: {'; '.join(skipped)}" if skipped else "there is none"
    raise ValueError(
        f"no checkpoint to go on from in {str(folder)!r}: {reason}. Start without `resume_from_checkpoint`"
    )


def check_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    """Refuses to go on with an optimizer of other groups than the saved one, before torch does in its own words.

    Args:
        checkpoint (`Path`): A checkpoint folder; without a saved optimizer there is nothing to check.
        optimizer (`torch.optim.Optimizer`): The one to go on with.

    Raises:
        ValueError: other stages, another learning rate of the reader, or another drafter; no state of an optimizer, or
        one that is not finite.
    """
    path = checkpoint / OPTIMIZER_NAME
    if not path.is_file():
        return
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        saved, states = content["param_groups"], content["state"].values()
        moments = [x for state in states if isinstance(state, dict) for x in state.values()]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"cannot go on from {checkpoint.name}: its {OPTIMIZER_NAME} holds no state of an optimizer "
            f"({type(error).__name__}). {ANOTHER}"
        ) from error
    # packed ones, such as torchao's of 8 or 4 bits, are classes of their own, which know few operations
    if not all(bool(torch.isfinite(x).all()) for x in moments if type(x) is torch.Tensor):
        raise ValueError(
            f"cannot go on from {checkpoint.name}: its {OPTIMIZER_NAME} holds values that are not finite: the "
            f"training diverged. {ANOTHER}"
        )
    found, wanted = _reader_rate(saved), _reader_rate(optimizer.param_groups)
    if found != wanted:
        raise ValueError(
            f"{checkpoint.name} was trained with {_in_words(found)}, and now it is {_in_words(wanted)}: resume with "
            "the `reader_learning_rate` and `freeze_backbone_steps` it had, or start a new training from its drafter"
        )
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
    if sizes != own_sizes:
        raise ValueError(
            f"the optimizer of {checkpoint.name} has groups of {sizes} parameters, and this drafter makes groups of "
            f"{own_sizes}: resume with the drafter and the options it had, or start a new training from its drafter"
        )


def check_weights(checkpoint: Path, model: nn.Module) -> None:
    """Refuses to go on from weights that are not all of this model's, before torch takes over what fits.

    Args:
        checkpoint (`Path`): A complete checkpoint folder; formats of a launcher are not looked at.
        model (`nn.Module`): The drafter.

    Raises:
        ValueError: naming tensors that are missing, left over, of another shape or type, or not finite.
    """
    files = [str(path) for path in _weight_files(checkpoint)]
    try:
        if files:
            check_whole(files, getattr(model, "_orig_mod", model).state_dict())
    except BrokenCheckpointError as error:
        raise ValueError(f"cannot go on from {checkpoint.name}: {error}. {ANOTHER}") from error


def _reader_rate(groups: list[dict[str, Any]]) -> float | None:
    """The learning rate that a reader in groups of its own started with; `None` if it has none."""
    rates = [group.get("initial_lr", group["lr"]) for group in groups if group.get(IS_READER)]
    return rates[0] if rates else None


def _in_words(rate: float | None) -> str:
    return (
        "the reader among the other parameters" if rate is None else f"the reader apart, at a learning rate of {rate}"
    )


def check_complete(checkpoint: Path) -> None:
    """Refuses a folder that was named, whatever its own name, and is no complete checkpoint.

    Raises:
        ValueError: saying what it lacks.
    """
    problem = incomplete(checkpoint, is_named_by_step=False) if checkpoint.is_dir() else "there is no such folder"
    if problem is not None:
        raise ValueError(
            f"cannot go on from {str(checkpoint)!r}: {problem}. Name a complete checkpoint, or pass `True` for the "
            "newest one in the output folder"
        )


def incomplete(checkpoint: Path, is_named_by_step: bool = True) -> str | None:
    """What a checkpoint folder lacks; `None` if it is complete."""
    state = checkpoint / TRAINER_STATE_NAME
    if not state.is_file():
        return f"no {TRAINER_STATE_NAME}"
    try:
        step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{TRAINER_STATE_NAME} cannot be read"
    if not isinstance(step, int):
        return f"{TRAINER_STATE_NAME} is of step {step!r}, which is no number"
    if is_named_by_step and checkpoint.name != f"checkpoint-{step}":
        return f"{TRAINER_STATE_NAME} is of step {step}"
    for weights in _weight_files(checkpoint):
        try:
            with safe_open(weights, "pt") as file:  # compares the header with the size of the file
                file.keys()
        except (OSError, SafetensorError):
            return f"{weights.name} is missing or cannot be read"
    for path in (checkpoint / OPTIMIZER_NAME, checkpoint / SCHEDULER_NAME, *checkpoint.glob("rng_state*.pth")):
        if path.is_file() and not _is_whole(path):
            return f"{path.name} is cut off"
    return None


def _weight_files(checkpoint: Path) -> list[Path]:
    """The one file, or every shard that an index names; none for formats of a launcher, which has its own checks."""
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        try:
            names = list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            check_index_names(names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, BrokenCheckpointError):
            names = []
        # an index of nothing is no file of weights, and is named as such
        return [checkpoint / name for name in sorted({*names})] or [index]
    if any(checkpoint.glob("pytorch_model_fsdp*")):
        return []
    return [checkpoint / SAFE_WEIGHTS_NAME]


def _is_whole(path: Path) -> bool:
    """Whether a file of `torch.save` has its beginning and its end."""
    with path.open("rb") as file:
        return file.read(2) == b"PK" and zipfile.is_zipfile(path)
