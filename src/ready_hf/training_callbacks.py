"""What happens between the steps of a training: steps that are skipped, weights that are watched, whole folders."""

import logging
from typing import Any

import torch
from transformers import Trainer, TrainerCallback


logger = logging.getLogger(__name__)

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


class SkipNonFiniteSteps(TrainerCallback):
    """Drops the gradients of a step that has one that is not finite: the optimizer then changes nothing.

    In float16 training the gradient scaler does that itself, and must find the gradients as they are.
    """

    def __init__(self) -> None:
        self.num_skipped = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks the gradients of the whole accumulated batch."""
        if getattr(kwargs.get("optimizer"), "scaler", None) is not None:
            return
        model = kwargs["model"]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if gradients and not bool(torch.nn.utils.get_total_norm(gradients).isfinite()):
            self.num_skipped += 1
            model.zero_grad(set_to_none=True)
            logger.warning(
                "ready_hf: loss or gradient of step %d is not finite, so the step is skipped (%d so far): is the "
                "learning rate too high, or the target overflowing in its dtype?",
                state.global_step + 1,
                self.num_skipped,
            )


class WatchUntouchedWeights(TrainerCallback):
    """Warns at the end of a training of weights that should have learned and did not.

    Such a tensor never had a gradient, or its gradient changed nothing: a learning rate of 0, or steps that are too
    small for a low precision. Runs of less than three steps say nothing, because maps start at zero here and hide what
    lies before them in the first one. Of a sharded tensor one part in any process counts.
    """

    _fewest_steps = 3

    def __init__(self) -> None:
        self._first_step = 0
        self._without_gradient: set[str] = set()
        self._before: dict[str, tuple[int, int]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remembers two sums of every trainable tensor."""
        self._first_step, self._before = state.global_step, _sums_of_weights(kwargs["model"])
        self._without_gradient = set(self._before)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Looks at tensors that had no gradient so far; soon there are none."""
        if self._without_gradient:
            for name, parameter in kwargs["model"].named_parameters():
                gradient = parameter.grad if name in self._without_gradient else None
                if gradient is not None and bool(_local(gradient).any()):
                    self._without_gradient.discard(name)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares."""
        if state.global_step - self._first_step < self._fewest_steps:
            return
        after = _sums_of_weights(kwargs["model"])
        here = [(name, name not in self._without_gradient, self._before.get(name) != after[name]) for name in after]
        parts = [here] * args.world_size
        if args.world_size > 1:
            torch.distributed.all_gather_object(parts, here)
        everywhere = [entry for part in parts for entry in part]
        names = {name for name, _, _ in everywhere}
        learning = {name for name, has_gradient, _ in everywhere if has_gradient}
        unmoved = names - {name for name, _, has_moved in everywhere if has_moved}
        if state.global_step <= args.freeze_backbone_steps:  # all of it on purpose
            unmoved = {name for name in unmoved if name.startswith("reader.")}
        if not learning:  # optimizers that step within the backward, and DeepSpeed, leave no gradients to look at
            learning = names
        if not state.is_world_process_zero:
            return
        for found, what in (
            (names - learning, "never had a gradient"),
            (unmoved & learning, "had gradients and are as they were"),
        ):
            if found:
                logger.warning(
                    "ready_hf: %d of %d trainable tensors %s (%s%s): is a part of the drafter left out of the loss, "
                    "or its learning rate 0 or too small for its dtype?",
                    len(found),
                    len(names),
                    what,
                    ", ".join(sorted(found)[:5]),
                    ", ..." if len(found) > 5 else "",
                )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _sums_of_weights(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Two sums of every trainable tensor of which this process has a part; equal ones mean equal weights.

    Of the bits: exact in any precision, also on devices without float64.
    """
    parts = {name: _local(p) for name, p in model.named_parameters() if p.requires_grad and _local(p).numel()}
    sums = []
    for part in parts.values():
        bits = part.flatten().view(BITS[part.element_size()])
        squares = [some.long().square().sum() for some in bits.split(2**22)]  # that many at once are widened
        sums.append(torch.stack([bits.sum(dtype=torch.int64), sum(squares)]))
    return {name: tuple(both.tolist()) for name, both in zip(parts, sums, strict=True)}


class Passes(TrainerCallback):
    """Counts passes over the training data.

    The trainer's own `epoch` comes late in the first step of a pass over a stream, whose length it does not know.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._is_first, self._is_resumed, self._first_step = True, False, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A training may begin anew, or go on in the middle of a pass."""
        self.epoch, self._is_first, self._is_resumed = int(state.epoch or 0), True, state.global_step > 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before the first batch of a pass is taken."""
        if not self._is_first:
            if self._is_resumed and self.epoch and state.global_step == self._first_step:
                logger.warning("ready_hf: the stream had ended before this checkpoint, so its rows start anew")
            self.epoch, self._is_resumed = self.epoch + 1, False
        self._is_first, self._first_step = False, state.global_step

    def check_stream(self, global_step: int, num_batches: int, wanted: int) -> None:
        """To be called where a stream ends within a step.

        Raises:
            ValueError: no pass would ever have a step, and the training no end.
        """
        if global_step == self._first_step and not self._is_resumed:
            raise ValueError(
                f"the stream has {num_batches} batches, and a step accumulates {wanted}: give more rows, or lower "
                "`gradient_accumulation_steps` or `per_device_train_batch_size`"
            )


class CompleteFolder(TrainerCallback):
    """Puts card and shim beside what a trainer uploads while it trains, which is the weights alone."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before every upload."""
        if self._trainer.is_world_process_zero():
            self._trainer.model.config.save_pretrained(args.output_dir)  # writes the shim
            self._trainer.create_model_card()
