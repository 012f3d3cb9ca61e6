"""Names from names: what a value or a variable is called after a module or a dotted path."""

from __future__ import annotations

import re


def identifier(text: str) -> str:
    """``text`` as a Python identifier: ``blocks.0.attn`` becomes ``blocks_0_attn``."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() else name
