"""Scopes are modules whose children are ordinary attributes as well."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwright.runtime.module.scope import Scope, place


def tree() -> Scope:
    root = Scope()
    for fqn in ("layers.0.up.weight", "layers.0.up.bias", "layers.1.up.weight", "train.weight"):
        place(root, fqn).put_parameter(nn.Parameter(torch.zeros(2)))
    return root


def test_children_are_found_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree()
    monkeypatch.delattr(nn.Module, "__getattr__")
    assert root.layers[0].up is root._modules["layers"]._modules["0"]._modules["up"]


def test_names_that_mean_something_else_are_read_by_index() -> None:
    root = tree()
    assert callable(root.train) and not isinstance(root.train, Scope)
    assert root["train.weight"].shape == (2,)


def test_a_replaced_child_is_the_one_that_is_found() -> None:
    root = tree()
    root.layers = nn.Linear(2, 2)
    assert isinstance(root.layers, nn.Linear)
    assert "layers.weight" in dict(root.named_parameters())


def test_a_copy_has_children_of_its_own() -> None:
    root = tree()
    other = copy.deepcopy(root)
    assert other.layers is other._modules["layers"]
    with torch.no_grad():
        other.layers[1].up.weight += 1
    assert root.layers[1].up.weight.sum() == 0 and other["layers.1.up.weight"].sum() == 2
