"""The policies that come with the package, by name. Reading this table imports none of them."""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "dp": "shardwright.policies.dp",
    "tp": "shardwright.policies.tp",
    "data": "shardwright.policies.data",
    "ep": "shardwright.policies.ep",
    "cp": "shardwright.policies.cp",
    "pp": "shardwright.policies.pp",
    "hybrid": "shardwright.policies.hybrid",
    "tensor": "shardwright.policies.tensor",
    "autodist": "shardwright.policies.autodist.autodist_policy",
    "saved": "shardwright.policies.saved_plan",
}
"""Name to the module whose ``POLICY`` it is; imported when asked for."""
