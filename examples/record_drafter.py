"""Put a drafter that ablate_reader.py trained beside those of train_drafter.py: measured, with a record and a card.

    python examples/record_drafter.py small.json --arm default --drafter small/default --target small_target
        --text text --out small_ready

`--out` gets the weights, `training.json` and README.md. Measured on the held-out rows in `--text`, which
on_policy_text.py wrote, as train_drafter.py measures: expected tokens a round, with the states that the target has
and with wrong ones.
"""

import argparse
import json
import pathlib

import torch
from ablation_arms import ARMS
from on_policy_text import PROMPTS, check_least, make_folder, read_fields, read_text
from train_drafter import DEVICE, evaluate_all
from transformers import AutoModelForCausalLM
from write_drafter_cards import write_card

import ready_hf
from ready_hf import ReadyDrafterModel


FIELDS = ("command", "date", "device", "versions", "options", "steps", "arms")


def read_record(path: pathlib.Path, arm: str) -> dict:
    """What ablate_reader.py wrote, checked for the arm and for text that the target wrote."""
    if not path.is_file():
        raise SystemExit(f"there is no file {path}: ablate_reader.py --out writes it")
    record = read_fields(path, FIELDS, "name what ablate_reader.py --out wrote")
    if not all(isinstance(record[name], dict) for name in ("versions", "options", "arms")):
        raise SystemExit(f"{path} is not laid out as ablate_reader.py --out writes it: name such a file")
    if arm not in record["arms"]:
        raise SystemExit(f"--arm must be one of {', '.join(record['arms'])}, got {arm}")
    if record["options"].get("on_policy") is None:
        raise SystemExit(f"{path} is of a training on other text than the target's own: train with --on-policy")
    return record


def main() -> None:
    """Measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=pathlib.Path, help="JSON that ablate_reader.py wrote")
    parser.add_argument("--arm", choices=list(ARMS), required=True)
    parser.add_argument(
        "--drafter", type=pathlib.Path, required=True, help="folder that ablate_reader.py --save wrote"
    )
    parser.add_argument("--target", default=ready_hf.small_target_path(), help="folder of its target")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="folder that on_policy_text.py wrote")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--batch", type=int, default=32, help="rows at a time")
    parser.add_argument("--anchors", type=int, default=32, help="half of the blocks of a row that are measured")
    args = parser.parse_args()
    check_least(args, {"batch": 2, "anchors": 1})
    record = read_record(args.record, args.arm)
    if not (args.drafter / "config.json").is_file():
        raise SystemExit(f"no drafter in {args.drafter}: name a folder that ablate_reader.py --save wrote")
    rows, held, shares = read_text(args.text)
    args.row = rows.shape[1]
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(DEVICE).eval()
    ready_hf.ensure_patched(target)
    drafter = ReadyDrafterModel.from_pretrained(args.drafter, dtype=torch.float32).to(DEVICE).eval()
    drafter.config.check_target(target)
    trained = record["arms"][args.arm]["parameters"]
    if drafter.num_parameters() != trained:
        raise SystemExit(
            f"the drafter in {args.drafter} has {drafter.num_parameters()} parameters, and {args.arm!r} in "
            f"{args.record} has {trained}: name the folder of that arm"
        )
    make_folder(args.out)
    entry = {name: record[name] for name in FIELDS[:-1]} | {
        "arm": args.arm,
        "planned_steps": record["options"]["steps"] or record["steps"],
        "rows": len(rows),
        "shares": shares,
        "prompts": PROMPTS,
        "parameters": drafter.num_parameters(),
        "evaluation": evaluate_all(target, drafter, held, args),
    }
    drafter.to(torch.bfloat16).save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8")
    write_card(args.out)
    for name, metrics in entry["evaluation"].items():
        print(f"{name:32} tau {metrics['tau']:.4f}  of samples {metrics['tau_of_samples']:.4f}", flush=True)


if __name__ == "__main__":
    main()
