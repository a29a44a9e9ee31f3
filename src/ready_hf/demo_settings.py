"""Options of the demo: refused before anything is loaded if they cannot work, and the models that they name."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ready_hf import plots, shipped
from ready_hf.candidates import is_drafter
from ready_hf.demo_prompts import Prompt, UsageError
from ready_hf.ops import uses_kernels
from ready_hf.target import check_target
from ready_hf.target_shape import check_token_ids
from ready_hf.ways import NAMES
from ready_hf.weight_files import why_unloadable


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS = {temperature: NAMES[temperature] for temperature in (1, 0)}  # by `--temperature`, in the order of the tables
PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Settings:
    """What to run; the fields are the options of `ready-hf demo`. `check` refuses what cannot be run."""

    target: str | None = None
    drafters: tuple[str, ...] = ()
    prompts_file: Path | None = None
    prompts: int | None = None
    max_new_tokens: int = 64
    temperature: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    plot: Path | None = None
    details: bool = False
    reader_check: bool = False

    @property
    def ways(self) -> list[str]:
        """The ways of decoding that get a table."""
        return [name for temperature, name in WAYS.items() if self.temperature in (None, temperature)]

    @property
    def target_path(self) -> str:
        """The target, by default the one that ships."""
        return self.target or shipped.small_target_path()

    @property
    def drafter_paths(self) -> tuple[str, ...]:
        """The drafters, by default those that ship; none for another target."""
        if self.drafters or self.target is not None:
            return self.drafters
        return shipped.small_drafter_path("dspark"), shipped.small_drafter_path("ready")

    def check(self) -> None:
        """Everything that can be found out without loading a model.

        Raises:
            UsageError: naming the option and what is wrong with it.
        """
        for option, value in (("--prompts", self.prompts), ("--max-new-tokens", self.max_new_tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, got {value}")
        if self.reader_check and self.prompts == 1:
            raise UsageError("--reader-check needs --prompts of at least 2: states are taken from another prompt")
        if self.temperature not in (None, *WAYS):
            raise UsageError(f"--temperature must be 0 or 1, got {self.temperature}")
        if self.dtype not in DTYPES:
            raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _check_device(self.device)
        try:
            uses_kernels(torch.device(self.device))
        except (RuntimeError, ValueError) as error:
            raise UsageError(str(error)) from None
        for option, path in (("--target", self.target), *(("--drafter", path) for path in self.drafters)):
            _check_model(option, path)
        for path in (self.target_path, *self.drafter_paths):
            if path.startswith(str(shipped.ASSETS)) and not Path(path).is_dir():
                raise UsageError("the models that ship with the package are missing from this installation")
        if self.plot is not None:
            if self.plot.suffix not in PLOT_FORMATS:
                raise UsageError(f"--plot {self.plot} must end in .png, .svg or .pdf")
            if self.plot.is_dir():
                raise UsageError(f"--plot {self.plot} is a folder")
            if not self.plot.parent.is_dir():
                raise UsageError(f"--plot {self.plot}: there is no folder {self.plot.parent}")
            try:
                plots.require_matplotlib()
            except ImportError as error:
                raise UsageError(f"--plot: {error}") from None


def load_target(settings: Settings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target and its tokenizer.

    Raises:
        UsageError: it cannot be loaded, or not be decoded with.
    """
    path = settings.target_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if problem := why_unloadable(path, {}):
            raise ValueError(problem)
        target, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=DTYPES[settings.dtype], output_loading_info=True, use_safetensors=True
        )
        if info["missing_keys"]:  # transformers would make them up
            raise ValueError(f"its weights lack {', '.join(sorted(info['missing_keys'])[:3])}")
        check_target(target)
        target = target.to(settings.device).eval()
    except Exception as error:  # libraries raise errors of all types about a folder that is not as it should be
        raise UsageError(f"the target {path} cannot be used{_place(path)}: {_reason(error)}") from error
    longest = _context(target)
    if longest is not None and settings.max_new_tokens > longest:
        raise UsageError(f"--max-new-tokens {settings.max_new_tokens} is more than the target's context of {longest}")
    return target, tokenizer


def check_context(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_new_tokens: int
) -> None:
    """Refuses a prompt that cannot be encoded, holds no tokens of the target's, or leaves no room in its context.

    Raises:
        UsageError: naming the prompt by its number, from 1, or what it begins with.
    """
    longest = _context(target)
    for number, prompt in enumerate(prompts, 1):
        ids = prompt.encode(tokenizer)["input_ids"]
        try:
            check_token_ids(target, ids, f"prompt {number}")
        except ValueError as error:
            raise UsageError(str(error)) from None
        length = ids.shape[1]
        if longest is not None and length + max_new_tokens > longest:
            raise UsageError(
                f"prompt {number} has {length} tokens, which with --max-new-tokens {max_new_tokens} is more than the "
                f"target's context of {longest}: shorten or leave it out"
            )


def load_drafters(target: PreTrainedModel, settings: Settings) -> dict[str, Any]:
    """The drafters for this target, by the names of their rows: what they are, and their folder if two are the same.

    Raises:
        UsageError: one cannot be loaded, is no drafter, or was made for another target.
    """
    found: dict[str, Any] = {}
    for path in settings.drafter_paths:
        try:
            model = AutoModel.from_pretrained(path, dtype=DTYPES[settings.dtype]).to(settings.device).eval()
            if not is_drafter(model):
                raise ValueError(f"it is a {type(model).__name__} and no ReaDy drafter")
            model.config.check_target(target, exact_vocabulary=False)
        except Exception as error:
            raise UsageError(f"the drafter {path} cannot be used{_place(path)}: {_reason(error)}") from error
        name = "ReaDy" if model.config.has_reader else "DSpark"
        if name in found:
            name = f"{name} {len(found) + 1} ({Path(path).name})"
        found[name] = model
    return found


def _context(target: PreTrainedModel) -> Any:
    return getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)


def _check_device(name: str) -> None:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device must be cpu, cuda or cuda:NUMBER, got {name!r}") from None
    if device.type != "cuda" and name != "cpu":
        raise UsageError(f"--device must be cpu, cuda or cuda:NUMBER, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: torch finds {torch.cuda.device_count()} CUDA devices on this machine")


def _check_model(option: str, path: str | None) -> None:
    """A folder with a config.json, or the name of a Hub repository, which only loading can check."""
    if path is None:
        return
    folder = Path(path)
    if not os.path.exists(path):  # which takes names that are too long, too
        if path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith("/"):
            return
        raise UsageError(f"{option} {path} is neither a folder nor the name of a Hub repository, OWNER/NAME")
    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError):  # AttributeError: JSON, but no object
        raise UsageError(f"{option} {path} holds no readable config.json: save a model there first") from None
    if (model_type == "ready_drafter") != (option == "--drafter"):
        kind = "a ReaDy drafter" if option == "--drafter" else "a language model; that is a drafter"
        raise UsageError(f"{option} {path} has model type {model_type!r}, but must be {kind}")


def _place(path: str) -> str:
    """Where a model was looked for, if not in a folder: `drafters/dspark` reads like a name on the Hub."""
    return "" if Path(path).is_dir() else " (no folder of that name is here, so it was looked for on the Hub)"


def _reason(error: Exception) -> str:
    """What an error of a library says, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if "`ignore_mismatched_sizes`" in lines[0]:  # its details are in a report that goes to the log
        return "its weights do not have the shapes that its config.json says"
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said if isinstance(error, (OSError, ValueError, RuntimeError)) else f"{type(error).__name__}: {said}"
