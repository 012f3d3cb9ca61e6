"""Numbers from points: fits find what made the points, and say how far off they are."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.cost.machine.hardware import COLLECTIVES, Device, Hardware, Tier
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.frontend.calibrate.fit import (
    fit_fetches,
    fit_host,
    fit_launches,
    fit_link,
    fit_products,
    fit_rates,
    fit_streams,
    mean_error,
)

SIZES = [2**power for power in range(8, 26, 2)]


def link_points(
    latency_s: float, bytes_per_s: float, kinds: tuple[str, ...], ranks: tuple[int, ...]
) -> list[dict[str, Any]]:
    hardware = Hardware(
        "made", Device("d", 1, {}, 1.0, 0.0), (Tier("node", (max(ranks),), latency_s, bytes_per_s),)
    )
    return [
        {
            "kind": kind,
            "ranks": p,
            "bytes": n,
            "seconds": collective_s(hardware, kind, n, range(2 if kind == "send" else p)),
        }
        for kind in kinds
        for p in ranks
        for n in SIZES
    ]


@given(
    st.floats(1e-6, 1e-3),
    st.floats(1e8, 1e12),
    st.sampled_from(COLLECTIVES),
    st.sampled_from([(2,), (4,), (8,), (2, 8), (3, 5)]),
)
def test_a_link_is_found_again(
    latency_s: float, bytes_per_s: float, kind: str, ranks: tuple[int, ...]
) -> None:
    link, error = fit_link(link_points(latency_s, bytes_per_s, (kind,), ranks))
    assert error < 0.02
    assert link.latency_s == pytest.approx(latency_s, rel=0.05)
    if bytes_per_s < SIZES[-1] / latency_s / 10:  # large messages show it
        assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)


def test_all_kinds_share_one_link() -> None:
    link, error = fit_link(link_points(2e-5, 3e9, COLLECTIVES, (2, 4)))
    assert (link.latency_s, link.bytes_per_s) == (
        pytest.approx(2e-5, rel=1e-2),
        pytest.approx(3e9, rel=1e-2),
    )
    assert error < 1e-2


def test_the_error_of_a_fit_is_that_of_its_points() -> None:
    points, draw = link_points(2e-5, 3e9, ("all_reduce",), (4,)), random.Random(0)
    for point in points:
        point["seconds"] *= 1.25 if draw.random() < 0.5 else 0.8
    link, error = fit_link(points)
    assert 0.15 < error < 0.35
    assert link.latency_s == pytest.approx(2e-5, rel=0.3) and link.bytes_per_s == pytest.approx(
        3e9, rel=0.3
    )


def test_times_that_do_not_grow_are_all_latency_and_times_without_a_floor_all_bandwidth() -> None:
    flat = [
        {"kind": "send", "ranks": 2, "bytes": n, "seconds": 1e-3 / (1 + n / 1e9)} for n in SIZES[:4]
    ]
    link, _ = fit_link(flat)
    assert link.latency_s == pytest.approx(1e-3, rel=1e-2) and link.bytes_per_s >= 1e13
    steep = [{"kind": "send", "ranks": 2, "bytes": n, "seconds": (n / 1e9) ** 1.1} for n in SIZES]
    assert fit_link(steep)[0].latency_s == 0.0


def test_products_become_a_table_and_are_checked_between_its_points() -> None:
    def seconds(m: int, n: int, k: int) -> float:
        return 1e-6 + 2.0 * m * n * k / 1e11

    sizes = (8, 64, 512)
    grid = [(m, n, k, False) for m in sizes for n in sizes for k in sizes]
    points = [
        {
            "dtype": dtype,
            "m": m,
            "n": n,
            "k": k,
            "check": check,
            "seconds": factor * seconds(m, n, k),
        }
        for dtype, factor in (("float32", 1.0), ("float64", 2.0))
        for m, n, k, check in [*grid, (23, 23, 23, True), (181, 64, 8, True)]
    ]
    peaks, tables, errors = fit_products(points)
    assert (
        peaks["float32"]
        == pytest.approx(2 * peaks["float64"])
        == pytest.approx(2 * 512**3 / seconds(512, 512, 512))
    )
    assert tables["float32"] == tables["float64"]
    for m, n, k, _ in grid:
        rate = 2.0 * m * n * k / seconds(m, n, k)
        assert tables["float32"].at(m, n, k) * peaks["float32"] == pytest.approx(rate)
    table = tables["float32"]
    modelled = [
        2.0 * m * n * k / (table.at(m, n, k) * peaks["float32"])
        for m, n, k in ((23, 23, 23), (181, 64, 8))
    ]
    measured = [seconds(23, 23, 23), seconds(181, 64, 8)]
    assert errors["float32"] == pytest.approx(mean_error(zip(measured, modelled, strict=True)))
    assert 0 < errors["float32"] < 0.5


def test_streams_keep_their_size() -> None:
    points = [
        {"stream": name, "size": size, "bytes": passes * size, "seconds": passes * size / rate}
        for size, rates in ((1000, (1e11, 1e11)), (100000, (2e10, 0.75e10)))
        for name, passes, rate in (("copy", 2, rates[0]), ("add", 3, rates[1]))
    ]
    bytes_per_s, table, error = fit_streams(points)
    assert bytes_per_s == pytest.approx(2e10)  # of the large copy; additions make new tensors
    assert table.num_bytes == (2500, 250000) and table.bytes_per_s == pytest.approx((1e11, 1e10))
    assert 0.1 < error < 0.4  # the two large streams lie on either side of the table's point


def test_launches_take_the_median() -> None:
    seconds, error = fit_launches([{"seconds": s} for s in (1e-6, 2e-6, 4e-6)])
    assert (seconds, error) == (2e-6, pytest.approx(2 ** (2 / 3) - 1))


def test_a_host_adds_what_is_beyond_a_launch() -> None:
    assert fit_host({"forward_s": 5e-6, "backward_s": 8e-6}, 2e-6) == pytest.approx((3e-6, 6e-6))
    assert fit_host({"forward_s": 1e-6, "backward_s": 8e-6}, 2e-6) == (0.0, pytest.approx(6e-6))


def test_fetching_takes_what_cached_operands_save() -> None:
    points = [
        {"bytes": n, "cached_s": 1e-3, "seconds": 1e-3 + n / 1e10} for n in (10**6, 4 * 10**6)
    ]
    assert fit_fetches(points) == (pytest.approx(1e10), pytest.approx(0.0))
    assert fit_fetches([{"bytes": 10**6, "cached_s": 1e-3, "seconds": 1.005e-3}]) == (None, 0.0)


def test_rates_are_bytes_by_seconds() -> None:
    point = {
        "operator": "gelu",
        "forward_bytes": 80,
        "forward_s": 2.0,
        "backward_bytes": 120,
        "backward_s": 4.0,
    }
    assert fit_rates([point]) == {"gelu": (40.0, 30.0)}


def test_too_much_and_too_little_are_errors_alike() -> None:
    assert mean_error([(1.0, 2.0)]) == pytest.approx(1.0) == mean_error([(2.0, 1.0)])
    assert mean_error([]) == 0.0
