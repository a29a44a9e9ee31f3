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
STATE, RECORD = "*fp32", "*bf16"


def sources() -> dict[str, tuple[object, dict, dict, dict]]:
    """By name: kernel, argument types, constants, options, as the launchers choose them at the size of a 27B model."""
    names = ("triton_commit_read", "triton_conv", "triton_state_read", "triton_verify")
    commit, conv, read, verify = (importlib.import_module(f"ready_hf.kernels.{name}") for name in names)
    configs = json.loads((pathlib.Path(commit.__file__).parent / "configs" / "default.json").read_text())
    shape = {"H": H, "K": K, "V": V, "J": J, "BK": K, "BJ": 16}
    flags = {"STATE_TABLE": True, "HAS_SLOTS": False, "PRECISION": "tf32"}
    pointers = {"state": STATE, "tables": "*i64", "slots": "*i32", "query": RECORD, "reads": STATE}
    commit_pointers = {"out": STATE, "accepted": "*i32", "key": RECORD, "value": RECORD, "g": "*fp32", "beta": RECORD}
    rule = {"IN_PLACE": True, "RECORD_TABLE": True, "DELTA": True, "L2NORM": True, "READ": True, "PER_CHANNEL": False}
    grads = {"state": STATE, "tables": "*i64", "slots": "*i32", "grad_reads": STATE, "grad_query": STATE}
    conv_pointers = {"uncut": RECORD, "tables": "*i64", "accepted": "*i32", "window": RECORD}
    unit = {"s_v": 1, "w_v": 1, "k_d": 1, "v_d": 1, "q_k": 1}
    found = {}
    for name, per_channel in (("commit_and_read", False), ("commit_and_read_kda", True)):
        sizes, options = _tiles(configs["commit_and_read"][-1])
        constants = {**shape, **flags, **rule, "HK": HK, "PER_CHANNEL": per_channel, **unit, **sizes}
        found[name] = (commit.commit_read_kernel, pointers | commit_pointers, constants, options)
    sizes, options = _tiles(configs["state_read"][-1])
    found["state_read"] = (read.state_read_kernel, pointers, {**shape, **flags, "s_v": 1, "q_k": 1, **sizes}, options)
    sizes, options = _tiles(configs["state_read_bwd"][-1])
    constants = {**shape, **flags, "s_v": 1, "r_v": 1, "BV": V, **sizes}
    found["state_read_bwd"] = (read.state_read_bwd_kernel, grads, constants, options)
    sizes, options = _tiles(configs["conv_commit"][-1])
    found["conv_commit"] = (conv.conv_commit_kernel, conv_pointers, {"W": 4, "BW": 4, "TABLE": True, **sizes}, options)
    sizes, options = _tiles(configs["verify_conv"][-1])
    names = ("x", "old", "weight", "bias", "mixed", "window")
    shape = {"D": 2 * HK * K + H * V, "W": 4, "HAS_OLD": True, "HAS_BIAS": False, "x_d": 1, "w_w": 1, "c_w": 1}
    found["verify_conv"] = (verify.verify_conv_kernel, dict.fromkeys(names, RECORD), {**shape, **sizes}, options)
    sizes, options = _tiles(configs["verify"][-1])
    names = ("mixed", "a", "b", "A_log", "dt_bias", "output", "beta")
    rule_pointers = {**dict.fromkeys(names, RECORD), "state": STATE, "g": STATE, "scale": "fp32"}
    shape = {"H": H, "HK": HK, "K": K, "V": V, "BT": 32, "BK": K, "HAS_STATE": True, "s_v": 1}
    found["verify_rule"] = (verify.verify_rule_kernel, rule_pointers, {**shape, **sizes}, options)
    return found


def _tiles(entry: dict) -> tuple[dict, dict]:
    """Tile sizes, and compiler options."""
    options = {key: entry[key] for key in ("num_warps", "num_stages")}
    return {key: value for key, value in entry.items() if key.startswith("B")}, options


def main(capability: int) -> None:
    """Prints `{kernel: {"registers": n, "spills": bytes, "wide_loads": n}}`."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    found = {}
    for name, (kernel, pointers, constants, options) in sources().items():
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
