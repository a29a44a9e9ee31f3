"""Checks and measures rollback on a GPU: states, tokens, and the cost of verify and commit at the size of a 27B model.

    python examples/benchmark_gpu.py --layers 64

Correctness comes first and ends the run if it fails. Times are medians of `--repetitions` alternated runs, each waited
for. The large model has random weights: no timing here depends on their values.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ready_hf
from ready_hf.target import CACHE_NAME


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the CPU only to try the script out
PROMPT = "<file>\n{code}\n</file>\n# Rename total to amount\n<edited>\n"
CODE = "\n".join(f"def step_{i}(total, rate):\n    total = total + rate * {i}\n    return total\n" for i in range(6))
TINY = {
    "vocab_size": 97,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]


def tiny_qwen3_5() -> Any:
    """Gated delta rule, K != V."""
    return transformers.Qwen3_5TextConfig(
        layer_types=LAYER_TYPES,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        **TINY,
    )


def tiny_kimi_linear() -> Any:
    """KDA."""
    return transformers.KimiLinearConfig(
        layer_types=LAYER_TYPES,
        mlp_layer_types=["dense"] * 4,
        moe_intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=4,
        **{**TINY, "num_key_value_heads": 4},
    )


def tiny_bamba() -> Any:
    """Mamba-2."""
    return transformers.BambaConfig(
        attn_layer_indices=[2],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=64,
        mamba_expand=2,
        mamba_chunk_size=32,
        **TINY,
    )


def cache_of(outputs: Any) -> Any:
    """The cache of a model output, whatever this transformers calls it."""
    return getattr(outputs, CACHE_NAME)


def recurrent_states(cache: Any) -> list[torch.Tensor]:
    """Every recurrent state of a cache, cloned."""
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    return [s.clone() for layer in layers for s in layer.recurrent_states.values() if s is not None]


@torch.no_grad()
def state_errors(model: PreTrainedModel, rounds: int = 60) -> tuple[float, float]:
    """Worst relative L2 errors after random rounds, against stepping the same tokens one by one.

    First that of the committed states, then that of one long stock forward: the kernels' own rounding.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 97, (1, 13), generator=generator).to(DEVICE)
    drafted = cache_of(model(ids, use_cache=True, position_ids=positions(0, 13)))
    stepped = copy.deepcopy(drafted)
    rollback = ready_hf.Rollback(drafted)
    for _ in range(rounds):
        length = int(torch.randint(2, 18, (1,), generator=generator))
        keep = int(torch.randint(1, length + 1, (1,), generator=generator))
        block = torch.randint(0, 97, (1, length), generator=generator).to(DEVICE)
        start = ids.shape[1]
        with rollback.recording(length):
            model(block, use_cache=True, position_ids=positions(start, length), **{CACHE_NAME: drafted})
        rollback.commit(keep)
        for k in range(keep):
            model(block[:, k : k + 1], use_cache=True, position_ids=positions(start + k, 1), **{CACHE_NAME: stepped})
        ids = torch.cat([ids, block[:, :keep]], dim=1)
    rollback.close()
    whole = cache_of(model(ids, use_cache=True, position_ids=positions(0, ids.shape[1])))
    return worst(recurrent_states(drafted), recurrent_states(stepped)), worst(
        recurrent_states(whole), recurrent_states(stepped)
    )


def positions(start: int, length: int) -> torch.Tensor:
    """Position ids `[1, length]`."""
    return torch.arange(start, start + length, device=DEVICE)[None]


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Largest relative L2 difference."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def divergence(model: PreTrainedModel, ids: torch.Tensor, tokens: int) -> str:
    """Drafted against plain greedy: identical, or where they part and how close the two best logits were there."""
    plain = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    with ready_hf.record_stats() as stats:
        drafted = model.generate(
            ids, max_new_tokens=tokens, do_sample=False, assistant_model=ready_hf.PromptLookupDrafter()
        )
    length = min(plain.shape[1], drafted.shape[1])
    differing = (plain[0, :length] != drafted[0, :length]).nonzero()
    rate = f"{stats.tokens_per_forward:.2f} tokens per forward"
    if not len(differing) and plain.shape == drafted.shape:
        return f"identical over {plain.shape[1] - ids.shape[1]} tokens, {rate}"
    where = int(differing[0])
    logits = model(plain[:, :where]).logits[0, -1].float().topk(2).values
    return f"part at new token {where - ids.shape[1]}, top-2 margin {float(logits[0] - logits[1]):.4f}, {rate}"


def synchronize() -> None:
    """Waits for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def alternated(functions: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Median milliseconds of each function, run in turn: what a host is busy with then hits all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(repetitions + 3):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            function()
            synchronize()
            if repetition >= 3:  # the first ones warm up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


@torch.no_grad()
def large_model(layers: int) -> PreTrainedModel:
    """A model of the Qwen3.5-27B shape in bfloat16 with random weights."""
    folder = Path(__file__).parent.parent / "hub_configs" / "qwen3.5-27b-shape"
    config = json.loads((folder / "target.json").read_text())["config"] | {"num_hidden_layers": layers}
    config["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    torch.set_default_dtype(torch.float32)
    model.to_empty(device=DEVICE)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02)
    decoder = model.get_decoder()
    decoder.rotary_emb = type(decoder.rotary_emb)(decoder.config).to(DEVICE)  # its buffers are not in the state dict
    return model.eval()


@torch.no_grad()
def time_large(model: PreTrainedModel, block: int, context: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of a plain step, the stock verify forward and recorded ones with all or half of the block kept."""
    prompt = torch.randint(0, 1000, (1, context), device=DEVICE)
    stock = cache_of(model(prompt, use_cache=True, logits_to_keep=1))
    cache = copy.deepcopy(stock)
    rollback = ready_hf.Rollback(cache)
    draft = torch.randint(0, 1000, (1, block), device=DEVICE)

    def forward(cache: Any, length: int) -> None:
        inputs = {"use_cache": True, CACHE_NAME: cache, "position_ids": positions(context, length)}
        model(draft[:, :length], **inputs)

    def recorded(keep: int, backend: str) -> None:
        ready_hf.set_kernels(backend)
        with rollback.recording(block):
            forward(cache, block)
        rollback.commit(keep)

    # every call leaves its cache longer: by a few hundred tokens in all, of no weight beside the context
    times = alternated(
        {
            "plain step": lambda: forward(stock, 1),
            "stock verify": lambda: forward(stock, block),
            "recorded verify, all kept": lambda: recorded(block, "auto"),
            "recorded verify, half kept": lambda: recorded(block // 2, "auto"),
            "the same, no kernels": lambda: recorded(block // 2, "torch"),
        },
        repetitions,
    )
    rollback.close()
    return times


def check(limit: float) -> bool:
    """Prints state errors and token identity; returns whether every state is within `limit`."""
    passed = True
    for build in (tiny_qwen3_5, tiny_kimi_linear, tiny_bamba):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(build(), dtype=torch.float32).to(DEVICE).eval()
        ready_hf.ensure_patched(model)
        drafted, whole = state_errors(model)
        passed &= drafted <= limit
        print(
            f"{build.__name__[5:]:12} float32, committed against stepped states {drafted:.1e} "
            f"(one long forward against stepped: {whole:.1e})",
            flush=True,
        )
    path = ready_hf.tiny_target_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(PROMPT.format(code=CODE), return_tensors="pt").input_ids.to(DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE).eval()
        print(f"trained fixture, {dtype}: {divergence(model, ids, 256)}", flush=True)
    return passed


def package_version(name: str) -> str:
    """A package's version, or that it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def main() -> None:
    """Checks, then measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--limit", type=float, default=5e-3, help="largest error of a committed state")
    arguments = parser.parse_args()
    names = ("torch", "triton", "transformers", "fla-core")
    print(
        torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        *(f"{name} {package_version(name)}" for name in names),
        flush=True,
    )
    if not check(arguments.limit):
        raise SystemExit("state errors are above the limit: nothing was timed")
    model = large_model(arguments.layers)
    ready_hf.ensure_patched(model)
    for block in (4, 8, 16):
        times = time_large(model, block, arguments.context, arguments.repetitions)
        for name, value in times.items():
            ratio = value / times["plain step"]
            print(
                f"{arguments.layers} layers, block {block:2}: {name:27} {value:7.1f} ms, {ratio:.2f} plain steps",
                flush=True,
            )
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main()
