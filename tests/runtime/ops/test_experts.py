"""Dispatch, products of groups and combination on threads: a plain loop over experts in float64,
values and gradients, whatever the ranks hold and wherever a router sends tokens.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from op_ranks import on_mesh
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.experts import combine, dispatch, grouped_linear, within_capacity
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime import ops as operators
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InputError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.ops import exchange_places, experts, grouped_products, token_messages
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.groups import AxisGroup, RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.started import arrived, start

HIDDEN, INNER = 4, 3
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Layer:
    """A layer of experts, and what a router chose. ``sizes``: its tokens as ``outer x size x
    inner``, of which the ranks cut the middle. Weights of experts are ``[experts, ...]``.
    """

    sizes: tuple[int, int, int]
    num_experts: int
    chosen: Tensor
    operands: dict[str, Tensor]
    gradient: Tensor

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, sizes: Any = None) -> Layer:
        """A layer of random weights and tokens for a choice ``[tokens, top_k]``."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        num_tokens = chosen.shape[0]
        operands = {
            "x": random(num_tokens, HIDDEN),
            "weights": random(*chosen.shape),
            "up": random(num_experts, INNER, HIDDEN),
            "bias": random(num_experts, INNER),
            "down": random(num_experts, INNER, HIDDEN),  # transposed: [in, out]
        }
        gradient = random(num_tokens, HIDDEN)
        return cls(sizes or (1, num_tokens, 1), num_experts, chosen, operands, gradient)


def by_a_loop(layer: Layer) -> tuple[Tensor, dict[str, Tensor]]:
    """What one device computes: the output and the gradients of all operands."""
    x, weights, up, bias, down = (
        given := {name: w.clone().requires_grad_() for name, w in layer.operands.items()}
    ).values()
    y = torch.zeros_like(x)
    for expert in range(layer.num_experts):
        token, choice = (layer.chosen == expert).nonzero(as_tuple=True)
        inner = F.silu(x[token] @ up[expert].T + bias[expert])
        y = y.index_add(0, token, inner @ down[expert] * weights[token, choice].unsqueeze(1))
    y.backward(layer.gradient)
    return y.detach(), {
        name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in given.items()
    }


# Each way is what dispatch and combine do along one axis. Dispatch finds the tokens of this rank
# or of all ("exchange" and "tokens", or "experts"), and combine gives the same.
WAYS = (
    ("tokens", "tokens"),
    ("experts", "experts"),
    ("exchange", "exchange"),
    ("experts", "exchange"),
    ("exchange", "experts"),
)
Way = tuple[str, str]


@dataclass(frozen=True)
class Found:
    """What one rank computed. ``tokens_in``, ``tokens``, ``experts``: which tokens it gives and
    gets, and which experts it holds.
    """

    y: Tensor
    rows: Tensor
    gradients: dict[str, Tensor | None]
    tokens_in: Tensor
    tokens: Tensor
    experts: Tensor
    volume: Any


def tokens_of(layer: Layer, cuts: Cuts) -> Tensor:
    """The tokens of a rank outside of the experts."""
    numbers = torch.arange(math.prod(layer.sizes)).view(layer.sizes)
    for dim, axes in cuts.items():
        numbers = numbers.index_select(dim, own_places(layer.sizes[dim], *axes))
    return numbers.reshape(-1)


def own_places(size: int, *axes: AxisGroup) -> Tensor:
    """Which of so many things are this rank's."""
    own = torch.arange(size)
    for axis in axes:
        own = torch.cat([own[start : start + length] for start, length in axis.runs(len(own))])
    return own


Cuts = dict[int, tuple[AxisGroup, ...]]
"""The axes that cut dims of the tokens outside of the experts, by dim."""


def on_a_rank(ops: Any, layer: Layer, way: Way, axes: list[AxisGroup], cuts: Cuts) -> Found:
    """The layer on one rank. The experts are cut by all ``axes``; those of ``cuts`` do what ``way``
    says, and along the others tokens are whole.
    """
    all_tokens = torch.arange(layer.chosen.shape[0])
    tokens_in, tokens_out = (
        all_tokens if side == "experts" else tokens_of(layer, cuts) for side in way
    )
    cutting_tokens = [axis for found in cuts.values() for axis in found]
    cutting = tuple(axis for axis in axes if "tokens" not in way or axis not in cutting_tokens)
    own = own_places(layer.num_experts, *cutting)
    local = {
        name: whole[tokens_in if name in ("x", "weights") else own].clone().requires_grad_()
        for name, whole in layer.operands.items()
    }
    exchanged = {
        "exchange": tuple(axis for axis in axes if axis in cutting_tokens),
        "token_dims": tuple((size, *cuts.get(dim, ())) for dim, size in enumerate(layer.sizes)),
    }
    exchanges = [exchanged if side == "exchange" else {} for side in way]
    with count_communication() as volume:
        rows, gains, routing = ops.dispatch(
            local["x"],
            layer.chosen[tokens_in],
            local["weights"],
            num_experts=layer.num_experts,
            expert_axes=cutting,
            **exchanges[0],
        )
        inner = ops.grouped_linear(rows, local["up"], routing, local["bias"])
        out = ops.grouped_linear(F.silu(inner), local["down"], routing, transposed=True)
        y = ops.combine(out * gains.unsqueeze(-1), routing, **exchanges[1])
        y.backward(layer.gradient[tokens_out])
    gradients = {name: tensor.grad for name, tensor in local.items()}
    return Found(y.detach(), rows.detach(), gradients, tokens_in, tokens_out, own, volume)


Dims = dict[int, tuple[str, ...]]
"""The names of the axes that cut dims of the tokens, by dim."""


def run(
    layer: Layer,
    way: Way,
    mesh: Mesh | dict[str, int],
    ops: Any = operators,
    dims: Dims | None = None,
) -> list[tuple[RankMesh, Found]]:
    """The layer on all ranks of a mesh whose axes cut the experts. ``dims``: what cuts the tokens,
    if not the last axis the dim in the middle.
    """
    mesh = mesh if isinstance(mesh, Mesh) else Mesh.of(mesh)
    dims = dims or {1: mesh.names[-1:]}

    def fn(ranks: RankMesh) -> tuple[RankMesh, Found]:
        axes = [ranks.axis(name) for name in mesh.names]
        cuts = {dim: tuple(map(ranks.axis, names)) for dim, names in dims.items()}
        return ranks, on_a_rank(ops, layer, way, axes, cuts)

    return on_mesh(mesh, fn)


def check(
    layer: Layer,
    way: Way,
    mesh: Mesh | dict[str, int],
    ops: Any = operators,
    dims: Dims | None = None,
) -> list[Found]:
    """The layer equals the loop: the sum of summands, pieces in their places, every gradient."""
    y, wanted = by_a_loop(layer)
    ranks = run(layer, way, mesh, ops, dims)
    found = [one for _, one in ranks]
    # Summands along the last axis, too, where combine leaves all tokens on each of its ranks.
    made = torch.zeros_like(y)
    for one in found:
        made.index_add_(0, one.tokens, one.y)
    torch.testing.assert_close(made, y, rtol=TOLERANCE, atol=TOLERANCE)
    total = {name: torch.zeros_like(w) for name, w in wanted.items()}
    for rank, one in ranks:
        for name, gradient in one.gradients.items():
            assert gradient is not None, f"{name} has no gradient on rank {rank.rank}"
            place = one.tokens_in if name in ("x", "weights") else one.experts
            total[name].index_add_(0, place, gradient)
    for name, expected in wanted.items():
        torch.testing.assert_close(
            total[name],
            expected,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda m, name=name: f"gradient of {name}: {m}",
        )
    return found


def routed(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    scores = torch.rand(
        num_tokens, num_experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return scores.topk(top_k).indices


LAYERS: dict[str, Layer] = {
    "random": Layer.of(routed(7, 5, 2), 5),
    "cut in the middle": Layer.of(routed(12, 5, 2), 5, (2, 3, 2)),
    "all to one expert": Layer.of(torch.full((5, 1), 2), 4),
    "to one expert of each two": Layer.of(torch.tensor([[0, 2]] * 5), 4),
    "fewer tokens than ranks": Layer.of(routed(2, 5, 2), 5),
    "fewer experts than ranks": Layer.of(routed(6, 2, 1), 2),
    "every expert": Layer.of(routed(5, 3, 3), 3),
    "one expert": Layer.of(torch.zeros(4, 1, dtype=torch.long), 1),
    "no token": Layer.of(torch.zeros(0, 2, dtype=torch.long), 3),
    "an expert twice": Layer.of(torch.tensor([[1, 1], [0, 2], [2, 2]]), 3),
}


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=slow), 2, 3, pytest.param(4, marks=slow)]
)
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_layer_equals_a_loop(way: Way, num_ranks: int) -> None:
    for layer in LAYERS.values():
        check(layer, way, {"ep": num_ranks})


@pytest.mark.parametrize("way", WAYS[1:], ids="-".join)
def test_experts_over_two_axes(way: Way) -> None:
    """The first axis has all tokens of the second, whose ranks exchange them."""
    for name in ("cut in the middle", "fewer experts than ranks"):
        check(LAYERS[name], way, {"a": 2, "ep": 2})


@slow
@pytest.mark.parametrize("way", WAYS[1:], ids="-".join)
def test_every_layer_over_two_axes(way: Way) -> None:
    for layer in LAYERS.values():
        for sizes in ({"a": 2, "ep": 3}, {"a": 3, "ep": 2}, {"a": 2, "b": 2, "ep": 2}):
            check(layer, way, sizes)


TURNED = Mesh((("a", 2), ("b", 2)), turns=(("b", 1),))
SEVERAL: dict[str, tuple[Mesh | dict[str, int], Dims]] = {
    "one dim": ({"a": 2, "b": 2}, {1: ("a", "b")}),
    "two dims": ({"a": 2, "b": 2}, {0: ("b",), 1: ("a",)}),
    "in zigzag": (TURNED, {0: ("a",), 1: ("b",)}),
    "one dim, in zigzag": (TURNED, {1: ("a", "b")}),
    "one of three keeps tokens whole": ({"a": 2, "b": 2, "c": 2}, {0: ("c",), 2: ("a",)}),
    "three": ({"a": 2, "b": 2, "c": 2}, {1: ("a", "c"), 2: ("b",)}),
}
"""Meshes whose axes cut the experts, and the dims of the tokens that axes exchange for them."""
QUICK = ("one dim, in zigzag",)


@pytest.mark.parametrize("way", [way for way in WAYS if "exchange" in way], ids="-".join)
@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(n, marks=slow) for n in SEVERAL if n not in QUICK)],
)
def test_several_axes_exchange_tokens(name: str, way: Way) -> None:
    mesh, dims = SEVERAL[name]
    for layer in LAYERS.values():
        check(layer, way, mesh, dims=dims)


def test_a_token_crosses_an_outer_axis_once() -> None:
    """A token has an expert on each of the 2 ranks of another node. It goes there once, and from
    there to its neighbour.
    """
    layer = Layer.of(torch.tensor([[2, 3]] * 4), 4)
    for rank, one in run(layer, ("exchange", "exchange"), {"a": 2, "b": 2}, dims={1: ("a", "b")}):
        on_node = rank.coords["a"]  # the experts are on the second one
        for axis, tokens in (("a", on_node), ("b", 2 * on_node)):
            volume = one.volume.total("all_to_all", axis=axis, phase="forward")
            back = 1 - on_node if axis == "a" else tokens
            # Two counts; tokens with their number, and two choices with their weights.
            assert volume.received == 2 + tokens * (HIDDEN + 1 + 2 * 2) + back * HIDDEN, axis


def test_a_message_is_let_go_of_when_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until backward there are rows of tokens, and not the message that brought them, too."""
    messages: list[StorageWeakRef] = []
    send = Communicator.all_to_all_rows

    def sending(self: Communicator, *args: Any, **options: Any) -> Tensor:
        came = send(self, *args, **options)
        messages.append(StorageWeakRef(came.untyped_storage()))
        return came

    monkeypatch.setattr(Communicator, "all_to_all_rows", sending)

    def fn(ranks: RankMesh) -> list[Any]:
        axes = (ranks.axis("a"), ranks.axis("b"))
        return operators.dispatch(
            torch.ones(2, HIDDEN).requires_grad_(),
            torch.tensor([[0], [3]]),
            torch.ones(2, 1).requires_grad_(),
            num_experts=4,
            expert_axes=axes,
            exchange=axes,
            token_dims=((8, *axes),),
        )

    kept = on_mesh(Mesh.of({"a": 2, "b": 2}), fn)
    assert len(kept) == 4 and len(messages) == 4 * 4
    assert all(message.expired() for message in messages)


def test_an_exchange_is_one_function_of_autograd() -> None:
    """What picks rows of tokens, and what adds rows up, is a part of it: each function more costs
    as much as several messages of small layers.
    """

    def before(x: Tensor) -> list[Any]:
        assert x.grad_fn is not None
        return [function for function, _ in x.grad_fn.next_functions if function is not None]

    def fn(ranks: RankMesh) -> None:
        ep = ranks.axis("ep")
        x, weights = torch.ones(2, HIDDEN).requires_grad_(), torch.ones(2, 1).requires_grad_()
        where: Any = {"exchange": (ep,), "token_dims": ((4, ep),)}
        chosen = torch.tensor([[0], [1]])
        rows, gains, routing = operators.dispatch(
            x, chosen, weights, num_experts=2, expert_axes=(ep,), **where
        )
        y = operators.combine(rows, routing, **where)
        assert rows.grad_fn is gains.grad_fn
        assert [function.variable for function in before(rows)] == [x, weights]
        assert before(y) == [rows.grad_fn]

    on_mesh(Mesh.of({"ep": 2}), fn)


def test_gradients_of_experts_without_rows_are_zeros() -> None:
    layer = LAYERS["all to one expert"]
    for way in WAYS:
        for one in check(layer, way, {"ep": 2}):
            for name in ("up", "bias", "down"):
                empty = [i for i, expert in enumerate(one.experts.tolist()) if expert != 2]
                gradient = one.gradients[name]
                assert gradient is not None and torch.equal(
                    gradient[empty], torch.zeros_like(gradient[empty])
                )


def rows_in_order(ops: Any) -> None:
    """Rows are sorted by expert, and by token within an expert, wherever they came from."""
    for name in ("random", "cut in the middle"):
        layer = LAYERS[name]
        ((_, alone),) = run(layer, ("tokens", "tokens"), {"ep": 1}, ops)
        order = layer.chosen.T.reshape(-1).argsort(stable=True) % layer.chosen.shape[0]
        expert = layer.chosen.T.reshape(-1).sort(stable=True).values
        order = order[(expert * 1000 + order).argsort()]
        assert torch.equal(alone.rows, layer.operands["x"][order])
        for way in (("experts", "experts"), ("exchange", "exchange")):
            for num_ranks in (2, 3, 4):
                found = [one.rows for _, one in run(layer, way, {"ep": num_ranks}, ops)]
                assert torch.equal(torch.cat(found), alone.rows)


def test_rows_have_the_order_of_one_device() -> None:
    rows_in_order(operators)


@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32, torch.float64, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_and_weights_of_all_dtypes_arrive(
    dtype: torch.dtype, weights_dtype: torch.dtype | None
) -> None:
    """Bit by bit, with their gradients; of three elements, which fill no whole 8 bytes."""
    chosen, x = routed(6, 4, 3), torch.arange(18).view(6, 3).to(dtype)
    weights = None if weights_dtype is None else torch.arange(18).view(6, 3).to(weights_dtype)

    def fn(ranks: RankMesh) -> tuple[Tensor, ...]:
        axis = ranks.axis("ep")
        mine = slice(axis.index * 6 // axis.size, (axis.index + 1) * 6 // axis.size)
        given = [of[mine].clone().requires_grad_() for of in (x, weights) if of is not None]
        rows, *gains, _ = operators.dispatch(
            given[0],
            chosen[mine],
            *given[1:],
            num_experts=4,
            expert_axes=(axis,),
            exchange=(axis,),
            token_dims=((6, axis),),
        )
        torch.autograd.backward([rows, *gains], [rows.detach(), *(g.detach() for g in gains)])
        return rows.detach(), *(g.detach() for g in gains), *(of.grad for of in given)

    (alone,), two = on_mesh(Mesh.of({"ep": 1}), fn), on_mesh(Mesh.of({"ep": 2}), fn)
    for whole, pieces in zip(alone, zip(*two, strict=True), strict=True):
        assert torch.equal(torch.cat(pieces), whole)


def test_sums_travel_in_the_dtype_of_the_result() -> None:
    """Rows of float64 are summed so on each rank and at home. Sums travel in float32, in half the
    bytes, and their gradients do.
    """

    class Narrow:
        dispatch, grouped_linear = operators.dispatch, operators.grouped_linear

        @staticmethod
        def combine(*args: Any, **options: Any) -> Tensor:
            y = operators.combine(*args, dtype=torch.float32, **options)
            assert y.dtype == torch.float32
            return y.double()  # so that float64 gradients come

    layer, way, mesh = LAYERS["every expert"], ("exchange", "exchange"), {"a": 2, "ep": 2}
    y, wanted = by_a_loop(layer)
    plain, narrow = (
        [one for _, one in run(layer, way, mesh, ops, {1: tuple(mesh)})]
        for ops in (operators, Narrow)
    )
    saved = {}
    for phase in ("forward", "backward"):
        wide, half = (
            [one.volume.total("all_to_all", phase=phase) for one in found]
            for found in (plain, narrow)
        )
        assert [v.elements for v in wide] == [v.elements for v in half]
        saved[phase] = sum(v.num_bytes for v in wide) - sum(v.num_bytes for v in half)
    # Of each token 3 sums, of its 3 experts, cross "ep", and one of each node "a".
    num_sums = len(y) * (3 + 2)
    assert saved == dict.fromkeys(("forward", "backward"), num_sums * HIDDEN * 4)
    total = {name: torch.zeros_like(gradient) for name, gradient in wanted.items()}
    for one in narrow:
        torch.testing.assert_close(one.y, y[one.tokens], rtol=1e-6, atol=1e-6)
        for name, gradient in one.gradients.items():
            assert gradient is not None and gradient.dtype == torch.float64
            place = one.tokens_in if name in ("x", "weights") else one.experts
            total[name].index_add_(0, place, gradient)
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-6)


def early(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of which what it communicates is started, and waited for."""
    return lambda *args, **options: arrived(start(function, *args, **options))


STARTED = SimpleNamespace(
    dispatch=early(operators.dispatch),
    combine=early(operators.combine),
    grouped_linear=operators.grouped_linear,
)


@pytest.mark.parametrize("way", spread(WAYS, 2, whole=True), ids="-".join)
def test_what_is_started_has_the_same_bits_and_messages(way: Way) -> None:
    for name in ("random", "all to one expert", "cut in the middle"):
        for mesh in ({"ep": 3}, {"a": 2, "ep": 2}):
            dims = {1: tuple(mesh)} if way == ("exchange", "exchange") else None
            both = [run(LAYERS[name], way, mesh, ops, dims) for ops in (STARTED, operators)]
            for (_, one), (_, plain) in zip(*both, strict=True):
                assert torch.equal(one.y, plain.y) and torch.equal(one.rows, plain.rows)
                for its, gradient in zip(
                    one.gradients.values(), plain.gradients.values(), strict=True
                ):
                    assert its is not None and gradient is not None and torch.equal(its, gradient)
                assert str(one.volume) == str(plain.volume)


def test_work_between_runs_while_tokens_are_under_way() -> None:
    """Forward and backward: a message begins, the work in between runs, the message is waited
    for.
    """
    events: list[str] = []

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            events.append("work")
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            events.append("work")
            return grad

    class Noting(Communicator):
        def all_to_all_rows_async(self, *args: Any, **options: Any) -> Any:
            pending = super().all_to_all_rows_async(*args, **options)
            wait = pending.wait
            if self.index == 0:
                events.append("begin")
                pending.wait = lambda: (events.append("wait"), wait())[1]
            return pending

    def rank(index: int) -> None:
        ep = RankMesh(Mesh.of({"ep": 2})).axis("ep")
        if index == 0:
            ep.communicator.__class__ = Noting
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        chosen = torch.tensor([[0], [1]])
        options = {"exchange": (ep,), "token_dims": ((4, ep),)}
        coming = start(operators.dispatch, x, chosen, num_experts=2, expert_axes=(ep,), **options)
        shared = Work.apply(x) if index == 0 else x
        rows, routing = arrived(coming)
        coming = start(operators.combine, rows, routing, **options)
        shared = Work.apply(shared) if index == 0 else shared
        (arrived(coming) * shared).sum().backward()

    run_ranks(2, rank)
    assert events == ["begin", "work", "wait"] * 4


def test_sums_do_not_depend_on_the_ranks_of_tokens() -> None:
    """All rows of a token are on one rank: their sum is that of one device, bit by bit. Products of
    experts are left out, as libraries compute them in another way for another number of rows.
    """
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(7, 6, generator=generator).argsort(1)[:, :4]
    weights = torch.randn(chosen.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(7, HIDDEN, generator=generator, dtype=torch.float64)

    def sums(tokens: slice) -> Tensor:
        rows, gains, routing = operators.dispatch(
            x[tokens], chosen[tokens], weights[tokens], num_experts=6
        )
        return operators.combine(rows * gains.unsqueeze(-1), routing)

    for tokens in (slice(0, 3), slice(3, 7), slice(2, 3)):
        assert torch.equal(sums(tokens), sums(slice(None))[tokens])


# ------------------------------------------------------------------------------------------------
# what is sent


ROUTINGS = {
    # Four tokens on each of two ranks; experts 0 and 1 lie on the first, 2 and 3 on the second.
    "both experts on one rank": torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]] * 2),
    "one expert on each": torch.tensor([[0, 2], [3, 1]] * 4),
    "all to the first rank": torch.tensor([[0, 1]] * 8),
    "random": routed(8, 4, 2, seed=3),
}


def sent(layer: Layer, num_ranks: int) -> Tensor:
    """How many tokens each rank (row) sends to each other (column)."""
    owner = {
        expert: rank
        for rank, own in enumerate(torch.arange(layer.num_experts).tensor_split(num_ranks))
        for expert in own.tolist()
    }
    home = torch.arange(layer.chosen.shape[0]).tensor_split(num_ranks)
    tokens = torch.zeros(num_ranks, num_ranks, dtype=torch.long)
    for rank, own in enumerate(home):
        for token in own.tolist():
            for other in {owner[expert] for expert in layer.chosen[token].tolist()}:
                tokens[rank, other] += 1
    return tokens.fill_diagonal_(0)


def check_volume(chosen: Tensor, way: Way, num_ranks: int, ops: Any = operators) -> tuple[int, int]:
    """What a rank receives is what the routing says. Returns the elements of all ranks, forward and
    backward.
    """
    layer, top_k = Layer.of(chosen, 4), chosen.shape[1]
    tokens = sent(layer, num_ranks)
    found = [0, 0]
    for mesh, one in run(layer, way, {"ep": num_ranks}, ops):
        rank = mesh.rank
        arrive, go_home = tokens[:, rank].sum().item(), tokens[rank].sum().item()
        forward = backward = 0
        if way[0] == "exchange":
            # Two counts of each rank; tokens with their number, and the experts and the weights of
            # all their choices.
            forward += 2 * (num_ranks - 1) + arrive * (HIDDEN + 1 + 2 * top_k)
            backward += go_home * (HIDDEN + top_k)
        if way[1] == "exchange":
            told = 0 if way[0] == "exchange" else num_ranks - 1 + go_home
            forward += told + go_home * HIDDEN
            backward += arrive * HIDDEN
        volume = one.volume.total("all_to_all", axis="ep", phase="forward")
        assert volume.received == forward
        assert one.volume.total("all_to_all", axis="ep", phase="backward").received == backward
        assert one.volume.total().received == forward + backward, "nothing else is sent"
        found[0] += forward
        found[1] += backward
    return found[0], found[1]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_what_is_received_is_what_the_routing_says(routing: str, way: Way) -> None:
    for num_ranks in (2, 3):
        check_volume(ROUTINGS[routing], way, num_ranks)


def test_a_token_goes_once_to_a_rank_that_has_several_experts_for_it() -> None:
    """Four of eight tokens are on the wrong rank. Each goes there once, and comes back once."""
    way = ("exchange", "exchange")
    forward, backward = check_volume(ROUTINGS["both experts on one rank"], way, 2)
    assert (forward, backward) == (
        2 * 2 + 4 * (HIDDEN + 1 + 2 * 2) + 4 * HIDDEN,
        4 * (HIDDEN + 2) + 4 * HIDDEN,
    )


# ------------------------------------------------------------------------------------------------
# dtypes and refusals


def test_rows_take_the_dtype_of_weights_or_of_autocast() -> None:
    layer = LAYERS["random"]
    rows, gains, routing = operators.dispatch(
        layer.operands["x"].bfloat16(), layer.chosen, layer.operands["weights"], num_experts=5
    )
    weight = layer.operands["up"].float().requires_grad_()
    assert (rows.dtype, gains.dtype) == (torch.bfloat16, torch.float64)
    assert operators.grouped_linear(rows, weight, routing).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert operators.grouped_linear(rows, weight, routing).dtype == torch.float32
        y = operators.grouped_linear(rows.float(), weight, routing, autocast=True)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.parametrize("number", [-1, 5])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_an_expert_that_is_none_is_refused(way: Way, number: int) -> None:
    chosen = LAYERS["random"].chosen.clone()
    chosen[3, 1] = number
    layer = Layer.of(torch.zeros_like(chosen), 5)
    layer = Layer(layer.sizes, 5, chosen, layer.operands, layer.gradient)
    with pytest.raises(InputError, match="a chosen expert"):
        run(layer, way, {"ep": 2})


class Shifted(torch.nn.Module):
    """Experts that are chosen by numbers which forward is given, plus a number of the layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 3, 3, dtype=torch.float64))
        self.register_buffer("shift", torch.tensor(0))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows, routing = dispatch(x, chosen + self.shift, num_experts=4)
        return combine(grouped_linear(rows, self.weight, routing), routing)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Shifted() for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, chosen)
        return x.sum()


def test_a_layer_that_chooses_an_expert_that_is_none_is_named(tmp_path: Path) -> None:
    model = Layers()
    model.layers[1].shift += 1
    inputs = {
        "x": torch.ones(6, 3, dtype=torch.float64),
        "chosen": torch.tensor([[0], [1], [2], [0], [1], [2]]),
    }
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    directory = compile_into(tmp_path, model, inputs, "ep", config)

    def rank(_: int) -> str:
        module = load_class(directory)()
        module(**inputs)
        with pytest.raises(InputError) as caught:
            module(inputs["x"], inputs["chosen"] + 1)
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert re.search(r"where: gencode\d\.py:\d+ \(layers\.1\)", message), message


def test_a_routing_is_what_dispatch_returned() -> None:
    with pytest.raises(TypeError, match="the routing of rows is what dispatch returned"):
        experts.combine(torch.ones(2, 3), torch.ones(2))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------
# faults that these tests must see


def mutant(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The operators with one piece of their text exchanged."""
    modules = (experts, exchange_places, token_messages, grouped_products)
    sources = [inspect.getsource(module) for module in modules]
    count = sum(source.count(old) for source in sources)
    assert not old or count == 1, f"{old!r} is there {count} times"
    made = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", made)  # dataclasses look there
    for source in sources:
        exec(compile(source.replace(old, new), "mutant", "exec"), made.__dict__)
    return SimpleNamespace(**made.__dict__)


def gradients_and_values(ops: Any) -> None:
    for way in WAYS:
        check(LAYERS["cut in the middle"], way, {"ep": 3}, ops)
    check(LAYERS["all to one expert"], ("exchange", "exchange"), {"ep": 2}, ops)
    check(LAYERS["random"], ("exchange", "exchange"), {"a": 2, "ep": 2}, ops)
    for way in (("exchange", "exchange"), ("experts", "exchange")):
        check(LAYERS["cut in the middle"], way, TURNED, ops, {1: ("a", "b")})


def volumes(ops: Any) -> None:
    for routing in ROUTINGS.values():
        check_volume(routing, ("exchange", "exchange"), 2, ops)


MUTANTS: dict[str, tuple[str, str, Callable[[ModuleType], None]]] = {
    "gradients are lost on the way": (
        "begin(columns.joined(grads), leg.axis",
        "begin(columns.joined(grads) * 0, leg.axis",
        gradients_and_values,
    ),
    "gradients are counted as forward": (
        'ctx.flight.back(grads, "backward")',
        'ctx.flight.back(grads, "forward")',
        volumes,
    ),
    "gradients of weights are those of the first choice": (
        "found.append(placed.view(count, top_k))",
        "found.append(placed.view(count, top_k)[:, :1].expand(count, top_k))",
        gradients_and_values,
    ),
    "experts belong to the rank before": (
        "[index] * length",
        "[(index - 1) % size] * length",
        gradients_and_values,
    ),
    "experts beyond the axis are taken for its own": (
        "place if there == other.index else axis.size",
        "place",
        gradients_and_values,
    ),
    "choices of other ranks' experts are taken for its own": (
        "[count * num_tokens] * num_experts",
        "[0] * num_experts",
        gradients_and_values,
    ),
    "rows are in the order of their arrival": (
        ".add_(number)",
        "",
        lambda ops: rows_in_order(ops),
    ),
    "experts without rows have other gradients": (
        "torch.mm(a, b, out=result)",
        "torch.mm(a, b, out=result) if a.numel() else result.fill_(1.0)",
        gradients_and_values,
    ),
    "weights arrive in the order of their senders": (
        "part.reshape(-1).index_select(0, picked.choice)",
        "part.reshape(-1)[: len(picked.choice)]",
        gradients_and_values,
    ),
    "a token is sent for each choice": (
        "wanted.scatter_(0, receiver.view(experts.shape).T, True)",
        "wanted.fill_(True)",
        volumes,
    ),
    "tokens of a rank lie together": (
        "(number.unsqueeze(1) * (unit * sum(segments)) + place)",
        "(number.unsqueeze(1) * len(place) + place)",
        gradients_and_values,
    ),
    "tokens go home to the first rank's places": (
        "torch.searchsorted(own, arrived)",
        "arrived * 0",
        gradients_and_values,
    ),
    "rows of other ranks' experts are kept": (
        "here = expert >= 0",
        "here = expert >= -1",
        gradients_and_values,
    ),
    "sums go on in the order in which they came": (
        "in_message[legs[-1].tokens]",
        "legs[-1].tokens",
        gradients_and_values,
    ),
    "sums come back along the outermost axis first": (
        "home, *legs = arrivals.legs",
        "*legs, home = arrivals.legs",
        gradients_and_values,
    ),
    "zigzag is not asked for": (
        "dealt(count, size, index, turns=turns)",
        "dealt(count, size, index, turns=0)",
        gradients_and_values,
    ),
    "a bias is added to the first rows": (
        "bias.to(out.dtype), routing.counts, dim=0",
        "bias.to(out.dtype), routing.counts.flip(0), dim=0",
        gradients_and_values,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, look = MUTANTS[name]
    broken = mutant(old, new, monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        look(broken)


def test_the_module_itself_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mutant("", "", monkeypatch)
    gradients_and_values(made)
    volumes(made)


def kept_by_a_loop(
    chosen: Tensor, weights: Tensor, *, factor: float, drop: str, groups: int
) -> Tensor:
    """The weights of 5 experts within their capacity, choice by choice."""
    num_tokens, top_k = chosen.shape
    size, kept = num_tokens // groups, torch.zeros_like(weights)
    capacity = max(1, math.ceil(size * top_k / 5 * factor))
    for group, expert in itertools.product(range(groups), range(5)):
        own = range(group * size, (group + 1) * size)
        choices = [(t, k) for t in own for k in range(top_k) if chosen[t, k] == expert]
        if drop == "probability":
            choices.sort(key=lambda choice: -weights[choice].item())
        for choice in choices[:capacity]:
            kept[choice] = weights[choice]
    return kept


@pytest.mark.parametrize("drop", ["probability", "position"])
def test_choices_within_capacity(drop: Any) -> None:
    for groups, factor in itertools.product((1, 2, 4), (0.01, 0.75, 1.0, 3.0)):
        weights, chosen = torch.randn(24, 5).softmax(-1).topk(2)
        found = within_capacity(
            chosen, weights, num_experts=5, factor=factor, drop=drop, groups=groups
        )
        expected = kept_by_a_loop(chosen, weights, factor=factor, drop=drop, groups=groups)
        assert torch.equal(found, expected), (groups, factor)


def test_capacities_that_cannot_be() -> None:
    weights, chosen = torch.randn(24, 5).softmax(-1).topk(2)
    for options, text in (
        ({"factor": 1.0, "groups": 5}, "24 tokens cannot be counted in 5 groups"),
        ({"factor": 0.0}, "experts cannot have a capacity factor of 0.0"),
        ({"factor": -1.0}, "experts cannot have a capacity factor of -1.0"),
        ({"factor": math.nan}, "experts cannot have a capacity factor of nan"),
        ({"factor": 1.0, "min_capacity": -1}, "experts cannot keep at least -1 choices"),
    ):
        with pytest.raises(InputError, match=text):
            within_capacity(chosen, weights, num_experts=5, **options)
