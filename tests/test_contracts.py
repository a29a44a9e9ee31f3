"""What ready_hf relies on in `generate` beyond its documented interface: one test per name or behaviour.

Where one fails, transformers has changed: the message names the version, the test what has to be looked at.
"""

import functools
import inspect
import re

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StopStringCriteria
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, GenerationMixin, candidate_generator
from transformers.generation.candidate_generator import CandidateGenerator, PromptLookupCandidateGenerator

from ready_hf.acceptance import POSITIONWISE_PROCESSORS
from ready_hf.candidates import SAMPLING_WARPERS
from ready_hf.target import CACHE_NAME
from support import (
    FAMILIES,
    VOCAB_SIZE,
    cache_argument,
    cache_of,
    char_tokenizer,
    contract,
    feed,
    random_prompt,
    tiny_target,
)


WARPERS = [
    transformers.TemperatureLogitsWarper(0.7), transformers.TopKLogitsWarper(5), transformers.TopPLogitsWarper(0.9),
    transformers.MinPLogitsWarper(0.1), transformers.TypicalLogitsWarper(0.9), transformers.EpsilonLogitsWarper(1e-2),
    transformers.EtaLogitsWarper(1e-2, device="cpu"), transformers.InfNanRemoveLogitsProcessor(),
    transformers.LogitNormalization(),
]  # fmt: skip
every_family = pytest.mark.parametrize("family", FAMILIES)


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def handed_over(**kwargs):
    """What `generate` hands to a callable `custom_generate` that has an argument of its own, by name."""
    seen = {}

    def method(
        model, input_ids, logits_processor, stopping_criteria, generation_config, num_assistant_tokens=None, **rest
    ):
        seen.update(locals() | rest)
        return input_ids

    arguments = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0} | kwargs
    tiny_target("qwen3_5").generate(random_prompt(4), custom_generate=method, **arguments)
    return seen


def test_a_broken_contract_names_the_version():
    @contract("the sky is blue")
    def check():
        raise AttributeError("sky")

    with pytest.raises(AssertionError, match=f"transformers {transformers.__version__} .* blue .*AttributeError: sky"):
        check()


# generate


@contract("`generate` takes these arguments by these names")
def test_generate_arguments():
    wanted = [
        "assistant_model",
        "streamer",
        "custom_generate",
        "generation_config",
        "stopping_criteria",
        "synced_gpus",
    ]
    assert {*wanted, "kwargs"} <= set(parameters(GenerationMixin.generate))


@contract(
    "`custom_generate` may be a callable; arguments of its own are popped from the others, and come only if given"
)
def test_custom_generate_arguments_of_its_own():
    assert handed_over(num_assistant_tokens=3)["num_assistant_tokens"] == 3
    seen = handed_over()
    assert seen["num_assistant_tokens"] is None
    assert {"input_ids", "logits_processor", "stopping_criteria", "generation_config"} <= seen.keys()
    assert isinstance(seen[CACHE_NAME], DynamicCache)


@contract("`generate` drops `streamer` and `tokenizer` for a callable, after it has given the prompt to the streamer")
def test_custom_generate_loses_streamer_and_tokenizer():
    class Streamer(transformers.TextStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value)

    streamer = Streamer()
    seen = handed_over(streamer=streamer, tokenizer=char_tokenizer())
    assert [x.shape for x in streamer.got] == [(1, 4)]
    assert not {"streamer", "tokenizer"} & seen.keys()


@contract(
    "the prepared configuration has special tokens as tensors, `max_length` and a default `num_assistant_tokens`"
)
def test_prepared_generation_config():
    config = handed_over(eos_token_id=[7, 9])["generation_config"]
    assert config._pad_token_tensor.item() == 0
    assert config._eos_token_tensor.tolist() == [7, 9]
    assert config.max_length == 9
    default = GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
    assert isinstance(default, int)
    assert config.num_assistant_tokens == default


@contract("an eos token becomes a criterion with the attribute `eos_token_id`; no other criterion has one")
def test_eos_criterion():
    criteria = handed_over(eos_token_id=[7, 9])["stopping_criteria"]
    assert [type(c) for c in criteria if hasattr(c, "eos_token_id")] == [EosTokenCriteria]
    assert not any(hasattr(c, "eos_token_id") for c in handed_over()["stopping_criteria"])
    assert parameters(StopStringCriteria)[:2] == ["tokenizer", "stop_strings"]


@contract("options that ready_hf refuses exist on `GenerationConfig`")
def test_refused_options():
    names = ["num_beams", "num_return_sequences", "prompt_lookup_num_tokens", "assistant_early_exit", "penalty_alpha"]
    names += ["dola_layers", "force_words_ids", "constraints", "max_matching_ngram_size"]
    assert [name for name in names if not hasattr(GenerationConfig(), name)] == []


@contract("`_prefill(input_ids, generation_config, model_kwargs)` runs the prompt and returns logits and the cache")
@pytest.mark.parametrize("chunk", [None, 3])
def test_prefill(chunk):
    seen = handed_over(**({} if chunk is None else {"prefill_chunk_size": chunk}))
    with torch.no_grad():
        outputs = seen["model"]._prefill(seen["input_ids"], seen["generation_config"], seen["rest"])
    assert outputs.logits.shape[-1] == VOCAB_SIZE
    assert cache_of(outputs).get_seq_length(2) == 4


@contract(
    "`_update_model_kwargs_for_generation` extends mask and positions, also without outputs, and takes the cache"
)
def test_update_model_kwargs():
    model, mask = tiny_target("qwen3_5"), torch.tensor([[0, 1, 1]])
    kwargs = {"attention_mask": mask, "position_ids": torch.tensor([[0, 0, 1]])}
    update = functools.partial(model._update_model_kwargs_for_generation, is_encoder_decoder=False, num_new_tokens=2)
    updated = update({}, dict(kwargs))
    assert updated["attention_mask"].tolist() == [[0, 1, 1, 1, 1]]
    assert updated["position_ids"].tolist() == [[0, 0, 1, 2, 3]]
    outputs = feed(model, None, random_prompt(3), 0, 3)
    assert update(outputs, dict(kwargs))[CACHE_NAME] is cache_of(outputs)


@contract("`prepare_inputs_for_generation` cuts tokens and positions to the last `next_sequence_length`")
@every_family
def test_prepare_inputs(family):
    model, ids = tiny_target(family), random_prompt(9)
    cache = cache_of(feed(model, None, ids, 0, 5))
    kwargs = {"position_ids": torch.arange(9)[None], "use_cache": True, **cache_argument(cache)}
    inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=4, is_first_iteration=False, **kwargs)
    assert torch.equal(inputs["input_ids"], ids[:, 5:])
    assert inputs["position_ids"].tolist() == [[5, 6, 7, 8]]
    assert inputs[CACHE_NAME] is cache
    with torch.no_grad():
        outputs = model(**inputs | {"logits_to_keep": 4}, return_dict=True)
    assert outputs.logits.shape == (1, 4, VOCAB_SIZE)


@contract("the cache is called `cache` from 5.24 on and `past_key_values` before, in outputs and in arguments alike")
def test_cache_name():
    assert CACHE_NAME in GenerateDecoderOnlyOutput.__annotations__
    assert CACHE_NAME in parameters(tiny_target("qwen3_5").forward)
    assert hasattr(feed(tiny_target("qwen3_5"), None, random_prompt(2), 0, 2), CACHE_NAME)


# candidate generators and processors


@contract("candidate generators have this interface; those that want model outputs say what they add to the forward")
def test_candidate_generator_interface():
    assert parameters(CandidateGenerator.update_candidate_strategy)[1:] == ["input_ids", "scores", "num_matches"]
    assert parameters(CandidateGenerator.get_candidates)[1] == "input_ids"
    assert CandidateGenerator.requires_model_outputs is False
    for found in filter(inspect.isclass, vars(candidate_generator).values()):
        if issubclass(found, CandidateGenerator) and found.requires_model_outputs:
            assert isinstance(found.model_kwargs_overrides, dict)


@contract("`PromptLookupCandidateGenerator` takes these arguments, works without processors and returns no logits")
def test_prompt_lookup_generator():
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([96]), num_output_tokens=3, max_matching_ngram_size=2, max_length=30
    )
    candidates, logits = generator.get_candidates(torch.tensor([[5, 6, 7, 8, 9, 5, 6]]))
    assert candidates.tolist() == [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9]]
    assert logits is None


@contract("`AssistedCandidateGenerator` puts its cache and mask right in one method, and hands both to `generate`")
def test_assisted_generator():
    generator_class = candidate_generator.AssistedCandidateGenerator
    assert "self._update_past_and_masks(input_ids)" in inspect.getsource(generator_class.get_candidates)
    assert "**self.assistant_kwargs" in inspect.getsource(generator_class._generate_candidates)
    assert f'self.assistant_kwargs["{CACHE_NAME}"]' in inspect.getsource(generator_class._generate_candidates)
    assert "self.num_assistant_tokens" in inspect.getsource(generator_class._calculate_new_tokens)


@contract("`DFlashTokenCandidateGenerator` reads hidden states by the indices that it asks for")
def test_dflash_generator():
    generator_class = candidate_generator.DFlashTokenCandidateGenerator
    wanted = re.search(r'"output_hidden_states": (.*)}', inspect.getsource(generator_class.__init__))[1]
    index = {"[i + 1 for i in self.target_layer_ids]": "i + 1", "self.target_layer_ids": "i"}[wanted]
    assert f"model_outputs.hidden_states[{index}]" in inspect.getsource(generator_class.get_candidates)
    assert "self.logits_processor" in inspect.getsource(generator_class.get_candidates)


@contract("these processors look at one position's scores only")
@pytest.mark.parametrize("warper", WARPERS, ids=lambda warper: type(warper).__name__)
def test_positionwise_processors(warper):
    scores = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    assert type(warper) in POSITIONWISE_PROCESSORS
    together = LogitsProcessorList([warper])(None, scores.clone())
    alone = torch.cat([warper(None, row[None].clone()) for row in scores])
    assert torch.equal(together, alone)


@contract("every sampling warper is covered by the test above")
def test_sampling_warpers_are_positionwise():
    assert set(SAMPLING_WARPERS) <= set(POSITIONWISE_PROCESSORS) == {type(warper) for warper in WARPERS}


@contract("`generate` is a plain function of `GenerationMixin`, which can be wrapped and put back")
def test_generate_is_a_function_of_the_mixin():
    assert inspect.isfunction(vars(GenerationMixin)["generate"])
