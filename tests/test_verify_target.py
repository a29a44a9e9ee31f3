"""The verdict: lossless where it is, not lossless with a rollback that is broken, and an error where it cannot be
asked."""

import functools
import json
import sys

import pytest
import torch

import ready_hf
from ready_hf import rollback, verify_command
from ready_hf.block_records import Record
from ready_hf.cli import main
from ready_hf.demo_prompts import Prompt
from ready_hf.forced_drafts import ForcedDrafter, ObservedDrafter
from ready_hf.plain_paths import NearTie, PlainPath, cache_error, snapshot
from ready_hf.statistics import Round
from ready_hf.target import CACHE_NAME, recurrent_layers, unpatch
from ready_hf.verify_target import DraftedRun, Verdict, drafted_run, verify_target
from support import FAMILIES, drafter_for, random_prompt, tiny_target, trained_target, trained_tokenizer


CODE = "def area(width, height):\n    total = width * height\n    return total"
TASK = f"<file>\n{CODE}\n</file>\n# Rename total to size\n<edited>\n"
BLOCK = 3


def inputs():
    return [dict(trained_tokenizer()(TASK, return_tensors="pt"))]


@functools.cache
def good():
    drafters = {"ReaDy": drafter_for(trained_target())}
    return verify_target(trained_target(), inputs(), drafters, block_size=BLOCK, max_new_tokens=16)


def test_the_trained_target_is_lossless():
    verdict = good()
    assert verdict.is_lossless
    assert verdict.failures == verdict.unasked == verdict.ties == []
    names = ["wrong at draft 1", "wrong at draft 2", "wrong at draft 3", "all right", "prompt lookup", "ReaDy"]
    assert [run.drafter for run in verdict.runs] == names
    assert all(0 < run.state_error <= 1e-5 for run in verdict.runs)
    assert 0 < verdict.plain_difference < 1e-5
    # 15 tokens after the first: k right drafts make rounds of k + 1 tokens, the last ones are shorter
    assert [run.rounds for run in verdict.runs[:4]] == [15, 8, 5, 4]
    assert all(count > 0 for count in verdict.rejections)
    report = verdict.report()
    assert report.startswith("LOSSLESS in float32: 6 drafted texts")
    assert json.loads(json.dumps(verdict.to_dict()))["lossless"] is True


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_asked(family):
    target = tiny_target(family)
    verdict = verify_target(target, [{"input_ids": random_prompt(9)}], block_size=2, max_new_tokens=10)
    assert verdict.is_lossless, verdict.report()


def broken(monkeypatch, fault):
    """Breaks the commit of recurrent states."""
    commit, state_after = rollback._commit_states, Record.state_after
    if fault == "one token too few":
        monkeypatch.setattr(Record, "state_after", lambda self, keep: state_after(self, max(keep - 1, 0)))
    elif fault == "rejected drafts stay":
        monkeypatch.setattr(rollback, "_commit_states", lambda layers, keep, length: None)
    elif fault == "only whole blocks":
        monkeypatch.setattr(
            rollback,
            "_commit_states",
            lambda layers, keep, length: commit(layers, length if keep == 2 else keep, length),
        )
    elif fault == "windows stay":
        windows = rollback._conv_window
        monkeypatch.setattr(
            rollback, "_conv_window", lambda window, keep, size: windows(window, window.shape[-1] - size, size)
        )
    else:
        cut = rollback._cut_keys_and_values
        monkeypatch.setattr(
            rollback, "_cut_keys_and_values", lambda layer, count: cut(layer, count - 1 if count > 0 else count)
        )


FAULTS = ["one token too few", "rejected drafts stay", "only whole blocks", "windows stay", "a key too many"]


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_control_a_broken_rollback_is_not_lossless(fault, monkeypatch, capsys):
    ready_hf.set_kernels("torch")
    try:
        broken(monkeypatch, fault)
        monkeypatch.setattr(verify_command, "BUILT_IN", (TASK,))
        arguments = ["verify", "--target", ready_hf.tiny_target_path(), "--block-size", "3"]
        assert main([*arguments, "--max-new-tokens", "12", "--prompts", "1"]) == 1
    finally:
        ready_hf.set_kernels("auto")
    out = capsys.readouterr().out
    assert "NOT LOSSLESS in float32" in out
    assert "FAILED: wrong at draft" in out
    assert "committed states are off by" in out


@pytest.mark.parametrize("fault", ["one token too few", "rejected drafts stay"])
def test_negative_control_in_bfloat16_too(fault, monkeypatch):
    target = ready_hf.tiny_target_path()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    options = {"block_size": BLOCK, "max_new_tokens": 12}
    verdict = verify_target(model, inputs(), **options)
    assert not verdict.is_exact
    assert verdict.bound == 2 * verdict.plain_difference > 1e-4
    assert not verdict.failures, verdict.report()
    broken(monkeypatch, fault)
    assert verify_target(model, inputs(), **options).failures


def coarse_prompts(monkeypatch):
    """A kernel as on a GPU: it multiplies a text in tf32, and short blocks in float32."""
    unpatch()
    module = sys.modules[type(recurrent_layers(trained_target())[0].mixer).__module__]
    rule = module.torch_chunk_gated_delta_rule

    def coarse(query, key, value, *args, **kwargs):
        if query.shape[1] > 16:  # a mantissa of 10 bits
            query, key, value = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (query, key, value))
        return rule(query, key, value, *args, **kwargs)

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", coarse)


@pytest.mark.parametrize("fault", [None, "one token too few", "rejected drafts stay"])
def test_float32_is_asked_where_prompts_are_multiplied_in_tf32(fault, monkeypatch):
    coarse_prompts(monkeypatch)
    try:
        if fault is not None:
            broken(monkeypatch, fault)
        verdict = verify_target(trained_target(), inputs(), block_size=BLOCK, max_new_tokens=16)
    finally:
        unpatch()
    assert verdict.plain_difference > 1e-4
    assert verdict.bound == 1e-5
    assert verdict.is_lossless == (fault is None), verdict.report()
    assert fault is None or max(run.state_error for run in verdict.runs) > 1e-3


def test_only_the_rejection_that_is_broken_fails(monkeypatch):
    """Positions are told apart: a fault after one accepted draft is found by the blocks that are wrong at draft 2."""
    broken(monkeypatch, "only whole blocks")
    verdict = verify_target(trained_target(), inputs(), block_size=BLOCK, max_new_tokens=12)
    failed = {failure.split(",")[0] for failure in verdict.failures}
    assert "wrong at draft 2" in failed
    assert "wrong at draft 1" not in failed
    assert "all right" not in failed


def test_a_drafter_that_changes_tokens_is_found():
    path = PlainPath(trained_target(), inputs()[0], 12)
    run, _ = drafted_run(path, "right", ForcedDrafter(path.ids, 3, 3, 200), 0)
    assert run.first_difference is None
    path.ids = path.ids.clone()
    path.ids[0, path.prompt_length + 5] += 1
    run, _ = drafted_run(path, "other", ForcedDrafter(path.ids, 3, 3, 200), 0)
    assert run.first_difference == 5
    assert run.tie is not None
    assert not run.tie.is_near


def test_the_committed_cache_of_every_round_is_looked_at():
    path, seen = PlainPath(trained_target(), inputs()[0], 12), []
    for drafter in (ForcedDrafter(path.ids, 3, 1, 200), ready_hf.PromptLookupDrafter()):
        seen.clear()
        observed = ObservedDrafter(drafter, lambda ids, cache: seen.append((ids.shape[1], cache.get_seq_length())))
        with ready_hf.record_stats() as stats:
            trained_target().generate(**path.inputs, assistant_model=observed, max_new_tokens=12, do_sample=False)
        assert [length for length, _ in seen] == [item.context for item in stats.log if item.num_drafts]
        assert all(length == held for length, held in seen)


def test_drafts_behind_the_end_of_a_text_are_not_counted_as_rejected(monkeypatch):
    """The text ends with the first draft of its block: that says nothing about a rejection at the second."""
    log = [Round(9, 2, 1, [1], tokens=1), Round(9, 2, 1, [1, 1], tokens=3), Round(9, 2, 1, [], tokens=1)]
    run = DraftedRun("x", 0, 3, 0.0)
    monkeypatch.setattr("ready_hf.verify_target.drafted_run", lambda *args: (run, log))
    verdict = verify_target(trained_target(), inputs(), block_size=2, max_new_tokens=6)
    assert verdict.rejections == (3, 0, 3)
    assert verdict.unasked == ["at draft 2"]


def verdict_of(*runs, is_exact=False, rejections=(1, 1), bound=0.1):
    return Verdict("bfloat16", is_exact, 1, tuple(rejections), 0.05, bound, runs)


def test_near_ties_are_told_from_differences():
    near, far = NearTie(4, 0.2, 0.1), NearTie(4, 0.21, 0.1)
    assert near.is_near
    assert not far.is_near
    tied = verdict_of(DraftedRun("x", 0, 3, 0.01, 4, near))
    assert tied.is_lossless
    assert (
        "x, prompt 1 parts at new token 5: margin 0.2000, two plain ways differ by 0.1000, a near tie."
        in tied.report()
    )
    assert not verdict_of(DraftedRun("x", 0, 3, 0.01, 4, near), is_exact=True).is_lossless
    assert not verdict_of(DraftedRun("x", 0, 3, 0.01, 4, far)).is_lossless
    assert not verdict_of(DraftedRun("x", 0, 3, 0.01, 4)).is_lossless  # a text that ends too early is no tie
    assert not verdict_of(DraftedRun("x", 0, 3, 0.11)).is_lossless
    assert not verdict_of(DraftedRun("x", 0, 3, float("nan"))).is_lossless
    assert not verdict_of(DraftedRun("x", 0, 3, 0.0), rejections=(1, 0)).is_lossless
    assert verdict_of(DraftedRun("x", 0, 3, 0.0), rejections=(0, 1)).unasked == ["at draft 1"]


def test_a_tie_is_measured_at_its_token():
    path = PlainPath(trained_target(), inputs()[0], 8)
    tie = path.tie(3)
    length = path.prompt_length + 3
    with torch.no_grad():
        best = trained_target()(path.ids[:, :length]).logits[0, -1].topk(2)
    assert int(best.indices[0]) == int(path.ids[0, length])
    assert tie.margin == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-3)
    assert 0 < tie.spread < 1e-3


def test_caches_are_compared_tensor_by_tensor():
    with torch.no_grad():
        cache = getattr(trained_target()(**inputs()[0], use_cache=True), CACHE_NAME)
    reference = snapshot(cache)
    kinds = {name.split(", ")[1].split(" ")[0] for name in reference}
    assert kinds == {"recurrent_states", "conv_states", "keys", "values"}
    assert cache_error(cache, reference) == 0
    for name in reference:
        changed = {**reference, name: reference[name] * 1.01}
        assert cache_error(cache, changed) == pytest.approx(0.01 / 1.01, rel=1e-2)
    assert cache_error(cache, {**reference, "more": torch.zeros(1)}) == float("inf")
    name = next(name for name in reference if "keys" in name)
    assert cache_error(cache, {**reference, name: reference[name][..., 1:, :]}) == float("inf")
    assert cache_error(cache, {**reference, name: reference[name] * torch.nan}) == float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "at least one is needed"),
        ({"prompts": [{"input_ids": torch.ones(2, 3).long()}]}, "`input_ids` of one sequence"),
        ({"prompts": [{"attention_mask": torch.ones(1, 3)}]}, "`input_ids` of one sequence"),
        (
            {"prompts": [{"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.tensor([[0, 1]])}]},
            "without padding",
        ),
        ({"block_size": 0}, "`block_size` must be 1 to 31, got 0"),
        ({"block_size": 32}, "`block_size` must be 1 to 31, got 32"),
        ({"max_new_tokens": 17}, "`max_new_tokens` must be at least 18, two blocks of 8 drafts, got 17"),
    ],
)
def test_wrong_arguments(options, message, monkeypatch):
    monkeypatch.setattr(trained_target(), "generate", lambda **kwargs: pytest.fail("something was decoded"))
    given = {"prompts": inputs(), **options}
    with pytest.raises(ValueError, match=message):
        verify_target(trained_target(), given.pop("prompts"), **given)
    with pytest.raises(TypeError, match="'x' is a int and no drafter"):
        verify_target(trained_target(), inputs(), {"x": 1})


def test_prompts_are_those_of_the_target(tmp_path):
    settings = verify_command.VerifySettings
    assert settings().read_prompts()[0].source.startswith("arrow")
    other = settings(target=ready_hf.tiny_target_path())
    assert other.read_prompts() == [Prompt(text) for text in verify_command.BUILT_IN[:2]]
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "mine"}\n')
    assert settings(prompts_file=path).read_prompts() == [Prompt("mine")]


def test_the_command_on_the_shipped_models(tmp_path, capsys):
    arguments = ["verify", "--prompts", "1", "--block-size", "4", "--max-new-tokens", "12"]
    assert main([*arguments, "--json", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    assert "LOSSLESS in float32: 8 drafted texts" in out
    assert "NOT" not in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["lossless"] is True
    assert {run["drafter"] for run in found["runs"]} >= {"DSpark", "ReaDy", "all right"}


def test_what_cannot_be_known_is_exit_code_2(monkeypatch, capsys):
    class OneRight(ForcedDrafter):
        def __init__(self, reference, block_size, num_right, vocab_size):
            super().__init__(reference, block_size, min(num_right, 1), vocab_size)

    monkeypatch.setattr("ready_hf.verify_target.ForcedDrafter", OneRight)
    monkeypatch.setattr(verify_command, "BUILT_IN", (TASK,))
    arguments = ["verify", "--target", ready_hf.tiny_target_path(), "--block-size", "2", "--max-new-tokens", "8"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert "no block was rejected nowhere" in err
    assert out.splitlines()[2].startswith("NOT DECIDED in float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "20"], "--max-new-tokens must be at least 42 for --block-size 20: two whole blocks, got 32"),
        (["--max-new-tokens", "3"], "--max-new-tokens must be at least 4, got 3"),
        (["--block-size", "40"], "--block-size must be 1 to 31, got 40"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--target", "./none"], "neither a folder nor"),
        (["--prompts-file", "none.jsonl"], "none.jsonl does not exist"),
        (["--json", "none/a.json"], "--json none/a.json cannot be written"),
        (["--drafter", "TINY"], "must be a ReaDy drafter"),
    ],
)
def test_a_wrong_argument_is_one_line_and_loads_nothing(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(verify_command, "load_target", lambda settings: pytest.fail("a model was loaded"))
    arguments = [argument.replace("TINY", ready_hf.tiny_target_path()) for argument in arguments]
    assert main(["verify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_too_few_tokens_for_the_blocks_is_one_line(capsys):
    arguments = ["verify", "--target", ready_hf.tiny_target_path(), "--max-new-tokens", "4"]
    assert main(arguments) == 2
    assert "`max_new_tokens` must be at least 18" in capsys.readouterr().err
