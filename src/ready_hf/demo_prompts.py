"""Prompts of the demo: read from a file, encoded, and kept or dropped by what *plain* decoding makes of them.

A small model often falls into a loop, which any drafter predicts; such text would flatter every figure. So a prompt
is dropped if its plain greedy text repeats itself. No drafter has a say in that.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase


LONGEST_CYCLE = 40  # tokens
SHORTEST_TEXT = 24  # tokens
LEAST_DISTINCT = 0.6  # of the 4-grams


class UsageError(ValueError):
    """What was asked for cannot be done; the message is one line for the person who asked."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and where it comes from.

    Args:
        text (`str`): The text.
        source (`str`): Name and version of the package it was cut from; empty if the file does not say.
        is_turn (`bool`): Whether it is a turn of a conversation, for a chat template.
        task (`str`): What kind of prompt it is, by the file; empty if it does not say.
        thinking (`bool`, *optional*): `enable_thinking` of the chat template; `None` leaves it to the template.
    """

    text: str
    source: str = ""
    is_turn: bool = False
    task: str = ""
    thinking: bool | None = None

    def encode(
        self, tokenizer: PreTrainedTokenizerBase, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Arguments for `generate`; a turn goes through the chat template, if the tokenizer has one.

        Raises:
            UsageError: the chat template fails, or nothing is left of the prompt.
        """
        if self.is_turn and getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": self.text}]
            options = {} if self.thinking is None else {"enable_thinking": self.thinking}
            try:
                encoded: Any = tokenizer.apply_chat_template(
                    message, add_generation_prompt=True, return_dict=True, return_tensors="pt", **options
                )
            except (jinja2.TemplateError, TypeError) as error:
                raise UsageError(
                    f"the target's chat template fails for the turn {_short(self.text)}: {error}"
                ) from None
        else:
            encoded = tokenizer(self.text, return_tensors="pt")
        if not encoded["input_ids"].shape[1]:
            made = "chat template and tokenizer make" if self.is_turn else "tokenizer makes"
            raise UsageError(f"the target's {made} no token of the prompt {_short(self.text)}")
        return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file with one JSON object per line: `{"prompt": "..."}`, or `{"turns": ["...", ...]}`.

    Of several turns only the first is used. `package` and `version`, if there, say where a prompt comes from, `task`
    (or `category`) what kind of prompt it is.

    Raises:
        UsageError: no such file, no UTF-8, nothing in it, or a line that is something else, by its number.
    """
    if not path.is_file():
        raise UsageError(f"the prompts file {path} does not exist, or is not a file")
    try:
        # not `splitlines`, which also splits at U+2028 and the like: JSON allows them inside of a string
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not a text file in UTF-8") from None
    found = [_prompt(line, f"{path.name} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f'{path.name} holds no prompts: write one {{"prompt": "..."}} per line')
    return found


def reason_to_drop(tokens: Sequence[int], shortest: int = SHORTEST_TEXT) -> str | None:
    """Why a prompt with this plain greedy text is not measured; `None` to keep it.

    Args:
        tokens (`Sequence[int]`): New tokens, without eos.
        shortest (`int`): Least number of them.

    Returns:
        `str`, *optional*: the first that holds of

        - `"short"`: fewer than `shortest` tokens;
        - `"loop"`: for some p of 1 to 40, the text ends in p tokens three times in a row; or twice in a row where
          three times would be more than half of the text;
        - `"repetitive"`: fewer than 0.6 of its 4-grams are distinct.
    """
    tokens, length = list(tokens), len(tokens)
    if length < shortest:
        return "short"
    for period in range(1, min(LONGEST_CYCLE, length // 2) + 1):
        times = 3 if 3 * period <= length / 2 else 2
        if tokens[-period:] * times == tokens[-period * times :]:
            return "loop"
    grams = [tuple(tokens[i : i + 4]) for i in range(length - 3)]
    return "repetitive" if len(set(grams)) < LEAST_DISTINCT * len(grams) else None


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; nesting without end
        raise UsageError(f"{where} cannot be read as JSON: {error}") from None
    if not isinstance(row, dict) or not {"prompt", "turns"} & set(row):
        raise UsageError(f'{where} must be {{"prompt": "..."}} or {{"turns": ["...", ...]}}')
    turns = [row["prompt"]] if "prompt" in row else row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UsageError(f"{where}: a prompt must be a text that is not empty, and `turns` a list of such texts")
    if not all(_is_unicode(turn) for turn in turns):
        raise UsageError(f"{where}: a prompt holds half of a surrogate pair, which is no text")
    source = " ".join(str(row[name]) for name in ("package", "version") if row.get(name))
    task = row.get("task") or row.get("category") or ""
    if not isinstance(task, str):
        raise UsageError(f"{where}: `task` (or `category`) must be a text, got {type(task).__name__}")
    return Prompt(turns[0], source, is_turn="prompt" not in row, task=task)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
