"""Folders that somebody else has made: what is wrong with one is said in one sentence, and nothing of it is run."""

import copy
import hashlib
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import ready_hf
from ready_hf import ReadyDrafterModel
from ready_hf.cli import main
from support import drafter_for, random_prompt, trained_target


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LOADERS = [AutoModel, ReadyDrafterModel]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    drafter_for(trained_target(), reader_rank=4).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "drafter"))


class Code:
    """An object whose pickle runs code: it leaves a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def mark(folder: Path) -> Path:
    return folder.parent / "code was run"


def test_the_pickle_of_these_tests_would_run_code(folder):
    pickle.loads(pickle.dumps(Code(mark(folder))))
    assert mark(folder).exists()


def pickled(folder, name="pytorch_model.bin"):
    torch.save({"fc.weight": Code(mark(folder))}, folder / name)


def changed(change):
    """What changes the tensors of a folder by `change(tensors)`."""

    def apply(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def with_bytes(make):
    """What replaces the file of weights by `make(bytes)`."""
    return lambda folder: (folder / WEIGHTS).write_bytes(make((folder / WEIGHTS).read_bytes()))


def in_type(dtype, names=("fc.weight",)):
    return changed(lambda tensors: tensors.update({name: tensors[name].to(dtype) for name in names}))


def set_value(name, value):
    return changed(lambda tensors: tensors[name].view(-1)[-1:].fill_(value))


def indexed(name, keep=None):
    """What makes a checkpoint of one shard that the index calls `name`; the weights lie at `keep` in the folder."""

    def apply(folder):
        names = list(load_file(folder / WEIGHTS))
        if keep is not None:
            (folder / keep).parent.mkdir(exist_ok=True)
            shutil.copy(folder / WEIGHTS, folder / keep)
        (folder / WEIGHTS).unlink()
        at = str(folder.parent / name[1:]) if name.startswith("@") else name
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, at)}
        (folder / INDEX).write_text(json.dumps(index))

    return apply


def index_of(text):
    def apply(folder):
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(text)

    return apply


def configured(**fields):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return apply


def written(data):
    return lambda folder: (folder / "config.json").write_bytes(data)


def in_front(change):
    """What puts the name of a base model in front of all tensors, which transformers drops, and changes them."""

    def apply(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({f"model.{name}": value for name, value in tensors.items()}, folder / WEIGHTS)

    return apply


def quantized_and(apply):
    """What leaves looking at types and shapes to a quantizer: places and files are looked at all the same."""
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}

    def apply_quantized(folder):
        pytest.importorskip("bitsandbytes")
        apply(folder)
        configured(quantization_config=settings)(folder)

    return apply_quantized


def twice(folder):
    """Two shards that hold the same tensor, with other values."""
    indexed("model-1.safetensors", "model-1.safetensors")(folder)
    norm = load_file(folder / "model-1.safetensors")["norm.weight"]
    save_file({"norm.weight": norm + 1}, folder / "model-2.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "model-2.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def only_pickles(folder):
    (folder / WEIGHTS).unlink()
    pickled(folder)


def pickle_by_index(place):
    def apply(folder):
        indexed(place)(folder)
        pickled(folder, place)

    return apply


def pickle_without_dtype(folder):
    """transformers looks into the first file to find the dtype, before any weights are loaded."""
    configured(dtype=None)(folder)
    pickle_by_index("../weights.bin")(folder)


def adapter(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    pickled(folder, "adapter_model.bin")


BROKEN = {
    "half a file": (with_bytes(lambda data: data[: len(data) // 2]), rf"{WEIGHTS}' is no whole safetensors file"),
    "half a header": (with_bytes(lambda data: data[:20]), rf"{WEIGHTS}' is no whole safetensors file"),
    "an empty file": (with_bytes(lambda data: b""), rf"{WEIGHTS}' is no whole safetensors file"),
    "a byte too many": (with_bytes(lambda data: data + b"\0"), rf"{WEIGHTS}' is no whole safetensors file"),
    "a page": (with_bytes(lambda data: b"<html>Sign in</html>" * 9), rf"{WEIGHTS}' is no whole safetensors file"),
    "a pointer": (with_bytes(lambda data: b"version https://git-lfs"), rf"{WEIGHTS}' is no whole safetensors file"),
    "a huge header": (with_bytes(lambda data: struct.pack("<Q", 2**62) + data[8:]), "is no whole safetensors file"),
    "a pickle under that name": (lambda folder: pickled(folder, WEIGHTS), "is no whole safetensors file"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}; only safetensors files are loaded"),
    "only pickles": (only_pickles, f"has no {WEIGHTS}, but pytorch_model.bin; only safetensors"),
    "a folder": (lambda folder: [(folder / WEIGHTS).unlink(), (folder / WEIGHTS).mkdir()], f"has no {WEIGHTS}"),
    "nan": (set_value("fc.weight", float("nan")), r"not finite in fc\.weight: the training diverged"),
    "infinity": (set_value("norm.weight", float("-inf")), r"not finite in norm\.weight"),
    "integers": (in_type(torch.int32), r"fc\.weight of type I32, and allowed are F64, F32, F16, BF16"),
    "bytes": (in_type(torch.uint8, ("fc.weight", "norm.weight")), r"fc\.weight, norm\.weight of type U8"),
    "8 bits": (in_type(torch.float8_e4m3fn), r"fc\.weight of type F8_E4M3"),
    "complex": (in_type(torch.complex64), r"fc\.weight of type C64"),
    "another shape": (
        changed(lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()})),
        "fc.weight has shape",
    ),
    "a missing tensor": (changed(lambda t: t.pop("fc.weight")), r"missing: fc\.weight"),
    "a tensor too many": (changed(lambda t: t.update(more=torch.zeros(2))), "belongs to no module: more"),
    "shapes beyond memory": (configured(intermediate_size=10**9), r"mlp\.up_proj\.weight has shape .* \[1000000000, "),
    "a path upwards": (indexed("../w.safetensors", "../w.safetensors"), r"names '\.\./w\.safetensors'; allowed are"),
    "an absolute path": (indexed("@w.safetensors", "../w.safetensors"), r"names '/.*w\.safetensors'; allowed are"),
    "a path downwards": (indexed("a/w.safetensors", "a/w.safetensors"), r"names 'a/w\.safetensors'; allowed are"),
    "a path of windows": (indexed("..\\w.safetensors", "../w.safetensors"), r"w\.safetensors'; allowed are"),
    "a shard that is not there": (indexed("model-2.safetensors"), r"there is no '.*model-2\.safetensors'"),
    "a pickle as a shard": (pickle_by_index("model-1.bin"), r"names 'model-1\.bin'; allowed are \.safetensors files"),
    "a pickle elsewhere": (pickle_by_index("../model.bin"), r"names '\.\./model\.bin'; allowed are"),
    "a path upwards, quantized": (
        quantized_and(indexed("../w.safetensors", "../w.safetensors")),
        r"names '\.\./w\.safetensors'; allowed are",
    ),
    "a pickle elsewhere, quantized": (
        quantized_and(pickle_by_index("../model.bin")),
        r"names '\.\./model\.bin'; allowed are",
    ),
    "half a file, quantized": (
        quantized_and(with_bytes(lambda data: data[: len(data) // 2])),
        rf"{WEIGHTS}' is no whole safetensors file",
    ),
    "an endless name": (indexed("a" * 5000 + ".safetensors"), "names 'aaa.*'; allowed are"),
    "a tensor twice": (twice, r"norm\.weight is there twice"),
    "a tensor twice, once in front": (
        changed(lambda t: t.update({"model.norm.weight": t["norm.weight"] + 1})),
        r"norm\.weight is there twice",
    ),
    "integers in front": (
        in_front(lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int32)})),
        r"fc\.weight of type I32, and allowed are F64, F32, F16, BF16",
    ),
    "another shape in front": (
        in_front(lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()})),
        "fc.weight has shape",
    ),
    "made up beyond memory": (configured(reader_gate_rank=10**9), r"missing: reader\.gate_proj\.0\.weight"),
    "sizes beyond memory": (configured(hidden_size=10**12), "sizes in its config.json are beyond any memory"),
    "a size beyond 64 bits": (configured(intermediate_size=2**70), "sizes in its config.json are beyond any memory"),
    "layers beyond patience": (
        configured(num_hidden_layers=10**9, layer_types=None),
        "`num_hidden_layers` must be at most 1000, got 1000000000",
    ),
    "labels beyond memory": (configured(num_labels=10**9), "has no labels, but .* sets `num_labels=1000000000`"),
    "a number for labels": (configured(id2label=5), "has no labels, but .* sets `id2label=5`"),
    "a number for a dtype": (configured(dtype=3), "`dtype` must be a type of torch such as 'bfloat16', got 3"),
    "a word for quantization": (configured(quantization_config="x"), "`quantization_config` must be a table"),
    "a field for a method": (configured(check_target=1), "sets `check_target`, which is computed and no field"),
    "a field for a property": (configured(has_reader=True), "sets `has_reader`, which is computed and no field"),
    "an endless epsilon": (configured(rms_norm_eps=float("inf")), "`rms_norm_eps` must be 0 or more, and finite"),
    "no number as epsilon": (configured(rms_norm_eps=float("nan")), "`rms_norm_eps` must be 0 or more, and finite"),
    "a negative epsilon": (configured(rms_norm_eps=-1.0), "`rms_norm_eps` must be 0 or more, and finite"),
    "a sure dropout": (configured(attention_dropout=1.0), r"`attention_dropout` must be in \[0, 1\)"),
    "an endless scatter": (configured(initializer_range=float("inf")), "`initializer_range` must be 0 or more"),
    "a pickle to look into": (pickle_without_dtype, r"names '\.\./weights\.bin'; allowed are"),
    "half an index": (index_of('{"weight_map": {'), rf"its {INDEX} is no index"),
    "a list as index": (index_of("[]"), rf"its {INDEX} is no index"),
    "a number as file": (index_of('{"metadata": {}, "weight_map": {"fc.weight": 3}}'), "index of weights names 3"),
    "an index of nothing": (index_of('{"metadata": {}, "weight_map": {}}'), rf"its {INDEX} names no file"),
    "a pickled adapter": (adapter, r"there is no '.*adapter_model\.safetensors'"),
    "weights elsewhere": (
        configured(transformers_weights="../w.safetensors"),
        "must reference a file inside",
    ),
    "code for attention": (configured(_attn_implementation="someone/kernel"), "names code of the Hub.*someone/kernel"),
    "other code for attention": (configured(attn_implementation="someone/kernel"), "names code of the Hub"),
    "an unknown dtype": (configured(dtype="load"), "`dtype` must be a type of torch such as 'bfloat16', got 'load'"),
    "an integer dtype": (configured(dtype="int8"), "not a floating-point dtype"),
    "an unknown rotation": (configured(rope_parameters={"rope_type": "x"}), "must have a `rope_type` out of .*'x'"),
    "a word for a number": (configured(block_size="8"), "'block_size' expected int, got str"),
    "nothing for a number": (configured(hidden_size=None), "'hidden_size' expected int, got NoneType"),
    "a word for a list": (configured(state_layer_ids="abc"), "'state_layer_ids' with value 'abc'"),
    "half a configuration": (
        lambda folder: (folder / "config.json").write_text('{"a'),
        r"config\.json' is not a valid",
    ),
    "bytes as configuration": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"),
        "is not a valid JSON",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_wrong_with_a_folder_is_one_sentence(folder, fault):
    apply, message = BROKEN[fault]
    apply(folder)
    for loader in LOADERS:
        with pytest.raises((ValueError, RuntimeError, OSError, StrictDataclassError), match=message):
            loader.from_pretrained(folder)
    assert not mark(folder).exists()


@pytest.mark.parametrize("fault", ["half a file", "nan", "integers", "only pickles", "a path upwards"])
def test_asking_for_loading_info_or_other_shapes_does_not_let_it_through(folder, fault):
    apply, message = BROKEN[fault]
    apply(folder)
    for options in ({"output_loading_info": True}, {"ignore_mismatched_sizes": True}, {"weights_only": False}):
        with pytest.raises(RuntimeError, match=message):
            AutoModel.from_pretrained(folder, **options)
    assert not mark(folder).exists()


def unsafe(folder):
    (folder / "ready.py").write_text(f"import os\nos.mkdir({str(mark(folder))!r})\n")
    pickled(folder)
    pickled(folder, "training_args.bin")


def linked(folder):
    (folder / WEIGHTS).rename(folder.parent / "weights")
    (folder / WEIGHTS).symlink_to(folder.parent / "weights")


HARMLESS = {
    "code and pickles beside the weights": unsafe,
    "a link": linked,  # as in the cache of the Hub: what it leads to must be whole safetensors all the same
    "the name of a base model in front": in_front(lambda tensors: None),
    "one shard": indexed("model-1.safetensors", "model-1.safetensors"),
    "float64": in_type(torch.float64),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_what_is_harmless_is_loaded_and_not_run(whole, folder, what):
    HARMLESS[what](folder)
    for loader in LOADERS:
        loaded = loader.from_pretrained(folder)
        for name, value in load_file(whole / WEIGHTS).items():
            assert torch.equal(loaded.state_dict()[name], value)
    assert not mark(folder).exists()


def test_a_narrow_dtype_that_overflows_is_said(folder):
    set_value("fc.weight", 1e30)(folder)
    assert AutoModel.from_pretrained(folder).dtype == torch.float32
    with pytest.raises(RuntimeError, match="float16 is too narrow"):
        AutoModel.from_pretrained(folder, dtype=torch.float16)


def test_pickles_cannot_be_asked_for(folder):
    with pytest.raises(ValueError, match="got `use_safetensors=False`"):
        AutoModel.from_pretrained(folder, use_safetensors=False)


def as_on_the_hub(folder, cache):
    """The cache that downloading the folder as `someone/drafter` leaves."""
    repository, commit = cache / "models--someone--drafter", hashlib.sha1(b"a commit").hexdigest()
    for name in ("refs", "blobs", f"snapshots/{commit}"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for number, file in enumerate(path for path in folder.iterdir() if path.is_file()):
        shutil.copy(file, repository / "blobs" / str(number))
        (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/{number}")
    return {"cache_dir": cache, "local_files_only": True}


@pytest.mark.parametrize(
    "fault", ["half a file", "only pickles", "nan", "another shape", "a list as index", "a pickle as a shard"]
)
def test_a_repository_of_the_hub_is_looked_at_alike(folder, tmp_path, fault):
    apply, message = BROKEN[fault]
    whole = as_on_the_hub(folder, tmp_path / "whole")
    assert AutoModel.from_pretrained("someone/drafter", **whole).config.block_size == 6
    apply(folder)
    broken = as_on_the_hub(folder, tmp_path / "broken")
    with pytest.raises(RuntimeError, match=f"the drafter in 'someone/drafter' cannot be loaded: .*{message}"):
        AutoModel.from_pretrained("someone/drafter", **broken)
    assert not mark(folder).exists()


def test_a_name_that_is_nowhere_is_left_to_transformers(tmp_path):
    for name in ("someone/nothing", str(tmp_path / "nothing")):
        with pytest.raises(OSError, match="connect|nothing"):
            ReadyDrafterModel.from_pretrained(name, local_files_only=True)


@pytest.mark.parametrize("fault", ["half a file", "only pickles", "a pickle elsewhere"])
def test_targets_of_the_command_line_are_of_safetensors_too(tmp_path, capsys, fault):
    target = Path(shutil.copytree(ready_hf.tiny_target_path(), tmp_path / "target"))
    BROKEN[fault][0](target)
    assert main(["demo", "--target", str(target)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(target) in said
    assert not mark(target).exists()


def test_a_target_of_nan_is_said_when_it_decodes():
    target = copy.deepcopy(trained_target())
    prompt = random_prompt(8, vocab_size=500)
    drafter = drafter_for(target)
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight * float("nan"))
    with pytest.raises(RuntimeError, match="the target's scores of token 8 are not a number"):
        target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafter)


def test_whoever_asks_is_told_of_every_name(folder):
    """Also where nothing of the drafter is there, as transformers' own model tests want it."""
    save_file({"tensor": torch.tensor([1, 2])}, folder / WEIGHTS, metadata={"format": "pt"})
    model, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert set(info["missing_keys"]) == set(model.state_dict())
    assert set(info["unexpected_keys"]) == {"tensor"}
    with pytest.raises(RuntimeError, match="tensor of type I64"):
        AutoModel.from_pretrained(folder)
