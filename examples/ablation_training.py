"""Training several drafters side by side on one target's forwards; on a GPU, every drafter's step is a CUDA graph."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from ablation_arms import Arm
from ablation_batches import warmed_up

from ready_hf import ReadyDrafterModel
from ready_hf.backbone import DrafterLayer
from ready_hf.features import DraftingBatch, FrozenTarget
from ready_hf.losses import DraftingLoss, LossSums
from ready_hf.state_reader import StateReader
from ready_hf.training import drafting_sums


WARMUP, BETAS, WEIGHT_DECAY, CLIP = 100, (0.9, 0.95), 0.01, 1.0
LOSS = DraftingLoss(max_logits=2**28)  # in one chunk: a graph cannot recompute


@contextmanager
def compiled() -> Iterator[None]:
    """Layers, loss and reader compiled, once for all arms that are captured meanwhile."""
    with (
        mock.patch.object(torch._dynamo.config, "recompile_limit", 64),
        mock.patch.object(DrafterLayer, "forward", torch.compile(DrafterLayer.forward, dynamic=False)),
        mock.patch.object(DraftingLoss, "_chunk", torch.compile(DraftingLoss._chunk, dynamic=False)),
        mock.patch.object(StateReader, "forward", torch.compile(StateReader.forward, dynamic=False)),
    ):
        yield


def seen_by(arm: Arm, batch: DraftingBatch) -> DraftingBatch:
    """The batch as an arm sees it."""
    changes: dict = {"states": batch.states[:, :, arm.read(batch.states.shape[2])] if arm.reader else None}
    if arm.next_feature:
        changes["anchor_positions"] = batch.anchor_positions + 1
    return dataclasses.replace(batch, **changes)


def measured(arm: Arm, drafter: ReadyDrafterModel, frozen: FrozenTarget, batch: DraftingBatch) -> LossSums:
    """Loss and acceptance on a batch; in bfloat16 on a GPU, as in training."""
    device = batch.labels.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return drafting_sums(drafter, drafter, frozen, seen_by(arm, batch), LOSS)


class Training:
    """One arm in training: AdamW with a cosine, the reader in a group of its own.

    Args:
        arm (`Arm`): What is trained.
        drafter (`ReadyDrafterModel`): On the device, in float32.
        frozen (`FrozenTarget`): For the loss.
        lr (`float`): Learning rate at its highest.
        steps (`int`): Steps of the schedule.
    """

    def __init__(self, arm: Arm, drafter: ReadyDrafterModel, frozen: FrozenTarget, lr: float, steps: int):
        self.arm, self.drafter, self.frozen, self.lr, self.steps = arm, drafter.train(), frozen, lr * arm.lr, steps
        self.device = drafter.device
        is_cuda = self.device.type == "cuda"
        reader = [] if drafter.reader is None else [*drafter.reader.parameters()]
        known = {id(p) for p in reader}
        groups = [[p for p in drafter.parameters() if id(p) not in known], reader]
        self.rates = [torch.zeros((), device=self.device) for _ in groups]
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "lr": rate} for group, rate in zip(groups, self.rates, strict=True) if group],
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            capturable=is_cuda,
            foreach=False,
            fused=is_cuda,
        )
        self.loss = torch.zeros((), device=self.device)  # running mean
        self.graph: torch.cuda.CUDAGraph | None = None

    def rate(self, step: int, is_reader: bool) -> float:
        """Learning rate of a step, 0 while a stage of training leaves the group out."""
        start, end = (round(share * self.steps) for share in self.arm.stages)
        if step < start if is_reader else start <= step < end:
            return 0.0
        shape = min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return self.lr * shape * (self.arm.reader_lr if is_reader else 1.0)

    def step(self, batch: DraftingBatch, step: int) -> None:
        """One step on a batch; with a graph, `batch` must be the one that it was captured with."""
        for rate, is_reader in zip(self.rates, (False, True), strict=True):
            rate.fill_(self.rate(step, is_reader))
        if self.graph is None:
            self._step(batch)
        else:
            self.graph.replay()

    def capture(self, batch: DraftingBatch, pool: tuple | None) -> tuple:
        """Makes a step on the memory of `batch` a graph; weights stay, the optimizer starts anew. Returns the pool."""
        with warmed_up():
            for _ in range(3):  # at a rate of 0
                self._step(batch)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self._step(batch)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss.zero_()
        return self.graph.pool()

    def _step(self, batch: DraftingBatch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        sums = measured(self.arm, self.drafter, self.frozen, batch)
        loss = sums.loss / sums.num_slots.sum().clamp_min(1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), CLIP)
        self.optimizer.step()
        self.loss.lerp_(loss.detach(), 0.02)
