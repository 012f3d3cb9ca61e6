"""Scopes are modules whose children are ordinary attributes as well."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune  # noqa: F401  (torch.nn.utils does not import it)

from shardwright.runtime.errors import UsageError
from shardwright.runtime.module.scope import Scope, place
from shardwright.runtime.module.wrappers import watch_wrappers


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


def replace_child(root: Scope) -> None:
    root.layers = nn.Linear(2, 2)


def replace_parameter(root: Scope) -> None:
    root.layers[1].up.weight = nn.Parameter(torch.ones(2))


def parametrized(root: Scope) -> None:
    torch.nn.utils.parametrize.register_parametrization(root.layers[1].up, "weight", nn.Identity())


CHANGES = {
    "submodule 'layers'": replace_child,
    "parameter 'weight'": replace_parameter,
    "parameter 'weight_orig'": lambda root: torch.nn.utils.prune.l1_unstructured(
        root.layers[1].up, "weight", 1
    ),
    "parameter 'weight_g'": lambda root: torch.nn.utils.weight_norm(root.layers[1].up),
    "buffer 'mask'": lambda root: root.layers.register_buffer("mask", torch.ones(2)),
    "submodule 'head'": lambda root: root.layers.add_module("head", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_no_other_tensors_are_taken_in(what: str) -> None:
    """And none is taken out on the way to the refusal."""
    watch_wrappers()
    root = tree()
    before = list(root.state_dict())
    with pytest.raises(UsageError) as error:
        CHANGES[what](root)
    assert list(root.state_dict()) == before
    title, why, hint = str(error.value).split("\n")
    assert title.endswith(f" cannot be given a {what}")
    assert title.startswith(("submodule 'layers", "the parallel module Scope "))
    assert why == (
        "  why:   a parallel module has the parameters and buffers that its program was made "
        "for, each rank its pieces"
    )
    assert hint.startswith("  try:   change the original module before parallelize; ")


@pytest.mark.parametrize(
    ("take", "what"),
    [
        (lambda root: delattr(root.layers[1].up, "weight"), "parameter 'weight'"),
        (lambda root: delattr(root.layers, "0"), "submodule '0'"),
        (lambda root: setattr(root, "layers", None), "submodule 'layers'"),
        (parametrized, "parameter 'weight'"),
    ],
)
def test_nothing_is_taken_out(take: Callable[[Scope], None], what: str) -> None:
    """Neither by hand nor on the way to a refusal, which leaves the module as it was."""
    root = tree()
    before = list(root.state_dict())
    with pytest.raises(UsageError, match=f"cannot lose its {what}\n"):
        take(root)
    assert list(root.state_dict()) == before


def test_what_is_put_back_is_no_change() -> None:
    root = tree()
    with torch.no_grad():
        root.layers[1].up.weight += 1
    assert root.layers[1].up.weight.sum() == 2


HOOKS = (
    "forward_pre_hook",
    "forward_hook",
    "full_backward_pre_hook",
    "full_backward_hook",
    "backward_hook",
)


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_that_would_never_run(kind: str) -> None:
    with pytest.raises(UsageError) as error:
        getattr(tree().layers[0], f"register_{kind}")(print)
    what = "a " + kind.replace("full_", "").replace("_hook", " hook").replace(
        "forward_pre ", "forward pre-"
    )
    assert str(error.value).startswith(
        f"{what.replace('backward_pre ', 'backward pre-')} on submodule 'layers.0' of a "
        "parallel module would never run\n"
    )


def test_submodules_are_not_called_and_have_no_mode_of_their_own() -> None:
    up = tree().layers[0].up
    with pytest.raises(
        UsageError, match="^submodule 'layers.0.up' of a parallel module cannot be called\n"
    ):
        up(torch.zeros(2))
    with pytest.raises(
        UsageError,
        match="^submodule 'layers.0.up' of a parallel module cannot be set to evaluation by itself",
    ):
        up.eval()
    assert up.train() is up
    with pytest.raises(
        UsageError,
        match="another forward on submodule 'layers.0.up' of a parallel module would never run",
    ):
        up.forward = print


def test_settings_that_nobody_reads_are_warned_of() -> None:
    with pytest.warns(UserWarning) as caught:
        tree().layers[0].momentum = 0.5
    assert [str(warning.message) for warning in caught] == [
        "layers.0.momentum has no effect on a parallel module\n"
        "  why:   the program was made with the settings that the submodules of the original had\n"
        "  try:   change the original module, and call parallelize again"
    ]
    assert caught[0].filename == __file__


def test_dtypes_stay() -> None:
    with pytest.raises(UsageError) as error:
        tree().layers.to(torch.bfloat16)
    assert str(error.value) == (
        "submodule 'layers' of a parallel module cannot be converted from float32 to bfloat16\n"
        "  why:   its program was made for these dtypes: casts, buckets of gradients and "
        "inputs depend on them\n"
        "  try:   convert the original before parallelize or initialize, "
        "module.to(torch.bfloat16); parallelize also takes module_dtype=torch.bfloat16"
    )
    assert tree().float().to("meta").layers[0].up.bias.is_meta


def test_a_copy_has_children_of_its_own() -> None:
    root = tree()
    other = copy.deepcopy(root)
    assert other.layers is other._modules["layers"]
    with torch.no_grad():
        other.layers[1].up.weight += 1
    assert root.layers[1].up.weight.sum() == 0 and other["layers.1.up.weight"].sum() == 2
