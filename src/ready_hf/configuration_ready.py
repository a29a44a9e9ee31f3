"""Configuration of a ReaDy drafter: a DSpark block drafter, with or without a reader of recurrent states.

Flat, with the target's `vocab_size`, as transformers' assisted generation expects. Every size that the target dictates
is derived by `ReadyDrafterConfig.for_target`; `check_target` names what does not fit, on both sides.
"""

import difflib
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ready_hf.target import UnsupportedTargetError
from ready_hf.target_shape import TargetShape, special_token_ids, target_shape


logger = logging.getLogger(__name__)

SMALLEST_BLOCK, LARGEST_BLOCK = 2, 31
BILINEAR_RANK, FULL_RANK = 8, 64
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_target_layers",
)

MOST_LAYERS = 1000  # so that no configuration makes Python build modules for hours,
MOST_LABELS = 1000  # or names of labels, which transformers makes for every model

# Every saved folder carries one line of code, so that `trust_remote_code=True` finds the classes of the installed
# package without `import ready_hf`. No source is copied: there is one implementation, and it is the installed one.
SHIM_FILE = "ready.py"
SHIM = "from ready_hf import ReadyDrafterConfig, ReadyDrafterModel  # noqa: F401\n"
AUTO_MAP = {"AutoConfig": "ready.ReadyDrafterConfig", "AutoModel": "ready.ReadyDrafterModel"}


@strict
class ReadyDrafterConfig(PreTrainedConfig):
    r"""
    Sizes of the backbone (`hidden_size`, `intermediate_size`, `num_hidden_layers`, ...) are named as in any
    transformers configuration; `vocab_size` and `hidden_size` are the target's.

    Args:
        block_size (`int`): Drafts per round, 2 to 31. The first slot holds the anchor (the newest token, not yet fed
            to the target) and already predicts the token after it.
        mask_token_id (`int`): Token whose target embedding fills the other slots.
        target_layer_ids (`list[int]`): Decoder layers of the target whose outputs (*features*) the drafter reads. The
            last layer's is taken before the target's final norm.
        num_target_layers (`int`): Decoder layers of the target.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per drafter layer; default:
            sliding if `sliding_window` is set.
        sliding_window (`int`, *optional*): A slot sees context at a distance below this, as in Mistral.
        markov_head_type (`"vanilla"`, `"gated"` or `"rnn"`): How the sequential head turns the previous token into a
            correction of the logits.
        markov_rank (`int`): Its rank; 0 for no sequential head.
        enable_confidence_head (`bool`): Whether acceptance is predicted.
        confidence_head_with_markov (`bool`): Whether the confidence head sees the previous token too.
        confidence_threshold (`float`): A block is cut before the first draft that all before it and itself survive
            with less than this probability, by the confidence head; 0 never cuts.
        confidence_temperatures (`list[float]`, *optional*): What the confidence's logits at draft 1, 2, ... are
            divided by, `block_size` numbers above 0 (see `ready_hf.calibration`); `None` for 1.
        state_layer_ids (`list[int]`, *optional*): Recurrent layers whose committed states are read; `None` for no
            reader, which is DSpark.
        state_shape (`list[int]`, *optional*): `[H, K, V]` of one state.
        reader_projection (`"full"` or `"bilinear"`): `full`: all reads of a slot through one map of rank
            `reader_rank`; `bilinear`: every head's read to `reader_rank` numbers.
        reader_rank (`int`, *optional*): See `reader_projection`. Default: 64 for a full map, 8 for bilinear ones.
        reader_conditioning (`list[str]`): What is added to the learned query of a slot: terms from `"anchor"`
            (embedding of the anchor), `"context"` (the last context feature), `"slot"` (the slot's hidden state where
            reads are added), any of them or none.
        reader_query_rank (`int`, *optional*): Rank of those additions; `None` for a full matrix.
        reader_query_act (`str`, *optional*): Activation between the two maps of that rank; `None` for none.
        reader_num_queries (`int`): Queries of a slot per head.
        reader_injection (`"input"`, `"layers"`, `"last"` or `"head"`): Where reads are added: to the block's input,
            before every layer, before the last layer, or before the final norm.
        reader_normalization (`"read"`, `"state"` or `"none"`): Root mean square of every head's read is set to 1;
            every head's state is divided by its norm; nothing.
        reader_gate (`bool`): Whether the mapped reads are gated.
        reader_gate_inputs (`list[str]`): What the gate depends on: `"anchor"`, `"context"` or both.
        reader_gate_rank (`int`, *optional*): Rank of the gate's map; `None` for a full matrix.
        reader_output_rank (`int`, *optional*): Rank of the last map, into hidden states; `None` for a full
            matrix, which is large if many heads are read bilinearly.
    """

    model_type = "ready_drafter"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    block_size: int = 8
    mask_token_id: int = 1
    target_layer_ids: list[int] | None = None
    num_target_layers: int = 4

    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 64
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_threshold: float | int = 0.0
    confidence_temperatures: list[float] | None = None

    state_layer_ids: list[int] | None = None
    state_shape: list[int] | None = None
    reader_projection: Literal["full", "bilinear"] = "bilinear"
    reader_rank: int | None = None
    reader_conditioning: list[str] | None = None
    reader_query_rank: int | None = 32
    reader_query_act: str | None = None
    reader_num_queries: int = 1
    reader_injection: Literal["input", "layers", "last", "head"] = "layers"
    reader_normalization: Literal["read", "state", "none"] = "read"
    reader_gate: bool = True
    reader_gate_inputs: list[str] | None = None
    reader_gate_rank: int | None = None
    reader_output_rank: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs:  # transformers keeps unknown fields, so a misspelt one would go unnoticed
            meant = difflib.get_close_matches(name, [field.name for field in fields(self)], n=1, cutoff=0.85)
            if meant:
                logger.warning("ready_hf: %s has no field %r; did you mean %r?", type(self).__name__, name, meant[0])
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(1, self.num_attention_heads)  # 0 heads are refused below
        if self.layer_types is None:
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [kind] * min(self.num_hidden_layers, MOST_LAYERS)  # more are refused below
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers)
        if self.reader_rank is None:
            self.reader_rank = BILINEAR_RANK if self.reader_projection == "bilinear" else FULL_RANK
        if self.reader_conditioning is None:
            self.reader_conditioning = ["anchor", "context"]
        if self.reader_gate_inputs is None:
            self.reader_gate_inputs = ["anchor", "context"]
        super().__post_init__(**kwargs)

    @property
    def has_reader(self) -> bool:
        """Whether recurrent states are read; a drafter that reads none is DSpark."""
        return bool(self.state_layer_ids)

    @property
    def reads_by_slot(self) -> bool:
        """Whether queries come from hidden states of the slots too."""
        return self.has_reader and "slot" in (self.reader_conditioning or ())

    def validate_architecture(self) -> None:
        """Part of the validation that transformers runs on every configuration.

        Raises:
            ValueError: naming the field, its value and what is allowed.
        """
        if not SMALLEST_BLOCK <= self.block_size <= LARGEST_BLOCK:
            raise ValueError(f"`block_size` must be {SMALLEST_BLOCK} to {LARGEST_BLOCK}, got {self.block_size}")
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        for name, is_right, allowed in (
            ("num_hidden_layers", self.num_hidden_layers <= MOST_LAYERS, f"at most {MOST_LAYERS}"),
            ("rms_norm_eps", 0 <= self.rms_norm_eps < math.inf, "0 or more, and finite"),
            ("initializer_range", 0 <= self.initializer_range < math.inf, "0 or more, and finite"),
            ("attention_dropout", 0 <= self.attention_dropout < 1, "in [0, 1)"),
        ):
            if not is_right:
                raise ValueError(f"`{name}` must be {allowed}, got {getattr(self, name)}")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            allowed_types = sorted({"default", *ROPE_INIT_FUNCTIONS})
            raise ValueError(f"`rope_parameters` must have a `rope_type` out of {allowed_types}, got {rope_type!r}")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation that transformers knows, got {self.hidden_act!r}")
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})"
            )
        if (self.head_dim or 0) % 2:
            raise ValueError(f"`head_dim` must be even for rotary embeddings, got {self.head_dim}")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"`mask_token_id` must be 0 to {self.vocab_size - 1}, got {self.mask_token_id}")
        if not 0.0 <= self.confidence_threshold < 1.0:
            raise ValueError(f"`confidence_threshold` must be in [0, 1), got {self.confidence_threshold}")
        if self.confidence_threshold and not self.enable_confidence_head:
            raise ValueError("`confidence_threshold` needs `enable_confidence_head=True`")
        if self.confidence_temperatures is not None:
            self._validate_temperatures(self.confidence_temperatures)
        if self.markov_rank < 0:
            raise ValueError(f"`markov_rank` must be 0 (no sequential head) or more, got {self.markov_rank}")
        self._validate_layers()
        if self.has_reader:
            self._validate_reader()
        super().validate_architecture()

    def _validate_temperatures(self, temperatures: list[float]) -> None:
        if not self.enable_confidence_head:
            raise ValueError("`confidence_temperatures` needs `enable_confidence_head=True`")
        if len(temperatures) != self.block_size or not all(0 < t < math.inf for t in temperatures):
            raise ValueError(
                f"`confidence_temperatures` must be {self.block_size} numbers above 0 (`block_size`), got "
                f"{temperatures}"
            )

    def _validate_layers(self) -> None:
        kinds = self.layer_types or []
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` must have {self.num_hidden_layers} entries (`num_hidden_layers`), got {len(kinds)}"
            )
        allowed = {"full_attention", "sliding_attention"}
        if not set(kinds) <= allowed:
            raise ValueError(f"`layer_types` must be out of {sorted(allowed)}, got {kinds}")
        if "sliding_attention" in kinds and (self.sliding_window or 0) < self.block_size:
            raise ValueError(
                f"`sliding_window` must be at least `block_size` ({self.block_size}) for sliding layers, got "
                f"{self.sliding_window}"
            )
        _check_layer_ids("target_layer_ids", self.target_layer_ids, self.num_target_layers)

    def _validate_reader(self) -> None:
        _check_layer_ids("state_layer_ids", self.state_layer_ids, self.num_target_layers)
        if self.state_shape is None or len(self.state_shape) != 3 or min(self.state_shape) < 1:
            raise ValueError(f"`state_shape` must be [H, K, V] when states are read, got {self.state_shape}")
        for name in ("rank", "num_queries", "query_rank", "gate_rank", "output_rank"):
            value = getattr(self, f"reader_{name}")
            if value is not None and value < 1:
                raise ValueError(f"`reader_{name}` must be at least 1, got {value}")
        allowed = {"anchor", "context", "slot"}
        if not set(self.reader_conditioning or ()) <= allowed:
            raise ValueError(f"`reader_conditioning` must be out of {sorted(allowed)}, got {self.reader_conditioning}")
        allowed = {"anchor", "context"}
        if not set(self.reader_gate_inputs or ()) <= allowed or (self.reader_gate and not self.reader_gate_inputs):
            raise ValueError(
                f"`reader_gate_inputs` must be out of {sorted(allowed)}, at least one, got {self.reader_gate_inputs}"
            )
        if self.reader_query_act is not None and (
            self.reader_query_act not in ACT2FN or self.reader_query_rank is None
        ):
            raise ValueError(
                "`reader_query_act` must be an activation that transformers knows, between two maps of "
                f"`reader_query_rank`; got {self.reader_query_act!r} and rank {self.reader_query_rank}"
            )
        # before the last of one layer, all slots but the anchor's are the same mask embedding
        allowed_sites = ("last", "head") if self.num_hidden_layers > 1 else ("head",)
        if self.reads_by_slot and self.reader_injection not in allowed_sites:
            raise ValueError(
                '`reader_conditioning` with "slot" needs hidden states that know their slot: `reader_injection` must '
                f'be "head", or "last" with several layers; got {self.reader_injection!r} and '
                f"{self.num_hidden_layers} layers"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; what was saved before a gate could have several inputs had the anchor alone.

        Raises:
            ValueError: a file that names code of the Hub, a dtype that torch does not have, or what is no field.
        """
        for name in ("attn_implementation", "_attn_implementation"):
            if "/" in str(config_dict.get(name)):  # of a file: those of the caller are in `kwargs`
                raise ValueError(
                    f"the configuration names code of the Hub, `{name}={config_dict[name]!r}`: remove it, and pass "
                    "`attn_implementation` to `from_pretrained` if you trust that code"
                )
        _check_foreign_fields(cls, config_dict)
        if {
            "reader_gate",
            "transformers_version",
        } <= config_dict.keys():  # all fields of its time, not a hand's choice
            config_dict = {"reader_gate_inputs": ["anchor"]} | config_dict
        return super().from_dict(config_dict, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As in transformers; the shim for `trust_remote_code=True` is written next to the configuration."""
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, **({} if push_to_hub else kwargs))
        (Path(save_directory) / SHIM_FILE).write_text(SHIM, encoding="utf-8")
        if push_to_hub:  # not by the line above, which would leave the shim behind
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: a saved folder points at the installed package already, and source is never copied."""

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel | PreTrainedConfig,
        *,
        reader: bool = True,
        mask_token_id: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> "ReadyDrafterConfig":
        """A configuration that fits a target: every size it dictates is derived, the rest may be given.

        Args:
            target (`PreTrainedModel` or `PreTrainedConfig`): Text-only or composite; nothing is allocated for a
                configuration.
            reader (`bool`): Read the states of all recurrent layers (choose some with `state_layer_ids=[...]`);
                `False` gives DSpark.
            mask_token_id (`int`, *optional*): Default: the tokenizer's mask token; else the last row of the vocabulary
                that is no bos, eos or pad (of the target, its generation configuration, or the tokenizer) and, with
                a tokenizer, no token.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Only to choose `mask_token_id`.
            options: Any other field.

        Raises:
            UnsupportedTargetError: a target that cannot be decoded with, or a reader for a target without recurrent
            states.
            TypeError: an unknown field.
            ValueError: no free id for the mask token, or a field that is not allowed.
        """
        unknown = sorted(set(options) - {field.name for field in fields(cls)})
        if unknown:
            raise TypeError(f"{cls.__name__} has no field {', '.join(map(repr, unknown))}")
        if not reader and options.get("state_layer_ids"):
            raise ValueError(
                f"`reader=False` makes a drafter that reads no states, `state_layer_ids={options['state_layer_ids']}` "
                "one that does: pass one of them"
            )
        shape = target_shape(target)
        config = target if isinstance(target, PreTrainedConfig) else target.config
        special = special_token_ids(config)
        derived = _derived_sizes(shape) | special
        if reader and options.get("state_layer_ids", ()) is not None:
            derived |= _derived_reader(shape, options.get("state_layer_ids"))
        if mask_token_id is None:
            sources = (getattr(target, "generation_config", None), tokenizer)
            used = [*special.values(), *(getattr(source, name, None) for source in sources for name in special)]
            mask_token_id = choose_mask_token(shape.vocab_size, used, tokenizer)
        made = cls(**{**derived, **options, "mask_token_id": mask_token_id})
        made.check_target(shape)
        return made

    def check_target(
        self, target: PreTrainedModel | PreTrainedConfig | TargetShape, *, exact_vocabulary: bool = True
    ) -> None:
        """Refuses a target this drafter was not made for.

        Args:
            target: The target, its configuration or its shape.
            exact_vocabulary (`bool`): Refuse a vocabulary of any other size, as training does. `False`, for drafting,
                lets it differ by padding and a few added tokens: by a twentieth, and the mask token must be in both.

        Raises:
            ValueError: naming every difference, the drafter's side and the target's.
        """
        shape = target if isinstance(target, TargetShape) else target_shape(target)
        rows = self.vocab_size, shape.vocab_size
        is_close = self.mask_token_id < min(rows) and max(rows) - min(rows) <= max(rows) // 20
        pairs: list[tuple[str, Any, Any]] = [] if is_close and not exact_vocabulary else [("vocabulary", *rows)]
        pairs += [
            ("hidden size", self.hidden_size, shape.hidden_size),
            ("number of decoder layers", self.num_target_layers, shape.num_layers),
        ]
        if self.has_reader:
            missing = sorted(set(self.state_layer_ids or ()) - set(shape.state_layer_ids))
            found = dict(zip(shape.state_layer_ids, shape.state_shapes, strict=True))
            if missing:
                pairs.append(("recurrent layers", self.state_layer_ids, list(shape.state_layer_ids)))
            shapes = sorted({found[i] for i in self.state_layer_ids or () if i in found})
            if shapes and shapes != [tuple(self.state_shape or ())]:
                pairs.append(("state shape [H, K, V]", self.state_shape, [list(s) for s in shapes]))
        differing = [pair for pair in pairs if pair[1] != pair[2]]
        if differing:
            wrong = [f"{name}: {mine} in the drafter, {theirs} in the target" for name, mine, theirs in differing]
            raise ValueError(
                f"this drafter was not made for {shape.name}. {'; '.join(wrong)}. Load the target it was trained for, "
                "or make a drafter with ReadyDrafterConfig.for_target(target)"
            )


def _check_foreign_fields(config_class: type, config_dict: dict[str, Any]) -> None:
    """Refuses values of transformers' own fields that it would fail on, and names that are methods of the class."""
    for name in ("dtype", "torch_dtype"):
        value = config_dict.get(name)
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"`{name}` must be a type of torch such as 'bfloat16', got {value!r}")
    for name in config_dict:
        own = getattr(config_class, name, None)
        if callable(own) or (isinstance(own, property) and own.fset is None):
            raise ValueError(f"the configuration sets `{name}`, which is computed and no field: remove it")
    for name, is_right in (
        ("num_labels", lambda x: isinstance(x, int) and 0 <= x <= MOST_LABELS),
        ("id2label", lambda x: isinstance(x, dict)),
    ):
        if config_dict.get(name) is not None and not is_right(config_dict[name]):
            raise ValueError(f"a drafter has no labels, but its configuration sets `{name}={config_dict[name]!r}`")
    quantization = config_dict.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict) and not hasattr(quantization, "to_dict"):
        raise ValueError(f"`quantization_config` must be a table of settings, got {quantization!r}: remove it")


def default_target_layer_ids(num_layers: int, most: int = 5) -> list[int]:
    """Evenly spaced layers from the second to the third from the end, as DFlash drafters for hybrid targets use.

    At most `most`, and one for every three layers of a shallow target.
    """
    first, last = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    count = max(1, min(most, num_layers // 3))
    if count == 1:
        return [last]
    return sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)})


def choose_mask_token(
    vocab_size: int, special: Iterable[Any], tokenizer: PreTrainedTokenizerBase | None = None
) -> int:
    """An id for the mask slots that no text contains; see `ReadyDrafterConfig.for_target`.

    Raises:
        ValueError: the tokenizer uses every row of the vocabulary.
    """
    taken = {i for ids in special for i in (ids if isinstance(ids, list) else [ids])}
    own = getattr(tokenizer, "mask_token_id", None)
    if own is not None and own not in taken and own < vocab_size:
        return int(own)
    first = 0 if tokenizer is None else max(tokenizer.get_vocab().values(), default=-1) + 1  # ids may have gaps
    free = [i for i in range(vocab_size - 1, max(first, vocab_size - 100) - 1, -1) if i not in taken]
    if not free:
        why = "" if own not in taken else f"; its mask token {own} is the target's bos, eos or padding"
        raise ValueError(
            f"the tokenizer uses ids up to {first - 1} and the target has {vocab_size} rows, so no row is free for "
            f"the mask slots{why}: pass `mask_token_id=` an id that no text contains"
        )
    return free[0]


def _derived_sizes(shape: TargetShape) -> dict[str, Any]:
    hidden = shape.hidden_size
    head_dim = next((d for d in (128, 64, 32, 16) if hidden % d == 0 and hidden // d >= 4), None)
    heads = hidden // head_dim if head_dim else 1
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads,
        "head_dim": head_dim or hidden,
        "num_target_layers": shape.num_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": int(getattr(shape.text_config, "max_position_embeddings", 32768)),
    }


def _derived_reader(shape: TargetShape, chosen: list[int] | None) -> dict[str, Any]:
    if not shape.state_layer_ids:
        raise UnsupportedTargetError(
            f"{shape.name} keeps no recurrent state, so there is nothing for a reader to read. Make the drafter with "
            "`reader=False` (DSpark), or choose a target with gated-delta-rule, KDA or Mamba-2 layers."
        )
    found = dict(zip(shape.state_layer_ids, shape.state_shapes, strict=True))
    ids = list(shape.state_layer_ids if chosen is None else chosen)
    shapes = {found[i] for i in ids if i in found}
    return {"state_layer_ids": ids, "state_shape": list(min(shapes)) if shapes else [1, 1, 1]}


def _check_layer_ids(name: str, ids: list[int] | None, num_layers: int) -> None:
    if not ids or len(set(ids)) != len(ids) or not all(0 <= i < num_layers for i in ids):
        raise ValueError(
            f"`{name}` must be different decoder layers of the target, 0 to {num_layers - 1}, at least one; got {ids}"
        )
