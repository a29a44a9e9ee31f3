"""Batches for training several drafters side by side: one forward of the target serves all of them."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ready_hf.features import DraftingBatch, FrozenTarget, choose_anchors, legal_anchors


class Batches:
    """Rows of a text, at random offsets, or of several, with random anchors, as what a drafter learns from.

    Every batch lies in the memory of the first one, so that drafters can be captured as CUDA graphs. The target's
    forward is a graph too, if it can be.

    Args:
        frozen (`FrozenTarget`): With the layers that any of the drafters reads.
        tokens (`torch.LongTensor`): Text `[N]`, or rows `[N, row]`.
        block_size, batch_size, row, num_anchors (`int`): Shapes.
        seed (`int`): Of offsets and anchors.
    """

    def __init__(
        self,
        frozen: FrozenTarget,
        tokens: torch.Tensor,
        *,
        block_size: int,
        batch_size: int,
        row: int,
        num_anchors: int,
        seed: int,
    ):
        self.frozen, self.tokens, self.block_size, self.num_anchors = frozen, tokens, block_size, num_anchors
        self.shape, self.device = (batch_size, row), frozen.target.device
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs = tuple(x.to(self.device) for x in self._draw())
        first = self._computed()
        values = {item.name: getattr(first, item.name) for item in dataclasses.fields(first)}
        self.memory = DraftingBatch(**{name: None if x is None else x.clone() for name, x in values.items()})
        self.graph = _captured(self._fill) if self.device.type == "cuda" else None

    def next(self) -> DraftingBatch:
        """The next batch, in the same memory as all."""
        for mine, drawn in zip(self.inputs, self._draw(), strict=True):
            mine.copy_(drawn)
        if self.graph is None:
            self._fill()
        else:
            self.graph.replay()
        return self.memory

    def _draw(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids `[B, T]` and anchors `[B, A]`, on the CPU."""
        size, row = self.shape
        if self.tokens.dim() == 2:
            ids = self.tokens[torch.randint(len(self.tokens), (size,), generator=self.generator)]
        else:
            offsets = torch.randint(len(self.tokens) - row, (size, 1), generator=self.generator)
            ids = self.tokens[offsets + torch.arange(row)]
        legal = usable_anchors(torch.ones(size, row, dtype=torch.long), self.block_size)
        positions, mask = choose_anchors(legal, self.num_anchors, self.generator)
        if not bool(mask.all()):
            raise SystemExit(f"rows of {row} tokens have no {self.num_anchors} places for blocks of {self.block_size}")
        return ids, positions

    def _computed(self) -> DraftingBatch:
        return with_tensor_states(self.frozen.batch(*self.inputs, check=False))

    def _fill(self) -> None:
        batch = self._computed()
        for item in dataclasses.fields(batch):
            value = getattr(batch, item.name)
            if value is not None:
                getattr(self.memory, item.name).copy_(value)


def usable_anchors(mask: torch.Tensor, block_size: int, written: torch.Tensor | None = None) -> torch.Tensor:
    """Legal anchors `[B, T]`, without the last ones: an arm that sees one feature more needs room."""
    legal = legal_anchors(mask, block_size, 1, written)
    legal[:, -block_size - 2 :] = False
    return legal


def with_tensor_states(batch: DraftingBatch) -> DraftingBatch:
    """The batch with the states of all anchors in one tensor."""
    return batch if batch.states is None else dataclasses.replace(batch, states=batch.states.stack())


@contextmanager
def warmed_up() -> Iterator[None]:
    """A stream for what runs before it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _captured(function) -> torch.cuda.CUDAGraph | None:
    """`function` as a graph, `None` if something in it cannot be captured."""
    with warmed_up():
        for _ in range(2):
            function()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError as error:
        print(f"the target's forward is no graph: {' '.join(str(error).split())[:200]}", flush=True)
        return None
    return graph
