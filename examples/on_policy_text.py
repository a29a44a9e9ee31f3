"""Text that a target writes itself: what a drafter should learn from.

`train_drafter.py` writes it on its own. Written beforehand it serves several trainings, and several processes at once
take a fraction of the time, because decoding a small target is bound by launches:

    options="--target small_target --data small_data --out text"
    for seed in 1 2 3; do python examples/on_policy_text.py $options --kind sampled --seed $seed & done
    python examples/on_policy_text.py $options --kind greedy --seed 4 &
    python examples/on_policy_text.py $options --held 256; wait
    python examples/train_drafter.py --target small_target --text text --out drafters
"""

import argparse
import json
import math
import pathlib
import time
from collections.abc import Iterable

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import ready_hf


PROMPTS = (32, 96)  # shortest and longest, tokens
KINDS = ("sampled", "greedy")


def read_tokens(path: pathlib.Path, vocab_size: int, prompt: int) -> torch.Tensor:
    """The ids of a file of uint16: below `vocab_size`, and more than one prompt of `prompt` tokens."""
    if not path.is_file():
        raise SystemExit(f"{path} is no file: --data must be a folder that train_small_target.py prepared")
    tokens = torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int64))
    if len(tokens) <= prompt:
        raise SystemExit(f"{path} has {len(tokens)} tokens, more than {prompt} are needed: prepare the data again")
    if int(tokens.max()) >= vocab_size:
        raise SystemExit(
            f"{path} has id {int(tokens.max())}, the target knows ids up to {vocab_size - 1}: the data was tokenized "
            "for another target"
        )
    return tokens


@torch.no_grad()
def continuations(
    model: PreTrainedModel, prompts: torch.Tensor, length: int, sample: bool, forbidden: int, seed: int
) -> torch.Tensor:
    """Prompts `[B, P]` continued to `[B, length]` at temperature 1 or greedily, on the CPU.

    The end-of-text token is a token like any other: text of the training data goes on after it too.
    """
    torch.manual_seed(seed)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    choice = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    prompts = prompts.to(model.device)
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=length - prompts.shape[1],
        suppress_tokens=[forbidden],
        **choice,
    )
    if ids.shape[1] != length:
        raise RuntimeError(f"rows of {ids.shape[1]} tokens came back, expected {length}")
    return ids.cpu()


def is_greedy_batch(index: int, share: float) -> bool:
    """Whether batch `index` is written greedily; rounded, so that a few batches are mixed too."""
    return math.floor((index + 0.5) * share + 0.5) > math.floor((index - 0.5) * share + 0.5)


def write_rows(
    model: PreTrainedModel,
    tokens: torch.Tensor,
    *,
    length: int,
    batch: int,
    prompts: tuple[int, int],
    greedy: float,
    seconds: float,
    forbidden: int,
    seed: int,
) -> torch.Tensor:
    """Rows `[N, length]` in int32, as many batches as fit into `seconds`, at least one.

    Args:
        model (`PreTrainedModel`): The target.
        tokens (`torch.LongTensor`): Text that prompts are cut from, at random places.
        length (`int`): Tokens of a row, prompt included.
        batch (`int`): Rows written at once.
        prompts (`tuple[int, int]`): Shortest and longest prompt; drawn once per batch.
        greedy (`float`): Share of batches that are written greedily, the others at temperature 1.
        seconds (`float`): Time budget.
        forbidden (`int`): An id that must not be written: the mask token.
        seed (`int`): Seed.
    """
    generator, rows, start, slowest = torch.Generator().manual_seed(seed), [], time.perf_counter(), 0.0
    while not rows or time.perf_counter() - start + slowest < seconds:
        began, index = time.perf_counter(), len(rows)
        size = int(torch.randint(prompts[0], prompts[1] + 1, (), generator=generator))
        places = torch.randint(len(tokens) - size, (batch, 1), generator=generator)
        is_greedy = is_greedy_batch(index, greedy)
        text = continuations(
            model, tokens[places + torch.arange(size)], length, not is_greedy, forbidden, seed * 1000 + index
        )
        rows.append(text.to(torch.int32))
        slowest = max(slowest, time.perf_counter() - began) if index else 0.0  # the first one warms up
        if index in (0, 1):
            print(f"on-policy text: {batch} rows in {time.perf_counter() - began:.1f} s", flush=True)
    found = torch.cat(rows)
    print(f"on-policy text: {len(found)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    return found[torch.randperm(len(found), generator=generator)]


def write_held_out(
    model: PreTrainedModel, tokens: torch.Tensor, *, rows: int, length: int, forbidden: int, seed: int
) -> dict[str, torch.Tensor]:
    """Sampled and greedy continuations `[rows, length]` of the same prompts, spread over `tokens`."""
    size = held_prompt(length)
    prompts = tokens[torch.linspace(0, len(tokens) - size - 1, rows).long()[:, None] + torch.arange(size)]
    return {name: continuations(model, prompts, length, name == "sampled", forbidden, seed) for name in KINDS}


def describe(sampled: int, greedy: int) -> str:
    """How many rows of which kind there are, for a drafter's card."""
    return f"{sampled} at temperature 1, {greedy} greedily"


def held_prompt(length: int) -> int:
    """Tokens of a held-out row that the target does not write."""
    return min(64, length // 2)


def read_rows(path: pathlib.Path) -> np.ndarray:
    """Rows `[N, length]` of ids from a `.npy` file."""
    try:
        with path.open("rb") as file:
            rows = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # numpy parses the header, and a damaged one raises many kinds
        reason = " ".join(str(error).split())
        raise SystemExit(f"{path} cannot be read ({reason}): write it again with on_policy_text.py") from error
    if rows.ndim != 2 or not rows.size or not np.issubdtype(rows.dtype, np.integer):
        raise SystemExit(
            f"{path} holds {rows.dtype} of shape {list(rows.shape)}, expected rows [N, length] of whole numbers: "
            "write it again with on_policy_text.py"
        )
    if rows.min() < 0 or rows.max() >= 2**31:
        raise SystemExit(
            f"{path} has ids {rows.min()} to {rows.max()}, expected 0 to {2**31 - 1}: write it again with "
            "on_policy_text.py"
        )
    return rows.astype(np.int32)


def read_text(folder: pathlib.Path) -> tuple[torch.Tensor, dict[str, torch.Tensor], str]:
    """Rows `[N, length]` of all `train-*.npy`, shuffled; held-out rows of both kinds; what `describe` says."""
    files = {kind: sorted(folder.glob(f"train-{kind}-*.npy")) for kind in KINDS}
    paths = {kind: folder / f"held-{kind}.npy" for kind in KINDS}
    missing = [path.name for path in paths.values() if not path.exists()]
    missing += [] if any(files.values()) else ["train-*.npy"]
    if missing:
        raise SystemExit(f"{folder} has no {', '.join(missing)}: on_policy_text.py writes them")
    parts = {path: read_rows(path) for kind in KINDS for path in [*files[kind], paths[kind]]}
    first, *others = parts
    for path in others:
        if parts[path].shape[1] != parts[first].shape[1]:
            raise SystemExit(
                f"{path} has rows of {parts[path].shape[1]} tokens, {first} of {parts[first].shape[1]}: write all "
                "files with one --row"
            )
    rows = torch.from_numpy(np.concatenate([parts[path] for kind in KINDS for path in files[kind]]))
    held = {kind: torch.from_numpy(parts[path]).long() for kind, path in paths.items()}
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    return shuffled, held, describe(*(sum(len(parts[path]) for path in files[kind]) for kind in KINDS))


def save_rows(path: pathlib.Path, rows: torch.Tensor) -> None:
    """Ids in uint16, or in int32 if one needs it; the file is written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part, kind = path.with_suffix(".part"), np.uint16 if int(rows.max()) < 2**16 else np.int32
    with part.open("wb") as file:
        np.save(file, rows.numpy().astype(kind))
    part.replace(path)
    print(f"{path.name}: {len(rows)} rows", flush=True)


def target_vocabulary(target: str) -> int:
    """Number of ids that the target knows."""
    try:
        return AutoConfig.from_pretrained(target).get_text_config().vocab_size
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise SystemExit(f"--target {target} cannot be loaded ({reason}): name the folder of a model") from error


def make_folder(path: pathlib.Path) -> None:
    """The folder of `--out`, now rather than after all the work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {path} cannot be a folder ({error.strerror}): choose another") from error


def read_fields(path: pathlib.Path, fields: Iterable[str], hint: str) -> dict:
    """What a JSON file holds, an object with at least these fields; `hint` says which file to name instead."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"{path} is not JSON ({error}): {hint}") from error
    missing = [name for name in fields if not isinstance(record, dict) or name not in record]
    if missing:
        raise SystemExit(f"{path} has no {', '.join(missing)}: {hint}")
    return record


def check_least(args: argparse.Namespace, least: dict[str, float]) -> None:
    """Refuses numbers on the command line that are too small, infinite or none; `None` is not looked at."""
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and not (value >= bound and math.isfinite(value)):
            raise SystemExit(f"--{name.replace('_', '-')} must be a number of at least {bound}, got {value}")


def main() -> None:
    """Writes a file of rows, or with `--held` both files of held-out rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--data", type=pathlib.Path, required=True, help="folder of train.bin and held.bin")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a folder")
    parser.add_argument("--held", type=int, default=0, help="held-out rows of both kinds, and nothing else")
    parser.add_argument("--seconds", type=float, default=90, help="time for writing; at least one batch is written")
    parser.add_argument("--kind", choices=KINDS, help=f"default: {KINDS[0]}")
    for name, default in {"rows": 4096, "row": 512, "mask_token_id": 1, "seed": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    check_least(args, {"held": 0, "seconds": 0, "rows": 1, "row": 2})
    if args.held and args.kind:
        raise SystemExit(f"--held writes rows of both kinds, got --kind {args.kind} too: leave one of them out")
    size = target_vocabulary(args.target)
    if not 0 <= args.mask_token_id < size:
        raise SystemExit(f"--mask-token-id must be 0 to {size - 1}, the target's ids, got {args.mask_token_id}")
    prompts = tuple(min(length, args.row // 2) for length in PROMPTS)
    if args.held:
        tokens = read_tokens(args.data / "held.bin", size, held_prompt(args.row))
    else:
        tokens = read_tokens(args.data / "train.bin", size, prompts[1])
    make_folder(args.out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    ready_hf.ensure_patched(model)
    if args.held:
        options = {"length": args.row, "forbidden": args.mask_token_id, "seed": args.seed}
        for name, rows in write_held_out(model, tokens, rows=args.held, **options).items():
            save_rows(args.out / f"held-{name}.npy", rows)
        return
    kind = args.kind or KINDS[0]
    rows = write_rows(
        model,
        tokens,
        length=args.row,
        batch=args.rows,
        prompts=prompts,
        greedy=float(kind == "greedy"),
        seconds=args.seconds,
        forbidden=args.mask_token_id,
        seed=args.seed,
    )
    save_rows(args.out / f"train-{kind}-{args.seed}.npy", rows)


if __name__ == "__main__":
    main()
