"""An evaluation as Markdown, HTML and plain numbers: blocks of text and tables, made once for all forms."""

import html as escaping
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ready_hf.evaluation_result import PLAIN, Evaluation, Position, survival
from ready_hf.intervals import MACRO, Estimate, finite
from ready_hf.ways import name_of


Table = list[list[str]]  # the first row is the head
Block = str | Table  # a text that starts with "# " is a heading


def blocks(found: Evaluation) -> list[Block]:
    """The report, in reading order."""
    setting = ", ".join(f"{name} {value}" for name, value in found.setting.items())
    made: list[Block] = [f"Setting: {setting}."] if setting else []
    made += [_identity(found)] if 0 in found.temperatures else []
    for temperature in found.temperatures:
        made += _temperature(found, temperature)
    for name, result in found.break_evens.items():
        head, _, *rows = result.table().splitlines()
        made += [f"# Break-even of {name}, greedy", f"{result.verdict[0].upper()}{result.verdict[1:]}."]
        made.append([[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows)])
    return made


def markdown(made: Sequence[Block]) -> str:
    """Blocks as Markdown."""
    parts = []
    for block in made:
        if isinstance(block, str):
            parts.append(f"##{block[1:]}" if block.startswith("# ") else block)
            continue
        head, *rows = [[cell.replace("|", "\\|") for cell in row] for row in block]
        lines = [head, ["---"] * len(head), *rows]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in lines))
    return "\n\n".join(parts) + "\n"


def html(made: Sequence[Block]) -> str:
    """Blocks as HTML, for notebooks."""
    parts = []
    for block in made:
        if isinstance(block, str):
            heading = block.startswith("# ")
            text = escaping.escape(block[2:] if heading else block)
            parts.append(f"<h4>{text}</h4>" if heading else f"<p>{text}</p>")
            continue
        head, *rows = [[escaping.escape(cell) for cell in row] for row in block]
        lines = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
        parts.append(f"<table>{''.join(lines)}</table>")
    return "".join(parts)


def to_dict(found: Evaluation) -> dict[str, Any]:
    """Plain numbers; `None` where there is no value."""
    rows: dict[str, dict[str, Any]] = {}
    for temperature in found.temperatures:
        rows[name_of(temperature)] = {row: _row_dict(found, temperature, row) for row in found.rows}
    identical = {row: dict(zip(("identical", "texts"), found.identical(row), strict=True)) for row in found.drafters}
    return {
        "setting": dict(found.setting),
        "contexts": found.contexts,
        "looping_prompts": {name_of(t): found.prompts(t, looping=True) for t in found.temperatures},
        "identity": identical if 0 in found.temperatures else {},
        "figures": rows,
        "break_even": {name: result.to_dict() for name, result in found.break_evens.items()},
        "texts": [{k: v for k, v in asdict(text).items() if k != "log"} for text in found.texts],
    }


def _row_dict(found: Evaluation, temperature: float, row: str) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens_per_second": finite(found.tokens_per_second(temperature, row))}
    if row == PLAIN:
        return figures
    drafts, forwards = found.drafts(temperature, row)
    figures |= {
        "drafts": drafts,
        "forwards": forwards,
        "accepted_length": _dicts(found.accepted_length(temperature, row)),
        "accepted_length_looping": _dicts(found.accepted_length(temperature, row, looping=True)),
        "speed": _dicts(found.speed(temperature, row)),
        "positions": _positions_dict(found.positions(temperature, row)),
        "positions_by_context": {
            name: _positions_dict(found.positions(temperature, row, i)) for i, name in enumerate(found.contexts)
        },
    }
    if row != found.drafters[0]:
        difference = found.difference(temperature, row, found.drafters[0])
        figures[f"accepted_length_minus_{found.drafters[0]}"] = _dicts(difference)
    return figures


def _dicts(estimates: dict[str, Estimate]) -> dict[str, Any]:
    return {task: estimate.to_dict() for task, estimate in estimates.items()}


def _positions_dict(found: Sequence[Position]) -> list[dict[str, Any]]:
    shares: list[float | None] = [*survival(found)]
    shares += [None] * (len(found) - len(shares))
    return [
        {
            **asdict(position),
            "acceptance": finite(position.acceptance),
            "conditional": finite(position.conditional),
            "survival": share,
        }
        for position, share in zip(found, shares, strict=True)
    ]


def _identity(found: Evaluation) -> str:
    parts = []
    for row in found.drafters:
        same, of = found.identical(row)
        text = "identical" if same == of else f"DIFFERENT in {of - same} of {of}"
        parts.append(f"{row} {text}")
    texts = found.identical(found.drafters[0])[1]
    found_so = f"Greedy tokens against plain decoding, {texts} text{'s' * (texts != 1)} each: {'; '.join(parts)}."
    dtype = found.setting.get("dtype", "float32")
    if found.is_identical or dtype == "float32":
        return found_so
    return (
        f"{found_so} In {dtype} they may part at near ties: `ready-hf verify --dtype {dtype}` tells ties from faults."
    )


def _temperature(found: Evaluation, temperature: float) -> list[Block]:
    kept, looping = found.prompts(temperature), found.prompts(temperature, looping=True)
    title = name_of(temperature).capitalize()
    note = f"{len(kept)} prompts; {len(looping)} more with a looping text are left out of all figures but their own."
    made: list[Block] = [f"# {title}", note]
    if looping:
        loops = [
            f"{row} {found.accepted_length(temperature, row, looping=True)[MACRO].text()}" for row in found.drafters
        ]
        made.append(f"Looping prompts, tokens per forward: {'; '.join(loops)}.")
    if not kept:
        return [*made, "No other prompt is left, so there are no figures."]
    made += [
        "Macro mean over tasks, with 95 % intervals over prompts; tokens/s are those of all texts together.",
        _summary(found, temperature),
    ]
    tasks = [task for task in found.accepted_length(temperature, found.drafters[0]) if task != MACRO]
    if len(tasks) > 1:
        made += [f"# {title}: tokens per forward by task", _tasks(found, temperature, tasks, "accepted_length")]
        made += [f"# {title}: speed by task", _tasks(found, temperature, tasks, "speed")]
    made += _slower(found, temperature)
    made += [f"# {title}: acceptance by position", "Share of verified drafts; in brackets that given all before."]
    made.append(_positions(found.drafters, [found.positions(temperature, row) for row in found.drafters]))
    for row in found.drafters:
        cells = [found.positions(temperature, row, i) for i in range(len(found.contexts))]
        used = [i for i, cell in enumerate(cells) if cell]
        if len(used) > 1:
            made.append(f"# {title}: acceptance by position and context length, {row}")
            made.append(_positions([f"{found.contexts[i]} tokens" for i in used], [cells[i] for i in used]))
    return made


def _slower(found: Evaluation, temperature: float) -> list[Block]:
    """Which rows lose against plain decoding, and where."""
    places = []
    for row in found.drafters:
        speeds = found.speed(temperature, row)
        names = {task: f"{row} on {task}" for task in speeds if task != MACRO}
        if len(names) > 1:
            names[MACRO] = f"{row} in the {MACRO}"
        places += [f"{name} ({speeds[task].value:.2f})" for task, name in names.items() if speeds[task].value < 1]
    return [f"SLOWER than plain decoding: {'; '.join(places)}."] if places else []


def _summary(found: Evaluation, temperature: float) -> Table:
    first = found.drafters[0]
    head = ["", "tokens per forward", "speed", "tokens/s", "drafts per forward"]
    rows = [head, [PLAIN, "1.00", "1.00", f"{found.tokens_per_second(temperature, PLAIN):.1f}", ""]]
    for row in found.drafters:
        drafts, forwards = found.drafts(temperature, row)
        rows.append(
            [
                row,
                found.accepted_length(temperature, row)[MACRO].text(),
                found.speed(temperature, row)[MACRO].text(),
                f"{found.tokens_per_second(temperature, row):.1f}",
                f"{drafts / forwards:.2f}" if forwards else "n/a",
            ]
        )
    if len(found.drafters) > 1:
        head.append(f"tokens per forward minus {first}")
        for cells, row in zip(rows[1:], found.rows, strict=True):
            has_one = row not in (PLAIN, first)
            cells.append(found.difference(temperature, row, first)[MACRO].text("+.3f") if has_one else "")
    return rows


def _tasks(found: Evaluation, temperature: float, tasks: Sequence[str], figure: str) -> Table:
    by_row = [getattr(found, figure)(temperature, row) for row in found.drafters]
    return [["task", *found.drafters], *([task, *(row[task].text() for row in by_row)] for task in tasks)]


def _positions(names: Iterable[str], columns: Sequence[Sequence[Position]]) -> Table:
    rows = [["position", *names]]
    for k in range(max(len(column) for column in columns)):
        cells = [_share(column[k]) if k < len(column) else "" for column in columns]
        rows.append([str(k + 1), *cells])
    return rows


def _share(position: Position) -> str:
    given = "n/a" if math.isnan(position.conditional) else f"{position.conditional:.0%}"
    return f"{position.acceptance:.0%} ({given}), n = {position.drafted}"
