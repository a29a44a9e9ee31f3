"""States at anchors, read layer by layer: they, their reads, norms and gradients are those of the whole tensor."""

import copy
import itertools

import pytest
import torch

from ready_hf.anchor_states import AnchorStates, ChunkScan
from ready_hf.chunk_states import forward_with_states, gated_delta_scan
from ready_hf.features import FrozenTarget
from ready_hf.target import committed_states, recurrent_layers
from support import FAMILIES, cache_of, drafter_for, random_prompt, tiny_target


LENGTH = 40
READERS = {
    "reader_normalization": ("read", "state", "none"),
    "reader_projection": ("full", "bilinear"),
    "reader_conditioning": ([], ["anchor", "context", "slot"]),
}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def new_scan(length=LENGTH, chunk_size=8, seed=0, heads=(2, 4), sizes=(5, 7), batch=2):
    """With fewer heads of keys than of values, K != V, an initial state and decay."""
    key, value = normal(batch, length, heads[0], sizes[0], seed=seed), normal(batch, length, heads[1], sizes[1])
    g, beta = -normal(batch, length, heads[1], seed=seed + 1).abs(), normal(batch, length, heads[1]).sigmoid()
    first = normal(batch, heads[1], *sizes)
    return gated_delta_scan(key, value, g, beta, first, use_qk_l2norm_in_kernel=True, chunk_size=chunk_size)


def dense_positions(length=LENGTH, batch=2):
    return torch.stack([torch.randperm(length, generator=torch.Generator().manual_seed(i)) for i in range(batch)])


def new_states(most_elements=3 * 2 * 4 * 5 * 7, shift=0):
    """A scan, states as they are, another scan; read three anchors at a time."""
    positions = dense_positions() + shift
    layers = [new_scan(), new_scan(seed=5).states(positions), new_scan(seed=9, chunk_size=16)]
    return AnchorStates(layers, positions, most_elements)


def difference(got, want):
    """Relative to the largest number."""
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert torch.isfinite(got).all()
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("most_elements", [1, 3 * 2 * 4 * 5 * 7, 2**24], ids=["one", "three", "all"])
@pytest.mark.parametrize("queries", [1, 3])
def test_layers_norms_reads_and_gradients(most_elements, queries):
    states = new_states(most_elements)
    tensor = states.stack()
    assert list(tensor.shape) == list(states.shape) == [2, LENGTH, 3, 4, 5, 7]
    for i in range(3):
        assert difference(states.layer(i), tensor[:, :, i]) == 0
        assert difference(states.norms(i), tensor[:, :, i].norm(dim=(-1, -2))) < 1e-6
    asked = normal(2, LENGTH, queries, 3, 4, 5).requires_grad_()
    weights = normal(2, LENGTH, queries, 3, 4, 7, seed=3)
    want = torch.einsum("baqnhk,banhkv->baqnhv", asked, tensor)
    (want_gradient,) = torch.autograd.grad((want * weights).sum(), asked)
    one_by_one = torch.stack([states.read(i, x) for i, x in enumerate(asked.unbind(3))], dim=3)
    for got in (states.read_all(asked), one_by_one):
        assert difference(got, want) < 1e-6
        (gradient,) = torch.autograd.grad((got * weights).sum(), asked)
        assert difference(gradient, want_gradient) < 1e-6


def test_reads_are_linear_and_their_gradient_has_a_gradient():
    states = new_states()
    asked, given = normal(2, LENGTH, 2, 3, 4, 5).requires_grad_(), normal(2, LENGTH, 2, 3, 4, 7).requires_grad_()
    (gradient,) = torch.autograd.grad(states.read_all(asked), asked, given, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), given)
    want = 2 * states.read_all(gradient)
    assert difference(second, want) < 1e-6


def test_reads_stay_float32_under_autocast():
    states = new_states()
    asked = normal(2, LENGTH, 2, 3, 4, 5).to(torch.bfloat16).requires_grad_()
    want = states.read_all(asked.detach().float())
    with torch.autocast("cpu", torch.bfloat16):
        got = states.read_all(asked)
        got.sum().backward()
    assert torch.equal(got, want)
    assert asked.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("change", ["shift", "decay", "order"])
def test_another_state_reads_otherwise(change):
    """Negative control of the comparisons above."""
    states, asked = new_states(), normal(2, LENGTH, 1, 3, 4, 5)
    want = states.read_all(asked)
    other = new_states(shift=1) if change == "shift" else copy.copy(states)
    if change == "decay":
        scan = states.layers[0]
        other.layers = [scan._replace(decay=scan.decay * 1.01), *states.layers[1:]]
    elif change == "order":
        other.layers = states.layers[::-1]
    assert difference(other.read_all(asked), want) > 1e-3


def test_no_layer_at_all_is_refused():
    with pytest.raises(ValueError, match="states of no layer at all"):
        AnchorStates([], torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.parametrize("values", list(itertools.product(*READERS.values())), ids=str)
@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_a_drafter_makes_the_same_of_the_tensor(family, values):
    """Hidden states, and the gradients of all of its parameters."""
    target = tiny_target(family)
    options = {"reader_injection": "last", "reader_num_queries": 2}
    drafter = drafter_for(target, **dict(zip(READERS, values, strict=True)), **options)
    ids, anchors = random_prompt(LENGTH, batch=2), dense_positions()[:, ::3]
    batch = FrozenTarget(target, drafter.config).batch(ids, anchors)
    batch.states.most_elements = 2 * 2 * 4 * 16 * 24
    found = []
    for states in (batch.states.stack(), batch.states):
        drafter.zero_grad()
        hidden = drafter(batch.noise_embeds, batch.context_hidden_states, anchors, states).last_hidden_state
        (hidden * normal(*hidden.shape)).sum().backward()
        gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
        found.append({"hidden": hidden.detach(), **gradients})
    assert any(name.startswith("reader.query") for name in found[0])
    assert found[0].keys() == found[1].keys()
    for name, want in found[0].items():
        assert difference(found[1][name], want) < 5e-6, name


def test_states_of_other_shapes_are_refused():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    batch = FrozenTarget(target, drafter.config).batch(random_prompt(20), torch.tensor([[4, 9]]))
    batch.states.layers.pop()
    with pytest.raises(ValueError, match=r"must be \[B, A, N, H, K, V\] = \[1, 2, 3, 4, 16, 24\], got \[1, 2, 2, 4,"):
        drafter(batch.noise_embeds, batch.context_hidden_states, batch.anchor_positions, batch.states)


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_states_are_those_of_a_forward_over_the_tokens_before(family):
    """At the first token, before, at and after the starts of chunks, inside of them, and at the end of the row."""
    target, length = tiny_target(family), 70
    layers = recurrent_layers(target)
    ids, anchors = random_prompt(length, batch=2), dense_positions(length)
    with torch.no_grad():
        _, states = forward_with_states(target, ids, anchors, layers)
    is_scan = isinstance(states.layers[0], ChunkScan)
    assert is_scan is all(layer.recurrence.name == "gated_delta_rule" for layer in layers)
    asked = normal(*states.shape[:2], 2, *states.shape[2:5])
    reads, tensor = states.read_all(asked), states.stack()
    for anchor in (1, 2, 33, 63, 64, 65, 69):
        with torch.no_grad():
            want = committed_states(cache_of(target(ids[:, :anchor], use_cache=True)), layers)
        for row, column in enumerate((anchors == anchor).int().argmax(-1).tolist()):
            assert float((tensor[row, column] - want[row]).norm() / want[row].norm()) < 1e-5
            read = torch.einsum("qnhk,nhkv->qnhv", asked[row, column], want[row])
            assert float((reads[row, column] - read).norm() / read.norm()) < 1e-5
    assert not tensor[anchors == 0].any()
    assert not reads[anchors == 0].any()


def test_few_anchors_of_a_long_row_keep_their_states():
    """The smaller of two forms is kept, and both say the same."""
    target = tiny_target("qwen3_5")
    layers, ids = recurrent_layers(target), random_prompt(70)
    with torch.no_grad():
        few = forward_with_states(target, ids, torch.tensor([[7, 66]]), layers)[1]
        many = forward_with_states(target, ids, torch.arange(70)[None], layers)[1]
    assert all(isinstance(layer, torch.Tensor) for layer in few.layers)
    assert all(isinstance(layer, ChunkScan) for layer in many.layers)
    assert many.nbytes < many.stack().nbytes / 3
    assert few.nbytes == few.stack().nbytes
    assert difference(few.stack(), many.stack()[:, [7, 66]]) < 1e-6


def test_layers_come_in_the_order_of_the_drafter():
    for family in ("qwen3_5", "bamba"):
        target, ids, anchors = tiny_target(family), random_prompt(20), torch.tensor([[4, 17]])
        with torch.no_grad():
            layers = recurrent_layers(target)
            want = forward_with_states(target, ids, anchors, layers)[1].stack()
            got = forward_with_states(target, ids, anchors, [layers[2], layers[0]])[1].stack()
        assert torch.equal(got, want[:, :, [2, 0]])


def leak(target, shift=0):
    """Largest change of a drafter's output at the anchors up to one, if tokens from that one on are others.

    All anchors are dense. The anchor's own embedding, which its block may see, stays. `shift` reads other states.
    """
    length, drafter = 70, drafter_for(target, block_size=2)
    frozen, anchors = FrozenTarget(target, drafter.config), torch.arange(1, length - 1)[None]
    ids, worst = random_prompt(length), 0.0
    embeds = frozen.batch(ids, anchors).noise_embeds

    def hidden(ids):
        batch = frozen.batch(ids, anchors)
        assert isinstance(batch.states.layers[0], ChunkScan)
        states = AnchorStates(batch.states.layers, anchors + shift)
        with torch.no_grad():
            out = drafter(embeds, batch.context_hidden_states, anchors, states).last_hidden_state
        return out.unflatten(1, (-1, 2))[0]

    want = hidden(ids)
    for anchor in (1, 33, 63, 64, 65, 68):
        other = ids.clone()
        other[:, anchor:] = (other[:, anchor:] + 7) % 90 + 3
        worst = max(worst, float((hidden(other)[:anchor] - want[:anchor]).abs().max()))
    return worst


def test_dense_anchors_never_leak_later_tokens():
    target = tiny_target("qwen3_5")
    assert leak(target) < 1e-5
    assert leak(target, shift=1) > 1e-2  # control: states that have consumed the anchor
