"""Rollback, generation and drafting through the Triton kernels, in the interpreter where there is no GPU."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import ready_hf
from ready_hf import kernels, ops
from ready_hf.demo_prompts import UsageError
from ready_hf.demo_settings import Settings
from ready_hf.drafting import DraftSession
from ready_hf.target import committed_states, state_views
from support import (
    StateCheck,
    cache_argument,
    cache_of,
    drafter_for,
    plain_ids,
    random_prompt,
    states,
    tiny_target,
    trained_target,
    trained_tokenizer,
    worst_error,
)


pytest.importorskip("triton")
FUSED = ["qwen3_5", "qwen3_next"]
OTHERS = ["kimi_linear", "bamba"]


@pytest.fixture
def forced(monkeypatch):
    """Kernels on, and counted from zero."""
    monkeypatch.setattr(ops, "_backend", "triton")
    kernels.launches.clear()
    return kernels.launches


def round_of(model, rollback, cache, seen, length, keep, rows):
    """One recorded and committed block; returns it."""
    block = torch.cat([random_prompt(length, seed=seen + row) for row in range(rows)])
    positions = torch.arange(seen, seen + length).expand(rows, -1)
    with torch.no_grad(), rollback.recording(length):
        model(block, use_cache=True, position_ids=positions, **cache_argument(cache))
    rollback.commit(keep)
    return block


@pytest.mark.contract
@pytest.mark.parametrize("family", FUSED + OTHERS)
@torch.no_grad()
def test_committed_states_equal_a_fresh_forward(family, forced):
    """Several rounds, the last one kept whole."""
    model = copy.deepcopy(tiny_target(family))
    ids = random_prompt(9)
    cache = cache_of(model(ids, use_cache=True))
    rollback = ready_hf.Rollback(cache)
    for length, keep in ((2, 1), (5, 3), (4, 4)):
        block = round_of(model, rollback, cache, ids.shape[1], length, keep, 1)
        ids = torch.cat([ids, block[:, :keep]], dim=1)
        assert worst_error(states(cache), states(cache_of(model(ids, use_cache=True)))) <= 1e-5
    rollback.close()
    assert forced["commit_and_read"] == (3 if family in FUSED else 2)  # a step rule has the state of a whole block
    assert forced["conv_commit"] == 3
    assert (forced["verify_rule"] > 0) is (family in FUSED)


@pytest.mark.parametrize("family", FUSED + OTHERS)
@torch.no_grad()
def test_rows_keep_different_numbers_of_tokens(family, forced):
    model, rows = copy.deepcopy(tiny_target(family)), 3
    prompts = torch.cat([random_prompt(9, seed=row) for row in range(rows)])
    keep = torch.tensor([1, 4, 2])
    found = []
    for backend in ("triton", "torch"):
        ops.set_kernels(backend)
        cache = cache_of(model(prompts, use_cache=True))
        rollback = ready_hf.Rollback(cache)
        round_of(model, rollback, cache, 9, 4, keep, rows)
        rollback.close()
        found.append(states(cache))
    assert worst_error(*found) <= 1e-5
    assert forced["commit_and_read"]
    assert forced["conv_commit"]


@pytest.mark.lossless
def test_tokens_of_the_trained_target_are_those_of_plain_decoding(forced):
    code = "def area(rows):\n    total = rows * 2\n    return total"
    prompt = trained_tokenizer()(
        f"<file>\n{code}\n</file>\n# Rename rows to items\n<edited>\n", return_tensors="pt"
    ).input_ids
    plain = trained_target().generate(prompt, max_new_tokens=10, do_sample=False)
    with ready_hf.record_stats() as stats:
        drafted = trained_target().generate(
            prompt, max_new_tokens=10, do_sample=False, assistant_model=ready_hf.PromptLookupDrafter(3)
        )
    assert torch.equal(drafted, plain)
    assert stats.rounds < 10
    assert forced["verify_rule"]
    assert forced["commit_and_read"]


@torch.no_grad()
def test_without_the_commit_states_are_wrong(forced, monkeypatch):
    """Negative control: the frozen state of a verified block is not that of its tokens."""
    monkeypatch.setattr("ready_hf.rollback._commit_states", lambda *args: None)
    model = copy.deepcopy(tiny_target("qwen3_5"))
    ids = random_prompt(9)
    cache = cache_of(model(ids, use_cache=True))
    rollback = ready_hf.Rollback(cache)
    block = round_of(model, rollback, cache, 9, 4, 4, 1)
    rollback.close()
    fresh = cache_of(model(torch.cat([ids, block], dim=1), use_cache=True))
    assert worst_error(states(cache), states(fresh)) > 1e-2


def test_a_drafter_reads_states_where_they_lie(forced):
    """The same tokens as through torch; the states are the committed ones in every round."""
    target = copy.deepcopy(tiny_target("qwen3_5"))
    drafter, prompt = drafter_for(target, block_size=3), random_prompt(12)
    check, draft = StateCheck(target), DraftSession.draft
    found = {}
    for backend in ("triton", "torch"):
        ops.set_kernels(backend)
        blocks = []

        def seen(self, context, blocks=blocks):
            check(context)
            blocks.append(draft(self, context)[0])
            return blocks[-1], None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftSession, "draft", seen)
            ids = target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)
        found[backend] = ids, torch.cat(blocks, dim=1)
    assert torch.equal(found["triton"][0], plain_ids("qwen3_5")[:, : found["triton"][0].shape[1]])
    assert torch.equal(found["triton"][1], found["torch"][1])
    assert check.worst < 1e-5
    assert forced["state_read"] == check.rounds // 2


@torch.no_grad()
def test_a_failing_commit_leaves_the_cache_as_it_was(forced, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of memory")

    model = copy.deepcopy(tiny_target("qwen3_5"))
    cache = cache_of(model(random_prompt(9), use_cache=True))
    before = states(copy.deepcopy(cache))
    rollback = ready_hf.Rollback(cache)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "commit_windows", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            round_of(model, rollback, cache, 9, 4, 2, 1)
    assert worst_error(states(cache), before) == 0.0
    round_of(model, rollback, cache, 9, 4, 2, 1)  # goes on
    rollback.close()


def test_choosing_kernels(monkeypatch):
    with pytest.raises(ValueError, match="must be one of auto, triton, torch"):
        ready_hf.set_kernels("cuda")
    monkeypatch.setattr(ops, "_backend", "gpu")  # READY_HF_KERNELS=gpu
    with pytest.raises(ValueError, match="READY_HF_KERNELS"):
        ops.uses_kernels(torch.device("cpu"))
    for backend, expected in (("torch", False), ("triton", True), ("auto", torch.cuda.is_available())):
        monkeypatch.setattr(ops, "_backend", backend)
        assert ops.uses_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu")) is expected


def test_forced_kernels_that_cannot_run_are_refused_before_any_compute(forced, monkeypatch):
    monkeypatch.setattr("ready_hf.kernels._launch.INTERPRETED", False)
    model = tiny_target("qwen3_5")
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: pytest.fail("computed"))
    with pytest.raises(RuntimeError, match=r"Triton kernels run on CUDA tensors.*set_kernels\("):
        model.generate(random_prompt(4), max_new_tokens=4, assistant_model=ready_hf.PromptLookupDrafter(2))


@torch.no_grad()
def test_forced_kernels_refuse_float64(forced):
    model = AutoModelForCausalLM.from_config(tiny_target("qwen3_5").config, dtype=torch.float64).eval()
    ready_hf.ensure_patched(model)
    cache = cache_of(model(random_prompt(9), use_cache=True))
    rollback = ready_hf.Rollback(cache)
    with pytest.raises(ValueError, match="kernels are forced, and take float32, bfloat16 and float16"):
        round_of(model, rollback, cache, 9, 4, 2, 1)
    rollback.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", lambda *args, **kwargs: pytest.fail("computed"))
        with pytest.raises(ValueError, match="the target has torch.float64"):
            model.generate(random_prompt(4), max_new_tokens=4, assistant_model=ready_hf.PromptLookupDrafter(2))


@torch.no_grad()
def test_states_of_odd_sizes(forced):
    """3 x 5 numbers a head: states in one tensor would not start at multiples of 16 bytes."""
    config = copy.deepcopy(tiny_target("qwen3_5").config)
    config.linear_num_key_heads = config.linear_num_value_heads = 1
    config.linear_key_head_dim, config.linear_value_head_dim = 3, 5
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ready_hf.ensure_patched(model)
    ids = random_prompt(9)
    cache = cache_of(model(ids, use_cache=True))
    rollback = ready_hf.Rollback(cache)
    for length, keep in ((4, 2), (3, 1)):
        block = round_of(model, rollback, cache, ids.shape[1], length, keep, 1)
        ids = torch.cat([ids, block[:, :keep]], dim=1)
    rollback.close()
    assert worst_error(states(cache), states(cache_of(model(ids, use_cache=True)))) <= 1e-5
    assert forced["commit_and_read"] == 2


@pytest.mark.parametrize("normalization", ["none", "read", "state"])
def test_reads_in_place_equal_those_of_a_copy(normalization, forced):
    target = tiny_target("bamba")  # whose states lie transposed
    reader = drafter_for(target, reader_normalization=normalization).reader
    cache = cache_of(target(random_prompt(9), use_cache=True))
    layers = ready_hf.recurrent_layers(target)
    views, copies = state_views(cache, layers), committed_states(cache, layers)[:, None]
    size = target.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, size, generator=generator) for _ in range(2)]
    with torch.no_grad():
        found, expected = reader(views, *inputs), reader(copies, *inputs)
    assert float((found - expected).norm() / expected.norm()) <= 1e-5
    assert forced["state_read"] == 1


def test_the_demo_says_in_one_line_that_kernels_cannot_run(forced, monkeypatch):
    monkeypatch.setattr("ready_hf.kernels._launch.INTERPRETED", False)
    for backend, message in (("triton", "kernels are forced"), ("gpu", "READY_HF_KERNELS")):
        monkeypatch.setattr(ops, "_backend", backend)
        with pytest.raises(UsageError, match=message):
            Settings().check()


def test_without_triton_everything_runs_in_torch():
    code = """
import sys
sys.modules["triton"] = None
import torch
import ready_hf
from ready_hf import kernels
assert not kernels.has_kernels(torch.device("cpu"))
uncut, kept = torch.randn(1, 2, 3, 6), torch.tensor([1, 2])
assert kernels.conv_commit(uncut, kept, 4).shape == (1, 2, 3, 4)
try:
    kernels.conv_commit(uncut, kept, 4, backend="triton")
except RuntimeError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "need Triton, which is not installed" in ran.stdout
