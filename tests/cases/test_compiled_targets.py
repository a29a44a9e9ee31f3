"""Case C22: compiled targets and drafters, whose code must not be compiled again in every round or every call."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

from ready_hf import record_stats
from support import (
    FAMILIES,
    VOCAB_SIZE,
    FeatureCheck,
    ScriptedDrafter,
    StateCheck,
    drafter_for,
    partly_right,
    random_prompt,
    tiny_target,
    with_lively_weights,
)


MOST_PLAIN = 3  # the prompt, and two for one token: keys and values of a fixed length, and of any
MOST_DRAFTED = 5  # the prompt with features; two for a block and two for one token: keys as they came, and cut back


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model, **options):
    made = copy.deepcopy(model)
    made.compile(**{"backend": "eager", **options})
    return made


def two_layers():
    """A recurrent layer and one of attention."""
    config = FAMILIES["qwen3_5"]()
    config.num_hidden_layers, config.layer_types = 2, ["linear_attention", "full_attention"]
    torch.manual_seed(0)
    return with_lively_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def num_graphs() -> int:
    """Graphs so far; fails if code was too often compiled, and runs without from now on."""
    assert not any("recompile limit" in reason for reason in counters["unimplemented"])
    return counters["stats"].get("unique_graphs", 0)


def written(model, new_tokens=40, **options):
    return model.generate(random_prompt(5), do_sample=False, max_new_tokens=new_tokens, **options)


@pytest.mark.slow
def test_c22_two_hundred_rounds_that_accept_one_to_nine_tokens():
    """Every number of drafts; the states and features of the rounds are those of the model as it was."""
    plain, tokens = two_layers(), 1040
    target, reference = compiled(plain), written(plain, tokens)
    assert torch.equal(written(target), reference[:, :45])
    assert 0 < num_graphs() <= MOST_PLAIN

    drafter = ScriptedDrafter(reference, block_size=8, is_right=lambda round_, position: position < round_ * 5 % 9)
    features, states = FeatureCheck(), StateCheck(plain, every=20)
    drafter.target_layer_ids, drafter.check = [0, 1], lambda context: (features(context), states(context))
    before = num_graphs()
    with record_stats() as stats:
        assert torch.equal(written(target, tokens, assistant_model=drafter), reference)
    assert drafter.rounds > 200
    assert min(stats.accepted_by_position) > 20
    assert states.worst < 1e-5
    assert features.worst(plain, reference) < 1e-4
    assert 0 < num_graphs() - before <= MOST_DRAFTED


def test_c22_later_calls_find_the_code_of_the_first_ones():
    """Blocks of other lengths, calls with a drafter and without in turn."""
    plain = two_layers()
    target, reference = compiled(plain), written(plain)
    for most in (MOST_PLAIN + MOST_DRAFTED, 0):
        before = num_graphs()
        for block_size in (6, 3, 5):
            drafter = partly_right(reference, 0.6, block_size)
            drafter.target_layer_ids, drafter.check = [0, 1], FeatureCheck()
            assert torch.equal(written(target, assistant_model=drafter), reference)
            assert drafter.check.worst(plain, reference) < 1e-4
            assert torch.equal(written(target), reference)
        assert num_graphs() - before <= most
    assert num_graphs() > 0


def test_c22_a_compiled_drafter_on_a_compiled_target():
    """The features that the drafter asks for arrive, though the target was compiled before anybody read any."""
    plain = tiny_target("bamba")
    target, reference, drafter = compiled(plain), written(plain), drafter_for(plain, block_size=4)
    assert torch.equal(written(target), reference)
    with record_stats() as uncompiled:
        assert torch.equal(written(plain, assistant_model=drafter), reference)
    before = num_graphs()
    drafter.compile(backend="eager")
    for most in (MOST_DRAFTED + 4, 0):
        with record_stats() as stats:
            assert torch.equal(written(target, assistant_model=drafter), reference)
        assert stats.accepted_by_position == uncompiled.accepted_by_position
        assert num_graphs() - before <= most
        before = num_graphs()


def test_c22_a_static_cache():
    plain = two_layers()
    target, reference = compiled(plain), written(plain)
    for most, seed in ((MOST_DRAFTED, 0), (0, 1)):
        before, drafter = num_graphs(), partly_right(reference, 0.6, block_size=6, seed=seed)
        drafter.target_layer_ids, drafter.check = [0, 1], FeatureCheck()
        assert torch.equal(written(target, cache_implementation="static", assistant_model=drafter), reference)
        assert drafter.check.worst(plain, reference) < 1e-4
        assert num_graphs() - before <= most
    assert num_graphs() > 0


def test_c22_a_target_without_recurrent_layers():
    """Nothing tells its compiled code that features are read, so it is not used where they are."""
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 16}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, eos_token_id=None, **options)
    plain = with_lively_weights(AutoModelForCausalLM.from_config(config))
    target, reference = compiled(plain), written(plain)
    assert torch.equal(written(target), reference)
    before, drafter = num_graphs(), partly_right(reference, 0.6, block_size=6)
    drafter.check = features = FeatureCheck()
    assert torch.equal(written(target, assistant_model=drafter), reference)
    assert features.worst(plain, reference) < 1e-4
    assert num_graphs() == before
    drafter.target_layer_ids, drafter.check = [], None
    assert torch.equal(written(target, assistant_model=drafter), reference)
    assert 0 < num_graphs() - before <= MOST_DRAFTED


def test_c22_torch_compile_of_a_model_compiles_nothing_in_generate():
    """transformers' `generate` belongs to the model inside; so it does with a drafter."""
    plain = tiny_target("qwen3_5")
    target, reference = torch.compile(plain, backend="eager"), written(plain)
    assert torch.equal(written(target), reference)
    assert torch.equal(written(target, assistant_model=partly_right(reference, 0.6, block_size=6)), reference)
    assert num_graphs() == 0
