"""The one-minute story: code that a trained hybrid has never seen, continued with and without drafting.

    ready-hf demo                                     # the models that ship with the package
    ready-hf demo --target PATH --drafter PATH        # your own; `--help` lists the rest
    python -P -m ready_hf.demo                        # the same without the command on the path

Every prompt is continued in turn by plain `generate`, prompt lookup, DSpark and ReaDy, so that all of them see the
same machine, once sampling at temperature 1 and once greedily. Greedy text must be that of plain decoding, token for
token; sampled text has the target's distribution, and each row samples its own. Speed is a ratio of this very run.
Which prompts count is decided by plain greedy text alone (see `demo_prompts`), and those runs are the plain row.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ready_hf import plots, shipped
from ready_hf.candidates import Drafter, PromptLookupDrafter
from ready_hf.demo_prompts import SHORTEST_TEXT, Prompt, UsageError, read_prompts, reason_to_drop
from ready_hf.demo_settings import Settings, check_context, load_drafters, load_target
from ready_hf.evaluation import now, without_end
from ready_hf.quiet import quiet, use_few_threads
from ready_hf.reader_check import RULE, aligned, check_reader
from ready_hf.statistics import DecodingStats, record_stats
from ready_hf.ways import DECODING


BUDGET = 60.0  # seconds for the prompts, if their number is not given
CHECK_PROMPTS = 12  # of the reader check, if their number is not given


@dataclass
class Run:
    """Totals of one row of a table: one way to draft, one way of decoding.

    Args:
        name (`str`): What the table calls it.
        drafter (`Drafter`, *optional*): `None` for plain `generate`.
        texts, tokens, forwards (`int`): Texts, new tokens, target forwards (prefills included).
        seconds (`float`): Wall time of `generate`.
        identical (`int`): Texts equal to plain greedy text.
        stats (`DecodingStats`): Counts and times of the drafting.
    """

    name: str
    drafter: Drafter | None = None
    texts: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    identical: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)

    def row(self, plain: "Run", way: str, is_exact: bool) -> list[str]:
        """Cells of the table; the speed is against the plain run."""
        same = "n/a" if way != "greedy" else f"{self.identical} of {self.texts}"
        if way == "greedy" and is_exact:
            same = "yes" if self.identical == self.texts else f"NO ({same})"
        speed, reference = self.tokens / self.seconds, plain.tokens / plain.seconds
        return [self.name, same, f"{self.tokens / self.forwards:.2f}", f"{speed:.0f}", f"{speed / reference:.2f}x"]


@dataclass
class Measurement:
    """What `measure` found: a list of rows per way of decoding, and which prompts they are of."""

    runs: dict[str, list[Run]]
    kept: list[Prompt] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def is_identical(self) -> bool:
        """Whether every drafted greedy text is plain decoding's."""
        return all(run.identical == run.texts for run in self.runs.get("greedy", ()))


def generate(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], run: Run, way: str, seed: int, max_new_tokens: int
) -> torch.Tensor:
    """One text `[new tokens]`, added to the totals of `run`; forwards are counted at the target's decoder."""
    forwards = 0

    def count(*args: Any) -> None:
        nonlocal forwards
        forwards += 1

    torch.manual_seed(seed)
    handle = target.get_decoder().register_forward_hook(count)
    try:
        with record_stats() as stats:
            start = now(target)
            sequences: Any = target.generate(
                **inputs, assistant_model=run.drafter, max_new_tokens=max_new_tokens, **DECODING[way]
            )
            seconds = now(target) - start
    finally:
        handle.remove()
    new = sequences[0, inputs["input_ids"].shape[1] :]
    run.texts, run.tokens = run.texts + 1, run.tokens + len(new)
    run.forwards, run.seconds = run.forwards + forwards, run.seconds + seconds
    run.stats.add(stats)
    return new


def kept_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    plain: Run,
    max_new_tokens: int,
    dropped: Counter[str],
    deadline: float = math.inf,
) -> Iterator[tuple[int, Prompt, dict[str, torch.Tensor], torch.Tensor]]:
    """Prompts whose plain greedy text is kept: index, prompt, arguments for `generate`, the text.

    Runs of kept prompts are added to `plain`, reasons of the others to `dropped`. After `deadline` (of
    `time.perf_counter`) no further prompt is tried, if one has been kept.
    """
    for index, prompt in enumerate(prompts):
        if plain.texts and time.perf_counter() > deadline:
            return
        inputs = prompt.encode(tokenizer, target.device)
        one = Run(plain.name)
        text = generate(target, inputs, one, "greedy", index, max_new_tokens)
        reason = reason_to_drop(without_end(text.tolist(), target), min(SHORTEST_TEXT, max_new_tokens))
        if reason is not None:
            dropped[reason] += 1
            continue
        one.identical = 1
        for name in ("texts", "tokens", "forwards", "seconds", "identical"):
            setattr(plain, name, getattr(plain, name) + getattr(one, name))
        yield index, prompt, inputs, text


def measure(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: dict[str, Drafter],
    prompts: Sequence[Prompt],
    settings: Settings,
) -> Measurement:
    """Decodes prompts in every way, until there are `settings.prompts` of them or the time is up.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): The target.
        drafters (`dict`): By the name of their row.
        prompts (`Sequence[Prompt]`): In the order in which they are tried.
        settings (`Settings`): What to run.
    """
    names: dict[str, Drafter | None] = {"plain": None, **drafters}
    runs = {way: [Run(name, drafter) for name, drafter in names.items()] for way in settings.ways}
    for drafter in names.values():  # warm-up
        for way in runs:
            generate(target, prompts[0].encode(tokenizer, target.device), Run("", drafter), way, 0, 12)
    found, limit = Measurement(runs), settings.max_new_tokens
    plain = runs["greedy"][0] if "greedy" in runs else Run("plain")
    wanted, start = min(settings.prompts or len(prompts), len(prompts)), time.perf_counter()
    deadline = math.inf if settings.prompts else start + BUDGET
    kept = kept_prompts(target, tokenizer, prompts, plain, limit, found.dropped, deadline)
    with tqdm(total=wanted, desc="prompts", leave=False, disable=None) as bar:
        for index, prompt, inputs, text in kept:
            began = time.perf_counter()
            for way in runs:
                for number, run in enumerate(runs[way]):
                    if run is plain:
                        continue
                    new = generate(target, inputs, run, way, 1000 * index + number, limit)
                    run.identical += torch.equal(new, text)
            found.kept.append(prompt)
            if settings.prompts is None and len(found.kept) == 1:  # dropped prompts may take the number further down
                wanted = bar.total = max(1, min(len(prompts), int(BUDGET / (time.perf_counter() - began))))
            bar.update()
            if len(found.kept) >= wanted:
                break
    if not found.kept:
        raise UsageError(f"all {len(prompts)} prompts were dropped ({_counts(found.dropped)}): nothing to measure")
    return found


def run_demo(settings: Settings) -> int:
    """Loads, measures and prints; returns the exit code: 1 if greedy text in float32 differs from plain decoding's.

    Raises:
        UsageError: something asked for cannot be done.
    """
    settings.check()
    prompts = read_prompts(settings.prompts_file or Path(shipped.small_target_path()) / "prompts.jsonl")
    with quiet():
        target, tokenizer = load_target(settings)
        models = load_drafters(target, settings)
        use_few_threads(target)
        check_context(target, tokenizer, prompts, settings.max_new_tokens)
        sizes = [f"{name} {model.num_parameters() / 1e6:.2f} M" for name, model in models.items()]
        kind = f"{type(target).__name__} of {target.num_parameters() / 1e6:.2f} M parameters"
        where = f"{torch.get_num_threads()} CPU thread(s)" if settings.device == "cpu" else settings.device
        print(f"Target: {kind}; drafters: {', '.join(['prompt lookup', *sizes])}.")
        print(f"{settings.dtype}, {where}, torch {torch.__version__}, transformers {transformers.__version__}.")
        if settings.reader_check:
            return _run_check(target, tokenizer, models, prompts, settings)
        drafters: dict[str, Drafter] = {"prompt lookup": PromptLookupDrafter(num_tokens=10), **models}
        found = measure(target, tokenizer, drafters, prompts, settings)
    print("\n".join(report(found, settings)))
    if settings.plot is not None:
        way = settings.ways[0]
        stats = {run.name: run.stats for run in found.runs[way] if run.name in models}
        try:
            plots.save_acceptance(stats, settings.plot, f"Accepted drafts, {way}")
        except OSError as error:
            raise UsageError(f"--plot {settings.plot} cannot be written: {error}") from error
        print(f"\nPlot: {settings.plot}")
    if settings.dtype == "float32" and not found.is_identical:
        print(
            "drafted greedy text differs from plain decoding: this must not happen, please report it", file=sys.stderr
        )
        return 1
    return 0


def report(found: Measurement, settings: Settings) -> list[str]:
    """What was found, as lines of text."""
    lines = _prompt_lines(found.kept, found.dropped, settings)
    for way, runs in found.runs.items():
        rows = [["", "identical to plain", "tokens per target forward", "tokens/s", "speed"]]
        rows += [run.row(runs[0], way, settings.dtype == "float32") for run in runs]
        own = ", each row a sample of its own" if way != "greedy" else ""
        texts = f"{runs[0].texts} text{'s' * (runs[0].texts > 1)} of up to {settings.max_new_tokens} tokens"
        title = f"{way[0].upper()}{way[1:]}: {texts}{own}"
        lines += ["", title, "", aligned(rows)]
    way = settings.ways[0]
    models = [run for run in found.runs[way] if run.stats.rounds and run.name != "prompt lookup"]
    if models:
        lines += ["", f"Share of verified drafts accepted, by position in the block, {way}", "", _bars(models)]
    if models and settings.details:
        shown = next((run for run in models if run.name.startswith("ReaDy")), models[-1])
        lines += ["", f"A round of {shown.name}, {way}", "", _phases(shown)]
    return lines


def _run_check(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    models: dict[str, Any],
    prompts: Sequence[Prompt],
    settings: Settings,
) -> int:
    readers = [name for name, model in models.items() if model.config.has_reader]
    if not readers:
        raise UsageError("--reader-check needs a drafter that reads states, and none of these drafters does")
    dropped: Counter[str] = Counter()
    kept = kept_prompts(target, tokenizer, prompts, Run("plain"), settings.max_new_tokens, dropped)
    chosen = list(islice(kept, settings.prompts or CHECK_PROMPTS))
    if len(chosen) < 2:
        raise UsageError(f"--reader-check needs 2 prompts, and {len(chosen)} is left ({_counts(dropped)} dropped)")
    print("\n".join(_prompt_lines([prompt for _, prompt, _, _ in chosen], dropped, settings)))
    for name in readers:
        inputs = [arguments for _, _, arguments, _ in chosen]
        found = check_reader(target, models[name], inputs, max_new_tokens=settings.max_new_tokens)
        print(f"\n{name}: tokens per verify forward, by the states that its reader gets\n\n{found.table()}")
        print(f"\n{found.verdict[0].upper()}{found.verdict[1:]}\n{RULE}")
    return 0


def _prompt_lines(kept: Sequence[Prompt], dropped: Counter[str], settings: Settings) -> list[str]:
    what = "code that the shipped models never saw" if settings.prompts_file is None else settings.prompts_file.name
    sources = sorted({prompt.source for prompt in kept if prompt.source})
    default = f"{CHECK_PROMPTS} are the default" if settings.reader_check else f"as many as fit about {BUDGET:.0f} s"
    number = f"{settings.prompts} asked for" if settings.prompts else default
    origin = f", from {', '.join(sources)}" if sources else ""
    return [
        f"Prompts: {what}{origin}.",
        f"{len(kept)} measured ({number}); {dropped.total()} dropped by their plain greedy text ({_counts(dropped)}).",
    ]


def _counts(dropped: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"


def _bars(runs: Sequence[Run], width: int = 20) -> str:
    rows = [["position", *(run.name for run in runs)]]
    for position in range(max(len(run.stats.acceptance_by_position) for run in runs)):
        shares = [run.stats.acceptance_by_position[position:] for run in runs]
        cells = [f"{'#' * round(share[0] * width):<{width}} {share[0]:>4.0%}" if share else "" for share in shares]
        rows.append([str(position + 1), *cells])
    return aligned(rows)


def _phases(run: Run) -> str:
    """Milliseconds per round by phase; the prefills are left out, the rest of `generate` is `other Python`."""
    stats = run.stats
    seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "commit": stats.commit_seconds}
    whole = run.seconds - stats.prefill_seconds
    seconds |= {"other Python": whole - sum(seconds.values()), "all but prefill": whole}
    rows = [["", "ms per round", "share"]]
    rows += [[name, f"{part / stats.rounds * 1e3:.2f}", f"{part / whole:.0%}"] for name, part in seconds.items()]
    return aligned(rows)


if __name__ == "__main__":
    from ready_hf.cli import main

    sys.exit(main(["demo", *sys.argv[1:]]))
