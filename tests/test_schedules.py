"""Training in stages: a new reader, its learning rate, and the rest frozen meanwhile; and where a run goes on."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from ready_hf import ReadyDrafterModel
from ready_hf.checkpoints import check_optimizer, last_complete_checkpoint
from ready_hf.schedules import add_reader
from support import drafter_for, random_prompt, tiny_target, trained_target


pytest.importorskip("accelerate")
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments  # noqa: E402


FAMILIES = ("qwen3_5", "kimi_linear", "bamba")


def dspark(target, **options):
    return drafter_for(target, reader=False, **options)


def trainer_for(folder, drafter, target, callbacks=None, **options):
    options = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "num_anchors": 3,
        **options,
    }
    rows = [{"input_ids": row} for row in random_prompt(24, batch=8, seed=3)]
    arguments = ReadyTrainingArguments(str(folder), **options)
    datasets = {"train_dataset": rows, "eval_dataset": rows}
    return ReadyTrainer(drafter, arguments, target=target, callbacks=callbacks, **datasets)


class Snapshots(TrainerCallback):
    """Weights after every step, and stops after one of them."""

    def __init__(self, stop=None):
        self.weights, self.stop = {}, stop

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights[state.global_step] = {name: p.detach().clone() for name, p in model.named_parameters()}
        control.should_training_stop |= state.global_step == self.stop


def moved(one, other):
    """Whether parameters of the reader, and of the rest, differ at all."""
    differ = {name: not torch.equal(value, other[name]) for name, value in one.items()}
    reader = [value for name, value in differ.items() if name.startswith("reader.")]
    rest = [value for name, value in differ.items() if not name.startswith("reader.")]
    return any(reader), any(rest)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_reader_changes_no_draft(tmp_path, family):
    target = tiny_target(family)
    first = dspark(target, seed=3)
    made = add_reader(first, target, reader_rank=8)
    assert made.config.has_reader
    assert not first.config.has_reader
    assert (made.config.reader_rank, made.config.block_size) == (8, first.config.block_size)
    rows = [{"input_ids": row} for row in random_prompt(24, batch=4)]
    options = {"anchor_stride": 8} if family != "qwen3_5" else {}
    one, other = (trainer_for(tmp_path, d, target, **options).evaluate(rows) for d in (first, made))
    assert one["eval_tau"] == pytest.approx(other["eval_tau"], rel=1e-6)
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-6)
    with torch.no_grad():
        made.reader.up_proj.weight.normal_()
    assert trainer_for(tmp_path, made, target, **options).evaluate(rows)["eval_loss"] != pytest.approx(
        one["eval_loss"], rel=1e-4
    )
    for name, value in first.state_dict().items():
        assert torch.equal(made.state_dict()[name], value)


def test_a_new_reader_of_every_form_adds_nothing_yet(tmp_path):
    target = tiny_target("qwen3_5")
    first = dspark(target, seed=3, num_hidden_layers=2)
    options = {
        "reader_injection": "last",
        "reader_conditioning": ["slot", "anchor"],
        "reader_query_rank": 3,
        "reader_query_act": "silu",
        "reader_num_queries": 30,
        "reader_gate": True,
        "reader_gate_inputs": ["anchor", "context"],
        "reader_gate_rank": 2,
        "reader_output_rank": 5,
    }
    made = add_reader(first, target, **options)
    assert {name: getattr(made.config, name) for name in options} == options
    rows = [{"input_ids": row} for row in random_prompt(24, batch=4)]
    one, other = (trainer_for(tmp_path, d, target).evaluate(rows) for d in (first, made))
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-6)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    trainer_for(tmp_path, made, target).train()
    still = [name for name, p in made.named_parameters() if torch.equal(p, before[name])]
    assert not still


def test_a_new_reader_of_slots_is_refused_where_they_are_alike():
    target = tiny_target("qwen3_5")
    for injection, layers in (("input", 2), ("layers", 2), ("last", 1)):
        drafter = dspark(target, num_hidden_layers=layers)
        with pytest.raises(
            (StrictDataclassError, ValueError), match=f"know their slot.*got '{injection}' and {layers} layers"
        ):
            add_reader(drafter, target, reader_conditioning=["slot"], reader_injection=injection)


def test_a_new_reader_is_refused_where_it_does_not_fit():
    target = tiny_target("qwen3_5")
    with pytest.raises(ValueError, match="has a reader already"):
        add_reader(drafter_for(target), target)
    with pytest.raises(ValueError, match="can be chosen for a reader, got block_size"):
        add_reader(dspark(target), target, block_size=4)
    for none in (None, []):
        with pytest.raises(ValueError, match="names no layer"):
            add_reader(dspark(target), target, state_layer_ids=none)
    with pytest.raises(ValueError, match="was not made for"):
        add_reader(dspark(target), trained_target())


def test_the_rest_is_frozen_to_the_last_bit_and_then_moves(tmp_path):
    target = tiny_target("qwen3_5")
    drafter = add_reader(dspark(target), target)
    snapshots = Snapshots()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer = trainer_for(tmp_path, drafter, target, [snapshots], freeze_backbone_steps=2, reader_learning_rate=3e-2)
    trainer.train()
    assert moved(before, snapshots.weights[2]) == (True, False)
    assert moved(snapshots.weights[2], snapshots.weights[3]) == (True, True)
    rates = {bool(g.get("is_reader")): g["initial_lr"] for g in trainer.optimizer.param_groups}
    assert rates == {False: 1e-2, True: 3e-2}
    decays = {(bool(g.get("is_reader")), g["weight_decay"]) for g in trainer.optimizer.param_groups}
    assert decays >= {(True, 0.1), (False, 0.1), (False, 0.0)}
    held = [id(p) for g in trainer.optimizer.param_groups for p in g["params"]]
    assert sorted(held) == sorted(map(id, drafter.parameters()))  # every parameter once


def test_a_rate_of_zero_for_the_reader_leaves_it_alone(tmp_path):
    target = tiny_target("qwen3_5")
    drafter, snapshots = drafter_for(target), Snapshots()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    trainer_for(tmp_path, drafter, target, [snapshots], reader_learning_rate=0.0).train()
    assert moved(before, snapshots.weights[4]) == (False, True)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_stage_is_the_straight_one(tmp_path, stop):
    """Before, at and after the end of the frozen steps."""
    target = tiny_target("qwen3_5")
    options = {
        "freeze_backbone_steps": 2,
        "reader_learning_rate": 3e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
    }
    saving = {"save_strategy": "steps", "save_steps": 1}
    straight = trainer_for(tmp_path / "a", add_reader(dspark(target), target), target, **options)
    straight.train()
    trainer_for(
        tmp_path / "b", add_reader(dspark(target), target), target, [Snapshots(stop)], **options, **saving
    ).train()
    resumed = trainer_for(tmp_path / "b", add_reader(dspark(target, seed=9), target), target, **options, **saving)
    resumed.train(resume_from_checkpoint=True)

    def history(trainer):
        return [(e["step"], e["loss"], e["learning_rate"]) for e in trainer.state.log_history if "loss" in e]

    for one, other in zip(history(straight), history(resumed), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for (name, value), other in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(value, other, atol=1e-6), name


STAGED = {"freeze_backbone_steps": 2, "reader_learning_rate": 3e-2}


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (STAGED, {}, "the reader apart, at a learning rate of 0.03, and now it is the reader among the other"),
        ({}, STAGED, "with the reader among the other parameters, and now it is the reader apart"),
        (
            STAGED,
            STAGED | {"reader_learning_rate": 1e-3},
            "of 0.03, and now it is the reader apart.* of 0.001: r",
        ),
        ({}, {"weight_decay": 0.0}, None),
        (STAGED, STAGED | {"freeze_backbone_steps": 3}, None),
    ],
    ids=str,
)
def test_resuming_in_other_stages_is_refused_in_one_sentence(tmp_path, first, then, message):
    """Before anything is computed; a number of frozen steps alone is one that the same checkpoint can go on with."""
    target = tiny_target("qwen3_5")
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer_for(tmp_path, drafter_for(target), target, [Snapshots(1)], **saving, **first).train()
    snapshots = Snapshots()
    trainer = trainer_for(tmp_path, drafter_for(target), target, [snapshots], **saving, **then)
    if message is None:
        trainer.train(resume_from_checkpoint=True)
        assert sorted(snapshots.weights) == [2, 3, 4]
        return
    with pytest.raises(ValueError, match=f"checkpoint-1 was trained .*{message}") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert str(caught.value).count("\n") == 0
    assert not snapshots.weights


def test_resuming_with_another_drafter_is_refused_in_one_sentence(tmp_path):
    target = tiny_target("qwen3_5")
    trainer_for(tmp_path, dspark(target), target, [Snapshots(1)], save_strategy="steps", save_steps=1).train()
    with pytest.raises(ValueError, match=r"groups of \[\d+, \d+\] parameters, and this drafter makes groups of"):
        trainer_for(tmp_path, drafter_for(target), target).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze_backbone_steps": -1}, "`freeze_backbone_steps` must be 0 or more, got -1"),
        ({"reader_learning_rate": float("nan")}, "`reader_learning_rate` must be 0 or more, got nan"),
        (
            {"freeze_backbone_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
            "depends on the step alone",
        ),
    ],
)
def test_stages_that_cannot_be_are_refused(tmp_path, options, message):
    target = tiny_target("qwen3_5")
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, drafter_for(target), target, **options).train()


@pytest.mark.parametrize("options", [{"freeze_backbone_steps": 1}, {"reader_learning_rate": 1e-3}])
def test_stages_need_a_reader(tmp_path, options):
    target = tiny_target("qwen3_5")
    with pytest.raises(ValueError, match="this one has none: leave them out, or give it one"):
        trainer_for(tmp_path, dspark(target), target, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A training with three checkpoints."""
    folder, target = tmp_path_factory.mktemp("run"), tiny_target("qwen3_5")
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    trainer_for(folder, drafter_for(target), target, **options).train()
    return folder


FAULTS = {
    "an empty folder": lambda path: [file.unlink() for file in path.iterdir()],
    "no state": lambda path: (path / "trainer_state.json").unlink(),
    "half a state": lambda path: (path / "trainer_state.json").write_text('{"global_step": 3, "ep'),
    "half the weights": lambda path: cut(path / "model.safetensors"),
    "no weights": lambda path: (path / "model.safetensors").unlink(),
    "half an optimizer": lambda path: cut(path / "optimizer.pt"),
    "half a random state": lambda path: cut(path / "rng_state.pth"),
    "an optimizer without a beginning": lambda path: blank(path / "optimizer.pt"),
    "a broken index": lambda path: (path / "model.safetensors.index.json").write_text("{"),
    "a missing shard": lambda path: (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    ),
    "half a scheduler": lambda path: cut(path / "scheduler.pt"),
}


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def blank(file):
    file.write_bytes(bytes(1000) + file.read_bytes()[1000:])


def test_a_checkpoint_of_the_model_alone_is_said_to_start_anew(run, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "checkpoint-3" / "optimizer.pt").unlink()
    with caplog.at_level(logging.WARNING, "ready_hf"):
        assert last_complete_checkpoint(folder).name == "checkpoint-3"
    assert "checkpoint-3 has no optimizer.pt" in caplog.text


def test_mixed_dtypes_are_kept():
    target = tiny_target("qwen3_5")
    first = dspark(target).to(torch.bfloat16)
    for name, parameter in first.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float() + 1e-4
    made = add_reader(first, target)
    for name, parameter in first.named_parameters():
        assert made.get_parameter(name).dtype == parameter.dtype
        assert torch.equal(made.get_parameter(name), parameter)


@pytest.mark.parametrize("options", [{"freeze_backbone_steps": 1}, {"reader_learning_rate": 1e-3}])
def test_stages_and_an_optimizer_of_ones_own_are_refused(tmp_path, options):
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    arguments = ReadyTrainingArguments(str(tmp_path), use_cpu=True, **options)
    optimizer = torch.optim.AdamW(drafter.parameters())
    with pytest.raises(ValueError, match="`optimizers` brings others"):
        ReadyTrainer(drafter, arguments, target=target, optimizers=(optimizer, None))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_incomplete_checkpoint_is_passed_over_and_named(run, tmp_path, caplog, fault):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    assert last_complete_checkpoint(folder).name == "checkpoint-3"
    FAULTS[fault](folder / "checkpoint-3")
    with caplog.at_level(logging.WARNING, "ready_hf"):
        assert last_complete_checkpoint(folder).name == "checkpoint-2"
    assert "skipped checkpoint-3 (" in caplog.text
    target = tiny_target("qwen3_5")
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    other = drafter_for(target, seed=9)  # training it from the start would give other weights
    trainer_for(folder, other, target, **options).train(resume_from_checkpoint=True)
    straight, again = (ReadyDrafterModel.from_pretrained(x / "checkpoint-3") for x in (run, folder))
    for value, other in zip(straight.parameters(), again.parameters(), strict=True):
        assert torch.allclose(value, other, atol=1e-6)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_incomplete_checkpoint_is_refused_where_it_is_named(run, tmp_path, fault):
    folder = tmp_path / "mine"
    shutil.copytree(run / "checkpoint-3", folder)
    FAULTS[fault](folder)
    drafter = drafter_for(tiny_target("qwen3_5"), seed=9)
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    with pytest.raises(ValueError, match="cannot go on from .*mine.*: .*. Name a complete checkpoint"):
        trainer_for(tmp_path, drafter, tiny_target("qwen3_5")).train(resume_from_checkpoint=str(folder))
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def with_weights(change):
    """What changes the tensors of a checkpoint by `change(tensors)`."""

    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def with_optimizer(change):
    def apply(folder):
        content = torch.load(folder / "optimizer.pt")
        torch.save(change(content) or content, folder / "optimizer.pt")

    return apply


def diverged(content):
    content["state"][0]["exp_avg"].fill_(float("nan"))


WRONG = {
    "nan": (with_weights(lambda t: t["fc.weight"].fill_(float("nan"))), r"not finite in fc\.weight"),
    "integers": (with_weights(lambda t: t.update({"fc.weight": t["fc.weight"].int()})), r"fc\.weight of type I32"),
    "another shape": (
        with_weights(lambda t: t.update({"fc.weight": t["fc.weight"][:3].contiguous()})),
        r"fc\.weight has shape \[3, 64\]",
    ),
    "a missing tensor": (with_weights(lambda t: t.pop("fc.weight")), r"missing: fc\.weight"),
    "a tensor too many": (with_weights(lambda t: t.update(more=torch.zeros(2))), "belongs to no module: more"),
    "an optimizer of nan": (with_optimizer(diverged), r"optimizer\.pt holds values that are not finite"),
    "no optimizer": (with_optimizer(lambda content: {"a": 1}), r"optimizer\.pt holds no state of an optimizer"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_checkpoint_that_is_whole_and_wrong_is_refused(run, tmp_path, fault):
    """Trained on, all that does not fit would stay as the new drafter was made: without a word."""
    apply, message = WRONG[fault]
    shutil.copytree(run, tmp_path / "run")
    apply(tmp_path / "run" / "checkpoint-2")
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    drafter = drafter_for(tiny_target("qwen3_5"), seed=9)
    for resume in (True, str(tmp_path / "run" / "checkpoint-2")):
        trainer = trainer_for(tmp_path / "run", drafter, tiny_target("qwen3_5"))
        with pytest.raises(ValueError, match=f"cannot go on from checkpoint-2: .*{message}.* Name another"):
            trainer.train(resume_from_checkpoint=resume)


@pytest.mark.parametrize("names", [{}, {"fc.weight": 3}, {"fc.weight": "../checkpoint-2/model.safetensors"}])
def test_a_checkpoint_with_a_wrong_index_is_passed_over(run, tmp_path, names):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "checkpoint-3" / "model.safetensors").unlink()
    (folder / "checkpoint-3" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert last_complete_checkpoint(folder).name == "checkpoint-2"


def test_a_state_without_a_number_of_steps_is_passed_over(run, tmp_path):
    for content in ("[" * 100_000, '{"global_step": "3"}'):
        folder = Path(shutil.copytree(run, tmp_path / str(len(content))))
        (folder / "checkpoint-3" / "trainer_state.json").write_text(content)
        assert last_complete_checkpoint(folder).name == "checkpoint-2"


def test_a_complete_checkpoint_may_have_any_name(run, tmp_path):
    shutil.copytree(run / "checkpoint-2", tmp_path / "mine")
    target = tiny_target("qwen3_5")
    other = drafter_for(target, seed=9)
    trainer_for(tmp_path, other, target, max_steps=3).train(resume_from_checkpoint=str(tmp_path / "mine"))
    straight = ReadyDrafterModel.from_pretrained(run / "checkpoint-3")
    for value, again in zip(straight.parameters(), other.parameters(), strict=True):
        assert torch.allclose(value, again, atol=1e-6)
    with pytest.raises(ValueError, match="there is no such folder"):
        trainer_for(tmp_path, drafter_for(target), target).train(resume_from_checkpoint=str(tmp_path / "gone"))


def test_nothing_to_go_on_from_is_said(run, tmp_path):
    target = tiny_target("qwen3_5")
    with pytest.raises(ValueError, match="there is none. Start without"):
        trainer_for(tmp_path, drafter_for(target), target).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(ValueError, match=r"none is complete: checkpoint-5 \(no trainer_state.json\)"):
        last_complete_checkpoint(tmp_path)


class PackedMoments(torch.Tensor):
    """As torchao's optimizers of 8 and 4 bits keep them: a class of its own, which knows few operations."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.isfinite:
            raise NotImplementedError("unimplemented")
        return super().__torch_function__(func, types, args, kwargs)


def test_an_optimizer_that_packs_its_moments_goes_on(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].as_subclass(PackedMoments)
    torch.save(state, tmp_path / "optimizer.pt")
    with torch.serialization.safe_globals([PackedMoments]):
        check_optimizer(tmp_path, optimizer)
        state["state"][0]["exp_avg_sq"][0] = torch.nan
        torch.save(state, tmp_path / "optimizer.pt")
        with pytest.raises(ValueError, match="not finite"):
            check_optimizer(tmp_path, optimizer)
