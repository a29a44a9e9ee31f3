"""Cases C69 to C73: kernels at the first call, at lengths from 1 on, with gradients and over many steps.

On the CPU in Triton's interpreter, with fewer tokens; figures of a GPU are shown by `pytest -s -m gpu`.
"""

import copy
import importlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import ready_hf
from ready_hf import kernels
from ready_hf.chunk_states import forward_with_states
from ready_hf.features import FrozenTarget
from ready_hf.kernels import Records, commit_and_read, conv_commit, state_read, verify
from ready_hf.kernels._launch import ensure_cache_folder
from ready_hf.kernels.verify_reference import MAX_TOKENS
from ready_hf.target import committed_states, recurrent_layers
from support import DEVICES, cache_of, drafter_for, partly_right, random_prompt, tiny_target


pytest.importorskip("triton")
devices = pytest.mark.parametrize("device", DEVICES)
B, H, HK, K, V, W = 2, 4, 2, 16, 24, 4  # rows, state heads, key heads, key and value channels, taps

FIRST_CALL = """
import sys
sys.modules["fla"] = None  # of another package, and compiled for minutes
import torch
from transformers import AutoModelForCausalLM
import ready_hf
from ready_hf.kernels import launches

device = sys.argv[1]
target = AutoModelForCausalLM.from_pretrained(ready_hf.tiny_target_path(), dtype=torch.float32).to(device).eval()
config = ready_hf.ReadyDrafterConfig.for_target(target, mask_token_id=1, block_size=2)
drafter = ready_hf.ReadyDrafterModel(config).to(device).eval()
prompt, options = torch.tensor([[7]], device=device), {"do_sample": False, "max_new_tokens": 4}
drafted = target.generate(prompt, assistant_model=drafter, **options)
assert launches["verify_rule"] and launches["state_read"] and launches["commit_and_read"], launches
assert torch.equal(drafted, target.generate(prompt, **options))
"""
COMPILE = """
import triton
import triton.language as tl
from ready_hf.kernels._launch import ensure_cache_folder
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def copy(x, y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.load(x + tl.arange(0, N)))

ensure_cache_folder()
source = ASTSource(copy, {"x": "*fp32", "y": "*fp32", "N": "constexpr"}, {"N": 16})
assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
print(triton.knobs.cache.dir)
"""
KERNEL_MODULES = ["triton_commit_read", "triton_conv", "triton_state_read", "triton_verify"]
READ_ONLY = "/sys"  # not even root can write there


def skip_without_kernels(device):
    if not kernels.has_kernels(torch.device(device)):
        pytest.skip("Triton's interpreter is off")


def normal(*size, device, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator).to(device)


def error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def run_alone(script, folder, *arguments, **environment):
    """A new process with this cache folder; what it printed, and its log."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **environment,
    }
    command = [sys.executable, "-P", str(script), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout, ran.stderr


@pytest.mark.parametrize("kind", ["missing", "read-only", "below a file"])
def test_c69_kernels_are_compiled_where_it_can_be_written(kind, tmp_path, monkeypatch, caplog):
    """What the folder holds is still found."""
    knobs = pytest.importorskip("triton").knobs.cache
    (tmp_path / "file").write_text("")
    folder = {"missing": tmp_path / "a" / "b", "read-only": Path(READ_ONLY), "below a file": tmp_path / "file" / "a"}[
        kind
    ]
    monkeypatch.setattr(knobs, "dir", str(folder))
    ensure_cache_folder.__wrapped__()
    if kind == "missing":
        assert (knobs.dir, caplog.text) == (str(folder), "")
        return
    used = Path(knobs.dir)
    assert "Set TRITON_CACHE_DIR to a folder that can be written" in caplog.text
    (used / "mine").write_text("written")
    assert {x.name for x in used.iterdir()} == {"mine", *(os.listdir(folder) if kind == "read-only" else [])}
    if kind == "read-only":
        half = next(
            x for x in sorted(folder.iterdir()) if x.is_dir() and os.listdir(x)
        )  # as of a kernel half compiled
        (used / half.name / "rest").write_text("written")
        assert {x.name for x in (used / half.name).iterdir()} == {"rest", *os.listdir(half)}
    shutil.rmtree(used)
    assert kind != "read-only" or os.listdir(folder)


def test_c69_no_kernel_is_autotuned():
    """So nothing that is left out can reach an autotuned kernel as None."""
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in KERNEL_MODULES]
    found = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    assert len(found) == 6
    assert not [name for name, value in found.items() if type(value).__name__ in ("Autotuner", "Heuristics")]


@pytest.mark.slow
def test_c69_compiling_with_a_read_only_cache_folder(tmp_path):
    """In a process of its own, for a GPU that need not be there; the temporary folder is gone afterwards."""
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    used, log = run_alone(script, READ_ONLY)
    assert "triton-cache-" in used
    assert not os.path.exists(used.strip())
    assert "Set TRITON_CACHE_DIR" in log


@pytest.mark.slow
@devices
def test_c69_the_first_call_ever_with_a_prompt_of_one_token(device, tmp_path):
    skip_without_kernels(device)
    script = tmp_path / "first_call.py"
    script.write_text(FIRST_CALL)
    interpreted = {} if device == "cuda" else {"TRITON_INTERPRET": "1", "READY_HF_KERNELS": "triton"}
    folders = [tmp_path / "empty", script / "below a file"][: 2 if device == "cuda" else 1]  # a CPU compiles nothing
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        logs = [log for _, log in pool.map(lambda folder: run_alone(script, folder, device, **interpreted), folders)]
    print(f"\nC69 on {device}: {len(folders)} first calls at once in {time.perf_counter() - start:.0f} s")
    assert ["cannot be written" in log for log in logs] == [False, True][: len(folders)]
    assert bool(list((tmp_path / "empty").rglob("*.cubin"))) is (device == "cuda")


def block(tokens, device, seed=0):
    """What a layer is given for a block: its projections `[B, T, D]` and `[B, T, H]`, and its parameters."""
    channels = 2 * HK * K + H * V
    inputs = [normal(B, tokens, channels, device=device, seed=seed)]
    inputs += [normal(B, tokens, H, device=device, seed=seed + i) for i in (1, 2)]
    taps, parameters = normal(channels, W, device=device), normal(2, H, device=device)
    return inputs, (taps / W**0.5, parameters[0] - 1, parameters[1])


def verified(inputs, parameters, window, state, backend):
    x, a, b = inputs
    taps, a_log, dt_bias = parameters
    return verify(x, window, taps, None, a, b, a_log, dt_bias, state, num_key_heads=HK, backend=backend)


def committed(found, state, keep, backend):
    """State and window after the first `keep` tokens of a verified block."""
    records = Records(*(getattr(found, name)[None] for name in Records._fields))
    accepted = torch.tensor(keep, device=state.device)
    state = state[None].clone()
    commit_and_read(state, records, accepted, backend=backend)
    window = conv_commit([found.window], accepted, W, backend=backend)
    return state[0], window[0]


@devices
@pytest.mark.parametrize("keep", [[1, 1], [0, 1]])
def test_c70_a_block_of_one_token(device, keep):
    skip_without_kernels(device)
    inputs, parameters = block(1, device)
    state, window = normal(B, H, K, V, device=device), normal(B, inputs[0].shape[-1], W, device=device)
    found, expected = (verified(inputs, parameters, window, state, backend) for backend in ("triton", "torch"))
    assert error(found.output, expected.output) <= 1e-5
    after, wanted = (committed(x, state, keep, y) for x, y in ((found, "triton"), (expected, "torch")))
    assert error(after[0], wanted[0]) <= 1e-5
    assert torch.equal(after[1], wanted[1])
    for row, count in enumerate(keep):
        assert torch.equal(after[0][row], state[row]) is (count == 0)
        assert torch.equal(after[1][row], window[row]) is (count == 0)


@devices
def test_c70_rows_of_one_token_beside_long_ones(device):
    """Left-padded; one draft a round, so that a block has two tokens, and rounds of one token where room ends."""
    long = 8191 if device == "cuda" else 300
    model = tiny_target("qwen3_5")
    model = copy.deepcopy(model).to(device)
    ready_hf.ensure_patched(model)
    ids, mask = random_prompt(long, batch=2).to(device), torch.ones(2, long, dtype=torch.long, device=device)
    mask[1, :-1] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    alone = model.generate(ids[1:, -1:], **{**options, "attention_mask": mask[1:, -1:]})
    is_alike = torch.equal(plain[1, long - 1 :], alone[0])  # on a GPU a long prompt is multiplied in tf32
    assert is_alike or device == "cuda"
    drafters = partly_right(plain, 0.7, block_size=1), drafter_for(model).to(device)
    for drafter in drafters:
        for most in (None, 1, 0):
            drafted = model.generate(ids, assistant_model=drafter, num_assistant_tokens=most, **options)
            assert torch.equal(drafted, plain)
    print(f"\nC70 on {device}: rows of {long} and 1 tokens as plain; the short one as alone: {is_alike}")


@devices
@torch.no_grad()
def test_c71_features_and_states_of_a_very_long_text(device):
    """262,144 tokens with chunks of 16 on a GPU; the state at the end against the target's own."""
    length = 262_144 if device == "cuda" else 2048
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(ready_hf.small_target_path(), dtype=dtype).to(device).eval()
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path("ready")).to(device)
    ready_hf.ensure_patched(target)
    frozen = FrozenTarget(target, drafter.config)
    ids = torch.randint(3, 2000, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    anchors = torch.linspace(1, length - 16, 32, device=device).long()[None]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    layers = [layer for layer in recurrent_layers(target) if layer.layer_idx in drafter.config.state_layer_ids]
    states = forward_with_states(target, ids, anchors, layers, chunk_size=16)[1].stack()
    batch = frozen.batch(ids, anchors)
    assert bool(batch.context_hidden_states.isfinite().all())
    assert batch.context_hidden_states.shape[1] == length
    expected = committed_states(
        cache_of(target(ids[:, : int(anchors[0, -1])], use_cache=True, logits_to_keep=1)), layers
    )
    worst = error(states[:, -1], expected)
    again = error(batch.states.stack(), states)
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    seconds = time.perf_counter() - start
    print(
        f"\nC71 on {device}: {length} tokens, state off by {worst:.1e}, chunks of 16 against 64 {again:.1e}, "
        f"{memory / 1e9:.1f} GB, {seconds:.1f} s"
    )
    assert worst <= (1e-5 if device == "cpu" else 2e-2)
    assert again <= (1e-5 if device == "cpu" else 1e-3)
    assert memory < 40e9


@devices
@torch.no_grad()
def test_c71_offsets_beyond_int32(device):
    """Slots of states that 32 bits cannot count the elements of (on a GPU), and a block that is too long."""
    skip_without_kernels(device)
    size = 128 if device == "cuda" else 16
    slots = 2**31 // (32 * size * size) + 8 if device == "cuda" else 5
    states = torch.empty(1, slots, 32, size, size, dtype=torch.bfloat16, device=device)
    states[0, -1] = normal(32, size, size, device=device).bfloat16()
    alone, last = states[:, -1:].clone(), torch.tensor([slots - 1], device=device)
    queries = normal(1, 32, 3, size, device=device)
    read = state_read(states, queries, slots=last, backend="triton", precision="ieee")
    assert error(read, state_read(alone.double(), queries.double(), backend="torch", read_dtype=torch.float64)) <= 1e-5
    shapes = ((1, 1, 4, 32, size), (1, 1, 4, 32, size), (1, 1, 4, 32), (1, 1, 4, 32))
    records = Records(*(normal(*shape, device=device, seed=i) for i, shape in enumerate(shapes)))
    records = records._replace(g=-records.g.abs(), beta=records.beta.sigmoid())
    accepted = torch.tensor([3], device=device)
    commit_and_read(states, records, accepted, slots=last, backend="triton")
    commit_and_read(alone, records, accepted, backend="torch")
    assert error(states[:, -1:], alone) <= 4e-3
    print(f"\nC71 on {device}: states of {states.numel() / 2**31:.2f} x 2^31 elements")
    inputs, parameters = block(MAX_TOKENS + 1, device)
    with pytest.raises(ValueError, match=f"{MAX_TOKENS}.*{MAX_TOKENS + 1}"):
        verified(inputs, parameters, None, None, "triton")


@devices
def test_c72_the_gradient_of_a_read(device):
    """Of the kernel that has a backward, against float64, with states that are not contiguous."""
    skip_without_kernels(device)
    states = normal(3, B, H, V, K, device=device).mT
    for shape in ((3, H, 5, K), (B, 3, H, 5, K)):
        queries = normal(*shape, device=device).requires_grad_()
        exact = queries.detach().double().requires_grad_()
        read = state_read(states, queries, backend="triton", precision="ieee")
        expected = state_read(states.double(), exact, backend="torch", read_dtype=torch.float64)
        weights = normal(*read.shape, device=device, seed=1)
        (read * weights).sum().backward()
        (expected * weights).sum().backward()
        print(f"\nC72 on {device}: read {error(read, expected):.1e}, gradient {error(queries.grad, exact.grad):.1e}")
        assert error(read, expected) <= 1e-5
        assert error(queries.grad, exact.grad) <= 1e-5


@pytest.mark.parametrize("backend", ["torch", "triton"])
@devices
def test_c72_kernels_without_a_gradient_say_so(device, backend):
    skip_without_kernels(device)
    inputs, parameters = block(2, device)
    state, window = normal(B, H, K, V, device=device), normal(B, inputs[0].shape[-1], W, device=device)
    found = verified(inputs, parameters, window, state, backend)
    keep = torch.tensor([1, 2], device=device)
    records = Records(*(getattr(found, name)[None].clone() for name in Records._fields))
    calls = {
        "conv_commit": lambda: conv_commit([found.window.clone().requires_grad_()], keep, W, backend=backend),
    }
    given = [*inputs, *parameters, window, state]
    for i in range(len(given)):
        x, a, b, *rest = [tensor.clone().requires_grad_(i == j) for j, tensor in enumerate(given)]
        calls[f"verify of argument {i}"] = lambda x=x, a=a, b=b, rest=rest: verified(
            (x, a, b), rest[:3], *rest[3:], backend
        )
    for name in Records._fields:
        learning = records._replace(**{name: [getattr(records, name)[0].requires_grad_()]})
        calls[f"commit_and_read of {name}"] = lambda learning=learning: commit_and_read(
            state.detach()[None].clone(), learning, keep, backend=backend
        )
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"`{name.split()[0]}` has no gradient: call it under `torch.no_grad"):
            call()
        with torch.no_grad():
            call()
    with pytest.raises(ValueError, match="states get no gradient, only queries do"):
        state_read(state.requires_grad_()[None], normal(1, H, 2, K, device=device), backend=backend)


STEPS = [("cpu", "torch"), pytest.param("cuda", "triton", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("device", "backend"), STEPS)
def test_c73_eight_steps_and_one_verify_of_eight(device, backend):
    """Over 2,048 tokens the two states never part by more than rounding."""
    tokens = 2048
    inputs, parameters = block(tokens, device)
    kept = {}
    for size in (1, 8):
        state = torch.zeros(B, H, K, V, device=device)
        window = torch.zeros(B, inputs[0].shape[-1], W, device=device)
        kept[size] = []
        for start in range(0, tokens, size):
            part = [x[:, start : start + size] for x in inputs]
            found = verified(part, parameters, window, state, backend)
            state, window = committed(found, state, [size] * B, backend)
            kept[size].append(state)
    errors = [error(whole, stepped) for stepped, whole in zip(kept[1][7::8], kept[8], strict=True)]
    print(f"\nC73 on {device}: {tokens} tokens, states part by {max(errors):.1e} at most, {errors[-1]:.1e} at the end")
    assert 0 < float(state.norm()) < 1e3
    assert max(errors) <= 5e-6
