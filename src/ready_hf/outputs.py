"""What drafted `generate` returns: the fields of plain `generate`, one entry per token, plus statistics."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput

from ready_hf.acceptance import Column
from ready_hf.statistics import DecodingStats
from ready_hf.target import CACHE_NAME


@dataclass
class SpeculativeDecodingOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with statistics.

    Args:
        stats (`DecodingStats`): Rounds, accepted drafts by position and seconds of this call.
    """

    stats: DecodingStats | None = None


class Transcript:
    """Collects scores, logits, attentions and hidden states as plain `generate` does, if the caller asked for them.

    Args:
        config (`GenerationConfig`): Says which of them are wanted.
    """

    def __init__(self, config: GenerationConfig):
        wanted = bool(config.return_dict_in_generate)
        self.is_wanted = wanted
        self.scores: tuple[torch.Tensor, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if wanted and config.output_logits else None
        self.attentions: tuple[Any, ...] | None = () if wanted and config.output_attentions else None
        self.hidden_states: tuple[Any, ...] | None = () if wanted and config.output_hidden_states else None

    def add_column(self, column: Column) -> None:
        """Adds a token's scores and logits; before the stopping criteria run, as in plain `generate`."""
        if self.scores is not None:
            self.scores += (column.scores,)
        if self.logits is not None:
            self.logits += (column.logits,)

    def add_prefill(self, outputs: Any) -> None:
        """Adds the prompt's attentions and hidden states, unsliced."""
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)

    def add_block(self, outputs: Any, length: int, keep: int) -> None:
        """Adds attentions and hidden states of the first `keep` of a block's `length` tokens, one token at a time."""
        for k in range(keep):
            if self.hidden_states is not None:
                self.hidden_states += (tuple(h[:, k : k + 1] for h in outputs.hidden_states),)
            if self.attentions is not None:
                # [B, heads, T, kv]: token k sees all but the length - 1 - k last keys
                self.attentions += (
                    tuple(
                        None if a is None else a[:, :, k : k + 1, : a.shape[-1] - (length - 1 - k)]
                        for a in outputs.attentions
                    ),
                )

    def output(self, sequences: torch.Tensor, cache: Cache, stats: DecodingStats) -> Any:
        """The return value of `generate`: the sequences, or everything."""
        if not self.is_wanted:
            return sequences
        return SpeculativeDecodingOutput(
            sequences=sequences,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            stats=stats,
            **{CACHE_NAME: cache},
        )
