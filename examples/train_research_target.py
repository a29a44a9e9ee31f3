"""Train the research target: a hybrid language model of Python code with 9.5 M parameters and long-range structure.

It is for experiments with drafters only and ships outside of the package, in examples/research_target. `prepare`
fetches the packages that small_target_corpus.txt pins; `train` learns from them and measures whether the model uses
its long context. The commands behind the folder, and a try on a CPU:

    python examples/train_research_target.py prepare --data research_data
    python examples/train_research_target.py train --data research_data --out examples/research_target
    python examples/train_research_target.py train --data research_data --out tried --seconds 5 --batch 1
        --row 512 --rows 4

Training stops by the clock, as in train_small_target.py, and `--resume` goes on in a later command. It wants an
environment without flash-linear-attention: the backward pass is that of transformers' chunk rule in torch.
"""

import argparse
import json
import time
from unittest import mock

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from research_target_data import PARTS, write_data
from small_target_data import fetched_sources, wrap
from train_small_target import STARTED, make_parser, read_tokens, train, with_state
from train_tiny_target import causal_conv, chunk_gated_delta_rule
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

import ready_hf


OPTIONS = {"seconds": 440.0, "limit": 530.0, "lr": 2e-3, "batch": 32, "row": 2048, "seed": 0}
VOCABULARY, MOST_OF_PACKAGE = 4096, 1_500_000  # tokens, characters
SHORT, STRIDE = 128, 16  # the short context that long-range structure is shown against, and windows for it
LAYERS = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(12)]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 8192, "num_hidden_layers": 12}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True}
GDN = {"linear_num_key_heads": 4, "linear_key_head_dim": 64, "linear_num_value_heads": 4, "linear_value_head_dim": 64}
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

# Research target

A trained hybrid language model of Python code for experiments with drafters: `Qwen3_5ForCausalLM`, {parameters:.2f} M
parameters in bfloat16, 12 layers (three with the gated delta rule, then one with full attention, repeated), 4 heads
with states of 64 x 64, hidden size 256, a byte-level BPE of {vocabulary} tokens, tied embeddings. Made by
`examples/train_research_target.py`. It is no coding assistant.

## Training record

| what | value |
| --- | --- |
{table}

## Does it use long context?

Nats a token on rows of {row} tokens of held-out packages (validation and test), at even offsets, float32 on the saved
weights. "Last {short}" is the same tokens with the {short} to {longest} tokens before them only.

| position in the row | loss |
| --- | --- |
{positions}

## Limits

The model saw nothing but Python. Greedy text often falls into loops; measurements use sampled text or say how many
texts loop. `<|mask|>` (id 1) was never trained. Training stops by the clock, so another machine gives other weights.

## Training data

Modules of pinned PyPI wheels, without tests, vendored copies and generated files, at most {most:.1f} M characters of a
package. Files are separated by `<|endoftext|>`; those of a package stand beside each other.

{parts}
"""


def build_model(vocabulary: int) -> Qwen3_5ForCausalLM:
    """The hybrid with fresh weights."""
    sizes = {"vocab_size": vocabulary, "layer_types": LAYERS, **SIZES, **HEADS, **GDN}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, eos_token_id=0, pad_token_id=0))
    for mixer in (m for m in model.modules() if isinstance(m, qwen.Qwen3_5GatedDeltaNet)):
        # The library's initial decay forgets within a token or two; these remember 3 to 3000 tokens.
        mixer.dt_bias.data.copy_(torch.logspace(-3.5, -0.5, mixer.num_v_heads).expm1().log())
        mixer.A_log.data.zero_()
    return model


@torch.no_grad()
def token_losses(model: Qwen3_5ForCausalLM, rows: torch.Tensor, batch: int) -> torch.Tensor:
    """Nats of every token but the first `[N, T - 1]`, of ids `[N, T]`."""
    found = []
    for part in rows.long().split(batch):
        logits = model(part, use_cache=False).logits[:, :-1].float()
        found.append(
            F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none").view(len(part), -1)
        )
    return torch.cat(found)


def long_range(model: Qwen3_5ForCausalLM, held: torch.Tensor, row: int, rows: int) -> dict[str, float]:
    """Mean loss by position, and of the second half of every row with a short context only."""
    starts = torch.linspace(0, len(held) - row, rows, device=held.device).long()
    text = held[starts[:, None] + torch.arange(row, device=held.device)]
    losses, half, quarter = token_losses(model, text, 8), row // 2, row // 8
    found = {
        f"below {quarter}": losses[:, : quarter - 1].mean().item(),
        f"{quarter} to {half}": losses[:, quarter - 1 : half].mean().item(),
        f"above {half}": losses[:, half:].mean().item(),
    }
    windows = text[:, half - SHORT + 1 :].unfold(1, SHORT + STRIDE, STRIDE).flatten(0, 1)
    compared = windows.shape[0] // rows * STRIDE  # tokens of a row that the windows end with
    short = token_losses(model, windows, 256)[:, SHORT - 1 :]
    found[f"above {half}, the same tokens that the next line has"] = losses[:, half : half + compared].mean().item()
    found[f"above {half}, last {SHORT}"] = short.mean().item()
    return found


def write_card(args: argparse.Namespace, manifest: dict, model: Qwen3_5ForCausalLM, record: dict, found: dict) -> None:
    """The model card, and what it says as JSON."""
    lists = [
        f"{name}:\n\n"
        + "\n".join(f"- {package} ({licence})" for package, licence in manifest[name]["packages"].items())
        for name in ("validation", "test", "train")
    ]
    card = CARD.format(
        parameters=model.num_parameters() / 1e6,
        vocabulary=model.config.vocab_size,
        table="\n".join(f"| {name} | {value} |" for name, value in record.items()),
        positions="\n".join(f"| {name} | {value:.4f} |" for name, value in found.items()),
        row=args.row,
        short=SHORT,
        longest=SHORT + STRIDE - 1,
        most=MOST_OF_PACKAGE / 1e6,
        parts="\n\n".join(lists),
    )
    (args.out / "README.md").write_text(card, encoding="utf-8")
    (args.out / "training.json").write_text(json.dumps({**record, "loss": found}, indent=1) + "\n", encoding="utf-8")


def run_training(args: argparse.Namespace) -> None:
    """Train, save, load again, measure, write the card."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    manifest = json.loads((args.data / "manifest.json").read_text(encoding="utf-8"))
    tokens, *held = (read_tokens(args.data / f"{name}.bin", device) for name in PARTS)
    for name, ids in zip(PARTS, (tokens, *held), strict=True):
        if len(ids) <= args.row:
            raise SystemExit(f"{name}.bin has {len(ids)} tokens, more than --row {args.row} are needed")
    model, elapsed, step = build_model(manifest["vocabulary"]).to(device), 0.0, 0
    if args.resume:
        state = torch.load(args.state, map_location=device, weights_only=True)
        model.load_state_dict(state["weights"], strict=False)  # the tied head is left out
        elapsed, step = state["elapsed"], state["step"]
    torch.set_float32_matmul_precision("high")
    for layer in model.model.layers if device == "cuda" else ():
        layer.compile()
    with mock.patch.multiple(qwen, torch_chunk_gated_delta_rule=chunk_gated_delta_rule, causal_conv1d_fn=causal_conv):
        step, loss = train(model, tokens, held[0], args, elapsed, step)
    model.to(torch.bfloat16).save_pretrained(args.out, max_shard_size="3500KB")
    wrap(tokenizers.Tokenizer.from_file(str(args.data / "tokenizer.json"))).save_pretrained(args.out)
    torch.set_float32_matmul_precision("highest")
    model = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    ready_hf.ensure_patched(model)
    found = long_range(model, torch.cat(held), args.row, args.rows)
    shown = {"data": args.data.name, "out": args.out.name} | {name: getattr(args, name) for name in OPTIONS}
    size = manifest["train"]
    record = {
        "run": "`python examples/train_research_target.py train "
        + " ".join(f"--{name} {value}" for name, value in shown.items())
        + f"`{', resumed' if args.resume else ''}, {time.strftime('%Y-%m-%d')}",
        "on": f"{f'one {torch.cuda.get_device_name().split()[-1]}' if device == 'cuda' else 'CPU'}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}",
        "text": f"{size['tokens']} tokens, {size['bytes']} bytes, {size['files']} files of {len(size['packages'])} "
        f"packages, sha256 of the token file {size['sha256'][:16]}",
        "steps": f"{step} of {args.batch} rows of {args.row} tokens",
        "training loss": f"{loss:.3f} nats a token, mean over about the last 50 steps",
    }
    write_card(args, manifest, model, record, found)
    print(json.dumps({**record, **found}, indent=1), f"{time.perf_counter() - STARTED:.0f} s", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser, training = make_parser(__doc__, OPTIONS)
    training.add_argument("--rows", type=int, default=256, help="held-out rows for the losses by position")
    args = with_state(parser.parse_args(arguments))
    if args.command == "train" and (args.row % 64 or args.row < 4 * SHORT):
        parser.error(f"--row must be a multiple of 64 (a chunk) and at least {4 * SHORT}, got {args.row}")
    return args


def main() -> None:
    """Prepare the text or train the model."""
    args = parse()
    if args.command == "train":
        run_training(args)
        return
    manifest = write_data(fetched_sources(args.wheels, MOST_OF_PACKAGE), args.data, VOCABULARY)
    for name in PARTS:
        print(name, {key: value for key, value in manifest[name].items() if key != "packages"})


if __name__ == "__main__":
    main()
