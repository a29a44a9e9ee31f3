"""`conv_commit` against its torch reference, and the rules of choosing a backend."""

import pytest
import torch

from ready_hf.kernels import conv_commit, launches


pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel_size", [3, 4])
@pytest.mark.parametrize("length", [1, 9, 16])
def test_windows_of_every_row(length, kernel_size, dtype):
    accepted = torch.tensor([0, length, length // 2, 1], device=DEVICE)
    stacked = torch.randn(3, 4, 300, kernel_size + length).to(DEVICE, dtype)  # 300 channels: more than a tile
    for uncut in (stacked, list(stacked), stacked.mT.contiguous().mT):
        before = launches["conv_commit"]
        found = conv_commit(uncut, accepted, kernel_size, backend="triton")
        assert launches["conv_commit"] == before + 1
        assert torch.equal(found, conv_commit(uncut, accepted, kernel_size, backend="torch"))
    for row, n in enumerate(accepted.tolist()):
        assert torch.equal(found[:, row], stacked[:, row, :, n : n + kernel_size])


def test_negative_lengths_read_nothing_foreign():
    """They count as 0, as on a GPU those beyond the block count as the whole block: looking would wait for it."""
    uncut = torch.randn(1, 2, 8, 7, device=DEVICE)
    found = conv_commit(uncut, torch.tensor([-5, 3], device=DEVICE), 4, backend="triton")
    assert torch.equal(found, conv_commit(uncut, torch.tensor([0, 3], device=DEVICE), 4, backend="torch"))


@pytest.mark.parametrize(
    ("uncut", "accepted", "kernel_size", "message"),
    [
        (torch.zeros(2, 3, 5), torch.zeros(2, dtype=torch.long), 4, "`uncut` must be"),
        (torch.zeros(1, 2, 3, 5), torch.zeros(2, dtype=torch.long), 6, "or more columns"),
        (torch.zeros(1, 2, 3, 5), torch.zeros(3, dtype=torch.long), 4, "`accepted` must be"),
        (torch.zeros(1, 2, 3, 5).int(), torch.zeros(2, dtype=torch.long), 4, "float32, bfloat16 or float16"),
        (torch.zeros(1, 2, 3, 5), torch.zeros(2, dtype=torch.int16), 4, "`accepted` must be"),
        (torch.zeros(1, 2, 3, 5), torch.zeros(2, dtype=torch.long), 0, "or more columns"),
        (torch.zeros(1, 2, 3, 5), torch.tensor([0, 2]), 4, "must be below 2, got 2"),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_what_does_not_fit_is_refused(uncut, accepted, kernel_size, message, backend):
    with pytest.raises(ValueError, match=message):
        conv_commit(uncut.to(DEVICE), accepted.to(DEVICE), kernel_size, backend=backend)


def test_torch_runs_on_the_cpu_unless_kernels_are_forced():
    uncut, accepted = torch.randn(1, 2, 3, 6), torch.tensor([1, 2])
    before = launches["conv_commit"]
    conv_commit(uncut, accepted, 4)
    assert launches["conv_commit"] == before


def test_a_forced_backend_raises_where_it_cannot_run(monkeypatch):
    import ready_hf.kernels._launch as launch

    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="run on CUDA tensors, got 'cpu'"):
        conv_commit(torch.randn(1, 2, 3, 6), torch.tensor([1, 2]), 4, backend="triton")
    monkeypatch.setattr(launch, "triton", None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        conv_commit(torch.randn(1, 2, 3, 6), torch.tensor([1, 2]), 4, backend="triton")
