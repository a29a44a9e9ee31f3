"""Rows of token ids become one batch: padded on the right, with a mask of what is learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


# what packing adds: borders of texts, here and as `seq_lengths` by trl, and what goes on by a step within a text
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k")
STEPS = {"position_ids": 1, "seq_idx": 0}


@dataclass
class DraftingCollator:
    """Pads rows on the right.

    Args:
        max_length (`int`, *optional*): Longer rows are cut.
    """

    max_length: int | None = None

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """`input_ids`, `attention_mask` and, if any row has one, `loss_mask`, all `[B, T]`.

        Args:
            rows (`Sequence[dict]`): Each with `input_ids` and optionally `attention_mask` and `loss_mask`: lists,
                arrays or tensors of one length. `labels`, as in supervised fine-tuning, stand for a `loss_mask`: a
                label of -100 is not learned.

        Raises:
            ValueError: a row without `input_ids`, with fields of different lengths, or of several packed texts.
        """
        rows = [_with_loss_mask(row) for row in rows]
        for row in rows:
            if "input_ids" not in row:
                raise ValueError(f"a training row needs `input_ids`, got the columns {sorted(row)}")
            check_is_one_text(row)
        names = ["input_ids", "attention_mask"] + ["loss_mask"] * any("loss_mask" in row for row in rows)
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for row in rows:
            ids = _as_row(row["input_ids"])[: self.max_length]
            for name, column in columns.items():
                values = _as_row(row[name])[: self.max_length] if name in row else torch.ones_like(ids)
                if len(values) != len(ids):
                    raise ValueError(f"`{name}` has {len(values)} entries, `input_ids` of the same row {len(ids)}")
                column.append(values)
        longest = max(1, *map(len, columns["input_ids"]))  # rows of nothing become one padding token
        return {
            name: torch.stack([torch.nn.functional.pad(values, (0, longest - len(values))) for values in column])
            for name, column in columns.items()
        }


def check_is_one_text(fields: Mapping[str, Any]) -> None:
    """Refuses packed rows: a recurrent state, and a drafter's context, would run over from one text into the next.

    What says that all is one text passes: rising positions, wherever they start and whatever padding has, one length.

    Args:
        fields (`Mapping`): One row, `[T]` each, or a batch of a collator of one's own, `[B, T]`.

    Raises:
        ValueError: naming the fields that say where texts begin.
    """
    mine = ("attention_mask", "seq_lengths", *LENGTHS, *STEPS)
    given = {name: _as_numbers(fields[name]) for name in mine if fields.get(name) is not None}
    mask = given.get("attention_mask")
    found = [name for name in LENGTHS if name in given and given[name].numel() > 2]
    if "seq_lengths" in given and _as_numbers(fields["input_ids"]).dim() == 1 and given["seq_lengths"].numel() > 1:
        found.append("seq_lengths")
    if mask is not None and bool((mask > 1).any()):
        found.append("attention_mask")
    found += [name for name, step in STEPS.items() if name in given and not _has_steps(given[name], step, mask)]
    if found:
        raise ValueError(
            f"a training row must be one text, and this one looks packed ({', '.join(found)}): give every text a row "
            "of its own, rows are padded to the longest of their batch"
        )


def _has_steps(values: torch.Tensor, step: int, mask: torch.Tensor | None) -> bool:
    """Whether each of `values` `[..., T]` is the one before plus `step`, where `mask` `[..., T]` has both."""
    is_step = values.diff(dim=-1) == step
    if mask is not None and mask.shape[-1] == values.shape[-1]:
        is_step = is_step | ~(mask[..., 1:].bool() & mask[..., :-1].bool()).to(is_step.device)
    return bool(is_step.all())


def _with_loss_mask(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the mask that its `labels` mean, unless it has one."""
    if row.get("labels") is None or "loss_mask" in row:
        return row
    return row | {"loss_mask": (_as_row(row["labels"]) != -100).long()}


def _as_numbers(values: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a training row must be one list of numbers, got {type(values).__name__}: {error}") from None


def _as_row(values: Any) -> torch.Tensor:
    row = _as_numbers(values)
    if row.dim() != 1:
        raise ValueError(f"a training row must be one list of numbers, got the shape {list(row.shape)}")
    if row.is_floating_point() and bool((row != row.floor()).any()):
        raise ValueError(f"a training row must hold whole numbers, got {row[row != row.floor()][0].item()}")
    return row.long()
