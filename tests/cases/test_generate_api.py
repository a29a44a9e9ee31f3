"""Cases of the category generate-api: C02, C03, C21, C25, C33, C39, C47, C77, C79, C80, C83."""

import copy
import threading

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, pipeline
from transformers.cache_utils import StaticLayer

import ready_hf
from support import (
    ScriptedDrafter,
    cache_of,
    char_tokenizer,
    counting_forwards,
    drafter_for,
    k_right,
    num_tensors,
    oracle,
    partly_right,
    plain_ids,
    random_prompt,
    tiny_target,
)


LENGTH = 12
REFERENCE = plain_ids("qwen3_5", 96, LENGTH)
PROMPT = REFERENCE[:, :LENGTH]


@pytest.fixture
def target():
    return tiny_target("qwen3_5")


def generate(model, ids=PROMPT, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 24} | kwargs)


def outcome(model, *args, **kwargs):
    """Ids, or the error: what plain and drafted calls have to share."""
    try:
        return generate(model, *args, **kwargs).tolist()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("position", range(10))
def test_c02_eos_inside_a_block(target, position):
    """At the token before the first block, at each of its 8 drafts, and at the token that the target adds to them."""
    new = REFERENCE[0, LENGTH : LENGTH + 10].tolist()
    assert len(set(new)) == 10
    for eos, last in ((new[position], position), ([new[position], new[6]], min(position, 6))):
        want = generate(target, eos_token_id=eos)
        got = generate(target, eos_token_id=eos, assistant_model=oracle(REFERENCE))
        assert got.tolist() == want.tolist() == REFERENCE[:, : LENGTH + last + 1].tolist()


@pytest.mark.parametrize("length", [{"max_new_tokens": n} for n in (1, 2, 7, 8, 9)] + [{"max_length": 2}], ids=str)
def test_c03_prompt_of_one_token(target, length):
    prompt = random_prompt(1)
    reference = generate(target, prompt)
    kwargs = {"max_new_tokens": None} | length
    got = generate(target, prompt, assistant_model=oracle(reference), **kwargs)
    assert got.shape[1] == 1 + length.get("max_new_tokens", 1)
    assert got.tolist() == generate(target, prompt, **kwargs).tolist() == reference[:, : got.shape[1]].tolist()


def test_c21_two_padded_prompts_beams_and_several_sequences(target):
    rows = [random_prompt(3, seed=1), random_prompt(9, seed=2)]
    ids = torch.cat([torch.nn.functional.pad(rows[0], (6, 0)), rows[1]])
    mask = torch.tensor([[0] * 6 + [1] * 3, [1] * 9])
    reference = generate(target, ids, attention_mask=mask)
    got = generate(target, ids, attention_mask=mask, assistant_model=k_right(reference, 3))
    for row, start in ((0, 6), (1, 0)):
        assert got[row, start:].tolist() == generate(target, rows[row])[0].tolist()
    for kwargs in ({"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}):
        with counting_forwards(target) as forwards, pytest.raises(ValueError, match=next(iter(kwargs))):
            generate(target, assistant_model=oracle(REFERENCE), **kwargs)
        assert not forwards


@pytest.mark.parametrize("kind", ["oracle", "real"])
def test_c25_num_assistant_tokens_does_not_persist(target, kind):
    """By the tokens of every forward of the target: the drafts that are verified, and the one before them."""
    drafter = oracle(REFERENCE) if kind == "oracle" else drafter_for(target, block_size=8)
    widths = []
    for kwargs in ({"num_assistant_tokens": 3}, {"num_assistant_tokens": 1}, {}):
        with counting_forwards(target) as forwards:
            generate(target, assistant_model=drafter, **kwargs)
        assert forwards[0] == LENGTH
        widths.append(max(forwards[1:]) - 1)
    assert widths == [3, 1, 8]


def split_character_tokenizer() -> tuple[PreTrainedTokenizerFast, int]:
    """A byte-level tokenizer in which two consecutive new tokens are the bytes of one character; where that is."""
    new = REFERENCE[0, LENGTH : LENGTH + 30].tolist()
    place = next(i for i in range(9) if new.count(new[i]) == new.count(new[i + 1]) == 1 and i % 9 in (2, 3, 4))
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    first, second = to_bytes.pre_tokenize_str("é")[0][0]
    plain = iter(chr(code) for code in range(33, 127))
    used = {new[place]: first, new[place + 1]: second}
    vocabulary = {used.get(i) or next(plain, f"<{i}>"): i for i in range(97)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = to_bytes, tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False), place


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_c33_streamer_with_a_split_character_and_eos_inside_a_block(target, skip_prompt):
    tokenizer, place = split_character_tokenizer()
    eos = int(REFERENCE[0, LENGTH + 13])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=60)
    ids = []

    def work():
        ids.append(generate(target, streamer=streamer, eos_token_id=eos, assistant_model=oracle(REFERENCE)))

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert ids[0][0, -1] == eos
    assert text == tokenizer.decode(ids[0][0, LENGTH if skip_prompt else 0 :])
    assert "é" in text
    assert "\ufffd" not in text


def test_c33_streamer_ends_when_generate_raises(target):
    def fail(context):
        raise RuntimeError("no drafts")

    streamer = TextIteratorStreamer(char_tokenizer(), timeout=10)
    with pytest.raises(RuntimeError, match="no drafts"):
        generate(target, streamer=streamer, assistant_model=ScriptedDrafter(REFERENCE, check=fail))
    assert "".join(streamer)


CROPS_STATIC = getattr(StaticLayer, "is_croppable", False)  # newer transformers
CACHES = {
    "dynamic": ({"cache_implementation": "dynamic"}, None),
    "static": ({"cache_implementation": "static"}, None if CROPS_STATIC else "static caches as far as transformers"),
    "quantized": ({"cache_implementation": "quantized"}, "'quantized'.* on dynamic or static caches"),
    "offloaded": ({"cache_implementation": "offloaded"}, "offloaded DynamicCache.*Supported are dynamic caches"),
    "none": ({"use_cache": False}, "`use_cache=False`.*Supported are dynamic caches"),
}


@pytest.mark.parametrize("name", CACHES)
def test_c39_every_cache_is_exact_or_refused_in_one_sentence(target, name):
    """Which says what is supported, before any forward."""
    kwargs, refusal = CACHES[name]
    drafter = k_right(REFERENCE, 3)
    if refusal is None:
        assert generate(target, assistant_model=drafter, **kwargs).tolist() == REFERENCE[:, : LENGTH + 24].tolist()
        assert drafter.rounds > 3
        return
    with counting_forwards(target) as forwards, pytest.raises(ValueError, match=refusal):
        generate(target, assistant_model=drafter, **kwargs)
    assert not forwards


CONSTRAINTS = {
    "allowed": {"prefix_allowed_tokens_fn": lambda batch_id, ids: [5, 17, 29, 41, 53]},
    "bad words": {"bad_words_ids": [[int(t)] for t in REFERENCE[0, LENGTH : LENGTH + 5]] + [[7, 9]]},
    "minimum": {"min_new_tokens": 10, "eos_token_id": [int(t) for t in REFERENCE[0, LENGTH : LENGTH + 3]]},
    "all": {"min_new_tokens": 10, "eos_token_id": 5, "prefix_allowed_tokens_fn": lambda batch_id, ids: [5, 17, 29]},
}


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_c47_constraints_hold_for_every_token(target, constraint):
    kwargs = CONSTRAINTS[constraint]
    want = generate(target, **kwargs)
    assert want.tolist() != REFERENCE[:, : want.shape[1]].tolist()  # the oracle proposes what is not allowed
    for reference in (REFERENCE, torch.nn.functional.pad(want, (0, 30), value=3)):
        for drafter in (oracle(reference), partly_right(reference, 0.6)):
            assert generate(target, assistant_model=drafter, **kwargs).tolist() == want.tolist()
    if constraint == "allowed":
        assert set(want[0, LENGTH:].tolist()) <= {5, 17, 29, 41, 53}


@pytest.mark.slow
def test_c77_soak():
    """Shortened: 30 sampled calls of about 12 rounds, then one call of 300 tokens."""
    target, drafter = tiny_target("qwen3_5"), partly_right(REFERENCE, 0.5)

    counts = []
    for seed in range(30):
        torch.manual_seed(seed)
        generate(target, assistant_model=drafter, do_sample=True, max_new_tokens=16)
        if seed % 10 == 9:
            counts.append(num_tensors())
    assert counts[-1] <= counts[0]

    output = generate(
        target, assistant_model=ready_hf.PromptLookupDrafter(), max_new_tokens=300, return_dict_in_generate=True
    )
    cache = cache_of(output)
    assert cache.get_seq_length() == LENGTH + 300 - 1
    for layer in cache.layers:
        for state in (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()):
            assert state.untyped_storage().nbytes() == state.numel() * state.element_size()
    assert counts[-1] + 500 > num_tensors()


def test_c79_four_prompts_one_of_which_finishes_early(target):
    rows = [random_prompt(n, seed=n) for n in (2, 5, 11, 8)]
    alone = [generate(target, row) for row in rows]
    eos = int(alone[2][0, 11 + 6])
    alone = [generate(target, row, eos_token_id=eos, pad_token_id=0)[0].tolist() for row in rows]
    ids = torch.cat([torch.nn.functional.pad(row, (11 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(row), (11 - row.shape[1], 0)) for row in rows])
    free = generate(target, ids, attention_mask=mask)

    class PerRow(ScriptedDrafter):
        def draft(self, context):
            drafts, _ = super().draft(context)
            wrong = torch.arange(drafts.shape[1]) >= torch.tensor([[7], [2], [5], [3]])
            return torch.where(wrong, (drafts + 1) % 97, drafts), None

    kwargs = {"attention_mask": mask, "eos_token_id": eos, "pad_token_id": 0}
    got = generate(target, ids, assistant_model=PerRow(free), **kwargs).tolist()
    for row, want in enumerate(alone):
        start = 11 - rows[row].shape[1]
        assert got[row][start : start + len(want)] == want
        assert set(got[row][start + len(want) :]) <= {0}


EXTRAS = {
    "position_ids": torch.arange(LENGTH)[None],
    "shifted position_ids": torch.arange(5, LENGTH + 5)[None],
    "attention_mask": torch.ones_like(PROMPT),
    "attention_mask with holes": (torch.arange(LENGTH) % 5 != 1).long()[None],
    "cache_position": torch.arange(LENGTH),
    "token_type_ids": torch.zeros_like(PROMPT),
    "dummy": 1,
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
def test_c80_other_arguments(family, extra):
    model, kwargs = tiny_target(family), {extra.split()[-1] if " p" in extra else extra.split()[0]: EXTRAS[extra]}
    want = outcome(model, **kwargs)
    widths = []
    reference = torch.tensor(want) if isinstance(want, list) else REFERENCE
    drafter = k_right(reference, 3)
    drafter.check = lambda context: widths.append(
        (context.input_ids.shape[1], None if context.attention_mask is None else context.attention_mask.shape[1])
    )
    assert outcome(model, assistant_model=drafter, **kwargs) == want
    assert all(mask in (None, length) for length, mask in widths)
    assert bool(widths) is isinstance(want, list)  # drafted, or refused before any draft as plain calls are
    with ready_hf.record_stats() as stats:
        assert outcome(model, assistant_model=drafter_for(model), **kwargs) == want
    assert bool(stats.rounds) is isinstance(want, list)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(char_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    return tokenizer


@pytest.mark.parametrize("at_call", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_c83_pipeline(target, at_call, chat):
    text = [{"role": "user", "content": "Hello there"}] if chat else "Hello there"
    tokenizer = chat_tokenizer()
    prompt = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True) if chat else text
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    reference = generate(target, ids)
    drafter = k_right(reference, 3)
    drafter.config = target.config  # pipelines compare vocabularies and special tokens
    options = {"do_sample": False, "max_new_tokens": 24, "max_length": None}
    with ready_hf.record_stats() as stats:
        if at_call:
            pipe = pipeline("text-generation", model=target, tokenizer=tokenizer)
            outputs = pipe(text, assistant_model=drafter, **options)
        else:
            pipe = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
            outputs = pipe(text, **options)
    new = tokenizer.decode(reference[0, ids.shape[1] :], skip_special_tokens=True)
    got = outputs[0]["generated_text"]
    assert (got[-1]["content"] if chat else got.removeprefix(text)) == new
    assert stats.calls == 1


def test_c83_a_path_in_place_of_a_drafter_is_an_error(target, tmp_path):
    """transformers itself refuses one that its pipeline is made with: it looks for a causal language model there."""
    drafter_for(target).save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=target, tokenizer=chat_tokenizer())
    with pytest.raises(TypeError, match="must be a loaded drafter, got the string"):
        pipe("Hello there", assistant_model=str(tmp_path))
    with pytest.raises(ValueError, match="cannot infer suitable model classes"):
        pipeline("text-generation", model=target, tokenizer=chat_tokenizer(), assistant_model=str(tmp_path))
