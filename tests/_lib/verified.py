"""Models of the zoo verified under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zoo
from traces import shared_traces

from shardwright.frontend.verification.verify import VerifyReport, verify
from shardwright.policies.policy import PolicyFunction


def verify_zoo(
    name: str, policy: str | PolicyFunction, config: Mapping[str, Any], **options: Any
) -> VerifyReport:
    """:func:`verify` of the entry called ``name`` as it is, on its default inputs."""
    entry = zoo.get(name)
    with shared_traces(name):
        return verify(entry.build(), entry.inputs(), policy, config, **options)
