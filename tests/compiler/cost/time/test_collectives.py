"""Collectives: the formulas of textbooks on one tier, bounds on several, contention, and speed."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.cost.machine.hardware import (
    COLLECTIVES,
    Device,
    Hardware,
    Link,
    Tier,
    load_hardware,
)
from shardwright.compiler.cost.time.collectives import (
    _axes_rows,
    _first_of_each,
    axes_collective_s,
    collective_s,
    groups_collective_s,
)
from shardwright.runtime.errors import ConfigError, InternalError
from shardwright.runtime.layout import Mesh

DEVICE = Device("d", 1, {}, 1.0, 0.0)
A, B = 1e-6, 1e9
FLAT = Hardware("flat", DEVICE, (Tier("all", (16,), A, B),))
GROUP_KINDS = tuple(kind for kind in COLLECTIVES if kind != "send")


def two_tiers(sizes: tuple[int, ...], **outer: float) -> Hardware:
    """Nodes of the given sizes: 100 times slower links between them."""
    return Hardware(
        "two",
        DEVICE,
        (Tier("node", sizes, A, 100 * B), Tier("net", (sum(sizes),), 10 * A, B, **outer)),
    )


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """One to three tiers of uneven groups, each slower than the one inside it."""
    sizes = [tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))]
    for _ in range(draw(st.integers(0, 2))):
        groups, inner = [], list(sizes[-1])
        while inner:
            take = draw(st.integers(1, len(inner)))
            groups.append(sum(inner[:take]))
            inner = inner[take:]
        sizes.append(tuple(groups))
    if len(sizes[-1]) > 1:
        sizes.append((sum(sizes[-1]),))
    tiers, latency, rate = [], draw(st.floats(1e-7, 1e-5)), draw(st.floats(1e8, 1e11))
    for index, groups in enumerate(sizes):
        shared = {
            name: draw(st.none() | st.floats(0.5 * rate, 8 * rate))
            for name in ("uplink_bytes_per_s", "fabric_bytes_per_s")
        }
        tiers.append(Tier(f"t{index}", groups, latency, rate, **shared))
        latency, rate = latency * draw(st.floats(1, 10)), rate / draw(st.floats(1, 20))
    return Hardware("random", DEVICE, tuple(tiers))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Hardware, tuple[int, ...]]:
    hardware = draw(machines())
    ranks = draw(st.permutations(range(hardware.num_devices)))
    return hardware, tuple(ranks[: draw(st.integers(1, len(ranks)))])


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("num_bytes", [1.0, 1e4, 1e9])
def test_one_tier_gives_the_formulas_of_textbooks(num_ranks: int, num_bytes: float) -> None:
    p, n, depth = num_ranks, num_bytes, math.ceil(math.log2(num_ranks))
    ring = (p - 1) * (A + n / p / B)
    expected = {
        "reduce_scatter": ring,
        "all_gather": ring,
        "all_reduce": 2 * min(ring, depth * A + n / B),
        "all_to_all": ring,
        "broadcast": min((p - 1) * A + n / B, depth * (A + n / B)),
    }
    for kind, seconds in expected.items():
        assert collective_s(FLAT, kind, n, range(p)) == pytest.approx(seconds, rel=1e-12), kind
    assert collective_s(FLAT, "send", n, (3, 11)) == pytest.approx(A + n / B, rel=1e-12)


@given(machines(), st.sampled_from(COLLECTIVES), st.floats(0, 1e12))
def test_one_rank_costs_nothing(hardware: Hardware, kind: str, num_bytes: float) -> None:
    assert collective_s(hardware, kind, num_bytes, (hardware.num_devices - 1,)) == 0.0


@given(groups(), st.sampled_from(GROUP_KINDS), st.floats(0, 1e11), st.floats(0, 1e11))
def test_more_bytes_never_take_less(
    group: tuple[Hardware, tuple[int, ...]], kind: str, some: float, other: float
) -> None:
    assert collective_s(group[0], kind, min(some, other), group[1]) <= collective_s(
        group[0], kind, max(some, other), group[1]
    )


@given(groups(), st.floats(0, 1e11))
def test_an_all_reduce_takes_no_longer_than_its_halves(
    group: tuple[Hardware, tuple[int, ...]], num_bytes: float
) -> None:
    """Around a ring it takes as long; but only an all-reduce has trees, too."""
    scatter = collective_s(group[0], "reduce_scatter", num_bytes, group[1])
    gather = collective_s(group[0], "all_gather", num_bytes, group[1])
    whole = collective_s(group[0], "all_reduce", num_bytes, group[1])
    assert scatter == gather and whole <= 2 * gather * (1 + 1e-12)


@given(
    groups(),
    st.sampled_from(GROUP_KINDS),
    st.floats(0, 1e11),
    st.integers(0, 3),
    st.floats(1, 10),
    st.floats(1, 10),
)
def test_a_slower_tier_never_helps(
    group: tuple[Hardware, tuple[int, ...]],
    kind: str,
    num_bytes: float,
    index: int,
    latency: float,
    rate: float,
) -> None:
    hardware, ranks = group
    tiers = list(hardware.tiers)
    tier = tiers[index % len(tiers)]
    shared = {
        name: None if getattr(tier, name) is None else getattr(tier, name) / rate
        for name in ("uplink_bytes_per_s", "fabric_bytes_per_s")
    }
    slower = replace(
        tier, latency_s=tier.latency_s * latency, bytes_per_s=tier.bytes_per_s / rate, **shared
    )
    tiers[index % len(tiers)] = slower
    before = collective_s(hardware, kind, num_bytes, ranks)
    assert before <= collective_s(replace(hardware, tiers=tuple(tiers)), kind, num_bytes, ranks) * (
        1 + 1e-12
    )


@given(groups(), st.sampled_from(GROUP_KINDS), st.floats(0, 1e10))
def test_the_order_of_ranks_does_not_count(
    group: tuple[Hardware, tuple[int, ...]], kind: str, num_bytes: float
) -> None:
    assert collective_s(group[0], kind, num_bytes, group[1]) == collective_s(
        group[0], kind, num_bytes, sorted(group[1])
    )


@given(machines(), st.sampled_from(COLLECTIVES), st.floats(0, 1e9))
def test_two_ranks_take_what_others_of_their_tier_do(
    hardware: Hardware, kind: str, num_bytes: float
) -> None:
    """They are priced as the first two of it."""
    for pair in itertools.permutations(range(hardware.num_devices), 2):
        own_s = groups_collective_s(hardware, kind, num_bytes, [pair])
        assert collective_s(hardware, kind, num_bytes, pair) == own_s


@given(groups(), st.sampled_from(GROUP_KINDS), st.floats(1, 1e11))
def test_no_collective_beats_what_must_leave_a_device(
    group: tuple[Hardware, tuple[int, ...]], kind: str, num_bytes: float
) -> None:
    """Each rank sends or receives (p-1)/p of the bytes, at most at the rate of the fastest tier."""
    hardware, ranks = group
    p, rate = len(ranks), max(tier.bytes_per_s for tier in hardware.tiers)
    least = {
        "all_reduce": 2 * (p - 1) / p,
        "broadcast": 1.0 if p > 1 else 0.0,
        "all_to_all": (p - 1) / p / len(hardware.tiers),
    }
    assert collective_s(hardware, kind, num_bytes, ranks) >= least.get(
        kind, (p - 1) / p
    ) * num_bytes / rate * (1 - 1e-12)


def test_all_links_of_a_node_are_used_between_nodes() -> None:
    n = 1e9
    # A sum over two nodes of 8, tier by tier: inside the node, then each member's piece, an eighth,
    # between nodes, and the same ways back.
    by_tier = 2 * (7 / 8 * n / (100 * B) + n / 8 / 2 / B)
    assert collective_s(two_tiers((8, 8)), "all_reduce", n, range(16)) == pytest.approx(
        by_tier, rel=1e-3
    )
    # A ring brings everything through every node over 8 links, and inside at the same time: better
    # if there are many nodes, and all that a gather has.
    for num_nodes in (2, 64):
        p = 8 * num_nodes
        gather = collective_s(two_tiers((8,) * num_nodes), "all_gather", n, range(p))
        assert gather == pytest.approx((p - 1) / p * n / (8 * B), rel=1e-2)
    many = collective_s(two_tiers((8,) * 64), "all_reduce", n, range(512))
    assert many == pytest.approx(2 * gather, rel=1e-2)
    assert many < 2 * (63 / 64 * n / 8 / B + 7 / 8 * n / (100 * B))
    # One member in each node: its own link alone.
    assert collective_s(two_tiers((8, 8)), "all_gather", n, (0, 8)) == pytest.approx(
        n / 2 / B, rel=1e-3
    )
    # The thinnest node decides: 2 links.
    thin = two_tiers((8, 2))
    assert collective_s(thin, "all_gather", n, range(10)) == pytest.approx(
        9 / 10 * n / 2 / B, rel=1e-3
    )
    assert collective_s(thin, "all_reduce", n, range(10)) == pytest.approx(
        2 * (n / 2 / 2 / B + 7 / 8 * n / (100 * B)), rel=1e-3
    )


def test_a_ring_pipelines_over_tiers() -> None:
    """Nodes of 2, links between them half as fast: a ring keeps both busy, tier after tier takes
    their sum.
    """
    hardware = Hardware(
        "ring", DEVICE, (Tier("node", (2, 2), 0.0, B), Tier("net", (4,), 0.0, B / 2))
    )
    assert collective_s(hardware, "all_gather", 1e9, range(4)) == pytest.approx(
        3 / 4 * 1e9 / B, rel=1e-12
    )


def test_latency_counts_every_hop_of_a_ring_but_the_cheapest_and_the_depth_of_trees() -> None:
    nodes = two_tiers((2, 2))
    # Hops 0-1 and 2-3 in nodes, 1-2 and 3-0 between them; halving: one step in the node, one
    # between nodes.
    assert collective_s(nodes, "broadcast", 0, range(4)) == pytest.approx(
        min(A + 2 * 10 * A, A + 10 * A)
    )
    assert collective_s(nodes, "all_reduce", 0, range(4)) == pytest.approx(2 * (A + 10 * A))
    # No hop of a gather is left out but the cheapest.
    assert collective_s(nodes, "all_gather", 0, range(4)) == pytest.approx(A + 2 * 10 * A)
    # By tier; pairwise: A + 2 * 10 A.
    assert collective_s(nodes, "all_to_all", 0, range(4)) == pytest.approx(A + 10 * A)


def test_trees_win_where_the_latency_of_rings_hurts() -> None:
    """1 MiB over 32 nodes of 8."""
    hardware = load_hardware("a100-80gb", 256)
    inner, outer = hardware.tiers
    n = 2**20
    depth = 2 * (3 * inner.latency_s + 5 * outer.latency_s)
    tree = depth + 2 * n / min(inner.bytes_per_s, 8 * outer.bytes_per_s)
    ring = 2 * 32 * outer.latency_s  # the latency between nodes alone
    assert tree < ring and collective_s(hardware, "all_reduce", n, range(256)) == pytest.approx(
        tree
    )
    # With links inside nodes that cost nothing, the pieces of the hierarchy are all that counts.
    hardware = replace(hardware, tiers=(replace(inner, latency_s=0.0, bytes_per_s=1e15), outer))
    pieces = 2 * min(
        31 * (outer.latency_s + n / 8 / 32 / outer.bytes_per_s),
        5 * outer.latency_s + n / 8 / outer.bytes_per_s,
    )
    assert collective_s(hardware, "all_reduce", n, range(256)) == pytest.approx(pieces, rel=1e-2)


def test_all_to_all_waits_for_the_rank_with_most_to_send_far() -> None:
    # In nodes of 3 and 1, the lonely rank sends all 3 of its pieces over its link between nodes.
    assert collective_s(two_tiers((3, 1)), "all_to_all", 4e9, range(4)) == pytest.approx(
        3e9 / B, rel=1e-3
    )
    # In nodes of 3 and 2, each of the two sends 3 of its 5 pieces there, over a link of its own.
    assert collective_s(two_tiers((3, 2)), "all_to_all", 5e9, range(5)) == pytest.approx(
        3e9 / B, rel=1e-3
    )


def test_kinds_have_numbers_of_their_own() -> None:
    tier = Tier("all", (4,), A, B, kinds={"all_gather": Link(0.0, 2 * B)})
    hardware = Hardware("kinds", DEVICE, (tier,))
    assert collective_s(hardware, "all_gather", 4e9, range(4)) == pytest.approx(3e9 / (2 * B))
    assert collective_s(hardware, "reduce_scatter", 4e9, range(4)) == pytest.approx(3 * A + 3e9 / B)


@given(groups(), st.sampled_from(COLLECTIVES), st.floats(0, 1e9))
def test_the_latest_of_more_ranks_is_later(
    group: tuple[Hardware, tuple[int, ...]], kind: str, num_bytes: float
) -> None:
    hardware, ranks = group[0], group[1][: 2 if kind == "send" else None]
    late = replace(hardware, late_s=1e-3)
    waited = collective_s(late, kind, num_bytes, ranks) - collective_s(
        hardware, kind, num_bytes, ranks
    )
    assert waited == pytest.approx(1e-3 * math.ceil(math.log2(len(ranks))), rel=1e-6)


def test_axes_of_a_mesh_are_laid_over_ranks() -> None:
    mesh = Mesh((("dp", 2), ("tp", 3)))
    assert _axes_rows(mesh, ("tp",), (10, 11, 12, 20, 21, 22)).tolist() == [
        [10, 11, 12],
        [20, 21, 22],
    ]
    assert _axes_rows(mesh, ("dp",), range(6)).tolist() == [[0, 3], [1, 4], [2, 5]]
    for axis in mesh.names:
        assert _axes_rows(mesh, (axis,), range(6)).tolist() == [
            list(group) for group in mesh.groups(axis)
        ]


def test_groups_are_made_without_the_coordinates_of_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan may have a million ranks, and a search asks for groups along many axes."""
    mesh = Mesh((("dp", 2), ("cp", 3), ("tp", 2)))
    wanted = {}
    for count in range(4):
        for axes in itertools.permutations(mesh.names, count):
            by_others: dict[tuple[int, ...], list[int]] = {}
            for rank, coords in enumerate(mesh.all_coords()):
                others = tuple(coords[name] for name in mesh.names if name not in axes)
                by_others.setdefault(others, []).append(rank)
            wanted[axes] = [tuple(ranks) for ranks in by_others.values()]

    def counted(*_: object) -> None:
        raise AssertionError("a rank was asked for its coordinates")

    monkeypatch.setattr(Mesh, "coords", counted)
    assert {axes: mesh.groups(axes) for axes in wanted} == wanted
    assert mesh.groups("tp") == wanted["tp",]


@pytest.mark.parametrize("num_kinds", [1, 2, 20])
def test_groups_that_are_alike_are_priced_once(num_kinds: int) -> None:
    rng = np.random.default_rng(0)
    kinds = rng.integers(num_kinds, size=300)
    keys = np.stack([kinds // 3, kinds % 3], axis=1).astype(np.float64)
    firsts = {int(kind): row for row, kind in reversed(list(enumerate(kinds)))}
    assert sorted(_first_of_each(keys)) == sorted(firsts.values())
    assert _first_of_each(keys)[0] == 0 and not _first_of_each(keys[:0])


def test_groups_that_share_a_card_take_turns() -> None:
    """Eight groups of two over two nodes at once: own links do not mind, one card per node divides
    among them.
    """
    mesh, n = Mesh((("dp", 2), ("tp", 8))), 1e9
    alone = collective_s(two_tiers((8, 8)), "all_gather", n, (0, 8))
    assert axes_collective_s(two_tiers((8, 8)), "all_gather", n, mesh, ("dp",), range(16)) == alone
    shared = two_tiers((8, 8), uplink_bytes_per_s=2 * B)
    assert collective_s(shared, "all_gather", n, (0, 8)) == alone
    assert axes_collective_s(shared, "all_gather", n, mesh, ("dp",), range(16)) == pytest.approx(
        n / 2 / (2 * B / 8), rel=1e-3
    )
    # tp stays inside nodes and never touches the card.
    assert axes_collective_s(shared, "all_gather", n, mesh, ("tp",), range(16)) == collective_s(
        shared, "all_gather", n, range(8)
    )


def test_a_fabric_is_shared_by_all_that_send() -> None:
    n, mesh = 1e9, Mesh((("dp", 4), ("tp", 4)))
    bus = Hardware("bus", DEVICE, (Tier("bus", (16,), 0.0, B, fabric_bytes_per_s=4 * B),))
    assert collective_s(bus, "all_gather", n, range(4)) == pytest.approx(3 / 4 * n / B)
    assert axes_collective_s(bus, "all_gather", n, mesh, ("tp",), range(16)) == pytest.approx(
        3 / 4 * n / (B / 4)
    )


def test_the_slowest_group_of_an_axis_counts() -> None:
    """Pairs in nodes of 3: (0, 1) and (4, 5) stay inside, (2, 3) spans both."""
    hardware, mesh = two_tiers((3, 3)), Mesh((("dp", 3), ("tp", 2)))
    slowest = collective_s(hardware, "all_reduce", 1e9, (2, 3))
    assert axes_collective_s(hardware, "all_reduce", 1e9, mesh, ("tp",), range(6)) == slowest
    assert groups_collective_s(hardware, "all_reduce", 1e9, [(0, 1), (2, 3), (4, 5)]) == slowest
    assert groups_collective_s(hardware, "all_reduce", 1e9, [(0, 1), (4, 5)]) < slowest / 50


@pytest.mark.parametrize("name", ["h100", "a100-80gb", "mi300x", "gb200-nvl72", "cpu"])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 3), (2, 2, 2), (2, 8), (4, 4, 4), (2, 4, 2)])
def test_one_sum_over_two_axes_takes_no_longer_than_one_after_the_other(
    name: str, sizes: tuple[int, ...]
) -> None:
    """One sum sends less; where one axis is inside of nodes and one between them, it is
    hierarchical.
    """
    mesh = Mesh(tuple(zip("abc", sizes, strict=False)))
    hardware, ranks = load_hardware(name, mesh.size), range(mesh.size)
    for axes in itertools.combinations(mesh.names, 2):
        for num_bytes in (0.0, 1e3, 1e5, 1e7, 1e9):
            once = axes_collective_s(hardware, "all_reduce", num_bytes, mesh, axes, ranks)
            each = [
                axes_collective_s(hardware, "all_reduce", num_bytes, mesh, (axis,), ranks)
                for axis in axes
            ]
            assert once <= sum(each) * (1 + 1e-12), (axes, num_bytes)
            assert num_bytes < 1e9 or once < sum(each)


def test_one_sum_over_two_axes_is_that_of_all_their_ranks() -> None:
    mesh = Mesh((("dp", 2), ("tp", 4), ("tp2", 2)))
    hardware = two_tiers((8, 8))
    inside = axes_collective_s(hardware, "all_reduce", 1e9, mesh, ("tp", "tp2"), range(16))
    assert inside == collective_s(hardware, "all_reduce", 1e9, range(8))
    assert _axes_rows(mesh, ("dp", "tp2"), range(16)).tolist() == [
        list(group) for group in mesh.groups(("dp", "tp2"))
    ]


def num_calls(work: Callable[[], object]) -> int:
    """How many functions it calls and returns from: what it does, however busy the machine is."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, arg: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(events)


def test_thousands_of_ranks_are_fast_and_cached() -> None:
    hardware, mesh = load_hardware("h100", 4096), Mesh((("pp", 8), ("dp", 64), ("tp", 8)))
    ranks = tuple(range(4096))
    first = num_calls(
        lambda: [
            axes_collective_s(hardware, "all_reduce", 1e9, mesh, (axis,), ranks)
            for axis in mesh.names
        ]
    )
    assert first < 200_000  # tenths of a second
    again = num_calls(
        lambda: [
            axes_collective_s(hardware, "all_reduce", size, mesh, ("dp",), ranks)
            for size in range(100)
        ]
    )
    assert again < 50 * 100
    assert axes_collective_s(hardware, "all_reduce", 1e9, mesh, ("tp",), ranks) > 0


def test_a_group_of_half_a_million_ranks_is_priced_in_seconds() -> None:
    """Work grows with the ranks of a group, and not with their square."""
    hardware = load_hardware("h100", 2**19)
    start = time.process_time()
    everyone, half = (
        collective_s(hardware, "all_reduce", 1e9, range(count)) for count in (2**19, 2**18)
    )
    assert time.process_time() - start < 10  # less than one; with the square a minute
    assert half < everyone < 2 * half


def _error(*arguments: object) -> str:
    with pytest.raises(ConfigError) as error:
        collective_s(*arguments)
    return str(error.value)


def test_requests_that_make_no_sense_are_refused() -> None:
    assert (
        _error(FLAT, "allreduce", 1, (0, 1))
        == "there is no collective 'allreduce'\n  try:   did you mean 'all_reduce'?"
    )
    assert _error(FLAT, "all_reduce", 1, (0, 16)) == (
        "hardware 'flat' has no device 16\n"
        "  why:   it has 16, numbered from 0\n"
        "  try:   load_hardware(name, num_devices=...) describes as many as there are ranks"
    )
    assert (
        _error(FLAT, "all_reduce", 1, (3, 3))
        == "a rank is named twice in a collective\n  why:   ranks [3, 3]"
    )
    assert _error(FLAT, "send", 1, (0, 1, 2)) == "a send is between two ranks\n  why:   3 are named"
    with pytest.raises(InternalError, match="groups that communicate at once differ in size"):
        groups_collective_s(FLAT, "all_reduce", 1, [(0, 1), (2, 3, 4)])
