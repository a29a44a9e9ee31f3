"""Where the trained models that ship with the package are: folders for `from_pretrained`.

`small_target` is a hybrid language model of Python code; `small_ready` and `small_dspark` are drafters for it, with
and without a reader of its recurrent states; their cards tell how each was trained.
"""

from pathlib import Path
from typing import Literal, get_args


ASSETS = Path(__file__).parent / "assets"
DrafterKind = Literal["ready", "dspark"]


def small_target_path() -> str:
    """Folder of the small code model that ships with the package; its `prompts.jsonl` holds prompts it never saw."""
    return str(ASSETS / "small_target")


def small_drafter_path(kind: DrafterKind = "ready") -> str:
    """Folder of a drafter for the model at `small_target_path()`.

    Args:
        kind (`"ready"` or `"dspark"`): With a reader of recurrent states, or without.

    Raises:
        ValueError: another kind.
    """
    if kind not in get_args(DrafterKind):
        raise ValueError(f"`kind` must be one of {list(get_args(DrafterKind))}, got {kind!r}")
    return str(ASSETS / f"small_{kind}")
