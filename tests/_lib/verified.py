"""Models of the zoo verified under a plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import zoo
from torch import nn
from traces import shared_traces

from shardwright.frontend.verification.verify import VerifyReport, verify
from shardwright.policies.policy import PolicyFunction


@functools.cache
def built(name: str) -> nn.Module:
    """The model of the zoo: ``verify`` leaves it as it was, so that all tests share it."""
    return zoo.get(name).build()


def verify_zoo(
    name: str, policy: str | PolicyFunction, config: Mapping[str, Any], **options: Any
) -> VerifyReport:
    """:func:`verify` of the entry called ``name`` as it is, on its default inputs."""
    with shared_traces(name):
        return verify(built(name), zoo.get(name).inputs(), policy, config, **options)
