"""Pictures of predicted over measured seconds, as small SVG files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

SIDE, MARGIN = 260, 36
"""The side of the square that is drawn in, and what is left around it, in pixels."""


def write_picture(folder: Path, study: str, points: Sequence[tuple[float, float]]) -> Path:
    """Write one study: a dot for each row, measured to the right and predicted upwards, both in
    seconds and logarithmic. On the line they are equal; dashed lines are 10 % off.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", study.lower()).strip("-")
    path = folder / f"{name}.svg"
    path.write_text(picture(study, points))
    return path


def picture(study: str, points: Sequence[tuple[float, float]]) -> str:
    """The text of the SVG file of a study."""
    values = [value for point in points for value in point]
    # The powers of ten around all values, or halves of them where that is much.
    low = math.floor(2 * math.log10(min(values))) / 2
    high = max(math.ceil(2 * math.log10(max(values))) / 2, low + 0.5)

    def place(value: float) -> float:
        return SIDE * (math.log10(value) - low) / (high - low)

    def line(factor: float, style: str) -> str:
        # From the left edge to the right one; what is outside is clipped.
        start, end = 10**low, 10**high
        first, last = SIDE - place(start * factor), SIDE - place(end * factor)
        return f'<line x1="0" y1="{first:.1f}" x2="{SIDE}" y2="{last:.1f}" {style}/>'

    size = SIDE + 2 * MARGIN
    dots = "\n".join(
        f'<circle cx="{place(measured):.1f}" cy="{SIDE - place(predicted):.1f}" r="2.2"/>'
        for measured, predicted in points
    )
    labels = []
    for exponent in range(math.ceil(low), math.floor(high) + 1):
        at, text = place(10.0**exponent), f"{10.0**exponent:g} s"
        labels.append(f'<text x="{at:.1f}" y="{SIDE + 14}" text-anchor="middle">{text}</text>')
        labels.append(f'<text x="-4" y="{SIDE - at + 4:.1f}" text-anchor="end">{text}</text>')
    lines = [
        line(1.0, 'stroke="#444"'),
        line(1.1, 'stroke="#aaa" stroke-dasharray="3 3"'),
        line(1 / 1.1, 'stroke="#aaa" stroke-dasharray="3 3"'),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" '
            'font-family="sans-serif" font-size="10">',
            f"<title>{study}: predicted over measured seconds of a step</title>",
            f'<rect width="{size}" height="{size}" fill="white"/>',
            f'<g transform="translate({MARGIN + 8},{MARGIN - 8})">',
            f'<text x="0" y="-8" font-size="12">{study}: {len(points)} rows</text>',
            f'<svg width="{SIDE}" height="{SIDE}">',
            f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="#444"/>',
            *lines,
            f'<g fill="#1f6fb4" fill-opacity="0.7">\n{dots}\n</g>',
            "</svg>",
            *labels,
            f'<text x="{SIDE / 2}" y="{SIDE + 26}" text-anchor="middle">measured</text>',
            f'<text transform="translate(-32,{SIDE / 2}) rotate(-90)" text-anchor="middle">'
            "predicted</text>",
            "</g>",
            "</svg>\n",
        ]
    )
