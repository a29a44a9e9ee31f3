"""`ready-hf verify`: is drafted decoding lossless with this target, drafter, dtype and device?

Exit code 0: lossless. 1: not. 2: cannot be asked, with one line on stderr.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ready_hf import shipped
from ready_hf.configuration_ready import LARGEST_BLOCK
from ready_hf.demo_prompts import Prompt, UsageError, read_prompts
from ready_hf.demo_settings import Settings, check_context, load_drafters, load_target
from ready_hf.output_files import check_outputs, write_outputs
from ready_hf.quiet import quiet, use_few_threads
from ready_hf.verify_target import verify_target


BUILT_IN = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return",
    "The history of the city begins with a small harbour at the mouth of the river, where",
    '{"name": "Ada", "year": 1815}\n{"name": "Alan", "year": 1912}\n{"name": "Grace", "year":',
)


@dataclass(frozen=True)
class VerifySettings(Settings):
    """What to verify; the fields are the options of `ready-hf verify`, those of `Settings` among them."""

    max_new_tokens: int = 32
    block_size: int | None = None
    json: Path | None = None

    def check(self) -> None:
        """Everything that can be found out without loading a model; see `Settings.check`."""
        super().check()
        if self.block_size is not None and not 1 <= self.block_size <= LARGEST_BLOCK:
            raise UsageError(f"--block-size must be 1 to {LARGEST_BLOCK}, got {self.block_size}")
        least = 2 * ((self.block_size or 1) + 1)
        if self.max_new_tokens < least:
            blocks = "" if self.block_size is None else f" for --block-size {self.block_size}: two whole blocks"
            raise UsageError(f"--max-new-tokens must be at least {least}{blocks}, got {self.max_new_tokens}")
        check_outputs({"--json": self.json})

    def read_prompts(self) -> list[Prompt]:
        """Those of the file; else the ones that ship with the target, or the built-in ones; by default 2."""
        is_shipped = Path(self.target_path).resolve() == Path(shipped.small_target_path()).resolve()
        if self.prompts_file is not None:
            found = read_prompts(self.prompts_file)
        elif is_shipped:
            found = read_prompts(Path(shipped.small_target_path()) / "prompts.jsonl")
        else:
            found = [Prompt(text) for text in BUILT_IN]
        return found[: self.prompts or 2]


def run_verify(settings: VerifySettings) -> int:
    """Loads, verifies and prints; returns the exit code, 0 or 1.

    Raises:
        UsageError: it cannot be asked.
    """
    settings.check()
    prompts = settings.read_prompts()
    with quiet():
        target, tokenizer = load_target(settings)
        drafters = load_drafters(target, settings)
        use_few_threads(target)
        check_context(target, tokenizer, prompts, settings.max_new_tokens)
        try:
            inputs = [prompt.encode(tokenizer, target.device) for prompt in prompts]
            verdict = verify_target(
                target, inputs, drafters, block_size=settings.block_size, max_new_tokens=settings.max_new_tokens
            )
        except (ValueError, RuntimeError) as error:  # of a target whose states cannot be recorded, or of memory
            raise UsageError(f"{settings.target_path} cannot be verified: {error}") from error
    print(f"{settings.target_path}, {settings.device}, torch {torch.__version__}, {len(prompts)} prompts\n")
    print(verdict.report(), end="")
    text = json.dumps(verdict.to_dict(), indent=2, allow_nan=False) + "\n"
    write_outputs({"--json": (settings.json, lambda path: path.write_text(text, encoding="utf-8"))})
    if not verdict.failures and verdict.unasked:
        raise UsageError(
            f"nothing failed, but no block was rejected {', '.join(verdict.unasked)}, so that is not known: use more "
            "prompts or --max-new-tokens"
        )
    return int(not verdict.is_lossless)
