"""Training on streams, whose length nobody knows: passes, and what is left at their ends."""

import pytest
import torch

from support import drafter_for, random_prompt, tiny_target


pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
from ready_hf.training import ReadyTrainer, ReadyTrainingArguments  # noqa: E402


class Seen(ReadyTrainer):
    """Keeps step, row, anchors and number of slots of every batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.seen.append(
            (
                self.state.global_step,
                int(inputs["input_ids"][0, 0]),
                inputs["anchor_positions"].tolist(),
                None if num_items_in_batch is None else int(num_items_in_batch),
            )
        )
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def trained(folder, rows, resume=None, is_stream=True, **options):
    data = datasets.Dataset.from_list([{"input_ids": row} for row in rows])
    arguments = ReadyTrainingArguments(
        str(folder),
        num_anchors=3,
        learning_rate=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=1,
        **{"save_strategy": "no", **options},
    )
    target = tiny_target("qwen3_5")
    data = data.to_iterable_dataset() if is_stream else data
    trainer = Seen(drafter_for(target), arguments, target=target, train_dataset=data)
    trainer.seen = []
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def rows_of(count):
    rows = random_prompt(24, batch=count, seed=9)
    rows[:, 0] = torch.arange(3, 3 + count)
    return rows.tolist()


def test_what_is_left_at_the_end_of_a_pass_is_not_in_the_next_step(tmp_path):
    """3 rows, 2 a step: the third would have doubled the next step's gradient."""
    trainer = trained(tmp_path, rows_of(3), max_steps=3, gradient_accumulation_steps=2)
    assert [(step, row) for step, row, _, _ in trainer.seen] == [(0, 3), (0, 4), (1, 3), (1, 4), (2, 3), (2, 4)]
    assert all(slots == 36 for *_, slots in trainer.seen)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx([losses[0]] * 3, rel=0.1)


def test_a_stream_shorter_than_a_step_is_refused(tmp_path):
    """It would have been read again and again without an end."""
    with pytest.raises(ValueError, match=r"the stream has 1 batches, and a step accumulates 2"):
        trained(tmp_path, rows_of(1), max_steps=2, gradient_accumulation_steps=2)


def test_every_pass_has_anchors_of_its_own_as_rows_in_memory_have(tmp_path):
    rows = rows_of(3)
    stream = trained(tmp_path, rows, max_steps=9).seen
    by_row = {row: [anchors for _, other, anchors, _ in stream if other == row] for row in (3, 4, 5)}
    for passes in by_row.values():
        assert len(passes) == 3
        assert all(one != other for one, other in zip(passes, passes[1:], strict=False))
    memory = trained(tmp_path, rows, is_stream=False, max_steps=9).seen
    for row, passes in by_row.items():
        assert [anchors for _, other, anchors, _ in memory if other == row] == passes


def test_a_resumed_pass_goes_on_with_its_anchors(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight = trained(tmp_path, rows_of(5), **options).seen
    assert trained(tmp_path, rows_of(5), str(tmp_path / "checkpoint-2"), **options).seen == straight[2:]


@pytest.mark.parametrize(("step", "is_said"), [(2, False), (5, True)])
def test_resuming_behind_the_end_of_a_stream_is_said(tmp_path, caplog, step, is_said):
    """transformers skips more rows than there are, and begins again."""
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 1}
    trained(tmp_path, rows_of(3), **options)
    caplog.clear()
    seen = trained(tmp_path, rows_of(3), str(tmp_path / f"checkpoint-{step}"), **options).seen
    assert [row for _, row, _, _ in seen][:2] == ([3, 4] if is_said else [5, 3])
    assert ("its rows start anew" in caplog.text) is is_said
