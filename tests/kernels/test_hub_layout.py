"""The kernel folder as a Hub repository: the tree that `kernels/assemble.py` writes, alone and in the hands of the
`kernels` library, which may be missing."""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from ready_hf import kernels as installed
from ready_hf.kernels import layers


SOURCE = Path(__file__).parents[2] / "kernels"
PACKAGE = SOURCE / "torch-ext" / "ready_kernels"
GENERAL = tomllib.loads((SOURCE / "build.toml").read_text())["general"]
ALLOWED_IMPORTS = {*sys.stdlib_module_names, "torch", "triton"}
LAYERS = [
    name for name, thing in vars(layers).items() if inspect.isclass(thing) and thing.__module__ == layers.__name__
]


def has_library() -> bool:
    """Whether the `kernels` library is installed; a look for a module would find the folder `kernels/` here."""
    try:
        importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# `make test` installs the library and must not skip
needs_library = pytest.mark.skipif(
    not has_library() and "READY_HF_REQUIRE_GPU_EXTRA" not in os.environ,
    reason="the `kernels` library is not installed: `pip install 'ready_hf[dev]'`",
)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("assemble", SOURCE / "assemble.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


assemble = load_script()


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """An assembled tree that nothing is imported from."""
    folder = tmp_path_factory.mktemp("hub") / "tree"
    assemble.main(["--out", str(folder)])
    return folder


@pytest.fixture
def loadable(tree, tmp_path) -> Path:
    """A copy of the tree for the library, which keeps what it loads by path and leaves caches there."""
    return shutil.copytree(tree, tmp_path / "tree")


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_metadata(tree: Path, backend: str) -> dict:
    return json.loads((tree / "build" / f"torch-{backend}" / "metadata.json").read_text())


def copy_with_litter(folder: Path) -> Path:
    """A copy of the kernel folder, with files in the package that must not travel."""
    copy = shutil.copytree(SOURCE, folder / "copy")
    for name in (
        "__pycache__/old.py",
        "__pycache__/api.pyc",
        ".ipynb_checkpoints/api.py",
        ".hidden.json",
        "notes.txt",
    ):
        path = copy / "torch-ext" / "ready_kernels" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("litter")
    return copy


def run_as_command(kernels: Path, folder: Path) -> Path:
    """Assembles `kernels` in a process of its own, and gives the tree."""
    command = [sys.executable, str(kernels / "assemble.py"), "--out", "tree"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "tree"


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States `[L, B, H, K, V]`, queries `[L, H, J, K]` and the reads `[B, J, L, H, V]`, all sizes different."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 3, 4, 16, 32, generator=generator)
    queries = torch.randn(2, 4, 5, 16, generator=generator)
    return states, queries, torch.einsum("lbhkv,lhjk->bjlhv", states, queries)


def test_tree_is_complete_and_holds_nothing_else(tree):
    sources = {
        path.relative_to(PACKAGE).as_posix(): path.read_bytes()
        for path in PACKAGE.rglob("*")
        if path.suffix in (".py", ".json") and path.is_file() and "__pycache__" not in path.parts
    }
    assert {"__init__.py", "layers.py", "reference.py"} <= set(sources)
    expected = {"README.md": (SOURCE / "CARD.md").read_bytes()}
    for backend in GENERAL["backends"]:
        expected |= {f"build/torch-{backend}/{name}": content for name, content in sources.items()}
    found = contents(tree)
    described = {f"build/torch-{backend}/metadata.json" for backend in GENERAL["backends"]}
    assert set(found) == set(expected) | described
    assert {name: found[name] for name in expected} == expected


def test_backends_have_a_variant_each(tree):
    assert {path.name for path in (tree / "build").iterdir()} == {"torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu"}


@pytest.mark.parametrize("backend", GENERAL["backends"])
def test_metadata_describes_the_variant(tree, backend):
    found = read_metadata(tree, backend)
    identifier = found.pop("id")
    assert identifier.isidentifier()
    assert identifier.startswith(f"_ready_kernels_{backend}_")
    assert found == {
        "name": "ready-kernels",
        "version": GENERAL["version"],
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }


def test_python_files_compile_and_import_only_what_every_kernel_may(tree):
    paths = sorted((tree / "build" / "torch-cpu").rglob("*.py"))
    assert paths
    for path in paths:
        inner = path.relative_to(tree / "build" / "torch-cpu")
        parsed = ast.parse(path.read_text(encoding="utf-8"), str(inner), feature_version=(3, 9))  # as the Hub asks
        compile(parsed, str(inner), "exec")
        for node in ast.walk(parsed):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= len(inner.parts), f"{inner}:{node.lineno} leaves the package"
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            foreign = {name for name in names if name.split(".")[0] not in ALLOWED_IMPORTS}
            assert not foreign, f"{inner}:{node.lineno} imports {foreign}"


def test_same_sources_give_the_same_bytes(tree, tmp_path):
    copy = copy_with_litter(tmp_path)
    assert contents(run_as_command(copy, tmp_path)) == contents(tree)


def test_changed_sources_give_another_id(tree, tmp_path):
    copy = copy_with_litter(tmp_path)
    with (copy / "torch-ext" / "ready_kernels" / "reference.py").open("a") as file:
        file.write("# changed\n")
    trees = (tree, run_as_command(copy, tmp_path))
    identifiers = [read_metadata(folder, backend)["id"] for folder in trees for backend in GENERAL["backends"]]
    assert len(set(identifiers)) == len(identifiers)


def test_two_folders_get_the_same_bytes(tree, tmp_path):
    assemble.main(["--out", str(tmp_path / "new" / "tree")])
    assert contents(tmp_path / "new" / "tree") == contents(tree)


def test_empty_folder_is_filled(tmp_path, tree):
    assemble.main(["--out", str(tmp_path)])
    assert contents(tmp_path) == contents(tree)


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {".hidden": "mine"},
        {"build/lib/thing.py": "mine"},
        {"build/torch-cpu/metadata.json": '{"name": "ready-kernels"}', "build/torch-cpu/mine.py": "mine"},
    ],
    ids=["file", "hidden", "another_build", "earlier_output"],
)
def test_folder_with_something_in_it_is_left_alone(tmp_path, capsys, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        assemble.main(["--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "is not empty: remove it, or choose another folder" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_an_earlier_output_is_left_alone(loadable, tree, capsys):
    with pytest.raises(SystemExit):
        assemble.main(["--out", str(loadable)])
    assert "is not empty" in capsys.readouterr().err
    assert contents(loadable) == contents(tree)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("", "--out is empty"),
        ("file", "is a file"),
        ("file/sub", "Not a directory"),
        ("loop", "symbolic links"),
        ("loop/sub", "symbolic links"),
        ("gone", "exists"),
        ("x" * 300, "too long"),
        (str(PACKAGE / "tree"), "lies within the sources"),
        ("sources/tree", "lies within the sources"),
    ],
    ids=["nothing", "file", "below_a_file", "loop", "below_a_loop", "dangling", "long", "sources", "link_to_sources"],
)
def test_what_cannot_be_a_new_folder_is_refused(tmp_path, monkeypatch, capsys, out, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    for name, place in {"loop": "loop", "gone": "nowhere", "sources": PACKAGE}.items():
        Path(name).symlink_to(place)
    with pytest.raises(SystemExit) as stopped:
        assemble.main(["--out", out])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop", "gone", "sources"}
    assert Path("file").read_text() == "mine"
    assert not (PACKAGE / "tree").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="everything is allowed to root")
def test_a_folder_without_permission_is_refused(tmp_path, capsys):
    tmp_path.chmod(0o500)
    with pytest.raises(SystemExit) as stopped:
        assemble.main(["--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert "Permission denied" in capsys.readouterr().err


def test_layers_are_public():
    assert "layers" in installed.__all__  # the library takes them from an attribute of the package
    assert "StateRead" in LAYERS


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_no_state(name):
    layer = getattr(layers, name)
    assert issubclass(layer, nn.Module)
    assert layer.__init__ is nn.Module.__init__
    assert {member for member, _ in inspect.getmembers(layer)} - {
        member for member, _ in inspect.getmembers(nn.Module)
    } <= {
        "can_torch_compile",
        "has_backward",
    }


def test_state_read_layer_multiplies_states_with_queries():
    states, queries, expected = problem()
    torch.testing.assert_close(layers.StateRead()(states, queries), expected, rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize("part", [".", "build", "build/torch-cpu"])
def test_library_loads_the_same_names(loadable, part):
    from kernels import get_local_kernel

    loaded = get_local_kernel(loadable / part, backend="cpu")
    assert Path(loaded.__file__) == loadable / "build" / "torch-cpu" / "__init__.py"
    assert loaded.__name__ == read_metadata(loadable, "cpu")["id"]
    assert loaded.__all__ == installed.__all__
    for name in installed.__all__:
        ours, theirs = getattr(installed, name), getattr(loaded, name)
        assert type(theirs) is type(ours), name
        if inspect.isfunction(ours) or inspect.isclass(ours):
            assert theirs is not ours
            assert theirs.__module__.split(".")[0] == loaded.__name__, name
            assert inspect.signature(theirs) == inspect.signature(ours), name


@needs_library
@pytest.mark.parametrize("backend", GENERAL["backends"])
def test_library_reads_the_metadata(tree, backend):
    from kernels import Metadata

    read = Metadata.read_from_file(tree / "build" / f"torch-{backend}" / "metadata.json")
    assert str(read.name) == GENERAL["name"]
    assert read.name.python_name == PACKAGE.name
    assert read.version == GENERAL["version"]
    assert str(read.backend.backend_type).lower() == backend


@needs_library
def test_kernelize_swaps_in_the_state_read(loadable):
    from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

    @use_kernel_forward_from_hub("ToyRead")
    class ToyRead(nn.Module):
        def forward(self, states, queries):
            raise AssertionError("not swapped")

    model = nn.ModuleList([ToyRead()])
    repository = LocalLayerRepository(loadable, layer_name="StateRead")
    with use_kernel_mapping({"ToyRead": {"cpu": {Mode.INFERENCE: repository}}}, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cpu", use_fallback=False)
    states, queries, expected = problem()
    torch.testing.assert_close(model[0](states, queries), expected, rtol=1e-5, atol=1e-5)
    assert model[0].forward.__func__.__module__.startswith("_ready_kernels_")


@needs_library
def test_kernelize_keeps_the_original_for_training(loadable):
    from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

    @use_kernel_forward_from_hub("ToyRead")
    class ToyRead(nn.Module):
        def forward(self, states, queries):
            return "original"

    model = nn.ModuleList([ToyRead()])
    with use_kernel_mapping({"ToyRead": {"cpu": LocalLayerRepository(loadable, layer_name="StateRead")}}):
        kernelize(model, mode=Mode.TRAINING, device="cpu")
    assert model[0](None, None) == "original"
