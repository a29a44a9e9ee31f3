"""The demo: its figures are those of the forwards that ran, prompts are dropped by plain text alone, and a drafter
that changes a token cannot hide."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import ready_hf
from ready_hf import demo, shipped
from ready_hf.cli import main
from ready_hf.demo_prompts import Prompt, UsageError, read_prompts, reason_to_drop
from ready_hf.demo_settings import Settings
from support import counting_forwards, trained_target, trained_tokenizer


CODES = (
    "def area(width, height):\n    total = width * height\n    return total",
    "def mean(values):\n    total = sum(values)\n    return total / len(values)",
)
EDITS = [Prompt(f"<file>\n{code}\n</file>\n# Rename total to size\n<edited>\n", "made-up 1") for code in CODES]


@pytest.fixture(scope="module")
def drafters():
    """Untrained drafters for the trained fixture, by the names of their rows."""
    found = {}
    for name, reader in (("DSpark", False), ("ReaDy", True)):
        torch.manual_seed(0)
        config = ready_hf.ReadyDrafterConfig.for_target(
            trained_target(), mask_token_id=1, reader=reader, num_hidden_layers=1, intermediate_size=64
        )
        found[name] = ready_hf.ReadyDrafterModel(config).eval()
    return found


@pytest.fixture(scope="module")
def folder(drafters, tmp_path_factory):
    """The drafters, and prompts in a file, as a user would have them."""
    path = tmp_path_factory.mktemp("own")
    for name, model in drafters.items():
        model.save_pretrained(path / name)
    rows = [{"prompt": prompt.text, "package": "made-up", "version": "1"} for prompt in EDITS]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own(folder, *options):
    """Arguments of a short run on the trained fixture."""
    paths = ["--target", ready_hf.tiny_target_path(), "--drafter", str(folder / "DSpark")]
    paths += ["--drafter", str(folder / "ReaDy"), "--prompts-file", str(folder / "prompts.jsonl")]
    return ["demo", *paths, "--max-new-tokens", "12", *options]


def test_the_figures_are_those_of_the_forwards_that_ran(drafters):
    target, lookup = trained_target(), ready_hf.PromptLookupDrafter(num_tokens=10)
    settings = Settings(prompts=2, max_new_tokens=24)
    with counting_forwards(target.get_decoder()) as lengths:
        found = demo.measure(target, trained_tokenizer(), {"prompt lookup": lookup, **drafters}, EDITS, settings)
    assert list(found.runs) == ["temperature 1", "greedy"]
    runs = [run for table in found.runs.values() for run in table]
    assert [run.name for run in found.runs["greedy"]] == ["plain", "prompt lookup", "DSpark", "ReaDy"]
    for run in runs:
        assert run.texts == 2
        expected = run.tokens if run.drafter is None else run.stats.rounds + run.texts
        assert run.forwards == expected  # with the prefills
        assert run.stats.new_tokens == (0 if run.drafter is None else run.tokens)
        row = run.row(runs[0], "greedy", True)
        assert row[2:4] == [f"{run.tokens / run.forwards:.2f}", f"{run.tokens / run.seconds:.0f}"]
    # every forward is in a row, but for the warm-up: 8 texts of 12 tokens at most
    assert 0 < len(lengths) - sum(run.forwards for run in runs) <= 8 * 12
    assert found.is_identical
    greedy_plain, greedy_lookup = found.runs["greedy"][:2]
    assert greedy_plain.forwards / greedy_lookup.forwards > 1.5
    assert greedy_lookup.tokens == greedy_plain.tokens


def test_sampled_texts_are_the_same_in_every_run(drafters):
    settings, drafters = Settings(prompts=1, max_new_tokens=12, temperature=1), {"ReaDy": drafters["ReaDy"]}
    first, second = (
        demo.measure(trained_target(), trained_tokenizer(), drafters, EDITS, settings).runs["temperature 1"]
        for _ in range(2)
    )
    assert [(run.tokens, run.forwards) for run in first] == [(run.tokens, run.forwards) for run in second]


def test_the_number_of_prompts_follows_the_time(monkeypatch):
    settings = Settings(max_new_tokens=4, temperature=0)
    found = demo.measure(trained_target(), trained_tokenizer(), {}, EDITS, settings)
    assert len(found.kept) == 2
    monkeypatch.setattr(demo, "BUDGET", 1e-6)
    found = demo.measure(trained_target(), trained_tokenizer(), {}, EDITS, settings)
    assert len(found.kept) == 1
    assert "1 measured (as many as fit" in "\n".join(demo.report(found, settings))


def test_no_prompt_is_tried_after_the_deadline_unless_none_is_kept(monkeypatch):
    dropped, plain = Counter(), demo.Run("plain")
    reasons = iter(["short", None])
    monkeypatch.setattr(demo, "reason_to_drop", lambda *args: next(reasons))
    prompts = [EDITS[0], EDITS[1], EDITS[0]]
    kept = list(demo.kept_prompts(trained_target(), trained_tokenizer(), prompts, plain, 2, dropped, deadline=0.0))
    assert [index for index, *_ in kept] == [1]
    assert dropped == {"short": 1}


def test_prompts_are_dropped_by_plain_text_alone():
    target, dropped, plain = trained_target(), Counter(), demo.Run("plain")
    prompts = [EDITS[0], Prompt("aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaa aaaa"), EDITS[1]]
    kept = list(demo.kept_prompts(target, trained_tokenizer(), prompts, plain, 64, dropped))
    assert [index for index, *_ in kept] == [0, 2]
    assert dropped == {"loop": 1}
    assert plain.texts == 2
    for _, prompt, inputs, text in kept:
        assert prompt in prompts
        expected = target.generate(**inputs, max_new_tokens=64, do_sample=False)
        assert torch.equal(text, expected[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (list(range(96)), None),
        (list(range(23)), "short"),
        (list(range(90)) + [1, 1, 1], "loop"),
        (list(range(90)) + [1, 1], None),
        (list(range(60)) + [1, 2, 3] * 3, "loop"),
        (list(range(60)) + [1, 2, 3] * 2, None),
        (list(range(48)) + list(range(100, 116)) * 3, "loop"),  # three times is just half of the text
        (list(range(64)) + list(range(100, 116)) * 2, None),
        (list(range(62)) + list(range(100, 117)) * 2, "loop"),  # three times would be more than half
        (list(range(16)) + list(range(100, 140)) * 2, "loop"),
        (list(range(30)) + list(range(100, 141)) * 2, None),  # a cycle of 41
        ([1, 2, 3, 4] * 10 + list(range(50, 70)), "repetitive"),
        ([1, 2, 3, 4] * 3 + list(range(50, 70)), None),
    ],
)
def test_reason_to_drop(tokens, reason):
    assert reason_to_drop(tokens) == reason


def test_the_shortest_text_can_be_chosen():
    assert reason_to_drop([1, 2, 3, 4, 5], shortest=5) is None


def test_prompts_are_read_from_both_forms(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a = 1"}\n\n{"turns": ["Hello", "And?"], "package": "x", "version": "2"}\n')
    assert read_prompts(path) == [Prompt("a = 1"), Prompt("Hello", "x 2", is_turn=True)]


def test_a_turn_goes_through_the_chat_template():
    class Templated:
        chat_template = "yes"

        def apply_chat_template(self, message, **options):
            assert options["add_generation_prompt"]
            return trained_tokenizer()("<" + message[0]["content"] + ">", return_tensors="pt")

        def __call__(self, text, return_tensors):
            return trained_tokenizer()(text, return_tensors=return_tensors)

    decode = trained_tokenizer().decode
    assert decode(Prompt("hi", is_turn=True).encode(Templated())["input_ids"][0]) == "<hi>"
    assert decode(Prompt("hi").encode(Templated())["input_ids"][0]) == "hi"
    assert decode(Prompt("hi", is_turn=True).encode(trained_tokenizer())["input_ids"][0]) == "hi"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("prompt", "line 2 is not JSON"),
        ('["a"]', "line 2 must be"),
        ('{"text": "a"}', "line 2 must be"),
        ('{"prompt": ""}', "line 2: a prompt must be"),
        ('{"prompt": 3}', "line 2: a prompt must be"),
        ('{"turns": []}', "line 2: a prompt must be"),
        ('{"turns": "Hello"}', "line 2: a prompt must be"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(line, message, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a = 1"}\n' + line + "\n")
    with pytest.raises(UsageError, match=message):
        read_prompts(path)


def test_two_tables_plot_and_details(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the plot needs the extra `plot`")
    plot = tmp_path / "acceptance.png"
    assert main(own(folder, "--prompts", "1", "--details", "--plot", str(plot))) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert out.index("Temperature 1: 1 text ") < out.index("Greedy: 1 text ")
    rows = [line for line in out.splitlines() if line.startswith(("plain ", "prompt lookup ", "DSpark ", "ReaDy "))]
    assert [row.split()[-4] for row in rows] == ["n/a"] * 4 + ["yes"] * 4
    assert rows[0].split()[-3] == rows[4].split()[-3] == "1.00"
    positions = out.split("position  DSpark")[1].split("A round of")[0]
    assert [line.split()[0] for line in positions.splitlines()[1:] if line] == [str(k) for k in range(1, 9)]
    assert "made-up 1" in out
    assert "A round of ReaDy" in out
    shares = [int(line.split()[-1].rstrip("%")) for line in out.split("ms per round")[1].splitlines()[1:5]]
    assert 97 <= sum(shares) <= 103
    assert str(plot) in out


def test_a_single_table(folder, capsys):
    assert main(own(folder, "--prompts", "1", "--temperature", "0")) == 0
    out = capsys.readouterr().out
    assert "Greedy:" in out
    assert "Temperature 1" not in out


def lossy(target):
    """A `generate` that changes the last token of every drafted text."""
    stock = target.generate

    def generate(*args, assistant_model=None, **options):
        sequences = stock(*args, assistant_model=assistant_model, **options)
        if assistant_model is not None:
            sequences[0, -1] = (sequences[0, -1] + 1) % 100
        return sequences

    return generate


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_a_drafter_that_changes_a_token_is_found(dtype, code, folder, monkeypatch, capsys):
    load = demo.load_target

    def broken(settings):
        target, tokenizer = load(settings)
        target.generate = lossy(target)
        return target, tokenizer

    monkeypatch.setattr(demo, "load_target", broken)
    assert main(own(folder, "--prompts", "1", "--temperature", "0", "--dtype", dtype)) == code
    out, err = capsys.readouterr()
    assert ("must not happen" in err) == (code == 1)
    assert ("NO (0 of 1)" if code else "0 of 1") in out
    plain = next(line for line in out.splitlines() if line.startswith("plain "))
    assert ("yes" if code else "1 of 1") in plain


def test_nothing_left_to_measure_is_said(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "reason_to_drop", lambda *args: "loop")
    assert main(own(folder, "--temperature", "0")) == 2
    assert "all 2 prompts were dropped (2 loop)" in capsys.readouterr().err


def test_threads_and_verbosity_are_put_back(folder, capsys):
    import transformers

    before = torch.get_num_threads(), transformers.logging.get_verbosity()
    assert main(own(folder, "--prompts", "1", "--temperature", "0", "--max-new-tokens", "2")) == 0
    assert (torch.get_num_threads(), transformers.logging.get_verbosity()) == before


def test_shipped_paths():
    assert Path(shipped.small_target_path()).name == "small_target"
    assert Path(shipped.small_drafter_path()).name == "small_ready"
    assert Path(shipped.small_drafter_path("dspark")).name == "small_dspark"
    with pytest.raises(ValueError, match="must be one of"):
        shipped.small_drafter_path("other")


def test_missing_models_are_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "ASSETS", tmp_path)
    assert main(["demo"]) == 2
    assert "missing from this installation" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_models_tell_the_story(capsys):
    assert main(["demo", "--prompts", "2", "--max-new-tokens", "48"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.split("Greedy:")[1].splitlines() if "yes" in line}
    assert {"plain", "prompt", "DSpark", "ReaDy"} <= set(rows)
    assert float(rows["DSpark"][2]) > 1.2  # tokens per target forward
    assert float(rows["ReaDy"][2]) > 1.2


def test_the_shipped_prompts_say_where_they_come_from():
    prompts = read_prompts(Path(shipped.small_target_path()) / "prompts.jsonl")
    assert len(prompts) >= 20
    assert all(prompt.source and not prompt.is_turn for prompt in prompts)


def test_lines_end_at_line_feeds_alone_and_a_byte_order_mark_is_skipped(tmp_path):
    """JSON allows the other separators of Unicode inside of a string."""
    text = "a\u2028b\x85c"
    (tmp_path / "a.jsonl").write_bytes(f'\ufeff{{"prompt": "{text}"}}\r\n\n{{"prompt": "d"}}'.encode())
    assert [prompt.text for prompt in read_prompts(tmp_path / "a.jsonl")] == [text, "d"]
