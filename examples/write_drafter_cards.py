"""Write the model cards of trained drafters, with the check whether reading states helps.

    python examples/write_drafter_cards.py --date 2026-11-30 --target small_target
        --prompts small_target/prompts.jsonl drafters/ready

README.md and `training.json` of the folders are written anew. `train_drafter.py` writes a card without the check. What
a card says about training comes from the folder's `training.json`; the check decodes the prompts that the demo would
measure, with the real states and with wrong ones.
"""

import argparse
import json
import pathlib
from collections import Counter

import torch
from on_policy_text import check_least, read_fields
from transformers import AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf import ReadyDrafterModel
from ready_hf.demo import Run, kept_prompts
from ready_hf.demo_prompts import UsageError, read_prompts
from ready_hf.hub import drafter_card
from ready_hf.reader_check import ReaderCheck, check_reader


TRAINING = """
## Training

| what | value |
| --- | --- |
| run | `{command}`, {date} |
| on | {device}, torch {torch}, transformers {transformers} |
| steps | {steps} of {planned_steps} planned, of {batch} rows with {anchors} blocks each |
{notes}| tokens a round, on sampled text | {sampled:.3f} |
| tokens a round, on greedy text | {greedily:.3f} |

Tokens a round are expected ones: 1 + the summed probabilities that a draft and all before it are accepted at
temperature 1. They come from distributions on text that the target wrote after held-out prompts, not from decoding.

Training text: {rows} rows of {row} tokens that the target wrote itself ({shares}), after prompts of {shortest} to
{longest} tokens cut from the corpus that the target was trained on.
"""
IN_TABLE = ("command", "date", "device", "steps", "planned_steps", "rows", "shares")
RECORDED = (*IN_TABLE, "options", "versions", "prompts", "evaluation")
USAGE = {  # of drafters that ship with the package
    'from_pretrained("path/to/its/target")': "from_pretrained(ready_hf.small_target_path())",
    '"small_ready"': 'ready_hf.small_drafter_path("ready")',
    '"small_dspark"': 'ready_hf.small_drafter_path("dspark")',
    '"The quick brown fox"': '"def main("',
}


def read_record(folder: pathlib.Path) -> dict:
    """`training.json` of a drafter's folder, with all that a card tells of it."""
    path = folder / "training.json"
    if not (folder / "config.json").is_file() or not path.is_file():
        raise SystemExit(f"{folder} is no folder with a drafter and its training.json, which train_drafter.py writes")
    return read_fields(path, RECORDED, "name a folder that train_drafter.py wrote")


def write_card(folder: pathlib.Path, check: ReaderCheck | None = None) -> None:
    """Writes the card of the drafter in `folder` from its `training.json`."""
    record = read_record(folder)
    drafter, evaluation = ReadyDrafterModel.from_pretrained(folder), record["evaluation"]
    card = drafter_card(
        drafter,
        folder.name,
        base_model=None,
        license="apache-2.0",
        measured=check and f"{check.num_prompts} held-out prompts, float32, one CPU thread, {record['checked']}.",
        reader_check=check,
    )
    notes = "".join(f"| {name} | {value} |\n" for name, value in record.get("notes", {}).items())
    options = {name: record["options"][name] for name in ("batch", "anchors", "row")}
    fields = {name: record[name] for name in IN_TABLE}
    text = (
        str(card).rstrip()
        + "\n"
        + TRAINING.format(
            **options,
            **fields,
            **{name: record["versions"][name] for name in ("torch", "transformers")},
            notes=notes,
            sampled=evaluation["sampled"]["tau"],
            greedily=evaluation["greedy"]["tau"],
            shortest=record["prompts"][0],
            longest=record["prompts"][1],
        )
    )
    for general, own in USAGE.items():
        text = text.replace(general, own) if folder.name.startswith("small_") else text
    (folder / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Checks the readers and writes the cards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=pathlib.Path, help="folders of drafters")
    parser.add_argument("--target", default=ready_hf.small_target_path(), help="folder of their target")
    parser.add_argument("--prompts", type=pathlib.Path, help="JSON lines; default: those of the target")
    parser.add_argument("--count", type=int, default=12, help="prompts to decode")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each")
    parser.add_argument("--date", required=True, help="of the check, for the card")
    args = parser.parse_args()
    check_least(args, {"count": 2, "tokens": 1})
    for folder in args.folders:  # all of them, before the first is measured
        read_record(folder)
    if not (pathlib.Path(args.target) / "config.json").is_file():
        raise SystemExit(f"no target in {args.target}: --target must be the folder of one")
    try:
        prompts = read_prompts(args.prompts or pathlib.Path(args.target) / "prompts.jsonl")
    except UsageError as error:
        raise SystemExit(f"--prompts: {error}") from error
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    for folder in args.folders:
        drafter = ReadyDrafterModel.from_pretrained(folder, dtype=torch.float32).eval()
        check = None
        if drafter.config.has_reader:
            kept = kept_prompts(target, tokenizer, prompts, Run("plain"), args.tokens, Counter())
            inputs = [arguments for (_, _, arguments, _), _ in zip(kept, range(args.count), strict=False)]
            check = check_reader(target, drafter, inputs, max_new_tokens=args.tokens)
            print(f"{folder.name}\n{check.table()}\n{check.verdict}", flush=True)
        record = read_record(folder) | {"checked": args.date}
        (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write_card(folder, check)


if __name__ == "__main__":
    main()
