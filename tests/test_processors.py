"""Logits processors see with a drafter exactly what they see without one: the same prefixes, once each, left to right.

So processors that keep state between their calls, built in or the user's own, give the same tokens.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig

from support import VOCAB_SIZE, ScriptedDrafter, partly_right, random_prompt, tiny_target


PROMPT_LENGTH = 6
NEW_TOKENS = 24


class Recorder(LogitsProcessor):
    """Keeps the sequences it is shown."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(input_ids.tolist())
        return scores


class Counting(Recorder):
    """Forbids another token at every call."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forbidden = (len(self.seen) * 31 + torch.arange(40)) % VOCAB_SIZE
        return super().__call__(input_ids, scores.index_fill(1, forbidden, -torch.inf))


class Watermark(Recorder):
    """Favours tokens at random, from a generator that every call moves on and the last token disturbs."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for _ in range(int(input_ids[0, -1]) % 3):
            torch.rand(1, generator=self.generator)
        bias = 2 * torch.rand(scores.shape, generator=self.generator)
        return super().__call__(input_ids, scores + bias)


class Allowing:
    """A `prefix_allowed_tokens_fn` that keeps its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        self.seen.append((batch_id, input_ids.tolist()))
        return [token for token in range(VOCAB_SIZE) if (token + len(input_ids) + batch_id) % 3]


def plain(batch: int = 1, **options: Any) -> torch.Tensor:
    return generate(random_prompt(PROMPT_LENGTH, batch), **options)


def generate(prompt: torch.Tensor, **options: Any) -> Any:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return tiny_target("qwen3_5").generate(prompt, attention_mask=torch.ones_like(prompt), **options)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "counting": lambda: {"logits_processor": [Counting()]},
    "watermark": lambda: {"logits_processor": [Watermark()]},
    "repetition_penalty": lambda: {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 1},
    "min_new_tokens": lambda: {"min_new_tokens": 9, "eos_token_id": plain()[0, 8:12].tolist(), "pad_token_id": 0},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": Allowing()},
    "bad_words_ids": lambda: {"bad_words_ids": [plain()[0, 8:9].tolist(), plain()[0, 10:12].tolist()]},
    "sequence_bias": lambda: {"sequence_bias": [[plain()[0, 8:10].tolist(), -5.0], [[3], 2.5]]},
    "suppress_tokens": lambda: {"suppress_tokens": list(range(0, VOCAB_SIZE, 2))},
    "exponential_decay": lambda: {
        "exponential_decay_length_penalty": (5, 1.2),
        "eos_token_id": 5,
        "pad_token_id": 0,
    },
    "green_list": lambda: {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "synth_id": lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    "together": lambda: {
        "logits_processor": [Counting(), Watermark()],
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "renormalize_logits": True,
    },
}


def calls_of(options: dict[str, Any], recorder: Recorder) -> list[Any]:
    """What every recorder of a `generate` call has seen."""
    recorders = [recorder, *options.get("logits_processor", []), options.get("prefix_allowed_tokens_fn")]
    return [r.seen for r in recorders if r is not None]


@pytest.mark.lossless
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_processor_sees_the_same_and_gives_the_same(name: str, batch: int) -> None:
    results = []
    for share in (None, 0.6, 1.0):
        options, recorder = OPTIONS[name](), Recorder()
        calls = calls_of(options, recorder)
        drafter: ScriptedDrafter | None = None if share is None else partly_right(results[0][0].sequences, share)
        output = generate(
            random_prompt(PROMPT_LENGTH, batch),
            assistant_model=drafter,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **options,
            **({} if "logits_processor" in options else {"logits_processor": [recorder]}),
        )
        results.append((output, calls))
        assert share is None or drafter.rounds < len(output.scores) - 1
    (reference, reference_calls), *drafted = results
    if name != "none":
        assert not torch.equal(reference.sequences, plain(batch))  # the option matters
    for output, calls in drafted:
        assert torch.equal(output.sequences, reference.sequences)
        assert calls == reference_calls
        for got, want in zip((*output.scores, *output.logits), (*reference.scores, *reference.logits), strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_under_sampling_every_prefix_of_the_output_is_seen_once(batch: int) -> None:
    prompt = random_prompt(PROMPT_LENGTH, batch)
    reference = plain(batch)
    for seed in range(3):
        torch.manual_seed(seed)
        recorder = Recorder()
        ids = generate(
            prompt,
            do_sample=True,
            top_k=2,
            logits_processor=[recorder],
            assistant_model=partly_right(reference, 1.0, block_size=4),
        )
        assert recorder.seen == [ids[:, :length].tolist() for length in range(PROMPT_LENGTH, ids.shape[1])]


def test_processors_run_on_the_target_side_only() -> None:
    """The drafter is handed the sampling warpers, nothing that keeps state."""
    handed = []
    drafter = partly_right(plain(), 1.0)
    drafter.check = lambda context: handed.append([type(warper).__name__ for warper in context.warpers])
    generate(
        random_prompt(PROMPT_LENGTH),
        do_sample=True,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        repetition_penalty=1.5,
        logits_processor=[Counting()],
        assistant_model=drafter,
    )
    assert handed[0] == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]


class Spoiling(LogitsProcessor):
    """Makes every third position's scores NaN."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan") if input_ids.shape[1] % 3 == 0 else scores


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_scores_that_a_processor_spoils_are_those_of_plain_generate(share: float) -> None:
    """The target is not at fault, and plain decoding takes the first token there."""
    options = {"logits_processor": [Spoiling()]}
    want = plain(**options)
    drafter = partly_right(want, share)
    assert torch.equal(generate(random_prompt(PROMPT_LENGTH), assistant_model=drafter, **options), want)
    assert 0 in want[0, PROMPT_LENGTH:]
