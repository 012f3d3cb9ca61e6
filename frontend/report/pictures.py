"""Pictures of a plan's cost as self-contained SVG: memory against its limit, where time goes, how
ranks lie on the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwright.compiler.plan.amounts import amount

PALETTE = ("#7aa6e8", "#6fbf8b", "#f2b56b", "#c79ad8", "#e58f8f", "#8fd0b4", "#b0b7c3", "#d9c25f")
"""Fills of categories in the order they are named. Text on them is black."""

_FONT = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12"'
_ROW, _BAR, _LEFT = 26, 18, 120
_BOX_WIDTH, _BOX_HEIGHT, _BOXES_PER_ROW = 112, 34, 8


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a label, and what it is made of."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def bars(rows: Sequence[Bar], unit: str, *, limit: float | None = None, width: int = 960) -> str:
    """Stacked bars, a row each, with the total at the end and a line at ``limit`` where there is
    one. A limit so far off that nobody could tell the parts of the bars is named only.
    """
    longest = max([*(row.total for row in rows), 1e-300])
    is_far = limit is not None and limit > 4 * longest
    scale = (width - _LEFT - 110) / max(longest, 0.0 if limit is None or is_far else limit)
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    legend, first = _legend(colours, width)
    height = first + _ROW * len(rows) + 16
    parts = [legend]
    for index, row in enumerate(rows):
        top, x = first + _ROW * index, float(_LEFT)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(row.label)}</text>'
        )
        for name, value in row.parts.items():
            told = f"<title>{escape(name)}: {amount(value, unit)}</title>"
            parts.append(
                f'<g>{told}<rect x="{x:.2f}" y="{top}" width="{value * scale:.2f}" '
                f'height="{_BAR}" fill="{colours[name]}"/></g>'
            )
            x += value * scale
        over = limit is not None and row.total > limit
        style = ' fill="#b00020" font-weight="bold"' if over else ""
        parts.append(
            f'<text x="{x + 6:.2f}" y="{top + 13}"{style}>{amount(row.total, unit)}</text>'
        )
    if limit is not None and is_far:
        parts.append(
            f'<text x="{_LEFT}" y="{height - 2}" fill="#666666">far below the limit, '
            f"{amount(limit, unit)}</text>"
        )
    elif limit is not None:
        x = _LEFT + limit * scale
        line = f'x1="{x:.2f}" x2="{x:.2f}" y1="{first - 6}" y2="{first + _ROW * len(rows)}"'
        parts.append(f'<line {line} stroke="#b00020" stroke-dasharray="4 3"/>')
        told = f"limit {amount(limit, unit)}"
        parts.append(
            f'<text x="{x:.2f}" y="{height - 2}" text-anchor="middle" fill="#b00020">{told}</text>'
        )
    return _svg(width, height, parts)


@dataclass(frozen=True, slots=True)
class Box:
    """Something that takes from ``start`` to ``end`` seconds."""

    name: str
    start: float
    end: float


ACTION_FILLS = {"F": "#7aa6e8", "B": "#6fbf8b", "I": "#8fd0b4", "W": "#f2b56b"}
"""Actions of a schedule by their letter: forward, backward, gradients of inputs, gradients of
weights.
"""

_ACTION = re.compile(r"(?P<stage>\d+)(?P<kind>[FBIW])(?P<microbatch>\d+)")


def timeline(rows: Mapping[str, Sequence[Box]], width: int = 960) -> str:
    """A row for each label with its boxes along one time axis. Actions of a schedule are coloured
    by kind, paler the later the stage among those of the row, and numbered by microbatch; pointing
    at a box shows its name and time.
    """
    boxes = [box for row in rows.values() for box in row]
    end = max((box.end for box in boxes), default=0.0) or 1.0
    scale = (width - _LEFT - 16) / end
    others = list(
        dict.fromkeys(_unnumbered(box.name) for box in boxes if not _ACTION.fullmatch(box.name))
    )
    kinds = list(
        dict.fromkeys(match["kind"] for box in boxes if (match := _ACTION.fullmatch(box.name)))
    )
    words = {
        "F": "forward",
        "B": "backward",
        "I": "gradients of inputs",
        "W": "gradients of weights",
    }
    colours = {words[kind]: ACTION_FILLS[kind] for kind in kinds}
    colours |= {name: PALETTE[(index + 3) % len(PALETTE)] for index, name in enumerate(others)}
    legend, first = _legend(colours, width)
    parts = [legend]
    for index, (label, row) in enumerate(rows.items()):
        top = first + _ROW * index
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(label)}</text>'
        )
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{end * scale:.2f}" height="{_BAR}" '
            'fill="#eeeeee"/>'
        )
        stages = sorted(
            {int(match["stage"]) for box in row if (match := _ACTION.fullmatch(box.name))}
        )
        parts += [_box(box, top, scale, stages, colours) for box in row]
    height = first + _ROW * len(rows) + 18
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if share == 1.0 else "middle"
        x = _LEFT + share * end * scale
        parts.append(
            f'<text x="{x:.0f}" y="{height - 4}" text-anchor="{anchor}" '
            f'fill="#666666">{amount(share * end, "s")}</text>'
        )
    return _svg(width, height, parts)


def _box(
    box: Box, top: int, scale: float, stages: Sequence[int], colours: Mapping[str, str]
) -> str:
    x, size = _LEFT + box.start * scale, (box.end - box.start) * scale
    match = _ACTION.fullmatch(box.name)
    fill, text = (
        (colours[_unnumbered(box.name)], "")
        if match is None
        else (_paler(match, stages), match["microbatch"])
    )
    shown = (
        f'<text x="{x + size / 2:.2f}" y="{top + 13}" text-anchor="middle" '
        f'font-size="10">{text}</text>'
    )
    told = f"<title>{escape(box.name)}: {amount(box.start, 's')} to {amount(box.end, 's')}</title>"
    rect = (
        f'<rect x="{x:.2f}" y="{top}" width="{size:.2f}" height="{_BAR}" fill="{fill}" '
        'stroke="#ffffff" stroke-width="0.5"/>'
    )
    return f"<g>{told}{rect}{shown if text and size >= 6.5 * len(text) else ''}</g>"


def _unnumbered(name: str) -> str:
    """The kind of an activity: ``reduce bucket`` for ``reduce bucket 3``. All activities of a kind
    have one colour.
    """
    return re.sub(r" \d+$", "", name)


def _paler(match: re.Match[str], stages: Sequence[int]) -> str:
    """The fill of an action, with up to 60 % of white for the last stage."""
    colour = ACTION_FILLS[match["kind"]]
    share = 0.6 * stages.index(int(match["stage"])) / max(1, len(stages) - 1)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def ranks_on_machine(
    places: Sequence[str],
    node_sizes: Sequence[int],
    stage_of: Mapping[int, str],
    *,
    most: int = 256,
) -> str:
    """A box for every rank of a unit: its number and its place in the mesh, coloured by stage, a
    frame around each node.
    ``node_sizes``: the devices of each node, of which the ranks are the first.
    """
    shown = min(len(places), most)
    columns = min(_BOXES_PER_ROW, max(1, min(max(node_sizes), shown)))
    stages = list(dict.fromkeys(stage_of.get(rank, "") for rank in range(shown)))
    parts: list[str] = []
    top, first = 8, 0
    for size in node_sizes:
        ranks = range(first, min(first + size, shown))
        if not ranks:
            break
        # Rounded up.
        rows = -(-len(ranks) // columns)
        frame = (
            f'width="{min(columns, len(ranks)) * _BOX_WIDTH + 4}" height="{rows * _BOX_HEIGHT + 4}"'
        )
        parts.append(f'<rect x="4" y="{top - 4}" {frame} fill="none" stroke="#999999" rx="4"/>')
        for place, rank in enumerate(ranks):
            x, y = 8 + place % columns * _BOX_WIDTH, top + place // columns * _BOX_HEIGHT
            stage = stage_of.get(rank, "")
            parts.append(
                _rank_box(
                    rank, places[rank], stage, x, y, PALETTE[stages.index(stage) % len(PALETTE)]
                )
            )
        top, first = top + rows * _BOX_HEIGHT + 14, first + size
    if shown < len(places):
        parts.append(f'<text x="8" y="{top + 6}">and {len(places) - shown} more ranks</text>')
        top += 20
    return _svg(columns * _BOX_WIDTH + 24, top + 2, parts)


def _rank_box(rank: int, where: str, stage: str, x: int, y: int, fill: str) -> str:
    told = (
        f"<title>rank {rank}: "
        f"{escape(where) or 'the only one'}{escape(f', {stage}' if stage else '')}</title>"
    )
    return (
        f'<g>{told}<rect x="{x}" y="{y}" width="{_BOX_WIDTH - 4}" height="{_BOX_HEIGHT - 4}" '
        f'fill="{fill}" rx="3"/>'
        f'<text x="{x + 6}" y="{y + 13}">rank {rank}</text>'
        f'<text x="{x + 6}" y="{y + 25}" font-size="10">{escape(where)}</text></g>'
    )


def _legend(colours: Mapping[str, str], width: int) -> tuple[str, int]:
    """Each name behind its colour, in as many lines as the width asks for, and where the first row
    begins below them.
    """
    parts, x, y = [], _LEFT, 4
    for name, colour in colours.items():
        taken = 34 + 7 * len(name)
        if x + taken > width and x > _LEFT:
            x, y = _LEFT, y + 20
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{escape(name)}</text>')
        x += taken
    return "".join(parts), y + 26


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 '
        f'{width} {height}" {_FONT}>'
    )
    return "\n".join((head, *parts, "</svg>")) + "\n"
