"""What must hold of the package, as functions that raise `AssertionError` if it does not; for tests and mutants."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ready_hf import record_stats
from ready_hf.acceptance import verified_columns
from support import (
    RecordingCriterion,
    RecordingStreamer,
    ScriptedDrafter,
    StateCheck,
    cache_argument,
    cache_of,
    fresh_states,
    k_right,
    oracle,
    partly_right,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)
from toys import NO_WARPERS, WARPERS, assert_distributed, bigram_logits, toy_block, toy_drafts, warped


WORST_STATE_ERROR = 1e-5


def check_drafted_token(rows: int = 100_000) -> None:
    """A drafted position follows the target's warped distribution, and as many drafts are accepted as can be."""
    torch.manual_seed(0)
    target, draft = bigram_logits(7, scale=0.7), bigram_logits(8, scale=0.7)
    for warpers in (WARPERS, NO_WARPERS):
        column = toy_block(target, *toy_drafts(draft, rows, 1, warpers), warpers)[0]
        p, q = warped(target[0], warpers), warped(draft[0], warpers)
        assert_distributed(column.tokens, p)
        acceptance, highest = float(column.is_draft.float().mean()), float(torch.minimum(p, q).sum())
        assert abs(acceptance - highest) < 6 * (highest * (1 - highest) / rows) ** 0.5  # no method accepts more


def check_truncated_rows(rows: int = 100_000) -> None:
    """Rows that another row holds back at the second draft still emit two tokens from the target's distribution."""
    torch.manual_seed(0)
    target = bigram_logits(1, scale=0.5)
    sequences, draft_logits = toy_drafts(target, rows, 3, NO_WARPERS)
    # the second draft comes from half of the vocabulary
    draft_logits[:, 1] = target[sequences[:, 1]]
    draft_logits[:, 1, ::2] = -torch.inf
    sequences[:, 2] = torch.multinomial(draft_logits[:, 1].softmax(-1), 1)[:, 0]
    logits = target[sequences]
    logits[0, 1, sequences[0, 2]] = -torch.inf  # row 0 is certain to reject it
    active = torch.ones(rows, dtype=torch.bool)
    columns = list(verified_columns(sequences, 3, logits, draft_logits, active, NO_WARPERS, True))
    assert len(columns) == 2
    assert not columns[1].is_draft[0]
    assert 0.3 < float(columns[1].is_draft.float().mean()) < 0.7
    tokens = torch.stack([column.tokens for column in columns], dim=1)[1:]
    assert_distributed(tokens, target[0].softmax(-1)[:, None] * target.softmax(-1))


def assert_states_after(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> None:
    """The cache is that of one plain forward over `ids`."""
    error = worst_error(states(cache), fresh_states(model, ids))
    assert error < WORST_STATE_ERROR, f"relative error {error:.1e}"


def greedy(model: PreTrainedModel, prompt: torch.Tensor, **kwargs: Any) -> Any:
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **kwargs)


def check_lossless(family: str = "qwen3_5", batch: int = 1, new_tokens: int = 32) -> None:
    """Half-right drafts change neither tokens nor, in any round and at the end, any state."""
    model, prompt = tiny_target(family), random_prompt(5, batch)
    reference = greedy(model, prompt, max_new_tokens=new_tokens)

    drafter = partly_right(reference, 0.5, block_size=6)
    drafter.check = state_check = StateCheck(model)
    output = greedy(model, prompt, max_new_tokens=new_tokens, assistant_model=drafter, return_dict_in_generate=True)
    assert state_check.worst < WORST_STATE_ERROR, f"relative error {state_check.worst:.1e}"
    assert torch.equal(output.sequences, reference)
    assert 2 < drafter.rounds < new_tokens - 4
    assert_states_after(model, cache_of(output), reference[:, :-1])


def check_returned_cache() -> None:
    """The returned cache is an ordinary one: layer classes and flags of plain `generate`'s, and it can go on."""
    model, prompt = tiny_target("qwen3_5"), random_prompt(5)
    plain = greedy(model, prompt, max_new_tokens=12, return_dict_in_generate=True)
    drafter = k_right(plain.sequences, 1, block_size=4)
    drafted = greedy(model, prompt, max_new_tokens=12, return_dict_in_generate=True, assistant_model=drafter)
    for got, want in zip(cache_of(drafted).layers, cache_of(plain).layers, strict=True):
        assert type(got) is type(want)
        assert vars(got).keys() == vars(want).keys()
        assert getattr(got, "record_past", None) == getattr(want, "record_past", None)
    tokens = random_prompt(3, seed=6)
    with torch.no_grad():
        for cache in (cache_of(plain), cache_of(drafted)):
            model(tokens, use_cache=True, **cache_argument(cache))
    assert worst_error(states(cache_of(drafted)), states(cache_of(plain))) < WORST_STATE_ERROR


def check_statistics(right: int = 2, block_size: int = 4, new_tokens: int = 20) -> None:
    """Rounds, drafts and accepted drafts by position, counted here once more."""
    model, prompt = tiny_target("qwen3_5"), random_prompt(5)
    reference = greedy(model, prompt, max_new_tokens=new_tokens)
    with record_stats() as stats:
        greedy(model, prompt, max_new_tokens=new_tokens, assistant_model=k_right(reference, right, block_size))
    rounds, drafted, accepted = 0, [0] * block_size, [0] * block_size
    left = new_tokens - 1
    while left:
        num_drafts = min(block_size, left - 1)
        num_accepted = min(right, num_drafts)
        rounds, left = rounds + 1, left - num_accepted - 1
        for counts, count in ((drafted, num_drafts), (accepted, num_accepted)):
            counts[:count] = [n + 1 for n in counts[:count]]
    assert (stats.calls, stats.rounds, stats.row_rounds) == (1, rounds, rounds)
    assert (stats.drafted_by_position, stats.accepted_by_position) == (drafted, accepted)
    assert (stats.new_tokens, stats.round_tokens) == (new_tokens, new_tokens - 1)
    assert stats.tokens_per_forward == (new_tokens - 1) / rounds


def _stopped(position: int, arguments: Callable[[int], dict[str, Any]], **kwargs: Any) -> None:
    model, prompt = tiny_target("qwen3_5"), random_prompt(5)
    reference = greedy(model, prompt, max_new_tokens=20)
    token = int(reference[0, 5 + position])
    assert token not in reference[0, 5 : 5 + position]
    plain = greedy(model, prompt, max_new_tokens=20, **arguments(token))
    assert plain.shape[1] == 5 + position + 1
    drafted = greedy(
        model,
        prompt,
        max_new_tokens=20,
        assistant_model=oracle(reference),
        return_dict_in_generate=True,
        **arguments(token),
    )
    assert torch.equal(drafted.sequences, plain)
    assert_states_after(model, cache_of(drafted), plain[:, :-1])


def check_criterion_inside_block(position: int = 4) -> None:
    """A stopping criterion ends the output where it says, also in the middle of accepted drafts."""
    _stopped(position, lambda token: {"stopping_criteria": [RecordingCriterion(lambda ids: ids[:, -1] == token)]})


def check_eos_inside_block(position: int = 4) -> None:
    """An end-of-sequence token in the middle of accepted drafts ends the output."""
    _stopped(position, lambda token: {"eos_token_id": token, "pad_token_id": 0})


def check_streamer() -> None:
    """A streamer gets the prompt, every token on its own, and one end."""
    model, prompt = tiny_target("qwen3_5"), random_prompt(5)
    plain, drafted = RecordingStreamer(), RecordingStreamer()
    reference = greedy(model, prompt, max_new_tokens=20, streamer=plain)
    drafter: ScriptedDrafter = partly_right(reference, 0.8)
    greedy(model, prompt, max_new_tokens=20, streamer=drafted, assistant_model=drafter)
    assert drafted.events == plain.events
    assert len(plain.events) == 1 + 20 + 1
