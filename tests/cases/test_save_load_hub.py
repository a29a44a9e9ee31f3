"""Cases of saving, loading and the Hub: C07, C42, C43, C44, C45."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, Qwen3_5Config

import ready_hf
from ready_hf import ReadyDrafterConfig, ReadyDrafterModel, hub
from support import FAMILIES, drafter_for, random_prompt, trained_target


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def new_drafter(dtype=torch.float32, **options):
    return drafter_for(trained_target(), **{"reader_rank": 8, "reader_query_rank": 4} | options).to(dtype)


def buffers(model):
    return dict(model.named_buffers())


def generate(drafter, **kwargs):
    target = trained_target()
    return target.generate(random_prompt(8), assistant_model=drafter, max_new_tokens=16, do_sample=False, **kwargs)


@pytest.mark.parametrize("options", [{}, {"low_cpu_mem_usage": True}, {"device_map": "cpu"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_c07_buffers_that_are_not_saved(tmp_path, dtype, options):
    if "device_map" in options:
        pytest.importorskip("accelerate")
    new_drafter(layer_types=["full_attention", "sliding_attention"], sliding_window=32).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    loaded = AutoModel.from_pretrained(tmp_path, dtype=dtype, **options)
    built = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), dtype=dtype)
    found, wanted = buffers(loaded), buffers(built)
    assert found.keys() == wanted.keys()
    assert found
    for name, buffer in found.items():
        assert name not in saved
        assert buffer.device.type == "cpu"
        assert buffer.dtype == wanted[name].dtype == torch.float32
        assert torch.equal(buffer, wanted[name])
        assert torch.isfinite(buffer).all()
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_c42_dtype_is_saved_as_a_string_and_reloads(tmp_path, dtype):
    drafter = new_drafter(dtype)
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    assert AutoConfig.from_pretrained(tmp_path).dtype == dtype
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


class LocalHub:
    """Stands in for the client of the Hub: its one repository is a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, token=None):
        return self

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path, ignore_patterns=(), **kwargs):
        shutil.copytree(folder_path, self.folder, ignore=shutil.ignore_patterns(*ignore_patterns or ()))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The folder that `push_to_hub` ends in."""
    monkeypatch.setattr(hub, "HfApi", LocalHub(tmp_path / "repository"))
    return tmp_path / "repository"


def test_c42_a_configuration_that_holds_the_targets(tmp_path, repository):
    text = FAMILIES["qwen3_5"]()
    text.dtype = torch.bfloat16
    config = ReadyDrafterConfig.for_target(Qwen3_5Config(text_config=text.to_dict()), dtype=torch.bfloat16)
    config.text_config = text
    drafter = ReadyDrafterModel(config).to(torch.bfloat16)
    drafter.save_pretrained(tmp_path / "saved")
    hub.push_to_hub(drafter, "someone/drafter", base_model="someone/target")
    for folder in (tmp_path / "saved", repository):
        saved = json.loads((folder / "config.json").read_text())
        assert (saved["dtype"], saved["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
        assert AutoModel.from_pretrained(folder).dtype == torch.bfloat16


def result(value, name="GSM8K"):
    return EvalResult(
        task_type="text-generation",
        dataset_type="openai/gsm8k",
        dataset_name=name,
        metric_type="accepted_length",
        metric_value=value,
    )


@pytest.mark.parametrize("license", [None, "", "apache-2.0"])
@pytest.mark.parametrize("datasets", [None, [], ["openai/gsm8k"]])
@pytest.mark.parametrize("values", [[], [math.nan], [torch.tensor(2.5), math.nan, -math.inf, None]])
def test_c43_card_from_odd_inputs(license, datasets, values):
    card = hub.drafter_card(
        new_drafter(),
        "someone/drafter",
        base_model="Qwen/Qwen3.5-0.8B",
        license=license,
        datasets=datasets,
        tags=["日本語", "größer: 100 %", "- yaml", "ready"],
        eval_results=[result(value) for value in values],
    )
    text = str(card)
    data = ModelCard(text).data
    assert data.base_model == "Qwen/Qwen3.5-0.8B"
    assert data.license == (license or None)
    assert data.datasets == (datasets or None)
    assert ("license" in text) == bool(license)
    assert ("## Training data" in text) == bool(datasets)
    assert data.tags[-3:] == ["日本語", "größer: 100 %", "- yaml"]
    assert len(set(data.tags)) == len(data.tags)
    assert [r.metric_value for r in data.eval_results or ()] == ([2.5] if len(values) > 1 else [])
    assert ("## Results" in text) == (len(values) > 1)
    assert "nan" not in text.lower()
    assert "-inf" not in text


@pytest.mark.parametrize("wrong", [{"license": "My Own"}, {"datasets": ["a b"]}, {"tags": ["two\nlines"]}], ids=str)
def test_c43_a_card_that_is_wrong_is_not_uploaded(repository, wrong):
    """Checked here, before any call of the Hub; one that is right arrives."""
    pushed = {"base_model": "someone/target", "eval_results": [result(2.5), result(math.nan)]}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        hub.push_to_hub(new_drafter(), "someone/drafter", **pushed, **wrong)
    assert not repository.exists()
    hub.push_to_hub(new_drafter(), "someone/drafter", **pushed)
    card = ModelCard((repository / "README.md").read_text(encoding="utf-8"))
    assert [one.metric_value for one in card.data.eval_results] == [2.5]


def test_c44_nothing_of_the_target_is_kept_or_saved(tmp_path):
    drafter = new_drafter()
    names = set(drafter.state_dict())
    want = generate(drafter)
    assert set(drafter.state_dict()) == names
    of_target = {tensor.data_ptr() for tensor in trained_target().state_dict().values()}
    assert not of_target & {tensor.data_ptr() for tensor in [*drafter.parameters(), *drafter.buffers()]}
    drafter.save_pretrained(tmp_path)  # also: no error about shared tensors
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == names
    assert not [name for name in saved if "embed" in name or "lm_head" in name]
    loaded = AutoModel.from_pretrained(tmp_path)
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])
    assert generate(loaded).tolist() == want.tolist()
    with pytest.raises(TypeError, match="load its target"):
        loaded.generate(random_prompt(8))
    with pytest.raises(NotImplementedError, match="shares the target's"):
        loaded.get_input_embeddings()
    with pytest.raises(NotImplementedError, match="shares the target's"):
        loaded.set_input_embeddings(torch.nn.Embedding(2, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_c45_small_heads_in_every_dtype_draft(tmp_path, dtype):
    new_drafter(dtype).save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    want = trained_target().generate(random_prompt(8), max_new_tokens=16, do_sample=False)
    with ready_hf.record_stats() as stats:
        got = generate(loaded)
    assert got.tolist() == want.tolist()
    assert sum(stats.drafted_by_position) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_c45_only_the_small_heads_in_another_dtype(tmp_path, dtype):
    """In the file, and in memory."""
    drafter = new_drafter()
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    heads = [name for name in tensors if name.startswith(("markov_head", "confidence_head"))]
    assert len(heads) == 4
    tensors |= {name: tensors[name].to(dtype) for name in heads}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = AutoModel.from_pretrained(tmp_path)
    for name in heads:
        assert torch.equal(loaded.state_dict()[name], tensors[name].float())
    want = trained_target().generate(random_prompt(8), max_new_tokens=16, do_sample=False)
    drafter.markov_head.to(dtype)
    for one in (loaded, drafter):
        with ready_hf.record_stats() as stats:
            got = generate(one)
        assert got.tolist() == want.tolist()
        assert sum(stats.drafted_by_position) > 0


REMOVED = ["markov_head.markov_w2.weight", "confidence_head.proj.bias", "reader.query", "layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("name", REMOVED)
def test_c45_a_missing_tensor_raises(tmp_path, name):
    new_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for load in (AutoModel.from_pretrained, ReadyDrafterModel.from_pretrained):
        with pytest.raises(RuntimeError, match=f"missing: {name}"):
            load(tmp_path)
    with pytest.raises(RuntimeError, match=f"missing: {name}"):
        AutoModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


def test_c45_other_shapes_and_tensors_of_no_module_raise(tmp_path):
    new_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w1.weight"][:, :4].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"markov_head\.markov_w1\.weight has shape \[\d+, 4\], and .* \[\d+, 8\]"):
        AutoModel.from_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert loaded.markov_head.markov_w1.weight.shape[1] == 8
    tensors["lm_head.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"w1\.weight has shape .*; belongs to no module: lm_head\.weight"):
        AutoModel.from_pretrained(tmp_path)
    _, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True)
    assert info["unexpected_keys"] == {"lm_head.weight"}
