"""What a cache holds beside what transformers' own classes put there: somebody's model may keep a state there."""

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin


def unknown_tensors(cache: Cache) -> list[str]:
    """Names of attributes that hold floating-point tensors which cutting the cache back leaves as they are.

    Known are those that a method of transformers' own class mentions, or of a class of keys and values that has a
    `crop` of its own.
    """
    found = [f"`{name}`" for name in _unknown(cache)]
    for index, layer in enumerate(cache.layers):
        found += [f"`{name}` of layer {index}" for name in _unknown(layer)]
    return found


def _unknown(holder: Any) -> Iterator[str]:
    known = _mentioned(type(holder))  # type: ignore[arg-type]
    return (name for name, value in vars(holder).items() if name not in known and _holds_tensor(value))


def _holds_tensor(value: Any, within: tuple[int, ...] = ()) -> bool:
    if id(value) in within:  # notes may go round in circles
        return False
    if isinstance(value, dict | list | tuple):
        inner = value.values() if isinstance(value, dict) else value
        return any(_holds_tensor(x, (*within, id(value))) for x in inner)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@functools.cache
def _mentioned(holder_class: type) -> frozenset[str]:
    # a rollback calls the `crop` of layers of keys and values, and rebuilds recurrent states by itself
    is_recurrent = issubclass(holder_class, LinearAttentionCacheLayerMixin)
    is_cut = issubclass(holder_class, CacheLayerMixin) and not is_recurrent
    classes = holder_class.__mro__
    trusted = (c for c in classes if c.__module__.startswith("transformers.") or (is_cut and "crop" in vars(c)))
    methods = (inspect.unwrap(x) for c in trusted for x in vars(c).values() if isinstance(x, FunctionType))
    return frozenset(name for method in methods for name in method.__code__.co_names)
