"""Checks the kernels on a GPU, then measures them at the size of a 27B model.

    python kernels/benchmarks/benchmark.py                # 48 layers, 48 heads of 128 x 128, 8 tokens, 7 queries
    python kernels/benchmarks/benchmark.py --sweep        # tile sizes too, for configs/*.json

Nothing is measured unless all is right: float32 commit against float64 to 1e-5, tf32 read to 2e-3, 512 rounds of
commits to 1e-5, two runs alike to the last bit; KDA, Mamba-2 and bfloat16 states likewise. Times are medians of graph
replays; "of copy" is the share of the bandwidth that a device-to-device copy reaches in the same run, with the bytes
that the operation must move at least.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from unittest import mock

import torch
from problems import (
    CHANNELS,
    DEVICE,
    HEADS,
    KEY_HEADS,
    KEYS,
    QUERIES,
    RULES,
    TAPS,
    TOKENS,
    VALUES,
    as_transformers,
    error,
    layer_inputs,
    problem,
    record_bytes,
    wide,
)
from timing import copy_bandwidth, eager, line, replayed

import ready_hf.kernels
from ready_hf.kernels import Records, commit_and_read, conv_commit, launches, state_read, verify
from ready_hf.kernels.triton_commit_read import address_tables


def check(name: str, value: float, bound: float) -> bool:
    """Prints one line of the correctness table."""
    print(f"  {name:52} {value:9.2e}  (bound {bound:.0e})  {'ok' if value <= bound else 'WRONG'}", flush=True)
    return value <= bound


def correct() -> bool:
    """All checks; without them no number below means anything."""
    print("correctness", flush=True)
    oks = []
    case = problem(2, 5)
    expected = wide(case)
    read = commit_and_read(**expected, backend="torch", read_dtype=torch.float64)
    start = case["states"].clone()
    found = commit_and_read(**case, backend="triton")
    oks.append(check("commit, float32", error(case["states"], expected["states"]), 1e-5))
    oks.append(check("read, tf32", error(found, read), 2e-3))
    again = {**case, "states": start.clone()}
    same = torch.equal(found, commit_and_read(**again, backend="triton")) and torch.equal(
        case["states"], again["states"]
    )
    oks.append(check("two runs differ", float(not same), 0.5))
    exact = commit_and_read(**{**case, "states": start.clone()}, backend="triton", precision="ieee")
    oks.append(check("read, ieee", error(exact, read), 1e-5))
    oks.append(
        check("state_read, tf32", error(state_read(case["states"], case["queries"], backend="triton"), read), 2e-3)
    )
    rounded = commit_and_read(**{**case, "states": start.clone()}, backend="triton", precision="bf16")
    oks.append(check("read, bf16", error(rounded, read), 1e-2))
    for rule, dtype in (("KDA", torch.float32), ("Mamba-2", torch.float32), ("gated delta rule", torch.bfloat16)):
        other = problem(2, 5, rule=rule, dtype=dtype)
        truth = wide(other)
        truth_read = commit_and_read(**truth, backend="torch", read_dtype=torch.float64)
        other_read = commit_and_read(**other, backend="triton")
        name, bound = f"{rule}, {str(dtype).removeprefix('torch.')}", 1e-5 if dtype == torch.float32 else 4e-3
        oks.append(check(f"commit, {name} states", error(other["states"], truth["states"]), bound))
        oks.append(check(f"read, tf32, {name} states", error(other_read, truth_read), 2e-3))
    lists = Records(*(list(x) for x in case["records"]))
    states = [x.clone() for x in start]
    commit_and_read(states, lists, case["accepted"], case["queries"], backend="triton")
    oks.append(check("commit, lists of layers", error(torch.stack(states), expected["states"]), 1e-5))

    drift, truth = problem(1, 2, tokens=8), None
    truth = wide(drift)
    for round in range(512):
        block = problem(1, 2, tokens=8, seed=round + 1)
        drift |= {"records": block["records"], "accepted": block["accepted"]}
        double = wide(block)
        truth |= {"records": double["records"], "accepted": double["accepted"]}
        commit_and_read(**drift, backend="triton")
        commit_and_read(**{**truth, "queries": None}, backend="torch")
    oks.append(check("512 rounds of commits", error(drift["states"], truth["states"]), 1e-5))

    queries = [x.clone().requires_grad_() for x in (case["queries"], case["queries"].double())]
    weights = torch.randn(5, QUERIES, 2, HEADS, VALUES, device=DEVICE)
    (state_read(case["states"], queries[0], backend="triton", precision="ieee") * weights).sum().backward()
    (
        state_read(case["states"].double(), queries[1], backend="torch", read_dtype=torch.float64) * weights
    ).sum().backward()
    oks.append(check("gradient of the queries (bfloat16)", error(queries[0].grad, queries[1].grad), 1e-2))

    uncut, kept = torch.randn(3, 4, CHANNELS, TAPS + TOKENS, device=DEVICE), torch.tensor([0, 3, 8, 1], device=DEVICE)
    windows = [conv_commit(uncut, kept, TAPS, backend=name) for name in ("triton", "torch")]
    oks.append(check("conv_commit differs", float(not torch.equal(*windows)), 0.5))
    return all(oks)


def by_step_kernel(case: dict) -> Callable[[], None] | None:
    """Commit as the package does it without these kernels: one launch of fla's step kernel per layer."""
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as step
    except ImportError:
        return None
    key, value, g, beta = case["records"]
    query, kept = torch.zeros_like(key), int(case["accepted"][0])
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def run() -> None:
        for i, state in enumerate(case["states"]):
            args = (x[i][:, :kept] for x in (query, key, value, g, beta))
            step(*args, initial_state=state, **options)

    return run


def in_closed_form(case: dict) -> Callable[[], None]:
    """Commit by torch, layer by layer."""
    key, value, g, beta = case["records"]
    kept = int(case["accepted"][0])

    def run() -> None:
        for i, state in enumerate(case["states"]):
            window = ready_hf.kernels.gated_delta_window(key[i], value[i], g[i], beta[i], state)
            ready_hf.kernels.window_state(window, state, kept)

    return run


def measure(rows: int, layers: int, copy: float) -> None:
    """The table of commit and read."""
    print(f"\n{rows} rows, {layers} layers, {HEADS} heads of {KEYS} x {VALUES}, float32 states", flush=True)
    case = problem(layers, rows, 5)
    states, records, accepted, queries = case.values()
    size, read_bytes = states.nbytes, queries.nbytes + rows * QUERIES * layers * HEADS * VALUES * 4
    in_lists = {**case, "states": list(states), "records": Records(*(list(x) for x in records))}
    tables = address_tables(in_lists["states"], None, in_lists["records"])

    def run() -> object:
        return commit_and_read(**case, backend="triton")

    def commit() -> object:
        return commit_and_read(states, records, accepted, backend="triton")

    def read() -> object:
        return state_read(states, queries, backend="triton")

    def snapshot() -> None:
        for each in snapshots:
            each.copy_(states)
        states.copy_(snapshots[4])

    times = {}
    for kept in (1, 5, 8):
        accepted.fill_(kept)
        times[kept] = replayed(run)
        moved = 2 * size + record_bytes(case, kept) + read_bytes
        line(f"commit_and_read, {kept} of {TOKENS} tokens kept", times[kept], moved, copy)
    accepted.fill_(5)
    moved = 2 * size + record_bytes(case, 5) + read_bytes
    micros = replayed(lambda: commit_and_read(**case, backend="triton", precision="bf16"))
    line(f"commit_and_read, 5 of {TOKENS}, bf16 products", micros, moved, copy)
    alone = replayed(commit)
    line("commit alone, 5 kept", alone, 2 * size + record_bytes(case, 5), copy, f"read adds {times[5] - alone:.1f} us")
    line("state_read", replayed(read), size + read_bytes, copy)
    micros = replayed(lambda: state_read(states, queries, backend="triton", precision="bf16"))
    line("state_read, bf16 products", micros, size + read_bytes, copy)
    line("commit, then state_read", replayed(lambda: (commit(), read())), 0, copy)
    micros = replayed(lambda: commit_and_read(**in_lists, backend="triton", tables=tables))
    line("commit_and_read, lists of layers", micros, 0, copy)
    if rows == 1:
        line("commit_and_read, eager", eager(run), 0, copy)
        micros = eager(lambda: commit_and_read(**in_lists, backend="triton"))
        line("commit_and_read, eager, lists, tables made anew", micros, 0, copy)
        chain(case, alone)
    if rows <= 8:
        snapshots = torch.empty(TOKENS, *states.shape, device=DEVICE)
        line(f"a snapshot per token, {TOKENS} tokens, and one back", replayed(snapshot), 0, copy, "copies alone")
        del snapshots
        step = by_step_kernel(case)
        if step is not None:
            line("fla's step kernel, layer by layer, graph", replayed(step), 0, copy)
            line("fla's step kernel, layer by layer, eager", eager(step), 0, copy)
        line("torch in closed form, layer by layer, eager", eager(in_closed_form(case)), 0, copy)
    uncut = torch.randn(layers, rows, CHANNELS, TAPS + TOKENS, device=DEVICE, dtype=torch.bfloat16)
    micros = replayed(lambda: conv_commit(uncut, accepted, TAPS, backend="triton"))
    line("conv_commit", micros, 2 * layers * rows * CHANNELS * TAPS * 2, copy)
    micros = eager(lambda: [x[..., 5 : 5 + TAPS].contiguous() for x in uncut])
    line("the same by torch, layer by layer, eager", micros, 0, copy)


def measure_rules(copy: float) -> None:
    """KDA, Mamba-2 and bfloat16 states, at the sizes of models that have them."""
    print(f"\nother rules and states, 5 of {TOKENS} tokens kept", flush=True)
    cases = (
        ("KDA", 20, torch.float32),
        ("Mamba-2", 24, torch.float32),
        ("gated delta rule", 48, torch.bfloat16),
    )
    for rule, layers, dtype in cases:
        for rows in (1, 8):
            case = problem(layers, rows, 5, rule=rule, dtype=dtype)
            heads, _, _, values = RULES[rule]
            reads = case["queries"].nbytes + rows * QUERIES * layers * heads * values * 4
            moved = 2 * case["states"].nbytes + record_bytes(case, 5)
            name = f"{rule}, {layers} layers, {str(dtype).removeprefix('torch.')}, {rows} rows"
            micros = replayed(lambda case=case: commit_and_read(**case, backend="triton"))
            line(f"{name}: commit_and_read", micros, moved + reads, copy)
            micros = replayed(lambda case=case: commit_and_read(**{**case, "queries": None}, backend="triton"))
            line(f"{name}: commit", micros, moved, copy)
            micros = replayed(lambda case=case: state_read(case["states"], case["queries"], backend="triton"))
            line(f"{name}: state_read", micros, case["states"].nbytes + reads, copy)


def chain(case: dict, commit: float, rank: int = 256, hidden: int = 5120) -> None:
    """What reading costs a round: commit and read, low-rank map, injection; `commit` alone in microseconds."""
    layers = len(case["states"])
    down = torch.randn(rank, layers * HEADS * VALUES, device=DEVICE, dtype=torch.bfloat16) * 0.01
    up = torch.randn(hidden, rank, device=DEVICE, dtype=torch.bfloat16) * 0.01
    slots = torch.randn(QUERIES, hidden, device=DEVICE, dtype=torch.bfloat16)

    def run() -> object:
        reads = commit_and_read(**case, backend="triton", read_dtype=torch.bfloat16)
        latent = torch.nn.functional.linear(reads.view(QUERIES, -1), down)
        return torch.addmm(slots, latent, up.T)

    micros = replayed(run)
    name = f"commit, read, rank {rank} map, injection"
    print(f"  {name:52} {micros:10.1f} us  {micros - commit:.1f} over commit alone", flush=True)


def sweep(rows: int, layers: int, copy: float) -> None:
    """Tile sizes, for configs/*.json."""
    names = ("commit_read", "state_read")
    modules = {name: importlib.import_module(f"ready_hf.kernels.triton_{name}") for name in names}
    case = problem(layers, rows, 5)
    states, records, accepted, queries = case.values()
    runs = {
        "commit+read": ("commit_read", 2, lambda: commit_and_read(**case, backend="triton")),
        "commit": ("commit_read", 2, lambda: commit_and_read(states, records, accepted, backend="triton")),
        "read": ("state_read", 1, lambda: state_read(states, queries, backend="triton")),
    }
    print(f"\ntiles, {rows} rows: microseconds, share of a copy", flush=True)
    for tile, warps in ((8, 1), (16, 1), (32, 1), (16, 2), (32, 2), (64, 2), (32, 4), (64, 4), (128, 4), (128, 8)):
        shown = []
        for name, (module, factor, run) in runs.items():
            sizes = {"BV": tile, "num_warps": warps, "num_stages": 2}
            with mock.patch.object(modules[module], "tiles", side_effect=lambda *_, sizes=sizes: dict(sizes)):
                micros = replayed(run, 10)
            shown.append(f"{name} {micros:8.1f} ({factor * states.nbytes / (micros * 1e-6) / copy:4.0%})")
        print(f"  BV {tile:3} warps {warps}: {', '.join(shown)}", flush=True)


def measure_verify(layers: int, tokens: int) -> bool:
    """Outputs against transformers' path in the same run, then microseconds a layer."""
    inputs = layer_inputs(layers, tokens)

    def ours() -> object:
        return [verify(**x, num_key_heads=KEY_HEADS, head_k_dim=KEYS, backend="triton") for x in inputs]

    exact = verify(
        **{k: v if v is None else v.double() for k, v in inputs[0].items()}, num_key_heads=KEY_HEADS, backend="torch"
    )
    found = verify(**inputs[0], num_key_heads=KEY_HEADS, backend="triton").output
    print(f"\nverify of {tokens} tokens, 1 row, {layers} layers, microseconds a layer", flush=True)
    ok = check("against float64 (bfloat16 inputs and outputs)", error(found, exact.output), 1e-2)
    runs = {"two launches": ours}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError:
        pass
    else:
        rules = {"chunk": chunk_gated_delta_rule, "step": fused_recurrent_gated_delta_rule}
        for name, rule in rules.items():
            ok &= check(
                f"transformers with fla's {name} rule", error(as_transformers(inputs[0], rule), exact.output), 3e-2
            )
            runs[f"transformers, fla's {name} rule"] = lambda rule=rule: [as_transformers(x, rule) for x in inputs]
    for name, run in runs.items():
        print(f"  {name:52} graph {replayed(run, 10) / layers:8.2f}   eager {eager(run, 5) / layers:8.1f}", flush=True)
    return ok


def sweep_verify(layers: int, tokens: int) -> None:
    """Tile sizes of `verify`."""
    inputs, module = layer_inputs(layers, tokens), importlib.import_module("ready_hf.kernels.triton_verify")
    for tile, warps in ((8, 1), (16, 1), (32, 1), (8, 2), (16, 2), (32, 2), (64, 4)):
        for channels, conv_warps in ((256, 4), (128, 1), (64, 1)):
            sizes = {
                "verify": {"BV": tile, "num_warps": warps, "num_stages": 2},
                "verify_conv": {"BD": channels, "num_warps": conv_warps, "num_stages": 2},
            }
            if tile != 16 and channels != 256:
                continue
            with mock.patch.object(module, "tiles", side_effect=lambda kernel, *_, sizes=sizes: dict(sizes[kernel])):
                run = replayed(lambda: [verify(**x, num_key_heads=KEY_HEADS, backend="triton") for x in inputs], 10)
            print(
                f"  {tokens} tokens, BV {tile:3} warps {warps}, BD {channels}: {run / layers:8.2f} us a layer",
                flush=True,
            )


def main() -> int:
    """Exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--sweep", action="store_true", help="measure tile sizes too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return 1
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if not correct():
        return 1
    copy = copy_bandwidth()
    for rows in (1, 8, 32):
        measure(rows, args.layers, copy)
        torch.cuda.empty_cache()
    measure_rules(copy)
    ok = measure_verify(args.layers, 8) & measure_verify(args.layers, 16)
    for tokens in (8, 16) if args.sweep else ():
        sweep_verify(args.layers, tokens)
    for rows in (1, 8) if args.sweep else ():
        sweep(rows, args.layers, copy)
        torch.cuda.empty_cache()
    print(f"launches: {dict(launches)}", flush=True)
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
