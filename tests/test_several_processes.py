"""Two real processes train as one does: anchors, loss, gradients, weights, evaluation; with DDP and with FSDP."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ready_hf import ReadyDrafterModel
from ready_hf.checkpoints import last_complete_checkpoint
from ready_hf.sharding import check_sharding
from support import drafter_for, tiny_target


pytest.importorskip("accelerate")
from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402
from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: E402
from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: E402

from train_worker import train  # noqa: E402


CONFIGS = Path(__file__).parents[1] / "examples" / "accelerate"

pytestmark = pytest.mark.slow
TWO = {"per_device_train_batch_size": 2}
STAGES = {"freeze_backbone_steps": 1, "reader_learning_rate": 3e-2}
RUNS = {
    "halves": TWO,
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_logits_per_chunk": 1},
    "faulty": TWO | {"fault": True},
    "sharded": TWO | {"fsdp": True, "max_logits_per_chunk": 1, "save_strategy": "steps", "save_steps": 1},
    "resumed": TWO | {"fsdp": True, "resume": "sharded/checkpoint-2"},
    "stages": TWO | {"fsdp": True, "gradient_accumulation_steps": 2} | STAGES,
    "spoiled": TWO | {"fsdp": True, "spoil": True},
    "half": TWO | {"fsdp": True, "half": True},
}


def launch(folder, runs):
    """Trains in two processes; what the first of them found, by the names of the runs."""
    worker = Path(__file__).with_name("train_worker.py")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(worker), str(folder), json.dumps(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(worker.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: torch.load(folder / f"{name}.pt") | {"folder": folder / name} for name in runs}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One process with batches of 4."""
    return train(tmp_path_factory.mktemp("whole"), per_device_train_batch_size=4)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("runs"), RUNS)


def difference(one, other, what):
    """Largest difference of tensors by name, relative to the largest value of each."""
    assert one.keys() == other.keys(), what
    return max(float((one[n] - other[n]).abs().max() / one[n].abs().max().clamp_min(1e-6)) for n in one)


def assert_alike(one, other, tolerance=1e-4):
    assert other["losses"] == pytest.approx(one["losses"], rel=tolerance)
    assert len(one["gradients"]) == len(other["gradients"]) > 1
    for step, (gradients, others) in enumerate(zip(one["gradients"], other["gradients"], strict=True)):
        assert difference(gradients, others, step) < tolerance
    assert difference(one["weights"], other["weights"], "weights") < tolerance
    for name, value in one["metrics"].items():
        if not name.endswith(("runtime", "per_second", "epoch")):
            assert other["metrics"][name] == pytest.approx(value, rel=tolerance), name


@pytest.mark.parametrize("run", ["halves", "accumulated", "sharded"])
def test_two_processes_learn_what_one_does(whole, found, run):
    """Also the evaluation: 5 rows are filled up to 16 for two processes, and still count once."""
    assert (whole["world"], found[run]["world"]) == (1, 2)
    assert found[run]["sharded"] is (run == "sharded")
    assert_alike(whole, found[run])


def test_dividing_in_every_process_would_be_noticed(whole, found):
    faulty = found["faulty"]["gradients"][0]
    assert difference(whole["gradients"][0], faulty, "gradients") > 0.02


def test_a_sharded_training_saves_whole_drafters_and_goes_on(whole, found, caplog):
    folder = found["sharded"]["folder"]
    with caplog.at_level(logging.WARNING, "ready_hf"):
        assert last_complete_checkpoint(folder).name == "checkpoint-3"
    assert not caplog.text
    for path in (folder, folder / "checkpoint-3"):
        saved = dict(ReadyDrafterModel.from_pretrained(path).requires_grad_(False).named_parameters())
        assert difference(found["sharded"]["weights"], saved, path) == 0
    assert found["resumed"]["losses"][-1] == pytest.approx(whole["losses"][-1], rel=1e-4)
    assert len(found["resumed"]["gradients"]) == 1  # the third step alone
    assert difference(whole["weights"], found["resumed"]["weights"], "weights") < 1e-4


def test_stages_of_a_sharded_training(found, tmp_path):
    """Gradients of a reader at 3e-2 differ by 4e-6, 7e-5 and 1.3e-4 in three steps: rounding that grows."""
    assert_alike(train(tmp_path, per_device_train_batch_size=8, **STAGES), found["stages"], tolerance=1e-3)


def test_a_gradient_that_is_not_finite_in_one_shard_stops_the_step_of_all(found):
    spoiled = found["spoiled"]
    assert spoiled["skipped"] == 1
    assert all(bool(value.isfinite().all()) for value in spoiled["weights"].values())


def test_a_part_without_gradients_in_one_shard_is_no_fault(found):
    assert {name: run["untouched"] for name, run in found.items()} == dict.fromkeys(RUNS, [])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"fsdp_plugin": {"fsdp_version": 1, "state_dict_type": "FULL_STATE_DICT"}}, "take FSDP 2"),
        ({"fsdp_plugin": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}, "take FULL_STATE_DICT"),
    ],
    ids=["version 1", "sharded checkpoints"],
)
def test_sharding_that_cannot_train_a_drafter_is_refused(state, message):
    plugin = FullyShardedDataParallelPlugin(**state["fsdp_plugin"])
    with pytest.raises(ValueError, match=message):
        check_sharding(SimpleNamespace(fsdp_plugin=plugin))


def test_accelerates_own_loader_reads_the_configurations():
    for name, kind in (("one_node", "MULTI_GPU"), ("fsdp", "FSDP")):
        config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
        assert config.distributed_type == kind
        assert config.mixed_precision == "bf16"
    assert config.fsdp_config["fsdp_version"] == 2


def test_the_configuration_of_fsdp_is_one_that_trains(monkeypatch):
    """By the way that `accelerate launch` goes: file, arguments, environment, plugin."""
    arguments = launch_command_parser().parse_args(["--config_file", str(CONFIGS / "fsdp.yaml"), "train.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    check_sharding(SimpleNamespace(fsdp_plugin=plugin))
    drafter = drafter_for(tiny_target("qwen3_5"))
    plugin.set_auto_wrap_policy(drafter)
    wrapped = [module for module in drafter.modules() if plugin.auto_wrap_policy(module, False, 0)]
    assert wrapped == list(drafter.layers)
