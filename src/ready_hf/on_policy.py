"""Rows that the target writes itself, kept on disk: what a drafter learns from best.

    cache_dir/on_policy-<key>/manifest.json                      what was asked for, for people
                              shard-00000-<checksum>.arrow       rows of the first prompts
                              shard-00001-<checksum>.arrow       ...

The key is a hash of everything that decides the rows: weights, tokenizer, options and prompts. A shard is drawn with
a seed that depends on the run's seed and the shard's number alone, so an interrupted run goes on at the first missing
shard and ends with the rows of an uninterrupted one, on the same device and software. A shard's name holds the
checksum of its content (see `row_shards`); one that does not fit is written again.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ready_hf.fingerprints import digest, tokenizer_fingerprint, weights_fingerprint
from ready_hf.row_encoder import Row
from ready_hf.row_shards import find_shard, open_shards, save_shard, write_whole
from ready_hf.target import ensure_patched
from ready_hf.text_sources import DataError, import_datasets


FORMAT = 1  # raised when rows of the same key would change
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class OnPolicyOptions:
    """How the target writes.

    Args:
        max_new_tokens (`int`): Most tokens after a prompt.
        temperature (`float`): Of sampling; 0 for greedy decoding. A drafter is best trained on what it will meet.
        top_p (`float`): Least probability mass that is sampled from.
        top_k (`int`): Most tokens that are sampled from; 0 for all.
        batch_size (`int`): Prompts that are continued at once.
        rows_per_shard (`int`): Rows of a file; what an interruption may cost.
        seed (`int`): Seed.
        learn_prompt (`bool`): Whether prompts are learned too.
        stop_at_end (`bool`): Whether a row ends with the target's end-of-text token.
        forbidden_ids (`tuple[int, ...]`): Ids that are not written, and that no prompt may hold, such as the drafter's
            `mask_token_id`.

    Raises:
        DataError: naming the option, its value and what is allowed.
    """

    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 16
    rows_per_shard: int = 256
    seed: int = 0
    learn_prompt: bool = False
    stop_at_end: bool = True
    forbidden_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in {"max_new_tokens": 1, "top_k": 0, "batch_size": 1, "rows_per_shard": 1}.items():
            if not isinstance(getattr(self, name), int):
                raise DataError(f"`{name}` must be an integer, got {getattr(self, name)!r}")
            if getattr(self, name) < least:
                raise DataError(f"`{name}` must be at least {least}, got {getattr(self, name)}")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise DataError(f"`temperature` must be 0 (greedy) or a finite number above, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise DataError(f"`top_p` must be above 0 and at most 1, got {self.top_p}")


def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    cache_dir: str | Path,
    options: OnPolicyOptions | None = None,
) -> Any:
    """Continuations of prompts by the target; those that `cache_dir` already holds are not written again.

    The options are all that decides: the target's own `generation_config` only says what ends a text.

    Args:
        target (`PreTrainedModel`): Where it is, and as it was left: mode and configuration are put back.
        tokenizer (`PreTrainedTokenizerBase`): Of the target.
        prompts (`Sequence[Sequence[int]]`): Token ids, from `prompt_ids`.
        cache_dir (`str` or `Path`): A folder for any number of such runs.
        options (`OnPolicyOptions`, *optional*): How the target writes.

    Returns:
        `datasets.Dataset`: In the order of the prompts, mapped from disk: `input_ids` of prompt and continuation,
        without padding, and `loss_mask`, 1 on the continuation.

    Raises:
        DataError: no prompts; a prompt without tokens, or with ids that the target does not know or must not see.
        ImportError: the `datasets` library is missing.
    """
    import_datasets()
    options, prompts = options or OnPolicyOptions(), list(prompts)
    if not isinstance(options, OnPolicyOptions):
        raise DataError(f"`options` must be OnPolicyOptions, got {type(options).__name__}")
    _check_prompts(prompts, target, options)
    folder = Path(cache_dir) / f"on_policy-{_key(target, tokenizer, prompts, options)}"
    num_shards = -(-len(prompts) // options.rows_per_shard)
    _begin(folder, target, options, len(prompts), num_shards)
    shards = _whole_shards(folder, num_shards)
    missing = [index for index in range(num_shards) if index not in shards]
    with _writing(target, tokenizer, options) as config:
        for index in tqdm(missing, desc="on-policy text", unit="shard", disable=None):
            part = prompts[index * options.rows_per_shard : (index + 1) * options.rows_per_shard]
            rows = _rows(target, part, config, options, index)
            shards[index] = save_shard(folder, index, rows, {"seed": str(shard_seed(options.seed, index))})
    return open_shards([shards[index] for index in range(num_shards)])


def load_regenerated(folder: str | Path) -> Any:
    """The rows of a finished run, without the target.

    Args:
        folder (`str` or `Path`): `on_policy-<key>`, below `cache_dir`.

    Raises:
        DataError: no such run; a shard is missing or damaged.
    """
    num_shards = _recorded_shards(Path(folder))
    if num_shards is None:
        raise DataError(f"{folder} holds no regenerated text (no readable {MANIFEST}): run `regenerate`")
    shards = _whole_shards(Path(folder), num_shards)
    missing = [index for index in range(num_shards) if index not in shards]
    if missing:
        raise DataError(
            f"{folder} lacks the shards {missing} of {num_shards}, or they are damaged: `regenerate` with the same "
            "arguments writes what is missing"
        )
    return open_shards(list(shards.values()))


def shard_seed(seed: int, index: int) -> int:
    """Seed of a shard, 0 to 2^63 - 1."""
    return int(hashlib.sha256(f"{seed} {index}".encode()).hexdigest()[:16], 16) >> 1


def _recorded_shards(folder: Path) -> int | None:
    """The number of shards by the manifest, if there is one that can be read."""
    try:
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["num_shards"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _whole_shards(folder: Path, num_shards: int) -> dict[int, Path]:
    found = {index: find_shard(folder, index) for index in range(num_shards)}
    return {index: path for index, path in found.items() if path is not None}


def _key(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    options: OnPolicyOptions,
) -> str:
    text = hashlib.sha256()
    for prompt in prompts:
        text.update(array("q", [len(prompt), *prompt]).tobytes())
    end = _end_ids(target, tokenizer, options)
    parts = [FORMAT, weights_fingerprint(target), tokenizer_fingerprint(tokenizer), asdict(options), end]
    return digest([*parts, text.hexdigest()])[:24]


def _check_prompts(prompts: Sequence[Sequence[int]], target: PreTrainedModel, options: OnPolicyOptions) -> None:
    if not len(prompts):
        raise DataError("there are no prompts: give at least one")
    config: Any = target.config.get_text_config(decoder=True)
    size, forbidden = config.vocab_size, set(options.forbidden_ids)
    if not all(0 <= i < size for i in forbidden):
        raise DataError(f"`forbidden_ids` must be ids that the target knows, 0 to {size - 1}, got {sorted(forbidden)}")
    longest = getattr(config, "max_position_embeddings", None)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, list | tuple) or not all(isinstance(i, int) for i in prompt):
            raise DataError(
                f"prompt {number} must be a list of token ids (see `prompt_ids`), got {type(prompt).__name__} "
                f"{str(prompt)[:40]!r}"
            )
        if longest is not None and len(prompt) + options.max_new_tokens > longest:
            raise DataError(
                f"prompt {number} has {len(prompt)} tokens, which with `max_new_tokens` {options.max_new_tokens} is "
                f"more than the target's context of {longest}: shorten or drop it"
            )
        if not len(prompt):
            raise DataError(f"prompt {number} has no tokens: drop it")
        if not 0 <= min(prompt) <= max(prompt) < size:
            raise DataError(
                f"prompt {number} has ids {min(prompt)} to {max(prompt)}, and the target knows 0 to {size - 1}: use "
                "its own tokenizer"
            )
        if not forbidden.isdisjoint(prompt):
            raise DataError(
                f"prompt {number} holds the id {min(forbidden.intersection(prompt))}, one of `forbidden_ids`: drop it"
            )


def _end_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: OnPolicyOptions) -> list[int]:
    """Ids that end a text, in ascending order."""
    if not options.stop_at_end:
        return []
    found = getattr(target.generation_config, "eos_token_id", None)
    found = tokenizer.eos_token_id if found is None else found
    return sorted(found) if isinstance(found, list | tuple) else [] if found is None else [found]


@contextmanager
def _writing(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: OnPolicyOptions
) -> Iterator[GenerationConfig]:
    """The target in evaluation mode, with a generation config from the options and nothing else."""
    end, pad = _end_ids(target, tokenizer, options), tokenizer.pad_token_id
    names = ("temperature", "top_p", "top_k") if options.temperature else ()
    sampling = {name: getattr(options, name) for name in names}
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        eos_token_id=end or None,
        pad_token_id=(end[0] if end else 0) if pad is None else pad,
        suppress_tokens=list(options.forbidden_ids) or None,
        do_sample=options.temperature > 0,
        **sampling,
    )
    ensure_patched(target)
    training = [module for module in target.modules() if module.training]
    own, target.generation_config = target.generation_config, config  # `generate` fills gaps from the model's config
    target.eval()
    try:
        yield config
    finally:
        target.generation_config = own
        for module in training:
            module.training = True


def _rows(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    options: OnPolicyOptions,
    index: int,
) -> list[Row]:
    """The rows of one shard; the random state of the process is put back."""
    rows: list[Row] = []
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(shard_seed(options.seed, index))
        for begin in range(0, len(prompts), options.batch_size):
            batch = prompts[begin : begin + options.batch_size]
            for prompt, written in zip(batch, _continuations(target, batch, config), strict=True):
                mask = [int(options.learn_prompt)] * len(prompt) + [1] * len(written)
                rows.append({"input_ids": [*prompt, *written], "loss_mask": mask})
    return rows


@torch.no_grad()
def _continuations(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> list[list[int]]:
    """What the target writes after each prompt, up to and with the token that ends it."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    written = target.generate(ids.to(target.device), attention_mask=mask.to(target.device))[:, longest:].tolist()
    ends = set(config.eos_token_id or ())
    return [row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))] for row in written]


def _begin(folder: Path, target: PreTrainedModel, options: OnPolicyOptions, num_prompts: int, num_shards: int) -> None:
    """Makes the folder and its manifest, before any compute."""
    manifest = {
        "target": target.config.name_or_path or type(target).__name__,
        "dtype": str(target.dtype),
        "device": target.device.type,
        "num_prompts": num_prompts,
        "num_shards": num_shards,
        "options": asdict(options),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _recorded_shards(folder) is None:
            write_whole(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    except OSError as error:
        raise DataError(f"{folder} cannot be written to ({error.strerror}): choose another `cache_dir`") from error
