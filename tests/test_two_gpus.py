"""On two CUDA devices: one process whose target lies on both, and two processes with a device each.

Without them, a target of which a part stays on the disk goes through the same hooks of accelerate.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ready_hf
from ready_hf import ReadyDrafterModel
from support import trained_target


pytest.importorskip("accelerate")

from train_worker import train  # noqa: E402


ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "examples" / "accelerate"
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def on_two_gpus(test):
    for mark in TWO_GPUS:
        test = mark(test)
    return test


def launch(*command, config="one_node", options=()):
    """Two processes by `accelerate launch` and one of the configurations; what they printed."""
    paths = [ROOT / "tests", Path(ready_hf.__file__).parents[1], os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
    }
    start = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    start += ["--num_processes", "2", "--main_process_port", "0", *options]
    whole = [sys.executable, *start, *map(str, command)]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=200)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-6000:]
    return printed


def difference(one, other):
    """Largest difference of tensors by name, relative to the largest value of each."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max() / one[n].abs().max().clamp_min(1e-6)) for n in one)


def assert_alike(one, other, losses, tensors):
    """Within relative tolerances: of losses and evaluations, and of gradients and weights."""
    assert other["losses"] == pytest.approx(one["losses"], rel=losses)
    for name in ("eval_loss", "eval_tau"):
        assert other["metrics"][name] == pytest.approx(one["metrics"][name], rel=losses), name
    assert len(one["gradients"]) == len(other["gradients"]) == len(one["losses"])
    for step, (gradients, others) in enumerate(zip(one["gradients"], other["gradients"], strict=True)):
        assert difference(gradients, others) < tensors, step
    assert difference(one["weights"], other["weights"]) < tensors


def save_target(folder, is_tied):
    """The trained fixture, or the same with a head of its own."""
    target = copy.deepcopy(trained_target())
    if not is_tied:
        target.config.tie_word_embeddings = False
        target.lm_head.weight = torch.nn.Parameter(1.01 * target.get_input_embeddings().weight.detach())
    target.save_pretrained(folder)


def placed(folder, first, second, head):
    """The target in `folder`: embeddings and the first half of the layers on one device, the rest on another."""
    devices = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": head}
    devices |= {f"model.layers.{i}": first if i < 3 else second for i in range(6)}
    options = {"device_map": devices, "offload_folder": str(folder / "offloaded")}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@pytest.mark.parametrize(
    ("first", "second", "head"),
    [
        pytest.param("cpu", "disk", "cpu", id="cpu and disk"),
        pytest.param(0, 1, 0, id="two GPUs, tied head", marks=TWO_GPUS),  # it lies where the embeddings do
        pytest.param(0, 1, 1, id="two GPUs, head on the second", marks=TWO_GPUS),
    ],
)
def test_a_target_spread_over_two_gpus_trains_the_same_drafter(tmp_path, first, second, head):
    """As `device_map="auto"` spreads a target that is too large for one."""
    save_target(tmp_path / "target", is_tied=head == first)
    options = {"use_cpu": first == "cpu", "per_device_train_batch_size": 4}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    expected = train(tmp_path / "whole", target=whole, **options)
    spread = placed(tmp_path / "target", first, second, head)
    places = {str(parameter.device) for parameter in spread.parameters()}
    found = train(tmp_path / "spread", target=spread, **options)
    assert {str(parameter.device) for parameter in spread.parameters()} == places
    assert places == ({"cpu", "meta"} if first == "cpu" else {"cuda:0", "cuda:1"})
    assert found["device"] == ("cpu" if first == "cpu" else "cuda")
    assert (found["world"], len(found["losses"])) == (1, 3)
    assert_alike(expected, found, losses=1e-4, tensors=1e-3)


def test_a_target_whose_head_is_offloaded_is_refused(tmp_path):
    save_target(tmp_path, is_tied=False)
    with pytest.raises(ValueError, match="output head without a device"):
        train(tmp_path / "spread", target=placed(tmp_path, "cpu", "disk", "disk"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process on the first device, with batches of 4."""
    return train(tmp_path_factory.mktemp("one"), use_cpu=False, max_steps=2, per_device_train_batch_size=4)


@on_two_gpus
@pytest.mark.parametrize("config", ["one_node", "fsdp"])
def test_two_processes_equal_one(one, tmp_path, config):
    """In float32, whatever the configuration says: in bfloat16 every order of a sum has a result of its own."""
    runs = {"two": {"use_cpu": False, "max_steps": 2, "per_device_train_batch_size": 2}}
    worker = ROOT / "tests" / "train_worker.py"
    launch(worker, tmp_path, json.dumps(runs), config=config, options=["--mixed_precision", "no"])
    two = torch.load(tmp_path / "two.pt")
    assert (one["world"], two["world"]) == (1, 2)
    assert one["device"] == two["device"] == "cuda"
    assert two["sharded"] is (config == "fsdp")
    assert_alike(one, two, losses=1e-3, tensors=1e-2)
    saved = dict(ReadyDrafterModel.from_pretrained(tmp_path / "two").requires_grad_(False).named_parameters())
    assert difference(two["weights"], saved) == 0


@on_two_gpus
@pytest.mark.parametrize("config", ["one_node", "fsdp"])
def test_ready_hf_train_on_two_gpus(tmp_path, config):
    """The documented command, in bfloat16 as the configurations say, on text as it is written."""
    lines = [{"prompt": f"def f{i}(x):\n", "completion": f"    return x + {i}\n" * 12} for i in range(18)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["-m", "ready_hf.cli", "train", "--device", "cuda", "--target", ready_hf.tiny_target_path()]
    command += ["--data", tmp_path / "rows.jsonl", "--as-written", "--max-length", "64", "--held-out", "2"]
    command += ["--output-dir", tmp_path / "drafter", "--max_steps", "4", "--per_device_train_batch_size", "2"]
    printed = launch(*command, config=config)
    assert printed.count("16 rows, 4 steps, on 2 held-out rows") == 1  # by the first process alone
    drafter = ReadyDrafterModel.from_pretrained(tmp_path / "drafter")
    assert all(bool(parameter.isfinite().all()) for parameter in drafter.parameters())
    assert any(bool(parameter.any()) for name, parameter in drafter.named_parameters() if "markov_w2" in name)
