"""Adapter times by hand, and for every step of random conversions."""

import math
import random

import pytest
import torch

from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.time.adapter_time import DEFAULT_BUCKET_BYTES, reduction_s, step_time
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.plan.conversion import convert
from shardwright.runtime.layout import Layout, Mesh

FREE_MEMORY = Hardware(
    "toy", Device("toy", 10**9, {}, math.inf, 0.0), (Tier("link", (8,), 1e-6, 1e8),)
)
TP = Mesh((("tp", 4),))
RANKS = (0, 1, 2, 3)


def time_of(source: str, target: str) -> OpTime:
    total = OpTime()
    for step in convert(Layout.parse(source), Layout.parse(target), TP):
        total += step_time(step, torch.float32, TP, RANKS, FREE_MEMORY)
    return total


def collective(kind: str, elements: int) -> float:
    return collective_s(FREE_MEMORY, kind, 4 * elements, RANKS)


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        ("[8/tp, 6]", "[8, 6]", ("all_gather", 48), None),
        ("[8/tp, 6]", "[8, 6] G(tp)", ("all_gather", 48), ("reduce_scatter", 48)),
        ("[8/tp, 6]", "[8, 6] P(tp)", None, None),
        ("[8/tp, 6]", "[8, 6/tp]", ("all_to_all", 12), ("all_to_all", 16)),
        ("[8, 6]", "[8/tp, 6]", None, ("all_gather", 48)),
        ("[8, 6]", "[8, 6] G(tp)", None, ("all_reduce", 48)),
        ("[8, 6]", "[8, 6] P(tp)", None, None),
        ("[8, 6] P(tp)", "[8/tp, 6]", ("reduce_scatter", 48), ("all_gather", 48)),
        ("[8, 6] P(tp)", "[8, 6]", ("all_reduce", 48), None),
        ("[8, 6] P(tp)", "[8, 6] G(tp)", ("all_reduce", 48), ("all_reduce", 48)),
        ("[8, 6] G(tp)", "[8/tp, 6]", None, None),
        ("[8, 6] G(tp)", "[8, 6]", None, None),
        (
            "[9/tp, 6]",
            "[9, 6]",
            ("all_gather", 72),
            None,
        ),  # the longest piece times the ranks is sent
    ],
)
def test_collectives_of_every_conversion(
    source: str, target: str, forward: tuple[str, int] | None, backward: tuple[str, int] | None
) -> None:
    time = time_of(source, target)
    assert time.forward_s == pytest.approx(collective(*forward) if forward else 0.0)
    assert time.backward_s == pytest.approx(collective(*backward) if backward else 0.0)


def test_without_gradient_there_is_no_backward() -> None:
    (step,) = convert(Layout.parse("[8, 6] P(tp)"), Layout.parse("[8, 6] G(tp)"), TP)
    time = step_time(step, torch.float32, TP, RANKS, FREE_MEMORY, differentiable=False)
    assert time.forward_s > 0 and time.backward_s == 0


def test_local_copies_take_memory_time() -> None:
    slow = Hardware("toy", Device("toy", 10**9, {}, 1.0, 0.0), (Tier("link", (8,), 0.0, math.inf),))
    (slice_,) = convert(Layout.parse("[8, 6]"), Layout.parse("[8/tp, 6]"), TP)
    assert step_time(slice_, torch.float32, TP, RANKS, slow) == OpTime(2 * 12 * 4, 0.0)
    (columns,) = convert(Layout.parse("[8, 8]"), Layout.parse("[8, 8/tp]"), TP)
    # Gathered pieces are joined.
    assert step_time(columns, torch.float32, TP, RANKS, slow).backward_s == 2 * 64 * 4
    (zeros,) = convert(Layout.parse("[8, 6]"), Layout.parse("[8, 6] P(tp)"), TP)
    assert step_time(zeros, torch.float32, TP, RANKS, slow) == OpTime(48 * 4, 0.0)


def test_links_are_those_of_the_ranks() -> None:
    tiers = (Tier("near", (2, 2), 0.0, 1e9), Tier("far", (4,), 0.0, 1e6))
    hardware = Hardware("toy", Device("toy", 10**9, {}, math.inf, 0.0), tiers)
    mesh = Mesh((("tp", 2),))
    (step,) = convert(Layout.parse("[8] P(tp)"), Layout.parse("[8]"), mesh)
    near, far = (
        step_time(step, torch.float32, mesh, ranks, hardware).forward_s
        for ranks in ((0, 1), (1, 2))
    )
    assert far == pytest.approx(1000 * near)


@pytest.mark.parametrize("seed", range(20))
def test_times_grow_with_the_tensor(seed: int) -> None:
    rng = random.Random(seed)
    mesh = Mesh((("a", 2), ("b", 3)))
    hardware = Hardware(
        "toy", Device("toy", 10**9, {}, 1e9, 1e-9), (Tier("link", (8,), 1e-6, 1e8),)
    )

    def layout(size: int, marks: list[str]) -> Layout:
        cut = "".join(f"/{axis}" for axis, mark in zip("ab", marks, strict=True) if mark == "S")
        named = [
            f"{m}({axis})"
            for m in "PG"
            for axis, mark in zip("ab", marks, strict=True)
            if mark == m
        ]
        if len(named) == 2 and named[0][0] == named[1][0]:
            named = [f"{named[0][0]}(a, b)"]
        return Layout.parse(" ".join([f"[{size}{cut}]", *named]))

    source, target = ([rng.choice("SRGP") for _ in range(2)] for _ in range(2))
    totals = []
    for size in (60, 120, 6000):
        steps = convert(layout(size, source), layout(size, target), mesh)
        times = [step_time(step, torch.float32, mesh, tuple(range(6)), hardware) for step in steps]
        totals.append(sum(time.total_s for time in times))
    assert totals == sorted(totals)


def test_a_reduction_goes_over_partial_axes_and_units() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))

    def reduced(layout: str, num_units: int = 1) -> float:
        return reduction_s(
            Layout.parse(layout), torch.float32, mesh, RANKS, FREE_MEMORY, num_units=num_units
        )

    assert reduced("[64]") == 0.0
    share = 4 * 64 / DEFAULT_BUCKET_BYTES
    assert reduced("[64] G(dp)") == pytest.approx(
        share * collective_s(FREE_MEMORY, "all_reduce", DEFAULT_BUCKET_BYTES, (0, 2))
    )
    everyone = share * collective_s(FREE_MEMORY, "all_reduce", DEFAULT_BUCKET_BYTES, (0, 2, 4, 6))
    assert reduced("[64] G(dp)", num_units=2) == pytest.approx(everyone)
    assert reduced("[64/tp] G(dp)", num_units=2) == pytest.approx(everyone / 2)
    assert reduced("[64]", num_units=2) == pytest.approx(
        share * collective_s(FREE_MEMORY, "all_reduce", DEFAULT_BUCKET_BYTES, (0, 4))
    )


def test_reductions_of_parameters_add_up() -> None:
    one = reduction_s(Layout.parse("[100] G(tp)"), torch.float32, TP, RANKS, FREE_MEMORY)
    assert reduction_s(
        Layout.parse("[300] G(tp)"), torch.float32, TP, RANKS, FREE_MEMORY
    ) == pytest.approx(3 * one)
