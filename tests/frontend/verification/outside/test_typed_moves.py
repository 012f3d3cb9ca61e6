"""The typing rules of adapters say what the adapters compute: held by ``spmd_types.rulecheck``."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spmd_types.rulecheck import rulecheck
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor

from shardwright.frontend.verification.outside import typed_moves
from shardwright.runtime import adapters
from shardwright.runtime.layout import Cut, Mesh
from shardwright.runtime.ranks.groups import AxisGroup, RankMesh
from shardwright.runtime.ranks.threads import run_ranks

Run = Callable[[Tensor, AxisGroup], Tensor]


def on_ranks(x: Tensor, run: Run) -> Tensor:
    """An adapter on threads, on the local tensors of all ranks; one rank alone changes nothing."""
    if not isinstance(x, LocalTensor):
        return x.clone()
    local = dict(x._local_tensors)

    def on_rank(rank: int) -> Tensor:
        return run(local[rank], RankMesh(Mesh((("tp", len(local)),))).axis("tp"))

    return LocalTensor(dict(enumerate(run_ranks(len(local), on_rank))))


def kernel(run: Run, rule: Callable[..., Any], arguments: dict[str, Any]) -> type:
    """A function of the whole mesh, with the rule of an adapter."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
            return on_ranks(x, run)

        @staticmethod
        def spmd_typecheck(*, x: Tensor, group: Any) -> Any:
            return rule(x=x, axis="tp", **arguments)

    return Kernel


@pytest.fixture(autouse=True)
def noise_of_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's stateless random numbers, which ``rulecheck`` prefers, have no CPU kernel."""
    monkeypatch.setitem(sys.modules, "torch.func._random", None)
    monkeypatch.delattr(torch.func, "_random", raising=False)


HALVES = {"dim": 0}
CASES: dict[str, tuple[Run, Callable[..., Any], dict[str, Any]]] = {
    "all_gather": (
        lambda x, axis: adapters.all_gather(x, axis, 0),
        typed_moves.all_gather,
        {**HALVES, "backward": "slice"},
    ),
    "narrow": (
        lambda x, axis: adapters.narrow(x, axis, 0),
        typed_moves.narrow,
        {**HALVES, "backward": "all_gather"},
    ),
    "reduce_scatter": (
        lambda x, axis: adapters.reduce_scatter(x, axis, 0),
        typed_moves.reduce_scatter,
        HALVES,
    ),
    "all_reduce": (
        adapters.all_reduce,
        typed_moves.all_reduce,
        {"backward": "identity"},
    ),
    "grad_all_reduce": (adapters.grad_all_reduce, typed_moves.grad_all_reduce, {}),
    "keep_one": (adapters.keep_one, typed_moves.keep_one, {"backward": "identity"}),
    "grad_keep_one": (adapters.grad_keep_one, typed_moves.grad_keep_one, {}),
    "pad": (lambda x, axis: adapters.pad(x, axis, 0), typed_moves.pad, HALVES),
    "all_to_all": (
        lambda x, axis: adapters.all_to_all(x, axis, 0, Cut((4,)), 1, Cut((6,))),
        typed_moves.all_to_all,
        {**HALVES, "to_dim": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rule_of_an_adapter(name: str) -> None:
    report = rulecheck(kernel(*CASES[name]), (torch.randn(4, 6), "tp"), local_tensor_mode=True)
    assert report is not None and report.checked and report.rejected


def test_a_wrong_rule_is_seen() -> None:
    run, _, _ = CASES["all_reduce"]
    wrong = kernel(run, typed_moves.grad_all_reduce, {})
    with pytest.raises(AssertionError, match="differs from the reference"):
        rulecheck(wrong, (torch.randn(4, 6), "tp"), local_tensor_mode=True)
