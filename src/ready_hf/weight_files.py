"""Are the weight files of a checkpoint what they should be? Asked of their headers, before a tensor is read.

From a folder or the Hub only safetensors files are loaded, for reading a pickle can run code. What else may be wrong
with a folder that somebody else has made: a file that is cut off, an index that leads out of the folder, tensors of
other types or shapes, numbers that are none.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUFFIX = ".safetensors"
LONGEST_NAME = 255  # of a file, in bytes, on every usual system
BASE_MODEL_PREFIX = "model."
PLACE_OPTIONS = ("cache_dir", "revision", "subfolder", "token")  # of `from_pretrained`: where the files are


class BrokenCheckpointError(RuntimeError):
    """A checkpoint whose files cannot be loaded, or do not fit; its message names the file or the tensors."""


def check_index_names(names: Iterable[Any]) -> None:
    """Refuses an index that names anything but safetensors files beside it.

    Raises:
        BrokenCheckpointError: naming the first such entry.
    """
    for name in names:
        is_plain = isinstance(name, str) and Path(name).name == name and "\\" not in name and len(name) <= LONGEST_NAME
        if not is_plain or not name.endswith(SUFFIX):
            shown = name[:LONGEST_NAME] if isinstance(name, str) else name
            raise BrokenCheckpointError(
                f"its index of weights names {shown!r}; allowed are {SUFFIX} files in the folder of the index"
            )


def check_headers(
    files: Sequence[str],
    wanted: Mapping[str, torch.Tensor],
    other_shapes_allowed: bool,
    is_quantized: bool = False,
    names_are_told: bool = False,
) -> None:
    """Refuses files that are no whole safetensors files, or whose tensors cannot be those of a model.

    Args:
        files (`list[str]`): The files, resolved.
        wanted (`dict[str, torch.Tensor]`): Tensors of the model by name; only their shapes are looked at.
        other_shapes_allowed (`bool`): Do not look at shapes.
        is_quantized (`bool`): Nor at types and missing tensors: packed ones have types, shapes and names of their own.
        names_are_told (`bool`): Missing tensors, and those of no module, are the caller's business.

    Raises:
        BrokenCheckpointError: naming the file that cannot be read, or every tensor that does not fit.
    """
    found: dict[str, tuple[list[int], str]] = {}
    problems: list[str] = []
    for file in files:
        for stored, header in _header(file).items():
            # transformers drops the name of the base model in front
            name = stored if stored in wanted else stored.removeprefix(BASE_MODEL_PREFIX)
            if name in found:
                problems.append(f"{name} is there twice, and which one is meant cannot be told")
            found[name] = header
    if not is_quantized:
        # all of them: the caller may rename them while loading
        types = {name: dtype for name, (_, dtype) in found.items() if name in wanted or not names_are_told}
        problems += _other_types(types)
        shapes = {name: shape for name, (shape, _) in found.items()}
        problems += [] if other_shapes_allowed else _other_shapes(shapes, wanted)
        if files and not problems and not names_are_told:
            problems += _far_too_few(shapes, wanted)
    if problems:
        raise BrokenCheckpointError("; ".join(problems))


def check_whole(files: Sequence[str], wanted: Mapping[str, torch.Tensor]) -> None:
    """Refuses files unless they hold every tensor of a model and no other, all of them finite. Reads them.

    Args:
        files (`list[str]`): The files.
        wanted (`dict[str, torch.Tensor]`): Tensors of the model by name; only their shapes are looked at.

    Raises:
        BrokenCheckpointError: as `check_headers`; or naming what is missing, left over or not finite.
    """
    check_headers(files, wanted, other_shapes_allowed=False)
    found, wrong = set(), []
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                found.add(name)
                if not bool(torch.isfinite(opened.get_tensor(name)).all()):
                    wrong.append(name)
    problems = [f"missing: {name}" for name in sorted(wanted.keys() - found)] + _of_no_module(found, wanted)
    problems += [f"values that are not finite in {_some(wrong)}: the training diverged"] if wrong else []
    if problems:
        raise BrokenCheckpointError("; ".join(problems))


def _header(file: str) -> dict[str, tuple[list[int], str]]:
    """Shapes and types of the tensors in a file, by name."""
    if not Path(file).is_file():
        raise BrokenCheckpointError(f"there is no {str(file)!r}")
    if not str(file).endswith(SUFFIX):
        raise BrokenCheckpointError(
            f"{str(file)!r} is no {SUFFIX} file, and others are not loaded, since they can run code"
        )
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            return {name: (list(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise BrokenCheckpointError(
            f"{str(file)!r} is no whole safetensors file ({error}): copy, download or save it again"
        ) from error


def _far_too_few(found: Mapping[str, list[int]], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Missing tensors larger than all that is there. Loading would make them up, in memory, before it says so."""
    missing = sorted(wanted.keys() - found.keys())
    if sum(wanted[name].numel() for name in missing) <= sum(map(math.prod, found.values())):
        return []
    return [f"missing: {name}" for name in missing] + _of_no_module(found, wanted)


def _of_no_module(found: Iterable[str], wanted: Mapping[str, Any]) -> list[str]:
    return [f"belongs to no module: {name}" for name in sorted(set(found) - wanted.keys())]


def _other_types(found: Mapping[str, str]) -> list[str]:
    wrong = {dtype: [name for name in sorted(found) if found[name] == dtype] for dtype in sorted({*found.values()})}
    allowed = ", ".join(FLOATS)
    return [f"{_some(wrong[t])} of type {t}, and allowed are {allowed}" for t in wrong if t not in FLOATS]


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _other_shapes(found: Mapping[str, list[int]], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """What is wrong if a shape is; the names alone are compared after loading, when all that was renamed has been."""
    both = sorted(found.keys() & wanted.keys())
    problems = [
        f"{name} has shape {found[name]}, and the configuration wants {list(wanted[name].shape)}"
        for name in both
        if found[name] != list(wanted[name].shape)
    ]
    if problems:
        problems += [f"missing: {name}" for name in sorted(wanted.keys() - found.keys())]
        problems += _of_no_module(found, wanted)
    return problems


def check_finite(model: nn.Module) -> None:
    """Refuses weights that are not finite. Offloaded and quantized ones are not looked at.

    Raises:
        BrokenCheckpointError: naming the tensors, and the type that they were loaded in.
    """
    floats = tuple(FLOATS.values())
    wrong = [
        name
        for name, tensor in model.named_parameters()
        if tensor.dtype in floats and not tensor.is_meta and not bool(torch.isfinite(tensor).all())
    ]
    if wrong:
        dtype = str(model.get_parameter(wrong[0]).dtype).removeprefix("torch.")
        raise BrokenCheckpointError(
            f"values that are not finite in {_some(wrong)}: the training diverged, the file is damaged, or {dtype} is "
            "too narrow for them"
        )


def why_unbuildable(error: Exception) -> str | None:
    """What an error of making a model says about its sizes; `None` if it is another."""
    if isinstance(error, (MemoryError, RuntimeError, TypeError)) and re.search(
        "overflow|allocate mem", str(error), re.I
    ):
        first = str(error).partition("\n")[0]
        return f"the sizes in its {CONFIG_NAME} are beyond any memory ({first})"
    return None


def why_unloadable(path: Any, options: Mapping[str, Any]) -> str | None:
    """What in the files themselves keeps a checkpoint from loading, asked after an error; `None` if nothing is found.

    Args:
        path (`str` or `os.PathLike`): As given to `from_pretrained`; of a repository of the Hub, what is in the cache.
        options (`dict`): Those of `from_pretrained`.
    """
    places: dict[str, Any] = {name: options[name] for name in PLACE_OPTIONS if options.get(name) is not None}
    places |= {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    variant = options.get("variant")

    def found(name: str) -> str | None:
        if variant is not None and name != CONFIG_NAME:
            stem, suffix = name.rsplit(".", 1)
            name = f"{stem}.{variant}.{suffix}"
        with suppress(OSError, ValueError):
            return cached_file(path, name, **places)
        return None

    if found(SAFE_WEIGHTS_NAME):
        return None
    if index := found(SAFE_WEIGHTS_INDEX_NAME):
        return _index_problem(index)
    if found(CONFIG_NAME):
        pickles = [name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if found(name)]
        beside = f", but {' and '.join(pickles)}" if pickles else ""
        return (
            f"it has no {SAFE_WEIGHTS_NAME}{beside}; only safetensors files are loaded, since others can run code: "
            "save it again with `save_pretrained`"
        )
    return None


def _index_problem(index: str) -> str | None:
    try:
        content = json.loads(Path(index).read_text(encoding="utf-8"))
        names = content["weight_map"].values()
        content["metadata"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"its {SAFE_WEIGHTS_INDEX_NAME} is no index: it needs a `weight_map` and `metadata`"
    if not names:
        return f"its {SAFE_WEIGHTS_INDEX_NAME} names no file"
    try:
        check_index_names(names)
    except BrokenCheckpointError as error:
        return str(error)
    missing = [name for name in sorted(set(names)) if not (Path(index).parent / name).is_file()]
    return f"it lacks {', '.join(missing)}, which its index of weights names" if missing else None
