"""Pictures of a schedule in time: text for a terminal, SVG for everything else."""

from __future__ import annotations

import math
from html import escape

from shardwright.compiler.schedule.simulate import Span, Timeline
from shardwright.runtime.schedule import ActionKind, ScheduleAction

COLOURS = {
    ActionKind.FORWARD: ("#7aa6e8", "forward"),
    ActionKind.BACKWARD: ("#6fbf8b", "backward"),
    ActionKind.INPUT_GRADIENT: ("#8fd0b4", "input gradients"),
    ActionKind.WEIGHT_GRADIENT: ("#f2b56b", "weight gradients"),
}
"""The fill of each kind of action, and what the legend calls it. Text on it is black."""

IDLE = "·"

_ROW, _BAR = 28, 24
_LEFT, _TOP = 64, 34
_FONT = 'font-family="ui-sans-serif, system-ui, sans-serif" font-size="11"'


def draw_text(timeline: Timeline, width: int | None = None) -> str:
    """One line per rank, time to the right, waiting as dots; each action starts with the longest of its names that fits.

    Args:
        timeline: what to draw.
        width: the most characters in a line. Without it the drawing is as wide as the full name of each action needs.
    """
    margin = len(f"rank {len(timeline.spans) - 1} ")
    scale = _chars_per_second(timeline, None if width is None else width - margin)
    lines = []
    for rank, spans in enumerate(timeline.spans):
        line = [IDLE] * round(timeline.makespan_s * scale)
        for span in spans:
            start, end = round(span.start_s * scale), round(span.end_s * scale)
            line[start:end] = _label(span.action, end - start)
        lines.append(f"rank {rank} ".ljust(margin) + "".join(line).rstrip())
    held = ", ".join(map(str, timeline.peak_in_flight))
    lines.append(f"time {timeline.makespan_s:g}, bubble {timeline.bubble_ratio:.1%} of it, most activations held: {held}")
    return "\n".join(lines) + "\n"


def _chars_per_second(timeline: Timeline, room: int | None) -> float:
    """The scale at which each action has room for its full name and a blank, or less if that needs more than ``room``.

    Where all times are multiples of the shortest, this gets a whole number of characters: equal actions look equal.
    """
    named = [(span.end_s - span.start_s, str(span.action)) for spans in timeline.spans for span in spans]
    full = max((len(name) + 1) / time_s for time_s, name in named if time_s > 0)
    if room is None or full * timeline.makespan_s <= room:
        return full
    shortest_s = min(time_s for time_s, _ in named if time_s > 0)
    most = max(1, room) / timeline.makespan_s
    even = all(math.isclose(time_s / shortest_s, round(time_s / shortest_s)) for time_s, _ in named)
    return int(most * shortest_s) / shortest_s if even and most * shortest_s >= 1 else most


def _label(action: ScheduleAction, room: int) -> str:
    """The longest name of ``action`` that fits, in exactly ``room`` characters, the last of them blank where there are two."""
    if room < 2:
        return action.kind.value[:room]
    names = (str(action), f"{action.kind.value}{action.microbatch}", action.kind.value)
    return next(name for name in names if len(name) < room).ljust(room - 1, "-") + " "


def draw_svg(timeline: Timeline, width: int = 1200) -> str:
    """A self-contained SVG picture, ``width`` pixels wide: a row per rank, coloured by kind of action.

    Later stages of a rank are paler; the number in a box is the microbatch, and pointing at it shows the action and its time.
    """
    scale = (width - _LEFT - 16) / timeline.makespan_s
    height = _TOP + _ROW * len(timeline.spans) + 44
    title = (
        f"{timeline.schedule.name}: {timeline.schedule.num_ranks} ranks, {timeline.schedule.num_stages} stages, "
        f"{timeline.schedule.num_microbatches} microbatches, time {timeline.makespan_s:g}, bubble {timeline.bubble_ratio:.1%}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" {_FONT}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="13">{escape(title)}</text>',
    ]
    for rank, spans in enumerate(timeline.spans):
        parts += _svg_row(timeline, rank, spans, scale)
    parts += _svg_legend(timeline, _TOP + _ROW * len(timeline.spans) + 24)
    return "\n".join((*parts, "</svg>")) + "\n"


def _svg_row(timeline: Timeline, rank: int, spans: tuple[Span, ...], scale: float) -> list[str]:
    top = _TOP + _ROW * rank
    track = f'<rect x="{_LEFT}" y="{top}" width="{timeline.makespan_s * scale:.2f}" height="{_BAR}" fill="#eeeeee"/>'
    parts = [f'<text x="8" y="{top + 16}">rank {rank}</text>', track]
    stages = timeline.schedule.stages_of(rank)
    for span in spans:
        action, x, box = span.action, _LEFT + span.start_s * scale, (span.end_s - span.start_s) * scale
        colour = _paler(COLOURS[action.kind][0], stages.index(action.stage) / len(stages))
        label = str(action.microbatch)
        text = (
            f'<text x="{x + box / 2:.2f}" y="{top + 16}" text-anchor="middle">{label}</text>' if box >= 7 * len(label) else ""
        )
        parts.append(
            f"<g><title>{action}: {span.start_s:g} to {span.end_s:g}</title>"
            f'<rect x="{x:.2f}" y="{top}" width="{box:.2f}" height="{_BAR}" fill="{colour}" stroke="#ffffff"/>{text}</g>'
        )
    return parts


def _paler(colour: str, share: float) -> str:
    """``colour`` (``#rrggbb``) with up to 70 % of white, for ``share`` from 0 to 1."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * 0.7 * share):02x}" for part in parts)


def _svg_legend(timeline: Timeline, y: int) -> list[str]:
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    parts, x = [], _LEFT
    for kind, (colour, name) in COLOURS.items():
        if kind in kinds:
            parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{x + 18}" y="{y}">{name}</text>')
            x += 120
    if timeline.schedule.num_stages > timeline.schedule.num_ranks:
        parts.append(f'<text x="{x}" y="{y}">the paler, the later among the stages of the rank</text>')
    return parts
