"""Feature capture: what it hands over, for whom, and that it leaves nothing behind."""

import copy
import threading

import pytest
import torch

from ready_hf import FeatureCapture
from ready_hf.target_features import decoder_layers, matrix_shape
from support import FAMILIES, cache_of, feed, random_prompt, tiny_target


every_family = pytest.mark.parametrize("family", FAMILIES)


def hook_count(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def layer_outputs(model, ids: torch.Tensor) -> list[torch.Tensor]:
    """The output of every decoder layer, by a hook of our own."""
    outputs = []
    handles = [
        layer.register_forward_hook(lambda m, a, out: outputs.append(out[0] if isinstance(out, tuple) else out))
        for layer in decoder_layers(model)
    ]
    try:
        feed(model, None, ids, 0, ids.shape[1])
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@every_family
def test_features_are_the_outputs_of_the_chosen_layers(family):
    model, ids = tiny_target(family), random_prompt(7, batch=2)
    want = layer_outputs(model, ids)
    with FeatureCapture(model, [3, 0]) as capture:
        feed(model, None, ids, 0, 7)
        got = capture.take()
    assert list(got) == [3, 0]
    assert all(features.shape == (2, 7, 64) for features in got.values())
    assert all(torch.equal(features, want[index]) for index, features in got.items())


def test_features_of_several_forwards_follow_each_other_until_taken():
    model, ids = tiny_target("qwen3_5"), random_prompt(9)
    (want,) = [layer_outputs(model, ids)[2]]
    with FeatureCapture(model, [2]) as capture:
        cache = cache_of(feed(model, None, ids, 0, 4))
        feed(model, cache, ids, 4, 6)
        first = capture.take()[2]
        assert capture.take() == {}
        feed(model, cache, ids, 6, 9)
        last = capture.take(length=2)[2]
    torch.testing.assert_close(first, want[:, :6])
    torch.testing.assert_close(last, want[:, 6:8])


def test_a_layer_that_is_named_twice_is_captured_once():
    model, ids = tiny_target("qwen3_5"), random_prompt(5)
    with FeatureCapture(model, [1, 1]) as capture:
        feed(model, None, ids, 0, 5)
        assert {index: x.shape for index, x in capture.take().items()} == {1: (1, 5, 64)}


def test_forwards_of_other_threads_are_not_captured():
    model, ids = tiny_target("qwen3_5"), random_prompt(5)
    with FeatureCapture(model, [1]) as capture:
        other = threading.Thread(target=feed, args=(model, None, ids, 0, 5))
        other.start()
        other.join()
        assert capture.take() == {}
        feed(model, None, ids, 0, 3)
        assert capture.take()[1].shape == (1, 3, 64)


def test_layers_are_read_where_they_are_now():
    """Layers may be cut off after they were read, or belong to a shorter model as well, at another place."""
    model, ids = copy.deepcopy(tiny_target("qwen3_5")), random_prompt(5)
    whole = layer_outputs(model, ids)
    with FeatureCapture(model, [1, 2]) as capture:
        feed(model, None, ids, 0, 5)
        capture.take()
        assert hook_count(model) > hook_count(tiny_target("qwen3_5"))
    model.model.layers = torch.nn.ModuleList([model.model.layers[2], model.model.layers[0]])
    own = layer_outputs(model, ids)
    with FeatureCapture(model, [0, 1]) as capture:
        feed(model, None, ids, 0, 5)
        found = capture.take()
    assert [torch.equal(found[i], own[i]) for i in (0, 1)] == [True, True]
    assert not torch.equal(found[0], whole[2])


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_hooks_are_removed_on_close_and_after_an_exception(error):
    model = copy.deepcopy(tiny_target("qwen3_5"))
    before = hook_count(model)
    capture = FeatureCapture(model, [0, 1])
    assert hook_count(model) == before + 2
    if error is None:
        capture.close()
    else:
        with pytest.raises(error), capture:
            raise error
    assert hook_count(model) == before
    capture.close()  # harmless
    feed(model, None, random_prompt(3), 0, 3)
    assert capture.take() == {}


@pytest.mark.parametrize("wrong", [[4], [-1], [0, 7]])
def test_layers_that_do_not_exist_are_refused_with_the_allowed_range(wrong):
    model = copy.deepcopy(tiny_target("qwen3_5"))
    with pytest.raises(ValueError, match=r"Qwen3_5ForCausalLM: allowed are 0\.\.3"):
        FeatureCapture(model, wrong)
    assert hook_count(model) == 0


def test_the_size_of_a_head_is_that_of_its_weight():
    """Whoever gives a head more rows by another weight need not touch `out_features`."""
    head = torch.nn.Linear(6, 4, bias=False)
    head.weight = torch.nn.Parameter(torch.zeros(9, 6))
    assert matrix_shape(head) == (9, 6)
    assert matrix_shape(torch.nn.Embedding(5, 3)) == (5, 3)
