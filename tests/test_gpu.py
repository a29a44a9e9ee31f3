"""On a CUDA device, with flash-linear-attention if it is installed: committed states and drafted tokens.

`examples/benchmark_gpu.py` checks the same and measures; its figures are in docs/RESULTS.md.
"""

import copy

import pytest
import torch

import ready_hf
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
