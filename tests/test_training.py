"""The trainer: accumulation, evaluation, what it learns, refuses and leaves alone."""

import copy
import importlib
import json
import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from ready_hf import ReadyDrafterModel
from ready_hf.features import FrozenTarget
from ready_hf.losses import DraftingLoss
from support import drafter_for, random_prompt, tiny_target, trained_target


pytest.importorskip("accelerate")
from ready_hf.training import DraftingCollator, ReadyTrainer, ReadyTrainingArguments, drafting_sums  # noqa: E402


LENGTH = 24


def rows_of(count=8, length=LENGTH, seed=3):
    return [{"input_ids": row} for row in random_prompt(length, batch=count, seed=seed)]


def trainer_for(folder, drafter=None, target=None, rows=None, callbacks=None, **options):
    target = target or tiny_target("qwen3_5")
    options = {
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "num_anchors": 3,
        **options,
    }
    arguments = ReadyTrainingArguments(str(folder), **options)
    rows = rows or rows_of()
    return ReadyTrainer(
        drafter or drafter_for(target),
        arguments,
        target=target,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=callbacks,
    )


def weights(drafter):
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Gradients(TrainerCallback):
    """Keeps the gradients that the optimizer is given."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        named = kwargs["model"].named_parameters()
        self.found.append({n: None if p.grad is None else p.grad.clone() for n, p in named})


def uneven_rows():
    rows = [{"input_ids": row[: 10 + 2 * i]} for i, row in enumerate(random_prompt(LENGTH, batch=8))]
    for i, row in enumerate(rows):
        row["loss_mask"] = (torch.arange(len(row["input_ids"])) % (i + 5) > 0).long()
    return rows


@pytest.mark.parametrize("parts", [2, 8])
def test_accumulated_parts_give_the_loss_and_gradient_of_the_whole(tmp_path, parts):
    """Of rows with very different lengths and numbers of slots that count."""
    found = []
    for size, steps in ((8, 1), (8 // parts, parts)):
        gradients = Gradients()
        trainer = trainer_for(
            tmp_path,
            rows=uneven_rows(),
            callbacks=[gradients],
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
        )
        trainer.train()
        found.append((losses(trainer), gradients.found))
    (whole_loss, whole), (parts_loss, in_parts) = found
    assert len(whole) == len(in_parts) == 1
    assert parts_loss == pytest.approx(whole_loss, rel=1e-4)
    for name, gradient in whole[0].items():
        assert torch.allclose(in_parts[0][name], gradient, atol=1e-6, rtol=1e-4), name


def test_gradients_are_those_of_the_dense_loss(tmp_path):
    """The chunks of the trainer change nothing, and every parameter takes part."""
    found = []
    for most in (2**27, 1):
        gradients = Gradients()
        trainer_for(tmp_path, callbacks=[gradients], max_logits_per_chunk=most).train()
        found.append(gradients.found[0])
    for name, gradient in found[0].items():
        assert gradient is not None, name
        assert gradient.any(), name
        assert torch.allclose(found[1][name], gradient, atol=1e-6, rtol=1e-4), name


@pytest.mark.parametrize(("reader", "bf16"), [(False, False), (True, False), (True, True)])
def test_twenty_steps_reduce_the_loss(tmp_path, reader, bf16):
    target = trained_target()
    text = target.generate(
        torch.randint(3, 500, (8, 4), generator=torch.Generator().manual_seed(0)),
        max_new_tokens=28,
        do_sample=False,
        eos_token_id=None,
        suppress_tokens=[1],
    )
    rows = [{"input_ids": row} for row in text]
    drafter = drafter_for(target, reader=reader, sliding_window=16)
    trainer = trainer_for(tmp_path, drafter, target, rows, max_steps=20, learning_rate=3e-3, bf16=bf16)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    found = losses(trainer)
    assert sum(found[-5:]) < 0.95 * sum(found[:5])
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_tau"] > before["eval_tau"]
    assert all(p.dtype == torch.float32 for p in drafter.parameters())


def test_evaluation_counts_the_last_rows_whatever_training_drops(tmp_path):
    """3 rows in batches of 2."""
    rows, found = rows_of()[:3], []
    for options in ({}, {"dataloader_drop_last": True}):
        sizes = {"per_device_eval_batch_size": 2, "per_device_train_batch_size": 2}
        trainer = trainer_for(tmp_path, rows=rows, **sizes, **options)
        found += [trainer.evaluate()["eval_num_blocks"], trainer.predict(rows).metrics["test_num_blocks"]]
    assert found == [found[0]] * 4
    assert found[0] > 0


def test_evaluation_metrics(tmp_path):
    """In parts as in one, without a change of the drafter, and equal to the sums of the loss."""
    target = tiny_target("qwen3_5")
    drafter = drafter_for(target)
    before = weights(drafter)
    found = [
        trainer_for(
            tmp_path, drafter, target, uneven_rows(), per_device_eval_batch_size=size, num_anchors=99
        ).evaluate()
        for size in (8, 3)
    ]
    for name in ("loss", "tau", "acceptance_1", "acceptance_6", "confidence_bce", "cross_entropy", "num_blocks"):
        assert found[0][f"eval_{name}"] == pytest.approx(found[1][f"eval_{name}"], rel=1e-4)
    assert 1 <= found[0]["eval_tau"] <= 7
    assert all(torch.equal(before[name], value) for name, value in weights(drafter).items())


def test_anchors_are_new_in_every_epoch_and_the_same_for_another_drafter(tmp_path):
    """Two variants learn from the same blocks; a batch of all rows makes every step an epoch."""
    target = tiny_target("qwen3_5")
    seen = []
    for reader in (False, True):
        trainer = trainer_for(tmp_path, drafter_for(target, reader=reader), target, max_steps=3)
        original, anchors = trainer._frozen.batch, []

        def batch(input_ids, positions, *args, original=original, anchors=anchors):
            anchors.append((input_ids.clone(), positions.clone()))
            return original(input_ids, positions, *args)

        trainer._frozen.batch = batch
        trainer.train()
        seen.append(anchors)
    assert len(seen[0]) == 3
    for (ids, positions), (other_ids, other_positions) in zip(*seen, strict=True):
        assert torch.equal(ids, other_ids)
        assert torch.equal(positions, other_positions)
    assert not torch.equal(seen[0][0][1], seen[0][1][1])


def test_a_checkpoint_holds_the_drafter_alone(tmp_path):
    trainer = trainer_for(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    loaded = ReadyDrafterModel.from_pretrained(tmp_path / "checkpoint-1")
    assert weights(loaded).keys() == weights(trainer.model).keys()
    for name, value in weights(trainer.model).items():
        assert torch.equal(weights(loaded)[name], value)
    assert json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())["model_type"] == "ready_drafter"
    assert {id(p) for g in trainer.optimizer.param_groups for p in g["params"]} == {
        id(p) for p in trainer.model.parameters()
    }


def test_several_gpus_in_one_process_are_refused_unless_the_target_is_spread(tmp_path):
    target = tiny_target("qwen3_5")
    arguments = ReadyTrainingArguments(str(tmp_path), use_cpu=True)
    arguments._setup_devices  # noqa: B018 - sets the number of GPUs, which the next line changes
    arguments._n_gpu = 2
    with pytest.raises(ValueError, match=r"2 GPUs in one process.*torchrun"):
        ReadyTrainer(drafter_for(target), arguments, target=target)
    target = copy.deepcopy(target)
    target.hf_device_map = {"": 0}
    with pytest.raises(ValueError, match=r"2 GPUs in one process.*torchrun"):
        ReadyTrainer(drafter_for(target), arguments, target=target)
    target.hf_device_map = {"model": 0, "lm_head": 1}
    assert ReadyTrainer(drafter_for(target), arguments, target=target).args.n_gpu == 1  # no nn.DataParallel


def test_a_drafter_for_another_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="this drafter was not made for"):
        trainer_for(tmp_path, drafter_for(tiny_target("bamba")))


def test_rows_without_a_legal_anchor_do_not_stop_training(tmp_path):
    """One row that is too short beside others, and a batch of nothing else."""
    rows = [{"input_ids": row[:4]} for row in random_prompt(LENGTH, batch=4)] + rows_of(4)
    trainer = trainer_for(tmp_path, rows=rows, per_device_train_batch_size=2, max_steps=4)
    trainer.train()
    assert all(math.isfinite(loss) for loss in losses(trainer))
    assert trainer.num_skipped_steps == 0


def test_collator_pads_cuts_and_checks():
    collate = DraftingCollator(max_length=5)
    batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": torch.arange(2, 9), "loss_mask": [0, 0, 1, 1, 1, 1, 1]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0, 0], [2, 3, 4, 5, 6]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    with pytest.raises(ValueError, match=r"needs `input_ids`, got the columns \['text'\]"):
        collate([{"text": "x"}])
    with pytest.raises(ValueError, match="`loss_mask` has 2 entries"):
        collate([{"input_ids": [1, 2, 3], "loss_mask": [1, 1]}])
    with pytest.raises(ValueError, match="one list of numbers"):
        collate([{"input_ids": [[1, 2, 3]]}])


def test_targets_whose_states_come_from_stretches_train(tmp_path):
    for family in ("kimi_linear", "bamba"):
        trainer = trainer_for(tmp_path, target=tiny_target(family), anchor_stride=8)
        trainer.train()
        assert math.isfinite(losses(trainer)[0])


def test_gradient_of_the_loss_is_not_blocked_by_the_target():
    """The distance term alone reaches every trunk parameter, though head and embeddings are frozen."""
    target = copy.deepcopy(tiny_target("qwen3_5")).requires_grad_(False)
    drafter = drafter_for(target)
    frozen = FrozenTarget(target, drafter.config)
    batch = frozen.batch(random_prompt(LENGTH), torch.tensor([[4, 9]]))
    sums = drafting_sums(drafter, drafter, frozen, batch, DraftingLoss(cross_entropy=0.0, confidence=0.0))
    sums.loss.backward()
    without = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == ["confidence_head.proj.weight", "confidence_head.proj.bias"]


def test_the_example_script_makes_both_drafters(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    script = importlib.import_module("train_drafter")
    options = {"steps": 2, "rows": 4, "row": 40, "batch": 2, "anchors": 2, "held": 2, "intermediate": 64}
    command = [str(tmp_path), *(str(x) for name, value in options.items() for x in (f"--{name}", value))]
    monkeypatch.setattr(sys, "argv", ["train_drafter.py", "--out", *command])
    try:
        script.main()
    finally:
        for name in ("train_drafter", "on_policy_text", "write_drafter_cards"):
            sys.modules.pop(name, None)
    record = json.loads((tmp_path / "record.json").read_text())
    for variant, kinds in (("dspark", 2), ("ready", 5)):
        entry = record["variants"][variant]
        assert entry["steps"] == 2
        assert len(entry["evaluation"]) == kinds
        assert all(math.isfinite(metrics["tau"]) for metrics in entry["evaluation"].values())
        saved = ReadyDrafterModel.from_pretrained(tmp_path / variant)
        assert saved.num_parameters() == entry["parameters"]
        assert (saved.reader is not None) == (variant == "ready")
        assert "tokens a round" in (tmp_path / variant / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_anchors": 0}, "`num_anchors` must be at least 1, got 0"),
        ({"anchor_stride": 0}, "`anchor_stride` must be at least 1, got 0"),
        ({"max_logits_per_chunk": 0}, "`max_logits_per_chunk` must be at least 1, got 0"),
        ({"loss_decay": 0.0}, "`loss_decay` must be above 0"),
        ({"distance_weight": -1.0}, "0 or more"),
        ({"distance_weight": math.nan}, "0 or more"),
        ({"distance_weight": 0.0, "cross_entropy_weight": 0.0, "confidence_weight": 0.0}, "one of them above 0"),
        ({"remove_unused_columns": True}, "would remove every column"),
    ],
    ids=str,
)
def test_options_that_cannot_train_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        ReadyTrainingArguments(str(tmp_path), use_cpu=True, **options)


def test_drafter_target_and_arguments_in_the_wrong_place_are_named(tmp_path):
    target = tiny_target("qwen3_5")
    drafter, arguments = drafter_for(target), ReadyTrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(TypeError, match="expected a drafter to train, got Qwen3_5ForCausalLM"):
        ReadyTrainer(target, arguments, target=drafter)
    with pytest.raises(TypeError, match="ReadyDrafterModel, which is a drafter"):
        ReadyTrainer(drafter, arguments, target=drafter)
    with pytest.raises(TypeError, match="must be ReadyTrainingArguments, got TrainingArguments"):
        ReadyTrainer(drafter, TrainingArguments(str(tmp_path), use_cpu=True), target=target)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (lambda: rows_of(length=7), {}),  # a block of 6 needs 8 tokens
        (lambda: [{"input_ids": []}] * 8, {}),
        (lambda: [row | {"loss_mask": torch.zeros(LENGTH)} for row in rows_of()], {}),
        (rows_of, {"anchor_stride": LENGTH}),
    ],
    ids=["short", "empty", "masked", "stride"],
)
def test_nothing_to_learn_from_is_said(tmp_path, caplog, rows, options):
    trainer = trainer_for(tmp_path, rows=rows(), **options)
    for run, where in ((trainer.train, "step 1"), (trainer.evaluate, "the evaluation")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ready_hf.training"):
            run()
        assert f"nothing to learn from in {where}: a block needs a row of more than 7 tokens" in caplog.text


def test_enough_to_learn_from_is_not_remarked_on(tmp_path, caplog):
    trainer = trainer_for(tmp_path, rows=rows_of(length=8))
    with caplog.at_level(logging.WARNING, "ready_hf.training"):
        trainer.train()
        trainer.evaluate()
    assert "nothing to learn" not in caplog.text


def test_columns_of_other_collators_are_left_alone(tmp_path):
    """Such as the labels of `DataCollatorForLanguageModeling`."""

    def with_labels(rows):
        batch = DraftingCollator()(rows)
        return batch | {"labels": batch["input_ids"].clone()}

    found = []
    for collator in (DraftingCollator(), with_labels):
        trainer = trainer_for(tmp_path)
        trainer.data_collator = collator
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("row", "message"),
    [("abc", "one list of numbers, got str"), (None, "one list of numbers, got NoneType"), ([3.0, 4.5], "got 4.5")],
    ids=str,
)
def test_rows_that_are_no_whole_numbers_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        DraftingCollator()([{"input_ids": row}])


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_scaler_skips_steps_by_itself(tmp_path, max_grad_norm):
    """Float16 starts with a scale that overflows, and the scaler must see that."""
    trainer = trainer_for(tmp_path, max_grad_norm=max_grad_norm)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = weights(trainer.model)
    trainer.train()
    assert scaler.get_scale() == 2.0**126
    assert all(torch.equal(before[name], value) for name, value in weights(trainer.model).items())


def test_labels_of_fine_tuning_rows_are_a_loss_mask():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [5, 6], "labels": [5, -100]}]
    assert DraftingCollator()(rows)["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    own = [{"input_ids": [5, 6], "labels": [-100, -100], "loss_mask": [1, 0]}]
    assert DraftingCollator()(own)["loss_mask"].tolist() == [[1, 0]]
    with pytest.raises(ValueError, match="`loss_mask` has 1 entries"):
        DraftingCollator()([{"input_ids": [5, 6], "labels": [5]}])


def test_a_drafter_that_is_frozen_as_a_whole_is_evaluated_and_not_trained(tmp_path):
    trainer = trainer_for(tmp_path, drafter_for(tiny_target("qwen3_5")).requires_grad_(False))
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    with pytest.raises(ValueError, match="all weights of the drafter are frozen, so there is nothing to train"):
        trainer.train()
