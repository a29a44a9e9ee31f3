"""The fused verify forward against the mixer's own, and every reason to leave a mixer alone."""

import copy

import pytest
import torch

import ready_hf
from ready_hf import fused_mixer, kernels, ops
from ready_hf.target import MixerCall, recurrent_layers
from support import cache_argument, cache_of, random_prompt, states, tiny_target, worst_error


pytest.importorskip("triton")


@pytest.fixture
def forced(monkeypatch):
    """Kernels on, and counted from zero."""
    monkeypatch.setattr(ops, "_backend", "triton")
    kernels.launches.clear()
    return kernels.launches


def verified(model, dtype=torch.float32, length=5, **inputs):
    """Logits and cache of one recorded block, all of it kept."""
    model = copy.deepcopy(model).to(dtype)
    ready_hf.ensure_patched(model)
    cache = cache_of(model(random_prompt(7), use_cache=True))
    rollback = ready_hf.Rollback(cache)
    with rollback.recording(length):
        positions = torch.arange(7, 7 + length)[None]
        out = model(random_prompt(length, seed=3), position_ids=positions, **cache_argument(cache), **inputs)
    rollback.commit(length)
    rollback.close()
    return out.logits.detach(), cache


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@torch.no_grad()
def test_a_fused_block_is_that_of_the_mixer(family, dtype, tolerance, forced):
    logits, cache = verified(tiny_target(family), dtype)
    assert forced["verify_rule"] == forced["verify_conv"] == len(recurrent_layers(tiny_target(family)))
    ops.set_kernels("torch")
    expected, plain = verified(tiny_target(family), dtype)
    assert float((logits - expected).norm() / expected.norm()) <= tolerance
    assert worst_error(states(cache), states(plain)) <= tolerance
    windows = [[layer.conv_states[0] for layer in c.layers if hasattr(layer, "conv_states")] for c in (cache, plain)]
    for ours, stock in zip(*windows, strict=True):
        assert float((ours - stock).norm() / stock.norm()) <= tolerance


@pytest.mark.contract
def test_known_mixers_are_those_of_transformers():
    """A renamed class would silently lose its fast path."""
    for module, name in fused_mixer.KNOWN_MIXERS:
        imported = pytest.importorskip(module)
        assert hasattr(imported, name)


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba"])
@torch.no_grad()
def test_other_mixers_run_as_always(family, forced):
    verified(tiny_target(family))
    assert not forced["verify_rule"]


def test_with_gradients_the_mixer_runs_as_always(forced):
    logits, _ = verified(tiny_target("qwen3_5"))
    assert torch.isfinite(logits).all()
    assert not forced["verify_rule"]


@torch.no_grad()
def test_a_long_block_runs_as_always(forced):
    verified(tiny_target("qwen3_5"), length=fused_mixer.MOST_TOKENS + 2)
    assert not forced["verify_rule"]


@torch.no_grad()
def test_outside_of_a_recorded_block_the_mixer_runs_as_always(forced):
    model = copy.deepcopy(tiny_target("qwen3_5"))
    ready_hf.ensure_patched(model)
    model(random_prompt(7), use_cache=True)
    assert not forced["verify_rule"]


@pytest.mark.parametrize(
    "change",
    [
        lambda call, layer: setattr(call.mixer.conv1d, "_hf_hook", object()),
        lambda call, layer: setattr(call.mixer, "activation", "gelu"),
        lambda call, layer: call.options.update(cu_seq_lens_q=torch.tensor([0, 5])),
        lambda call, layer: layer.recurrent_states.update({0: None}),
        lambda call, layer: layer.conv_states.update({0: layer.conv_states[0][..., :-1]}),
        lambda call, layer: call.mixer.double(),
        lambda call, layer: setattr(call.mixer, "__class__", type("Changed", (type(call.mixer),), {})),
    ],
    ids=["offloaded", "activation", "packed", "no state", "other window", "float64", "subclass"],
)
@torch.no_grad()
def test_anything_unusual_leaves_a_mixer_alone(change, forced):
    model = copy.deepcopy(tiny_target("qwen3_5"))
    cache = cache_of(model(random_prompt(7), use_cache=True))
    mixer = recurrent_layers(model)[0].mixer
    call, layer = (
        MixerCall(mixer, torch.zeros(1, 5, model.config.hidden_size), None, {}),
        cache.layers[mixer.layer_idx],
    )
    assert fused_mixer.fits(call, layer, 5)
    assert not fused_mixer.fits(call, layer, 4)  # not the block that is recorded
    change(call, layer)
    assert not fused_mixer.fits(call, layer, 5)


def test_unhook_puts_the_forward_back():
    model = tiny_target("qwen3_5")
    mixer_class = type(recurrent_layers(model)[0].mixer)
    ready_hf.unhook()
    original = mixer_class.forward
    ready_hf.hook()
    ready_hf.ensure_patched(model)
    assert mixer_class.forward is not original
    ready_hf.unhook()
    assert mixer_class.forward is original
    ready_hf.hook()
