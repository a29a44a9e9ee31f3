"""Cases of other categories with real drafters: C16, C35, C46, C52, C74, C78, C84."""

import copy
import json
import logging
import math
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel, UnsupportedTargetError
from ready_hf.features import FrozenTarget
from ready_hf.heads import SequentialHead
from ready_hf.losses import DraftingLoss
from support import DEVICES, FAMILIES, drafter_for, random_prompt, tiny_target, trained_target


VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 24} | kwargs)


def test_c16_one_drafter_from_every_form_of_a_target():
    text = FAMILIES["qwen3_5"]()
    text.eos_token_id, text.pad_token_id = 5, 6
    composite = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=VISION)
    forms = [
        text,
        composite,
        AutoModelForCausalLM.from_config(text),
        AutoModelForCausalLM.from_config(composite),
        transformers.Qwen3_5ForConditionalGeneration(composite),
    ]
    configs = [ReadyDrafterConfig.for_target(form).to_dict() for form in forms]
    assert configs[0]["state_shape"] == [4, 16, 24]
    assert configs[0]["state_layer_ids"] == [0, 1, 3]
    assert (configs[0]["vocab_size"], configs[0]["hidden_size"]) == (97, 64)
    assert (configs[0]["eos_token_id"], configs[0]["pad_token_id"]) == (5, 6)
    assert all(config == configs[0] for config in configs)


HEADS = ["vanilla", "gated", "rnn"]
INJECTIONS = ["input", "layers", "head"]


def test_c35_every_parameter_of_a_drafter_made_in_bfloat16_is_finite():
    for seed in range(50):
        torch.manual_seed(seed)
        config = ReadyDrafterConfig.for_target(
            tiny_target("qwen3_5"),
            markov_head_type=HEADS[seed % 3],
            reader_injection=INJECTIONS[seed % 3],
            reader_projection=["full", "bilinear"][seed % 2],
            reader_gate=bool(seed % 2),
        )
        drafter = AutoModel.from_config(config, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
        assert all(torch.isfinite(tensor).all() for tensor in [*drafter.parameters(), *drafter.buffers()]), seed


@pytest.mark.parametrize("device", DEVICES)
def test_c46_more_drafts_than_the_block(caplog, device):
    target, prompt = copy.deepcopy(trained_target()).to(device), random_prompt(12).to(device)
    plain = generate(target, prompt)
    drafter = drafter_for(target, block_size=8).to(device)
    first = {}
    for limit, most in ((4, 4), (8, 8), (12, 8), (64, 8)):
        caplog.clear()
        with ready_hf.record_stats() as stats:
            got = generate(target, prompt, assistant_model=drafter, num_assistant_tokens=limit)
        assert torch.equal(got, plain)
        assert len(stats.drafted_by_position) == most
        assert (f"num_assistant_tokens={limit}" in caplog.text) is (limit > 8)
        first[limit] = stats.accepted_by_position
    assert first[8] == first[12] == first[64]


@pytest.mark.parametrize("device", DEVICES)
def test_c46_fewer_drafts_are_the_first_of_the_block(device):
    """A trained drafter, asked for 4 of its 8: at the same anchor the same drafts, so they are accepted as often."""
    path = ready_hf.small_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path("dspark"), dtype=torch.float32).eval().to(device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    logs = {}
    for limit in (4, 8):
        for text in ("def main(", "import os\n\nclass Reader:", "for name in sorted("):
            ids = tokenizer(text, return_tensors="pt")["input_ids"].to(device)
            with ready_hf.record_stats() as stats:
                generate(target, ids, assistant_model=drafter, num_assistant_tokens=limit)
            logs[limit, text] = {entry.context: entry for entry in stats.log}
    pairs = [
        (entry, logs[8, text][context])
        for (limit, text), log in logs.items()
        for context, entry in log.items()
        if limit == 4 and context in logs[8, text]
    ]
    assert len(pairs) > 6
    assert max(few.num_drafts for few, _ in pairs) == 4
    assert any(many.num_drafts == 8 for _, many in pairs)
    assert all(few.accepted == many.accepted[: few.num_drafts] for few, many in pairs)
    assert sum(len(few.accepted) for few, _ in pairs) > 3


def evaluated(target, drafter, rows, before):
    """Expected tokens of a round, over anchors in the last 100 tokens of rows with `before` tokens more."""
    anchors = torch.arange(before + 36, before + 92, 8, device=rows.device).expand(len(rows), -1)
    frozen = FrozenTarget(target, drafter.config)
    from ready_hf.training import drafting_sums  # needs accelerate

    with torch.no_grad():
        return drafting_sums(drafter, drafter, frozen, frozen.batch(rows, anchors), DraftingLoss()).metrics()["tau"]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["dspark", "ready"])
def test_c52_longer_contexts_than_in_training(kind, device):
    """The same text after 0, 200 and 1000 other tokens; the drafters were trained on 512."""
    pytest.importorskip("accelerate")
    folder = Path(ready_hf.small_target_path())
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    ready_hf.ensure_patched(target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    ids = torch.cat([torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts])
    pieces = ids[: len(ids) // 100 * 100].view(-1, 100).to(device)
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path(kind), dtype=torch.float32).to(device).eval()
    assert drafter.config.sliding_window == 64

    def tau(before):
        rows = torch.stack([pieces[i - before // 100 : i + 1].flatten() for i in range(10, 34, 3)])
        return evaluated(target, drafter, rows, before)

    short, middle, long = tau(0), tau(200), tau(1000)
    print(
        f"\nC52 on {device}, {kind}: {short:.3f} tokens a round at 100 tokens, {middle:.3f} at 300, {long:.3f} at 1100"
    )
    assert short > 1.8
    assert middle > 0.95 * short
    assert long > 0.95 * short
    drafter.config.sliding_window = 4096  # control: without the window it is lost
    assert tau(1000) < 0.9 * short


@pytest.mark.parametrize("place", ["head", "sequential head"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_c74_draft_logits_of_one_round_are_nan(place, do_sample, monkeypatch, caplog):
    target, prompt = tiny_target("qwen3_5"), random_prompt(12)
    plain = generate(target, prompt)
    owner, name = (ReadyDrafterModel, "base_logits") if place == "head" else (SequentialHead, "step")
    original, calls = getattr(owner, name), []

    def broken(self, *args):
        calls.append(1)
        result = original(self, *args)
        return result * math.nan if len(calls) == (2 if place == "head" else 9) else result  # draft 3 of round 2

    monkeypatch.setattr(owner, name, broken)
    with caplog.at_level(logging.WARNING, "ready_hf.drafting"), ready_hf.record_stats() as stats:
        got = generate(target, prompt, assistant_model=drafter_for(target), do_sample=do_sample)
    assert caplog.text.count("not finite") == 1
    drafted = stats.drafted_by_position
    assert drafted[0] > drafted[2] if place == "sequential head" else stats.rounds > drafted[0]
    if not do_sample:
        assert torch.equal(got, plain)
    assert got.shape == plain.shape


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("first", [1, 3])
def test_c74_target_logits_are_nan(first, do_sample):
    target, prompt = tiny_target("qwen3_5"), random_prompt(12)
    drafter, calls = drafter_for(target), []

    def broken(module, args, output):
        calls.append(1)
        return output * math.nan if len(calls) >= first else output

    handle = target.get_decoder().norm.register_forward_hook(broken)
    try:
        with pytest.raises(RuntimeError, match="not a number" if not do_sample else "nan"):
            generate(target, prompt, assistant_model=drafter, do_sample=do_sample)
        calls.clear()
        got = generate(target, prompt, assistant_model=drafter, remove_invalid_values=True)
    finally:
        handle.remove()
    assert got.shape[1] == 36


def lfm2():
    config = transformers.Lfm2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_c78_a_reader_needs_recurrent_states():
    target, prompt = lfm2(), random_prompt(9)
    with pytest.raises(UnsupportedTargetError, match=r"'lfm2'.* keeps no recurrent state.*`reader=False`.*Mamba-2"):
        ReadyDrafterConfig.for_target(target)
    other = drafter_for(tiny_target("qwen3_5"))
    with pytest.raises(ValueError, match=r"'lfm2'.*recurrent layers: \[0, 1, 3\] in the drafter, \[\] in the target"):
        generate(target, prompt, assistant_model=other)
    with ready_hf.record_stats() as stats:
        got = generate(target, prompt, assistant_model=drafter_for(target, reader=False))
    assert stats.drafted_by_position[0] > 0
    assert torch.equal(got, generate(target, prompt))


SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4}
UNSUPPORTED = {
    "mamba": lambda: transformers.MambaConfig(state_size=8, **SIZES),
    "rwkv": lambda: transformers.RwkvConfig(attention_hidden_size=64, **SIZES),
}


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_c78_other_recurrent_families_are_refused_with_what_is_supported(family):
    target = AutoModelForCausalLM.from_config(UNSUPPORTED[family]()).eval()
    drafter = drafter_for(tiny_target("qwen3_5"))
    message = rf"model type '{family}'(?s:.*)Supported recurrences: gated_delta_rule, kda, mamba2"
    with pytest.raises(UnsupportedTargetError, match=message):
        generate(target, random_prompt(9), assistant_model=drafter)
    for reader in (True, False):
        with pytest.raises(UnsupportedTargetError, match=message):
            ReadyDrafterConfig.for_target(target, reader=reader)


def test_c84_a_drafter_is_no_target(tmp_path):
    target, prompt = tiny_target("qwen3_5"), random_prompt(9)
    drafter = drafter_for(target)
    drafter.save_pretrained(tmp_path)
    message = r"is a drafter.*load its target.*target\.generate\(\*\*inputs, assistant_model=drafter\)"
    with pytest.raises(TypeError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match=message):
        AutoModelForCausalLM.from_config(drafter.config)
    for args, kwargs in ((("hi",), {}), ((prompt,), {}), ((prompt,), {"assistant_model": target})):
        with pytest.raises(TypeError, match=message):
            drafter.generate(*args, **kwargs)
    with pytest.raises(TypeError, match="is a drafter"):
        ReadyDrafterConfig.for_target(drafter)
    assert isinstance(AutoModel.from_pretrained(tmp_path), ReadyDrafterModel)
