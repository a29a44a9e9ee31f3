"""Case C75: what a rollback copies, and its share of a round."""

import json
from collections import Counter

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import ready_hf
from support import (
    DEVICES,
    cache_argument,
    cache_of,
    partly_right,
    random_prompt,
    states,
    trained_target,
    with_lively_weights,
)


COPIES = ("clone", "copy_", "_to_copy")
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "vocab_size": 97}
SMALL |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 3072, "vocab_size": 32000}
LARGE |= {"linear_num_key_heads": 8, "linear_num_value_heads": 16}


class CountedCopies(TorchDispatchMode):
    """Bytes that were copied, by operation."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES:
            self.bytes[name] += found.nbytes
        return found


def test_c75_states_are_kept_by_reference_and_only_windows_are_copied():
    target = trained_target()
    cache = cache_of(target(random_prompt(40, vocab_size=500), use_cache=True))
    rollback = ready_hf.Rollback(cache)
    recurrent = [layer for layer in cache.layers if hasattr(layer, "_records")]
    before = [layer.recurrent_states[0] for layer in recurrent]
    windows = sum(x.nbytes for name, x in states(cache).items() if "conv" in name)
    positions = torch.arange(40, 48)[None]
    with torch.no_grad(), rollback.recording(8):
        target(random_prompt(8, vocab_size=500), position_ids=positions, use_cache=True, **cache_argument(cache))
    assert len(recurrent) == 4
    assert all(layer._records[0].base is state for layer, state in zip(recurrent, before, strict=True))
    with CountedCopies() as copies:
        rollback.commit(5)
    rollback.close()
    assert 0 < copies.bytes.total() <= windows
    assert windows < sum(state.nbytes for state in before)


def random_hybrid(device):
    """A few hundred million parameters on a GPU."""
    config = transformers.Qwen3_5TextConfig(
        **(LARGE if device == "cuda" else SMALL),
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=128 if device == "cuda" else 32,
        linear_value_head_dim=128 if device == "cuda" else 32,
        eos_token_id=None,
        pad_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = with_lively_weights(model.cpu()).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    ready_hf.ensure_patched(model)
    return model


@pytest.mark.parametrize("device", DEVICES)
def test_c75_fifty_rounds_of_a_random_hybrid(device, tmp_path):
    """Nothing of a state's size leaves the device; the commit is a small part of a round on a GPU."""
    model = random_hybrid(device)
    prompt = random_prompt(32).to(device)
    options = {"do_sample": False, "max_new_tokens": 110}
    drafts = partly_right(model.generate(prompt, **options), 0.5, block_size=7)
    model.generate(prompt, assistant_model=drafts, do_sample=False, max_new_tokens=8)  # compiles
    with ready_hf.record_stats() as stats:
        output = model.generate(prompt, assistant_model=drafts, return_dict_in_generate=True, **options)
    kept = sum(x.nbytes for name, x in states(cache_of(output)).items() if "recurrent" in name)
    rounds = stats.draft_seconds + stats.verify_seconds + stats.commit_seconds
    share = stats.commit_seconds / rounds
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as found:
        model.generate(prompt, assistant_model=drafts, **options)
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    to_host = [event["args"].get("bytes", 0) for event in events if "DtoH" in event.get("name", "")]
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"\nC75 on {device}: {millions:.0f} M parameters, {stats.rounds} rounds of "
        f"{1e3 * rounds / stats.rounds:.2f} ms, commit {1e3 * stats.commit_seconds / stats.rounds:.2f} ms "
        f"({share:.1%}); {kept / 1e6:.2f} MB of states, {sum(to_host)} bytes in {len(to_host)} copies to the host, "
        f"largest {max(to_host, default=0)}"
    )
    assert stats.rounds >= 50
    assert max(to_host, default=0) <= 1024  # tokens and flags
    if device == "cuda":
        assert to_host, "not one copy was seen: does the profiler see this GPU?"
        assert share < 0.1
