"""The one-minute story: a small trained hybrid edits a real code file, with and without drafting.

    python -m ready_hf.demo
    python -m ready_hf.demo --file my_module.py --old total --new amount

The file is cut into pieces that fit the small model. Each piece is edited twice, by plain `generate` and with prompt
lookup as drafter, in turn, so that both see the same machine. Drafted tokens must be identical; the speed is a ratio
of this very run.
"""

import argparse
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ready_hf


PROMPT = "<file>\n{code}\n</file>\n# Rename {old} to {new}\n<edited>\n"  # the format the small model was trained on
END = "\n</edited>"
LONGEST_PIECE = 300  # characters


@dataclass
class Run:
    """Totals of one way of decoding.

    Args:
        name (`str`): What the table calls it.
        tokens (`int`): New tokens.
        seconds (`float`): Wall time.
        forwards (`int`): Target forwards, prefills included.
    """

    name: str
    tokens: int = 0
    seconds: float = 0.0
    forwards: int = 0

    def row(self, plain: "Run", identical: bool | None) -> list[str]:
        """The run as cells of the table, its speed against the plain run."""
        same = "" if identical is None else "yes" if identical else "NO"
        speed = self.tokens / self.seconds
        ratio = speed / (plain.tokens / plain.seconds)
        return [self.name, f"{self.tokens / self.forwards:.2f}", f"{speed:.0f}", f"{ratio:.2f}x", same]


def pieces(text: str, longest: int = LONGEST_PIECE) -> list[str]:
    """Cuts a source text into pieces of at most `longest` characters, at blank lines if possible, else at a line."""
    found = [""]
    for block in re.split(r"\n{2,}", text.strip("\n")):
        while len(block) > longest:
            line_end = block.rfind("\n", 0, longest)
            cut = line_end if line_end > 0 else longest
            found.append(block[:cut])
            block = block[cut:].lstrip("\n")
        if len(found[-1]) + len(block) + 2 <= longest and found[-1]:
            found[-1] += "\n\n" + block
        else:
            found.append(block)
    return [piece for piece in found if piece.strip()]


def timed_generate(model: PreTrainedModel, run: Run, inputs: Any, **options: Any) -> torch.Tensor:
    """Greedy `generate`, added to the totals of `run`."""
    forwards = 0

    def count(*args: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.get_decoder().register_forward_hook(count)
    try:
        start = time.perf_counter()
        sequences: torch.Tensor = model.generate(**inputs, do_sample=False, max_new_tokens=320, **options)
        run.seconds += time.perf_counter() - start
    finally:
        handle.remove()
    run.tokens += sequences.shape[1] - inputs["input_ids"].shape[1]
    run.forwards += forwards
    return sequences


def edit_file(path: Path, old: str, new: str, most: int) -> bool:
    """Edits the pieces in which `old` occurs, prints the table; returns whether all tokens were identical."""
    name = re.compile(rf"\b{re.escape(old)}\b")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SystemExit(f"{path.name} is not a text file in UTF-8. Choose another with --file.") from None
    wanted = [piece for piece in pieces(text) if name.search(piece)][:most]
    if not wanted:
        raise SystemExit(f"the name {old!r} does not occur in {path.name}: nothing to edit. Name another with --old.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = ready_hf.tiny_target_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = ready_hf.PromptLookupDrafter(num_tokens=10)
    print(f"A hybrid of {model.num_parameters() / 1e6:.2f} M parameters renames {old} to {new} in {path.name}:")
    print(f"{len(wanted)} {'piece' if len(wanted) == 1 else 'pieces'} of code, float32, one CPU thread.\n")

    plain, drafted, identical, right = Run("plain generate"), Run("prompt lookup"), True, 0
    prompts = [tokenizer(PROMPT.format(code=p, old=old, new=new), return_tensors="pt") for p in wanted]
    for assistant in (None, drafter):  # warm-up
        timed_generate(model, Run("warm-up"), prompts[0], assistant_model=assistant)
    for piece, inputs in zip(wanted, prompts, strict=True):
        expected = timed_generate(model, plain, inputs)
        sequences = timed_generate(model, drafted, inputs, assistant_model=drafter)
        identical &= torch.equal(sequences, expected)
        text = tokenizer.decode(sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += text.removesuffix(END) == name.sub(lambda match: new, piece)
    rows = [["", "tokens per forward", "tokens/s", "speed", "identical"]]
    rows += [plain.row(plain, None), drafted.row(plain, identical)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n{plain.tokens} tokens each way. {right} of {len(wanted)} pieces are edited exactly as asked:")
    print("it is a very small model, and drafting does not change what it says.")
    return identical


def main() -> None:
    """Parses the arguments and edits the file."""
    parser = argparse.ArgumentParser(prog="python -m ready_hf.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=Path(__file__).with_name("target.py"), help="code to edit")
    parser.add_argument("--old", default="module", help="name to replace")
    parser.add_argument("--new", default="part", help="its replacement")
    parser.add_argument("--pieces", type=int, default=6, help="most pieces of the file to edit")
    arguments = parser.parse_args()
    if not arguments.file.is_file():
        parser.error(f"--file {arguments.file} is not a file")
    for option in ("old", "new"):
        if not getattr(arguments, option).isidentifier():
            parser.error(f"--{option} {getattr(arguments, option)!r} is not a Python name")
    if arguments.pieces < 1:
        parser.error(f"--pieces must be at least 1, got {arguments.pieces}")
    torch.set_num_threads(1)  # the model is too small to gain from more
    if not edit_file(arguments.file, arguments.old, arguments.new, arguments.pieces):
        raise SystemExit("drafted tokens differ from plain generation: this must not happen, please report it")


if __name__ == "__main__":
    main()
