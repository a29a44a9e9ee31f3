"""What reading states costs a drafter: the whole reader, from queries to residuals, in microseconds.

    python examples/benchmark_reader.py --json reader-cost.json
    python examples/benchmark_reader.py --layers 4 --heads 4 --keys 32 --values 32 --hidden 64   # a try on a CPU

The default shape is that of Qwen3.5-27B: 48 layers of 48 states of 128 x 128. One row, one block, bfloat16 weights,
float32 states, which lie apart from each other as in a cache. Medians of alternated runs; on a GPU also as a CUDA
graph.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable

import torch
from ablation_batches import warmed_up
from on_policy_text import check_least

import ready_hf
from ready_hf import ReadyDrafterConfig
from ready_hf.configuration_ready import LARGEST_BLOCK, SMALLEST_BLOCK
from ready_hf.state_reader import StateReader


FIRST = {"reader_projection": "full", "reader_rank": 64, "reader_injection": "input", "reader_gate": False}
READERS: dict[str, dict] = {
    "default, rank 8": {},
    "rank 3": {"reader_rank": 3},
    "rank 3, no gate": {"reader_rank": 3, "reader_gate": False},
    "full 64, at the input": FIRST,
}


def make_reader(options: dict, args: argparse.Namespace) -> StateReader:
    """A reader with random weights, in the dtype and on the device of the measurement."""
    config = ReadyDrafterConfig(
        hidden_size=args.hidden,
        num_attention_heads=1,
        num_hidden_layers=args.depth,
        num_target_layers=args.layers + 2,
        block_size=args.block,
        state_layer_ids=list(range(args.layers)),
        state_shape=[args.heads, args.keys, args.values],
        **options,
    )
    reader = StateReader(config).to(args.device, torch.bfloat16)
    for parameter in reader.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return reader.eval()


def seconds(function: Callable[[], object], repeats: int, device: str) -> float:
    """Of one call, `repeats` of them timed together."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(repeats):
        function()
    events[1].record()
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / repeats / 1e3


def graphed(function: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of it."""
    with warmed_up():
        for _ in range(3):
            function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


@torch.no_grad()
def main() -> None:
    """One line per reader."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 48, "heads": 48, "keys": 128, "values": 128, "hidden": 5120, "depth": 5, "block": 8, "runs": 15}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=pathlib.Path, help="write every run into this file")
    args = parser.parse_args()
    check_least(args, dict.fromkeys(sizes, 1) | {"block": SMALLEST_BLOCK})
    if args.block > LARGEST_BLOCK:
        raise SystemExit(f"--block must be at most {LARGEST_BLOCK}, got {args.block}")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise SystemExit(f"--json {args.json} must be a file in a folder that is there")
    shape = {name: getattr(args, name) for name in sizes}
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"device": args.device}
    states = [torch.randn(1, args.heads, args.keys, args.values, **options) for _ in range(args.layers)]
    embeds, features = (torch.randn(1, 1, args.hidden, dtype=torch.bfloat16, **options) for _ in range(2))
    timed: dict[str, dict[str, Callable[[], object]]] = {}
    counts: dict[str, int] = {}
    for name, chosen in READERS.items():
        reader = make_reader(chosen, args)
        inputs = states if args.device == "cuda" else torch.stack(states, dim=1)[:, None]

        def call(reader: StateReader = reader, inputs=inputs) -> torch.Tensor:
            return reader(inputs, embeds, features)

        call()
        timed[name] = {"eager": call} | ({"graph": graphed(call)} if args.device == "cuda" else {})
        counts[name] = sum(p.numel() for p in reader.parameters())
        print(f"{name}: {counts[name] / 1e6:.1f} M parameters", flush=True)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.runs):
        for name, ways in timed.items():
            for way, function in ways.items():
                found.setdefault((name, way), []).append(seconds(function, 10, args.device))
    for (name, way), values in found.items():
        print(f"{name:40} {way:6} {statistics.median(values) * 1e6:8.1f} us")
    if args.json is not None:
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
            "versions": {"torch": torch.__version__, "ready_hf": ready_hf.__version__},
            "shape": shape,
            "parameters": counts,
            "microseconds": [
                {"reader": name, "way": way, "runs": [round(value * 1e6, 1) for value in values]}
                for (name, way), values in found.items()
            ],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
