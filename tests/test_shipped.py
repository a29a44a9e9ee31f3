"""The trained models that ship: sizes, cards, and real drafted decoding with them."""

import functools
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf.drafting import DraftSession
from ready_hf.hub import check_card
from support import StateCheck


KINDS = ("ready", "dspark")
ASSETS = Path(ready_hf.small_target_path()).parent


@functools.cache
def target():
    return AutoModelForCausalLM.from_pretrained(ready_hf.small_target_path(), dtype=torch.float32).eval()


@functools.cache
def drafter(kind):
    return AutoModel.from_pretrained(ready_hf.small_drafter_path(kind), dtype=torch.float32).eval()


def prompts(count: int) -> list[dict[str, torch.Tensor]]:
    """Tokenized held-out prompts."""
    path = Path(ready_hf.small_target_path())
    rows = [json.loads(line) for line in (path / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [tokenizer(row["prompt"], return_tensors="pt") for row in rows[:count]]


@pytest.fixture(autouse=True)
def _patched():
    ready_hf.ensure_patched(target())  # with a GPU package installed, stock transformers crashes on the CPU


def test_files_are_small():
    sizes = {path: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}
    assert sum(sizes.values()) <= 12_000_000
    assert max(sizes.values()) <= 4_000_000


def test_models_are_small_and_in_bfloat16():
    assert target().num_parameters() <= 3_400_000
    assert all(drafter(kind).num_parameters() <= 1_300_000 for kind in KINDS)
    for path in ASSETS.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize("kind", KINDS)
def test_cards_are_valid_and_honest(kind):
    card = ModelCard.load(Path(ready_hf.small_drafter_path(kind)) / "README.md")
    check_card(card)
    assert ("ready" in card.data.tags) is (kind == "ready")
    if kind == "ready":
        assert "the reader helps" in card.text.lower() or "does not help yet" in card.text


@pytest.mark.lossless
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_plain_generate(kind):
    rounds = rejected = 0
    for inputs in prompts(4):
        plain = target().generate(**inputs, max_new_tokens=64, do_sample=False)
        with ready_hf.record_stats() as stats:
            drafted = target().generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=drafter(kind))
        assert torch.equal(drafted, plain)
        rounds += stats.rounds
        rejected += stats.drafted_by_position[0] - stats.accepted_by_position[0]
    assert rejected  # some blocks were rolled back whole
    assert rounds < 4 * 48  # and many drafts accepted


@pytest.mark.parametrize("kind", KINDS)
def test_states_after_every_commit_are_those_of_a_fresh_forward(kind, monkeypatch):
    check, draft = StateCheck(target()), DraftSession.draft

    def checked(self, context):
        check(context)
        return draft(self, context)

    monkeypatch.setattr(DraftSession, "draft", checked)
    (inputs,) = prompts(1)
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        torch.manual_seed(0)
        target().generate(**inputs, max_new_tokens=48, assistant_model=drafter(kind), **options)
    assert check.rounds > 20
    assert check.worst < 1e-5


@pytest.mark.slow
def test_drafters_beat_prompt_lookup_at_temperature_1():
    tokens = {}
    for name, assistant in {
        "lookup": ready_hf.PromptLookupDrafter(),
        **{kind: drafter(kind) for kind in KINDS},
    }.items():
        with ready_hf.record_stats() as stats:
            for seed, inputs in enumerate(prompts(6)):
                torch.manual_seed(seed)
                target().generate(**inputs, max_new_tokens=48, do_sample=True, top_k=0, assistant_model=assistant)
        tokens[name] = stats.tokens_per_forward
    assert min(tokens[kind] for kind in KINDS) > tokens["lookup"] + 0.2, tokens
