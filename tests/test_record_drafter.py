"""A drafter of the reader experiments gets the record and the card of those that `train_drafter.py` makes."""

import argparse
import importlib
import json
import re
import sys
from pathlib import Path

import pytest


np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
from huggingface_hub import ModelCard  # noqa: E402

import ready_hf  # noqa: E402
from ready_hf import ReadyDrafterModel  # noqa: E402


EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = (
    "ablate_reader",
    "record_drafter",
    "benchmark_reader",
    "ablation_arms",
    "ablation_batches",
    "ablation_training",
    "train_drafter",
)
NAMES += ("on_policy_text", "wrong_states", "write_drafter_cards")
SCRIPTS = (*NAMES[:3], "write_drafter_cards")
SIZES = {"steps": 2, "batch": 2, "anchors": 4, "block": 4, "held": 2, "held_new": 24, "held_anchors": 4}
SIZES |= {"intermediate": 16, "markov_rank": 4, "head_dim": 16}


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield argparse.Namespace(**{name: importlib.import_module(name) for name in SCRIPTS})
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def run(monkeypatch):
    def call(script, *words, **options):
        options = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items()]
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, words), *sum(options, [])])
        script.main()

    return call


@pytest.fixture
def text(tmp_path):
    """Rows as `on_policy_text.py` writes them, random ones."""
    folder = tmp_path / "text"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(2, 500, (5, 4, 48)).astype(np.uint16)
    names = ("train-sampled-1", "train-greedy-2", "held-sampled", "held-greedy", "validation")
    for name, part in zip(names, rows, strict=True):
        np.save(folder / f"{name}.npy", part)
    return folder


@pytest.fixture
def trained(scripts, run, text, tmp_path):
    """`small.json` and `small/default`, as `ablate_reader.py` leaves them."""
    target = ready_hf.tiny_target_path()
    places = {"on_policy": text, "text": text, "out": tmp_path / "small.json", "save": tmp_path / "small"}
    run(scripts.ablate_reader, target=target, arms="default", **places, **SIZES)
    return {"arm": "default", "drafter": tmp_path / "small" / "default", "target": target, "text": text}


def test_weights_record_and_card(scripts, run, trained, tmp_path, capsys):
    run(scripts.record_drafter, tmp_path / "small.json", out=tmp_path / "shipped", batch=2, anchors=2, **trained)
    before, after = (ReadyDrafterModel.from_pretrained(x) for x in (trained["drafter"], tmp_path / "shipped"))
    assert after.dtype == torch.bfloat16
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in after.state_dict().items())
    record = json.loads((tmp_path / "shipped" / "training.json").read_text())
    assert (record["arm"], record["steps"], record["planned_steps"], record["rows"]) == ("default", 2, 2, 8)
    wrong = ["sampled, states: zeros", "sampled, states: another row's", "sampled, states: the previous anchor's"]
    assert list(record["evaluation"]) == ["sampled", "greedy", *wrong]
    assert all(1 <= metrics["tau"] <= 5 for metrics in record["evaluation"].values())
    card = ModelCard.load(tmp_path / "shipped" / "README.md").text
    assert "of 2 rows with 4 blocks each" in card
    assert "8 rows of 48 tokens that the target wrote itself (4 at temperature 1, 4 greedily)" in card
    assert str(tmp_path) not in card
    assert "greedy" in capsys.readouterr().out


def test_what_has_no_record_is_refused(scripts, run, trained, tmp_path):
    def refused(path, **options):
        with pytest.raises(SystemExit) as stopped:
            run(scripts.record_drafter, path, out=tmp_path / "shipped", **trained | options)
        assert not (tmp_path / "shipped").exists()
        return stopped.value.code

    path = tmp_path / "small.json"
    assert "there is no file" in refused(tmp_path / "none.json")
    assert refused(path, arm="dspark") == "--arm must be one of default, got dspark"
    assert "no drafter in" in refused(path, drafter=tmp_path / "none")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"options": record["options"] | {"on_policy": None}}))
    assert "other text than the target's own" in refused(path)
    arms = {"default": record["arms"]["default"] | {"parameters": 7}}
    path.write_text(json.dumps(record | {"arms": arms}))
    assert re.search(
        r"has \d+ parameters, and 'default' in .*small.json has 7: name the folder of that arm", refused(path)
    )
    for text, message in {
        "{": "is not JSON",
        "[1]": "has no command, date",
        '{"arms": {}}': "has no command, ",
        json.dumps(record | {"options": []}): "is not laid out as ablate_reader.py --out writes it",
        json.dumps(record | {"arms": ["default"]}): "is not laid out as ablate_reader.py --out writes it",
    }.items():
        path.write_text(text)
        assert message in refused(path)


def test_the_cost_of_reading_is_not_measured_for_a_file_that_cannot_be_written(scripts, run, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts.benchmark_reader, "make_reader", None)
    for path in (tmp_path / "none" / "cost.json", tmp_path):
        with pytest.raises(SystemExit, match="must be a file in a folder that is there"):
            run(scripts.benchmark_reader, json=path)


@pytest.mark.parametrize(
    ("name", "value", "bound"), [("runs", 0, 1), ("layers", 0, 1), ("keys", -1, 1), ("depth", 0, 1), ("block", 1, 2)]
)
def test_the_cost_of_reading_is_not_measured_for_sizes_that_cannot_be(scripts, run, name, value, bound):
    with pytest.raises(SystemExit, match=f"--{name} must be a number of at least {bound}, got {value}"):
        run(scripts.benchmark_reader, **{name: value})
    with pytest.raises(SystemExit, match="--block must be at most 31, got 32"):
        run(scripts.benchmark_reader, block=32)


def test_cards_are_refused_before_anything_is_decoded(scripts, run, tmp_path, monkeypatch):
    """Of the second folder too, before the first one's reader is checked."""
    monkeypatch.setattr(scripts.write_drafter_cards, "check_reader", None)
    shipped = Path(ready_hf.small_drafter_path("ready"))

    def refused(*folders, **options):
        with pytest.raises(SystemExit) as stopped:
            run(scripts.write_drafter_cards, *folders, date="2026-11-30", **options)
        return stopped.value.code

    other = tmp_path / "other"
    assert "other is no folder with a drafter" in refused(shipped, other)
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert "other is no folder with a drafter" in refused(shipped, other)
    for text, message in {"{": "is not JSON", "[1]": "has no command, date", "{}": "has no command, date"}.items():
        (other / "training.json").write_text(text)
        assert message in refused(shipped, other)
    assert refused(shipped, count=1) == "--count must be a number of at least 2, got 1"
    assert refused(shipped, tokens=0) == "--tokens must be a number of at least 1, got 0"
    assert "no target in" in refused(shipped, target=tmp_path / "none")
    assert "--prompts: the prompts file" in refused(shipped, prompts=tmp_path / "none")
