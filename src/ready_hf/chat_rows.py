"""Conversations as token ids, and which of them the assistant wrote.

A template with `{% generation %}` marks the assistant's text itself. For the others the text is rendered up to every
answer, once with the prompt for it and once with the answer:

    render(before, add_generation_prompt)  "...<assistant>"
    render(before + [answer])              "...<assistant>answer<end>"     what is new is the answer

That holds only if each is the beginning of the next one, which is checked. Templates of thinking models often break
it: they drop the thoughts of earlier turns. `turns="split"` renders every answer as the last one, as it is when the
model is asked for it.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from ready_hf.text_sources import DataError, RefusedConversation


Turns = Literal["all", "last", "split"]
Thinking = Literal["on", "off", "mixed"]
Messages = list[dict[str, Any]]

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def check_chat_tokenizer(tokenizer: PreTrainedTokenizerBase, thinking: Thinking | None = None) -> None:
    """Refuses a tokenizer whose conversations could not be told apart.

    Raises:
        DataError: no chat template; no offsets of tokens; `thinking` for a template without `enable_thinking`.
    """
    template = _template(tokenizer)
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not tell where tokens stand in the text, which the loss mask needs: "
            "load the fast tokenizer (`use_fast=True`)"
        )
    if thinking is not None and "enable_thinking" not in template:
        raise DataError(
            f"thinking={thinking!r} would change nothing: the chat template does not read `enable_thinking`. Leave "
            "`thinking` out"
        )


def template_options(thinking: Thinking | None, seed: int, index: int) -> dict[str, bool]:
    """What the template of row `index` is given; `"mixed"` is drawn from seed and row alone.

    Nothing else has a say in it: neither workers nor an interruption change a row.
    """
    if thinking is None:
        return {}
    if thinking != "mixed":
        return {"enable_thinking": thinking == "on"}
    return {"enable_thinking": bool(hashlib.sha256(f"{seed} {index}".encode()).digest()[0] & 1)}


def encode_prompt(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, bool], where: str
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer."""
    text = _renderer(tokenizer, options, where)(messages, True)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode_chat(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    turns: Turns = "all",
    options: dict[str, bool] | None = None,
    where: str = "the conversation",
) -> list[tuple[list[int], list[int]]]:
    """Token ids and loss masks of a conversation: 1 for the assistant's tokens, with the end of its turns.

    What follows the last answer is left out. An answer that nothing asks for, at the very beginning, is learned only
    if the template marks it.

    Args:
        messages (`list[dict]`): With `role` and `content`.
        tokenizer (`PreTrainedTokenizerBase`): Fast, with a chat template.
        turns (`"all"`, `"last"` or `"split"`): One row with all answers; one with the last answer; a row for every
            answer.
        options (`dict`, *optional*): For the template.
        where (`str`): Where the conversation stands, for errors.

    Returns:
        `list[tuple[list[int], list[int]]]`: ids and mask of equal length; no rows if there is no answer.

    Raises:
        DataError: the template fails, or shows an answer otherwise than it was asked for.
    """
    options = options or {}
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return []
    if turns == "all" and _MARKER.search(_template(tokenizer)):
        return [_marked(messages[: answers[-1] + 1], tokenizer, options, where)]
    render = _renderer(tokenizer, options, where)
    asked = [index for index in answers if index]
    if turns == "all":
        rows = [asked] if asked else []
    else:
        rows = [[index] for index in (asked[-1:] if turns == "last" else asked)]
    return [_encode(*_spans(messages[: row[-1] + 1], row, render, where), tokenizer) for row in rows]


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            "the data holds conversations, and the tokenizer has no chat template: set `tokenizer.chat_template`, "
            f"load the tokenizer of the chat model, or give plain text ({str(error).split('. ')[0]})"
        ) from None


def _renderer(
    tokenizer: PreTrainedTokenizerBase, options: dict[str, bool], where: str
) -> Callable[[Messages, bool], str]:
    def render(messages: Messages, add_generation_prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RefusedConversation(where, str(error)) from error

    return render


def _marked(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: dict[str, bool], where: str
) -> tuple[list[int], list[int]]:
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **options,
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise RefusedConversation(where, str(error)) from error
    return encoded["input_ids"], encoded["assistant_masks"]


def _spans(
    messages: Messages, answers: list[int], render: Callable[..., str], where: str
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text, and where the answers begin and end in it."""
    text, spans = render(messages), []
    for index in answers:
        plain, asked = render(messages[:index]), render(messages[:index], True)
        answered = render(messages[: index + 1])
        if not (answered.startswith(asked) and text.startswith(answered)):
            raise DataError(_unstable(where, index, answered.startswith(asked)))
        # whitespace after the end of a turn belongs to the template: the model stops before it
        begin, end = len(asked), len(answered.rstrip())
        content = messages[index].get("content")
        if asked == plain and isinstance(content, str):  # without a prompt the header of the answer would count too
            begin = max(begin, answered.find(content.strip(), begin))
        spans.append((begin, end))
    return text, spans


def _unstable(where: str, index: int, is_asked_alike: bool) -> str:
    if is_asked_alike:
        return (
            f"{where}: the chat template renders message {index + 1} differently once the conversation goes on "
            "(thinking templates drop earlier thoughts), so its tokens cannot be found in the whole: use "
            'turns="split" (a row for every answer) or turns="last"'
        )
    return (
        f"{where}: the chat template does not render the answer in message {index + 1} as what it asks for: the "
        "prompt for it is not how the rendered answer begins. Use a template with {% generation %} markers, another "
        "`thinking`, or let the target answer itself (`regenerate`), which needs prompts only"
    )


def _encode(
    text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Ids, and a mask with 1 for tokens that share a character with a span."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    mask = [
        int(any(begin < stop and start < end for begin, end in spans)) for start, stop in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], mask
