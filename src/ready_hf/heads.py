"""The two light heads of DSpark on top of the parallel backbone.

All slots of a block are computed at once, so their logits do not know which tokens are drafted before them. The
*sequential head* adds that: logits_k += W2 z_k, where z_k depends on the token x_{k-1} before draft k. The *confidence
head* predicts c_k = P(draft k is accepted | all before it are).

Shapes: B batch, G block slots, d hidden size, r rank, V vocabulary.
"""

import torch
from torch import nn

from ready_hf.configuration_ready import ReadyDrafterConfig


class ZeroLinear(nn.Linear):
    """A linear map that starts at zero: transformers initialises it by its class, as `SequentialHead` has no weights
    of its own and is passed over.
    """


class SequentialHead(nn.Module):
    """Low-rank correction of the logits by the previous token (DSpark paper, sequential head).

    - `vanilla`: z_k = W1[x_{k-1}], a Markov chain of rank r;
    - `gated`: z_k = sigmoid(gate [h_k; e_k]) * e_k with e_k = W1[x_{k-1}];
    - `rnn`: z_k = u * z_{k-1} + (1 - u) * tanh(c), (u, c) = joint [h_k; e_k; z_{k-1}], z_0 = 0.

    The exact form of the last two, and the zero-initialised W2, are ours.
    """

    def __init__(self, config: ReadyDrafterConfig):
        super().__init__()
        self.kind, self.rank = config.markov_head_type, config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = ZeroLinear(self.rank, config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * self.rank, 2 * self.rank)

    def step(
        self, hidden_states: torch.Tensor, previous_ids: torch.Tensor, latent: torch.Tensor | None
    ) -> torch.Tensor:
        """z_k `[..., r]` of one slot, from its hidden state `[..., d]`, the token before it `[...]` and z_{k-1}."""
        embeds = self.markov_w1(previous_ids)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden_states, embeds], dim=-1))) * embeds
        if self.kind == "rnn":
            latent = torch.zeros_like(embeds) if latent is None else latent
            keep, new = self.joint_proj(torch.cat([hidden_states, embeds, latent], dim=-1)).chunk(2, dim=-1)
            keep = torch.sigmoid(keep)
            return keep * latent + (1 - keep) * torch.tanh(new)
        return embeds

    def forward(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """z `[..., G, r]` of whole blocks, from `[..., G, d]` and the tokens before every slot `[..., G]`."""
        if self.kind != "rnn":
            return self.step(hidden_states, previous_ids, None)
        latents: list[torch.Tensor] = []
        for k in range(hidden_states.shape[-2]):
            last = latents[-1] if latents else None
            latents.append(self.step(hidden_states[..., k, :], previous_ids[..., k], last))
        return torch.stack(latents, dim=-2)


class ConfidenceHead(nn.Module):
    """Logit of c_k from the slot's hidden state and, optionally, the embedding of the token before it.

    Its gradient stops here: training it leaves backbone and sequential head alone (DSpark paper, confidence head).
    """

    def __init__(self, config: ReadyDrafterConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov and config.markov_rank > 0
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden_states: torch.Tensor, previous_embeds: torch.Tensor | None) -> torch.Tensor:
        """Logits `[...]` from `[..., d]` and, `confidence_head_with_markov`, W1 of the token before `[..., r]`."""
        inputs = hidden_states.detach()
        if self.with_markov and previous_embeds is not None:
            inputs = torch.cat([inputs, previous_embeds.detach()], dim=-1)
        return self.proj(inputs).squeeze(-1)
