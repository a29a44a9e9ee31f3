"""The README's table of families, from the outcomes of `test_families.py` on one or more releases of transformers."""

import json
from pathlib import Path
from typing import Any

import transformers


ABSENT = "not in transformers"
FIRST, LAST = "<!-- families -->\n", "<!-- end of families -->\n"
NAMES = {
    "gated_delta_rule": "gated delta rule",
    "kda": "KDA",
    "mamba2": "Mamba-2",
    "convolutions": "none: convolutions",
}


def release() -> str:
    """The installed transformers, as 5.24."""
    return ".".join(transformers.__version__.split(".")[:2])


class Collector:
    """A pytest plugin that writes what a run says of every family into a file, and the README's table anew."""

    def __init__(self, path: Path):
        self.path, self.rows, self.failed = path, {}, []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when != "call":
            return
        for name, said in report.user_properties:
            if name == "family":
                row = self.rows.setdefault(said.pop("name"), {"tested": []})
                row["tested"].append(said.pop("tested"))
                row.update(said)
        if report.skipped and ABSENT in str(report.longrepr):
            self.rows.setdefault(report.nodeid.split("[")[1].rstrip("]"), {})["status"] = ABSENT

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(self.write())

    def write(self) -> str:
        """Writes the file and the README if every family was tested; says what was done."""
        expected = _order()
        if self.failed or any(name not in self.rows for name in expected):
            return f"{self.path} is left as it was: run all of test_families.py, and let it pass"
        rows = {name: self.rows[name] for name in expected}
        for row in rows.values():
            if "tested" in row:
                row["tested"] = sorted(set(row["tested"]))
        results = json.loads(self.path.read_text()) if self.path.exists() else {}
        results[release()] = rows
        self.path.write_text(json.dumps(results, indent=1) + "\n")
        write_readme(results)
        return f"wrote {self.path} and the README's table"


def _order() -> list[str]:
    from test_families import EXACT, REFUSED

    return [*EXACT, *REFUSED]


def render(results: dict[str, Any]) -> str:
    """The table in Markdown, one row per family and one column per release.

    Args:
        results (`dict`): By release, then by family: status, and for what was tested model, recurrence and tests.
    """
    releases = sorted(results, key=lambda name: [int(part) for part in name.split(".")])
    heads = ["model type", "model", "recurrence", "tested with", *(f"transformers {name}" for name in releases)]
    lines = [_line(heads), "|" + "---|" * len(heads)]
    newest = results[releases[-1]]
    for name in newest:
        found = [results[one].get(name, {"status": "not run"}) for one in releases]
        row = next(one for one in reversed(found) if "tested" in one)
        tests = set(row["tested"])
        tested = [what for what in ("ids, states", "ReaDy, lookup", "DSpark, lookup") if what in tests]
        tested += ["every block and share"] if "grid" in tests else []
        family, _, image = name.partition(" ")
        recurrence = NAMES.get(row["recurrence"], row["recurrence"])
        status = ["not in this release" if one["status"] == ABSENT else one["status"] for one in found]
        cells = [f"`{family}`{' ' + image if image else ''}", f"`{row['model']}`", recurrence]
        lines.append(_line([*cells, "; ".join(tested) or "its refusal", *status]))
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write_readme(results: dict[str, Any]) -> None:
    """Puts the table between the two marks in the README."""
    readme = Path(__file__).parents[1] / "README.md"
    before, rest = readme.read_text().split(FIRST)
    readme.write_text(before + FIRST + render(results) + LAST + rest.split(LAST)[1])
