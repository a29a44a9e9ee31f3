"""Rows for training a drafter: token ids, and which of them are learned.

    read_examples(source) --+--> training_rows --> [{"input_ids": [...], "loss_mask": [...]}, ...] --> ReadyTrainer
                            |
                            +--> prompt_ids --> regenerate: such rows, written by the target itself

The first needs answers in the data, which somebody else has written; the second only questions.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ready_hf.row_encoder import Row, RowEncoder, RowOptions
from ready_hf.text_sources import DataError, Example, import_datasets


STREAM_CHECKED_AFTER = 256  # rows


def training_rows(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, options: RowOptions | None = None
) -> list[Row]:
    """All rows of some examples, in their order.

    Args:
        examples (`Iterable[Example]`): From `read_examples`.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        options (`RowOptions`, *optional*): Lengths, masks and thinking.

    Returns:
        `list[dict]`: With `input_ids` and `loss_mask`, lists of ints of one length, at most `max_length`.

    Raises:
        DataError: no examples; nothing to learn in more than half of the rows; no chat template for conversations, or
        one that hides where answers stand; ids that the target does not know.
    """
    _check_examples(examples)
    encoder = RowEncoder(tokenizer, options or RowOptions())
    rows = list(encoder.rows(examples))
    encoder.check()
    return rows


def stream_rows(
    read: Callable[[], Iterable[Example]], tokenizer: PreTrainedTokenizerBase, options: RowOptions | None = None
) -> Any:
    """The rows of `training_rows` one by one, for sources larger than the memory; the trainer needs `max_steps`.

    What is in order for the first rows is taken to be so for all: they are checked once, not at the end.

    Args:
        read (`Callable[[], Iterable[Example]]`): Reads the source from its beginning, such as
            `functools.partial(read_examples, "user/dataset", streaming=True)`.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        options (`RowOptions`, *optional*): As above.

    Returns:
        `datasets.IterableDataset`: In one shard, hence read by one worker; `.shuffle(buffer_size=...)` mixes rows.

    Raises:
        ImportError: the `datasets` library is missing.
    """
    rows = {"read": read, "tokenizer": tokenizer, "options": options or RowOptions()}
    return import_datasets().IterableDataset.from_generator(_stream, gen_kwargs=rows)


def prompt_ids(
    examples: Iterable[Example],
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions | None = None,
    *,
    prompt_tokens: int = 64,
) -> list[list[int]]:
    """Prompts for the target: a conversation up to its first user turn, a `prompt`, the first tokens of a text.

    Args:
        examples (`Iterable[Example]`): From `read_examples`.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        options (`RowOptions`, *optional*): Prompts of more than `max_length` tokens are dropped; `thinking`, `seed`
            and `vocab_size` as for rows.
        prompt_tokens (`int`): Tokens that a plain text begins with.

    Raises:
        DataError: as `training_rows`; more than half of the examples give no prompt.
    """
    if prompt_tokens < 1:
        raise DataError(f"`prompt_tokens` must be at least 1, got {prompt_tokens}")
    _check_examples(examples)
    encoder = RowEncoder(tokenizer, options or RowOptions())
    prompts = list(encoder.prompts(examples, prompt_tokens))
    encoder.check()
    return prompts


def _check_examples(examples: Any) -> None:
    if isinstance(examples, str | Path):
        raise DataError(f"examples are expected, got {str(examples)!r}: pass `read_examples({str(examples)!r})`")


def _stream(
    read: Callable[[], Iterable[Example]], tokenizer: PreTrainedTokenizerBase, options: RowOptions
) -> Iterator[Row]:
    encoder, is_checked = RowEncoder(tokenizer, options), False
    for row in encoder.rows(read()):
        yield row
        if not is_checked and encoder.num_rows + sum(encoder.dropped.values()) >= STREAM_CHECKED_AFTER:
            encoder.check()
            is_checked = True
    if not is_checked:
        encoder.check()
