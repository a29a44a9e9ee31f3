"""Recurrent states of a target in the middle of a text, for every anchor of a training row at once.

A forward of the target leaves only the state after the last token. Two ways give the others:

    gated delta rule    one forward; the inputs of the recurrence are observed, a chunk scan in torch repeats it and
                        keeps what all anchors need (about 50 small operations a layer)
    anything else       one forward per stretch between two anchors, with a cache; its state is read at each anchor

Both are exact for any anchors. The second costs a forward per different position, so let rows share their anchors.

Shapes: B rows, T tokens, A anchors, N layers that are read, H heads, K key and V value channels, C tokens of a chunk,
n chunks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from ready_hf.anchor_states import AnchorStates, ChunkScan
from ready_hf.kernels.reference import interval_decays
from ready_hf.target import (
    GATED_DELTA_RULE,
    RecurrenceCall,
    RecurrentLayer,
    cache_argument,
    cache_in,
    observing_recurrence,
    recurrent_layers,
    state_views,
    text_decoder,
)


CHUNK_SIZE = 64


def forward_with_states(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    layers: list[RecurrentLayer],
    chunk_size: int = CHUNK_SIZE,
) -> tuple[torch.Tensor, AnchorStates | None]:
    """Runs the decoder of `model` over `input_ids`; to be called without gradients.

    Args:
        model (`PreTrainedModel`): Patched (`ready_hf.ensure_patched`) and in evaluation mode.
        input_ids (`torch.LongTensor` of shape `[B, T]`): Padding, if any, on the right.
        positions (`torch.LongTensor` of shape `[B, A]`): Tokens a state shall have consumed, 0 to T - 1.
            No token gives zeros.
        layers (`list[RecurrentLayer]`): Whose states are read; none for no states.
        chunk_size (`int`): C of the scan.

    Returns:
        `tuple`: the last hidden state `[B, T, d]` and the states before the anchors, in the order of `layers`, or
        `None`.
    """
    if not layers:
        return _moved(_decoder(model, input_ids, 0, use_cache=False).last_hidden_state, input_ids), None
    everything = recurrent_layers(model)
    if all(layer.recurrence is GATED_DELTA_RULE for layer in everything):
        return _observed(model, input_ids, positions, everything, [x.layer_idx for x in layers], chunk_size)
    return _by_stretches(model, input_ids, positions, layers)


@torch.no_grad()
def gated_delta_scan(
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    chunk_size: int = CHUNK_SIZE,
) -> ChunkScan:
    """What gives the state of the gated delta rule after any number of tokens, in float32 and without gradients.

    S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T. Within a chunk that starts with S, the written
    values are U - W S, where U and W do not depend on S; so only n steps are sequential (the WY form of Yang et al.,
    Gated Delta Networks, arXiv 2412.06464).

    Args:
        key (`torch.Tensor` of shape `[B, T, H_k, K]`): H_k divides H.
        value (`torch.Tensor` of shape `[B, T, H, V]`): Values.
        g (`torch.Tensor` of shape `[B, T, H]`): Log decay.
        beta (`torch.Tensor` of shape `[B, T, H]`): Strength of the write.
        initial_state (`torch.Tensor` of shape `[B, H, K, V]`, *optional*): State before the first token.
        use_qk_l2norm_in_kernel (`bool`): Keys are divided by their norm first.
        chunk_size (`int`): C.
    """
    length, num_heads, size_v = value.shape[1:]
    key = key.float()
    if use_qk_l2norm_in_kernel:
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    pad = -length % chunk_size + chunk_size * (length % chunk_size == 0)  # a state after all tokens needs a chunk too

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, D] to [n, B, H, C, D]: the scan goes through memory
        padded = F.pad(x.float(), (0, 0, 0, 0, 0, pad))
        return padded.unflatten(1, (-1, chunk_size)).permute(1, 0, 3, 2, 4).contiguous()

    keys, v, b = chunks(key), chunks(value), chunks(beta[..., None])
    k = keys.repeat_interleave(num_heads // keys.shape[2], dim=2)
    decay = chunks(g[..., None]).squeeze(-1)
    decays = interval_decays(decay)  # [n, B, H, C, 1 + C]
    from_start, between = decays[..., :1], decays[..., 1:]
    system = (b * k) @ k.transpose(-1, -2) * between  # diagonal and what is above it are not looked at
    right = torch.cat([b * v, b * k * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = (x.flatten(1, 2) for x in solved.split([size_v, k.shape[-1]], dim=-1))
    to_end = (k * between[..., -1, :, None]).transpose(-1, -2).flatten(1, 2)
    whole = from_start[..., -1, :, None].flatten(1, 2)  # [n, B * H, 1, 1]

    starts = k.new_zeros(*k.shape[:3], k.shape[-1], size_v)
    writes = torch.empty_like(v)
    if initial_state is not None:
        starts[0] = initial_state
    before, written = starts.flatten(1, 2), writes.flatten(1, 2)
    for i in range(len(k)):
        torch.baddbmm(u[i], w[i], before[i], alpha=-1, out=written[i])
        if i + 1 < len(k):
            torch.baddbmm(before[i] * whole[i], to_end[i], written[i], out=before[i + 1])
    return ChunkScan(starts, keys, writes, decay)


def _kept(scan: ChunkScan, positions: torch.Tensor) -> ChunkScan | torch.Tensor:
    """The scan, or with few anchors their states `[B, A, H, K, V]`, whichever is smaller."""
    states = scan.starts[:1].nbytes * positions.shape[1]
    return scan.states(positions) if states <= sum(x.nbytes for x in scan) else scan


def _observed(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    layers: list[RecurrentLayer],
    wanted: list[int],
    chunk_size: int,
) -> tuple[torch.Tensor, AnchorStates]:
    """One forward; the calls of the recurrence come in the order of the layers."""
    waiting, found = iter(layers), {}

    def observe(call: RecurrenceCall) -> Any:
        layer = next(waiting, None)
        if layer is not None and layer.layer_idx in wanted:
            names = ("key", "value", "g", "beta", "initial_state", "use_qk_l2norm_in_kernel")
            arguments = {name: call.arguments[name] for name in names if name in call.arguments}
            arguments = {name: _moved(value, input_ids) for name, value in arguments.items()}
            found[layer.layer_idx] = _kept(gated_delta_scan(**arguments, chunk_size=chunk_size), positions)
        return call.run()

    with observing_recurrence(observe):
        hidden_states = _decoder(model, input_ids, 0, use_cache=False).last_hidden_state
    if len(found) != len(wanted) or next(waiting, None) is not None:
        raise RuntimeError(
            f"{type(model).__name__}: states of {len(found)} recurrent layers were seen in a forward, expected "
            f"{len(wanted)}. Is a layer skipped, or its recurrence run by a kernel that replaces the whole layer?"
        )
    return _moved(hidden_states, input_ids), AnchorStates([found[index] for index in wanted], positions)


def _by_stretches(
    model: PreTrainedModel, input_ids: torch.Tensor, positions: torch.Tensor, layers: list[RecurrentLayer]
) -> tuple[torch.Tensor, AnchorStates]:
    """A forward per stretch between two positions that some row asks for."""
    cuts = sorted({0, input_ids.shape[1], *positions.flatten().tolist()})
    found = [input_ids.new_zeros(*positions.shape, *x.state_shape, dtype=torch.float32) for x in layers]
    parts, cache = [], None
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        outputs = _decoder(model, input_ids[:, start:stop], start, use_cache=True, cache=cache)
        cache = cache_in(outputs)
        parts.append(_moved(outputs.last_hidden_state, input_ids))
        rows, columns = (positions == stop).nonzero(as_tuple=True)
        for states, state in zip(found, state_views(cache, layers), strict=True):
            states[rows, columns] = _moved(state, input_ids)[rows].float()
    return torch.cat(parts, dim=1), AnchorStates(found, positions)


def _moved(value: Any, like: torch.Tensor) -> Any:
    """To the device of `like`: the layers of one model may lie on several."""
    return value.to(like.device) if isinstance(value, torch.Tensor) else value


def _decoder(model: PreTrainedModel, input_ids: torch.Tensor, start: int, use_cache: bool, cache: Any = None) -> Any:
    steps = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
    decoder = text_decoder(model)
    past = cache_argument(decoder, cache)
    return decoder(input_ids=input_ids, position_ids=steps.expand(len(input_ids), -1), use_cache=use_cache, **past)
