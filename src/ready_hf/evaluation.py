"""Real decoding of many prompts with several drafters and without any, side by side in one run, and what came of it.

    found = evaluate(target, tokenizer, {"DSpark": dspark, "ReaDy": ready}, read_prompts(path), max_new_tokens=128)
    print(found.to_markdown())

Every prompt is decoded plainly and with every drafter, in an order that changes from prompt to prompt, so that all of
them see the same machine. Figures:

- accepted length: tokens per verify forward, prefills and their tokens left out; 1 is plain decoding;
- speed: tokens per second of `generate`, prefills included, over those of plain decoding in this run;
- acceptance by position, and by position and context length (`positions`);
- identity: greedy tokens against those of plain decoding.

A prompt is *looping* at a temperature if any text at that temperature ends in a loop (`is_looping`): loops are easy to
draft and would flatter every figure, so such prompts are counted, reported apart and left out of all other figures.
"""

import datetime
import logging
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ready_hf.candidates import Drafter, is_drafter
from ready_hf.demo_prompts import Prompt
from ready_hf.evaluation_result import PLAIN, Evaluation, Text
from ready_hf.intervals import MACRO
from ready_hf.statistics import Round
from ready_hf.target_shape import check_token_ids
from ready_hf.ways import arguments_of, name_of


logger = logging.getLogger(__name__)

CONTEXT_EDGES = (256, 1024, 4096, 16384)
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.001, 10  # but for 0; below, logits overflow
LONGEST_PERIOD, LEAST_TIMES, LEAST_TOKENS = 32, 4, 32


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether new tokens end in a loop: a period of at most 32 tokens, at least 4 times and over at least 32 tokens.

    Four times, since code and lists repeat a line two or three times for good reasons; 32 tokens, since a row of
    spaces or dashes is no loop.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        length = max(LEAST_TIMES * period, LEAST_TOKENS)
        tail = list(tokens[-length:])
        if len(tail) == length and tail[period:] == tail[:-period]:
            return True
    return False


def evaluate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    temperatures: Sequence[float] = (0, 1),
    context_edges: Sequence[int] = CONTEXT_EDGES,
    seed: int = 0,
    resamples: int = 2000,
) -> Evaluation:
    """Decodes every prompt at every temperature, plainly and with every drafter.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): The target.
        drafters (`Mapping[str, Drafter]`): By the name of their rows; differences are taken against the first.
        prompts (`Sequence[Prompt]`): A prompt's `task` is the task it counts for; of `turns` the first is used.
        max_new_tokens (`int`): Per text.
        temperatures (`Sequence[float]`): 0 (greedy), 1 (sampling from the target's own distribution), others.
        context_edges (`Sequence[int]`): Borders of the context lengths, rising: `(256, 1024)` makes the three ranges
            below 256, 256 to 1023, 1024 and more.
        seed (`int`): First of the seeds of the samples, and that of the bootstrap.
        resamples (`int`): Of the bootstrap over prompts.

    An interrupt (Ctrl-C) ends it early, with the prompts that were done, if there are any.

    Raises:
        TypeError: something that is no drafter.
        ValueError: an option that is not allowed, or a prompt that is not of the target's tokens, before anything is
        decoded.
    """
    _check(drafters, prompts, max_new_tokens, temperatures, context_edges, resamples)
    rows: dict[str, Drafter | None] = {PLAIN: None, **drafters}
    names, texts = list(rows), []
    devices = [target.device] if target.device.type == "cuda" else []
    encoded = [prompt.encode(tokenizer, target.device) for prompt in prompts]
    for number, inputs in enumerate(encoded, 1):
        check_token_ids(target, inputs["input_ids"], f"prompt {number}")
    total = len(temperatures) * len(prompts) * len(rows)
    with torch.random.fork_rng(devices), tqdm(total=total, desc="texts", leave=False, disable=None) as bar:
        for drafter in rows.values():  # warm-up
            for temperature in temperatures:
                decode(target, encoded[0], drafter, temperature, seed, min(12, max_new_tokens))
        done = str(len(prompts))
        try:
            for index, (prompt, inputs) in enumerate(zip(prompts, encoded, strict=True)):
                for temperature in temperatures:
                    found = {}
                    for number in range(len(names)):
                        name = names[(index + number) % len(names)]
                        row_seed = seed + 1000 * index + names.index(name)  # every row samples its own text
                        found[name] = decode(target, inputs, rows[name], temperature, row_seed, max_new_tokens)
                        bar.update()
                    for name in names:
                        texts.append(_text(index, prompt, temperature, name, found[name], found[PLAIN], target))
        except KeyboardInterrupt:
            texts = [text for text in texts if text.prompt < index]  # of whole prompts
            done = f"{index} of {len(prompts)}, then interrupted"
            if not texts:
                raise
            logger.warning("ready_hf: interrupted; this is about the first %d of %d prompts", index, len(prompts))
    options = {"max_new_tokens": max_new_tokens, "seed": seed, "resamples": resamples}
    setting = {"target": type(target).__name__, "dtype": str(target.dtype).removeprefix("torch."), **options}
    setting |= _quantization(target)
    setting |= {"device": str(target.device), "hardware": _hardware(target.device), "torch": torch.__version__}
    setting |= {"prompts": done, "date": datetime.date.today().isoformat(), **_cuts(drafters)}
    return Evaluation(tuple(texts), tuple(names), tuple(context_edges), seed, resamples, setting)


@dataclass
class Decoded:
    """One `generate` call: new tokens, seconds of wall time, its verify forwards."""

    tokens: list[int]
    seconds: float
    log: list[Round] = field(default_factory=list)


def decode(
    target: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    drafter: Drafter | None,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    **options: Any,
) -> Decoded:
    """One text. Statistics come with the output, since `record_stats` would wait for the device in every phase."""
    torch.manual_seed(seed)
    options = {
        **arguments_of(temperature),
        "max_new_tokens": max_new_tokens,
        "return_dict_in_generate": True,
        **options,
    }
    if drafter is not None:
        options["assistant_model"] = drafter
    start = now(target)
    output: Any = target.generate(**inputs, **options)
    seconds = now(target) - start
    log = output.stats.log if drafter is not None else []
    return Decoded(output.sequences[0, inputs["input_ids"].shape[1] :].tolist(), seconds, log)


def _text(
    index: int, prompt: Prompt, temperature: float, name: str, found: Decoded, plain: Decoded, target: PreTrainedModel
) -> Text:
    parted = None
    if temperature == 0 and found.tokens != plain.tokens:
        pairs = enumerate(zip(found.tokens, plain.tokens, strict=False))
        parted = next((i for i, (a, b) in pairs if a != b), min(len(found.tokens), len(plain.tokens)))
    return Text(
        prompt=index,
        task=prompt.task or "all",
        temperature=temperature,
        row=name,
        num_tokens=len(found.tokens),
        seconds=found.seconds,
        is_looping=is_looping(without_end(found.tokens, target)),
        first_difference=parted,
        log=tuple(found.log),
    )


def without_end(tokens: Iterable[int], target: PreTrainedModel) -> list[int]:
    """Tokens without those that end a text."""
    eos: Any = getattr(target.generation_config, "eos_token_id", None)
    ends = set(eos) if isinstance(eos, list) else {eos}
    return [token for token in tokens if token not in ends]


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type.upper()} with {torch.get_num_threads()} threads"


def _quantization(target: PreTrainedModel) -> dict[str, str]:
    config = getattr(target.config, "quantization_config", None)
    if config is None or not getattr(target, "is_quantized", False):  # a plain model may be made from such a config
        return {}
    if isinstance(config, dict):
        return {"quantization": str(config.get("quant_method", "yes"))}
    kind: Any = getattr(config, "quantization_method", None)  # bitsandbytes: how many bits
    method = getattr(config, "quant_method", "yes")
    return {"quantization": str(kind() if callable(kind) else getattr(method, "value", method))}


def _cuts(drafters: Mapping[str, Drafter]) -> dict[str, float]:
    """Where drafters with a confidence head cut their blocks; 0 is nowhere."""
    configs = {name: drafter.config for name, drafter in drafters.items() if isinstance(drafter, PreTrainedModel)}
    return {
        f"confidence cut of {name}": float(config.confidence_threshold)
        for name, config in configs.items()
        if getattr(config, "enable_confidence_head", False)
    }


def _check(
    drafters: Mapping[str, Any],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperatures: Sequence[float],
    context_edges: Sequence[int],
    resamples: int,
) -> None:
    for name, drafter in drafters.items():
        if name == PLAIN:
            raise ValueError(f"a drafter must not be called {PLAIN!r}, which is the row of plain decoding")
        if not is_drafter(drafter):
            raise TypeError(f"{name!r} is a {type(drafter).__name__} and no drafter; see `ready_hf.Drafter`")
    if not drafters or not prompts:
        raise ValueError(
            f"an evaluation needs a drafter and a prompt, got {len(drafters)} drafters and {len(prompts)} prompts"
        )
    if any(prompt.task == MACRO for prompt in prompts):
        raise ValueError(f"a task must not be called {MACRO!r}, which is the row of the mean over tasks")
    for option, value in (("max_new_tokens", max_new_tokens), ("resamples", resamples)):
        if value < 1:
            raise ValueError(f"`{option}` must be at least 1, got {value}")
    check_temperatures(temperatures)
    check_edges(context_edges)


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Refuses none at all, the same one twice, and those that no text can be decoded at.

    Raises:
        ValueError: naming what was given and what is allowed.
    """
    allowed = all(t == 0 or LEAST_TEMPERATURE <= t <= MOST_TEMPERATURE for t in temperatures)
    if not temperatures or not allowed or len(set(map(name_of, temperatures))) != len(temperatures):
        raise ValueError(
            f"`temperatures` must be different numbers, 0 (greedy) or {LEAST_TEMPERATURE} to {MOST_TEMPERATURE}, at "
            f"least one, got {list(temperatures)}"
        )


def check_edges(edges: Sequence[int]) -> None:
    """Refuses borders of context lengths that do not rise.

    Raises:
        ValueError: naming them.
    """
    if any(edge < 1 for edge in edges) or list(edges) != sorted(set(edges)):
        raise ValueError(f"`context_edges` must be rising numbers of tokens from 1 on, got {list(edges)}")


def now(target: PreTrainedModel) -> float:
    """`time.perf_counter`, once the target's device has nothing left to do."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
