"""`verify` against its float64 reference, and both against the mixers of transformers.

Without a GPU the kernels run in Triton's interpreter, which is slow: few heads, few rows.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from ready_hf.kernels import launches, verify_reference
from ready_hf.kernels.reference import gated_delta_window, window_state
from ready_hf.kernels.verify_reference import Verified
from ready_hf.target import RecurrenceCall, observing_recurrence
from support import tiny_target


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Inputs = dict[str, torch.Tensor | None]
EXACT = 3e-6  # relative L2 in float32
ULP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # two roundings, relative


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Verified]]:
    """`verify` in Triton; memory it allocates holds NaN, and the interpreter rounds as GPUs do."""
    pytest.importorskip("triton")
    module = importlib.import_module("ready_hf.kernels.triton_verify")
    if DEVICE == "cpu":
        _round_to_nearest(monkeypatch, importlib.import_module("triton.runtime.interpreter"))

    def verify(**inputs) -> Verified:
        with monkeypatch.context() as patch:
            for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
                patch.setattr(owner, name, _poisoned(getattr(owner, name)))
            return module.verify(**inputs)

    return verify


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_nan(*args, **kwargs) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return allocate_nan


def _round_to_nearest(monkeypatch: pytest.MonkeyPatch, interpreter: ModuleType) -> None:
    """The interpreter cuts float32 off to bfloat16, GPUs round."""
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if str(source) == "fp32" and str(target) == "bf16":
            return torch.from_numpy(data.copy()).bfloat16().view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def make_inputs(
    length: int,
    k_dim: int = 32,
    v_dim: int = 48,
    batch: int = 1,
    key_heads: int = 1,
    taps: int = 4,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> Inputs:
    generator = torch.Generator().manual_seed(length)
    heads = 2 * key_heads
    channels = 2 * key_heads * k_dim + heads * v_dim

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    return {
        "mixed_qkv": randn(batch, length, channels).to(dtype),
        "conv_state": randn(batch, channels, taps).to(dtype),
        "conv_weight": (randn(channels, taps) / 2).to(dtype),
        "conv_bias": randn(channels).to(dtype),
        "a": randn(batch, length, heads).to(dtype),
        "b": randn(batch, length, heads).to(dtype),
        "A_log": randn(heads) - 1,
        "dt_bias": randn(heads).to(dtype),
        "state": randn(batch, heads, k_dim, v_dim).to(state_dtype),
    }


def reference(inputs: Inputs, dtype: torch.dtype | None = torch.float64, **options) -> Verified:
    """The reference, in float64 unless told otherwise."""
    cast = {name: x if x is None or dtype is None else x.to(dtype) for name, x in inputs.items()}
    return verify_reference.verify(**cast, **options)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2 distance; NaN never passes a comparison."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def assert_exact(got: Verified, want: Verified) -> None:
    for name, x, y in zip(Verified._fields, got, want, strict=True):
        assert x.shape == y.shape, name
        assert error(x, y) <= EXACT, name


@pytest.mark.parametrize("length", [1, 2, 3, 8, 16, 32])
@pytest.mark.parametrize(("k_dim", "v_dim"), [(32, 48), (64, 64), (60, 100), (96, 32)], ids=str)
def test_equals_float64_reference(kernel, length, k_dim, v_dim):
    inputs = make_inputs(length, k_dim, v_dim)
    before = {name: x.clone() for name, x in inputs.items()}
    assert_exact(kernel(**inputs, num_key_heads=1), reference(inputs, num_key_heads=1))
    for name, x in inputs.items():
        assert torch.equal(x, before[name]), f"{name} was written to"


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_the_reference_does(kernel, dtype, state_dtype):
    inputs = make_inputs(6, batch=2, key_heads=2, dtype=dtype, state_dtype=state_dtype)
    got = kernel(**inputs, num_key_heads=2)
    want = reference(inputs, dtype=None, num_key_heads=2)
    assert torch.equal(got.window, want.window)
    assert error(got.g, want.g) <= EXACT
    for name in ("key", "value", "beta"):
        x, y = getattr(got, name), getattr(want, name)
        assert x.dtype == y.dtype == dtype, name
        # sums in another order round differently now and then, by one step
        torch.testing.assert_close(x, y, rtol=ULP[dtype], atol=1e-6, msg=f"{name}: {{}}".format)
        if dtype != torch.float32:
            assert (x != y).float().mean() < 0.01, name
    assert got.output.dtype == dtype
    assert error(got.output, want.output) <= max(EXACT, ULP[dtype] / 4)
    assert error(got.output, reference(inputs, num_key_heads=2).output) <= max(EXACT, 2 * ULP[dtype])


def test_rounded_gates_enter_the_rule(kernel):
    inputs = make_inputs(6, batch=2, state_dtype=torch.bfloat16)
    inputs |= {name: inputs[name].bfloat16() for name in ("a", "b", "dt_bias")}
    got = kernel(**inputs, num_key_heads=1)
    assert got.beta.dtype == torch.bfloat16
    assert_exact(got, reference(inputs, dtype=None, num_key_heads=1))


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_other_kernel_sizes(kernel, taps):
    inputs = make_inputs(4, taps=taps)
    assert_exact(kernel(**inputs, num_key_heads=1), reference(inputs, num_key_heads=1))


@pytest.mark.parametrize("missing", ["conv_state", "conv_bias", "state"])
def test_optional_inputs(kernel, missing):
    inputs = make_inputs(3, batch=2) | {missing: None}
    options = {"num_key_heads": 1, "head_k_dim": 32, "activation": "swish"}
    assert_exact(kernel(**inputs, **options), reference(inputs, **options))


def test_any_strides(kernel):
    inputs = make_inputs(5, batch=2, key_heads=2)
    want = kernel(**inputs, num_key_heads=2)
    strided = (
        inputs
        | {
            "mixed_qkv": inputs["mixed_qkv"].mT.contiguous().mT,  # channels first, as the convolution leaves it
            "conv_state": want.window[..., 3:7],
            "conv_weight": inputs["conv_weight"].mT.contiguous().mT,
            "a": torch.stack([inputs["a"], inputs["b"]], dim=-1)[..., 0],
            "b": inputs["b"].transpose(0, 1).contiguous().transpose(0, 1),
            "A_log": inputs["A_log"].repeat_interleave(2)[::2],
            "state": inputs["state"].mT.contiguous().mT,  # values first, as serving engines keep it
        }
    )
    plain = inputs | {"conv_state": strided["conv_state"].contiguous()}
    got = kernel(**strided, num_key_heads=2)
    for name, x, y in zip(Verified._fields, got, kernel(**plain, num_key_heads=2), strict=True):
        assert torch.equal(x, y), name
    assert_exact(got, reference(plain, num_key_heads=2))


def test_later_tokens_change_nothing(kernel):
    inputs = make_inputs(8)
    want = kernel(**inputs, num_key_heads=1)
    for name in ("mixed_qkv", "a", "b"):
        inputs[name][:, 5:] = float("nan")
    got = kernel(**inputs, num_key_heads=1)
    for name, x, y in zip(Verified._fields[:-1], got, want, strict=False):
        assert torch.equal(x[:, :5], y[:, :5]), name


def test_gates_over_their_whole_range(kernel):
    inputs = make_inputs(32, 8, 8)
    inputs["a"] = torch.linspace(-60, 60, 64, device=DEVICE).view(1, 32, 2)
    inputs["b"] = inputs["a"].flip(1)
    inputs["A_log"] = torch.tensor([-4.0, 2.75], device=DEVICE)  # rates of 0.02 and 16
    got, want = kernel(**inputs, num_key_heads=1), reference(inputs, num_key_heads=1)
    torch.testing.assert_close(got.g.double(), want.g, rtol=3e-6, atol=0)
    torch.testing.assert_close(got.beta.double(), want.beta, rtol=3e-6, atol=0)
    assert error(got.output, want.output) <= EXACT


def test_two_launches(kernel):
    before = launches.copy()
    kernel(**make_inputs(2), num_key_heads=1)
    assert launches - before == {"verify_conv": 1, "verify_rule": 1}


def on_meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


REFUSALS = [
    ({"mixed_qkv": lambda x: x[:, :0]}, "1 to 32 tokens"),
    ({"mixed_qkv": lambda x: x.repeat(1, 9, 1)}, "1 to 32 tokens"),
    ({"mixed_qkv": lambda x: x[0]}, r"`mixed_qkv` must have shape \[B, T, D\]"),
    ({"mixed_qkv": lambda x: x[..., 1:]}, "159 channels"),
    ({"mixed_qkv": lambda x: x.double(), "conv_state": lambda x: x.double()}, "`mixed_qkv` must be float32"),
    ({"conv_state": lambda x: x[..., 1:]}, "`conv_state` must have shape"),
    ({"conv_state": lambda x: x.bfloat16()}, "`conv_state` must have the dtype"),
    ({"conv_weight": lambda x: x[1:]}, "`conv_weight` must have shape"),
    ({"conv_weight": lambda x: x[:, None]}, "`conv_weight` must have shape"),
    ({"conv_bias": lambda x: x[1:]}, "`conv_bias` must have shape"),
    ({"a": lambda x: x[:, 1:]}, "`a` must have shape"),
    ({"b": lambda x: x[..., 1:]}, "`b` must have shape"),
    ({"b": lambda x: x.long()}, "`b` must be float32"),
    ({"A_log": lambda x: x[1:]}, "`A_log` must have shape"),
    ({"dt_bias": lambda x: x[1:]}, "`dt_bias` must have shape"),
    ({"state": lambda x: x[0]}, "`state` must have shape"),
    ({"state": lambda x: x[:, 1:]}, "`state` must have shape"),
    ({"state": lambda x: x[..., 1:]}, "160 channels"),
    ({"state": lambda x: x.mT, "head_k_dim": lambda x: 32}, "`head_k_dim` is 32"),
    ({"state": lambda x: x.double()}, "`state` must be float32"),
    ({"state": lambda x: None}, "`head_k_dim` must be given"),
    ({"state": on_meta}, "one device"),
    ({"num_key_heads": lambda x: 3}, "`num_key_heads` must divide"),
    ({"num_key_heads": lambda x: 0}, "`num_key_heads` must divide"),
    ({"head_k_dim": lambda x: 16}, "`head_k_dim` is 16"),
    ({"activation": lambda x: "gelu"}, "`activation` must be one of silu, swish"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=lambda x: "-".join(x) if isinstance(x, dict) else None)
def test_refusals(kernel, changes, message):
    inputs = make_inputs(4) | {"num_key_heads": 1, "head_k_dim": None, "activation": "silu"}
    inputs |= {name: change(inputs[name]) for name, change in changes.items()}
    before = launches.copy()
    with pytest.raises(ValueError, match=message):
        kernel(**inputs)
    if "must be float32" not in message:  # the reference takes float64
        with pytest.raises(ValueError, match=message):
            verify_reference.verify(**inputs)
    assert launches == before


def mixer_inputs(mixer: nn.Module, hidden_states: torch.Tensor, cache: DynamicCache) -> tuple[Inputs, torch.Tensor]:
    """What a mixer would hand to `verify`, and the gate of its norm."""
    if hasattr(mixer, "in_proj_qkv"):  # Qwen3.5
        mixed, z = mixer.in_proj_qkv(hidden_states), mixer.in_proj_z(hidden_states)
        a, b = mixer.in_proj_a(hidden_states), mixer.in_proj_b(hidden_states)
    else:  # Qwen3-Next
        projected = mixer.in_proj_qkvz(hidden_states), mixer.in_proj_ba(hidden_states)
        query, key, value, z, b, a = mixer.fix_query_key_value_ordering(*projected)
        mixed = torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1)
    layer = cache.layers[mixer.layer_idx]
    inputs = {
        "mixed_qkv": mixed,
        "conv_state": copy.deepcopy(layer.conv_states[0]),
        "conv_weight": mixer.conv1d.weight.squeeze(1),
        "conv_bias": mixer.conv1d.bias,
        "a": a,
        "b": b,
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "state": copy.deepcopy(layer.recurrent_states[0]),
    }
    return inputs, z


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("prefix", [0, 2, 7])  # nothing cached; fewer tokens than taps; more
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
@torch.no_grad()
def test_equals_the_mixer(request, family, prefix, implementation):
    verify = request.getfixturevalue("kernel") if implementation == "kernel" else verify_reference.verify
    model = tiny_target(family)
    mixer, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
    hidden_states = torch.randn(2, prefix + 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    if prefix:
        mixer(hidden_states[:, :prefix], cache)
    inputs, z = mixer_inputs(mixer, hidden_states[:, prefix:], cache)
    options = {"num_key_heads": mixer.num_k_heads, "activation": mixer.activation, "head_k_dim": mixer.head_k_dim}
    there = {name: None if x is None else x.to(DEVICE) for name, x in inputs.items()}
    got = Verified(*(x.cpu() for x in verify(**there, **options)))

    want = mixer(hidden_states[:, prefix:], cache)
    normed = mixer.norm(got.output.flatten(0, 2), z.reshape(-1, mixer.head_v_dim))
    assert error(mixer.out_proj(normed.view(2, 5, -1)), want) <= EXACT
    after = cache.layers[0]
    assert torch.equal(got.window[..., -4:], after.conv_states[0])
    window = gated_delta_window(got.key, got.value, got.g, got.beta, inputs["state"])
    assert error(window_state(window, inputs["state"], 5), after.recurrent_states[0]) <= EXACT


@torch.no_grad()
def test_rounds_where_the_mixer_does():
    """In bfloat16, the reference has the records that the mixer hands to its rule."""
    model = copy.deepcopy(tiny_target("qwen3_5")).bfloat16()
    mixer, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
    hidden_states = torch.randn(2, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    mixer(hidden_states[:, :7], cache)
    inputs, _ = mixer_inputs(mixer, hidden_states[:, 7:], cache)
    got = verify_reference.verify(**inputs, num_key_heads=mixer.num_k_heads)
    seen = []

    def observer(call: RecurrenceCall):
        seen.append(call)
        return call.run()

    with observing_recurrence(observer):
        mixer(hidden_states[:, 7:], cache)
    (call,) = seen
    for name in ("key", "value", "g", "beta"):
        x, y = getattr(got, name), call.arguments[name]
        assert x.dtype == y.dtype, name
        x = x.repeat_interleave(y.shape[2] // x.shape[2], dim=2)  # transformers 5.17 repeats keys for their heads
        torch.testing.assert_close(x, y, rtol=ULP[torch.bfloat16], atol=1e-7, msg=f"{name}: {{}}".format)
        assert (x != y).float().mean() < 0.01, name
