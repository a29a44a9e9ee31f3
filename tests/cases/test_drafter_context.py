"""Cases of category drafter-context with real drafters: C09, C54, C55, C56 (C53 is in test_training_loop.py)."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf import ReadyDrafterModel
from ready_hf.drafting import DraftSession
from support import cache_argument, cache_of, drafter_for, plain_ids, random_prompt, tiny_target, trained_target


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of every drafter forward."""
    seen = []
    original = ReadyDrafterModel.forward

    def forward(self, *args, **kwargs):
        seen.append(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ReadyDrafterModel, "forward", forward)
    return seen


RETURN_CACHE = {"max_new_tokens": 60, "return_dict_in_generate": True}


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 16} | kwargs)


@pytest.mark.parametrize("window", [None, 12])
def test_c09_second_turn_with_a_real_drafter(calls, window):
    target, reference = tiny_target("qwen3_5"), plain_ids("qwen3_5")
    drafter = drafter_for(target, sliding_window=window)
    first = generate(target, reference[:, :12], max_new_tokens=88, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, random_prompt(10, seed=9)], dim=1)
    want = generate(target, ids, **cache_argument(copy.deepcopy(cache_of(first))))
    got = generate(target, ids, assistant_model=drafter, **cache_argument(cache_of(first)))
    assert torch.equal(got, want)
    rows = calls[0]["context_hidden_states"]
    assert rows.shape[1] == 11  # turn 1's anchor and the new tokens; no rows made up for the tokens before
    assert calls[0]["context_position_ids"].tolist() == [list(range(99, 110))]
    assert rows.abs().amax(-1).min() > 0


TURNS = [
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read(self):\n",
    "import os\nimport sys\n\n\ndef main(arguments=None):\n    parser = ",
    "for name in sorted(os.listdir(path)):\n    with open(name) as file:\n        text = file.read()\n",
]


@pytest.mark.slow
def test_c09_a_trained_drafter_accepts_nearly_as_much_behind_a_cache_as_in_a_cold_run():
    path = ready_hf.small_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path("ready"), dtype=torch.float32).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(path), {"warm": [0, 0], "cold": [0, 0]}
    for text in TURNS:
        first = generate(target, tokenizer(text, return_tensors="pt")["input_ids"], **RETURN_CACHE)
        new = tokenizer("\n\n\ndef save(self, path):\n", return_tensors="pt")["input_ids"]
        ids = torch.cat([first.sequences, new], dim=1)
        assert new.shape[1] < drafter.config.sliding_window  # the window is not full of rows again
        texts = {}
        for name, cache in (("warm", cache_argument(cache_of(first))), ("cold", {})):
            with ready_hf.record_stats() as stats:
                texts[name] = generate(target, ids, max_new_tokens=40, assistant_model=drafter, **cache)
            found[name][0] += sum(stats.accepted_by_position)
            found[name][1] += stats.rounds
        assert torch.equal(texts["warm"], texts["cold"])
    warm, cold = (1 + accepted / rounds for accepted, rounds in found.values())
    print(f"\nC09: {warm:.2f} tokens a round behind a cache, {cold:.2f} cold")
    assert warm > 2
    assert warm > 0.8 * cold


@pytest.mark.parametrize("depth", [10, 100, 1000])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("family", ["trained", "mamba2"])
def test_c54_positions_are_the_true_ones(calls, family, depth, padding, monkeypatch):
    """After rounds in which all 6 drafts are accepted, 3, and none; also of a target that is given no positions."""
    target = trained_target() if family == "trained" else tiny_target(family)
    size = target.config.vocab_size
    drafter = drafter_for(target, sliding_window=64)
    ids = random_prompt(depth, vocab_size=min(size, 500))
    mask = torch.ones_like(ids)
    if padding:
        ids, mask = (torch.nn.functional.pad(x, (padding, 0)) for x in (ids, mask))
    plain = generate(target, ids, attention_mask=mask, max_new_tokens=40)

    def tokens(self, hidden_states, logits, context):
        start, right = context.input_ids.shape[1], (6, 3, 0)[(len(calls) - 1) % 3]
        drafts = plain[:, start : start + context.num_drafts].clone()
        drafts[:, right:] = (drafts[:, right:] + 1) % size
        own.append(context.position_ids is not None)
        return drafts, None

    own = []
    monkeypatch.setattr(DraftSession, "_tokens", tokens)
    with ready_hf.record_stats() as stats:
        got = generate(target, ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=40)
    assert torch.equal(got, plain)
    assert family == "trained" or not any(own)
    assert stats.rounds - 1 <= len(calls) <= stats.rounds  # no room for a draft in the last round
    steps = [call["context_position_ids"].shape[1] for call in calls[1:]]
    assert steps == ([7, 4, 1] * 9)[: len(steps)]
    assert len(steps) > 6
    anchor = depth  # after the prompt; padding does not count
    for index, call in enumerate(calls):
        slots, rows = call["position_ids"][0].tolist(), call["context_position_ids"][0].tolist()
        anchor += len(rows) if index else 0  # the tokens that were committed since
        assert slots == list(range(anchor, anchor + 6))
        assert rows == [max(0, anchor - len(rows) + i) for i in range(len(rows))]


@pytest.mark.parametrize("chunk_size", [16, 7])
def test_c55_prefill_in_chunks_with_a_real_drafter(calls, chunk_size):
    target, prompt = tiny_target("qwen3_5"), random_prompt(50)
    drafter = drafter_for(target)
    want = generate(target, prompt, assistant_model=drafter)
    whole = calls[0]["context_hidden_states"]
    calls.clear()
    got = generate(target, prompt, assistant_model=drafter, prefill_chunk_size=chunk_size)
    assert torch.equal(got, want)
    assert torch.equal(got, generate(target, prompt))
    rows = calls[0]["context_hidden_states"]
    assert rows.shape[1] == 50
    assert (rows - whole).abs().max() < 1e-4


def test_c56_first_and_last_layer_and_one_beyond():
    target = tiny_target("qwen3_5")
    prompt = random_prompt(9)
    plain = generate(target, prompt)
    for ids in ([0, 3], [3]):
        drafter = drafter_for(target, target_layer_ids=ids)
        assert torch.equal(generate(target, prompt, assistant_model=drafter), plain)
    with pytest.raises(
        StrictDataclassClassValidationError,
        match="different decoder layers of the target, 0 to 3",
    ):
        drafter_for(target, target_layer_ids=[1, 4])


def test_the_last_layer_is_read_before_the_final_norm(calls):
    target = tiny_target("qwen3_5")
    prompt = random_prompt(9)
    generate(target, prompt, assistant_model=drafter_for(target, target_layer_ids=[3]))
    with torch.no_grad():
        normed = target.get_decoder()(prompt).last_hidden_state
        rows = target.get_decoder().norm(calls[0]["context_hidden_states"])
    assert (rows - normed).abs().max() < 1e-4


def test_a_prompt_of_embeddings():
    target = trained_target()
    ids = random_prompt(20, vocab_size=500)
    embeds = target.get_input_embeddings()(ids)
    options = {"max_new_tokens": 16, "do_sample": False}
    want = target.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), **options)
    for window in (None, 12):
        drafter = drafter_for(target, sliding_window=window)
        got = target.generate(
            inputs_embeds=embeds, attention_mask=torch.ones_like(ids), assistant_model=drafter, **options
        )
        assert torch.equal(got, want)
