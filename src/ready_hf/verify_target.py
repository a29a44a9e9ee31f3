"""Is drafted decoding lossless with this target, drafter and dtype, here? One verdict from real decoding.

For every prompt, plain greedy text is drafted with blocks that are right up to draft k and wrong there, for every k,
then by prompt lookup and by the drafters given. Asked of each:

- tokens: those of plain `generate`. In bfloat16 and float16 they may part at a near tie, where the margin of the two
  best logits is at most twice the largest difference of any logit between two plain ways to compute them;
- committed caches, in every round and at the end: recurrent states, convolution windows, keys and values against the
  nearer of the two plain ways, one forward or step by step, relative L2 error per tensor; at most 1e-5 in float32,
  else at most twice what the two differ by. Of quantized targets, whose layers may turn a rounding error into a jump,
  at most 1e-5 or twice what differs if the embeddings are off by rounding, whichever is more.

    verdict = verify_target(target, [tokenizer(text, return_tensors="pt")], {"ReaDy": drafter})
    print(verdict.report())
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ready_hf.candidates import Drafter, PromptLookupDrafter, is_drafter
from ready_hf.configuration_ready import LARGEST_BLOCK
from ready_hf.drafting import DraftingMixin
from ready_hf.forced_drafts import ForcedDrafter, ObservedDrafter
from ready_hf.intervals import finite
from ready_hf.plain_paths import FLOAT32_BOUND, NearTie, PlainPath
from ready_hf.statistics import Round
from ready_hf.target import cache_in, check_target
from ready_hf.target_shape import check_token_ids


EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class DraftedRun:
    """One drafted text against the plain one.

    Args:
        drafter (`str`): What drafted.
        prompt (`int`): Which prompt.
        rounds (`int`): Verify forwards.
        state_error (`float`): Largest error of a committed cache.
        first_difference (`int`, *optional*): First new token that differs from plain decoding.
        tie (`NearTie`, *optional*): How close the two best tokens were there.
    """

    drafter: str
    prompt: int
    rounds: int
    state_error: float
    first_difference: int | None = None
    tie: NearTie | None = None


@dataclass(frozen=True)
class Verdict:
    """Result of `verify_target`.

    Args:
        dtype (`str`): Of the target.
        is_exact (`bool`): Whether tokens must be equal: float32 and float64.
        block_size (`int`): Drafts per block of the forced rejections.
        rejections (`tuple[int]` of length `block_size + 1`): How many blocks were rejected at draft 1, 2, ..., and how
            many not at all.
        plain_difference (`float`): Largest error between the caches of the two plain ways.
        bound (`float`): Largest error that is allowed.
        runs (`tuple[DraftedRun]`): What was compared.
    """

    dtype: str
    is_exact: bool
    block_size: int
    rejections: tuple[int, ...]
    plain_difference: float
    bound: float
    runs: tuple[DraftedRun, ...]

    @property
    def failures(self) -> list[str]:
        """One sentence for every run that is not lossless."""
        found = []
        for run in self.runs:
            where = f"{run.drafter}, prompt {run.prompt + 1}"
            if run.first_difference is not None and (self.is_exact or run.tie is None or not run.tie.is_near):
                found.append(f"{where}: tokens differ from plain decoding at new token {run.first_difference + 1}")
            if not run.state_error <= self.bound:
                found.append(f"{where}: committed states are off by {run.state_error:.1e}, allowed {self.bound:.1e}")
        return found

    @property
    def unasked(self) -> list[str]:
        """Rejections that never came about, so that nothing is known about them."""
        names = [f"at draft {k + 1}" for k in range(self.block_size)] + ["nowhere"]
        return [name for name, count in zip(names, self.rejections, strict=True) if not count]

    @property
    def is_lossless(self) -> bool:
        """Whether everything was asked and nothing failed."""
        return not self.failures and not self.unasked

    @property
    def ties(self) -> list[DraftedRun]:
        """Runs that part from plain decoding, near tie or not."""
        return [run for run in self.runs if run.first_difference is not None]

    def report(self) -> str:
        """As Markdown."""
        verdict = "LOSSLESS" if self.is_lossless else "NOT LOSSLESS" if self.failures else "NOT DECIDED"
        lines = [
            f"{verdict} in {self.dtype}: {len(self.runs)} drafted texts "
            f"against plain decoding, blocks of {self.block_size} drafts.",
            "",
            "| drafts | texts | same tokens | rounds | worst state error |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name in dict.fromkeys(run.drafter for run in self.runs):
            runs = [run for run in self.runs if run.drafter == name]
            same, rounds = sum(run.first_difference is None for run in runs), sum(run.rounds for run in runs)
            worst = max(run.state_error for run in runs)
            lines.append(f"| {name} | {len(runs)} | {same} | {rounds} | {worst:.1e} |")
        lines += [
            "",
            f"State errors: allowed {self.bound:.1e}; the two plain ways differ by {self.plain_difference:.1e}.",
        ]
        counts = ", ".join(str(count) for count in self.rejections)
        lines.append(f"Blocks rejected at draft 1, 2, ..., and nowhere: {counts}.")
        for run in self.ties:
            lines.append(_tie_line(run))
        lines += [f"FAILED: {failure}." for failure in self.failures]
        lines += [f"NOT ASKED: no block was rejected {name}." for name in self.unasked]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; infinite errors are `None`."""
        runs = [{**asdict(run), "state_error": finite(run.state_error)} for run in self.runs]
        own = {name: getattr(self, name) for name in ("dtype", "block_size", "bound", "failures", "unasked")}
        return {
            "lossless": self.is_lossless,
            **own,
            "rejections": list(self.rejections),
            "plain_difference": finite(self.plain_difference),
            "runs": runs,
        }

    def _repr_markdown_(self) -> str:
        return self.report()


def verify_target(
    target: PreTrainedModel,
    prompts: Sequence[Mapping[str, torch.Tensor]],
    drafters: Mapping[str, Drafter] | None = None,
    *,
    block_size: int | None = None,
    max_new_tokens: int = 32,
) -> Verdict:
    """Decodes every prompt plainly and with forced rejections, prompt lookup and the drafters.

    Args:
        target (`PreTrainedModel`): The target.
        prompts (`Sequence`): Arguments for `generate`, each with one sequence without padding.
        drafters (`Mapping[str, Drafter]`, *optional*): By name.
        block_size (`int`, *optional*): Drafts per block, 1 to 31. Default: the largest of the drafters', else 8.
        max_new_tokens (`int`): Per text; enough for two whole blocks.

    Raises:
        UnsupportedTargetError: a target that cannot be rolled back.
        TypeError: something that is no drafter.
        ValueError: an option or prompt that is not allowed, before any compute.
    """
    drafters = dict(drafters or {})
    check_target(target)
    for name, drafter in drafters.items():
        if not is_drafter(drafter):
            raise TypeError(f"{name!r} is a {type(drafter).__name__} and no drafter; see `ready_hf.Drafter`")
    if block_size is None:
        sizes = (d.config.block_size for d in drafters.values() if isinstance(d, DraftingMixin))
        block_size = max(sizes, default=8)
    _check(prompts, block_size, max_new_tokens)
    for number, inputs in enumerate(prompts, 1):
        check_token_ids(target, inputs["input_ids"], f"prompt {number}")
    # quantized layers may round their inputs, whatever dtype lies between them
    is_quantized = bool(getattr(target, "is_quantized", False))
    runs: list[DraftedRun] = []
    rejections, difference = [0] * (block_size + 1), 0.0
    with tqdm(total=len(prompts) * (block_size + 3 + len(drafters)), desc="texts", leave=False, disable=None) as bar:
        for index, inputs in enumerate(prompts):
            path = PlainPath(target, inputs, max_new_tokens)
            difference = max(difference, path.difference())
            if is_quantized:
                difference = max(difference, path.jumps())
            bar.update()
            for name, drafter in [*_forced(path, block_size), ("prompt lookup", _lookup()), *drafters.items()]:
                run, log = drafted_run(path, name, drafter, index)
                runs.append(run)
                for entry in log if isinstance(drafter, ForcedDrafter) else ():
                    if entry.num_drafts == block_size:
                        rejections[len(entry.accepted)] += entry.tokens == len(entry.accepted) + 1
                bar.update()
    is_exact = target.dtype in EXACT and not is_quantized
    least = FLOAT32_BOUND if target.dtype in EXACT else 0.0  # the two plain ways of a short text hardly differ
    bound = least if is_exact else max(least, 2 * difference)
    dtype = str(target.dtype).removeprefix("torch.")
    return Verdict(dtype, is_exact, block_size, tuple(rejections), difference, bound, tuple(runs))


def drafted_run(path: PlainPath, name: str, drafter: Drafter, prompt: int) -> tuple[DraftedRun, list[Round]]:
    """One drafted text of a prompt against its plain one, and its verify forwards."""
    worst = 0.0

    def check(ids: torch.Tensor, cache: Cache) -> None:
        nonlocal worst
        worst = max(worst, path.error(ids, cache))

    output: Any = path.model.generate(
        **path.inputs,
        assistant_model=ObservedDrafter(drafter, check),
        max_new_tokens=path.max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    check(output.sequences[:, :-1], cache_in(output))
    got, want = output.sequences[0].tolist(), path.ids[0].tolist()
    if got == want:
        return DraftedRun(name, prompt, output.stats.rounds, worst), output.stats.log
    pairs = enumerate(zip(got, want, strict=False))
    where = next((i for i, (a, b) in pairs if a != b), None)
    tie = None  # one text is a part of the other: no tie
    if where is not None:
        tie = path.tie(where - path.prompt_length)
    first = min(len(got), len(want)) if where is None else where
    return DraftedRun(name, prompt, output.stats.rounds, worst, first - path.prompt_length, tie), output.stats.log


def _forced(path: PlainPath, block_size: int) -> list[tuple[str, Drafter]]:
    size = path.model.config.get_text_config(decoder=True).vocab_size
    names = [f"wrong at draft {k + 1}" for k in range(block_size)] + ["all right"]
    return [(name, ForcedDrafter(path.ids, block_size, k, size)) for k, name in enumerate(names)]


def _lookup() -> Drafter:
    return PromptLookupDrafter(num_tokens=10)


def _check(prompts: Sequence[Mapping[str, torch.Tensor]], block_size: int, max_new_tokens: int) -> None:
    if not prompts:
        raise ValueError("no prompts: at least one is needed")
    for inputs in prompts:
        if "input_ids" not in inputs or inputs["input_ids"].shape[0] != 1 or not inputs["input_ids"].shape[1]:
            raise ValueError("every prompt must be a dict with `input_ids` of one sequence, as a tokenizer returns it")
        mask = inputs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise ValueError("prompts are verified without padding, and one has an `attention_mask` with zeros")
    if not 1 <= block_size <= LARGEST_BLOCK:
        raise ValueError(f"`block_size` must be 1 to {LARGEST_BLOCK}, got {block_size}")
    if max_new_tokens < 2 * (block_size + 1):
        raise ValueError(
            f"`max_new_tokens` must be at least {2 * (block_size + 1)}, two blocks of {block_size} drafts, got "
            f"{max_new_tokens}"
        )


def _tie_line(run: DraftedRun) -> str:
    where = f"{run.drafter}, prompt {run.prompt + 1} parts at new token {(run.first_difference or 0) + 1}"
    if run.tie is None:
        return f"{where}: one text ends there."
    kind = "a near tie" if run.tie.is_near else "NO near tie"
    return f"{where}: margin {run.tie.margin:.4f}, two plain ways differ by {run.tie.spread:.4f}, {kind}."
