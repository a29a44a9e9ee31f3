"""Every folder of hub_configs holds a target and a drafter for it, and the index says how large they are.

Nothing is allocated: all models are built on the meta device.
"""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ready_hf
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel


FOLDER = Path(__file__).parents[1] / "hub_configs"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/target.json"))
SHIPPED = {"ready_hf:small_target": ready_hf.small_target_path, "ready_hf:tiny_target": ready_hf.tiny_target_path}

every_folder = pytest.mark.parametrize("name", NAMES)


def entry(name: str) -> dict:
    return json.loads((FOLDER / name / "target.json").read_text())


@functools.cache
def target(name: str) -> PreTrainedModel:
    """The target of a folder, without storage for its weights."""
    config = entry(name)["config"]
    if isinstance(config, str):
        assert config in SHIPPED, f"not a model that ships with the package: {config!r}"
        config = AutoConfig.from_pretrained(SHIPPED[config]())
    else:
        config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def drafter(name: str) -> ReadyDrafterModel:
    """The drafter of a folder, without storage for its weights."""
    with torch.device("meta"):
        return ReadyDrafterModel(ReadyDrafterConfig.from_pretrained(FOLDER / name))


def amount(number: int) -> str:
    """Three digits and a unit: 0.70 M, 12.3 M, 1.98 B."""
    value, unit = (number / 1e9, "B") if number >= 1e9 else (number / 1e6, "M")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def row(name: str) -> str:
    """What the index must say about a folder."""
    model, draft = target(name), drafter(name)
    layers, parameters = ready_hf.recurrent_layers(model), model.num_parameters()
    heads, keys, values = layers[0].state_shape
    size = heads * keys * values * 4 / 1024
    memory = f"{size / 1024:.1f} MiB" if size >= 1024 else f"{size:.0f} KiB"
    cells = [
        f"`{name}`",
        amount(parameters),
        f"{len(layers)} of {model.config.num_hidden_layers}",
        f"{heads} x {keys} x {values}, {memory}",
        amount(draft.num_parameters()),
        amount(sum(p.numel() for p in draft.reader.parameters())),
    ]
    return f"| {' | '.join(cells)} |"


@every_folder
def test_recurrent_layers_are_the_expected_ones(name):
    model, expected = target(name), entry(name)["expected"]

    layers = ready_hf.recurrent_layers(model)
    assert len(layers) == expected["num_recurrent_layers"]
    assert {layer.recurrence.name for layer in layers} == {expected["recurrence"]}
    assert {tuple(layer.state_shape) for layer in layers} == {tuple(expected["state_shape"])}
    indices = [layer.layer_idx for layer in layers]
    assert indices == sorted(set(indices))
    assert indices[-1] < model.config.num_hidden_layers

    convs = {(m.in_channels, *m.kernel_size) for m in model.modules() if isinstance(m, torch.nn.Conv1d)}
    assert convs == {tuple(expected["conv"])}


@every_folder
def test_the_drafter_fits_its_target(name):
    draft = drafter(name)
    draft.config.check_target(target(name))
    assert draft.reader is not None
    assert draft.config.state_layer_ids == [layer.layer_idx for layer in ready_hf.recurrent_layers(target(name))]
    assert {p.device.type for p in draft.parameters()} == {"meta"}


@every_folder
def test_a_drafter_configuration_holds_what_is_not_default_and_nothing_else(name):
    stored = json.loads((FOLDER / name / "config.json").read_text())
    assert stored.pop("model_type") == ReadyDrafterConfig.model_type
    defaults = {field.name: field.default for field in dataclasses.fields(ReadyDrafterConfig)}
    assert [key for key in stored if key not in ReadyDrafterConfig.__annotations__] == []
    assert [key for key, value in stored.items() if value == defaults[key]] == []


def test_the_small_drafter_has_the_sizes_of_the_one_that_ships():
    here = ReadyDrafterConfig.from_pretrained(FOLDER / "small-target").to_dict()
    shipped = ReadyDrafterConfig.from_pretrained(ready_hf.small_drafter_path("ready")).to_dict()
    about_the_file = {"architectures", "auto_map", "dtype", "transformers_version", "use_cache"}
    assert {k: v for k, v in here.items() if k not in about_the_file} == {
        k: v for k, v in shipped.items() if k not in about_the_file
    }


def test_a_drafter_for_another_target_is_refused():
    config = ReadyDrafterConfig.from_pretrained(FOLDER / "qwen3.8-27b")
    with pytest.raises(ValueError, match="was not made for") as error:
        config.check_target(target("small-target"))
    assert "hidden size: 5120 in the drafter, 128 in the target" in str(error.value)
    assert "[48, 128, 128] in the drafter, [[4, 32, 48]] in the target" in str(error.value)


def test_every_folder_is_complete_and_has_its_row_in_the_index():
    folders = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    assert folders == NAMES
    assert sorted(path.parent.name for path in FOLDER.glob("*/config.json")) == NAMES
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(rows) == [row(name) for name in NAMES]
