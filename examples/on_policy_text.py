"""Text that a target writes itself: what a drafter should learn from (see train_drafter.py)."""

import math
import pathlib
import time

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel


def read_tokens(path: pathlib.Path) -> torch.Tensor:
    """The ids of a file of uint16."""
    return torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64))


@torch.no_grad()
def continuations(
    model: PreTrainedModel, prompts: torch.Tensor, length: int, sample: bool, forbidden: int, seed: int
) -> torch.Tensor:
    """Prompts `[B, P]` continued to `[B, length]` at temperature 1 or greedily, on the CPU.

    The end-of-text token is a token like any other: text of the training data goes on after it too.
    """
    torch.manual_seed(seed)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    prompts = prompts.to(model.device)
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length - prompts.shape[1],
        suppress_tokens=[forbidden],
        **choice,
    )
    if ids.shape[1] != length:
        raise RuntimeError(f"rows of {ids.shape[1]} tokens came back, expected {length}")
    return ids.cpu()


def is_greedy_batch(index: int, share: float) -> bool:
    """Whether batch `index` is written greedily; rounded, so that a few batches are mixed too."""
    return math.floor((index + 0.5) * share + 0.5) > math.floor((index - 0.5) * share + 0.5)


def write_rows(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    *,
    length: int,
    batch: int,
    prompts: tuple[int, int],
    greedy: float,
    seconds: float,
    forbidden: int,
    seed: int,
) -> torch.Tensor:
    """Rows `[N, length]` in int32, as many batches as fit into `seconds`, at least one.

    Args:
        model (`PreTrainedModel`): The target.
        tokens (`torch.LongTensor`): Text that prompts are cut from, at random places.
        length (`int`): Tokens of a row, prompt included.
        batch (`int`): Rows written at once.
        prompts (`tuple[int, int]`): Shortest and longest prompt; drawn once per batch.
        greedy (`float`): Share of batches that are written greedily, the others at temperature 1.
        seconds (`float`): Time budget.
        forbidden (`int`): An id that must not be written: the mask token.
        seed (`int`): Seed.
    """
    generator, rows, start, slowest = torch.Generator().manual_seed(seed), [], time.perf_counter(), 0.0
    while not rows or time.perf_counter() - start + slowest < seconds:
        began, index = time.perf_counter(), len(rows)
        size = int(torch.randint(prompts[0], prompts[1] + 1, (), generator=generator))
        places = torch.randint(len(tokens) - size, (batch, 1), generator=generator)
        is_greedy = is_greedy_batch(index, greedy)
        text = continuations(
            model, tokens[places + torch.arange(size)], length, not is_greedy, forbidden, seed * 1000 + index
        )
        rows.append(text.to(torch.int32))
        slowest = max(slowest, time.perf_counter() - began) if index else 0.0  # the first one warms up
        if index in (0, 1):
            print(f"on-policy text: {batch} rows in {time.perf_counter() - began:.1f} s", flush=True)
    found = torch.cat(rows)
    print(f"on-policy text: {len(found)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    return found[torch.randperm(len(found), generator=generator)]
