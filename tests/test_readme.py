"""The README can be trusted: its Python blocks run, in order, as written; its commands and links exist."""

import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

import ready_hf


ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "<!-- not-executed -->"
VISIBLE = "*(not executed by the tests: needs the network)*"


def blocks(language: str) -> list[tuple[int, str, str]]:
    """Fenced blocks as (line number of the first code line, code, the text between the block before and this one)."""
    text, found, end = README.read_text(), [], 0
    for match in BLOCK.finditer(text):
        if match[1] == language:
            found.append((text.count("\n", 0, match.start(2)) + 1, match[2], text[end : match.start()]))
        end = match.end()
    return found


@pytest.fixture
def hooks_restored():
    yield
    ready_hf.disable_assisted_generation()
    ready_hf.hook()


@pytest.mark.usefixtures("hooks_restored")
def test_python_blocks_run():
    namespace, executed = {"__name__": "readme"}, 0
    for line, code, before in blocks("python"):
        if MARK in before:
            continue
        # leading newlines give tracebacks the line numbers of the README
        exec(compile("\n" * (line - 1) + code, str(README), "exec"), namespace)
        executed += 1
    assert executed >= 4


def test_blocks_that_do_not_run_say_so():
    for line, _, before in blocks("python"):
        ending = before.strip().splitlines()[-2:]
        assert (MARK in before) == (VISIBLE in before), f"line {line}: one of the two marks is missing"
        assert MARK not in before or ending == [MARK, VISIBLE], f"line {line}: marks must stand right before a block"


def test_make_targets_exist():
    used = set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= used <= targets


def test_links_and_paths_exist():
    text = README.read_text()
    names = re.findall(r"\]\((?!https?:)([^)#]+)\)", text) + re.findall(r"^\| `([\w./-]+/)`", text, re.MULTILINE)
    assert len(names) > 8
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_supported_model_types_exist():
    models = re.findall(r"`([a-z0-9_]+)`", README.read_text().split("## Supported targets")[1].split("Refused")[0])
    assert len(models) >= 7
    assert [name for name in models if name not in CONFIG_MAPPING] == []
