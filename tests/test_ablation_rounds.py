"""Expected rounds of decoding: the recursion against drawing, and the script on the research target."""

import importlib
import json
import sys
from pathlib import Path

import pytest


np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
from transformers import AutoModelForCausalLM  # noqa: E402

import ready_hf  # noqa: E402
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel  # noqa: E402
from ready_hf.features import FrozenTarget  # noqa: E402


EXAMPLES = Path(__file__).parents[1] / "examples"
TARGET = EXAMPLES / "research_target"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("ablation_rounds")
    for name in ("ablation_rounds", "on_policy_text"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("value", "count", "rounds"), [(0.0, 7, 7), (1.0, 8, 2), (1.0, 9, 3)])
def test_none_and_all_accepted(script, value, count, rounds):
    """Blocks of 3: a round emits one token, or four."""
    assert script.expected_rounds(torch.full((count, 3), value)) == pytest.approx(rounds)


def test_the_recursion_is_the_mean_of_drawn_decodings(script):
    generator = torch.Generator().manual_seed(0)
    ratios = torch.rand(20, 4, generator=generator)
    total, draws = 0, 4000
    for accepted in (torch.rand(draws, 20, 4, generator=generator) < ratios).cumprod(-1).sum(-1).tolist():
        anchor = 0
        while anchor < 20:
            anchor += accepted[anchor] + 1
            total += 1
    expected = script.expected_rounds(ratios.cumprod(-1))
    assert total / draws == pytest.approx(expected, rel=0.02)
    uniform = 20 / (1 + ratios.cumprod(-1).sum(-1).mean())  # anchors spread evenly: another number
    assert abs(float(uniform) - expected) > 0.04 * expected


@pytest.fixture(scope="module")
def target():
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval().requires_grad_(False)
    ready_hf.ensure_patched(model)
    return model


def new_drafter(target, **options):
    torch.manual_seed(0)
    sizes = {"block_size": 4, "num_hidden_layers": 1, "intermediate_size": 64, "markov_rank": 4, "mask_token_id": 1}
    drafter = ReadyDrafterModel(ReadyDrafterConfig.for_target(target, **sizes | options)).eval()
    for parameter in drafter.parameters():  # a fresh one accepts nothing
        torch.nn.init.normal_(parameter, std=0.05)
    return drafter


def test_survival_is_that_of_decoding(script, target):
    """Ratios of what the drafter would draw from in `generate` and of the target's own distribution."""
    drafter, ids = new_drafter(target), torch.from_numpy(np.load(TARGET / "text" / "validation.npy")[0, :80]).long()
    anchor = 60
    frozen = FrozenTarget(target, drafter.config)
    with torch.no_grad():
        batch = frozen.batch(ids[None], torch.tensor([[anchor]]))
        got = script.survival(frozen, drafter, batch)[0, 0]
        wanted = target(ids[None]).logits[0, anchor : anchor + 4].softmax(-1)
        hidden = drafter(
            batch.noise_embeds,
            batch.context_hidden_states[:, :anchor],
            states=batch.states.stack(),
            use_cache=False,
        ).last_hidden_state
        drafted = drafter.draft_logits(hidden, ids[None, anchor : anchor + 4], target.lm_head)[0][0].softmax(-1)
    labels = ids[anchor + 1 : anchor + 5, None]
    ratio = (drafted.gather(1, labels) / wanted.gather(1, labels)).clamp(max=1)[:, 0]
    assert torch.allclose(got, ratio.cumprod(0), rtol=1e-4, atol=0)  # down to 1e-12; states a token late change 4e-3
    assert 0 < float(got[0]) < 1


def test_drafters_share_forwards_where_they_can(script, target):
    """By block and layers of features; one that reads states decides what the others are served beside."""
    ready, plain = new_drafter(target), new_drafter(target, reader=False)
    short = new_drafter(target, block_size=2, reader=False)
    groups = script.shared_targets(target, {"plain": plain, "short": short, "ready": ready})
    assert [names for _, names in groups] == [["plain", "ready"], ["short"]]
    assert [frozen.config is drafter.config for (frozen, _), drafter in zip(groups, (ready, short), strict=True)] == [
        True,
        True,
    ]
    other = new_drafter(target, state_layer_ids=[0])
    with pytest.raises(SystemExit, match="ready, other read states of different layers"):
        script.shared_targets(target, {"ready": ready, "other": other})


def test_the_script_compares_saved_drafters(script, target, tmp_path, monkeypatch, capsys):
    new_drafter(target).save_pretrained(tmp_path / "ready")
    new_drafter(target, reader=False, sliding_window=16).save_pretrained(tmp_path / "plain")
    np.save(tmp_path / "validation.npy", np.load(TARGET / "text" / "validation.npy")[:3, -120:])
    common = ["--text", str(tmp_path), "--json", str(tmp_path / "out.json"), "--rows", "3"]

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ablation_rounds.py", *arguments, *common])
        script.main()

    run(str(tmp_path / "plain"), str(tmp_path / "ready"), "--new", "40", "--anchors", "16")
    found = json.loads((tmp_path / "out.json").read_text())
    assert list(found) == ["plain", "ready"]
    assert found["plain"]["gain"]["value"] == 0
    run(str(tmp_path / "plain"), str(tmp_path / "ready"), "--new", "40", "--anchors", "64", "--batch", "2")
    again = json.loads((tmp_path / "out.json").read_text())
    for name in found:  # however rows and anchors are put together
        assert again[name]["rounds_by_row"] == pytest.approx(found[name]["rounds_by_row"], rel=1e-5)
    rounds = found["ready"]["rounds_by_row"]
    assert found["ready"]["tokens_per_forward"]["value"] == pytest.approx(3 * 35 / sum(rounds))
    assert all(35 / 5 <= x <= 35 for x in rounds)
    assert "ready" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="leaves no prompt"):
        run(str(tmp_path / "plain"), "--new", "120")
    with pytest.raises(SystemExit, match="--new must be at least 6"):
        run(str(tmp_path / "plain"), "--new", "5")
    with pytest.raises(SystemExit, match="no drafter in gone"):
        run("gone", "--new", "40")
