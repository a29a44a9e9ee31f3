"""The table of cases is complete and says the truth about which of them are tested."""

import re
from pathlib import Path


FOLDER = Path(__file__).parent
ROW = re.compile(r"^\| C(\d\d) \| (tested|waits for issue [3-6]) \|", re.MULTILINE)


def test_every_case_is_listed_once_and_the_tested_ones_have_tests():
    rows = ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _ in rows] == list(range(1, 95))
    tests = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("test_*.py"))
    tested = set(re.findall(r"^def test_c(\d\d)_", tests, re.MULTILINE))
    assert {number for number, status in rows if status == "tested"} == tested
