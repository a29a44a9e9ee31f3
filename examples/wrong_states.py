"""States that a reader should not be served: does a drafter use the real ones?"""

import dataclasses

import torch

from ready_hf.anchor_states import AnchorStates
from ready_hf.features import DraftingBatch


WRONG = ("zeros", "another row's", "the previous anchor's")


def with_wrong_states(batch: DraftingBatch, kind: str) -> DraftingBatch:
    """The batch with the states that `kind`, one of `WRONG`, says, in one tensor; at least two rows and anchors."""
    states = batch.states.stack() if isinstance(batch.states, AnchorStates) else batch.states
    assert states is not None
    if kind == "zeros":
        states = torch.zeros_like(states)
    elif kind == "another row's":
        states = states.roll(1, 0)
    else:
        states = torch.cat([states[:, :1], states[:, :-1]], dim=1)
    return dataclasses.replace(batch, states=states)
