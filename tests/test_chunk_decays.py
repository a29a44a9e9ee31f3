"""The chunk scan of the gated delta rule with tokens that decay everything, against the rule in float64."""

import pytest
import torch

from ready_hf.chunk_states import gated_delta_scan


LENGTH, CHUNK = 40, 16
EVERY_POSITION = torch.arange(LENGTH + 1).expand(2, -1)


def inputs() -> dict[str, torch.Tensor]:
    """Two rows, six heads, keys of 4 and values of 5 channels, ordinary decay."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, LENGTH, 6, 4, generator=generator)
    return {
        "key": key / key.norm(dim=-1, keepdim=True),
        "value": torch.randn(2, LENGTH, 6, 5, generator=generator),
        "g": -torch.rand(2, LENGTH, 6, generator=generator),
        "beta": torch.rand(2, LENGTH, 6, generator=generator),
        "initial_state": torch.randn(2, 6, 4, 5, generator=generator),
    }


def by_steps(key, value, g, beta, initial_state) -> torch.Tensor:
    """States `[B, T + 1, H, K, V]` after 0, 1, ..., T tokens in float64."""
    key, value, g, beta, state = (x.double() for x in (key, value, g, beta, initial_state))
    states = [state]
    for t in range(key.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        write = beta[:, t, :, None] * (value[:, t] - (state * key[:, t, ..., None]).sum(-2))
        state = state + key[:, t, ..., None] * write[..., None, :]
        states.append(state)
    return torch.stack(states, 1)


@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
@pytest.mark.parametrize("strength", [0.5, 200.0, 1600.0, torch.inf])
@pytest.mark.parametrize("tokens", [[0], [5], [15], [16], [39], [3, 4, 15, 16, 30]], ids=str)  # of chunks of 16
def test_states_at_all_positions(tokens, strength, chunk_size):
    given = inputs()
    given["g"][:, tokens] = -strength
    got = gated_delta_scan(**given, chunk_size=chunk_size).states(EVERY_POSITION)
    want = by_steps(**given)
    errors = (got.double() - want).flatten(2).norm(dim=-1) / want.flatten(2).norm(dim=-1)
    assert float(errors.max()) <= 1e-6  # not a number fails too
    assert torch.equal(got[:, 0], given["initial_state"])


def test_nothing_from_before_such_a_token_is_left():
    given = inputs()
    given["g"][:, 20] = -torch.inf
    got = gated_delta_scan(**given, chunk_size=CHUNK).states(EVERY_POSITION)
    given["initial_state"], given["value"] = given["initial_state"] + 1.0, given["value"].clone()
    given["value"][:, :20] += 1.0
    other = gated_delta_scan(**given, chunk_size=CHUNK).states(EVERY_POSITION)
    assert torch.equal(got[:, 21:], other[:, 21:])
    assert not torch.allclose(got[:, :21], other[:, :21])
