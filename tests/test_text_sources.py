"""Reading text: every form of rows, every place, and what is refused with which words."""

import json
import sys

import pytest

from ready_hf.text_sources import DataError, Example, example_from, import_datasets, read_examples


def write_lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a"}, {"text": "a"}),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b"}),
        ({"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
        ({"prompt": "a", "package": "p"}, {"prompt": "a"}),
        ({"prompt": "a", "completion": None, "text": "t"}, {"text": "t"}),
        ({"prompt": [USER], "completion": [ASSISTANT]}, {"messages": [USER, ASSISTANT]}),
        ({"prompt": [USER], "completion": "ho"}, {"messages": [USER, ASSISTANT]}),
        ({"prompt": [USER]}, {"messages": [USER]}),
        ({"messages": [USER, ASSISTANT], "prompt": "hi"}, {"messages": [USER, ASSISTANT]}),
        ({"messages": None, "text": "a"}, {"text": "a"}),
        ({"messages": [{**USER, "name": None}]}, {"messages": [USER]}),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            {"messages": [USER, ASSISTANT]},
        ),
        ({"conversations": [USER]}, {"messages": [USER]}),
        ({"turns": ["hi", "more"]}, {"messages": [USER, {"role": "user", "content": "more"}]}),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]},
        ),
    ],
)
def test_forms_of_rows(row, expected):
    assert example_from(row, "row 0") == Example("row 0", **expected)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"body": "a", "id": 1}, ["row 0", "['body', 'id']", '"messages"', "columns="]),
        (["a"], ["row 0", "list"]),
        ({"text": 3}, ["`text`", "must be text", "int"]),
        ({"text": "\ud800"}, ["surrogate"]),
        ({"prompt": 3}, ["`prompt`", "int"]),
        ({"prompt": "a", "response": ["b"]}, ["completion", "list"]),
        ({"messages": []}, ["`messages`", "not empty"]),
        ({"messages": "hi"}, ["`messages`", "str"]),
        ({"messages": [3]}, ["message 1", "role", "int"]),
        ({"messages": [USER, {"role": "user"}]}, ["message 2", "`content`", "['role']"]),
        ({"messages": [{"content": "a"}]}, ["message 1", "`role`"]),
        ({"messages": [{"role": "user", "content": 3}]}, ["message 1", "int"]),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, ["`from`", "human", "narrator"]),
        ({"conversations": [{"from": "gpt", "value": None}]}, ["message 1", "NoneType"]),
        ({"turns": ["a", 3]}, ["`turns`", "message 2"]),
    ],
)
def test_refused_rows(row, words):
    with pytest.raises(DataError) as error:
        example_from(row, "row 0")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_files_and_folders_in_the_order_of_their_names(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second\nline")
    write_lines(tmp_path / "a.jsonl", {"text": "first"}, "", {"text": "line\u2028separator"})
    write_lines(tmp_path / "sub" / "c.jsonl", {"prompt": "p"})
    (tmp_path / "README.md").write_text("no data")
    found = list(read_examples(tmp_path))
    assert [example.text or example.prompt for example in found] == [
        "first",
        "line\u2028separator",
        "second\nline",
        "p",
    ]
    assert [example.where for example in found] == ["a.jsonl line 1", "a.jsonl line 3", "b.txt", "c.jsonl line 1"]
    assert list(read_examples(str(tmp_path / "b.txt"))) == [found[2]]


def test_a_byte_order_mark_and_windows_lines_are_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n')
    assert [example.text for example in read_examples(path)] == ["a", "b"]


def test_lines_are_read_when_they_are_needed(tmp_path):
    examples = read_examples(write_lines(tmp_path / "a.jsonl", {"text": "a"}, "{"))
    assert next(examples).text == "a"
    with pytest.raises(DataError, match="line 2 is not JSON"):
        next(examples)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"text": }\n', ["a.jsonl line 3", "not JSON", "column 10"]),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', ["a.jsonl line 2", "list"]),
        ("a.jsonl", b"[" * 100_000, ["a.jsonl line 1", "JSON"]),
        ("a.jsonl", b"\n \n", ["a.jsonl is empty"]),
        ("a.txt", b" \n", ["a.txt is empty"]),
        ("a.txt", b"caf\xe9", ["a.txt", "UTF-8"]),
        ("a.jsonl", b'{"text": "caf\xe9"}', ["a.jsonl", "UTF-8"]),
        ("a.csv", b"text\na\n", ["a.csv", ".txt or .jsonl", "datasets"]),
    ],
)
def test_refused_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        list(read_examples(tmp_path / name))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("source", ["gone.jsonl", "./gone", "/gone", "a/b/c"])
def test_a_missing_file_is_told_at_once(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_examples(source)


def test_an_empty_folder_is_told_at_once(tmp_path):
    with pytest.raises(DataError, match=r"holds no \.txt or \.jsonl file"):
        read_examples(tmp_path)


def test_rows_in_memory_with_other_names():
    rows = [{"content": "a", "text": "not this"}, {"content": "b"}]
    assert [example.text for example in read_examples(rows, columns={"content": "text"})] == ["a", "b"]
    with pytest.raises(DataError, match=r"row 0 must be an object"):
        list(read_examples(["a.jsonl"]))


def test_a_dataset_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'ready_hf\[train\]'"):
        read_examples("user/dataset")
    assert [example.text for example in read_examples(write_lines(tmp_path / "a.jsonl", {"text": "a"}))] == ["a"]


def test_a_loaded_dataset_gives_its_rows():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "a", "messages": None}, {"text": None, "messages": [USER]}])
    assert list(read_examples(rows)) == [Example("row 0", text="a"), Example("row 1", messages=[USER])]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_of_the_hub(monkeypatch, streaming):
    datasets = import_or_skip()
    asked = []

    def load_dataset(path, name, **options):
        asked.append((path, name, options))
        rows = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = list(read_examples("user/dataset", name="small", split="test", streaming=streaming))
    assert asked == [("user/dataset", "small", {"split": "test", "streaming": streaming})]
    assert found == [Example("user/dataset row 0", text="a"), Example("user/dataset row 1", text="b")]


def test_a_dataset_that_the_hub_does_not_give():
    import_or_skip()
    with pytest.raises(DataError, match=r"'nobody/nothing' is no file or folder here.*'train'.*check the spelling"):
        read_examples("nobody/nothing")  # the tests are offline


def import_or_skip():
    pytest.importorskip("datasets")
    return import_datasets()


def test_hidden_files_of_a_folder_are_left_alone(tmp_path):
    for name in (
        "a.txt",
        "B.TXT",
        ".hidden.txt",
        "._a.txt",
        ".git/x.txt",
        "deep/.ipynb_checkpoints/y.txt",
        "deep/c.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [example.text for example in read_examples(tmp_path)] == ["B.TXT", "a.txt", "deep/c.txt"]
