"""transformers' own model tests (`ModelTesterMixin`, `ConfigTester`) on our drafter.

They are in the source distribution of transformers and nowhere else; it is fetched with pip once and kept in pytest's
cache. Where it cannot be had the test is skipped, unless the environment variable `READY_HF_REQUIRE_CONFORMANCE` is
set.
The suite runs in a process of its own, next to `drafter_suite.py`.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import transformers


SUITE = Path(__file__).parent / "drafter_suite.py"
OWN_SKIPS = {
    "test_model_get_set_embeddings": "a drafter has no embeddings, it uses its target's",
    "test_resize_tokens_embeddings": "a drafter has no embeddings, it uses its target's",
    "test_bc_cache_name_forward": "`cache` never had another name here",
}
# The suite imports these for models that generate or are exported; the distribution leaves them out.
ABSENT = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}


def fetch_suite(cache: Path) -> Path:
    """The folder `tests` of the installed release of transformers, from the cache or by pip.

    Raises:
        RuntimeError: pip cannot get it, or the folder is not in it.
    """
    version = transformers.__version__
    folder = cache / f"transformers-{version}-tests"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        if importlib.util.find_spec("setuptools"):  # pip reads the metadata of what it downloads: not with a new one
            command += ["--no-build-isolation"]
        command += ["--disable-pip-version-check", "--no-binary", "transformers", "--dest", scratch]
        done = subprocess.run([*command, f"transformers=={version}"], capture_output=True, text=True, timeout=200)
        archives = list(Path(scratch).glob("*.tar.gz"))
        if done.returncode != 0 or len(archives) != 1:
            raise RuntimeError(
                f"pip cannot get the source distribution of transformers {version}: {done.stderr[-400:]}"
            )
        with tarfile.open(archives[0]) as archive:
            members = [m for m in archive.getmembers() if m.name.split("/")[1:2] == ["tests"]]
            # no `filter` before Python 3.11.4
            options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(scratch, members, **options)
        found = list(Path(scratch).glob("*/tests/test_modeling_common.py"))
        if len(found) != 1:
            raise RuntimeError(
                f"the source distribution of transformers {version} has no tests/test_modeling_common.py"
            )
        shutil.copytree(found[0].parent, Path(scratch) / "ready")
        if not folder.is_dir():  # another process may have been faster
            (Path(scratch) / "ready").rename(folder)
    return folder


def lay_out(suite: Path, root: Path) -> Path:
    """Puts the suite, the files it wants and ours into `root`; returns our file there."""
    tests = root / "tests"
    shutil.copytree(suite, tests)
    for name, text in ABSENT.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).parent.joinpath("__init__.py").touch()
        (tests / name).write_text(text, encoding="utf-8")
    (tests / "__init__.py").touch()
    return Path(shutil.copy(SUITE, tests / "test_drafter.py"))


def run(file: Path) -> tuple[int, str, dict[str, str | None]]:
    """Runs the suite: exit status, output, and for every test `None` or the reason it was skipped."""
    report = file.with_suffix(".xml")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_TEST_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "--disable-warnings", "-p", "no:cacheprovider", "-rf"]
    command += ["--rootdir", str(file.parents[1]), f"--junitxml={report}", str(file)]
    done = subprocess.run(command, cwd=file.parents[1], env=environment, capture_output=True, text=True, timeout=500)
    outcomes: dict[str, str | None] = {}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        skipped = case.find("skipped")
        outcomes[case.attrib["name"]] = None if skipped is None else skipped.attrib["message"]
    return done.returncode, done.stdout + done.stderr, outcomes


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_model_tests_of_transformers(request, tmp_path):
    required = os.environ.get("READY_HF_REQUIRE_CONFORMANCE", "0") not in ("", "0")
    try:
        import parameterized  # noqa: F401  # the suite imports it

        suite = fetch_suite(request.config.cache.mkdir("conformance"))
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        if required:
            raise
        pytest.skip(f"the model tests of transformers cannot be had: {error}")

    status, output, outcomes = run(lay_out(suite, tmp_path))
    assert status == 0, output[-20000:]
    skipped = {name: reason for name, reason in outcomes.items() if reason is not None}
    own = {name: r.removeprefix("ready_hf: ") for name, r in skipped.items() if r.startswith("ready_hf: ")}
    assert own == OWN_SKIPS
    # what the suite leaves out by itself must not be what we are here for
    ran = {name for name, reason in outcomes.items() if reason is None}
    assert len(ran) >= 90, sorted(skipped.items())
    assert sum(name.startswith("test_eager_matches_sdpa_inference") for name in ran) == 25, sorted(ran)
    wanted = {
        "test_attention_outputs",
        "test_batching_equivalence",
        "test_config",
        "test_model_outputs_equivalence",
        "test_retain_grad_hidden_states_attentions",
        "test_save_load",
        "test_training",
        "test_training_gradient_checkpointing_use_reentrant_true",
    }
    assert wanted <= ran, sorted(wanted - ran)
