"""Kernels that compiled code calls: compilers leave them alone, and what is around them is compiled."""

import pytest
import torch
from torch._dynamo.utils import counters

from ready_hf.kernels import Records, commit_and_read, conv_commit, launches, state_read


pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("fresh_compiler")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATES = torch.randn(3, 2, 4, 16, 32).to(DEVICE)  # L, B, H, K, V
BLOCK = [torch.rand(shape).to(DEVICE) for shape in [(3, 2, 5, 2, 16), (3, 2, 5, 4, 32), (3, 2, 5, 4), (3, 2, 5, 4)]]
BLOCK[2] = -BLOCK[2]


def read(states, queries):
    return state_read(states, 2 * queries, backend="triton", precision="ieee") + 1


def commit(states, queries):
    accepted = torch.tensor([5, 2], device=DEVICE)
    records = Records(*(list(x) for x in BLOCK))
    reads = commit_and_read(
        states, records, accepted, 2 * queries, out=[x + 1 for x in states], backend="triton", precision="ieee"
    )
    return reads + 1


def cut(states, queries):
    uncut, accepted = [x.flatten(1, 2)[..., :9] + 1 for x in states], torch.tensor([5, 2], device=DEVICE)
    return conv_commit(uncut, accepted, 4, backend="triton") + 1


@pytest.mark.parametrize("function", [read, commit, cut])
def test_a_compiled_caller_gets_what_an_eager_one_gets(function):
    """From layers that lie apart, which takes a table of addresses, pinned on a GPU."""
    queries, states = torch.randn(3, 4, 6, 16).to(DEVICE), [x.clone() for x in STATES]
    expected, before = function(states, queries), launches.total()
    found = torch.compile(function, backend="eager")
    for _ in range(2):
        assert torch.equal(found(states, queries), expected)
    assert launches.total() == before + 2
    assert counters["stats"]["unique_graphs"] > 0
    states[1] *= 2  # the code that is there reads what is there
    assert torch.equal(found(states, queries), function(states, queries))


def test_the_gradient_of_a_read_goes_through_compiled_code():
    gradients = []
    for function in (read, torch.compile(read, backend="aot_eager")):
        queries = torch.ones(3, 4, 6, 16, device=DEVICE, requires_grad=True)
        function(list(STATES), queries).square().sum().backward()
        gradients.append(queries.grad)
    assert torch.equal(gradients[0], gradients[1])
