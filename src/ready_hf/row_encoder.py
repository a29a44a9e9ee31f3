"""Examples as rows of token ids with a loss mask, or as prompts.

A row in which nothing is learned costs a forward of the target and teaches nothing; such rows are dropped and counted,
and if most rows are like that, something is wrong with the data, which is an error.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from transformers import PreTrainedTokenizerBase

from ready_hf.chat_rows import (
    Thinking,
    Turns,
    check_chat_tokenizer,
    encode_chat,
    encode_prompt,
    template_options,
)
from ready_hf.text_sources import DataError, Example, RefusedConversation


logger = logging.getLogger(__name__)

Row = dict[str, list[int]]

FIRST_LABEL = 2  # an anchor has a token before it, and its labels come after it


@dataclass(frozen=True)
class RowOptions:
    """How examples become rows.

    Args:
        max_length (`int`): Most tokens of a row. Longer texts become several rows; longer conversations are cut.
        pack (`bool`): Whether plain texts are joined, with the end-of-text token between them, into rows of
            `max_length`. The target then reads on across texts, as in pretraining; without, a row holds one text.
        turns (`"all"`, `"last"` or `"split"`): Answers of a conversation that are learned: all in one row, only the
            last one, or each in a row of its own, as thinking templates need it.
        thinking (`"on"`, `"off"` or `"mixed"`, *optional*): `enable_thinking` for the chat template; mixed is drawn
            for every example from `seed` and its index. By default the template decides.
        seed (`int`): Of mixed thinking.
        vocab_size (`int`, *optional*): The target's; larger ids are refused.
        forbidden_ids (`tuple[int, ...]`): Rows with one of these are dropped, such as the drafter's `mask_token_id`,
            which must not stand in a text.

    Raises:
        DataError: naming the option, its value and what is allowed.
    """

    max_length: int = 2048
    pack: bool = False
    turns: Turns = "all"
    thinking: Thinking | None = None
    seed: int = 0
    vocab_size: int | None = None
    forbidden_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.max_length, int) or self.max_length <= FIRST_LABEL:
            raise DataError(f"`max_length` must be an integer above {FIRST_LABEL}, got {self.max_length!r}")
        if not isinstance(self.forbidden_ids, tuple | list | set | frozenset):
            raise DataError(f"`forbidden_ids` must be a tuple of token ids, got {self.forbidden_ids!r}")
        if self.turns not in get_args(Turns):
            raise DataError(f"`turns` must be one of {list(get_args(Turns))}, got {self.turns!r}")
        if self.thinking is not None and self.thinking not in get_args(Thinking):
            raise DataError(f"`thinking` must be one of {list(get_args(Thinking))} or None, got {self.thinking!r}")


class RowEncoder:
    """Turns examples into rows and counts what it drops, by reason.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        options (`RowOptions`): How.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: RowOptions):
        if not isinstance(options, RowOptions):
            raise DataError(f"`options` must be RowOptions, got {type(options).__name__}")
        self.tokenizer, self.options = tokenizer, options
        self.num_rows = 0
        self.dropped: Counter[str] = Counter()
        self._is_checked_for_chats = False

    def rows(self, examples: Iterable[Example]) -> Iterator[Row]:
        """Rows in the order of the examples; packed text comes when a row is full, its rest at the end."""
        waiting: list[int] = []
        for index, example in enumerate(examples):
            if example.text is None or not self.options.pack:
                for ids, mask in self._encoded(example, index):
                    yield from self._kept(ids, mask, example.where)
                continue
            waiting += self._ids(example.text) + self._end()
            whole = len(waiting) - len(waiting) % self.options.max_length
            for piece in self._pieces(waiting[:whole]):
                yield from self._kept(piece, [1] * len(piece), example.where)
            waiting = waiting[whole:]
        if waiting:
            yield from self._kept(waiting, [1] * len(waiting), "the last packed row")

    def prompts(self, examples: Iterable[Example], prompt_tokens: int) -> Iterator[list[int]]:
        """Prompts in the order of the examples."""
        for index, example in enumerate(examples):
            try:
                ids = self._prompt(example, index, prompt_tokens)
            except RefusedConversation as error:
                self._drop_refused(error)
                continue
            if not ids:
                self.dropped["has no user turn" if example.messages else "holds no text"] += 1
            elif len(ids) > self.options.max_length:
                self.dropped[f"has a prompt of more than `max_length` ({self.options.max_length}) tokens"] += 1
            elif self._is_forbidden(ids):
                self.dropped["holds one of `forbidden_ids`"] += 1
            else:
                self._check_ids(ids, example.where)
                self.num_rows += 1
                yield ids

    def check(self) -> None:
        """Warns of dropped rows.

        Raises:
            DataError: there were no rows, or more than half of them were dropped.
        """
        num_dropped = sum(self.dropped.values())
        if not num_dropped and not self.num_rows:
            raise DataError(
                "the data holds no rows: give a source with text in it (what `read_examples` returns can be read once)"
            )
        reasons = ", ".join(f"{count} of which each {reason}" for reason, count in self.dropped.most_common())
        if num_dropped > self.num_rows:
            raise DataError(
                f"nothing can be learned from {num_dropped} of {num_dropped + self.num_rows} rows: {reasons}. Raise "
                "`max_length` if rows are cut, give conversations with assistant turns, mend the chat template's "
                "{% generation %} markers, or let the target answer (`regenerate`)"
            )
        if num_dropped:
            logger.warning("ready_hf: %d rows kept, %d dropped: %s", self.num_rows, num_dropped, reasons)

    def _encoded(self, example: Example, index: int) -> Iterable[tuple[list[int], list[int]]]:
        if example.messages is not None:
            self._check_for_chats()
            options = template_options(self.options.thinking, self.options.seed, index)
            try:
                rows = encode_chat(example.messages, self.tokenizer, self.options.turns, options, example.where)
            except RefusedConversation as error:
                self._drop_refused(error)
                return []
            if not rows:
                roles = ", ".join(sorted({message["role"] for message in example.messages}))
                self.dropped[f"has no answer of the assistant (its roles: {roles})"] += 1
            return rows
        if example.prompt is None:
            pieces = self._pieces(self._ids(example.text or ""))
            if not pieces:
                self.dropped["holds no text"] += 1
            return [(piece, [1] * len(piece)) for piece in pieces]
        prompt, completion = self._ids(example.prompt), self._ids(example.completion or "", False)
        completion += self._end() if completion else []
        return [(prompt + completion, [0] * len(prompt) + [1] * len(completion))]

    def _kept(self, ids: list[int], mask: list[int], where: str) -> Iterator[Row]:
        """The row, cut to the greatest length, unless nothing is left to learn."""
        self._check_ids(ids, where)
        ids, cut = ids[: self.options.max_length], mask[: self.options.max_length]
        if self._is_forbidden(ids):
            self.dropped["holds one of `forbidden_ids`"] += 1
        elif any(cut[FIRST_LABEL:]):
            self.num_rows += 1
            yield {"input_ids": ids, "loss_mask": cut}
        elif any(mask[FIRST_LABEL:]):
            self.dropped[f"has its answer cut away by `max_length` ({self.options.max_length})"] += 1
        elif any(mask):
            self.dropped[f"has no more than {FIRST_LABEL} tokens"] += 1
        else:
            self.dropped["has no answer that is marked: a prompt alone, or a template that marks nothing"] += 1

    def _prompt(self, example: Example, index: int, prompt_tokens: int) -> list[int]:
        if example.messages is None:
            return (
                self._ids(example.text or "")[:prompt_tokens] if example.prompt is None else self._ids(example.prompt)
            )
        self._check_for_chats()
        turn = next((i for i, message in enumerate(example.messages) if message["role"] == "user"), None)
        if turn is None:
            return []
        options = template_options(self.options.thinking, self.options.seed, index)
        before = [message for message in example.messages[: turn + 1] if message["role"] != "assistant"]
        return encode_prompt(before, self.tokenizer, options, example.where)

    def _drop_refused(self, error: RefusedConversation) -> None:
        self.dropped[f"is refused by the chat template ({error.reason})"] += 1

    def _check_for_chats(self) -> None:
        if not self._is_checked_for_chats:
            check_chat_tokenizer(self.tokenizer, self.options.thinking)
            self._is_checked_for_chats = True

    def _check_ids(self, ids: list[int], where: str) -> None:
        size = self.options.vocab_size
        if size is not None and max(ids) >= size:
            raise DataError(
                f"{where} has the token id {max(ids)}, and the target knows 0 to {size - 1}: use the target's own "
                "tokenizer"
            )

    def _is_forbidden(self, ids: list[int]) -> bool:
        return not set(self.options.forbidden_ids).isdisjoint(ids)

    def _ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _end(self) -> list[int]:
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def _pieces(self, ids: list[int]) -> list[list[int]]:
        return [ids[begin : begin + self.options.max_length] for begin in range(0, len(ids), self.options.max_length)]
