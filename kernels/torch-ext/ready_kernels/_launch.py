"""What every Triton launch here shares: whether kernels can run, checks of inputs, tile sizes, counts of launches."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import pathlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence

import torch


try:
    import triton
except ImportError:  # the torch references run everywhere
    triton = None

# Triton decides when a kernel is defined, so this must not change after the kernel modules are imported
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)

launches: Counter[str] = Counter()  # by kernel, since the process started or `launches.clear()`


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of this device: on CUDA, or anywhere in Triton's interpreter."""
    if triton is None or INTERPRETED or device.type != "cuda":
        return triton is not None and INTERPRETED
    if not torch.compiler.is_compiling():
        ensure_cache_folder()
    return True


@functools.cache
def ensure_cache_folder() -> None:
    """Lets Triton compile where its cache folder cannot be written: a read-only home or image, a full disk.

    It then compiles into a temporary folder, in this process, and still finds what the other one holds.
    """
    folder = pathlib.Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        own = pathlib.Path(tempfile.mkdtemp(prefix="triton-cache-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                _link(entry.absolute(), own / entry.name)
        triton.knobs.cache.dir = str(own)
        logger.warning(
            "Triton's cache folder cannot be written (%s): kernels are compiled into a temporary one, once per "
            "process. Set TRITON_CACHE_DIR to a folder that can be written.",
            error,
        )


def _link(entry: pathlib.Path, place: pathlib.Path) -> None:
    """Links a file, or every file of a folder: what is missing of a kernel is compiled into its folder."""
    if not entry.is_dir():
        place.symlink_to(entry)
        return
    place.mkdir()
    with contextlib.suppress(OSError):  # a folder that cannot be read
        for file in entry.iterdir():
            (place / file.name).symlink_to(file)


def require_kernels(device: torch.device) -> None:
    """Raises if the kernels cannot run there.

    Raises:
        RuntimeError: saying what is missing.
    """
    if triton is None:
        raise RuntimeError("these kernels need Triton, which is not installed: `pip install triton`, or use torch")
    if not has_kernels(device):
        raise RuntimeError(
            f"Triton kernels run on CUDA tensors, got {device.type!r}; set TRITON_INTERPRET=1 before Python starts to "
            "run them slowly on the CPU, or use the torch implementation"
        )


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's GPU the current one: Triton launches on the current one, wherever its arguments are."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of 2 that is at least `n` and `least`; products of Triton want 16 rows."""
    return max(least, 1 << (n - 1).bit_length())


def tiles(kernel: str, device: torch.device, shape: Sequence[int], programs: int) -> dict[str, int]:
    """Tile sizes and warps of a kernel: `{"BV": ..., "num_warps": ..., "num_stages": ...}`.

    They come from `configs/<device name>.json`, else from `configs/default.json`; never from a search on live states.
    A file maps kernel names to lists of entries; the first one whose bounds hold is taken.

    Args:
        kernel (`str`): Name of the kernel.
        device (`torch.device`): Where it will run.
        shape (`Sequence[int]`): `(K, V)`.
        programs (`int`): Independent states: layers x rows x heads.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
    found = _table(name).get(kernel) or _table("default")[kernel]
    for entry in found:
        if max(shape) <= entry.get("max_dim", max(shape)) and programs <= entry.get("max_programs", programs):
            return {key: value for key, value in entry.items() if not key.startswith("max_")}
    return {key: value for key, value in found[-1].items() if not key.startswith("max_")}


@functools.cache
def _table(device_name: str) -> dict[str, list[dict[str, int]]]:
    path = pathlib.Path(__file__).parent / "configs" / f"{device_name.replace(' ', '_').lower()}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all are on one device."""
    devices = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            "all tensors must be on one device, got " + ", ".join(f"{n}: {d}" for n, d in devices.items())
        )


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int]) -> None:
    """Raises ValueError unless `tensor` has the expected shape."""
    if list(tensor.shape) != list(expected):
        raise ValueError(f"`{name}` must have shape {list(expected)}, got {list(tensor.shape)}")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless `tensor` is float32, bfloat16 or float16."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"`{name}` must be float32, bfloat16 or float16, got {tensor.dtype}")


def versions(layers: torch.Tensor | Sequence[torch.Tensor]) -> tuple[int, ...]:
    """How often each tensor was changed, as autograd counts it."""
    tensors = [layers] if isinstance(layers, torch.Tensor) else layers
    return tuple(0 if x.is_inference() else x._version for x in tensors)


def increment_versions(layers: torch.Tensor | Sequence[torch.Tensor]) -> None:
    """Tells autograd that a kernel has changed these tensors."""
    for x in [layers] if isinstance(layers, torch.Tensor) else layers:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def address_table(rows: list[Layers]) -> torch.Tensor:
    """Addresses `[len(rows), L]`, int64, on the device of the tensors; valid as long as they live."""
    device = rows[0].tensor.device
    on_host = torch.tensor([layers.addresses for layers in rows], dtype=torch.int64)
    if device.type == "cuda":  # pinned, so that the copy does not wait for the device
        on_host = on_host.pin_memory()
    return on_host.to(device, non_blocking=True)


class Layers:
    """Tensors of L layers, stacked `[L, ...]` or a list of L tensors alike, as a kernel addresses them.

    `tensor` is handed to the kernel with `stride` (elements from layer to layer) or, if `is_table`, with a table of
    addresses. `strides` are those within a layer.

    Args:
        name (`str`): For error messages.
        layers (`torch.Tensor` or list of `torch.Tensor`): The layers.
        exact (`bool`): Take float64 too, as torch does and kernels do not.

    Raises:
        ValueError: tensors of different shape, strides, dtype or device.
    """

    def __init__(self, name: str, layers: torch.Tensor | Sequence[torch.Tensor], exact: bool = False):
        self.is_table = not isinstance(layers, torch.Tensor)
        if not len(layers):
            raise ValueError(f"`{name}` is empty: at least one layer is needed")
        if isinstance(layers, torch.Tensor):
            self.tensor, self.stride, self.count = layers, layers.stride(0), layers.shape[0]
            self.shape, self.strides = layers.shape[1:], layers.stride()[1:]
        else:
            self.tensor, self.stride, self.count = layers[0], 0, len(layers)
            self.shape, self.strides = self.tensor.shape, self.tensor.stride()
            kinds = {(x.shape, x.stride(), x.dtype, x.device) for x in layers}
            if len(kinds) > 1:
                raise ValueError(
                    f"the layers of `{name}` must have one shape, one set of strides, one dtype, one device"
                )
        if not (exact and self.tensor.dtype == torch.float64):
            check_float(name, self.tensor)
        self.layers = layers

    @functools.cached_property
    def is_aligned(self) -> bool:
        """Whether every layer starts at a multiple of 16 bytes."""
        return not any(address % 16 for address in self.addresses)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first element of a layer to the end of its last one, whatever lies between."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides))  # noqa: B905
        return (last + 1) * self.tensor.element_size()

    @functools.cached_property
    def addresses(self) -> list[int]:
        """Address of every layer."""
        if self.is_table:
            return [x.data_ptr() for x in self.layers]
        step = self.stride * self.tensor.element_size()
        return [self.tensor.data_ptr() + i * step for i in range(self.count)]
