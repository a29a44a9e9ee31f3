"""Memory of the drafting loss, with its gradient, at the vocabulary of a large model: growth of the process's peak.

    python examples/benchmark_loss.py --blocks 64 --max-logits 134217728 67108864 33554432

Every size runs in a process of its own, because a peak does not go down again.
"""

import argparse
import subprocess
import sys
import time

import torch
from peak_memory import peak

from ready_hf.losses import DraftingLoss


VOCABULARY, SLOTS, HIDDEN = 248_320, 16, 64


def measure(blocks: int, max_logits: int) -> tuple[int, float]:
    """Bytes above the inputs, and seconds, on one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    weight = torch.randn(VOCABULARY, HIDDEN) * 0.02
    hidden, wanted = torch.randn(blocks, SLOTS, HIDDEN, requires_grad=True), torch.randn(blocks, SLOTS, HIDDEN)
    ids = torch.randint(0, VOCABULARY, (blocks, SLOTS))
    before, start = peak(), time.perf_counter()
    heads = (lambda x, _: (x @ weight.T, None)), (lambda x: x @ weight.T)
    DraftingLoss(max_logits=max_logits)(hidden, wanted, ids, ids, torch.ones_like(ids).bool(), *heads).loss.backward()
    if hidden.grad is None or not bool(hidden.grad.isfinite().all()) or not bool(hidden.grad.any()):
        raise RuntimeError("the gradient is missing or not finite")
    return peak() - before, time.perf_counter() - start


def main() -> None:
    """One line per size of a chunk: its logits, bytes, seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=64, help="all anchors of all rows")
    parser.add_argument("--max-logits", type=int, nargs="+", default=[DraftingLoss().max_logits], help="of a chunk")
    args = parser.parse_args()
    for size in args.max_logits:
        if len(args.max_logits) > 1:
            command = [sys.executable, __file__, "--blocks", str(args.blocks), "--max-logits", str(size)]
            subprocess.run(command, check=True)
        else:
            print(size, *(round(value) for value in measure(args.blocks, size)), flush=True)


if __name__ == "__main__":
    main()
