"""Case C11: the same prompts in float32 and in bfloat16, and what is said about texts that part."""

import functools
import json

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf.cli import main
from ready_hf.demo_prompts import Prompt
from ready_hf.evaluation import evaluate
from ready_hf.plain_paths import PlainPath
from ready_hf.verify_target import Verdict, drafted_run
from support import DEVICES


NEW_TOKENS = 34
LENGTHS = [NEW_TOKENS, pytest.param(256, marks=pytest.mark.slow)]
PROMPTS = ("import os\nimport sys\n", "try:\n    import json\n")  # in bfloat16 on a CPU their texts often part


@functools.cache
def models(device, dtype):
    """The shipped target, its tokenizer, and drafters by name."""
    path = ready_hf.small_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path("ready"), dtype=dtype).to(device).eval()
    return target, AutoTokenizer.from_pretrained(path), {"lookup": ready_hf.PromptLookupDrafter(), "ReaDy": drafter}


@pytest.mark.parametrize("new_tokens", LENGTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_c11_float32_is_identical(device, new_tokens):
    target, tokenizer, drafters = models(device, torch.float32)
    for text in PROMPTS:
        inputs = Prompt(text).encode(tokenizer, target.device)
        options = {"do_sample": False, "max_new_tokens": new_tokens}
        plain = target.generate(**inputs, **options)
        for drafter in drafters.values():
            assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
    print(f"\nC11 on {device} in float32: {len(PROMPTS) * len(drafters)} texts of {new_tokens} tokens identical")


@pytest.mark.parametrize("new_tokens", LENGTHS)
@pytest.mark.parametrize("text", PROMPTS)
@pytest.mark.parametrize("device", DEVICES)
def test_c11_bfloat16_parts_at_near_ties_only(device, text, new_tokens):
    target, tokenizer, drafters = models(device, torch.bfloat16)
    path = PlainPath(target, Prompt(text).encode(tokenizer, target.device), new_tokens)
    found = [drafted_run(path, name, drafter, 0)[0] for name, drafter in drafters.items()]
    ties = [run.tie for run in found if run.first_difference is not None]
    print(f"\nC11 on {device} in bfloat16: {len(ties)} of {len(found)} texts part, {ties}")
    assert all(tie is not None and tie.is_near for tie in ties)
    verdict = Verdict("bfloat16", False, 1, (1, 1), 0.1, 0.2, tuple(found))  # as if every rejection had been tried
    assert verdict.is_lossless
    assert verdict.report().count(", a near tie.") == len(ties)
    others = [path.tie(k) for k in (2, 5, 8, 11)]
    assert any(tie.spread > 0 and not tie.is_near for tie in others)  # a clear choice is none


def test_c11_an_evaluation_in_bfloat16_does_not_fail_and_says_where_to_ask(tmp_path, capsys):
    """Whether a text parts is up to the machine; `test_the_command_fails_if_a_token_differs` has one that does."""
    file = tmp_path / "parting.jsonl"
    file.write_text(json.dumps({"prompt": PROMPTS[0]}) + "\n")
    options = ["--prompts-file", str(file), "--dtype", "bfloat16", "--max-new-tokens", str(NEW_TOKENS)]
    assert main(["eval", *options, "--temperature", "0", "--resamples", "50"]) == 0
    report = capsys.readouterr().out
    assert ("`ready-hf verify --dtype bfloat16`" in report) == ("DIFFERENT in 1 of 1" in report)


def test_c11_an_evaluation_in_float32_has_no_excuse():
    target, tokenizer, drafters = models("cpu", torch.float32)
    found = evaluate(
        target, tokenizer, drafters, [Prompt(PROMPTS[0])], max_new_tokens=4, temperatures=(0,), resamples=50
    )
    assert found.is_identical
    assert "near ties" not in found.to_markdown()
