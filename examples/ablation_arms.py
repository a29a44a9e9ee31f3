"""The arms of the reader experiments: drafters that differ in one thing and are trained alike."""

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ready_hf import ReadyDrafterConfig, ReadyDrafterModel, recurrent_layers


@dataclass(frozen=True)
class Arm:
    """One drafter of an experiment.

    Args:
        name (`str`): In tables and files.
        options (`dict`): Fields of `ReadyDrafterConfig`.
        reader (`bool`): Whether it reads states.
        lr (`float`): Learning rate, as a multiple of everybody's.
        reader_lr (`float`): Learning rate of the reader, as a multiple of the arm's.
        stages (`tuple[float, float]`): Shares of the steps after which the reader starts, and then the rest goes
            on: between the two only the reader learns. (0, 0) is joint training.
        as_large_as (`Arm`, *optional*): Its MLPs are made so wide that both have as many parameters.
        thirds (`tuple[int, int]`): Which thirds of the recurrent layers it reads, from the first to before the second.
        next_feature (`bool`): It sees the target's features of the anchor, which no drafter can have: a probe of the
            ceiling.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    reader: bool = True
    lr: float = 1.0
    reader_lr: float = 1.0
    stages: tuple[float, float] = (0.0, 0.0)
    as_large_as: "Arm | None" = None
    thirds: tuple[int, int] = (0, 3)
    next_feature: bool = False

    def read(self, layers: int) -> slice:
        """Which of so many recurrent layers it reads."""
        start, stop = (layers * third // 3 for third in self.thirds)
        return slice(start, stop)


# What an arm's reader is unless its name says otherwise: the first default of the package, not today's.
FIRST = {"projection": "full", "rank": 64, "injection": "input", "gate": False, "gate_inputs": ["anchor"]}


def _reader(name: str, reader_lr: float = 1.0, stages: tuple[float, float] = (0.0, 0.0), **options: Any) -> Arm:
    fields = {f"reader_{key}": value for key, value in (FIRST | options).items()}
    return Arm(name, fields, reader_lr=reader_lr, stages=stages)


SLOT = ["anchor", "context", "slot"]
READY = _reader("conditioned")
SCREEN = [
    Arm("dspark", reader=False),
    Arm("dspark, as large", reader=False, as_large_as=READY),
    READY,  # queries with terms from anchor and context, full projection of rank 64, at the input, reads normalised
    _reader("static", conditioning=[]),
    _reader("bilinear 8", projection="bilinear", rank=8),
    _reader("rank 256", rank=256),
    _reader("full query rank", query_rank=None),
    _reader("4 queries", num_queries=4),
    _reader("before every layer", injection="layers"),
    _reader("before the norm", injection="head"),
    _reader("by slot", injection="last", conditioning=SLOT),
    _reader("by slot, before the norm", injection="head", conditioning=SLOT),
    _reader("states normalised", normalization="state"),
    _reader("gate", gate=True),
    _reader("staged", stages=(0.4, 0.6)),
    _reader("reader lr x 0.3", reader_lr=0.3),
]
BOTH = ["anchor", "context"]
SIMPLE = {"projection": "bilinear", "rank": 8, "gate": True}
LAYERS = {**SIMPLE, "injection": "layers"}
BEST = _reader("bilinear 8, gate 2, layers", **LAYERS, gate_inputs=BOTH)  # gate 2: by anchor and context
SILU = {"query_rank": 256, "query_act": "silu"}
LARGEST = _reader(
    "bilinear 16, gate 2, layers, silu 256, 4 queries",
    **{**LAYERS, "rank": 16},
    **SILU,
    gate_inputs=BOTH,
    num_queries=4,
)
COMBINED = [  # of what helped alone
    _reader("bilinear 8, gate", **SIMPLE),
    _reader("bilinear 8, gate, layers", **LAYERS),
    BEST,
    _reader("bilinear 8, gate, layers, silu 256", **LAYERS, **SILU),
    _reader("bilinear 8, gate, layers, 4 queries", **LAYERS, num_queries=4),
    _reader("rank 256, gate, layers", rank=256, gate=True, injection="layers"),
    LARGEST,
    Arm("dspark, as large as the largest", reader=False, as_large_as=LARGEST),
]
GATE = {"gate_inputs": BOTH}
LOW = {"gate_rank": 32, "output_rank": 128}
FOUR = {**LAYERS, **GATE, **LOW, "num_queries": 4}
LARGE_TARGETS = [  # the best with maps that stay small where hundreds of heads are read
    Arm("dspark, as large as the best", reader=False, as_large_as=BEST),
    _reader("bilinear 3, gate 2, layers", **LAYERS | {"rank": 3}, **GATE),
    _reader("best, low rank", **LAYERS, **GATE, **LOW),
    _reader("best, low rank, at the input", **SIMPLE, **GATE, **LOW),
    _reader("best, 4 queries", **LAYERS, **GATE, num_queries=4),
    _reader("best, 4 queries, low rank", **FOUR),
    replace(_reader("best, 4 queries, low rank, lr x 2", **FOUR), lr=2.0),
]
PLAIN = [  # is plain DSpark treated fairly?
    Arm("dspark, lr x 0.5", reader=False, lr=0.5),
    Arm("dspark, lr x 2", reader=False, lr=2.0),
    Arm("dspark, window 1024", {"sliding_window": 1024}, reader=False),
    Arm("dspark, 3 layers", {"num_hidden_layers": 3}, reader=False),
]
WHICH_LAYERS = [
    replace(BEST, name="best, first third of the layers", thirds=(0, 1)),
    replace(BEST, name="best, middle third of the layers", thirds=(1, 2)),
    replace(BEST, name="best, last third of the layers", thirds=(2, 3)),
]
DEFAULT = Arm("default")  # what `for_target` makes; the best, today
CEILING = [
    _reader("large reader", injection="last", conditioning=SLOT, num_queries=4, rank=512, query_rank=None),
    Arm("dspark with the next feature", reader=False, next_feature=True),
]
FULL = ", full attention"  # after a name: drafter layers see the whole context, whatever `--window` says
VARIED: dict[str, dict[str, Any]] = {  # after a name too
    FULL: {"sliding_window": None},
    ", window 128": {"sliding_window": 128},
    ", 1 layer": {"num_hidden_layers": 1},
    ", 5 layers": {"num_hidden_layers": 5},
}


def varied(arm: Arm, suffix: str) -> Arm:
    """The arm with other options, and what it is as large as with the same ones."""
    larger = None if arm.as_large_as is None else varied(arm.as_large_as, suffix)
    return replace(arm, name=arm.name + suffix, options=arm.options | VARIED[suffix], as_large_as=larger)


ARMS = {arm.name: arm for arm in [*SCREEN, *COMBINED, *LARGE_TARGETS, *PLAIN, *WHICH_LAYERS, DEFAULT, *CEILING]}
ARMS |= {name + FULL: varied(arm, FULL) for name, arm in ARMS.items()}
COMPARED = [ARMS[name] for name in ("dspark", "dspark, as large as the best", BEST.name)]
ARMS |= {arm.name + suffix: varied(arm, suffix) for arm in COMPARED for suffix in VARIED}


def folder_of(name: str) -> str:
    """The folder that an arm's drafter is saved in."""
    return name.replace(" ", "_").replace(",", "")


def make_config(target: PreTrainedModel, arm: Arm, args: argparse.Namespace, **options: Any) -> ReadyDrafterConfig:
    """The arm's configuration, with the sizes of the command line."""
    heads = target.config.get_text_config().hidden_size // args.head_dim
    sizes = {
        "block_size": args.block,
        "num_hidden_layers": args.layers,
        "intermediate_size": args.intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": args.head_dim,
        "sliding_window": args.window or None,
        "markov_rank": args.markov_rank,
    }
    if arm.reader and arm.thirds != (0, 3):
        layers = [layer.layer_idx for layer in recurrent_layers(target)]
        sizes["state_layer_ids"] = layers[arm.read(len(layers))]
    return ReadyDrafterConfig.for_target(
        target, reader=arm.reader, mask_token_id=args.mask_token_id, **{**sizes, **arm.options, **options}
    )


def make_drafter(target: PreTrainedModel, arm: Arm, args: argparse.Namespace) -> ReadyDrafterModel:
    """A fresh drafter, seeded: all arms of a seed start with the same weights wherever they have the same ones."""
    config = make_config(target, arm, args)
    if arm.as_large_as is not None:
        wanted = ReadyDrafterModel(make_config(target, arm.as_large_as, args)).num_parameters()
        missing = wanted - ReadyDrafterModel(config).num_parameters()
        width = 3 * config.hidden_size * config.num_hidden_layers  # parameters of one more channel in every MLP
        config = make_config(target, arm, args, intermediate_size=config.intermediate_size + round(missing / width))
    torch.manual_seed(args.seed)
    plain = ReadyDrafterModel(make_config(target, Arm("plain", reader=False), args)).state_dict()
    drafter = ReadyDrafterModel(config)
    mine = drafter.state_dict()
    drafter.load_state_dict({k: v for k, v in plain.items() if k in mine and v.shape == mine[k].shape}, strict=False)
    return drafter
