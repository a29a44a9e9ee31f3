"""Files of rows: whole or not there, and never used when they are damaged."""

import logging

import pytest


pytest.importorskip("datasets")
from ready_hf.row_shards import find_shard, open_shards, save_shard, write_whole  # noqa: E402


ROWS = [{"input_ids": [1, 2, 300_000], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1]}]


def test_rows_come_back_in_the_order_of_the_shards(tmp_path):
    paths = [save_shard(tmp_path, 1, ROWS[1:], {}), save_shard(tmp_path, 0, ROWS[:1], {"seed": "5"})]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert [find_shard(tmp_path, index) for index in (0, 1, 2)] == [paths[1], paths[0], None]
    assert list(open_shards(paths[::-1])) == ROWS


@pytest.mark.parametrize("kept", [0, 1, 100, -1, -8, -9])
def test_a_truncated_file_is_not_used(tmp_path, caplog, kept):
    path = save_shard(tmp_path, 0, ROWS, {})
    path.write_bytes(path.read_bytes()[:kept])
    with caplog.at_level(logging.WARNING):
        assert find_shard(tmp_path, 0) is None
    assert f"{path} is damaged" in caplog.text
    assert save_shard(tmp_path, 0, ROWS, {}) == path
    assert find_shard(tmp_path, 0) == path


def test_a_file_with_one_other_byte_is_not_used(tmp_path):
    path = save_shard(tmp_path, 0, ROWS, {})
    content = bytearray(path.read_bytes())
    content[content.index((300_000).to_bytes(4, "little"))] ^= 1  # still a readable file
    path.write_bytes(content)
    assert list(open_shards([path])) != ROWS
    assert find_shard(tmp_path, 0) is None


def test_other_files_of_the_same_number_go_once_there_is_a_whole_one(tmp_path):
    damaged = tmp_path / "shard-00000-0123456789abcdef.arrow"
    damaged.write_bytes(b"nothing")
    other = save_shard(tmp_path, 1, ROWS, {})
    path = save_shard(tmp_path, 0, ROWS, {})
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def stop(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
