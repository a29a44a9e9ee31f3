r"""How a block drafter drafts inside `generate`: one session per call, one block per round.

    features of newly committed positions ---> context keys and values (kept, windowed)
    committed recurrent states ---> reader ---\
    anchor, mask, mask, ...    ---> backbone --+--> head of the target + sequential head ---> drafts, left to right

A session holds what belongs to one `generate` call. The drafter itself stays as it was: nothing of a target is ever
stored in it.
"""

import itertools
import logging
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.candidate_generator import CandidateGenerator

from ready_hf.candidates import DraftContext, ReadyCandidateGenerator, choose_drafts
from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.target import committed_states, output_head, recurrent_layers, state_views
from ready_hf.target_shape import check_token_ids


logger = logging.getLogger(__name__)

NOT_A_TARGET = (
    "is a drafter and has no embeddings or head of its own: load its target (AutoModelForCausalLM) and the drafter "
    "(AutoModel), and call `target.generate(**inputs, assistant_model=drafter)`"
)


def any_weight(module: nn.Module) -> torch.Tensor:
    """One of a module's tensors, for its device and dtype; some packed layers have buffers only."""
    return next(itertools.chain(module.parameters(), module.buffers()))


def moved_to(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    """`value` on the device of a module's weights; as it is if they are offloaded, for then a hook moves both."""
    weight = any_weight(module)
    return value if weight.is_meta else value.to(weight.device)


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: where its weights are or, if they are offloaded, where hooks bring them.

    Raises:
        ValueError: it has no weights but their shapes.
    """
    hooks = [hook for m in module.modules() if (hook := getattr(m, "_hf_hook", None)) is not None]
    parts = [part for hook in hooks for part in getattr(hook, "hooks", [hook])]  # several at one module
    devices = [getattr(part, "execution_device", None) for part in parts]
    is_offloaded = any(x is not None for x in devices)
    if not is_offloaded and any(weight.is_meta for weight in module.parameters()):
        raise ValueError(
            f"weights of {type(module).__name__} are on the meta device, which holds shapes only: load them with "
            "`from_pretrained`, to the CPU, a GPU, or with `device_map`"
        )
    weight = any_weight(module)
    return torch.device(next(x for x in devices if x is not None)) if weight.is_meta else weight.device


class DraftingMixin:
    """Makes a drafter model usable as `assistant_model=` and in `ready_hf.speculate`."""

    is_ready_drafter = True
    config: ReadyDrafterConfig

    def get_candidate_generator(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ) -> CandidateGenerator:
        """A generator for one `generate` call; see `ready_hf.Drafter`.

        Raises:
            ValueError: a field of the configuration is not allowed, the drafter was not made for this target or has no
            weights, or the prompt has ids beyond the target's vocabulary.
        """
        self.config.validate_architecture()  # fields may have been set since the drafter was made
        self.config.check_target(target, exact_vocabulary=False)
        check_token_ids(target, input_ids, "the prompt")
        return ReadyCandidateGenerator(self.make_session(target), target, generation_config, logits_processor)

    def make_session(self, target: PreTrainedModel) -> "DraftSession":
        """What drafts in one call."""
        return DraftSession(self, target)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """A drafter does not generate by itself.

        Raises:
            TypeError: always, saying how to use it.
        """
        raise TypeError(f"{type(self).__name__} {NOT_A_TARGET}")


class DraftSession:
    """Drafts for one `generate` call; a `BlockDrafter`.

    Args:
        drafter (`ReadyDrafterModel`): The model.
        target (`PreTrainedModel`): Its target, whose embeddings and head are used in place.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel):
        config: ReadyDrafterConfig = drafter.config
        self.block_size = config.block_size
        self.target_layer_ids = list(config.target_layer_ids or ())
        self._drafter, self._config, self._device = drafter, config, device_of(drafter)
        self._embedding: nn.Module = target.get_input_embeddings()
        self._head: Any = output_head(target)
        by_index = {layer.layer_idx: layer for layer in recurrent_layers(target)}
        self._state_layers = [by_index[i] for i in config.state_layer_ids or ()]
        self._threshold = config.confidence_threshold
        self._temperatures = config.confidence_temperatures or [1.0] * config.block_size
        self._cache = DynamicCache(config=config)
        is_windowed = "full_attention" not in (config.layer_types or ())
        # most context rows that any slot's window reaches; None without a limit
        self._max_rows = config.sliding_window - 1 if is_windowed and config.sliding_window else None
        self._num_tokens = 0  # tokens before the anchor, padding included
        self._num_rows = 0  # of these, handed to the drafter as context rows
        self._is_padded: bool | None = None

    def draft(self, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One block; see `BlockDrafter.draft`. The confidence threshold may cut it, down to no draft at all."""
        hidden_states = self._block(context)[:, : context.num_drafts]
        logits = self._drafter.base_logits(hidden_states, self._head)
        return self._tokens(hidden_states, logits, context)

    def states(self, context: DraftContext) -> torch.Tensor | list[torch.Tensor] | None:
        """What the reader reads in this round; `None` without a reader.

        The committed states `[B, N, H, K, V]`, or where kernels run, N tensors `[B, H, K, V]` that still belong to the
        cache: they are read where they lie.
        """
        if not self._state_layers:
            return None
        views = state_views(context.cache, self._state_layers)
        alike = len({(x.shape, x.stride(), x.dtype, x.device) for x in views}) == 1
        if alike and views[0].device == self._device and self._drafter.reader.reads_in_place(views[0]):
            return views
        return committed_states(context.cache, self._state_layers)

    def known(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids with those beyond the drafter's own vocabulary replaced: after them, any guess will do."""
        return ids.clamp_max(self._config.vocab_size - 1)

    def _block(self, context: DraftContext) -> torch.Tensor:
        """Hidden states `[B, G, d]` of the block; the features of the round join the context."""
        device, dtype = self._device, self._drafter.dtype
        features = torch.cat([context.features[i] for i in self.target_layer_ids], dim=-1)
        # with `inputs_embeds` the ids lack the prompt, so feature rows [B, new tokens, m * d] are counted too
        self._num_tokens = max(context.input_ids.shape[1] - 1, self._num_tokens + features.shape[1])
        if self._max_rows is not None:
            features = features[:, -self._max_rows :]
        num_new, length = features.shape[1], self._num_tokens
        self._num_rows += num_new
        positions = self._positions(context, num_new + 1).to(device)
        mask = None
        if context.attention_mask is not None and self._is_padded:
            mask = context.attention_mask[:, length - self._num_rows : length].to(device)
        states = self.states(context)
        if isinstance(states, torch.Tensor):
            states = states[:, None].to(device)  # of one anchor
        outputs = self._drafter(
            noise_embeds=self._noise_embeds(context.input_ids[:, -1:]).to(device, dtype),
            context_hidden_states=features.to(device, dtype),
            states=states,
            context_attention_mask=mask,
            position_ids=positions[:, -1:] + torch.arange(self.block_size, device=device),
            context_position_ids=positions[:, :-1],
            cache=self._cache,
            use_cache=True,
            return_dict=True,  # whatever the configuration says
        )
        return outputs.last_hidden_state

    def _positions(self, context: DraftContext, count: int) -> torch.Tensor:
        """Positions of the last `count` tokens, the anchor's last, `[B, count]`: the target's own, or counted."""
        mask, own = context.attention_mask, context.position_ids
        if self._is_padded is None:
            self._is_padded = mask is not None and not bool(mask.all())
        if own is not None and own.shape[1] >= count:
            return own[:, -count:]
        if mask is not None and self._is_padded:
            return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -count:]
        positions = torch.arange(self._num_tokens + 1 - count, self._num_tokens + 1, device=context.input_ids.device)
        return positions.expand(len(context.input_ids), -1)

    def _noise_embeds(self, anchors: torch.Tensor) -> torch.Tensor:
        masks = anchors.new_full((anchors.shape[0], self.block_size - 1), self._config.mask_token_id)
        ids = torch.cat([anchors, masks], dim=1)
        return self._embedding(moved_to(self._embedding, ids))

    def _tokens(
        self, hidden_states: torch.Tensor, logits: torch.Tensor, context: DraftContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts left to right, from the head's logits `[B, n, V]` and the sequential head's corrections.

        Rows of the vocabulary that only one of drafter and target has are never drafted.
        """
        markov, threshold = self._drafter.markov_head, self._threshold
        num_ids = min(self._config.vocab_size, logits.shape[-1])
        num_others = logits.shape[-1] - num_ids
        logits = logits[..., :num_ids]
        previous, latent = self.known(context.input_ids[:, -1].to(logits.device)), None
        survival = torch.ones(len(previous), device=logits.device)
        drafts: list[torch.Tensor] = []
        warped: list[torch.Tensor] = []
        finite: list[torch.Tensor] = []
        for k in range(logits.shape[1]):
            hidden = hidden_states[:, k]
            if threshold:
                # decided before draft k is drawn, so that the choice of the length tells nothing about it
                confidence = self._drafter.confidence_logits(hidden, previous) / self._temperatures[k]
                survival = survival * torch.sigmoid(confidence)
                if float(survival.max()) < threshold:  # in every row; waits for the device
                    break
            step_logits = logits[:, k]
            if markov is not None:
                latent = markov.step(hidden, previous, latent)
                step_logits = step_logits + markov.markov_w2(latent).float()[..., :num_ids]
            finite.append(torch.isfinite(step_logits).all())
            step_logits = step_logits.masked_fill(~finite[-1], 0.0)  # something to draw from; dropped below
            previous, sampled_from = choose_drafts(step_logits, context.do_sample, context.warpers)
            drafts.append(previous)
            if sampled_from is not None:
                warped.append(sampled_from)
        num_finite = int(torch.stack(finite).long().cumprod(0).sum()) if finite else 0  # one wait for the device
        if num_finite < len(finite):
            logger.warning(
                "ready_hf: draft logits are not finite, so %d of %d drafts are dropped in this round: are drafter "
                "(%s) or target broken, or overflowing in their dtype?",
                len(finite) - num_finite,
                len(finite),
                hidden_states.dtype,
            )
        if not num_finite:
            return context.input_ids[:, :0], None
        tokens = torch.stack(drafts[:num_finite], dim=1).to(context.input_ids.device)
        if not warped:
            return tokens, None
        drawn_from = torch.stack(warped[:num_finite], dim=1)
        return tokens, nn.functional.pad(drawn_from, (0, num_others), value=-torch.inf) if num_others else drawn_from
