"""The decoding loop: draft, verify, accept, commit. Exactly the output of plain `generate`, in fewer target forwards.

One round, with x_0 the newest token (the *anchor*: chosen by the target, not yet fed to it):

1. draft    a candidate generator proposes x_1 .. x_g;
2. verify   one target forward over x_0 .. x_g, recorded by `rollback`;
3. accept   tokens are taken left to right until a draft is rejected; one token of the target's own follows;
4. commit   the cache becomes that of the accepted prefix: it has always seen every token but the newest.

Batches advance together, by the fewest accepted drafts of any unfinished row. Every stopping criterion sees every
prefix of a block; a block ends where a row finishes, so that the cache is that of plain `generate`, padding included.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.streamers import BaseStreamer

from ready_hf.acceptance import Column, verified_columns
from ready_hf.candidates import Drafter
from ready_hf.ops import takes, uses_kernels
from ready_hf.outputs import Transcript
from ready_hf.rollback import Rollback, check_cache, close_surely
from ready_hf.statistics import CallStats
from ready_hf.target import cache_in, check_cached_states, check_target, ensure_patched


logger = logging.getLogger(__name__)

# Options that are a way of decoding of their own, or change what is decoded.
EXCLUSIVE_OPTIONS = (
    "assistant_ensemble_weight",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "speculation_type",
    "dola_layers",
    "force_words_ids",
    "constraints",
)


@torch.no_grad()
def speculative_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: Drafter,
    streamer: BaseStreamer | None = None,
    num_assistant_tokens: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decodes with a drafter; called by `generate`, which has prepared everything but `drafter`.

    Args:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.LongTensor` of shape `[B, L]`): Prompt, left-padded.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepares them for any
        decoding method.
        drafter (`Drafter`): Provides the candidate generator.
        streamer (`BaseStreamer`, *optional*): Gets every token, one at a time.
        num_assistant_tokens (`int`, *optional*): Most drafts to verify per round.

    Returns:
        `torch.LongTensor` of shape `[B, L + new]` or `SpeculativeDecodingOutput`, as
        `generation_config.return_dict_in_generate` says.

    Raises:
        UnsupportedTargetError, ValueError: before any compute, if the target, its cache or an option cannot be decoded
        exactly; after the prompt, if an unknown recurrence shows only in the cache.
        RuntimeError: before any compute, if Triton kernels are forced and cannot run.
    """
    check_options({**vars(generation_config), "num_assistant_tokens": num_assistant_tokens}.get)
    layers = check_target(model)
    check_cache(cache_in(model_kwargs))
    if getattr(generation_config, "compile_config", None) is not None:
        logger.warning(
            "ready_hf: `compile_config` is for plain decoding; with a drafter the target runs as it is. Call "
            "`target.compile()` to compile it"
        )
    if uses_kernels(model.device):  # raises if they are forced and cannot run, or not in this dtype
        takes(model.dtype)
    ensure_patched(model)
    sequences = _Sequences(input_ids, stopping_criteria, generation_config, streamer)
    call = CallStats(input_ids.device)
    with ExitStack() as stack:
        stack.callback(call.close)
        generator = drafter.get_candidate_generator(model, input_ids, generation_config, logits_processor)
        if not isinstance(generator, CandidateGenerator):
            raise TypeError(
                f"{type(drafter).__name__}.get_candidate_generator returned {type(generator).__name__}; expected a "
                "transformers CandidateGenerator"
            )
        if callable(getattr(generator, "close", None)):
            close_surely(stack, generator.close)
        most = getattr(generator, "most_drafts", None)  # of a block drafter
        if most is not None and num_assistant_tokens is not None and num_assistant_tokens > most:
            logger.warning(
                "ready_hf: num_assistant_tokens=%d, but %s drafts %d tokens per round, as it was trained to: going on "
                "with %d",
                num_assistant_tokens,
                type(drafter).__name__,
                most,
                most,
            )

        with call.timing("prefill"), _reading_target(generator):
            outputs = model._prefill(input_ids, generation_config, model_kwargs)
        rollback = Rollback(cache_in(outputs), stack)
        check_cached_states(model, layers, rollback.cache)
        sequences.transcript.add_prefill(outputs)
        logits = _last_logits(outputs, 1, input_ids)
        for column in verified_columns(
            input_ids, 0, logits, None, sequences.emitting, logits_processor, bool(generation_config.do_sample)
        ):
            call.stats.new_tokens += sequences.num_emitting
            sequences.append(column)
        model_kwargs = _extended(model, outputs, model_kwargs, 1)

        num_matches = 0
        while sequences.num_unfinished:
            # 1. draft
            room = generation_config.max_length - sequences.ids.shape[1] - 1
            limit = room if num_assistant_tokens is None else min(room, num_assistant_tokens)
            with call.timing("draft"):
                drafts, draft_logits = _propose(generator, sequences.ids, limit, model_kwargs, outputs, num_matches)
                drafts = sequences.padded_where_finished(drafts)
                candidates = torch.cat([sequences.ids, drafts], dim=1)
            length = drafts.shape[1] + 1
            del outputs

            # 2. verify
            rows = sequences.num_emitting
            call.stats.count_round(length - 1, rows, sequences.ids.shape[1] - 1)
            with call.timing("verify"), _reading_target(generator):
                outputs = _verify(model, candidates, length, rollback, model_kwargs, generator)
                logits = _last_logits(outputs, length, input_ids)

            # 3. accept
            keep = 0
            for column in verified_columns(
                candidates,
                length - 1,
                logits,
                draft_logits,
                sequences.emitting,
                logits_processor,
                bool(generation_config.do_sample),
            ):
                if keep < length - 1:
                    call.stats.count_accepted(keep, column.num_drafts)
                keep += 1
                call.stats.count_tokens(rows)
                if sequences.append(column):
                    break

            # 4. commit
            with call.timing("commit"):
                if length > 1:
                    rollback.commit(keep)
            sequences.transcript.add_block(outputs, length, keep)
            model_kwargs = _extended(model, outputs, model_kwargs, keep)
            num_matches = keep - 1
            generator.update_candidate_strategy(sequences.ids, logits, num_matches)

        cache = rollback.cache
    if streamer is not None:
        streamer.end()
    return sequences.transcript.output(sequences.ids, cache, call.stats)


def check_options(option: Callable[[str], Any]) -> None:
    """Refuses options that drafted decoding cannot honour exactly, one clear sentence each.

    Args:
        option (`Callable[[str], Any]`): The value of a generation option by name; `None` if unset or unknown.

    Raises:
        ValueError: naming the option, its value and what to do.
    """
    refused = {name: option(name) is not None for name in EXCLUSIVE_OPTIONS}
    refused |= {name: bool(option(name)) for name in ("use_mtp", "penalty_alpha", "token_healing")}
    refused |= {name: (option(name) or 1) > 1 for name in ("num_beams", "num_return_sequences")}
    refused["cache_implementation"] = option("cache_implementation") in ("paged", "quantized")
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(
                f"`{name}={option(name)!r}` cannot be combined with a drafter, which decodes greedily or by "
                f"sampling, one sequence per prompt, on dynamic or static caches. Drop `{name}` or the drafter."
            )
    limit = option("num_assistant_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise ValueError(
            f"`num_assistant_tokens` must be an integer >= 0, got {limit!r}; leave it out to verify every draft"
        )


class _Sequences:
    """The growing sequences of a call, which rows are unfinished, and where their tokens go."""

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.ids = input_ids
        self.unfinished = torch.ones(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        self.num_unfinished = input_ids.shape[0]
        self.transcript = Transcript(config)
        self._stopping_criteria = stopping_criteria
        self._streamer = streamer
        # as in plain `generate`: without an eos criterion, rows that other criteria finished go on
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self._pad = config._pad_token_tensor if has_eos else None

    @property
    def emitting(self) -> torch.Tensor:
        """Rows `[B]` whose tokens are the target's own: the unfinished ones; all, if finished rows are not padded."""
        return torch.ones_like(self.unfinished) if self._pad is None else self.unfinished

    @property
    def num_emitting(self) -> int:
        """Number of rows that emit tokens of the target's own."""
        return len(self.unfinished) if self._pad is None else self.num_unfinished

    def append(self, column: Column) -> bool:
        """Adds one token per row; returns whether a row finished, which ends the block."""
        tokens, emitting = column.tokens, self.emitting
        if self._pad is not None:
            tokens = torch.where(self.unfinished, tokens, self._pad.to(tokens.device))
        self.transcript.add_column(column)
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=1)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        self.unfinished = self.unfinished & ~self._stopping_criteria(self.ids, self.transcript.scores)
        is_nan = emitting & column.scores.gather(1, column.tokens[:, None])[:, 0].isnan()  # argmax finds a NaN
        before = self.num_unfinished
        self.num_unfinished, num_nan = torch.stack([self.unfinished.sum(), is_nan.sum()]).tolist()
        # scores that processors spoil are the caller's: plain `generate` goes on with them
        if num_nan and bool((column.logits.isnan() | column.logits.isposinf())[is_nan].any()):
            raise RuntimeError(
                f"the target's scores of token {self.ids.shape[1] - 1} are not a number: is it broken, or overflowing "
                "in its dtype? `remove_invalid_values=True` goes on regardless"
            )
        return self.num_unfinished < before

    def padded_where_finished(self, drafts: torch.Tensor) -> torch.Tensor:
        """Drafts with padding in finished rows: what plain `generate` feeds there."""
        if self._pad is None or self.num_unfinished == len(self.unfinished):
            return drafts
        return torch.where(self.unfinished[:, None], drafts, self._pad.to(drafts.device))


def _propose(
    generator: CandidateGenerator,
    input_ids: torch.Tensor,
    limit: int,
    model_kwargs: dict[str, Any],
    outputs: Any,
    num_matches: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """At most `limit` drafts `[B, g]` and, if the generator samples, their logits `[B, g, V]`."""
    length = input_ids.shape[1]
    if limit <= 0:
        return input_ids[:, length:], None
    context: dict[str, Any] = {}
    if generator.requires_model_outputs:
        context = {
            "model_kwargs": model_kwargs,
            "model_outputs": outputs,
            "is_first_iteration": False,
            "n_last_matches": num_matches,
            "num_drafts": limit,
        }
    candidates, logits = generator.get_candidates(input_ids, **context)
    _check_candidates(type(generator).__name__, candidates, logits, input_ids, outputs.logits.shape[-1])
    drafts = candidates[:, length : length + limit].to(input_ids.device)
    if logits is None or not drafts.shape[1]:
        return drafts, None
    return drafts, logits[:, : drafts.shape[1]].to(input_ids.device)


def _check_candidates(
    name: str, candidates: torch.Tensor, logits: torch.Tensor | None, input_ids: torch.Tensor, vocab_size: int
) -> None:
    """Refuses what a faulty generator may return; without waiting for the device."""
    batch, length = input_ids.shape
    if candidates.dim() != 2 or candidates.shape[0] != batch or candidates.is_floating_point():
        raise ValueError(
            f"{name} returned candidates of shape {tuple(candidates.shape)}, {candidates.dtype}; expected integer ids "
            f"[{batch}, {length} or more] that start with the input"
        )
    drafts = candidates[:, length:]
    if (
        candidates.device.type == "cpu"
        and drafts.numel()
        and not 0 <= int(drafts.min()) <= int(drafts.max()) < vocab_size
    ):
        raise ValueError(
            f"{name} drafted ids from {int(drafts.min())} to {int(drafts.max())}; allowed are 0..{vocab_size - 1}"
        )
    if logits is not None and (
        logits.dim() != 3
        or (logits.shape[0], logits.shape[2]) != (batch, vocab_size)
        or logits.shape[1] < drafts.shape[1]
    ):
        raise ValueError(
            f"{name} returned logits of shape {tuple(logits.shape)}; expected "
            f"[{batch}, {drafts.shape[1]}, {vocab_size}], or None for drafts that were not sampled"
        )


def _verify(
    model: PreTrainedModel,
    candidates: torch.Tensor,
    length: int,
    rollback: Rollback,
    model_kwargs: dict[str, Any],
    generator: CandidateGenerator,
) -> Any:
    """One target forward over the last `length` tokens of `candidates`; more than one token is recorded."""
    if length > 1:
        model_kwargs = _extended(model, {}, model_kwargs, length - 1)
    inputs = model.prepare_inputs_for_generation(
        candidates, next_sequence_length=length, is_first_iteration=False, **model_kwargs
    )
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = length
    if generator.requires_model_outputs:
        inputs |= generator.model_kwargs_overrides
    if length == 1:
        return model(**inputs, return_dict=True)
    with rollback.recording(length):
        return model(**inputs, return_dict=True)


def _reading_target(generator: CandidateGenerator) -> AbstractContextManager[None]:
    """Tells a generator that captures features which forwards are the loop's."""
    return generator.reading_target() if hasattr(generator, "reading_target") else nullcontext()


def _extended(model: PreTrainedModel, outputs: Any, model_kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """`model_kwargs` with mask, positions and token types extended by `num_tokens`."""
    extended = model._update_model_kwargs_for_generation(
        outputs, dict(model_kwargs), is_encoder_decoder=False, num_new_tokens=num_tokens
    )
    types = model_kwargs.get("token_type_ids")
    if types is not None:  # transformers repeats the last `num_tokens` types, plain decoding the last one
        extended["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, num_tokens)], dim=1)
    return extended


def _last_logits(outputs: Any, length: int, input_ids: torch.Tensor) -> torch.Tensor:
    """The last `length` positions' logits `[B, length, V]`, a float32 copy (the prompt's would pin far more)."""
    return outputs.logits[:, -length:].to(copy=True, dtype=torch.float32, device=input_ids.device)
