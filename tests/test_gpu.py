"""On a CUDA device, with flash-linear-attention if it is installed: committed states and drafted tokens.

`examples/benchmark_gpu.py` checks the same and measures; its figures are in docs/RESULTS.md.
"""

import copy

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf.chunk_states import forward_with_states
from ready_hf.kernels import Records, commit_and_read, launches, state_read
from ready_hf.target import committed_states, recurrent_layers
from support import (
    cache_argument,
    cache_of,
    random_prompt,
    states,
    tiny_target,
    trained_target,
    trained_tokenizer,
    worst_error,
)


pytestmark = pytest.mark.gpu
CODE = "def area(width, height):\n    total = width * height\n    return total"
PROMPT = f"<file>\n{CODE}\n</file>\n# Rename total to size\n<edited>\n"


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "bamba"])
@torch.no_grad()
def test_committed_states_equal_stepped_ones(family):
    """Against feeding the accepted tokens one by one: the chunk kernels' tf32 products would hide an error of 1e-5."""
    model = copy.deepcopy(tiny_target(family)).to("cuda")
    ready_hf.ensure_patched(model)
    ids = random_prompt(13).to("cuda")
    cache = cache_of(model(ids, use_cache=True))
    stepped = copy.deepcopy(cache)
    rollback = ready_hf.Rollback(cache)
    generator = torch.Generator().manual_seed(0)
    seen = ids.shape[1]
    for _ in range(20):
        length = int(torch.randint(2, 18, (1,), generator=generator))
        keep = int(torch.randint(1, length + 1, (1,), generator=generator))
        block = random_prompt(length, seed=seen).to("cuda")
        positions = torch.arange(seen, seen + length, device="cuda")[None]
        with rollback.recording(length):
            model(block, use_cache=True, position_ids=positions, **cache_argument(cache))
        rollback.commit(keep)
        for k in range(keep):
            step = {"use_cache": True, "position_ids": positions[:, k : k + 1]}
            model(block[:, k : k + 1], **step, **cache_argument(stepped))
        seen += keep
    rollback.close()
    assert worst_error(states(cache), states(stepped)) <= 1e-5


@pytest.mark.lossless
def test_drafted_tokens_equal_plain_ones():
    model = copy.deepcopy(trained_target()).to("cuda")
    inputs = trained_tokenizer()(PROMPT, return_tensors="pt").to("cuda")
    options = {"max_new_tokens": 96, "do_sample": False}
    drafted = model.generate(**inputs, **options, assistant_model=ready_hf.PromptLookupDrafter())
    assert torch.equal(drafted, model.generate(**inputs, **options))


@torch.no_grad()
def test_states_for_training_equal_those_of_the_kernels():
    """The torch scan against a forward of every prefix, whose chunk kernel multiplies in tf32."""
    model = AutoModelForCausalLM.from_pretrained(ready_hf.small_target_path(), dtype=torch.float32).to("cuda").eval()
    ready_hf.ensure_patched(model)
    layers, positions = recurrent_layers(model), torch.tensor([[64, 128, 200]], device="cuda")
    ids = torch.randint(3, 2000, (1, 256), generator=torch.Generator().manual_seed(0)).to("cuda")
    found = forward_with_states(model, ids, positions, layers)[1].stack()
    for k, length in enumerate(positions[0].tolist()):
        expected = committed_states(cache_of(model(ids[:, :length], use_cache=True)), layers)
        assert float((found[:, k] - expected).norm() / expected.norm()) <= 2e-3


@pytest.mark.lossless
def test_kernels_and_torch_draft_the_same_tokens():
    """The shipped models, greedily, in float32."""
    path = ready_hf.small_target_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to("cuda").eval()
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path("ready"), dtype=torch.float32).to("cuda").eval()
    inputs = AutoTokenizer.from_pretrained(path)("def main(", return_tensors="pt").to("cuda")
    options = {"max_new_tokens": 64, "do_sample": False}
    plain = model.generate(**inputs, **options)
    for backend in ("auto", "torch"):
        ready_hf.set_kernels(backend)
        launches.clear()
        assert torch.equal(model.generate(**inputs, **options, assistant_model=drafter), plain)
        assert bool(launches["commit_and_read"]) is bool(launches["verify_rule"]) is (backend == "auto")
    ready_hf.set_kernels("auto")


@pytest.mark.parametrize("rule", ["gated delta rule", "KDA", "Mamba-2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_run_on_a_device_that_is_not_the_current_one(rule, dtype):
    """On the last of the machine's GPUs, which with two of them is not the current one; against torch in float64."""
    device = f"cuda:{torch.cuda.device_count() - 1}"
    assert torch.cuda.current_device() == 0
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    layers, rows, tokens, heads, keys, values = 3, 2, 9, 4, 64, 32
    g = -0.1 * normal(layers, rows, tokens, heads, *([keys] if rule == "KDA" else [])).abs()
    strength = normal(layers, rows, tokens, heads).sigmoid()
    records = Records(normal(layers, rows, tokens, 2, keys), normal(layers, rows, tokens, heads, values), g, strength)
    states = normal(layers, rows, heads, values, keys).mT.to(dtype)
    queries, accepted = normal(layers, heads, 5, keys), torch.tensor([7, 4], device=device)
    options = {"delta": False, "l2norm": False} if rule == "Mamba-2" else {}
    exact = states.double()
    wide = Records(*(x.double() for x in records))
    read = commit_and_read(
        exact, wide, accepted, queries.double(), backend="torch", read_dtype=torch.float64, **options
    )
    found = commit_and_read(states, records, accepted, queries, backend="triton", precision="ieee", **options)
    assert found.device == states.device == torch.device(device)
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    assert float((found - read).norm() / read.norm()) <= 1e-5  # of the state before it is rounded
    assert float((states - exact).norm() / exact.norm()) <= bound
    alone = state_read(states, queries, backend="triton", precision="ieee")
    expected = torch.einsum("lbhkv,lhjk->bjlhv", states.double(), queries.double())
    assert float((alone - expected).norm() / expected.norm()) <= 1e-5
