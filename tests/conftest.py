"""Settings that must be in place before torch, triton and transformers are imported, and the rule for GPU tests."""

import os
from collections.abc import Iterator
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU, Triton kernels run in the interpreter

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))

import ready_hf


pytest.register_assert_rewrite("support", "checks", "toys", "prefix_tree", "assistants")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--families-table", type=Path, help="write what test_families.py found there and in the README")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--families-table")
    if path is not None and not hasattr(config, "workerinput"):
        from families_table import Collector

        config.pluginmanager.register(Collector(path.absolute()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _hook_in_place() -> Iterator[None]:
    """Every test starts with the hook as `import ready_hf` leaves it, whatever the last one did."""
    ready_hf.hook()
    ready_hf.disable_assisted_generation()
    yield
    ready_hf.hook()
    ready_hf.disable_assisted_generation()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code of other tests, and counts of graphs from zero."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def assisted_generation(_hook_in_place: None) -> None:
    """Switched on for a test."""
    ready_hf.enable_assisted_generation()
