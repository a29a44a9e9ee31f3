"""The reader check replaces exactly what it says, finds a reader that matters, and is not fooled by one that does
not."""

import json
import math

import pytest
import torch

import ready_hf
from ready_hf import reader_check
from ready_hf.cli import main
from ready_hf.reader_check import (
    DECODING,
    OLD,
    OTHER,
    REAL,
    REPLACED,
    ZEROS,
    StatesDrafter,
    StatesSession,
    check_reader,
    paired_difference,
)
from ready_hf.target import committed_states, recurrent_layers
from support import trained_target, trained_tokenizer


TEXTS = (
    "def area(width, height):\n    total = width * height\n    return total",
    "def mean(values):\n    total = sum(values)\n    return total / len(values)",
    "class Total:\n    total = 0",
)


def prompts(number=3):
    texts = [f"<file>\n{text}\n</file>\n# Rename total to size\n<edited>\n" for text in TEXTS[:number]]
    return [dict(trained_tokenizer()(text, return_tensors="pt")) for text in texts]


def drafter(up_std=0.0, reader=True):
    """A random drafter; its reader changes nothing if `up_std` is 0."""
    torch.manual_seed(3)
    config = ready_hf.ReadyDrafterConfig.for_target(
        trained_target(), mask_token_id=1, reader=reader, num_hidden_layers=1, intermediate_size=64
    )
    model = ready_hf.ReadyDrafterModel(config).eval()
    if reader:
        torch.nn.init.normal_(model.reader.up_proj.weight, std=up_std)
    return model


class Recorder(StatesSession):
    """Writes down what the reader got, what was committed, and what was drafted."""

    log: list[dict] = []

    def states(self, context):
        given = super().states(context)
        real = committed_states(context.cache, self._state_layers)
        self.log.append({"given": given.clone(), "real": real.clone(), "kind": self.kind})
        return given

    def draft(self, context):
        tokens, logits = super().draft(context)
        self.log[-1]["drafts"] = tokens.tolist()
        return tokens, logits


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(Recorder, "log", [])
    monkeypatch.setattr(reader_check, "StatesSession", Recorder)
    return Recorder.log


def rounds(log, model, kind, inputs, other=None, new_tokens=8):
    """What `Recorder` wrote down in one greedy call."""
    log.clear()
    wrapped = StatesDrafter(model, kind, other)
    target = trained_target()
    sequences = target.generate(**inputs, assistant_model=wrapped, max_new_tokens=new_tokens, do_sample=False)
    assert torch.equal(sequences, target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False))
    assert len(log) > 3
    return list(log)


def test_real_states_are_those_of_the_prefix(log):
    inputs = prompts(1)[0]
    found = rounds(log, drafter(), REAL, inputs)
    assert all(torch.equal(entry["given"], entry["real"]) for entry in found)
    cache = getattr(trained_target()(**inputs, use_cache=True), ready_hf.target.CACHE_NAME)
    torch.testing.assert_close(found[0]["given"], committed_states(cache, recurrent_layers(trained_target())))


def test_zeros_are_zeros(log):
    assert all(
        not entry["given"].any() and entry["real"].any() for entry in rounds(log, drafter(), ZEROS, prompts(1)[0])
    )


def test_one_round_old_is_the_round_before(log):
    found = rounds(log, drafter(), OLD, prompts(1)[0])
    assert torch.equal(found[0]["given"], found[0]["real"])  # no round before the first
    for before, entry in zip(found, found[1:], strict=False):
        assert torch.equal(entry["given"], before["real"])
        assert not torch.equal(entry["given"], entry["real"])


def test_the_other_states_are_the_final_ones_of_the_next_prompt(log):
    check_reader(trained_target(), drafter(), prompts(2), max_new_tokens=6, resamples=10)
    # per way of decoding: two prompts real, zeros, other, old; every call has as many rounds as a real one has here
    greedy = log[: len(log) // 2]
    real = [entry for entry in greedy if entry["kind"] == REAL]
    other = [entry for entry in greedy if entry["kind"] == OTHER]
    changes = [i for i in range(1, len(other)) if not torch.equal(other[i]["given"], other[i - 1]["given"])]
    assert len(changes) == 1  # one prompt's rounds, then the other's
    last_of_first = len(real) - (len(other) - changes[0]) - 1
    assert torch.equal(other[0]["given"], real[-1]["real"])
    assert torch.equal(other[-1]["given"], real[last_of_first]["real"])


def test_a_reader_that_matters_changes_the_drafts(log):
    model, inputs = drafter(up_std=1.0), prompts(1)[0]
    drafts = {kind: [e["drafts"] for e in rounds(log, model, kind, inputs)][0] for kind in (REAL, ZEROS)}
    assert drafts[REAL] != drafts[ZEROS]


def test_a_reader_of_zeros_makes_no_difference_at_all():
    found = check_reader(trained_target(), drafter(), prompts(2), max_new_tokens=8, resamples=100)
    for name in DECODING:
        for kind in REPLACED:
            assert found.lengths[name][kind] == found.lengths[name][REAL]
            difference = found.differences[name][kind]
            assert (difference.mean, difference.low, difference.high) == (0.0, 0.0, 0.0)
    assert not found.helps
    assert found.verdict.startswith("the reader does not help yet")


class Reading(StatesSession):
    """Drafts the target's own next token if its reader gets the committed states, else another one."""

    def draft(self, context):
        given = self.states(context)
        right = torch.equal(given, committed_states(context.cache, self._state_layers))
        token = trained_target()(context.input_ids).logits[:, -1:].argmax(-1)
        return (token if right else (token + 1) % 512)[:, : context.num_drafts], None


def test_temperature_1_samples_from_the_model_as_it_is(monkeypatch):
    seen = []

    class Spy(StatesDrafter):
        def get_candidate_generator(self, target, input_ids, generation_config, logits_processor):
            seen.append((generation_config.do_sample, list(logits_processor)))
            return super().get_candidate_generator(target, input_ids, generation_config, logits_processor)

    model = Spy(drafter())
    for options in DECODING.values():
        trained_target().generate(**prompts(1)[0], assistant_model=model, max_new_tokens=2, **options)
    assert seen == [(False, []), (True, [])]


def test_a_reader_that_matters_is_found(monkeypatch):
    monkeypatch.setattr(reader_check, "StatesSession", Reading)
    model, state = drafter(), torch.get_rng_state()
    found = check_reader(trained_target(), model, prompts(2), max_new_tokens=8, repeats=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.helps
    assert found.verdict.startswith("the reader helps")
    greedy = found.lengths["greedy"]
    assert min(greedy[REAL]) > 1.7
    assert set(greedy[ZEROS]) == set(greedy[OTHER]) == {1.0}
    card = json.loads(json.dumps(found.to_dict()))
    assert card["helps"] is True
    assert card["prompts"] == 2
    assert card["repeats"] == 2
    assert card["greedy"]["accepted_length"][ZEROS] == 1.0
    assert card["temperature 1"]["real_minus_replaced"][OLD]["low"] > 0
    lines = found.table().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["states", REAL, *REPLACED]


def test_the_same_seed_gives_the_same_result():
    model = drafter(up_std=1.0)
    first, second = (check_reader(trained_target(), model, prompts(2), max_new_tokens=4) for _ in range(2))
    assert first == second


def test_the_interval_holds_what_it_should():
    values = [1.0 + 0.1 * i for i in range(20)]
    found = paired_difference(values, [1.0] * 20)
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(0.95)
    exact = 1.96 * torch.tensor(values).std(correction=0).item() / math.sqrt(20)
    assert found.high - found.mean == pytest.approx(exact, rel=0.1)
    assert found.mean - found.low == pytest.approx(exact, rel=0.1)


def test_pairs_without_rounds_are_left_out():
    assert paired_difference([math.nan, 2.0], [1.0, 1.5]).mean == 0.5
    assert paired_difference([math.nan, 2.0], [1.0, math.nan]) == pytest.approx(paired_difference([], []), nan_ok=True)


@pytest.mark.parametrize(
    ("reader", "number", "options", "message"),
    [
        (False, 3, {}, "reads no states"),
        (True, 1, {}, "two or more prompts"),
        (True, 2, {"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
        (True, 2, {"repeats": 0}, "`repeats` must be at least 1"),
        (True, 2, {"resamples": -1}, "`resamples` must be at least 1"),
    ],
)
def test_what_cannot_be_checked_is_refused(reader, number, options, message):
    with pytest.raises(ValueError, match=message):
        check_reader(trained_target(), drafter(reader=reader), prompts(number), **options)


def test_a_batch_is_refused():
    inputs = {name: value.expand(2, -1) for name, value in prompts(1)[0].items()}
    with pytest.raises(ValueError, match="one sequence each"):
        check_reader(trained_target(), drafter(), [inputs, inputs])


def test_the_command_prints_table_and_verdict(tmp_path, capsys):
    drafter().save_pretrained(tmp_path / "own")
    rows = [{"prompt": trained_tokenizer().decode(inputs["input_ids"][0])} for inputs in prompts(2)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--target", ready_hf.tiny_target_path(), "--drafter", str(tmp_path / "own")]
    arguments += ["--prompts-file", str(tmp_path / "p.jsonl"), "--reader-check", "--max-new-tokens", "6"]
    assert main(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    assert "one round old" in out
    assert "The reader does not help yet" in out
    assert reader_check.RULE in out


def test_one_pair_has_no_interval():
    found = paired_difference([2.0, math.nan], [1.0, 3.0])
    assert found.mean == 1.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_a_text_that_ends_before_its_first_draft_leaves_no_states(monkeypatch):
    """Another prompt's states are then those of the next one that has some; without any, there is no such pair."""
    target, inputs = trained_target(), prompts(3)
    firsts = [int(target.generate(**one, max_new_tokens=1, do_sample=False)[0, -1]) for one in inputs]
    inputs.append({name: value[:, :-6] for name, value in inputs[0].items()})
    other = int(target.generate(**inputs[-1], max_new_tokens=1, do_sample=False)[0, -1])
    assert other not in firsts
    monkeypatch.setattr(target.generation_config, "eos_token_id", other)
    lengths = check_reader(target, drafter(0.3), inputs, max_new_tokens=6, resamples=10).lengths["greedy"]
    assert [math.isnan(value) for value in lengths[OTHER]] == [False, False, False, True]
    monkeypatch.setattr(target.generation_config, "eos_token_id", [other, *firsts[1:]])
    found = check_reader(target, drafter(0.3), [inputs[0], inputs[-1]], max_new_tokens=6, resamples=10)
    assert all(math.isnan(value) for value in found.lengths["greedy"][OTHER])
    assert not found.helps
    assert "does not help" in found.verdict


def test_what_cannot_be_checked_is_named():
    target, model = trained_target(), drafter()
    with pytest.raises(TypeError, match="expected a ReaDy drafter, got Qwen3_5ForCausalLM: the order is"):
        check_reader(model, target, prompts())
    with pytest.raises(TypeError, match="expected a ReaDy drafter, got PromptLookupDrafter"):
        check_reader(target, ready_hf.PromptLookupDrafter(), prompts())
    with pytest.raises(ValueError, match="a dict with `input_ids`"):
        check_reader(target, model, [{"inputs_embeds": torch.ones(1, 3, 128)}] * 2)
