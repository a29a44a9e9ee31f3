"""Memory of a reader's training step: states at all anchors as one tensor, or read layer by layer.

    python examples/benchmark_states.py --anchors 64 128 256 512

Prints, for every number of anchors and both ways: bytes of the states that are kept, growth of the process's peak over
the step (states from the recurrence's inputs, reads, gradients), seconds. Every run has a process of its own, because
a peak does not go down again.
"""

import argparse
import subprocess
import sys
import time

import torch
from peak_memory import peak

from ready_hf import ReadyDrafterConfig
from ready_hf.anchor_states import AnchorStates
from ready_hf.chunk_states import gated_delta_scan
from ready_hf.state_reader import StateReader


LAYERS, HEADS, KEY_HEADS, CHANNELS, HIDDEN, SLOTS = 4, 16, 8, 128, 64, 8
WAYS = ("tensor", "layers")


def new_reader() -> StateReader:
    """With every weight at random."""
    reader = StateReader(
        ReadyDrafterConfig(
            vocab_size=100,
            hidden_size=HIDDEN,
            block_size=SLOTS,
            num_target_layers=LAYERS,
            state_layer_ids=list(range(LAYERS)),
            state_shape=[HEADS, CHANNELS, CHANNELS],
            reader_projection="bilinear",
            reader_rank=8,
        )
    )
    for parameter in reader.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return reader


def states_of(tokens: int, positions: torch.Tensor, way: str) -> AnchorStates | torch.Tensor:
    """Of a row of `tokens` random tokens."""
    scans = []
    for _ in range(LAYERS):
        key, value = torch.randn(1, tokens, KEY_HEADS, CHANNELS), torch.randn(1, tokens, HEADS, CHANNELS)
        g, beta = -torch.rand(1, tokens, HEADS) / 20, torch.rand(1, tokens, HEADS)
        scan = gated_delta_scan(key, value, g, beta, use_qk_l2norm_in_kernel=True)
        scans.append(scan if way == "layers" else scan.states(positions))
    states = AnchorStates(scans, positions)
    return states if way == "layers" else states.stack()


def measure(way: str, anchors: int, tokens: int) -> tuple[int, int, float]:
    """Bytes of the states, bytes of the step, and seconds, on one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    reader, embeds = new_reader(), torch.randn(1, anchors, HIDDEN)
    positions = torch.randperm(tokens)[:anchors].sort().values[None]
    before, start = peak(), time.perf_counter()
    with torch.no_grad():
        states = states_of(tokens, positions, way)
    reader(states, embeds, embeds).square().mean().backward()
    took = time.perf_counter() - start
    if not all(
        p.grad is not None and bool(p.grad.isfinite().all()) and bool(p.grad.any()) for p in reader.parameters()
    ):
        raise RuntimeError("a gradient is missing or not finite")
    return states.nbytes, peak() - before, took


def main() -> None:
    """One line per run: way, anchors, bytes of the states, bytes of the step, seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--anchors", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--tokens", type=int, default=2048, help="of the row")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    runs = [(way, anchors) for anchors in args.anchors for way in args.ways]
    for way, anchors in runs:
        if len(runs) > 1:
            command = [sys.executable, __file__, "--anchors", str(anchors), "--ways", way]
            subprocess.run([*command, "--tokens", str(args.tokens)], check=True)
        else:
            nbytes, growth, seconds = measure(way, anchors, args.tokens)
            print(way, anchors, nbytes, growth, f"{seconds:.1f}", flush=True)


if __name__ == "__main__":
    main()
