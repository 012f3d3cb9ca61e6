"""How long compiling takes, by layers and by ranks, stage by stage, and how much memory it needs.

    python benchmarks/compile_time.py [--repeat 3] [--json FILE]

Policy ``tp``, or ``hybrid`` where there are stages; weights on the meta device; each run in a
process of its own. Imports are not counted, but for "a first compile": one linear layer under
``dp`` or ``tp``, with everything from the end of ``import torch``, which is what somebody waits for
who starts a program. Its stages tell torch's part from ours; the latter is right only where Python
keeps byte code (``PYTHONDONTWRITEBYTECODE`` is not set).

Time is wall time and CPU time of everything from the module to the files on disk; memory is the
peak resident size of the process, torch and transformers included (their share is the row
"nothing").
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NARROW = {"model": "gpt2", "heads": 16, "head_size": 64}
WIDE = {"model": "gpt2", "heads": 1024, "head_size": 16, "layers": 24}
"""Wide enough that 1024 ranks have a head each."""

EXPERTS_CASE: dict[str, Any] = {
    "model": "qwen3-235b",
    "layers": 94,
    "ranks": 64,
    "stages": 4,
    "tp": 4,
    "dp": 4,
    "ep": 16,
}

CASES: dict[str, list[dict[str, Any]]] = {
    "nothing": [{"model": None}],
    "a first compile, imports counted": [
        {"model": "linear", "policy": "dp"},
        {"model": "linear", "policy": "tp", "ranks": 2},
    ],
    "by layers, GPT-2, 8 ranks": [
        {**NARROW, "layers": layers, "ranks": 8} for layers in (2, 8, 24, 48, 96)
    ],
    "by ranks, GPT-2 of 1024 heads, 24 layers": [
        {**WIDE, "ranks": ranks} for ranks in (2, 8, 64, 256, 1024)
    ],
    "Llama-7B shape, 32 layers, 8 ranks": [{"model": "llama", "layers": 32, "ranks": 8}],
    "GPT-2 in stages, pp 8 x tp 8": [
        {**NARROW, "layers": layers, "ranks": 64, "stages": 8} for layers in (24, 96)
    ],
    "a loop over time steps, by steps": [
        {"model": "steps", "layers": steps, "ranks": 2} for steps in (64, 512, 2048)
    ],
    "Qwen3-235B shape, pp 4 x dp 4 x tp 4, ep 16": [EXPERTS_CASE],
}


def run_first(case: dict[str, Any]) -> dict[str, Any]:
    """A small compile and all that it imports but torch."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    stages: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    # torch imports its compiler and sympy when the first mode of a process is made. Whoever traces
    # pays for it, so it stands apart from what shardwright itself imports.
    FakeTensorMode()
    stages["torch's fake tensors"] = time.process_time() - cpu
    before_ours = time.process_time()
    import shardwright

    _ = shardwright.parallelize  # names are imported when they are asked for
    stages["our imports"] = time.process_time() - before_ours
    before_compile = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        ranks = case.get("ranks", 1)
        shardwright.parallelize(
            torch.nn.Linear(8, 8),
            {"input": torch.zeros(4, 8)},
            case["policy"],
            shardwright.ComputeConfig(plan_ngpus=ranks, runtime_ngpus=ranks),
            gen_savedir=folder,
            load_module=False,
        )
        stages["the compile"] = time.process_time() - before_compile
        result: dict[str, Any] = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "stages": stages,
        }
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """One compile in this process."""
    if case["model"] == "linear":
        return run_first(case)
    import torch
    from models import StateSpaceLoop, gpt2_on_meta, llama_on_meta, qwen3_235b_on_meta

    from shardwright.frontend.files.module_files import Order, generate
    from shardwright.frontend.files.module_source import ModuleSource
    from shardwright.policies.known_policies import find_policy
    from shardwright.runtime.config import ComputeConfig

    torch.set_num_threads(1)
    result: dict[str, Any] = {"wall_s": 0.0, "cpu_s": 0.0, "stages": {}}
    if case["model"] is not None:
        make = {
            "llama": lambda: llama_on_meta(case["layers"]),
            "gpt2": lambda: gpt2_on_meta(case["layers"], case["heads"], case["head_size"]),
            "qwen3-235b": lambda: qwen3_235b_on_meta(case["layers"]),
            "steps": StateSpaceLoop,
        }[case["model"]]
        model = make()
        tokens = torch.zeros(4 * case.get("dp", 1), 512, dtype=torch.int64)
        given: dict[str, Any] = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        if case["model"] == "steps":  # as many as it would have layers
            given = {"x": torch.zeros(4, case["layers"], 64)}
        with tempfile.TemporaryDirectory() as folder:
            pipeline: dict[str, Any] = {
                "num_stages": case.get("stages", 1),
                "tp": case.get("tp", 8),
                "num_microbatches": 16,
                **{name: case[name] for name in ("dp", "ep") if name in case},
            }
            config = ComputeConfig(
                plan_ngpus=case["ranks"],
                runtime_ngpus=case["ranks"],
                outputs="loss",
                use_end2end="stages" in case,
                pas_config=pipeline if "stages" in case else {},
            )
            policy = find_policy("hybrid" if "stages" in case else "tp")
            wall, cpu = time.perf_counter(), time.process_time()
            made = generate(
                Order(
                    source=ModuleSource.of(type(model), lambda: model),
                    dummy_args=given,
                    policy=policy,
                    config=config,
                    directory=Path(folder) / "generated",
                )
            )
            result = {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "stages": made.report.seconds(),
            }
    # Linux counts in KiB.
    result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def run_in_process(case: dict[str, Any], repeat: int) -> dict[str, Any]:
    """The case in fresh processes; the median of every number."""
    runs = []
    for _ in range(repeat):
        command = [sys.executable, __file__, "--case", json.dumps(case)]
        runs.append(
            json.loads(
                subprocess.run(
                    command, check=True, stdout=subprocess.PIPE, text=True
                ).stdout.splitlines()[-1]
            )
        )
    medians = {
        key: statistics.median(run[key] for run in runs)
        for key in ("wall_s", "cpu_s", "peak_bytes")
    }
    stages = {
        stage: statistics.median(run["stages"][stage] for run in runs)
        for stage in runs[0]["stages"]
    }
    return {"case": case, **medians, "stages": stages}


def row(result: dict[str, Any]) -> str:
    """A result as a line of a Markdown table."""
    case = result["case"]
    stages = ", ".join(
        f"{name} {seconds:.2f}" for name, seconds in result["stages"].items() if seconds >= 0.01
    )
    cells = [
        case.get("layers", case.get("policy", "")),
        case.get("ranks", ""),
        f"{result['wall_s']:.2f}",
        f"{result['cpu_s']:.2f}",
    ]
    return (
        "| " + " | ".join([*map(str, cells), f"{result['peak_bytes'] / 2**20:.0f}", stages]) + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs of each case, of which the median counts"
    )
    parser.add_argument(
        "--only", default="", help="run the groups of cases whose title contains this"
    )
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(json.loads(arguments.case))))
        return
    results: dict[str, list[dict[str, Any]]] = {}
    for title, cases in CASES.items():
        if arguments.only not in title:
            continue
        print(
            f"\n### {title}\n\n| layers | ranks | wall s | CPU s | peak MiB | stages, s "
            "|\n|---|---|---|---|---|---|"
        )
        results[title] = []
        for case in cases:
            results[title].append(run_in_process(case, arguments.repeat))
            print(row(results[title][-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
