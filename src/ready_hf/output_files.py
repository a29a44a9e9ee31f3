"""Files that a command writes at its end: checked before anything is computed, and none is lost to another's fault."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ready_hf.demo_prompts import UsageError


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Refuses files that cannot be written, before anything is computed. Files that exist will be replaced.

    Args:
        paths (`Mapping[str, Path | None]`): By the option that names them.

    Raises:
        UsageError: a folder, a folder that does not exist or cannot be written to, or one file for two options.
    """
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"{option} {path} cannot be written: it is a folder, or its folder does not exist")
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise UsageError(f"{other} and {option} name the same file {path}: give each a name of its own")
        try:
            if path.exists():
                if not os.access(path, os.W_OK):
                    raise PermissionError(f"{path} is not writable")
            else:
                tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UsageError(f"{option} {path} cannot be written: {error.strerror or error}") from None


def write_outputs(writers: Mapping[str, tuple[Path | None, Callable[[Path], object]]]) -> None:
    """Writes every file, and raises at the end if some could not be.

    Args:
        writers (`Mapping[str, tuple]`): By option: the path, or `None`, and what writes it.

    Raises:
        UsageError: naming the files that could not be written.
    """
    failed = []
    for option, (path, write) in writers.items():
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            failed.append(f"{option} {path}: {error.strerror or error}")
    if failed:
        raise UsageError(f"not everything could be written: {'; '.join(failed)}")
