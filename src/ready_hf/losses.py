"""The drafting loss of DSpark, and the numbers that tell how well a drafter drafts.

For slot k = 0, 1, ... of a block, with p_d the drafter's and p_t the target's distribution of the token it predicts:

    w_k (0.1 CE(p_d, label) + 0.9 ||p_d - p_t||_1 + 1.0 BCE(c_k, 1 - ||p_d - p_t||_1 / 2)),    w_k = exp(-k / 4)

1 - ||p_d - p_t||_1 / 2 is the probability that speculative sampling accepts the draft, so the confidence c_k learns
that, and the expected tokens of a round are tau = 1 + sum_k prod_{i <= k} of it (DSpark
paper; slots count from 0 here). On text x that the target drew itself at temperature 1, the mean of
prod_{i <= k} min(1, p_d(x_i) / p_t(x_i)) is the probability that k drafts are accepted, without the bias that the
product of means has (`tau_of_samples`; ours). On other text it means nothing.

Distributions over the whole vocabulary exist for a few blocks at a time only: one chunk is computed, reduced to sums
and, in training, computed again for its gradient.

Shapes: M blocks (all anchors of all rows), G slots, d hidden size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


DraftLogits = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
TargetLogits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DraftingLoss:
    """Weights of the terms, and how much is computed at once.

    Args:
        cross_entropy (`float`): Weight of the cross entropy with the text.
        distance (`float`): Weight of ||p_d - p_t||_1.
        confidence (`float`): Weight of the confidence's binary cross entropy.
        decay (`float`): Slot k has the weight exp(-k / decay); infinite for equal weights.
        max_logits (`int`): Most logits of one chunk; a chunk has at least one block.
    """

    cross_entropy: float = 0.1
    distance: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    max_logits: int = 2**26

    def slot_weights(self, block_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """w_k `[G]`."""
        return torch.exp(-torch.arange(block_size, device=device, dtype=torch.float32) / self.decay)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        target_hidden_states: torch.Tensor,
        labels: torch.Tensor,
        previous_ids: torch.Tensor,
        mask: torch.Tensor,
        draft_logits: DraftLogits,
        target_logits: TargetLogits,
    ) -> "LossSums":
        """Sums over all slots that count.

        Args:
            hidden_states (`torch.Tensor` of shape `[M, G, d]`): The drafter's; gradients flow into them.
            target_hidden_states (`torch.Tensor` of shape `[M, G, d]`): The target's, one position before each label.
            labels (`torch.LongTensor` of shape `[M, G]`): The text.
            previous_ids (`torch.LongTensor` of shape `[M, G]`): The token before each label.
            mask (`torch.BoolTensor` of shape `[M, G]`): Slots that count.
            draft_logits (`Callable`): Hidden states `[m, G, d]` and previous ids `[m, G]` to logits `[m, G, V]` and
                logits of the confidence `[m, G]` or `None`.
            target_logits (`Callable`): Target hidden states `[m, G, d]` to logits `[m, G, V]`; run without gradients.
        """
        num_blocks, block_size = labels.shape
        vocab_size = _vocab_size(target_logits, target_hidden_states)
        size = max(1, self.max_logits // (block_size * vocab_size))
        tensors = (hidden_states, target_hidden_states, labels, previous_ids, mask)
        total: LossSums | None = None
        for start in range(0, num_blocks, size):
            part = [x[start : start + size] for x in tensors]
            if num_blocks > size and torch.is_grad_enabled() and hidden_states.requires_grad:
                options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
                sums = checkpoint(self._chunk, part, draft_logits, target_logits, **options)
            else:
                sums = self._chunk(part, draft_logits, target_logits)
            made = LossSums(*sums)
            total = made if total is None else total + made
        assert total is not None
        return total

    def _chunk(
        self, tensors: Sequence[torch.Tensor], draft_logits: DraftLogits, target_logits: TargetLogits
    ) -> tuple[torch.Tensor, ...]:
        """The fields of `LossSums`, in order, from the five tensors of a chunk."""
        hidden_states, target_hidden_states, labels, previous_ids, mask = tensors
        with torch.no_grad():
            wanted = target_logits(target_hidden_states).float().softmax(-1)
        logits, confidence_logits = draft_logits(hidden_states, previous_ids)
        log_drafted = logits.float().log_softmax(-1)
        cross_entropy = -log_drafted.gather(-1, labels[..., None]).squeeze(-1)
        distance = (log_drafted.exp() - wanted).abs().sum(-1)
        accepted = (1 - 0.5 * distance.detach()).clamp(0.0, 1.0)
        drawn = wanted.gather(-1, labels[..., None]).squeeze(-1)
        ratio = ((-cross_entropy.detach()).exp() / drawn.clamp_min(torch.finfo(drawn.dtype).tiny)).clamp(max=1.0)
        per_slot = self.cross_entropy * cross_entropy + self.distance * distance
        calibration = torch.zeros_like(accepted)
        if confidence_logits is not None:
            calibration = F.binary_cross_entropy_with_logits(confidence_logits.float(), accepted, reduction="none")
            per_slot = per_slot + self.confidence * calibration
        per_slot = per_slot * self.slot_weights(labels.shape[-1], labels.device)
        whole = mask.all(-1, keepdim=True)  # survival needs every slot before
        return (
            _kept(per_slot, mask).sum(),
            mask.sum(0),
            whole.sum(),
            _kept(accepted, mask).sum(0),
            _kept(accepted.cumprod(-1), whole.expand_as(mask)).sum(0),
            _kept(ratio.cumprod(-1), whole.expand_as(mask)).sum(0),
            _kept(cross_entropy.detach(), mask).sum(),
            _kept(calibration.detach(), mask).sum(),
        )


@dataclass
class LossSums:
    """Sums over the slots that count.

    Args:
        loss (`torch.Tensor` of shape `[]`): Weighted loss; the only field with a gradient.
        num_slots (`torch.Tensor` of shape `[G]`): Slots that count, by position in the block.
        num_blocks (`torch.Tensor` of shape `[]`): Blocks of which every slot counts.
        accepted (`torch.Tensor` of shape `[G]`): Probabilities that a draft is accepted, given all before it are.
        survived (`torch.Tensor` of shape `[G]`): Probabilities that it and all before it are; whole blocks only.
        survived_samples (`torch.Tensor` of shape `[G]`): The same from the text's own tokens, see the module.
        cross_entropy (`torch.Tensor` of shape `[]`): Cross entropy with the text.
        confidence (`torch.Tensor` of shape `[]`): Binary cross entropy of the confidence.
    """

    loss: torch.Tensor
    num_slots: torch.Tensor
    num_blocks: torch.Tensor
    accepted: torch.Tensor
    survived: torch.Tensor
    survived_samples: torch.Tensor
    cross_entropy: torch.Tensor
    confidence: torch.Tensor

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def detach(self) -> "LossSums":
        """Without the gradient of the loss."""
        return self.map(torch.Tensor.detach)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LossSums":
        """`function` of every sum."""
        return LossSums(*(function(getattr(self, f.name)) for f in fields(self)))

    def metrics(self) -> dict[str, float]:
        """Means: `loss`, `cross_entropy`, `confidence_bce`, `tau`, `acceptance_1` to `acceptance_G`, `num_blocks`.

        And `tau_of_samples`, for text that the target drew at temperature 1. Not a number where nothing counts.
        """
        slots = float(self.num_slots.sum())
        survived, of_samples = (
            _ratios(sums.tolist(), [float(self.num_blocks)] * len(sums))
            for sums in (self.survived, self.survived_samples)
        )
        accepted = _ratios(self.accepted.tolist(), self.num_slots.tolist())
        names = ("loss", "cross_entropy", "confidence")
        loss, cross_entropy, confidence = _ratios((float(getattr(self, name).detach()) for name in names), [slots] * 3)
        return {
            "loss": loss,
            "tau": 1 + sum(survived),
            "tau_of_samples": 1 + sum(of_samples),
            "cross_entropy": cross_entropy,
            "confidence_bce": confidence,
            **{f"acceptance_{k + 1}": value for k, value in enumerate(accepted)},
            "num_blocks": float(self.num_blocks),
        }


def _kept(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.zeros_like(values))


def _ratios(sums: Iterable[float], counts: list[float]) -> list[float]:
    return [value / count if count else math.nan for value, count in zip(sums, counts, strict=True)]


def _vocab_size(target_logits: TargetLogits, target_hidden_states: torch.Tensor) -> int:
    with torch.no_grad():
        return int(target_logits(target_hidden_states[:1, :1]).shape[-1])
