"""The import block of a generated file."""

from __future__ import annotations


def sorted_imports(statements: set[str]) -> list[str]:
    """Standard library and third parties first, then ours; names from one module on one line."""
    plain = sorted(s for s in statements if s.startswith("import "))
    # Names by module: each statement so far imports one name.
    merged: dict[str, set[str]] = {}
    for statement in statements:
        if statement.startswith("from "):
            module, _, name = statement.removeprefix("from ").partition(" import ")
            merged.setdefault(module, set()).add(name)
    froms = []
    for module in sorted(merged):
        text = f"from {module} import {', '.join(sorted(merged[module]))}"
        froms += (
            [text]
            if len(text) <= 128
            else [f"from {module} import (", *(f"    {n}," for n in sorted(merged[module])), ")"]
        )
    return [*plain, "", *froms]
