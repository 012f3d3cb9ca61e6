"""Pictures of a plan's cost as self-contained SVG: memory against its limit, where time goes, how ranks lie on the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwright.runtime.layout import Mesh

PALETTE = ("#7aa6e8", "#6fbf8b", "#f2b56b", "#c79ad8", "#e58f8f", "#8fd0b4", "#b0b7c3", "#d9c25f")
"""Fills of categories in the order they are named. Text on them is black."""

_FONT = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12"'
_ROW, _BAR, _LEFT, _TOP = 26, 18, 120, 30


@dataclass(frozen=True, slots=True)
class Bar:
    """One row: a label, and what it is made of."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def bars(rows: Sequence[Bar], unit: str, *, limit: float | None = None, width: int = 960) -> str:
    """Stacked bars, a row each, with the total at the end and a line at ``limit`` where there is one."""
    longest = max([*(row.total for row in rows), limit or 0.0, 1e-300])
    scale = (width - _LEFT - 110) / longest
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    height = _TOP + _ROW * len(rows) + 16
    parts = [_legend(colours)]
    for index, row in enumerate(rows):
        top, x = _TOP + _ROW * index, float(_LEFT)
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 13}" text-anchor="end">{escape(row.label)}</text>')
        for name, value in row.parts.items():
            told = f"<title>{escape(name)}: {amount(value, unit)}</title>"
            parts.append(
                f'<g>{told}<rect x="{x:.2f}" y="{top}" width="{value * scale:.2f}" height="{_BAR}" fill="{colours[name]}"/></g>'
            )
            x += value * scale
        over = limit is not None and row.total > limit
        style = ' fill="#b00020" font-weight="bold"' if over else ""
        parts.append(f'<text x="{x + 6:.2f}" y="{top + 13}"{style}>{amount(row.total, unit)}</text>')
    if limit is not None:
        x = _LEFT + limit * scale
        line = f'x1="{x:.2f}" x2="{x:.2f}" y1="{_TOP - 6}" y2="{_TOP + _ROW * len(rows)}"'
        parts.append(f'<line {line} stroke="#b00020" stroke-dasharray="4 3"/>')
        told = f"limit {amount(limit, unit)}"
        parts.append(f'<text x="{x:.2f}" y="{height - 2}" text-anchor="middle" fill="#b00020">{told}</text>')
    return _svg(width, height, parts)


def ranks_on_machine(mesh: Mesh, node_size: int, stage_of: Mapping[int, str], *, most: int = 256) -> str:
    """A box for every rank of a unit: its number and coordinates, coloured by stage, a frame around each node."""
    shown = min(mesh.size, most)
    box_width, box_height, per_row = 112, 34, 8
    columns = min(per_row, max(1, min(node_size, shown)))
    stages = list(dict.fromkeys(stage_of.get(rank, "") for rank in range(shown)))
    parts: list[str] = []
    bottom = 0.0
    for rank in range(shown):
        node, place = divmod(rank, node_size)
        rows_per_node = -(-min(node_size, shown) // columns)
        x = 8 + (place % columns) * box_width
        y = 8 + node * (rows_per_node * box_height + 14) + place // columns * box_height
        if place == 0:
            frame = f'width="{columns * box_width + 4}" height="{rows_per_node * box_height + 4}"'
            parts.append(f'<rect x="{x - 4}" y="{y - 4}" {frame} fill="none" stroke="#999999" rx="4"/>')
        stage = stage_of.get(rank, "")
        fill = PALETTE[stages.index(stage) % len(PALETTE)]
        where = ", ".join(f"{axis} {index}" for axis, index in mesh.coords(rank).items() if mesh.axis_size(axis) > 1)
        told = f"<title>rank {rank}: {escape(where) or 'the only one'}{escape(f', {stage}' if stage else '')}</title>"
        parts.append(
            f'<g>{told}<rect x="{x}" y="{y}" width="{box_width - 4}" height="{box_height - 4}" fill="{fill}" rx="3"/>'
            f'<text x="{x + 6}" y="{y + 13}">rank {rank}</text>'
            f'<text x="{x + 6}" y="{y + 25}" font-size="10">{escape(where)}</text></g>'
        )
        bottom = max(bottom, y + box_height)
    if shown < mesh.size:
        parts.append(f'<text x="8" y="{bottom + 20}">and {mesh.size - shown} more ranks</text>')
        bottom += 20
    return _svg(columns * box_width + 24, round(bottom + 16), parts)


def amount(value: float, unit: str) -> str:
    """A number a person can read: ``1.53 GB``, ``12.4 ms``."""
    steps = {
        "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
        "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    }[unit]
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / size:.3g} {name}"


def _legend(colours: Mapping[str, str]) -> str:
    parts, x = [], _LEFT
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="4" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="14">{escape(name)}</text>')
        x += 34 + 7 * len(name)
    return "".join(parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" {_FONT}>'
    return "\n".join((head, *parts, "</svg>")) + "\n"
