"""One process of a training with several: started by `test_several_processes.py`, not a test of its own.

Every process trains the same small drafter on uneven rows; what it was given is one JSON object, and what the first
process found (losses, evaluations, gradients, weights) goes into one file.
"""

import copy
import json
import logging
import math
import os
import sys


os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from ready_hf.training import ReadyTrainer, ReadyTrainingArguments
from support import drafter_for, random_prompt, tiny_target


def whole(tensor):
    """A copy on the CPU of what all processes together hold, in each of them."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def uneven_rows(count):
    """Lengths 10 to 34 and loss masks, so that batches hold very different numbers of slots."""
    rows = [{"input_ids": row[: 10 + 2 * (7 * i % 13)]} for i, row in enumerate(random_prompt(34, batch=count))]
    for i, row in enumerate(rows):
        row["loss_mask"] = (torch.arange(len(row["input_ids"])) % (i % 9 + 9) > 0).long()
    return rows


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer is given."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})


class PerProcess(ReadyTrainer):
    """The fault that the tests must notice: every process takes the mean over its own slots."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class Sharded(ReadyTrainer):
    """FSDP on CPUs, which accelerate leaves out without a word: here is what it does on GPUs when it starts."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


class SpoilOneShard(TrainerCallback):
    """The second step finds a gradient that is not a number, in the second process alone."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1 and args.process_index == 1:
            gradient = model.fc.weight.grad
            getattr(gradient, "_local_tensor", gradient).fill_(math.nan)


class NothingInOneShard(TrainerCallback):
    """A part of a tensor that has nothing to learn, as of words that a text does not have."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if args.process_index == 0:
            model.fc.weight.grad._local_tensor.zero_()


class Said(logging.Handler):
    """What was logged."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def train(folder, rows=12, held_out=5, fault=False, spoil=False, half=False, resume=None, target=None, **options):
    """One training, and what came out of it; on a GPU with `use_cpu=False`."""
    target = copy.deepcopy(tiny_target("qwen3_5")) if target is None else target  # it is moved, and others share it
    gradients = Gradients()
    defaults = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # weights of tiny gradients would follow their rounding errors
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "num_anchors": 4,
        "dataloader_pin_memory": False,
    }
    kind = PerProcess if fault else Sharded if options.get("fsdp") else ReadyTrainer
    arguments = ReadyTrainingArguments(str(folder), **defaults | options)
    if arguments.n_gpu > 1 and not hasattr(target, "hf_device_map"):
        arguments._n_gpu = 1  # the one process that others are compared with, where several GPUs are visible
    trainer = kind(
        drafter_for(target),
        arguments,
        target=target,
        train_dataset=uneven_rows(rows),
        eval_dataset=uneven_rows(held_out),
        callbacks=[gradients] + [SpoilOneShard()] * spoil + [NothingInOneShard()] * half,
    )
    if spoil:  # ours comes last
        trainer.remove_callback(trainer._skipping)
        trainer.add_callback(trainer._skipping)
    said = Said()
    logging.getLogger("ready_hf").addHandler(said)
    trainer.train(resume_from_checkpoint=resume)
    logging.getLogger("ready_hf").removeHandler(said)
    trainer.save_model()
    return {
        "world": trainer.args.world_size,
        "device": trainer.args.device.type,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "metrics": trainer.evaluate(),
        "gradients": gradients.found,
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "untouched": [message for message in said.messages if "trainable tensors" in message],
        "skipped": trainer.num_skipped_steps,
        "weights": {name: whole(p) for name, p in trainer.model.named_parameters()},
    }


def main(folder, runs):
    for name, options in runs.items():
        if "resume" in options:
            options["resume"] = os.path.join(folder, options["resume"])
        found = train(os.path.join(folder, name), **options)
        if os.environ["RANK"] == "0":
            torch.save(found, os.path.join(folder, f"{name}.pt"))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
