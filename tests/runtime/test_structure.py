"""Nested structures: taken apart and put together again."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from shardwright.runtime import structure


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Item:
    a: Any
    b: Any = None
    c: Any = dataclasses.field(init=False, default=0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self) -> None:
        raise AssertionError("rebuilding does not run the constructor")


def slotted(left: Any) -> Slotted:
    made = Slotted.__new__(Slotted)
    made.left = left
    return made


def item(a: Any) -> Item:
    made = Item(a, [a])
    made.c = 5
    return made


X = torch.arange(3)

CASES: list[tuple[Any, list[str]]] = [
    (X, [""]),
    ([X, (1, {"k": X})], ["0", "1.0", "1.1.k"]),
    (Point(X, None), ["x", "y"]),
    (item(X), ["a", "b.0", "c"]),
    (Frozen(X), ["a"]),
    (slotted(X), ["left"]),
    (collections.OrderedDict(b=X, a=1), ["b", "a"]),
    (transformers.modeling_outputs.CausalLMOutput(loss=X, logits=X), ["loss", "logits"]),
    (torch.Size([1, 2]), [""]),
    (torch.sort(X), ["0", "1"]),
    (np.int64(3), [""]),
    ({"sizes": np.arange(3), "dates": collections.deque([1])}, ["sizes", "dates"]),
    (types.SimpleNamespace(x=X), ["x"]),
    ([], []),
]


@pytest.mark.parametrize(("obj", "paths"), CASES, ids=lambda case: type(case).__name__)
def test_round_trip(obj: Any, paths: list[str]) -> None:
    assert list(structure.flatten(obj)) == paths
    copy = structure.map_leaves(obj, lambda path, leaf: leaf)
    assert type(copy) is type(obj)
    assert list(structure.flatten(copy)) == paths
    for path, leaf in structure.flatten(obj).items():
        assert structure.flatten(copy)[path] is leaf


def test_paths_under_a_name() -> None:
    assert list(structure.flatten({"k": [X]}, "batch")) == ["batch.k.0"]
    seen: list[str] = []
    structure.map_leaves([X, 1], lambda path, leaf: seen.append(path), "args")
    assert seen == ["args.0", "args.1"]


def test_import_paths() -> None:
    path = structure.type_path(transformers.DynamicCache())
    assert path == "transformers.cache_utils:DynamicCache"
    assert structure.import_type(path) is transformers.DynamicCache
    cache = structure.rebuild(
        path, {"layers": [], "offloading": False, "layer_class_to_replicate": None}
    )
    assert isinstance(cache, transformers.DynamicCache) and len(cache) == 0


def test_a_cache_survives() -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    copy = structure.map_leaves(
        cache, lambda path, leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf
    )
    assert copy.get_seq_length() == 3 and torch.equal(
        copy.layers[0].keys, torch.full((1, 2, 3, 4), 2.0)
    )
    assert cache.layers[0].keys.max() == 1
