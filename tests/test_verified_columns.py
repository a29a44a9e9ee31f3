"""`verified_columns`: the tokens that a verified block adds, column by column; a bigram table is the model."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from checks import check_drafted_token, check_truncated_rows
from ready_hf.acceptance import POSITIONWISE_PROCESSORS, verified_columns
from toys import NO_WARPERS, TOY_SIZE, WARPERS, assert_distributed, bigram_logits, toy_block, toy_drafts, warped


TARGET = bigram_logits(1)
LENGTH = 3  # tokens before the drafts


class SequentialTemperature(logits_process.TemperatureLogitsWarper):
    """Same scores, but not known to look at one position only."""


class Recorder(LogitsProcessor):
    """Keeps the sequences it is shown; adds to the scores, in place, something that depends on them."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.clone())
        return scores.add_(input_ids.sum(-1, keepdim=True) * torch.arange(TOY_SIZE) % 3 / 4)


def follow(rows: int, num_right: list[int], num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy sequences of every row `[B, LENGTH + N + 1]`, and candidates with that many right drafts."""
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % TOY_SIZE
    for _ in range(num_drafts + 1):
        ids = torch.cat([ids, TARGET[ids[:, -1]].argmax(-1, keepdim=True)], dim=1)
    candidates = ids[:, :-1].clone()
    for row, right in enumerate(num_right):
        candidates[row, LENGTH + right :] = (candidates[row, LENGTH + right :] + 1) % TOY_SIZE
    return ids, candidates


def columns_of(
    candidates: torch.Tensor, num_drafts: int, active=None, processors=NO_WARPERS, sample=False, draft_logits=None
):
    active = torch.ones(len(candidates), dtype=torch.bool) if active is None else active
    logits = TARGET[candidates[:, candidates.shape[1] - num_drafts - 1 :]]
    return verified_columns(candidates, num_drafts, logits, draft_logits, active, processors, sample)


@pytest.mark.parametrize(
    "num_right",
    [[0], [2], [4], [4, 4], [0, 4], [4, 1, 2], [3, 3, 4], [0, 0]],
    ids=lambda right: "-".join(map(str, right)),
)
@pytest.mark.parametrize("is_sequential", [False, True])
def test_greedy_takes_drafts_to_the_first_rejection_of_any_row(num_right: list[int], is_sequential: bool) -> None:
    ids, candidates = follow(len(num_right), num_right, 4)
    processors = LogitsProcessorList([SequentialTemperature(1.0)]) if is_sequential else NO_WARPERS
    columns = list(columns_of(candidates, 4, processors=processors))
    together = min(num_right)
    assert len(columns) == together + 1
    for k, column in enumerate(columns):
        assert torch.equal(column.tokens, ids[:, LENGTH + k])
        assert column.is_draft.tolist() == [right > k for right in num_right]
        assert torch.equal(column.logits, TARGET[ids[:, LENGTH + k - 1]])
        assert torch.equal(column.scores, column.logits)


def test_without_drafts_one_token_comes() -> None:
    ids, _ = follow(2, [0, 0], 0)
    (column,) = columns_of(ids[:, :LENGTH], 0)
    assert torch.equal(column.tokens, ids[:, LENGTH])
    assert not column.is_draft.any()
    torch.manual_seed(0)
    start = torch.full((100_000, 1), 5)
    (column,) = columns_of(start, 0, processors=WARPERS, sample=True)
    assert_distributed(column.tokens, warped(TARGET[5], WARPERS))


def test_rows_that_cannot_reject_hold_nobody_back() -> None:
    ids, candidates = follow(3, [0, 4, 3], 4)
    columns = list(columns_of(candidates, 4, active=torch.tensor([False, True, True])))
    assert len(columns) == 4
    assert [column.is_draft.tolist() for column in columns] == [[False, True, True]] * 3 + [[False, True, False]]
    tokens = torch.stack([column.tokens for column in columns], dim=1)
    assert torch.equal(tokens[1:], ids[1:, LENGTH : LENGTH + 4])
    columns = list(columns_of(candidates, 4, active=torch.zeros(3, dtype=torch.bool)))
    assert len(columns) == 5
    assert not any(column.is_draft.any() for column in columns)


def test_drafted_token_follows_target() -> None:
    check_drafted_token()


def test_row_held_back_by_another_emits_its_own_draft() -> None:
    check_truncated_rows()


@pytest.mark.parametrize("is_sequential", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_of_single_rows_and_pairs_are_jointly_right(rows: int, is_sequential: bool) -> None:
    """Two tokens of every row of 3,000 blocks: row 0 has a good drafter, row 1 a bad one."""
    torch.manual_seed(rows)
    num_blocks, target = 3000 // rows, bigram_logits(1, scale=1.0)
    temperature = (SequentialTemperature if is_sequential else logits_process.TemperatureLogitsWarper)(0.8)
    processors = LogitsProcessorList([temperature])
    p = warped(target, processors)
    drafts = [target + 0.25 * bigram_logits(2), target + bigram_logits(3)][:rows]
    sequences, logits = zip(*(toy_drafts(draft, num_blocks, 2, processors) for draft in drafts), strict=True)
    sequences, draft_logits = torch.stack(sequences, dim=1), torch.stack(logits, dim=1)  # [blocks, B, ...]
    pairs, lengths, accepted = [], [], torch.zeros(rows)
    for block in range(num_blocks):
        columns = toy_block(target, sequences[block], draft_logits[block], processors)
        lengths.append(len(columns))
        accepted += columns[0].is_draft
        tokens = torch.stack([column.tokens for column in columns[:2]], dim=1)
        if tokens.shape[1] == 1:
            tokens = torch.cat([tokens, torch.multinomial(p[tokens[:, 0]], 1)], dim=1)
        pairs.append(tokens)
    assert set(lengths) == {1, 2, 3}
    assert 0.6 < accepted[0] / num_blocks < 0.95
    for row in range(rows):
        assert_distributed(torch.stack(pairs)[:, row], p[0][:, None] * p)
    if rows == 2:
        assert 0.1 < accepted[1] / num_blocks < 0.6


@pytest.mark.parametrize("processor_class", POSITIONWISE_PROCESSORS, ids=lambda processor: processor.__name__)
def test_positionwise_processors_give_the_same_one_position_at_a_time(processor_class: type) -> None:
    arguments = {"TopKLogitsWarper": [3], "LogitNormalization": [], "InfNanRemoveLogitsProcessor": []}
    processor = processor_class(*arguments.get(processor_class.__name__, [0.6]))
    one_at_a_time = LogitsProcessorList([processor, SequentialTemperature(1.0)])
    torch.manual_seed(0)
    sequences, draft_logits = toy_drafts(bigram_logits(2), 64, 4, NO_WARPERS)
    rejected = 0
    for row in range(64):
        results = []
        for processors in (LogitsProcessorList([processor]), one_at_a_time):
            torch.manual_seed(row)
            results.append(toy_block(TARGET, sequences[row : row + 1], draft_logits[row : row + 1], processors))
        assert len(results[0]) == len(results[1])
        rejected += len(results[0]) < 5
        for got, want in zip(*results, strict=True):
            for name in got._fields:
                torch.testing.assert_close(getattr(got, name), getattr(want, name), msg=name)
    assert rejected > 0


def test_subclasses_are_not_taken_for_positionwise() -> None:
    """A user's subclass may look at the sequence, so it must see what plain `generate` shows it."""

    class Watching(logits_process.TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            lengths.append(input_ids.shape[1])
            return super().__call__(input_ids, scores)

    lengths: list[int] = []
    _, candidates = follow(1, [2], 4)
    list(columns_of(candidates, 4, processors=LogitsProcessorList([Watching(0.5)])))
    assert lengths == [LENGTH, LENGTH + 1, LENGTH + 2]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("stop_after", [1, 2, 3, 9])
def test_processors_see_the_prefixes_of_the_output_once_each_and_no_more(sample: bool, stop_after: int) -> None:
    lengths = set()
    for seed in range(30):
        torch.manual_seed(seed)
        recorder = Recorder()
        sequences, draft_logits = toy_drafts(TARGET, 2, 4, NO_WARPERS)
        if not sample:
            draft_logits = None
            for k in range(4):
                scores = Recorder()(sequences[:, : k + 1], TARGET[sequences[:, k]])
                sequences[:, k + 1] = scores.argmax(-1) if k != seed % 6 else torch.randint(TOY_SIZE, (2,))
        ids, num_columns = sequences[:, :1], 0
        for column in columns_of(sequences, 4, None, LogitsProcessorList([recorder]), sample, draft_logits):
            num_columns += 1
            assert len(recorder.seen) == num_columns  # nothing ran ahead
            assert torch.equal(recorder.seen[-1], ids)
            ids = torch.cat([ids, column.tokens[:, None]], dim=1)
            if num_columns == stop_after:
                break
        assert len(recorder.seen) == num_columns
        lengths.add(num_columns)
    assert max(lengths) == min(stop_after, 5)
    assert len(lengths) > 1 or stop_after <= 2


def test_inputs_stay_as_they_are_and_scores_do_not_leak_into_logits() -> None:
    torch.manual_seed(0)
    sequences, draft_logits = toy_drafts(TARGET, 4, 3, NO_WARPERS)
    logits, active = TARGET[sequences], torch.ones(4, dtype=torch.bool)
    inputs = (sequences, logits, draft_logits, active)
    copies = [tensor.clone() for tensor in inputs]
    for processors in (LogitsProcessorList([Recorder()]), WARPERS, NO_WARPERS):
        for k, column in enumerate(verified_columns(sequences, 3, logits, draft_logits, active, processors, True)):
            assert torch.equal(column.logits, copies[1][:, k])
            assert column.scores.dtype == column.logits.dtype == torch.float32
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


def test_greedy_draws_no_random_numbers() -> None:
    _, candidates = follow(2, [1, 3], 4)
    noise = torch.get_rng_state()
    list(columns_of(candidates, 4))
    assert torch.equal(torch.get_rng_state(), noise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draft_logits_may_have_half_precision(dtype: torch.dtype) -> None:
    """q is then the distribution of the rounded logits, which the drafts must have been sampled from."""
    torch.manual_seed(0)
    draft = (TARGET + bigram_logits(2)).to(dtype)
    sequences, draft_logits = toy_drafts(draft, 100_000, 1, NO_WARPERS)
    column = toy_block(TARGET, sequences, draft_logits.to(dtype), NO_WARPERS)[0]
    assert_distributed(column.tokens, TARGET[0].softmax(-1))
