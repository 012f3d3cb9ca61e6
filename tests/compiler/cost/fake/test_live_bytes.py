"""Counting the bytes that live."""

from __future__ import annotations

import gc
from typing import Any

import torch

from shardwright.compiler.cost.fake.live_bytes import LiveBytes


def test_storages_count_once_and_until_they_are_gone() -> None:
    with LiveBytes() as live:
        x = torch.zeros(16)
        y = x.view(4, 4)[1:]
        assert live.now == 64
        z = x + 1
        assert live.now == live.peak == 128
        del x, z
        gc.collect()
        assert live.now == 64 and live.peak == 128
        live.restart()
        assert live.peak == 64
        del y
    assert live.now == 0


def test_nothing_is_lost_where_another_thread_makes_what_this_one_frees() -> None:
    """A switch of threads while a storage is taken out of the books, made to happen."""
    made = torch.zeros(8)

    class Sizes(dict[int, int]):
        def pop(self, key: int, *default: Any) -> int:
            size = super().pop(key)
            if key == gone:
                live.watch([made])
            return size

    live = LiveBytes()
    live._sizes = Sizes()
    freed = torch.zeros(4)
    live.watch([freed])
    gone = freed.untyped_storage()._cdata
    del freed
    gc.collect()
    assert live.now == 32
