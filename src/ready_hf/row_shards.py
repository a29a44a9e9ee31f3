"""Rows on disk, in Arrow files that are whole or not there.

A file's name holds a checksum of its content: `shard-00003-<checksum>.arrow`. An Arrow stream that is cut off between
two of its parts reads like a shorter one without any error, so the reader alone would not notice.
"""

import hashlib
import io
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ready_hf.text_sources import import_datasets


logger = logging.getLogger(__name__)

CHECKSUM_DIGITS = 16


def find_shard(folder: Path, index: int) -> Path | None:
    """The file of a shard, if there is one with the content that its name promises."""
    for path in sorted(folder.glob(f"{_stem(index)}-*.arrow")):
        if _checksum(path.read_bytes()) == path.stem.rpartition("-")[2]:
            return path
        logger.warning("ready_hf: %s is damaged (its checksum does not fit) and is not used", path)
    return None


def save_shard(folder: Path, index: int, rows: list[dict[str, list[int]]], metadata: dict[str, str]) -> Path:
    """Writes a shard, and then removes damaged files of the same number.

    Args:
        folder (`Path`): Where; it exists.
        index (`int`): Number of the shard.
        rows (`list[dict]`): With `input_ids` and `loss_mask`.
        metadata (`dict[str, str]`): Kept in the file's schema.
    """
    content = _arrow(rows, metadata | {"shard": str(index)})
    path = folder / f"{_stem(index)}-{_checksum(content)}.arrow"
    old = [other for other in folder.glob(f"{_stem(index)}-*.arrow") if other != path]
    write_whole(path, content)
    for damaged in old:
        damaged.unlink(missing_ok=True)
    return path


def open_shards(paths: Sequence[Path]) -> Any:
    """`datasets.Dataset` of the rows of all shards, in their order, mapped from disk."""
    datasets = import_datasets()
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in paths])


def write_whole(path: Path, content: bytes) -> None:
    """The file has all of its content or does not exist, whatever interrupts."""
    part = path.with_name(f".{path.stem}-{uuid.uuid4().hex}.part")  # other processes may write the same file
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _arrow(rows: list[dict[str, list[int]]], metadata: dict[str, str]) -> bytes:
    import pyarrow as pa  # comes with datasets

    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())}, metadata=metadata)
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return buffer.getvalue()


def _stem(index: int) -> str:
    return f"shard-{index:05d}"


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:CHECKSUM_DIGITS]
