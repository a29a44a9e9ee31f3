"""Rows of token ids become one batch: padded on the right, with a mask of what is learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


PACKED = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")  # what packing collators of transformers add


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
            _check_is_one_text(row)
        names = ["input_ids", "attention_mask"] + ["loss_mask"] * any("loss_mask" in row for row in rows)
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        for row in rows:
            if "input_ids" not in row:
                raise ValueError(f"a training row needs `input_ids`, got the columns {sorted(row)}")
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


def _check_is_one_text(row: dict[str, Any]) -> None:
    """Refuses packed rows: a recurrent state, and a drafter's context, would run over from one text into the next."""
    found = [name for name in PACKED if row.get(name) is not None]
    if row.get("position_ids") is not None:
        positions = _as_row(row["position_ids"])
        if not torch.equal(positions, torch.arange(len(positions))):
            found.append("position_ids")
    if found:
        raise ValueError(
            f"a training row must be one text, and this one looks packed ({', '.join(found)}): give every text a row "
            "of its own, rows are padded to the longest of their batch"
        )


def _with_loss_mask(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the mask that its `labels` mean, unless it has one."""
    if row.get("labels") is None or "loss_mask" in row:
        return row
    return row | {"loss_mask": (_as_row(row["labels"]) != -100).long()}


def _as_row(values: Any) -> torch.Tensor:
    try:
        row = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a training row must be one list of numbers, got {type(values).__name__}: {error}") from None
    if row.dim() != 1:
        raise ValueError(f"a training row must be one list of numbers, got the shape {list(row.shape)}")
    if row.is_floating_point() and bool((row != row.floor()).any()):
        raise ValueError(f"a training row must hold whole numbers, got {row[row != row.floor()][0].item()}")
    return row.long()
