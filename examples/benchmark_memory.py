"""Memory of training steps, estimated (`ready_hf.training_memory`) and measured: growth of the process's peak.

    python examples/benchmark_memory.py states logits backbone mask bf16 checkpointing

Random models on the CPU. Every case is ruled by another part of the step, and runs in a process of its own after a
small training that loads what training loads.
"""

import argparse
import subprocess
import sys
import tempfile

import torch
from peak_memory import peak
from transformers import AutoModelForCausalLM, PrinterCallback, Qwen3_5TextConfig
from transformers.utils import logging

from ready_hf import ReadyDrafterConfig, ReadyDrafterModel, ensure_patched
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments


WARM_UP = {"vocab": 97, "hidden": 64, "heads": 4, "channels": 16, "layers": 2, "rows": 2, "length": 40, "anchors": 3}
BACKBONE = {"hidden": 512, "heads": 4, "channels": 32, "layers": 3, "rows": 2, "length": 512, "anchors": 64}
CASES = {
    "states": {"hidden": 128, "heads": 8, "channels": 64, "layers": 5, "rows": 1, "length": 512, "anchors": 256}
    | {"reader": True},
    "logits": {"vocab": 30_000, "hidden": 256, "heads": 4, "channels": 32, "layers": 3}
    | {"rows": 2, "length": 256, "anchors": 32},
    "backbone": BACKBONE,
    "mask": {"hidden": 64, "heads": 4, "channels": 16, "layers": 3, "rows": 1, "length": 1024, "anchors": 384},
    "bf16": {**BACKBONE, "bf16": True},
    "checkpointing": {**BACKBONE, "gradient_checkpointing": True},
}


def new_target(vocab: int, hidden: int, heads: int, channels: int, layers: int) -> torch.nn.Module:
    """Of the Qwen3.5 family: all layers but the last are recurrent."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        num_hidden_layers=layers,
        layer_types=["linear_attention"] * (layers - 1) + ["full_attention"],
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_key_head_dim=channels,
        linear_value_head_dim=channels,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ensure_patched(target)
    return target


def measure(
    hidden: int,
    heads: int,
    channels: int,
    layers: int,
    rows: int,
    length: int,
    anchors: int,
    vocab: int = 500,
    reader: bool = False,
    **options: bool,
) -> tuple[int, int]:
    """Bytes above the weights of target and drafter, estimated and measured, of two steps."""
    torch.manual_seed(0)
    target = new_target(vocab, hidden, heads, channels, layers)
    sizes = {"mask_token_id": 1, "block_size": 8, "num_hidden_layers": 2}
    drafter = ReadyDrafterModel(ReadyDrafterConfig.for_target(target, reader=reader, **sizes))
    data = [{"input_ids": torch.randint(3, vocab, (length,))} for _ in range(2 * rows)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ReadyTrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=rows,
            num_anchors=anchors,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        trainer = ReadyTrainer(drafter, arguments, target=target, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        before, estimate = peak(), trainer.memory(rows, length)
        trainer.train()
    return estimate.total - estimate.drafter - estimate.target, peak() - before


def main() -> None:
    """One line per case: its name, bytes estimated, bytes measured, estimated / measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for case in args.cases:
        if len(args.cases) > 1:
            subprocess.run([sys.executable, __file__, case], check=True)
        else:
            measure(**WARM_UP)
            estimated, measured = measure(**CASES[case])
            print(case, estimated, measured, f"{estimated / measured:.2f}", flush=True)


if __name__ == "__main__":
    main()
