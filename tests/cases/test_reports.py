"""Cases C34, C65, C66, C89, C90 and C94: what a report, a card and a training on hardly any text say."""

import datetime
import json
import logging
import re

import pytest
import torch
import transformers
from huggingface_hub import EvalResult
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf import hub
from ready_hf.cli import main
from ready_hf.demo_prompts import Prompt, UsageError
from ready_hf.evaluation import decode, evaluate
from ready_hf.evaluation_command import thinking_prompts
from ready_hf.intervals import MACRO
from ready_hf.train_command import FEW_ROWS
from support import DEVICES, drafter_for, trained_target, trained_tokenizer


TEXTS = [f"def function_{i}(value):\n    return value + {i}\n" * 3 for i in range(20)]


def small_drafter(**options):
    """The shipped DSpark drafter."""
    return AutoModel.from_pretrained(ready_hf.small_drafter_path("dspark"), dtype=torch.float32, **options).eval()


def small_target(device="cpu", dtype=torch.float32):
    """The shipped target and its tokenizer."""
    path = ready_hf.small_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)
    return target, AutoTokenizer.from_pretrained(path)


def table(report, title):
    """The first table below a heading, as rows of cells."""
    lines = report.split(f"## {title}\n")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize(
    ("device", "dtype", "num_prompts"),
    [("cpu", torch.float32, 2), pytest.param("cuda", torch.bfloat16, 50, marks=pytest.mark.gpu)],
)
def test_c65_accepted_length_is_what_decoding_did(device, dtype, num_prompts):
    """Counted from outside, by the forwards of the target, of texts that a drafter and plain decoding wrote."""
    target, tokenizer = small_target(device, dtype)
    drafter = small_drafter().to(device, dtype)
    texts = ["def main(", "class Reader:", *(f"def compute_{i}(values, {i}):\n" for i in range(num_prompts - 2))]
    options = {"max_new_tokens": 24, "temperatures": (0,), "resamples": 50}
    found = evaluate(target, tokenizer, {"dspark": drafter}, [Prompt(text) for text in texts], **options)
    forwards, tokens = [], []

    def count(*_):
        forwards[-1] += 1

    for text in texts:
        inputs = tokenizer(text, return_tensors="pt").to(device)
        forwards.append(-1)  # the first one is the prefill's, and so is its token
        handle = target.model.register_forward_hook(count)
        output = target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=24)
        handle.remove()
        tokens.append(output.shape[1] - inputs["input_ids"].shape[1] - 1)
    kept = found.prompts(0)
    assert len(kept) >= min(num_prompts, 10)
    expected = sum(tokens[i] for i in kept) / sum(forwards[i] for i in kept)
    print(f"\nC65 on {device}: {expected:.3f} tokens a forward of {len(kept)} texts")
    assert expected > 1.2
    assert found.accepted_length(0, "dspark")[MACRO].value == pytest.approx(expected)


def test_c66_a_confidence_cut_and_what_it_costs_are_in_the_report():
    target, tokenizer = small_target()
    drafters = {"whole": small_drafter(), "cut": small_drafter(confidence_threshold=0.75)}
    prompts = [Prompt(text) for text in ("def main(", "import os\n\nclass Reader:", "for name in sorted(")]
    found = evaluate(target, tokenizer, drafters, prompts, max_new_tokens=16, temperatures=(0,), resamples=50)
    report, figures = found.to_markdown(), found.to_dict()
    assert "confidence cut of whole 0.0, confidence cut of cut 0.75" in report
    assert figures["setting"]["confidence cut of cut"] == 0.75
    assert found.prompts(0)
    head, _, *rows = table(report, "Greedy")
    assert head[:5] == ["", "tokens per forward", "speed", "tokens/s", "drafts per forward"]
    per_forward = {}
    for row, cells in zip(found.drafters, rows, strict=True):
        log = [entry for text in found.of(0, row) for entry in text.log]
        drafts, tokens = sum(e.num_drafts for e in log), sum(e.tokens for e in log)
        mine = figures["figures"]["greedy"][row]
        assert (mine["drafts"], mine["forwards"]) == (drafts, len(log))
        assert mine["accepted_length"][MACRO]["value"] == pytest.approx(tokens / len(log))
        assert sum(position["drafted"] for position in mine["positions"]) == drafts
        assert sum(position["accepted"] for position in mine["positions"]) == sum(len(e.accepted) for e in log)
        assert cells[1].startswith(f"{tokens / len(log):.2f}")
        assert cells[4] == f"{drafts / len(log):.2f}"
        per_forward[row] = drafts / len(log)
    assert per_forward["cut"] < per_forward["whole"]
    assert "acceptance by position" in report


@pytest.mark.parametrize("device", DEVICES)
def test_c89_every_temperature_has_figures_of_its_own(device):
    """The drafter that ships at three of them: a section and figures for each, and decoding as it says."""
    target, tokenizer = small_target(device)
    prompts = [Prompt(text) for text in ("def main(", "import os\n\nclass Reader:")]
    options = {"max_new_tokens": 16, "temperatures": (0, 0.7, 1.0), "resamples": 50}
    found = evaluate(target, tokenizer, {"dspark": small_drafter().to(device)}, prompts, **options)
    report, figures = found.to_markdown(), found.to_dict()["figures"]
    names = ["greedy", "temperature 0.7", "temperature 1"]
    assert list(figures) == names
    places = [report.index(f"## {name.capitalize()}\n") for name in names]
    assert places == sorted(places)
    lengths = [figures[name]["dspark"]["accepted_length"][MACRO]["value"] for name in names]
    print(f"\nC89 on {device}: accepted lengths {lengths} at temperatures 0, 0.7 and 1")
    assert len(set(lengths)) == 3
    inputs = tokenizer("def main(", return_tensors="pt").to(device)
    tokens = [decode(target, inputs, None, temperature, 5, 16).tokens for temperature in (0.7, 1.0)]
    torch.manual_seed(5)
    expected = target.generate(**inputs, do_sample=True, temperature=0.7, top_k=0, max_new_tokens=16)
    assert tokens[0] == expected[0, inputs["input_ids"].shape[1] :].tolist() != tokens[1]


def test_c89_temperatures_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def main("}\n')
    out = tmp_path / "found.json"
    arguments = ["eval", "--prompts-file", str(path), "--max-new-tokens", "6", "--json", str(out), "--resamples", "10"]
    assert main([*arguments, "--temperature", "0.7", "--temperature", "0"]) == 0
    assert list(json.loads(out.read_text())["figures"]) == ["greedy", "temperature 0.7"]
    assert "Temperature 0.7" in capsys.readouterr().out
    assert main(arguments) == 0  # nobody has asked for greedy decoding alone
    assert list(json.loads(out.read_text())["figures"]) == ["greedy", "temperature 1"]


def test_c90_a_card_says_what_lossless_means_and_where_numbers_come_from():
    drafter = drafter_for(trained_target()).to(torch.bfloat16)
    result = EvalResult("text-generation", "a/b", "prompts", "accepted_length", 2.5)
    fields = {"base_model": "someone/target", "eval_results": [result]}
    measured = "NVIDIA H200, bfloat16, 20 prompts, 2026-11-30"
    told = hub.drafter_card(drafter, "someone/drafter", measured=measured, **fields).text
    untold = hub.drafter_card(drafter, "someone/drafter", **fields).text
    bare = hub.drafter_card(drafter, "someone/drafter", base_model="someone/target").text
    for text in (told, untold, bare):
        assert "in greedy decoding the same tokens, up to\nfloating-point ties" in text
        assert "(bfloat16)" in text
        assert not any(word in text for word in ("bit-exact", "guarantee", "identical"))
    assert f"measured as follows: {measured}" in told
    warning = "Nobody has told how the numbers on this card were measured (hardware, dtype, prompts, date)"
    assert [warning in text for text in (told, untold, bare)] == [False, True, False]


def test_c94_training_on_20_samples_warns_and_its_evaluation_is_honest(tmp_path, capsys, caplog):
    pytest.importorskip("accelerate")
    data, out = tmp_path / "data.jsonl", tmp_path / "drafter"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options = ["--target", ready_hf.tiny_target_path(), "--data", str(data), "--output-dir", str(out), "--as-written"]
    options += ["--max-length", "48", "--held-out", "4", "--no-reader", "--block-size", "4"]
    options += ["--max_steps", "3", "--save_strategy", "no", "--disable_tqdm", "True", "--num_anchors", "4"]
    with caplog.at_level(logging.WARNING, "ready_hf"):
        assert main(["train", *options]) == 0
    rows = int(capsys.readouterr().out.split(": ")[-2].split(" rows,")[0].split()[-1])
    assert 16 <= rows < FEW_ROWS
    assert f"ready_hf: {rows} rows are few to learn from, so expect no speedup" in caplog.text

    drafter = AutoModel.from_pretrained(out).eval()
    prompts = [Prompt(text[:40]) for text in TEXTS[:3]]
    found = evaluate(
        trained_target(),
        trained_tokenizer(),
        {"new": drafter},
        prompts,
        max_new_tokens=12,
        temperatures=(0,),
        resamples=50,
    )
    assert found.is_identical
    texts, plain = found.of(0, "new"), found.of(0, "plain")
    assert texts
    speed = found.speed(0, "new")[MACRO].value
    ours, theirs = (sum(t.num_tokens for t in some) / sum(t.seconds for t in some) for some in (texts, plain))
    assert speed == pytest.approx(ours / theirs)
    assert found.accepted_length(0, "new")[MACRO].value < 1.5
    assert f"| new | {found.accepted_length(0, 'new')[MACRO].text()} | {found.speed(0, 'new')[MACRO].text()} |" in (
        found.to_markdown()
    )
    setting = found.setting
    assert setting["date"] in (datetime.date.today().isoformat(), str(datetime.date.today() - datetime.timedelta(1)))
    assert {"hardware", "dtype", "prompts", "torch"} <= set(setting)
    assert "threads" in setting["hardware"]


THINKING = (
    "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking %}# think\n{% endif %}"
)
FIXED = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"


def chat_target(folder, template):
    """The shipped target with a chat template."""
    target, tokenizer = small_target()
    tokenizer.chat_template = template
    target.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def turns(tmp_path):
    """Two conversations and a prompt that is none."""
    path = tmp_path / "chat.jsonl"
    rows = [{"turns": ["Read a file"]}, {"turns": ["Sort the names"]}, {"prompt": "def main(", "task": "code"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_c34_both_modes_of_thinking_side_by_side(device, tmp_path, turns, capsys):
    """Each mode of a conversation is a task of its own, and where a drafter is slower than plain decoding is said."""
    folder = chat_target(tmp_path / "target", THINKING)
    options = ["--target", str(folder), "--drafter", ready_hf.small_drafter_path("dspark"), "--temperature", "0"]
    options += ["--prompts-file", str(turns), "--max-new-tokens", "10", "--resamples", "50", "--device", device]
    assert main(["eval", *options, "--thinking", "both", "--json", str(tmp_path / "both.json")]) == 0
    report, found = capsys.readouterr().out, json.loads((tmp_path / "both.json").read_text())
    assert found["setting"]["device"].startswith(device)
    tasks = {"chat, thinking", "chat, no thinking", "code"}
    figures = found["figures"]["greedy"]["DSpark"]
    assert tasks | {MACRO} == set(figures["accepted_length"]) == set(figures["speed"])
    assert [text["task"] for text in found["texts"] if text["row"] == "plain"].count("chat, thinking") == 2
    rows = {cells[0] for cells in table(report, "Greedy: speed by task")}
    assert rows >= tasks
    slower = [line for line in report.splitlines() if line.startswith("SLOWER than plain decoding")]
    for task in tasks:
        speed = figures["speed"][task]["value"]
        assert (f"DSpark on {task} ({speed:.2f})" in "".join(slower)) is (speed < 1)

    assert main(["eval", *options, "--thinking", "off", "--json", str(tmp_path / "off.json")]) == 0
    written = json.loads((tmp_path / "off.json").read_text())
    assert (found["setting"]["thinking"], written["setting"]["thinking"]) == ("both", "off")
    assert "thinking off" in capsys.readouterr().out
    off = written["figures"]["greedy"]["DSpark"]["accepted_length"]
    assert set(off) == {"chat", "code", MACRO}
    both = [figures["accepted_length"][f"chat, {mode}"]["value"] for mode in ("thinking", "no thinking")]
    assert off["chat"]["value"] == both[1] != both[0]
    speeds = ", ".join(f"{task} {figures['speed'][task]['value']:.2f}" for task in sorted(tasks))
    with capsys.disabled():  # what the command wrote is read above
        print(f"\nC34 on {device}: accepted length thinking {both[0]:.2f}, not {both[1]:.2f}; speed {speeds}")


def test_c34_a_mode_that_is_slower_is_named():
    """Times made up: one task twice as slow, one as fast again, one without drafts that help."""
    from ready_hf.evaluation_result import Evaluation, Text
    from ready_hf.statistics import Round

    seconds = {"thinking": 2.0, "no thinking": 0.5, "code": 1.0}
    texts = []
    for index, (task, own) in enumerate(seconds.items()):
        texts.append(Text(index, task, 0, "plain", 10, 1.0))
        texts.append(Text(index, task, 0, "ReaDy", 10, own, log=(Round(5, 4, 1, [1, 1], tokens=3),)))
    found = Evaluation(tuple(texts), ("plain", "ReaDy"), (), resamples=50)
    assert "SLOWER than plain decoding: ReaDy on thinking (0.50)." in found.to_markdown()
    fast = [text for text in texts if text.task != "thinking"]
    assert "SLOWER" not in Evaluation(tuple(fast), ("plain", "ReaDy"), (), resamples=50).to_markdown()


def test_c34_a_tokenizer_that_is_not_fast():
    """Where tokens stand in the text does not matter here, as it does for training."""
    tokenizer = transformers.ByT5Tokenizer(chat_template=THINKING)
    assert not tokenizer.is_fast
    prompts = thinking_prompts([Prompt("hi", is_turn=True, task="chat")], "both", tokenizer)
    texts = [tokenizer.decode(prompt.encode(tokenizer)["input_ids"][0]) for prompt in prompts]
    assert ["# think" in text for text in texts] == [True, False]


def test_c34_a_mode_does_not_take_the_name_of_another_task():
    tokenizer = transformers.ByT5Tokenizer(chat_template=THINKING)
    prompts = [Prompt("hi", is_turn=True, task="chat"), Prompt("def", task="chat, thinking")]
    with pytest.raises(UsageError, match="'chat, thinking' is the name of another task"):
        thinking_prompts(prompts, "both", tokenizer)
    assert [prompt.task for prompt in thinking_prompts(prompts, "on", tokenizer)] == ["chat", "chat, thinking"]


@pytest.mark.parametrize(
    ("template", "arguments", "message"),
    [
        (FIXED, ["--thinking", "both"], "--thinking: .*the chat template does not read `enable_thinking`"),
        (None, ["--thinking", "on"], "--thinking: .*no chat template"),
        (
            "{{ raise_exception('give a system prompt') }}",
            [],
            "the target's chat template fails for the turn 'Read a file': give a system prompt",
        ),
        ("{{ messages | no_filter }}", [], "the target's chat template fails for the turn 'Read a file': No filter"),
        ("{% if enable_thinking %}x{% endif %}", ["--thinking", "off"], "make no token of the prompt 'Read a file'"),
        (THINKING, ["--thinking", "mixed"], "--thinking must be one of on, off, both, got 'mixed'"),
        (THINKING, ["--thinking", "on", "--prompts-file", "CODE"], "--thinking is for turns of a conversation"),
    ],
)
def test_c34_modes_that_cannot_be_told_apart_are_refused(template, arguments, message, tmp_path, turns, capsys):
    folder = chat_target(tmp_path / "target", template)
    code = tmp_path / "code.jsonl"
    code.write_text('{"prompt": "def main("}\n')
    arguments = [str(code) if argument == "CODE" else argument for argument in arguments]
    given = [] if "--prompts-file" in arguments else ["--prompts-file", str(turns)]
    options = ["--target", str(folder), "--drafter", ready_hf.small_drafter_path("dspark")]
    capsys.readouterr()  # of saving the target
    assert main(["eval", *options, *given, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err), err
    assert err.count("\n") == 1
