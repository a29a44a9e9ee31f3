"""Reader experiments: drafters that differ in one thing, trained side by side on the same target forwards.

    python examples/ablate_reader.py --data research_data --out screen.json

Every arm (see ablation_arms.py) sees the same rows of text (of a corpus, at random offsets; or written by the target,
see on_policy_text.py) and the same random anchors in the same order, for the same number of steps of AdamW with a
cosine. Afterwards all of them are measured on text that the target drew itself at temperature 1 (ablation_text.py),
anchors spread over its last `--held-new` tokens:

    tau_of_samples   1 + mean of prod min(1, q / p) over the text's own tokens: what speculative sampling accepts
    tau              1 + product of 1 - TV, which is biased

The last figures of a reader are of samples too, with states set to zero, another row's, those of the anchor before.

`--seconds` is the time for training and everything is planned from a few measured steps. `--part test` is for settings
that are frozen. A try on a CPU:

    python examples/ablate_reader.py --data research_data --out tried.json --arms dspark conditioned
        --steps 2 --batch 2 --anchors 4 --row 256 --held 2 --held-anchors 4
"""

import argparse
import hashlib
import json
import pathlib
import platform
import shlex
import sys
import time
from contextlib import nullcontext

import torch
import transformers
from ablation_arms import ARMS, SCREEN, Arm, folder_of, make_config, make_drafter
from ablation_batches import Batches, usable_anchors, with_tensor_states
from ablation_training import Training, compiled, measured
from on_policy_text import check_least, make_folder, read_rows, read_tokens, target_vocabulary
from transformers import AutoModelForCausalLM, PreTrainedModel
from wrong_states import WRONG, with_wrong_states

import ready_hf
from ready_hf.features import FrozenTarget, choose_anchors
from ready_hf.losses import LossSums


STARTED = time.perf_counter()
TARGET = pathlib.Path(__file__).with_name("research_target")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REAL = "real"


def elapsed() -> float:
    """Seconds since the program started."""
    return time.perf_counter() - STARTED


@torch.no_grad()
def evaluate(
    trainings: list[Training], frozen: FrozenTarget, rows: torch.Tensor, args: argparse.Namespace
) -> dict[str, dict]:
    """Metrics of every arm, a reader's also with wrong states, over rows `[N, T]`; by part of the rows too."""
    total: dict[tuple[str, str], LossSums] = {}
    parts: dict[str, list[float]] = {}
    for training in trainings:
        training.drafter.eval()
    for ids in rows.long().split(args.held_batch):
        written = torch.ones_like(ids)
        written[:, : ids.shape[1] - args.held_new] = 0
        anchors, mask = choose_anchors(usable_anchors(torch.ones_like(ids), args.block, written), args.held_anchors)
        batch = with_tensor_states(frozen.batch(ids.to(DEVICE), anchors.to(DEVICE), mask.to(DEVICE)))
        for training in trainings:
            arm = training.arm
            for kind in (REAL, *WRONG) if arm.reader else (REAL,):
                served = batch if kind == REAL else with_wrong_states(batch, kind)
                sums = measured(arm, training.drafter, frozen, served).map(lambda x: x.double().cpu())
                key = (arm.name, kind)
                total[key] = total[key] + sums if key in total else sums
                if kind == REAL:
                    parts.setdefault(arm.name, []).append(round(sums.metrics()["tau_of_samples"], 5))
    found: dict[str, dict] = {}
    for (name, kind), sums in total.items():
        metrics = {key: round(value, 5) for key, value in sums.metrics().items()}
        if kind == REAL:
            found[name] = {**metrics, "tau_of_samples_by_part": parts[name], "wrong_states": {}}
        else:
            found[name]["wrong_states"][kind] = metrics["tau_of_samples"]
    return found


def make_arms(target: PreTrainedModel, frozen: FrozenTarget, args: argparse.Namespace, steps: int) -> list[Training]:
    """Fresh drafters in training, the same seed for all."""
    made = []
    for name in args.arms:
        made.append(Training(ARMS[name], make_drafter(target, ARMS[name], args).to(DEVICE), frozen, args.lr, steps))
    return made


def planned_steps(per_step: float, done: int, args: argparse.Namespace) -> int:
    """Steps that fit into the time, `done` of them taken."""
    return done + int(min(args.seconds, args.limit - elapsed() - args.reserve) / per_step)


def train(target: PreTrainedModel, frozen: FrozenTarget, tokens: torch.Tensor, args: argparse.Namespace) -> list:
    """All arms, step by step on the same batches."""
    shapes = {"batch_size": args.batch, "row": args.row, "num_anchors": args.anchors, "block_size": args.block}
    batches = Batches(frozen, tokens, seed=args.seed, **shapes)
    memory = batches.next()
    trainings = make_arms(target, frozen, args, args.steps or 1)
    if DEVICE == "cuda":
        pool = None
        with compiled() if args.compile else nullcontext():
            for training in trainings:
                pool = training.capture(memory, pool)
        print(
            f"{len(trainings)} graphs after {elapsed():.0f} s, {torch.cuda.max_memory_allocated() / 1e9:.0f} GB",
            flush=True,
        )
    step, steps, start, measured_from = 0, args.steps, time.perf_counter(), 5
    while steps is None or step < steps:
        batches.next()
        for training in trainings:
            training.steps = steps or 10**6
            training.step(memory, step)
        step += 1
        if steps is None and step in (measured_from, 3 * measured_from):
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            if step == measured_from:
                start = time.perf_counter()
                continue
            per_step = (time.perf_counter() - start) / (2 * measured_from)
            steps = planned_steps(per_step, step, args)
            print(f"{per_step * 1e3:.0f} ms a step of {len(trainings)} arms: {steps} steps", flush=True)
        if step % args.report == 0:
            shown = " ".join(f"{training.loss.item():.4f}" for training in trainings)
            print(f"step {step}, {elapsed():.0f} s: {shown}", flush=True)
            if elapsed() > args.limit - args.reserve:
                print("out of time", flush=True)
                break
    args.done = step
    return trainings


def print_table(arms: dict[str, dict]) -> None:
    """One line per arm; gains are over the first one."""
    base = next(iter(arms.values()))["tau_of_samples"]
    for name, found in arms.items():
        tau, wrong = found["tau_of_samples"], " ".join(f"{value:.3f}" for value in found["wrong_states"].values())
        print(
            f"{name:32} {found['parameters'] / 1e6:.2f} M  loss {found['training_loss']:.4f}  tau {found['tau']:.4f}",
            end="",
        )
        print(f"  of samples {tau:.4f} ({(tau / base - 1) * 100:+.1f} %)  {wrong}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=pathlib.Path, default=TARGET, help="folder of the target")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=pathlib.Path, help="folder of train.bin: rows at random offsets")
    source.add_argument("--on-policy", type=pathlib.Path, help="folder that on_policy_text.py wrote: its rows")
    parser.add_argument(
        "--text", type=pathlib.Path, default=TARGET / "text", help="folder that ablation_text.py wrote"
    )
    parser.add_argument("--part", choices=["validation", "test"], default="validation")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON file")
    parser.add_argument("--save", type=pathlib.Path, help="a folder for the drafters")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=[arm.name for arm in SCREEN])
    parser.add_argument("--seconds", type=float, default=400, help="training time")
    parser.add_argument("--limit", type=float, default=540, help="everything ends within these seconds")
    parser.add_argument("--reserve", type=float, default=40, help="of these, for measuring")
    parser.add_argument("--steps", type=int, help="default: as many as fit")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--compile", action="store_true", help="on a GPU: steps with fewer, larger kernels")
    sizes = {
        "seed": 0,
        "batch": 16,
        "row": 2048,
        "anchors": 64,
        "held": 128,
        "held_new": 512,
        "held_anchors": 96,
        "held_batch": 16,
    }
    sizes |= {"block": 8, "layers": 2, "intermediate": 512, "head_dim": 64, "window": 512, "markov_rank": 64}
    sizes |= {"mask_token_id": 1, "report": 200}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args(arguments)
    least = dict.fromkeys(("steps", "batch", "anchors", "held_anchors", "layers", "report"), 1)
    least |= {"held": 2, "held_batch": 2, "row": 4 * args.block, "held_new": args.block + 2}
    check_least(args, least)
    return args


def training_text(args: argparse.Namespace, size: int) -> torch.Tensor:
    """One long text `[N]`, or rows `[N, T]`, whose length then is `args.row`; ids below `size`."""
    if args.on_policy is None:
        return read_tokens(args.data / "train.bin", size, args.row)
    files = sorted(args.on_policy.glob("train-*.npy"))
    if not files:
        raise SystemExit(f"{args.on_policy} has no train-*.npy: on_policy_text.py writes them")
    parts = [torch.from_numpy(read_rows(path)) for path in files]
    if len({part.shape[1] for part in parts}) > 1:
        raise SystemExit(f"rows in {args.on_policy} have several lengths: write all files with one --row")
    rows = torch.cat(parts)
    if int(rows.max()) >= size:
        raise SystemExit(f"{args.on_policy} was written by another target: this one knows ids up to {size - 1}")
    args.row = rows.shape[1]
    return rows.long()


def held_rows(args: argparse.Namespace) -> torch.Tensor:
    """Rows to measure on `[N, T]`."""
    path = args.text / f"{args.part}.npy"
    rows = torch.from_numpy(read_rows(path))
    if args.held > len(rows) or args.held_new >= rows.shape[1]:
        raise SystemExit(
            f"{path} has {len(rows)} rows of {rows.shape[1]} tokens, too few for --held {args.held} and --held-new "
            f"{args.held_new}"
        )
    if args.held % args.held_batch == 1:
        raise SystemExit(
            f"--held {args.held} in parts of --held-batch {args.held_batch} leaves one row alone, which has no other "
            "row's states to be served: change one of them"
        )
    return rows[: args.held]


def make_places(args: argparse.Namespace) -> None:
    """Folders for what is written, now rather than after all the work."""
    if args.out.is_dir():
        raise SystemExit(f"--out {args.out} is a folder, expected a JSON file")
    for folder in (args.out.parent, args.save):
        if folder is not None:
            make_folder(folder)


def command() -> str:
    """The command line, of paths outside of the working folder only their names."""
    given = [pathlib.Path(x).name if pathlib.Path(x).is_absolute() else x for x in sys.argv[1:]]
    return shlex.join(["python", pathlib.Path(sys.argv[0]).name, *given])


def main() -> None:
    """Train, measure, write."""
    args = parse()
    size = target_vocabulary(str(args.target))
    tokens = training_text(args, size)
    rows = held_rows(args)
    make_places(args)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(DEVICE).eval().requires_grad_(False)
    ready_hf.ensure_patched(target)
    frozen = FrozenTarget(target, make_config(target, Arm("all states"), args))
    trainings = train(target, frozen, tokens, args)
    found = evaluate(trainings, frozen, rows, args)
    record = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__}
        | {"ready_hf": ready_hf.__version__, "python": platform.python_version()},
        "options": {k: v.name if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()},
        "text": hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16],
        "steps": args.done,
        "arms": {},
    }
    for training in trainings:
        name = training.arm.name
        record["arms"][name] = {
            "parameters": training.drafter.num_parameters(),
            "training_loss": round(training.loss.item(), 5),
            **found[name],
        }
        if args.save is not None:
            folder = args.save / folder_of(name)
            training.drafter.to(torch.bfloat16).save_pretrained(folder)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_table(record["arms"])
    print(f"done after {elapsed():.0f} s", flush=True)


if __name__ == "__main__":
    main()
