"""Rows for training: lengths, packing, what is dropped and counted, prompts, streams, and a step of the trainer."""

import functools
import logging

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf.data import prompt_ids, stream_rows, training_rows
from ready_hf.row_encoder import RowEncoder, RowOptions
from ready_hf.text_sources import DataError, read_examples


PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SWITCH = PLAIN + "{% if add_generation_prompt and enable_thinking %}yes{% endif %}"
BROKEN_MARKS = PLAIN + "{% generation %}{% endgeneration %}"
TEXTS = [{"text": f"def f{i}(a, b):\n    return a * {i} + b\n" * (i + 1)} for i in range(6)]


@functools.cache
def plain_tokenizer():
    return AutoTokenizer.from_pretrained(ready_hf.small_target_path())


@pytest.fixture
def tokenizer():
    found = AutoTokenizer.from_pretrained(ready_hf.small_target_path())
    found.chat_template = PLAIN
    return found


def chat(question, answer=None):
    answers = [] if answer is None else [{"role": "assistant", "content": answer}]
    return {"messages": [{"role": "user", "content": question}, *answers]}


def rows_of(rows, tokenizer, **options):
    return training_rows(read_examples(rows), tokenizer, RowOptions(**options))


def joined(rows):
    return [token for row in rows for token in row["input_ids"]]


def test_long_texts_become_several_rows_and_nothing_is_lost(tokenizer):
    rows = rows_of(TEXTS, tokenizer, max_length=40)
    assert tokenizer.decode(joined(rows)) == "".join(row["text"] for row in TEXTS)
    assert max(len(row["input_ids"]) for row in rows) == 40
    assert all(row["loss_mask"] == [1] * len(row["input_ids"]) for row in rows)
    assert tokenizer.decode(rows[0]["input_ids"]) == TEXTS[0]["text"]  # a row holds one text


def test_packed_texts_fill_their_rows(tokenizer):
    rows = rows_of(TEXTS, tokenizer, max_length=40, pack=True)
    assert [len(row["input_ids"]) for row in rows[:-1]] == [40] * (len(rows) - 1)
    assert 2 < len(rows[-1]["input_ids"]) <= 40
    assert tokenizer.decode(joined(rows)) == "".join(row["text"] + "<|endoftext|>" for row in TEXTS)
    assert all(row["loss_mask"] == [1] * len(row["input_ids"]) for row in rows)


def test_only_the_completion_of_a_prompt_is_learned(tokenizer):
    (row,) = rows_of([{"prompt": "def f(a):\n", "completion": "    return a"}], tokenizer)
    learned = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert tokenizer.decode(learned) == "    return a<|endoftext|>"
    assert tokenizer.decode(row["input_ids"]) == "def f(a):\n    return a<|endoftext|>"


def test_conversations_next_to_texts(tokenizer):
    rows = rows_of([chat("hi", "return a"), {"text": "plain text"}], tokenizer, pack=True)
    assert [tokenizer.decode(row["input_ids"]) for row in rows] == [
        "<|user|>hi<|endoftext|>\n<|assistant|>return a<|endoftext|>\n",
        "plain text<|endoftext|>",
    ]
    assert 0 in rows[0]["loss_mask"]
    learned = [i for i, m in zip(rows[0]["input_ids"], rows[0]["loss_mask"], strict=True) if m]
    assert tokenizer.decode(learned) == "return a<|endoftext|>"


def test_answers_apart(tokenizer):
    messages = chat("a", "one")["messages"] + chat("b", "two")["messages"]
    rows = rows_of([{"messages": messages}], tokenizer, turns="split")
    assert len(rows) == 2
    assert len(rows_of([{"messages": messages}], tokenizer)) == 1


def test_rows_with_nothing_to_learn_are_dropped_and_counted(tokenizer, caplog):
    good, cut, silent = chat("hi", "return a"), chat("long " * 40, "return a"), chat("hi")
    encoder = RowEncoder(tokenizer, RowOptions(max_length=32))
    kept = list(encoder.rows(read_examples([good, cut, good, silent, good, {"prompt": "p"}])))
    assert len(kept) == encoder.num_rows == 3
    assert sorted(encoder.dropped.values()) == [1, 1, 1]
    with caplog.at_level(logging.WARNING):
        encoder.check()
    assert "3 rows kept, 3 dropped" in caplog.text
    assert "has its answer cut away by `max_length` (32)" in caplog.text
    assert all(any(row["loss_mask"]) and len(row["loss_mask"]) == len(row["input_ids"]) <= 32 for row in kept)


def test_conversations_that_the_template_refuses_are_dropped_and_counted(tokenizer):
    """As many templates do with a system turn; the error of one alone would end a long run."""
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + PLAIN
    tokenizer.chat_template, good = refusing, chat("hi", "return a")
    bad = {"messages": [{"role": "system", "content": "be short"}, *good["messages"]]}
    for method, more in (("rows", []), ("prompts", [8])):
        encoder = RowEncoder(tokenizer, RowOptions())
        assert len(list(getattr(encoder, method)(read_examples([good, bad, good]), *more))) == 2
        assert encoder.dropped == {"is refused by the chat template (no system turns)": 1}


@pytest.mark.parametrize(
    ("rows", "template", "words"),
    [
        (
            [chat("long " * 40, "return a")],
            PLAIN,
            ["1 of 1 rows", "cut away by `max_length` (32)", "Raise `max_length`"],
        ),
        ([chat("hi")], PLAIN, ["1 of 1 rows", "no answer of the assistant", "assistant turns"]),
        ([chat("hi", "return a")], BROKEN_MARKS, ["marks nothing", "{% generation %}"]),
        ([{"prompt": "def f(a):"}], PLAIN, ["a prompt alone", "`regenerate`"]),
        ([{"text": ""}, {"text": ""}, {"text": "some text"}], PLAIN, ["2 of 3 rows", "holds no text"]),
        ([{"text": "a"}], PLAIN, ["no more than 2 tokens"]),
        ([], PLAIN, ["no rows"]),
        ([chat("hi", "return a")], None, ["no chat template"]),
    ],
)
def test_data_that_teaches_nothing_is_an_error(tokenizer, rows, template, words):
    tokenizer.chat_template = template
    with pytest.raises(DataError) as error:
        rows_of(rows, tokenizer, max_length=32)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_plain_text_needs_no_chat_template(tokenizer):
    tokenizer.chat_template = None
    assert len(rows_of(TEXTS[:1], tokenizer)) == 1
    assert prompt_ids(read_examples(TEXTS[:1]), tokenizer)


def test_ids_that_the_target_does_not_know(tokenizer):
    ids = tokenizer("some text")["input_ids"]
    assert rows_of([{"text": "some text"}], tokenizer, vocab_size=max(ids) + 1)
    with pytest.raises(
        DataError, match=rf"row 0 has the token id {max(ids)}, and the target knows 0 to {max(ids) - 1}"
    ):
        rows_of([{"text": "some text"}], tokenizer, vocab_size=max(ids))
    with pytest.raises(DataError, match="row 0 has the token id"):
        prompt_ids(read_examples([{"text": "some text"}]), tokenizer, RowOptions(vocab_size=max(ids)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_length": 2}, "`max_length` must be an integer above 2, got 2"),
        ({"max_length": "64"}, "`max_length` must be an integer above 2, got '64'"),
        ({"forbidden_ids": 3}, "`forbidden_ids` must be a tuple of token ids, got 3"),
        ({"turns": "first"}, "`turns` must be one of .*'split'.*got 'first'"),
        ({"thinking": True}, "`thinking` must be one of .*'mixed'.*got True"),
    ],
)
def test_refused_options(options, words):
    with pytest.raises(DataError, match=words):
        RowOptions(**options)


def test_rows_with_forbidden_ids_are_dropped_and_counted(tokenizer, caplog):
    texts = [{"text": "some text"}, {"text": "a slot <|mask|> here"}, {"text": "more text"}]
    options = RowOptions(forbidden_ids=(tokenizer.mask_token_id,))
    with caplog.at_level(logging.WARNING):
        rows = training_rows(read_examples(texts), tokenizer, options)
        prompts = prompt_ids(read_examples(texts), tokenizer, options)
    assert [tokenizer.decode(row["input_ids"]) for row in rows] == ["some text", "more text"]
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["some text", "more text"]
    assert caplog.text.count("2 rows kept, 1 dropped: 1 of which each holds one of `forbidden_ids`") == 2
    assert len(rows_of(texts, tokenizer)) == 3


def test_prompts_are_first_turns_whole_prompts_and_beginnings_of_texts(tokenizer):
    system = {"role": "system", "content": "be brief"}
    rows = [
        {"messages": [system, *chat("hi", "return a")["messages"], {"role": "user", "content": "more"}]},
        {"prompt": "def f(a):\n    return", "completion": " a"},
        {"text": "x = 1\n" * 40},
        {"turns": ["one", "two"]},
        {"messages": [{"role": "assistant", "content": "welcome"}, *chat("hi")["messages"]]},
    ]
    prompts = prompt_ids(read_examples(rows), tokenizer, prompt_tokens=5)
    assert [tokenizer.decode(prompt) for prompt in prompts[:2]] == [
        "<|system|>be brief<|endoftext|>\n<|user|>hi<|endoftext|>\n<|assistant|>",
        "def f(a):\n    return",
    ]
    assert prompts[2] == tokenizer("x = 1\n" * 40)["input_ids"][:5]
    assert tokenizer.decode(prompts[3]) == "<|user|>one<|endoftext|>\n<|assistant|>"
    assert tokenizer.decode(prompts[4]) == "<|user|>hi<|endoftext|>\n<|assistant|>"


def test_prompts_that_are_too_long_or_missing(tokenizer, caplog):
    rows = [{"prompt": "a"}, {"prompt": "long " * 40}, {"prompt": "b"}]
    with caplog.at_level(logging.WARNING):
        assert len(prompt_ids(read_examples(rows), tokenizer, RowOptions(max_length=16))) == 2
    assert "2 rows kept, 1 dropped" in caplog.text
    with pytest.raises(DataError, match="more than `max_length` \\(16\\) tokens"):
        prompt_ids(read_examples(rows[1:2]), tokenizer, RowOptions(max_length=16))
    with pytest.raises(DataError, match="has no user turn"):
        prompt_ids(read_examples([{"messages": [{"role": "assistant", "content": "a"}]}]), tokenizer)
    with pytest.raises(DataError, match="`prompt_tokens` must be at least 1, got 0"):
        prompt_ids(read_examples(rows), tokenizer, prompt_tokens=0)


def test_thinking_goes_to_the_template_by_seed_and_row(tokenizer):
    tokenizer.chat_template = SWITCH

    def thinks(**options):
        prompts = prompt_ids(read_examples([chat("hi")] * 40), tokenizer, RowOptions(**options))
        return [tokenizer.decode(prompt).endswith("yes") for prompt in prompts]

    assert thinks() == thinks(thinking="off") == [False] * 40
    assert thinks(thinking="on") == [True] * 40
    mixed = thinks(thinking="mixed", seed=3)
    assert 8 < sum(mixed) < 32
    assert mixed == thinks(thinking="mixed", seed=3) != thinks(thinking="mixed", seed=4)


def test_a_stream_gives_the_same_rows_again_and_again(tokenizer):
    pytest.importorskip("datasets")
    options = RowOptions(max_length=40)
    stream = stream_rows(functools.partial(read_examples, TEXTS), tokenizer, options)
    assert list(stream) == list(stream) == rows_of(TEXTS, tokenizer, max_length=40)


def test_a_stream_of_nothing_is_an_error(tokenizer, monkeypatch):
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="no answer of the assistant"):
        list(stream_rows(functools.partial(read_examples, [chat("hi")]), tokenizer))
    monkeypatch.setattr("ready_hf.data.STREAM_CHECKED_AFTER", 4)
    rows = [chat("hi", "return a"), *[chat("hi")] * 3, *[chat("hi", "return a")] * 9]
    seen = []
    stream = stream_rows(functools.partial(read_examples, rows), tokenizer)
    with pytest.raises(DataError, match="3 of 5 rows"):
        seen.extend(stream)
    assert len(seen) == 2


def test_the_trainer_takes_a_stream_of_such_rows(tokenizer, tmp_path):
    pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    from ready_hf.training import ReadyTrainer, ReadyTrainingArguments

    target = AutoModelForCausalLM.from_pretrained(ready_hf.small_target_path(), dtype="float32").eval()
    ready_hf.ensure_patched(target)
    drafter = ready_hf.ReadyDrafterModel.from_pretrained(ready_hf.small_drafter_path(), dtype="float32")
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    rows = [chat("write a function", "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):"), TEXTS[1]]
    options = RowOptions(max_length=48, vocab_size=target.config.vocab_size)
    arguments = ReadyTrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        num_anchors=4,
        learning_rate=1e-3,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    stream = stream_rows(functools.partial(read_examples, rows), tokenizer, options)
    result = ReadyTrainer(drafter, arguments, target=target, train_dataset=stream).train()
    assert 0 < result.training_loss < 50
    assert any(not parameter.equal(before[name]) for name, parameter in drafter.named_parameters())


@pytest.mark.parametrize("make", [training_rows, prompt_ids])
def test_a_path_is_no_examples_and_an_iterator_is_read_once(make, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("def area(width, height):\n    return width * height\n")
    tokenizer = AutoTokenizer.from_pretrained(ready_hf.small_target_path())
    with pytest.raises(DataError, match="pass `read_examples"):
        make(str(path), tokenizer)
    with pytest.raises(DataError, match="`options` must be RowOptions, got dict"):
        make(read_examples(path), tokenizer, {"max_length": 64})
    examples = read_examples(path)
    assert make(examples, tokenizer)
    with pytest.raises(DataError, match="can be read once"):
        make(examples, tokenizer)
