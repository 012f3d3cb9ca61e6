"""Conversions between random layouts, run with the real adapters on ranks that are threads: values
and gradients.
"""

import math
import random

import pytest
import torch
from covers import spread
from layouts import decode, encode, in_random_turns

from shardwright.compiler.cost.communication import step_elements
from shardwright.compiler.ir.size import DynamicSize, to_python
from shardwright.compiler.plan.conversion import AdapterStep, CutSizes, canonical, convert
from shardwright.runtime import adapters
from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Cut, Layout, Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}]


def atom(*segments: int, axes: tuple[str, ...] = ()) -> Atom:
    return Atom(segments, axes)


def random_dim(rng: random.Random, size: int, axes: list[str]) -> tuple[Atom, ...]:
    """``size`` as a random product of atoms and segments, cut by ``axes`` here and there."""
    factors = []
    while size > 1 and rng.random() < 0.5:
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        factors.append(rng.choice(divisors))
        size //= factors[-1]
    factors.append(size)
    dim = []
    for factor in factors:
        first = rng.randint(1, factor - 1) if factor > 2 and rng.random() < 0.3 else None
        segments = (first, factor - first) if first else (factor,)
        dim.append((segments, []))
    element: tuple[int, ...] = ()
    if rng.random() < 0.2:  # one of a few things that axes cut
        count = rng.randint(1, 5)
        element = (rng.randrange(count), count)
        dim.insert(0, ((1,), []))
    for axis in axes:
        rng.choice(dim)[1].append(axis)
    return tuple(
        Atom(segments, tuple(cut), element if segments == (1,) and cut and not index else ())
        for index, (segments, cut) in enumerate(dim)
    )


def random_layout(rng: random.Random, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    places: list[list[str]] = [[] for _ in shape]
    partial, grad_partial = [], []
    for axis in rng.sample(mesh.names, len(mesh.names)):
        kind = rng.choice("RGPSSS")
        if kind == "S":
            rng.choice(places).append(axis)
        elif kind != "R":
            (partial if kind == "P" else grad_partial).append(axis)
    dims = tuple(random_dim(rng, size, axes) for size, axes in zip(shape, places, strict=True))
    return Layout(dims, tuple(sorted(partial)), tuple(sorted(grad_partial)))


def number(size: object, groups: RankMesh) -> int:
    """The value of a size expression on this rank."""
    names = {axis: groups.axis(axis) for axis in groups.mesh.names}
    return int(eval(to_python(size), {}, names))  # type: ignore[arg-type]


def cut_of(sizes: CutSizes | None, groups: RankMesh) -> Cut | None:
    if sizes is None:
        return None
    return Cut(
        tuple(number(s, groups) for s in sizes.segments),
        number(sizes.outer, groups),
        number(sizes.inner, groups),
        tuple(number(s, groups) for s in sizes.element),
    )


def apply(step: AdapterStep, x: torch.Tensor, groups: RankMesh) -> torch.Tensor:
    """What generated code does for one step."""
    axis, cut = groups.axis(*step.axes), cut_of(step.cut, groups)
    function = getattr(adapters, step.kind)
    if step.kind == "all_to_all":
        return function(x, axis, step.dim, cut, step.to_dim, cut_of(step.to_cut, groups))
    keywords = {"dim": step.dim, "cut": cut} if step.dim is not None else {}
    if step.backward is not None:
        keywords["backward"] = step.backward
    return function(x, axis, **keywords)


def run(source: Layout, target: Layout, mesh: Mesh) -> None:
    """Convert on all ranks, forward and backward, and compare what the pieces mean."""
    shape = source.shape
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    gradient = torch.randn(shape, dtype=torch.float64, generator=generator)
    steps = convert(source, target, mesh)
    pieces = encode(value, source, mesh)
    gradients = encode(gradient, dual(target), mesh)

    def rank(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        groups = RankMesh(mesh, current_world())
        x = pieces[index].clone().requires_grad_()
        y = x * 1.0
        for step in steps:
            groups.join(step.axes)
            y = apply(step, y, groups)
        assert y.shape == target.local_shape(mesh, mesh.coords(index))
        y.backward(gradients[index])
        assert x.grad is not None
        return y.detach(), x.grad

    results = run_ranks(mesh.size, rank)
    torch.testing.assert_close(
        decode([y for y, _ in results], target, mesh), value, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        decode([g for _, g in results], dual(source), mesh), gradient, rtol=0, atol=1e-12
    )


def dual(layout: Layout) -> Layout:
    """The layout of the gradient: P and G change places."""
    return Layout(layout.dims, layout.grad_partial, layout.partial)


@pytest.mark.parametrize("seed", spread(range(30), 3))
def test_random_conversions(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        mesh = in_random_turns(Mesh.of(rng.choice(MESHES)), rng)
        shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]) for _ in range(rng.randint(1, 3)))
        source, target = random_layout(rng, shape, mesh), random_layout(rng, shape, mesh)
        try:
            run(source, target, mesh)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {source} -> {target} on {mesh}") from error


def test_equal_cuts_written_differently_are_one_layout() -> None:
    mesh = Mesh.of({"tp": 4})
    heads = Layout(((atom(12, axes=("tp",)), atom(64)),))
    flat = Layout(((atom(768, axes=("tp",)),),))
    assert convert(heads, flat, mesh) == ()
    assert (
        convert(
            Layout(((atom(6, axes=("tp",)), atom(64)),)),
            Layout(((atom(384, axes=("tp",)),),)),
            mesh,
        )
        != ()
    )


def test_the_order_of_axes_that_cut_one_element_does_not_matter() -> None:
    mesh = Mesh.of({"a": 2, "b": 2, "c": 2})
    nested = Layout(((atom(2, axes=("a",)), atom(1, axes=("c", "b"))),))
    beside = Layout(((atom(2, axes=("a", "b")), atom(1, axes=("c",))),))
    assert convert(nested, beside, mesh) == ()
    run(nested, Layout(((atom(2, axes=("b",)),),)), mesh)


def test_slices_come_before_collectives_and_gathers_last() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 2})
    source = Layout(((atom(4, axes=("dp",)),), (atom(6),)), partial=("tp",))
    assert [
        s.kind for s in convert(source, Layout(((atom(4),), (atom(6, axes=("tp",)),))), mesh)
    ] == [
        "reduce_scatter",
        "all_gather",
    ]
    assert [s.kind for s in convert(source, Layout.whole((4, 6)), mesh)] == [
        "all_reduce",
        "all_gather",
    ]


def test_a_sum_over_several_axes_is_one() -> None:
    """One sum of the value over all axes on which it is P, and of the gradient over all on which
    that is to be G.
    """
    mesh = Mesh.of({"a": 2, "b": 2, "c": 2})

    def steps(
        source: tuple[str, str], target: tuple[str, str]
    ) -> list[tuple[str, tuple[str, ...], str | None]]:
        layouts = [
            Layout.whole((4, 6), partial=tuple(p), grad_partial=tuple(g))
            for p, g in (source, target)
        ]
        run(*layouts, mesh)
        return [(step.kind, step.axes, step.backward) for step in convert(*layouts, mesh)]

    assert steps(("ac", ""), ("", "")) == [("all_reduce", ("a", "c"), "identity")]
    assert steps(("ab", ""), ("", "ab")) == [("all_reduce", ("a", "b"), "all_reduce")]
    assert steps(("", ""), ("", "bc")) == [("grad_all_reduce", ("b", "c"), None)]
    assert steps(("ab", ""), ("", "b")) == [
        ("all_reduce", ("a", "b"), "identity"),
        ("grad_all_reduce", ("b",), None),
    ]
    assert steps(("a", ""), ("", "ab")) == [
        ("all_reduce", ("a",), "identity"),
        ("grad_all_reduce", ("a", "b"), None),
    ]
    assert steps(("", "abc"), ("a", "")) == [
        ("grad_keep_one", ("a", "b", "c"), None),
        ("keep_one", ("a",), "identity"),
    ]
    assert steps(("", "ab"), ("ab", "")) == [("keep_one", ("a", "b"), "keep_one")]
    assert steps(("a", "b"), ("b", "a")) == [
        ("all_reduce", ("a",), "all_reduce"),
        ("keep_one", ("b",), "keep_one"),
    ]


def test_a_sum_over_two_axes_sends_less_than_one_after_the_other() -> None:
    mesh = Mesh.of({"a": 4, "b": 2})
    (step,) = convert(Layout.whole((8, 4), partial=("a", "b")), Layout.whole((8, 4)), mesh)
    assert step_elements(step, mesh) == (2 * 7 / 8 * 32, 0.0)


def test_dynamic_sizes_stay_expressions() -> None:
    mesh = Mesh.of({"dp": 2})
    batch = DynamicSize("batch", 32)
    source = Layout(((Atom((batch,), ("dp",)), atom(6)),))
    (step,) = convert(source, Layout.whole((batch * 6,)), mesh)
    assert step.cut == CutSizes((batch,), 1, 6)
    assert canonical(source, mesh) == source


def test_cost_of_a_step_is_ring_optimal() -> None:
    mesh = Mesh.of({"tp": 4})
    (step,) = convert(
        Layout.whole((8, 4), partial=("tp",)), Layout.whole((8, 4), grad_partial=("tp",)), mesh
    )
    assert step_elements(step, mesh) == (2 * 3 / 4 * 32, 2 * 3 / 4 * 32)
    (step,) = convert(
        Layout(((atom(8, axes=("tp",)),), (atom(4),))),
        Layout.whole((8, 4), grad_partial=("tp",)),
        mesh,
    )
    assert step_elements(step, mesh) == (3 / 4 * 32, 3 / 4 * 32)
    assert math.isclose(sum(step_elements(step, mesh)), 48)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_many_random_conversions(seed: int) -> None:
    """Three axes, larger dims, all kinds of layouts."""
    rng = random.Random(seed)
    for _ in range(6):
        larger = [{"a": 2, "b": 3, "c": 2}, {"a": 3, "b": 2, "c": 2}, {"a": 5, "b": 2}]
        mesh = in_random_turns(Mesh.of(rng.choice([*MESHES, *larger])), rng)
        shape = tuple(
            rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 18]) for _ in range(rng.randint(1, 3))
        )
        source, target = random_layout(rng, shape, mesh), random_layout(rng, shape, mesh)
        try:
            run(source, target, mesh)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {source} -> {target} on {mesh}") from error
