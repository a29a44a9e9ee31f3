"""The wrapper around `GenerationMixin.generate`: what it leaves alone, how it goes in and out, what it adds."""

import functools
import importlib
import inspect
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import GenerationMixin
from transformers.models.qwen3_5 import modeling_qwen3_5

import ready_hf
from support import RecordingStreamer, k_right, oracle, plain_ids, tiny_target


PROMPT_LENGTH, NEW_TOKENS = 12, 24
REFERENCE = plain_ids("qwen3_5", 96, PROMPT_LENGTH)
PROMPT = REFERENCE[:, :PROMPT_LENGTH]
WANT = REFERENCE[:, : PROMPT_LENGTH + NEW_TOKENS].tolist()


@pytest.fixture(autouse=True)
def hooked():
    """Every test starts and ends with the package just imported, whatever it did to `generate`."""
    ready_hf.unhook()
    original = GenerationMixin.generate
    ready_hf.hook()
    yield original
    ready_hf.unhook()
    GenerationMixin.generate = original
    ready_hf.hook()


@pytest.fixture
def stock(hooked, monkeypatch):
    """Replaces the original `generate` behind our wrapper by one that keeps its arguments and generates nothing."""
    calls = []

    @functools.wraps(hooked)
    def generate(self, *args, **kwargs):
        calls.append((args, kwargs))
        return "stock"

    ready_hf.unhook()
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    ready_hf.hook()
    yield calls
    ready_hf.unhook()


@pytest.fixture
def target():
    model = tiny_target("qwen3_5")
    before = model.generation_config.to_dict()
    yield model
    model.generation_config = GenerationConfig.from_dict(before)


@functools.cache
def attention_model(seed: int = 0) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def generate(model, *args, **kwargs):
    if not args and "inputs" not in kwargs:
        args = (PROMPT,)
    return model.generate(*args, **{"do_sample": False, "max_new_tokens": NEW_TOKENS} | kwargs)


def test_importing_and_hooking_again_keeps_one_wrapper(hooked):
    first = GenerationMixin.generate
    importlib.reload(ready_hf)
    ready_hf.hook()
    assert GenerationMixin.generate is first
    assert GenerationMixin.generate.__wrapped__ is hooked


def test_unhook_restores_the_very_original_functions(hooked, target):
    generate(target, assistant_model=oracle(REFERENCE))
    assert hasattr(modeling_qwen3_5.torch_chunk_gated_delta_rule, "__wrapped__")
    ready_hf.unhook()
    assert GenerationMixin.generate is hooked
    assert Path(modeling_qwen3_5.torch_chunk_gated_delta_rule.__code__.co_filename).name != "target.py"
    ready_hf.unhook()  # twice is harmless
    assert GenerationMixin.generate is hooked
    with pytest.raises(Exception, match=r"\w"):
        generate(target, assistant_model=oracle(REFERENCE))
    ready_hf.hook()
    assert generate(target, assistant_model=oracle(REFERENCE)).tolist() == WANT


def wrapped_by_others(with_wraps: bool):
    """Puts a wrapper of somebody else around the current `generate`; returns it and the calls it sees."""
    inner, calls = GenerationMixin.generate, []

    def theirs(self, *args, **kwargs):
        calls.append(kwargs)
        return inner(self, *args, **kwargs)

    GenerationMixin.generate = functools.wraps(inner)(theirs) if with_wraps else theirs
    return GenerationMixin.generate, calls


@pytest.mark.parametrize("with_wraps", [True, False])
def test_unhook_leaves_a_wrapper_put_around_ours_in_place(with_wraps, target):
    theirs, calls = wrapped_by_others(with_wraps)
    assert generate(target, assistant_model=oracle(REFERENCE)).tolist() == WANT

    ready_hf.unhook()
    assert GenerationMixin.generate is theirs
    ready_hf.ensure_patched(target)  # with kernel packages and no GPU, stock transformers cannot run it
    assert generate(target).tolist() == WANT
    with pytest.raises(Exception, match=r"\w"):  # ours inside it passes everything through
        generate(target, assistant_model=oracle(REFERENCE))
    assert len(calls) == 3


@pytest.mark.parametrize("with_wraps", [True, False])
@pytest.mark.parametrize("hooked_before", [True, False])
def test_hook_works_around_a_wrapper_of_others(with_wraps, hooked_before, target):
    if not hooked_before:
        ready_hf.unhook()
    _, calls = wrapped_by_others(with_wraps)
    ready_hf.unhook()
    ready_hf.hook()
    assert generate(target, assistant_model=oracle(REFERENCE)).tolist() == WANT
    assert generate(target, inputs=PROMPT, assistant_model=oracle(REFERENCE)).tolist() == WANT
    assert generate(target).tolist() == WANT
    assert len(calls) == 3


def test_signature_and_name_are_those_of_the_original(hooked):
    assert inspect.signature(GenerationMixin.generate) == inspect.signature(hooked)
    assert GenerationMixin.generate.__name__ == "generate"
    assert GenerationMixin.generate.__doc__ == hooked.__doc__


def test_a_call_without_a_drafter_is_passed_on_unchanged(stock, target):
    config, streamer, assistant = GenerationConfig(), RecordingStreamer(), attention_model()
    positional = (PROMPT, config, None, None, None, False, assistant, streamer)
    assert target.generate(*positional, attention_mask=None) == "stock"
    assert target.generate(inputs=PROMPT, custom_generate="some/repository", nonsense=3) == "stock"
    assert target.generate() == "stock"
    (args, kwargs), (no_args, named), nothing = stock
    assert all(got is sent for got, sent in zip(args, positional, strict=True))
    assert kwargs == {"attention_mask": None}
    assert no_args == ()
    assert named == {"inputs": PROMPT, "custom_generate": "some/repository", "nonsense": 3}
    assert nothing == ((), {})


def test_a_wrong_call_fails_as_in_stock(target):
    with pytest.raises(TypeError, match="multiple values"):
        target.generate(PROMPT, inputs=PROMPT)


def test_drafter_and_streamer_may_be_positional(target):
    streamer = RecordingStreamer()
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False)
    ids = target.generate(PROMPT, config, None, None, None, None, oracle(REFERENCE), streamer)
    assert ids.tolist() == WANT
    assert len(streamer.events) == NEW_TOKENS + 2


def test_ordinary_assistant_of_an_attention_model_is_not_affected():
    target, assistant = attention_model(), attention_model(1)
    hooked_ids = generate(target, assistant_model=assistant)
    ready_hf.unhook()
    assert generate(target, assistant_model=assistant).tolist() == generate(target).tolist() == hooked_ids.tolist()


def test_ordinary_assistant_of_a_hybrid_is_refused_by_stock_as_before(target):
    with pytest.raises(ValueError, match="stateful"):
        generate(target, assistant_model=attention_model())


def test_prompt_lookup_on_a_hybrid_is_refused_by_stock_until_enabled(target):
    with pytest.raises(ValueError, match="stateful"):
        generate(target, prompt_lookup_num_tokens=4)
    ready_hf.enable_assisted_generation()
    assert generate(target, prompt_lookup_num_tokens=4).tolist() == WANT
    ready_hf.disable_assisted_generation()
    with pytest.raises(ValueError, match="stateful"):
        generate(target, prompt_lookup_num_tokens=4)


REPEATING = torch.cat([PROMPT, REFERENCE[:, :PROMPT_LENGTH], REFERENCE[:, : PROMPT_LENGTH - 4]], dim=1)


@pytest.mark.parametrize("place", ["argument", "config", "model"])
@pytest.mark.parametrize("num_tokens", [1, 6])
def test_prompt_lookup_on_a_hybrid_is_exact(target, place, num_tokens):
    want = generate(target, REPEATING).tolist()
    options = {"prompt_lookup_num_tokens": num_tokens, "max_matching_ngram_size": 2}
    kwargs, config = {}, None
    if place == "argument":
        kwargs = options
    elif place == "config":
        config = kwargs["generation_config"] = GenerationConfig(**options, max_new_tokens=NEW_TOKENS, do_sample=False)
    else:
        target.generation_config.update(**options)
    before = target.generation_config.to_dict()

    ready_hf.enable_assisted_generation()
    with ready_hf.record_stats() as stats:
        assert generate(target, REPEATING, **kwargs).tolist() == want
    assert stats.calls == 1
    assert len(stats.drafted_by_position) == num_tokens
    assert target.generation_config.to_dict() == before
    assert config is None or config.prompt_lookup_num_tokens == num_tokens


def test_prompt_lookup_of_the_model_config_can_be_switched_off_by_a_call(target):
    target.generation_config.prompt_lookup_num_tokens = 4
    ready_hf.enable_assisted_generation()
    with ready_hf.record_stats() as stats:
        assert generate(target, prompt_lookup_num_tokens=None).tolist() == WANT
    assert stats.calls == 0


def test_a_drafter_is_used_even_where_assisted_generation_is_enabled(target):
    ready_hf.enable_assisted_generation()
    with ready_hf.record_stats() as stats:
        assert generate(target, assistant_model=k_right(REFERENCE, 8)).tolist() == WANT
    assert stats.tokens_per_forward > 5


def test_prompt_lookup_of_an_attention_model_keeps_the_stock_loop(monkeypatch):
    model, calls = attention_model(), []
    want = generate(model).tolist()
    loop = type(model)._assisted_decoding

    def counted(self, *args, **kwargs):
        calls.append(self)
        return loop(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", counted)
    ready_hf.enable_assisted_generation()
    assert generate(model, prompt_lookup_num_tokens=4).tolist() == want
    assert calls == [model]


@pytest.mark.parametrize("positional", [False, True])
def test_streamer_of_enabled_prompt_lookup(target, positional):
    plain, drafted = RecordingStreamer(), RecordingStreamer()
    generate(target, streamer=plain)
    ready_hf.enable_assisted_generation()
    if positional:
        generate(target, PROMPT, None, None, None, None, None, None, drafted, prompt_lookup_num_tokens=4)
    else:
        generate(target, streamer=drafted, prompt_lookup_num_tokens=4)
    assert drafted.events == plain.events
