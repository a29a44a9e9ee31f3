"""Faulty drafters, odd arguments, foreign code around us: one clear error and nothing lost, or the right result."""

import copy
import functools
import pickle
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer
from transformers.models.qwen3_5 import modeling_qwen3_5

import ready_hf
from ready_hf.target import unpatch
from support import (
    VOCAB_SIZE,
    ScriptedDrafter,
    cache_argument,
    cache_of,
    fresh_states,
    k_right,
    oracle,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


PROMPT = random_prompt(12)
OPTIONS = {"max_new_tokens": 20, "do_sample": False}


@functools.cache
def reference():
    return tiny_target("qwen3_5").generate(PROMPT, max_new_tokens=40, do_sample=False)


class Returning:
    """A drafter whose generator returns whatever `make(input_ids)` gives."""

    is_ready_drafter = True

    def __init__(self, make):
        self.make = make

    def get_candidate_generator(self, target, input_ids, generation_config, logits_processor):
        generator = CandidateGenerator()
        generator.get_candidates = lambda ids, **kwargs: self.make(ids)
        generator.update_candidate_strategy = lambda *args: None  # abstract in 5.17
        return generator


def drafts(ids, count=4, value=5):
    return torch.cat([ids, ids.new_full((ids.shape[0], count), value)], dim=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda ids: (drafts(ids).float(), None), "expected integer ids"),
        (lambda ids: (drafts(ids)[0], None), "expected integer ids"),
        (lambda ids: (drafts(ids).repeat(2, 1), None), r"expected integer ids \[1"),
        (lambda ids: (drafts(ids, value=VOCAB_SIZE), None), rf"allowed are 0\.\.{VOCAB_SIZE - 1}"),
        (lambda ids: (drafts(ids, value=-1), None), rf"allowed are 0\.\.{VOCAB_SIZE - 1}"),
        (lambda ids: (drafts(ids), torch.zeros(1, 4, VOCAB_SIZE - 1)), "returned logits of shape"),
        (lambda ids: (drafts(ids), torch.zeros(1, 4, VOCAB_SIZE + 1)), "returned logits of shape"),
        (lambda ids: (drafts(ids), torch.zeros(2, 4, VOCAB_SIZE)), "returned logits of shape"),
        (lambda ids: (drafts(ids), torch.zeros(1, 3, VOCAB_SIZE)), "returned logits of shape"),
        (lambda ids: (drafts(ids), torch.zeros(4, VOCAB_SIZE)), "returned logits of shape"),
    ],
)
@pytest.mark.parametrize("do_sample", [False, True])
def test_faulty_candidates_are_named(make, message, do_sample):
    with pytest.raises(ValueError, match=message):
        tiny_target("qwen3_5").generate(
            PROMPT, max_new_tokens=20, do_sample=do_sample, assistant_model=Returning(make)
        )


def test_draft_logits_of_nan_do_not_reach_the_output():
    model = tiny_target("qwen3_5")
    drafter = Returning(lambda ids: (drafts(ids), torch.full((1, 4, VOCAB_SIZE), float("nan"))))
    ids = model.generate(PROMPT, max_new_tokens=20, do_sample=True, top_k=1, assistant_model=drafter)
    assert torch.equal(ids, reference()[:, : ids.shape[1]])


def test_a_drafter_class_is_refused():
    with pytest.raises(TypeError, match="pass an instance"):
        tiny_target("qwen3_5").generate(PROMPT, **OPTIONS, assistant_model=ready_hf.PromptLookupDrafter)
    with pytest.raises(TypeError, match="pass an instance"):
        ready_hf.speculate(ready_hf.PromptLookupDrafter)


def test_a_drafter_without_generator_is_refused_before_the_prefill():
    class Marker:
        is_ready_drafter = True

    class NoGenerator(Returning):
        def get_candidate_generator(self, *args, **kwargs):
            return None

    for drafter in (Marker(), NoGenerator(None)):
        with pytest.raises(TypeError, match="get_candidate_generator"):
            tiny_target("qwen3_5").generate(PROMPT, **OPTIONS, assistant_model=drafter)


def test_a_generator_may_have_no_close():
    def make(ids):
        return drafts(ids), None

    drafter = Returning(make)
    create = drafter.get_candidate_generator

    def with_none(*args):
        generator = create(*args)
        generator.close = None
        return generator

    drafter.get_candidate_generator = with_none
    ids = tiny_target("qwen3_5").generate(PROMPT, **OPTIONS, assistant_model=drafter)
    assert torch.equal(ids, reference()[:, : ids.shape[1]])


@pytest.mark.parametrize("limit", [2.5, "3", True, float("nan"), -1])
def test_num_assistant_tokens_must_be_a_count(limit):
    with pytest.raises(ValueError, match="integer >= 0"):
        tiny_target("qwen3_5").generate(
            PROMPT, **OPTIONS, num_assistant_tokens=limit, assistant_model=oracle(reference())
        )


def test_drafter_is_told_the_cap():
    asked = []
    drafter = ScriptedDrafter(reference(), check=lambda context: asked.append(context.num_drafts))
    tiny_target("qwen3_5").generate(PROMPT, **OPTIONS, num_assistant_tokens=2, assistant_model=drafter)
    assert max(asked) == 2


@pytest.mark.parametrize("length", [1, 12])
@pytest.mark.parametrize("k", [0, 3, 8])
def test_token_type_ids_go_on_as_in_plain_generate(length, k):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2)).eval()
    prompt = random_prompt(length)
    types = torch.arange(1, length + 1)[None]
    options = {
        "max_new_tokens": 24,
        "do_sample": False,
        "token_type_ids": types,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    plain = model.generate(prompt, **options)
    drafter = k_right(plain, k)
    with pytest.raises(ready_hf.UnsupportedTargetError, match="decoder layers"):
        model.generate(prompt, **options, assistant_model=drafter)
    drafter.target_layer_ids = []
    assert torch.equal(model.generate(prompt, **options, assistant_model=drafter), plain)


def test_a_foreign_recurrence_function_keeps_being_called(monkeypatch):
    """A profiler's wrapper, or somebody's own rule: identity outside a recording, run as it is inside."""
    name, calls = "torch_chunk_gated_delta_rule", []
    unpatch()
    original = getattr(modeling_qwen3_5, name)
    torch_rule = original.__wrapped__

    @functools.wraps(original)
    def foreign(*args, **kwargs):
        calls.append(args[0].shape[1])
        return torch_rule(*args, **kwargs)

    monkeypatch.setattr(modeling_qwen3_5, name, foreign)
    try:
        ids = tiny_target("qwen3_5").generate(PROMPT, **OPTIONS, assistant_model=k_right(reference(), 3))
        assert torch.equal(ids, reference()[:, : ids.shape[1]])
        assert calls.count(12) == 3  # prefill, three layers
        assert calls.count(9) >= 3  # verification
    finally:
        unpatch()


def test_a_copy_of_the_cache_made_by_a_drafter_is_an_ordinary_cache():
    model, copies = tiny_target("qwen3_5"), []

    def check(context):
        copies.append((context.input_ids, copy.deepcopy(context.cache)))

    drafter = k_right(reference(), 3)
    drafter.check = check
    model.generate(PROMPT, **OPTIONS, assistant_model=drafter)
    ids, cache = copies[1]
    pickle.loads(pickle.dumps(cache.layers[0]))
    assert worst_error(states(cache), fresh_states(model, ids[:, :-1])) <= 1e-5
    continued = model.generate(ids, **OPTIONS, assistant_model=oracle(reference()), **cache_argument(cache))
    assert torch.equal(continued, model.generate(ids, **OPTIONS))


@pytest.mark.parametrize(
    ("keep", "error"), [(2.0, TypeError), ("2", TypeError), (torch.tensor(2), ValueError), (None, TypeError)]
)
def test_commit_takes_a_count_or_one_per_row(keep, error):
    model = tiny_target("qwen3_5")
    with torch.no_grad():
        cache = cache_of(model(PROMPT, use_cache=True))
        rollback = ready_hf.Rollback(cache)
        with rollback.recording(8):
            model(PROMPT[:, :8], use_cache=True, **cache_argument(cache))
        with pytest.raises(error):
            rollback.commit(keep)
        rollback.commit(np.int64(2))
    rollback.close()
    assert cache.get_seq_length() == 14


def test_rollback_without_the_wrapper_says_so(monkeypatch):
    model = tiny_target("qwen3_5")
    # as if the recurrence were not wrapped; really unwrapped it would crash where kernel packages are installed
    monkeypatch.setattr("ready_hf.rollback.observing_recurrence", lambda *observers: nullcontext())
    with torch.no_grad():
        cache = cache_of(model(PROMPT, use_cache=True))
        rollback = ready_hf.Rollback(cache)
        with pytest.raises(ready_hf.UnsupportedTargetError, match="ensure_patched"), rollback.recording(8):
            model(PROMPT[:, :8], use_cache=True, **cache_argument(cache))
        rollback.close()


def test_prompt_lookup_for_a_batch_says_what_to_do():
    with pytest.raises(ValueError, match="once per prompt"):
        tiny_target("qwen3_5").generate(
            random_prompt(8, batch=2), **OPTIONS, assistant_model=ready_hf.PromptLookupDrafter()
        )
    with pytest.raises(ValueError, match="num_tokens"):
        ready_hf.PromptLookupDrafter(num_tokens=True)


def test_enabled_prompt_lookup_leaves_beam_search_alone():
    model = tiny_target("qwen3_5")
    beams = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    expected = model.generate(PROMPT, **beams)
    ready_hf.enable_assisted_generation()
    assert torch.equal(model.generate(PROMPT, **beams, prompt_lookup_num_tokens=4), expected)


def test_prompt_lookup_in_a_pipeline_says_where_to_pass_it():
    with pytest.raises(TypeError, match="to the call of a pipeline"):
        ready_hf.PromptLookupDrafter().config  # noqa: B018


def test_a_path_as_assistant_is_named():
    with pytest.raises(TypeError, match="load it first"):
        tiny_target("qwen3_5").generate(PROMPT, **OPTIONS, assistant_model="some/folder")


@pytest.mark.parametrize("hooked", [True, False])
def test_a_streamer_ends_once_when_a_drafted_call_fails(hooked):
    class Streamer(BaseStreamer):
        ends = 0

        def put(self, value):
            pass

        def end(self):
            self.ends += 1

    def fail(context):
        raise RuntimeError("drafter failed")

    model, streamer = tiny_target("qwen3_5"), Streamer()
    method = ready_hf.speculate(ScriptedDrafter(reference(), check=fail), streamer=streamer)
    if not hooked:
        ready_hf.unhook()
        ready_hf.ensure_patched(model)
    with pytest.raises(RuntimeError, match="drafter failed"):
        model.generate(PROMPT, **OPTIONS, custom_generate=method, streamer=streamer)
    assert streamer.ends == 1
