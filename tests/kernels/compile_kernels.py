"""Compiles every kernel for given GPUs without one, and prints registers, spills and widths of loads as JSON.

Run by `test_compile.py` in a process of its own: Triton's interpreter must be off. Argument: the capability, 80 or 90.
"""

import importlib
import json
import pathlib
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


K, V, H, HK, J, T = 128, 128, 48, 16, 7, 8
HOPPER = 90
STATE, RECORD = "*fp32", "*bf16"


def sources(capability: int) -> dict[str, tuple[object, dict, dict, dict]]:
    """By name: kernel, argument types, constants, options, for every entry of every configuration file."""
    names = ("triton_commit_read", "triton_conv", "triton_state_read", "triton_verify")
    commit, conv, read, verify = (importlib.import_module(f"ready_hf.kernels.{name}") for name in names)
    entries: dict[str, list[dict]] = {}
    for path in sorted((pathlib.Path(commit.__file__).parent / "configs").glob("*.json")):
        if path.stem != "default" and capability != HOPPER:  # of one device
            continue
        for name, found in json.loads(path.read_text()).items():
            known = entries.setdefault(name, [])
            for entry in found:
                tiles = {key: value for key, value in entry.items() if not key.startswith("max_")}
                known += [] if tiles in known else [tiles]
    shape = {"H": H, "K": K, "V": V, "J": J, "BK": K, "BJ": 16}
    flags = {"STATE_TABLE": True, "ALIGNED": True, "HAS_SLOTS": False, "PRECISION": "tf32"}
    pointers = {"state": STATE, "tables": "*i64", "slots": "*i32", "query": RECORD, "reads": STATE}
    commit_pointers = {"out": STATE, "accepted": "*i32", "key": RECORD, "value": RECORD, "g": "*fp32", "beta": RECORD}
    rule = {"IN_PLACE": False, "RECORD_TABLE": True, "DELTA": True, "L2NORM": True, "HK": HK}
    unit = {"s_v": 1, "w_v": 1, "k_d": 1, "v_d": 1, "q_k": 1}
    grads = {"state": STATE, "tables": "*i64", "slots": "*i32", "grad_reads": STATE, "grad_query": STATE}
    conv_pointers = {"uncut": RECORD, "tables": "*i64", "accepted": "*i32", "window": RECORD}
    convolution = dict.fromkeys(("x", "old", "weight", "bias", "mixed", "window"), RECORD)
    convolution_flags = {"D": 2 * HK * K + H * V, "W": 4, "HAS_OLD": True, "HAS_BIAS": False, "x_d": 1, "c_w": 1}
    rule_pointers = dict.fromkeys(("mixed", "a", "b", "A_log", "dt_bias", "output", "beta"), RECORD)
    rule_pointers |= {"state": STATE, "g": STATE, "scale": "fp32"}
    rule_flags = {"H": H, "HK": HK, "K": K, "V": V, "BT": 32, "BK": K, "HAS_STATE": True, "s_v": 1}
    few = {"BJ": 8}
    commits = {
        "": {"READ": True, "PER_CHANNEL": False, **few},
        " of bf16 products": {"READ": True, "PER_CHANNEL": False, **few, "PRECISION": "bf16"},
        " with 15 queries": {"READ": True, "PER_CHANNEL": False, "J": 15},
        " without queries": {"READ": False, "PER_CHANNEL": False, **few},
        " of KDA": {"READ": True, "PER_CHANNEL": True, **few},
    }
    kernels = {
        f"commit_and_read{name}": (
            "commit_and_read",
            commit.commit_read_kernel,
            pointers | commit_pointers,
            {**shape, **flags, **rule, **unit, **more},
        )
        for name, more in commits.items()
    }
    kernels |= {
        "state_read": ("state_read", read.state_read_kernel, pointers, {**shape, **flags, **few, "s_v": 1, "q_k": 1}),
        "state_read_bwd": (
            "state_read_bwd",
            read.state_read_bwd_kernel,
            grads,
            {**shape, **flags, "s_v": 1, "r_v": 1, "BV": V},
        ),
        "conv_commit": ("conv_commit", conv.conv_commit_kernel, conv_pointers, {"W": 4, "BW": 4, "TABLE": True}),
        "verify_conv": ("verify_conv", verify.verify_conv_kernel, convolution, convolution_flags),
        "verify_rule": ("verify", verify.verify_rule_kernel, rule_pointers, rule_flags),
    }
    return {
        f"{name} {entry}": (
            kernel,
            signature,
            {**constants, **_tiles(entry, constants)[0]},
            _tiles(entry, constants)[1],
        )
        for name, (key, kernel, signature, constants) in kernels.items()
        for entry in entries[key]
    }


def _tiles(entry: dict, constants: dict) -> tuple[dict, dict]:
    """Tile sizes and flags, and compiler options, as the launches make them of an entry."""
    options = {key: entry[key] for key in ("num_warps", "num_stages")}
    tiles = {key: value for key, value in entry.items() if key not in options}
    if "EARLY_QUERY" in tiles:
        tiles["EARLY_QUERY"] = bool(tiles["EARLY_QUERY"]) and constants["J"] * K <= 1024
    return tiles, options


def main(capability: int) -> None:
    """Prints `{kernel: {"registers": n, "spills": bytes, "wide_loads": n}}`."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    found = {}
    for name, (kernel, pointers, constants, options) in sources(capability).items():
        signature = {arg: "constexpr" if arg in constants else pointers.get(arg, "i32") for arg in kernel.arg_names}
        index = {arg: i for i, arg in enumerate(kernel.arg_names)}
        # pointers and strides that are multiples of 16, as Triton finds them at a launch
        divisible = [["tt.divisibility", 16]]
        attributes = {(index[arg],): divisible for arg, kind in signature.items() if kind != "constexpr"}
        source = ASTSource(kernel, signature, {(index[arg],): value for arg, value in constants.items()}, attributes)
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options={**options, "enable_fp_fusion": True})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [tool / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
            )
            code = subprocess.run(
                [tool / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True
            ).stdout
        words = (usage.stdout + usage.stderr).replace(":", " ").split()
        fields = {key: int(words[words.index(key) + 1]) for key in ("REG", "STACK", "LOCAL")}
        found[name] = {
            "registers": fields["REG"],
            "spills": fields["STACK"] + fields["LOCAL"],
            "wide_loads": code.count("LDG.E.128"),
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
