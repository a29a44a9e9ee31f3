"""A training that is killed in the middle of saving loses the steps since its last complete checkpoint, no more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from ready_hf import ReadyDrafterModel
from ready_hf.checkpoints import incomplete, last_complete_checkpoint
from support import drafter_for, tiny_target


pytest.importorskip("accelerate")
from test_schedules import trainer_for  # noqa: E402


STEPS, KILLED_AT = 5, 4
SIZE = 12_000  # of the MLP: a checkpoint of 60 MB, which takes long enough to write


def trainer(folder, callbacks=None, seed=0):
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target, seed=seed, intermediate_size=SIZE, num_hidden_layers=2)
    options = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    return trainer_for(folder, drafter, target, callbacks, **options)


def killed_when(folder: Path, name: str) -> None:
    """Trains in a process of its own, and kills it when a file of the fourth checkpoint has begun to be written."""
    code = f"from test_killed_training import trainer; trainer({str(folder)!r}).train()"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    file, deadline = folder / f"checkpoint-{KILLED_AT}" / name, time.monotonic() + 120
    while not file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.kill()
    assert process.wait() == -signal.SIGKILL


class Steps(TrainerCallback):
    def __init__(self):
        self.done = []

    def on_step_end(self, args, state, control, **kwargs):
        self.done.append(state.global_step)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_kill_while_saving_loses_no_complete_checkpoint(tmp_path):
    trainer(tmp_path / "straight").train()
    straight = ReadyDrafterModel.from_pretrained(tmp_path / "straight" / f"checkpoint-{STEPS}")
    for name in ("model.safetensors", "optimizer.pt"):
        folder = tmp_path / name
        killed_when(folder, name)
        assert incomplete(folder / f"checkpoint-{KILLED_AT}") is not None
        assert last_complete_checkpoint(folder).name == f"checkpoint-{KILLED_AT - 1}"

        steps = Steps()
        again = trainer(folder, [steps], seed=9)  # its own weights must not matter
        again.train(resume_from_checkpoint=True)
        assert steps.done == list(range(KILLED_AT, STEPS + 1))
        for value, other in zip(straight.parameters(), again.model.parameters(), strict=True):
            assert torch.allclose(value, other, atol=1e-6)
        assert incomplete(folder / f"checkpoint-{KILLED_AT}") is None  # written again
