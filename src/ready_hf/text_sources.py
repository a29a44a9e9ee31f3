"""Text to learn from, wherever it lies: local files, folders of them, datasets of the Hub, rows in memory.

Every source becomes an iterator of `Example`s, one row at a time, so that a source may be larger than the memory.
Nothing here knows of tokens.
"""

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


FORMS = (
    '{"text": "..."}, {"prompt": "...", "completion": "..."} ("response" is a completion too), {"messages": [...]}, '
    '{"conversations": [...]} or {"turns": ["...", ...]}'
)
SUFFIXES = (".txt", ".jsonl")
CHAT_COLUMNS = ("messages", "conversations", "turns")
ROLES = {  # of the sharegpt form
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


class DataError(ValueError):
    """Data that cannot be learned from; the message says what was found, what is allowed and what to do."""


class RefusedConversation(DataError):
    """A conversation that the chat template does not take.

    Args:
        where (`str`): Where it stands.
        reason (`str`): The template's own words.
    """

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: the chat template refuses the conversation: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class Example:
    """One row of a source: a text, or a prompt with or without its completion, or a conversation.

    Args:
        where (`str`): Where it stands, for error messages.
        text (`str`, *optional*): Plain text.
        prompt (`str`, *optional*): Plain text that is not learned.
        completion (`str`, *optional*): What follows `prompt`.
        messages (`list[dict]`, *optional*): For a chat template.
    """

    where: str
    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_examples(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Example]:
    """The examples of a source, in its order.

    Args:
        source (`str`, `Path` or `Iterable[Mapping]`): A `.txt` file (one text), a `.jsonl` file (one object per
            line), a folder (all of these below it, by name, without hidden ones), else a dataset on the Hub; or rows
            in memory, such as a loaded dataset.
        name (`str`, *optional*): Configuration of a dataset on the Hub.
        split (`str`): Split of a dataset on the Hub.
        streaming (`bool`): Whether to read a dataset of the Hub without downloading it first.
        columns (`Mapping[str, str]`, *optional*): New names of columns, `{"content": "text"}`.

    Raises:
        DataError: no such file, folder or dataset; a file of another format, empty, or not UTF-8; a row of another
            form.
        ImportError: a dataset of the Hub without the `datasets` library.
    """
    if not isinstance(source, str | Path):
        return _examples(source, "row", columns)
    path = Path(source).expanduser()
    if path.is_dir() or path.is_file():
        return _local_examples(_files(path), columns)
    if isinstance(source, Path) or _looks_like_a_path(source):
        raise DataError(f"{source} does not exist: give a {' or '.join(SUFFIXES)} file, a folder, or a dataset's name")
    return _examples(_hub_rows(source, name, split, streaming), f"{source} row", columns)


def import_datasets() -> Any:
    """The `datasets` library.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            "datasets of the Hub, streams and regenerated text need the `datasets` library (local text does not): "
            f"it is in the extra `train`, pip install 'ready_hf[train]' ({error})"
        ) from error


def example_from(row: Mapping[str, Any], where: str) -> Example:
    """One row as an `Example`; columns that are `None` count as absent, and of several forms a chat wins.

    A `prompt` that is text stays plain text; a list of messages makes a conversation.

    Raises:
        DataError: a row of another form.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where} must be an object like {FORMS}, got {type(row).__name__}")
    row = {name: value for name, value in row.items() if value is not None}
    for column in CHAT_COLUMNS:
        if column in row:
            return Example(where, messages=_messages(row[column], f"{where}: `{column}`"))
    completion = row.get("completion", row.get("response"))
    if "prompt" in row and (completion is not None or "text" not in row):
        return _prompt_example(row["prompt"], completion, where)
    if "text" in row:
        return Example(where, text=_text(row["text"], f"{where}: `text`"))
    raise DataError(
        f'{where} has the columns {sorted(row)}, expected {FORMS}: rename yours with `columns={{"yours": "text"}}`'
    )


def _prompt_example(prompt: Any, completion: Any, where: str) -> Example:
    if not isinstance(prompt, list):
        completion = None if completion is None else _text(completion, f"{where}: the completion")
        return Example(where, prompt=_text(prompt, f"{where}: `prompt`"), completion=completion)
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    messages = _messages(prompt, f"{where}: `prompt`")
    return Example(
        where, messages=messages + _messages(completion, f"{where}: the completion") if completion else messages
    )


def _messages(values: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not values:
        raise DataError(f"{where} must be a list of messages that is not empty, got {_short(values)}")
    return [_message(value, f"{where}, message {number}") for number, value in enumerate(values, 1)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"role": "user", "content": _text(value, where)}
    if not isinstance(value, Mapping):
        raise DataError(f"{where} must be an object with `role` and `content`, got {_short(value)}")
    message = {name: entry for name, entry in value.items() if entry is not None}
    if "from" in message and "role" not in message:
        speaker = message["from"]
        if speaker not in ROLES:
            raise DataError(f"{where}: `from` must be one of {sorted(ROLES)}, got {_short(speaker)}")
        message = {"role": ROLES[speaker], "content": message.get("value")}
    if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
        raise DataError(f"{where} must have `role` and `content` (or `from` and `value`), got {sorted(value)}")
    if not isinstance(message.get("content"), list) and "tool_calls" not in message:
        message["content"] = _text(message["content"], where)
    return message


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where} must be text, got {_short(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where} holds half of a surrogate pair, which is no text") from None
    return value


def _short(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:40]!r})"


def _looks_like_a_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or bool(Path(source).suffix in SUFFIXES)


def _files(path: Path) -> list[Path]:
    """The file itself, or all readable ones below a folder; hidden files, and others, are left alone there."""
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"{path.name} is no {' or '.join(SUFFIXES)} file: convert it, or load it with the `datasets` library "
                "and give the loaded dataset"
            )
        return [path]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"the folder {path} holds no {' or '.join(SUFFIXES)} file")
    return files


def _local_examples(files: list[Path], columns: Mapping[str, str] | None) -> Iterator[Example]:
    for path in files:
        is_empty = True
        try:
            for example in _file_examples(path, columns):
                is_empty = False
                yield example
        except UnicodeDecodeError as error:
            raise DataError(f"{path.name} is not a text file in UTF-8 ({error.reason}): convert it") from None
        if is_empty:
            raise DataError(f"{path.name} is empty: remove it, or write text into it")


def _file_examples(path: Path, columns: Mapping[str, str] | None) -> Iterator[Example]:
    if path.suffix.lower() == ".txt":
        text = path.read_text(encoding="utf-8-sig")
        if text.strip():
            yield Example(path.name, text=text)
        return
    with path.open(encoding="utf-8-sig", newline="\n") as lines:  # JSON strings may hold other line separators
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path.name} line {number}"
                yield example_from(_renamed(_object(line, where), columns), where)


def _object(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; nesting without end
        raise DataError(f"{where} cannot be read as JSON: {error}") from None


def _examples(rows: Iterable[Any], where: str, columns: Mapping[str, str] | None) -> Iterator[Example]:
    for index, row in enumerate(rows):
        yield example_from(_renamed(row, columns), f"{where} {index}")


def _renamed(row: Any, columns: Mapping[str, str] | None) -> Any:
    if not columns or not isinstance(row, Mapping):
        return row
    kept = {name: value for name, value in row.items() if name not in columns}
    return kept | {columns[name]: row[name] for name in columns if name in row}


def _hub_rows(source: str, name: str | None, split: str, streaming: bool) -> Iterable[Any]:
    datasets = import_datasets()
    try:
        return datasets.load_dataset(source, name, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{source!r} is no file or folder here, and the Hub gave no dataset of this name with split {split!r} "
            f"({reason}): check the spelling, `name`, `split` and the connection"
        ) from error
