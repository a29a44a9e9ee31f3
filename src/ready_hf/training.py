"""Training of a drafter against a frozen target, with transformers' `Trainer`.

    rows of token ids --collator--> padded ids --anchors--> FrozenTarget: features, states, target rows
                                                     |                 |
                                                     +--> drafter <----+--> drafting loss, chunk by chunk

The trainer holds the target, but only the drafter is its model: nothing of the target is wrapped, optimised or saved.
The anchors of a row depend on the seed, its tokens and the epoch alone (`anchors.py`), so a resumed run, another
variant of the drafter, or another split of a batch into processes and accumulated parts sees what it would have seen.

Shapes: B rows, T tokens, A anchors, G slots, d hidden size.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from ready_hf.anchors import anchors_of_rows
from ready_hf.checkpoints import check_complete, check_optimizer, check_weights, last_complete_checkpoint
from ready_hf.collator import DraftingCollator, check_is_one_text
from ready_hf.configuration_ready import ReadyDrafterConfig
from ready_hf.features import DraftingBatch, FrozenTarget, choose_anchors, legal_anchors
from ready_hf.hub import keep_or_write_card, name_on_hub
from ready_hf.losses import DraftingLoss, LossSums
from ready_hf.modeling_ready import ReadyDrafterModel
from ready_hf.schedules import freeze_rest, split_reader_groups
from ready_hf.sharding import check_sharding, hide_missing_embeddings, is_spread
from ready_hf.training_arguments import ReadyTrainingArguments
from ready_hf.training_callbacks import CompleteFolder, Passes, SkipNonFiniteSteps, WatchUntouchedWeights
from ready_hf.training_memory import TrainingMemory, training_memory


logger = logging.getLogger(__name__)

CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # transformers 5.24 renamed the option

__all__ = ["DraftingCollator", "ReadyTrainer", "ReadyTrainingArguments", "drafting_sums"]


def drafting_sums(
    model: Callable[..., Any],
    drafter: ReadyDrafterModel,
    frozen: FrozenTarget,
    batch: DraftingBatch,
    loss: DraftingLoss,
) -> LossSums:
    """Loss and acceptance of a drafter on one batch.

    Args:
        model (`Callable`): What runs the forward: the drafter, or what a launcher wrapped it in.
        drafter (`ReadyDrafterModel`): The drafter itself.
        frozen (`FrozenTarget`): Its target.
        batch (`DraftingBatch`): From `frozen.batch`.
        loss (`DraftingLoss`): Weights.
    """
    dtype = drafter.dtype
    outputs = model(
        noise_embeds=batch.noise_embeds.to(dtype),
        context_hidden_states=batch.context_hidden_states.to(dtype),
        anchor_positions=batch.anchor_positions,
        states=batch.states,
        use_cache=False,
        return_dict=True,
    )
    block_size, head = batch.labels.shape[-1], frozen.head
    return loss(
        outputs.last_hidden_state.unflatten(1, (-1, block_size)).flatten(0, 1),
        batch.target_hidden_states.flatten(0, 1),
        batch.labels.flatten(0, 1),
        batch.previous_ids.flatten(0, 1),
        batch.loss_mask.flatten(0, 1),
        lambda hidden_states, previous_ids: drafter.draft_logits(hidden_states, previous_ids, head),
        frozen.logits,
    )


class ReadyTrainer(Trainer):
    """`Trainer` for a drafter; everything else is as in transformers.

    Args:
        model (`ReadyDrafterModel`): The drafter.
        args (`ReadyTrainingArguments`): Options.
        target (`PreTrainedModel`): The target; moved to the device of the training, otherwise left as it is.
        kwargs: As for `Trainer`. The datasets' rows are dicts with `input_ids`, and optionally `attention_mask` and
            `loss_mask` (1 for tokens to be learned).

    Raises:
        TypeError: no drafter, or other arguments than `ReadyTrainingArguments`.
        ValueError: the drafter was not made for this target; several GPUs in one process, but for a target that
        is spread over them; a way of sharding that cannot train a drafter.
    """

    loss_is_scaled_for_ga = True  # read by transformers >= 5.24

    def __init__(
        self, model: ReadyDrafterModel, args: ReadyTrainingArguments, *, target: PreTrainedModel, **kwargs: Any
    ):
        if not isinstance(args, ReadyTrainingArguments):
            raise TypeError(f"`args` must be ReadyTrainingArguments, got {type(args).__name__}")
        if not isinstance(getattr(model, "config", None), ReadyDrafterConfig):
            raise TypeError(
                f"expected a drafter to train, got {type(model).__name__}: ReadyTrainer(drafter, args, target=target)"
            )
        if args.n_gpu > 1 and is_spread(target):
            args._n_gpu = 1  # as `Trainer` does where its own model is spread
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs in one process would run as nn.DataParallel, which cannot train a drafter. Start "
                "one process per GPU (`torchrun --nproc-per-node ...` or `accelerate launch ...`), show this one a "
                "single GPU (`CUDA_VISIBLE_DEVICES=0`), or load a target that is too large for one with a `device_map`"
            )
        if model.reader is None and (args.freeze_backbone_steps or args.reader_learning_rate is not None):
            raise ValueError(
                "`freeze_backbone_steps` and `reader_learning_rate` are for drafters with a reader, and this one has "
                "none: leave them out, or give it one with `ready_hf.schedules.add_reader(drafter, target)`"
            )
        low = {str(p.dtype) for p in model.parameters() if p.requires_grad and p.element_size() < 4}
        if low:
            logger.warning(
                "ready_hf: the drafter's weights are %s, in which small steps round away: train `drafter.float()`, "
                "with `bf16=True` to compute in bfloat16",
                " and ".join(sorted(low)),
            )
        if any(kwargs.get("optimizers") or ()) and (
            args.freeze_backbone_steps or args.reader_learning_rate is not None
        ):
            raise ValueError(
                "`freeze_backbone_steps` and `reader_learning_rate` shape the trainer's own optimizer and schedule, "
                "and `optimizers` brings others: leave one of them out"
            )
        self._frozen = FrozenTarget(target, model.config)
        kwargs.setdefault("data_collator", DraftingCollator())
        super().__init__(model=model, args=args, **kwargs)
        check_sharding(self.accelerator.state)
        if self.is_fsdp_enabled:
            hide_missing_embeddings(model)
        self.model_accepts_loss_kwargs = True  # with it transformers < 5.24 leaves the scaled loss alone
        self._skipping = SkipNonFiniteSteps()
        self._passes = Passes()
        self.add_callback(self._skipping)
        self.add_callback(WatchUntouchedWeights())
        self.add_callback(self._passes)
        self.add_callback(CompleteFolder(self))
        self._evaluated: list[LossSums] = []
        self._memory_is_told = False
        if not (getattr(target, "hf_device_map", None) or getattr(target, "is_quantized", False)):
            target.to(args.device)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As in `Trainer`; `resume_from_checkpoint=True` takes the newest checkpoint that is complete.

        Raises:
            ValueError: no such checkpoint, one that is not complete, or one that was trained in other stages; a
            drafter without a weight that may change.
        """
        if not any(p.requires_grad for p in self.model.parameters()):
            raise ValueError(
                "all weights of the drafter are frozen, so there is nothing to train: call `requires_grad_(True)` on "
                "the parts that shall learn"
            )
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_complete_checkpoint(self.args.output_dir))
        if resume_from_checkpoint:
            check_complete(Path(resume_from_checkpoint))
            self.check_checkpoint(resume_from_checkpoint)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def check_checkpoint(self, checkpoint: str | Path) -> None:
        """Refuses to go on from a checkpoint that was trained in other stages, or with another drafter, or is broken.

        Raises:
            ValueError: naming what differs.
        """
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # they save optimizers in forms of their own
            check_optimizer(Path(checkpoint), self.create_optimizer())
            check_weights(Path(checkpoint), self.model)

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """All rows count: `dataloader_drop_last` is about training."""
        with self._keeping_last_rows():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """All rows count, as in an evaluation."""
        with self._keeping_last_rows():
            return super().get_test_dataloader(*args, **kwargs)

    @contextmanager
    def _keeping_last_rows(self) -> Iterator[None]:
        given, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            yield
        finally:
            self.args.dataloader_drop_last = given

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in `Trainer`, with the reader in groups of its own if it learns differently."""
        is_new, options = self.optimizer is None, self.args
        optimizer = super().create_optimizer(*args, **kwargs)
        if is_new and (options.reader_learning_rate is not None or options.freeze_backbone_steps):
            rate = options.learning_rate if options.reader_learning_rate is None else options.reader_learning_rate
            split_reader_groups(optimizer, self.model.reader.parameters(), rate)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """As in `Trainer`; everything but the reader waits for `freeze_backbone_steps` steps."""
        is_new = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if is_new and self.args.freeze_backbone_steps:
            freeze_rest(self.optimizer if optimizer is None else optimizer, scheduler, self.args.freeze_backbone_steps)
        return scheduler

    def memory(self, batch_size: int, row_length: int) -> TrainingMemory:
        """How much memory a step will take on rows of this length; see `ready_hf.training_memory`.

        Args:
            batch_size (`int`): Rows of one process and one accumulated part.
            row_length (`int`): Tokens of the longest row.
        """
        options, drafter = self.args, self.accelerator.unwrap_model(self.model)
        name = str(getattr(options.optim, "value", options.optim))
        return training_memory(
            drafter.config,
            self._frozen.target,
            batch_size=batch_size,
            row_length=row_length,
            num_anchors=min(options.num_anchors, row_length),
            dtype=drafter.dtype,
            autocast_dtype=torch.bfloat16 if options.bf16 else torch.float16 if options.fp16 else None,
            max_logits=options.max_logits_per_chunk,
            optimizer_values=(2.0 if "adam" in name else 1.0) / (4 if "8bit" in name else 1),
            gradient_checkpointing=any(getattr(options, name, False) for name in CHECKPOINTING),
        )

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        finetuned_from: str | None = None,
        dataset_tags: str | list[str] | None = None,
        **unused: Any,
    ) -> None:
        """The card of a drafter, in `output_dir`; a valid one that is there stays if no fields are given.

        Args:
            language, license, tags: As in `ready_hf.hub.drafter_card`.
            finetuned_from (`str`, *optional*): Its target. Default: where the target was loaded from, on the Hub.
            dataset_tags (`str` or `list[str]`, *optional*): Training data on the Hub.
            unused: What only transformers' plain card shows.
        """
        if self.is_world_process_zero():
            keep_or_write_card(
                self.accelerator.unwrap_model(self.model),
                self.args.output_dir,
                self.hub_model_id or Path(self.args.output_dir).absolute().name,
                base_model=finetuned_from or name_on_hub(self._frozen.target),
                language=language,
                license=license,
                tags=tags,
                datasets=dataset_tags,
            )

    @property
    def num_skipped_steps(self) -> int:
        """Steps that were skipped since a gradient was not finite; those that a gradient scaler skips do not count."""
        return self._skipping.num_skipped

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """The batches of one optimizer step, with their anchors, and the slots that count in all of them together.

        What is left at the end of a stream and fills no step is dropped: its gradient would go into the next one.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if 0 < len(batches) < num_batches:
            self._passes.check_stream(self.state.global_step, len(batches), num_batches)
            return [], None
        for batch in batches:
            self._add_anchors(batch, self._passes.epoch)
        if batches and not self._memory_is_told and self.is_world_process_zero():
            logger.info("ready_hf: %s", self.memory(*batches[0]["input_ids"].shape).table())
            self._memory_is_told = True
        return batches, self._num_slots(batches, device) if batches else None

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Sum of the loss over the slots of `inputs`, divided by `num_items_in_batch` (default: its own slots).

        Returns:
            `torch.Tensor` of shape `[]`, with `return_outputs=True` a tuple of it and the `LossSums`.
        """
        sums = self._sums(model, inputs)
        if num_items_in_batch is None:
            loss = sums.loss / sums.num_slots.sum().clamp_min(1)
        else:  # the processes' gradients are averaged, but their slots were added up
            loss = sums.loss * self.args.world_size / num_items_in_batch
        return (loss, sums.detach()) if return_outputs else loss

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """Adds one batch to the evaluation; its anchors are spread evenly over the rows."""
        inputs = dict(self._prepare_inputs(inputs))
        self._add_anchors(inputs)
        inputs["anchor_mask"] = inputs["anchor_mask"] & self._is_own_row(inputs["anchor_mask"])
        with torch.no_grad():
            loss, sums = self.compute_loss(model, inputs, return_outputs=True)
        self._evaluated.append(sums)
        return loss, None, None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As in `Trainer`; the metrics are those of `LossSums.metrics` over all processes."""
        self._evaluated = []
        output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        evaluated, self._evaluated = self._evaluated, []
        if evaluated:
            total = sum(evaluated[1:], evaluated[0])
            if self.args.world_size > 1:
                total = total.map(lambda x: self.accelerator.reduce(x, reduction="sum"))
            if not int(total.num_slots.sum()):
                self._warn_of_nothing("the evaluation")
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in total.metrics().items()})
        return output

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: the drafter's inputs are made inside of the loss."""
        return 0

    def _sums(self, model: Any, inputs: dict[str, Any]) -> LossSums:
        if "anchor_positions" not in inputs:
            inputs = dict(inputs)
            self._add_anchors(inputs)
        batch = self._frozen.batch(
            inputs["input_ids"],
            inputs["anchor_positions"],
            inputs["anchor_mask"],
            inputs.get("attention_mask"),
            inputs.get("loss_mask"),
        )
        drafter = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():
            return drafting_sums(model, drafter, self._frozen, batch, self.args.drafting_loss)

    def _is_own_row(self, rows: torch.Tensor) -> torch.Tensor:
        """`[B, 1]`, `False` for rows that only fill up the last batch of several processes (not known of streams)."""
        state, counted = self.accelerator.gradient_state, len(rows)
        if state.end_of_dataloader and state.remainder > 0:
            counted = state.remainder - self.args.process_index * len(rows)
        return torch.arange(len(rows), device=rows.device)[:, None] < counted

    def _add_anchors(self, batch: dict[str, Any], epoch: int | None = None) -> None:
        """At random by the epoch; evenly spread without one. Here, because a collator need not be ours."""
        check_is_one_text(batch)
        mask = batch.get("attention_mask")
        mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
        block_size = self._frozen.config.block_size
        legal = legal_anchors(mask, block_size, self.args.anchor_stride, batch.get("loss_mask"))
        if epoch is None:
            anchors = choose_anchors(legal, self.args.num_anchors)
        else:
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            anchors = anchors_of_rows(legal, batch["input_ids"], mask, self.args.num_anchors, seed, epoch)
        batch["anchor_positions"], batch["anchor_mask"] = anchors

    def _warn_of_nothing(self, where: str) -> None:
        logger.warning(
            "ready_hf: nothing to learn from in %s: a block needs a row of more than %d tokens (2 with a "
            "`loss_mask`), an anchor at a multiple of %d that is not the first token, and a `loss_mask` of 1 after it",
            where,
            self._frozen.config.block_size + 1,
            self.args.anchor_stride,
        )

    def _num_slots(self, batches: Iterable[dict[str, Any]], device: torch.device) -> torch.Tensor:
        """Slots that count, over all accumulated batches and processes; at least 1."""
        names = ("input_ids", "anchor_positions", "anchor_mask", "attention_mask", "loss_mask")
        counts = [
            self._frozen.loss_mask(**{name: batch[name] for name in names if name in batch}).sum() for batch in batches
        ]
        total = torch.stack(counts).sum()
        is_nothing = not int(total)  # here: on the CPU, and nobody waits for the GPU
        total = total.to(device)
        if self.args.world_size > 1:
            total = self.accelerator.reduce(total, reduction="sum")
        if is_nothing and not int(total):
            self._warn_of_nothing(f"step {self.state.global_step + 1}")
        return total.clamp_min(1)
