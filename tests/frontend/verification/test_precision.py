"""Casts to float32 that are casts to float64 for a while."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from shardwright.frontend.verification.precision import float64_casts


def test_threads_may_leave_in_any_order() -> None:
    entered, left = Event(), Event()

    def first() -> None:
        with float64_casts():
            entered.wait()
        left.set()

    def second() -> str:
        with float64_casts():
            entered.set()
            left.wait()
            return str(torch.float32)

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(first)
        assert pool.submit(second).result(60) == "torch.float64"
        running.result(60)
    assert str(torch.float32) == str(torch.get_default_dtype()) == "torch.float32"
    assert torch.ones(1).double().float().dtype == torch.float32
