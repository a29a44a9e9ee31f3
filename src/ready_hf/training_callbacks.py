"""What happens between the steps of a training: steps that are skipped, and folders that are made whole."""

import logging
from typing import Any

import torch
from transformers import Trainer, TrainerCallback


logger = logging.getLogger(__name__)


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
