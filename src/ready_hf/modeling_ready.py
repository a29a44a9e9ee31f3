"""The ReaDy drafter as a transformers model.

It owns the trunk, the heads and the reader. Embeddings and output head are the target's: they are handed to it as
tensors or modules in every call and never stored, neither in the module nor in a checkpoint.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ready_hf.anchor_states import AnchorStates
from ready_hf.backbone import BlockAttention, DrafterLayer, block_mask
from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.drafting import NOT_A_TARGET, DraftingMixin, any_weight, moved_to
from ready_hf.heads import ConfidenceHead, SequentialHead, ZeroLinear
from ready_hf.hub import push_to_hub
from ready_hf.state_reader import StateReader
from ready_hf.weight_files import (
    BrokenCheckpointError,
    check_finite,
    check_headers,
    check_index_names,
    why_unbuildable,
    why_unloadable,
)


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Whether the caller of `from_pretrained` asked for `output_loading_info`; transformers does not hand it on.
_names_are_told: ContextVar[bool] = ContextVar("names_are_told", default=False)


@dataclass
class ReadyDrafterOutput(ModelOutput):
    """Output of `ReadyDrafterModel.forward`.

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `[B, A * G, d]`): Normed hidden state of every slot; slot k of
            a block predicts the k-th token after its anchor.
        cache (`Cache`, *optional*): Keys and values of the context.
        hidden_states (`tuple(torch.FloatTensor)`, *optional*): Input of every layer, and the last hidden state.
        attentions (`tuple(torch.FloatTensor)`, *optional*): Attention weights of every layer.
    """

    last_hidden_state: torch.FloatTensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


class ReadyDrafterPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation of drafters."""

    config: ReadyDrafterConfig
    config_class = ReadyDrafterConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DrafterLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": DrafterLayer, "attentions": BlockAttention}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """As in transformers, except that a checkpoint must fit: no tensor is made up or left out silently.

        Only safetensors files are loaded. With `output_loading_info=True` the caller is told about names instead, and
        `ignore_mismatched_sizes=True` allows other shapes, as in transformers.

        Raises:
            RuntimeError: naming the tensors that are missing, have another shape or type, are not finite, or belong to
            no module; the file that is no whole safetensors file; or what is wrong with the index of files.
            ValueError: `use_safetensors=False`.
        """
        if kwargs.get("use_safetensors") is False:
            raise ValueError(
                "got `use_safetensors=False`, but drafters are loaded from safetensors files alone, since others can "
                "run code: leave it out"
            )
        if pretrained_model_name_or_path is None:  # with a `state_dict`
            return super().from_pretrained(None, *model_args, **kwargs)
        tells_names = kwargs.pop("output_loading_info", False)
        options = kwargs | {"output_loading_info": True, "use_safetensors": True, "weights_only": True}
        token = _names_are_told.set(bool(tells_names))
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, *model_args, **options)
            check_finite(model)
            problems = [f"missing: {name}" for name in sorted(info["missing_keys"])]
            problems += [f"belongs to no module: {name}" for name in sorted(info["unexpected_keys"])]
            if problems and not tells_names:
                raise BrokenCheckpointError("; ".join(problems))
        except Exception as error:
            is_known = isinstance(error, BrokenCheckpointError)
            problem = str(error) if is_known else why_unbuildable(error)
            problem = problem or why_unloadable(pretrained_model_name_or_path, kwargs)
            if problem is None:
                raise
            raise BrokenCheckpointError(
                f"the drafter in {str(pretrained_model_name_or_path)!r} cannot be loaded: {problem}"
            ) from (error.__cause__ if is_known else error)
        finally:
            _names_are_told.reset(token)
        return (model, info) if tells_names else model

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, **kwargs: Any
    ) -> Any:
        """Looks at the files before anything of them is read: they are resolved here, from a folder or the Hub."""
        if state_dict is None:
            if load_config.sharded_metadata is not None:
                check_index_names(load_config.sharded_metadata["weight_map"].values())
            check_headers(
                checkpoint_files or [],
                model.state_dict(),
                load_config.ignore_mismatched_sizes,
                load_config.is_quantized,
                _names_are_told.get(),
            )
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing: a saved folder points at the installed package already, and source is never copied."""

    def push_to_hub(self, repo_id: str, *, base_model: str | None = None, **kwargs: Any) -> Any:
        """Uploads configuration, weights, shim and a model card; see `ready_hf.hub.push_to_hub`.

        A card that the repository has already is kept, unless something to put on a new one is given.
        """
        return push_to_hub(self, repo_id, base_model=base_model, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ZeroLinear):
            init.zeros_(module.weight)
        elif isinstance(module, StateReader):
            init.normal_(module.query, std=module.query.shape[-1] ** -0.5)
            if hasattr(module, "head_map"):
                init.normal_(module.head_map, std=module.head_map.shape[-2] ** -0.5)
            init.zeros_(module.up_proj.weight)


class ReadyDrafterModel(DraftingMixin, ReadyDrafterPreTrainedModel):
    """Block drafter over target features and, with `config.state_layer_ids`, committed recurrent states.

    Args:
        config (`ReadyDrafterConfig`): Best made with `ReadyDrafterConfig.for_target(target)`.
    """

    def __init__(self, config: ReadyDrafterConfig):
        super().__init__(config)
        assert config.target_layer_ids is not None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = SequentialHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.reader = StateReader(config) if config.has_reader else None
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        anchor_positions: torch.Tensor | None = None,
        states: torch.Tensor | list[torch.Tensor] | AnchorStates | None = None,
        attention_mask: torch.Tensor | None = None,
        context_attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        context_position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ReadyDrafterOutput:
        r"""
        One parallel pass over A blocks of G = `config.block_size` slots each.

        Args:
            noise_embeds (`torch.FloatTensor` of shape `[B, A * G, d]`): Target embeddings of anchor, mask, mask, ...
            context_hidden_states (`torch.FloatTensor` of shape `[B, n, m * d]`): Target features, the m
                `target_layer_ids` concatenated; with a `cache`, of the positions it has not seen.
            anchor_positions (`torch.LongTensor` of shape `[B, A]`, *optional*): Context row of each anchor: a block
                sees the rows before it. Default: one block after all rows.
            states (`torch.FloatTensor` of shape `[B, A, N, H, K, V]`, or `AnchorStates`, *optional*): Committed states
                before each anchor, of `config.state_layer_ids`. A drafter with a reader needs them. For one anchor,
                and where kernels run, also a list of N tensors `[B, H, K, V]`, which are read where they lie.
            attention_mask (`torch.Tensor` of shape `[B, A * G]`, *optional*): 0 for slots that others must not see.
            context_attention_mask (`torch.Tensor` of shape `[B, C]`, *optional*): 0 for padding, over all context rows
                ever seen.
            position_ids (`torch.LongTensor` of shape `[B, A * G]`, *optional*): Default: the anchor's row and on.
            context_position_ids (`torch.LongTensor` of shape `[B, n]`, *optional*): Default: the row.
            cache (`Cache`, *optional*): Context keys and values of earlier calls; only with one block after all rows.
            use_cache (`bool`, *optional*): Keep and return a cache. Default: `config.use_cache`.

        Raises:
            ValueError: shapes that do not fit the configuration.
        """
        self._check_inputs(noise_embeds, context_hidden_states, anchor_positions, states, cache)
        batch, num_new = context_hidden_states.shape[:2]
        block_size, device = self.config.block_size, noise_embeds.device
        if use_cache and cache is None and anchor_positions is None:
            cache = DynamicCache(config=self.config)
        num_past = cache.get_seq_length() if cache is not None else 0
        num_seen = num_past + num_new
        if anchor_positions is None:
            anchor_positions = torch.full((batch, 1), num_seen, dtype=torch.long, device=device)
        if position_ids is None:
            slots = torch.arange(block_size, device=device)
            position_ids = (anchor_positions[..., None] + slots).flatten(1)
        if context_position_ids is None:
            context_position_ids = torch.arange(num_past, num_seen, device=device).expand(batch, -1)

        context = self.hidden_norm(self.fc(context_hidden_states))
        rotation = self.rotary_emb(context, torch.cat([context_position_ids, position_ids], dim=1))
        masks = self._masks(anchor_positions, num_new, num_seen, cache, context_attention_mask, attention_mask)
        read_at = self._injections()
        reads: torch.Tensor | None = None

        hidden_states = noise_embeds
        for index in range(len(self.layers) + 1):
            if index in read_at:
                if reads is None:
                    anchor_rows = anchor_positions - num_past
                    reads = self._reads(noise_embeds, context, anchor_rows, states, hidden_states)
                hidden_states = hidden_states + reads[read_at.index(index)]
            if index < len(self.layers):
                mask = masks[(self.config.layer_types or [])[index]]
                hidden_states = self.layers[index](hidden_states, context, rotation, mask, cache, **kwargs)
        return ReadyDrafterOutput(last_hidden_state=self.norm(hidden_states), cache=cache if use_cache else None)

    def draft_logits(
        self, hidden_states: torch.Tensor, previous_ids: torch.Tensor, head: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft logits of whole blocks whose drafts are known: training and evaluation.

        Args:
            hidden_states (`torch.Tensor` of shape `[..., G, d]`): `last_hidden_state`, split into blocks.
            previous_ids (`torch.LongTensor` of shape `[..., G]`): The token before every slot; the anchor first.
            head (`nn.Module`): The target's output head.

        Returns:
            `tuple`: logits `[..., G, V]` in float32; logits of the confidences `[..., G]` in float32, or `None`.
        """
        logits = self.base_logits(hidden_states, head)
        if self.markov_head is not None:
            logits = logits + self.markov_head.markov_w2(self.markov_head(hidden_states, previous_ids)).float()
        return logits, self.confidence_logits(hidden_states, previous_ids)

    def base_logits(self, hidden_states: torch.Tensor, head: nn.Module) -> torch.Tensor:
        """Logits `[..., V]` in float32 of the target's head, before the sequential head."""
        weight = any_weight(head)
        # a quantized head takes its input as it is
        dtype = weight.dtype if weight.dtype in FLOATS else hidden_states.dtype
        return head(moved_to(head, hidden_states.to(dtype))).float().to(hidden_states.device)

    def confidence_logits(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """Logits `[...]` in float32 of P(accepted | all before accepted), or `None` without a confidence head."""
        if self.confidence_head is None:
            return None
        embeds = self.markov_head.markov_w1(previous_ids) if self.markov_head is not None else None
        return self.confidence_head(hidden_states, embeds).float()

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError("a drafter has no embeddings of its own: it shares the target's")

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise NotImplementedError("a drafter has no embeddings of its own: it shares the target's")

    def _masks(
        self,
        anchor_rows: torch.Tensor,
        num_new: int,
        num_seen: int,
        cache: Cache | None,
        context_attention_mask: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
    ) -> dict[str, torch.Tensor | None]:
        """The mask of each kind of layer, for the context rows that its cache hands out."""
        masks: dict[str, torch.Tensor | None] = {}
        for kind in dict.fromkeys(self.config.layer_types or ()):
            window = self.config.sliding_window if kind == "sliding_attention" else None
            num_rows = num_seen
            if cache is not None and window is not None:  # a sliding layer has kept the last window - 1 rows
                num_rows = min(num_seen - num_new, window - 1) + num_new
            if window is None and cache is not None and context_attention_mask is None and attention_mask is None:
                masks[kind] = None
                continue
            mask = block_mask(
                anchor_rows,
                self.config.block_size,
                num_rows,
                num_seen,
                window,
                context_attention_mask,
                attention_mask,
            )
            if self.config._attn_implementation == "eager":
                dtype = self.dtype
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
            masks[kind] = mask
        return masks

    def _reads(
        self,
        noise_embeds: torch.Tensor,
        context: torch.Tensor,
        anchor_rows: torch.Tensor,
        states: torch.Tensor | list[torch.Tensor] | AnchorStates | None,
        hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        """Residuals `[num_outputs, B, A * G, d]` of the reader; `hidden_states` `[B, A * G, d]` ask if slots do."""
        assert self.reader is not None
        anchor_embeds = noise_embeds[:, :: self.config.block_size]
        rows = nn.functional.pad(context, (0, 0, 1, 0))  # row r - 1 is now row r; zeros before a first token
        features = rows.gather(1, anchor_rows[..., None].expand(-1, -1, context.shape[-1]))
        slots = hidden_states.unflatten(1, (-1, self.config.block_size)) if self.config.reads_by_slot else None
        return self.reader(states, anchor_embeds, features, slots).flatten(2, 3)

    def _injections(self) -> list[int]:
        """Before which layers reads are added; the number of layers stands for the final norm."""
        if self.reader is None:
            return []
        last = len(self.layers)
        return {"input": [0], "layers": [*range(last)], "last": [last - 1], "head": [last]}[
            self.config.reader_injection
        ]

    def _check_inputs(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        anchor_positions: torch.Tensor | None,
        states: torch.Tensor | list[torch.Tensor] | AnchorStates | None,
        cache: Cache | None,
    ) -> None:
        config = self.config
        num_anchors = 1 if anchor_positions is None else anchor_positions.shape[1]
        if noise_embeds.shape[1] != num_anchors * config.block_size:
            raise ValueError(
                f"`noise_embeds` must hold whole blocks: {num_anchors} of {config.block_size} slots, got "
                f"{noise_embeds.shape[1]} slots"
            )
        width = len(config.target_layer_ids or ()) * config.hidden_size
        if context_hidden_states.shape[-1] != width:
            raise ValueError(
                f"`context_hidden_states` must have {width} channels (target layers {config.target_layer_ids} of "
                f"{config.hidden_size}), got {context_hidden_states.shape[-1]}"
            )
        if cache is not None and anchor_positions is not None:
            raise ValueError("`anchor_positions` cannot be combined with a `cache`: it serves one block at the end")
        if self.reader is None:
            return
        if len(self.reader.query) != config.block_size:
            raise ValueError(
                f"the reader was made for blocks of {len(self.reader.query)} slots, and `block_size` is now "
                f"{config.block_size}: cut drafts with `num_assistant_tokens` or `confidence_threshold` instead"
            )
        expected = [noise_embeds.shape[0], num_anchors, len(config.state_layer_ids or ()), *(config.state_shape or ())]
        got: list[int] | None = None
        if isinstance(states, list):  # of one anchor, where they lie in a cache
            got = [noise_embeds.shape[0], 1, len(states), *(states[0].shape[1:] if states else ())]
        elif states is not None:
            got = list(states.shape)
        if got != expected:
            raise ValueError(f"`states` of a drafter with a reader must be [B, A, N, H, K, V] = {expected}, got {got}")


class DrafterIsNoTarget(ReadyDrafterPreTrainedModel):
    """What `AutoModelForCausalLM` finds for a drafter: an error that says how to use it."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Refused.

        Raises:
            TypeError: always, saying how to use a drafter.
        """
        raise TypeError(f"{str(pretrained_model_name_or_path)!r} {NOT_A_TARGET}")

    @classmethod
    def _from_config(cls, config: ReadyDrafterConfig, **kwargs: Any) -> Any:
        raise TypeError(f"a model of type {config.model_type!r} {NOT_A_TARGET}")
