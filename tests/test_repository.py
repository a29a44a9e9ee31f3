"""Properties of the repository as a whole: public names, packaging, file sizes, what must not be in it."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import ready_hf


ROOT = Path(__file__).parents[1]
SOURCES = ("src", "kernels", "tests", "examples", "benchmarks", "hub_configs")
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".cff", ".ipynb", ""}


def project_files() -> list[Path]:
    """Files of the source folders and of the root, without caches and environments."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (*SOURCES, "docs", ".ci"):
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    hidden = re.compile(r"__pycache__|\.egg-info|\.ipynb_checkpoints")
    return [path for path in found if not hidden.search(str(path.relative_to(ROOT)))]


@pytest.mark.parametrize("name", [name for name in ready_hf.__all__ if not name.startswith("__")])
def test_public_name_exists_and_is_documented(name):
    thing = getattr(ready_hf, name)
    assert not callable(thing) or inspect.getdoc(thing), f"ready_hf.{name} has no docstring"


def test_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ready_hf.__version__"}
    number = re.escape(ready_hf.__version__)
    assert re.search(rf"^## \[({number}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_python_files_are_short():
    long = {}
    for path in project_files():
        if path.suffix == ".py" and (lines := path.read_text().count("\n")) > 500:
            long[str(path.relative_to(ROOT))] = lines
    assert long == {}


def test_no_machine_paths():
    folders = "|".join(("home", "root", "work", "tmp", "Users", "mnt"))  # in parts, so that this file has none
    pattern = re.compile(rf"(?<![\w.}}-])/({folders})/\w")
    hits = []
    for path in project_files():
        if path.suffix in TEXT and path.stat().st_size < 1_000_000 and pattern.search(path.read_text(errors="ignore")):
            hits.append(str(path.relative_to(ROOT)))
    assert hits == []


def test_kernels_folder_does_not_shadow_the_kernels_library():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_are_the_files_of_the_hub_repository():
    from ready_hf import kernels

    assert Path(kernels.__file__).parent.resolve() == ROOT / "kernels" / "torch-ext" / "ready_kernels"
    build = tomllib.loads((ROOT / "kernels" / "build.toml").read_text())
    assert build["general"]["name"].replace("-", "_") == "ready_kernels"


@pytest.fixture(scope="module")
def wheel_path(tmp_path_factory) -> Path:
    """A wheel that is built from a copy of the sources, without a network."""
    pytest.importorskip("build", reason="the `build` package is part of the dev extra")
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "kernels"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=dict(os.environ, PYTHONSAFEPATH="1"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = (copy / "dist").glob("*.whl")
    assert path.name.startswith(f"ready_hf-{ready_hf.__version__}-py3-none-any")
    return path


@pytest.fixture(scope="module")
def wheel(wheel_path) -> list[str]:
    """Names in the wheel."""
    return zipfile.ZipFile(wheel_path).namelist()


def test_wheel_holds_the_package_and_its_data(wheel):
    def installed(folder: str, to: str, pattern: str) -> set[str]:
        paths = [path for path in (ROOT / folder).rglob(pattern) if path.is_file() and "__pycache__" not in path.parts]
        return {to + path.relative_to(ROOT / folder).as_posix() for path in paths}

    expected = installed("src/ready_hf", "ready_hf/", "*.py") | {"ready_hf/py.typed"}
    expected |= installed("src/ready_hf/assets", "ready_hf/assets/", "*")
    expected |= installed("kernels/torch-ext/ready_kernels", "ready_hf/kernels/", "*.py")
    assert expected - set(wheel) == set()
    assert any(name.endswith("LICENSE") for name in wheel)


def test_wheel_holds_nothing_else(wheel):
    assert {name.split("/")[0] for name in wheel} == {"ready_hf", f"ready_hf-{ready_hf.__version__}.dist-info"}
    assert [name for name in wheel if "test" in name.lower()] == []


WHEEL_PROGRAM = """
import pathlib, sys, ready_hf, torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

assert pathlib.Path(ready_hf.__file__).is_relative_to(sys.argv[1]), ready_hf.__file__
path = ready_hf.small_target_path()
target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
inputs = AutoTokenizer.from_pretrained(path)("def main(", return_tensors="pt")
plain = target.generate(**inputs, max_new_tokens=8, do_sample=False)
for kind in ("ready", "dspark"):
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path(kind), dtype=torch.float32)
    drafted = target.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert torch.equal(drafted, plain)
print("same")
"""


@pytest.mark.slow
def test_models_load_from_the_wheel(wheel_path, tmp_path):
    zipfile.ZipFile(wheel_path).extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", WHEEL_PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.endswith("same\n"), done.stderr[-2000:]
