"""The table of a comparison with several seeds: means, and paired differences with their 95 % intervals.

    python examples/ablation_table.py docs/results/headline-seed*.json --of tau_of_samples

Every file is one seed, written by ablate_reader.py with the same arms. A difference of two arms is taken within a
seed, relative to the arm it is compared with; its interval is Student's, over the seeds.
"""

import argparse
import json
import math
import pathlib
import statistics

from ablation_arms import FULL


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


def rows(records: list[dict], of: str) -> list[list[str]]:
    """One row per arm, the first arm of its setting being what it is compared with."""
    found = []
    for full in (False, True):
        names = [name for name in records[0]["arms"] if name.endswith(FULL) == full]
        for name in names:
            mean, low, high = interval([record["arms"][name][of] for record in records])
            row = [
                name,
                f"{records[0]['arms'][name]['parameters'] / 1e6:.2f} M",
                f"{mean:.3f} [{low:.3f}, {high:.3f}]",
            ]
            for base in names[: min(2, names.index(name))]:
                gain, low, high = interval(gains(records, name, base, of))
                row.append(f"{gain:+.1f} % [{low:+.1f}, {high:+.1f}]")
            found.append([*row, *[""] * (5 - len(row))])
    return found


def main() -> None:
    """Prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    parser.add_argument("--of", default="tau_of_samples", help="figure of every arm")
    args = parser.parse_args()
    records = [json.loads(path.read_text(encoding="utf-8")) for path in args.files]
    if len({tuple(record["arms"]) for record in records}) > 1:
        raise SystemExit("the files have different arms: name those of one comparison")
    if len({record["options"]["seed"] for record in records}) < len(records) or len(records) > max(T95) + 1:
        raise SystemExit(f"expected one file per seed, at most {max(T95) + 1}, got {len(records)} files")
    names = [name for name in records[0]["arms"] if not name.endswith(FULL)]
    head = ["arm", "parameters", args.of, *(f"over {name}" for name in (names or list(records[0]["arms"]))[:2])]
    for row in (head, ["---"] * len(head), *rows(records, args.of)):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
