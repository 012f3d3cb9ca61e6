"""Pictures of a plan's cost as self-contained SVG: memory against its limit, where time goes, how
ranks lie on the machine.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwright.compiler.plan.amounts import amount

COLOURS = {
    "forward": "#7aa6e8",
    "backward": "#6fbf8b",
    "gradients of inputs": "#8fd0b4",
    "gradients of weights": "#3f9e78",
    "computing": "#93a8d6",
    "communicating": "#f2b56b",
    "waiting": "#b0b7c3",
    "parameter": "#c79ad8",
    "optimizer": "#9b6fb8",
    "optimizer step": "#9b6fb8",
    "gradient": "#e58f8f",
    "activation": "#d9c25f",
    "temporary": "#ece0a0",
    "communication": "#f2b56b",
    "buffer": "#8d99ad",
    "input": "#86c5cf",
}
"""The fill of each thing that pages show: one colour has one meaning. Text on them is dark."""

EXCHANGES = {
    "all_reduce": "#f2b56b",
    "all_gather": "#f7cf9b",
    "reduce_scatter": "#e39a4f",
    "all_to_all": "#d9824a",
    "gradients": "#c96f4a",
}
"""The fills of exchanges, by what they do along whatever axis."""

STAGES = ("#c9d6ea", "#e3d3ea", "#d3e8da", "#f3e3c8", "#efd2d2", "#d0e6ea", "#dedede", "#ece7c4")
"""The fills of stages, one after the other."""

_OTHERS = ("#b58db6", "#7fb7be", "#a3b18a", "#d4a5a5")


def colour_of(name: str) -> str:
    """The fill of what has this name, the same in every picture."""
    known = COLOURS.get(name) or EXCHANGES.get(name.rpartition(" ")[2])
    return known or _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]


_FONT = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12"'
_ROW, _BAR, _LEFT = 26, 18, 120
_DARK = 'fill="#1d2330"'  # of text on a coloured box
_FAINT = 'fill="#7a8396"'  # of text beside pictures
_FAR = 0.85  # how high the fullest moment is where the limit is far off
_THIN = 3.0  # the least width of a box in time
_BOX_WIDTH, _BOX_HEIGHT, _BOXES_PER_ROW = 112, 34, 8


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a label, and what it is made of."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def bars(
    rows: Sequence[Bar],
    unit: str,
    *,
    limit: float | None = None,
    width: int = 960,
    left: int = _LEFT,
) -> str:
    """Stacked bars, a row each, with the total at the end and a line at ``limit`` where there is
    one. ``left``: where the bars begin, behind their labels. A limit so far off that nobody could
    tell the parts of the bars is named only.
    """
    longest = max([*(row.total for row in rows), 1e-300])
    is_far = limit is not None and limit > 4 * longest
    scale = (width - left - 110) / max(longest, 0.0 if limit is None or is_far else limit)
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    colours = {name: colour_of(name) for name in names}
    legend, first = _legend(colours, width)
    height = first + _ROW * len(rows) + 16
    parts = [legend]
    for index, row in enumerate(rows):
        top, x = first + _ROW * index, float(left)
        parts.append(
            f'<text x="{left - 8}" y="{top + 13}" text-anchor="end">{escape(row.label)}</text>'
        )
        for name, value in row.parts.items():
            told = f"<title>{escape(name)}: {amount(value, unit)}</title>"
            parts.append(
                f'<g>{told}<rect x="{x:.2f}" y="{top}" width="{value * scale:.2f}" '
                f'height="{_BAR}" fill="{colours[name]}"/></g>'
            )
            x += value * scale
        over = limit is not None and row.total > limit
        style = ' fill="#d0364f" font-weight="bold"' if over else ""
        parts.append(
            f'<text x="{x + 6:.2f}" y="{top + 13}"{style}>{amount(row.total, unit)}</text>'
        )
    if limit is not None and is_far:
        parts.append(
            f'<text x="{left}" y="{height - 2}" {_FAINT}>far below the limit, '
            f"{amount(limit, unit)}</text>"
        )
    elif limit is not None:
        x = left + limit * scale
        line = f'x1="{x:.2f}" x2="{x:.2f}" y1="{first - 6}" y2="{first + _ROW * len(rows)}"'
        parts.append(f'<line {line} stroke="#d0364f" stroke-dasharray="4 3"/>')
        told = f"limit {amount(limit, unit)}"
        parts.append(
            f'<text x="{x:.2f}" y="{height - 2}" text-anchor="middle" fill="#d0364f">{told}</text>'
        )
    return _svg(width, height, parts)


def over_time(
    moments: Sequence[tuple[str, Mapping[str, float]]],
    unit: str,
    *,
    limit: float | None = None,
    most: float = 0.0,
    width: int = 960,
    height: int = 200,
) -> str:
    """What is held from moment to moment, stacked by category, with a line at ``limit``. A moment
    is a column with its name; of neighbours that share one, the fullest is shown. ``most``: what
    the scale reaches at least, so that several pictures can be compared. The line of a limit that
    is far off is not to scale.
    """
    shown = _fullest(moments, (width - _LEFT - 16) // 2)
    names = list(dict.fromkeys(name for _, held in shown for name in held))
    legend, first = _legend({name: colour_of(name) for name in names}, width)
    own = max([*(sum(held.values()) for _, held in shown), 1e-300])
    most = max(most, own)
    is_far = limit is not None and limit > 4 * most
    # A limit far off would flatten everything: its line is at the top then, above a gap.
    top = most / _FAR if is_far else max(most, limit or 0.0)
    scale = height / top
    step, bottom = (width - _LEFT - 16) / max(1, len(shown)), first + height
    parts = [legend]
    for index, (told, held) in enumerate(shown):
        y = float(bottom)
        columns = []
        for name in names:
            size = held.get(name, 0.0) * scale
            y -= size
            columns.append(
                f'<rect x="{_LEFT + index * step:.2f}" y="{y:.2f}" width="{step + 0.3:.2f}" '
                f'height="{size:.2f}" fill="{colour_of(name)}"/>'
            )
        title = f"{escape(told)}: {amount(sum(held.values()), unit)}"
        parts.append(f"<g><title>{title}</title>{''.join(columns)}</g>")
    marks = [(own, f"most {amount(own, unit)}", "currentColor")]
    if limit is not None:
        marks.append((top if is_far else limit, f"limit {amount(limit, unit)}", "#d0364f"))
    # From the top, each label below the one before.
    label = float("-inf")
    for value, text, colour in sorted(marks, reverse=True):
        y = bottom - value * scale
        label = max(y + 4, label + 14)
        line = f'x1="{_LEFT}" x2="{width - 16}" y1="{y:.2f}" y2="{y:.2f}"'
        parts.append(f'<line {line} stroke="{colour}" stroke-dasharray="4 3"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{label:.2f}" text-anchor="end" fill="{colour}">{text}</text>'
        )
    if is_far:
        text = "not to scale"
        y = first + 14
        parts.append(f'<text x="{_LEFT + 4}" y="{y}" {_FAINT}>{text}</text>')
    return _svg(width, bottom + 8, parts)


def _fullest(
    moments: Sequence[tuple[str, Mapping[str, float]]], most: int
) -> list[tuple[str, Mapping[str, float]]]:
    """The ``most`` fullest moments, each of some neighbours."""
    size = -(-len(moments) // most) if moments else 1
    groups = [moments[start : start + size] for start in range(0, len(moments), size)]
    return [max(group, key=lambda moment: sum(moment[1].values())) for group in groups]


@dataclass(frozen=True, slots=True)
class Box:
    """Something that takes from ``start`` to ``end`` seconds."""

    name: str
    start: float
    end: float


ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
}
"""Actions of a schedule by their letter."""

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
    colours = {name: colour_of(name) for name in [*(ACTIONS[kind] for kind in kinds), *others]}
    legend, first = _legend(colours, width)
    parts = [legend]
    for index, (label, row) in enumerate(rows.items()):
        top = first + _ROW * index
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(label)}</text>'
        )
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{end * scale:.2f}" height="{_BAR}" '
            'fill="currentColor" fill-opacity="0.08"/>'
        )
        stages = sorted(
            {int(match["stage"]) for box in row if (match := _ACTION.fullmatch(box.name))}
        )
        # The shortest come last, on top.
        drawn = sorted(row, key=lambda box: box.start - box.end)
        parts += [_box(box, top, scale, stages, colours) for box in drawn]
    height = first + _ROW * len(rows) + 18
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        anchor = "end" if share == 1.0 else "middle"
        x = _LEFT + share * end * scale
        parts.append(
            f'<text x="{x:.0f}" y="{height - 4}" text-anchor="{anchor}" '
            f"{_FAINT}>{amount(share * end, 's')}</text>"
        )
    return _svg(width, height, parts)


def _box(
    box: Box, top: int, scale: float, stages: Sequence[int], colours: Mapping[str, str]
) -> str:
    x, size = _LEFT + box.start * scale, (box.end - box.start) * scale
    # What takes almost no time is seen all the same, and nothing lies over it: an optimizer step.
    is_thin = size < _THIN
    if is_thin:
        x, size = x + (size - _THIN) / 2, _THIN
    edge = "" if is_thin else 'stroke="#ffffff" stroke-width="0.5"'
    match = _ACTION.fullmatch(box.name)
    fill, text = (
        (colours[_unnumbered(box.name)], "")
        if match is None
        else (_paler(match, stages), match["microbatch"])
    )
    shown = (
        f'<text x="{x + size / 2:.2f}" y="{top + 13}" text-anchor="middle" '
        f'font-size="10" {_DARK}>{text}</text>'
    )
    told = f"<title>{escape(box.name)}: {amount(box.start, 's')} to {amount(box.end, 's')}</title>"
    rect = f'<rect x="{x:.2f}" y="{top}" width="{size:.2f}" height="{_BAR}" fill="{fill}" {edge}/>'
    return f"<g>{told}{rect}{shown if text and size >= 6.5 * len(text) else ''}</g>"


def _unnumbered(name: str) -> str:
    """The kind of an activity: ``reduce bucket`` for ``reduce bucket 3``. All activities of a kind
    have one colour.
    """
    return re.sub(r" \d+$", "", name)


def _paler(match: re.Match[str], stages: Sequence[int]) -> str:
    """The fill of an action, with up to 60 % of white for the last stage."""
    colour = COLOURS[ACTIONS[match["kind"]]]
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
                    rank, places[rank], stage, x, y, STAGES[stages.index(stage) % len(STAGES)]
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
        f'<text x="{x + 6}" y="{y + 13}" {_DARK}>rank {rank}</text>'
        f'<text x="{x + 6}" y="{y + 25}" font-size="10" {_DARK}>{escape(where)}</text></g>'
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
        f'{width} {height}" {_FONT} fill="currentColor">'
    )
    return "\n".join((head, *parts, "</svg>")) + "\n"
