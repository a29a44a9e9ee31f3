"""Text that the target writes: what rows hold, that interruptions and damage do not show, what decides the key."""

import copy
import functools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf.text_sources import DataError, read_examples


pytest.importorskip("datasets")
from ready_hf.data import prompt_ids  # noqa: E402
from ready_hf.on_policy import OnPolicyOptions, load_regenerated, regenerate, shard_seed  # noqa: E402
from support import tiny_target  # noqa: E402


OPTIONS = OnPolicyOptions(max_new_tokens=8, batch_size=2, rows_per_shard=2, seed=7)
TEXTS = [
    "def add(a, b):",
    "import os\n\n\ndef main():\n",
    "class A:\n    def",
    "x =",
    "for i in range(10):\n    print",
]


@functools.cache
def small_target():
    return AutoModelForCausalLM.from_pretrained(ready_hf.small_target_path(), dtype=torch.float32).eval()


@functools.cache
def small_tokenizer():
    return AutoTokenizer.from_pretrained(ready_hf.small_target_path())


@functools.cache
def prompts():
    return prompt_ids(read_examples([{"prompt": text} for text in TEXTS]), small_tokenizer())


def run(folder, options=OPTIONS, target=None, given=None):
    return regenerate(target or small_target(), small_tokenizer(), given or prompts(), folder, options)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.arrow")}


class Interruption(Exception):
    """Stands for whatever ends a run."""


def interrupting(monkeypatch, target, calls):
    """Lets `generate` succeed `calls` times."""
    generate, done = type(target).generate, []

    def counted(self, *args, **kwargs):
        if len(done) == calls:
            raise Interruption
        done.append(1)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "generate", counted)
    return done


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run from its beginning to its end: its folder and its rows."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, list(run(folder))


def test_rows_hold_prompt_and_continuation_without_padding(straight):
    _, rows = straight
    assert len(rows) == len(prompts()) == 5
    assert len({len(prompt) for prompt in prompts()}) > 2
    for row, prompt in zip(rows, prompts(), strict=True):
        written = len(row["input_ids"]) - len(prompt)
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"] == [0] * len(prompt) + [1] * written
        assert 1 <= written <= 8


def test_greedy_rows_are_what_the_target_writes_alone(tmp_path):
    rows = run(tmp_path, OnPolicyOptions(max_new_tokens=8, batch_size=5, temperature=0.0, learn_prompt=True))
    for row, prompt in zip(rows, prompts(), strict=True):
        alone = small_target().generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
        assert row["input_ids"] == alone
        assert row["loss_mask"] == [1] * len(alone)


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_interrupted_run_ends_with_the_same_rows(tmp_path, monkeypatch, straight, calls):
    folder, rows = straight
    with monkeypatch.context() as patch:
        interrupting(patch, small_target(), calls)
        with pytest.raises(Interruption):
            run(tmp_path)
    assert len(files(tmp_path)) == calls
    torch.manual_seed(calls)  # the state that a new process happens to have
    with monkeypatch.context() as patch:
        done = interrupting(patch, small_target(), 99)
        assert list(run(tmp_path)) == rows
        assert len(done) == 3 - calls
    assert files(tmp_path) == files(folder)
    with monkeypatch.context() as patch:
        interrupting(patch, small_target(), 0)
        assert list(run(tmp_path)) == rows  # nothing is written twice


def test_an_interruption_within_a_shard(tmp_path, monkeypatch):
    options = OnPolicyOptions(max_new_tokens=4, batch_size=1, rows_per_shard=3, seed=1)
    whole = list(run(tmp_path / "whole", options))
    with monkeypatch.context() as patch:
        interrupting(patch, small_target(), 4)
        with pytest.raises(Interruption):
            run(tmp_path / "cut", options)
    assert len(files(tmp_path / "cut")) == 1
    assert list(run(tmp_path / "cut", options)) == whole
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["truncated", "emptied", "other byte", "removed"])
def test_a_damaged_shard_is_written_again_and_never_used(tmp_path, monkeypatch, straight, damage):
    folder, rows = straight
    run(tmp_path)
    path = sorted(tmp_path.rglob("shard-00001-*.arrow"))[0]
    content = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        changed = bytes([content[0], content[1], *content[2:-40], content[-40] ^ 1, *content[-39:]])
        path.write_bytes({"truncated": content[:-8], "emptied": b"", "other byte": changed}[damage])
    with pytest.raises(DataError, match=r"lacks the shards \[1\] of 3"):
        load_regenerated(path.parent)
    done = interrupting(monkeypatch, small_target(), 99)
    assert list(run(tmp_path)) == rows
    assert len(done) == 1
    assert files(tmp_path) == files(folder)


def test_loading_without_the_target(straight, tmp_path):
    folder, rows = straight
    (run_folder,) = folder.iterdir()
    assert list(load_regenerated(run_folder)) == rows
    with pytest.raises(DataError, match="holds no regenerated text"):
        load_regenerated(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"num_sh'])
def test_a_damaged_manifest_is_written_again(tmp_path, monkeypatch, content):
    target = tiny_target("qwen3_5")
    tiny_run(tmp_path, target)
    (run_folder,) = tmp_path.iterdir()
    whole = (run_folder / "manifest.json").read_text()
    (run_folder / "manifest.json").write_text(content)
    with pytest.raises(DataError, match="holds no regenerated text"):
        load_regenerated(run_folder)
    interrupting(monkeypatch, target, 0)  # the shards are still good
    tiny_run(tmp_path, target)
    assert (run_folder / "manifest.json").read_text() == whole


def test_what_was_asked_for_is_written_down(straight):
    (run_folder,) = straight[0].iterdir()
    manifest = json.loads((run_folder / "manifest.json").read_text())
    assert manifest["options"]["temperature"] == 1.0
    assert manifest["options"]["seed"] == 7
    assert (manifest["num_prompts"], manifest["num_shards"], manifest["dtype"]) == (5, 3, "torch.float32")
    import pyarrow as pa

    for index, path in enumerate(sorted(run_folder.glob("*.arrow"))):
        metadata = pa.ipc.open_stream(path.read_bytes()).schema.metadata
        assert metadata == {b"seed": str(shard_seed(7, index)).encode(), b"shard": str(index).encode()}


def test_shards_and_seeds_are_drawn_apart():
    assert len({shard_seed(seed, index) for seed in range(20) for index in range(20)}) == 400
    assert all(0 <= shard_seed(0, index) < 2**63 for index in range(50))


def test_the_seed_decides_the_rows_and_equal_prompts_differ(tmp_path, straight):
    options = OnPolicyOptions(max_new_tokens=8, batch_size=2, rows_per_shard=2, seed=8)
    assert list(run(tmp_path, options)) != straight[1]
    rows = list(run(tmp_path, OPTIONS, given=[prompts()[0]] * 4))
    assert rows[0] != rows[1]
    assert rows[:2] != rows[2:]  # shards have seeds of their own


def tiny_run(folder, target, options=None, given=((5, 6), (7,)), tokenizer=None):
    options = options or OnPolicyOptions(max_new_tokens=1)
    regenerate(target, tokenizer or small_tokenizer(), given, folder, options)
    return {path.name for path in folder.iterdir()}


def test_the_key_depends_on_weights_tokenizer_options_and_prompts(tmp_path):
    target = copy.deepcopy(tiny_target("qwen3_5"))
    first = tiny_run(tmp_path, target)
    assert tiny_run(tmp_path, copy.deepcopy(target)) == first
    assert len(first) == 1
    with torch.no_grad():
        target.get_input_embeddings().weight[-1, -1] += 1e-3
    assert len(tiny_run(tmp_path, target)) == 2
    for number, options in enumerate(
        [{"temperature": 0.5}, {"seed": 1}, {"top_p": 0.5}, {"learn_prompt": True}, {"forbidden_ids": (1,)}], 3
    ):
        assert len(tiny_run(tmp_path, target, OnPolicyOptions(max_new_tokens=1, **options))) == number
    assert len(tiny_run(tmp_path, target, given=[[5], [6, 7]])) == 8  # the same ids, cut elsewhere
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = "{{ messages }}"
    assert len(tiny_run(tmp_path, target, tokenizer=tokenizer)) == 9


def test_a_row_ends_with_the_first_end_of_text(tmp_path):
    target = copy.deepcopy(small_target())
    free = list(run(tmp_path, OnPolicyOptions(max_new_tokens=8, temperature=0.0, stop_at_end=False), target))
    assert [len(row["input_ids"]) for row in free] == [len(prompt) + 8 for prompt in prompts()]
    ends = [free[0]["input_ids"][len(prompts()[0]) + 2], free[1]["input_ids"][len(prompts()[1]) + 4]]
    target.generation_config.eos_token_id = ends
    rows = list(run(tmp_path, OnPolicyOptions(max_new_tokens=8, temperature=0.0), target))
    for row, whole, prompt in zip(rows, free, prompts(), strict=True):
        written = whole["input_ids"][len(prompt) :]
        stop = next((i + 1 for i, token in enumerate(written) if token in ends), len(written))
        assert row["input_ids"] == prompt + written[:stop]
    assert len(rows[0]["input_ids"]) <= len(prompts()[0]) + 3


def test_forbidden_ids_are_not_written(tmp_path):
    rows = run(tmp_path, OnPolicyOptions(max_new_tokens=4, temperature=0.0))
    favourites = [row["input_ids"][len(prompt)] for row, prompt in zip(rows, prompts(), strict=True)]
    number = next(i for i, prompt in enumerate(prompts()) if favourites[i] not in prompt)
    options = OnPolicyOptions(max_new_tokens=4, temperature=0.0, forbidden_ids=(favourites[number],))
    (row,) = run(tmp_path, options, given=[prompts()[number]])
    assert favourites[number] not in row["input_ids"]
    with pytest.raises(DataError, match=r"prompt 1 holds the id 9, one of `forbidden_ids`"):
        run(tmp_path, OnPolicyOptions(forbidden_ids=(9,)), given=[[8], [9]])


def test_the_target_is_left_as_it_was(tmp_path, monkeypatch):
    target = copy.deepcopy(tiny_target("qwen3_5")).train()
    target.model.layers[0].eval()
    target.generation_config.top_k = 3
    target.generation_config.repetition_penalty = 9.0
    config, modes = target.generation_config, [module.training for module in target.modules()]
    state, seen = torch.get_rng_state(), []
    generate = type(target).generate

    def look(self, *args, **kwargs):
        seen.append((self.generation_config, [module.training for module in self.modules()]))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "generate", look)
    tiny_run(tmp_path, target)
    assert target.generation_config is config
    assert [module.training for module in target.modules()] == modes
    assert torch.get_rng_state().equal(state)
    ((during, training),) = seen
    assert not any(training)
    assert (during.top_k, during.repetition_penalty) != (3, 9.0)
    interrupting(monkeypatch, target, 0)
    with pytest.raises(Interruption):
        tiny_run(tmp_path, target, OnPolicyOptions(max_new_tokens=2))
    assert target.generation_config is config
    assert [module.training for module in target.modules()] == modes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 has no tokens"),
        ([[5], [3, 2048]], "prompt 1 has ids 3 to 2048, and the target knows 0 to 2047"),
        ([[-1]], "prompt 0 has ids -1"),
    ],
)
def test_prompts_that_cannot_be_continued(tmp_path, given, words):
    with pytest.raises(DataError, match=words):
        regenerate(small_target(), small_tokenizer(), given, tmp_path, OPTIONS)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        ({"rows_per_shard": 0}, "`rows_per_shard` must be at least 1"),
        ({"temperature": -1.0}, "`temperature` must be 0"),
        ({"temperature": float("nan")}, "`temperature` must be 0"),
        ({"top_p": 0.0}, "`top_p` must be above 0"),
        ({"top_k": -1}, "`top_k` must be at least 0"),
    ],
)
def test_refused_options(options, words):
    with pytest.raises(DataError, match=words):
        OnPolicyOptions(**options)


def test_a_cache_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="choose another `cache_dir`"):
        run(tmp_path / "file")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["def f"], {}, "prompt 0 must be a list of token ids .*, got str"),
        ([{"input_ids": [5]}], {}, "prompt 0 must be a list of token ids .*, got dict"),
        ([5, 6], {}, "prompt 0 must be a list of token ids .*, got int"),
        ([[5], [5.5]], {}, "prompt 1 must be a list of token ids"),
        ([[5] * 4090], {"max_new_tokens": 16}, "prompt 0 has 4090 tokens.*more than the target's context of 4096"),
        ([[5]], {"forbidden_ids": (99999,)}, "`forbidden_ids` must be ids that the target knows, 0 to 2047"),
        ([[5]], {"batch_size": 2.5}, "`batch_size` must be an integer, got 2.5"),
        ([[5]], {"max_new_tokens": "8"}, "`max_new_tokens` must be an integer, got '8'"),
    ],
)
def test_prompts_and_options_of_a_wrong_kind_are_named(tmp_path, prompts, options, message):
    path = ready_hf.small_target_path()
    target, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with pytest.raises(DataError, match=message):
        regenerate(target, tokenizer, prompts, tmp_path, OnPolicyOptions(**options))
    with pytest.raises(DataError, match="must be OnPolicyOptions, got dict"):
        regenerate(target, tokenizer, [[5]], tmp_path, {"max_new_tokens": 8})
    assert not any(tmp_path.iterdir())
