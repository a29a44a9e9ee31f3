"""The exact distribution of a target's next few tokens, and a drafter that hits it as often as one likes."""

from collections import Counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ready_hf import DraftContext, record_stats
from ready_hf.candidates import choose_drafts
from ready_hf.statistics import DecodingStats
from support import ScriptedDrafter
from toys import LEVEL, p_value


Prefix = tuple[int, ...]


class PrefixTree:
    """Every continuation of a prompt that the processors allow, from plain forwards without a cache.

    Args:
        model (`PreTrainedModel`): The target.
        prompt (`torch.LongTensor` of shape `[1, L]`): Where the tree starts.
        depth (`int`): Tokens after the prompt.
        processors (`LogitsProcessorList`): What the target applies; best with a small top-k.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, depth: int, processors: LogitsProcessorList):
        self.model, self.prompt = model, prompt
        self.logits: dict[Prefix, torch.Tensor] = {}  # [V]
        self.paths: dict[Prefix, float] = {(): 1.0}  # probability of every continuation of full depth
        for _ in range(depth):
            prefixes = list(self.paths)
            tails = torch.tensor(prefixes, dtype=torch.long).view(len(prefixes), -1)
            ids = torch.cat([prompt.expand(len(prefixes), -1), tails], dim=1)
            with torch.no_grad():
                logits = model(ids).logits[:, -1].float()
            probabilities = processors(ids, logits.clone()).double().softmax(-1)
            longer = {}
            for prefix, row, row_logits in zip(prefixes, probabilities, logits, strict=True):
                self.logits[prefix] = row_logits
                for token in row.nonzero()[:, 0].tolist():
                    longer[(*prefix, token)] = self.paths[prefix] * float(row[token])
            self.paths = longer

    def p_values(self, sequences: torch.Tensor) -> list[float]:
        """Chi-square tests of continuations of the prompt: the first 1, 2, ... tokens jointly, and each alone."""
        depth, start = len(next(iter(self.paths))), self.prompt.shape[1]
        drawn = [tuple(tokens) for tokens in sequences[:, start : start + depth].tolist()]
        parts = [slice(0, end) for end in range(1, depth + 1)] + [slice(k, k + 1) for k in range(1, depth)]
        return [self._p_value(drawn, part) for part in parts]

    def assert_distributed(self, sequences: torch.Tensor) -> None:
        """Continuations of the prompt follow the tree."""
        worst = min(self.p_values(sequences))
        assert worst > LEVEL, f"p = {worst:.1e} over {len(sequences)} samples"

    def _p_value(self, drawn: list[Prefix], part: slice) -> float:
        expected: Counter[Prefix] = Counter()
        for path, probability in self.paths.items():
            expected[path[part]] += probability  # type: ignore[assignment]
        counts = Counter(path[part] for path in drawn)
        outcomes = list(expected | counts)
        return p_value(torch.tensor([counts[x] for x in outcomes]), torch.tensor([expected[x] for x in outcomes]))


class TreeDrafter(ScriptedDrafter):
    """Drafts from the target's own logits plus a fixed table of noise by the last token.

    Args:
        tree (`PrefixTree`): Knows the target's logits.
        noise (`tuple` of `float`): Scale of the noise in row 0, 1, ...; repeated over the rows of the batch.
        samples (`bool`): Draw drafts through `choose_drafts`, or take the most probable ones.
        block_size (`int`): Drafts per round.
    """

    target_layer_ids: list[int] = []

    def __init__(self, tree: PrefixTree, noise: tuple[float, ...] = (0.0,), samples: bool = True, block_size: int = 3):
        super().__init__(tree.prompt, block_size)
        self.tree, self.noise, self.samples = tree, noise, samples
        vocab_size = len(next(iter(tree.logits.values())))
        self.table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0))
        self.drafted: list[torch.Tensor] = []

    def draft(self, context: DraftContext) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids, start, logits = context.input_ids, self.tree.prompt.shape[1], []
        nothing = torch.zeros(len(self.table))
        scale = torch.tensor([self.noise[row % len(self.noise)] for row in range(len(ids))])[:, None]
        for _ in range(context.num_drafts):
            known = torch.stack([self.tree.logits.get(tuple(row), nothing) for row in ids[:, start:].tolist()])
            tokens, row_logits = choose_drafts(
                known + scale * self.table[ids[:, -1]], context.do_sample and self.samples, context.warpers
            )
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            logits.append(row_logits)
        drafts = ids[:, context.input_ids.shape[1] :]
        self.drafted.append(drafts)
        return drafts, torch.stack(logits, dim=1) if context.do_sample and self.samples else None


def sample(
    tree: PrefixTree, drafter: TreeDrafter | None, batch: int, calls: int, new_tokens: int, **options: Any
) -> tuple[torch.Tensor, DecodingStats]:
    """`batch * calls` samples `[B, L + new_tokens]` through `generate`, and what the calls counted."""
    prompt = tree.prompt.repeat(batch, 1)
    with record_stats() as stats:
        sequences = [
            tree.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                assistant_model=drafter,
                do_sample=True,
                max_new_tokens=new_tokens,
                **options,
            )
            for _ in range(calls)
        ]
    return torch.cat(sequences), stats
