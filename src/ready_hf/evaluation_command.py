"""`ready-hf eval`: options, the run, and where the report goes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ready_hf import shipped
from ready_hf.candidates import Drafter, PromptLookupDrafter
from ready_hf.demo_prompts import Prompt, UsageError, read_prompts
from ready_hf.demo_settings import Settings, check_context, load_drafters, load_target
from ready_hf.evaluation import CONTEXT_EDGES, check_edges, check_temperatures, evaluate
from ready_hf.evaluation_result import Evaluation, survival
from ready_hf.intervals import MACRO
from ready_hf.output_files import check_outputs, write_outputs
from ready_hf.plots import save_evaluation
from ready_hf.quiet import quiet, use_few_threads
from ready_hf.round_times import measure_round_times


MOST_RESAMPLES = 100_000  # a few hundred MB
THINKING = {"on": (True,), "off": (False,), "both": (True, False)}


@dataclass(frozen=True)
class EvaluationSettings(Settings):
    """What to run; the fields are the options of `ready-hf eval`, those of `Settings` among them."""

    prompts_files: tuple[Path, ...] = ()
    at_temperatures: tuple[float, ...] = ()
    context_edges: tuple[int, ...] = CONTEXT_EDGES
    lookup: bool = False
    break_even: bool = False
    thinking: str | None = None
    seed: int = 0
    resamples: int = 2000
    json: Path | None = None
    markdown: Path | None = None

    @property
    def temperatures(self) -> list[float]:
        """What is decoded, colder text first; by default greedy text and samples of the target."""
        return sorted(self.at_temperatures) or [0, 1]

    def check(self) -> None:
        """Everything that can be found out without loading a model; see `Settings.check`."""
        super().check()
        if not 1 <= self.resamples <= MOST_RESAMPLES:
            raise UsageError(f"--resamples must be 1 to {MOST_RESAMPLES}, got {self.resamples}")
        if not 0 <= self.seed < 2**62:
            raise UsageError(f"--seed must be 0 to 2**62 - 1, got {self.seed}")
        if self.max_new_tokens < 2:
            raise UsageError(
                f"--max-new-tokens must be at least 2: nothing is drafted of one, got {self.max_new_tokens}"
            )
        try:
            check_temperatures(self.temperatures)
        except ValueError as error:
            raise UsageError(f"--temperature: {error}") from None
        try:
            check_edges(self.context_edges)
        except ValueError as error:
            raise UsageError(f"--context-edges: {error}") from None
        if self.thinking not in (None, *THINKING):
            raise UsageError(f"--thinking must be one of {', '.join(THINKING)}, got {self.thinking!r}")
        if self.break_even and 0 not in self.temperatures:
            raise UsageError("--break-even is about greedy decoding: leave --temperature out, or set it to 0")
        if not self.drafter_paths and not self.lookup:
            raise UsageError("there is no drafter to evaluate: name one with --drafter, or set --lookup")
        check_outputs({"--json": self.json, "--markdown": self.markdown, "--plot": self.plot})


def run_evaluation(settings: EvaluationSettings) -> int:
    """Loads, decodes and writes; returns the exit code: 1 if greedy text in float32 differs from plain decoding's.

    Raises:
        UsageError: something asked for cannot be done.
    """
    settings.check()
    prompts = task_prompts(settings)
    with quiet():
        target, tokenizer = load_target(settings)
        models = load_drafters(target, settings)
        use_few_threads(target)
        if settings.thinking is not None:
            prompts = thinking_prompts(prompts, settings.thinking, tokenizer)
        check_context(target, tokenizer, prompts, settings.max_new_tokens)
        drafters: dict[str, Drafter] = dict(models)
        if settings.lookup:
            drafters["prompt lookup"] = PromptLookupDrafter(num_tokens=10)
        found = evaluate(
            target,
            tokenizer,
            drafters,
            prompts,
            max_new_tokens=settings.max_new_tokens,
            temperatures=settings.temperatures,
            context_edges=settings.context_edges,
            seed=settings.seed,
            resamples=settings.resamples,
        )
        if settings.thinking is not None:
            found = replace(found, setting={**found.setting, "thinking": settings.thinking})
        if settings.break_even:
            found = _with_break_evens(found, target, tokenizer, models, prompts, settings)
    _write(found, settings)
    is_exact = settings.dtype == "float32" and not getattr(target, "is_quantized", False)
    return int(is_exact and not found.is_identical)


def task_prompts(settings: EvaluationSettings) -> list[Prompt]:
    """Prompts of all files, each with its task: what the file says, or the file's name.

    Raises:
        UsageError: a file that cannot be used, or two files of one name without tasks.
    """
    default = Path(shipped.small_target_path()) / "prompts.jsonl"
    paths = settings.prompts_files or (default,)
    stems, found = [path.stem for path in paths], []
    for path in paths:
        for prompt in read_prompts(path)[: settings.prompts]:
            if prompt.task == MACRO or (not prompt.task and path.stem == MACRO):
                raise UsageError(f"{path.name}: a task must not be called {MACRO!r}")
            if not prompt.task and stems.count(path.stem) > 1:
                raise UsageError(
                    f"--prompts-file: two files are called {path.name}, and lines without a `task` take it from the "
                    "file's name: rename one, or give every line a task"
                )
            found.append(Prompt(prompt.text, prompt.source, prompt.is_turn, prompt.task or path.stem))
    return found


def thinking_prompts(prompts: list[Prompt], thinking: str, tokenizer: Any) -> list[Prompt]:
    """Turns with `enable_thinking` on or off; with `"both"` every turn twice, and each mode a task of its own.

    Raises:
        UsageError: no prompt is a turn, the chat template does not read `enable_thinking`, or a mode's task has the
        name of another one.
    """
    if not any(prompt.is_turn for prompt in prompts):
        raise UsageError(
            '--thinking is for turns of a conversation, and there are none: write {"turns": ["..."]} lines'
        )
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise UsageError(f"--thinking: there is no chat template to use ({str(error).split('. ')[0]})") from None
    if "enable_thinking" not in template:
        raise UsageError(
            f"--thinking: {thinking!r} would change nothing, the chat template does not read `enable_thinking`; leave "
            "--thinking out"
        )
    suffixes: dict[bool | None, str] = {True: ", thinking", False: ", no thinking"} if thinking == "both" else {}
    found = []
    for prompt in prompts:
        for mode in THINKING[thinking] if prompt.is_turn else (None,):
            task = prompt.task + suffixes.get(mode, "")
            if task != prompt.task and any(task == other.task for other in prompts):
                raise UsageError(f"--thinking both: {task!r} is the name of another task: rename one of the two")
            found.append(replace(prompt, thinking=mode, task=task))
    return found


def _with_break_evens(
    found: Evaluation, target: Any, tokenizer: Any, models: Any, prompts: list[Prompt], settings: EvaluationSettings
) -> Evaluation:
    """Round times at 1, 2, 4, ... drafts and the whole block, on the first prompt that does not loop."""
    kept = found.prompts(0)
    if not kept:
        raise UsageError("--break-even needs a prompt whose text does not loop, and there is none")
    inputs = prompts[kept[0]].encode(tokenizer, target.device)
    results = {}
    for name, model in models.items():
        block = model.config.block_size
        lengths = [n for n in (1, 2, 4, 8, 16) if n < block] + [block]
        shares = survival(found.positions(0, name))
        if not shares:
            continue  # every text ended before its first draft
        try:
            times = measure_round_times(target, model, inputs, lengths, settings.max_new_tokens)
            results[name] = times.break_even(shares)
        except ValueError as error:
            raise UsageError(f"--break-even: {error}") from None
    return replace(found, break_evens=results)


def _write(found: Evaluation, settings: EvaluationSettings) -> None:
    report = found.to_markdown()
    print(report, end="")
    write_outputs(
        {
            "--json": (settings.json, lambda path: path.write_text(found.to_json(), encoding="utf-8")),
            "--markdown": (settings.markdown, lambda path: path.write_text(report, encoding="utf-8")),
            "--plot": (settings.plot, lambda path: save_evaluation(found, path, settings.temperatures[0])),
        }
    )
