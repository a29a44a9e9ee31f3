"""The drafter as a module: one block, many blocks, cache and padding agree; wrong inputs; every option trains.

Shapes: B batch, A anchors, G block slots, d hidden size, m target layers that are read.
"""

import itertools

import pytest
import torch
from transformers import DynamicCache

from ready_hf import ReadyDrafterConfig, ReadyDrafterModel, kernels, ops
from ready_hf.heads import SequentialHead


G, D, VOCABULARY = 4, 32, 61
READER = {"state_layer_ids": [0, 2], "state_shape": [2, 4, 6], "reader_rank": 5, "reader_query_rank": 3}
LAYERS = {
    "full": {"sliding_window": None},
    "windowed": {"sliding_window": 7},
    "mixed": {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"]},
    "mixed the other way": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
}
all_layers = pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)


def new_config(**options):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": D,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "block_size": G,
        "target_layer_ids": [1, 2],
        "markov_rank": 6,
    }
    return ReadyDrafterConfig(**sizes | READER | options)


def new_drafter(**options):
    """A drafter with no weight at zero, whose scales tell if something is left out."""
    torch.manual_seed(0)
    drafter = ReadyDrafterModel(new_config(**options)).eval()
    for name, parameter in drafter.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return drafter


def normal(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def new_inputs(drafter, batch=2, rows=19, anchors=1):
    """Keyword arguments of `forward`, without `anchor_positions`."""
    config = drafter.config
    inputs = {
        "noise_embeds": normal(batch, anchors * config.block_size, D),
        "context_hidden_states": normal(batch, rows, len(config.target_layer_ids) * D, seed=2),
    }
    if config.has_reader:
        inputs["states"] = normal(batch, anchors, len(config.state_layer_ids), *config.state_shape, seed=3)
    return inputs


def hidden(drafter, **inputs):
    with torch.no_grad():
        return drafter(**inputs).last_hidden_state


def close(got, want, tolerance=1e-5):
    """Largest difference, relative to the largest number if that is above 1."""
    got, want = got.detach(), want.detach()
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error = float((got - want).abs().max())
    assert error <= tolerance * max(1.0, float(want.abs().max())), error


def new_head():
    """The output head of a target."""
    head = torch.nn.Linear(D, VOCABULARY, bias=False).requires_grad_(False)
    head.weight.copy_(normal(VOCABULARY, D, seed=7) * 0.3)
    return head


def loss_of(drafter, ids, **inputs):
    """A scalar that every output of the drafter has a part in."""
    blocks = drafter(**inputs).last_hidden_state.unflatten(1, (-1, drafter.config.block_size))
    logits, confidences = drafter.draft_logits(blocks, ids, new_head())
    return logits.square().mean() + confidences.square().mean()


def test_shapes_of_all_outputs():
    drafter = new_drafter()
    drafter.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = drafter(
            **new_inputs(drafter, anchors=3),
            anchor_positions=torch.tensor([[1, 5, 19], [0, 7, 8]]),
            output_hidden_states=True,
            output_attentions=True,
        )
    assert outputs.last_hidden_state.shape == (2, 3 * G, D)
    assert outputs.cache is None
    assert [state.shape for state in outputs.hidden_states] == [(2, 3 * G, D)] * 3
    assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)
    assert [weights.shape for weights in outputs.attentions] == [(2, 4, 3 * G, 19 + 3 * G)] * 2
    blocks = outputs.last_hidden_state.unflatten(1, (3, G))
    logits, confidences = drafter.draft_logits(blocks, torch.zeros(2, 3, G, dtype=torch.long), new_head())
    assert (logits.shape, confidences.shape) == ((2, 3, G, VOCABULARY), (2, 3, G))
    assert logits.dtype == confidences.dtype == torch.float32


@all_layers
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_many_blocks_are_each_block_alone(layers, attention):
    drafter = new_drafter(**layers)
    drafter.set_attn_implementation(attention)
    anchors = torch.tensor([[1, 2, 9, 19], [0, 3, 18, 5]])
    inputs = new_inputs(drafter, anchors=4)
    got = hidden(drafter, **inputs, anchor_positions=anchors).unflatten(1, (4, G))
    ids = torch.arange(2 * 4 * G).view(2, 4, G) % VOCABULARY
    logits, confidences = drafter.draft_logits(got, ids, new_head())
    for row, block in itertools.product(range(2), range(4)):
        rows = int(anchors[row, block])
        alone = hidden(
            drafter,
            noise_embeds=inputs["noise_embeds"][row : row + 1, block * G : (block + 1) * G],
            context_hidden_states=inputs["context_hidden_states"][row : row + 1, :rows],
            states=inputs["states"][row : row + 1, block : block + 1],
        )
        close(got[row, block], alone[0])
        want, want_confidences = drafter.draft_logits(alone, ids[row : row + 1, block], new_head())
        close(logits[row, block], want[0])
        close(confidences[row, block], want_confidences[0])


@pytest.mark.parametrize("reader", [True, False])
def test_an_anchor_at_the_start_sees_no_context(reader):
    drafter = new_drafter(**({} if reader else {"state_layer_ids": None}))
    inputs = new_inputs(drafter, rows=3)
    start = torch.zeros(2, 1, dtype=torch.long)
    first = hidden(drafter, **inputs, anchor_positions=start)
    inputs["context_hidden_states"] = normal(2, 3, 2 * D, seed=9)
    close(hidden(drafter, **inputs, anchor_positions=start), first, tolerance=0)
    inputs["context_hidden_states"] = normal(2, 0, 2 * D)
    close(hidden(drafter, **inputs), first)


@all_layers
@pytest.mark.parametrize("chunks", [[19], [1] * 19, [5, 3, 1, 1, 9], [9, 4, 6]], ids=str)
def test_round_by_round_with_a_cache_is_one_call_without(layers, chunks):
    drafter = new_drafter(**layers)
    rows = normal(2, 19, 2 * D, seed=2)
    cache, seen = DynamicCache(config=drafter.config), 0
    for index, chunk in enumerate(chunks):
        inputs = new_inputs(drafter) | {"noise_embeds": normal(2, G, D, seed=10 + index)}
        new, seen = rows[:, seen : seen + chunk], seen + chunk
        got = hidden(drafter, **inputs | {"context_hidden_states": new}, cache=cache)
        close(got, hidden(drafter, **inputs | {"context_hidden_states": rows[:, :seen]}, use_cache=False))
        assert cache.get_seq_length() == seen


@all_layers
def test_left_padding_changes_nothing(layers):
    drafter, pad = new_drafter(**layers), 5
    inputs = new_inputs(drafter, batch=1, rows=14)
    want = hidden(drafter, **inputs)
    padded = inputs | {
        "context_hidden_states": torch.cat([normal(1, pad, 2 * D, seed=8), inputs["context_hidden_states"]], dim=1),
        "context_position_ids": (torch.arange(14 + pad) - pad).clamp_min(0)[None],
        "position_ids": torch.arange(14, 14 + G)[None],
    }
    mask = (torch.arange(14 + pad) >= pad).long()[None]
    close(hidden(drafter, **padded, context_attention_mask=mask), want)
    cache = DynamicCache(config=drafter.config)
    for start, stop in ((0, 3), (3, 9), (9, 14 + pad)):
        step = padded | {
            "context_hidden_states": padded["context_hidden_states"][:, start:stop],
            "context_position_ids": padded["context_position_ids"][:, start:stop],
        }
        got = hidden(drafter, **step, context_attention_mask=mask[:, :stop], cache=cache)
    close(got, want)


@all_layers
def test_eager_is_sdpa(layers):
    drafter = new_drafter(**layers)
    inputs = new_inputs(drafter, anchors=2) | {
        "anchor_positions": torch.tensor([[4, 19], [0, 11]]),
        "context_attention_mask": (torch.arange(19) >= torch.tensor([[0], [6]])).long(),
        "attention_mask": torch.tensor([[1] * 2 * G, [1] * G + [1, 1, 0, 0]]),
    }
    want = hidden(drafter, **inputs)
    drafter.set_attn_implementation("eager")
    close(hidden(drafter, **inputs), want)


def test_a_masked_slot_is_unseen_by_the_others_and_sees_itself():
    drafter = new_drafter()
    inputs = new_inputs(drafter)
    mask = torch.ones(2, G, dtype=torch.long)
    mask[:, -1] = 0
    want = hidden(drafter, **inputs, attention_mask=mask)
    inputs["noise_embeds"] = torch.cat([inputs["noise_embeds"][:, :-1], normal(2, 1, D, seed=6)], dim=1)
    got = hidden(drafter, **inputs, attention_mask=mask)
    close(got[:, :-1], want[:, :-1], tolerance=0)
    assert not torch.equal(got[:, -1], want[:, -1])
    assert not torch.equal(hidden(drafter, **inputs)[:, 0], want[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_dummy_block_without_anything_visible_is_finite(attention, dtype):
    drafter = new_drafter().to(dtype)
    drafter.set_attn_implementation(attention)
    inputs = {name: tensor.to(dtype) for name, tensor in new_inputs(drafter, anchors=2).items()}
    inputs["noise_embeds"][:, G:] = 0
    loss = loss_of(
        drafter,
        torch.zeros(2, 2, G, dtype=torch.long),
        **inputs,
        anchor_positions=torch.tensor([[7, 0], [3, 0]]),
        attention_mask=torch.tensor([[1] * G + [0] * G] * 2),
        context_attention_mask=torch.tensor([[1] * 19, [0] * 19]),
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(parameter.grad).all() for parameter in drafter.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    gradients = []
    for checkpointing in (False, True):
        drafter = new_drafter().train()
        if checkpointing:
            name = "activation_checkpointing_enable"  # gradient_checkpointing_enable on older transformers
            enable = getattr(drafter, name, None) or drafter.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        inputs = new_inputs(drafter, anchors=2) | {"anchor_positions": torch.tensor([[4, 19], [1, 11]])}
        loss_of(drafter, torch.arange(4 * G).view(2, 2, G), **inputs).backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    for name, gradient in gradients[0].items():
        close(gradients[1][name], gradient, tolerance=1e-6)


def test_an_untrained_reader_changes_nothing():
    for injection in ("input", "layers", "last", "head"):
        torch.manual_seed(0)
        ready = ReadyDrafterModel(new_config(reader_injection=injection)).eval()
        assert not ready.reader.up_proj.weight.any()
        plain = ReadyDrafterModel(new_config(state_layer_ids=None)).eval()
        assert plain.reader is None
        weights = {name: w for name, w in ready.state_dict().items() if not name.startswith("reader.")}
        plain.load_state_dict(weights)
        inputs = new_inputs(ready)
        want = hidden(ready, **inputs)
        states = inputs.pop("states")
        close(hidden(plain, **inputs), want, tolerance=0)
        ready.reader.up_proj.weight.data.normal_()
        assert not torch.equal(hidden(ready, **inputs, states=states), want)


def test_untrained_sequential_and_confidence_heads():
    drafter = ReadyDrafterModel(new_config())
    states, ids = normal(2, G, D), torch.zeros(2, G, dtype=torch.long)
    logits, _ = drafter.draft_logits(states, ids, new_head())
    close(logits, drafter.base_logits(states, new_head()), tolerance=0)  # W2 starts at zero
    bare = ReadyDrafterModel(new_config(markov_rank=0, enable_confidence_head=False))
    assert bare.markov_head is None
    logits, confidences = bare.draft_logits(states, ids, new_head())
    assert confidences is None
    close(logits, bare.base_logits(states, new_head()), tolerance=0)


@pytest.mark.parametrize("injection", ["input", "layers", "last", "head"])
@pytest.mark.parametrize("projection", ["full", "bilinear"])
@pytest.mark.parametrize("conditioning", [[], ["anchor"], ["context"], ["context", "anchor"], ["slot"]], ids=str)
def test_every_reader_runs_and_all_of_it_trains(injection, projection, conditioning):
    if "slot" in conditioning and injection not in ("last", "head"):
        injection, conditioning = "last", ["slot", "anchor"]
    options = itertools.product((None, 3), ("read", "state", "none"), (False, True))
    for index, (rank, normalization, gate) in enumerate(options):
        drafter = new_drafter(
            reader_num_queries=1 + index % 3,
            reader_query_act="silu" if rank and gate else None,
            reader_gate_inputs=["anchor", "context"] if normalization == "read" else ["context"],
            reader_gate_rank=2 if index % 2 else None,
            reader_output_rank=None if index % 4 else 3,
            reader_injection=injection,
            reader_projection=projection,
            reader_conditioning=conditioning,
            reader_query_rank=rank,
            reader_normalization=normalization,
            reader_gate=gate,
        )
        inputs = new_inputs(drafter, anchors=2) | {"anchor_positions": torch.tensor([[4, 19], [1, 11]])}
        inputs["states"] = inputs["states"].to(torch.bfloat16)  # any float dtype
        loss_of(drafter, torch.arange(4 * G).view(2, 2, G), **inputs).backward()
        for name, parameter in drafter.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            assert parameter.grad.any(), name


def test_a_read_is_the_state_transposed_times_the_query():
    reader = new_drafter(reader_normalization="none").reader
    queries, states = normal(2, 3, G, 2, 2, 4), normal(2, 3, 2, 2, 4, 6, seed=2)
    got = reader.read(queries, states)
    assert got.shape == (2, 3, G, 2, 2, 6)
    close(got[1, 2, 3, 1, 0], states[1, 2, 1, 0].T @ queries[1, 2, 3, 1, 0])
    for normalization, scale in (("read", 10.0), ("state", 10.0)):
        reader = new_drafter(reader_normalization=normalization).reader
        close(reader.read(queries, states * scale), reader.read(queries, states), tolerance=1e-4)


@pytest.mark.parametrize("projection", ["full", "bilinear"])
def test_several_queries_are_as_many_readers_whose_maps_are_added(projection):
    options = {"reader_projection": projection, "reader_conditioning": [], "reader_gate": False}
    options["reader_injection"] = "input"
    both = new_drafter(reader_num_queries=2, **options).reader
    ones = [new_drafter(**options).reader for _ in range(2)]
    heads, inputs = 2, new_inputs(new_drafter())
    both.up_proj.weight.data.copy_(normal(*both.up_proj.weight.shape, seed=5))
    for i, one in enumerate(ones):
        one.query.data.copy_(both.query.unflatten(2, (heads, 2))[:, :, :, i])
        if projection == "full":
            one.down_proj.weight.data.copy_(
                both.down_proj.weight.unflatten(1, (2, heads, 2, 6))[:, :, :, i].flatten(1)
            )
            one.up_proj.weight.data.copy_(both.up_proj.weight)
        else:
            one.head_map.data.copy_(both.head_map.unflatten(1, (heads, 2))[:, :, i])
            up = both.up_proj.weight.unflatten(1, (2, heads, 2, 5))[:, :, :, i].flatten(1)
            one.up_proj.weight.data.copy_(up)
    arguments = (inputs["states"], normal(2, 1, D), normal(2, 1, D, seed=3))
    close(both(*arguments), ones[0](*arguments) + ones[1](*arguments), tolerance=1e-5)


@pytest.mark.parametrize("normalization", ["read", "state", "none"])
@pytest.mark.parametrize("queries", [1, 2 * kernels.MOST_QUERIES // G + 1])
def test_states_where_they_lie_are_read_like_one_tensor(queries, normalization, monkeypatch):
    """By a kernel, several launches for more queries than it takes at once."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "_backend", "triton")
    options = {"reader_injection": "last", "reader_conditioning": ["slot"], "reader_normalization": normalization}
    drafter = new_drafter(reader_num_queries=queries, **options)
    inputs = new_inputs(drafter)
    want, states = hidden(drafter, **inputs), inputs.pop("states")
    kernels.launches.clear()
    close(hidden(drafter, **inputs, states=[*states[:, 0].transpose(0, 1).contiguous()]), want)
    assert sum(kernels.launches.values()) == -(-queries * G // kernels.MOST_QUERIES)


def test_a_gate_is_by_its_inputs_and_each_counts_once():
    arguments = (normal(2, 1, G, 2, 2, 6), normal(2, 1, D), normal(2, 1, D, seed=3))
    for inputs, moves in (
        (["anchor"], [True, False]),
        (["context"], [False, True]),
        (["context", "anchor"], [True] * 2),
    ):
        reader = new_drafter(reader_gate=True, reader_gate_inputs=inputs).reader
        assert reader.gate_proj.in_features == len(inputs) * D
        first = reader.project(*arguments)
        changed = [reader.project(arguments[0], arguments[1].roll(1, -1), arguments[2])]
        changed.append(reader.project(*arguments[:2], arguments[2].roll(1, -1)))
        assert [not torch.equal(x, first) for x in changed] == moves
    twice = new_drafter(reader_gate=True, reader_gate_inputs=["anchor", "anchor"]).reader
    assert twice.gate_proj.in_features == D


def test_queries_by_slot_ask_for_what_the_slot_is():
    drafter = new_drafter(reader_conditioning=["slot"], reader_injection="head")
    reader = drafter.reader
    slots = normal(2, 1, G, D)
    queries = reader.queries(normal(2, 1, D), normal(2, 1, D, seed=1), slots)
    change = torch.zeros_like(slots)
    change[1, 0, 2] = 1.0
    changed = (
        (reader.queries(normal(2, 1, D), normal(2, 1, D, seed=1), slots + change) - queries).flatten(3).norm(dim=-1)
    )
    assert changed[1, 0, 2] > 0
    assert not changed[0].any()
    assert (changed[1, 0] > 0).sum() == 1


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("size", [2, 4, 31])
def test_sequential_head_step_by_step_is_the_whole_block(kind, size):
    torch.manual_seed(0)
    sequential = SequentialHead(new_config(markov_head_type=kind))
    states, ids = normal(3, size, D), torch.randint(VOCABULARY, (3, size), generator=torch.Generator().manual_seed(0))
    whole, latent = sequential(states, ids), None
    assert whole.shape == (3, size, 6)
    for k in range(size):
        latent = sequential.step(states[:, k], ids[:, k], latent)
        close(latent, whole[:, k])
    changed = ids.clone()
    changed[:, size // 2] += 1
    differs = (sequential(states, changed % VOCABULARY) != whole).any(-1).all(0)
    assert differs.tolist() == [k == size // 2 or (kind == "rnn" and k > size // 2) for k in range(size)]


@pytest.mark.parametrize("options", [{}, {"confidence_head_with_markov": False}, {"markov_rank": 0}], ids=str)
def test_training_the_confidence_head_leaves_the_rest_alone(options):
    drafter = new_drafter(**options)
    states = drafter(**new_inputs(drafter)).last_hidden_state
    drafter.confidence_logits(states, torch.ones(2, G, dtype=torch.long)).sum().backward()
    trained = {name for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    assert trained == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert drafter.confidence_head.proj.in_features == D + (0 if options else 6)


@pytest.mark.parametrize("size", [2, 31])
def test_smallest_and_largest_block(size):
    drafter = new_drafter(block_size=size, sliding_window=size)
    inputs = new_inputs(drafter, rows=40)
    want = hidden(drafter, **inputs)
    assert want.shape == (2, size, D)
    cache = DynamicCache(config=drafter.config)
    rows = inputs.pop("context_hidden_states")
    hidden(drafter, **inputs, context_hidden_states=rows[:, :37], cache=cache)
    close(hidden(drafter, **inputs, context_hidden_states=rows[:, 37:], cache=cache), want)
    if size == 2:  # slot 0 sees row 39 alone, as the reader does; slot 1 sees none
        changed = torch.cat([normal(2, 39, 2 * D, seed=9), rows[:, 39:]], dim=1)
        close(hidden(drafter, **inputs, context_hidden_states=changed), want, tolerance=0)


def test_caches_are_made_and_kept_as_asked():
    drafter = new_drafter()
    inputs = new_inputs(drafter)
    with torch.no_grad():
        assert drafter(**inputs, use_cache=False).cache is None
        made = drafter(**inputs, use_cache=True).cache
        assert made.get_seq_length() == 19
        assert drafter(**inputs, use_cache=True, cache=made).cache is made
    assert made.get_seq_length() == 38
    assert made.layers[0].keys.shape == (2, 2, 38, 8)  # the context's only, never the block's


WRONG_INPUTS = {
    "part of a block": (
        {"noise_embeds": normal(2, G + 1, D)},
        rf"`noise_embeds` must hold whole blocks: 1 of {G} slots, got {G + 1} slots",
    ),
    "blocks without anchors": (
        {"anchor_positions": torch.zeros(2, 3, dtype=torch.long)},
        rf"`noise_embeds` must hold whole blocks: 3 of {G} slots, got {G} slots",
    ),
    "features of one layer": (
        {"context_hidden_states": normal(2, 19, D)},
        rf"must have {2 * D} channels \(target layers \[1, 2\] of {D}\), got {D}",
    ),
    "no states": ({"states": None}, r"\[B, A, N, H, K, V\] = \[2, 1, 2, 2, 4, 6\], got None"),
    "transposed states": (
        {"states": normal(2, 1, 2, 2, 6, 4)},
        r"\[B, A, N, H, K, V\] = \[2, 1, 2, 2, 4, 6\], got \[2, 1, 2, 2, 6, 4\]",
    ),
    "states of one layer": (
        {"states": normal(2, 1, 1, 2, 4, 6)},
        r"= \[2, 1, 2, 2, 4, 6\], got \[2, 1, 1, 2, 4, 6\]",
    ),
    "anchors and cache": (
        {"anchor_positions": torch.zeros(2, 1, dtype=torch.long), "cache": DynamicCache()},
        "`anchor_positions` cannot be combined with a `cache`",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_wrong_inputs_are_refused(wrong, message):
    drafter = new_drafter()
    with pytest.raises(ValueError, match=message):
        drafter(**new_inputs(drafter) | wrong)
