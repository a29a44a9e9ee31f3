"""Accepted length of saved drafters in decoding at temperature 1, without the noise of drawing drafts.

    python examples/ablation_rounds.py drafters/dspark drafters/bilinear_8_gate_layers --json rounds.json

On a text that the target drew itself, speculative sampling would have accepted token i as a draft with probability
min(1, q_i / p_i), whatever else happened. So the expected number of rounds from anchor a to the end of the text is

    f(a) = 1 + sum_k P(k drafts are accepted at a) f(a + k + 1)

and tokens over rounds is what decoding reaches, with rounds where they really begin: after rejections, at places that
are harder than average. All drafters are measured on the same texts (ablation_text.py): differences are paired.
"""

import argparse
import json
import pathlib
import time

import torch
from on_policy_text import check_least, read_rows
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import ready_hf
from ready_hf.features import DraftingBatch, FrozenTarget
from ready_hf.intervals import Estimate, bootstrap, finite, ratio


TARGET = pathlib.Path(__file__).with_name("research_target")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def survival(frozen: FrozenTarget, drafter: torch.nn.Module, batch: DraftingBatch) -> torch.Tensor:
    """Probabilities `[B, A, G]` that the text's own tokens are accepted as drafts 1 to k at the anchors of a batch."""
    outputs = drafter(
        noise_embeds=batch.noise_embeds.to(drafter.dtype),
        context_hidden_states=batch.context_hidden_states.to(drafter.dtype),
        anchor_positions=batch.anchor_positions,
        states=batch.states if drafter.config.has_reader else None,
        use_cache=False,
    )
    hidden_states = outputs.last_hidden_state.unflatten(1, batch.labels.shape[1:])
    drafted, _ = drafter.draft_logits(hidden_states, batch.previous_ids, frozen.head)
    wanted = frozen.logits(batch.target_hidden_states)
    of_label = [x.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0] for x in (drafted, wanted)]
    return (of_label[0] - of_label[1]).clamp(max=0).exp().cumprod(-1)


def shared_targets(target: PreTrainedModel, drafters: dict[str, torch.nn.Module]) -> list[tuple[FrozenTarget, list]]:
    """Drafters that can be served by the same forward of the target, with the target as they need it."""
    groups: dict[tuple, list[str]] = {}
    for name, drafter in drafters.items():
        config = drafter.config
        key = (config.block_size, config.mask_token_id, tuple(config.target_layer_ids))
        groups.setdefault(key, []).append(name)
    found = []
    for names in groups.values():
        configs = [drafters[name].config for name in names]
        read = {tuple(config.state_layer_ids) for config in configs if config.has_reader}
        if len(read) > 1:
            raise SystemExit(f"{', '.join(names)} read states of different layers: measure them one at a time")
        found.append((FrozenTarget(target, next((c for c in configs if c.has_reader), configs[0])), names))
    return found


def expected_rounds(survived: torch.Tensor) -> float:
    """f of the first anchor, for anchors that stand next to each other `[A, G]`; a block may end behind the last."""
    count, size = survived.shape
    rounds = torch.zeros(count + size + 1, dtype=torch.float64)
    ends = torch.cat([survived.new_ones(count, 1), survived, survived.new_zeros(count, 1)], dim=1).double().cpu()
    exactly = ends[:, :-1] - ends[:, 1:]  # [A, G + 1]
    for anchor in range(count - 1, -1, -1):
        rounds[anchor] = 1 + (exactly[anchor] * rounds[anchor + 1 : anchor + size + 2]).sum()
    return float(rounds[0])


def numbers(estimate: Estimate) -> dict[str, float | None]:
    """As JSON has them: a single row has no interval."""
    return {name: finite(value) for name, value in vars(estimate).items()}


def main() -> None:
    """One line per drafter, with intervals over the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafters", nargs="+", type=pathlib.Path, help="folders; the first one is compared with")
    parser.add_argument("--target", type=pathlib.Path, default=TARGET)
    parser.add_argument(
        "--text", type=pathlib.Path, default=TARGET / "text", help="folder that ablation_text.py wrote"
    )
    parser.add_argument("--part", choices=["validation", "test"], default="validation")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    for name, default in {"rows": 128, "new": 512, "anchors": 128, "batch": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    check_least(args, {"rows": 1, "new": 2, "anchors": 1, "batch": 1})
    found = torch.from_numpy(read_rows(args.text / f"{args.part}.npy"))
    rows = found[torch.linspace(0, len(found) - 1, min(args.rows, len(found))).round().long()].long().to(DEVICE)
    if args.new >= rows.shape[1]:
        raise SystemExit(f"--new {args.new} of rows of {rows.shape[1]} tokens leaves no prompt: give a smaller number")
    if missing := [str(path) for path in args.drafters if not (path / "config.json").is_file()]:
        raise SystemExit(f"no drafter in {', '.join(missing)}: name folders that ablate_reader.py --save wrote")
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(DEVICE).eval()
    ready_hf.ensure_patched(target)
    drafters = {
        path.name: AutoModel.from_pretrained(path, dtype=torch.float32).to(DEVICE).eval() for path in args.drafters
    }
    largest = max(drafter.config.block_size for drafter in drafters.values())
    if args.new < largest + 2:
        raise SystemExit(f"--new must be at least {largest + 2}, for a block of {largest}, got {args.new}")
    groups = shared_targets(target, drafters)
    counts: dict[str, list[list[float]]] = {name: [] for name in drafters}
    started = time.perf_counter()
    for ids in rows.split(args.batch):
        anchors = torch.arange(ids.shape[1] - args.new, ids.shape[1] - largest - 1, device=DEVICE)
        for frozen, names in groups:
            parts: dict[str, list[torch.Tensor]] = {name: [] for name in names}
            for part in anchors.split(args.anchors):
                with torch.no_grad():
                    batch = frozen.batch(ids, part.expand(len(ids), -1))
                for name in names:
                    parts[name].append(survival(frozen, drafters[name], batch))
            for name in names:
                for survived in torch.cat(parts[name], dim=1):
                    counts[name].append([len(anchors), expected_rounds(survived)])
        done = len(counts[next(iter(counts))])
        if done == args.batch or done % 16 < args.batch:
            print(f"{done} of {len(rows)} rows, {time.perf_counter() - started:.0f} s", flush=True)
    first, tasks = next(iter(counts)), [args.part] * len(rows)
    record = {}
    for name, mine in counts.items():
        reached = bootstrap(mine, tasks, ratio(0, 1), seed=0, resamples=2000)[args.part]
        both = [[*a, *b] for a, b in zip(mine, counts[first], strict=True)]
        gain = bootstrap(both, tasks, lambda x: x[..., 3] / x[..., 1] - 1, seed=0, resamples=2000)[args.part]
        record[name] = {
            "tokens_per_forward": numbers(reached),
            "gain": numbers(gain),
            "rounds_by_row": [r for _, r in mine],
        }
        print(f"{name:60} {reached.value:.3f} [{reached.low:.3f}, {reached.high:.3f}]", end="  ")
        print(f"{gain.value * 100:+.1f} % [{gain.low * 100:+.1f}, {gain.high * 100:+.1f}]", flush=True)
    args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
