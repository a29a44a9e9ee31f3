"""`ready-hf train`: a drafter for a target, from text to a folder that loads.

    --data --> prompts --> text the target writes (or the data as it is) --> ReadyTrainer --> --output-dir

Everything about the training itself is an option of `ReadyTrainingArguments` by its name: `--learning_rate 1e-3`.
"""

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ready_hf.checkpoints import last_complete_checkpoint
from ready_hf.configuration_ready import LARGEST_BLOCK, ReadyDrafterConfig
from ready_hf.data import prompt_ids, training_rows
from ready_hf.demo_prompts import UsageError
from ready_hf.demo_settings import Settings, load_drafters, load_target
from ready_hf.modeling_ready import ReadyDrafterModel
from ready_hf.on_policy import OnPolicyOptions, regenerate
from ready_hf.quiet import use_few_threads
from ready_hf.row_encoder import RowOptions
from ready_hf.schedules import add_reader
from ready_hf.text_sources import Example, read_examples
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments


logger = logging.getLogger(__name__)

TEXT, HELD_OUT_TEXT = "_on_policy", "_on_policy_held_out"  # folders in the output folder
FEW_ROWS = 1000  # 28672 rows of 512 tokens made the drafters that ship


@dataclass(frozen=True)
class TrainSettings(Settings):
    """What to train; the fields are the options of `ready-hf train`, those of `Settings` among them."""

    data: tuple[str, ...] = ()
    output_dir: Path = Path("drafter")
    reader: bool = True
    block_size: int | None = None
    drafter_config: str | None = None
    as_written: bool = False
    turns: str = "all"
    thinking: str | None = None
    max_length: int = 1024
    max_examples: int | None = None
    held_out: int = 16
    held_out_data: tuple[str, ...] = ()
    eval_steps: int | None = None
    resume: bool = False

    @property
    def drafter_paths(self) -> tuple[str, ...]:
        """The drafter to go on from, if one was given; none of those that ship stands in for it."""
        return self.drafters

    def check(self) -> None:
        """Everything that can be found out without loading a model; see `Settings.check`."""
        super().check()
        if self.target is None or not self.data:
            raise UsageError("--target and --data must be given: whose drafter, and what to learn from")
        if len(self.drafters) > 1:
            raise UsageError(f"--drafter may be given once, to go on from it, got {len(self.drafters)}")
        if self.drafters and self.block_size is not None:
            raise UsageError("--block-size is the given drafter's: leave one of --drafter and --block-size out")
        self.drafter_fields()
        if self.block_size is not None and not 2 <= self.block_size <= LARGEST_BLOCK:
            raise UsageError(f"--block-size must be 2 to {LARGEST_BLOCK}, got {self.block_size}")
        for option, value in (("--max-length", self.max_length), ("--max-examples", self.max_examples)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, got {value}")
        for option, value in (("--held-out", self.held_out), ("--eval-steps", self.eval_steps)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1, got {value}")
        self.row_options()
        both = {_place(source) for source in self.data} & {_place(source) for source in self.held_out_data}
        if both:
            raise UsageError(
                f"{min(both)} is in --data and in --held-out-data: it would be evaluated on what it learned"
            )
        self._check_output_dir()

    def row_options(self, **options: Any) -> RowOptions:
        """How examples become rows.

        Raises:
            UsageError: a value that is not allowed.
        """
        chosen: dict[str, Any] = {"max_length": self.max_length, "turns": self.turns, "thinking": self.thinking}
        try:
            return RowOptions(**chosen, **options)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def drafter_fields(self) -> dict[str, Any]:
        """Fields of `ReadyDrafterConfig` for a new drafter, or a new reader.

        Raises:
            UsageError: `--drafter-config` is no file and no JSON object, or has fields with options of their own.
        """
        if self.drafter_config is None:
            return {} if self.block_size is None else {"block_size": self.block_size}
        text = self.drafter_config
        try:
            found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"--drafter-config must be a JSON file or {{...}}, got {text!r}: {error}") from None
        if not isinstance(found, dict):
            raise UsageError(f"--drafter-config must hold one JSON object, got {type(found).__name__}")
        unknown = sorted(set(found) - {field.name for field in fields(ReadyDrafterConfig)})
        if unknown:
            raise UsageError(f"--drafter-config: ReadyDrafterConfig has no field {unknown[0]!r}")
        if "block_size" in found and self.block_size is not None:
            raise UsageError("block_size stands in --drafter-config too: leave --block-size out")
        return found if self.block_size is None else {**found, "block_size": self.block_size}

    def _check_output_dir(self) -> None:
        """Refuses folders that cannot be written to, and those of another training, whose checkpoints would mix."""
        if self.output_dir.is_file():
            raise UsageError(f"--output-dir {self.output_dir} is a file")
        if not self.resume and (old := sorted(self.output_dir.glob("checkpoint-*"))):
            raise UsageError(
                f"--output-dir {self.output_dir} has {old[-1].name} of an earlier training: give --resume to go on "
                "from it, or another --output-dir"
            )


def _place(source: str) -> str:
    """A source, a file by its full path."""
    return str(Path(source).resolve()) if Path(source).exists() else source


class _Parser(HfArgumentParser):
    """Errors are ours to print."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def run_training(settings: TrainSettings, options: Sequence[str] = ()) -> int:
    """Reads, trains, saves and prints; returns the exit code.

    Args:
        settings (`TrainSettings`): What to train.
        options (`Sequence[str]`): Options of `ReadyTrainingArguments`, `--name value`.

    Raises:
        UsageError: it cannot be done.
    """
    settings.check()
    arguments = training_arguments(settings, options)
    try:
        checkpoint = str(last_complete_checkpoint(settings.output_dir)) if settings.resume else None
        examples, held_out = _examples(settings.data, settings), _examples(settings.held_out_data, settings)
        _check_apart(examples, held_out)
        target, tokenizer = load_target(settings)
        target = target.to(arguments.device)
        use_few_threads(target)
        set_seed(arguments.seed)  # a new drafter is the same in every run, and in every process
        drafter = _drafter(target, tokenizer, settings)
        shortest = drafter.config.block_size + 2  # something before an anchor, it, and its block
        if settings.max_length < shortest:
            raise UsageError(f"--max-length must be at least {shortest} for this drafter, got {settings.max_length}")
        with arguments.main_process_first(desc="on-policy text"):  # the others find it on disk
            rows = _rows(target, tokenizer, drafter.config, examples, settings, TEXT)
            others = held_out and _rows(target, tokenizer, drafter.config, held_out, settings, HELD_OUT_TEXT)
        parts = _parts(rows, others, settings.held_out)
        trainer = _trainer(drafter, arguments, target=target, processing_class=tokenizer, **parts)
        if checkpoint is not None:
            trainer.check_checkpoint(checkpoint)
    except (ValueError, TypeError, ImportError, StrictDataclassError) as error:  # what data, trainer and target refuse
        raise UsageError(_said(error)) from error
    if trainer.is_world_process_zero():
        _warn_of_few_rows(len(parts["train_dataset"]))
        longest = max(len(row["input_ids"]) for row in parts["train_dataset"])
        print(trainer.memory(arguments.per_device_train_batch_size, longest).table(), flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()  # in all processes
    if trainer.is_world_process_zero():
        print(
            f"{settings.output_dir}: {len(parts['train_dataset'])} rows, {trainer.state.global_step} steps, on "
            f"{len(parts['eval_dataset'])} held-out rows {metrics['eval_tau']:.2f} expected tokens a round; drafts "
            f"accepted if all before them are: {_by_position(metrics)}"
        )
    return 0


def _trainer(drafter: ReadyDrafterModel, arguments: ReadyTrainingArguments, **kwargs: Any) -> ReadyTrainer:
    """The trainer, with its optimizer unless a launcher shards it.

    Raises:
        UsageError: reports, uploads or the output folder cannot be set up.
    """
    try:
        trainer = ReadyTrainer(drafter, arguments, **kwargs)
        if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
            trainer.create_optimizer()
    except (ValueError, ImportError):
        raise
    except Exception as error:
        if arguments.push_to_hub:  # the Hub's client raises errors of many types
            raise UsageError(
                f"--push_to_hub: the repository cannot be made or reached ({type(error).__name__}: {error}): log in "
                "(`hf auth login`), check --hub_model_id and the network, or leave --push_to_hub out"
            ) from error
        if isinstance(error, (OSError, RuntimeError)):  # a folder, a program that reports
            raise UsageError(str(error)) from error
        raise
    return trainer


def training_arguments(settings: TrainSettings, options: Sequence[str]) -> ReadyTrainingArguments:
    """The trainer's options, from the command line.

    Raises:
        UsageError: an unknown option, or a value that is not allowed.
    """
    own = {"--output_dir": "--output-dir", "--resume_from_checkpoint": "--resume"}
    given = ["--output_dir", str(settings.output_dir), "--use_cpu", str(settings.device == "cpu")]
    if settings.eval_steps is not None:
        own |= {"--eval_steps": "--eval-steps", "--eval_strategy": "--eval-steps"}
        given += ["--eval_strategy", "steps", "--eval_steps", str(settings.eval_steps)]
    for option in options:
        if option.split("=")[0] in own:
            raise UsageError(f"{option}: the command's own option is {own[option.split('=')[0]]}")
    given += options
    try:
        arguments, unknown = _Parser(ReadyTrainingArguments, allow_abbrev=False).parse_args_into_dataclasses(
            given, return_remaining_strings=True, look_for_args_file=False
        )
    except (ValueError, ImportError) as error:
        raise UsageError(_said(error)) from error
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}: neither of this command nor of ReadyTrainingArguments")
    return arguments


def _said(error: Exception) -> str:
    """An error in one line; transformers' about its own extra names ours."""
    text = " ".join(str(error).split())
    return f"{text}; the extra `ready_hf[train]` brings it" if "accelerate" in text else text


def _warn_of_few_rows(num_rows: int) -> None:
    if num_rows < FEW_ROWS:
        logger.warning(
            "ready_hf: %d rows are few to learn from, so expect no speedup: give thousands of them (`ready-hf eval` "
            "measures what the drafter brings)",
            num_rows,
        )


def _by_position(metrics: dict[str, float]) -> str:
    """`61%, 43%, ...`, from the first position in the block on."""
    names = (f"eval_acceptance_{k}" for k in itertools.count(1))
    return ", ".join(f"{metrics[name]:.0%}" for name in itertools.takewhile(metrics.__contains__, names))


def _examples(sources: Sequence[str], settings: TrainSettings) -> list[Example]:
    found: list[Example] = []
    for source in sources:
        streaming = settings.max_examples is not None and not Path(source).exists()
        found += itertools.islice(read_examples(source, streaming=streaming), settings.max_examples)
    return found


def _check_apart(examples: list[Example], held_out: list[Example]) -> None:
    """Refuses held-out texts that are to be learned too, in whatever file they stand."""
    kept = {_content(example) for example in held_out}  # of the two the few: what is learned may fill the memory
    learned = {content for example in examples if kept and (content := _content(example)) in kept}
    both = [example for example in held_out if _content(example) in learned]
    if both:
        raise UsageError(
            f"{len(both)} of the {len(held_out)} texts of --held-out-data are in --data too (the first: "
            f"{both[0].where}): it would be evaluated on what it learned"
        )


def _content(example: Example) -> str:
    return repr((example.text, example.prompt, example.completion, example.messages))


def _check_enough(count: int, held_out: int) -> None:
    if count <= held_out:
        raise UsageError(f"{count} rows, and --held-out takes {held_out}: give more --data")


def _parts(rows: Any, others: Any, held_out: int) -> dict[str, list[Any]]:
    """Rows to learn from, and rows to evaluate on: others if there are any, else the first ones."""
    if others:
        return {"eval_dataset": list(others), "train_dataset": list(rows)}
    _check_enough(len(rows), held_out)
    return {
        "eval_dataset": [rows[i] for i in range(held_out)],
        "train_dataset": [rows[i] for i in range(held_out, len(rows))],
    }


def _drafter(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: TrainSettings
) -> ReadyDrafterModel:
    chosen = settings.drafter_fields()
    for given in load_drafters(target, settings).values():
        given = given.float()  # `--bf16` computes in bfloat16; what is summed up over steps stays float32
        if settings.reader and not given.config.has_reader:
            return add_reader(given, target, **chosen)
        if chosen:
            raise UsageError(
                "--drafter-config is for new drafters and readers, and --drafter brings its own: leave it out"
            )
        return given
    config = ReadyDrafterConfig.for_target(target, reader=settings.reader, tokenizer=tokenizer, **chosen)
    return ReadyDrafterModel(config)


def _rows(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: ReadyDrafterConfig,
    examples: list[Example],
    settings: TrainSettings,
    folder: str,
) -> Any:
    forbidden = (config.mask_token_id,)
    options = settings.row_options(vocab_size=config.vocab_size, forbidden_ids=forbidden)
    if settings.as_written:
        return training_rows(examples, tokenizer, options)
    prompt_tokens = min(64, max(1, settings.max_length // 4))
    prompts = prompt_ids(examples, tokenizer, options, prompt_tokens=prompt_tokens)
    longest = max(len(prompt) for prompt in prompts)
    if longest >= settings.max_length:
        raise UsageError(f"a prompt has {longest} tokens, which leaves none of --max-length {settings.max_length}")
    written = OnPolicyOptions(max_new_tokens=settings.max_length - longest, forbidden_ids=forbidden)
    if folder == TEXT and not settings.held_out_data:
        _check_enough(len(prompts), settings.held_out)  # before the target writes for hours
    place = settings.output_dir / folder
    print(
        f"the target writes {len(prompts)} texts of up to {settings.max_length} tokens into {place}, where they are "
        "kept (a .txt file is one text; --as-written learns the data itself)",
        flush=True,
    )
    return regenerate(target, tokenizer, prompts, place, written)
