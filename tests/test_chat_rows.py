"""Loss masks of conversations, compared token by token with the text, for three kinds of templates."""

import copy
import functools

import pytest
from transformers import AutoTokenizer

import ready_hf
from ready_hf.chat_rows import check_chat_tokenizer, encode_chat, encode_prompt, template_options
from ready_hf.text_sources import DataError


END = "<|endoftext|>"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>\n{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}{{ '\\n' }}{% endfor %}" + PROMPT
)
NO_PROMPT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>\n{% endfor %}"
# as Qwen's: the thoughts of the last answer are shown, those of earlier ones are not
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
FORGETFUL = (  # an answer is not rendered as it was asked for
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


@functools.cache
def plain_tokenizer():
    return AutoTokenizer.from_pretrained(ready_hf.small_target_path())


def tokenizer_with(template):
    tokenizer = copy.deepcopy(plain_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns):
    """Alternating turns of user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


CHAT = chat("def add(a, b):", "return a + b", "and for three?", "sum((a, b, c))")


def expected_mask(ids, tokenizer, *learned):
    """1 where a token shares text with one of the `learned` pieces, found by decoding token after token."""
    text, at, mask = tokenizer.decode(ids), 0, []
    spans, begin = [], 0
    for piece in learned:
        begin = text.index(piece, begin)
        spans.append((begin, begin + len(piece)))
        begin += len(piece)
    for token in ids:
        length = len(tokenizer.decode([token]))
        mask.append(int(any(at < stop and start < at + length for start, stop in spans)))
        at += length
    assert at == len(text)
    return mask


@pytest.mark.parametrize("template", [PLAIN, MARKED, NO_PROMPT])
def test_masks_cover_the_answers_and_their_ends(template):
    tokenizer = tokenizer_with(template)
    ((ids, mask),) = encode_chat(CHAT, tokenizer)
    assert mask == expected_mask(ids, tokenizer, "return a + b" + END, "sum((a, b, c))" + END)
    assert ids == tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    assert mask.count(1) >= 8
    assert mask[0] == 0


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_the_last_answer_and_every_answer_apart(template):
    tokenizer = tokenizer_with(template)
    ((ids, mask),) = encode_chat(CHAT, tokenizer, "last")
    assert mask == expected_mask(ids, tokenizer, "sum((a, b, c))" + END)
    first, second = encode_chat(CHAT, tokenizer, "split")
    assert second == (ids, mask)
    assert first == encode_chat(CHAT[:2], tokenizer)[0]


def test_text_of_several_bytes_per_character():
    tokenizer = tokenizer_with(PLAIN)
    ((ids, mask),) = encode_chat(chat("früh", "héllo 世界"), tokenizer)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "héllo 世界" + END
    assert (
        tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if not m]) == f"<|user|>früh{END}\n<|assistant|>\n"
    )


def test_the_same_words_of_the_user_are_not_learned():
    tokenizer = tokenizer_with(NO_PROMPT)
    ((ids, mask),) = encode_chat(chat("same", "same"), tokenizer)
    learned = [i for i, m in enumerate(mask) if m]
    assert tokenizer.decode([ids[i] for i in learned]) == "same" + END
    assert learned[0] > len(ids) // 2


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_what_follows_the_last_answer_is_left_out(template):
    tokenizer = tokenizer_with(template)
    assert encode_chat([*CHAT, {"role": "user", "content": "thanks"}], tokenizer) == encode_chat(CHAT, tokenizer)


@pytest.mark.parametrize("turns", ["all", "last", "split"])
def test_no_answer_gives_no_row(turns):
    assert encode_chat(chat("hi"), tokenizer_with(PLAIN), turns) == []
    assert encode_chat(chat("hi"), tokenizer_with(MARKED), turns) == []


def test_an_answer_to_nothing_is_learned_only_where_marked():
    messages = [{"role": "assistant", "content": "welcome"}, *CHAT[:2]]
    tokenizer = tokenizer_with(PLAIN)
    ((ids, mask),) = encode_chat(messages, tokenizer)
    assert mask == expected_mask(ids, tokenizer, "return a + b" + END)
    ((ids, mask),) = encode_chat(messages, tokenizer_with(MARKED))
    assert mask == expected_mask(ids, tokenizer, "welcome" + END, "return a + b" + END)
    assert encode_chat(messages[:1], tokenizer) == []


def test_a_thinking_template_needs_answers_apart():
    tokenizer = tokenizer_with(THINKING)
    with pytest.raises(DataError, match=r'row 7: .*renders message 2 differently once .* turns="split"'):
        encode_chat(CHAT, tokenizer, where="row 7")
    first, second = encode_chat(CHAT, tokenizer, "split")
    # "\n\n" is one token, half of the prompt and half of the answer
    assert first[1] == expected_mask(first[0], tokenizer, "\n</think>\n\nreturn a + b" + END)
    assert second[1] == expected_mask(second[0], tokenizer, "\n</think>\n\nsum((a, b, c))" + END)
    assert tokenizer.decode(second[0]).count("<think>") == 1


def test_without_thinking_the_empty_thought_belongs_to_the_prompt():
    tokenizer, options = tokenizer_with(THINKING), {"enable_thinking": False}
    ((ids, mask),) = encode_chat(CHAT, tokenizer, "last", options)
    assert mask == expected_mask(ids, tokenizer, "sum((a, b, c))" + END)
    prompt = encode_prompt(CHAT[:3], tokenizer, options, "")
    assert ids[: len(prompt)] == prompt
    assert mask.index(1) == len(prompt)


def test_an_answer_that_does_not_begin_as_asked():
    with pytest.raises(DataError, match=r"row 3: .*the answer in message 2 as what it asks for.*regenerate"):
        encode_chat(CHAT, tokenizer_with(FORGETFUL), where="row 3")


def test_a_template_that_refuses():
    tokenizer = tokenizer_with("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"row 3: the chat template refuses .*roles must alternate"):
        encode_chat(CHAT, tokenizer, where="row 3")
    tokenizer = tokenizer_with(MARKED + "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"row 3: the chat template refuses .*roles must alternate"):
        encode_chat(CHAT, tokenizer, where="row 3")


def test_tokenizers_that_cannot_do_it():
    with pytest.raises(DataError, match="no chat template: set"):
        check_chat_tokenizer(tokenizer_with(None))
    with pytest.raises(DataError, match="thinking='off' would change nothing"):
        check_chat_tokenizer(tokenizer_with(PLAIN), "off")
    check_chat_tokenizer(tokenizer_with(PLAIN))
    check_chat_tokenizer(tokenizer_with(THINKING), "mixed")


def test_mixed_thinking_depends_on_seed_and_row():
    drawn = [template_options("mixed", 0, index)["enable_thinking"] for index in range(200)]
    assert drawn == [template_options("mixed", 0, index)["enable_thinking"] for index in range(200)]
    assert 70 < sum(drawn) < 130
    assert drawn != [template_options("mixed", 1, index)["enable_thinking"] for index in range(200)]
    assert template_options(None, 0, 0) == {}
    assert template_options("on", 0, 0) == {"enable_thinking": True}
    assert template_options("off", 0, 0) == {"enable_thinking": False}
