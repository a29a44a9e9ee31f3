"""Measures what rollback costs on the CPU: a verify forward and its commit against stock forwards of the same model.

    python examples/benchmark_rollback.py --family qwen3_5 --block 8

Every repetition runs, in this order and on copies of the same cache: one plain step, the stock verify forward, the
recorded verify forward, the commit of half the block. Medians over the repetitions; ratios are against the stock
verify forward of the same run.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import ready_hf
from ready_hf.target import CACHE_NAME


LAYER_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
SHAPE = {"vocab_size": 1024, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def qwen3_5() -> Any:
    """Gated delta rule: 16 value heads of 128 x 128, 8 key heads."""
    return transformers.Qwen3_5TextConfig(
        layer_types=LAYER_TYPES,
        intermediate_size=2816,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        **SHAPE,
        **SPECIAL,
    )


def bamba() -> Any:
    """Mamba-2: 32 heads of 64 x 128."""
    return transformers.BambaConfig(
        attn_layer_indices=[3, 7],
        intermediate_size=2816,
        num_key_value_heads=2,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        **SHAPE,
        **SPECIAL,
    )


FAMILIES = {"qwen3_5": qwen3_5, "bamba": bamba}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds and result of one call."""
    start = time.perf_counter()
    result = function()
    return 1e3 * (time.perf_counter() - start), result


@torch.no_grad()
def measure(model: PreTrainedModel, block: int, context: int, repetitions: int) -> dict[str, list[float]]:
    """Milliseconds per repetition of the plain step, the stock verify, the recorded verify and the commit."""
    prompt = torch.randint(0, 1024, (1, context))
    draft = torch.randint(0, 1024, (1, block))
    positions = torch.arange(context, context + block)[None]
    prefilled = getattr(model(prompt, use_cache=True, position_ids=torch.arange(context)[None]), CACHE_NAME)
    times: dict[str, list[float]] = {"plain step": [], "stock verify": [], "recorded verify": [], "commit": []}

    def forward(cache: Any, length: int) -> Any:
        inputs = {"position_ids": positions[:, :length], "use_cache": True, CACHE_NAME: cache}
        return model(draft[:, :length], **inputs)

    for repetition in range(repetitions + 2):
        measured = {}
        step_cache, stock_cache, cache = (copy.deepcopy(prefilled) for _ in range(3))
        measured["plain step"], _ = timed(lambda cache=step_cache: forward(cache, 1))
        measured["stock verify"], _ = timed(lambda cache=stock_cache: forward(cache, block))
        rollback = ready_hf.Rollback(cache)

        def recorded(rollback: ready_hf.Rollback = rollback, cache: Any = cache) -> None:
            with rollback.recording(block):
                forward(cache, block)

        measured["recorded verify"], _ = timed(recorded)
        measured["commit"], _ = timed(lambda rollback=rollback: rollback.commit(block // 2))
        rollback.close()
        if repetition >= 2:  # the first two warm up
            for name, value in measured.items():
                times[name].append(value)
    return times


def main() -> None:
    """Builds the model, measures, prints one line per phase."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_5")
    parser.add_argument("--block", type=int, default=8, help="tokens of a verify forward")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=40)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[arguments.family](), dtype=torch.float32).eval()
    ready_hf.ensure_patched(model)
    times = measure(model, arguments.block, arguments.context, arguments.repetitions)
    print(
        f"{arguments.family}, block {arguments.block}, {arguments.repetitions} repetitions, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    stock = statistics.median(times["stock verify"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:16} {median:8.2f} ms  {100 * median / stock:6.1f} % of the stock verify forward")


if __name__ == "__main__":
    main()
