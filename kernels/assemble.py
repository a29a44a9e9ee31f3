"""Lays this kernel repository out as the `kernels` library loads it, without kernel-builder:

    python kernels/assemble.py --out FOLDER

FOLDER must not exist or be empty. It gets `build/torch-<backend>/` for every backend of build.toml, each with the
files of the package and the `metadata.json` that the library demands, and the card as `README.md`. Nothing is
compiled, so the variants differ in their metadata alone, and the same sources always give the same bytes. For tests
and for trying the kernels out with `kernels.get_local_kernel(Path(FOLDER))`; what is published on the Hub is built by
kernel-builder. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path


ROOT = Path(__file__).resolve().parent


def package_files(package: Path, suffixes: Sequence[str]) -> dict[str, bytes]:
    """Files of the package by their path within it, sorted; no caches, nothing hidden.

    Args:
        package (`Path`): Folder of the package.
        suffixes (`Sequence[str]`): Kinds of files to take, such as `"py"`.
    """
    found = {}
    for path in sorted(package.rglob("*")):
        inner = path.relative_to(package)
        is_cache = any(part == "__pycache__" or part.startswith(".") for part in inner.parts)
        if path.is_file() and not is_cache and path.suffix[1:] in suffixes:
            found[inner.as_posix()] = path.read_bytes()
    return found


def metadata(general: dict, backend: str, files: dict[str, bytes]) -> dict:
    """What the library must know of a variant; it rejects a file that lacks any of these six.

    The library registers the variant in `sys.modules` under `id`. So the id holds a hash of the contents: two versions
    in one process stay apart.

    Args:
        general (`dict`): Table `[general]` of build.toml.
        backend (`str`): Backend of the variant.
        files (`dict[str, bytes]`): Contents of the variant by path.
    """
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return {
        "name": general["name"],
        "id": f"_{general['name'].replace('-', '_')}_{backend}_{digest.hexdigest()[:12]}",
        "version": general["version"],
        "license": general["license"],
        "python-depends": general.get("python-depends", []) + general.get(backend, {}).get("python-depends", []),
        "backend": {"type": backend},
    }


def assemble(out: Path) -> None:
    """Writes the tree to `out`.

    Args:
        out (`Path`): Folder that does not exist, or is empty.

    Raises:
        OSError: `out` is a file, a folder with something in it, or cannot be written; nothing in it is changed.
        ValueError: `out` lies within the package, where the next run would take it for sources.
    """
    build = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))
    general = build["general"]
    package = ROOT / "torch-ext" / general["name"].replace("-", "_")
    if Path(os.path.realpath(out)).is_relative_to(package):
        raise ValueError(f"{out} lies within the sources {package}: choose a folder outside")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file: choose a folder")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: remove it, or choose another folder")
    files = package_files(package, build["torch-noarch"]["pyext"])
    for backend in general["backends"]:
        described = json.dumps(metadata(general, backend, files), indent=2) + "\n"
        for name, content in {"metadata.json": described.encode(), **files}.items():
            path = out / "build" / f"torch-{backend}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (out / "README.md").write_bytes((ROOT / "CARD.md").read_bytes())


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="new or empty")
    out = parser.parse_args(argv).out
    if not out:
        parser.error("--out is empty: name a folder that does not exist or is empty")
    try:
        assemble(Path(out))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{out}: {', '.join(sorted(path.name for path in (Path(out) / 'build').iterdir()))}")


if __name__ == "__main__":
    main()
