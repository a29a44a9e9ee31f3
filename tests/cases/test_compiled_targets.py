"""Case C22: compiled targets and drafters, whose code must not be compiled again in every round or every call."""

import copy
import threading
import time

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

from ready_hf import compiled_code, ops, record_stats
from ready_hf.compiled_code import without_compiled_code
from ready_hf.plain_paths import PlainPath
from ready_hf.target import checks_reading
from support import (
    DEVICES,
    FAMILIES,
    VOCAB_SIZE,
    FeatureCheck,
    ScriptedDrafter,
    StateCheck,
    drafter_for,
    partly_right,
    random_prompt,
    tiny_target,
    trained_target,
    trained_tokenizer,
    with_lively_weights,
)


MOST_PLAIN = 3  # the prompt, and two for one token: keys and values of a fixed length, and of any
MOST_DRAFTED = 5  # the prompt with features; two for a block and two for one token: keys as they came, and cut back
MOST_DRAFTER = 4  # the prompt, and later rounds: one new position, several, keys and values of any length
MOST_AROUND_KERNELS = 28  # the drafter in pieces around its reads, whatever the number of rounds
# flash-linear-attention's functions are not compiled, so every layer with one of them is graphs of its own
MOST_IN_PIECES = 10  # 4 on an H200
MOST_OF_SIX_LAYERS = 16  # 8 on an H200
# Its block function, which one forward over a text goes through, multiplies float32 in tf32: 1e-3 from plain decoding
STATES = {"cpu": 1e-5, "cuda": 2e-3}
FEATURES = {"cpu": 1e-4, "cuda": 2e-2}  # not relative, of numbers up to 10; 3.6e-3 on an H200
CODE = "def area(width, height):\n    total = width * height\n    return total"
EDIT = f"<file>\n{CODE}\n</file>\n# Rename total to size\n<edited>\n"

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(model, **options):
    made = copy.deepcopy(model)
    made.compile(**{"backend": "eager", **options})
    return made


def two_layers(family="bamba"):
    """A recurrent layer and one of attention."""
    config = FAMILIES[family]()
    kinds = {"bamba": {"attn_layer_indices": [1]}, "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]}}
    config.update({"num_hidden_layers": 2, **kinds[family]})
    torch.manual_seed(0)
    return with_lively_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def attention_only():
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 16}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=96, eos_token_id=None, **options)
    return with_lively_weights(AutoModelForCausalLM.from_config(config))


def num_graphs() -> int:
    """Graphs so far; fails if code was too often compiled, and runs without from now on."""
    assert not any("recompile limit" in reason for reason in counters["unimplemented"])
    return counters["stats"].get("unique_graphs", 0)


def written(model, new_tokens=40, **options):
    prompt = random_prompt(5).to(model.device)
    return model.generate(prompt, do_sample=False, max_new_tokens=new_tokens, **options)


class RealignedDrafter(ScriptedDrafter):
    """Goes on from what plain decoding makes of the text so far, should that part from the reference."""

    def __init__(self, plain, reference, **options):
        super().__init__(reference, **options)
        self.plain, self.partings = plain, []

    def parts(self, ids):
        """Whether a text is not the beginning of the reference; notes where."""
        differs = (ids != self.reference[:, : ids.shape[1]])[0].nonzero()
        self.partings += differs[:1, 0].tolist()
        return len(differs) > 0

    def draft(self, context):
        ids, length = context.input_ids, self.reference.shape[1]
        if self.parts(ids):
            self.reference = self.plain.generate(ids, do_sample=False, max_new_tokens=length - ids.shape[1])
        return super().draft(context)


def ties_of(plain, ids, partings):
    """What plain decoding of a prompt of 5 tokens says of places in a text."""
    path = PlainPath(plain, {"input_ids": ids[:, :5]}, 1)
    path.ids = ids
    return [path.tie(place - 5) for place in partings]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_c22_two_hundred_rounds_that_accept_one_to_nine_tokens(device):
    """Every number of drafts; the states and features of the rounds are those of the model as it was."""
    plain, tokens = two_layers("qwen3_5").to(device), 1040
    target, reference = compiled(plain), written(plain, tokens)
    assert torch.equal(written(target), reference[:, :45])
    before = num_graphs()
    assert 0 < before <= (MOST_PLAIN if device == "cpu" else MOST_IN_PIECES)

    # where a kernel package cuts compiled code to pieces, it is not used while features are read
    for ids in ([0, 1],) if device == "cpu" else ([0, 1], []):
        drafter = RealignedDrafter(
            plain, reference, block_size=8, is_right=lambda round_, position: position < round_ * 5 % 9
        )
        features, states = FeatureCheck(), StateCheck(plain, every=20)
        drafter.target_layer_ids = ids
        drafter.check = lambda context, checks=(features, states): [check(context) for check in checks]
        before = num_graphs()
        with record_stats() as stats:
            text = written(target, tokens, assistant_model=drafter)
        drafter.parts(text)
        found, ties = num_graphs() - before, ties_of(plain, text, drafter.partings)
        worst = features.worst(plain, text) if ids else 0.0
        accepted = stats.accepted_by_position
        print(f"\nC22 on {device}: {drafter.rounds} rounds, {accepted} accepted, layers {ids} read, {before} graphs")
        print(f"and {found} more, states to {states.worst:.1e}, features to {worst:.1e}, texts part at {ties}")
        assert all(tie.is_near for tie in ties) if device == "cuda" else torch.equal(text, reference)
        assert drafter.rounds > 200
        assert min(stats.accepted_by_position) > 20
        assert states.worst < STATES[device]
        assert worst < FEATURES[device]
        assert found <= (MOST_DRAFTED if device == "cpu" else MOST_IN_PIECES)
    assert found > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "kernels", "tokens"),
    [("cpu", "torch", 40), ("cpu", "triton", 16), pytest.param("cuda", "triton", 240, marks=pytest.mark.gpu)],
)
def test_c22_a_compiled_drafter_and_later_calls(monkeypatch, device, kernels, tokens):
    """The features that the drafter asks for arrive, though the target was compiled before anybody read any; calls
    with other blocks, and without a drafter, find the code that is there."""
    if kernels == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(ops, "_backend", kernels)
    plain = two_layers().to(device)  # on a GPU too, no kernel is in the way: nothing is in tf32
    drafter = drafter_for(plain, block_size=4).to(device)
    target, reference = compiled(plain), written(plain, tokens)
    assert torch.equal(written(target, tokens), reference)
    with record_stats() as uncompiled:
        assert torch.equal(written(plain, tokens, assistant_model=drafter), reference)
    drafter.compile(backend="eager")
    for most in (MOST_DRAFTED + MOST_DRAFTER if kernels == "torch" else MOST_AROUND_KERNELS, 0):
        before = num_graphs()
        with record_stats() as stats:
            assert torch.equal(written(target, tokens, assistant_model=drafter), reference)
        assert stats.accepted_by_position == uncompiled.accepted_by_position
        scripted = partly_right(reference, 0.6, block_size=6)
        scripted.target_layer_ids, scripted.check = drafter.config.target_layer_ids, FeatureCheck()
        assert torch.equal(written(target, tokens, assistant_model=scripted), reference)
        assert scripted.check.worst(plain, reference) < FEATURES[device]
        assert torch.equal(written(target, tokens), reference)
        found = num_graphs() - before
        print(f"\nC22 on {device}: a drafter compiled, {kernels}, {stats.rounds} rounds, {found} graphs more")
        assert found <= most


@pytest.mark.slow
@pytest.mark.gpu
def test_c22_the_default_backend_on_a_gpu():
    """Inductor rounds otherwise than eager code: where a text parts from it, plain decoding is not sure either."""
    plain = copy.deepcopy(trained_target()).to("cuda")
    target = copy.deepcopy(plain)
    target.compile()
    inputs = trained_tokenizer()(EDIT, return_tensors="pt").to("cuda")
    path = PlainPath(plain, inputs, 60)
    for most in (MOST_OF_SIX_LAYERS, 0):
        before, ties = counters["stats"].get("unique_graphs", 0), {}
        guesses = partly_right(path.ids, 0.7)
        guesses.target_layer_ids = []  # no features, for which compiled code would not be used
        with record_stats() as stats:
            for name, drafter in (("plain", None), ("guesses", guesses)):
                text = target.generate(**inputs, do_sample=False, max_new_tokens=60, assistant_model=drafter)
                differs = (text != path.ids)[0].nonzero()[:, 0].tolist()
                if differs:
                    ties[name] = path.tie(differs[0] - path.prompt_length)
        found = counters["stats"].get("unique_graphs", 0) - before
        print(f"\nC22 on cuda with inductor: {stats.rounds} rounds, {found} graphs more, texts part at {ties}")
        assert all(tie.is_near for tie in ties.values())
        assert found <= most
        assert found > 0 or most == 0


def test_c22_features_are_read_uncompiled_where_a_kernel_package_cuts_the_code(monkeypatch):
    assert checks_reading(tiny_target("qwen3_5"))
    assert not checks_reading(attention_only())
    monkeypatch.setattr("ready_hf.target._has_kernel", lambda recurrence, device: True)
    assert not checks_reading(tiny_target("qwen3_5"))


@pytest.mark.slow
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


@pytest.mark.slow
def test_c22_a_target_without_recurrent_layers():
    """Nothing tells its compiled code that features are read, so it is not used where they are."""
    plain = attention_only()
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


def _compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def _compile_part(model):
    model.model = torch.compile(model.model, backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("compile_it", [_compile_forward, _compile_part])
def test_c22_other_ways_to_compile_a_target_without_recurrent_layers(compile_it):
    plain = attention_only()
    target, reference = copy.deepcopy(plain), written(plain)
    compile_it(target)
    assert torch.equal(written(target), reference)
    assert num_graphs() > 0
    drafter = partly_right(reference, 0.6, block_size=6)
    drafter.check = features = FeatureCheck()
    assert torch.equal(written(target, assistant_model=drafter), reference)
    assert features.worst(plain, reference) < 1e-4


def test_c22_threads_that_leave_compiled_code_out_do_not_hand_it_back_early_or_never():
    """torch has one stance for all threads."""
    inside, go_on = threading.Barrier(3), threading.Event()
    function, seen = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager"), []

    def runs_compiled():
        return bool(function(torch.zeros(1)))

    def second():
        with without_compiled_code():
            inside.wait(10)
            go_on.wait(10)
            seen.append(runs_compiled())

    def first():
        with without_compiled_code():
            inside.wait(10)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    assert runs_compiled()
    threads[0].start()
    while not compiled_code._stance.num_users:
        time.sleep(0.001)
    threads[1].start()
    inside.wait(10)
    threads[0].join()
    go_on.set()
    threads[1].join()
    assert seen == [False]
    assert runs_compiled()
