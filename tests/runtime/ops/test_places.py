"""Names of operators that move places."""

from __future__ import annotations

from shardwright.runtime import adapters, ops


def test_no_operator_has_the_name_of_an_adapter() -> None:
    """Generated code imports both by name."""
    ours = (name for name in ops.__all__ if hasattr(adapters, name))
    assert all(getattr(adapters, name) is getattr(ops, name) for name in ours)
