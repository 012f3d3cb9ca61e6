"""What ``one_gpu.py`` prints: a line for each thing that was tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Something that was tried: its name, what came out, whether that is right, and why not."""

    name: str
    found: str
    right: bool = True
    reason: str = ""

    def __str__(self) -> str:
        text = f"  {'ok' if self.right else 'WRONG':6}{self.name}: {self.found}"
        return text if self.right or not self.reason else f"{text}\n        {self.reason}"
