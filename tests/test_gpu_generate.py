"""What `generate` is asked for around decoding, on a CUDA device: random options, threads, caches, offloaded parts."""

import copy
import functools
import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from transformers import AutoModelForCausalLM
from transformers.cache_utils import StaticLayer

import ready_hf
from assistants import attention_assistant, noisy
from families import FAMILIES
from random_calls import Call, calls, load, text
from ready_hf.kernels import launches
from support import (
    cache_of,
    drafter_for,
    num_hooks,
    partly_right,
    random_prompt,
    states,
    tiny_target,
    trained_target,
    with_lively_weights,
    worst_error,
)
from test_dflash_assistants import dflash_assistant
from test_load import at_once
from test_random_calls import RANDOM, check


pytestmark = [pytest.mark.gpu, pytest.mark.lossless]
BOUND = 2e-3  # of scores and states: flash-linear-attention's block function, which reads prompts, multiplies in tf32
NEW_TOKENS = 24


def on_the_gpu(call: Call) -> Call:
    """transformers compiles static caches by itself on a GPU, which takes a minute for every shape."""
    is_static = call.options.get("cache_implementation") == "static"
    return replace(call, device="cuda", options=call.options | ({"disable_compile": True} if is_static else {}))


@settings(max_examples=40, **RANDOM)
@given(call=calls("tiny", longest=9, sample=False))
def test_greedy_calls_on_the_tiny_target(call):
    check(on_the_gpu(call), BOUND)


@settings(max_examples=10, **RANDOM)
@given(call=calls("small", longest=9, sample=False))
def test_greedy_calls_of_the_shipped_drafters(call):
    check(on_the_gpu(call), BOUND)


@settings(max_examples=10, **RANDOM)
@given(call=calls("small", longest=8, sample=True))
def test_sampled_calls_of_the_shipped_drafters(call):
    check(on_the_gpu(call), BOUND)


@pytest.mark.parametrize("family", ["kimi_linear", "bamba", "nemotron_h", "olmo_hybrid"])
def test_families(family):
    """KDA, Mamba-2 with and without limits on its time steps, and a gated delta rule, by the kernels of the commit."""
    config = FAMILIES[family]()
    if family == "nemotron_h":
        config.time_step_min = 0.5
    target = with_lively_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).to("cuda")
    ready_hf.ensure_patched(target)
    ids, options = random_prompt(12).to("cuda"), {"return_dict_in_generate": True}
    want = written(target, ids, **options)
    launches.clear()
    for block_size in (5, 8):
        drafter = partly_right(want.sequences, 0.8, block_size)
        got = written(target, ids, assistant_model=drafter, **options)
        assert torch.equal(got.sequences, want.sequences)
        assert worst_error(states(cache_of(got)), states(cache_of(want))) <= 1e-5
    assert launches["commit_and_read"] > 0


def prompt(start: int = 0, length: int = 24) -> torch.Tensor:
    return text("tiny")[None, start : start + length].to("cuda")


def written(target=None, ids=None, **options):
    target, ids = load("tiny", "cuda") if target is None else target, prompt() if ids is None else ids
    return target.generate(ids, **{"do_sample": False, "max_new_tokens": NEW_TOKENS} | options)


def drafters(want: torch.Tensor) -> list:
    """A ReaDy drafter, drafts of which 70 % are right, prompt lookup."""
    lookup = ready_hf.PromptLookupDrafter(num_tokens=4)
    return [drafter_for(trained_target(), block_size=4).to("cuda"), partly_right(want, 0.7, block_size=5), lookup]


def test_calls_at_once_on_one_target():
    target, prompts = load("tiny", "cuda"), [prompt(start, 20 + start) for start in (0, 5, 9)]
    want, hooks = [written(ids=ids) for ids in prompts], num_hooks(target)
    chosen = [drafters(ids)[index] for index, ids in enumerate(want)]
    runs = [
        lambda ids=ids, drafter=drafter: written(ids=ids, assistant_model=drafter).tolist()
        for ids, drafter in zip(prompts, chosen, strict=True)
    ]
    assert at_once(runs) == [ids.tolist() for ids in want]
    assert num_hooks(target) == hooks


@pytest.mark.usefixtures("assisted_generation")
@pytest.mark.parametrize("name", ["itself with noise", "attention", "lookup", "dflash"])
def test_assisted_generation_of_transformers(name):
    target, ids, options = load("tiny", "cuda"), prompt(), {"prompt_lookup_num_tokens": 4}
    if name == "dflash":
        ids = random_prompt(12).to("cuda")
        target = copy.deepcopy(tiny_target("qwen3_5")).to("cuda")
        options = {"speculation_type": "dflash", "assistant_model": copy.deepcopy(dflash_assistant()).to("cuda")}
    elif name != "lookup":
        model = attention_assistant(512) if name == "attention" else noisy(load("tiny"), 0.1)
        options = {"assistant_model": copy.deepcopy(model).to("cuda")}
    want = written(target, ids)
    with ready_hf.record_stats() as stats:
        assert torch.equal(written(target, ids, **options), want)
    assert sum(stats.drafted_by_position) > 0


def test_parts_of_the_target_on_the_host(tmp_path):
    """accelerate brings a layer, the embeddings and the head to the GPU whenever they run."""
    trained_target().save_pretrained(tmp_path)
    parts = dict.fromkeys(["model.embed_tokens", "lm_head", "model.layers.1"], "cpu")
    rest = [f"model.layers.{i}" for i in range(trained_target().config.num_hidden_layers) if i != 1]
    devices = parts | dict.fromkeys([*rest, "model.norm", "model.rotary_emb"], 0)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map=devices).eval()
    assert target.model.layers[1].mlp.up_proj.weight.is_meta
    want = written(target)
    assert torch.equal(want, written())
    for drafter in drafters(want):
        assert torch.equal(written(target, assistant_model=drafter), want)
    assert target.model.layers[1].mlp.up_proj.weight.is_meta


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_an_adapter_on_and_off():
    peft = pytest.importorskip("peft")
    modules = ["q_proj", "in_proj_qkv", "out_proj", "gate_proj"]
    config = peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(trained_target()), config).to("cuda").eval()
    torch.manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    on = written(wrapped)
    assert not torch.equal(on, written())
    for drafter in drafters(on):
        assert torch.equal(written(wrapped, assistant_model=drafter), on)
    with wrapped.disable_adapter():
        for drafter in drafters(written()):
            assert torch.equal(written(wrapped, assistant_model=drafter), written())


def test_prompts_of_embeddings():
    ids = torch.cat([prompt(), prompt(start=7)])
    inputs = {
        "inputs_embeds": load("tiny", "cuda").get_input_embeddings()(ids).detach(),
        "attention_mask": (torch.arange(24) >= torch.tensor([[5], [0]])).long().to("cuda"),
    }
    run = functools.partial(load("tiny", "cuda").generate, **inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
    want = run()
    for drafter in drafters(want)[:2]:
        assert torch.equal(run(assistant_model=drafter), want)


def test_a_static_cache():
    """Which transformers compiles in plain decoding, by itself; drafted decoding runs the target as it is."""
    options = {"cache_implementation": "static", "return_dict_in_generate": True}
    if not getattr(StaticLayer, "is_croppable", False):  # before transformers 5.24
        with pytest.raises(ready_hf.UnsupportedTargetError, match="StaticLayer"):
            written(assistant_model=ready_hf.PromptLookupDrafter(), **options)
        return
    want = written(**options)
    assert torch.equal(want.sequences, written())
    for drafter in drafters(want.sequences):
        got = written(assistant_model=drafter, **options)
        assert torch.equal(got.sequences, want.sequences)
        length = cache_of(want).get_seq_length()
        assert cache_of(got).get_seq_length() == length
        found, expected = ({k: v for k, v in states(cache_of(x)).items() if "_states" in k} for x in (got, want))
        assert worst_error(found, expected) <= BOUND


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_offloaded_caches_are_refused(implementation):
    with pytest.raises(ready_hf.UnsupportedTargetError, match=r"offloaded.*cannot be rolled back"):
        written(cache_implementation=implementation, assistant_model=ready_hf.PromptLookupDrafter())
    assert torch.equal(written(assistant_model=ready_hf.PromptLookupDrafter()), written())


def test_memory_is_flat_over_100_calls():
    chosen, found = drafters(written()), []
    for index in range(110):
        written(max_new_tokens=8, do_sample=index % 2 == 1, assistant_model=chosen[index % 3])
        if index in (9, 109):
            gc.collect()
            torch.cuda.synchronize()
            found.append(torch.cuda.memory_allocated())
    assert found[1] <= found[0]
