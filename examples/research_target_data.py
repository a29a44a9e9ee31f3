"""Text of the research target: the pinned packages of the small target, package by package, in three parts.

Unlike the small target's, files of a package stand beside each other in the order of their paths, so that a row of
2048 tokens holds what its later tokens refer to. Held-out packages are split into validation and test.
"""

import hashlib
import json
import pathlib
import random

import numpy as np
import tokenizers
from small_target_data import Source, train_tokenizer


PARTS = ("train", "validation", "test")
MOST = {"train": 20_000_000, "validation": 400_000, "test": 400_000}  # tokens


def split(sources: list[Source]) -> dict[str, list[list[Source]]]:
    """Sources by package; every second held-out package, by name, is for the test."""
    by_package: dict[str, list[Source]] = {}
    for source in sorted(sources, key=lambda source: (source.package.name, source.file)):
        by_package.setdefault(source.package.name, []).append(source)
    held = [part for part in by_package.values() if part[0].package.held]
    training = [part for part in by_package.values() if not part[0].package.held]
    return {"train": training, "validation": held[::2], "test": held[1::2]}


def encode(packages: list[list[Source]], bpe: tokenizers.Tokenizer, most: int) -> tuple[np.ndarray, list[Source]]:
    """Ids of shuffled packages, an end token after every file, and the files; beyond `most` ids, an equal share of
    every package is left out at its end."""
    encoded = []
    for package in random.Random(0).sample(packages, len(packages)):
        ids = [np.array([*one.ids, 0], np.uint16) for one in bpe.encode_batch([source.text for source in package])]
        encoded.append((package, ids))
    share = min(1.0, most / sum(len(x) for _, ids in encoded for x in ids))
    parts, used = [], []
    for package, ids in encoded:
        left = share * sum(map(len, ids))
        for source, file in zip(package, ids, strict=True):
            if (left := left - len(file)) < 0:
                break
            parts.append(file)
            used.append(source)
    return np.concatenate(parts), used


def write_data(sources: list[Source], out: pathlib.Path, vocabulary: int) -> dict:
    """Tokenizer, token files, and a manifest of what they hold."""
    out.mkdir(parents=True, exist_ok=True)
    parts = split(sources)
    bpe = train_tokenizer([source.text for package in parts["train"] for source in package], vocabulary)
    bpe.save(str(out / "tokenizer.json"))
    manifest: dict = {"vocabulary": bpe.get_vocab_size()}
    for name in PARTS:
        ids, used = encode(parts[name], bpe, MOST[name])
        ids.tofile(out / f"{name}.bin")
        packages = {f"{s.package.name} {s.package.version}": s.package.licence for s in used}
        manifest[name] = {
            "tokens": len(ids),
            "files": len(used),
            "bytes": sum(len(source.text.encode()) for source in used),
            "sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
            "packages": dict(sorted(packages.items())),
        }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest
