"""Ordinary and hybrid assistants on hybrid targets: exact, with an own state that is put back.

Assistants are real models. Copies of a target with noise on their weights agree with it partly, so that drafts are
accepted and rejected.
"""

import copy
import functools

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process

import ready_hf
from assistants import NEW_TOKENS, PROMPT, attention_assistant, confident, generate, noisy
from prefix_tree import PrefixTree
from ready_hf import assisted
from ready_hf.assisted import AssistantDrafter
from ready_hf.rollback import Rollback
from support import (
    FAMILIES,
    VOCAB_SIZE,
    cache_of,
    counting_forwards,
    fresh_states,
    plain_ids,
    states,
    tiny_target,
    trained_target,
    trained_tokenizer,
    worst_error,
)
from test_lossless import TASK


pytestmark = [pytest.mark.lossless, pytest.mark.usefixtures("assisted_generation")]


def trained_prompt():
    return trained_tokenizer()(TASK, return_tensors="pt").input_ids


TRAINED_ASSISTANTS = {
    "itself": lambda: trained_target(),
    "itself with little noise": lambda: noisy(trained_target(), 0.1),
    "itself with noise": lambda: noisy(trained_target(), 0.2),
    "random attention model": lambda: attention_assistant(512),
}


@functools.cache
def trained_ids():
    return generate(trained_target(), trained_prompt(), max_new_tokens=64)


@pytest.mark.parametrize("name", TRAINED_ASSISTANTS)
def test_trained_target_ids_equal_plain(name):
    assistant = TRAINED_ASSISTANTS[name]()
    with ready_hf.record_stats() as stats:
        ids = generate(trained_target(), trained_prompt(), max_new_tokens=64, assistant_model=assistant)
    assert ids.tolist() == trained_ids().tolist()
    accepted, drafted = sum(stats.accepted_by_position), sum(stats.drafted_by_position)
    assert drafted > 0
    if name == "itself":
        assert accepted == drafted
    if name.endswith("noise"):
        assert 0 < accepted < drafted


def test_without_rollback_the_ids_are_wrong(monkeypatch):
    """Negative control: the comparison above notices states that are not rolled back."""
    commit = Rollback.commit
    monkeypatch.setattr(Rollback, "commit", lambda self, keep: commit(self, self._length))
    ids = generate(trained_target(), trained_prompt(), max_new_tokens=64, assistant_model=noisy(trained_target(), 0.2))
    assert ids.tolist() != trained_ids().tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_a_hybrid_and_an_attention_assistant(family):
    target = tiny_target(family)
    want = plain_ids(family)[:, :36]
    for assistant in (noisy(target, 0.01), attention_assistant()):
        output = generate(target, max_new_tokens=24, assistant_model=assistant, return_dict_in_generate=True)
        assert output.sequences.tolist() == want.tolist()
        assert worst_error(states(cache_of(output)), fresh_states(target, want[:, :-1])) <= 1e-5


HYBRID_ASSISTANTS = {
    family: functools.partial(tiny_target, family)
    for family in ("qwen3_5", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h")
}
HYBRID_ASSISTANTS |= {"sliding window": lambda: attention_assistant(sliding_window=16)}


def rounds_that_draft_anew(monkeypatch, assistant, target):
    """For every round of a call, whether it drafts what the assistant would generate from scratch."""
    rounds, draft = [], assisted.AssistantCandidateGenerator.get_candidates

    def recorded(self, input_ids, **kwargs):
        candidates, logits = draft(self, input_ids, **kwargs)
        rounds.append((input_ids, candidates))
        return candidates, logits

    monkeypatch.setattr(assisted.AssistantCandidateGenerator, "get_candidates", recorded)
    with ready_hf.record_stats() as stats:
        ids = generate(target, assistant_model=assistant)
    assert ids.tolist() == generate(target).tolist()
    assert 0 < len(rounds) < NEW_TOKENS
    assert sum(stats.accepted_by_position) < sum(stats.drafted_by_position)
    anew = (generate(assistant, ids, max_new_tokens=drafted.shape[1] - ids.shape[1]) for ids, drafted in rounds)
    return [drafted.tolist() == ids.tolist() for (_, drafted), ids in zip(rounds, anew, strict=True)]


@pytest.mark.parametrize("name", HYBRID_ASSISTANTS)
def test_state_of_the_assistant_is_that_of_the_accepted_tokens(monkeypatch, name):
    assistant = HYBRID_ASSISTANTS[name]()
    target = tiny_target("qwen3_5") if name == "sliding window" else assistant
    assert all(rounds_that_draft_anew(monkeypatch, noisy(assistant, 0.02), target))


def test_states_of_the_assistant_that_keep_their_drafts_are_noticed(monkeypatch):
    monkeypatch.setattr(assisted, "_contents", lambda layer: dict(vars(layer)))
    target = tiny_target("qwen3_5")
    assert not all(rounds_that_draft_anew(monkeypatch, noisy(target, 0.02), target))


def test_tokens_accepted_since_are_fed_with_the_next_one():
    """An assistant runs one forward per draft, however many were accepted; the first one over the whole prompt."""
    target = tiny_target("qwen3_5")
    assistant = noisy(target, 0.02)
    with counting_forwards(assistant) as lengths, ready_hf.record_stats() as stats:
        generate(target, assistant_model=assistant)
    assert len(lengths) == sum(stats.drafted_by_position)
    assert lengths[0] == 13
    assert max(lengths[1:]) > 2


@pytest.mark.slow
def test_sampling_follows_the_target():
    """The joint distribution of the 3 tokens after the prompt; the assistant's is far sharper, on the same tokens."""
    target = tiny_target("nemotron_h")
    warpers = [logits_process.TemperatureLogitsWarper(3.0), logits_process.TopKLogitsWarper(3)]
    tree = PrefixTree(target, PROMPT, 3, LogitsProcessorList(warpers))
    assistant = confident(copy.deepcopy(target))
    with torch.no_grad():
        assistant.get_output_embeddings().weight.mul_(60.0)
    torch.manual_seed(0)
    with ready_hf.record_stats() as stats:
        options = {"do_sample": True, "temperature": 3.0, "top_k": 3, "max_new_tokens": 4}
        ids = torch.cat([generate(target, assistant_model=assistant, **options) for _ in range(200)])
    assert 0 < sum(stats.accepted_by_position) < sum(stats.drafted_by_position)
    tree.assert_distributed(ids)


@pytest.mark.parametrize("options", [{"top_k": 4, "temperature": 0.7}])
def test_returned_logits_are_those_the_drafts_were_sampled_from(options):
    """Drafts of one position, 150 times, against the distribution that the verifier is told."""
    target = tiny_target("nemotron_h")
    config = GenerationConfig(do_sample=True, max_length=20, min_length=0, **options)
    drafter, counts = AssistantDrafter(confident(noisy(target, 0.1))), torch.zeros(VOCAB_SIZE)
    torch.manual_seed(0)
    for _ in range(150):
        generator = drafter.get_candidate_generator(target, PROMPT, config, LogitsProcessorList())
        candidates, logits = generator.get_candidates(PROMPT, model_kwargs={}, num_drafts=2)
        counts[candidates[0, 12]] += 1
        q = logits[0, 0].softmax(-1)
        assert q[candidates[0, 12]] > 0
    assert int((q > 0).sum()) <= options["top_k"]
    assert float((counts / counts.sum() - q).abs().sum() / 2) < 0.15
