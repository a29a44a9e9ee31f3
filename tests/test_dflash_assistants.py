"""`speculation_type="dflash"` on hybrid targets: exact, with the drafts that transformers' own loop would draft."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

import ready_hf
from assistants import PROMPT, REFERENCE, attention_assistant, generate, random_model
from prefix_tree import PrefixTree
from ready_hf.assisted import DFlashDrafter
from support import plain_ids, tiny_target


pytestmark = [pytest.mark.lossless, pytest.mark.usefixtures("assisted_generation")]


@functools.cache
def dflash_assistant(layers=(0, 2), sliding_window=2048):
    config = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "block_size": 6,
        "mask_token_id": 1,
        "target_layer_ids": list(layers),
        "sliding_window": sliding_window,
    }
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.MuseGlimmerAssistantConfig(**config)
    return random_model(AutoModel.from_config(config))


@pytest.mark.parametrize(("family", "window"), [("qwen3_5", 8), ("kimi_linear", 2048), ("bamba", 8)])
def test_dflash(family, window):
    target, assistant = tiny_target(family), dflash_assistant(sliding_window=window)
    with ready_hf.record_stats() as stats:
        ids = generate(target, assistant_model=assistant, speculation_type="dflash", max_new_tokens=48)
    assert ids.tolist() == plain_ids(family)[:, :60].tolist()
    assert len(stats.drafted_by_position) == 5


def overfitted(target, ids, start):
    """A DFlash assistant that was trained to draft `ids` from every sixth position."""
    assistant = copy.deepcopy(dflash_assistant()).train()
    with torch.no_grad(), ready_hf.FeatureCapture(target, [0, 2]) as capture:
        target(ids)
        features = torch.cat(list(capture.take().values()), dim=-1)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    optimizer = torch.optim.Adam(assistant.parameters(), lr=3e-3)
    for _ in range(40):
        for anchor in range(start, ids.shape[1] - 5, 6):
            noise = torch.cat([ids[:, anchor : anchor + 1], torch.full((1, 5), 1)], dim=1)
            hidden = assistant(embed(noise).detach(), features[:, :anchor]).last_hidden_state[:, 1:]
            loss = torch.nn.functional.cross_entropy(head(hidden)[0], ids[0, anchor + 1 : anchor + 6])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    target.zero_grad()
    return assistant.eval()


def test_dflash_drafts_are_accepted_and_rejected():
    target = copy.deepcopy(tiny_target("qwen3_5")).requires_grad_(False)
    assistant = overfitted(target, REFERENCE[:, :50], 12)
    with ready_hf.record_stats() as stats:
        ids = generate(target, assistant_model=assistant, speculation_type="dflash", max_new_tokens=80)
    assert ids.tolist() == REFERENCE[:, :92].tolist()
    accepted = sum(stats.accepted_by_position)
    assert 15 < accepted < sum(stats.drafted_by_position) - 15


@pytest.mark.parametrize("layers", [(0, 2), (1,)])
def test_dflash_drafts_as_in_the_loop_of_transformers(monkeypatch, layers):
    """On an attention model, which stock serves: the same drafts in every round, from our features."""
    rounds, draft = [], DFlashTokenCandidateGenerator.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        candidates, logits = draft(self, input_ids, *args, **kwargs)
        if candidates.shape[1] > input_ids.shape[1]:
            rounds.append(candidates[0].tolist())
        return candidates, logits

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    config = attention_assistant().config.to_dict()
    config |= {"hidden_size": 64, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    target = random_model(AutoModelForCausalLM.from_config(transformers.Qwen3Config(**config)))
    assistant = dflash_assistant(layers)
    stock = generate(target, assistant_model=assistant, speculation_type="dflash")
    want = rounds.copy()
    rounds.clear()
    ours = generate(target, custom_generate=ready_hf.speculate(DFlashDrafter(assistant)))
    assert ours.tolist() == stock.tolist()
    assert rounds == want
    assert len({tuple(ids[-5:]) for ids in rounds}) > 10


@pytest.mark.slow
def test_dflash_sampling_follows_the_target():
    """An assistant that prefers the greedy continuation by far: the 3 tokens after the prompt."""
    target = copy.deepcopy(tiny_target("qwen3_5")).requires_grad_(False)
    tree = PrefixTree(target, PROMPT, 3, LogitsProcessorList([logits_process.TopKLogitsWarper(2)]))
    assistant = overfitted(target, REFERENCE[:, :18], 12)
    torch.manual_seed(0)
    with ready_hf.record_stats() as stats:
        options = {"do_sample": True, "top_k": 2, "max_new_tokens": 4, "speculation_type": "dflash"}
        ids = torch.cat([generate(target, assistant_model=assistant, **options) for _ in range(200)])
    assert sum(stats.accepted_by_position) > 50
    tree.assert_distributed(ids)
