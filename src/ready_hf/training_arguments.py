"""Options of a drafter's training, beside those of transformers' `Trainer`."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ready_hf.losses import DraftingLoss


@dataclass
class ReadyTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the options of drafter training.

    Args:
        num_anchors (`int`): Blocks per row and step.
        anchor_stride (`int`): Anchors stand at multiples of it. 1 is best for targets with the gated delta rule; for
            KDA and Mamba-2, whose states cost a forward per different position, take about 64.
        cross_entropy_weight (`float`): See `DraftingLoss`, as for the next four.
        distance_weight (`float`): Weight of the distance of distributions.
        confidence_weight (`float`): Weight of the confidence loss.
        loss_decay (`float`): Slot k has the weight exp(-k / loss_decay).
        max_logits_per_chunk (`int`): Most logits that exist at once.
        reader_learning_rate (`float`, *optional*): Of the reader's parameters; default: `learning_rate`.
        freeze_backbone_steps (`int`): Steps at the beginning in which only the reader learns. For a drafter that was
            trained before, with a new reader (`ready_hf.schedules.add_reader`).
    """

    num_anchors: int = field(default=16, metadata={"help": "Blocks per row and step."})
    anchor_stride: int = field(default=1, metadata={"help": "Anchors stand at multiples of it."})
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "Weight of the cross entropy."})
    distance_weight: float = field(default=0.9, metadata={"help": "Weight of the distance of distributions."})
    confidence_weight: float = field(default=1.0, metadata={"help": "Weight of the confidence loss."})
    loss_decay: float = field(default=4.0, metadata={"help": "Slot k has the weight exp(-k / loss_decay)."})
    max_logits_per_chunk: int = field(default=2**26, metadata={"help": "Most logits that exist at once."})
    reader_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of the reader."})
    freeze_backbone_steps: int = field(default=0, metadata={"help": "Steps in which only the reader learns."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "The collator chooses the columns."})
    report_to: str = field(default="none", metadata={"help": "Where to report to."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "The heads run outside of the forward, where the search would miss them."}
    )

    def __post_init__(self) -> None:
        """Refuses what cannot train, before anything is set up.

        Raises:
            ValueError: naming the option, its value and what is allowed.
        """
        for name in ("num_anchors", "anchor_stride", "max_logits_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        weights = {n: getattr(self, n) for n in ("cross_entropy_weight", "distance_weight", "confidence_weight")}
        if not (min(weights.values()) >= 0 and sum(weights.values()) > 0):
            raise ValueError(f"the weights of the loss must be 0 or more, and one of them above 0, got {weights}")
        if self.reader_learning_rate is not None and not self.reader_learning_rate >= 0:
            raise ValueError(f"`reader_learning_rate` must be 0 or more, got {self.reader_learning_rate}")
        if self.freeze_backbone_steps < 0:
            raise ValueError(f"`freeze_backbone_steps` must be 0 or more, got {self.freeze_backbone_steps}")
        if not self.loss_decay > 0:
            raise ValueError(f"`loss_decay` must be above 0 (infinite for equal weights), got {self.loss_decay}")
        if self.remove_unused_columns:
            raise ValueError(
                "`remove_unused_columns=True` would remove every column: the drafter's forward names none"
            )
        super().__post_init__()

    @property
    def drafting_loss(self) -> DraftingLoss:
        """The loss with these weights."""
        return DraftingLoss(
            self.cross_entropy_weight,
            self.distance_weight,
            self.confidence_weight,
            self.loss_decay,
            self.max_logits_per_chunk,
        )
