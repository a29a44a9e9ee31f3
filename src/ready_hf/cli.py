"""The command `ready-hf`: a thin shell over the modules that do the work.

What a person asks for and cannot get is one line on stderr, with exit code 2.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import ready_hf
from ready_hf.demo import run_demo
from ready_hf.demo_prompts import UsageError
from ready_hf.demo_settings import Settings
from ready_hf.evaluation import CONTEXT_EDGES
from ready_hf.evaluation_command import EvaluationSettings, run_evaluation
from ready_hf.verify_command import VerifySettings, run_verify


INTERRUPTED = 130  # as shells count

app = typer.Typer(name="ready-hf", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


TARGET = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Folder or Hub name of a language model. [default: the one that ships]"),
]
DRAFTERS = Annotated[
    list[str] | None,
    typer.Option(metavar="MODEL", help="Folder or Hub name of a drafter made for it; may be given several times."),
]
DEVICE = Annotated[str, typer.Option(help="cpu, cuda or cuda:NUMBER.")]
DTYPE = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Lossless speculative decoding for hybrid linear-attention language models."""
    if version:
        typer.echo(ready_hf.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    target: TARGET = None,
    drafter: DRAFTERS = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help='Lines of {"prompt": "..."} or {"turns": ["..."]}. [default: held-out code]')
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(help="Prompts to measure. [default: as many as fit about a minute; 12 with --reader-check]"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest text.")] = 64,
    temperature: Annotated[int | None, typer.Option(help="Only one table: 1 (sampling) or 0 (greedy).")] = None,
    device: DEVICE = "cpu",
    dtype: DTYPE = "float32",
    plot: Annotated[
        Path | None, typer.Option(help="Draw acceptance by position into this file (.png, .svg or .pdf).")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Where the time of a round goes.")] = False,
    reader_check: Annotated[
        bool, typer.Option("--reader-check", help="Instead: does the drafter use the states it reads?")
    ] = False,
) -> int:
    """Continue code with and without drafting, and compare tokens, forwards and speed."""
    settings = Settings(
        target=target,
        drafters=tuple(drafter or ()),
        prompts_file=prompts_file,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        device=device,
        dtype=dtype,
        plot=plot,
        details=details,
        reader_check=reader_check,
    )
    return run_demo(settings)


@app.command("eval")
def evaluate(
    target: TARGET = None,
    drafter: DRAFTERS = None,
    prompts_file: Annotated[
        list[Path] | None,
        typer.Option(
            help='Lines of {"prompt": "..."} or {"turns": ["..."]}, with "task" or "category" if not the file\'s name '
            "is the task; may be given several times. [default: held-out code]"
        ),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts of each file. [default: all]")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest text.")] = 128,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="0 (greedy), 1 (the target's own samples) or others; may be given several times. [default: 0, 1]"
        ),
    ] = None,
    context_edges: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Borders of the context lengths that acceptance is split by.")
    ] = ",".join(map(str, CONTEXT_EDGES)),
    lookup: Annotated[bool, typer.Option("--lookup", help="Prompt lookup as one more drafter.")] = False,
    break_even: Annotated[
        bool, typer.Option("--break-even", help="Measure rounds at several block lengths: is it worth it, and where?")
    ] = False,
    thinking: Annotated[
        str | None,
        typer.Option(
            metavar="on|off|both",
            help="enable_thinking of the chat template, for turns; both: a task each. [default: the template's]",
        ),
    ] = None,
    device: DEVICE = "cpu",
    dtype: DTYPE = "float32",
    seed: Annotated[int, typer.Option(help="Of the samples and of the bootstrap.")] = 0,
    resamples: Annotated[int, typer.Option(help="Of the bootstrap over prompts.")] = 2000,
    json: Annotated[Path | None, typer.Option(help="Write every figure and text length into this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the report into this file, too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw acceptance into this file (.png, .svg or .pdf).")] = None,
) -> int:
    """Decode prompt files with several drafters and plainly: accepted length, speed, identity, with intervals."""
    settings = EvaluationSettings(
        target=target,
        drafters=tuple(drafter or ()),
        prompts_files=tuple(prompts_file or ()),
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        at_temperatures=tuple(temperature or ()),
        device=device,
        dtype=dtype,
        plot=plot,
        context_edges=_edges(context_edges),
        lookup=lookup,
        break_even=break_even,
        thinking=thinking,
        seed=seed,
        resamples=resamples,
        json=json,
        markdown=markdown,
    )
    return run_evaluation(settings)


@app.command()
def verify(
    target: TARGET = None,
    drafter: DRAFTERS = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help='Lines of {"prompt": "..."} or {"turns": ["..."]}. [default: held-out code for the target that '
            "ships, else built-in texts]"
        ),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts to decode. [default: 2]")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest text; at least two blocks.")] = 32,
    block_size: Annotated[
        int | None, typer.Option(help="Drafts per block of the forced rejections. [default: the drafter's, or 8]")
    ] = None,
    device: DEVICE = "cpu",
    dtype: DTYPE = "float32",
    json: Annotated[Path | None, typer.Option(help="Write the verdict into this file, too.")] = None,
) -> int:
    """Is drafted decoding lossless here? Exit code 0: yes, 1: no, 2: cannot be asked."""
    settings = VerifySettings(
        target=target,
        drafters=tuple(drafter or ()),
        prompts_file=prompts_file,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=dtype,
        block_size=block_size,
        json=json,
    )
    return run_verify(settings)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Folder or Hub name of a language model. [required]")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="File (.txt: one text, .jsonl: one per line), folder or Hub dataset; may be given several times. "
            "[required]",
        ),
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Where checkpoints, texts and the drafter go.")] = Path("drafter"),
    drafter: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A drafter to go on from. [default: a new one]")
    ] = None,
    reader: Annotated[
        bool,
        typer.Option("--reader/--no-reader", help="Read recurrent states, or not; a given drafter only gains."),
    ] = True,
    block_size: Annotated[int | None, typer.Option(help="Drafts per round of a new drafter. [default: 8]")] = None,
    drafter_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Fields of ReadyDrafterConfig for a new drafter or reader: a file, or {...} itself."
        ),
    ] = None,
    as_written: Annotated[
        bool, typer.Option("--as-written", help="Learn the data itself, not what the target writes after its prompts.")
    ] = False,
    turns: Annotated[
        str,
        typer.Option(metavar="all|last|split", help="Answers of a chat to learn; split: each in a row of its own."),
    ] = "all",
    thinking: Annotated[
        str | None,
        typer.Option(metavar="on|off|mixed", help="enable_thinking of the chat template. [default: the template's]"),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 1024,
    max_examples: Annotated[int | None, typer.Option(help="Examples of each source. [default: all]")] = None,
    held_out: Annotated[int, typer.Option(help="Rows of --data kept for evaluation.")] = 16,
    held_out_data: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="As --data, to evaluate on; then --held-out takes nothing from --data."),
    ] = None,
    eval_steps: Annotated[
        int | None, typer.Option(help="Evaluate every so many steps, by position in the block. [default: at the end]")
    ] = None,
    device: DEVICE = "cpu",
    dtype: DTYPE = "float32",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")] = False,
) -> int:
    """Train a drafter. All options of ReadyTrainingArguments are taken too, such as --learning_rate 1e-3
    --max_steps 500 --per_device_train_batch_size 8 --bf16 True."""
    from ready_hf.train_command import TrainSettings, run_training  # needs what the extra `train` installs

    settings = TrainSettings(
        target=target,
        drafters=() if drafter is None else (drafter,),
        data=tuple(data or ()),
        output_dir=output_dir,
        reader=reader,
        block_size=block_size,
        drafter_config=drafter_config,
        as_written=as_written,
        turns=turns,
        thinking=thinking,
        max_length=max_length,
        max_examples=max_examples,
        held_out=held_out,
        held_out_data=tuple(held_out_data or ()),
        eval_steps=eval_steps,
        device=device,
        dtype=dtype,
        resume=resume,
    )
    return run_training(settings, context.args)


def _edges(text: str) -> tuple[int, ...]:
    """`"256,1024"` as numbers; none for an empty text."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"--context-edges must be numbers of tokens with commas, 256,1024, got {text!r}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (default: that of the process) and returns the exit code."""
    try:
        given = None if arguments is None else list(arguments)
        code = int(app(given, prog_name="ready-hf", standalone_mode=False) or 0)
        if code == INTERRUPTED:  # what typer makes of a Ctrl-C that no command has answered
            typer.echo("ready-hf: interrupted", err=True)
        return code
    except UsageError as error:
        message = str(error)
    except Exception as error:
        # typer's own errors of arguments; their class has moved between its releases
        if not callable(getattr(error, "format_message", None)):
            raise
        message = error.format_message()  # type: ignore[attr-defined]
    typer.echo(f"ready-hf: {' '.join(message.split())}", err=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
