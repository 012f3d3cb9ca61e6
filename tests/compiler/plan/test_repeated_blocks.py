"""Layers are told by numbers that are whole names."""

from __future__ import annotations

import pytest

from shardwright.compiler.plan.repeated_blocks import container_of


@pytest.mark.parametrize(
    ("path", "container"),
    [
        ("transformer.h.0.attn", ("transformer.h", 0)),
        ("0.linear", ("", 0)),
        ("layer1.12.conv2", ("layer1", 12)),
        ("down.conv1", None),
        ("conv1", None),
        ("", None),
    ],
)
def test_container(path: str, container: tuple[str, int] | None) -> None:
    assert container_of(path) == container
