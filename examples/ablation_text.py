"""Texts that the research target writes itself, for measuring drafters: samples at temperature 1 after long prompts.

    python examples/ablation_text.py --target examples/research_target --data research_data
        --out examples/research_target/text

For validation and for test: prompts at even offsets in the packages of that part, continued to whole rows by `--new`
tokens. The mask token is never written; an end of file does not end a row. `--prompts 32` writes only files of such
prompts as text, for real decoding with `ready-hf eval --prompts-file ...`.
"""

import argparse
import json
import pathlib

import torch
from on_policy_text import check_least, continuations, make_folder, read_tokens, save_rows, target_vocabulary
from transformers import AutoModelForCausalLM, AutoTokenizer

import ready_hf


PARTS = ("validation", "test")


def write_prompts(args: argparse.Namespace, prompts: dict[str, torch.Tensor]) -> None:
    """`PART-prompts.jsonl` for every part, from evenly chosen rows of ids `[N, P]`."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    for part, rows in prompts.items():
        chosen = rows[torch.linspace(0, len(rows) - 1, args.prompts).round().long()]
        lines = [json.dumps({"prompt": tokenizer.decode(row), "task": part}) + "\n" for row in chosen]
        (args.out / f"{part}-prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Writes `validation.npy` and `test.npy`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of validation.bin and test.bin")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder")
    for name, default in {"rows": 128, "row": 1536, "new": 512, "batch": 128, "mask_token_id": 1, "seed": 11}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--prompts", type=int, help="write prompts as text, so many per part, and no rows")
    args = parser.parse_args()
    check_least(args, {"rows": 1, "row": 4, "new": 1, "batch": 1, "prompts": 1})
    vocabulary, size = target_vocabulary(args.target), args.row - args.new
    if size < 1:
        raise SystemExit(f"--new must be less than --row, got {args.new} and {args.row}")
    if not 0 <= args.mask_token_id < vocabulary:
        raise SystemExit(f"--mask-token-id must be 0 to {vocabulary - 1}, the target's ids, got {args.mask_token_id}")
    if args.prompts is not None and args.prompts > args.rows:
        raise SystemExit(f"--prompts are chosen from --rows {args.rows}, got {args.prompts}")
    prompts = []
    for part in PARTS:
        tokens = read_tokens(args.data / f"{part}.bin", vocabulary, size)
        prompts.append(
            tokens[torch.linspace(0, len(tokens) - size - 1, args.rows).long()[:, None] + torch.arange(size)]
        )
    make_folder(args.out)
    if args.prompts is not None:
        write_prompts(args, dict(zip(PARTS, prompts, strict=True)))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    ready_hf.ensure_patched(model)
    texts = []
    for i, batch in enumerate(torch.cat(prompts).split(args.batch)):
        texts.append(continuations(model, batch, args.row, True, args.mask_token_id, args.seed * 1000 + i))
        print(f"{sum(map(len, texts))} of {len(PARTS) * args.rows} rows", flush=True)
    for part, rows in zip(PARTS, torch.cat(texts).split(args.rows), strict=True):
        save_rows(args.out / f"{part}.npy", rows)


if __name__ == "__main__":
    main()
