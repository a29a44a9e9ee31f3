"""Saved folders and pushed repositories: what is in them, and that a drafter comes back from them by every route."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.utils.hub
from huggingface_hub import EvalResult, ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

import ready_hf
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel, hub
from support import drafter_for, random_prompt, trained_target, trained_tokenizer


WRITTEN = ["README.md", "config.json", "model.safetensors", "ready.py"]

# A process that has not heard of ready_hf: every folder must load, save and load again, and give the same logits.
FRESH = """
import json, sys
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

assert "ready_hf" not in sys.modules
folders, inputs = sys.argv[2:], load_file(sys.argv[1])
try:
    AutoModel.from_pretrained(folders[0])
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("loaded without trust_remote_code")
assert "ready_hf" not in sys.modules

def logits(drafter):
    drafter.base_logits, ids = lambda hidden, head: hidden @ inputs["head"].T, inputs["ids"]
    with torch.no_grad():
        hidden = drafter(inputs["noise"], inputs["context"], states=inputs["states"]).last_hidden_state
        return torch.stack([x.sum(-1) if x.dim() == 3 else x for x in drafter.draft_logits(hidden, ids, None)])

for folder in folders:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(drafter).__module__ == "ready_hf.modeling_ready", type(drafter)
    assert type(config).__module__ == "ready_hf.configuration_ready", type(config)
    drafter.save_pretrained(folder + "-again")
    again = AutoModel.from_pretrained(folder + "-again", trust_remote_code=True)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    for got in (logits(drafter), logits(again)):  # weights elsewhere in memory may be multiplied in another order
        error, size = (x.flatten(1).norm(dim=1) for x in (got - inputs["want"], inputs["want"]))
        assert (error < 1e-5 * size).all(), (folder, error, size)
    print(f"\\nloaded {folder}")
"""


def new_drafter(**options):
    return drafter_for(trained_target(), **{"reader_rank": 8, "reader_query_rank": 4, "block_size": 4} | options)


class RecordingApi:
    """Stands in for `HfApi`, the border to the network: keeps calls and a copy of what would be uploaded."""

    def __init__(self, folder, *, has_card=False):
        self.calls, self.folder, self.has_card = [], folder, has_card

    def __call__(self, token=None):
        self.calls.append(("HfApi", token))
        return self

    def create_repo(self, repo_id, **kwargs):
        self.calls.append(("create_repo", repo_id, kwargs))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"someone/{repo_id}")

    def create_branch(self, repo_id, **kwargs):
        self.calls.append(("create_branch", repo_id, kwargs))

    def file_exists(self, repo_id, filename, **kwargs):
        self.calls.append(("file_exists", repo_id, filename))
        return self.has_card

    def upload_folder(self, *, folder_path, ignore_patterns, **kwargs):
        self.calls.append(("upload_folder", kwargs["repo_id"], kwargs))
        shutil.copytree(folder_path, self.folder, ignore=shutil.ignore_patterns(*ignore_patterns or ()))
        return "the commit"

    @property
    def names(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def api(monkeypatch, tmp_path):
    recording = RecordingApi(tmp_path / "uploaded")
    monkeypatch.setattr(hub, "HfApi", recording)
    return recording


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))


def test_a_saved_folder(tmp_path):
    drafter = new_drafter()
    drafter.save_pretrained(tmp_path)
    assert files(tmp_path) == ["config.json", "model.safetensors", "ready.py"]
    code = (tmp_path / "ready.py").read_text()
    assert code.count("\n") == 1
    assert code.startswith("from ready_hf import ReadyDrafterConfig, ReadyDrafterModel")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {"AutoConfig": "ready.ReadyDrafterConfig", "AutoModel": "ready.ReadyDrafterModel"}
    assert config["architectures"] == ["ReadyDrafterModel"]
    assert config["vocab_size"] == trained_target().config.get_text_config().vocab_size
    assert not [value for value in config.values() if isinstance(value, dict) and "model_type" in value]  # flat


def test_saving_again_writes_the_same_bytes(tmp_path):
    new_drafter(sliding_window=16, confidence_threshold=0.5).save_pretrained(tmp_path / "0")
    for i in range(2):
        AutoModel.from_pretrained(tmp_path / str(i)).save_pretrained(tmp_path / str(i + 1))
    for name in files(tmp_path / "0"):
        assert (tmp_path / "2" / name).read_bytes() == (tmp_path / "0" / name).read_bytes(), name
    AutoConfig.from_pretrained(tmp_path / "0").save_pretrained(tmp_path / "alone")
    assert files(tmp_path / "alone") == ["config.json", "ready.py"]
    assert (tmp_path / "alone" / "config.json").read_bytes() == (tmp_path / "0" / "config.json").read_bytes()


def test_loading_with_the_package_asks_nothing(tmp_path, monkeypatch):
    def refuse(*args):
        raise AssertionError("a question was asked")

    monkeypatch.setattr("builtins.input", refuse)
    drafter = new_drafter()
    drafter.save_pretrained(tmp_path)
    for kwargs in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
        assert type(AutoConfig.from_pretrained(tmp_path, **kwargs)) is ReadyDrafterConfig
        loaded = AutoModel.from_pretrained(tmp_path, **kwargs)
        assert type(loaded) is ReadyDrafterModel
        assert not loaded.training
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
    assert type(AutoModel.from_config(loaded.config)) is ReadyDrafterModel


def test_source_is_never_copied(tmp_path):
    ReadyDrafterConfig.register_for_auto_class()
    ReadyDrafterModel.register_for_auto_class("AutoModel")
    new_drafter().save_pretrained(tmp_path)
    assert files(tmp_path) == ["config.json", "model.safetensors", "ready.py"]


def test_a_checkpoint_in_pieces(tmp_path):
    drafter = new_drafter()
    drafter.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModel.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.timeout(200)
def test_a_process_without_the_package_loads_what_was_saved_and_pushed(tmp_path, api):
    drafter = new_drafter()
    drafter.save_pretrained(tmp_path / "saved")
    assert drafter.push_to_hub("someone/drafter", base_model="someone/target") == "the commit"
    assert files(api.folder) == WRITTEN

    config, generator = drafter.config, torch.Generator().manual_seed(0)
    states = (1, 1, len(config.state_layer_ids), *config.state_shape)
    shapes = {
        "noise": (1, config.block_size, config.hidden_size),
        "context": (1, 6, len(config.target_layer_ids) * config.hidden_size),
        "states": states,
        "head": (config.vocab_size, config.hidden_size),
    }
    inputs = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    inputs["ids"] = torch.randint(config.vocab_size, (1, config.block_size), generator=generator)
    with torch.no_grad():
        hidden = drafter(inputs["noise"], inputs["context"], states=inputs["states"]).last_hidden_state
        logits = hidden @ inputs["head"].T
        logits = logits + drafter.markov_head.markov_w2(drafter.markov_head(hidden, inputs["ids"])).float()
        inputs["want"] = torch.stack([logits.sum(-1), drafter.confidence_logits(hidden, inputs["ids"])])
    save_file(inputs, tmp_path / "inputs.safetensors")

    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FRESH, tmp_path / "inputs.safetensors", tmp_path / "saved", api.folder]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("loaded") for line in done.stdout.splitlines()) == 2
    for folder in (tmp_path / "saved", api.folder):
        again = Path(f"{folder}-again")
        assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
        assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_pushing_hands_one_folder_to_the_client(api):
    drafter = new_drafter()
    commit = hub.push_to_hub(
        drafter,
        "drafter",
        base_model="someone/target",
        license="apache-2.0",
        private=True,
        token="a token",
        revision="trained",
        commit_message="Trained",
    )
    assert commit == "the commit"
    assert api.names == ["HfApi", "create_repo", "create_branch", "upload_folder"]
    assert api.calls[0] == ("HfApi", "a token")
    assert api.calls[1] == ("create_repo", "drafter", {"private": True, "exist_ok": True})
    repo_id, upload = api.calls[3][1:]
    assert repo_id == "someone/drafter"
    assert (upload["commit_message"], upload["revision"]) == ("Trained", "trained")
    assert files(api.folder) == WRITTEN
    saved = load_file(api.folder / "model.safetensors")
    assert saved.keys() == drafter.state_dict().keys()
    text = (api.folder / "README.md").read_text(encoding="utf-8")
    assert 'AutoModel.from_pretrained("someone/drafter"' in text  # the full name, which the Hub has told


@pytest.mark.parametrize("has_card", [False, True])
def test_a_card_in_the_repository_is_kept_if_nothing_is_said(api, has_card):
    api.has_card = has_card
    new_drafter().push_to_hub("someone/drafter")
    assert files(api.folder) == [name for name in WRITTEN if name != "README.md" or not has_card]


def test_a_card_in_the_repository_is_replaced_by_what_is_said(api):
    api.has_card = True
    new_drafter().push_to_hub("someone/drafter", tags=["mine"])
    assert "mine" in ModelCard.load(api.folder / "README.md").data.tags


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained", "config"])
def test_the_pushes_of_transformers_carry_the_shim(tmp_path, monkeypatch, way):
    """Its own code, not our `push_to_hub`, down to the files of its commit; the card is transformers' plain one."""
    committed = []

    class Api(RecordingApi):
        def create_commit(self, repo_id, operations, **kwargs):
            committed.extend(operation.path_in_repo for operation in operations)

    for module in (transformers.utils.hub, transformers.modeling_utils):
        monkeypatch.setattr(module, "hf_api", Api(tmp_path), raising=False)
    if way == "push_to_hub":
        transformers.PreTrainedModel.push_to_hub(new_drafter(), "someone/drafter")
    elif way == "save_pretrained":
        new_drafter().save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="someone/drafter")
    else:
        new_drafter().config.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="someone/drafter")
    assert set(committed) == set(WRITTEN) - ({"model.safetensors"} if way == "config" else set())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"base_model": "/data/models/target"}, "base_model"),
        ({"license": "Apache License 2.0"}, "license"),
        ({"datasets": ["a data set"]}, "datasets"),
        ({"tags": ["two\nlines"]}, "tags"),
        ({"tags": [""]}, "tags"),
        ({"language": 3}, "language"),
        ({"repo_id": "some one/drafter"}, "repo_id"),
        ({"repo_id": ""}, "repo_id"),
        ({"card": ModelCard("---\nlicense: mit\n---\n# A card\n")}, "library_name.*pipeline_tag.*tags"),
        ({"card": ModelCard("no metadata at all")}, "library_name"),
    ],
)
def test_what_is_wrong_is_found_before_any_call(api, tmp_path, wrong, named):
    arguments = {"repo_id": "someone/drafter", "base_model": "someone/target"} | wrong
    with pytest.raises(ValueError, match=named):
        hub.push_to_hub(new_drafter(), arguments.pop("repo_id"), **arguments)
    assert api.calls == []


def test_everything_that_is_wrong_is_named_at_once():
    with pytest.raises(ValueError, match="base_model.*datasets.*tags.*license"):
        hub.drafter_card(
            new_drafter(), "someone/drafter", base_model="a b", datasets="c d", tags="\n", license="My Own"
        )
    with pytest.raises(TypeError, match=r"EvalResult, got dict: \{'accuracy': 1\}"):
        hub.drafter_card(new_drafter(), "someone/drafter", base_model=None, eval_results=[{"accuracy": 1}])
    with pytest.raises(TypeError, match="`reader_check` must be what `check_reader` returns, got str"):
        hub.drafter_card(new_drafter(), "someone/drafter", base_model=None, reader_check="it helps")
    card = hub.drafter_card(new_drafter(), "someone/drafter", base_model=None)
    card.data.eval_results, card.data.model_name = [result(float("nan"))], "drafter"
    with pytest.raises(ValueError, match="metric 'accepted_length' is nan"):
        hub.check_card(card)


def test_an_invalid_card_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="library_name"):
        hub.save_to_folder(new_drafter(), tmp_path / "folder", ModelCard("# Nothing\n"))
    assert not (tmp_path / "folder").exists()


def result(value):
    return EvalResult(
        task_type="text-generation",
        dataset_type="openai/gsm8k",
        dataset_name="GSM8K",
        metric_type="accepted_length",
        metric_value=value,
    )


def test_card_of_a_drafter_with_a_reader():
    card = hub.drafter_card(
        new_drafter(state_layer_ids=[0]), "someone/drafter", base_model="Qwen/Qwen3.5-0.8B", license="apache-2.0"
    )
    data = card.data.to_dict()
    assert data == {
        "base_model": "Qwen/Qwen3.5-0.8B",
        "base_model_relation": "adapter",
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "dspark", "ready"],
    }
    assert "states of the target's layers 0 are read" in card.text
    assert "has not been checked" in card.text
    assert "floating-point ties" in card.text


def test_card_of_a_drafter_without_a_reader():
    card = hub.drafter_card(new_drafter(reader=False), "someone/drafter", base_model=None)
    assert card.data.tags == ["speculative-decoding", "draft-model", "dspark"]
    assert card.data.base_model is None
    assert "base_model_relation" not in card.data.to_dict()
    assert "No recurrent states are read" in card.text
    assert "##" in card.text
    assert not any(heading in card.text for heading in ("## Results", "## Training data", "has not been checked"))


def test_card_tells_the_result_of_a_reader_check_as_it_is():
    found = SimpleNamespace(verdict="the reader does not help yet: +0.01 [-0.02, +0.04].", table=lambda: "states  x")
    card = hub.drafter_card(
        new_drafter(),
        "someone/drafter",
        base_model=None,
        reader_check=found,
        eval_results=[result(2.5)],
        measured="a CPU, float32, 20 prompts",
    )
    assert found.verdict in card.text
    assert "```\nstates  x\n```" in card.text
    assert "| GSM8K | accepted_length | 2.5 |" in card.text
    assert "a CPU, float32, 20 prompts" in card.text
    assert "has not been checked" not in card.text


def test_the_code_of_a_card_runs(tmp_path, capsys):
    drafter = new_drafter()
    card = hub.drafter_card(drafter, "someone/drafter", base_model="someone/target")
    hub.save_to_folder(drafter, tmp_path, card)
    assert files(tmp_path) == WRITTEN
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    assert code.startswith("import ready_hf")
    code = code.replace("someone/target", ready_hf.tiny_target_path()).replace("someone/drafter", str(tmp_path))
    with ready_hf.record_stats() as stats:
        exec(code, {})
    assert stats.calls == 1
    inputs = trained_tokenizer()("The quick brown fox", return_tensors="pt")
    target = trained_target()
    assert (
        capsys.readouterr().out.strip()
        == trained_tokenizer().decode(target.generate(**inputs, max_new_tokens=64)[0]).strip()
    )


def test_a_drafter_drafts_the_same_after_a_round_trip(tmp_path):
    drafter, target, prompt = new_drafter(), trained_target(), random_prompt(8)
    drafter.save_pretrained(tmp_path)
    drafted = []
    for model in (drafter, AutoModel.from_pretrained(tmp_path)):
        with ready_hf.record_stats() as stats:
            target.generate(prompt, assistant_model=model, max_new_tokens=24, do_sample=False)
        drafted.append((stats.rounds, stats.drafted_by_position, stats.accepted_by_position))
    assert drafted[0] == drafted[1]
