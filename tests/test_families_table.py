"""The README's table of families is what the last runs of `test_families.py` found, and covers what it tests now."""

import json
from pathlib import Path

import pytest

import families_table
from test_families import EXACT, REFUSED, case


ROOT = Path(__file__).parents[1]
RESULTS = json.loads((ROOT / "docs" / "families.json").read_text())


def test_every_family_is_there_as_this_release_has_it():
    rows = RESULTS[families_table.release()]
    assert list(rows) == [*EXACT, *REFUSED]
    for name in EXACT:
        try:
            case(name)
        except pytest.skip.Exception:
            assert rows[name] == {"status": families_table.ABSENT}
        else:
            assert rows[name]["status"] == "exact"
    assert {rows[name]["status"] for name in REFUSED} == {"refused"}


def test_the_readme_shows_the_table():
    assert families_table.FIRST + families_table.render(RESULTS) in (ROOT / "README.md").read_text()


def test_a_run_that_fails_or_leaves_families_out_writes_nothing(tmp_path):
    path = tmp_path / "families.json"
    collector = families_table.Collector(path)
    collector.rows = {name: {"status": "exact"} for name in EXACT}
    assert "left as it was" in collector.write()
    assert not path.exists()
