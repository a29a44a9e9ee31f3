"""Everything that ends or watches a generation: lengths, eos, stopping criteria, stop strings, streamers.

A draft block may run far past the place where plain `generate` stops; nothing of that may be seen from outside.
"""

import threading

import pytest
import torch
from transformers import GenerationConfig, StopStringCriteria, TextIteratorStreamer

import ready_hf
from support import (
    RecordingCriterion,
    RecordingStreamer,
    ScriptedDrafter,
    cache_of,
    char_tokenizer,
    fresh_states,
    k_right,
    oracle,
    plain_ids,
    states,
    tiny_target,
    worst_error,
)


PROMPT_LENGTH, NEW_TOKENS = 12, 24
REFERENCE = plain_ids("qwen3_5", 96, PROMPT_LENGTH)
PROMPT = REFERENCE[:, :PROMPT_LENGTH]
DRAFTERS = {"oracle": oracle, "3-right": lambda ids: k_right(ids, 3)}


@pytest.fixture
def target():
    """The target, whose generation config a test may change."""
    model = tiny_target("qwen3_5")
    before = model.generation_config.to_dict()
    yield model
    model.generation_config = GenerationConfig.from_dict(before)


@pytest.fixture(params=DRAFTERS)
def drafter(request) -> ScriptedDrafter:
    return DRAFTERS[request.param](REFERENCE)


def generate(model, ids=PROMPT, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW_TOKENS} | kwargs)


def assert_same(model, drafter, **kwargs) -> torch.Tensor:
    """Drafted output, returned cache and number of calls of every criterion are those of plain `generate`."""
    kwargs["return_dict_in_generate"] = True
    plain, drafted = generate(model, **kwargs), generate(model, assistant_model=drafter, **kwargs)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert worst_error(states(cache_of(drafted)), states(cache_of(plain))) <= 1e-5
    assert worst_error(states(cache_of(drafted)), fresh_states(model, drafted.sequences[:, :-1])) <= 1e-5
    return drafted.sequences


@pytest.mark.parametrize("new_tokens", [1, 2, 5, 7, 8, 9, 17])
def test_max_new_tokens(target, drafter, new_tokens):
    ids = assert_same(target, drafter, max_new_tokens=new_tokens)
    assert ids.shape[1] == PROMPT_LENGTH + new_tokens


@pytest.mark.parametrize("max_length", [PROMPT_LENGTH + 1, PROMPT_LENGTH + 2, 20, 21, 30])
def test_max_length(target, drafter, max_length):
    ids = assert_same(target, drafter, max_length=max_length, max_new_tokens=None)
    assert ids.shape[1] == max_length


@pytest.mark.parametrize("position", range(10))
def test_eos_at_every_position_of_a_block(target, drafter, position):
    eos = int(REFERENCE[0, PROMPT_LENGTH + position])
    first = REFERENCE[0, PROMPT_LENGTH:].tolist().index(eos)
    ids = assert_same(target, drafter, eos_token_id=eos)
    assert ids.shape[1] == PROMPT_LENGTH + first + 1
    assert ids[0, -1] == eos


@pytest.mark.parametrize(("first", "second"), [(4, 6), (6, 4), (13, 20), (8, 8)])
def test_list_of_eos_ids(target, drafter, first, second):
    eos = REFERENCE[0, [PROMPT_LENGTH + first, PROMPT_LENGTH + second]].tolist()
    ids = assert_same(target, drafter, eos_token_id=eos)
    assert ids[0, -1] in eos


def test_eos_of_the_model_generation_config(target, drafter):
    target.generation_config.eos_token_id = int(REFERENCE[0, PROMPT_LENGTH + 5])
    assert assert_same(target, drafter).shape[1] <= PROMPT_LENGTH + 6


@pytest.mark.parametrize("length", range(13, 24))
def test_criterion_sees_every_prefix_once_and_stops_at_the_first_hit(target, drafter, length):
    plain, drafted = (RecordingCriterion(lambda ids: ids.shape[1] >= length) for _ in range(2))
    want = generate(target, stopping_criteria=[plain])
    got = generate(target, stopping_criteria=[drafted], assistant_model=drafter)
    assert got.tolist() == want.tolist()
    assert drafted.calls == plain.calls == [(n, None) for n in range(PROMPT_LENGTH + 1, length + 1)]


def test_criterion_sees_scores_of_its_prefix_only(target, drafter):
    plain, drafted = RecordingCriterion(), RecordingCriterion()
    kwargs = {"return_dict_in_generate": True, "output_scores": True}
    generate(target, stopping_criteria=[plain], **kwargs)
    generate(target, stopping_criteria=[drafted], assistant_model=drafter, **kwargs)
    assert drafted.calls == plain.calls == [(PROMPT_LENGTH + n, n) for n in range(1, NEW_TOKENS + 1)]


def test_stateful_criterion(target, drafter):
    class Counting:
        """Stops when it has seen six even tokens: wrong if asked twice about a token, or about a rejected one."""

        def __init__(self):
            self.even = 0

        def __call__(self, ids):
            self.even += int(ids[0, -1] % 2 == 0)
            return self.even >= 6

    want = generate(target, stopping_criteria=[RecordingCriterion(Counting())])
    got = generate(target, stopping_criteria=[RecordingCriterion(Counting())], assistant_model=drafter)
    assert got.tolist() == want.tolist()
    assert got.shape[1] < PROMPT_LENGTH + NEW_TOKENS


def test_several_criteria_and_eos_together(target, drafter):
    eos = int(REFERENCE[0, PROMPT_LENGTH + 20])
    plain, drafted = ([RecordingCriterion(), RecordingCriterion(lambda ids: ids.shape[1] >= 29)] for _ in range(2))
    want = generate(target, stopping_criteria=plain, eos_token_id=eos)
    got = generate(target, stopping_criteria=drafted, eos_token_id=eos, assistant_model=drafter)
    assert got.tolist() == want.tolist()
    assert [c.calls for c in drafted] == [c.calls for c in plain]
    assert len(drafted) == 2  # the caller's list is not added to


TOKENIZER = char_tokenizer()
TEXT = TOKENIZER.decode(REFERENCE[0, PROMPT_LENGTH:])


@pytest.mark.parametrize("end", range(2, 13))
def test_stop_strings_anywhere_in_a_block(target, drafter, end):
    stop = TEXT[end - 2 : end]
    stop_strings = ["never to be seen", stop] if end % 2 else stop
    ids = assert_same(target, drafter, stop_strings=stop_strings, tokenizer=TOKENIZER)
    assert TOKENIZER.decode(ids[0, PROMPT_LENGTH:]).index(stop) == ids.shape[1] - PROMPT_LENGTH - 2


@pytest.mark.parametrize("place", ["model", "config"])
def test_stop_strings_of_a_generation_config_which_stays_as_it_was(target, drafter, place):
    stop = TEXT[9:12]
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, stop_strings=stop if place == "config" else None
    )
    if place == "model":
        target.generation_config.stop_strings = [stop]
    before = config.to_dict(), target.generation_config.to_dict()
    plain = target.generate(PROMPT, generation_config=config, tokenizer=TOKENIZER)
    drafted = target.generate(PROMPT, generation_config=config, tokenizer=TOKENIZER, assistant_model=drafter)
    assert drafted.tolist() == plain.tolist()
    assert drafted.shape[1] == PROMPT_LENGTH + TEXT.index(stop) + 3
    assert (config.to_dict(), target.generation_config.to_dict()) == before


def test_stop_strings_of_a_call_win_over_those_of_the_model(target, drafter):
    target.generation_config.stop_strings = [TEXT[2:4]]
    assert assert_same(target, drafter, stop_strings=TEXT[9:12], tokenizer=TOKENIZER).shape[1] == PROMPT_LENGTH + 12


def test_own_stop_string_criterion_wins_over_stop_strings_as_in_plain_generate(target, drafter):
    own = StopStringCriteria(TOKENIZER, TEXT[9:11])
    assert_same(target, drafter, stopping_criteria=[own], stop_strings=TEXT[4:6], tokenizer=TOKENIZER)


def test_stop_strings_without_a_tokenizer_are_refused_as_in_plain_generate(target, drafter):
    with pytest.raises(ValueError, match="tokenizer"):
        generate(target, stop_strings="x", assistant_model=drafter)


@pytest.mark.parametrize("kwargs", [{}, {"eos_token_id": int(REFERENCE[0, PROMPT_LENGTH + 11])}])
def test_streamer_gets_what_plain_generate_sends(target, drafter, kwargs):
    plain, drafted = RecordingStreamer(), RecordingStreamer()
    generate(target, streamer=plain, **kwargs)
    generate(target, streamer=drafted, assistant_model=drafter, **kwargs)
    assert drafted.events == plain.events
    assert drafted.events[0] == ("put", PROMPT.tolist())
    assert drafted.events[-1] == ("end",)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer_in_a_thread(target, drafter, skip_prompt):
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=skip_prompt, timeout=60)
    ids = []
    thread = threading.Thread(target=lambda: ids.append(generate(target, streamer=streamer, assistant_model=drafter)))
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert text == TOKENIZER.decode(ids[0][0, PROMPT_LENGTH if skip_prompt else 0 :])


@pytest.mark.parametrize("kwargs", [{"use_cache": False}, {"num_beams": 2}, {"synced_gpus": True}, {"max_length": 3}])
def test_text_streamer_ends_when_generate_refuses(target, drafter, kwargs):
    streamer = TextIteratorStreamer(TOKENIZER, timeout=1)
    kwargs = {"max_new_tokens": None} | kwargs
    with pytest.raises(ValueError, match=r"\w"):
        generate(target, streamer=streamer, assistant_model=drafter, **kwargs)
    list(streamer)  # would raise queue.Empty


def test_text_streamer_ends_when_the_drafter_fails(target):
    def fail(context):
        raise RuntimeError("drafter failed")

    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=1)
    drafter = ScriptedDrafter(REFERENCE, check=fail)
    with pytest.raises(RuntimeError, match="drafter failed"):
        generate(target, streamer=streamer, assistant_model=drafter)
    assert "".join(streamer) == TEXT[:1]


@pytest.mark.parametrize("kwargs", [{}, {"streamer": None}], ids=["no argument", "none"])
def test_streamer_given_to_speculate_gets_prompt_and_tokens(target, drafter, kwargs):
    plain, drafted = RecordingStreamer(), RecordingStreamer()
    generate(target, streamer=plain)
    generate(target, custom_generate=ready_hf.speculate(drafter, streamer=drafted), **kwargs)
    assert drafted.events == plain.events
