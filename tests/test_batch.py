"""Several rows at once: they advance together, and every row is what plain `generate` makes of it."""

import copy
import functools

import pytest
import torch

import ready_hf
from support import (
    RecordingCriterion,
    RecordingStreamer,
    ScriptedDrafter,
    StateCheck,
    cache_argument,
    cache_of,
    random_prompt,
    states,
    tiny_target,
    worst_error,
)


LENGTHS = (3, 12, 9, 7)
WIDTH = max(LENGTHS)
PAD = 1
ROWS = [random_prompt(length, seed=20 + length) for length in LENGTHS]


def batch() -> dict[str, torch.Tensor]:
    """The rows, left-padded."""
    ids = torch.cat([torch.nn.functional.pad(row, (WIDTH - row.shape[1], 0), value=PAD) for row in ROWS])
    mask = torch.stack([(torch.arange(WIDTH) >= WIDTH - length).long() for length in LENGTHS])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, **kwargs):
    options = {"do_sample": False, "max_new_tokens": 28, "pad_token_id": PAD, "return_dict_in_generate": True}
    return model.generate(**batch(), **options | kwargs)


@functools.cache
def free_ids() -> torch.Tensor:
    """What the rows become if nothing ends them early."""
    return generate(tiny_target("qwen3_5")).sequences


@functools.cache
def alone(row: int, eos: int) -> list[int]:
    """What a row becomes on its own."""
    model = tiny_target("qwen3_5")
    ids = model.generate(ROWS[row], do_sample=False, max_new_tokens=28, eos_token_id=eos, pad_token_id=PAD)
    return ids[0].tolist()


class RowDrafter(ScriptedDrafter):
    """K-RIGHT with another k for every row: each has its own acceptance."""

    def __init__(self, reference, ks, block_size=8):
        super().__init__(reference, block_size)
        self.ks = torch.tensor(ks)[:, None]

    def draft(self, context):
        drafts, _ = super().draft(context)
        wrong = torch.arange(drafts.shape[1]) >= self.ks
        return torch.where(wrong, (drafts + 1) % 97, drafts), None


def assert_same(model, plain, drafted):
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert cache_of(drafted).get_seq_length() == drafted.sequences.shape[1] - 1
    assert worst_error(states(cache_of(drafted)), states(cache_of(plain))) <= 1e-5


ACCEPTANCES = {"oracle": (8, 8, 8, 8), "one bad row": (8, 0, 8, 8), "mixed": (1, 5, 3, 8), "none": (0, 0, 0, 0)}


@pytest.mark.lossless
@pytest.mark.parametrize("ks", ACCEPTANCES.values(), ids=ACCEPTANCES)
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "nemotron_h"])
def test_rows_of_different_length_and_acceptance(family, ks):
    model = tiny_target(family)
    plain = generate(model)
    drafter = RowDrafter(plain.sequences, ks)
    drafter.check = check = StateCheck(model, every=6)
    drafted = generate(model, assistant_model=drafter)
    assert_same(model, plain, drafted)
    assert check.worst <= 1e-5
    assert drafted.stats.rounds == -(-27 // (min(ks) + 1))


@pytest.mark.parametrize("ks", list(ACCEPTANCES.values())[:3], ids=list(ACCEPTANCES)[:3])
@pytest.mark.parametrize("finished_first", range(len(LENGTHS)))
def test_one_row_finishes_early(ks, finished_first):
    model = tiny_target("qwen3_5")
    free = free_ids()
    eos = int(free[finished_first, WIDTH + 10])
    plain = generate(model, eos_token_id=eos)
    drafted = generate(model, eos_token_id=eos, assistant_model=RowDrafter(free, ks))
    assert_same(model, plain, drafted)
    assert (drafted.sequences[finished_first, WIDTH + 11 :] == PAD).all()
    for row, ids in enumerate(ROWS):  # and each row is that of its prompt alone
        want, start = alone(row, eos), WIDTH - ids.shape[1]
        assert drafted.sequences[row, start : start + len(want)].tolist() == want
        assert (drafted.sequences[row, start + len(want) :] == PAD).all()


@pytest.mark.parametrize("ks", ACCEPTANCES.values(), ids=ACCEPTANCES)
def test_all_rows_finish_at_different_places(ks):
    model = tiny_target("qwen3_5")
    free = free_ids()
    eos = [int(free[row, WIDTH + place]) for row, place in enumerate((3, 17, 10, 11))]
    streamers = RecordingCriterion(), RecordingCriterion()
    plain = generate(model, eos_token_id=eos, stopping_criteria=[streamers[0]])
    drafted = generate(model, eos_token_id=eos, stopping_criteria=[streamers[1]], assistant_model=RowDrafter(free, ks))
    assert_same(model, plain, drafted)
    assert streamers[0].calls == streamers[1].calls


@pytest.mark.parametrize("with_eos", [False, True])
@pytest.mark.parametrize("ks", ACCEPTANCES.values(), ids=ACCEPTANCES)
def test_rows_finished_by_a_criterion(ks, with_eos):
    """Without an eos id plain `generate` lets a finished row run on; with one it is padded."""
    model = tiny_target("qwen3_5")
    free = free_ids()
    last = free[:, WIDTH + 7 : WIDTH + 8] + torch.tensor([[0], [1000], [1000], [1000]])

    def row_0_is_done(ids):
        return (ids[:, WIDTH:] == last).any(-1) | (ids.shape[1] >= WIDTH + 22)

    kwargs = {"eos_token_id": 96} if with_eos else {}
    plain = generate(model, stopping_criteria=[RecordingCriterion(row_0_is_done)], **kwargs)
    drafted = generate(
        model,
        stopping_criteria=[RecordingCriterion(row_0_is_done)],
        assistant_model=RowDrafter(free, ks),
        **kwargs,
    )
    assert plain.sequences.shape[1] == WIDTH + 22
    assert_same(model, plain, drafted)


def test_a_criterion_that_holds_for_one_prefix_only():
    """It finishes its row for good; the others go on."""
    model = tiny_target("qwen3_5")
    free = free_ids()

    def once(ids):
        return torch.tensor([row * 3 + WIDTH + 5 == ids.shape[1] for row in range(len(ROWS))])

    plain = generate(model, stopping_criteria=[RecordingCriterion(once)])
    drafted = generate(
        model, stopping_criteria=[RecordingCriterion(once)], assistant_model=RowDrafter(free, (2, 8, 1, 8))
    )
    assert_same(model, plain, drafted)


def test_streamer_gets_the_columns_of_plain_generate():
    model = tiny_target("qwen3_5")
    plain, drafted = RecordingStreamer(), RecordingStreamer()
    reference = generate(model, streamer=plain).sequences
    generate(model, streamer=drafted, assistant_model=RowDrafter(reference, (1, 5, 3, 8)))
    assert drafted.events == plain.events


def test_outputs_of_every_row():
    model = copy.deepcopy(tiny_target("qwen3_5"))  # transformers leaves hooks on a model whose outputs it captured
    kwargs = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "repetition_penalty": 1.1}
    plain = generate(model, **kwargs)
    drafted = generate(model, assistant_model=RowDrafter(plain.sequences, (1, 5, 3, 8)), **kwargs)
    assert_same(model, plain, drafted)
    for field in ("scores", "logits"):
        torch.testing.assert_close(drafted[field], plain[field], rtol=1e-4, atol=1e-4)
    for got, want in zip(drafted.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_next_turn_of_a_batch():
    model = tiny_target("qwen3_5")
    first = generate(model)
    drafted = generate(model, assistant_model=RowDrafter(first.sequences, (2, 5, 3, 8)))
    ids = torch.cat([first.sequences, random_prompt(5, batch=len(ROWS), seed=3)], dim=1)
    mask = torch.nn.functional.pad(batch()["attention_mask"], (0, ids.shape[1] - WIDTH), value=1)
    kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20, "pad_token_id": PAD}
    want = model.generate(ids, **cache_argument(cache_of(first)), **kwargs)
    got = model.generate(
        ids, **cache_argument(cache_of(drafted)), assistant_model=RowDrafter(want, (2, 5, 3, 8)), **kwargs
    )
    assert got.tolist() == want.tolist()


def test_statistics_count_unfinished_rows():
    model = tiny_target("qwen3_5")
    free = generate(model, max_new_tokens=19).sequences
    eos = int(free[1, WIDTH + 9])
    assert not (free[[0, 2, 3], WIDTH:] == eos).any()
    stats = generate(model, max_new_tokens=19, eos_token_id=eos, assistant_model=RowDrafter(free, (8,) * 4)).stats
    assert stats.rounds == 2  # tokens 1..9 of all rows (row 1 ends with its last), 10..18 of three
    assert stats.row_rounds == 4 + 3 * (stats.rounds - 1)
    assert stats.new_tokens == 3 * 19 + 10
    assert stats.round_tokens == 3 * 18 + 9
    assert stats.drafted_by_position == [7] * 8
    assert stats.accepted_by_position == [7] * 8


def test_prompt_lookup_takes_one_row_only():
    with pytest.raises(ValueError, match="one sequence at a time"):
        generate(tiny_target("qwen3_5"), assistant_model=ready_hf.PromptLookupDrafter())
