"""Short names for what decides a target's text: its weights and its tokenizer.

A tensor's checksum is a sum of 64-bit integers, one per eight bytes, each mixed with its place. The mixing is
one-to-one, so that a change within eight bytes always changes the sum, and other changes, such as swapped rows, do so
but for one case in 2^64. It runs where the tensor is, at the speed of its memory; the order of summation does not
matter, so every device finds the same number.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


CHUNK_BYTES = 2**26
WORD_BYTES = 8
FACTORS = (-7046029254386353131, -4658895280553007687)  # odd, hence one-to-one modulo 2^64


def digest(value: Any) -> str:
    """SHA-256 of what JSON can write, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor) -> int:
    """Checksum of a tensor's bytes, 0 to 2^64 - 1."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = 0
    for begin in range(0, len(data), CHUNK_BYTES):
        part = data[begin : begin + CHUNK_BYTES]
        words = torch.zeros(-(-len(part) // WORD_BYTES), dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: len(part)] = part
        places = torch.arange(len(words), device=data.device) + begin // WORD_BYTES
        words += places * FACTORS[0]
        words ^= (words >> 32) & 0xFFFFFFFF  # shifts of signed numbers fill up with the sign
        words *= FACTORS[1]
        words ^= (words >> 29) & 0x7FFFFFFFF
        total += int((words * FACTORS[0]).sum())
    return total % 2**64


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Changes with any weight or buffer that is saved, its name, shape and dtype, and with the configuration.

    Raises:
        ValueError: weights that are not in memory, or change by being read.
    """
    states = (getattr(parameter, "quant_state", None) for parameter in model.parameters())
    if any(getattr(state, "packing_format_for_cpu", False) for state in states):
        raise ValueError(
            "a forward on this CPU has packed the 4-bit weights of bitsandbytes anew, and reading them would round "
            "their scales and change the target's text: take the fingerprint before any forward, or use 8 bits"
        )
    tensors = []
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):
            tensors.append([name, str(tensor)])
            continue
        if tensor.is_meta:
            raise ValueError(f"the weight {name} is not in memory: load the target without offloading to CPU or disk")
        for place, part in _parts(name, tensor):
            tensors.append([place, list(part.shape), str(part.dtype), tensor_checksum(part)])
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version"
    }
    return digest([type(model).__name__, config, tensors])


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor, or the ones of which a packed tensor is made."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Changes with vocabulary, rules, special tokens and chat template; padding and truncation do not matter."""
    special = [str(tokenizer.special_tokens_map), tokenizer.chat_template]
    if not tokenizer.is_fast:
        return digest([type(tokenizer).__name__, tokenizer.get_vocab(), special])
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return digest([{name: rule for name, rule in rules.items() if name not in ("padding", "truncation")}, special])
