"""Train the small hybrid target that ships with the package: a language model of Python code with 3 M parameters.

`prepare` lets pip fetch the packages that small_target_corpus.txt pins and writes token files; `train` learns from
them. The commands behind the shipped folder, and options to try the second on a CPU:

    python examples/train_small_target.py prepare --data small_data
    python examples/train_small_target.py train --data small_data --out small_target --seconds 430 --limit 500
    python examples/train_small_target.py train --data small_data --out tried --seconds 5 --batch 2 --prompts 2

Training stops by the clock: `--seconds` is the length of the schedule, without compilation, and `--limit` ends this
command's share of it. `OUT.state.pt` holds float32 weights and the place in the schedule, and `--resume` goes on from
there in a later command. It holds no optimizer moments, so a resumed run warms up again.
"""

import argparse
import json
import math
import pathlib
import shutil
import time
from unittest import mock

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from small_target_data import fetched_sources, wrap, write_data
from train_tiny_target import causal_conv, chunk_gated_delta_rule
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen


STARTED = time.perf_counter()
OPTIONS = {"seconds": 440.0, "limit": math.inf, "lr": 3e-3, "batch": 64, "row": 1024, "layers": 16, "seed": 0}
VOCABULARY, PROMPTS = 2048, 40  # tokens, demo prompts
WARMUP, REPORT = 200, 60  # steps, seconds
LONGEST, REPEATS, DISTINCT = 40, 3, 0.6  # the loop filter: tokens of a cycle, cycles in a row, share of 4-grams
SIZES = {"hidden_size": 128, "intermediate_size": 224, "max_position_embeddings": 4096}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
GDN = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_num_value_heads": 4, "linear_value_head_dim": 48}
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags:
- code
- python
- hybrid
- gated-delta-rule
- linear-attention
- speculative-decoding
---

# Small target

A trained hybrid language model of Python code that is small enough to ship: `Qwen3_5ForCausalLM`, {parameters:.2f} M
parameters in bfloat16, {layers} layers (three with the gated delta rule, then one with full attention, repeated),
2 key heads of 32 and 4 value heads of 48, a byte-level BPE of {vocabulary} tokens, tied embeddings. Its purpose is to
be a target for drafters in demos, tests and measurements; it is no coding assistant.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
```

A prompt is the beginning of a Python file or of a definition in it, and best ends at the end of a line, before the
line break: break and indent are one token. `prompts.jsonl` has {prompts} of them, cut from packages that training
never saw; none was chosen or left out for what the model makes of it.

## Training record

| what | value |
| --- | --- |
{table}

Text continues without a loop if no cycle of at most 40 tokens stands three times in a row at its end and at least 0.6
of its 4-grams are distinct. Loss and bits are of the saved weights, computed in float32.

## Limits

The model saw nothing but Python, in rows of {row} tokens, and invents names, arguments and whole interfaces. Greedy
text often falls into loops, see the record. It is not tuned to follow instructions. `<|mask|>` (id 1) is in the
vocabulary for drafters and was never trained. Training stops by the clock, so another machine gives other weights.

## Training data

Modules of pinned PyPI wheels, without tests, vendored copies and generated files, at most 0.7 M characters of a
package, fetched and checked by `examples/train_small_target.py prepare`. Files are separated by `<|endoftext|>`.

Held out, for the measurements and `prompts.jsonl`:

{held}

Trained on:

{train}
"""


def build_model(vocabulary: int, layers: int = 16) -> Qwen3_5ForCausalLM:
    """The hybrid with fresh weights."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    sizes = {"vocab_size": vocabulary, "num_hidden_layers": layers, "layer_types": kinds, **SIZES, **HEADS, **GDN}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, eos_token_id=0, pad_token_id=0))
    for mixer in (m for m in model.modules() if isinstance(m, qwen.Qwen3_5GatedDeltaNet)):
        # The library's initial decay forgets within a token or two.
        mixer.dt_bias.data.copy_(torch.logspace(-3, -0.5, mixer.num_v_heads).expm1().log())
        mixer.A_log.data.uniform_(1, 4).log_()
    return model


def read_tokens(path: pathlib.Path, device: str) -> torch.Tensor:
    """The ids of a token file."""
    return torch.from_numpy(np.fromfile(path, np.uint16).astype(np.int32)).to(device)


def loss_of(model: Qwen3_5ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of [B, row + 1] ids."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def make_optimizer(model: Qwen3_5ForCausalLM, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms, biases, decays and convolutions alone."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def save_state(model: Qwen3_5ForCausalLM, path: pathlib.Path, elapsed: float, step: int) -> None:
    """Weights and the place in the schedule, for `--resume`."""
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    torch.save({"weights": weights, "elapsed": elapsed, "step": step}, path)


def train(
    model: Qwen3_5ForCausalLM,
    tokens: torch.Tensor,
    held: torch.Tensor,
    args: argparse.Namespace,
    elapsed: float = 0.0,
    step: int = 0,
) -> tuple[int, float]:
    """Rows at random offsets, a cosine over the clock that starts at `elapsed`; returns steps and the last loss."""
    generator, span = torch.Generator().manual_seed(args.seed + step), torch.arange(args.row + 1, device=tokens.device)
    # Always the same held-out rows, of the training shape, so that nothing is compiled for them.
    fixed = torch.linspace(0, len(held) - args.row - 1, args.batch, device=held.device).long()
    optimizer, first, start, reported, mean = make_optimizer(model, args.lr), step, time.perf_counter(), 0.0, None
    while True:
        done = elapsed + time.perf_counter() - start
        if step > first and (done >= args.seconds or time.perf_counter() - STARTED >= args.limit):
            save_state(model, args.state, done, step)
            return step, mean.item()
        offsets = torch.randint(len(tokens) - args.row, (args.batch,), generator=generator).to(tokens.device)
        factor = min(1, (step - first + 1) / WARMUP) * max(
            0.01, math.cos(math.pi / 2 * min(1, done / args.seconds)) ** 2
        )
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor
        loss = loss_of(model, tokens[offsets[:, None] + span].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() if mean is None else mean.lerp(loss.detach(), 0.02)
        step += 1
        if step == first + 1:  # compilation is not training time
            print(f"first step: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
            start = reported = time.perf_counter()
        if step == first + 20 or (now := time.perf_counter()) - reported >= REPORT:
            known = loss_of(model, held[fixed[:, None] + span].long()).item()
            now = time.perf_counter()
            rate = f"{(now - start) / (step - first - 1) * 1e3:.0f} ms a step"
            print(
                f"step {step}: loss {mean.item():.3f}, held out {known:.3f}, {rate}, {now - STARTED:.0f} s", flush=True
            )
            save_state(model, args.state, elapsed + now - start, step)
            reported = now


def loops(ids: list[int]) -> bool:
    """Whether the ids end in a cycle that stands three times in a row, or hold too few distinct 4-grams."""
    for size in range(1, min(LONGEST, len(ids) // REPEATS) + 1):
        if ids[-size:] * REPEATS == ids[-size * REPEATS :]:
            return True
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) < DISTINCT * len(grams)


@torch.no_grad()
def free_of_loops(model: Qwen3_5ForCausalLM, prompts: list[list[int]], new: int) -> int:
    """How many prompts the model continues greedily by up to `new` tokens without a loop."""
    ids = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, prompts)], True, -1, "left").to(model.device)
    outputs = model.generate(ids.clamp(min=0), attention_mask=(ids >= 0).long(), do_sample=False, max_new_tokens=new)
    outputs = [output[: (output + [0]).index(0)] for output in outputs[:, ids.shape[1] :].tolist()]
    return sum(not loops(output) for output in outputs)


@torch.no_grad()
def held_out_loss(model: Qwen3_5ForCausalLM, held: torch.Tensor, row: int) -> float:
    """Nats a token over non-overlapping rows."""
    rows = held.long().unfold(0, row, row)
    return sum(model(part, labels=part).loss.item() * len(part) for part in rows.split(8)) / len(rows)


def measure(model: Qwen3_5ForCausalLM, args: argparse.Namespace, manifest: dict) -> dict[str, str]:
    """Held-out loss, and how often greedy text runs free of loops."""
    held = read_tokens(args.data / "held.bin", model.device)
    bpe = tokenizers.Tokenizer.from_file(str(args.data / "tokenizer.json"))
    loss, size = held_out_loss(model, held, args.row), manifest["held"]
    starts = np.linspace(0, len(held) - 96, args.prompts).astype(int)
    cuts = [held[start : start + 96].tolist() for start in starts]
    lines = (args.data / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    demo = [bpe.encode(json.loads(line)["prompt"]).ids for line in lines[: args.prompts + args.prompts // 4]]
    return {
        "held-out loss": f"{loss:.3f} nats a token, {size['tokens']} tokens of {size['files']} files",
        "held-out bits": f"{loss / math.log(2) * size['tokens'] / size['bytes']:.3f} a byte",
        "no loop in 128 greedy tokens after 96 held-out tokens": f"{free_of_loops(model, cuts, 128)} of {len(cuts)}",
        "no loop in 96 greedy tokens after a demo prompt": f"{free_of_loops(model, demo, 96)} of {len(demo)}",
    }


def write_card(args: argparse.Namespace, manifest: dict, model: Qwen3_5ForCausalLM, record: dict[str, str]) -> None:
    """The model card."""
    lists = {
        name: "\n".join(f"- {package} ({licence})" for package, licence in manifest[name]["packages"].items())
        for name in ("train", "held")
    }
    prompts = len((args.out / "prompts.jsonl").read_text(encoding="utf-8").splitlines())
    card = CARD.format(
        parameters=model.num_parameters() / 1e6,
        layers=model.config.num_hidden_layers,
        vocabulary=model.config.vocab_size,
        prompts=prompts,
        row=args.row,
        table="\n".join(f"| {name} | {value} |" for name, value in record.items()),
        **lists,
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")


def run_training(args: argparse.Namespace) -> None:
    """Train, save, load again, measure, write the card."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    manifest = json.loads((args.data / "manifest.json").read_text(encoding="utf-8"))
    tokens, held = (read_tokens(args.data / f"{name}.bin", device) for name in ("train", "held"))
    model, elapsed, step = build_model(manifest["vocabulary"], args.layers).to(device), 0.0, 0
    if args.resume:
        state = torch.load(args.state, map_location=device)
        model.load_state_dict(state["weights"], strict=False)  # the tied head is left out
        elapsed, step = state["elapsed"], state["step"]
    torch.set_float32_matmul_precision("high")
    for layer in model.model.layers if device == "cuda" else ():
        layer.compile()
    with mock.patch.multiple(qwen, torch_chunk_gated_delta_rule=chunk_gated_delta_rule, causal_conv1d_fn=causal_conv):
        step, loss = train(model, tokens, held, args, elapsed, step)
    model.to(torch.bfloat16).save_pretrained(args.out, max_shard_size="3500KB")
    wrap(tokenizers.Tokenizer.from_file(str(args.data / "tokenizer.json"))).save_pretrained(args.out)
    shutil.copy(args.data / "prompts.jsonl", args.out)
    torch.set_float32_matmul_precision("highest")
    model = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    shown = {"data": args.data.name, "out": args.out.name} | {name: getattr(args, name) for name in OPTIONS}
    options = " ".join(f"--{name} {value}" for name, value in shown.items())
    chip = f"one {torch.cuda.get_device_name().split()[-1]}" if device == "cuda" else "CPU"
    size = manifest["train"]
    record = {
        "run": f"`python examples/train_small_target.py train {options}`, {time.strftime('%Y-%m-%d')}",
        "on": f"{chip}, torch {torch.__version__}, transformers {transformers.__version__}",
        "text": f"{size['tokens']} tokens, {size['bytes']} bytes, {size['files']} files of {len(size['packages'])} "
        f"packages, sha256 of the token file {size['sha256'][:16]}",
        "steps": f"{step} of {args.batch} rows of {args.row} tokens",
        "training loss": f"{loss:.3f} nats a token, mean over about the last 50 steps",
        **measure(model, args, manifest),
    }
    write_card(args, manifest, model, record)
    print(json.dumps(record, indent=1), f"{time.perf_counter() - STARTED:.0f} s", flush=True)


def make_parser(doc: str, options: dict[str, float]) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """What training scripts of targets take, and the part of it that `train` takes."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    prepare, training = commands.add_parser("prepare"), commands.add_parser("train")
    for command in (prepare, training):
        command.add_argument("--data", type=pathlib.Path, required=True, help="folder of the token files")
    prepare.add_argument(
        "--wheels", type=pathlib.Path, help="folder of the pinned wheels; without it pip fetches them"
    )
    training.add_argument("--out", type=pathlib.Path, required=True, help="folder of the model")
    training.add_argument("--resume", action="store_true", help="go on from OUT.state.pt")
    for name, default in options.items():
        training.add_argument(f"--{name}", type=type(default), default=default)
    return parser, training


def with_state(args: argparse.Namespace) -> argparse.Namespace:
    """The same, with the file that a training goes on from."""
    if args.command == "train":
        args.state = args.out.with_name(args.out.name + ".state.pt")
    return args


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser, training = make_parser(__doc__, OPTIONS)
    training.add_argument("--prompts", type=int, default=32, help="held-out prompts for the loop rate")
    args = parser.parse_args(arguments)
    return with_state(args)


def main() -> None:
    """Prepare the text or train the model."""
    args = parse()
    if args.command == "train":
        run_training(args)
        return
    manifest = write_data(fetched_sources(args.wheels), args.data, VOCABULARY, PROMPTS)
    for name in ("train", "held"):
        print(name, {key: value for key, value in manifest[name].items() if key != "packages"})


if __name__ == "__main__":
    main()
