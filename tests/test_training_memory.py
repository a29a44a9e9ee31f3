"""The estimate of a training step's memory: what can be counted is exact, the rest is measured in another process."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ready_hf.features import FrozenTarget
from ready_hf.training_memory import training_memory
from support import FAMILIES, drafter_for, random_prompt, tiny_target


pytest.importorskip("accelerate")
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments  # noqa: E402


EXAMPLES = Path(__file__).parent.parent / "examples"
SIZES = {"batch_size": 2, "row_length": 150, "num_anchors": 3}


def estimate(drafter, target, **options):
    return training_memory(drafter.config, target, **{**SIZES, **options})


def trainer_for(folder, target, drafter=None, **options):
    rows = [{"input_ids": row} for row in random_prompt(24, batch=8)]
    defaults = {"max_steps": 2, "num_anchors": 3, "per_device_train_batch_size": 4, "use_cpu": True}
    defaults |= {"save_strategy": "no", "disable_tqdm": True}
    arguments = ReadyTrainingArguments(str(folder), **defaults | options)
    return ReadyTrainer(drafter or drafter_for(target), arguments, target=target, train_dataset=rows)


@pytest.mark.parametrize("num_anchors", [3, 60], ids=["few", "many"])
@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "bamba"])
def test_what_can_be_counted_is_exact(family, num_anchors):
    target = tiny_target(family)
    drafter = drafter_for(target)
    found = estimate(drafter, target, num_anchors=num_anchors)
    assert found.drafter == found.gradients == sum(p.nbytes for p in drafter.parameters())
    assert found.optimizer == 2 * found.drafter
    assert found.target == sum(p.nbytes for p in target.parameters())
    anchors = torch.arange(1, 1 + 2 * num_anchors, 2).expand(2, -1)
    batch = FrozenTarget(target, drafter.config).batch(random_prompt(150, batch=2), anchors)
    tensors = batch.noise_embeds, batch.context_hidden_states, batch.target_hidden_states
    assert found.features == sum(x.nbytes for x in tensors)
    assert found.states == len(batch.states.layers) * found.state_layer
    assert batch.states.nbytes <= found.states  # fewer heads of keys than of values are not counted on
    assert found.states < 1.25 * batch.states.nbytes
    assert bool(found.state_pieces) is any(not isinstance(x, torch.Tensor) for x in batch.states.layers)


def test_nothing_is_allocated_and_dtypes_count():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    with torch.device("meta"):
        elsewhere = AutoModelForCausalLM.from_config(FAMILIES["qwen3_5"](), dtype=torch.bfloat16)
    found, half = estimate(drafter, target), estimate(drafter, elsewhere)
    assert half.target * 2 == found.target
    assert half.states == found.states
    assert half.drafter == found.drafter
    assert estimate(drafter, target, dtype=torch.bfloat16).drafter * 2 == found.drafter
    assert estimate(drafter, target, autocast_dtype=torch.bfloat16).activations < found.activations
    assert estimate(drafter_for(target, reader_num_queries=2), target).reads == 2 * found.reads
    assert estimate(drafter, target, gradient_checkpointing=True).activations < found.activations


@pytest.mark.parametrize("name", SIZES)
def test_more_takes_more(name):
    target = tiny_target("bamba")
    drafter = drafter_for(target)
    assert estimate(drafter, target, **{name: 2 * SIZES[name]}).total > estimate(drafter, target).total
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        estimate(drafter, target, **{name: 0})


def test_a_drafter_without_a_reader_reads_nothing():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target, reader=False)
    found = estimate(drafter, target)
    assert found.states == found.reads == found.state_pieces == 0
    assert "reader" not in found.table()


def test_the_chunk_of_the_loss_is_whole_blocks():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)  # blocks of 6 slots, 97 tokens
    sizes = [estimate(drafter, target, max_logits=most).logits for most in (1, 6 * 97, 2 * 6 * 97, 2**26)]
    assert [size / sizes[0] for size in sizes] == [1, 1, 2, 6]


def test_the_table_has_every_part_and_the_higher_peak():
    target = tiny_target("qwen3_5")
    found = estimate(drafter_for(target), target)
    first, *lines = found.table().splitlines()
    assert first == f"memory of a training step (estimate): {found.total / 1e6:.2f} MB"
    assert len(lines) == 12
    assert lines[0].split() == ["drafter:", "weights", f"{found.drafter / 1e3:.2f}", "kB"]
    assert all(len(line) == len(lines[0]) for line in lines)
    for more in (found, estimate(drafter_for(target), target, num_anchors=60)):  # the target's peak, the drafter's
        least = more.drafter + more.gradients + more.optimizer + more.target + more.features + more.states
        drafting = more.activations + more.reads + max(more.state_pieces, more.logits)
        assert more.total == least + (more.target_forward if more is found else drafting)


def test_the_trainer_tells_it_once_before_the_first_step(tmp_path, caplog):
    target = tiny_target("qwen3_5")
    trainer = trainer_for(tmp_path, target, max_logits_per_chunk=1, bf16=True, optim="sgd")
    with caplog.at_level(logging.INFO, "ready_hf.training"):
        trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if "memory of a training step" in record.getMessage()]
    sizes = {"batch_size": 4, "row_length": 24, "num_anchors": 3}
    options = {"autocast_dtype": torch.bfloat16, "max_logits": 1, "optimizer_values": 1.0}
    assert said == f"ready_hf: {training_memory(trainer.model.config, target, **sizes, **options).table()}"


def test_checkpointing_of_the_trainer_counts(tmp_path):
    target = tiny_target("qwen3_5")
    new_name = "activation_checkpointing"
    name = new_name if hasattr(ReadyTrainingArguments, new_name) else "gradient_checkpointing"
    plain, checkpointed = (trainer_for(tmp_path, target, **{name: on}).memory(4, 24) for on in (False, True))
    assert checkpointed.activations < plain.activations
    assert checkpointed.states == plain.states


def run_example(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["states", "logits"])
def test_the_estimate_is_what_a_training_takes(case):
    """Above the weights. 1.0 to 1.14 and 0.97 were measured."""
    pytest.importorskip("resource", reason="Windows does not tell the peak of a process this way")
    _, estimated, measured, _ = run_example("benchmark_memory.py", case)
    assert int(measured) > 2e8
    assert 0.7 < int(estimated) / int(measured) < 1.4


@pytest.mark.slow
def test_a_step_that_reads_layer_by_layer_takes_less_than_the_tensor_of_states():
    """128 anchors on 512 tokens. With the tensor, twice its size was measured; layer by layer 374 MB."""
    pytest.importorskip("resource", reason="Windows does not tell the peak of a process this way")
    options = ("--anchors", "128", "--tokens", "512", "--ways", "layers")
    _, _, kept, growth, _ = run_example("benchmark_states.py", *options)
    tensor = 128 * 4 * 16 * 128 * 128 * 4
    assert int(kept) < 0.13 * tensor
    assert 0.2 * tensor < int(growth) < 0.9 * tensor
