"""When does tensor parallelism in several dims pay? Audited steps of GPT-2 layers on many ranks.

    python benchmarks/tensor_modes.py --ranks 16 --hidden 1024 [--network slow] [--search 60]

Nothing runs: steps and memory are those of ``shardwright``'s own audit (docs/cost-model.md), of
layers in bfloat16 on A100s, eight to a node. ``--network slow``: a tenth of the rate between nodes.
``--search``: also what ``autodist`` finds in so many seconds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import gpt2_on_meta

from shardwright import ComputeConfig
from shardwright.compiler.compile import annotate, compile_graph, pass_manager
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.trace import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.errors import ShardwrightError

SHAPES = {
    4: {"2d": (2, 2)},
    8: {"2d": (2, 4), "2.5d": (2, 2, 2), "3d": (2, 2, 2)},
    16: {"2d": (4, 4), "2.5d": (4, 2, 2), "3d": (2, 2, 4)},
    64: {"2d": (8, 8), "2.5d": (4, 4, 4), "3d": (4, 4, 4)},
}
"""The shapes of the modes, by the number of ranks."""


def machine(num_ranks: int, network: str) -> Hardware:
    """A100s, with a network between nodes that is as it should be, or a tenth of that."""
    found = load_hardware("a100-80gb", num_ranks)
    if network == "fast":
        return found
    between = found.tiers[-1]
    return replace(
        found,
        tiers=(
            *found.tiers[:-1],
            replace(
                between,
                bytes_per_s=between.bytes_per_s / 10,
                kinds={},
                uplink_bytes_per_s=between.uplink_bytes_per_s and between.uplink_bytes_per_s / 10,
                fabric_bytes_per_s=between.fabric_bytes_per_s and between.fabric_bytes_per_s / 10,
            ),
        ),
    )


def cases(num_ranks: int, search: dict[str, Any] | None) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, policy and options of each case. ``search``: the options of a search, if there is
    one.
    """
    found: list[tuple[str, str, dict[str, Any]]] = [("1d", "tp", {}), ("data", "data", {})]
    for mode, shape in SHAPES[num_ranks].items():
        for again in (False, True):
            words = "again" if again else "kept"
            name = f"{mode} {'x'.join(map(str, shape))} {words}"
            options = {"mode": mode, "shape": list(shape), "gathers_again": again}
            found.append((name, "tensor", options))
        stepped = {"mode": mode, "shape": list(shape), "gather": "steps"}
        found.append((f"{mode} {'x'.join(map(str, shape))} steps", "tensor", stepped))
    if search is not None:
        found.append(("autodist", "autodist", search))
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16, choices=sorted(SHAPES))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--network", choices=("fast", "slow"), default="fast")
    parser.add_argument("--search", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--max-axes", type=int, default=2, help="of the meshes that are searched")
    given = parser.parse_args()
    heads = given.hidden // 64
    module = gpt2_on_meta(given.layers, heads, 64).to(torch.bfloat16)
    tokens = torch.zeros(given.batch, given.seq, dtype=torch.int64)
    graph = annotate(trace(module, {"input_ids": tokens, "labels": tokens}), pass_manager())
    hardware = machine(given.ranks, given.network)
    print(
        f"{given.ranks} ranks, hidden {given.hidden}, batch {given.batch}, {given.network} network"
    )
    file = Path(tempfile.mkdtemp()) / "machine.json"
    file.write_text(hardware.dumps())
    search = {
        "time_limit_s": given.search, "hardware": str(file), "max_axes": given.max_axes
    }  # fmt: skip
    for name, policy, options in cases(given.ranks, search if given.search else None):
        config = ComputeConfig(
            plan_ngpus=given.ranks, runtime_ngpus=given.ranks, outputs="loss", pas_config=options
        )
        try:
            compiled = compile_graph(graph, find_policy(policy).apply, config, policy_name=policy)
            cost = audit(compiled.program, config, hardware)
        except ShardwrightError as error:
            print(f"  {name:<18} {error.what}")
            continue
        peak_gb = cost.peak_bytes / 1e9
        mesh = f"  {compiled.plan.mesh}" if policy == "autodist" else ""
        print(f"  {name:<18} {1e3 * cost.step_s:8.2f} ms  {peak_gb:6.2f} GB{mesh}", flush=True)


if __name__ == "__main__":
    main()
