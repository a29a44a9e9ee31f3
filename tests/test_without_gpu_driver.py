"""With kernel packages installed and no GPU, everything works on the CPU, where stock transformers crashes.

One program runs everything in a process of its own: whether Triton interprets its kernels is settled at its import,
and the other tests let it. Once with the extra `gpu` as installed (its absence is a failure with
`READY_HF_REQUIRE_GPU_EXTRA=1`), once with stand-ins for every kernel package: some do not install without a GPU.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from support import FAMILIES


TESTS = os.path.dirname(os.path.abspath(__file__))
STAND_INS = {
    "fla": ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"],
    "mamba_ssm": ["mamba_chunk_scan_combined", "selective_state_update", "mamba_split_conv1d_scan_combined"],
    "causal_conv1d": ["causal_conv1d_fn", "causal_conv1d_update"],
}
RECURRENCES = ["qwen3_5", "kimi_linear", "bamba"]
USES = ["plain_generate", "drafted_generate", "forward", "feature_capture"]
PROGRAM = """
import json, sys, traceback
import torch, transformers

results = {}

def attempt(name, use):
    try:
        use()
        results[name] = ""
    except Exception:
        results[name] = traceback.format_exc()

def stock_generate(family):
    config = transformers.AutoConfig.for_model(**configs[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generate(torch.arange(3, 9)[None], max_new_tokens=2, do_sample=False)

configs, uses = json.loads(sys.argv[1]), json.loads(sys.argv[2])
assert "ready_hf" not in sys.modules
for family in configs:
    attempt(f"{family}-stock", lambda: stock_generate(family))

from support import k_right, random_prompt, tiny_target
from ready_hf import FeatureCapture, ensure_patched
from ready_hf.target import unpatch

def use_it(family, use):
    model, prompt = tiny_target(family), random_prompt(6)
    plain = model.generate(prompt, max_new_tokens=16, do_sample=False)
    unpatch()  # so that this use is the first of its process
    if use == "plain_generate":
        assert torch.equal(model.generate(prompt, max_new_tokens=16, do_sample=False), plain)
    if use == "drafted_generate":
        drafter = k_right(plain, 3)
        drafted = model.generate(prompt, max_new_tokens=16, do_sample=False, assistant_model=drafter)
        assert torch.equal(drafted, plain), (drafted, plain)
        assert drafter.rounds < 8
    if use == "forward":
        ensure_patched(model)
        assert torch.equal(model(plain[:, :-1]).logits[:, 5:].argmax(-1), plain[:, 6:])
    if use == "feature_capture":
        with FeatureCapture(model, [0, 3]) as capture:
            model(prompt)
            assert {i: tuple(x.shape) for i, x in capture.take().items()} == {0: (1, 6, 64), 3: (1, 6, 64)}

for family in configs:
    for use in uses:
        attempt(f"{family}-{use}", lambda: use_it(family, use))
print(json.dumps(results))
"""


@pytest.fixture(scope="module", params=["gpu_extra", "stand_ins"])
def results(request, tmp_path_factory) -> dict[str, str]:
    """What the program said of every use: nothing if it worked, else the traceback."""
    path = [TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]
    if request.param == "gpu_extra":
        require_gpu_extra()
    else:
        path.insert(0, str(make_stand_ins(tmp_path_factory.mktemp("packages"))))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    configs = {family: FAMILIES[family]().to_dict() for family in RECURRENCES}
    command = [sys.executable, "-c", PROGRAM, json.dumps(configs), json.dumps(USES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def require_gpu_extra() -> None:
    missing = [name for name in ("triton", "fla") if importlib.util.find_spec(name) is None]
    if not missing:
        return
    message = f"{' and '.join(missing)} not installed: `pip install 'ready_hf[gpu]'`"
    if os.environ.get("READY_HF_REQUIRE_GPU_EXTRA") == "1":
        pytest.fail(message)
    pytest.skip(message)


def make_stand_ins(folder):
    """Packages whose kernels name arguments unlike the torch rules, and crash on the CPU as the real ones do."""
    for package, functions in STAND_INS.items():
        (folder / package).mkdir()
        lines = [f"def {name}(q, *args, **kwargs): raise RuntimeError('0 active drivers')" for name in functions]
        (folder / package / "__init__.py").write_text("\n".join(["__version__ = '9.9.9'", *lines]))
    return folder


@pytest.mark.lossless
@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("family", RECURRENCES)
def test_use_on_the_cpu_with_kernel_packages_installed(results, family, use):
    assert results[f"{family}-{use}"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENCES)
def test_stock_transformers_crashes_there(results, family, request):
    if family == "bamba" and "gpu_extra" in request.node.name:
        pytest.skip("the extra has no kernels for Mamba-2")
    assert "active drivers" in results[f"{family}-stock"], "stock works: nothing is left to test here"
