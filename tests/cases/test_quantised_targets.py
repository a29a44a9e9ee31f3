"""Cases C24 and C67: targets whose layers are packed into 4 or 8 bits, by bitsandbytes.

Its 8-bit layers look for outliers in all tokens of a forward at once unless `llm_int8_threshold=0.0`, so that a
token's scores depend on the tokens beside it, in plain decoding too. Texts are compared without that.
"""

import copy
import functools
import tempfile

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import ready_hf
from checks import WORST_STATE_ERROR
from ready_hf import rollback
from ready_hf.candidates import PromptLookupDrafter
from ready_hf.demo_prompts import Prompt
from ready_hf.evaluation import evaluate
from ready_hf.features import FrozenTarget
from ready_hf.fingerprints import weights_fingerprint
from ready_hf.intervals import MACRO
from ready_hf.plain_paths import PlainPath
from ready_hf.verify_target import drafted_run, verify_target
from support import (
    StateCheck,
    cache_of,
    drafter_for,
    fresh_states,
    partly_right,
    states,
    trained_target,
    trained_tokenizer,
    worst_error,
)


bitsandbytes = pytest.importorskip("bitsandbytes")
from transformers import BitsAndBytesConfig  # noqa: E402


NEW_TOKENS = 64
BITS = {
    4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    8: {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
# float16 within 8-bit layers: rounding turns differences of 1e-7 into steps of 1 / 127 of a token's largest input
STATE_ERRORS = {4: WORST_STATE_ERROR, 8: 1e-2}
bits = pytest.mark.parametrize("bits", BITS)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

pytestmark = pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")


def packed_modules(model):
    return [module for module in model.modules() if type(module).__module__.startswith("bitsandbytes")]


def load_quantised(folder, bits, device="cpu", dtype=torch.float32, **options):
    config = BitsAndBytesConfig(**BITS[bits], **options)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype, device_map=device)
    for module in packed_modules(model):
        module.support_avx512bf16_for_cpu = False  # there it computes in bfloat16, and takes no layer of 4 outputs
    return model.eval()


@functools.cache
def with_own_head():
    """Folder of the trained fixture with a head of its own: one that is tied to the embeddings cannot be packed."""
    model = copy.deepcopy(trained_target())
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return folder


@functools.cache
def target_of(bits, device="cpu", head=False):
    if head:
        return load_quantised(with_own_head(), bits, device, llm_int8_skip_modules=["none"])
    return load_quantised(ready_hf.tiny_target_path(), bits, device)


def prompt_on(device):
    return trained_tokenizer()("def f(x):\n    return x", return_tensors="pt")["input_ids"].to(device)


def written(model, **options):
    return model.generate(prompt_on(model.device), do_sample=False, max_new_tokens=NEW_TOKENS, **options)


class Inside:
    """Mixed into a packed layer: its weight is not for reading from outside of its forward."""

    is_running = False

    @property
    def weight(self):
        assert self.is_running, f"somebody reads the packed weight of {type(self).__mro__[2].__name__}"
        return self._parameters["weight"]

    def forward(self, *args, **kwargs):
        self.is_running = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.is_running = False


@pytest.fixture
def guarded():
    """Gives a target whose packed layers fail if their weight is read from outside; undone afterwards."""
    changed = []

    def guard(model):
        for module in packed_modules(model):
            changed.append((module, type(module)))
            module.__class__ = type("Guarded", (Inside, type(module)), {"__module__": "bitsandbytes.guarded"})
        assert changed
        return model

    yield guard
    for module, own in changed:
        module.__class__ = own


def drafter_of(target):
    drafter = drafter_for(target, block_size=4)
    assert drafter.config.has_reader
    return drafter.to(target.device)


def train(target, drafter, folder):
    """Three steps; returns the losses."""
    from ready_hf.training import ReadyTrainer, ReadyTrainingArguments

    text = trained_tokenizer()("def f(x):\n    return x + 1\n\nclass Reader:\n    def __init__(self):\n" * 2)[
        "input_ids"
    ]
    options = {"max_steps": 3, "logging_steps": 1, "num_anchors": 4, "save_strategy": "no", "disable_tqdm": True}
    arguments = ReadyTrainingArguments(str(folder), use_cpu=target.device.type == "cpu", **options)
    trainer = ReadyTrainer(drafter, arguments, target=target, train_dataset=[{"input_ids": torch.tensor(text)}] * 4)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@devices
@pytest.mark.parametrize(
    ("bits", "head"),
    [
        (4, True),
        (8, False),
        pytest.param(4, False, marks=pytest.mark.slow),
        pytest.param(8, True, marks=pytest.mark.slow),
    ],
)
def test_c24_three_steps_of_training_and_64_tokens(tmp_path, guarded, bits, head, device):
    """The texts are those of the quantised target itself, and nobody reads its packed weights."""
    pytest.importorskip("accelerate")
    target = guarded(target_of(bits, device, head))
    kinds = {type(module).__mro__[2].__name__ for module in packed_modules(target)}
    assert kinds == {"Linear4bit" if bits == 4 else "Linear8bitLt"}
    assert isinstance(target.lm_head, Inside) == head
    reference, drafter = written(target), drafter_of(target)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    losses = train(target, drafter, tmp_path)
    assert len(losses) == 3
    assert all(0 < loss < 100 for loss in losses)
    unchanged = [n for n, p in drafter.named_parameters() if torch.equal(p, before[n])]
    assert not unchanged
    assert torch.equal(written(target, assistant_model=drafter.eval()), reference)
    if bits == 4 and device == "cpu":
        assert not torch.equal(reference, written(trained_target()))  # it is another model


@bits
def test_c24_states_are_those_of_the_quantised_target(bits):
    """In every round, against fresh forwards of it; a rollback that keeps one token too many is far off."""
    target = target_of(bits)
    plain = written(target, return_dict_in_generate=True)
    own_error = worst_error(states(cache_of(plain)), fresh_states(target, plain.sequences[:, :-1]))
    drafter = partly_right(plain.sequences, 0.7, block_size=5)
    drafter.check = check = StateCheck(trained_target())
    check.twin = target  # it reads no features at that moment
    with ready_hf.record_stats() as stats:
        assert torch.equal(written(target, assistant_model=drafter), plain.sequences)
    assert 0 < sum(stats.accepted_by_position) < sum(stats.drafted_by_position)
    assert check.worst < STATE_ERRORS[bits]
    assert check.worst < max(10 * own_error, WORST_STATE_ERROR)
    late = worst_error(_recurrent(states(cache_of(plain))), _recurrent(fresh_states(target, plain.sequences[:, :-2])))
    assert late > 5 * STATE_ERRORS[bits]


def _recurrent(found):
    return {name: state for name, state in found.items() if "recurrent" in name}


@bits
def test_c24_verify_measures_what_plain_decoding_differs_by(bits):
    found = verify_target(target_of(bits), [{"input_ids": prompt_on("cpu")}], max_new_tokens=16, block_size=3)
    assert not found.is_exact
    assert found.is_lossless


def test_c24_a_head_that_hands_no_gradient_on_is_refused(monkeypatch):
    """As 4-bit layers on a CPU with bfloat16 instructions are, once a forward has packed them anew."""
    target = target_of(4, head=True)
    config = ready_hf.ReadyDrafterConfig.for_target(target, mask_token_id=1)
    FrozenTarget(target, config)
    forward = type(target.lm_head).forward
    monkeypatch.setattr(target.lm_head, "forward", lambda x: forward(target.lm_head, x.detach()))
    with pytest.raises(ValueError, match="Linear4bit, the target's quantized output head, hands no gradient on"):
        FrozenTarget(target, config)


def test_c24_states_of_short_texts_may_be_as_far_off_as_those_of_any_target_in_float32(monkeypatch):
    """Both plain ways of a text may be equal by chance."""
    for name in ("difference", "jumps"):
        monkeypatch.setattr(PlainPath, name, lambda path: 0.0)
    found = verify_target(target_of(4), [{"input_ids": prompt_on("cpu")}], max_new_tokens=8, block_size=2)
    assert max(run.state_error for run in found.runs) > 0
    assert not found.failures


TEXTS = ["import os\nimport sys\n\ndef main(x, y):\n    z = ", "def f(x):\n    return x"]


@pytest.mark.slow
@bits
@pytest.mark.parametrize("text", TEXTS)
def test_c24_verify_knows_that_8_bit_layers_turn_rounding_errors_into_jumps(bits, text, monkeypatch):
    """Also where a text meets none on its plain ways, as the first. What is off by a token still shows."""
    prompt = trained_tokenizer()(text, return_tensors="pt")
    found = verify_target(target_of(bits), [prompt], max_new_tokens=16, block_size=3)
    assert not found.failures
    assert (found.bound > 1e-2) is (bits == 8)
    commit = rollback._commit_states
    monkeypatch.setattr(
        rollback, "_commit_states", lambda layers, keep, length: commit(layers, min(keep + 1, length), length)
    )
    assert verify_target(target_of(bits), [prompt], max_new_tokens=16, block_size=3).failures


def test_c67_a_configuration_is_not_yet_a_quantised_target():
    target = copy.deepcopy(trained_target())
    target.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    report = evaluate(
        target, trained_tokenizer(), {"lookup": PromptLookupDrafter(2)}, [Prompt("x = ")], max_new_tokens=2
    )
    assert "quantization" not in report.setting


class HeadOfBuffers(nn.Module):
    """Packed as GPTQ and AWQ do it: integers and scales, and no parameter."""

    def __init__(self, weight):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("scales", weight.abs().amax(-1, keepdim=True) / 127)
        self.register_buffer("qweight", (weight / self.scales).round().to(torch.int8).T.contiguous())

    def forward(self, x):
        return x @ (self.qweight * self.scales.T)


def test_c24_a_head_without_parameters(tmp_path):
    pytest.importorskip("accelerate")
    target = copy.deepcopy(trained_target())
    target.lm_head = HeadOfBuffers(target.lm_head.weight.detach())
    target.is_quantized = True
    reference, drafter = written(target), drafter_of(target)
    assert all(0 < loss < 100 for loss in train(target, drafter, tmp_path))
    assert torch.equal(written(target, assistant_model=drafter.eval()), reference)


def test_c24_the_fingerprint_of_a_packed_target():
    """It stays the same while the target is used, and is refused where reading the weights would change them."""
    target, other = target_of(4), load_quantised(ready_hf.tiny_target_path(), 4)
    first = weights_fingerprint(other)
    written(other)
    assert weights_fingerprint(other) == first == weights_fingerprint(target) != weights_fingerprint(target_of(8))
    packed_modules(other)[0].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="has packed the 4-bit weights"):
        weights_fingerprint(other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        *(pytest.param("cuda", x, marks=pytest.mark.gpu) for x in (torch.float32, torch.bfloat16)),
    ],
)
def test_c67_a_target_against_its_4_bit_version(device, dtype):
    """One drafter, trained for the first: both texts are their own target's, and the report tells what is lost."""
    folder, name = ready_hf.small_target_path(), str(dtype).removeprefix("torch.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    drafter = AutoModel.from_pretrained(ready_hf.small_drafter_path("dspark"), dtype=dtype).eval().to(device)
    targets = {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device),
        "nf4": load_quantised(folder, 4, device, dtype=dtype),
    }
    prompts = [Prompt(text) for text in ("def main(", "import os\n\nclass Reader:", "for name in sorted(")]
    found = {
        kind: evaluate(target, tokenizer, {"dspark": drafter}, prompts, max_new_tokens=24, temperatures=(0,))
        for kind, target in targets.items()
    }
    if dtype == torch.bfloat16:
        for target in targets.values():
            for prompt in prompts:
                path = PlainPath(target, prompt.encode(tokenizer, target.device), 24)
                run, _ = drafted_run(path, "dspark", drafter, 0)
                assert run.first_difference is None or run.tie.is_near
    for kind, result in found.items():
        assert result.is_identical or dtype == torch.bfloat16, kind
        accepted, speed = result.accepted_length(0, "dspark"), result.speed(0, "dspark")
        assert accepted
        assert all(1 <= estimate.value <= 9 for estimate in accepted.values())
        report = result.to_markdown()
        assert all(estimate.text() in report for estimate in [*accepted.values(), *speed.values()])
        slower = [f"({speed[task].value:.2f})" for task in speed if task != MACRO and speed[task].value < 1]
        said = "".join(line for line in report.splitlines() if line.startswith("SLOWER than plain decoding: dspark"))
        assert bool(said) is bool(slower)
        assert all(value in said for value in slower)
    assert found["nf4"].setting["quantization"] == "nf4"
    assert "quantization nf4" in found["nf4"].to_markdown()
    assert "quantization" not in found[name].setting
    lengths = {kind: [text.log for text in result.of(0, "dspark")] for kind, result in found.items()}
    assert lengths["nf4"] != lengths[name]
    means = {kind: f"{result.accepted_length(0, 'dspark')[MACRO].value:.2f}" for kind, result in found.items()}
    print(f"\nC67 on {device}: tokens a forward {means}, identical {[x.is_identical for x in found.values()]}")
