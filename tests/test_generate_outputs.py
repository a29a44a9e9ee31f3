"""What goes into a drafted call beside the prompt, and what comes out beside the ids."""

import copy

import pytest
import torch

from support import (
    FeatureCheck,
    ScriptedDrafter,
    cache_argument,
    cache_of,
    fresh_states,
    k_right,
    oracle,
    plain_ids,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


PROMPT_LENGTH = 12
REFERENCE = plain_ids("qwen3_5", 96, PROMPT_LENGTH)
PROMPT = REFERENCE[:, :PROMPT_LENGTH]
DRAFTERS = {"oracle": oracle, "3-right": lambda ids: k_right(ids, 3)}


@pytest.fixture(params=DRAFTERS)
def drafter(request) -> ScriptedDrafter:
    return DRAFTERS[request.param](REFERENCE)


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 24} | kwargs)


def assert_close(got, want, tolerance=1e-4):
    """Same nesting, lengths, shapes and values."""
    assert type(got) is type(want) or isinstance(got, torch.Tensor)
    if isinstance(want, torch.Tensor):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    elif want is not None:
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, tolerance)


@pytest.mark.parametrize("field", ["scores", "logits", "hidden_states", "attentions"])
@pytest.mark.parametrize("eos_position", [None, 13])
def test_output_fields_equal_plain(drafter, field, eos_position):
    target = copy.deepcopy(tiny_target("qwen3_5"))
    target.set_attn_implementation("eager")
    kwargs = {"return_dict_in_generate": True, f"output_{field}": True, "repetition_penalty": 1.01}
    if eos_position is not None:
        kwargs["eos_token_id"] = int(REFERENCE[0, PROMPT_LENGTH + eos_position])
    plain = generate(target, PROMPT, **kwargs)
    drafted = generate(target, PROMPT, assistant_model=drafter, **kwargs)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert len(plain[field]) == plain.sequences.shape[1] - PROMPT_LENGTH
    assert_close(drafted[field], plain[field])
    assert set(drafted) == {*plain, "stats"}


def test_output_is_a_tensor_unless_a_dict_is_asked_for(drafter):
    assert isinstance(
        generate(tiny_target("qwen3_5"), PROMPT, assistant_model=drafter, output_scores=True), torch.Tensor
    )


@pytest.mark.parametrize("chunk_size", [1, 16, 50, 64])
def test_prefill_chunks_give_the_drafter_every_feature_row_in_order(chunk_size):
    target, prompt = tiny_target("qwen3_5"), random_prompt(50)
    reference = generate(target, prompt)
    drafter = k_right(reference, 3)
    drafter.check = check = FeatureCheck()
    assert generate(target, prompt, prefill_chunk_size=chunk_size).tolist() == reference.tolist()
    got = generate(target, prompt, prefill_chunk_size=chunk_size, assistant_model=drafter)
    assert got.tolist() == reference.tolist()
    assert check.rows[0][0].shape[1] == 50
    assert check.worst(target, reference) <= 1e-4


def test_forwards_of_processors_do_not_reach_the_drafter():
    """Classifier-free guidance runs the target on another prompt, between the forwards of the call."""
    target = tiny_target("qwen3_5")
    kwargs = {"guidance_scale": 1.5, "negative_prompt_ids": PROMPT[:, 3:8]}
    reference = generate(target, PROMPT, **kwargs)
    drafter = k_right(reference, 3)
    drafter.check = check = FeatureCheck()
    assert generate(target, PROMPT, assistant_model=drafter, **kwargs).tolist() == reference.tolist()
    assert check.rows[0][0].shape[1] == PROMPT_LENGTH
    assert check.worst(target, reference) <= 1e-4


def test_forwards_of_the_drafter_do_not_reach_the_drafter():
    """A drafter may run the target itself, on a cache of its own."""
    target = tiny_target("qwen3_5")
    drafter, check = k_right(REFERENCE, 3), FeatureCheck()

    def run_the_target(context):
        check(context)
        fresh_states(target, context.input_ids)

    drafter.check = run_the_target
    ids = generate(target, PROMPT, assistant_model=drafter)
    assert ids.tolist() == REFERENCE[:, : ids.shape[1]].tolist()
    assert check.worst(target, REFERENCE) <= 1e-4


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "nemotron_h"])
def test_left_padding_changes_nothing_for_one_row(family):
    target, reference = tiny_target(family), plain_ids(family, 24, 9)
    pad = torch.full((1, 3), 1)
    prompt = torch.cat([pad, reference[:, :9]], dim=1)
    mask = (torch.arange(12) >= 3).long()[None]
    got = generate(target, prompt, attention_mask=mask, assistant_model=k_right(torch.cat([pad, reference], dim=1), 2))
    assert got[:, 3:].tolist() == reference.tolist()


@pytest.mark.parametrize("with_position_ids", [False, True])
def test_left_padding_and_position_ids_for_three_rows(with_position_ids):
    target = tiny_target("qwen3_5")
    lengths = (4, 12, 9)
    rows = [random_prompt(n, seed=n)[0] for n in lengths]
    prompt = torch.stack([torch.cat([torch.ones(12 - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(12) >= 12 - n).long() for n in lengths])
    kwargs = {"attention_mask": mask}
    if with_position_ids:
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    plain = generate(target, prompt, return_dict_in_generate=True, **kwargs)
    drafted = generate(
        target, prompt, return_dict_in_generate=True, assistant_model=k_right(plain.sequences, 3), **kwargs
    )
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert worst_error(states(cache_of(drafted)), states(cache_of(plain))) <= 1e-5
    for row, text in enumerate(rows):  # and each row is that of the prompt alone
        alone = generate(target, text[None])
        assert drafted.sequences[row, 12 - len(text) :].tolist() == alone[0].tolist()


@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
@pytest.mark.parametrize("first_drafted", [False, True])
@pytest.mark.parametrize("second_drafted", [False, True])
@pytest.mark.parametrize("only_new_ids", [False, True])
def test_cache_of_an_earlier_turn(family, first_drafted, second_drafted, only_new_ids):
    target, first_reference = tiny_target(family), plain_ids(family, 20)
    prompt = torch.cat([first_reference, random_prompt(7, seed=8)], dim=1)
    reference = generate(target, prompt, max_new_tokens=20)

    kwargs = {"assistant_model": k_right(first_reference, 5)} if first_drafted else {}
    first = generate(target, first_reference[:, :12], max_new_tokens=20, return_dict_in_generate=True, **kwargs)
    cache = cache_of(first)
    seen = prompt.shape[1] - 7 - 1
    assert cache.get_seq_length() == seen

    kwargs = cache_argument(cache)
    ids = prompt
    if only_new_ids:
        ids, kwargs["attention_mask"] = prompt[:, seen:], torch.ones_like(prompt)
    if second_drafted:
        drafter = k_right(reference[:, prompt.shape[1] - ids.shape[1] :], 5)
        drafter.check = check = FeatureCheck()
        kwargs["assistant_model"] = drafter
    second = generate(target, ids, max_new_tokens=20, return_dict_in_generate=True, **kwargs)

    assert second.sequences[:, -20:].tolist() == reference[:, -20:].tolist()
    assert cache_of(second) is cache
    assert worst_error(states(cache), fresh_states(target, reference[:, :-1])) <= 1e-5
    if second_drafted:
        assert check.rows[0][0].shape[1] == 8  # the anchor of turn 1 and the seven new tokens
        assert check.worst(target, reference, start=seen) <= 1e-4


@pytest.mark.parametrize("stop", ["eos", "criterion", "length"])
@pytest.mark.parametrize("new_tokens", [1, 4, 9, 15])
def test_plain_generate_continues_on_the_returned_cache(drafter, stop, new_tokens):
    target, length = tiny_target("qwen3_5"), PROMPT_LENGTH + new_tokens
    kwargs = {
        "eos": {"eos_token_id": int(REFERENCE[0, length - 1])},
        "criterion": {"stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] >= length])]},
        "length": {"max_new_tokens": new_tokens},
    }[stop]
    first = generate(target, PROMPT, return_dict_in_generate=True, assistant_model=drafter, **kwargs)
    ids = first.sequences
    assert cache_of(first).get_seq_length() == ids.shape[1] - 1
    assert worst_error(states(cache_of(first)), fresh_states(target, ids[:, :-1]) if ids.shape[1] > 1 else {}) <= 1e-5
    second = generate(target, ids, max_new_tokens=10, **cache_argument(cache_of(first)))
    assert second.tolist() == REFERENCE[:, : second.shape[1]].tolist()


def test_extra_arguments_reach_every_forward_of_the_target(drafter):
    target = copy.deepcopy(tiny_target("qwen3_5"))
    seen = []

    class WithArgument(type(target)):
        def forward(self, *args, temper: float = 1.0, **kwargs):
            seen.append(temper)
            outputs = super().forward(*args, **kwargs)
            outputs.logits = outputs.logits * temper
            return outputs

    target.__class__ = WithArgument
    plain = generate(target, PROMPT, temper=-1.0)
    assert plain.tolist() != REFERENCE[:, : plain.shape[1]].tolist()
    seen.clear()
    drafted = generate(target, PROMPT, temper=-1.0, assistant_model=oracle(plain))
    assert drafted.tolist() == plain.tolist()
    assert set(seen) == {-1.0}
    assert len(seen) <= 1 + 24 // 8


def test_unknown_arguments_are_refused_as_in_plain_generate(drafter):
    with pytest.raises(ValueError, match="nonsense"):
        generate(tiny_target("qwen3_5"), PROMPT, nonsense=1, assistant_model=drafter)
