"""The fused verify forward against the mixer's own, and every reason to leave a mixer alone."""

import copy
import functools
import inspect
import sys

import pytest
import torch
import transformers

import ready_hf
from families import BASE, EXPERTS, FAMILIES, GATED_DELTA, LAYER_TYPES, NO_SPECIAL_TOKENS
from ready_hf import fused_mixer, kernels, ops
from ready_hf.recurrences import GATED_DELTA_RULE
from ready_hf.target import MixerCall, observing_recurrence, recurrent_layers
from support import (
    cache_argument,
    cache_of,
    partly_right,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


pytest.importorskip("triton")


def qwen3_next(key_heads):
    """With other groups of heads, what is cut out of the interleaved projections has other strides."""
    heads = {**GATED_DELTA, "linear_num_key_heads": key_heads}
    experts = {**EXPERTS, "intermediate_size": 96}
    return transformers.Qwen3NextConfig(
        layer_types=LAYER_TYPES, head_dim=16, **experts, **heads, **BASE, **NO_SPECIAL_TOKENS
    )


HEAD_GROUPS = {
    "qwen3_next_one_key_head": lambda: qwen3_next(1),
    "qwen3_next_equal_heads": lambda: qwen3_next(4),
}
has_lara_mini = hasattr(transformers, "LaraMiniConfig")
LARA_MINI = pytest.param("lara_mini", marks=pytest.mark.skipif(not has_lara_mini, reason="not in transformers 5.17"))
KNOWN_FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", LARA_MINI, "qwen4_exp"]


@pytest.fixture(autouse=True)
def more_families(monkeypatch):
    """For `tiny_target`."""
    for name, config in HEAD_GROUPS.items():
        monkeypatch.setitem(FAMILIES, name, config)


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
@pytest.mark.parametrize("family", KNOWN_FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@torch.no_grad()
def test_a_fused_block_is_that_of_the_mixer(family, dtype, tolerance, forced):
    logits, cache = verified(tiny_target(family), dtype)
    assert forced["verify_rule"] == forced["verify_conv"] == len(recurrent_layers(tiny_target(family)))
    ops.set_kernels("torch")
    expected, plain = verified(tiny_target(family), dtype)
    assert float((logits - expected).norm() / expected.norm()) <= tolerance
    assert worst_error(wide(cache), wide(plain)) <= tolerance
    windows = [[layer.conv_states[0] for layer in c.layers if hasattr(layer, "conv_states")] for c in (cache, plain)]
    for ours, stock in zip(*windows, strict=True):
        assert float((ours - stock).norm() / stock.norm()) <= tolerance


@pytest.mark.contract
@pytest.mark.parametrize("family", [*KNOWN_FAMILIES, "qwen3_next_one_key_head", "qwen3_next_equal_heads"])
@torch.no_grad()
def test_a_partly_kept_fused_block_leaves_the_states_of_a_fresh_forward(family, forced):
    """Two rows, of which one begins with padding; the second block starts from the states that the first one left."""
    model = copy.deepcopy(tiny_target(family))
    ready_hf.ensure_patched(model)
    ids, mask = random_prompt(12, batch=2), torch.ones(2, 12, dtype=torch.long)
    mask[1, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)

    def forward(start, stop, **inputs):
        inputs = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop], **inputs}
        return cache_of(model(ids[:, start:stop], use_cache=True, **inputs))

    cache = forward(0, 7)
    rollback = ready_hf.Rollback(cache)
    for start, length, keep in ((7, 4, 3), (10, 2, 1)):
        with rollback.recording(length):
            forward(start, start + length, **cache_argument(cache))
        rollback.commit(keep)
    rollback.close()
    assert forced["verify_rule"] == forced["verify_conv"] == 2 * len(recurrent_layers(model))
    assert worst_error(wide(cache), wide(forward(0, 11))) <= 1e-5


@pytest.mark.parametrize("family", ["qwen3_next", LARA_MINI, "qwen4_exp"])
def test_drafted_tokens_are_those_of_plain_decoding(family, forced):
    """So are their logits: the tokens alone do not see every mistake."""
    model, prompt = tiny_target(family), random_prompt(12)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(prompt, **options)
    assert not forced["verify_rule"]
    drafter = partly_right(plain.sequences, 0.5, block_size=3)
    drafted = model.generate(prompt, assistant_model=drafter, **options)
    assert torch.equal(drafted.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)
    assert forced["verify_rule"] >= 2 * len(recurrent_layers(model))


def wide(cache):
    """Its states; token ids, of which Qwen4-Exp keeps a window, as floats."""
    return {name: x.float() for name, x in states(cache).items()}


@pytest.mark.contract
@pytest.mark.parametrize(("module", "name"), sorted(fused_mixer.KNOWN_MIXERS))
def test_known_mixers_are_those_of_transformers(module, name):
    """A renamed class would silently lose its fast path."""
    assert hasattr(pytest.importorskip(module), name)


@torch.no_grad()
def test_a_mixer_takes_only_its_input_by_position():
    model = tiny_target("qwen3_5")
    mixer, x, mask = recurrent_layers(model)[0].mixer, torch.zeros(1, 3, model.config.hidden_size), torch.ones(1, 3)
    calls = []  # `append` returns `None`, so that the mixer runs
    with observing_recurrence(lambda call: call.run(), calls.append):
        mixer(x, attention_mask=mask, **cache_argument(None))
        mixer(hidden_states=x, attention_mask=mask)
        mixer(x, None, mask)
    assert len(calls) == 2
    assert all(call.hidden_states is x and call.attention_mask is mask and call.cache is None for call in calls)


@pytest.mark.parametrize("family", ["olmo_hybrid", "kimi_linear", "bamba"])
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
    verified(tiny_target("qwen3_5"), length=fused_mixer.MAX_TOKENS + 2)
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
        lambda call, layer: setattr(call.mixer.dt_bias, "data", call.mixer.dt_bias.double()),
        lambda call, layer: layer.conv_states.update({0: layer.conv_states[0].bfloat16()}),
        lambda call, layer: setattr(call.mixer, "forward", call.mixer.forward),
        lambda call, layer: setattr(call.mixer, "__class__", type("Changed", (type(call.mixer),), {})),
    ],
    ids=[
        "offloaded",
        "activation",
        "packed",
        "no state",
        "other window",
        "float64",
        "gates",
        "window dtype",
        "own forward",
        "subclass",
    ],
)
@torch.no_grad()
def test_anything_unusual_leaves_a_mixer_alone(change, forced):
    model = copy.deepcopy(tiny_target("qwen3_5"))
    ready_hf.ensure_patched(model)
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


def doubled(function):
    """Somebody's own rule."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        found = function(*args, **kwargs)
        return 2 * found if isinstance(found, torch.Tensor) else (2 * found[0], *found[1:])

    return wrapper


@pytest.mark.parametrize("what", ["forward", "rule", "convolution"])
@torch.no_grad()
def test_what_somebody_else_has_changed_is_kept(what, forced, monkeypatch):
    """Drafted tokens are those of the changed model."""
    model = copy.deepcopy(tiny_target("qwen3_5"))
    mixer_class = type(recurrent_layers(model)[0].mixer)
    module = sys.modules[mixer_class.__module__]
    ready_hf.unhook()
    names = {"rule": GATED_DELTA_RULE.block_function, "convolution": "causal_conv1d_fn"}
    if what == "forward":
        monkeypatch.setattr(mixer_class, "forward", doubled(mixer_class.forward))
    else:
        # of the torch function: what stands in front may be a GPU package's
        monkeypatch.setattr(module, names[what], doubled(inspect.unwrap(getattr(module, names[what]))))
    ready_hf.hook()
    try:
        verified(model)
        assert not forced["verify_rule"]
    finally:
        ready_hf.unhook()
        ready_hf.hook()


@torch.no_grad()
def test_a_block_for_another_cache_is_none_of_ours(forced):
    """Without a cache, with another one, or another model's: the rollback's own cache must not take it."""
    model = copy.deepcopy(tiny_target("qwen3_5"))
    ready_hf.ensure_patched(model)
    cache = cache_of(model(random_prompt(7), use_cache=True))
    before = states(copy.deepcopy(cache))
    other = copy.deepcopy(cache)
    rollback = ready_hf.Rollback(cache)
    for inputs in ({"use_cache": False}, cache_argument(other)):
        with pytest.raises(ready_hf.UnsupportedTargetError), rollback.recording(4):
            model(random_prompt(4, seed=3), **inputs)
        assert worst_error(states(cache), before) == 0.0
    rollback.close()
    assert not forced["verify_rule"]


@torch.no_grad()
def test_autocast_leaves_a_mixer_alone(forced):
    model = copy.deepcopy(tiny_target("qwen3_5"))
    ready_hf.ensure_patched(model)
    cache = cache_of(model(random_prompt(7), use_cache=True))
    rollback = ready_hf.Rollback(cache)
    with torch.autocast("cpu", dtype=torch.bfloat16), rollback.recording(4):
        model(random_prompt(4, seed=3), position_ids=torch.arange(7, 11)[None], **cache_argument(cache))
    rollback.commit(2)
    rollback.close()
    assert not forced["verify_rule"]


@torch.no_grad()
def test_a_copy_of_the_cache_before_the_commit_has_seen_the_whole_block(forced):
    model = copy.deepcopy(tiny_target("qwen3_5"))
    ready_hf.ensure_patched(model)
    prompt, block = random_prompt(7), random_prompt(4, seed=3)
    cache = cache_of(model(prompt, use_cache=True))
    rollback = ready_hf.Rollback(cache)
    with rollback.recording(4):
        model(block, position_ids=torch.arange(7, 11)[None], **cache_argument(cache))
    found = copy.deepcopy(cache)
    rollback.close()
    fresh = states(cache_of(model(torch.cat([prompt, block], dim=1), use_cache=True)))
    recurrent = {name: x for name, x in states(found).items() if "recurrent" in name}
    assert worst_error(recurrent, {name: fresh[name] for name in recurrent}) <= 1e-5
