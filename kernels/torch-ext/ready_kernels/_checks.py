"""Checks of what the operations are given, the same for Triton and torch, before anything is computed."""

from __future__ import annotations

import torch

from ._launch import FLOATS, Layers, check_same_device, check_shape


MOST_QUERIES = 128  # more would not fit a multiprocessor's shared memory


def check_commit(
    state: Layers,
    written: Layers,
    fields: dict[str, Layers],
    accepted: torch.Tensor,
    queries: torch.Tensor | None,
    slots: torch.Tensor | None,
) -> tuple[int, int, tuple[int, int, int]]:
    """Raises ValueError unless everything fits; returns B, T and (H, K, V)."""
    if len(state.shape) != 4:
        raise ValueError(
            f"`states` must be [L, N, H, K, V] or L tensors [N, H, K, V], got {list(state.shape)} a layer"
        )
    num_slots, heads, k_dim, v_dim = state.shape
    key, value, g, beta = fields.values()
    if len(key.shape) != 4 or heads % key.shape[2]:
        raise ValueError(
            f"`records.key` must be [B, T, Hk, {k_dim}] a layer, Hk dividing {heads}, got {list(key.shape)}"
        )
    num_rows, num_tokens = key.shape[:2]
    expected = {
        "key": [num_rows, num_tokens, key.shape[2], k_dim],
        "value": [num_rows, num_tokens, heads, v_dim],
        "g": [num_rows, num_tokens, heads, *([k_dim] if len(g.shape) == 4 else [])],
        "beta": [num_rows, num_tokens, heads],
    }
    for name, field in fields.items():
        check_shape(f"records.{name}", field.tensor if field.is_table else field.tensor[0], expected[name])
        if field.count != state.count:
            raise ValueError(f"`states` has {state.count} layers and `records.{name}` {field.count}")
    if written.count != state.count or written.shape != state.shape:
        raise ValueError(
            f"`out` must have the {state.count} layers and the shape of `states`, got {list(written.shape)}"
        )
    sizes = [*written.shape, *([] if written.is_table else [written.count])]
    strides = [*written.strides, *([] if written.is_table else [written.stride])]
    is_expanded = any(stride == 0 and size > 1 for stride, size in zip(strides, sizes))  # noqa: B905
    if is_expanded or len(set(written.addresses)) < written.count:
        raise ValueError("`out`, or `states` in place, must not overlap: an expanded tensor, or one tensor twice")
    if min(num_rows, num_tokens, *state.shape[1:]) < 1:
        raise ValueError(f"rows, tokens, heads and channels must be at least 1, got {list(value.shape)} values")
    if written is not state and _overlap_in_part(state, written):
        raise ValueError(
            "`out` overlaps `states` in memory without being the same view layer by layer: leave `out` away to write "
            "in place, or pass new tensors"
        )
    check_vector("accepted", accepted, num_rows, below=num_tokens + 1)
    if slots is not None:
        check_vector("slots", slots, num_rows, below=num_slots, different=True)
    elif num_slots != num_rows:
        raise ValueError(f"`states` has {num_slots} rows and the records {num_rows}: pass `slots`")
    check_queries(queries, state.count, num_rows, heads, k_dim)
    tensors = {name: field.tensor for name, field in fields.items()}
    check_same_device(
        states=state.tensor, out=written.tensor, accepted=accepted, queries=queries, slots=slots, **tensors
    )
    return num_rows, num_tokens, (heads, k_dim, v_dim)


def _overlap_in_part(state: Layers, written: Layers) -> bool:
    """Whether bytes between the ends of a layer of `written` are also of `state`, but for a layer written in place."""
    sizes = state.num_bytes, written.num_bytes
    is_alike = state.strides == written.strides and state.tensor.dtype == written.tensor.dtype
    starts = [(start, 0) for start in state.addresses]
    for before, after in zip(state.addresses, written.addresses):  # noqa: B905
        if not (is_alike and before == after):
            starts.append((after, 1))
    ends = [0, 0]  # of the last layer that began, of `state` and of `written`
    for start, which in sorted(starts):
        if start < ends[1 - which]:
            return True
        ends[which] = start + sizes[which]
    return False


def check_vector(
    name: str, tensor: torch.Tensor, num_rows: int, below: int | None = None, different: bool = False
) -> None:
    """Raises ValueError unless `tensor` holds one int32 or int64 per row, next to each other.

    On the CPU, where looking costs nothing, also if values are not less than `below`, or not `different` (but for
    negative ones).
    """
    if (
        tensor.dtype not in (torch.int32, torch.int64)
        or list(tensor.shape) != [num_rows]
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"`{name}` must be a contiguous int32 or int64 tensor of shape [{num_rows}], got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )
    if below is None or tensor.device.type != "cpu":
        return
    values = [value for value in tensor.tolist() if value >= 0]
    if values and max(values) >= below:
        raise ValueError(f"`{name}` must be below {below}, got {max(values)}")
    if different and len(set(values)) < len(values):
        raise ValueError(f"`{name}` must not name a slot twice, got {tensor.tolist()}")


def check_queries(queries: torch.Tensor | None, num_layers: int, num_rows: int, heads: int, k_dim: int) -> None:
    """Raises ValueError unless queries are `[L, H, J, K]` or `[B, L, H, J, K]`."""
    if queries is None:
        return
    rows = [] if queries.dim() == 4 else [num_rows]
    kinds = (*FLOATS, torch.float64)  # float64 for torch only, as of the states
    most = queries.dim() in (4, 5) and 1 <= queries.shape[-2] <= MOST_QUERIES
    expected = [*rows, num_layers, heads, queries.shape[-2], k_dim] if queries.dim() in (4, 5) else None
    if expected is None or list(queries.shape) != expected or not most or queries.dtype not in kinds:
        raise ValueError(
            f"`queries` must be [{num_layers}, {heads}, J, {k_dim}], or the same with {num_rows} rows in front, "
            f"J from 1 to {MOST_QUERIES}, in float32, bfloat16 or float16; got {queries.dtype} {list(queries.shape)}"
        )


def check_read(state: Layers, queries: torch.Tensor, slots: torch.Tensor | None) -> int:
    """Raises ValueError unless states and queries fit; returns B."""
    if len(state.shape) != 4:
        raise ValueError(
            f"`states` must be [L, N, H, K, V] or L tensors [N, H, K, V], got {list(state.shape)} a layer"
        )
    num_rows = state.shape[0] if slots is None else len(slots)
    if min(num_rows, *state.shape[1:]) < 1:
        raise ValueError(f"rows, heads and channels must be at least 1, got states {list(state.shape)}")
    check_queries(queries, state.count, num_rows, state.shape[1], state.shape[2])
    if slots is not None:
        check_vector("slots", slots, num_rows, below=state.shape[0])
    check_same_device(states=state.tensor, queries=queries, slots=slots)
    return num_rows


def check_windows(layers: Layers, accepted: torch.Tensor, kernel_size: int) -> tuple[int, int, int]:
    """Raises ValueError unless windows fit; returns B, D and W + T."""
    if len(layers.shape) != 3 or not 1 <= kernel_size <= layers.shape[2]:
        raise ValueError(
            f"`uncut` must be [L, B, D, W + T] or L tensors [B, D, W + T], with W = `kernel_size` = {kernel_size} or "
            f"more columns; got {list(layers.shape)} a layer"
        )
    num_rows, num_channels, num_columns = layers.shape
    check_vector("accepted", accepted, num_rows, below=num_columns - kernel_size + 1)
    check_same_device(uncut=layers.tensor, accepted=accepted)
    return num_rows, num_channels, num_columns
