"""The table of a comparison with several seeds: means, and paired differences with their 95 % intervals.

    python examples/ablation_table.py docs/results/headline-seed*.json --of tau_of_samples
    python examples/ablation_table.py docs/results/headline-rounds-seed*.json

Every file is one seed, written by ablate_reader.py, or by ablation_rounds.py, with the same arms. A difference of two
arms is taken within a seed, relative to the arm it is compared with; its interval is Student's, over the seeds.
"""

import argparse
import json
import math
import pathlib
import statistics

from ablation_arms import ARMS, FULL, folder_of


T95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}  # by degrees of freedom
OF_ROUNDS = "tokens_per_forward"
# Options that may differ: the seed, places, and time, as steps are planned from it.
FREE = {"seed", "out", "save", "data", "target", "text", "seconds", "limit", "reserve", "report", "steps", "done"}


def loaded(path: pathlib.Path) -> dict:
    """One seed; what ablation_rounds.py wrote of saved drafters takes the shape of the other files."""
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    if "arms" in record:
        return record
    names = {folder_of(name): name for name in ARMS}
    arms = {names.get(key, key): {OF_ROUNDS: found["tokens_per_forward"]["value"]} for key, found in record.items()}
    return {"arms": arms, "options": {"seed": text}}  # which is not said: no two seeds find the same


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and both ends of Student's 95 % interval of the mean; NaN for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def gains(records: list[dict], arm: str, base: str, of: str) -> list[float]:
    """Relative differences in per cent, one per seed."""
    return [(record["arms"][arm][of] / record["arms"][base][of] - 1) * 100 for record in records]


def compared_with(records: list[dict]) -> list[str]:
    """The arms that all others of their setting are compared with: the first two, without the setting's name."""
    return list(dict.fromkeys(name.removesuffix(FULL) for name in records[0]["arms"]))[:2]


def rows(records: list[dict], of: str) -> list[list[str]]:
    """One row per arm; differences are with the arms of its own setting that come before it."""
    found = []
    for full in (False, True):
        names = [name for name in records[0]["arms"] if name.endswith(FULL) == full]
        for name in names:
            mean, low, high = interval([record["arms"][name][of] for record in records])
            row = [
                name,
                f"{size / 1e6:.2f} M" if (size := records[0]["arms"][name].get("parameters")) else "",
                f"{mean:.3f} [{low:.3f}, {high:.3f}]",
            ]
            for base in (base + FULL if full else base for base in compared_with(records)):
                if base in names[: names.index(name)]:
                    gain, low, high = interval(gains(records, name, base, of))
                    row.append(f"{gain:+.1f} % [{low:+.1f}, {high:+.1f}]")
                else:
                    row.append("")
            found.append(row)
    return found


def check(records: list[dict], of: str) -> None:
    """Refuses files that are not the seeds of one comparison."""
    if len({tuple(record["arms"]) for record in records}) > 1:
        raise SystemExit("the files have different arms: name those of one comparison")
    if len({record["options"]["seed"] for record in records}) < len(records) or len(records) > max(T95) + 1:
        raise SystemExit(f"expected one file per seed, at most {max(T95) + 1}, got {len(records)} files")
    settings = [
        {"text": record.get("text")} | {k: v for k, v in record["options"].items() if k not in FREE}
        for record in records
    ]
    keys = sorted(set().union(*settings))
    differing = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    if differing:
        raise SystemExit(f"the files differ in more than the seed ({', '.join(differing)}): name those of one setting")
    figures = next(iter(records[0]["arms"].values()))
    if not isinstance(figures.get(of), float):
        known = ", ".join(name for name, value in figures.items() if isinstance(value, float))
        raise SystemExit(f"--of must be one of {known}, got {of}")


def main() -> None:
    """Prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    parser.add_argument("--of", help=f"figure of every arm; default: tau_of_samples, or {OF_ROUNDS}")
    args = parser.parse_args()
    records = [loaded(path) for path in args.files]
    of = args.of or ("tau_of_samples" if "steps" in records[0] else OF_ROUNDS)
    check(records, of)
    steps = [record["steps"] for record in records if "steps" in record]
    print(f"{len(records)} seeds" + (f", {min(steps)} to {max(steps)} steps" if steps else "") + "\n")
    head = ["arm", "parameters", of, *(f"over {name}" for name in compared_with(records))]
    for row in (head, ["---"] * len(head), *rows(records, of)):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
