"""Drafted generation on a GPU with the Triton kernels and without: tokens, states, near ties, time by phase.

    python examples/benchmark_generate.py --layers 64

First the small trained target with its shipped drafters in float32: tokens must be those of plain decoding, with
kernels and without. Then a model of the 27B shape with random weights in bfloat16 and drafts that are right with
probability 0.7: the committed states against a fresh forward, and wherever drafted and plain tokens part, how close
the two best logits were, against how much two plain ways to compute them (step by step, all at once) differ there.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from benchmark_gpu import (
    DEVICE,
    cache_of,
    large_model,
    package_version,
    recurrent_states,
    synchronize,
    time_large,
    worst,
)
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

import ready_hf
from ready_hf.demo_prompts import read_prompts
from ready_hf.kernels import launches, state_read
from ready_hf.target import CACHE_NAME, RecurrentLayer, recurrent_layers, state_views


class PartlyRight(CandidateGenerator):
    """Drafts of a known continuation, each right with probability `share`; keeps the committed cache in sight.

    It also reads the committed states of all layers, as a reader of `block - 1` queries a head would, and times that.
    """

    is_ready_drafter = True
    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {}

    def __init__(self, known: torch.Tensor, share: float, block: int, layers: list[RecurrentLayer]):
        self.known, self.share, self.block, self.layers = known, share, block, layers
        self.queries: torch.Tensor | None = None
        self.read_seconds = 0.0
        self.generator = torch.Generator().manual_seed(0)
        self.seen: tuple[int, list[torch.Tensor]] = (0, [])

    def get_candidate_generator(self, *args: Any) -> CandidateGenerator:
        """Itself."""
        return self

    def get_candidates(self, input_ids: torch.Tensor, **context: Any) -> tuple[torch.Tensor, None]:
        """The input and a block."""
        cache = cache_of(context["model_outputs"])
        self.read(cache)
        if input_ids.shape[1] > 160 and not self.seen[0]:  # once, in the middle
            self.seen = input_ids.shape[1] - 1, recurrent_states(cache)
        drafts = self.known[:, input_ids.shape[1] : input_ids.shape[1] + self.block].clone()
        wrong = (torch.rand(drafts.shape, generator=self.generator) >= self.share).to(drafts.device)
        drafts = torch.where(wrong, (drafts + 1) % 1000, drafts)
        return torch.cat([input_ids, drafts], dim=1), None

    def read(self, cache: Any) -> None:
        """Reads the states where they lie; the first round, which compiles, is not counted."""
        views = state_views(cache, self.layers)
        if self.queries is None:
            heads, keys = views[0].shape[1:3]
            self.queries = torch.randn(len(views), heads, self.block - 1, keys, device=views[0].device)
            state_read(views, self.queries)
        synchronize()
        start = time.perf_counter()
        state_read(views, self.queries)
        synchronize()
        self.read_seconds += time.perf_counter() - start

    def update_candidate_strategy(self, *args: Any) -> None:
        """Nothing to learn."""


def small_target(prompts: int) -> bool:
    """Tokens of the shipped models, kernels on and off; prints one line per drafter and returns whether all agree."""
    path, same = ready_hf.small_target_path(), True
    tokenizer = AutoTokenizer.from_pretrained(path)
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE).eval()
    texts = [prompt.text for prompt in read_prompts(Path(path) / "prompts.jsonl")[:prompts]]
    for kind in ("dspark", "ready") if prompts else ():
        drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path(kind), dtype=torch.float32).to(DEVICE).eval()
        for backend in ("torch", "auto"):
            ready_hf.set_kernels(backend)
            launches.clear()
            equal, seconds = 0, {"plain": 0.0, "drafted": 0.0}
            with ready_hf.record_stats() as stats:
                for text in texts:
                    inputs = tokenizer(text, return_tensors="pt").to(DEVICE)
                    found = {}
                    for name, options in (("plain", {}), ("drafted", {"assistant_model": drafter})):
                        synchronize()
                        start = time.perf_counter()
                        found[name] = target.generate(**inputs, max_new_tokens=96, do_sample=False, **options)
                        synchronize()
                        seconds[name] += time.perf_counter() - start
                    equal += torch.equal(found["plain"], found["drafted"])
            same &= equal == len(texts)
            speed, rate = seconds["plain"] / seconds["drafted"], stats.tokens_per_forward
            line = f"small target, {kind}, kernels {backend}: {equal} of {len(texts)} identical, {rate:.2f} tokens per"
            print(f"{line} forward, {speed:.2f} times plain, launches {dict(launches)}", flush=True)
    ready_hf.set_kernels("auto")
    return same


@torch.no_grad()
def tie(model: PreTrainedModel, ids: torch.Tensor) -> tuple[float, float]:
    """At the end of `ids`: margin of the two best logits, and the largest difference of two plain ways to get them."""
    cache = cache_of(model(ids[:, :64], use_cache=True, logits_to_keep=1))
    for i in range(64, ids.shape[1]):
        out = model(ids[:, i : i + 1], use_cache=True, **{CACHE_NAME: cache})
    stepped, whole = out.logits[0, -1].float(), model(ids, logits_to_keep=1).logits[0, -1].float()
    best = stepped.topk(2).values
    return float(best[0] - best[1]), float((stepped - whole).abs().max())


@torch.no_grad()
def large(model: PreTrainedModel, block: int, tokens: int, prompts: int, backends: list[str]) -> bool:
    """Near ties, states and the time of a round; returns whether every parting is a near tie."""
    ok = True
    for seed in range(prompts):
        torch.manual_seed(seed)
        prompt = torch.randint(0, 1000, (1, 64), device=DEVICE)
        start = time.perf_counter()
        plain = model.generate(prompt, max_new_tokens=tokens, do_sample=False)
        synchronize()
        step = (time.perf_counter() - start) / tokens
        for backend in backends:
            ready_hf.set_kernels(backend)
            drafter = PartlyRight(plain, 0.7, block, recurrent_layers(model))
            with ready_hf.record_stats() as stats:
                drafted = model.generate(prompt, max_new_tokens=tokens, do_sample=False, assistant_model=drafter)
            parted = (plain != drafted)[0].nonzero()
            fate = "identical"
            if len(parted):
                where = int(parted[0])
                margin, spread = tie(model, plain[:, :where])
                ok &= margin <= 2 * spread
                fate = f"part at token {where - 64}: margin {margin:.4f}, two plain ways differ by {spread:.4f}"
            seen, states = drafter.seen
            fresh = recurrent_states(cache_of(model(drafted[:, :seen], use_cache=True, logits_to_keep=1)))
            phases = {
                name: getattr(stats, f"{name}_seconds") / stats.rounds * 1e3 for name in ("draft", "verify", "commit")
            }
            phases["read"] = drafter.read_seconds / stats.rounds * 1e3  # a part of draft
            print(
                f"  prompt {seed}, kernels {backend:5}: {fate}; states {worst(states, fresh):.1e}; "
                f"{stats.tokens_per_forward:.2f} tokens per forward; plain step {step * 1e3:.1f} ms; a round: "
                + ", ".join(f"{name} {value:.2f}" for name, value in phases.items()),
                flush=True,
            )
    ready_hf.set_kernels("auto")
    return ok


def main() -> int:
    """Exit status 1 if tokens differ where they must not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64, help="of the large model; 0 leaves it out")
    parser.add_argument("--small-prompts", type=int, default=6, help="of the small target; 0 leaves it out")
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--time-blocks", type=int, nargs="*", default=[8, 16], help="blocks to time a forward of")
    parser.add_argument("--kernels", nargs="+", default=["torch", "auto"], help="backends of the large model's rounds")
    parser.add_argument("--cudnn-attention", action="store_true", help="leave torch the choice of cuDNN's attention")
    args = parser.parse_args()
    names = ("torch", "triton", "transformers", "fla-core")
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    print(device, *(f"{name} {package_version(name)}" for name in names), flush=True)
    # cuDNN's attention takes 5 to 13 ms of host time for every new length, and every round has one
    torch.backends.cuda.enable_cudnn_sdp(args.cudnn_attention)
    ok = small_target(args.small_prompts)
    if args.layers:
        model = large_model(args.layers)
        ready_hf.ensure_patched(model)
        for block in args.time_blocks:
            times = time_large(model, block, 512, 7)
            shown = [f"{name} {ms:.1f} ms ({ms / times['plain step']:.2f} steps)" for name, ms in times.items()]
            print(f"block {block}: {', '.join(shown)}", flush=True)
        ready_hf.set_kernels("auto")
        print(f"{args.layers} layers of the 27B shape, blocks of {args.block}, drafts right with 0.7", flush=True)
        ok &= large(model, args.block, args.tokens, args.prompts, args.kernels)
    print("ok" if ok else "WRONG", flush=True)
    return int(not ok)


if __name__ == "__main__":
    raise SystemExit(main())
