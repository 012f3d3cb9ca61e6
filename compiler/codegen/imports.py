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
    ours = [module for module in merged if module.partition(".")[0] == "shardwright"]
    theirs = sorted(merged.keys() - set(ours))
    lines = {module: _from_import(module, sorted(names)) for module, names in merged.items()}
    third_parties = [line for module in theirs for line in lines[module]]
    return [
        *plain,
        *third_parties,
        "",
        *(line for module in sorted(ours) for line in lines[module]),
    ]


def _from_import(module: str, names: list[str]) -> list[str]:
    text = f"from {module} import {', '.join(names)}"
    if len(text) <= 128:
        return [text]
    return [f"from {module} import (", *(f"    {name}," for name in names), ")"]
