"""Cases C27 and C62: the drafting loss of a large vocabulary, in chunks, and of rows without anchors."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ready_hf
from ready_hf import modeling_ready
from ready_hf.features import FrozenTarget, choose_anchors, legal_anchors
from ready_hf.losses import DraftingLoss
from support import DEVICES, drafter_for, random_prompt, tiny_target


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


@pytest.mark.parametrize("device", DEVICES)
def test_c62_a_row_without_any_anchor_changes_nothing(device):
    """The mask is dense everywhere: all slots of the row are dummies, and loss and gradient stay finite."""
    pytest.importorskip("accelerate")
    from ready_hf.training import drafting_sums

    target = copy.deepcopy(tiny_target("qwen3_5")).to(device)
    ready_hf.ensure_patched(target)
    drafter = drafter_for(target, block_size=6).train().to(device)
    frozen = FrozenTarget(target, drafter.config)
    ids = random_prompt(24, batch=2, seed=3).to(device)
    ids[1, 4:] = 0
    mask = (torch.arange(24) < torch.tensor([[24], [4]])).long().to(device)
    found = []
    for rows in (2, 1):
        anchors, is_anchor = choose_anchors(legal_anchors(mask[:rows], 6), 3)
        assert bool(is_anchor[0].all())
        assert not bool(is_anchor[1:].any())
        batch = frozen.batch(ids[:rows], anchors, is_anchor, mask[:rows])
        drafter.zero_grad()
        sums = drafting_sums(drafter, drafter, frozen, batch, DraftingLoss())
        sums.loss.backward()
        found.append((sums.metrics(), {name: p.grad.clone() for name, p in drafter.named_parameters()}))
    bound = 1e-5 if device == "cpu" else 1e-3  # products of other shapes there
    assert found[0][0] == pytest.approx(found[1][0], rel=bound)
    for name, gradient in found[1][1].items():
        assert float((found[0][1][name] - gradient).norm()) <= bound * float(gradient.norm()), name
    print(f"\nC62 on {device}: {found[0][0]}")


def test_c62_a_slot_that_nobody_sees_sees_itself():
    """So no row of the attention is empty, even with all context and all slots hidden."""
    context, slots = torch.zeros(1, 8), torch.zeros(1, 6)
    mask = modeling_ready.block_mask(torch.tensor([[0, 5]]), 3, 8, 8, None, context, slots)
    assert torch.equal(mask[0, 0], torch.cat([torch.zeros(6, 8), torch.eye(6)], dim=1).bool())
