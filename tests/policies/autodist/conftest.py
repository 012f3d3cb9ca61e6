"""Searches without hurry: on a machine that others use, the time limit that options have by default
may cut one short.
"""

from __future__ import annotations

import pytest

from shardwright.policies.autodist.options import AutodistOptions

NEVER_S = 1e6


@pytest.fixture(autouse=True)
def no_default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that a test chooses counts, the default one is far away."""
    check = AutodistOptions.__post_init__

    def unhurried(options: AutodistOptions) -> None:
        if options.time_limit_s == AutodistOptions.time_limit_s:
            object.__setattr__(options, "time_limit_s", NEVER_S)
        check(options)

    monkeypatch.setattr(AutodistOptions, "__post_init__", unhurried)
