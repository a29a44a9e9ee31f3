"""The command: what it helps with, and one line with exit code 2 for everything that cannot be done, before any model
is loaded."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import Qwen3Config

import ready_hf
from ready_hf import demo
from ready_hf.cli import main


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Loading a model fails the test."""

    def load(*args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(demo, "load_target", load)
    monkeypatch.setattr(demo, "load_drafters", load)


@pytest.fixture
def files(tmp_path):
    """Files and folders that arguments can name."""
    (tmp_path / "good.jsonl").write_text('{"prompt": "a = 1"}\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a = 1"}\n{"prompt": \n')
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    (tmp_path / "hollow").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[1]")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "number.jsonl").write_text(f'{{"prompt": {"9" * 5000}}}')
    (tmp_path / "surrogate.jsonl").write_text('{"prompt": "a \\ud800"}')
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({"model_type": "ready_drafter"}))
    return tmp_path


def run(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


WRONG = [
    (["--prompts", "0"], "--prompts must be at least 1, got 0"),
    (["--prompts", "-3"], "--prompts must be at least 1, got -3"),
    (["--prompts", "many"], "--prompts"),
    (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
    (["--max-new-tokens", "-1"], "--max-new-tokens must be at least 1"),
    (["--temperature", "2"], "--temperature must be 0 or 1"),
    (["--temperature", "warm"], "--temperature"),
    (["--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16"),
    (["--device", "gpu"], "--device must be cpu, cuda"),
    (["--device", "meta"], "--device must be cpu, cuda"),
    (["--device", "cuda:99"], "CUDA devices on this machine"),
    (["--prompts-file", "DIR/none.jsonl"], "does not exist"),
    (["--prompts-file", "DIR"], "not a file"),
    (["--prompts-file", "DIR/empty.jsonl"], "holds no prompts"),
    (["--prompts-file", "DIR/wrong.jsonl"], "wrong.jsonl line 2 is not JSON"),
    (["--prompts-file", "DIR/binary.jsonl"], "UTF-8"),
    (["--prompts-file", "DIR/deep.jsonl"], "deep.jsonl line 1 cannot be read as JSON"),
    (["--prompts-file", "DIR/number.jsonl"], "number.jsonl line 1 cannot be read as JSON"),
    (["--prompts-file", "DIR/surrogate.jsonl"], "surrogate.jsonl line 1: a prompt holds half of a surrogate pair"),
    (["--target", "DIR/list"], "no readable config.json"),
    (["--target", "x" * 5000], "neither a folder nor"),
    (["--plot", "DIR/folder.png"], "is a folder"),
    (["--device", "cpu:1"], "--device must be cpu, cuda"),
    (["--target", "DIR/none"], "neither a folder nor"),
    (["--target", "./none"], "neither a folder nor"),
    (["--target", "DIR/hollow"], "no readable config.json"),
    (["--target", "DIR/broken"], "no readable config.json"),
    (["--target", "DIR/drafter"], "must be a language model"),
    (["--drafter", "DIR/none"], "neither a folder nor"),
    (["--drafter", "TINY"], "must be a ReaDy drafter"),
    (["--plot", "DIR/a.txt"], "must end in"),
    (["--plot", "DIR/none/a.png"], "there is no folder"),
    (["--reader-check", "--prompts", "1"], "at least 2"),
    (["--no-such-option"], "--no-such-option"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_wrong_argument_is_one_line(arguments, message, files, capsys):
    arguments = [a.replace("DIR", str(files)).replace("TINY", ready_hf.tiny_target_path()) for a in arguments]
    named = {a for a in arguments if a.startswith("--")}
    defaults = {"--target": ready_hf.tiny_target_path(), "--prompts-file": str(files / "good.jsonl")}
    for option, value in defaults.items():
        if option not in named:
            arguments += [option, value]
    code, out, err = run(capsys, "demo", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("ready-hf: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("nothing_is_loaded")
def test_cuda_without_a_gpu_is_named(files, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    arguments = ["--device", "cuda", "--target", ready_hf.tiny_target_path()]
    code, _, err = run(capsys, "demo", *arguments)
    assert code == 2
    assert "torch finds 0 CUDA devices" in err


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_plot_without_matplotlib_is_named(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "demo", "--plot", str(files / "a.png"), "--target", ready_hf.tiny_target_path())
    assert code == 2
    assert "extra `plot`" in err


def test_a_drafter_of_another_target_is_named(files, capsys):
    config = ready_hf.ReadyDrafterConfig.for_target(
        Qwen3Config(vocab_size=97, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
        reader=False,
        mask_token_id=1,
        num_hidden_layers=1,
    )
    ready_hf.ReadyDrafterModel(config).save_pretrained(files / "other")
    capsys.readouterr()
    arguments = ["--target", ready_hf.tiny_target_path(), "--drafter", str(files / "other")]
    code, _, err = run(capsys, "demo", *arguments, "--prompts-file", str(files / "good.jsonl"))
    assert code == 2
    assert "was not made for" in err
    assert err.count("\n") == 1


def test_a_target_that_cannot_be_loaded_is_named(files, capsys):
    (files / "hollow" / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    arguments = ["--target", str(files / "hollow"), "--prompts-file", str(files / "good.jsonl")]
    code, _, err = run(capsys, "demo", *arguments)
    assert code == 2
    assert "cannot be used" in err
    assert err.count("\n") == 1


def test_a_reader_check_without_reader_is_refused(files, capsys):
    arguments = ["--target", ready_hf.tiny_target_path(), "--prompts-file", str(files / "good.jsonl")]
    code, _, err = run(capsys, "demo", *arguments, "--reader-check")
    assert code == 2
    assert "needs a drafter that reads states" in err


def test_help_and_version(capsys):
    assert run(capsys, "--version") == (0, f"{ready_hf.__version__}\n", "")
    for arguments in ((), ("--help",)):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert "demo" in out
    code, out, _ = run(capsys, "demo", "--help")
    assert code == 0
    for option in ("--target", "--drafter", "--prompts-file", "--reader-check", "--plot", "--details", "--dtype"):
        assert option in out
    code, _, err = run(capsys, "no-such-command")
    assert code == 2
    assert "no-such-command" in err


def test_an_error_of_ours_is_not_hidden(monkeypatch, files):
    def fail(settings):
        raise RuntimeError("a fault")

    monkeypatch.setattr(demo, "load_target", fail)
    arguments = ["--target", ready_hf.tiny_target_path(), "--prompts-file", str(files / "good.jsonl")]
    with pytest.raises(RuntimeError, match="a fault"):
        main(["demo", *arguments])


def test_the_module_is_the_same_command():
    command = [sys.executable, "-P", "-m", "ready_hf.demo", "--prompts", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ready-hf: --prompts must be at least 1, got 0\n"


def changed(folder, source, **fields):
    """A copy of a model's folder with other fields in its configuration."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 99}, "`block_size` must be 2 to 31, got 99"),
        ({"block_size": "8"}, "expected int, got str"),
        ({"reader_rank": 7}, "reader.up_proj.weight has shape"),
        ({"state_layer_ids": None}, "belongs to no module: reader.query"),
    ],
    ids=str,
)
def test_a_drafter_folder_that_is_not_as_it_should_be_is_one_line(fields, message, tmp_path, capsys):
    folder = changed(tmp_path / "drafter", ready_hf.small_drafter_path(), **fields)
    code, out, err = run(capsys, "demo", "--drafter", folder)
    assert (code, out) == (2, "")
    assert "cannot be used" in err
    assert message in err
    assert err.count("\n") == 1


def test_a_target_folder_that_is_not_as_it_should_be_is_one_line(tmp_path, capsys):
    tiny = ready_hf.tiny_target_path()
    other_size = changed(tmp_path / "size", tiny, vocab_size=100)
    more_layers = changed(tmp_path / "more", tiny, num_hidden_layers=7, layer_types=["linear_attention"] * 7)
    no_tokenizer = changed(tmp_path / "none", tiny)
    for file in (tmp_path / "none").glob("tokenizer*"):
        file.write_text("{}")
    messages = {other_size: "do not have the shapes", more_layers: "its weights lack", no_tokenizer: "KeyError"}
    for folder, message in messages.items():
        code, out, err = run(capsys, "demo", "--target", folder)
        assert (code, out) == (2, "")
        assert f"{folder} cannot be used" in err
        assert message in err
        assert err.count("\n") == 1


def test_more_tokens_than_the_context_are_refused(capsys):
    code, _, err = run(capsys, "demo", "--max-new-tokens", str(10**12))
    assert code == 2
    assert "is more than the target's context of 4096" in err


def test_an_interrupt_that_leaves_nothing_to_report_is_said(monkeypatch, capsys):
    def interrupted(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("ready_hf.cli.run_verify", interrupted)
    assert main(["verify"]) == 130
    assert capsys.readouterr().err == "ready-hf: interrupted\n"
