"""What a drafter learns from: a frozen target's features, states and distributions at the anchors of a text.

    text  x_0 ... x_{a-1} | x_a  x_{a+1} ...  x_{a+G}
          features,         anchor, then the labels of slots 0 .. G-1
          states

An anchor at index a stands for the moment at which x_a is chosen but not yet fed: the drafter sees features of
positions before a, and states that have consumed x_0 .. x_{a-1}. Slot k predicts x_{a+1+k}; the target's distribution
of that token is read at position a+k.

Shapes: B rows, T tokens, A anchors, G slots, d hidden size, m feature layers, N recurrent layers that are read, H
heads, K key and V value channels of a state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ready_hf.anchor_states import AnchorStates
from ready_hf.chunk_states import forward_with_states
from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.drafting import any_weight
from ready_hf.target import UnsupportedTargetError, output_head, recurrent_layers
from ready_hf.target_features import FeatureCapture


@dataclass
class DraftingBatch:
    """One batch of blocks to learn from.

    Args:
        noise_embeds (`torch.Tensor` of shape `[B, A * G, d]`): The target's embeddings of anchor, mask, mask, ...
        context_hidden_states (`torch.Tensor` of shape `[B, T, m * d]`): Features of all positions.
        anchor_positions (`torch.LongTensor` of shape `[B, A]`): Indices of the anchors.
        states (`AnchorStates`, or `torch.Tensor` of shape `[B, A, N, H, K, V]`, *optional*): Committed states before
            the anchors, in float32; `None` if the drafter reads none. `FrozenTarget` gives `AnchorStates`.
        labels (`torch.LongTensor` of shape `[B, A, G]`): The tokens after the anchors.
        previous_ids (`torch.LongTensor` of shape `[B, A, G]`): The token before every label.
        loss_mask (`torch.BoolTensor` of shape `[B, A, G]`): Slots that count.
        target_hidden_states (`torch.Tensor` of shape `[B, A, G, d]`): What the target's head is applied to for the
            distribution of every label.
    """

    noise_embeds: torch.Tensor
    context_hidden_states: torch.Tensor
    anchor_positions: torch.Tensor
    states: AnchorStates | torch.Tensor | None
    labels: torch.Tensor
    previous_ids: torch.Tensor
    loss_mask: torch.Tensor
    target_hidden_states: torch.Tensor


class FrozenHead(nn.Module):
    """The target's output head: gradients flow through it, and none into it, whether or not its weights want one.

    Args:
        head (`nn.Module`): The head, which stays as it is.
    """

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` from `[..., d]`."""
        learning = {name: p.detach() for name, p in self.head.named_parameters() if p.requires_grad}
        if learning:
            return torch.func.functional_call(self.head, learning, (hidden_states,))
        return self.head(hidden_states)


class FrozenTarget:
    """A target as the source of training data; it is not changed, and no module owns it.

    Args:
        target (`PreTrainedModel`): Text-only or composite causal language model.
        config (`ReadyDrafterConfig`): Of the drafter to be trained.

    Raises:
        ValueError: the drafter's configuration does not fit this target, or the target's output head is offloaded, or
        quantized in a way that hands no gradient on.
    """

    def __init__(self, target: PreTrainedModel, config: ReadyDrafterConfig):
        config.check_target(target)
        if any(parameter.is_meta for parameter in output_head(target).parameters()):
            raise ValueError(
                "the `device_map` left the target's output head without a device of its own (`cpu` beside GPUs, or "
                "`disk`), and the drafter's gradients go through it: place it, mostly `lm_head`, on a GPU"
            )
        if getattr(target, "is_quantized", False) and not _hands_gradients_on(target, config.hidden_size):
            raise ValueError(
                f"{type(output_head(target)).__name__}, the target's quantized output head, hands no gradient on, and "
                "the drafter's go through it: leave the head out (bitsandbytes: `llm_int8_skip_modules`)"
            )
        self.target, self.config = target, config
        by_index = {layer.layer_idx: layer for layer in recurrent_layers(target)}
        self._state_layers = [by_index[i] for i in config.state_layer_ids or ()]
        self._logit_scale: float | None = None

    @property
    def head(self) -> FrozenHead:
        """The target's output head, for the drafter's logits."""
        return FrozenHead(output_head(self.target))

    @torch.no_grad()
    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's logits `[..., V]` in float32, from its last hidden states `[..., d]`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = output_head(self.target)(hidden_states).float().to(hidden_states.device)
        return logits if self._logit_scale is None else logits * self._logit_scale

    @torch.no_grad()
    def batch(
        self,
        input_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        anchor_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        check: bool = True,
    ) -> DraftingBatch:
        """One forward of the target over `input_ids`, and what a drafter learns from at the anchors.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, T]`): Text; padding, if any, on the right.
            anchor_positions (`torch.LongTensor` of shape `[B, A]`): Indices, 0 to T - 1.
            anchor_mask (`torch.BoolTensor` of shape `[B, A]`, *optional*): `False` for dummies.
            attention_mask (`torch.Tensor` of shape `[B, T]`, *optional*): 0 for padding.
            loss_mask (`torch.Tensor` of shape `[B, T]`, *optional*): 1 for tokens to be learned. A block counts up to
                its first other token, or the end of the text; without a mask only if all of it is in the text.
            check (`bool`): Look at ids and anchors first, which waits for the device. `False` is for rows without
                padding that are known to be legal.

        Raises:
            ValueError: ids outside of the vocabulary, the mask token in the text, padding on the left, an anchor
            beyond the text; `check=False` with an `attention_mask`.
        """
        if check:
            input_ids = checked_ids(input_ids, self.config, attention_mask)
        elif attention_mask is not None:
            raise ValueError("`check=False` is for rows without padding: leave `attention_mask` out")
        length, block_size = input_ids.shape[1], self.config.block_size
        if check and anchor_positions.numel():
            first, last = int(anchor_positions.min()), int(anchor_positions.max())
            if not 0 <= first <= last < length:
                raise ValueError(f"anchors must be 0 to {length - 1}, got {first} to {last}")
        before, after = _slot_positions(anchor_positions, block_size, length)
        counted = self.loss_mask(input_ids, anchor_positions, anchor_mask, attention_mask, loss_mask)
        context, hidden_states, states = self._forward(input_ids, anchor_positions)
        index = before.flatten(1)[..., None].expand(-1, -1, hidden_states.shape[-1])
        return DraftingBatch(
            noise_embeds=self._noise_embeds(input_ids, anchor_positions),
            context_hidden_states=context,
            anchor_positions=anchor_positions,
            states=states,
            labels=_taken(input_ids, after),
            previous_ids=_taken(input_ids, before),
            loss_mask=counted,
            target_hidden_states=hidden_states.gather(1, index).unflatten(1, before.shape[1:]),
        )

    def loss_mask(
        self,
        input_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        anchor_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slots that count `[B, A, G]`, without a forward; arguments as in `batch`."""
        block_size, length = self.config.block_size, input_ids.shape[1]
        sizes = range(1, block_size + 1) if loss_mask is not None else [block_size] * block_size
        inside = [_is_whole(anchor_positions, length, size, attention_mask) for size in sizes]
        counted = torch.stack(inside, dim=-1)
        if anchor_mask is not None:
            counted = counted & anchor_mask.bool()[..., None]
        if loss_mask is None:
            return counted
        _, after = _slot_positions(anchor_positions, block_size, length)
        return counted & _taken(loss_mask.bool(), after).cumprod(-1).bool()

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, AnchorStates | None]:
        """Features `[B, T, m * d]`, last hidden states `[B, T, d]` and states or `None`."""
        ids = list(self.config.target_layer_ids or ())
        # a trainer's autocast is for the drafter: the target runs as it does when it generates
        with (
            _evaluating(self.target),
            torch.autocast(input_ids.device.type, enabled=False),
            FeatureCapture(self.target, ids) as capture,
        ):
            hidden_states, states = forward_with_states(self.target, input_ids, positions, self._state_layers)
            features = capture.take()
            if self._logit_scale is None:
                self._logit_scale = self._measured_scale(input_ids[:1, :8])
        # layers of one model may lie on several devices
        return torch.cat([features[i].to(input_ids.device) for i in ids], dim=-1), hidden_states, states

    def _noise_embeds(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        blocks = torch.full_like(positions, self.config.mask_token_id)[..., None].repeat(1, 1, self.config.block_size)
        blocks[..., 0] = input_ids.gather(1, positions)
        return self.target.get_input_embeddings()(blocks.flatten(1)).to(input_ids.device)

    def _measured_scale(self, input_ids: torch.Tensor) -> float:
        """What the model multiplies its head's output with: some families scale their logits."""
        hidden_states, _ = forward_with_states(self.target, input_ids, input_ids[:, :0], [])
        own = self.target(input_ids=input_ids, use_cache=False).logits.float()
        plain = self.logits(hidden_states)
        scale = float((own * plain).sum() / plain.square().sum())
        scale = 1.0 if abs(scale - 1) < 1e-2 else scale
        if float((own - scale * plain).norm()) > 2e-2 * float(own.norm()):
            raise UnsupportedTargetError(
                f"{type(self.target).__name__} does more to its logits than to scale them, so its distributions "
                "cannot be had from its last hidden states"
            )
        return scale


def checked_ids(
    input_ids: torch.Tensor, config: ReadyDrafterConfig, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """`input_ids` `[B, T]` with padding replaced by a legal id.

    Raises:
        ValueError: ids outside of the vocabulary, the mask token in the text, padding on the left.
    """
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    illegal = mask & ((input_ids < 0) | (input_ids >= config.vocab_size))
    masked = mask & (input_ids == config.mask_token_id)
    left = mask[:, 1:] & ~mask[:, :-1]
    if not bool(illegal.any() | masked.any() | left.any()):  # one wait for the device
        return input_ids.masked_fill(~mask, 0 if config.mask_token_id else 1)
    if bool(illegal.any()):
        raise ValueError(
            f"token ids must be 0 to {config.vocab_size - 1} (the target's vocabulary has {config.vocab_size} rows), "
            f"got {int(input_ids[illegal][0])}: was the text tokenized for this target?"
        )
    if bool(masked.any()):
        raise ValueError(
            f"the mask token ({config.mask_token_id}) stands in the training text, so the drafter could not tell text "
            "from slots: choose another `mask_token_id`, or drop these rows"
        )
    raise ValueError("training rows must be padded on the right: `attention_mask` must not go from 0 to 1")


def legal_anchors(
    attention_mask: torch.Tensor, block_size: int, stride: int = 1, loss_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Where an anchor may stand `[B, T]`: something before it, its block in the text, its first label learned.

    Without a `loss_mask` the whole block must be in the text. With one, the first label is enough: the last answer of
    a conversation may be shorter than a block, and its end should be learned at every slot.

    Args:
        attention_mask (`torch.Tensor` of shape `[B, T]`): 0 for padding, on the right.
        block_size (`int`): G.
        stride (`int`): Multiples of it only.
        loss_mask (`torch.Tensor` of shape `[B, T]`, *optional*): 1 for tokens to be learned.
    """
    batch, length = attention_mask.shape
    positions = torch.arange(length, device=attention_mask.device).expand(batch, -1)
    needed = block_size if loss_mask is None else 1
    legal = _is_whole(positions, length, needed, attention_mask) & (positions > 0) & (positions % stride == 0)
    if loss_mask is not None:
        legal = legal & _taken(loss_mask.bool(), (positions + 1).clamp_max(length - 1))
    return legal


def choose_anchors(
    legal: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Different legal anchors for every row: at random with a generator, evenly spread without.

    Args:
        legal (`torch.BoolTensor` of shape `[B, T]`): From `legal_anchors`.
        num_anchors (`int`): A, at most; fewer if no row has as many tokens.
        generator (`torch.Generator`, *optional*): Of the CPU.

    Returns:
        `tuple`: positions `[B, A]` in ascending order, and a mask `[B, A]` that is `False` for dummies (at 0) in rows
        with too few legal places.
    """
    if generator is None:
        count, rank = legal.sum(-1, keepdim=True).clamp_min(1), legal.long().cumsum(-1)
        wanted = count.clamp_max(num_anchors)
        scores = (rank * wanted // count > (rank - 1) * wanted // count).float()
    else:
        scores = torch.rand(legal.shape, generator=generator).to(legal.device)
    best = scores.masked_fill(~legal, -1.0).topk(min(num_anchors, legal.shape[1]), dim=-1)
    is_chosen = best.values >= 0 if generator is not None else best.values > 0
    positions = torch.where(is_chosen, best.indices, 0).sort(dim=-1).values
    return positions, positions > 0


def _hands_gradients_on(target: PreTrainedModel, hidden_size: int) -> bool:
    head = output_head(target)
    inputs = torch.randn(1, hidden_size, device=any_weight(head).device, dtype=target.dtype)
    with torch.no_grad():
        head(inputs)  # may pack its weight anew, for speed
    with torch.enable_grad():
        return bool(head(inputs.requires_grad_()).requires_grad)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _is_whole(
    positions: torch.Tensor, length: int, block_size: int, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Anchors whose last label is still text."""
    lengths: torch.Tensor | int = length if attention_mask is None else attention_mask.long().sum(-1, keepdim=True)
    return positions + block_size < lengths


def _slot_positions(positions: torch.Tensor, block_size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the previous tokens and of the labels, both `[B, A, G]`, kept inside the text."""
    before = positions[..., None] + torch.arange(block_size, device=positions.device)
    return before.clamp_max(length - 1), (before + 1).clamp_max(length - 1)


def _taken(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`values` `[B, T]` at `index` `[B, ...]`."""
    return values.gather(1, index.flatten(1)).view(index.shape)
