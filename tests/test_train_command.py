"""`ready-hf train`: from text to a folder that loads, and one line for what cannot be done."""

import json
import sys

import huggingface_hub
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_bitsandbytes_available

import ready_hf
from ready_hf.cli import main


pytest.importorskip("accelerate")
pytest.importorskip("datasets")
TEXTS = [f"def function_{i}(value):\n    return value + {i}\n" * 4 for i in range(10)]
FEW = ["--max_steps", "3", "--per_device_train_batch_size", "4", "--num_anchors", "4", "--learning_rate", "1e-3"]
FEW += ["--save_strategy", "steps", "--save_steps", "1", "--disable_tqdm", "True", "--dataloader_pin_memory", "False"]


@pytest.fixture(scope="module")
def target():
    return str(ready_hf.small_target_path())


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def train(target, data, out, *more):
    options = ["--target", target, "--data", data, "--output-dir", str(out), "--max-length", "48", "--held-out", "2"]
    return main(["train", *options, *FEW, *more])


FIELDS = {"reader_projection": "bilinear", "reader_rank": 4, "reader_gate": True, "num_hidden_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["--drafter-config", json.dumps(FIELDS)], ["--as-written", "--no-reader", "--block-size", "4"]],
    ids=["", "as-written"],
)
def test_a_drafter_comes_out_that_drafts(target, data, tmp_path, capsys, more):
    out = tmp_path / "drafter"
    as_written = "--as-written" in more
    assert train(target, data, out, *more) == 0
    said = capsys.readouterr().out
    assert "3 steps, on 2 held-out rows" in said
    assert said.index("memory of a training step (estimate)") < said.index("3 steps, on")
    shares = said.split("if all before them are: ")[1].split(", ")
    assert len(shares) == (4 if as_written else 8)
    drafter = AutoModel.from_pretrained(out)
    assert drafter.config.has_reader is ("--no-reader" not in more)
    assert drafter.config.block_size == (4 if as_written else 8)
    assert as_written or all(getattr(drafter.config, name) == value for name, value in FIELDS.items())
    assert ("the target writes 10 texts of up to 48 tokens" in said) is not as_written
    assert (out / "_on_policy").is_dir() is not as_written  # a name that no trainer uploads
    model = AutoModelForCausalLM.from_pretrained(target)
    inputs = AutoTokenizer.from_pretrained(target)(TEXTS[0], return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False}
    drafted = model.generate(**inputs, **options, assistant_model=drafter)
    assert torch.equal(drafted, model.generate(**inputs, **options))


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_and_from_a_drafter(target, data, tmp_path, capsys):
    straight, stopped = tmp_path / "a", tmp_path / "b"
    assert train(target, data, straight, "--no-reader") == 0
    assert train(target, data, stopped, "--no-reader") == 0
    (stopped / "checkpoint-3" / "trainer_state.json").unlink()  # as a kill would leave it
    first = stopped / "checkpoint-1" / "model.safetensors"
    first.unlink()
    assert train(target, data, stopped, "--no-reader", "--resume") == 0
    assert not first.exists()  # a run from the start would have written it again, and ended alike
    one, other = (AutoModel.from_pretrained(x) for x in (straight, stopped))
    for name, value in one.named_parameters():
        assert torch.allclose(value, dict(other.named_parameters())[name], atol=1e-6), name

    capsys.readouterr()
    assert train(target, data, straight, "--resume", "--freeze_backbone_steps", "1") == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("ready-hf: checkpoint-3 was trained with the reader among the other parameters, and now")

    staged = tmp_path / "c"
    frozen = ["--freeze_backbone_steps", "3", "--drafter", str(straight)]
    assert train(target, data, staged, *frozen) == 0
    made = AutoModel.from_pretrained(staged)
    assert made.config.has_reader
    assert bool(made.reader.up_proj.weight.any())
    for name, value in one.named_parameters():
        assert torch.equal(made.state_dict()[name], value), name


@pytest.mark.slow
def test_it_evaluates_on_a_file_of_its_own_every_n_steps(target, data, tmp_path, capsys):
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in TEXTS[:3]))
    out = tmp_path / "drafter"
    assert train(target, data, out, "--held-out-data", str(held_out), "--eval-steps", "2", "--no-reader") == 0
    assert f"{len(TEXTS)} rows, 3 steps, on 3 held-out rows" in capsys.readouterr().out
    history = json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    found = [entry for entry in history if "eval_tau" in entry]
    assert [entry["step"] for entry in found] == [2, 3]  # and at the end
    assert all(0 <= entry[f"eval_acceptance_{k}"] <= 1 for entry in found for k in range(1, 9))
    assert (out / "_on_policy_held_out").is_dir()


def test_the_extra_that_is_missing_is_named(target, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_accelerate_available", lambda *args: False)
    assert train(target, data, tmp_path / "drafter") == 2
    assert "the extra `ready_hf[train]` brings it" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("count", [1, len(TEXTS)])
def test_held_out_texts_that_are_learned_too_are_refused_in_another_file(target, data, tmp_path, capsys, count):
    held_out = tmp_path / "held.jsonl"
    others = [json.dumps({"text": "never learned"})]
    held_out.write_text("\n".join([*others, *(json.dumps({"text": text}) for text in TEXTS[-count:])]))
    assert train(target, data, tmp_path / "drafter", "--held-out-data", str(held_out)) == 2
    said = capsys.readouterr().err
    assert f"{count} of the {count + 1} texts of --held-out-data are in --data too (the first: " in said
    assert "held.jsonl" in said
    assert not (tmp_path / "drafter").exists()


WRONG = [
    (["--data", "DATA"], "--target and --data must be given"),
    (["--target", "TARGET"], "--target and --data must be given"),
    (["--target", "TARGET", "--data", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    (["--target", "TARGET", "--data", "DATA", "--learning_rat", "1e-3"], "unknown option --learning_rat"),
    (["--target", "TARGET", "--data", "DATA", "--learning_rate", "fast"], "invalid float value: 'fast'"),
    (["--target", "TARGET", "--data", "DATA", "--num_anchors", "0"], "`num_anchors` must be at least 1, got 0"),
    (["--target", "TARGET", "--data", "DATA", "--output_dir", "x"], "the command's own option is --output-dir"),
    (
        ["--target", "TARGET", "--data", "DATA", "--eval-steps", "2", "--eval_steps=3"],
        "the command's own option is --eval-steps",
    ),
    (["--target", "TARGET", "--data", "DATA", "--eval-steps", "0"], "--eval-steps must be at least 1, got 0"),
    (["--target", "TARGET", "--data", "DATA", "--held-out-data", "gone.txt"], "gone.txt does not exist"),
    (["--target", "TARGET", "--data", "DATA", "--block-size", "1"], "--block-size must be 2 to 31, got 1"),
    (["--target", "TARGET", "--data", "DATA", "--max-length", "0"], "--max-length must be at least 1, got 0"),
    (["--target", "TARGET", "--data", "DATA", "--held-out", "0"], "--held-out must be at least 1, got 0"),
    (["--target", "TARGET", "--data", "DATA", "--resume"], "no checkpoint to go on from"),
    (["--target", "TARGET", "--data", "DATA", "--held-out-data", "DATA"], "is in --data and in --held-out-data"),
    (["--target", "DRAFTER", "--data", "DATA"], "must be a language model; that is a drafter"),
    (
        ["--target", "TARGET", "--data", "DATA", "--drafter-config", "gone.json"],
        "must be a JSON file or {...}, got 'gone",
    ),
    (["--target", "TARGET", "--data", "DATA", "--drafter-config", "{"], "must be a JSON file or {...}, got '{'"),
    (
        ["--target", "TARGET", "--data", "DATA", "--drafter-config", '{"block_size": 4}', "--block-size", "8"],
        "leave --block-size out",
    ),
    (["--target", "TARGET", "--data", "DATA", "--drafter-config", '{"reader_rnk": 4}'], "has no field 'reader_rnk'"),
    (
        ["--target", "TARGET", "--data", "DATA", "--drafter-config", '{"reader_rank": 0}'],
        "`reader_rank` must be at least",
    ),
    (
        ["--target", "TARGET", "--data", "DATA", "--drafter", "READY", "--drafter-config", '{"reader_rank": 4}'],
        "--drafter brings its own",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else None)
def test_what_cannot_be_done_is_one_line(target, data, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    names = {"TARGET": target, "DATA": data, "DRAFTER": str(ready_hf.small_drafter_path("dspark"))}
    names["READY"] = str(ready_hf.small_drafter_path())
    assert main(["train", *(names.get(argument, argument) for argument in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said
    lines = [line for line in said.splitlines() if line and "Loading weights" not in line]
    assert len(lines) == 1
    assert not any(path.name.startswith(("drafter", "tmp_trainer")) for path in tmp_path.iterdir())


@pytest.mark.parametrize("more", [["--as-written"], []], ids=["as written", "written by the target"])
def test_too_little_data_is_one_line(target, data, tmp_path, capsys, more):
    """Before the target writes anything."""
    assert train(target, data, tmp_path / "out", *more, "--held-out", "99") == 2
    said = capsys.readouterr()
    assert "rows, and --held-out takes 99: give more --data" in said.err
    assert "the target writes" not in said.out


def test_a_drafter_that_is_nowhere_is_said_to_be_no_folder(target, data, tmp_path, capsys):
    assert train(target, data, tmp_path / "out", "--drafter", "drafters/gone") == 2
    said = capsys.readouterr().err
    assert "the drafter drafters/gone cannot be used (no folder of that name is here, so it was looked for" in said


UNREACHABLE = [
    (["--report_to", "wandb"], "wandb"),
    (["--optim", "adamw_bnb_8bit"], "bitsandbytes"),
    (["--push_to_hub", "True"], "--push_to_hub: the repository cannot be made or reached"),
]


@pytest.mark.parametrize(("options", "message"), UNREACHABLE, ids=lambda x: x if isinstance(x, str) else None)
def test_what_is_not_there_is_one_line_too(target, data, tmp_path, capsys, monkeypatch, options, message):
    """A program that reports, an optimizer's library, the Hub."""
    is_bitsandbytes_available()  # transformers remembers the first answer, which must be true for tests after this one
    for package in ("wandb", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert train(target, data, tmp_path / "drafter", "--as-written", "--no-reader", *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_rows_too_short_for_a_block_are_one_line(target, data, tmp_path, capsys):
    """They would train nothing and be saved as a drafter."""
    assert train(target, data, tmp_path / "out", "--as-written", "--max-length", "9") == 2
    assert capsys.readouterr().err.endswith("--max-length must be at least 10 for this drafter, got 9\n")


def test_an_output_folder_of_another_training_is_refused(target, data, tmp_path, capsys):
    """Its checkpoints have higher numbers, so resuming the new training would go on from the old one."""
    (tmp_path / "drafter" / "checkpoint-7").mkdir(parents=True)
    assert train(target, data, tmp_path / "drafter", "--as-written", "--no-reader") == 2
    assert "has checkpoint-7 of an earlier training: give --resume" in capsys.readouterr().err
