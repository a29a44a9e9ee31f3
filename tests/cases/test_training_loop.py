"""Cases C13, C14, C15, C19, C28, C40, C53, C63, C64, C68 and C88: what users met while training drafters."""

import copy
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from ready_hf import ReadyDrafterConfig, ReadyDrafterModel, modeling_ready
from ready_hf.drafting import DraftSession
from ready_hf.features import FrozenTarget
from support import DEVICES, drafter_for, random_prompt, tiny_target, trained_target, trained_tokenizer


pytest.importorskip("accelerate")
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments  # noqa: E402


HEALTH = "trainable tensors"


def run_training(folder, drafter, target, steps, resume=None, callbacks=None, batch=2, rows=None, **options):
    rows = rows or [{"input_ids": row} for row in random_prompt(24, batch=12, seed=9)]
    options = {"save_strategy": "no", **options}
    arguments = ReadyTrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        logging_steps=1,
        disable_tqdm=True,
        num_anchors=3,
        **{"learning_rate": 1e-2, "use_cpu": True, **options},
    )
    trainer = ReadyTrainer(drafter, arguments, target=target, train_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def hidden_states(drafter, batch):
    with torch.no_grad():
        return drafter(
            noise_embeds=batch.noise_embeds,
            context_hidden_states=batch.context_hidden_states,
            anchor_positions=batch.anchor_positions,
            states=batch.states,
        ).last_hidden_state.unflatten(1, (-1, drafter.config.block_size))


@pytest.mark.parametrize("window", [None, 16])
def test_c13_a_block_sees_nothing_at_or_after_its_anchor_but_the_anchor(window):
    """A text of 64 with 32 anchors, blocks of 8: other features, and other tokens, from the anchor on."""
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target, block_size=8, sliding_window=window)
    frozen = FrozenTarget(target, drafter.config)
    ids, anchors = random_prompt(64), torch.arange(1, 64, 2)[None, :32]
    batch = frozen.batch(ids, anchors)
    want = hidden_states(drafter, batch)
    for index in (0, 5, 17, 31):
        anchor = int(anchors[0, index])
        changed = copy.copy(batch)
        changed.context_hidden_states = batch.context_hidden_states.clone()
        changed.context_hidden_states[:, anchor:] += 3.0
        got = hidden_states(drafter, changed)
        assert torch.equal(got[:, : index + 1], want[:, : index + 1])
        other = ids.clone()
        other[:, anchor + 1 :] = random_prompt(63 - anchor, seed=8)
        got = hidden_states(drafter, frozen.batch(other, anchors))
        assert torch.allclose(got[:, : index + 1], want[:, : index + 1], atol=1e-5)
        # control: the last feature before the anchor is seen
        changed.context_hidden_states = batch.context_hidden_states.clone()
        changed.context_hidden_states[:, anchor - 1] += 3.0
        assert (hidden_states(drafter, changed)[:, index] - want[:, index]).abs().max() > 1e-2


def test_c14_training_ids_up_to_the_limit():
    target = tiny_target("qwen3_5")  # 97 rows
    frozen = FrozenTarget(target, drafter_for(target).config)
    anchors = torch.tensor([[3]])
    ids = random_prompt(12)
    ids[0, 2:5] = torch.tensor([94, 95, 96])
    frozen.batch(ids, anchors)
    for illegal in (97, 1000, -1):
        ids[0, 7] = illegal
        with pytest.raises(ValueError, match=f"token ids must be 0 to 96 .*got {illegal}"):
            frozen.batch(ids, anchors)


def test_c15_the_mask_token_is_refused_in_training_text():
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    frozen = FrozenTarget(target, drafter.config)
    ids = random_prompt(12)
    ids[0, 7] = drafter.config.mask_token_id
    with pytest.raises(ValueError, match=r"the mask token \(1\) stands in the training text"):
        frozen.batch(ids, torch.tensor([[3]]))


@pytest.mark.parametrize("place", ["features", "gradient"])
def test_c19_a_step_that_is_not_finite_is_skipped_and_reported(tmp_path, caplog, monkeypatch, place):
    """Steps 1 and 3 of 4 see infinite features, or an infinite gradient of a finite loss, and change nothing."""
    target = tiny_target("qwen3_5")
    drafter, seen = drafter_for(target), []
    original = FrozenTarget.batch

    def batch(self, *args):
        made = original(self, *args)
        seen.append({name: value.detach().clone() for name, value in drafter.named_parameters()})
        if len(seen) in (1, 3) and place == "features":
            made.context_hidden_states[0, 0] = torch.inf
        return made

    def hook(gradient):
        return gradient * (torch.inf if len(seen) in (1, 3) and place == "gradient" else 1)

    drafter.layers[0].mlp.up_proj.weight.register_hook(hook)
    monkeypatch.setattr(FrozenTarget, "batch", batch)
    trainer = run_training(
        tmp_path, drafter, target, 4, save_strategy="steps", save_steps=3, gradient_accumulation_steps=1
    )
    assert trainer.num_skipped_steps == 2
    assert [r.getMessage()[:50] for r in caplog.records if r.name == "ready_hf.training_callbacks"] == [
        f"ready_hf: loss or gradient of step {step} is not finite"[:50] for step in (1, 3)
    ]
    changed = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip(seen[:-1], seen[1:], strict=True)]
    assert changed == [False, True, False]
    saved = ReadyDrafterModel.from_pretrained(tmp_path / "checkpoint-3")
    assert all(torch.isfinite(value).all() for value in saved.parameters())
    assert all(torch.isfinite(value).all() for value in drafter.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_c19_500_steps_in_bfloat16_stay_finite(tmp_path, caplog, device):
    """Pure bfloat16 warns that small steps round away; master weights in float32 learn no worse."""
    target, ends, warned = copy.deepcopy(trained_target()).to(torch.bfloat16), {}, {}
    for dtype in (torch.bfloat16, torch.float32):
        caplog.clear()
        drafter = drafter_for(target, block_size=4).to(dtype)
        options = {"learning_rate": 6e-4, "bf16": True, "use_cpu": device == "cpu"}
        trainer = run_training(tmp_path / str(dtype), drafter, target, 500, **options)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert trainer.num_skipped_steps == 0
        assert all(torch.isfinite(p).all() and p.dtype == dtype for p in drafter.parameters())
        assert drafter.device.type == device
        ends[dtype], warned[dtype] = sum(losses[-50:]) / 50, "small steps round away" in caplog.text
        assert ends[dtype] < 0.9 * sum(losses[:50]) / 50
    print(f"\nC19 on {device}: mean loss of the last 50 of 500 steps {ends}")
    assert warned == {torch.bfloat16: True, torch.float32: False}
    assert ends[torch.float32] < ends[torch.bfloat16] + 0.02


@pytest.mark.parametrize("steps", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_c28_a_training_is_its_two_halves_with_a_resume_between(tmp_path, monkeypatch, steps):
    """Same rows, anchors, learning rates, losses and weights; 50 steps end within an epoch."""
    target, batches, batch = tiny_target("qwen3_5"), [], FrozenTarget.batch

    def spy(self, input_ids, anchor_positions, *args):
        batches[-1].append((input_ids.tolist(), anchor_positions.tolist()))
        return batch(self, input_ids, anchor_positions, *args)

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= steps // 2

    def run(folder, drafter, **options):
        batches.append([])
        return run_training(tmp_path / folder, drafter, target, steps, **options)

    monkeypatch.setattr(FrozenTarget, "batch", spy)
    straight = run("a", drafter_for(target))
    options = {"save_strategy": "steps", "save_steps": steps // 2}
    run("b", drafter_for(target), callbacks=[Stop()], **options)
    fresh = drafter_for(target, seed=1)
    resumed = run("b", fresh, resume=str(tmp_path / "b" / f"checkpoint-{steps // 2}"), **options)
    assert [len(seen) for seen in batches] == [steps, steps // 2, steps // 2]
    assert batches[1] + batches[2] == batches[0]

    def history(trainer):
        return [(e["step"], e["loss"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e]

    assert [step for step, *_ in history(resumed)] == list(range(1, steps + 1))
    for one, other in zip(history(straight), history(resumed), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for (name, value), other in zip(straight.model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.allclose(value, other, atol=1e-6), name


def test_anchors_differ_from_step_to_step(tmp_path, monkeypatch):
    """A resumed run that drew the same anchors in every step would equal a straight one that does, too."""
    seen, batch = [], FrozenTarget.batch

    def spy(self, input_ids, anchor_positions, *args):
        seen.append(anchor_positions.tolist())
        return batch(self, input_ids, anchor_positions, *args)

    monkeypatch.setattr(FrozenTarget, "batch", spy)
    target = tiny_target("qwen3_5")
    run_training(tmp_path, drafter_for(target), target, 4)
    assert len(seen) == 4
    assert len({str(anchors) for anchors in seen}) == 4


WITHOUT_KERNELS = """
import sys
sys.modules.update({name: None for name in ("triton", "fla", "kernels", "causal_conv1d")})  # as if not installed

import torch
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments
from support import drafter_for, random_prompt, tiny_target, trained_target, trained_tokenizer

target = tiny_target("qwen3_5")
drafter, rows = drafter_for(target), [{"input_ids": row} for row in random_prompt(24, batch=6)]
before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
options = {"max_steps": 3, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "num_anchors": 3}
trainer = ReadyTrainer(drafter, ReadyTrainingArguments(sys.argv[1], **options), target=target, train_dataset=rows)
loss = trainer.train().training_loss
assert loss == loss and trainer.state.global_step == 3
assert not any(torch.equal(before[name], value) for name, value in drafter.named_parameters())
prompt, options = random_prompt(8), {"max_new_tokens": 12, "do_sample": False}
plain = target.generate(prompt, **options)
assert torch.equal(target.generate(prompt, **options, assistant_model=drafter), plain)
loaded = [name for name in sys.modules if name.split(".")[0] in ("triton", "fla") and sys.modules[name]]
print("done", loaded)
"""


def test_c40_import_train_and_generate_without_kernels(tmp_path):
    """In a process of its own, since this one has imported whatever is installed."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT_KERNELS, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[-1] == "done []"


def by_hand(anchor_rows, block_size, num_rows, num_seen, window, context_attention_mask, attention_mask):
    """The mask of a window of 16, entry by entry; without a cache, whatever the configuration says."""
    batch, anchors = anchor_rows.shape
    mask = torch.zeros(batch, 1, anchors * block_size, num_rows + anchors * block_size, dtype=torch.bool)
    for b in range(batch):
        for query in range(anchors * block_size):
            anchor, slot = int(anchor_rows[b, query // block_size]), query % block_size
            for row in range(num_rows):
                mask[b, 0, query, row] = row < anchor and (anchor + slot) - row < 16
            for other in range(anchors * block_size):
                mask[b, 0, query, num_rows + other] = other // block_size == query // block_size
    return mask


def test_c53_window_of_16_in_a_context_of_60(tmp_path, monkeypatch):
    """Training and inference against a drafter without a window and a mask made by hand; also after a reload."""
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target, sliding_window=16, num_hidden_layers=2)
    config = copy.deepcopy(drafter.config)
    config.sliding_window, config.layer_types = None, ["full_attention"] * 2
    full = ReadyDrafterModel(config).eval()
    full.load_state_dict(drafter.state_dict())
    ids, anchors = random_prompt(61), torch.tensor([[7, 30, 60]])
    batch = FrozenTarget(target, drafter.config).batch(ids, anchors)
    without = hidden_states(full, batch)
    with monkeypatch.context() as patched:
        patched.setattr(modeling_ready, "block_mask", by_hand)
        want = hidden_states(full, batch)
    assert torch.allclose(hidden_states(drafter, batch), want, atol=1e-5)
    assert (without - want)[:, 1:].abs().max() > 1e-2
    drafter.save_pretrained(tmp_path)
    reloaded = ReadyDrafterModel.from_pretrained(tmp_path).eval()
    assert torch.allclose(hidden_states(reloaded, batch), want, atol=1e-5)

    blocks = []
    block = DraftSession._block
    monkeypatch.setattr(
        DraftSession, "_block", lambda self, context: blocks.append(block(self, context)) or blocks[-1]
    )
    target.generate(ids, max_new_tokens=4, do_sample=False, assistant_model=reloaded)  # the first anchor is token 61
    first = target.generate(ids, max_new_tokens=1, do_sample=False)
    batch = FrozenTarget(target, drafter.config).batch(first, torch.tensor([[61]]))
    with monkeypatch.context() as patched:
        patched.setattr(modeling_ready, "block_mask", by_hand)
        want = hidden_states(full, batch)
    assert torch.allclose(blocks[0], want[:, 0], atol=1e-4)


def test_c64_the_target_is_frozen_and_comes_back_as_it_was(tmp_path):
    """Loaded with gradients and dropout, in train mode but for one layer."""
    target = copy.deepcopy(tiny_target("qwen3_5")).train().requires_grad_(True)
    for module in target.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    prompt = random_prompt(24)
    with torch.no_grad():
        assert not torch.equal(target(prompt).logits, target(prompt).logits)  # there is dropout
    target.get_decoder().layers[1].eval()
    modes = [module.training for module in target.modules()]
    before = {name: value.clone() for name, value in target.state_dict().items()}
    drafter = drafter_for(target)
    run_training(tmp_path, drafter, target, 1)
    assert [module.training for module in target.modules()] == modes
    assert True in modes
    assert False in modes
    assert all(p.grad is None and p.requires_grad for p in target.parameters())
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())
    frozen = FrozenTarget(target, drafter.config)
    anchors = torch.tensor([[5]])
    one, other = frozen.batch(prompt, anchors), frozen.batch(prompt, anchors)  # and it is off
    assert torch.equal(one.context_hidden_states, other.context_hidden_states)
    assert not one.target_hidden_states.requires_grad


@contextmanager
def files_written():
    """Paths that are opened for writing, by Python's audit events."""
    found, is_on = [], True

    def hook(event, arguments):
        if is_on and event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            found.append(str(arguments[0]))

    sys.addaudithook(hook)  # which stays
    yield found
    is_on = False


def test_c63_training_writes_no_features(tmp_path):
    """Features, states and distributions of 1,000 rows are made in steps, and nothing but a checkpoint is written."""
    target = tiny_target("qwen3_5")
    rows = [{"input_ids": row} for row in random_prompt(10, batch=1000)]
    with files_written() as written:
        run_training(tmp_path / "a", drafter_for(target), target, 20, rows=rows, batch=50)
    assert not [path for path in written if path != os.devnull]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with files_written() as written:
        run_training(tmp_path / "b", drafter_for(target), target, 2, save_strategy="steps", save_steps=2)
    assert written  # they are seen
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    parameters = sum(parameter.nbytes for parameter in drafter_for(target).parameters())
    assert parameters < size < 3 * parameters + 100_000  # weights, two moments of the optimizer, small files


OPTIONS = [
    {},
    {"reader": False, "confidence_head_with_markov": False},
    {"markov_head_type": "rnn", "reader_gate": True, "reader_projection": "bilinear"},
    {"markov_head_type": "gated", "reader_injection": "layers", "reader_query_rank": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_c88_the_saved_file_is_what_was_trained_and_all_of_it_moved(tmp_path, options):
    target = tiny_target("qwen3_5")
    torch.manual_seed(0)
    config = ReadyDrafterConfig.for_target(target, block_size=6, mask_token_id=1, markov_rank=8, **options)
    drafter = ReadyDrafterModel(config)  # as made: reader and sequential head start at zero
    before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    trainer = run_training(tmp_path / "a", drafter, target, 20)
    trainer.save_model(tmp_path / "b")
    saved, memory = load_file(tmp_path / "b" / "model.safetensors"), drafter.state_dict()
    assert saved.keys() == memory.keys() == before.keys()
    assert all(torch.equal(saved[name], memory[name]) for name in saved)
    assert not [name for name, value in before.items() if torch.equal(value, saved[name])]
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def frozen_head(drafter):
    """A part that the loss does not see: its outputs carry no gradient."""
    head = drafter.confidence_head
    head.forward = (lambda forward: lambda *args, **kwargs: forward(*args, **kwargs).detach())(head.forward)


@pytest.mark.parametrize(
    ("break_it", "options", "found"),
    [
        (None, {}, None),
        (frozen_head, {}, "never had a gradient (confidence_head."),
        (None, {"reader_learning_rate": 0.0}, "had gradients and are as they were (reader."),
        (
            None,
            {"learning_rate": 1e-9, "dtype": torch.bfloat16},
            "had gradients and are as they were (confidence_head.",
        ),
        (frozen_head, {"steps": 2}, None),
        (None, {"freeze_backbone_steps": 9}, None),
        (
            None,
            {"freeze_backbone_steps": 9, "reader_learning_rate": 0.0},
            "7 of 36 trainable tensors had gradients and are as they were (reader.",
        ),
    ],
    ids=[
        "sound",
        "left out of the loss",
        "learning rate 0",
        "too small for bfloat16",
        "too short to tell",
        "reader alone",
        "not even it",
    ],
)
def test_c88_untouched_weights_are_named(tmp_path, caplog, break_it, options, found):
    """The health check inside of the trainer: a run that trains everything says nothing."""
    options = {"steps": 4, **options}
    drafter = drafter_for(tiny_target("qwen3_5")).to(options.pop("dtype", torch.float32))
    if break_it is not None:
        break_it(drafter)
    with caplog.at_level("WARNING"):
        run_training(tmp_path, drafter, tiny_target("qwen3_5"), **options)
    said = [record.getMessage() for record in caplog.records if HEALTH in record.getMessage()]
    assert len(said) == (found is not None)
    assert found is None or found in said[0]


def test_c88_an_optimizer_that_steps_within_the_backward_is_no_fault(tmp_path, caplog):
    """It leaves no gradients to look at; weights that move are enough."""
    drafter = drafter_for(tiny_target("qwen3_5"))

    def step(parameter):
        parameter.data -= 1e-2 * parameter.grad
        parameter.grad = None

    for parameter in drafter.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    run_training(tmp_path, drafter, tiny_target("qwen3_5"), 4, max_grad_norm=0.0)
    assert HEALTH not in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_c88_the_smallest_change_is_seen_without_float64(dtype):
    """As on devices that have none."""
    from torch.overrides import TorchFunctionMode

    from ready_hf.training_callbacks import _sums_of_weights

    class NoFloat64(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if (kwargs or {}).get("dtype") == torch.float64:
                raise TypeError("this device has no float64")
            return func(*args, **kwargs or {})

    layer = torch.nn.Linear(40, 50).to(dtype)
    with NoFloat64():
        before = _sums_of_weights(layer)
        assert _sums_of_weights(layer) == before
        bits = layer.weight.data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
        bits[7, [3, 4]] += torch.tensor([1, -1], dtype=bits.dtype)  # which cancel in a plain sum
        after = _sums_of_weights(layer)
    assert after["weight"] != before["weight"]
    assert after["bias"] == before["bias"]


def test_c68_reader_on_and_off_with_the_same_budget(tmp_path):
    """Same rows, anchors and steps; the report compares them on prompts that were not learned."""
    from ready_hf.demo_prompts import Prompt
    from ready_hf.evaluation import evaluate
    from ready_hf.intervals import MACRO

    target, drafters, learned = trained_target(), {}, {}
    for name, reader in (("off", False), ("on", True)):
        drafters[name] = drafter_for(target, reader=reader, block_size=4).eval()
        trainer = run_training(tmp_path / name, drafters[name], target, steps=8)
        learned[name] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        drafters[name].eval()
    assert len(learned["on"]) == len(learned["off"]) == 8
    assert all(losses[-1] < losses[0] for losses in learned.values())
    prompts = [Prompt(text) for text in ("ab", "cd ef", "xyz")]
    found = evaluate(target, trained_tokenizer(), drafters, prompts, max_new_tokens=16, resamples=50)
    head = next(line for line in found.to_markdown().splitlines() if line.startswith("|") and "minus" in line)
    assert "minus off" in head
    for temperature in found.temperatures:
        lengths = [found.accepted_length(temperature, name)[MACRO].value for name in drafters]
        assert all(length >= 1 for length in lengths)
