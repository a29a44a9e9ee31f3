"""Cases C20, C23 and C91: targets inside of wrappers, and targets of which a part lies elsewhere."""

import contextlib
import copy

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from ready_hf.target import output_head
from ready_hf.target_features import decoder_layers
from support import (
    FeatureCheck,
    StateCheck,
    counting_forwards,
    drafter_for,
    num_hooks,
    partly_right,
    tiny_target,
    trained_target,
    trained_tokenizer,
)


NEW_TOKENS = 32
ADAPTED = ["q_proj", "v_proj", "in_proj_qkv", "out_proj", "gate_proj"]  # attention, recurrent mixers and MLPs


def written(model, prompt, **options):
    return model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS, **options)


def prompt_for_target():
    return trained_tokenizer()("def f(x):\n    return x", return_tensors="pt")["input_ids"]


pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it


@pytest.fixture
def with_adapter():
    """The trained fixture in a LoRA wrapper whose adapter changes what it writes."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=ADAPTED, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(trained_target()), config).eval()
    torch.manual_seed(0)
    for name, parameter in wrapped.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return wrapped


def test_c23_with_an_adapter_and_without_it(with_adapter):
    """Each equals its own plain text, whatever was switched before, and nothing is left behind."""
    prompt, hooks = prompt_for_target(), num_hooks(with_adapter)
    drafter = drafter_for(trained_target(), block_size=4).eval()
    texts = {"on": written(with_adapter, prompt)}
    with with_adapter.disable_adapter():
        texts["off"] = written(with_adapter, prompt)
    assert not torch.equal(texts["on"], texts["off"])
    assert torch.equal(texts["off"], written(trained_target(), prompt))
    for way in ("on", "off", "on"):
        guesses = partly_right(texts[way], 0.7, block_size=5)
        for assistant in (drafter, guesses):
            with ready_hf.record_stats() as stats:
                if way == "on":
                    found = written(with_adapter, prompt, assistant_model=assistant)
                else:
                    with with_adapter.disable_adapter():
                        found = written(with_adapter, prompt, assistant_model=assistant)
            assert torch.equal(found, texts[way]), way
        accepted, drafted = sum(stats.accepted_by_position), sum(stats.drafted_by_position)
        assert 0 < accepted < drafted  # both acceptance and rejection: the states were put back
    assert num_hooks(with_adapter) == hooks


@pytest.mark.parametrize("way", ["on", "off"])
def test_c23_states_and_features_are_those_of_the_adapter_that_is_on(with_adapter, way):
    """In every round, against fresh forwards of the wrapped model."""
    prompt = prompt_for_target()
    with with_adapter.disable_adapter() if way == "off" else contextlib.nullcontext():
        text = written(with_adapter, prompt)
        states, features = StateCheck(with_adapter), FeatureCheck()
        for check in (states, features):
            guesses = partly_right(text, 0.7, block_size=5)
            guesses.check = check
            assert torch.equal(written(with_adapter, prompt, assistant_model=guesses), text)
        assert states.rounds > 3
        assert states.worst < 1e-5
        assert features.worst(with_adapter, text) < 1e-4
    assert (features.worst(with_adapter, text) < 1e-4) == (way == "on")


def offloaded(folder, where):
    """The trained fixture with embeddings and head on `where`, by accelerate's hooks."""
    trained_target().save_pretrained(folder)
    devices = {"model.embed_tokens": where, "lm_head": where, "model.layers": "cpu", "model.norm": "cpu"}
    devices |= {"model.rotary_emb": "cpu"}
    options = {"device_map": devices, "offload_folder": str(folder / "offloaded")}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def test_c20_embeddings_and_head_on_the_disk(tmp_path):
    """The drafter calls the target's modules, so their hooks bring the weights."""
    pytest.importorskip("accelerate")
    target, prompt = offloaded(tmp_path, "disk"), prompt_for_target()
    assert target.get_input_embeddings().weight.is_meta
    expected = written(trained_target(), prompt)
    assert torch.equal(written(target, prompt), expected)
    drafter = drafter_for(trained_target(), block_size=4).eval()
    for assistant in (drafter, partly_right(expected, 0.7, block_size=5)):
        assert torch.equal(written(target, prompt, assistant_model=assistant), expected)
    assert target.get_input_embeddings().weight.is_meta


def drafter_on_the_disk(folder):
    """The shipped drafter, most of it on the disk by accelerate's hooks."""
    options = {"dtype": torch.float32, "offload_folder": str(folder)}
    devices = {"hidden_norm": "cpu", "norm": "cpu", "rotary_emb": "cpu", "confidence_head": "cpu"}
    devices |= dict.fromkeys(("fc", "layers", "markov_head", "reader"), "disk")
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path(), device_map=devices, **options).eval()
    assert drafter.device.type == "meta"
    return drafter


def test_c20_a_drafter_on_the_disk_drafts_the_same(tmp_path):
    pytest.importorskip("accelerate")
    target = AutoModelForCausalLM.from_pretrained(ready_hf.small_target_path(), dtype=torch.float32).eval()
    prompt = AutoTokenizer.from_pretrained(ready_hf.small_target_path())(
        "import json\n", return_tensors="pt"
    ).input_ids
    drafters = [
        AutoModel.from_pretrained(ready_hf.small_drafter_path(), dtype=torch.float32),
        drafter_on_the_disk(tmp_path),
    ]
    found = []
    for drafter in drafters:
        with ready_hf.record_stats() as stats:
            found.append(written(target, prompt, assistant_model=drafter).tolist())
        found.append((stats.rounds, stats.accepted_by_position))
    assert found[:2] == found[2:]
    assert found[0] == written(target, prompt).tolist()
    assert sum(found[1][1]) > 0


def test_c20_a_drafter_of_shapes_only_is_refused_before_any_forward():
    drafter = drafter_for(trained_target(), block_size=4).to("meta")
    with counting_forwards(trained_target()) as forwards, pytest.raises(ValueError, match="are on the meta device"):
        written(trained_target(), prompt_for_target(), assistant_model=drafter)
    assert forwards == []


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_c23_adapters_that_put_tokens_in_front_are_refused_before_any_forward(kind):
    """transformers 5.24 and PEFT 0.21 feed such tokens in every step, or never."""
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(copy.deepcopy(trained_target()), config).eval()
    prompt, drafter = prompt_for_target(), drafter_for(trained_target(), block_size=4)
    with counting_forwards(wrapped) as forwards, pytest.raises(ValueError, match="puts tokens of its own"):
        wrapped.generate(input_ids=prompt, max_new_tokens=4, assistant_model=drafter)
    assert forwards == []
    bare = wrapped.get_base_model()  # the adapter is none of its own
    assert torch.equal(written(bare, prompt, assistant_model=drafter), written(trained_target(), prompt))


def places(model):
    """Recurrent layers, all decoder layers, embeddings and head, by their weights' addresses."""
    layers = ready_hf.recurrent_layers(model)
    modules = [*(layer.mixer for layer in layers), *decoder_layers(model)]
    modules += [model.get_input_embeddings(), output_head(model)]
    return [layer.layer_idx for layer in layers], [next(module.parameters()).data_ptr() for module in modules]


def test_c91_the_same_modules_behind_every_wrapper(with_adapter):
    """A LoRA wrapper, a compiled module, and a model that also sees images."""
    target = trained_target()
    assert places(torch.compile(target)) == places(target)
    inside = with_adapter.get_base_model()
    assert places(with_adapter) == places(inside)
    assert places(with_adapter)[0] == places(target)[0]
    text = tiny_target("qwen3_5").config.get_text_config().to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    seeing = transformers.Qwen3_5ForConditionalGeneration(config)
    found, addresses = places(seeing)
    assert found == places(tiny_target("qwen3_5"))[0]
    inner = seeing.model.language_model
    own = [inner.layers[index].linear_attn for index in found]
    own += [*inner.layers, inner.embed_tokens, seeing.lm_head]
    assert addresses == [next(module.parameters()).data_ptr() for module in own]
