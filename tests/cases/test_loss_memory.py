"""Case C27: the drafting loss at the vocabulary of a large model, which is computed in chunks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ready_hf.losses import DraftingLoss


@pytest.mark.slow
def test_c27_the_loss_of_a_large_vocabulary_needs_less_than_2_gb():
    """248,320 tokens, 20 blocks of 16, of which one dense copy has 318 MB: a fraction of what dense takes."""
    script = Path(__file__).parents[2] / "examples" / "benchmark_loss.py"
    sizes = ["16777216", "268435456"]  # four chunks; all at once
    command = [sys.executable, str(script), "--blocks", "20", "--max-logits", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    chunked, dense = (int(line.split()[1]) for line in done.stdout.splitlines())
    assert chunked < 1e9  # by default chunks are four times as large, however many blocks there are
    assert chunked < dense / 2


@pytest.mark.slow
@pytest.mark.gpu
def test_c27_512_anchors_on_a_gpu():
    """The case as it was reported, 512 blocks of 16, loss and gradient."""
    torch.manual_seed(0)
    weight = torch.randn(248_320, 64, device="cuda") * 0.02
    hidden, wanted = (torch.randn(512, 16, 64, device="cuda") for _ in range(2))
    ids = torch.randint(0, 248_320, (512, 16), device="cuda")
    hidden.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    heads = (lambda x, _: (x @ weight.T, None)), (lambda x: x @ weight.T)
    DraftingLoss()(hidden, wanted, ids, ids, torch.ones_like(ids).bool(), *heads).loss.backward()
    extra = torch.cuda.max_memory_allocated() - before
    print(f"\nC27 on cuda: {extra / 1e9:.2f} GB above the inputs, where one dense copy has 8.14 GB")
    assert hidden.grad.isfinite().all()
    assert hidden.grad.any()
    assert extra < 2e9
