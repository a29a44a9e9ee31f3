"""Assistants for the tests: copies of a target with noise on their weights, small random models."""

import copy
import functools

import torch
import transformers
from transformers import AutoModelForCausalLM

from support import VOCAB_SIZE, plain_ids


NEW_TOKENS = 40
REFERENCE = plain_ids("qwen3_5", 96, 12)
PROMPT = REFERENCE[:, :12]


def generate(model, ids=PROMPT, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW_TOKENS} | kwargs)


def noisy(model, scale, seed=0):
    """A copy of a model with noise on its matrices; drafts whatever its confidence."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * scale)
    return confident(model)


def confident(model):
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generation_config.num_assistant_tokens = 6
    return model


@functools.cache
def attention_assistant(vocab_size=VOCAB_SIZE, sliding_window=None):
    """A small random Qwen3, of full attention or with windows."""
    layers = ["full_attention", "sliding_attention" if sliding_window else "full_attention"]
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=layers,
        use_sliding_window=sliding_window is not None,
        sliding_window=sliding_window,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return confident(random_model(AutoModelForCausalLM.from_config(config)))


def random_model(model, seed=1):
    """Weights large enough that logits are not flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.eval()
