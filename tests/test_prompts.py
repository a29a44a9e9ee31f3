"""Prompts that are embeddings, and prompts so long that they are read in pieces: exact, or refused."""

import pytest
import torch

import ready_hf
from support import (
    FeatureCheck,
    StateCheck,
    cache_of,
    counting_forwards,
    drafter_for,
    k_right,
    random_prompt,
    states,
    tiny_target,
    trained_target,
    worst_error,
)


IDS = random_prompt(20, batch=2, vocab_size=500)
MASK = (torch.arange(20) >= torch.tensor([[5], [0]])).long()


def generate(target, **kwargs):
    return target.generate(**{"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True} | kwargs)


def embeds():
    return trained_target().get_input_embeddings()(IDS).detach()


PROMPTS = {
    "embeddings": lambda: {"inputs_embeds": embeds()},
    "padded": lambda: {"inputs_embeds": embeds(), "attention_mask": MASK},
    "with ids": lambda: {"inputs_embeds": embeds(), "attention_mask": MASK, "input_ids": IDS},
    "with fewer ids": lambda: {"inputs_embeds": embeds(), "attention_mask": MASK, "input_ids": IDS[:, :3]},
    "no ids' embeddings": lambda: {"inputs_embeds": embeds() * 0.7 + 0.1, "attention_mask": MASK},
    "with processors": lambda: {"inputs_embeds": embeds(), "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_of_embeddings(prompt):
    target, inputs = trained_target(), PROMPTS[prompt]()
    want = generate(target, **inputs)
    for drafter in (k_right(want.sequences, 3), drafter_for(target, sliding_window=8)):
        got = generate(target, **inputs, assistant_model=drafter)
        assert torch.equal(got.sequences, want.sequences)
        assert worst_error(states(cache_of(got)), states(cache_of(want))) <= 1e-5


def test_prompt_lookup_after_embeddings():
    """It sees what was generated alone."""
    inputs = {"inputs_embeds": embeds()[:1]}
    want = generate(trained_target(), **inputs, max_new_tokens=24)
    got = generate(trained_target(), **inputs, max_new_tokens=24, assistant_model=ready_hf.PromptLookupDrafter())
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("place", ["argument", "model"])
def test_embeddings_in_pieces_are_refused(place, monkeypatch):
    target, options = trained_target(), {"inputs_embeds": embeds()}
    if place == "argument":
        options["prefill_chunk_size"] = 7
    else:
        monkeypatch.setattr(target.generation_config, "prefill_chunk_size", 7)
    with counting_forwards(target) as forwards, pytest.raises(ValueError, match="cannot cut `inputs_embeds`"):
        generate(target, **options, assistant_model=drafter_for(target))
    assert forwards == []


@pytest.mark.parametrize("chunk_size", [200, 64])
def test_a_long_prompt_in_pieces(chunk_size):
    """A thousand tokens, with the context of a real drafter, and every state and feature row of a scripted one."""
    target, prompt = tiny_target("qwen3_5"), random_prompt(1000)
    want = target.generate(prompt, do_sample=False, max_new_tokens=16)
    options = {"input_ids": prompt, "prefill_chunk_size": chunk_size, "max_new_tokens": 16}
    scripted, features, state_check = k_right(want, 3), FeatureCheck(), StateCheck(target)
    scripted.check = lambda context: (features(context), state_check(context))
    for drafter in (scripted, drafter_for(target)):
        with counting_forwards(target) as forwards:
            assert torch.equal(generate(target, **options, assistant_model=drafter).sequences, want)
        assert forwards[:2] == [chunk_size, chunk_size]
    assert state_check.worst <= 1e-5
    assert features.worst(target, want) <= 1e-4
