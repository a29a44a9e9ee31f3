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


app = typer.Typer(name="ready-hf", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


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
    target: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Folder or Hub name of a language model. [default: the one that ships]"),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Folder or Hub name of a drafter made for it; may be given several times."),
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help='Lines of {"prompt": "..."} or {"turns": ["..."]}. [default: held-out code]')
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option(help="Prompts to measure. [default: as many as fit about a minute; 12 with --reader-check]"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest text.")] = 64,
    temperature: Annotated[int | None, typer.Option(help="Only one table: 1 (sampling) or 0 (greedy).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:NUMBER.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (default: that of the process) and returns the exit code."""
    try:
        return int(
            app(None if arguments is None else list(arguments), prog_name="ready-hf", standalone_mode=False) or 0
        )
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
