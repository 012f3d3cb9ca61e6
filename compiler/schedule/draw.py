"""A schedule in time as text. The page of a plan draws it to scale: ``pictures.py``."""

from __future__ import annotations

import math

from shardwright.compiler.schedule.simulate import Timeline
from shardwright.runtime.arguments import checked
from shardwright.runtime.schedule_actions import ScheduleAction

IDLE = "·"


@checked
def draw_text(timeline: Timeline, width: int | None = None) -> str:
    """One line per rank, time to the right, waiting as dots; each action starts with the longest of
    its names that fits.

    Args:
        timeline: what to draw.
        width: the most characters in a line. Without it the drawing is as wide as the full name of
            each action needs.
    """
    # Columns are seconds times ``scale``; the name of the rank stands in front.
    margin = len(f"rank {len(timeline.spans) - 1} ")
    scale = _chars_per_second(timeline, None if width is None else width - margin)
    lines = []
    for rank, spans in enumerate(timeline.spans):
        line = [IDLE] * round(timeline.makespan_s * scale)
        for span in spans:
            start, end = round(span.start_s * scale), round(span.end_s * scale)
            # Both ends are rounded, not the width: neighbours then never overlap, nor drift apart.
            line[start:end] = _label(span.action, end - start)
        lines.append(f"rank {rank} ".ljust(margin) + "".join(line).rstrip())
    held = ", ".join(map(str, timeline.peak_in_flight))
    lines.append(
        f"time {timeline.makespan_s:g}, bubble {timeline.bubble_ratio:.1%} of it, most "
        f"activations held: {held}"
    )
    return "\n".join(lines) + "\n"


def _chars_per_second(timeline: Timeline, room: int | None) -> float:
    """The scale at which each action has room for its full name and a blank, or less if that needs
    more than ``room``.

    Where all times are multiples of the shortest, this gets a whole number of characters: equal
    actions look equal.
    """
    named = [
        (span.end_s - span.start_s, str(span.action)) for spans in timeline.spans for span in spans
    ]
    full = max((len(name) + 1) / time_s for time_s, name in named if time_s > 0)
    if room is None or full * timeline.makespan_s <= room:
        return full
    # If all times are multiples of the shortest one, as in a picture of a schedule, take whole
    # columns for it, so that the picture has no uneven widths.
    shortest_s = min(time_s for time_s, _ in named if time_s > 0)
    most = max(1, room) / timeline.makespan_s
    even = all(math.isclose(time_s / shortest_s, round(time_s / shortest_s)) for time_s, _ in named)
    return int(most * shortest_s) / shortest_s if even and most * shortest_s >= 1 else most


def _label(action: ScheduleAction, room: int) -> str:
    """The longest name of ``action`` that fits, in exactly ``room`` characters. If there are two or
    more, the last one is blank.
    """
    if room < 2:
        return action.kind.value[:room]
    names = (str(action), f"{action.kind.value}{action.microbatch}", action.kind.value)
    return next(name for name in names if len(name) < room).ljust(room - 1, "-") + " "
