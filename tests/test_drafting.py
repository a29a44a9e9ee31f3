"""Drafting with real drafter models inside `generate`: what they are shown, what they keep, what they refuse."""

import logging
import statistics
import time
from collections.abc import Iterator

import pytest
import torch

import ready_hf
from ready_hf import DraftContext, ReadyDrafterModel
from ready_hf.drafting import DraftSession
from ready_hf.recurrences import MAMBA2
from ready_hf.target import recurrent_layers
from support import (
    FAMILIES,
    StateCheck,
    cache_of,
    drafter_for,
    fresh_states,
    random_prompt,
    tiny_target,
    trained_target,
    trained_tokenizer,
)


EDIT = (
    "<file>\ndef area(width, height):\n    total = width * height\n    return total\n</file>\n# Rename total to size\n"
)


@pytest.fixture
def prompt():
    return trained_tokenizer()(EDIT + "<edited>\n", return_tensors="pt")


@pytest.fixture
def contexts(monkeypatch):
    """Per round: the context rows that the session's layers keep, its `DraftContext`, and what it drafted."""
    seen = []
    original = DraftSession.draft

    def draft(self, context):
        drafts = original(self, context)
        seen.append(({layer.keys.shape[2] for layer in self._cache.layers}, context, drafts))
        return drafts

    monkeypatch.setattr(DraftSession, "draft", draft)
    return seen


@pytest.mark.lossless
@pytest.mark.parametrize("reader", [False, True], ids=["dspark", "ready"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_plain_generate(family, reader):
    target = tiny_target(family)
    prompt = random_prompt(9)
    plain = target.generate(prompt, max_new_tokens=24, do_sample=False)
    drafter = drafter_for(target, reader=reader)
    with ready_hf.record_stats() as stats:
        drafted = target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    assert stats.drafted_by_position[0] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_a_round_are_those_of_a_fresh_forward_in_one_layout(family, contexts, monkeypatch):
    target = tiny_target(family)
    drafter, worst = drafter_for(target), []
    layers = recurrent_layers(target)
    original = DraftSession.states

    def states(self, context):
        got = original(self, context)
        fresh = fresh_states(target, context.input_ids[:, :-1])
        for index, layer in enumerate(layers):
            want = fresh[f"{layer.layer_idx}.recurrent_states.0"]
            want = want.transpose(-1, -2) if layer.recurrence is MAMBA2 else want
            assert tuple(want.shape[1:]) == layer.state_shape
            worst.append(float((got[:, index] - want).norm() / want.norm()))
        return got

    monkeypatch.setattr(DraftSession, "states", states)
    target.generate(random_prompt(9), max_new_tokens=16, do_sample=False, assistant_model=drafter)
    assert len(worst) >= 3 * len(layers)
    assert max(worst) < 1e-5


def test_a_reader_that_reads_another_state_drafts_something_else(prompt, monkeypatch):
    """Negative control: the states do reach the drafts."""
    target = trained_target()
    drafter, states, base_logits = drafter_for(target), DraftSession.states, ReadyDrafterModel.base_logits
    seen = []

    def spy(self, hidden_states, head):
        seen.append(hidden_states.clone())
        return base_logits(self, hidden_states, head)

    monkeypatch.setattr(ReadyDrafterModel, "base_logits", spy)
    target.generate(**prompt, max_new_tokens=3, do_sample=False, assistant_model=drafter)
    monkeypatch.setattr(DraftSession, "states", lambda self, context: torch.zeros_like(states(self, context)))
    target.generate(**prompt, max_new_tokens=3, do_sample=False, assistant_model=drafter)
    assert len(seen) == 2
    assert (seen[0] - seen[1]).abs().max() > 1e-3


@pytest.mark.parametrize("window", [None, 8])
def test_only_features_of_accepted_tokens_join_the_context(prompt, contexts, window):
    target = trained_target()
    drafter = drafter_for(target, sliding_window=window)
    plain = target.generate(**prompt, max_new_tokens=20, do_sample=False)
    drafted = target.generate(**prompt, max_new_tokens=20, do_sample=False, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    with ready_hf.FeatureCapture(target, drafter.config.target_layer_ids) as capture, torch.no_grad():
        target(plain)
        want = capture.take()
    rows = 0
    for kept, context, _ in contexts:
        count = context.features[drafter.config.target_layer_ids[0]].shape[1]
        for index, features in context.features.items():
            assert (features - want[index][:, rows : rows + count]).abs().max() < 1e-4
        rows += count
        assert rows == context.input_ids.shape[1] - 1  # everything before the anchor, nothing else
        assert kept == ({rows} if window is None else {min(rows, window - 1)})


@pytest.mark.parametrize("options", [{}, {"sliding_window": 8}, {"reader": False}])
def test_left_padding_changes_no_draft(options, contexts):
    target, tokenizer = trained_target(), trained_tokenizer()
    drafter = drafter_for(target, **options)
    alone = tokenizer(EDIT + "<edited>\n", return_tensors="pt")
    padded = {
        "input_ids": torch.nn.functional.pad(alone["input_ids"], (5, 0), value=0),
        "attention_mask": torch.nn.functional.pad(alone["attention_mask"], (5, 0), value=0),
    }
    drafts = []
    for inputs in (alone, padded):
        contexts.clear()
        target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=drafter)
        drafts.append([tokens.tolist() for _, _, (tokens, _) in contexts])
    assert len(drafts[0]) > 3
    assert drafts[0] == drafts[1]


@pytest.mark.lossless
def test_batches_with_padding_and_rows_that_finish_early():
    target, tokenizer = trained_target(), trained_tokenizer()
    tokenizer.padding_side = "left"
    texts = [EDIT + "<edited>\n", EDIT.replace("total", "sum_of_all") + "<edited>\n", "import os\n"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    for options in ({}, {"reader": False, "sliding_window": 12, "confidence_threshold": 0.4}):
        drafted = target.generate(
            **inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter_for(target, **options)
        )
        assert torch.equal(drafted, plain)


def test_confidence_threshold_cuts_the_block_before_the_draft_it_distrusts(prompt, contexts):
    target = trained_target()
    drafter = drafter_for(target)
    lengths = {}
    for threshold in (0.0, 0.2, 0.99):
        drafter.config.confidence_threshold = threshold
        contexts.clear()
        drafted = target.generate(**prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)
        lengths[threshold] = [tokens.shape[1] for _, _, (tokens, _) in contexts]
    assert set(lengths[0.0][:8]) == {6}
    assert set(lengths[0.99]) == {0}  # untrained confidences are near one half: no draft survives
    assert {1, 2} & set(lengths[0.2][:8])
    assert max(lengths[0.2]) < 6
    assert torch.equal(drafted, target.generate(**prompt, max_new_tokens=24, do_sample=False))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("confidence_threshold", 1.5, r"`confidence_threshold` must be in \[0, 1\), got 1.5"),
        ("confidence_threshold", float("nan"), "`confidence_threshold` must be in"),
        ("enable_confidence_head", False, "needs `enable_confidence_head=True`"),
        ("block_size", 40, "`block_size` must be 2 to 31, got 40"),
        ("block_size", 4, "the reader was made for blocks of 6 slots, and `block_size` is now 4"),
    ],
)
def test_fields_set_after_the_drafter_was_made_are_checked(prompt, name, value, message):
    target = trained_target()
    drafter = drafter_for(target, confidence_threshold=0.1)
    setattr(drafter.config, name, value)
    with pytest.raises(ValueError, match=message):
        target.generate(**prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_drafter_drafts_nearly_the_same(prompt, contexts):
    target = trained_target()
    plain = target.generate(**prompt, max_new_tokens=8, do_sample=False)
    drafts = []
    for drafter in (drafter_for(target), torch.ao.quantization.quantize_dynamic(drafter_for(target))):
        contexts.clear()
        drafted = target.generate(**prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)
        assert torch.equal(drafted, plain)
        drafts.append(contexts[0][2][0])
    assert (drafts[0] == drafts[1]).float().mean() > 0.5


def test_drafts_that_are_not_finite_are_dropped_with_a_warning(prompt, contexts, caplog):
    target = trained_target()
    drafter = drafter_for(target)
    drafter.norm.weight.data[3] = float("nan")
    plain = target.generate(**prompt, max_new_tokens=8, do_sample=False)
    for sample in (False, True):
        with caplog.at_level(logging.WARNING, "ready_hf.drafting"):
            drafted = target.generate(**prompt, max_new_tokens=8, do_sample=sample, assistant_model=drafter)
        assert {tokens.shape[1] for _, _, (tokens, _) in contexts} == {0}
        assert "not finite" in caplog.text
        if not sample:
            assert torch.equal(drafted, plain)


def test_more_drafts_than_the_block_has_are_clamped_with_a_warning(prompt, contexts, caplog):
    target = trained_target()
    drafter = drafter_for(target)
    for limit, most, warns in ((4, 4, False), (6, 6, False), (64, 6, True)):
        contexts.clear()
        caplog.clear()
        target.generate(
            **prompt, max_new_tokens=20, do_sample=False, assistant_model=drafter, num_assistant_tokens=limit
        )
        assert max(tokens.shape[1] for _, _, (tokens, _) in contexts) == most
        assert ("num_assistant_tokens=64" in caplog.text) is warns


def test_wrong_targets_are_refused_naming_both_sides(prompt):
    target = trained_target()
    drafter = drafter_for(target)
    fields = {
        "vocab_size": (480, "vocabulary: 480 in the drafter, 512 in the target"),
        "hidden_size": (64, "hidden size: 64 in the drafter, 128 in the target"),
        "num_target_layers": (8, "number of decoder layers: 8 in the drafter, 6 in the target"),
        "state_shape": ([4, 48, 32], r"state shape \[H, K, V\]: \[4, 48, 32\] in the drafter, \[\[4, 32, 48\]\] in"),
        "state_layer_ids": ([0, 1], r"recurrent layers: \[0, 1\] in the drafter, \[0, 2, 3, 5\] in the target"),
    }
    for name, (value, message) in fields.items():
        right = getattr(drafter.config, name)
        setattr(drafter.config, name, value)
        with pytest.raises(ValueError, match=message):
            target.generate(**prompt, max_new_tokens=4, assistant_model=drafter)
        setattr(drafter.config, name, right)
    target.generate(**prompt, max_new_tokens=4, assistant_model=drafter)  # nothing is left behind


def test_a_drafter_is_no_target(prompt):
    target = trained_target()
    drafter = drafter_for(target)
    with pytest.raises(TypeError, match="target.generate"):
        drafter.generate(**prompt, assistant_model=target)


def test_a_call_leaves_nothing_in_drafter_or_target(prompt):
    target = trained_target()
    drafter = drafter_for(target)
    before = {name: id(value) for name, value in vars(drafter).items()}, set(drafter.state_dict())
    target.generate(**prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert ({name: id(value) for name, value in vars(drafter).items()}, set(drafter.state_dict())) == before
    assert not any(len(module._forward_hooks) for module in target.get_decoder().layers)


def test_a_drafter_configured_to_return_tuples_drafts_all_the_same(prompt):
    target = trained_target()
    drafter = drafter_for(target)
    drafter.config.return_dict = False
    plain = target.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(target.generate(**prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter), plain)


def test_pipeline_takes_a_drafter(prompt):
    from transformers import pipeline

    target, tokenizer = trained_target(), trained_tokenizer()
    drafter = drafter_for(target)
    options = {"max_new_tokens": 16, "do_sample": False, "return_full_text": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    text = EDIT + "<edited>\n"
    with ready_hf.record_stats() as stats:
        got = drafted(text, **options)
    assert stats.rounds > 0
    assert got == plain(text, **options)


def test_states_of_a_padded_batch_skip_the_padding():
    target, tokenizer = trained_target(), trained_tokenizer()
    tokenizer.padding_side = "left"
    inputs = tokenizer([EDIT, "x = 1\n"], return_tensors="pt", padding=True)
    check = StateCheck(target)
    drafter = drafter_for(target)
    original = DraftSession.draft

    def draft(self, context):
        check(context)
        return original(self, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftSession, "draft", draft)
        target.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert check.rounds > 1
    assert check.worst < 1e-5


@pytest.mark.slow
def test_a_round_of_a_windowed_drafter_costs_the_same_at_any_context():
    """Draft time at 8192 tokens of context against 1024, in turn; best of three tries, as the machine is shared."""
    target = trained_target()
    drafter = drafter_for(target, sliding_window=64)
    generator = torch.Generator().manual_seed(0)

    def rounds(length: int) -> Iterator[float]:
        ids = torch.randint(3, 500, (1, length), generator=generator)
        ids_of_layers = drafter.config.target_layer_ids
        with ready_hf.FeatureCapture(target, ids_of_layers) as capture:
            cache = cache_of(target(ids, use_cache=True))
            features = capture.take()
        session = DraftSession(drafter, target)
        while True:
            ids = torch.cat([ids, ids[:, :3]], dim=1)
            context = DraftContext(ids, cache, features, None, 6, False, [])
            start = time.perf_counter()
            session.draft(context)
            yield time.perf_counter() - start
            features = {i: rows[:, :3] for i, rows in features.items()}

    ratios = []
    with torch.no_grad():
        short, long = rounds(1024), rounds(8192)
        for _ in range(3):
            pairs = [(next(short), next(long)) for _ in range(60)]
            ratios.append(statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs))
    assert min(ratios) < 1.10, ratios
