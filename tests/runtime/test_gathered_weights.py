"""Weights stored in pieces: gathered for their uses, dropped, gathered again in backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.runtime import gathered_weights
from shardwright.runtime.adapters import all_reduce, keep_one
from shardwright.runtime.errors import UsageError
from shardwright.runtime.gathered_weights import WeightGathering
from shardwright.runtime.layout import Cut, Layout, Mesh
from shardwright.runtime.pieces import local_piece
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication, current_world
from shardwright.runtime.recompute import recompute

WIDTH, BATCH = 32, 2


class Sharded:
    """Weights on the ranks of a mesh: ``self.weight(number)`` is one of them whole."""

    def __init__(
        self, wholes: list[Tensor], layout: str = "[32/dp, 32]", trained: bool = True
    ) -> None:
        self.layout = Layout.parse(layout)
        axes = self.layout.cut_axes
        self.ranks = RankMesh(Mesh(tuple((name, 2) for name in axes)))
        pieces = [
            local_piece(whole, self.layout, self.ranks.mesh, self.ranks.coords).clone()
            for whole in wholes
        ]
        self.pieces = [nn.Parameter(piece, trained) for piece in pieces]
        self.gathering = WeightGathering()

    def weight(self, number: int) -> Tensor:
        x = self.pieces[number]
        for axis in reversed(self.layout.cut_axes):  # the minor axis first
            dim = next(d for d in range(2) if axis in self.layout.dim_axes(d))
            group = self.ranks.axis(axis)
            cut = None if x.shape[dim] * 2 in (16, 32) else Cut((self.layout.shape[dim],))
            x = self.gathering.gathered(x, group, dim, cut)
        return x


def wholes(count: int, shape: tuple[int, int] = (WIDTH, WIDTH)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator) / WIDTH**0.5
        for _ in range(count)
    ]


class Alive:
    """How many weights one rank holds whole, or has on their way. ``peak``: at most, whenever a
    gather began.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._storages: list[StorageWeakRef] = []

    @property
    def now(self) -> int:
        self._storages = [storage for storage in self._storages if not storage.expired()]
        return len(self._storages)

    def add(self, x: Tensor) -> None:
        self._storages.append(StorageWeakRef(x.untyped_storage()))
        self.peak = max(self.peak, self.now)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[int, Alive]:
    """Bytes alive, by rank. Pieces are gathered into the memory of the whole, so that counts from
    the start.
    """
    found = {rank: Alive() for rank in range(2)}
    start = gathered_weights.start_gather

    def counted(x: Tensor, *args: Any) -> Any:
        started = start(x, *args)
        found[current_world().rank].add(started.pieces.rows)
        return started

    monkeypatch.setattr(gathered_weights, "start_gather", counted)
    return found


def batch(rank: int) -> Tensor:
    return torch.randn(
        BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )


def chain(x: Tensor, weight: Callable[[int], Tensor], count: int) -> Tensor:
    for number in range(count):
        x = torch.tanh(F.linear(x, weight(number)))
    return x.square().sum()


def reference(count: int, run: Callable[..., Tensor] = chain, num_ranks: int = 2) -> list[Tensor]:
    """Gradients of the sum over the ranks' batches."""
    leaves = [whole.requires_grad_() for whole in wholes(count)]
    torch.stack(
        [run(batch(rank), lambda n: leaves[n], count) for rank in range(num_ranks)]
    ).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_gradients(sharded: Sharded, expected: list[Tensor]) -> None:
    for parameter, whole in zip(sharded.pieces, expected, strict=True):
        piece = local_piece(whole, sharded.layout, sharded.ranks.mesh, sharded.ranks.coords)
        torch.testing.assert_close(parameter.grad, piece, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "layout", ["[32/dp, 32]", "[32, 32/dp]", "[32/dp/zero, 32]", "[32/dp, 32/zero]"]
)
def test_gradients_are_those_of_whole_weights_and_each_step_gathers_twice(layout: str) -> None:
    """Gathers of the second and third step are begun ahead of time."""
    count, num_axes = 4, layout.count("/")
    expected = reference(count, num_ranks=2**num_axes)

    def rank(index: int) -> None:
        sharded = Sharded(wholes(count), layout)
        for _ in range(3):
            for parameter in sharded.pieces:
                parameter.grad = None
            with count_communication() as volume:
                with sharded.gathering.forward("train"):
                    loss = chain(batch(index), sharded.weight, count)
                loss.backward()
            assert_gradients(sharded, expected)
            assert volume.calls("all_gather", phase="forward") == count * num_axes
            # The first input needs no gradient.
            assert volume.calls("all_gather", phase="backward") == (count - 1) * num_axes
            assert volume.calls("reduce_scatter", phase="backward") == count * num_axes
            assert len(volume.items()) == 3 * num_axes

    run_ranks(2**num_axes, rank)


def test_a_gradient_that_is_not_summed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests of gradients are worth: without the sum the loss is right and they fail."""
    monkeypatch.setattr(gathered_weights, "reduced_piece", gathered_weights.sliced_piece)
    with pytest.raises(AssertionError, match="not close"):
        test_gradients_are_those_of_whole_weights_and_each_step_gathers_twice("[32/dp, 32]")


def test_only_two_weights_are_whole_at_any_time(alive: dict[int, Alive]) -> None:
    """Twelve layers: one weight in use and the next one on its way, in forward and in backward."""

    def rank(index: int) -> None:
        sharded = Sharded(wholes(12))
        for _ in range(3):
            with sharded.gathering.forward("train"):
                loss = chain(batch(index), sharded.weight, 12)
            assert alive[index].now == 0, "weights are kept for the backward"
            loss.backward()
            assert alive[index].now == 0 and alive[index].peak == 2

    run_ranks(2, rank)


def several_views(x: Tensor, weight: Callable[[int], Tensor], count: int) -> Tensor:
    """Uses that save the weight itself, its transpose, a slice, and a product that saves it
    twice.
    """
    whole = weight(0)
    x = F.linear(x, whole) + x @ whole + x @ whole.t()[:, 5:17] @ whole[3:15]
    x = x * whole[0] * whole.diagonal()
    return (x @ torch.linalg.matrix_exp(whole)).square().sum() + (whole * whole).sum()


def test_views_are_rebuilt_and_uses_share_one_gather() -> None:
    expected = reference(1, several_views)

    def rank(index: int) -> None:
        sharded = Sharded(wholes(1))
        with count_communication() as volume:
            with sharded.gathering.forward("train"):
                loss = several_views(batch(index).requires_grad_(), sharded.weight, 1)
            loss.backward()
        assert_gradients(sharded, expected)
        assert (
            volume.calls("all_gather", phase="forward"),
            volume.calls("all_gather", phase="backward"),
        ) == (1, 1)
        assert sharded.gathering._uses == {} or all(
            e[0].expired() for e in sharded.gathering._uses.values()
        )

    run_ranks(2, rank)


def test_a_second_backward_through_a_retained_graph() -> None:
    expected = [2 * gradient for gradient in reference(3)]

    def rank(index: int) -> None:
        sharded = Sharded(wholes(3))
        with sharded.gathering.forward("train"):
            loss = chain(batch(index), sharded.weight, 3)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_gradients(sharded, expected)

    run_ranks(2, rank)


def test_what_was_computed_from_a_weight_is_gathered() -> None:
    """An adapter may have made it along another axis: it is no leaf, and its gradient goes on
    through what made it.
    """
    expected = reference(2)

    def rank(index: int) -> None:
        sharded = Sharded(wholes(2))
        group = sharded.ranks.axis("dp")
        with sharded.gathering.forward("train"):
            made = [0.5 * (2.0 * piece) for piece in sharded.pieces]
            loss = chain(
                batch(index), lambda number: sharded.gathering.gathered(made[number], group, 0), 2
            )
        loss.backward()
        assert_gradients(sharded, expected)

    run_ranks(2, rank)


def test_ranks_agree_to_gather_again_where_one_of_them_keeps_the_weight() -> None:
    """Held as a summand, the weight is zeros on the other ranks, which save nothing of a gathered
    weight.
    """

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, weight)).square().sum()

    whole = wholes(1)[0].requires_grad_()
    (expected,) = torch.autograd.grad(product(batch(0), whole), whole)

    def rank(index: int) -> None:
        sharded = Sharded(wholes(1))
        group = sharded.ranks.axis("dp")
        with count_communication() as volume:
            with sharded.gathering.forward("train"):
                summand = keep_one(sharded.weight(0), group, backward="keep_one")  # G -> P
                loss = (
                    torch.tanh(all_reduce(F.linear(batch(0).requires_grad_(), summand), group))
                    .square()
                    .sum()
                )
            loss.backward()
        assert_gradients(sharded, [expected])
        assert volume.calls("all_gather", phase="backward") == 0

    run_ranks(2, rank)


def test_frozen_weights_are_gathered_again_and_not_reduced() -> None:
    def rank(index: int) -> None:
        sharded = Sharded(wholes(3), trained=False)
        x = batch(index).requires_grad_()
        with count_communication() as volume:
            with sharded.gathering.forward("train"):
                loss = chain(x, sharded.weight, 3)
            loss.backward()
        y = batch(index).requires_grad_()
        chain(y, lambda n: wholes(3)[n], 3).backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-14)
        assert volume.calls("all_gather", phase="backward") == 3 and not volume.calls(
            "reduce_scatter"
        )

    run_ranks(2, rank)


def test_recomputed_regions_gather_ahead(
    alive: dict[int, Alive], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two regions of two weights each, one weight before them and one behind. Backward begins each
    weight while the one before it is used, also from region to region, into them and out of them.
    """
    expected = reference(6)
    events: dict[int, list[str]] = {0: [], 1: []}
    names: dict[int, str] = {}
    start = gathered_weights.start_gather

    def noted(x: Tensor, *args: Any) -> Any:
        events[current_world().rank].append(f"begin {names[x.data_ptr()]}")
        return start(x, *args)

    monkeypatch.setattr(gathered_weights, "start_gather", noted)

    def rank(index: int) -> None:
        sharded = Sharded(wholes(6))
        axis = sharded.ranks.axis("dp")
        names.update((piece.data_ptr(), f"{n}") for n, piece in enumerate(sharded.pieces))

        def layer(x: Tensor, *pieces: Tensor) -> Tensor:
            for piece in pieces:
                whole = sharded.gathering.gathered(piece, axis, 0)
                events[index].append(f"use {names[piece.data_ptr()]}")
                x = torch.tanh(F.linear(x, whole))
            return x

        for _ in range(2):
            for parameter in sharded.pieces:
                parameter.grad = None
            with count_communication() as volume:
                with sharded.gathering.forward("train"):
                    x = layer(batch(index).requires_grad_(), sharded.pieces[0])
                    for first in (1, 3):
                        pieces = sharded.pieces[first : first + 2]
                        x = recompute(layer, x, *pieces, gathering=sharded.gathering)
                    loss = layer(x, sharded.pieces[5]).square().sum()
                assert alive[index].now == 0 and alive[index].peak <= 3
                events[index].clear()
                loss.backward()
            # Both weights of a region are held until its backward; the next one is on its way.
            assert alive[index].now == 0 and alive[index].peak == 3
            assert_gradients(sharded, expected)
            assert volume.calls("all_gather") == 12 and volume.calls("reduce_scatter") == 6
            assert events[index] == (
                ["begin 5", "begin 3"]
                + ["begin 4", "use 3", "begin 1", "use 4"]
                + ["begin 2", "use 1", "begin 0", "use 2"]
            )

    run_ranks(2, rank)


def test_a_second_run_that_stops_early_leaves_nothing_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A region has two weights, and backward needs nothing of what is behind the first: there its
    second run ends. The second weight is waited for, and the weight before the region is begun.
    """
    events: dict[int, list[str]] = {0: [], 1: []}
    names: dict[int, str] = {}
    start = gathered_weights.start_gather

    def noted(x: Tensor, *args: Any) -> Any:
        rank, name, started = current_world().rank, names[x.data_ptr()], start(x, *args)
        events[rank].append(f"begin {name}")

        def wait() -> Tensor:
            events[rank].append(f"wait {name}")
            return started.wait()

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(gathered_weights, "start_gather", noted)

    def rank(index: int) -> None:
        sharded = Sharded(wholes(4))
        names.update((piece.data_ptr(), f"{n}") for n, piece in enumerate(sharded.pieces))

        def layer(x: Tensor, number: int) -> Tensor:
            return torch.tanh(F.linear(x, sharded.weight(number)))

        for _ in range(2):
            with sharded.gathering.forward("train"):
                x = layer(batch(index).requires_grad_(), 0)
                x.register_hook(lambda grad: events[index].append("gradient of 0"))
                x = recompute(
                    lambda x: layer(x, 1) + sharded.weight(2)[:BATCH],
                    x,
                    gathering=sharded.gathering,
                )
                loss = layer(x, 3).sum()
            events[index].clear()
            loss.backward()
            assert events[index] == (
                ["begin 3", "begin 1", "wait 3", "begin 2", "wait 1", "wait 2"]
                + ["begin 0", "gradient of 0", "wait 0"]
            )

    run_ranks(2, rank)


def test_regions_that_no_backward_comes_to_are_not_gathered() -> None:
    """The first of two regions takes no gradient: the second one's second run begins nothing."""

    def rank(index: int) -> None:
        frozen, trained = Sharded(wholes(1), trained=False), Sharded(wholes(1))
        trained.gathering = frozen.gathering
        with count_communication() as volume:
            with frozen.gathering.forward("train"):
                x = batch(index)
                for sharded in (frozen, trained):
                    x = recompute(
                        lambda x, s: torch.tanh(F.linear(x, s.weight(0))),
                        x,
                        sharded,
                        gathering=sharded.gathering,
                    )
            x.sum().backward()
        assert volume.calls("all_gather") == 3

    run_ranks(2, rank)


def test_a_region_refuses_a_parameter_that_was_changed() -> None:
    def rank(index: int) -> None:
        sharded = Sharded(wholes(2))
        with sharded.gathering.forward("train"):
            x = batch(index).requires_grad_()
            for number in range(2):
                x = recompute(
                    lambda x, n: torch.tanh(F.linear(x, sharded.weight(n))),
                    x,
                    number,
                    gathering=sharded.gathering,
                )
        with torch.no_grad():
            sharded.pieces[0].mul_(2.0)
        with pytest.raises(UsageError, match="changed between forward and backward"):
            x.sum().backward()

    run_ranks(2, rank)


def test_without_gradients_nothing_is_kept(alive: dict[int, Alive]) -> None:
    def rank(index: int) -> None:
        sharded = Sharded(wholes(6))
        for _ in range(2):
            with torch.no_grad(), sharded.gathering.forward("eval"):
                chain(batch(index), sharded.weight, 6)
            assert alive[index].now == 0 and alive[index].peak <= 2

    run_ranks(2, rank)


def test_another_way_through_the_module_drops_what_was_begun() -> None:
    """Three forwards that gather different weights, though they are of one kind."""

    def rank(index: int) -> None:
        sharded = Sharded(wholes(4))
        for order in ([0, 1, 2, 3], [0, 2, 1], [3], [0, 1, 2, 3]):
            x, y = batch(index), batch(index)
            with sharded.gathering.forward("train"):
                for number in order:
                    x = F.linear(x, sharded.weight(number))
            for number in order:
                y = F.linear(y, wholes(4)[number])
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)

    run_ranks(2, rank)


def failing(change: Callable[[Sharded, Tensor], Any]) -> str:
    """The error of a backward after ``change(sharded, hidden)``."""

    def rank(index: int) -> str:
        sharded = Sharded(wholes(2))
        with sharded.gathering.forward("train"):
            hidden = F.linear(batch(index), sharded.weight(0))
            loss = F.linear(hidden, sharded.weight(1)).square().sum()
        change(sharded, hidden)
        with pytest.raises(UsageError) as error:
            loss.backward()
        return str(error.value)

    return run_ranks(2, rank)[0]


def test_changing_a_parameter_before_backward_is_refused() -> None:
    def change(sharded: Sharded, hidden: Tensor) -> None:
        with torch.no_grad():
            sharded.pieces[1].add_(1)

    assert failing(change) == (
        "a parameter was changed between forward and backward\n"
        "  why:   the backward gathers it again, a piece of shape [16, 32], and must find it "
        "as it was\n"
        "  try:   run backward before optimizer.step() or anything else that writes to parameters"
    )


def test_changing_what_backward_needs_is_refused() -> None:
    def change(sharded: Sharded, hidden: Tensor) -> None:
        with torch.no_grad():
            hidden.add_(1)

    assert failing(change) == (
        "a tensor of shape [2, 32] that backward needs was changed in place after the forward\n"
        "  try:   change a copy of it, or run backward first"
    )


def test_graphs_are_freed_without_the_garbage_collector() -> None:
    """A node that saves its own result (tanh, exp) must not keep itself alive through the hooks."""

    def rank(index: int) -> None:
        sharded = Sharded(wholes(1))
        gc.disable()
        try:
            with sharded.gathering.forward("train"):
                hidden = torch.tanh(F.linear(batch(index), sharded.weight(0))).exp()
                loss = hidden.sum()
            alive = weakref.ref(hidden)
            del hidden, loss
            assert alive() is None
        finally:
            gc.enable()

    run_ranks(2, rank)
