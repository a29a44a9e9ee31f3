"""Every family of targets: exact, or refused by name. The README's table is made from a run of this file:

    python -m pytest tests/test_families.py --families-table docs/families.json

Random targets may fall into loops, which hide a broken rollback; so committed states are compared too, and the control
shows for every family that they are wrong without it.
"""

import copy
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import ready_hf
from assistants import attention_assistant
from composites import COMPOSITES, SPECIAL_TOKENS, image_inputs
from families import CONVOLUTIONS, FAMILIES, MORE_FAMILIES, REFUSED
from ready_hf import UnsupportedTargetError, recurrent_layers
from ready_hf.features import FrozenTarget
from ready_hf.recurrences import RECURRENCES
from ready_hf.target import CACHE_NAME, cache_in, check_cached_states, check_target, committed_states
from support import (
    StateCheck,
    cache_of,
    counting_forwards,
    drafter_for,
    existing,
    image_target,
    partly_right,
    random_prompt,
    states,
    tiny_target,
    with_lively_weights,
    worst_error,
)


NEW_TOKENS, FEW_TOKENS = 32, 12
WORST_STATE_ERROR = 1e-5
IMAGE = " with an image"
RECURRENT = [*FAMILIES, *MORE_FAMILIES]
EXACT = [*RECURRENT, *CONVOLUTIONS, *(f"{family}{IMAGE}" for family in COMPOSITES)]
IN_GRID = [*RECURRENT, *CONVOLUTIONS, f"qwen3_5{IMAGE}"]


@dataclass(frozen=True)
class Case:
    """A tiny model, the inputs of one `generate` call, and what plain decoding makes of them."""

    model: PreTrainedModel
    inputs: dict[str, torch.Tensor]
    reference: torch.Tensor  # ids [1, L + NEW_TOKENS]

    def is_exact(self, drafter: Any, max_new_tokens: int = NEW_TOKENS, **options: Any) -> bool:
        """Whether drafted decoding gives the ids of plain decoding."""
        ids = _generate(self.model, self.inputs, max_new_tokens, assistant_model=drafter, **options)
        length = self.inputs["input_ids"].shape[1] + max_new_tokens
        return torch.equal(ids, self.reference[:, :length])

    def state_check(self, every: int = 1) -> StateCheck:
        return StateCheck(self.model, every, {name: x for name, x in self.inputs.items() if name != "input_ids"})


def _generate(model: Any, inputs: dict[str, torch.Tensor], max_new_tokens: int, **options: Any) -> torch.Tensor:
    options |= {"suppress_tokens": SPECIAL_TOKENS, "do_sample": False, "max_new_tokens": max_new_tokens}
    return model.generate(**inputs, **options)


@functools.cache
def case(name: str) -> Case:
    """The case of a family; skips the test if this transformers does not have it."""
    family, has_image = name.removesuffix(IMAGE), name.endswith(IMAGE)
    # the text model of glm5_next has no head of its own
    model = existing(lambda: image_target(family) if has_image or family == "glm5_next" else tiny_target(family))
    inputs = image_inputs(family) if has_image else {"input_ids": random_prompt(12)}
    return Case(model, inputs, _generate(model, inputs, NEW_TOKENS))


@pytest.fixture
def told(record_property):
    """Tells the table what a passed test says of a family."""

    def tell(name: str, tested: str, **facts: str) -> None:
        record_property("family", {"name": name, "tested": tested, **facts})

    return tell


# exact


@pytest.mark.lossless
@pytest.mark.parametrize("name", EXACT)
def test_half_right_drafts_change_neither_ids_nor_states(name, told):
    this = case(name)
    drafter = partly_right(this.reference, 0.5)
    drafter.check = check = this.state_check(every=3)
    assert this.is_exact(drafter)
    assert check.worst <= WORST_STATE_ERROR
    layers = check_target(this.model)
    recurrence = layers[0].recurrence.name if layers else "convolutions"
    told(name, "ids, states", recurrence=recurrence, model=type(this.model).__name__, status="exact")


@pytest.mark.slow
@pytest.mark.lossless
@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.85, 1.0])
@pytest.mark.parametrize("name", IN_GRID)
def test_ids_and_states_at_every_block_length_and_share_of_right_drafts(name, share, block_size, told):
    this = case(name)
    drafter = partly_right(this.reference, share, block_size)
    drafter.check = check = this.state_check(every=16 if share == 0 else 6)
    assert this.is_exact(drafter)
    assert check.rounds >= NEW_TOKENS // (block_size + 1)
    assert check.worst <= WORST_STATE_ERROR
    told(name, "grid")


@pytest.mark.lossless
@pytest.mark.parametrize("name", EXACT)
def test_drafters_and_prompt_lookup_change_no_ids(name, told):
    this, has_states = case(name), not name.startswith(tuple(CONVOLUTIONS))
    if not has_states:
        with pytest.raises(UnsupportedTargetError, match=r"no recurrent state.*`reader=False`"):
            drafter_for(this.model)
    drafter = drafter_for(this.model, reader=has_states, mask_token_id=1)
    assert this.is_exact(drafter, FEW_TOKENS)
    assert this.is_exact(ready_hf.PromptLookupDrafter(4), FEW_TOKENS)
    told(name, "ReaDy, lookup" if has_states else "DSpark, lookup")


@pytest.mark.parametrize("name", [f"{family}{IMAGE}" for family in COMPOSITES])
def test_the_image_is_seen(name):
    this = case(name)
    other = this.inputs | {"pixel_values": -this.inputs["pixel_values"]}
    assert not torch.equal(_generate(this.model, other, FEW_TOKENS), this.reference[:, : 14 + FEW_TOKENS])


def test_positions_of_an_image_prompt_have_three_dimensions():
    this = case(f"qwen3_5{IMAGE}")
    _generate(this.model, this.inputs, 1)
    assert this.model.model.rope_deltas.tolist() == [[-3]], "2 x 3 tokens take as many positions as their longer side"


@pytest.mark.parametrize("name", [*MORE_FAMILIES, f"nemotron_h_omni{IMAGE}"])
def test_training_reads_the_states_and_logits_that_decoding_has(name):
    model, ids, anchors = case(name).model, random_prompt(70, batch=2), torch.tensor([[2, 33], [5, 63]])
    frozen = FrozenTarget(model, drafter_for(model).config)
    batch = frozen.batch(ids, anchors)
    for row, column in ((0, 0), (0, 1), (1, 1)):
        with torch.no_grad():
            cache = cache_of(model(ids[row : row + 1, : anchors[row, column]], use_cache=True))
        want = committed_states(cache, recurrent_layers(model))[0]
        got = batch.states.stack()[row, column]
        assert float((got - want).norm() / want.norm()) <= WORST_STATE_ERROR
    with torch.no_grad():
        logits = model(ids).logits[0, 33:39]
    assert torch.allclose(frozen.logits(batch.target_hidden_states[0, 1]), logits, atol=1e-4)


@pytest.mark.lossless
@pytest.mark.parametrize("name", RECURRENT)
def test_negative_control_without_rollback_the_states_are_wrong(name, monkeypatch):
    this = case(name)
    monkeypatch.setattr("ready_hf.rollback._commit_states", lambda layers, keep, length: None)
    drafter = partly_right(this.reference, 0.5)
    drafter.check = check = this.state_check(every=3)
    this.is_exact(drafter, FEW_TOKENS)
    assert check.worst > 1000 * WORST_STATE_ERROR


@pytest.mark.lossless
@pytest.mark.parametrize("name", ["qwen3_5", "qwen4_exp", "falcon_h1", "zamba2"])
def test_a_cache_of_fixed_length(name):
    this = case(name)
    drafter = partly_right(this.reference, 0.5)
    if CACHE_NAME == "cache":
        assert this.is_exact(drafter, cache_implementation="static")
        return
    # before 5.24 transformers cannot cut it, also where it lies beside a state in one layer
    with counting_forwards(this.model) as forwards, pytest.raises(UnsupportedTargetError, match="Static.* dynamic"):
        this.is_exact(drafter, cache_implementation="static")
    assert forwards == []


LIMITED = {
    "nemotron_h": {"time_step_min": 0.5},
    "zamba2": {"time_step_min": 0.5},
    "bamba": {"time_step_limit": (0.3, 0.6)},
    "mamba2": {"time_step_limit": (0.3, 0.6)},
}


@pytest.mark.lossless
@pytest.mark.parametrize("block_size", [8, 40])  # in closed form, and by the model's own rule
@pytest.mark.parametrize("name", LIMITED)
def test_limits_on_the_time_step_hold_for_the_prompt_alone_as_in_plain_decoding(name, block_size):
    """transformers clamps time steps in a forward over several tokens and not in one over a single token."""
    config = (FAMILIES | MORE_FAMILIES)[name]()
    for option, value in LIMITED[name].items():
        assert hasattr(config, option)
        setattr(config, option, value)
    model = with_lively_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    ready_hf.ensure_patched(model)
    inputs = {"input_ids": random_prompt(12)}
    plain = _generate(model, inputs, 64, return_dict_in_generate=True)
    drafter = partly_right(plain.sequences, 0.9, block_size)
    drafted = _generate(model, inputs, 64, return_dict_in_generate=True, assistant_model=drafter)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert worst_error(states(cache_of(drafted)), states(cache_of(plain))) <= WORST_STATE_ERROR


# refused


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_supported_recurrences(name, told):
    config, reason = REFUSED[name]
    with torch.device("meta"):  # nothing can be computed
        model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(UnsupportedTargetError, match=reason) as error:
        check_target(model)
    assert f"model type '{name}'" in str(error.value)
    assert all(recurrence.name in str(error.value) for recurrence in RECURRENCES)
    assert "without a drafter" in str(error.value)
    recurrence = "Mamba-1" if reason == "Mamba-1" else "unknown"
    told(name, "refusal", recurrence=recurrence, model=type(model).__name__, status="refused")


@pytest.mark.parametrize("name", ["mamba", "zaya"])
def test_generate_refuses_before_any_forward(name, monkeypatch):
    model = AutoModelForCausalLM.from_config(REFUSED[name][0]())
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: pytest.fail("a forward ran"))
    with pytest.raises(UnsupportedTargetError, match=f"'{name}'"):
        model.generate(random_prompt(5), assistant_model=ready_hf.PromptLookupDrafter(4), max_new_tokens=8)


def test_one_unknown_layer_among_known_ones_is_refused(monkeypatch):
    model = case("qwen3_5").model
    find, strangers = ready_hf.target._recurrence_of, iter([True, False, False])  # of three mixers, the first

    def found(module_class):
        recurrence = find(module_class)
        return None if recurrence is None or next(strangers) else recurrence

    monkeypatch.setattr("ready_hf.target._recurrence_of", found)
    with pytest.raises(UnsupportedTargetError, match=r"'qwen3_5_text'.* in layers \[0\] .* without a drafter"):
        check_target(model)


def test_a_state_that_shows_only_in_the_cache_is_refused_by_name(monkeypatch):
    model = AutoModelForCausalLM.from_config(REFUSED["zaya"][0]()).eval()
    monkeypatch.setattr(type(model), "_is_stateful", False)
    assert check_target(model) == []
    with pytest.raises(UnsupportedTargetError, match=r"'zaya'.* in layers \[0, 1\] .* without a drafter"):
        model.generate(random_prompt(5), assistant_model=ready_hf.PromptLookupDrafter(4), max_new_tokens=8)


class AveragingAttention(Qwen3Attention):
    """Attention whose outputs are summed up with a decay, in a state that is kept beside its cache layer's own."""

    def forward(self, hidden_states, *args, **kwargs):
        output, weights = super().forward(hidden_states, *args, **kwargs)
        keeper = self.keeper(cache_in(kwargs))
        state, averages = keeper.get("average", torch.zeros_like(output[:, 0])), []
        for token in output.unbind(1):
            averages.append(state := 0.7 * state + token)
        keeper["average"] = state
        return torch.stack(averages, dim=1), weights


KEEPERS = {
    "`average` of layer 0": lambda cache: vars(cache.layers[0]),
    "`average`": vars,
    "`averages`": lambda cache: vars(cache).setdefault("averages", {}),
}


@pytest.mark.parametrize("where", KEEPERS)
def test_a_state_that_a_model_of_somebody_else_keeps_beside_its_keys_is_refused_by_name(where):
    model = copy.deepcopy(attention_assistant())
    attention = model.model.layers[0].self_attn
    attention.__class__, attention.keeper = AveragingAttention, KEEPERS[where]
    with counting_forwards(model) as forwards, pytest.raises(UnsupportedTargetError) as error:
        model.generate(random_prompt(5), assistant_model=ready_hf.PromptLookupDrafter(4), max_new_tokens=8)
    assert "'qwen3'" in str(error.value)
    assert f": {where}. " in str(error.value)
    assert "without a drafter" in str(error.value)
    assert forwards == [5]


def test_a_layer_that_cuts_its_own_state_is_taken_at_its_word():
    class Layer(DynamicLayer):
        def crop(self, tokens_to_remove):
            super().crop(tokens_to_remove)
            self.average = self.average[..., :tokens_to_remove]

    cache = DynamicCache(config=attention_assistant().config)
    cache.prompt_ids = random_prompt(5)  # somebody's notes, not a state
    cache.notes = {"seen": [1, 2]}
    cache.notes["all"] = cache.notes
    cache.layers[0] = Layer()
    cache.layers[0].average = torch.zeros(1)
    check_cached_states(attention_assistant(), [], cache)


def test_such_a_layer_keeps_one_number_of_tokens_in_all_rows():
    """What it cuts would not be moved with its keys."""
    model = attention_assistant()

    class Layer(DynamicLayer):
        def crop(self, tokens_to_remove):
            super().crop(tokens_to_remove)

    cache = DynamicCache(config=model.config)
    cache.layers[0] = Layer()
    with torch.no_grad():
        model(random_prompt(5, batch=2), **{CACHE_NAME: cache})
        rollback = ready_hf.Rollback(cache)
        with rollback.recording(3):
            model(random_prompt(3, batch=2), **{CACHE_NAME: cache})
    with pytest.raises(UnsupportedTargetError, match="Layer cannot keep a different number of tokens per row"):
        rollback.commit(torch.tensor([1, 2]))


@pytest.mark.parametrize("layer_class", [LinearAttentionLayer, LinearAttentionAndFullAttentionLayer])
def test_a_recurrent_layer_with_a_state_more_is_refused_even_if_it_can_cut_it(layer_class):
    """A rollback rebuilds states of such layers and never calls their `crop`."""

    class Layer(layer_class):
        def crop(self, tokens_to_remove):
            self.average = self.history[tokens_to_remove - 1]

    model = tiny_target("qwen3_5")
    cache = DynamicCache(config=model.config)
    cache.layers[0] = Layer()
    check_cached_states(model, recurrent_layers(model), cache)
    cache.layers[0].average, cache.layers[0].history = torch.zeros(1), [torch.zeros(1)]
    with pytest.raises(UnsupportedTargetError, match="`average` of layer 0, `history` of layer 0. "):
        check_cached_states(model, recurrent_layers(model), cache)


@pytest.mark.usefixtures("assisted_generation")
@pytest.mark.parametrize("assistance", ["lookup", "assistant"])
def test_assisted_generation_refuses_unknown_recurrences_by_name_too(assistance):
    model = AutoModelForCausalLM.from_config(REFUSED["zaya"][0]())
    options = {"prompt_lookup_num_tokens": 4} if assistance == "lookup" else {"assistant_model": attention_assistant()}
    with (
        counting_forwards(model) as forwards,
        pytest.raises(UnsupportedTargetError, match="'zaya'.*without a drafter"),
    ):
        model.generate(random_prompt(5), max_new_tokens=8, **options)
    assert forwards == []
