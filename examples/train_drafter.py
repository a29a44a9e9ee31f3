"""Train drafters for a small target on text that the target writes itself, and compare them.

    python examples/train_small_target.py prepare --data small_data
    python examples/train_drafter.py --target small_target --data small_data --out drafters

The recipe, for every variant (`dspark` reads no states, `ready` reads those of all recurrent layers):

- text: the target continues prompts of 32 to 96 tokens from its training corpus to rows of 512 tokens, three quarters
  at temperature 1, a quarter greedily, in whole batches. The mask token is suppressed; the end-of-text token does not
  end a row.
- every step: the same rows and anchors for all variants, 15 random anchors a row, blocks of 8.
- AdamW, cosine schedule with warm-up, bfloat16 autocast on a GPU; the steps fit the slowest variant into `--seconds`.
- evaluation of the saved bfloat16 weights on continuations of held-out prompts, tokens of the prompts left out. For
  `ready` also with wrong states: zeros, another row's, the previous anchor's.

With `--start` the sizes of a drafter are those of the earlier run; options that give sizes are not looked at.

Everything ends within `--limit` seconds; training is cut short if it must. A try on a CPU, with random prompts:

    python examples/train_drafter.py --out tried --steps 3 --rows 8 --row 64 --batch 4 --anchors 4 --held 4
"""

import argparse
import functools
import itertools
import json
import math
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from on_policy_text import (
    PROMPTS,
    check_least,
    describe,
    held_prompt,
    is_greedy_batch,
    make_folder,
    read_text,
    read_tokens,
    target_vocabulary,
    write_held_out,
    write_rows,
)
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from write_drafter_cards import write_card
from wrong_states import WRONG, with_wrong_states

import ready_hf
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel
from ready_hf.features import DraftingBatch, FrozenTarget, choose_anchors, legal_anchors
from ready_hf.losses import DraftingLoss
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments, drafting_sums


STARTED = time.perf_counter()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESERVE = 45.0  # seconds kept for evaluation and saving
SPARE = 0.94  # share of the measured speed that is planned with
# Options that give sizes of a drafter, and where its configuration has them.
FIELDS = {"block": "block_size", "layers": "num_hidden_layers", "intermediate": "intermediate_size"}
FIELDS |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "window": "sliding_window"}
FIELDS |= {"markov_rank": "markov_rank", "reader_rank": "reader_rank", "query_rank": "reader_query_rank"}
FIELDS |= {"mask_token_id": "mask_token_id"}
LEAST = dict.fromkeys(("rows", "row", "batch", "anchors", "stride", "held", "heads", "steps"), 1)


def elapsed() -> float:
    """Seconds since the program started."""
    return time.perf_counter() - STARTED


class Clock(TrainerCallback):
    """Keeps the time after every step, and stops training at a deadline."""

    def __init__(self, deadline: float):
        self.deadline, self.times = deadline, []

    def on_step_end(self, args, state, control, **kwargs):
        """Also lets the other callbacks know that training should stop."""
        self.times.append(elapsed())
        if elapsed() > self.deadline:
            control.should_training_stop = True
        return control


class Rows(torch.utils.data.Dataset):
    """Rows of token ids `[N, T]`."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index].long()}


def make_config(target: PreTrainedModel, variant: str, args: argparse.Namespace) -> ReadyDrafterConfig:
    """A configuration from the command line; or that of the drafter in `--start`, checked against the target."""
    if args.start is not None:
        config = ReadyDrafterConfig.from_pretrained(args.start / variant)
        config.check_target(target)
        return config
    reader = {"reader_rank": args.reader_rank, "reader_query_rank": args.query_rank} if variant == "ready" else {}
    return ReadyDrafterConfig.for_target(
        target,
        reader=variant != "dspark",
        mask_token_id=args.mask_token_id,
        block_size=args.block,
        num_hidden_layers=args.layers,
        intermediate_size=args.intermediate,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=target.config.get_text_config().hidden_size // args.heads,
        sliding_window=args.window or None,
        markov_rank=args.markov_rank,
        **{name: rank for name, rank in reader.items() if rank is not None},
    )


def make_drafter(target: PreTrainedModel, variant: str, args: argparse.Namespace) -> ReadyDrafterModel:
    """A fresh drafter, the same seed for all variants; or the one in `--start` to go on with."""
    torch.manual_seed(args.seed)
    if args.start is not None:
        return ReadyDrafterModel.from_pretrained(args.start / variant, dtype=torch.float32)
    return ReadyDrafterModel(make_config(target, variant, args))


def check_drafters(target: PreTrainedModel, args: argparse.Namespace) -> None:
    """Refuses drafters that cannot be made or loaded; with `--start` their sizes take the place of the options.

    A size that no drafter has, or that differs between them, is no longer in `args` afterwards.
    """
    names = [f"{variant}/{name}" for variant in args.variants for name in ("config.json", "model.safetensors")]
    missing = [name for name in names if args.start is not None and not (args.start / name).is_file()]
    if missing:
        expected = f"expected the output folder of an earlier run, with {', '.join(names)}"
        raise SystemExit(f"--start {args.start} has no {', '.join(missing)}: {expected}")
    try:
        configs = [make_config(target, variant, args) for variant in args.variants]
    except (OSError, ValueError, StrictDataclassError) as error:
        raise SystemExit(f"no such drafter can be trained: {' '.join(str(error).split())}") from error
    for option, field in FIELDS.items() if args.start is not None else ():
        found = {getattr(c, field) for c in configs if c.has_reader or not field.startswith("reader")}
        if len(found) > 1 and option in ("block", "mask_token_id"):  # no text and no anchors would suit both
            raise SystemExit(f"drafters in --start differ in `{field}`, {sorted(found)}: choose one with --variants")
        delattr(args, option)
        if len(found) == 1 and (size := found.pop()) is not None:
            setattr(args, option, size)


def check_length(args: argparse.Namespace) -> None:
    """Refuses rows in which no anchor has its whole block, in training or after the prompt of a held-out row."""
    least = next(n for n in itertools.count() if n - args.block > max(args.stride, held_prompt(n) - 1))
    if args.row < least:
        what = f"rows of {args.row} tokens are too short for blocks of {args.block} at --stride {args.stride}"
        raise SystemExit(f"{what}: at least {least} are needed; --row says how long text is written")


def check_held(count: int, args: argparse.Namespace) -> None:
    """Refuses held-out rows of which the last one would be alone: it has no other row's states to be served."""
    if "ready" in args.variants and count % args.batch == 1:
        raise SystemExit(
            f"{count} held-out rows in batches of {args.batch} leave one row alone, which has no other row's states "
            "to be served: change --held or --batch"
        )


def train(
    target: PreTrainedModel,
    drafter: ReadyDrafterModel,
    rows: torch.Tensor,
    steps: int,
    deadline: float,
    args: argparse.Namespace,
    folder: str,
) -> list[float]:
    """Trains for `steps`, or until `deadline`; returns the times after every step. Nothing is kept in `folder`."""
    options = ReadyTrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=args.batch,
        num_anchors=args.anchors,
        anchor_stride=args.stride,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, steps // 10),
        weight_decay=0.01,
        adam_beta2=0.95,
        bf16=DEVICE == "cuda",
        seed=args.seed,
        data_seed=args.seed,
        logging_steps=max(1, steps // 8),
        logging_nan_inf_filter=False,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=DEVICE == "cuda",
    )
    clock = Clock(deadline)
    trainer = ReadyTrainer(drafter, options, target=target, train_dataset=Rows(rows), callbacks=[clock])
    trainer.train()
    if trainer.num_skipped_steps:
        print(f"{trainer.num_skipped_steps} steps were skipped: not finite", flush=True)
    return clock.times


def planned_steps(target: PreTrainedModel, rows: torch.Tensor, args: argparse.Namespace, folder: str) -> int:
    """Steps that the slowest variant can do in `--seconds`, from a short run of a throw-away drafter."""
    budget = min(args.seconds, (args.limit - RESERVE - 15 - elapsed()) / len(args.variants))
    slowest = max(args.variants, key=lambda variant: variant != "dspark")
    times = train(target, make_drafter(target, slowest, args), rows, 30, math.inf, args, folder)
    per_step = (times[-1] - times[9]) / 20
    steps = max(10, int(SPARE * budget / per_step))
    print(f"{per_step * 1e3:.0f} ms a step of {slowest}: {steps} steps in {budget:.0f} s", flush=True)
    return steps


def whole_blocks(written: torch.Tensor, block_size: int) -> torch.Tensor:
    """Anchors `[N, T]` with their block in the row and written text behind them: every slot has as many labels."""
    text = torch.ones_like(written)
    return legal_anchors(text, block_size) & legal_anchors(text, block_size, 1, written)


@torch.no_grad()
def evaluate(
    target: PreTrainedModel,
    drafter: ReadyDrafterModel,
    rows: torch.Tensor,
    prompt: int,
    args: argparse.Namespace,
    change: Callable[[DraftingBatch], DraftingBatch] = lambda batch: batch,
) -> dict[str, float]:
    """Metrics over rows `[N, T]`, anchors spread over what follows the prompt."""
    frozen, total = FrozenTarget(target, drafter.config), None
    for ids in rows.long().split(args.batch):
        ids = ids.to(target.device)
        written = torch.ones_like(ids)
        written[:, :prompt] = 0
        legal = whole_blocks(written, drafter.config.block_size)
        anchors, mask = choose_anchors(legal, 2 * args.anchors)
        batch = change(frozen.batch(ids, anchors, mask, None, written))
        sums = drafting_sums(drafter, drafter, frozen, batch, DraftingLoss())
        total = sums if total is None else total + sums
    return {name: round(value, 5) for name, value in total.metrics().items()}


def evaluate_all(
    target: PreTrainedModel, drafter: ReadyDrafterModel, held: dict[str, torch.Tensor], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """On sampled and on greedy text; a reader also with wrong states."""
    prompt = held_prompt(args.row)
    found = {name: evaluate(target, drafter, rows, prompt, args) for name, rows in held.items()}
    for kind in WRONG if drafter.reader is not None else ():
        change = functools.partial(with_wrong_states, kind=kind)
        found[f"sampled, states: {kind}"] = evaluate(target, drafter, held["sampled"], prompt, args, change)
    return found


def text(
    target: PreTrainedModel, size: int, args: argparse.Namespace
) -> tuple[torch.Tensor, dict[str, torch.Tensor], str]:
    """Rows to train on, held-out rows, and how they were written: those of `--text`, or written now.

    Sets `args.row` to the length of the rows. All ids are below `size`.
    """
    if args.text is not None:
        rows, held, shares = read_text(args.text)
        if max(int(ids.max()) for ids in (rows, *held.values())) >= size:
            raise SystemExit(f"the text was written by another target: this one knows ids up to {size - 1}")
        args.row = rows.shape[1]
        check_length(args)
        check_held(len(held["sampled"]), args)
        return rows, held, shares
    check_length(args)
    check_held(args.held, args)
    shortest, longest = (min(length, args.row // 2) for length in PROMPTS)
    generator = torch.Generator().manual_seed(args.seed)
    tokens = {
        name: torch.randint(2, size, (10_000,), generator=generator)
        if args.data is None
        else read_tokens(args.data / f"{name}.bin", size, longest)
        for name in ("train", "held")
    }
    options = {"length": args.row, "forbidden": args.mask_token_id}
    held = write_held_out(target, tokens["held"], rows=args.held, seed=args.seed + 7, **options)
    print(f"held-out text after {elapsed():.0f} s", flush=True)
    choices = {"prompts": (shortest, longest), "greedy": args.greedy, "seed": args.seed}
    choices["seconds"] = 0 if args.data is None else args.text_seconds
    rows = write_rows(target, tokens["train"], batch=args.rows, **options, **choices)
    greedy = args.rows * sum(is_greedy_batch(i, args.greedy) for i in range(len(rows) // args.rows))
    return rows, held, describe(len(rows) - greedy, greedy)


def write_record(folder: pathlib.Path, entry: dict, record: dict) -> None:
    """`training.json` beside the weights: what its card says about training."""
    own = {name: value for name, value in record.items() if name != "variants"}
    (folder / "training.json").write_text(json.dumps(own | entry, indent=1) + "\n", encoding="utf-8")


def run_variant(
    variant: str,
    target: PreTrainedModel,
    rows: torch.Tensor,
    held: dict[str, torch.Tensor],
    steps: int,
    record: dict,
    args: argparse.Namespace,
    folder: str,
) -> None:
    """Trains, saves in bfloat16, loads again, evaluates, adds to the record and writes it."""
    drafter, began = make_drafter(target, variant, args), elapsed()
    left = len(args.variants) - len(record["variants"])
    deadline = began + (args.limit - RESERVE - began) / left
    times = train(target, drafter, rows, steps, deadline, args, folder)
    trained, place = elapsed(), args.out / variant
    drafter.to(torch.bfloat16).save_pretrained(place)
    saved = ReadyDrafterModel.from_pretrained(place, dtype=torch.float32).to(target.device).eval()
    entry = {
        "parameters": saved.num_parameters(),
        "steps": len(times),
        "planned_steps": steps,
        "training_seconds": round(trained - began, 1),
    }
    record["variants"][variant] = entry
    (args.out / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    entry["evaluation"] = evaluate_all(target, saved, held, args)
    entry["evaluation_seconds"] = round(elapsed() - trained, 1)
    write_record(place, entry, record)
    write_card(place)
    (args.out / "record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    for name, metrics in entry["evaluation"].items():
        shown = [round(value, 3) for key, value in metrics.items() if key.startswith("acceptance")]
        print(f"{variant:8} {name:32} tau {metrics['tau']:.4f} {shown} {elapsed():.0f} s", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=ready_hf.tiny_target_path(), help="folder of the target")
    parser.add_argument("--data", type=pathlib.Path, help="folder of train.bin and held.bin; default: random")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "--start", type=pathlib.Path, help="output folder of an earlier run, to go on from its drafters"
    )
    parser.add_argument("--variants", nargs="+", choices=["dspark", "ready"], default=["dspark", "ready"])
    parser.add_argument(
        "--text", type=pathlib.Path, help="folder that on_policy_text.py wrote; default: written first, from --data"
    )
    parser.add_argument("--seconds", type=float, default=150, help="training time of each variant")
    parser.add_argument("--text-seconds", type=float, default=130, help="time for the target to write")
    parser.add_argument("--limit", type=float, default=540, help="everything ends within these seconds")
    parser.add_argument("--steps", type=int, help="steps of each variant; default: as many as fit")
    sizes = {"rows": 4096, "row": 512, "batch": 128, "anchors": 15, "stride": 1, "held": 512, "seed": 0, "block": 8}
    sizes |= {"layers": 2, "intermediate": 384, "heads": 4, "kv_heads": 2, "window": 64, "markov_rank": 64}
    sizes |= {"mask_token_id": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    for name in ("--reader-rank", "--query-rank"):
        parser.add_argument(name, type=int, help="default: the package's")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--greedy", type=float, default=0.25, help="share of the text that is written greedily")
    return parser.parse_args(arguments)


def main() -> None:
    """Text, training, evaluation."""
    args = parse()
    check_least(args, LEAST)
    size = target_vocabulary(args.target)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(DEVICE).eval()
    ready_hf.ensure_patched(target)
    check_drafters(target, args)
    make_folder(args.out)
    rows, held, shares = text(target, size, args)
    record = {
        "command": f"python {' '.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]])}",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__}
        | {"ready_hf": ready_hf.__version__, "python": platform.python_version()},
        "options": {k: v if isinstance(v, int | float | list) else str(v) for k, v in vars(args).items()},
        "rows": len(rows),
        "shares": shares,
        "prompts": PROMPTS,
        "variants": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        steps = args.steps or planned_steps(target, rows, args, folder)
        for variant in args.variants:
            run_variant(variant, target, rows, held, steps, record, args, folder)
    for variant, entry in record["variants"].items():  # after all of them, so that none is lost
        if not all(math.isfinite(metrics["tau"]) for metrics in entry["evaluation"].values()):
            raise SystemExit(f"nothing was measured for {variant}: tau is no number, see {args.out / 'record.json'}")
    print(f"done after {elapsed():.0f} s", flush=True)


if __name__ == "__main__":
    main()
