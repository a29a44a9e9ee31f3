"""Text for drafters, written beforehand and trained on: what the two scripts keep and what they refuse."""

import importlib
import json
import math
import re
import sys
from pathlib import Path

import pytest


np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
from transformers import AutoConfig  # noqa: E402

import ready_hf  # noqa: E402
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel  # noqa: E402
from support import tiny_target  # noqa: E402


TARGET, VOCABULARY = ready_hf.tiny_target_path(), 512


@pytest.fixture(scope="module")
def trainer():
    """The training script as a module; it imports its neighbours by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "examples")
        yield importlib.import_module("train_drafter")
    for name in ("train_drafter", "on_policy_text", "write_drafter_cards"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def writer(trainer):
    return sys.modules["on_policy_text"]


@pytest.fixture
def run(monkeypatch):
    """Runs a script with a command line: options by name."""

    def call(script, **options):
        words = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items()]
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *sum(words, [])])
        script.main()

    return call


@pytest.fixture
def refusal(run, capsys):
    """The one line that a script ends with."""

    def call(script, **options):
        with pytest.raises(SystemExit) as stopped:
            run(script, **options)
        assert isinstance(stopped.value.code, str), capsys.readouterr().err
        assert "\n" not in stopped.value.code
        return stopped.value.code

    return call


@pytest.fixture
def no_model(monkeypatch, writer):
    """A target that is loaded fails the test: what is refused must be refused before."""
    monkeypatch.setattr(writer.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "held"):
        (np.arange(300) % 500 + 2).astype(np.uint16).tofile(folder / f"{name}.bin")
    return folder


def rows_of(length=24, count=4, seed=0):
    return np.random.default_rng(seed).integers(2, VOCABULARY, (count, length)).astype(np.uint16)


def text_folder(folder, length=24, **files):
    """A folder of text; files by their names in place of the usual ones."""
    folder.mkdir()
    names = ("train-sampled-1", "train-greedy-2", "held-sampled", "held-greedy")
    for seed, name in enumerate(names):
        np.save(folder / f"{name}.npy", files.get(name.replace("-", "_"), rows_of(length, seed=seed)))
    return folder


def tiny_start(folder, **options):
    """What an earlier run left: small drafters with sizes unlike those of the command line."""
    options = {"block_size": 4, "num_hidden_layers": 1, "intermediate_size": 32, "markov_rank": 8} | options
    options |= {"reader_rank": 8, "reader_query_rank": 4, "mask_token_id": 3}
    for variant in ("dspark", "ready"):
        config = ReadyDrafterConfig.for_target(own_target(), reader=variant == "ready", **options)
        ReadyDrafterModel(config).save_pretrained(folder / variant)
    return folder


def own_target():
    return AutoConfig.from_pretrained(TARGET)


@pytest.mark.parametrize(("largest", "kind"), [(65535, np.uint16), (65536, np.int32), (200_000, np.int32)])
def test_saved_rows_keep_every_id(writer, tmp_path, largest, kind):
    rows = torch.tensor([[0, 5, largest], [1, 2, 3]], dtype=torch.int32)
    for name in ("train-greedy-1", "held-sampled", "held-greedy"):
        writer.save_rows(tmp_path / f"{name}.npy", rows)
    assert np.load(tmp_path / "train-greedy-1.npy").dtype == kind
    found, held, shares = writer.read_text(tmp_path)
    assert sorted(found.tolist()) == sorted(rows.tolist())
    assert held["sampled"].tolist() == held["greedy"].tolist() == rows.tolist()
    assert shares == "0 at temperature 1, 2 greedily"


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("train-sampled-1", rows_of().astype(np.float32), "holds float32"),
        ("train-greedy-2", rows_of() > 3, "holds bool"),
        ("held-greedy", rows_of()[0], r"holds uint16 of shape \[24\]"),
        ("held-sampled", rows_of()[None], r"holds uint16 of shape \[1, 4, 24\]"),
        ("train-greedy-2", rows_of()[:0], r"holds uint16 of shape \[0, 24\]"),
        ("held-greedy", rows_of()[:, :0], r"holds uint16 of shape \[4, 0\]"),
        ("train-sampled-1", rows_of().astype(np.int64) - 10, "has ids -"),
        ("train-sampled-1", rows_of().astype(np.int64) + 2**32, "has ids 4294967"),
        ("train-greedy-2", rows_of(23), "has rows of 23 tokens, .*train-sampled-1.npy of 24"),
        ("held-greedy", rows_of(25), "has rows of 25 tokens, .*train-sampled-1.npy of 24"),
    ],
    ids=["float", "bool", "flat", "deep", "no_rows", "no_tokens", "negative", "large", "train_length", "held_length"],
)
def test_text_that_is_no_rows_of_ids_is_refused(writer, tmp_path, name, rows, message):
    folder = text_folder(tmp_path / "text", **{name.replace("-", "_"): rows})
    with pytest.raises(SystemExit, match=rf"{name}\.npy {message}[^\n]*: write [^\n]+$"):
        writer.read_text(folder)


@pytest.mark.parametrize("content", [b"", b"nothing", 40, 150, -1, "pickle", "header"], ids=str)
def test_a_damaged_file_is_refused(writer, tmp_path, content):
    path = text_folder(tmp_path / "text") / "held-greedy.npy"
    whole = path.read_bytes()
    if content == "pickle":
        np.save(path, np.array([None]), allow_pickle=True)
    elif content == "header":
        path.write_bytes(whole.replace(b"}", b"{"))
    else:
        path.write_bytes(content if isinstance(content, bytes) else whole[:content])
    with pytest.raises(SystemExit, match=r"held-greedy\.npy cannot be read \(.+\): write it again[^\n]*$"):
        writer.read_text(path.parent)


def test_a_folder_without_text_is_refused(writer, tmp_path):
    with pytest.raises(SystemExit, match=r"has no held-sampled.npy, held-greedy.npy, train-\*.npy: on_policy_text"):
        writer.read_text(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held": -1}, "--held must be a number of at least 0, got -1"),
        ({"row": 1}, "--row must be a number of at least 2, got 1"),
        ({"rows": 0}, "--rows must be a number of at least 1, got 0"),
        ({"seconds": -1}, "--seconds must be a number of at least 0, got -1.0"),
        ({"seconds": math.nan}, "--seconds must be a number of at least 0, got nan"),
        ({"seconds": math.inf}, "--seconds must be a number of at least 0, got inf"),
        ({"held": 2, "kind": "sampled"}, "--held writes rows of both kinds, got --kind sampled too: leave one"),
        ({"mask_token_id": VOCABULARY}, "--mask-token-id must be 0 to 511, the target's ids, got 512"),
        ({"mask_token_id": -1}, "--mask-token-id must be 0 to 511, the target's ids, got -1"),
    ],
    ids=str,
)
def test_options_that_cannot_write_text_are_refused(writer, refusal, no_model, data, tmp_path, options, message):
    found = refusal(writer, **({"target": TARGET, "data": data, "out": tmp_path / "text", "row": 16} | options))
    assert found.startswith(message)
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize(("name", "held"), [("train", 0), ("held", 2)])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "is no file: --data must be a folder"),
        ([], "has 0 tokens, more than 8 are needed"),
        ([5] * 8, "has 8 tokens, more than 8 are needed"),
        ([5] * 99 + [VOCABULARY], "has id 512, the target knows ids up to 511"),
    ],
    ids=["missing", "empty", "short", "another_target"],
)
def test_data_that_gives_no_prompts_is_refused(writer, refusal, no_model, data, tmp_path, name, held, ids, message):
    path = data / f"{name}.bin"
    path.unlink()
    if ids is not None:
        np.array(ids, np.uint16).tofile(path)
    found = refusal(writer, target=TARGET, data=data, out=tmp_path / "text", held=held, row=16)
    assert found.startswith(f"{path} {message}")


@pytest.mark.parametrize("place", ["file", "file/text"])
def test_an_output_that_is_a_file_is_refused(writer, trainer, refusal, data, tmp_path, place):
    (tmp_path / "file").write_text("mine")
    for script in (writer, trainer):
        found = refusal(script, target=TARGET, data=data, out=tmp_path / place)
        assert found.startswith(f"--out {tmp_path / place} cannot be a folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_text_written_beforehand_needs_only_the_data_it_uses(writer, run, data, tmp_path):
    options = {"target": TARGET, "data": data, "out": tmp_path / "text", "row": 16, "rows": 3, "seconds": 0}
    moved = (data / "held.bin").rename(tmp_path / "held.bin")
    run(writer, **options)
    run(writer, **options, kind="greedy", seed=2)
    moved.rename(data / "held.bin")
    (data / "train.bin").unlink()
    run(writer, **options, held=2)
    rows, held, shares = writer.read_text(tmp_path / "text")
    assert rows.shape == (6, 16)
    assert {kind: tuple(ids.shape) for kind, ids in held.items()} == {"sampled": (2, 16), "greedy": (2, 16)}
    assert shares == "3 at temperature 1, 3 greedily"


@pytest.fixture
def quick(trainer, monkeypatch):
    """A training that fails the test, for what must be refused before."""
    for name in ("train", "write_rows", "write_held_out"):
        monkeypatch.setattr(trainer, name, lambda *_, **__: pytest.fail("computed"))


def test_a_target_that_is_no_model_is_refused(writer, trainer, refusal, quick, data, tmp_path):
    for script in (writer, trainer):
        found = refusal(script, target=tmp_path, data=data, out=tmp_path / "out")
        assert found.startswith(f"--target {tmp_path} cannot be loaded (")


@pytest.mark.parametrize(
    ("length", "options", "least"), [(14, {}, 15), (9, {}, 15), (21, {"stride": 14}, 23), (5, {"block": 4}, 7)]
)
def test_rows_too_short_for_a_block_are_refused(trainer, refusal, quick, tmp_path, length, options, least):
    text = text_folder(tmp_path / "text", length)
    start = f"rows of {length} tokens are too short for blocks of {options.get('block', 8)}"
    for own in ({"text": text}, {"row": length}):
        found = refusal(trainer, out=tmp_path / "out", steps=1, **own, **options)
        assert found.startswith(start)
        assert f"at least {least} are needed" in found


@pytest.mark.parametrize(("block", "stride"), [(8, 1), (4, 1), (4, 9), (31, 1), (31, 40)])
def test_the_shortest_rows_have_an_anchor(trainer, block, stride):
    def anchors(length):
        """Of a row in training, and after the prompt of a held-out one."""
        ids, written = torch.ones(1, length), torch.ones(1, length)
        written[:, : trainer.held_prompt(length)] = 0
        legal = (trainer.legal_anchors(ids, block, stride), trainer.whole_blocks(written, block))
        return [bool(trainer.choose_anchors(places, 3)[1].any()) for places in legal]

    for length in range(2, 120):
        args = trainer.parse(["--out", "x", "--row", str(length), "--block", str(block), "--stride", str(stride)])
        try:
            trainer.check_length(args)
        except SystemExit:
            assert not all(anchors(length)), length
        else:
            assert all(anchors(length)), length


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "--rows must be a number of at least 1, got 0"),
        ({"heads": 0}, "--heads must be a number of at least 1, got 0"),
        ({"steps": -1}, "--steps must be a number of at least 1, got -1"),
        ({"block": 1}, "no such drafter can be trained: .*`block_size` must be 2 to 31, got 1"),
        ({"mask_token_id": 512}, "no such drafter can be trained: .*`mask_token_id` must be 0 to 511, got 512"),
    ],
    ids=str,
)
def test_drafters_that_cannot_be_are_refused(trainer, refusal, quick, tmp_path, options, message):
    assert re.match(message, refusal(trainer, out=tmp_path / "out", **options))
    assert not (tmp_path / "out").exists()


def test_text_of_another_target_is_refused(trainer, refusal, quick, tmp_path):
    text = text_folder(tmp_path / "text", held_greedy=rows_of() + np.uint16(VOCABULARY))
    assert "another target" in refusal(trainer, out=tmp_path / "out", text=text)


def test_start_without_a_variant_is_refused(trainer, refusal, quick, tmp_path):
    start, out = tiny_start(tmp_path / "start"), tmp_path / "out"
    (start / "ready" / "config.json").unlink()
    expected = "dspark/config.json, dspark/model.safetensors, ready/config.json, ready/model.safetensors"
    for folder, missing in ((start, "ready/config.json"), (tmp_path / "none", expected)):
        found = refusal(trainer, out=out, start=folder)
        assert found.startswith(f"--start {folder} has no {missing}: expected the output folder of an earlier run")
        assert found.endswith(f"with {expected}")
    (start / "ready" / "config.json").write_text("{")
    assert refusal(trainer, out=out, start=start).startswith("no such drafter can be trained: ")
    assert not out.exists()


def test_start_of_another_target_is_refused(trainer, refusal, quick, tmp_path):
    config = ReadyDrafterConfig.for_target(tiny_target("bamba"), reader=False)
    ReadyDrafterModel(config).save_pretrained(tmp_path / "start" / "dspark")
    found = refusal(trainer, out=tmp_path / "out", start=tmp_path / "start", variants="dspark")
    assert "this drafter was not made for" in found


def test_start_whose_drafters_need_different_text_is_refused(trainer, refusal, quick, tmp_path):
    start = tiny_start(tmp_path / "start")
    path = start / "ready" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"block_size": 5}))
    found = refusal(trainer, out=tmp_path / "out", start=start)
    assert found.startswith("drafters in --start differ in `block_size`, [4, 5]: choose one with --variants")


def test_rows_are_measured_by_the_block_of_the_start(trainer, refusal, quick, tmp_path):
    start, text = tiny_start(tmp_path / "start", block_size=12), text_folder(tmp_path / "text", 20)
    assert "too short for blocks of 12" in refusal(trainer, out=tmp_path / "out", start=start, text=text, block=2)


def test_going_on_keeps_the_sizes_of_the_start(trainer, run, tmp_path):
    """Rows that the default block of 8 does not fit into."""
    start, text = tiny_start(tmp_path / "start"), text_folder(tmp_path / "text", 12)
    run(trainer, out=tmp_path / "out", start=start, text=text, steps=1, batch=2, anchors=2, reader_rank=5)
    records = [tmp_path / "out" / name for name in ("record.json", "dspark/training.json", "ready/training.json")]
    expected = {"block": 4, "layers": 1, "intermediate": 32, "markov_rank": 8, "reader_rank": 8, "query_rank": 4}
    expected |= {"mask_token_id": 3, "batch": 2, "anchors": 2, "row": 12}
    for path in records:
        options = json.loads(path.read_text())["options"]
        assert {name: options[name] for name in expected} == expected
        assert "window" not in options  # the drafters have none
    for variant in ("dspark", "ready"):
        metrics = json.loads((tmp_path / "out" / variant / "training.json").read_text())["evaluation"]["greedy"]
        assert math.isfinite(metrics["tau"])
        assert "acceptance_4" in metrics
        assert "acceptance_5" not in metrics


def test_sizes_that_differ_or_that_no_drafter_has_are_not_recorded(trainer, tmp_path):
    start = tiny_start(tmp_path / "start")
    config = ReadyDrafterConfig.from_pretrained(start / "dspark")
    config.intermediate_size = 64
    config.save_pretrained(start / "dspark")
    for variants, gone in ((["dspark", "ready"], {"intermediate"}), (["dspark"], {"reader_rank", "query_rank"})):
        args = trainer.parse(["--out", "x", "--start", str(start), "--variants", *variants])
        trainer.check_drafters(own_target(), args)
        assert set(trainer.FIELDS) - set(vars(args)) == gone | {"window"}


def test_nothing_measured_is_a_failure_and_loses_nothing(trainer, refusal, monkeypatch, tmp_path):
    evaluate, text = trainer.evaluate, text_folder(tmp_path / "text", 20)

    def without_dspark(target, drafter, *args):
        metrics = evaluate(target, drafter, *args)
        return metrics if drafter.config.has_reader else metrics | {"tau": math.nan}

    monkeypatch.setattr(trainer, "evaluate", without_dspark)
    found = refusal(trainer, out=tmp_path / "out", text=text, steps=1, batch=2, anchors=2, intermediate=32)
    assert found.startswith("nothing was measured for dspark: tau is no number")
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert math.isfinite(record["variants"]["ready"]["evaluation"]["sampled"]["tau"])
    for variant in ("dspark", "ready"):
        ReadyDrafterModel.from_pretrained(tmp_path / "out" / variant)


def test_a_held_out_row_alone_has_no_other_rows_states(trainer, refusal, tmp_path):
    text = text_folder(tmp_path / "text")
    count = len(np.load(text / "held-sampled.npy"))
    assert count > 2
    options = {"out": tmp_path / "out", "text": text, "block": 2, "batch": count - 1}
    assert f"{count} held-out rows in batches of {count - 1} leave one row alone" in refusal(trainer, **options)
    assert "33 held-out rows in batches of 32" in refusal(trainer, out=tmp_path / "out", held=33, batch=32)
