"""Which recurrent layers a target has, and which targets are refused."""

import copy
import types

import pytest
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from families import SMALL
from ready_hf import UnsupportedTargetError, recurrent_layers
from ready_hf.target import check_target
from support import FAMILIES, VOCAB_SIZE, cache_of, feed, random_prompt, tiny_target


LAYERS = {family: [0, 1, 3] for family in FAMILIES} | {"nemotron_h": [0, 3]}
STATES = dict.fromkeys(FAMILIES, ("gated_delta_rule", (4, 16, 24))) | {
    "kimi_linear": ("kda", (4, 16, 16)),
    "bamba": ("mamba2", (8, 12, 16)),
    "nemotron_h": ("mamba2", (8, 12, 16)),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_recurrence = pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "bamba"])


class Wrapper(nn.Module):
    """Holds a model as PEFT does: what the wrapper itself lacks is looked up in the model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


# which layers, which shapes


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper], ids=["model", "wrapped"])
@every_family
def test_recurrent_layers_and_their_state_shapes(family, wrap):
    model = wrap(tiny_target(family))
    layers = check_target(model)
    assert layers == recurrent_layers(model)
    assert [layer.layer_idx for layer in layers] == LAYERS[family]
    assert {(layer.recurrence.name, layer.state_shape) for layer in layers} == {STATES[family]}


@every_family
def test_the_state_shape_is_that_of_the_cached_state(family):
    model = tiny_target(family)
    cache = cache_of(feed(model, None, random_prompt(5, batch=2), 0, 5))
    for layer in recurrent_layers(model):
        heads, keys, values = layer.state_shape
        state = cache.layers[layer.layer_idx].recurrent_states[0]
        is_transposed = layer.recurrence.name == "mamba2"
        assert state.shape == ((2, heads, values, keys) if is_transposed else (2, heads, keys, values))


def test_a_pure_attention_model_has_no_recurrent_layers():
    model = AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL))
    assert check_target(model) == []


# refused


def test_encoder_decoder_models_are_refused_by_name():
    config = transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedTargetError, match="'t5'.*encoder-decoder"):
        check_target(AutoModelForSeq2SeqLM.from_config(config))


@every_recurrence
def test_a_kernel_that_replaces_a_whole_layer_is_refused(family):
    model = copy.deepcopy(tiny_target(family))
    mixer = recurrent_layers(model)[1].mixer
    mixer.forward = types.MethodType(lambda self, hidden_states, *args, **kwargs: hidden_states, mixer)
    with pytest.raises(UnsupportedTargetError, match=rf"{type(mixer).__name__} in layer 1 .*use_kernels=False"):
        check_target(model)


def test_a_forward_replaced_by_accelerate_is_accepted():
    model = copy.deepcopy(tiny_target("qwen3_5"))
    mixer = recurrent_layers(model)[0].mixer
    mixer._hf_hook, mixer.forward = object(), mixer.forward
    assert len(check_target(model)) == 3
