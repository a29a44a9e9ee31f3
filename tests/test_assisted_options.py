"""Options of calls with an assistant or prompt lookup on a hybrid target; what is refused; going in and out."""

import copy
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig, LogitsProcessorList
from transformers.generation import GenerationMixin, logits_process

import ready_hf
from assistants import NEW_TOKENS, PROMPT, REFERENCE, attention_assistant, generate, noisy
from ready_hf import UnsupportedTargetError
from support import (
    RecordingCriterion,
    RecordingStreamer,
    cache_argument,
    cache_of,
    char_tokenizer,
    counting_forwards,
    fresh_states,
    num_hooks,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


pytestmark = [pytest.mark.lossless, pytest.mark.usefixtures("assisted_generation")]


@pytest.fixture(params=["hybrid", "attention", "lookup"])
def assistance(request):
    """What a call is given to be assisted."""
    if request.param == "lookup":
        return {"prompt_lookup_num_tokens": 4}
    model = noisy(tiny_target("qwen3_5"), 0.02) if request.param == "hybrid" else attention_assistant()
    return {"assistant_model": model}


@pytest.mark.parametrize("length", [13, 16, 21])
def test_criteria_see_every_prefix_once_and_stop_at_the_first_hit(assistance, length):
    plain, drafted = (RecordingCriterion(lambda ids: ids.shape[1] >= length) for _ in range(2))
    want = generate(tiny_target("qwen3_5"), stopping_criteria=[plain])
    got = generate(tiny_target("qwen3_5"), stopping_criteria=[drafted], **assistance)
    assert got.tolist() == want.tolist()
    assert drafted.calls == plain.calls


@pytest.mark.parametrize("new_tokens", [1, 7])
def test_length_eos_stop_strings_and_streamer(assistance, new_tokens):
    target, tokenizer = tiny_target("qwen3_5"), char_tokenizer()
    last = REFERENCE[0, 12 + new_tokens]
    text = tokenizer.decode(REFERENCE[0, 11 + new_tokens : 13 + new_tokens])
    for options in (
        {"max_new_tokens": new_tokens},
        {"eos_token_id": int(last)},
        {"stop_strings": text, "tokenizer": tokenizer},
    ):
        plain, drafted = RecordingStreamer(), RecordingStreamer()
        want = generate(target, streamer=plain, **options)
        got = generate(target, streamer=drafted, **options, **assistance)
        assert got.tolist() == want.tolist()
        assert got.shape[1] <= 13 + new_tokens
        assert drafted.events == plain.events


def test_second_turn_on_the_cache_of_the_first(assistance):
    target = tiny_target("qwen3_5")
    first = generate(target, return_dict_in_generate=True, **assistance)
    ids = torch.cat([first.sequences, random_prompt(10, seed=9)], dim=1)
    want = generate(target, ids)
    with counting_forwards(target) as lengths:
        second = generate(target, ids, return_dict_in_generate=True, **cache_argument(cache_of(first)), **assistance)
    assert lengths[0] == 11  # the last token of turn 1, which no forward has seen, and the new ones
    assert second.sequences.tolist() == want.tolist()
    assert worst_error(states(cache_of(second)), fresh_states(target, want[:, :-1])) <= 1e-5


def test_left_padding(assistance):
    ids = torch.cat([torch.zeros_like(PROMPT[:, :5]), PROMPT], dim=1)
    mask = (torch.arange(ids.shape[1])[None] >= 5).long()
    want = generate(tiny_target("qwen3_5"), ids, attention_mask=mask)
    got = generate(tiny_target("qwen3_5"), ids, attention_mask=mask, **assistance)
    assert got.tolist() == want.tolist()
    assert got[:, 5:].tolist() == REFERENCE[:, : 12 + NEW_TOKENS].tolist()


def test_processors_with_state_see_the_tokens_of_the_target_alone(assistance):
    class Recording(logits_process.LogitsProcessor):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores):
            self.seen.append(input_ids.tolist())
            return scores

    plain, drafted = Recording(), Recording()
    options = {"repetition_penalty": 1.3}
    want = generate(tiny_target("qwen3_5"), logits_processor=LogitsProcessorList([plain]), **options)
    got = generate(tiny_target("qwen3_5"), logits_processor=LogitsProcessorList([drafted]), **options, **assistance)
    assert got.tolist() == want.tolist()
    assert drafted.seen == plain.seen


def test_scores_and_logits_are_returned(assistance):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": None}
    plain = generate(tiny_target("qwen3_5"), **options)
    drafted = generate(tiny_target("qwen3_5"), **options, **assistance)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(getattr(drafted, name)), torch.stack(getattr(plain, name)))


@pytest.mark.parametrize("cap", [1, 3])
def test_num_assistant_tokens_of_the_call_caps_the_drafts(cap):
    assistant = noisy(tiny_target("qwen3_5"), 0.02)
    with counting_forwards(assistant) as lengths, ready_hf.record_stats() as stats:
        ids = generate(tiny_target("qwen3_5"), assistant_model=assistant, num_assistant_tokens=cap)
    assert ids.tolist() == REFERENCE[:, : 12 + NEW_TOKENS].tolist()
    assert len(stats.drafted_by_position) == cap
    assert len(lengths) == sum(stats.drafted_by_position)  # drafts that would be dropped are not computed


def test_static_cache_of_the_target():
    if not hasattr(transformers.cache_utils.StaticLayer, "crop"):
        pytest.skip("this transformers cannot cut static caches back")
    assistant = noisy(tiny_target("qwen3_5"), 0.02)
    ids = generate(tiny_target("qwen3_5"), assistant_model=assistant, cache_implementation="static")
    assert ids.tolist() == REFERENCE[:, : 12 + NEW_TOKENS].tolist()


UNIVERSAL = {"assistant_model": attention_assistant(64), "tokenizer": char_tokenizer()}
REFUSED = {
    "another vocabulary": ({"assistant_model": attention_assistant(64)}, ValueError, "vocabulary of 64 .* of 97"),
    "another tokenizer": (UNIVERSAL | {"assistant_tokenizer": char_tokenizer()}, ValueError, "assistant_tokenizer"),
    "no model": ({"assistant_model": object()}, TypeError, "got object"),
    "a name": ({"assistant_model": "some/repository"}, TypeError, "loaded"),
    "batch": ({"ids": PROMPT.repeat(2, 1)}, ValueError, "batch of 2"),
    "two ways": ({"prompt_lookup_num_tokens": 4}, ValueError, "prompt_lookup_num_tokens"),
    "early exit": ({"assistant_early_exit": 2}, ValueError, "assistant_early_exit"),
    "early exit alone": (
        {"assistant_early_exit": 2, "assistant_model": None},
        ValueError,
        "=2` is not supported on",
    ),
    "mtp": ({"use_mtp": True, "assistant_model": None}, ValueError, "use_mtp=True` is not supported on hybrid"),
    "mtp and lookup": (
        {"use_mtp": True, "prompt_lookup_num_tokens": 4, "assistant_model": None},
        ValueError,
        "Drop `use_mtp`",
    ),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, ValueError, "assistant_ensemble_weight"),
    "unknown speculation": ({"speculation_type": "other"}, ValueError, "speculation_type"),
    "dflash without its assistant": ({"speculation_type": "dflash"}, TypeError, "no target_layer_ids"),
    "embeddings": ({"ids": None, "inputs_embeds": torch.zeros(1, 4, 64)}, ValueError, "inputs_embeds"),
    "no cache": ({"use_cache": False}, ValueError, "cache"),
    "several sequences": ({"num_return_sequences": 2, "do_sample": True}, ValueError, "num_return_sequences"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence_before_any_compute(case):
    kwargs, error, words = REFUSED[case]
    target, assistant = tiny_target("qwen3_5"), attention_assistant()
    before = GenerationMixin.generate
    with (
        counting_forwards(target) as forwards,
        counting_forwards(assistant) as drafts,
        pytest.raises(error, match=words),
    ):
        generate(target, **{"ids": PROMPT, "assistant_model": assistant} | kwargs)
    assert forwards == drafts == []
    assert GenerationMixin.generate is before


MODELS = {
    "encoder-decoder": lambda: AutoModelForSeq2SeqLM.from_config(
        transformers.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    ),
    "Mamba-1": lambda: AutoModelForCausalLM.from_config(
        transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)
    ),
    "no attention layer": lambda: AutoModelForCausalLM.from_config(
        transformers.Mamba2Config(
            vocab_size=97, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8, n_groups=1
        )
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_cannot_assist_are_refused_by_name(kind):
    with counting_forwards(tiny_target("qwen3_5")) as forwards, pytest.raises(UnsupportedTargetError, match=kind):
        generate(tiny_target("qwen3_5"), assistant_model=MODELS[kind]())
    assert forwards == []


OWN_OPTIONS = [
    {"cache_implementation": "static"},
    {"cache_implementation": "dynamic"},
    {"stop_strings": ["a"]},
    {"prompt_lookup_num_tokens": 3},
    {"use_mtp": True},
    {"penalty_alpha": 0.5},
    {"exponential_decay_length_penalty": (3, 1.1)},
    {"num_beams": 3, "max_length": 3, "min_length": 50},
]


@pytest.mark.parametrize("options", OWN_OPTIONS, ids=lambda options: next(iter(options)))
def test_options_that_an_assistant_has_for_texts_of_its_own_do_not_reach_its_drafts(options):
    assistant = noisy(tiny_target("qwen3_5"), 0.02)
    other = copy.deepcopy(assistant)
    for name, value in options.items():
        setattr(other.generation_config, name, value)
    records = []
    for model in (assistant, other):
        with ready_hf.record_stats() as stats:
            ids = generate(tiny_target("qwen3_5"), assistant_model=model, max_new_tokens=16)
        assert ids.tolist() == REFERENCE[:, :28].tolist()
        records.append((stats.drafted_by_position, stats.accepted_by_position))
    assert records[0] == records[1]


def test_assistant_of_shapes_only_is_refused_before_any_forward():
    target, assistant = tiny_target("qwen3_5"), copy.deepcopy(attention_assistant()).to("meta")
    with counting_forwards(target) as forwards, pytest.raises(ValueError, match="are on the meta device"):
        generate(target, assistant_model=assistant)
    assert forwards == []


def test_beams_are_searched_without_an_assistant_as_in_transformers():
    want = generate(tiny_target("qwen3_5"), num_beams=2)
    assert (
        generate(tiny_target("qwen3_5"), num_beams=2, assistant_model=attention_assistant()).tolist() == want.tolist()
    )


def test_stock_refuses_before_and_after(assistance):
    for _ in range(2):
        ready_hf.disable_assisted_generation()
        with pytest.raises(ValueError, match="stateful"):
            generate(tiny_target("qwen3_5"), **assistance)
        for _ in range(2):  # twice is once
            ready_hf.enable_assisted_generation()
        got = generate(tiny_target("qwen3_5"), **assistance)
        assert got.tolist() == REFERENCE[:, : 12 + NEW_TOKENS].tolist()
    ready_hf.unhook()
    with pytest.raises(ValueError, match="stateful"):
        generate(tiny_target("qwen3_5"), **assistance)
    ready_hf.hook()  # which is not the opt-in
    with pytest.raises(ValueError, match="stateful"):
        generate(tiny_target("qwen3_5"), **assistance)


def test_attention_targets_keep_the_loop_of_transformers(monkeypatch):
    calls, loop = [], GenerationMixin._assisted_decoding

    def counted(self, *args, **kwargs):
        calls.append(self)
        return loop(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", counted)
    target, assistant = attention_assistant(), noisy(attention_assistant(), 0.02)
    assert generate(target, assistant_model=assistant).tolist() == generate(target).tolist()
    assert calls == [target]


def test_nothing_of_the_caller_is_changed():
    target, assistant = tiny_target("qwen3_5"), noisy(tiny_target("qwen3_5"), 0.02)
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, max_matching_ngram_size=3)
    configs = (config, target.generation_config, assistant.generation_config, target.config, assistant.config)
    before = [copy.deepcopy(c.to_dict()) for c in configs]
    hooks = num_hooks(target), num_hooks(assistant)
    ids = target.generate(PROMPT, generation_config=config, assistant_model=assistant)
    assert ids.tolist() == REFERENCE[:, : 12 + NEW_TOKENS].tolist()
    assert [c.to_dict() for c in configs] == before
    assert (num_hooks(target), num_hooks(assistant)) == hooks


def test_an_assistant_that_fails_leaves_nothing_behind():
    class Failing(logits_process.LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 20:
                raise RuntimeError("processor failed")
            return scores

    target, assistant = tiny_target("qwen3_5"), noisy(tiny_target("qwen3_5"), 0.02)
    streamer = RecordingStreamer()
    with pytest.raises(RuntimeError, match="processor failed"):
        generate(
            target, assistant_model=assistant, streamer=streamer, logits_processor=LogitsProcessorList([Failing()])
        )
    assert streamer.events[-1] == ("end",)
    assert generate(target, assistant_model=assistant).tolist() == REFERENCE[:, : 12 + NEW_TOKENS].tolist()


def test_calls_in_threads_with_one_assistant():
    target, assistant = tiny_target("qwen3_5"), noisy(tiny_target("qwen3_5"), 0.02)
    prompts = [random_prompt(10, seed=seed) for seed in range(3)]
    want = [generate(target, ids).tolist() for ids in prompts]
    got = [None] * len(prompts)

    def run(index):
        got[index] = generate(target, prompts[index], assistant_model=assistant).tolist()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got == want


def test_the_page_about_assisted_generation_runs():
    text = (Path(__file__).parents[1] / "docs" / "assisted.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, "assisted.md", "exec"), {"__name__": "assisted"})


@pytest.mark.slow
def test_benchmark_of_prompt_lookup_runs():
    script = Path(__file__).parents[1] / "examples" / "benchmark_lookup.py"
    command = [sys.executable, str(script), "--prompts", "1", "--new", "8"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"1 prompts, 8 new tokens, ids equal; .*x, .* tokens per verifying forward", output)
