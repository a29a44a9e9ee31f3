"""Cases C08, C17, C26, C57 to C61 and C92: conversations as training data, by templates that think as Qwen's do."""

import copy
import functools
import json
import math

import pytest
import torch
from transformers import AutoTokenizer

import ready_hf
from ready_hf.data import prompt_ids, training_rows
from ready_hf.features import FrozenTarget, choose_anchors, legal_anchors
from ready_hf.losses import DraftingLoss
from ready_hf.row_encoder import RowEncoder, RowOptions
from ready_hf.text_sources import DataError, read_examples
from support import DEVICES, drafter_for, tiny_target


END = "<|endoftext|>"  # of the shipped tokenizer
BASE = """{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if last.user < 0 %}{{ raise_exception('there is no question') }}{% endif %}
{%- for m in messages %}
    {%- set content, thought = m.content, m.reasoning_content or '' %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
        {%- set content = content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {{- '[' + m.role + ']\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.user and THINKS %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|endoftext|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[assistant]\\n' + PROMPT }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ EMPTY }}{% endif %}
{%- endif %}"""
TEMPLATES = {
    # the model writes the opening tag itself
    "closed": BASE.replace("THINKS", "(loop.last or thought)")
    .replace("PROMPT", "''")
    .replace("EMPTY", r"'<think>\n\n</think>\n\n'"),
    # the prompt opens the thought
    "open": BASE.replace("THINKS", "true").replace("PROMPT", r"'<think>\n'").replace("EMPTY", r"'\n</think>\n\n'"),
}
QUESTION = {"role": "user", "content": "return a or b?"}
templates = pytest.mark.parametrize("name", TEMPLATES)


@functools.cache
def plain_tokenizer():
    return AutoTokenizer.from_pretrained(ready_hf.small_target_path())


def tokenizer_with(name):
    tokenizer = copy.deepcopy(plain_tokenizer())
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def chat(answer, **more):
    return {"messages": [QUESTION, {"role": "assistant", "content": answer, **more}]}


def rows_of(rows, tokenizer, **options):
    return training_rows(read_examples(rows), tokenizer, RowOptions(**options))


def split(row, tokenizer):
    """The text of a row that is not learned, which comes first, and the text that is."""
    ids, mask = row["input_ids"], row["loss_mask"]
    assert len(ids) == len(mask)
    begin, end = mask.index(1), len(mask) - mask[::-1].index(1)
    assert all(mask[begin:end])
    assert tokenizer.decode(ids[end:]) in ("", "\n")
    return tokenizer.decode(ids[:begin]), tokenizer.decode(ids[begin:end])


@templates
def test_c08_the_mask_covers_the_answer_and_an_empty_one_is_no_row(name):
    tokenizer = tokenizer_with(name)
    (row,) = rows_of([chat("return b")], tokenizer, thinking="off")
    prompt, learned = split(row, tokenizer)
    assert learned == f"return b{END}"
    assert prompt == f"[user]\nreturn a or b?{END}\n[assistant]\n<think>\n\n</think>\n\n"

    encoder = RowEncoder(tokenizer, RowOptions(max_length=len(row["input_ids"]), thinking="off"))
    kept = list(encoder.rows(read_examples([chat("return b"), {"messages": [QUESTION]}, chat("return b")])))
    assert kept == [row, row]
    assert sum(encoder.dropped.values()) == 1
    with pytest.raises(DataError, match=r"nothing can be learned from 1 of 1 rows: .*cut away by `max_length`"):
        rows_of([chat("return b")], tokenizer, thinking="off", max_length=row["loss_mask"].index(1))
    tokenizer.chat_template += "{% generation %}{% endgeneration %}"  # marks, and none around an answer
    with pytest.raises(DataError, match="nothing can be learned from 1 of 1 rows: .*marks nothing"):
        rows_of([chat("return b")], tokenizer)


@templates
@pytest.mark.parametrize("answer", ["Y", "def f"], ids=["one token", "shorter than a block"])
def test_c17_short_answers_are_learned_to_their_end(name, answer):
    pytest.importorskip("accelerate")
    from ready_hf.training import drafting_sums

    tokenizer, target = tokenizer_with(name), tiny_target("qwen3_5")
    drafter = drafter_for(target, block_size=6)
    (row,) = rows_of([chat(answer)], tokenizer, thinking="off")
    learned = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert tokenizer.decode(learned) == answer + END
    assert len(learned) <= 4 < drafter.config.block_size
    assert (len(learned) == 2) is (answer == "Y")
    ids = torch.tensor([row["input_ids"]]) % 90 + 3  # ids of the tiny target
    mask = torch.tensor([row["loss_mask"]])
    ids, mask = (torch.nn.functional.pad(x, (0, 3)) for x in (ids, mask))  # as next to a longer row
    text = (torch.arange(ids.shape[1]) < len(row["input_ids"])).long()[None]
    anchors, is_anchor = choose_anchors(legal_anchors(text, 6, 1, mask), 8)
    frozen = FrozenTarget(target, drafter.config)
    batch = frozen.batch(ids, anchors, is_anchor, text, mask)
    slots = [batch.labels[0, i][counted].tolist() for i, counted in enumerate(batch.loss_mask[0])]
    want = [token % 90 + 3 for token in learned]
    assert slots[int(is_anchor[0].logical_not().sum()) :] == [want[i:] for i in range(len(want))]
    sums = drafting_sums(drafter.train(), drafter, frozen, batch, DraftingLoss())
    sums.loss.backward()
    assert all(math.isfinite(sums.metrics()[name]) and sums.metrics()[name] > 0 for name in ("loss", "cross_entropy"))
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in drafter.parameters())
    assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in drafter.parameters())


@templates
def test_c26_thoughts_in_the_answer_are_learned(name):
    tokenizer = tokenizer_with(name)
    opening = "<think>\n" if name == "closed" else ""
    (row,) = rows_of([chat("<think>a b c</think>\n\nreturn b")], tokenizer)
    assert split(row, tokenizer)[1] == f"{opening}a b c\n</think>\n\nreturn b{END}"
    (row,) = rows_of([chat("<think>\n\n</think>\n\nreturn b")], tokenizer)
    # "\n\n" is one token, half of it of the prompt that opens the thought
    assert split(row, tokenizer)[1] == f"{'<think>' if name == 'closed' else ''}\n\n</think>\n\nreturn b{END}"


@templates
def test_c57_forms_of_rows_in_one_file(name, tmp_path):
    tokenizer, (_, answer) = tokenizer_with(name), chat("return b")["messages"]
    rows = [
        chat("return b"),
        {"conversations": [{"from": "human", "value": QUESTION["content"]}, {"from": "gpt", "value": "return b"}]},
        {"prompt": [QUESTION], "completion": [answer]},
        {"prompt": [QUESTION], "completion": "return b"},
        {"text": "def f(a, b):\n    return b"},
        {"prompt": "def f(a):\n", "completion": "    return a"},  # text stays text: no template
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *others, text, completed = training_rows(read_examples(file), tokenizer)
    assert split(first, tokenizer)[1].endswith(f"return b{END}")
    assert others == [first] * 3
    assert tokenizer.decode(text["input_ids"]) == rows[4]["text"]
    assert all(text["loss_mask"])
    assert split(completed, tokenizer) == ("def f(a):\n", f"    return a{END}")
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"essay": "def"}]))
    with pytest.raises(DataError, match=r"mixed.jsonl line 7 has the columns \['essay'\], expected"):
        training_rows(read_examples(file), tokenizer)


GREETING = {"role": "assistant", "content": "Ask me."}
SYSTEM = {"role": "system", "content": "Be short."}


@templates
def test_c58_odd_conversations_are_learned_or_counted(name):
    tokenizer = tokenizer_with(name)
    two = chat("return a")["messages"] + chat("return b")["messages"]
    # both answers in a row of their own: thoughts of earlier answers are not shown again
    first, second = rows_of([{"messages": two}], tokenizer, turns="split", thinking="off")
    assert first == rows_of([chat("return a")], tokenizer, thinking="off")[0]
    asked, learned = split(second, tokenizer)
    assert learned == f"return b{END}"
    assert asked.count(QUESTION["content"]) == 2
    assert asked.count("return a") == 3

    options = RowOptions(turns="split", thinking="off")
    odd = [[SYSTEM], [GREETING, *two[:2]], [SYSTEM, GREETING, *two[:2]], [SYSTEM, GREETING]]
    rows = [chat("return b"), chat("return a"), *({"messages": messages} for messages in odd)]
    encoder = RowEncoder(tokenizer, options)
    kept = [split(row, tokenizer)[1] for row in encoder.rows(read_examples(rows))]
    assert kept == [f"return b{END}", f"return a{END}", f"return a{END}"]
    assert encoder.dropped == {
        "has no answer of the assistant (its roles: system)": 1,
        "is refused by the chat template (there is no question)": 2,  # an answer before any question
    }
    encoder.check()  # half of the rows are left
    with pytest.raises(DataError, match=r"3 of 3 rows: .*refused by the chat template \(there is no question\)"):
        rows_of(rows[-2:] + rows[2:3], tokenizer, turns="split", thinking="off")
    assert len(prompt_ids(read_examples(rows), tokenizer, options)) == 4


def test_c58_a_stable_template_shows_a_conversation_once():
    tokenizer = tokenizer_with("open")
    tokenizer.chat_template = BASE.replace("THINKS", "false").replace("PROMPT", "''").replace("EMPTY", "''")
    messages = chat("return a")["messages"] + chat("return b")["messages"]
    (row,) = rows_of([{"messages": messages}], tokenizer)
    text = tokenizer.decode(row["input_ids"])
    assert text == tokenizer.apply_chat_template(messages, tokenize=False)
    learned = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert tokenizer.decode(learned) == f"return a{END}return b{END}"


@templates
@pytest.mark.parametrize("thinking", [None, "on", "off"])
def test_c59_what_the_prompt_supplies_is_not_learned(name, thinking):
    tokenizer = tokenizer_with(name)
    (row,) = rows_of([chat("return b")], tokenizer, thinking=thinking)
    prompt, learned = split(row, tokenizer)
    switch = {} if thinking is None else {"enable_thinking": thinking == "on"}
    supplied = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True, **switch)
    assert supplied.endswith("</think>\n\n") is (thinking == "off")
    whole = f"[user]\nreturn a or b?{END}\n[assistant]\n<think>\n\n</think>\n\nreturn b{END}"
    assert prompt + learned == whole
    # a token that the prompt and the answer share ("\n\n") is learned
    shared = "\n" if name == "open" and thinking != "off" else ""
    assert learned == shared + whole.removeprefix(supplied)


@templates
def test_c59_both_modes_in_one_training(name):
    """By row: what the mode of the row has supplied is not learned, what it has not is."""
    tokenizer = tokenizer_with(name)
    modes = [rows_of([chat("return b")], tokenizer, thinking=thinking)[0] for thinking in ("on", "off")]
    assert modes[0]["loss_mask"] != modes[1]["loss_mask"]
    mixed = rows_of([chat("return b")] * 40, tokenizer, thinking="mixed")
    assert all(row in modes for row in mixed)
    assert 8 < mixed.count(modes[0]) < 32


@templates
def test_c60_reasoning_beside_the_answer_is_learned_with_it(name):
    tokenizer = tokenizer_with(name)
    (row,) = rows_of([chat("return b", reasoning_content="a or b: b")], tokenizer)
    opening = "<think>\n" if name == "closed" else ""
    assert split(row, tokenizer)[1] == f"{opening}a or b: b\n</think>\n\nreturn b{END}"
    assert rows_of([chat("<think>\na or b: b\n</think>\n\nreturn b")], tokenizer) == [row]
    with pytest.raises(DataError, match=r"row 0: .*the answer in message 2 as what it asks for.*another `thinking`"):
        rows_of([chat("return b", reasoning_content="a or b: b")], tokenizer, thinking="off")


PACKED = {
    "positions that start again": {"position_ids": [*range(9), *range(9)]},
    "sequence numbers": {"seq_idx": [0] * 9 + [1] * 9},
    "lengths": {"cu_seq_lens_q": [0, 9, 18], "cu_seq_lens_k": [0, 9, 18]},
    "lengths as trl writes them": {"seq_lengths": [9, 9]},
    "a mask of several texts": {"attention_mask": [1] * 9 + [2] * 9},
    "positions of three axes": {"position_ids": [[*range(9), *range(9)]] * 3},
}
ONE_TEXT = {
    "positions": {"position_ids": torch.arange(18)},
    "positions of three axes": {"position_ids": torch.arange(18).expand(3, 18)},
    "a middle of a text": {"position_ids": list(range(7, 25))},
    "positions of padding": {"position_ids": [*range(12), *[1] * 6], "attention_mask": [1] * 12 + [0] * 6},
    "one sequence number": {"seq_idx": [0] * 18},
    "one length": {"cu_seq_lens_q": [0, 18], "cu_seq_lens_k": [0, 18], "seq_lengths": [18]},
}


@pytest.mark.parametrize("more", PACKED.values(), ids=PACKED)
def test_c61_packed_conversations_are_refused(more):
    """A state would run over from one into the next; positions of one text are as good as none."""
    from ready_hf.collator import DraftingCollator

    row = {"input_ids": list(range(3, 21))}
    with pytest.raises(ValueError, match="must be one text, and this one looks packed"):
        DraftingCollator()([row, row | more])


@pytest.mark.parametrize("more", ONE_TEXT.values(), ids=ONE_TEXT)
def test_c61_what_says_one_text_is_no_packing(more):
    from ready_hf.collator import DraftingCollator

    assert DraftingCollator()([{"input_ids": list(range(3, 21))} | more])["input_ids"].shape == (1, 18)


@pytest.mark.parametrize("what", ["train", "evaluate"])
def test_c61_a_collator_that_packs_is_refused_too(tmp_path, what):
    """transformers' own, in place of ours."""
    from transformers import DataCollatorWithFlattening

    from ready_hf.training import ReadyTrainer, ReadyTrainingArguments

    target, rows = tiny_target("qwen3_5"), [{"input_ids": list(range(3, 21))}] * 2
    arguments = ReadyTrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, per_device_eval_batch_size=2)
    drafter, collator = drafter_for(target, block_size=4), DataCollatorWithFlattening()
    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collator}
    with pytest.raises(ValueError, match=r"must be one text, and this one looks packed \(position_ids\)"):
        getattr(ReadyTrainer(drafter, arguments, target=target, **data), what)()


@pytest.mark.parametrize("device", DEVICES)
def test_c61_rows_beside_each_other_have_their_own_features_and_states(device):
    target, worst = copy.deepcopy(tiny_target("qwen3_5")).to(device), 0.0
    frozen = FrozenTarget(target, drafter_for(target, block_size=4).config)
    rows = [torch.arange(30, device=device) % 50 + 3, torch.arange(19, device=device) % 40 + 7]
    anchors = torch.tensor([[5, 12], [3, 9]], device=device)
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(30) < torch.tensor([[30], [19]])).long().to(device)
    with torch.no_grad():
        together = frozen.batch(ids, anchors, attention_mask=mask)
        for i, row in enumerate(rows):
            alone = frozen.batch(row[None], anchors[i : i + 1])
            features = together.context_hidden_states[i, : len(row)]
            pairs = [(together.states.stack()[i], alone.states.stack()[0]), (features, alone.context_hidden_states[0])]
            worst = max(worst, *(float((found - own).norm() / own.norm()) for found, own in pairs))
            assert torch.equal(together.labels[i], alone.labels[0])
    print(f"\nC61 on {device}: features and states of a row beside another part by {worst:.1e}")
    assert worst <= (1e-5 if device == "cpu" else 2e-3)  # a block function there multiplies in tf32


def test_c92_no_label_crosses_from_one_conversation_into_the_next():
    """Packing is not offered: two short conversations are two rows, and every pair of tokens is of one of them."""
    tokenizer = tokenizer_with(next(iter(TEMPLATES)))
    chats = [chat("return a"), chat("return b, or c")]
    rows = rows_of(chats, tokenizer, thinking="off")
    assert len(rows) == 2
    from ready_hf.collator import DraftingCollator

    target = tiny_target("qwen3_5")
    frozen = FrozenTarget(target, drafter_for(target, block_size=6).config)
    batch = DraftingCollator()([row | {"input_ids": [i % 90 + 3 for i in row["input_ids"]]} for row in rows])
    legal = legal_anchors(batch["attention_mask"], 6, 1, batch["loss_mask"])
    anchors, is_anchor = choose_anchors(legal, 99)
    made = frozen.batch(batch["input_ids"], anchors, is_anchor, batch["attention_mask"], batch["loss_mask"])
    for i, row in enumerate(rows):
        text = [token % 90 + 3 for token in row["input_ids"]]
        pairs = set(zip(text[:-1], text[1:], strict=True))
        counted = made.loss_mask[i]
        found = set(zip(made.previous_ids[i][counted].tolist(), made.labels[i][counted].tolist(), strict=True))
        assert found
        assert found <= pairs
        where = made.anchor_positions[i][:, None] + torch.arange(1, 7)  # of labels, counted from the row's first token
        assert [text[place] for place in where[counted].tolist()] == made.labels[i][counted].tolist()
