"""Cases of other categories whose feature exists: C09, C29, C30, C31, C32, C41, C55, C85, C86."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation import GenerationMixin

import ready_hf
from ready_hf.rollback import Rollback
from support import (
    FAMILIES,
    FeatureCheck,
    StateCheck,
    cache_argument,
    cache_of,
    k_right,
    num_hooks,
    oracle,
    plain_ids,
    random_prompt,
    tiny_target,
)


def generate(model, ids, **kwargs):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": 24} | kwargs)


def test_c09_second_turn_on_a_cache_of_100_tokens():
    target, reference = tiny_target("qwen3_5"), plain_ids("qwen3_5")
    first = generate(target, reference[:, :12], max_new_tokens=88, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, random_prompt(10, seed=9)], dim=1)
    assert ids.shape[1] == 110
    want = generate(target, ids, **cache_argument(copy.deepcopy(cache_of(first))))
    drafter = k_right(want, 3)
    drafter.check = check = FeatureCheck()
    with ready_hf.record_stats() as warm:
        got = generate(target, ids, assistant_model=drafter, **cache_argument(cache_of(first)))
    assert got.tolist() == want.tolist()
    assert check.rows[0][0].shape[1] == 11  # rows of the new tokens and of turn 1's anchor, none made up
    assert check.worst(target, want, start=99) <= 1e-4
    with ready_hf.record_stats() as cold:
        generate(target, ids, assistant_model=k_right(want, 3))
    assert warm.accepted_by_position == cold.accepted_by_position


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "nemotron_h"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 130])
def test_c29_forward_step_and_verify_agree(family, length):
    target, ids = tiny_target(family), random_prompt(length + 8)
    with torch.no_grad():
        whole = target(ids).logits
        cache = cache_of(target(ids[:, :length], use_cache=True))
        positions = torch.arange(length, length + 8)[None]
        rollback = Rollback(cache)
        with rollback.recording(8):
            verified = target(ids[:, length:], position_ids=positions, **cache_argument(cache)).logits
        rollback.commit(1)
        rollback.close()
        stepped = target(
            ids[:, length + 1 : length + 2], position_ids=positions[:, 1:2], **cache_argument(cache)
        ).logits
    torch.testing.assert_close(verified, whole[:, length:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stepped, whole[:, length + 1 : length + 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["nemotron_h", "bamba"])
def test_c30_mamba2_hybrids_verify_five_after_ten(family):
    target, ids = tiny_target(family), random_prompt(15)
    with torch.no_grad():
        whole = target(ids).logits
        cache = cache_of(target(ids[:, :10], use_cache=True))
        rollback = Rollback(cache)
        with rollback.recording(5):
            verified = target(ids[:, 10:], position_ids=torch.arange(10, 15)[None], **cache_argument(cache)).logits
        rollback.close()
    torch.testing.assert_close(verified, whole[:, 10:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [0, 3, 8])
def test_c31_layers_without_any_state(k):
    config = FAMILIES["nemotron_h"]()
    config.layers_block_type = ["linear_attention", "mlp", "linear_attention", "full_attention"]  # M-M*
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    reference = generate(target, random_prompt(12), max_new_tokens=30)
    drafter = k_right(reference, k)
    drafter.check = check = StateCheck(target)
    assert (
        generate(target, reference[:, :12], assistant_model=drafter, max_new_tokens=30).tolist() == reference.tolist()
    )
    assert check.worst <= 1e-5


def test_c32_kimi_second_turn_equals_a_cold_run():
    target, reference = tiny_target("kimi_linear"), plain_ids("kimi_linear")
    first = generate(
        target,
        reference[:, :15],
        max_new_tokens=20,
        return_dict_in_generate=True,
        assistant_model=k_right(reference, 2),
    )
    ids = torch.cat([first.sequences, random_prompt(15, seed=4)], dim=1)
    cold = generate(target, ids)
    warm = generate(target, ids, assistant_model=k_right(cold, 4), **cache_argument(cache_of(first)))
    assert warm.tolist() == cold.tolist()


def test_c41_interrupt_in_round_3_then_the_same_cell_again():
    target, reference = tiny_target("qwen3_5"), plain_ids("qwen3_5")
    drafter, hooks = k_right(reference, 3), num_hooks(target)

    def interrupt(context):
        if drafter.rounds == 2:
            raise KeyboardInterrupt

    def caches() -> int:
        gc.collect()
        return sum(type(o) is DynamicCache for o in gc.get_objects())

    before, drafter.check = caches(), interrupt
    with pytest.raises(KeyboardInterrupt):
        generate(target, reference[:, :12], assistant_model=drafter)
    assert caches() == before
    assert num_hooks(target) == hooks
    drafter.check = None
    assert generate(target, reference[:, :12], assistant_model=drafter).tolist() == reference[:, :36].tolist()


@pytest.mark.parametrize("chunk_size", [16, 50])
def test_c55_prefill_in_chunks(chunk_size):
    target, prompt = tiny_target("qwen3_5"), random_prompt(50)
    reference = generate(target, prompt)
    drafter = k_right(reference, 5)
    drafter.check = check = FeatureCheck()
    got = generate(target, prompt, assistant_model=drafter, prefill_chunk_size=chunk_size)
    assert got.tolist() == reference.tolist()
    assert check.rows[0][0].shape[1] == 50
    assert check.worst(target, reference) <= 1e-4


def test_c85_same_call_again_and_again():
    target, reference = tiny_target("qwen3_5"), plain_ids("qwen3_5")
    other = generate(target, random_prompt(30, seed=6))
    drafter = oracle(reference)
    for _ in range(3):
        got = generate(target, reference[:, :12], assistant_model=drafter)
        assert got.tolist() == reference[:, :36].tolist()
        drafter.reference = other
        assert generate(target, other[:, :30], assistant_model=drafter).tolist() == other.tolist()
        drafter.reference = reference


def test_c86_nothing_stays_after_everything_is_deleted():
    original = GenerationMixin.generate
    for _ in range(3):
        target = AutoModelForCausalLM.from_config(FAMILIES["qwen3_5"]()).eval()
        target_alive, parameter_alive = weakref.ref(target), weakref.ref(next(target.parameters()))
        prompt = random_prompt(12)
        generate(target, prompt, assistant_model=oracle(generate(target, prompt)))
        assert num_hooks(target) == 0
        assert "generate" not in vars(target)
        del target
        gc.collect()
        assert target_alive() is None
        assert parameter_alive() is None
    assert GenerationMixin.generate is original
    assert transformers.generation.utils.GenerationMixin is GenerationMixin
