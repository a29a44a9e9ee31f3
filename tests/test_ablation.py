"""The reader experiments: that arms differ in what they should and in nothing else, and what the scripts write."""

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path

import pytest


np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
from transformers import AutoModelForCausalLM  # noqa: E402

import ready_hf  # noqa: E402
from ready_hf import ReadyDrafterModel  # noqa: E402
from ready_hf.backbone import DrafterLayer  # noqa: E402
from ready_hf.features import FrozenTarget  # noqa: E402


EXAMPLES = Path(__file__).parents[1] / "examples"
TARGET = EXAMPLES / "research_target"
NAMES = ("ablate_reader", "ablation_arms", "ablation_batches", "ablation_training", "ablation_table", "ablation_text")
NAMES += ("on_policy_text", "wrong_states")
SIZES = {"batch": 2, "anchors": 4, "row": 96, "block": 4, "held": 2, "held-new": 64, "held-anchors": 6}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
READER, PROBE = "bilinear 8, gate 2, layers", "dspark with the next feature"


@pytest.fixture(scope="module")
def scripts():
    """The scripts as modules; they import their neighbours by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield argparse.Namespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def target():
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval().requires_grad_(False)
    ready_hf.ensure_patched(model)
    return model


@pytest.fixture(scope="module")
def tokens():
    return torch.from_numpy(np.load(TARGET / "text" / "validation.npy")[:8].astype(np.int64).ravel())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokens):
    """What `--data` and `--text` name: rows of the target's own text, cut short."""
    path = tmp_path_factory.mktemp("ablation")
    tokens.numpy().astype(np.uint16).tofile(path / "train.bin")
    np.save(path / "validation.npy", np.load(TARGET / "text" / "validation.npy")[:4, -160:])
    np.save(path / "test.npy", np.load(TARGET / "text" / "test.npy")[:4, -160:])
    return path


@pytest.fixture
def options(scripts, folder):
    return lambda *more: scripts.ablate_reader.parse(
        ["--data", str(folder), "--text", str(folder), "--out", str(folder / "out.json"), *TINY, *more]
    )


@pytest.fixture
def frozen(scripts, target, options):
    arms = scripts.ablation_arms
    return FrozenTarget(target, arms.make_config(target, arms.Arm("all states"), options()))


@pytest.fixture
def batches(scripts, frozen, tokens):
    shapes = {"block_size": 4, "batch_size": 2, "row": 96, "num_anchors": 4}
    return lambda seed=0: scripts.ablation_batches.Batches(frozen, tokens, seed=seed, **shapes)


def test_arms_of_a_seed_start_with_the_same_weights(scripts, target, options):
    """Also where a reader is made beside them, or other drafters before them to count parameters."""
    arms, args = scripts.ablation_arms, options("--seed", "3")
    first = arms.make_drafter(target, arms.ARMS["dspark"], args).state_dict()
    for name in ("conditioned", READER, "by slot, before the norm", "dspark, as large", PROBE, "gate, full attention"):
        torch.manual_seed(len(name))  # what ran before does not matter
        made = arms.make_drafter(target, arms.ARMS[name], args).state_dict()
        alike = [k for k in first if first[k].shape == made[k].shape and torch.equal(first[k], made[k])]
        other = set(first) - set(alike)
        assert all(".mlp." in k for k in other), name
        assert bool(other) == (arms.ARMS[name].as_large_as is not None)
    again = arms.make_drafter(target, arms.ARMS[READER], args).state_dict()
    assert all(torch.equal(x, y) for x, y in zip(again.values(), _made(arms, target, READER, args), strict=True))
    other_seed = arms.make_drafter(target, arms.ARMS["dspark"], options("--seed", "4")).state_dict()
    assert not torch.equal(first["fc.weight"], other_seed["fc.weight"])


def _made(arms, target, name, args):
    return arms.make_drafter(target, arms.ARMS[name], args).state_dict().values()


def test_as_large_is_as_large_to_a_channel(scripts, target, options):
    arms, args = scripts.ablation_arms, options()
    compared = [arm for arm in arms.ARMS.values() if arm.as_large_as is not None]
    assert len(compared) >= 3
    for arm in compared:
        pair = [arms.make_drafter(target, a, args) for a in (arm, arm.as_large_as)]
        layers = pair[1].config.num_hidden_layers
        assert layers == pair[0].config.num_hidden_layers
        assert layers == {"1 layer": 1, "5 layers": 5}.get(arm.name.rpartition(", ")[2], args.layers)
        channel = 3 * target.config.hidden_size * layers  # of the MLP of every layer
        assert abs(pair[0].num_parameters() - pair[1].num_parameters()) <= channel / 2, arm.name


def test_every_arm_can_be_made(scripts, target, options):
    windows = {"full attention": None, "window 128": 128, "window 1024": 1024}  # by the end of a name
    for arm in scripts.ablation_arms.ARMS.values():
        config = scripts.ablation_arms.make_config(target, arm, options("--window", "64"))
        assert config.has_reader == arm.reader
        assert config.sliding_window == windows.get(arm.name.rpartition(", ")[2], 64)


def test_rates_by_stage(scripts, frozen, target, options, batches):
    arms, training = scripts.ablation_arms, scripts.ablation_training
    steps = 1000

    def of(name, count=steps):
        arm = arms.ARMS[name]
        return training.Training(arm, arms.make_drafter(target, arm, options()), frozen, 1e-3, count)

    joint, staged, slower = of("conditioned"), of("staged"), of("reader lr x 0.3")
    assert of("dspark, lr x 2").rate(50, False) == pytest.approx(2 * joint.rate(50, False))
    for step in (0, 50, 399, 400, 599, 600, 999):
        rate = joint.rate(step, False)
        assert rate == joint.rate(step, True) > 0
        assert slower.rate(step, True) == pytest.approx(0.3 * rate)
        assert slower.rate(step, False) == rate
        assert staged.rate(step, True) == (rate if step >= 400 else 0)
        assert staged.rate(step, False) == (0 if 400 <= step < 600 else rate)
    assert joint.rate(99, False) == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 0.099)))
    assert joint.rate(0, False) == pytest.approx(1e-5)
    staged, batch = of("staged", 10), batches().next()
    for step, moves in ((0, {False}), (5, {True}), (9, {False, True})):
        before = {name: p.detach().clone() for name, p in staged.drafter.named_parameters()}
        staged.step(batch, step)
        named = staged.drafter.named_parameters()
        assert {name.startswith("reader.") for name, p in named if not torch.equal(p, before[name])} == moves


def test_batches_are_the_same_by_seed_and_lie_in_one_memory(frozen, tokens, batches):
    one, other, different = batches(), batches(), batches(seed=1)
    names = [field.name for field in dataclasses.fields(one.memory)]
    addresses, last = None, None
    for _ in range(3):
        batch, again = one.next(), other.next()
        assert all(torch.equal(getattr(batch, name), getattr(again, name)) for name in names)
        assert not torch.equal(batch.labels, different.next().labels)
        found = {name: getattr(batch, name).data_ptr() for name in names}
        addresses = addresses or found
        assert found == addresses
        assert last is None or not torch.equal(batch.labels, last)
        last = batch.labels.clone()
        ids, anchors = one.inputs
        windows = tokens.unfold(0, 96, 1)
        assert all(bool((windows == row).all(-1).any()) for row in ids)
        fresh = frozen.batch(ids, anchors)
        assert torch.equal(fresh.states.stack(), batch.states)
        assert torch.equal(fresh.context_hidden_states, batch.context_hidden_states)
        assert batch.loss_mask.all()
        assert int(anchors.max()) + 1 + 4 < 96  # an arm that sees a feature more needs room


def test_an_anchor_has_room_and_its_first_label_is_the_targets_own(scripts):
    usable = scripts.ablation_batches.usable_anchors
    assert usable(torch.ones(1, 20), 4)[0].nonzero().flatten().tolist() == [*range(1, 14)]  # 14 + 1 + 4 < 20
    written = (torch.arange(20) >= 10)[None]
    assert usable(torch.ones(1, 20), 4, written)[0].nonzero().flatten().tolist() == [9, 10, 11, 12, 13]


def test_rows_that_the_target_wrote_stay_whole(scripts, frozen, tokens, options, tmp_path):
    rows = tokens[: 4 * 96].view(4, 96)
    for seed, part in enumerate(rows.split(2)):
        scripts.on_policy_text.save_rows(tmp_path / f"train-sampled-{seed}.npy", part)
    args = options()
    args.on_policy = tmp_path
    text = scripts.ablate_reader.training_text(args, 4096)
    assert torch.equal(text, rows)
    assert args.row == 96
    shapes = {"block_size": 4, "batch_size": 8, "row": 96, "num_anchors": 4}
    batches = scripts.ablation_batches.Batches(frozen, text, seed=0, **shapes)
    batches.next()
    drawn = {tuple(row.tolist()) for row in batches.inputs[0]}
    assert 1 < len(drawn) <= 4
    assert drawn <= {tuple(row.tolist()) for row in rows}


@pytest.mark.parametrize(
    ("lengths", "size", "message"),
    [([], 4096, "has no train-"), ([96, 64], 4096, "several lengths"), ([96], 100, "written by another target")],
)
def test_rows_of_another_kind_are_refused(lengths, size, message, scripts, tokens, options, tmp_path):
    for length in lengths:
        scripts.on_policy_text.save_rows(tmp_path / f"train-sampled-{length}.npy", tokens[:length][None])
    args = options()
    args.on_policy = tmp_path
    with pytest.raises(SystemExit, match=message):
        scripts.ablate_reader.training_text(args, size)


@pytest.mark.slow
def test_compiled_steps_are_the_same_steps(scripts, target, frozen, tokens, options):
    """Up to rounding, over three steps; and the package's classes are as before afterwards."""
    before, limit = DrafterLayer.forward, torch._dynamo.config.recompile_limit
    found = []
    for context in (contextlib.nullcontext, scripts.ablation_training.compiled):
        with context():
            args = options("--steps", "3", "--arms", "dspark", READER)
            found.append(scripts.ablate_reader.train(target, frozen, tokens, args))
            assert (DrafterLayer.forward is before) == (context is contextlib.nullcontext)
    assert DrafterLayer.forward is before
    assert torch._dynamo.config.recompile_limit == limit
    for plain, fast in zip(*found, strict=True):
        assert fast.loss.item() == pytest.approx(plain.loss.item(), rel=1e-4)
        for name, weight in plain.drafter.named_parameters():
            other = fast.drafter.get_parameter(name)
            assert float((weight - other).norm()) <= 1e-3 * float(weight.norm()), name


def test_rows_without_enough_places_are_refused(scripts, frozen, tokens):
    with pytest.raises(SystemExit, match="rows of 16 tokens have no 12 places for blocks of 4"):
        scripts.ablation_batches.Batches(frozen, tokens, seed=0, block_size=4, batch_size=2, row=16, num_anchors=12)


def test_an_arm_is_trained_alike_whatever_stands_beside_it(scripts, frozen, target, tokens, options):
    """Same data, steps and random numbers: alone, and as the last of three."""
    found = []
    for names in (["dspark"], ["large reader", "staged", "dspark"]):
        args = options("--steps", "3", "--arms", *names)
        torch.manual_seed(len(names))
        trained = scripts.ablate_reader.train(target, frozen, tokens, args)[-1]
        assert args.done == 3
        found.append(trained)
    first, last = (x.drafter.state_dict() for x in found)
    assert all(torch.equal(first[name], last[name]) for name in first)
    fresh = scripts.ablation_arms.make_drafter(target, found[0].arm, options()).state_dict()
    assert not torch.equal(first["fc.weight"], fresh["fc.weight"])
    assert found[0].loss == found[1].loss


def reads_something(scripts, target, frozen, name, args):
    arm = scripts.ablation_arms.ARMS[name]
    drafter = scripts.ablation_arms.make_drafter(target, arm, args)
    if drafter.reader is not None:
        torch.nn.init.normal_(drafter.reader.up_proj.weight, std=0.5)
    return scripts.ablation_training.Training(arm, drafter, frozen, 1e-3, 1)


def test_wrong_states_are_other_states(scripts, frozen, target, options, batches):
    batch, wrong = batches().next(), scripts.ablate_reader.with_wrong_states
    trained = reads_something(scripts, target, frozen, READER, options())
    figures = {}
    for kind in (scripts.ablate_reader.REAL, *scripts.ablate_reader.WRONG):
        served = batch if kind == scripts.ablate_reader.REAL else wrong(batch, kind)
        figures[kind] = scripts.ablation_training.measured(trained.arm, trained.drafter, frozen, served).metrics()
        others = [field.name for field in dataclasses.fields(batch) if field.name != "states"]
        assert all(getattr(served, name) is getattr(batch, name) for name in others)
    assert len({round(metrics["tau_of_samples"], 6) for metrics in figures.values()}) == 4
    assert not wrong(batch, "zeros").states.any()
    assert torch.equal(wrong(batch, "another row's").states[0], batch.states[1])
    assert torch.equal(wrong(batch, "the previous anchor's").states[:, 1:], batch.states[:, :-1])


def test_an_arm_is_served_the_layers_that_it_reads(scripts, frozen, target, options, batches):
    batch, read = batches().next(), []
    for name in ("first", "middle", "last"):
        arm = scripts.ablation_arms.ARMS[f"best, {name} third of the layers"]
        config = scripts.ablation_arms.make_config(target, arm, options())
        served = scripts.ablation_training.seen_by(arm, batch).states
        columns = [frozen.config.state_layer_ids.index(layer) for layer in config.state_layer_ids]
        assert torch.equal(served, batch.states[:, :, columns])
        read += config.state_layer_ids
    assert read == frozen.config.state_layer_ids


def test_only_the_probe_sees_the_anchors_feature(scripts, frozen, target, options, batches):
    batch = batches().next()
    context = batch.context_hidden_states.clone()
    later = torch.arange(96)[None, :, None] >= batch.anchor_positions[:, -1:, None]
    changed = dataclasses.replace(batch, context_hidden_states=torch.where(later, context + 1, context))
    for name, differs in ((READER, False), ("dspark", False), (PROBE, True)):
        trained = reads_something(scripts, target, frozen, name, options())
        first, other = (
            scripts.ablation_training.measured(trained.arm, trained.drafter, frozen, x).cross_entropy
            for x in (batch, changed)
        )
        assert bool(first != other) == differs, name
    seen = scripts.ablation_training.seen_by(scripts.ablation_arms.ARMS[PROBE], batch)
    assert torch.equal(seen.anchor_positions, batch.anchor_positions + 1)
    assert seen.states is None
    assert seen.labels is batch.labels


def test_the_experiment_on_a_cpu_writes_what_the_documentation_says(scripts, folder, tmp_path, monkeypatch, capsys):
    out, saved = tmp_path / "results" / "tried.json", tmp_path / "drafters"
    arms = ["dspark", "dspark, as large", READER, PROBE]
    arguments = ["--data", str(folder), "--out", str(out), "--save", str(saved), "--steps", "2", *TINY]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / "ablate_reader.py"), *arguments, "--arms", *arms])
    scripts.ablate_reader.main()  # on the committed texts
    record = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert str(folder) not in out.read_text()
    assert set(record) == {"command", "date", "device", "versions", "options", "text", "steps", "arms"}
    assert record["command"].startswith("python ablate_reader.py --data ")
    assert "--out tried.json" in record["command"]
    assert (record["steps"], record["options"]["seed"], record["options"]["held"]) == (2, 0, 2)
    assert list(record["arms"]) == arms
    for name, found in record["arms"].items():
        assert {"parameters", "training_loss", "loss", "tau", "tau_of_samples", "acceptance_4"} <= set(found)
        assert all(math.isfinite(value) for value in found.values() if isinstance(value, float))
        assert 1 <= found["tau_of_samples"] <= 5
        assert found["num_blocks"] == 12
        assert found["tau_of_samples_by_part"] == [found["tau_of_samples"]]
        assert list(found["wrong_states"]) == (list(scripts.ablate_reader.WRONG) if name == READER else [])
        drafter = ReadyDrafterModel.from_pretrained(saved / name.replace(" ", "_").replace(",", ""))
        assert drafter.num_parameters() == found["parameters"]
    printed = capsys.readouterr().out
    assert all(f"{name:32} " in printed for name in arms)
    assert "(+0.0 %)" in printed


def test_measured_on_whole_texts_is_measured_in_parts(scripts, frozen, target, options):
    trained = [reads_something(scripts, target, frozen, READER, options())]
    found = []
    for size in ("4", "2"):
        args = options("--held", "4", "--held-batch", size)
        rows = scripts.ablate_reader.held_rows(args)
        found.append(scripts.ablate_reader.evaluate(trained, frozen, rows, args)[READER])
    whole, parts = found
    assert whole["tau_of_samples"] == pytest.approx(parts["tau_of_samples"], abs=2e-5)
    assert parts["tau_of_samples"] == pytest.approx(np.mean(parts["tau_of_samples_by_part"]), abs=2e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--held", "5"], "has 4 rows of 160 tokens, too few for --held 5"),
        (["--held-new", "160"], "too few for --held 2 and --held-new 160"),
        (["--held", "3", "--held-batch", "2"], "leaves one row alone"),
        (["--held-batch", "1"], "--held-batch must be a number of at least 2"),
        (["--held-new", "5"], "--held-new must be a number of at least 6"),
        (["--out", "."], r"--out \. is a folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_measured_is_refused_before_training(more, message, scripts, folder, monkeypatch):
    arguments = ["--data", str(folder), "--text", str(folder), "--out", str(folder / "x.json"), *TINY, *more]
    monkeypatch.setattr(sys, "argv", ["ablate_reader.py", *arguments])
    monkeypatch.setattr(scripts.ablate_reader, "train", lambda *args: pytest.fail("it trains"))
    with pytest.raises(SystemExit, match=message):
        scripts.ablate_reader.main()


def seed_file(path, seed, arms, of="tau_of_samples", steps=100, **options):
    figures = {name: {"parameters": 2_000_000, of: value} for name, value in arms.items()}
    record = {"arms": figures, "options": {"seed": seed, "block": 8, **options}, "steps": steps, "text": "1234"}
    path.write_text(json.dumps(record))
    return str(path)


def printed_table(scripts, monkeypatch, capsys, files, *more):
    monkeypatch.setattr(sys, "argv", ["ablation_table.py", *files, *more])
    scripts.ablation_table.main()
    heading, _, table = capsys.readouterr().out.partition("\n\n")
    return heading, [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_intervals_are_students(scripts):
    interval = scripts.ablation_table.interval
    assert interval([1.0, 3.0]) == pytest.approx((2.0, 2 - 12.706, 2 + 12.706))
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 3 - 1.96293, 3 + 1.96293), abs=1e-4)
    mean, low, high = interval([2.0])
    assert mean == 2
    assert math.isnan(low)
    assert math.isnan(high)


def test_the_table_pairs_by_seed_and_by_setting(scripts, tmp_path, monkeypatch, capsys):
    """Gains of 10, 12 and 14 %, though the seeds themselves differ far more."""
    files = []
    for seed, (base, factor) in enumerate(((2.0, 1.10), (3.0, 1.12), (1.0, 1.14))):
        arms = {"dspark": base, "as large": base, "best": base * factor}
        arms |= {"dspark, full attention": 2 * base, "best, full attention": 2 * base * factor}
        files.append(seed_file(tmp_path / f"{seed}.json", seed, arms, steps=100 + seed))
    heading, table = printed_table(scripts, monkeypatch, capsys, files)
    assert heading == "3 seeds, 100 to 102 steps"
    assert table[0] == ["arm", "parameters", "tau_of_samples", "over dspark", "over as large"]
    half = 4.303 * 2 / math.sqrt(3)
    gain = f"+12.0 % [{12 - half:+.1f}, {12 + half:+.1f}]"
    tau = f"2.000 [{2 - 4.303 / math.sqrt(3):.3f}, {2 + 4.303 / math.sqrt(3):.3f}]"
    assert table[2] == ["dspark", "2.00 M", tau, "", ""]
    assert table[3] == ["as large", "2.00 M", tau, "+0.0 % [+0.0, +0.0]", ""]
    assert [row[0] for row in table[4:]] == ["best", "dspark, full attention", "best, full attention"]
    assert table[4][3:] == [gain, gain]
    assert table[5][3:] == ["", ""]
    assert table[6][3:] == [gain, ""]  # of its own setting, under the heading of the same arm


def test_files_that_are_no_seeds_of_one_comparison_are_refused(scripts, tmp_path, monkeypatch, capsys):
    first = seed_file(tmp_path / "a.json", 0, {"dspark": 2.0})
    others = {
        "different arms": seed_file(tmp_path / "b.json", 1, {"best": 2.0}),
        "one file per seed": seed_file(tmp_path / "c.json", 0, {"dspark": 2.0}),
        r"more than the seed \(block\)": seed_file(tmp_path / "d.json", 1, {"dspark": 2.0}, block=4),
    }
    for message, path in others.items():
        with pytest.raises(SystemExit, match=message):
            printed_table(scripts, monkeypatch, capsys, [first, path])
    with pytest.raises(SystemExit, match="--of must be one of tau_of_samples, got speed"):
        printed_table(scripts, monkeypatch, capsys, [first], "--of", "speed")
    many = [seed_file(tmp_path / f"{seed}.json", seed, {"dspark": 2.0}) for seed in range(11)]
    with pytest.raises(SystemExit, match="at most 10, got 11 files"):
        printed_table(scripts, monkeypatch, capsys, many)


def test_rounds_make_a_table_too(scripts, tmp_path, monkeypatch, capsys):
    """Files of ablation_rounds.py name folders of drafters; the table names arms, and pairs them by file."""
    files = []
    for seed, base in enumerate((2.0, 3.0)):
        arms = {"dspark": base, READER: base * (1.1 + seed / 50), "dspark, full attention": 2 * base}
        rounds = {
            scripts.ablation_arms.folder_of(name): {"tokens_per_forward": {"value": x}} for name, x in arms.items()
        }
        files.append(tmp_path / f"drafters-{seed}" / "rounds.json")
        files[-1].parent.mkdir()
        files[-1].write_text(json.dumps(rounds))
    copied = tmp_path / "copied.json"
    copied.write_text(files[0].read_text())
    with pytest.raises(SystemExit, match="one file per seed"):
        printed_table(scripts, monkeypatch, capsys, [str(files[0]), str(copied)])
    heading, table = printed_table(scripts, monkeypatch, capsys, [str(path) for path in files])
    assert heading == "2 seeds"
    assert [row[0] for row in table] == ["arm", "---", "dspark", READER, "dspark, full attention"]
    assert table[0][2] == "tokens_per_forward"
    assert table[3][3].startswith("+11.0 % [")
    with pytest.raises(SystemExit, match="different arms"):
        printed_table(scripts, monkeypatch, capsys, [str(files[0]), seed_file(tmp_path / "s", 1, {"dspark": 2.0})])


def test_committed_figures_make_a_table(scripts, monkeypatch, capsys):
    for name in ("reader-screen", "reader-combined"):
        path = EXAMPLES.parent / "docs" / "results" / f"{name}.json"
        _, table = printed_table(scripts, monkeypatch, capsys, [str(path)])
        arms = json.loads(path.read_text())["arms"]
        assert sorted(row[0] for row in table[2:]) == sorted(arms)
        assert set(arms) <= set(scripts.ablation_arms.ARMS)
        for row in table[2:]:
            assert row[2] == f"{arms[row[0]]['tau_of_samples']:.3f} [nan, nan]"


def test_texts_are_the_targets_own(scripts, tokens, tmp_path, monkeypatch):
    for part in ("validation", "test"):
        tokens[: 1000 if part == "test" else 2000].numpy().astype(np.uint16).tofile(tmp_path / f"{part}.bin")
    arguments = f"--target {TARGET} --data {tmp_path} --out {tmp_path / 'text'} --rows 3 --row 24 --new 6 --batch 4"
    monkeypatch.setattr(sys, "argv", ["ablation_text.py", *arguments.split()])
    scripts.ablation_text.main()
    for part, length in (("validation", 2000), ("test", 1000)):
        rows = np.load(tmp_path / "text" / f"{part}.npy")
        assert rows.shape == (3, 24)
        assert not (rows[:, 18:] == 1).any()
        starts = np.linspace(0, length - 18 - 1, 3).astype(int)
        assert (rows[:, :18] == tokens.numpy()[starts[:, None] + np.arange(18)]).all()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--prompts", "2"])
    scripts.ablation_text.main()
    prompts = [json.loads(line) for line in (tmp_path / "text" / "test-prompts.jsonl").read_text().splitlines()]
    assert [prompt["task"] for prompt in prompts] == ["test", "test"]
    for more, message in (
        ("--prompts 4", "chosen from --rows 3, got 4"),
        ("--mask-token-id 4096", "must be 0 to 4095"),
    ):
        monkeypatch.setattr(sys, "argv", ["ablation_text.py", *arguments.split(), *more.split()])
        with pytest.raises(SystemExit, match=message):
            scripts.ablation_text.main()
