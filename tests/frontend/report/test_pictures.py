"""Pictures are well-formed SVG that says what it shows."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.schedule.published import generate
from shardwright.compiler.schedule.simulate import simulate
from shardwright.frontend.report.pictures import (
    Bar,
    Box,
    bars,
    colour_of,
    over_time,
    ranks_on_machine,
    timeline,
)

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_bars_have_labels_totals_and_lengths_to_scale() -> None:
    rows = [Bar("rank 0", {"parameters": 2e9, "a < b": 1e9}), Bar("rank 1", {"parameters": 1e9})]
    picture = bars(rows, "B", limit=2.5e9)
    found = texts(picture)
    assert {"rank 0", "rank 1", "3 GB", "1 GB", "parameters", "a < b", "limit 2.5 GB"} <= set(found)
    widths = [
        float(r.attrib["width"])
        for g in ElementTree.fromstring(picture).iter(f"{SVG}g")
        for r in g.iter(f"{SVG}rect")
    ]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.02) and widths[2] == pytest.approx(
        widths[1], abs=0.02
    )
    red = [
        e.text
        for e in ElementTree.fromstring(picture).iter(f"{SVG}text")
        if e.attrib.get("font-weight") == "bold"
    ]
    assert red == ["3 GB"], "what exceeds the limit stands out"


def test_a_limit_far_off_is_named_and_does_not_shrink_the_bars() -> None:
    row = Bar("rank 0", {"parameters": 1e9})
    near, far = bars([row], "B", limit=2e9), bars([row], "B", limit=80e9)
    assert "far below the limit, 80 GB" in texts(far) and "<line" in near and "<line" not in far
    assert 'width="730.00"' in far and 'width="365.00"' in near


def test_a_legend_takes_as_many_lines_as_it_needs() -> None:
    names = [f"a category with a long name {index}" for index in range(9)]
    picture = ElementTree.fromstring(bars([Bar("rank 0", dict.fromkeys(names, 1.0))], "s"))
    written = {
        e.text: (float(e.attrib["x"]), float(e.attrib["y"])) for e in picture.iter(f"{SVG}text")
    }
    assert all(written[name][0] + 7 * len(name) <= 960 for name in names)
    assert (
        len({written[name] for name in names}) == len(names)
        and len({written[name][1] for name in names}) == 3
    )
    assert written["rank 0"][1] > max(written[name][1] for name in names)


def rows_of(
    name: str, num_ranks: int, num_microbatches: int, chunks: int = 1
) -> dict[str, list[Box]]:
    spans = simulate(generate(name, num_ranks, num_microbatches, chunks)).spans
    return {
        f"rank {i}": [Box(str(span.action), span.start_s, span.end_s) for span in row]
        for i, row in enumerate(spans)
    }


def test_a_schedule_has_a_box_for_each_action_where_it_is_in_time() -> None:
    rows = rows_of("zb_v", 3, 6, 2)
    root = ElementTree.fromstring(timeline(rows, width=1000))
    drawn = [(g.findtext(f"{SVG}title"), g.find(f"{SVG}rect")) for g in root.iter(f"{SVG}g")]
    boxes = [box for row in rows.values() for box in row]
    scale = (1000 - 120 - 16) / max(box.end for box in boxes)
    for box, (told, rect) in zip(boxes, drawn, strict=True):
        assert (
            rect is not None
            and told == f"{box.name}: {amount(box.start, 's')} to {amount(box.end, 's')}"
        )
        assert float(rect.attrib["x"]) == pytest.approx(120 + box.start * scale, abs=0.01)
        assert float(rect.attrib["width"]) == pytest.approx((box.end - box.start) * scale, abs=0.01)
    words = {text.text for text in root.iter(f"{SVG}text")}
    assert {
        "rank 0",
        "rank 1",
        "rank 2",
        "forward",
        "gradients of inputs",
        "gradients of weights",
        "5",
    } <= words
    assert "backward" not in words, "the legend names what is there"


def test_colours_tell_the_stages_of_a_rank_apart() -> None:
    def fills(*schedule: Any) -> list[set[str]]:
        rows = rows_of(*schedule)
        rects = iter(
            [g.find(f"{SVG}rect") for g in ElementTree.fromstring(timeline(rows)).iter(f"{SVG}g")]
        )
        return [{next(rects).attrib["fill"] for _ in row} for row in rows.values()]  # type: ignore[union-attr]

    assert [len(row) for row in fills("infer_pipe", 2, 2, 3)] == [3, 3]
    first, second = fills("infer_pipe", 2, 2)
    assert first == second and len(first) == 1, "where each rank has one stage, all look alike"


def test_parts_that_are_numbered_share_a_colour() -> None:
    boxes = [
        Box("forward", 0.0, 1.0),
        *(Box(f"reduce bucket {index}", 1.0 + index, 2.0 + index) for index in range(9)),
    ]
    picture = timeline({"rank 0": boxes})
    rects = [g.find(f"{SVG}rect") for g in ElementTree.fromstring(picture).iter(f"{SVG}g")]
    assert len({rect.attrib["fill"] for rect in rects if rect is not None}) == 2
    assert texts(picture)[:3] == ["forward", "reduce bucket", "rank 0"]


def test_every_rank_has_a_box_with_its_place() -> None:
    places = [f"pp {rank // 4}, tp {rank % 4}" for rank in range(8)]
    picture = ranks_on_machine(places, (4, 4), {rank: f"stage {rank // 4}" for rank in range(8)})
    titles = [e.text for e in ElementTree.fromstring(picture).iter(f"{SVG}title")]
    assert titles[5] == "rank 5: pp 1, tp 1, stage 1" and len(titles) == 8
    assert "and 44 more ranks" in texts(
        ranks_on_machine([f"tp {rank}" for rank in range(300)], (8,) * 40, {})
    )


def test_frames_are_of_the_size_of_each_node() -> None:
    """Nodes may be uneven, and the last may be used in part."""
    root = ElementTree.fromstring(
        ranks_on_machine([f"tp {rank}" for rank in range(6)], (3, 1, 4), {})
    )
    frames = [rect for rect in root.findall(f"{SVG}rect") if rect.attrib["fill"] == "none"]
    tops = {text.text: float(text.attrib["y"]) for text in root.iter(f"{SVG}text")}
    assert [frame.attrib["width"] for frame in frames] == ["340", "116", "228"]
    in_frames = [float(frame.attrib["y"]) for frame in frames]
    nodes = [sum(tops[f"rank {rank}"] > top for top in in_frames) for rank in range(6)]
    assert nodes == [1, 1, 1, 2, 3, 3]


def test_memory_over_time_keeps_its_peaks_in_few_columns() -> None:
    moments = [(f"operator {i}", {"parameter": 10.0, "activation": float(i)}) for i in range(5000)]
    picture = ElementTree.fromstring(over_time(moments, "B", limit=6000.0))
    titles = [element.text or "" for element in picture.iter(f"{SVG}title")]
    assert len(titles) < 500 and "operator 4999: 5.01 kB" in titles
    words = {element.text for element in picture.iter(f"{SVG}text")}
    assert {"most 5.01 kB", "limit 6 kB", "parameter"} <= words and "not to scale" not in words
    # The line of a limit that is far off is above all columns, and says that it is not to scale.
    far = over_time(moments, "B", limit=80e9)
    lines = [float(e.attrib["y1"]) for e in ElementTree.fromstring(far).iter(f"{SVG}line")]
    assert lines == sorted(lines) and "limit 80 GB" in far and "not to scale" in far


def test_what_takes_almost_no_time_is_seen() -> None:
    rows = {"rank 0": [Box("0F0", 0.0, 1.0), Box("optimizer step", 1.0, 1.0001)]}
    *_, last = ElementTree.fromstring(timeline(rows)).iter(f"{SVG}rect")
    assert last.attrib["fill"] == colour_of("optimizer step") and "stroke" not in last.attrib
    assert float(last.attrib["width"]) >= 2


def test_a_colour_has_one_meaning() -> None:
    assert colour_of("tp all_reduce") == colour_of("dp all_reduce") != colour_of("tp all_gather")
    assert colour_of("parameter") in over_time([("a", {"gradient": 1.0, "parameter": 1.0})], "B")
    assert colour_of("parameter") in bars([Bar("rank 0", {"parameter": 1.0})], "B")
