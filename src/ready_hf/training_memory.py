"""How much memory a training step will take, before it is taken.

A step has two peaks: the target's forward, and the drafter's with its gradient. Weights, gradients, optimizer and what
the drafter learns from are there in both. Weights, features, states and reads are counted; what layers keep for their
gradients and what the target's layers need for a moment is estimated from the operations that they run. Allocators
add some percent. In several processes every one needs as much (with FSDP, at most), and DDP's buckets the gradients
again.

Shapes: B rows, T tokens, A anchors, G slots, d hidden size, m feature layers, N recurrent layers that are read.
"""

import copy
import math
from dataclasses import dataclass, fields

import torch
from transformers import PreTrainedModel

from ready_hf.anchor_states import MOST_ELEMENTS
from ready_hf.chunk_states import CHUNK_SIZE
from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.modeling_ready import ReadyDrafterModel
from ready_hf.recurrences import GATED_DELTA_RULE
from ready_hf.target import recurrent_layers
from ready_hf.target_shape import TargetShape, target_shape


BYTES_PER_LOGIT = 22.0  # of a chunk of the loss with its gradient: measured, docs/RESULTS.md
FLOAT32 = 4


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of the parts of a training step, in one process.

    Args:
        drafter (`int`): Its weights.
        gradients (`int`): Of the weights.
        optimizer (`int`): What it keeps about every weight.
        target (`int`): Its weights.
        features (`int`): Of m layers, embeddings of the slots, target rows; also in the drafter's dtype if it differs.
        states (`int`): What is kept of all layers that are read; at most.
        state_layer (`int`): What is kept of one of them; a part of `states`.
        target_forward (`int`): While the target runs: of one layer, and the features before they are joined.
        activations (`int`): What the drafter keeps for its gradient.
        reads (`int`): Queries and reads of all layers, with their gradients.
        state_pieces (`int`): States of some anchors of one layer while they are read.
        logits (`int`): One chunk of the loss.
        step (`int`): While the optimizer steps.
    """

    drafter: int
    gradients: int
    optimizer: int
    target: int
    features: int
    states: int
    state_layer: int
    target_forward: int
    activations: int
    reads: int
    state_pieces: int
    logits: int
    step: int

    @property
    def total(self) -> int:
        """The higher one of the two peaks."""
        weights = self.drafter + self.gradients + self.optimizer + self.target
        drafting = self.activations + self.reads + max(self.state_pieces, self.logits)
        return weights + max(self.features + self.states + max(self.target_forward, drafting), self.step)

    def table(self) -> str:
        """A line per part."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        lines = [f"  {_LABELS[name]:<44}{_size(value):>10}" for name, value in named.items() if value]
        return "\n".join([f"memory of a training step (estimate): {_size(self.total)}", *lines])


_LABELS = {
    "drafter": "drafter: weights",
    "gradients": "drafter: gradients",
    "optimizer": "optimizer",
    "target": "target: weights",
    "features": "features and embeddings",
    "states": "states, all layers",
    "state_layer": "  of which one layer",
    "target_forward": "target: forward, for a moment",
    "activations": "drafter: kept for the gradient",
    "reads": "reader: queries and reads",
    "state_pieces": "reader: states at some anchors, for a moment",
    "logits": "loss: one chunk of logits, for a moment",
    "step": "optimizer: step, for a moment",
}


def training_memory(
    config: ReadyDrafterConfig,
    target: PreTrainedModel,
    *,
    batch_size: int,
    row_length: int,
    num_anchors: int,
    dtype: torch.dtype = torch.float32,
    autocast_dtype: torch.dtype | None = None,
    max_logits: int = 2**26,
    optimizer_values: float = 2.0,
    gradient_checkpointing: bool = False,
) -> TrainingMemory:
    """What a training step will take. Nothing is allocated, and the target may lie on the `meta` device.

    Args:
        config (`ReadyDrafterConfig`): Of the drafter.
        target (`PreTrainedModel`): Its target, in the dtype it will have.
        batch_size (`int`): B, of one process and one accumulated part.
        row_length (`int`): T.
        num_anchors (`int`): A, of a row.
        dtype (`torch.dtype`): Of the drafter's weights.
        autocast_dtype (`torch.dtype`, *optional*): Of a trainer with `bf16=True` or `fp16=True`.
        max_logits (`int`): See `DraftingLoss`.
        optimizer_values (`float`): Numbers that the optimizer keeps per weight: 2 for AdamW.
        gradient_checkpointing (`bool`): Whether the drafter's layers keep their inputs only.

    Raises:
        ValueError: a size below 1; the drafter was not made for this target.
    """
    for name, size in (("batch_size", batch_size), ("row_length", row_length), ("num_anchors", num_anchors)):
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}")
    shape = target_shape(target)
    config.check_target(shape)
    with torch.device("meta"):
        weights = ReadyDrafterModel(copy.deepcopy(config)).num_parameters() * dtype.itemsize
    slots, tokens = batch_size * num_anchors * config.block_size, batch_size * row_length
    state_layer, state_pieces = 0, 0
    if config.has_reader:
        state_layer, state_pieces = _states(config, target, batch_size, row_length, num_anchors)
    compute = dtype if autocast_dtype is None else autocast_dtype
    activations = _activations(config, batch_size, row_length, num_anchors, compute.itemsize, gradient_checkpointing)
    if autocast_dtype is not None:
        activations += weights // dtype.itemsize * autocast_dtype.itemsize  # weights in that dtype
    heads, keys, values = config.state_shape or (0, 0, 0)
    num_read = len(config.state_layer_ids or ())
    return TrainingMemory(
        drafter=weights,
        gradients=weights,
        optimizer=int(optimizer_values * weights),
        target=sum(p.nbytes for p in {id(p): p for p in target.parameters()}.values()),
        features=_features(config, tokens, slots, target.dtype, dtype),
        states=num_read * state_layer,
        state_layer=state_layer,
        target_forward=_target_forward(config, shape, tokens, target.dtype),
        activations=activations,
        # queries and their gradient; reads before and after normalisation, and their gradients
        reads=num_read * slots * heads * config.reader_num_queries * (2 * keys + 4 * values) * FLOAT32,
        state_pieces=state_pieces,
        logits=int(BYTES_PER_LOGIT * _chunk_logits(config, slots, max_logits)),
        step=weights,
    )


def _features(config: ReadyDrafterConfig, tokens: int, slots: int, from_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Context features, embeddings of the slots and target rows; the first two once more if they are converted."""
    inputs = (tokens * len(config.target_layer_ids or ()) + slots) * config.hidden_size
    converted = inputs * dtype.itemsize if dtype != from_dtype else 0
    return (inputs + slots * config.hidden_size) * from_dtype.itemsize + converted


def _states(
    config: ReadyDrafterConfig, target: PreTrainedModel, batch_size: int, row_length: int, num_anchors: int
) -> tuple[int, int]:
    """What is kept of one layer, and what its read takes for a moment.

    States at the anchors, or at the chunks with all keys and writes: the smaller of the two, as in training. From
    chunks, states come for some anchors at a time, with the keys (twice) and writes of their chunks.
    """
    heads, keys, values = config.state_shape or (0, 0, 0)
    state = heads * keys * values
    at_anchors = batch_size * num_anchors * state
    chunks = batch_size * (row_length // CHUNK_SIZE + 1)
    at_chunks = chunks * (state + heads * CHUNK_SIZE * (keys + values + 1))
    is_scanned = all(layer.recurrence is GATED_DELTA_RULE for layer in recurrent_layers(target))
    if not is_scanned or at_anchors <= at_chunks:
        return at_anchors * FLOAT32, 0
    anchors = min(batch_size * num_anchors, max(batch_size, MOST_ELEMENTS // state))
    return at_chunks * FLOAT32, anchors * (state + heads * CHUNK_SIZE * (2 * keys + values)) * FLOAT32


def _target_forward(config: ReadyDrafterConfig, shape: TargetShape, tokens: int, dtype: torch.dtype) -> int:
    """Features before they are joined, last hidden states, and the larger one of an MLP and a recurrence."""
    hidden = shape.hidden_size
    kept = (len(config.target_layer_ids or ()) + 1) * hidden * dtype.itemsize
    width = getattr(shape.text_config, "intermediate_size", None) or 4 * hidden
    mlp = (3 * width + 4 * hidden) * dtype.itemsize
    heads, keys, values = shape.state_shapes[0] if shape.state_shapes else (0, 0, 0)
    scan = heads * (6 * keys + 5 * values + 5 * CHUNK_SIZE) * FLOAT32
    return tokens * (kept + max(mlp, scan))


def _activations(
    config: ReadyDrafterConfig, batch_size: int, row_length: int, num_anchors: int, itemsize: int, checkpointed: bool
) -> int:
    """Inputs that the backward of every operation wants, layer by layer; see `backbone`."""
    hidden, num_layers = config.hidden_size, config.num_hidden_layers
    queries = num_anchors * config.block_size  # of a row
    slots, keys = batch_size * queries, batch_size * (row_length + queries)
    head_dim, kv_heads = config.head_dim or 0, config.num_key_value_heads or 0
    width, kv_width = config.num_attention_heads * head_dim, kv_heads * head_dim
    per_slot = 7 * hidden + 7 * width + 4 * config.intermediate_size  # norms and residuals, queries and outputs, MLP
    repeated = 2 * width if kv_width < width else 0
    per_key = hidden + 7 * kv_width + repeated
    mask = slots * (row_length + queries)
    layer = slots * per_slot + keys * per_key + mask
    kept = num_layers * slots * hidden + layer if checkpointed else num_layers * layer
    context = (2 * batch_size * row_length + 3 * slots) * hidden
    return (kept + context) * itemsize + mask  # and the mask as booleans


def _chunk_logits(config: ReadyDrafterConfig, slots: int, max_logits: int) -> int:
    """Of a chunk: whole blocks, at least one."""
    block = config.block_size * config.vocab_size
    return min(slots * config.vocab_size, block * max(1, max_logits // block))


def _size(count: int) -> str:
    exponent = min(3, int(math.log(max(count, 1), 1000)))
    return f"{count / 1000**exponent:.{2 if exponent else 0}f} {('B', 'kB', 'MB', 'GB')[exponent]}"
