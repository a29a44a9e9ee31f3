"""Layers that choose keys by an index keep more than keys and values, which a rollback must cut and put back too."""

import pytest
import torch
import transformers

from families import MORE_FAMILIES
from ready_hf import FeatureCapture, Rollback, UnsupportedTargetError
from ready_hf.target_shape import target_shape
from support import cache_of, feed, fresh_states, image_target, random_prompt, states, tiny_target, worst_error


PROMPT, LENGTH = 21, 8
every_family = pytest.mark.parametrize("family", ["qwen4_exp", "glm5_next"])


def target(family):
    return image_target(family) if family == "glm5_next" else tiny_target(family)


def started(family, batch=1):
    """A model, tokens, a cache that has seen the first of them, and its rollback."""
    model, ids = target(family), random_prompt(60, batch)
    cache = cache_of(feed(model, None, ids, 0, PROMPT))
    return model, ids, cache, Rollback(cache)


@pytest.mark.lossless
@every_family
@pytest.mark.parametrize("keep", [1, 5, 8])
def test_index_keys_and_positions_are_those_of_the_kept_tokens(family, keep):
    model, ids, cache, rollback = started(family)
    with rollback.recording(LENGTH):
        feed(model, cache, ids, PROMPT, PROMPT + LENGTH)
    rollback.commit(keep)
    found = states(cache)
    assert any("indexer_keys" in name for name in found)
    positions = getattr(cache, "position_ids", None)  # of qwen4_exp in transformers 5.17
    assert positions is None or positions.shape[-1] == PROMPT + keep
    assert worst_error(found, fresh_states(model, ids[:, : PROMPT + keep])) <= 1e-5


@pytest.mark.lossless
@every_family
@pytest.mark.parametrize("method", ["update_conv_state", "update_indexer", "update"])
def test_a_forward_that_fails_leaves_the_cache_as_it_was(family, method, monkeypatch):
    model, ids, cache, rollback = started(family)
    before, positions = states(cache), getattr(cache, "position_ids", None)
    original = getattr(cache, method)

    def failing(*args, **kwargs):
        original(*args, **kwargs)
        raise RuntimeError("out of memory")  # keys may be there and index keys not, or the other way round

    monkeypatch.setattr(cache, method, failing)
    with pytest.raises(RuntimeError, match="out of memory"), rollback.recording(LENGTH):
        feed(model, cache, ids, PROMPT, PROMPT + LENGTH)
    after = states(cache)
    assert after.keys() == before.keys()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []
    assert positions is None or torch.equal(cache.position_ids, positions)


@every_family
def test_rows_cannot_keep_different_numbers_of_tokens(family):
    model, ids, cache, rollback = started(family, batch=2)
    with rollback.recording(LENGTH):
        feed(model, cache, ids, PROMPT, PROMPT + LENGTH)
    with pytest.raises(UnsupportedTargetError, match=r"Indexed.*different number of tokens per row"):
        rollback.commit(torch.tensor([2, 3]))


@every_family
def test_features_are_the_mean_of_the_streams_that_go_from_layer_to_layer(family):
    model, ids = target(family), random_prompt(9)
    seen = []
    handle = model.get_decoder().layers[1].register_forward_hook(lambda *args: seen.append(args[2]))
    with FeatureCapture(model, [1]) as capture, torch.no_grad():
        model(ids)
        features = capture.take()[1]
    handle.remove()
    output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert output.numel() == 2 * features.numel()
    assert features.shape == (1, 9, 64)
    first, second = output.flatten(2).chunk(2, dim=-1)
    assert torch.allclose(features, (first + second) / 2, atol=1e-6)


def test_a_configuration_that_only_an_image_model_has_gives_its_shape():
    model = image_target("glm5_next")
    assert target_shape(model.config) == target_shape(model)
    assert target_shape(model).num_layers == len(MORE_FAMILIES["glm5_next"]().layer_types)
    assert transformers.Glm5NextConfig is type(model.config)
