"""Prompt lookup against plain decoding on prompts whose answer repeats much of them, on the CPU.

    OMP_NUM_THREADS=1 python examples/benchmark_lookup.py            # the small target goes on with a second copy
    OMP_NUM_THREADS=1 python examples/benchmark_lookup.py --tiny     # the tiny target edits a file, as trained

Both ways take turns on every prompt, so that other load on the machine falls on both. Ids must be equal.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ready_hf


FILE = '''def read_table(path, separator=","):
    """Return the rows of a text file as lists of words."""
    rows = []
    with open(path) as source:
        for line in source:
            words = line.strip().split(separator)
            if words and not words[0].startswith("#"):
                rows.append(words)
    return rows


def column_sum(rows, index):
    total = 0
    for row in rows:
        total += int(row[index])
    return total'''
RENAMED = (("rows", "entries"), ("words", "fields"), ("total", "result"), ("source", "stream"))


def edits() -> list[str]:
    """Instructions of the kind that the tiny target was trained on."""
    return [f"<file>\n{FILE}\n</file>\n# Rename {old} to {new}\n<edited>\n" for old, new in RENAMED]


def copies() -> list[str]:
    """Held-out beginnings of files, and half of each once more: what an editor of the file would write next."""
    rows = Path(ready_hf.small_target_path(), "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(row)["prompt"] for row in rows]
    halves = ["\n".join(text.splitlines()[: len(text.splitlines()) // 2 + 1]) for text in texts]
    return [f"{text}\n\n\n{half}\n" for text, half in zip(texts, halves, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="edits by the tiny target")
    parser.add_argument("--new", type=int, help="new tokens per prompt (default: 96; small target 48)")
    parser.add_argument("--drafts", type=int, default=8, help="drafts per round")
    parser.add_argument("--prompts", type=int, help="how many prompts (default: all)")
    args = parser.parse_args()
    path = ready_hf.tiny_target_path() if args.tiny else ready_hf.small_target_path()
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = (edits() if args.tiny else copies())[: args.prompts]
    options = {"max_new_tokens": args.new or (96 if args.tiny else 48), "do_sample": False}
    lookup = {"prompt_lookup_num_tokens": args.drafts, "max_matching_ngram_size": 3}

    ready_hf.enable_assisted_generation()
    seconds, new_tokens = {"plain": 0.0, "lookup": 0.0}, 0
    target.generate(**tokenizer(prompts[0], return_tensors="pt"), **options | {"max_new_tokens": 4})
    with ready_hf.record_stats() as stats:
        for prompt in prompts:
            inputs = tokenizer(prompt, return_tensors="pt")
            ids = {}
            for way, more in (("plain", {}), ("lookup", lookup)):
                start = time.perf_counter()
                ids[way] = target.generate(**inputs, **options, **more)
                seconds[way] += time.perf_counter() - start
            assert torch.equal(ids["plain"], ids["lookup"])
            new_tokens += ids["plain"].shape[1] - inputs.input_ids.shape[1]
    print(
        f"{len(prompts)} prompts, {new_tokens} new tokens, ids equal; plain {new_tokens / seconds['plain']:.1f} "
        f"tokens/s, prompt lookup {new_tokens / seconds['lookup']:.1f}: {seconds['plain'] / seconds['lookup']:.2f}x, "
        f"{stats.tokens_per_forward:.2f} tokens per verifying forward"
    )


if __name__ == "__main__":
    main()
