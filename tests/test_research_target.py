"""The research target's text, its measure of long-range structure and its training, on a few made-up modules."""

import hashlib
import importlib
import json
import sys
import zipfile
from pathlib import Path

import pytest


np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).parents[1] / "examples"
HELD, READ, TOPICS = ("ash", "beech", "cedar", "elm"), ("sea", "lake"), ("rivers", "hills", "roads")


@pytest.fixture(scope="module")
def script():
    """The training script as a module; it imports its neighbours by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("train_research_target")
    for name in ("train_research_target", "research_target_data", "train_small_target", "small_target_data"):
        sys.modules.pop(name, None)
    sys.modules.pop("train_tiny_target", None)


@pytest.fixture(scope="module")
def data(script):
    return sys.modules["research_target_data"]


def module_text(topic):
    body = "".join(f"    value_{i} = read({topic!r}, {i})\n    total += value_{i} * {i}\n" for i in range(12))
    return f'"""Notes on {topic}."""\n\nimport os\n\n\ndef {topic}_sum(total):\n{body}    return total\n\n\n' * 3


@pytest.fixture(scope="module")
def sources(data):
    """Three files of every package, in no order."""
    made = []
    for name in (*HELD, *READ):
        package = sys.modules["small_target_data"].Package(name, "1.0", "", "MIT", name in HELD)
        made += [data.Source(package, f"{name}/{topic}.py", module_text(f"{name}_{topic}")) for topic in TOPICS]
    return made[::-2] + made[-2::-2]


def test_parts_share_no_package_and_held_out_ones_alternate(data, sources):
    parts = data.split(sources)
    names = {part: [package[0].package.name for package in packages] for part, packages in parts.items()}
    assert names == {"train": ["lake", "sea"], "validation": ["ash", "cedar"], "test": ["beech", "elm"]}
    for package in (package for packages in parts.values() for package in packages):
        assert len({source.package.name for source in package}) == 1
        assert [source.file for source in package] == sorted(source.file for source in package)
        assert len(package) == len(TOPICS)


def test_token_files_are_deterministic_and_packages_stand_together(data, sources, tmp_path):
    first = data.write_data(sources, tmp_path / "a", 300)
    assert first == data.write_data(sources[::-1], tmp_path / "b", 300)
    assert first == json.loads((tmp_path / "a" / "manifest.json").read_text())
    bpe = data.tokenizers.Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    for name in data.PARTS:
        content = (tmp_path / "a" / f"{name}.bin").read_bytes()
        assert content == (tmp_path / "b" / f"{name}.bin").read_bytes()
        assert hashlib.sha256(content).hexdigest() == first[name]["sha256"]
        ids = np.frombuffer(content, np.uint16)
        assert len(ids) == first[name]["tokens"]
        files = bpe.decode(ids.tolist(), skip_special_tokens=False).split("<|endoftext|>")
        known = {source.text: source for source in sources}
        found = [known[text].file for text in files[:-1]]
        assert len(found) == first[name]["files"] == len(set(found))
        packages = [file.split("/")[0] for file in found]
        changes = sum(a != b for a, b in zip(packages, packages[1:], strict=False))
        assert changes == len(set(packages)) - 1
        assert found == [f"{package}/{topic}.py" for package in dict.fromkeys(packages) for topic in sorted(TOPICS)]


def test_beyond_the_most_every_package_loses_its_last_files(data, sources):
    package = data.split(sources)["train"]
    bpe = data.train_tokenizer([source.text for source in sources], 300)
    whole, used = data.encode(package, bpe, 10**9)
    assert len(used) == 6
    for share, kept in ((0.7, ["hills", "rivers"]), (0.4, ["hills"])):
        ids, used = data.encode(package, bpe, int(share * len(whole)))
        assert len(ids) <= share * len(whole)
        assert sorted(source.file for source in used) == [f"{n}/{topic}.py" for n in ("lake", "sea") for topic in kept]


@torch.no_grad()
def test_long_range_compares_the_same_tokens(script, monkeypatch):
    """A model without mixers has no context at all, so any length of it gives one loss, of the same tokens only."""
    monkeypatch.setattr(script, "SHORT", 32)
    torch.manual_seed(0)
    model, row, rows = script.build_model(300).eval(), 256, 3
    held = torch.randint(300, (2000,))
    script.ready_hf.ensure_patched(model)  # as in the script: fla may be installed without a GPU
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(4)  # logits that tell tokens apart
    with_context = script.long_range(model, held, row, rows)
    names = list(with_context)
    assert names[:3] == ["below 32", "32 to 128", "above 128"]
    for layer in model.model.layers:
        mixer = getattr(layer, "linear_attn", None)
        (layer.self_attn.o_proj if mixer is None else mixer.out_proj).weight.zero_()
    found = script.long_range(model, held, row, rows)
    assert found[names[3]] == pytest.approx(found[names[4]], abs=1e-5)
    assert abs(with_context[names[3]] - with_context[names[4]]) > 1e-3
    starts = torch.linspace(0, len(held) - row, rows).long()
    losses = script.token_losses(model, held[starts[:, None] + torch.arange(row)], 2)
    assert losses.shape == (rows, row - 1)
    sizes = (31, 97, 127)  # tokens 1 to 31, 32 to 128, 129 to 255
    for name, part in zip(names, losses.split(sizes, dim=1), strict=False):
        assert found[name] == pytest.approx(float(part.mean()), abs=1e-5)
    compared = (128 - 1 + 32 - 32) // 16 * 16  # windows end within the row
    assert found[names[3]] == pytest.approx(float(losses[:, 128 : 128 + compared].mean()), abs=1e-5)


def test_losses_are_those_of_the_model_itself(script):
    torch.manual_seed(0)
    model, rows = script.build_model(300).eval(), torch.randint(300, (3, 64))
    script.ready_hf.ensure_patched(model)
    with torch.no_grad():
        want = float(model(rows, labels=rows).loss)
    assert float(script.token_losses(model, rows, 2).mean()) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("row", ["500", "448"])
def test_rows_that_long_range_cannot_measure_are_refused(script, row, capsys):
    with pytest.raises(SystemExit):
        script.parse(["train", "--data", "a", "--out", "b", "--row", row])
    assert f"a multiple of 64 (a chunk) and at least 512, got {row}" in capsys.readouterr().err


def test_text_shorter_than_a_row_is_refused(script, data, sources, tmp_path):
    manifest = data.write_data(sources, tmp_path, 300)
    longest = manifest["train"]["tokens"] // 64 * 64 + 64
    with pytest.raises(SystemExit, match=f"train.bin has .* tokens, more than --row {longest} are needed"):
        script.run_training(
            script.parse(["train", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--row", str(longest)])
        )


@pytest.mark.slow
def test_prepared_and_trained_it_loads(script, data, tmp_path, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packages = []
    for name in (*HELD, *READ):
        path = tmp_path / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for topic in TOPICS:
                wheel.writestr(f"{name}/{topic}.py", module_text(f"{name}_{topic}"))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        packages.append(sys.modules["small_target_data"].Package(name, "1.0", digest, "MIT", name in HELD))
    monkeypatch.setattr(sys.modules["small_target_data"], "read_corpus", lambda: packages)
    monkeypatch.setattr(script, "VOCABULARY", 300)
    monkeypatch.setattr(script, "LAYERS", script.LAYERS[:4])
    monkeypatch.setitem(script.SIZES, "num_hidden_layers", 4)
    folder, out = tmp_path / "data", tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["x", "prepare", "--data", str(folder), "--wheels", str(tmp_path)])
    script.main()
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "tokenizer.json",
        *(f"{name}.bin" for name in data.PARTS),
    }
    capsys.readouterr()
    monkeypatch.setattr(sys.modules["train_small_target"], "WARMUP", 2)
    options = "--seconds 1 --batch 1 --row 512 --rows 2 --lr 0.003"
    monkeypatch.setattr(sys, "argv", ["x", "train", "--data", str(folder), "--out", str(out), *options.split()])
    script.main()
    printed = capsys.readouterr().out
    first = float(printed.partition("first step: loss ")[2].partition(",")[0])
    record = json.loads((out / "training.json").read_text())
    assert float(record["training loss"].split()[0]) < first
    assert list(record["loss"])[-1] == "above 256, last 128"
    assert all(0 < value < 10 for value in record["loss"].values())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.config.layer_types.count("full_attention") == 1
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 0, 1)
    assert tokenizer.decode(tokenizer("def f(x):\n    return x").input_ids) == "def f(x):\n    return x"
    card = (out / "README.md").read_text()
    assert "- ash 1.0 (MIT)" in card.partition("validation:")[2].partition("test:")[0]
    assert str(tmp_path) not in card + (out / "training.json").read_text()
    assert all(path.stat().st_size < 4e6 for path in out.iterdir())
    steps = int(record["steps"].split()[0])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])  # the schedule is over, so one step
    script.main()
    assert json.loads((out / "training.json").read_text())["steps"].startswith(f"{steps + 1} ")
