"""Options of a drafted call: caps on drafts, kinds of caches, refusals before any compute, `speculate`, statistics."""

import copy
import threading

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, GenerationConfig
from transformers.cache_utils import QuantizedLayer, StaticLayer

import ready_hf
from support import (
    RecordingStreamer,
    ScriptedDrafter,
    cache_argument,
    counting_forwards,
    k_right,
    oracle,
    plain_ids,
    tiny_target,
)


PROMPT_LENGTH = 12
REFERENCE = plain_ids("qwen3_5", 96, PROMPT_LENGTH)
PROMPT = REFERENCE[:, :PROMPT_LENGTH]


@pytest.fixture
def target():
    """The target, whose generation config a test may change."""
    model = tiny_target("qwen3_5")
    before = model.generation_config.to_dict()
    yield model
    model.generation_config = GenerationConfig.from_dict(before)


def generate(model, ids=PROMPT, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 40} | kwargs)


def widest_block(model, **kwargs) -> int:
    """Most drafts verified in one round; the ids must be right."""
    with ready_hf.record_stats() as stats:
        ids = generate(model, **kwargs)
    assert ids.tolist() == REFERENCE[:, : ids.shape[1]].tolist()
    return len(stats.drafted_by_position)


@pytest.mark.parametrize("place", ["argument", "config", "model"])
@pytest.mark.parametrize("cap", [3, 1, 0, 20])
def test_num_assistant_tokens_caps_the_block_and_does_not_persist(target, place, cap):
    drafter = oracle(REFERENCE)
    kwargs = {"assistant_model": drafter}
    if place == "argument":
        kwargs["num_assistant_tokens"] = cap
    elif place == "config":
        kwargs["generation_config"] = GenerationConfig(num_assistant_tokens=cap, max_new_tokens=40, do_sample=False)
    else:
        target.generation_config.num_assistant_tokens = cap
    assert widest_block(target, **kwargs) == min(cap, 8)
    target.generation_config.num_assistant_tokens = None
    assert widest_block(target, assistant_model=drafter) == 8
    assert drafter.block_size == 8


def test_num_assistant_tokens_of_the_call_wins_over_that_of_the_model(target):
    target.generation_config.num_assistant_tokens = 2
    assert widest_block(target, assistant_model=oracle(REFERENCE)) == 2
    assert widest_block(target, assistant_model=oracle(REFERENCE), num_assistant_tokens=1) == 1
    assert widest_block(target, assistant_model=oracle(REFERENCE), num_assistant_tokens=6) == 6


def test_blocks_of_twenty_are_not_capped_by_the_default_of_transformers(target):
    assert widest_block(target, assistant_model=oracle(REFERENCE, 32)) == 32


def test_negative_num_assistant_tokens_is_refused(target):
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        generate(target, assistant_model=oracle(REFERENCE), num_assistant_tokens=-1)


REFUSED = {
    "beams": ({"num_beams": 2}, "num_beams"),
    "several sequences": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
    "several greedy sequences": ({"num_return_sequences": 2}, "num_return_sequences"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
    "no cache": ({"use_cache": False}, "cache"),
    "two ways of decoding": ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
    "synced processes": ({"synced_gpus": True}, "synced_gpus"),
    "two drafters": ({"prompt_lookup_num_tokens": 4}, "prompt_lookup_num_tokens"),
    "token healing": ({"token_healing": True}, "`token_healing"),
    "paged cache": ({"cache_implementation": "paged"}, "paged"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha|custom_generate|contrastive"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence_before_any_compute(target, case):
    kwargs, name = REFUSED[case]
    target = copy.deepcopy(target)
    with counting_forwards(target) as forwards, pytest.raises(ValueError, match=name):
        generate(target, assistant_model=oracle(REFERENCE), **kwargs)
    assert forwards == []


def test_encoder_decoder_model_is_refused_before_any_compute():
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with (
        counting_forwards(model.get_encoder()) as encoder_forwards,
        counting_forwards(model) as forwards,
        pytest.raises(ready_hf.UnsupportedTargetError, match="encoder-decoder"),
    ):
        generate(model, assistant_model=oracle(REFERENCE))
    assert (encoder_forwards, forwards) == ([], [])


def test_quantized_cache_is_refused_by_name(target):
    class FakeQuantizedLayer(QuantizedLayer):
        def _quantize(self, tensor, axis):
            return tensor

        def _dequantize(self, tensor):
            return tensor

    cache = DynamicCache(config=target.config)
    cache.layers[2] = FakeQuantizedLayer()
    with counting_forwards(target) as forwards, pytest.raises(ready_hf.UnsupportedTargetError, match="Quantized"):
        generate(target, assistant_model=oracle(REFERENCE), **cache_argument(cache))
    assert forwards == []


def test_offloaded_cache_is_refused_by_name(target):
    cache = DynamicCache(config=target.config)
    cache.offloading = True
    with counting_forwards(target) as forwards, pytest.raises(ready_hf.UnsupportedTargetError, match="offloaded"):
        generate(target, assistant_model=oracle(REFERENCE), **cache_argument(cache))
    assert forwards == []


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static", "quantized"])
def test_cache_implementations_that_are_refused_by_name(target, implementation):
    with counting_forwards(target) as forwards, pytest.raises(ValueError, match=r"(?i)offloaded|quantized"):
        generate(target, cache_implementation=implementation, assistant_model=oracle(REFERENCE))
    assert forwards == []


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("k", [0, 3, 8])
def test_cache_implementations_that_are_exact(target, implementation, k):
    if implementation == "static" and not getattr(StaticLayer, "is_croppable", False):
        with pytest.raises(ready_hf.UnsupportedTargetError, match="StaticLayer"):
            generate(target, cache_implementation=implementation, assistant_model=k_right(REFERENCE, k))
        return
    ids = generate(target, cache_implementation=implementation, assistant_model=k_right(REFERENCE, k))
    assert ids.tolist() == REFERENCE[:, : ids.shape[1]].tolist()
    assert ids.shape[1] == PROMPT_LENGTH + 40


def test_a_compilation_that_is_asked_for_is_not_left_out_without_a_word(target, caplog):
    """transformers compiles nothing on a CPU, whatever it says."""
    options = {"max_new_tokens": 8, "assistant_model": k_right(REFERENCE, 3)}
    for config, told in ((transformers.CompileConfig(), 1), (None, 0)):
        caplog.clear()
        ids = generate(target, compile_config=config, **options)
        assert ids.tolist() == REFERENCE[:, : ids.shape[1]].tolist()
        assert caplog.text.count("target.compile()") == told


@pytest.mark.parametrize("hooked", [True, False])
def test_speculate_works_hooked_and_unhooked(target, hooked):
    plain, drafted = RecordingStreamer(), RecordingStreamer()
    generate(target, streamer=plain)
    if not hooked:
        ready_hf.unhook()
    try:
        with ready_hf.record_stats() as stats:
            method = ready_hf.speculate(oracle(REFERENCE), streamer=drafted, num_assistant_tokens=5)
            ids = generate(target, custom_generate=method, streamer=drafted)
            narrow = generate(target, custom_generate=method, streamer=RecordingStreamer(), num_assistant_tokens=2)
    finally:
        ready_hf.hook()
    assert ids.tolist() == narrow.tolist() == REFERENCE[:, : PROMPT_LENGTH + 40].tolist()
    assert drafted.events[: len(plain.events)] == plain.events
    assert stats.calls == 2
    assert len(stats.drafted_by_position) == 5


@pytest.mark.parametrize("no_drafter", [None, "drafter", tiny_target("qwen3_5"), ScriptedDrafter.draft])
def test_speculate_refuses_what_is_not_a_drafter(no_drafter):
    with pytest.raises(TypeError, match="not a ready_hf drafter"):
        ready_hf.speculate(no_drafter)


def test_pure_attention_target_is_exact_too():
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    plain = generate(model)
    for k in (0, 3, 8):
        assert generate(model, assistant_model=k_right(plain, k)).tolist() == plain.tolist()


@pytest.mark.parametrize(("k", "new_tokens"), [(8, 28), (3, 28), (0, 6)])
def test_statistics_count_exactly(target, k, new_tokens):
    with ready_hf.record_stats() as stats:
        output = generate(
            target, assistant_model=k_right(REFERENCE, k), max_new_tokens=new_tokens, return_dict_in_generate=True
        )
    # one token from the prefill, then k + 1 per round, with as many drafts as leave room for one token more
    left, drafted, accepted, rounds = new_tokens - 1, [0] * 8, [0] * 8, 0
    while left:
        num_drafts, rounds = min(8, left - 1), rounds + 1
        emitted = min(k, num_drafts) + 1
        for position in range(num_drafts):
            drafted[position] += 1
            accepted[position] += position < emitted - 1
        left -= emitted
    width = max((i + 1 for i, count in enumerate(drafted) if count), default=0)
    for one in (stats, output.stats):
        assert (one.calls, one.rounds, one.row_rounds) == (1, rounds, rounds)
        assert (one.new_tokens, one.round_tokens) == (new_tokens, new_tokens - 1)
        assert one.drafted_by_position == drafted[:width]
        assert one.accepted_by_position == accepted[:width]
        assert one.tokens_per_forward == pytest.approx((new_tokens - 1) / rounds)
        assert min(one.prefill_seconds, one.draft_seconds, one.verify_seconds, one.commit_seconds) > 0


def test_statistics_count_one_target_forward_per_round(target):
    with counting_forwards(target) as forwards, ready_hf.record_stats() as stats:
        generate(target, assistant_model=k_right(REFERENCE, 3))
    assert len(forwards) == 1 + stats.rounds  # the prefill


def test_statistics_nest_and_add_up(target):
    with ready_hf.record_stats() as outer:
        generate(target, assistant_model=oracle(REFERENCE), max_new_tokens=10)
        with ready_hf.record_stats() as inner:
            generate(target, assistant_model=oracle(REFERENCE), max_new_tokens=19)
        generate(target)  # plain calls do not count
    assert (inner.calls, inner.rounds, inner.new_tokens) == (1, 2, 19)
    assert (outer.calls, outer.rounds, outer.new_tokens) == (2, 3, 29)


def test_statistics_are_per_thread():
    seen = {}

    def work(name, new_tokens):
        with ready_hf.record_stats() as stats:
            generate(
                copy.deepcopy(tiny_target("qwen3_5")), assistant_model=oracle(REFERENCE), max_new_tokens=new_tokens
            )
        seen[name] = stats.new_tokens

    with ready_hf.record_stats() as outside:
        threads = [threading.Thread(target=work, args=(n, n)) for n in (5, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert seen == {5: 5, 20: 20}
    assert outside.calls == 0
