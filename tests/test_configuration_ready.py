"""What a configuration of a drafter refuses, and the words it does so with."""

import copy
import json

import pytest
from huggingface_hub.errors import StrictDataclassError

from ready_hf import ReadyDrafterConfig
from ready_hf.configuration_ready import choose_mask_token
from support import drafter_for, tiny_target, trained_tokenizer


G, VOCABULARY = 4, 61
RIGHT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "block_size": G,
    "state_layer_ids": [0, 2],
    "state_shape": [2, 4, 6],
    "reader_rank": 5,
    "reader_query_rank": 3,
}
WRONG_CONFIGS = [
    ({"block_size": 1}, "`block_size` must be 2 to 31, got 1"),
    ({"block_size": 32}, "`block_size` must be 2 to 31, got 32"),
    ({"hidden_size": 0, "head_dim": 8}, "`hidden_size` must be at least 1, got 0"),
    ({"num_hidden_layers": 0}, "`num_hidden_layers` must be at least 1, got 0"),
    ({"vocab_size": 0}, "`vocab_size` must be at least 1, got 0"),
    ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads` \(3\)"),
    ({"num_attention_heads": 0}, "`num_attention_heads` must be at least 1, got 0"),
    ({"num_key_value_heads": 0}, "`num_key_value_heads` must be at least 1, got 0"),
    ({"head_dim": 0}, "`head_dim` must be at least 1, got 0"),
    ({"hidden_act": "foo"}, "`hidden_act` must be an activation that transformers knows, got 'foo'"),
    ({"head_dim": 7}, "`head_dim` must be even for rotary embeddings, got 7"),
    ({"mask_token_id": VOCABULARY}, f"`mask_token_id` must be 0 to {VOCABULARY - 1}, got {VOCABULARY}"),
    ({"mask_token_id": -1}, f"`mask_token_id` must be 0 to {VOCABULARY - 1}, got -1"),
    ({"confidence_threshold": 1.0}, r"`confidence_threshold` must be in \[0, 1\), got 1.0"),
    ({"confidence_threshold": 0.5, "enable_confidence_head": False}, "needs `enable_confidence_head=True`"),
    ({"markov_rank": -1}, r"`markov_rank` must be 0 \(no sequential head\) or more, got -1"),
    ({"markov_head_type": "lstm"}, "lstm"),
    ({"layer_types": ["full_attention"]}, r"`layer_types` must have 2 entries \(`num_hidden_layers`\), got 1"),
    ({"layer_types": ["full_attention", "linear_attention"]}, r"out of \['full_attention', 'sliding_attention'\]"),
    ({"sliding_window": G - 1}, rf"`sliding_window` must be at least `block_size` \({G}\) .*, got {G - 1}"),
    ({"layer_types": ["sliding_attention"] * 2}, rf"`sliding_window` must be at least .*\({G}\) .*, got None"),
    ({"target_layer_ids": []}, r"`target_layer_ids` must be different decoder layers .*, 0 to 3, .*; got \[\]"),
    ({"target_layer_ids": [1, 1]}, r"`target_layer_ids` must be different .*; got \[1, 1\]"),
    ({"target_layer_ids": [1, 4]}, r"`target_layer_ids` .* 0 to 3, at least one; got \[1, 4\]"),
    ({"state_layer_ids": [-1]}, r"`state_layer_ids` .* 0 to 3, at least one; got \[-1\]"),
    ({"state_shape": None}, r"`state_shape` must be \[H, K, V\] when states are read, got None"),
    ({"state_shape": [2, 4]}, r"`state_shape` must be \[H, K, V\] when states are read, got \[2, 4\]"),
    ({"state_shape": [2, 0, 4]}, r"`state_shape` must be .*, got \[2, 0, 4\]"),
    ({"reader_rank": 0}, "`reader_rank` must be at least 1, got 0"),
    ({"reader_query_rank": 0}, "`reader_query_rank` must be at least 1, got 0"),
    ({"reader_gate_rank": 0}, "`reader_gate_rank` must be at least 1, got 0"),
    ({"reader_output_rank": -1}, "`reader_output_rank` must be at least 1, got -1"),
    ({"reader_gate": True, "reader_gate_inputs": []}, "`reader_gate_inputs` must be out of .*, at least one"),
    ({"reader_gate_inputs": ["slot"]}, "`reader_gate_inputs` must be out of .*got \\['slot'\\]"),
    ({"reader_query_act": "bump"}, "`reader_query_act` must be an activation .* got 'bump'"),
    ({"reader_query_act": "silu", "reader_query_rank": None}, "got 'silu' and rank None"),
    ({"reader_conditioning": ["anchor", "moon"]}, r"out of \['anchor', 'context', 'slot'\], got \['anchor', 'moon'\]"),
    ({"reader_conditioning": ["slot"]}, '`reader_injection` must be "head", or "last" .* got \'layers\' and 2 layers'),
    (
        {"reader_conditioning": ["slot"], "reader_injection": "last", "num_hidden_layers": 1},
        "hidden states that know their slot: .*; got 'last' and 1 layers",
    ),
    ({"reader_num_queries": 0}, "`reader_num_queries` must be at least 1, got 0"),
    ({"reader_projection": "linear"}, "linear"),
    ({"reader_injection": "output"}, "output"),
    ({"reader_normalization": "layer"}, "layer"),
    ({"hidden_size": "32"}, "hidden_size.*expected int, got str"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_CONFIGS, ids=lambda value: str(value)[:40])
def test_wrong_configurations_are_refused(options, message):
    with pytest.raises(StrictDataclassError) as caught:
        ReadyDrafterConfig(**RIGHT | options)
    assert caught.match(f"(?s){message}")


def test_what_is_refused_is_right_otherwise():
    config = ReadyDrafterConfig(**RIGHT)
    assert config.has_reader
    assert config.layer_types == ["full_attention", "full_attention"]
    assert ReadyDrafterConfig(**RIGHT, sliding_window=G).layer_types == ["sliding_attention", "sliding_attention"]


def test_a_reader_that_is_wanted_and_not_wanted_is_refused():
    with pytest.raises(ValueError, match=r"`reader=False` .* `state_layer_ids=\[0\]`"):
        ReadyDrafterConfig.for_target(tiny_target("qwen3_5"), reader=False, state_layer_ids=[0])


def test_a_drafter_is_no_target():
    with pytest.raises(TypeError, match="ReadyDrafterModel, which is a drafter: are the two swapped"):
        ReadyDrafterConfig.for_target(drafter_for(tiny_target("qwen3_5")))


@pytest.mark.parametrize(("special", "why"), [([1], "; its mask token 1 is the target's"), ([], "")])
def test_no_row_is_free_for_the_mask_slots(special, why):
    tokenizer = copy.deepcopy(trained_tokenizer())
    tokenizer.mask_token = tokenizer.convert_ids_to_tokens(1) if special else None
    with pytest.raises(ValueError, match=f"no row is free for the mask slots{why}.*`mask_token_id=`"):
        choose_mask_token(len(tokenizer), special, tokenizer)


def test_a_misspelt_field_is_named(caplog):
    with caplog.at_level("WARNING", "ready_hf.configuration_ready"):
        ReadyDrafterConfig(block_sise=4)
    assert "has no field 'block_sise'; did you mean 'block_size'?" in caplog.text
    caplog.clear()
    ReadyDrafterConfig.from_dict(ReadyDrafterConfig().to_dict() | {"a_later_version_knows_this": 1})
    assert caplog.text == ""


@pytest.mark.parametrize("heads", [2, 64])
def test_bilinear_maps_give_eight_numbers_per_head(heads):
    """However many heads there are; what is given counts."""
    config = tiny_target("qwen3_5").config.get_text_config()
    sizes = {"hidden_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": heads}
    target = type(config)(**config.to_dict() | sizes)
    ready = ReadyDrafterConfig.for_target(target, state_layer_ids=[0, 1])
    assert (ready.reader_projection, ready.reader_rank) == ("bilinear", 8)
    assert ReadyDrafterConfig.for_target(target, reader_rank=5).reader_rank == 5
    assert ReadyDrafterConfig.for_target(target, reader_projection="full").reader_rank == 64


def test_a_rank_that_is_not_given_is_that_of_the_maps():
    assert ReadyDrafterConfig().reader_rank == 8
    assert ReadyDrafterConfig(reader_projection="full").reader_rank == 64  # as before bilinear maps were the default
    assert ReadyDrafterConfig.from_dict({"reader_projection": "full", "reader_rank": 3}).reader_rank == 3


def test_a_gate_that_was_saved_without_inputs_has_those_of_its_time(tmp_path):
    """The field is younger than the gate, and its default has changed since."""
    config = drafter_for(tiny_target("qwen3_5"), reader_gate=True, reader_gate_inputs=["anchor"]).config
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    reader = {name for name in vars(config) if name.startswith("reader_")}
    assert reader <= saved.keys()  # so that a default may change
    del saved["reader_gate_inputs"]
    path.write_text(json.dumps(saved))
    assert ReadyDrafterConfig.from_pretrained(tmp_path).reader_gate_inputs == ["anchor"]
    assert ReadyDrafterConfig.from_dict({"reader_gate": True}).reader_gate_inputs == ["anchor", "context"]
    newer = saved | {"reader_gate_inputs": ["context"]}
    assert ReadyDrafterConfig.from_dict(newer).reader_gate_inputs == ["context"]
