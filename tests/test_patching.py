"""What patching a target's modeling modules changes, for whom, and that it is undone."""

import contextlib
import copy
import functools
import importlib.util
import inspect
import sys
import threading
import time
import types

import pytest
import torch
from torch import nn

from ready_hf import ensure_patched, target
from ready_hf.target import (
    CPU_ROUTED_FUNCTIONS,
    RECURRENCES,
    _modeling_modules,
    _thread,
    observing_recurrence,
    unpatch,
)
from support import FAMILIES, cache_of, feed, random_prompt, tiny_target, torch_rule


every_family = pytest.mark.parametrize("family", FAMILIES)
every_recurrence = pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "bamba"])


def unpatched_target(family: str):
    """A tiny target, with the modeling modules as transformers made them."""
    model = tiny_target(family)
    unpatch()
    return model


def patchable(model: nn.Module) -> dict[tuple[types.ModuleType, str], object]:
    """The functions of a model's modeling modules that patching concerns."""
    names = [name for r in RECURRENCES for name in (r.block_function, r.step_function)] + list(CPU_ROUTED_FUNCTIONS)
    return {
        (module, name): vars(module)[name]
        for module in _modeling_modules(model)
        for name in names
        if name in vars(module)
    }


@every_recurrence
def test_patching_is_idempotent_and_undone_by_unpatch(family):
    model = unpatched_target(family)
    originals = patchable(model)
    ensure_patched(model)
    once = patchable(model)
    ensure_patched(model)
    ensure_patched(copy.deepcopy(model))  # another model of the same class
    assert patchable(model) == once
    assert all(once[name] is not original for name, original in originals.items())
    unpatch()
    assert all(function is originals[name] for name, function in patchable(model).items())


def test_patching_in_many_threads_at_once_wraps_once(monkeypatch):
    model = unpatched_target("qwen3_5")
    models = [copy.deepcopy(model) for _ in range(8)]
    originals, wrapped, wrap = patchable(model), [], target._wrap
    barrier = threading.Barrier(len(models))

    def slow_wrap(original, *args):
        wrapped.append(original)
        time.sleep(0.002)
        return wrap(original, *args)

    def patch(model):
        barrier.wait()
        ensure_patched(model)

    monkeypatch.setattr(target, "_wrap", slow_wrap)
    threads = [threading.Thread(target=patch, args=(model,)) for model in models]
    _ = [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert len(wrapped) == len(originals)
    unpatch()
    assert all(function is originals[name] for name, function in patchable(model).items())


def test_unpatch_leaves_a_foreign_replacement_alone(monkeypatch):
    model = unpatched_target("qwen3_5")
    module = sys.modules[type(model).__module__]
    originals = patchable(model)
    monkeypatch.setattr(
        module, "torch_chunk_gated_delta_rule", module.torch_chunk_gated_delta_rule
    )  # put back at the end
    ensure_patched(model)

    def foreign(*args, **kwargs):
        raise AssertionError

    module.torch_chunk_gated_delta_rule = foreign
    unpatch()
    assert module.torch_chunk_gated_delta_rule is foreign
    assert module.torch_recurrent_gated_delta_rule is originals[module, "torch_recurrent_gated_delta_rule"]


def test_with_the_kernels_package_the_torch_rule_is_found_too(monkeypatch):
    model, ids = unpatched_target("qwen3_5"), random_prompt(9)
    want = feed(tiny_target("qwen3_5"), None, ids, 0, 9).logits
    unpatch()
    for (module, name), function in patchable(model).items():
        monkeypatch.setattr(module, name, as_the_kernels_package_makes_it(crashing_on_cpu(function)))
    ensure_patched(model)
    assert torch.equal(feed(model, None, ids, 0, 9).logits, want)
    unpatch()


def crashing_on_cpu(function):
    """What stands in a modeling module once a GPU package is installed: a kernel that knows the torch rule."""
    rule = torch_rule(function)

    @functools.wraps(rule)
    def kernel(*args, **kwargs):
        raise RuntimeError("0 active drivers")

    return kernel


def as_the_kernels_package_makes_it(func):
    """A module that calls a function, with the function's signature."""

    class Func(nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    Func.forward.__signature__ = inspect.signature(lambda self: None).replace(
        parameters=[
            *inspect.signature(lambda self: None).parameters.values(),
            *inspect.signature(func).parameters.values(),
        ]
    )
    return Func()


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("fla", "causal_conv1d", "mamba_ssm")),
    reason="without our patch, transformers runs GPU kernels on CPU tensors here",
)
@every_family
def test_a_patched_model_computes_the_same_bits(family):
    model, ids = unpatched_target(family), random_prompt(70)

    def run():
        outputs = feed(model, None, ids, 0, 65)
        step = feed(model, cache_of(outputs), ids, 65, 66)
        return outputs.logits, step.logits, feed(model, cache_of(step), ids, 66, 70).logits

    originals, plain = patchable(model), run()
    ensure_patched(model)
    assert all(function is not originals[name] for name, function in patchable(model).items())
    assert all(torch.equal(got, want) for got, want in zip(run(), plain, strict=True))


def test_an_observer_sees_the_calls_of_its_own_thread_only():
    model, ids, seen = unpatched_target("qwen3_5"), random_prompt(8), []
    ensure_patched(model)

    def observe(call):
        seen.append((threading.get_ident(), call.arguments["value"].shape[1]))
        return call.run()

    with observing_recurrence(observe):
        other = threading.Thread(target=feed, args=(model, None, ids, 0, 7))
        other.start()
        other.join()
        assert seen == []
        outputs = feed(model, None, ids, 0, 5)
        feed(model, cache_of(outputs), ids, 5, 6)  # one token: not a block
    assert seen == [(threading.get_ident(), 5)] * 3
    assert _thread.observer is None


def test_observers_nest_and_are_removed_after_an_exception():
    with observing_recurrence(len):
        with contextlib.suppress(KeyboardInterrupt), observing_recurrence(repr):
            assert _thread.observer is repr
            raise KeyboardInterrupt
        assert _thread.observer is len
    assert _thread.observer is None
