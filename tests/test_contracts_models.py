"""What ready_hf relies on in the caches and models of transformers: one test per name or behaviour."""

import inspect
import sys

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer

from ready_hf import recurrent_layers
from ready_hf.recurrences import CPU_ROUTED_FUNCTIONS, MAMBA1_FUNCTION
from ready_hf.target import unpatch
from support import FAMILIES, cache_of, contract, feed, random_prompt, tiny_target, torch_rule


ARGUMENTS = {
    "delta": "query key value g beta initial_state use_qk_l2norm_in_kernel output_final_state",
    "mamba2": "hidden_states dt A B C D dt_bias dt_softplus dt_limit initial_states return_final_states",
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@contract("linear-attention cache layers keep their states in these attributes of an ordinary `__dict__`")
@every_family
def test_linear_attention_layer_attributes(family):
    model = tiny_target(family)
    cache = cache_of(feed(model, None, random_prompt(5), 0, 5))
    assert getattr(cache, "offloading", False) is False
    for layer in (cache.layers[layer.layer_idx] for layer in recurrent_layers(model)):
        assert isinstance(layer, LinearAttentionCacheLayerMixin)
        assert layer.recurrent_states[0].dtype == torch.float32
        assert layer.conv_states[0].shape[-1] == layer.conv_kernel_size[0] == 4
        assert layer.is_recurrent_states_initialized == {0: True}
        assert layer.record_past is False
        assert {"conv_states", "recurrent_states", "record_past"} <= vars(layer).keys()


@contract("`update_recurrent_state(recurrent_states, state_idx)` copies the state into the layer")
def test_update_recurrent_state():
    layer, state = LinearAttentionLayer(), torch.randn(1, 2, 3, 4)
    names = list(inspect.signature(layer.update_recurrent_state).parameters)
    assert names[:2] == ["recurrent_states", "state_idx"]
    assert torch.equal(layer.update_recurrent_state(state), state)
    assert torch.equal(layer.recurrent_states[0], state)


@contract("while `record_past` is set, the convolution window keeps the old columns and the new ones")
def test_recorded_convolution_window():
    layer, columns = LinearAttentionLayer(), torch.randn(1, 2, 9)
    layer.update_conv_state(columns[..., :5], conv_kernel_size=4)
    layer.activate_past_recording()
    assert layer.record_past is True
    layer.update_conv_state(columns[..., 5:], conv_kernel_size=4)
    assert torch.equal(layer.conv_states[0], columns[..., 1:])


@contract("`crop` takes the negative number of tokens to remove; sliding layers shrink to their window even with 0")
def test_crop():
    keys = torch.arange(8.0).view(1, 1, 8, 1)
    layer, sliding = DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=4)
    sliding.record_past = True
    for x in (layer, sliding):
        assert isinstance(x, CacheLayerMixin)
        assert x.is_initialized is False
        x.update(keys, keys)
        assert x.is_croppable
        x.crop(-2)
        assert x.get_seq_length() == 6
    assert layer.keys.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert sliding.keys.flatten().tolist() == [3, 4, 5]
    sliding.update(keys, keys)
    sliding.crop(0)
    assert sliding.keys.flatten().tolist() == [5, 6, 7]


@contract("a static layer's length is a counter that is changed in place")
def test_static_length():
    keys, layer = torch.zeros(1, 1, 5, 1), StaticLayer(max_cache_len=9)
    layer.update(keys, keys)
    length = layer.get_seq_length()
    layer.update(keys[:, :, :2], keys[:, :, :2])
    assert int(layer.get_seq_length()) == 7
    assert length is layer.get_seq_length()


@contract("an encoder-decoder cache is a cache of another kind, not a dynamic one")
def test_encoder_decoder_cache():
    assert not issubclass(EncoderDecoderCache, DynamicCache)


@contract("hybrid models are marked `_is_stateful`, attention models are not")
def test_stateful_marker():
    assert all(tiny_target(family)._is_stateful for family in FAMILIES)
    assert transformers.LlamaForCausalLM._is_stateful is False


@contract("mixers call block and step functions of their module by these names and arguments")
@every_family
def test_recurrence_functions(family):
    for layer in recurrent_layers(tiny_target(family)):
        module, names = (
            sys.modules[type(layer.mixer).__module__],
            inspect.unwrap(type(layer.mixer).forward).__code__.co_names,
        )
        for name in (layer.recurrence.block_function, layer.recurrence.step_function, *CPU_ROUTED_FUNCTIONS):
            assert name in names
            assert callable(getattr(module, name))
        wanted = ARGUMENTS["mamba2" if layer.recurrence.name == "mamba2" else "delta"].split()
        assert set(wanted) <= inspect.signature(getattr(module, layer.recurrence.block_function)).parameters.keys()


@contract("`inspect.unwrap` of these functions gives the torch rule")
@every_family
def test_unwrapped_functions(family):
    layer = recurrent_layers(tiny_target(family))[0]
    module = sys.modules[type(layer.mixer).__module__]
    unpatch()
    for name in (layer.recurrence.block_function, layer.recurrence.step_function, *CPU_ROUTED_FUNCTIONS):
        function = getattr(module, name)
        rule = torch_rule(function)
        assert rule.__name__ == name
        assert rule.__code__.co_filename == module.__file__
        assert rule is not function, "nothing is wrapped: kernels are dispatched in another way"


@contract("Mamba-1 mixers call `mamba_selective_scan`")
@pytest.mark.parametrize("mixer", [MambaMixer, FalconMambaMixer, JambaMambaMixer])
def test_mamba1_function(mixer):
    assert MAMBA1_FUNCTION in inspect.unwrap(mixer.forward).__code__.co_names


@contract("decoder layers are at `get_decoder().layers` and return the hidden states, first or alone")
@every_family
def test_decoder_layers(family):
    layers, outputs = tiny_target(family).get_decoder().layers, []
    handles = [layer.register_forward_hook(lambda *args: outputs.append(args[2])) for layer in layers]
    try:
        feed(tiny_target(family), None, random_prompt(5), 0, 5)
    finally:
        _ = [handle.remove() for handle in handles]
    assert [(x[0] if isinstance(x, tuple) else x).shape for x in outputs] == [(1, 5, 64)] * 4


@contract(
    "`from_pretrained` hands the files to `_load_pretrained_model` before it reads them, resolved, with their index"
)
def test_files_of_a_checkpoint_are_handed_over(tmp_path, monkeypatch):
    model, seen = tiny_target("qwen3_5"), []
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    original = PreTrainedModel._load_pretrained_model

    def load(model, state_dict, checkpoint_files, load_config, **kwargs):
        assert state_dict is None
        assert all(tensor.is_meta for tensor in model.parameters())
        seen.append((checkpoint_files, load_config))
        return original(model, state_dict, checkpoint_files, load_config, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", staticmethod(load))
    type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    ((files, config),) = seen
    assert len(files) > 1
    assert sorted(map(str, files)) == sorted(map(str, tmp_path.glob("*.safetensors")))
    assert {*config.sharded_metadata["weight_map"].values()} == {path.name for path in tmp_path.glob("*.safetensors")}
    assert config.ignore_mismatched_sizes is True
    assert config.is_quantized is False
