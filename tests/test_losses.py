"""The drafting loss against its formula, chunked against dense, and what its sums say."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ready_hf.losses import DraftingLoss, LossSums


BLOCKS, SLOTS, HIDDEN, VOCAB = 7, 4, 6, 11


class Toy:
    """Random hidden states, a head for each side, a confidence head that stops its gradient."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator, requires_grad=True)
        self.target_hidden = torch.randn(BLOCKS, SLOTS, HIDDEN, generator=generator)
        self.labels = torch.randint(VOCAB, (BLOCKS, SLOTS), generator=generator)
        self.previous = torch.randint(VOCAB, (BLOCKS, SLOTS), generator=generator)
        self.mask = torch.ones(BLOCKS, SLOTS, dtype=torch.bool)
        self.mask[2], self.mask[5, 2:] = False, False
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.bias = torch.randn(VOCAB, VOCAB, generator=generator, requires_grad=True)
        self.confidence = torch.randn(HIDDEN, generator=generator, requires_grad=True)
        self.most_logits = 0

    def draft_logits(self, hidden, previous):
        logits = hidden @ self.head.T + self.bias[previous]
        self.most_logits = max(self.most_logits, logits.numel())
        return logits, hidden.detach() @ self.confidence

    def sums(self, loss=None, confidence=True):
        draft = self.draft_logits if confidence else lambda h, p: (self.draft_logits(h, p)[0], None)
        tensors = (self.hidden, self.target_hidden, self.labels, self.previous, self.mask)
        return (loss or DraftingLoss())(*tensors, draft, lambda h: h @ self.head.T)

    def gradients(self, loss):
        return torch.autograd.grad(loss, [self.hidden, self.bias, self.confidence], retain_graph=True)


def by_hand(toy):
    """The formula, slot by slot: the loss, and the acceptance of every slot."""
    loss, accepted = 0.0, torch.zeros(BLOCKS, SLOTS)
    for block in range(BLOCKS):
        for k in range(SLOTS):
            hidden = toy.hidden[block, k]
            drafted = (toy.head @ hidden + toy.bias[toy.previous[block, k]]).softmax(-1)
            wanted = (toy.head @ toy.target_hidden[block, k]).softmax(-1)
            chance = torch.minimum(drafted, wanted).sum().detach()
            accepted[block, k] = chance
            if not toy.mask[block, k]:
                continue
            terms = -0.1 * drafted[toy.labels[block, k]].log() + 0.9 * (drafted - wanted).abs().sum()
            confidence = torch.sigmoid(hidden.detach() @ toy.confidence)
            loss = loss + math.exp(-k / 4) * (terms + F.binary_cross_entropy(confidence, chance))
    return loss, accepted


def test_loss_and_gradient_are_those_of_the_formula():
    toy = Toy()
    sums, (loss, _) = toy.sums(), by_hand(toy)
    assert torch.allclose(sums.loss, loss, atol=1e-5)
    for got, want in zip(toy.gradients(sums.loss), toy.gradients(loss), strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_metrics_are_means_over_what_counts():
    toy = Toy()
    _, accepted = by_hand(toy)
    metrics, whole = toy.sums().metrics(), toy.mask.all(-1)
    survived = accepted[whole].cumprod(-1).sum(-1)
    assert metrics["tau"] == pytest.approx(1 + float(survived.mean()), abs=1e-5)
    assert metrics["num_blocks"] == int(whole.sum()) == BLOCKS - 2
    for k in range(SLOTS):
        assert metrics[f"acceptance_{k + 1}"] == pytest.approx(float(accepted[toy.mask[:, k], k].mean()), abs=1e-5)


def test_tau_of_samples_is_what_sampling_accepts():
    """Two slots over three tokens, exactly: all texts, each as often as the target writes it. `tau` differs: what the
    second slot accepts depends on the first token."""
    first, drafted_first = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    second = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]])
    drafted_second = torch.tensor([[0.1, 0.1, 0.8], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    texts = [(a, b) for a in range(3) for b in range(3)]
    counts = [round(float(first[a] * second[a, b]) * 100) for a, b in texts]
    labels = torch.tensor([text for text, count in zip(texts, counts, strict=True) for _ in range(count)])
    assert len(labels) == 100
    wanted = torch.stack([first.expand(100, 3), second[labels[:, 0]]], dim=1).log()
    drafted = torch.stack([drafted_first.expand(100, 3), drafted_second[labels[:, 0]]], dim=1).log()
    mask = torch.ones(100, 2, dtype=torch.bool)
    sums = DraftingLoss()(drafted, wanted, labels, labels, mask, lambda x, _: (x, None), lambda x: x)
    accept_first = torch.minimum(first, drafted_first)
    accept_both = (accept_first[:, None] * torch.minimum(second, drafted_second)).sum()
    expected = 1 + float(accept_first.sum() + accept_both)
    assert sums.metrics()["tau_of_samples"] == pytest.approx(expected, abs=1e-5)
    assert abs(sums.metrics()["tau"] - expected) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tau_of_samples_where_a_label_has_no_probability(dtype):
    """A text that the target would never write: min(1, q / 0) is 1 where the drafter would, 0 where it would not, and
    a draft after it is judged as ever. No dtype makes it not a number."""
    never, even = [-60000.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    wanted = torch.tensor([[never, even], [never, even]], dtype=dtype)
    drafted = torch.tensor([[even, even], [never, even]], dtype=dtype)
    labels, mask = torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.bool)
    sums = DraftingLoss()(drafted, wanted, labels, labels, mask, lambda x, _: (x, None), lambda x: x)
    assert sums.survived_samples.tolist() == pytest.approx([1.0, 1.0], abs=1e-3)  # of the first block
    same = DraftingLoss()(wanted, wanted, labels + 1, labels, mask, lambda x, _: (x, None), lambda x: x)
    assert same.metrics()["tau_of_samples"] == pytest.approx(3.0, abs=1e-3)


def test_tau_of_samples_counts_whole_blocks_only():
    toy = Toy()
    alone, whole = Toy(), toy.mask.all(-1)
    for name in ("hidden", "target_hidden", "labels", "previous", "mask"):
        setattr(alone, name, getattr(alone, name)[whole])
    assert toy.sums().metrics()["tau_of_samples"] == pytest.approx(alone.sums().metrics()["tau_of_samples"], abs=1e-5)
    with torch.no_grad():
        toy.hidden[2], toy.target_hidden[5, 2:] = torch.nan, torch.inf
    assert toy.sums().metrics()["tau_of_samples"] == pytest.approx(alone.sums().metrics()["tau_of_samples"], abs=1e-5)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 100])
def test_chunked_is_dense(blocks):
    dense, chunked = Toy(), Toy()
    want, got = dense.sums(), chunked.sums(DraftingLoss(max_logits=blocks * SLOTS * VOCAB))
    assert chunked.most_logits == min(blocks, BLOCKS) * SLOTS * VOCAB
    for name in LossSums.__dataclass_fields__:
        assert torch.allclose(getattr(got, name).float(), getattr(want, name).float(), atol=1e-5), name
    for one, other in zip(chunked.gradients(got.loss), dense.gradients(want.loss), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_chunk_has_at_least_one_block():
    toy = Toy()
    assert torch.allclose(toy.sums(DraftingLoss(max_logits=1)).loss, Toy().sums().loss, atol=1e-5)


def test_the_confidence_moves_only_its_own_head():
    toy = Toy()
    only = DraftingLoss(cross_entropy=0.0, distance=0.0)
    hidden, bias, confidence = toy.gradients(toy.sums(only).loss)
    assert not hidden.any()
    assert not bias.any()
    assert confidence.any()


def test_without_a_confidence_head():
    toy = Toy()
    sums = toy.sums(confidence=False)
    assert float(sums.confidence) == 0
    assert torch.allclose(sums.loss, toy.sums(DraftingLoss(confidence=0.0)).loss)


@pytest.mark.parametrize(("decay", "weights"), [(4.0, [1, 0.7788, 0.6065, 0.4724]), (math.inf, [1, 1, 1, 1])])
def test_slot_weights(decay, weights):
    assert torch.allclose(DraftingLoss(decay=decay).slot_weights(4), torch.tensor(weights).float(), atol=1e-4)


def test_masked_slots_may_hold_anything():
    toy = Toy()
    with torch.no_grad():
        toy.hidden[2] = torch.nan
        toy.target_hidden[5, 2:] = torch.inf
    sums = toy.sums()
    assert all(torch.isfinite(getattr(sums, name)).all() for name in LossSums.__dataclass_fields__)


def test_nothing_counts():
    toy = Toy()
    toy.mask[:] = False
    sums = toy.sums()
    assert float(sums.loss.detach()) == 0
    assert not any(gradient.any() for gradient in toy.gradients(sums.loss))
    assert math.isnan(sums.metrics()["tau"])


def test_sums_add_up():
    toy = Toy()
    both = toy.sums().detach() + toy.sums().detach()
    assert torch.equal(both.num_slots, 2 * toy.sums().num_slots)
    assert both.metrics()["tau"] == pytest.approx(toy.sums().metrics()["tau"])
    assert not both.loss.requires_grad


@pytest.mark.slow
def test_memory_at_the_largest_vocabulary():
    """Below 2 GB above what was there, for any number of blocks: 36 are three chunks; at once they would be 570 MB of
    logits in float32, and several times that with softmax and gradient."""
    pytest.importorskip("resource", reason="Windows does not tell the peak of a process this way")
    script = Path(__file__).parent.parent / "examples" / "benchmark_loss.py"
    command = [sys.executable, str(script), "--blocks", "36"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    _, used, _ = ran.stdout.split()
    assert 1e8 < int(used) < 2e9
