"""The demo's own parts: how it cuts a file, and what it says to wrong arguments. Its story is run by `make demo`."""

import sys

import pytest

from ready_hf import demo


def test_pieces_hold_the_whole_text_and_keep_to_the_limit():
    text = "\n\n".join(f"def f{i}():\n    return {i}" for i in range(40)) + "\n\n" + "x = 1\n" * 200 + "y" * 1000
    found = demo.pieces(text, 100)
    assert all(0 < len(piece) <= 100 for piece in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_a_long_line_is_cut_at_the_limit():
    assert [len(piece) for piece in demo.pieces("z" * 950, 300)] == [300, 300, 300, 50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "no_such_file.py"], "is not a file"),
        (["--pieces", "0"], "at least 1"),
        (["--pieces", "-1"], "at least 1"),
        (["--old", "no_such_name"], "does not occur"),
        (["--old", "to tal"], "is not a Python name"),
        (["--new", ""], "is not a Python name"),
        (["--new", "\\1"], "is not a Python name"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as error:
        demo.main()
    assert message in str(error.value) + capsys.readouterr().err


def test_a_binary_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)))
    monkeypatch.setattr(sys, "argv", ["demo", "--file", str(path)])
    with pytest.raises(SystemExit, match="UTF-8"):
        demo.main()


def test_drafted_edit_is_identical_and_faster_per_forward(tmp_path, capsys):
    path = tmp_path / "area.py"
    path.write_text("def area(width, height):\n    total = width * height\n    return total\n")
    assert demo.edit_file(path, "total", "size", most=1)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("prompt lookup"))
    assert row.endswith("yes")
    assert float(row.split()[2]) > 1.5  # tokens per forward
