"""Recurrent states of a target in the middle of a text, for every anchor of a training row at once.

A forward of the target leaves only the state after the last token. Two ways give the others:

    gated delta rule    one forward; the inputs of the recurrence are observed, a chunk scan in torch repeats it and
                        keeps the states (about 50 small operations a layer)
    anything else       one forward per stretch between two anchors, with a cache; its state is read at each anchor

Both are exact for any anchors. The second costs a forward per different position, so let rows share their anchors.

Shapes: B rows, T tokens, A anchors, N layers that are read, H heads, K key and V value channels, C tokens of a chunk,
n chunks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ready_hf.kernels.reference import interval_decays
from ready_hf.target import (
    CACHE_NAME,
    GATED_DELTA_RULE,
    RecurrenceCall,
    RecurrentLayer,
    committed_states,
    observing_recurrence,
    recurrent_layers,
)


CHUNK_SIZE = 64


def forward_with_states(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    layers: list[RecurrentLayer],
    chunk_size: int = CHUNK_SIZE,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Runs the decoder of `model` over `input_ids`; to be called without gradients.

    Args:
        model (`PreTrainedModel`): Patched (`ready_hf.ensure_patched`) and in evaluation mode.
        input_ids (`torch.LongTensor` of shape `[B, T]`): Padding, if any, on the right.
        positions (`torch.LongTensor` of shape `[B, A]`): Tokens a state shall have consumed, 0 to T - 1.
            No token gives zeros.
        layers (`list[RecurrentLayer]`): Whose states are read; none for no states.
        chunk_size (`int`): C of the scan.

    Returns:
        `tuple`: the last hidden state `[B, T, d]` and the states `[B, A, N, H, K, V]` in float32, or `None`.
    """
    if not layers:
        return _decoder(model, input_ids, 0, use_cache=False).last_hidden_state, None
    everything = recurrent_layers(model)
    if all(layer.recurrence is GATED_DELTA_RULE for layer in everything):
        return _observed(model, input_ids, positions, everything, {x.layer_idx for x in layers}, chunk_size)
    return _by_stretches(model, input_ids, positions, layers)


def gated_delta_states(
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    positions: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK_SIZE,
) -> torch.Tensor:
    """States of the gated delta rule after any numbers of tokens, in float32.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T. Within a chunk that starts with S, the written
    values are U - W S, where U and W do not depend on S; so only n steps are sequential (the WY form of Yang et al.,
    Gated Delta Networks, arXiv 2412.06464).

    Args:
        key (`torch.Tensor` of shape `[B, T, H_k, K]`): H_k divides H.
        value (`torch.Tensor` of shape `[B, T, H, V]`): Values.
        g (`torch.Tensor` of shape `[B, T, H]`): Log decay.
        beta (`torch.Tensor` of shape `[B, T, H]`): Strength of the write.
        positions (`torch.LongTensor` of shape `[B, A]`): Tokens consumed, 0 to T.
        initial_state (`torch.Tensor` of shape `[B, H, K, V]`, *optional*): State before the first token.
        use_qk_l2norm_in_kernel (`bool`): Keys are divided by their norm first.
        chunk_size (`int`): C.

    Returns:
        `torch.Tensor` of shape `[B, A, H, K, V]`.
    """
    batch, length, num_heads, size_v = *value.shape[:3], value.shape[3]
    key = key.float()
    if use_qk_l2norm_in_kernel:
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    key = key.repeat_interleave(num_heads // key.shape[2], dim=2)
    pad = -length % chunk_size + chunk_size * (length % chunk_size == 0)  # a state after all tokens needs a chunk too

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, D] to [B, n, H, C, D]
        padded = F.pad(x.float(), (0, 0, 0, 0, 0, pad))
        return padded.unflatten(1, (-1, chunk_size)).transpose(2, 3)

    k, v, b = chunks(key), chunks(value), chunks(beta[..., None])
    decays = interval_decays(chunks(g[..., None]).squeeze(-1))  # [B, n, H, C, 1 + C]
    from_start, between = decays[..., :1], decays[..., 1:]
    system = ((b * k) @ k.transpose(-1, -2) * between).tril(-1) + torch.eye(chunk_size, device=k.device)
    right = torch.cat([b * v, b * k * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([size_v, k.shape[-1]], dim=-1)
    to_end = (k * between[..., -1, :, None]).transpose(-1, -2)
    whole = from_start[..., -1:, :]

    state = k.new_zeros(batch, num_heads, k.shape[-1], size_v) if initial_state is None else initial_state.float()
    starts, writes = [], []
    for i in range(k.shape[1]):
        starts.append(state)
        writes.append(u[:, i] - w[:, i] @ state)
        state = state * whole[:, i] + to_end[:, i] @ writes[-1]
    return _inside_chunks(torch.stack(starts, 1), torch.stack(writes, 1), k, decays, positions)


def _inside_chunks(
    starts: torch.Tensor, writes: torch.Tensor, keys: torch.Tensor, decays: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """States `[B, A, H, K, V]` after `positions`, from those at chunk starts `[B, n, H, K, V]` and all writes.

    Token i < t of a chunk adds D k_i w_i^T to the state after its first t tokens, D the decay from after i to there.
    """
    chunk_size = keys.shape[-2]
    rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
    chunk, taken = positions // chunk_size, positions % chunk_size
    picked = decays[rows, chunk, :, (taken - 1).clamp_min(0)]  # [B, A, H, 1 + C], 0 for tokens that are not taken
    is_start = (taken == 0)[:, :, None, None]
    whole, weights = picked[..., :1].masked_fill(is_start, 1.0), picked[..., 1:].masked_fill(is_start, 0.0)
    written = (keys[rows, chunk] * weights[..., None]).transpose(-1, -2) @ writes[rows, chunk]
    return starts[rows, chunk] * whole[..., None] + written


def _observed(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    layers: list[RecurrentLayer],
    wanted: set[int],
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward; the calls of the recurrence come in the order of the layers."""
    waiting, found = iter(layers), []

    def observe(call: RecurrenceCall) -> Any:
        layer = next(waiting, None)
        if layer is not None and layer.layer_idx in wanted:
            names = ("key", "value", "g", "beta", "initial_state", "use_qk_l2norm_in_kernel")
            arguments = {name: call.arguments[name] for name in names if name in call.arguments}
            found.append(gated_delta_states(**arguments, positions=positions, chunk_size=chunk_size))
        return call.run()

    with observing_recurrence(observe):
        hidden_states = _decoder(model, input_ids, 0, use_cache=False).last_hidden_state
    if len(found) != len(wanted) or next(waiting, None) is not None:
        raise RuntimeError(
            f"{type(model).__name__}: states of {len(found)} recurrent layers were seen in a forward, expected "
            f"{len(wanted)}. Is a layer skipped, or its recurrence run by a kernel that replaces the whole layer?"
        )
    return hidden_states, torch.stack(found, dim=2)


def _by_stretches(
    model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, layers: list[RecurrentLayer]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward per stretch between two positions that some row asks for."""
    cuts = sorted({0, input_ids.shape[1], *positions.flatten().tolist()})
    shape = (input_ids.shape[0], len(layers), *layers[0].state_shape)
    at_cuts, parts, cache = [input_ids.new_zeros(shape, dtype=torch.float32)], [], None
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        outputs = _decoder(model, input_ids[:, start:stop], start, use_cache=True, cache=cache)
        cache = getattr(outputs, CACHE_NAME)
        parts.append(outputs.last_hidden_state)
        at_cuts.append(committed_states(cache, layers).float())
    states = torch.stack(at_cuts, dim=1)  # [B, cuts, N, H, K, V]
    index = torch.searchsorted(torch.tensor(cuts, device=positions.device), positions)
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    return torch.cat(parts, dim=1), states[rows, index]


def _decoder(model: PreTrainedModel, input_ids: torch.Tensor, start: int, use_cache: bool, cache: Any = None) -> Any:
    steps = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
    inputs = {} if cache is None else {CACHE_NAME: cache}
    return model.get_decoder()(
        input_ids=input_ids, position_ids=steps.expand(len(input_ids), -1), use_cache=use_cache, **inputs
    )
