"""Cases of category vocab-tokens: C12, C14 (prompts; training data in test_training_loop.py), C15, C51, C87."""

import pytest
import tokenizers
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModelForCausalLM

import ready_hf
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel
from support import FAMILIES, drafter_for, random_prompt, tiny_target, trained_target, trained_tokenizer


@pytest.mark.parametrize("tied", [True, False])
def test_c12_the_head_is_the_targets(tied, monkeypatch):
    config = FAMILIES["qwen3_5"]()
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    ready_hf.ensure_patched(target)
    assert (target.get_output_embeddings().weight is target.get_input_embeddings().weight) is tied
    drafter, prompt = drafter_for(target), random_prompt(12)
    heads = []
    original = ReadyDrafterModel.base_logits
    monkeypatch.setattr(
        ReadyDrafterModel, "base_logits", lambda self, h, head: heads.append(head) or original(self, h, head)
    )
    target.generate(prompt, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert {id(head) for head in heads} == {id(target.get_output_embeddings())}
    with torch.no_grad():
        hidden = target.get_decoder()(prompt).last_hidden_state
        assert torch.equal(drafter.base_logits(hidden, heads[0]), target(prompt).logits)


def test_c14_prompt_ids_up_to_the_limit():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    ids = random_prompt(8)
    ids[0, 2:5] = torch.tensor([94, 95, 96])  # the last rows of the vocabulary: special tokens, as any other
    plain = target.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=drafter), plain)
    for wrong in (97, -1):
        ids[0, 3] = wrong
        with pytest.raises(ValueError, match="allowed are 0 to 96"):
            target.generate(ids, max_new_tokens=6, assistant_model=drafter)


def test_c15_mask_token_is_no_token_of_any_text():
    target = tiny_target("qwen3_5")  # 97 rows
    target_config = FAMILIES["qwen3_5"]()
    target_config.eos_token_id = target_config.pad_token_id = 96
    tokenizer = trained_tokenizer()
    assert tokenizer.mask_token_id == 1
    assert ReadyDrafterConfig.for_target(trained_target(), tokenizer=tokenizer).mask_token_id == 1

    small = transformers.PreTrainedTokenizerFast(
        tokenizer_object=transformers.AutoTokenizer.from_pretrained(ready_hf.tiny_target_path()).backend_tokenizer
    )
    small.add_special_tokens({"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    assert small.mask_token_id is None
    with pytest.raises(ValueError, match="no row is free"):  # 512 tokens, 512 rows
        ReadyDrafterConfig.for_target(trained_target(), tokenizer=small)
    assert ReadyDrafterConfig.for_target(trained_target(), tokenizer=small, mask_token_id=7).mask_token_id == 7

    config = ReadyDrafterConfig.for_target(target_config)
    assert config.mask_token_id == 95  # the last row that is neither eos nor pad
    assert ReadyDrafterConfig.from_dict(config.to_dict()).mask_token_id == 95
    with pytest.raises(StrictDataclassClassValidationError, match="`mask_token_id` must be 0 to 96, got 97"):
        ReadyDrafterConfig.for_target(target, mask_token_id=97)


def test_c15_ids_that_the_default_mask_token_is_not():
    """Of a tokenizer with gaps whose pad, eos and mask are one, and of a generation configuration."""
    words = {"a": 0, "b": 1, "c": 9, "</s>": 10}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    names = dict.fromkeys(("eos_token", "pad_token", "mask_token"), "</s>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    assert (len(tokenizer), tokenizer.mask_token_id) == (4, 10)
    config = FAMILIES["qwen3_5"]()
    config.vocab_size = 11
    with pytest.raises(ValueError, match="ids up to 10 and the target has 11 rows, so no row is free"):
        ReadyDrafterConfig.for_target(config, tokenizer=tokenizer)
    config.vocab_size = 13
    assert ReadyDrafterConfig.for_target(config, tokenizer=tokenizer).mask_token_id == 12
    target = AutoModelForCausalLM.from_config(config)
    target.generation_config.eos_token_id = [12, 11]
    assert ReadyDrafterConfig.for_target(target).mask_token_id == 10
    with pytest.raises(ValueError, match="no row is free"):
        ReadyDrafterConfig.for_target(target, tokenizer=tokenizer)


def test_c15_the_mask_token_of_the_config_fills_the_slots(monkeypatch):
    target = trained_target()
    drafter = drafter_for(target, mask_token_id=1)
    seen = []
    hook = target.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        target.generate(random_prompt(9, vocab_size=500), max_new_tokens=4, do_sample=False, assistant_model=drafter)
    finally:
        hook.remove()
    blocks = [ids[0, 1:].tolist() for ids in seen if ids.shape[1] == 6 and ids[0, -1] == 1]
    assert blocks
    assert all(block == [1] * 5 for block in blocks)


@pytest.mark.parametrize("rows", [90, 104])
def test_c51_vocabularies_of_different_size_are_refused(rows):
    target = tiny_target("qwen3_5")
    config = FAMILIES["qwen3_5"]()
    config.vocab_size = rows
    drafter = ReadyDrafterModel(ReadyDrafterConfig.for_target(config))
    with pytest.raises(ValueError, match=f"vocabulary: {rows} in the drafter, 97 in the target"):
        target.generate(random_prompt(5), max_new_tokens=4, assistant_model=drafter)


def test_c87_a_pruned_vocabulary_is_not_offered():
    target = tiny_target("qwen3_5")
    for name in ("d2t", "draft_vocab_size"):
        with pytest.raises(TypeError, match=f"has no field '{name}'"):
            ReadyDrafterConfig.for_target(target, **{name: 50})
