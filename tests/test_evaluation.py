"""An evaluation's figures are those of the texts that were decoded, and a drafter that changes a token cannot hide."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf import evaluation, evaluation_command
from ready_hf.cli import main
from ready_hf.demo_prompts import Prompt, UsageError, read_prompts
from ready_hf.evaluation import evaluate, is_looping
from ready_hf.evaluation_result import PLAIN, Evaluation, Position, Text, positions, survival
from ready_hf.intervals import MACRO
from ready_hf.output_files import write_outputs
from ready_hf.round_times import RoundTimes, measure_round_times
from ready_hf.statistics import Round
from support import counting_forwards, partly_right, plain_ids, tiny_target, trained_target, trained_tokenizer


NEW_TOKENS = 14


@functools.cache
def models():
    """The shipped target, its tokenizer and its drafters."""
    path = ready_hf.small_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    drafters = {
        name: AutoModel.from_pretrained(ready_hf.small_drafter_path(kind), dtype=torch.float32).eval()
        for name, kind in (("DSpark", "dspark"), ("ReaDy", "ready"))
    }
    return target, AutoTokenizer.from_pretrained(path), drafters


def prompts(*tasks):
    texts = read_prompts(Path(ready_hf.small_target_path()) / "prompts.jsonl")
    return [Prompt(text.text, task=task) for text, task in zip(texts, tasks, strict=False)]


@functools.cache
def real():
    """A short evaluation, and the number of target forwards that it ran."""
    target, tokenizer, drafters = models()
    with counting_forwards(target.get_decoder()) as lengths:
        found = evaluate(
            target,
            tokenizer,
            drafters,
            prompts("a", "a", "b"),
            max_new_tokens=NEW_TOKENS,
            context_edges=(130, 150),
            resamples=200,
        )
    return found, len(lengths)


def test_every_text_is_there_and_its_figures_are_those_of_the_forwards_that_ran():
    found, forwards = real()
    assert found.rows == (PLAIN, "DSpark", "ReaDy")
    assert len(found.texts) == 3 * 3 * 2
    counted = sum(1 + (text.num_tokens - 1 if text.row == PLAIN else len(text.log)) for text in found.texts)
    assert 0 < forwards - counted <= 6 * 12  # the warm-up
    for text in found.texts:
        assert text.seconds > 0
        assert 0 < text.num_tokens <= NEW_TOKENS
        if text.row != PLAIN:
            assert sum(entry.tokens for entry in text.log) == text.num_tokens - 1


def test_accepted_length_is_tokens_per_verify_forward():
    found, _ = real()
    for temperature in (0, 1):
        for row in found.drafters:
            texts = [text for text in found.texts if (text.row, text.temperature) == (row, temperature)]
            tasks = {}
            for task in ("a", "b"):
                mine = [text for text in texts if text.task == task]
                tasks[task] = sum(t.num_tokens - 1 for t in mine) / sum(len(t.log) for t in mine)
            lengths = found.accepted_length(temperature, row)
            assert {task: lengths[task].value for task in tasks} == pytest.approx(tasks)
            assert lengths[MACRO].value == pytest.approx(sum(tasks.values()) / 2)
            assert lengths["a"].low <= lengths["a"].value <= lengths["a"].high
            assert 1 < lengths[MACRO].value < 9
        assert found.accepted_length(temperature, PLAIN)[MACRO].value == 1


def test_real_drafters_are_lossless_and_their_positions_fall():
    found, _ = real()
    assert found.is_identical
    assert [found.identical(row) for row in found.drafters] == [(3, 3), (3, 3)]
    for row in found.drafters:
        shares = survival(found.positions(0, row))
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 0.4


def test_positions_of_all_contexts_add_up():
    found, _ = real()
    for row in found.drafters:
        whole = found.positions(0, row)
        parts = [found.positions(0, row, context) for context in range(3)]
        assert sum(bool(part) for part in parts) > 1
        for k, position in enumerate(whole):
            for name in ("drafted", "reached", "accepted"):
                added = sum(getattr(part[k], name) for part in parts if k < len(part))
                assert added == getattr(position, name)


def test_the_same_seed_samples_the_same_texts():
    found, _ = real()
    target, tokenizer, drafters = models()
    state = torch.get_rng_state()
    options = {"max_new_tokens": NEW_TOKENS, "temperatures": (1,), "context_edges": ()}
    again = evaluate(target, tokenizer, drafters, prompts("a"), **options)
    assert torch.equal(torch.get_rng_state(), state)
    for text in again.texts:
        (before,) = [t for t in found.texts if (t.prompt, t.row, t.temperature) == (0, text.row, 1)]
        assert (text.num_tokens, text.log) == (before.num_tokens, before.log)
    assert again.contexts == ["all"]


def test_every_text_has_a_seed_of_its_own_and_the_order_of_the_rows_changes(monkeypatch):
    calls = []

    def decode(target, inputs, drafter, temperature, seed, max_new_tokens):
        calls.append((drafter, temperature, seed))
        return evaluation.Decoded([1, 2, 3], 1.0)

    monkeypatch.setattr(evaluation, "decode", decode)
    target, tokenizer, drafters = models()
    evaluate(target, tokenizer, drafters, prompts("a", "a", "a"), temperatures=(1,), max_new_tokens=3)
    calls = calls[3:]  # after the warm-up
    assert len({seed for _, _, seed in calls}) == len(calls) == 9
    firsts = [calls[i][0] for i in (0, 3, 6)]
    assert firsts == [None, *drafters.values()]


def test_the_report_holds_the_figures_in_every_form():
    found, _ = real()
    text, page, figures = found.to_markdown(), found._repr_html_(), json.loads(found.to_json())
    value = found.accepted_length(0, "ReaDy")[MACRO]
    assert f"| ReaDy | {value.text()} |" in text
    assert f"<td>{value.text()}</td>" in page
    assert "DSpark identical; ReaDy identical" in text
    assert "## Temperature 1: acceptance by position" in text
    assert "| position | below 130 tokens | 130 to 149 tokens | 150 and more tokens |" in text
    mine = figures["figures"]["greedy"]["ReaDy"]
    assert mine["accepted_length"][MACRO]["value"] == value.value
    assert mine["positions"][0]["drafted"] == found.positions(0, "ReaDy")[0].drafted
    difference = found.difference(0, "ReaDy", "DSpark")[MACRO]
    assert mine["accepted_length_minus_DSpark"][MACRO]["value"] == difference.value
    lengths = [found.accepted_length(0, row)[MACRO].value for row in ("ReaDy", "DSpark")]
    assert difference.value == pytest.approx(lengths[0] - lengths[1])
    assert len(figures["texts"]) == len(found.texts)


def test_plots_have_a_panel_per_drafter(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    from matplotlib.figure import Figure

    from ready_hf.plots import plot_acceptance_by_context, save_evaluation

    found, _ = real()
    axes = plot_acceptance_by_context(found, "ReaDy", 0, Figure().subplots())
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    expected = {
        f"{name} tokens": [position.acceptance for position in found.positions(0, "ReaDy", i)]
        for i, name in enumerate(found.contexts)
    }
    assert lines == {name: shares for name, shares in expected.items() if shares}
    save_evaluation(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def entry(num_drafts, accepted, tokens=None, context=0):
    return Round(context, num_drafts, 1, [1] * accepted, accepted + 1 if tokens is None else tokens)


def test_positions_are_counted():
    # the third round ended with its second draft, the fourth was cut to one draft
    found = positions([entry(3, 1), entry(3, 3), entry(3, 2, tokens=2), entry(1, 1)])
    assert found == [Position(4, 4, 4), Position(3, 3, 2), Position(3, 1, 1)]
    assert found[2].acceptance == 1 / 3
    assert found[2].conditional == 1
    assert survival(found) == pytest.approx([1, 2 / 3, 2 / 3])
    assert survival(positions([entry(2, 0)])) == [0.0]  # draft 2 was never reached
    assert math.isnan(Position(1, 0, 0).conditional)


def made_up(loops=(), parted=None):
    """Two tasks with two prompts each: DSpark takes 2 tokens per forward, ReaDy 3; half the time of plain decoding."""
    texts = []
    for prompt in range(4):
        for row, tokens in ((PLAIN, 0), ("DSpark", 2), ("ReaDy", 3)):
            log = tuple(entry(4, tokens - 1, context=prompt * 100) for _ in range(6)) if tokens else ()
            texts.append(
                Text(
                    prompt=prompt,
                    task="ab"[prompt // 2],
                    temperature=0,
                    row=row,
                    num_tokens=6 * tokens + 1 if tokens else 13,
                    seconds=(1.0 if tokens else 2.0) * (6 * tokens + 1 if tokens else 13),
                    is_looping=(prompt, row) in loops,
                    first_difference=parted if row == "ReaDy" and prompt == 1 else None,
                    log=log,
                )
            )
    return Evaluation(tuple(texts), (PLAIN, "DSpark", "ReaDy"), (100, 200))


def test_hand_made_figures():
    found = made_up()
    assert found.accepted_length(0, "ReaDy")[MACRO].text() == "3.00 [3.00, 3.00]"
    assert found.difference(0, "ReaDy", "DSpark")["a"].text() == "1.00 [1.00, 1.00]"
    assert found.speed(0, "ReaDy")["b"].text() == "2.00 [2.00, 2.00]"
    assert found.contexts == ["below 100", "100 to 199", "200 and more"]
    assert [len(found.positions(0, "ReaDy", i)) and found.positions(0, "ReaDy", i)[0].drafted for i in range(3)] == [
        6,
        6,
        12,
    ]
    assert "IDENTICAL" not in found.to_markdown()
    with pytest.raises(ValueError, match="there is no row 'Eagle'; rows are 'plain', 'DSpark', 'ReaDy'"):
        found.speed(0, "Eagle")


def test_a_changed_token_is_reported():
    found = made_up(parted=5)
    assert not found.is_identical
    assert found.identical("ReaDy") == (3, 4)
    assert "DSpark identical; ReaDy DIFFERENT in 1 of 4" in found.to_markdown()


def test_looping_prompts_are_apart():
    found = made_up(loops={(0, "DSpark"), (3, PLAIN)})
    assert (found.prompts(0), found.prompts(0, looping=True)) == ([1, 2], [0, 3])
    assert [text.prompt for text in found.of(0, "ReaDy")] == [1, 2]
    assert found.positions(0, "ReaDy")[0].drafted == 12
    report = found.to_markdown()
    assert "2 prompts; 2 more with a looping text are left out" in report
    assert "Looping prompts, tokens per forward: DSpark 2.00; ReaDy 3.00." in report
    nothing = made_up(loops={(i, PLAIN) for i in range(4)})
    assert nothing.accepted_length(0, "ReaDy") == {}
    assert "No other prompt is left" in nothing.to_markdown()
    assert json.loads(nothing.to_json())["figures"]["greedy"]["ReaDy"]["tokens_per_second"] is None


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        (list(range(100)), False),
        ([7] * 32, True),
        ([7] * 31, False),
        ([1] + [7] * 31, False),
        (list(range(50)) + [1, 2, 3] * 11, True),
        (list(range(50)) + [1, 2, 3] * 10, False),  # 30 tokens
        (list(range(20)) * 4, True),
        (list(range(20)) * 3, False),
        (list(range(32)) * 4, True),
        (list(range(33)) * 4, False),  # a period of 33
        ([1, 2, 3, 4] * 20 + [5], False),  # it got out
    ],
)
def test_what_a_loop_is(tokens, loops):
    assert is_looping(tokens) is loops


def test_a_real_loop_is_found():
    loop = Prompt("aaaa " * 9)
    drafters = {"lookup": ready_hf.PromptLookupDrafter()}
    found = evaluate(trained_target(), trained_tokenizer(), drafters, [loop], max_new_tokens=48, temperatures=(0,))
    assert found.prompts(0, looping=True) == [0]
    assert found.accepted_length(0, "lookup", looping=True)["all"].value > 2


def test_the_log_of_a_call_adds_up_to_its_counts():
    reference = plain_ids("qwen3_5", 40, 12)
    with ready_hf.record_stats() as stats:
        for share in (0.4, 0.8):
            drafter = partly_right(reference, share, 4)
            tiny_target("qwen3_5").generate(
                reference[:, :12], assistant_model=drafter, max_new_tokens=40, do_sample=False
            )
    assert len(stats.log) == stats.rounds
    assert sum(item.tokens for item in stats.log) == stats.round_tokens
    for k in range(4):
        assert sum(item.num_drafts > k for item in stats.log) == stats.drafted_by_position[k]
        assert sum(len(item.accepted) > k for item in stats.log) == stats.accepted_by_position[k]
    # what the cache has seen: the prompt, then every token but the newest
    assert stats.log[0].context == 12
    for before, after in zip(stats.log, stats.log[1:], strict=False):
        assert after.context in (before.context + before.tokens, 12)


def test_round_times_are_those_of_the_block_lengths():
    target, tokenizer, drafters = models()
    inputs = prompts("a")[0].encode(tokenizer)
    with counting_forwards(target.get_decoder()) as lengths:
        found = measure_round_times(target, drafters["ReaDy"], inputs, [4, 1], max_new_tokens=10, repeats=1)
    assert {2, 5} <= set(lengths)
    assert max(lengths[1:]) == inputs["input_ids"].shape[1]
    assert 6 not in lengths
    assert found.num_drafts == (1, 4)
    assert found.plain > 0
    assert min(*found.draft, *found.verify, *found.other) > 0
    result = found.break_even([0.9, 0.8])
    assert [length.num_drafts for length in result.lengths] == [1]
    assert result.best.speed == pytest.approx(1.9 * found.plain / (found.draft[0] + found.verify[0] + found.other[0]))
    times = RoundTimes(2.0, (1, 2), (0.0, 1.0), (2.0, 2.0), (0.0, 0.0))
    assert times.break_even([1.0, 1.0]).best.num_drafts == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafters": {}}, "needs a drafter and a prompt, got 0 drafters"),
        ({"prompts": []}, "1 drafters and 0 prompts"),
        ({"prompts": [Prompt("a", task=MACRO)]}, "must not be called 'macro mean'"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
        ({"resamples": 0}, "`resamples` must be at least 1"),
        ({"temperatures": (0, -1)}, r"`temperatures` must be different numbers, 0 .* to 10, .* got \[0, -1\]"),
        ({"temperatures": (1e-39,)}, r"`temperatures` must be different numbers, 0 \(greedy\) or 0.001 to 10"),
        ({"temperatures": (float("nan"),)}, "`temperatures` must be different numbers"),
        ({"temperatures": (0.7, 0.7)}, "`temperatures` must be different numbers"),
        ({"temperatures": ()}, "`temperatures` must be .* at least one, got"),
        ({"context_edges": (5, 5)}, "`context_edges` must be rising"),
        ({"context_edges": (0,)}, "`context_edges` must be rising"),
        ({"drafters": {"plain": ready_hf.PromptLookupDrafter()}}, "must not be called 'plain'"),
    ],
)
def test_wrong_arguments(options, message):
    given = {"drafters": {"x": ready_hf.PromptLookupDrafter()}, "prompts": [Prompt("a")], **options}
    with pytest.raises(ValueError, match=message):
        evaluate(None, None, **given)  # before anything is decoded
    with pytest.raises(TypeError, match="'x' is a int and no drafter"):
        evaluate(None, None, {"x": 1}, [Prompt("a")])


def test_tasks_come_from_the_rows_or_the_file(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "task": "edit"}\n{"turns": ["b"], "category": "chat"}\n')
    (tmp_path / "two.jsonl").write_text('{"prompt": "c"}\n{"prompt": "d"}\n')
    paths = (tmp_path / "one.jsonl", tmp_path / "two.jsonl")
    settings = evaluation_command.EvaluationSettings(prompts_files=paths, prompts=2)
    assert [p.task for p in evaluation_command.task_prompts(settings)] == ["edit", "chat", "two", "two"]
    (tmp_path / "two.jsonl").write_text('{"prompt": "c", "task": 3}\n')
    with pytest.raises(UsageError, match="two.jsonl line 1: `task` .* must be a text, got int"):
        evaluation_command.task_prompts(settings)


def test_the_command_writes_its_report(tmp_path, capsys):
    rows = [{"prompt": prompt.text, "task": task} for prompt, task in zip(prompts("a", "b"), "ab", strict=True)]
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["eval", "--prompts-file", str(path), "--max-new-tokens", "4", "--temperature", "0", "--lookup"]
    arguments += ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md"), "--break-even"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "a.md").read_text() == out
    assert "DSpark identical; ReaDy identical; prompt lookup identical" in out
    assert "## Break-even of ReaDy, greedy" in out
    figures = json.loads((tmp_path / "a.json").read_text())
    assert {text["task"] for text in figures["texts"]} == {"a", "b"}
    assert set(figures["break_even"]) == {"DSpark", "ReaDy"}


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_the_command_fails_if_a_token_differs(dtype, code, tmp_path, capsys, monkeypatch):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": prompts("a")[0].text}) + "\n")
    decode = evaluation.decode

    def changed(target, inputs, drafter, *args, **options):
        found = decode(target, inputs, drafter, *args, **options)
        if drafter is not None:
            found.tokens[3] += 1
        return found

    monkeypatch.setattr(evaluation, "decode", changed)
    arguments = ["eval", "--prompts-file", str(path), "--max-new-tokens", "6", "--temperature", "0", "--dtype", dtype]
    assert main(arguments) == code
    report = capsys.readouterr().out
    assert "DSpark DIFFERENT in 1 of 1" in report
    hint = "In bfloat16 they may part at near ties: `ready-hf verify --dtype bfloat16` tells ties from faults."
    assert (hint in report) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context-edges", "5,x"], "--context-edges must be numbers of tokens"),
        (["--context-edges", "9,5"], "--context-edges: `context_edges` must be rising"),
        (["--resamples", "0"], "--resamples must be 1 to 100000, got 0"),
        (["--resamples", "2000000000"], "--resamples must be 1 to 100000, got 2000000000"),
        (["--seed", "99999999999999999999"], "--seed must be 0 to 2**62 - 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2"),
        (["--json", "x", "--markdown", "./x"], "--json and --markdown name the same file x"),
        (["--markdown", "/proc/x.md"], "--markdown /proc/x.md cannot be written"),
        (["--temperature", "1", "--break-even"], "--break-even is about greedy decoding"),
        (["--temperature", "-1"], "--temperature: `temperatures` must be different numbers, 0 (greedy) or"),
        (["--temperature", "1", "--temperature", "1"], "--temperature: `temperatures` must be different numbers"),
        (["--target", "TINY"], "there is no drafter to evaluate"),
        (["--json", "none/a.json"], "--json none/a.json cannot be written"),
        (["--prompts-file", "none.jsonl"], "none.jsonl does not exist"),
        (["--prompts-file", "a/x.jsonl", "--prompts-file", "b/x.jsonl"], "two files are called x.jsonl"),
    ],
)
def test_a_wrong_argument_is_one_line_and_loads_nothing(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.jsonl").write_text('{"prompt": "a = 1"}\n')
    monkeypatch.setattr(evaluation_command, "load_target", lambda settings: pytest.fail("a model was loaded"))
    arguments = [argument.replace("TINY", ready_hf.tiny_target_path()) for argument in arguments]
    assert main(["eval", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ready-hf: ")
    assert message in err
    assert err.count("\n") == 1


def test_files_of_one_name_may_hold_tasks(tmp_path):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(tmp_path / folder / "x.jsonl")
        paths[-1].write_text(json.dumps({"prompt": "a = 1", "task": folder}))
    settings = evaluation_command.EvaluationSettings(prompts_files=tuple(paths))
    assert [prompt.task for prompt in evaluation_command.task_prompts(settings)] == ["a", "b"]


def test_a_prompt_beyond_the_context_is_named(tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "a = 1"}) + "\n" + json.dumps({"prompt": "x = 12 + 7 * y\n" * 900}))
    for command in ("eval", "verify", "demo"):
        assert main([command, "--prompts-file", str(path), "--max-new-tokens", "20"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "ready-hf: prompt 2 has " in said
        assert "is more than the target's context of 4096" in said


def test_an_interrupt_leaves_what_was_done(monkeypatch, caplog):
    """In the middle of the third prompt."""
    target, tokenizer, drafters = models()
    decode, calls = evaluation.decode, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 1 + len(drafters) + 2 * (1 + len(drafters)) + 2:  # warm-up, two prompts, and one text
            raise KeyboardInterrupt
        return decode(*args, **options)

    monkeypatch.setattr(evaluation, "decode", interrupted)
    options = {"max_new_tokens": 4, "temperatures": (0,), "resamples": 10}
    found = evaluate(target, tokenizer, drafters, prompts("a", "a", "b"), **options)
    assert {text.prompt for text in found.texts} == {0, 1}
    assert len(found.texts) == 2 * (1 + len(drafters))
    assert "first 2 of 3 prompts" in caplog.text
    calls[:] = [1] * (2 * (1 + len(drafters)) + 1)
    with pytest.raises(KeyboardInterrupt):  # in the first prompt: nothing to report
        evaluate(target, tokenizer, drafters, prompts("a", "a", "b"), **options)


def test_one_file_that_fails_does_not_stop_the_others(tmp_path):
    def fails(path):
        raise OSError(28, "No space left on device")

    good = tmp_path / "good.md"
    writers = {
        "--json": (tmp_path / "x", fails),
        "--plot": (None, fails),
        "--markdown": (good, lambda p: p.write_text("x")),
    }
    with pytest.raises(UsageError, match="not everything could be written: --json .*: No space left"):
        write_outputs(writers)
    assert good.read_text() == "x"
