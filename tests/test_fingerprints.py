"""Fingerprints change with every weight, and with nothing that does not matter."""

import copy

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoTokenizer

import ready_hf
from ready_hf import fingerprints
from ready_hf.fingerprints import tensor_checksum, tokenizer_fingerprint, weights_fingerprint
from support import tiny_target


def test_a_packed_weight_counts_by_what_it_is_made_of():
    """As torchao's and quanto's, which are tensors around tensors."""
    model, found = torch.nn.Linear(4, 3), set()
    model.config = tiny_target("qwen3_5").config
    for change in (0.0, 1.0):
        scale = torch.ones(3, 4) + change
        model.weight = torch.nn.Parameter(TwoTensor(torch.ones(3, 4), scale), requires_grad=False)
        found |= {weights_fingerprint(model), weights_fingerprint(model)}
    assert len(found) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.bool])
def test_a_change_of_one_bit_anywhere_changes_the_checksum(dtype):
    tensor = torch.arange(23).remainder(2).to(dtype)
    found = {tensor_checksum(tensor)}
    for place in range(len(tensor)):
        for bit in range(0, 8 * tensor.element_size(), 1 if dtype != torch.bool else 8):
            changed = tensor.clone()
            changed.view(torch.uint8)[place * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
            found.add(tensor_checksum(changed))
    assert len(found) == 1 + len(tensor) * (1 if dtype == torch.bool else 8 * tensor.element_size())


def test_places_count():
    tensor = torch.randn(16, 8)
    swapped = tensor.clone()
    swapped[[3, 11]] = tensor[[11, 3]]
    assert len({tensor_checksum(tensor), tensor_checksum(swapped), tensor_checksum(tensor.T)}) == 3
    assert tensor_checksum(torch.zeros(2)) != tensor_checksum(torch.zeros(4))


def test_neither_pieces_nor_memory_layout_matter(monkeypatch):
    tensor = torch.randn(37, 5)
    whole = tensor_checksum(tensor)
    padded = torch.zeros(38 * 5)
    padded[1 : 1 + 37 * 5] = tensor.flatten()
    assert tensor_checksum(padded[1 : 1 + 37 * 5].view(37, 5)) == whole
    assert tensor_checksum(tensor.T.contiguous().T) == whole
    monkeypatch.setattr(fingerprints, "CHUNK_BYTES", 64)
    assert tensor_checksum(tensor) == whole
    assert tensor_checksum(torch.zeros(0)) == 0
    assert 0 <= tensor_checksum(torch.tensor(1.5)) < 2**64


@pytest.mark.gpu
def test_every_device_finds_the_same_number():
    tensor = torch.randn(1001, 257).to(torch.bfloat16)
    assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)


def test_the_sum_is_what_its_description_says():
    def mixed(word, place):
        first, second = (factor % 2**64 for factor in fingerprints.FACTORS)
        word = (word + place * first) % 2**64
        word = (word ^ word >> 32) * second % 2**64
        return (word ^ word >> 29) * first % 2**64

    words = torch.randint(-(2**63), 2**63 - 1, (50,), dtype=torch.int64)
    expected = sum(mixed(int(word) % 2**64, place) for place, word in enumerate(words)) % 2**64
    assert tensor_checksum(words) == expected


def test_weights():
    target = copy.deepcopy(tiny_target("qwen3_5"))
    before = weights_fingerprint(target)
    assert weights_fingerprint(copy.deepcopy(target).train()) == before
    for name, parameter in target.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.view(-1)[-1] = torch.nextafter(kept.view(-1)[-1], torch.tensor(torch.inf))
        assert weights_fingerprint(target) != before, name
        with torch.no_grad():
            parameter.copy_(kept)
    assert weights_fingerprint(target) == before
    assert weights_fingerprint(copy.deepcopy(target).to(torch.bfloat16)) != before
    target.config.rms_norm_eps *= 2
    assert weights_fingerprint(target) != before


def test_weights_that_are_not_there():
    with pytest.raises(ValueError, match="is not in memory"):
        weights_fingerprint(copy.deepcopy(tiny_target("qwen3_5")).to("meta"))


def test_tokenizers():
    def load():
        return AutoTokenizer.from_pretrained(ready_hf.small_target_path())

    tokenizer, before = load(), tokenizer_fingerprint(load())
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(tokenizer) != before
    tokenizer = load()
    tokenizer.add_tokens(["<|new|>"])
    assert tokenizer_fingerprint(tokenizer) != before
    tokenizer = load()
    tokenizer.eos_token = "<|mask|>"
    assert tokenizer_fingerprint(tokenizer) != before
