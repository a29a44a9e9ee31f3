"""Training features: states in the middle of a text, and the same draft logits as while decoding."""

import pytest
import torch

from ready_hf import ReadyDrafterConfig, ReadyDrafterModel
from ready_hf.candidates import ReadyCandidateGenerator
from ready_hf.chunk_states import gated_delta_scan
from ready_hf.features import FrozenTarget, choose_anchors, legal_anchors
from ready_hf.target import committed_states, recurrent_layers
from support import (
    FAMILIES,
    VOCAB_SIZE,
    cache_of,
    drafter_for,
    random_prompt,
    tiny_target,
    torch_rule,
    trained_target,
)


def block_logits(drafter, frozen, batch):
    """Logits of the head `[B, A, G, V]` of the training path, before the sequential head."""
    with torch.no_grad():
        hidden = drafter(
            noise_embeds=batch.noise_embeds,
            context_hidden_states=batch.context_hidden_states,
            anchor_positions=batch.anchor_positions,
            states=batch.states,
        ).last_hidden_state
        return drafter.base_logits(hidden, frozen.head).unflatten(1, (-1, drafter.config.block_size))


@pytest.fixture
def decoded(monkeypatch):
    """`decoded(target, drafter, prompt)`: the ids, and `{anchor: logits [G, V]}` of every round of `generate`."""

    def run(target, drafter, prompt, new_tokens=24):
        anchors, logits = [], []
        candidates, base = ReadyCandidateGenerator.get_candidates, ReadyDrafterModel.base_logits

        def get_candidates(self, input_ids, **kwargs):
            anchors.append(input_ids.shape[1] - 1)
            return candidates(self, input_ids, **kwargs)

        def base_logits(self, hidden_states, head):
            logits.append(base(self, hidden_states, head))
            return logits[-1]

        with monkeypatch.context() as patched:
            patched.setattr(ReadyCandidateGenerator, "get_candidates", get_candidates)
            patched.setattr(ReadyDrafterModel, "base_logits", base_logits)
            options = {"do_sample": False, "suppress_tokens": [drafter.config.mask_token_id]}
            ids = target.generate(prompt, max_new_tokens=new_tokens, assistant_model=drafter, **options)
        return ids, dict(zip(anchors, (x[0] for x in logits), strict=True))

    return run


def parity_error(frozen, drafter, ids, rounds, shift=0):
    """Largest difference between training and decoding; `shift` gives the reader states of other positions."""
    anchors = torch.tensor([sorted(rounds)])
    batch = frozen.batch(ids, anchors)
    if shift:
        batch.states = frozen.batch(ids, anchors + shift).states
    got = block_logits(drafter, frozen, batch)[0]
    errors = [
        (mine[: len(rounds[anchor])] - rounds[anchor]).abs().max()
        for anchor, mine in zip(anchors[0].tolist(), got, strict=True)
    ]
    return float(max(errors))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("family", ["qwen3_5", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h"])
def test_training_and_decoding_compute_the_same_logits(family, window, decoded):
    target = tiny_target(family)
    drafter = drafter_for(target, sliding_window=window)
    ids, rounds = decoded(target, drafter, random_prompt(11))
    assert len(rounds) >= 8
    frozen = FrozenTarget(target, drafter.config)
    assert parity_error(frozen, drafter, ids, rounds) < 1e-4


READERS = {
    "slot, 4 queries, ranks": {
        "reader_injection": "last",
        "reader_conditioning": ["slot", "anchor"],
        "reader_query_rank": 3,
        "reader_query_act": "silu",
        "reader_num_queries": 4,
        "reader_gate": True,
        "reader_gate_inputs": ["context", "anchor"],
        "reader_gate_rank": 3,
        "reader_output_rank": 5,
    },
    "slot at the head": {
        "reader_injection": "head",
        "reader_conditioning": ["slot", "context"],
        "reader_query_rank": None,
        "reader_num_queries": 3,
        "reader_normalization": "state",
    },
    "bilinear before every layer": {
        "reader_injection": "layers",
        "reader_projection": "bilinear",
        "reader_rank": 4,
        "reader_num_queries": 2,
        "reader_gate": True,
        "reader_gate_inputs": ["context"],
        "reader_output_rank": 6,
        "reader_normalization": "none",
    },
}


@pytest.mark.parametrize("options", READERS.values(), ids=READERS)
def test_every_reader_reads_the_same_in_training_and_decoding(options, decoded, tmp_path):
    """As loaded from a folder."""
    target = tiny_target("qwen3_5")
    drafter_for(target, **options).save_pretrained(tmp_path)
    drafter = ReadyDrafterModel.from_pretrained(tmp_path)
    assert {name: getattr(drafter.config, name) for name in options} == options
    ids, rounds = decoded(target, drafter, random_prompt(11))
    assert len(rounds) >= 8
    frozen = FrozenTarget(target, drafter.config)
    assert parity_error(frozen, drafter, ids, rounds) < 1e-4
    rounds.pop(max(rounds))
    assert parity_error(frozen, drafter, ids, rounds, shift=1) > 1e-2


def test_parity_fails_if_states_are_one_token_late_or_early(decoded):
    """Negative control."""
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    ids, rounds = decoded(target, drafter, random_prompt(11))
    frozen = FrozenTarget(target, drafter.config)
    rounds.pop(max(rounds))  # so that a later position exists
    assert parity_error(frozen, drafter, ids, rounds) < 1e-4
    for shift in (-1, 1):
        assert parity_error(frozen, drafter, ids, rounds, shift) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_a_forward_over_the_tokens_before(family):
    target = tiny_target(family)
    frozen = FrozenTarget(target, drafter_for(target).config)
    ids = random_prompt(70, batch=2)
    anchors = torch.tensor([[1, 2, 33, 64, 69], [0, 5, 33, 63, 65]])
    states = frozen.batch(ids, anchors).states.stack()
    assert states.dtype == torch.float32
    layers = recurrent_layers(target)
    for row, column in ((0, 0), (0, 1), (0, 3), (0, 4), (1, 1), (1, 2), (1, 3), (1, 4)):
        with torch.no_grad():
            cache = cache_of(target(ids[row : row + 1, : anchors[row, column]], use_cache=True))
        want = committed_states(cache, layers)[0]
        assert float((states[row, column] - want).norm() / want.norm()) < 1e-5
    assert not states[1, 0].any()


@pytest.mark.parametrize("chunk_size", [1, 8, 64])
@pytest.mark.parametrize("length", [1, 16, 21])
def test_scan_of_any_chunk_size(chunk_size, length):
    """Against transformers' rule; fewer key heads than value heads, K != V, an initial state, strong decay."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    generator = torch.Generator().manual_seed(length)
    query, key = (torch.randn(2, length, 2, 4, generator=generator) for _ in range(2))
    value = torch.randn(2, length, 6, 5, generator=generator)
    g, beta = -4 * torch.rand(2, length, 6, generator=generator), torch.rand(2, length, 6, generator=generator)
    first = torch.randn(2, 6, 4, 5, generator=generator)
    positions = torch.arange(length + 1).expand(2, -1)
    options = {"initial_state": first, "use_qk_l2norm_in_kernel": True}
    states = gated_delta_scan(key, value, g, beta, chunk_size=chunk_size, **options).states(positions)
    rule = torch_rule(modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    assert torch.allclose(states[:, 0], first)
    every = lambda x: x.repeat_interleave(3, dim=2)  # noqa: E731 - before transformers 5.24 the caller repeats heads
    for t in range(1, length + 1):
        parts = [x[:, :t] for x in (every(query), every(key), value)]
        _, want = rule(*parts, g=g[:, :t], beta=beta[:, :t], output_final_state=True, **options)
        assert torch.allclose(states[:, t], want, atol=1e-5)


def test_a_scan_of_inputs_that_learn_gives_the_same_states():
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(1, 21, 2, 4, generator=generator), torch.randn(1, 21, 2, 5, generator=generator)
    g, beta = -torch.rand(1, 21, 2, generator=generator), torch.rand(1, 21, 2, generator=generator)
    want = gated_delta_scan(key, value, g, beta, chunk_size=8)
    learning = [x.clone().requires_grad_() for x in (key, value, g, beta)]
    got = gated_delta_scan(*learning, chunk_size=8)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)
        assert not mine.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_the_target_give_its_logits(family):
    target = tiny_target(family)
    frozen = FrozenTarget(target, drafter_for(target).config)
    ids = random_prompt(40, batch=2)
    batch = frozen.batch(ids, torch.tensor([[3, 20], [7, 31]]))
    with torch.no_grad():
        logits = target(ids).logits
    for row, column, anchor in ((0, 1, 20), (1, 0, 7), (1, 1, 31)):
        got = frozen.logits(batch.target_hidden_states[row, column])
        assert torch.allclose(got, logits[row, anchor : anchor + 6], atol=1e-4)
        assert torch.equal(batch.previous_ids[row, column], ids[row, anchor : anchor + 6])
        assert torch.equal(batch.labels[row, column], ids[row, anchor + 1 : anchor + 7])


def test_a_target_that_scales_its_logits(monkeypatch):
    target = tiny_target("qwen3_5")
    frozen = FrozenTarget(target, drafter_for(target).config)
    forward = type(target).forward

    def scaled(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        outputs.logits = change(outputs.logits)
        return outputs

    monkeypatch.setattr(type(target), "forward", scaled)
    ids, anchors = random_prompt(20), torch.tensor([[5]])
    change = lambda logits: logits / 8  # noqa: E731
    hidden = frozen.batch(ids, anchors).target_hidden_states
    with torch.no_grad():
        assert torch.allclose(frozen.logits(hidden)[0, 0], target(ids).logits[0, 5:11], atol=1e-5)
    change = lambda logits: 2 * torch.tanh(logits)  # noqa: E731
    with pytest.raises(ValueError, match="does more to its logits than to scale them"):
        FrozenTarget(target, frozen.config).batch(ids, anchors)


def test_composite_target():
    import transformers

    text = FAMILIES["qwen3_5"]()
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    target = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    drafter = drafter_for(target)
    frozen = FrozenTarget(target, drafter.config)
    ids = random_prompt(20)
    batch = frozen.batch(ids, torch.tensor([[4, 9]]))
    with torch.no_grad():
        assert torch.allclose(frozen.logits(batch.target_hidden_states)[0, 0], target(ids).logits[0, 4:10], atol=1e-4)
    assert torch.isfinite(block_logits(drafter, frozen, batch)).all()


def test_padding_and_ends_are_masked_and_change_nothing():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)  # blocks of 6
    frozen = FrozenTarget(target, drafter.config)
    ids = random_prompt(20, batch=2)
    mask = torch.ones_like(ids)
    mask[1, 12:], ids[1, 12:] = 0, -100
    anchors = torch.tensor([[4, 13, 14], [4, 5, 6]])
    batch = frozen.batch(ids, anchors, attention_mask=mask)
    assert batch.loss_mask.all(-1).tolist() == [[True, True, False], [True, True, False]]
    assert torch.equal(batch.loss_mask.any(-1), batch.loss_mask.all(-1))
    alone = frozen.batch(ids[1:, :12], torch.tensor([[4, 5]]))
    got, want = block_logits(drafter, frozen, batch)[1, :2], block_logits(drafter, frozen, alone)[0]
    assert torch.allclose(got, want, atol=1e-4)
    assert torch.equal(batch.labels[1, :2], alone.labels[0])


def test_a_loss_mask_ends_a_block():
    target = tiny_target("qwen3_5")
    frozen = FrozenTarget(target, drafter_for(target, block_size=4).config)
    ids, learned = random_prompt(16), torch.ones(1, 16)
    learned[0, [0, 1, 2, 9]] = 0
    counted = frozen.batch(ids, torch.tensor([[1, 4, 7, 9]]), loss_mask=learned).loss_mask[0]
    assert counted.tolist() == [[False] * 4, [True] * 4, [True] + [False] * 3, [True] * 4]
    legal = legal_anchors(torch.ones(1, 16), 4, loss_mask=learned)
    assert legal[0].nonzero().flatten().tolist() == [2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14]


def test_with_a_loss_mask_a_block_may_reach_beyond_the_text():
    target = tiny_target("qwen3_5")
    frozen = FrozenTarget(target, drafter_for(target, block_size=4).config)
    ids, text, anchors = random_prompt(16), torch.ones(1, 16), torch.tensor([[8, 10, 12, 13]])
    text[0, 14:] = 0  # padding
    counted = frozen.batch(ids, anchors, None, text, torch.ones(1, 16)).loss_mask[0]
    assert counted.sum(-1).tolist() == [4, 3, 1, 0]
    assert counted[1].tolist() == [True] * 3 + [False]
    assert frozen.batch(ids, anchors, None, text).loss_mask[0].sum(-1).tolist() == [4, 0, 0, 0]
    assert not legal_anchors(text, 4, loss_mask=torch.ones(1, 16))[0, 13:].any()


def test_texts_shorter_than_a_block_give_dummies():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    frozen = FrozenTarget(target, drafter.config)
    for length in (1, 2, 6):
        ids = random_prompt(length, batch=2)
        anchors, mask = choose_anchors(legal_anchors(torch.ones_like(ids), 6), 3)
        batch = frozen.batch(ids, anchors, mask)
        assert not batch.loss_mask.any()
        assert torch.isfinite(block_logits(drafter, frozen, batch)).all()


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(0)], ids=["spread", "random"])
@pytest.mark.parametrize("stride", [1, 4])
def test_chosen_anchors_are_different_legal_and_ordered(stride, generator):
    mask = torch.ones(3, 40)
    mask[1, 20:], mask[2, 8:] = 0, 0
    legal = legal_anchors(mask, 6, stride)
    positions, is_real = choose_anchors(legal, 5, generator)
    assert is_real.sum(-1).tolist() == [min(5, int(row.sum())) for row in legal]
    for row in range(3):
        chosen = positions[row][is_real[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert legal[row, chosen].all()
        assert all(a > 0 and a + 6 < mask[row].sum() and a % stride == 0 for a in chosen)
    if generator is None:
        assert torch.equal(choose_anchors(legal, 5)[0], positions)


def test_anchors_beyond_the_text_are_refused():
    target = tiny_target("qwen3_5")
    frozen = FrozenTarget(target, drafter_for(target).config)
    with pytest.raises(ValueError, match="anchors must be 0 to 9, got 4 to 10"):
        frozen.batch(random_prompt(10), torch.tensor([[4, 10]]))


def test_unchecked_is_the_same_and_refuses_padding():
    target = tiny_target("qwen3_5")
    frozen = FrozenTarget(target, ReadyDrafterConfig.for_target(target, block_size=4))
    ids = torch.randint(2, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[3, 9], [1, 15]])
    one, other = frozen.batch(ids, anchors), frozen.batch(ids, anchors, check=False)
    assert torch.equal(one.states.stack(), other.states.stack())
    assert torch.equal(one.context_hidden_states, other.context_hidden_states)
    with pytest.raises(ValueError, match="leave `attention_mask` out"):
        frozen.batch(ids, anchors, attention_mask=torch.ones_like(ids), check=False)


def test_padding_on_the_left_is_refused():
    target = tiny_target("qwen3_5")
    frozen = FrozenTarget(target, drafter_for(target).config)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="padded on the right"):
        frozen.batch(random_prompt(5), torch.tensor([[2]]), attention_mask=mask)


def test_a_drafter_for_another_target_is_refused():
    with pytest.raises(ValueError, match=f"vocabulary: {VOCAB_SIZE} in the drafter"):
        FrozenTarget(trained_target(), drafter_for(tiny_target("qwen3_5")).config)
