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


class CompleteFolder(TrainerCallback):
    """Puts card and shim beside what a trainer uploads while it trains, which is the weights alone."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before every upload."""
        if self._trainer.is_world_process_zero():
            self._trainer.model.config.save_pretrained(args.output_dir)  # writes the shim
            self._trainer.create_model_card()
