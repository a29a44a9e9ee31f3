"""Random calls of `generate`: prompts, options and drafters, drawn by hypothesis; see `test_random_calls.py`."""

import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LogitsProcessor
from transformers.cache_utils import StaticLayer

import ready_hf
from assistants import noisy
from ready_hf.assisted import AssistantDrafter
from support import RecordingStreamer, cache_argument, cache_of, drafter_for, partly_right
from test_lossless import TASK


FIRST_TURN = ("cache_implementation", "prefill_chunk_size")
ONE_ROW = ("lookup", "assistant")  # drafters that take one row
DRAFTERS = {
    "tiny": ("half right", "right", "half right", "right", "wrong", "untrained", *ONE_ROW),
    "small": ("ready", "dspark", "ready", "dspark", *ONE_ROW),
}


@functools.cache
def load(name: str, device: str = "cpu") -> Any:
    path = ready_hf.tiny_target_path() if name == "tiny" else ready_hf.small_target_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    ready_hf.ensure_patched(model)
    return model


@functools.cache
def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(load(name).name_or_path)


@functools.cache
def text(name: str) -> torch.Tensor:
    """Ids that prompts are cut from: what the target has learned to go on with."""
    content = TASK
    if name == "small":
        lines = (Path(ready_hf.small_target_path()) / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        content = "".join(json.loads(line)["prompt"] for line in lines[:3])
    return tokenizer(name)(content, return_tensors="pt").input_ids[0]


@functools.cache
def trained_drafter(kind: str, device: str) -> Any:
    return AutoModel.from_pretrained(ready_hf.small_drafter_path(kind), dtype=torch.float32).to(device).eval()


@functools.cache
def untrained_drafter(device: str) -> Any:
    return drafter_for(load("tiny"), block_size=4, sliding_window=8).to(device)


@functools.cache
def assistant(name: str, device: str) -> Any:
    model = noisy(load(name), 0.1).to(device)
    model.generation_config.num_assistant_tokens = 4
    return model


def drafter(name: str, kind: str, reference: torch.Tensor) -> Any:
    """A drafter for a target, where `reference` is, which is the text that scripted ones know."""
    device = reference.device.type
    if kind in ("right", "half right", "wrong"):
        share = {"right": 1.0, "half right": 0.6, "wrong": 0.0}[kind]
        reference = reference.masked_fill(reference == 0, 3)  # no drafter knows that a row has finished and is padded
        return partly_right(torch.nn.functional.pad(reference, (0, 24), value=3), share, block_size=5)
    if kind in ("ready", "dspark"):
        return trained_drafter(kind, device)
    if kind == "assistant":
        return AssistantDrafter(assistant(name, device))
    return untrained_drafter(device) if kind == "untrained" else ready_hf.PromptLookupDrafter(num_tokens=4)


class Remembering(LogitsProcessor):
    """A processor with state: what it adds depends on every token that it has been shown, and on how often."""

    def __init__(self) -> None:
        self.total = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.total = (31 * self.total + int(input_ids[:, -1].sum())) % 1009
        scores = scores.clone()
        scores[:, self.total % scores.shape[1]] += 3.0
        return scores


@dataclass(frozen=True)
class Call:
    """One call, or two on one cache.

    Args:
        target (`str`): "tiny" or "small".
        kind (`str`): Of drafter; see `DRAFTERS`.
        starts (`list[int]`): Where the prompt of each row begins in `text`.
        lengths (`list[int]`): Of the prompts; shorter ones are padded at the left.
        options (`dict[str, Any]`): Of `generate`.
        extras (`set[str]`): "processor", "streamer" or "stop strings"; `options` cannot hold what keeps state.
        more (`int`): Tokens that a second turn adds to the text; 0 for a single turn.
        seed (`int`): Of sampling.
        device (`str`): Of target, prompts and drafter.
    """

    target: str
    kind: str
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    options: dict[str, Any]
    extras: frozenset[str] = frozenset()
    more: int = 0
    seed: int = 0
    device: str = "cpu"

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        longest, ids = max(self.lengths), text(self.target)
        rows = [ids[start : start + length] for start, length in zip(self.starts, self.lengths, strict=True)]
        padded = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
        mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
        return {"input_ids": padded.to(self.device), "attention_mask": mask.to(self.device)}

    def run(self, with_drafter: Any = None) -> "Outcome":
        """Generates, in one turn or two."""
        model, inputs, cache = load(self.target, self.device), self.inputs, {}
        turns, events = [], []
        for turn in range(2 if self.more else 1):
            # a cache that is handed over cannot be asked for, and 5.17 reads what follows it wrongly in pieces
            options = {k: v for k, v in self.options.items() if not turn or k not in FIRST_TURN}
            if "processor" in self.extras:
                options["logits_processor"] = [Remembering()]
            if "streamer" in self.extras:
                options["streamer"] = streamer = RecordingStreamer()
            if "stop strings" in self.extras:
                options |= {"stop_strings": ["self", " =", "\n\n", "(r"], "tokenizer": tokenizer(self.target)}
            if with_drafter is not None:
                options["assistant_model"] = with_drafter(turn)
            torch.manual_seed(self.seed + turn)
            output = model.generate(**inputs, **cache, **options, return_dict_in_generate=True)
            turns.append(output)
            events += [("ids", *streamer.events)] if "streamer" in self.extras else []
            new = text(self.target)[: self.more].to(self.device).expand(len(output.sequences), -1)
            ids = torch.cat([output.sequences, new], dim=1)
            mask = inputs["attention_mask"]
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            inputs, cache = {"input_ids": ids, "attention_mask": mask}, cache_argument(cache_of(output))
        return Outcome(turns, events)


@dataclass
class Outcome:
    """What the turns of a call gave."""

    turns: list[Any]
    events: list[Any]

    @property
    def ids(self) -> list[Any]:
        return [output.sequences.tolist() for output in self.turns]

    def rounds(self) -> tuple[int, int]:
        """Rounds and accepted drafts."""
        stats = [output.stats for output in self.turns]
        return sum(s.rounds for s in stats), sum(sum(s.accepted_by_position) for s in stats)


def outcome(run: Callable[[], Outcome]) -> Outcome | tuple[type, str]:
    """What a call gives, or its error: plain and drafted calls have to share either."""
    try:
        return run()
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        return type(error), str(error)


@functools.cache
def common(name: str, most: int) -> list[int]:
    """Tokens that the target is likely to write, the likeliest first."""
    return [token for token, _ in Counter(text(name).tolist()).most_common(most)]


def lengths(longest: int) -> st.SearchStrategy[dict[str, int]]:
    new = st.sampled_from([1, 2, 4, longest - 1, longest, longest])
    return st.one_of(
        st.builds(lambda n: {"max_new_tokens": n}, new),
        st.builds(lambda n, least: {"max_new_tokens": n, "min_new_tokens": least}, new, st.integers(0, longest)),
        st.builds(lambda n: {"max_length": n + 8}, new),
        st.builds(lambda n, least: {"max_length": n + 8, "min_length": least}, new, st.integers(0, longest)),
    )


def options(name: str) -> dict[str, st.SearchStrategy[Any]]:
    """Options of `generate`, beside lengths and sampling, that change what is decoded or what comes out."""
    some, likely = st.sampled_from(common(name, 60)), st.sampled_from(common(name, 12))
    static = ["static"] if getattr(StaticLayer, "is_croppable", False) else []
    return {
        "num_assistant_tokens": st.integers(0, 9),
        "eos_token_id": st.one_of(likely, st.lists(some, min_size=1, max_size=12, unique=True)),
        "repetition_penalty": st.sampled_from([0.8, 1.1, 1.8]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "bad_words_ids": st.lists(st.lists(some, min_size=1, max_size=2), min_size=1, max_size=4),
        "suppress_tokens": st.lists(some, min_size=1, max_size=20),
        "begin_suppress_tokens": st.lists(some, min_size=1, max_size=20),
        "forced_eos_token_id": some,
        "exponential_decay_length_penalty": st.tuples(st.integers(0, 5), st.sampled_from([1.1, 2.0])),
        "renormalize_logits": st.just(True),
        "remove_invalid_values": st.just(True),
        "cache_implementation": st.sampled_from(["dynamic", *static]),
        "prefill_chunk_size": st.integers(1, 8),
        "output_scores": st.just(True),
        "output_logits": st.just(True),
    }


WARPERS = {
    "temperature": st.sampled_from([0.3, 1.0, 2.0]),
    "top_k": st.integers(1, 40),
    "top_p": st.sampled_from([0.2, 0.9, 1.0]),
    "min_p": st.sampled_from([0.01, 0.2]),
    "typical_p": st.sampled_from([0.3, 0.95]),
}


def some_of(draw: Any, table: dict[str, st.SearchStrategy[Any]], most: int) -> dict[str, Any]:
    """A few of many options: of all together, each would be lost in what the others do."""
    names = draw(st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True))
    return {name: draw(table[name]) for name in names}


@st.composite
def calls(draw: Any, name: str, longest: int, sample: bool) -> Call:
    """A call on a target, of up to `longest` new tokens."""
    kind = draw(st.sampled_from(DRAFTERS[name]))
    rows = 1 if kind in ONE_ROW else draw(st.integers(1, 3))
    chosen = {"do_sample": sample, **draw(lengths(longest)), **some_of(draw, options(name), 4)}
    if rows > 1 and draw(st.booleans()):  # rows that finish at different places
        chosen["eos_token_id"] = draw(st.lists(st.sampled_from(common(name, 12)), min_size=1, max_size=3))
    found = Call(
        target=name,
        kind=kind,
        starts=tuple(draw(st.integers(0, len(text(name)) - 13)) for _ in range(rows)),
        lengths=tuple(draw(st.integers(1, 12)) for _ in range(rows)),
        options=chosen | (some_of(draw, WARPERS, 3) if sample else {}),
        extras=draw(st.frozensets(st.sampled_from(["processor", "streamer", "stop strings"]), max_size=2)),
        more=draw(st.sampled_from([0, 0, 1, 4])),
        seed=draw(st.integers(0, 9)),
    )
    if found.options.get("cache_implementation") == "static" or "max_length" in found.options:
        found = replace(found, more=0)  # a static cache is as long as its call; a second turn has no room
    return found
