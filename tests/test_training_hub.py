"""What a training uploads and reports: the folder on the Hub, the card, Tensorboard, Trackio, the terminal."""

import fnmatch
import json
import shutil
import sqlite3
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModel
from transformers.integrations import is_trackio_available

from ready_hf import ReadyDrafterModel, hub
from support import drafter_for, random_prompt, tiny_target


pytest.importorskip("accelerate")
import transformers.trainer  # noqa: E402

from ready_hf.training import ReadyTrainer, ReadyTrainingArguments  # noqa: E402


RECOMPUTING = "activation_checkpointing"
if not hasattr(ReadyTrainingArguments, RECOMPUTING):  # its name in older releases
    RECOMPUTING = "gradient_checkpointing"
FILES = ["README.md", "config.json", "model.safetensors", "ready.py", "training_args.bin"]


class RecordingApi:
    """Stands in for `HfApi`, the border to the network: keeps calls, and copies of what would be uploaded."""

    def __init__(self, folder):
        self.folder, self.uploads, self.created = folder, [], []

    def __call__(self):
        return self

    def create_repo(self, repo_id, **kwargs):
        self.created.append((repo_id, kwargs["private"]))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"someone/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns=(), run_as_future=False, **kwargs):
        copy = self.folder / str(len(self.uploads))
        for path in Path(folder_path).rglob("*"):
            name = path.relative_to(folder_path).as_posix()
            if path.is_file() and not any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy / name)
        self.uploads.append((repo_id, kwargs["commit_message"], copy))
        done = Future()
        done.set_result(copy)
        return done if run_as_future else copy


@pytest.fixture
def api(monkeypatch, tmp_path):
    recording = RecordingApi(tmp_path / "uploaded")
    monkeypatch.setattr(transformers.trainer, "hf_api", recording)
    return recording


def trainer_for(folder, target=None, **options):
    target = target or tiny_target("qwen3_5")
    options = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "num_anchors": 3,
        **options,
    }
    rows = [{"input_ids": row} for row in random_prompt(24, batch=4, seed=3)]
    arguments = ReadyTrainingArguments(str(folder), **options)
    return ReadyTrainer(drafter_for(target), arguments, target=target, train_dataset=rows, eval_dataset=rows)


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_upload_of_a_training_is_a_whole_drafter(api, tmp_path):
    """While it trains and at its end: configuration, weights, shim and our card."""
    out = tmp_path / "drafter"
    trainer = trainer_for(out, push_to_hub=True, save_strategy="steps", save_steps=1)
    (out / "_on_policy").mkdir(parents=True)
    (out / "_on_policy" / "shard.arrow").write_text("text of somebody")
    trainer.train()
    trainer.push_to_hub()
    assert api.created == [("drafter", None)]
    assert [message for _, message, _ in api.uploads][-1] == "End of training"
    assert len(api.uploads) == 3
    for repo_id, _, copy in api.uploads:
        assert repo_id == "someone/drafter"
        assert names(copy) == FILES
        card = ModelCard.load(copy / "README.md")
        hub.check_card(card)
        assert 'AutoModel.from_pretrained("someone/drafter"' in card.text
        assert card.data.library_name == "transformers"
        assert "generated_from_trainer" not in card.data.tags  # transformers' plain card has it
        assert type(AutoModel.from_pretrained(copy)) is ReadyDrafterModel
    first, *_, last = (load_file(copy / "model.safetensors") for _, _, copy in api.uploads)
    assert any(not torch.equal(first[name], last[name]) for name in last)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(last[name], value), name


def test_fields_and_a_card_of_ones_own(api, tmp_path):
    trainer = trainer_for(tmp_path / "drafter", push_to_hub=True, hub_model_id="me/mine", hub_private_repo=True)
    assert api.created == [("me/mine", True)]
    given = {"license": "mit", "tags": ["mine"], "finetuned_from": "owner/target", "dataset_tags": "owner/text"}
    trainer.push_to_hub(**given)
    data = ModelCard.load(api.uploads[0][2] / "README.md").data
    assert (data.base_model, data.license, data.datasets) == ("owner/target", "mit", ["owner/text"])
    assert "mine" in data.tags
    trainer.push_to_hub()  # says nothing, so the card stays
    assert ModelCard.load(api.uploads[1][2] / "README.md").data.license == "mit"
    (tmp_path / "drafter" / "README.md").write_text("---\ntags: [generated_from_trainer]\n---\n# Plain\n")
    trainer.push_to_hub()
    assert "generated_from_trainer" not in ModelCard.load(api.uploads[2][2] / "README.md").data.tags
    with pytest.raises(ValueError, match="license"):
        trainer.push_to_hub(license="My Own")


def test_the_target_of_the_hub_is_named_and_a_folder_is_not(tmp_path, monkeypatch):
    target = SimpleNamespace(name_or_path="owner/target")
    assert hub.name_on_hub(target) == "owner/target"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "target").mkdir(parents=True)
    assert hub.name_on_hub(target) is None
    for name in ("", None, "/data/models/target", "a b/c", "target"):
        assert hub.name_on_hub(SimpleNamespace(name_or_path=name)) is None


def scalars(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_loss_and_acceptance_by_position(tmp_path):
    pytest.importorskip("tensorboard")
    trainer = trainer_for(tmp_path, report_to="tensorboard", eval_strategy="steps", eval_steps=1)
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    found, history = scalars(folder), trainer.state.log_history
    for tag, name in [("train/loss", "loss"), ("eval/tau", "eval_tau")] + [
        (f"eval/acceptance_{k}", f"eval_acceptance_{k}") for k in range(1, 7)
    ]:
        wanted = [(entry["step"], entry[name]) for entry in history if name in entry]
        assert [step for step, _ in found[tag]] == [step for step, _ in wanted] == [1, 2]
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in wanted], rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not is_trackio_available(), reason="trackio is optional: it brings a web server")
def test_trackio_has_them_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # is read when trackio is imported
    options = {"project": "drafters", "run_name": "first", "eval_strategy": "steps", "eval_steps": 1}
    trainer_for(tmp_path / "out", report_to="trackio", **options).train()
    with sqlite3.connect(tmp_path / "drafters.db") as database:
        metrics = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics")]
    assert {"train/loss", "eval/tau", "eval/acceptance_1", "eval/acceptance_6"} <= set().union(*metrics)


@pytest.mark.parametrize("bars", [True, False], ids=["with bars", "without"])
def test_the_terminal_shows_accepted_length_by_position_every_n_steps(tmp_path, capsys, bars):
    trainer_for(tmp_path, eval_strategy="steps", eval_steps=1, disable_tqdm=not bars).train()
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "eval_tau" in line]
    assert len(lines) == 2
    for line in lines:
        assert all(f"'eval_acceptance_{k}'" in line for k in range(1, 7))


def gradients_of(folder, **options):
    trainer = trainer_for(folder, max_steps=1, max_grad_norm=0.0, learning_rate=0.0, **options)
    found = {}
    hook = {
        n: p.register_post_accumulate_grad_hook(lambda q, n=n: found.__setitem__(n, q.grad.clone()))
        for n, p in trainer.model.named_parameters()
    }
    trainer.train()
    assert hook.keys() == found.keys()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], found, trainer


def test_recomputed_activations_change_no_gradient(tmp_path):
    (loss, plain, _), (again, recomputed, trainer) = (
        gradients_of(tmp_path, **options) for options in ({}, {RECOMPUTING: True})
    )
    assert all(layer.gradient_checkpointing for layer in trainer.model.layers)
    assert again == pytest.approx(loss, rel=1e-6)
    for name, value in plain.items():
        assert float((recomputed[name] - value).norm()) <= 1e-6 * float(value.norm()), name  # some are below 1e-4


def test_bf16_computes_in_bfloat16_and_keeps_float32(tmp_path):
    """Weights, gradients and the optimizer's averages; a step smaller than bfloat16 can hold is not lost."""
    loss, plain, _ = gradients_of(tmp_path)
    rounded, gradients, trainer = gradients_of(tmp_path, bf16=True)
    assert rounded != loss
    assert rounded == pytest.approx(loss, rel=2e-2)
    assert all(value.dtype == torch.float32 for value in gradients.values())
    tiny = trainer_for(tmp_path, bf16=True, learning_rate=1e-6, max_steps=2)
    before = {name: p.detach().clone() for name, p in tiny.model.named_parameters()}
    tiny.train()
    for name, parameter in tiny.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert all(value.dtype == torch.float32 for value in tiny.optimizer.state[parameter].values())
        assert not torch.equal(parameter, before[name]), name
        assert torch.allclose(parameter, before[name], atol=1e-5), name
