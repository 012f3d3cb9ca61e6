"""Pictures are well-formed SVG that says what it shows."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from shardwright.compiler.report.pictures import Bar, amount, bars, ranks_on_machine
from shardwright.runtime.layout import Mesh

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_bars_have_labels_totals_and_lengths_to_scale() -> None:
    rows = [Bar("rank 0", {"parameters": 2 * 2.0**30, "a < b": 2.0**30}), Bar("rank 1", {"parameters": 2.0**30})]
    picture = bars(rows, "B", limit=2.5 * 2**30)
    found = texts(picture)
    assert {"rank 0", "rank 1", "3 GiB", "1 GiB", "parameters", "a < b", "limit 2.5 GiB"} <= set(found)
    widths = [float(r.attrib["width"]) for g in ElementTree.fromstring(picture).iter(f"{SVG}g") for r in g.iter(f"{SVG}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.02) and widths[2] == pytest.approx(widths[1], abs=0.02)
    red = [e.text for e in ElementTree.fromstring(picture).iter(f"{SVG}text") if e.attrib.get("font-weight") == "bold"]
    assert red == ["3 GiB"], "what exceeds the limit stands out"


def test_a_limit_far_off_is_named_and_does_not_shrink_the_bars() -> None:
    row = Bar("rank 0", {"parameters": 2.0**30})
    near, far = bars([row], "B", limit=2 * 2**30), bars([row], "B", limit=80 * 2**30)
    assert "far below the limit, 80 GiB" in texts(far) and "<line" in near and "<line" not in far
    assert 'width="730.00"' in far and 'width="365.00"' in near


def test_a_legend_takes_as_many_lines_as_it_needs() -> None:
    names = [f"a category with a long name {index}" for index in range(9)]
    picture = ElementTree.fromstring(bars([Bar("rank 0", dict.fromkeys(names, 1.0))], "s"))
    written = {e.text: (float(e.attrib["x"]), float(e.attrib["y"])) for e in picture.iter(f"{SVG}text")}
    assert all(written[name][0] + 7 * len(name) <= 960 for name in names)
    assert len({written[name] for name in names}) == len(names) and len({written[name][1] for name in names}) == 3
    assert written["rank 0"][1] > max(written[name][1] for name in names)


def test_every_rank_has_a_box_with_its_place() -> None:
    picture = ranks_on_machine(Mesh((("pp", 2), ("tp", 4))), 4, {rank: f"stage {rank // 4}" for rank in range(8)})
    titles = [e.text for e in ElementTree.fromstring(picture).iter(f"{SVG}title")]
    assert titles[5] == "rank 5: pp 1, tp 1, stage 1" and len(titles) == 8
    assert "and 44 more ranks" in texts(ranks_on_machine(Mesh((("tp", 300),)), 8, {}))


@pytest.mark.parametrize(
    ("value", "unit", "text"), [(1.5 * 2**30, "B", "1.5 GiB"), (12, "B", "12 B"), (0.0124, "s", "12.4 ms"), (0, "s", "0 µs")]
)
def test_amounts_are_rounded_for_people(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text
