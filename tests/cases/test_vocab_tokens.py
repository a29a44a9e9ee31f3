"""Cases of category vocab-tokens: C12, C14 (prompts; training data in test_training_loop.py), C15, C51, C87."""

import copy
import functools

import pytest
import tokenizers
import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoModelForCausalLM

import ready_hf
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel
from ready_hf.confidence_records import collect_confidences
from ready_hf.data import training_rows
from ready_hf.demo_prompts import Prompt
from ready_hf.demo_settings import check_context
from ready_hf.drafting import DraftSession
from ready_hf.evaluation import evaluate
from ready_hf.features import FrozenTarget
from ready_hf.text_sources import read_examples
from ready_hf.verify_target import verify_target
from support import (
    FAMILIES,
    counting_forwards,
    drafter_for,
    random_prompt,
    tiny_target,
    trained_target,
    trained_tokenizer,
)


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


LAST = 248_319
WORDS = {"?": 2} | {letter: i for i, letter in enumerate("abcdefghijklmnop", 3)}
WORDS |= {"<think>": 248_068, "</think>": 248_069, "<tool>": 248_077, "<beyond>": LAST + 1}
LEGAL = "a b <think> c </think> d <tool> e f g h i j k l m n o p"
BEYOND = LEGAL.replace("c", "<beyond>")


@functools.cache
def large_vocabulary():
    """A target of 248,320 rows, and a tokenizer that knows one id more."""
    config = FAMILIES["qwen3_5"]()
    config.vocab_size, config.hidden_size, config.tie_word_embeddings = LAST + 1, 16, True
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    ready_hf.ensure_patched(target)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return target, transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def trained_on(text, folder):
    """One step on a text, by its loss."""
    pytest.importorskip("accelerate")
    from ready_hf.training import ReadyTrainer, ReadyTrainingArguments

    target, tokenizer = large_vocabulary()
    options = {"max_steps": 1, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "num_anchors": 2}
    arguments = ReadyTrainingArguments(str(folder), per_device_train_batch_size=1, **options)
    rows = training_rows(read_examples([{"text": text}]), tokenizer)
    return ReadyTrainer(drafter_for(target, block_size=4), arguments, target=target, train_dataset=rows).train()


def test_c14_special_ids_of_a_large_vocabulary_are_tokens_and_the_next_one_is_refused(tmp_path):
    """In data, with a drafter, and in evaluations, by a message that gives the limit, before any compute."""
    target, tokenizer = large_vocabulary()
    legal, beyond = (tokenizer(text, return_tensors="pt") for text in (LEGAL, BEYOND))
    assert legal["input_ids"][0].tolist()[2:7:2] == [248_068, 248_069, 248_077]
    drafter, options = drafter_for(target, block_size=4), {"max_new_tokens": 8, "do_sample": False}

    def drafted(ids):
        return target.generate(**ids, **options, assistant_model=drafter)

    def evaluated(text):
        settings = {"max_new_tokens": 8, "temperatures": (0,), "resamples": 10}
        return evaluate(target, tokenizer, {"new": drafter}, [Prompt("a b"), Prompt(text)], **settings)

    def verified(ids):
        return verify_target(target, [ids], block_size=3, max_new_tokens=8)

    assert torch.equal(drafted(legal), target.generate(**legal, **options))
    assert trained_on(LEGAL, tmp_path).training_loss > 0
    assert evaluated(LEGAL).is_identical
    assert verified(legal).failures == []
    check_context(target, tokenizer, [Prompt(LEGAL)], 8)
    refusals = {
        "the prompt has": lambda: drafted(beyond),
        "token ids must be": lambda: trained_on(BEYOND, tmp_path),
        "prompt 2 has": lambda: evaluated(BEYOND),
        "prompt 1 has": lambda: verified(beyond),
        "prompt 1 has the": lambda: check_context(target, tokenizer, [Prompt(BEYOND)], 8),  # of the commands
    }
    with counting_forwards(target.get_decoder()) as forwards:
        for start, refused in refusals.items():
            with pytest.raises(ValueError, match=rf"^{start} .*(0 to {LAST}.*{LAST + 1}|{LAST + 1}.*0 to {LAST})"):
                refused()
    assert not forwards


def word_target():
    """A target of 97 rows, and a tokenizer of 12 words whose padding is its end, without a mask token."""
    words = {letter: i for i, letter in enumerate("abcdefghijk")} | {"</s>": 11}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = dict.fromkeys(("eos_token", "pad_token"), "</s>")
    return tiny_target("qwen3_5"), transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def test_c15_train_save_and_generate_with_the_default_mask_token(tmp_path):
    """Every slot of training and of drafting is that id, and no token of the text is."""
    pytest.importorskip("accelerate")
    from ready_hf.training import ReadyTrainer, ReadyTrainingArguments

    target, tokenizer = word_target()
    assert tokenizer.mask_token_id is None
    config = ReadyDrafterConfig.for_target(target, tokenizer=tokenizer, block_size=4)
    mask = config.mask_token_id
    assert mask not in range(len(tokenizer))
    rows = training_rows(read_examples([{"text": "a b c d e f g h i j k a c e </s>"}] * 4), tokenizer)
    options = {"max_steps": 2, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "num_anchors": 3}
    seen = []
    hook = target.get_input_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten()))
    try:
        arguments = ReadyTrainingArguments(str(tmp_path), per_device_train_batch_size=2, **options)
        trainer = ReadyTrainer(ReadyDrafterModel(config), arguments, target=target, train_dataset=rows)
        trainer.train()
        trained = [ids for ids in seen if mask in ids]
        trainer.save_model(tmp_path / "saved")
        seen.clear()
        drafter = ReadyDrafterModel.from_pretrained(tmp_path / "saved").eval()
        prompt = tokenizer("a b c d", return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": 12, "do_sample": False, "suppress_tokens": [mask]}
        drafted = target.generate(prompt, **options, assistant_model=drafter)
        blocks = [ids for ids in seen if mask in ids]
    finally:
        hook.remove()
    assert drafter.config.mask_token_id == mask
    for found in (trained, blocks):
        assert found
        assert all(bool((ids.view(-1, 4)[:, 1:] == mask).all()) and mask not in ids.view(-1, 4)[:, 0] for ids in found)
    assert torch.equal(drafted, target.generate(prompt, **options))


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


def of_rows(rows, **options):
    """A drafter for the trained target as if that had as many rows."""
    config = copy.deepcopy(trained_target().config)
    config.vocab_size = rows
    return drafter_for(config, block_size=4, **options)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [500, 512, 520])
def test_c51_rows_that_only_one_of_both_has_are_never_drafted(rows, sampled, monkeypatch):
    """They are the likeliest of all, for the target as for the drafter."""
    target = copy.deepcopy(trained_target())
    drafter = of_rows(rows, confidence_threshold=0.001)
    with torch.no_grad():
        target.get_output_embeddings().weight[500:] *= 4.0
        drafter.markov_head.markov_w2.weight[512:] *= 9.0
    original, drafts = DraftSession._tokens, []

    def tokens(*args):
        drafts.append(original(*args))
        return drafts[-1]

    monkeypatch.setattr(DraftSession, "_tokens", tokens)
    prompt = random_prompt(9, vocab_size=490)
    prompt[0, -1] = 511  # an anchor that not every drafter knows
    call = {"max_new_tokens": 24, "do_sample": sampled, "top_k": 0, "top_p": 0.99}
    got = [target.generate(prompt, assistant_model=drafter, **call) for _ in range(1 if sampled else 2)]
    assert max(int(ids.max()) for ids, _ in drafts if ids.numel()) < min(rows, 512)
    for _, drawn_from in drafts:
        assert drawn_from is None or (drawn_from.shape[2] == 512 and not drawn_from[..., rows:].isfinite().any())
    if not sampled:
        assert torch.equal(got[0], target.generate(prompt, **call))
    assert int(got[0].max()) >= 500  # what the target writes is its own


@pytest.mark.parametrize(("rows", "mask_token_id"), [(480, 1), (545, 1), (520, 512)])
def test_c51_other_vocabularies_are_refused_with_both_sizes(rows, mask_token_id):
    drafter = of_rows(rows, mask_token_id=mask_token_id)
    with pytest.raises(ValueError, match=f"vocabulary: {rows} in the drafter, 512 in the target"):
        trained_target().generate(random_prompt(5), max_new_tokens=4, assistant_model=drafter)


def test_c51_training_wants_every_row():
    with pytest.raises(ValueError, match="vocabulary: 500 in the drafter, 512 in the target"):
        FrozenTarget(trained_target(), of_rows(500).config)


def test_c51_tokens_that_were_added_to_the_target_since():
    target, drafter = copy.deepcopy(trained_target()), of_rows(512)
    prompt = trained_tokenizer()("def f(x):", return_tensors="pt").input_ids
    target.resize_token_embeddings(520, mean_resizing=False)
    drafted = target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert torch.equal(drafted, target.generate(prompt, max_new_tokens=24, do_sample=False))
    records = collect_confidences(target, drafter, [{"input_ids": prompt}], max_new_tokens=12)
    assert records


def test_c87_a_pruned_vocabulary_is_not_offered():
    target = tiny_target("qwen3_5")
    for name in ("d2t", "draft_vocab_size"):
        with pytest.raises(TypeError, match=f"has no field '{name}'"):
            ReadyDrafterConfig.for_target(target, **{name: 50})
