"""Every folder of hub_configs builds on the meta device and has the recurrent layers it says it has."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ready_hf


FOLDER = Path(__file__).parents[1] / "hub_configs"
ENTRIES = sorted(FOLDER.glob("*/target.json"))


def build(config: dict | str) -> torch.nn.Module:
    """The model of an entry, without storage for its weights."""
    if isinstance(config, str):
        assert config == "ready_hf:tiny_target", f"not a model that ships with the package: {config!r}"
        config = AutoConfig.from_pretrained(ready_hf.tiny_target_path())
    else:
        config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.parent.name)
def test_recurrent_layers_are_the_expected_ones(path):
    entry = json.loads(path.read_text())
    model, expected = build(entry["config"]), entry["expected"]

    layers = ready_hf.recurrent_layers(model)
    assert len(layers) == expected["num_recurrent_layers"]
    assert {layer.recurrence.name for layer in layers} == {expected["recurrence"]}
    assert {tuple(layer.state_shape) for layer in layers} == {tuple(expected["state_shape"])}
    indices = [layer.layer_idx for layer in layers]
    assert indices == sorted(set(indices))
    assert indices[-1] < model.config.num_hidden_layers

    convs = {(m.in_channels, *m.kernel_size) for m in model.modules() if isinstance(m, torch.nn.Conv1d)}
    assert convs == {tuple(expected["conv"])}


def test_every_folder_has_an_entry_and_a_row_in_the_index():
    folders = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    assert folders == [path.parent.name for path in ENTRIES]
    index = (FOLDER / "README.md").read_text()
    assert [name for name in folders if f"| `{name}` |" not in index] == []
