"""Times of GPU operations, and the bandwidth that a copy reaches in the same run."""

import statistics
from collections.abc import Callable

import torch
from problems import DEVICE


def replayed(run: Callable[[], object], repeats: int = 30) -> float:
    """Microseconds of one graph replay, median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times += [start.elapsed_time(end) * 1e3] if i >= 3 else []
    return statistics.median(times)


def eager(run: Callable[[], object], repeats: int = 20) -> float:
    """Microseconds of one eager call, host time included, median."""
    times = []
    for i in range(repeats + 3):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times += [start.elapsed_time(end) * 1e3] if i >= 3 else []
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of the faster of a memory copy and a kernel that copies 2 GB."""
    source = torch.randn(2**29, device=DEVICE)
    target = torch.empty_like(source)
    times = {
        "copy, graph": replayed(lambda: target.copy_(source), 10),
        "copy, eager": eager(lambda: target.copy_(source), 10),
        "kernel, graph": replayed(lambda: torch.mul(source, 1.0, out=target), 10),
    }
    rates = {name: 2 * source.nbytes / (micros * 1e-6) for name, micros in times.items()}
    print("\n" + ", ".join(f"{name} {rate / 1e12:.2f} TB/s" for name, rate in rates.items()), flush=True)
    return max(rates.values())


def line(name: str, micros: float, num_bytes: float, copy: float, note: str = "") -> None:
    """Prints one line of a table of times."""
    share = f"{num_bytes / (micros * 1e-6) / copy:6.0%}" if num_bytes else "      "
    print(f"  {name:52} {micros:10.1f} us  {share} of copy  {note}", flush=True)
