"""Tensor parallelism in several dims: models x modes x what goes with them, against one device.

    python tests/product/tensor_modes.py [--models gpt2,llama] [--modes 2d,3d] [--with plain,pp]

Each case trains three steps in float64 on ranks as threads. One line says how it went. The exit
status is the number of cases that failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "_lib"))

import zoo

from shardwright import ComputeConfig, verify
from shardwright.runtime.errors import ShardwrightError

MODELS = ("mlp", "mlp-uneven", "gpt2", "gpt2-uneven", "llama", "llama-uneven", "bert", "vit", "t5")
MODES: dict[str, dict[str, Any]] = {
    "2d": {"mode": "2d", "shape": [2, 2]},
    "2d 2x3": {"mode": "2d", "shape": [2, 3]},
    "2d 3x3": {"mode": "2d", "shape": [3, 3]},
    "2.5d": {"mode": "2.5d", "shape": [2, 2, 2]},
    "3d": {"mode": "3d", "shape": [2, 2, 2]},
    "3d 1x2x3": {"mode": "3d", "shape": [1, 2, 3]},
}
BESIDE: dict[str, dict[str, Any]] = {
    "plain": {},
    "keep": {"options": {"gathers_again": False}},
    "again": {"options": {"gathers_again": True}},
    "zero1": {"units": 2, "use_zero": 1},
    "zero3": {"units": 2, "use_zero": 3},
    "pp": {"stages": 2},
    "recompute": {"stages": 2, "options": {"recompute": ["stage:1"]}},
    "steps": {"options": {"gather": "steps"}},
    "steps zero1": {"units": 2, "use_zero": 1, "options": {"gather": "steps"}},
    "steps zero3": {"units": 2, "use_zero": 3, "options": {"gather": "steps"}},
    "steps pp": {"stages": 2, "options": {"gather": "steps"}},
    "steps recompute": {"stages": 2, "options": {"recompute": ["stage:1"], "gather": "steps"}},
}


def case(model: str, mode: str, beside: str) -> None:
    """Verify one case. Raises where it cannot be compiled, or gives other numbers."""
    given = dict(BESIDE[beside])
    options = {**MODES[mode], **given.pop("options", {})}
    ranks = 1
    for size in options["shape"]:
        ranks *= size
    stages, units = given.pop("stages", 1), given.pop("units", 1)
    if stages > 1:
        options |= {"num_stages": stages, "num_microbatches": 4}
        given["use_end2end"] = True
    config = ComputeConfig(
        plan_ngpus=ranks * stages,
        runtime_ngpus=ranks * stages * units,
        pas_config=options,
        outputs="loss",
        **given,
    )
    entry = zoo.get(model)
    report = verify(
        entry.build(), entry.inputs(batch=9 if "3" in mode[2:] else 8), "tensor", config
    )
    if not report.ok:
        raise AssertionError(str(report))


def main() -> int:
    """Run the cases that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--with", dest="beside", default=",".join(BESIDE))
    arguments = parser.parse_args()
    failed = 0
    for model in arguments.models.split(","):
        for mode in arguments.modes.split(","):
            for beside in arguments.beside.split(","):
                start = time.perf_counter()
                try:
                    case(model, mode, beside)
                    outcome = "ok"
                except (AssertionError, ShardwrightError) as error:
                    outcome = f"{type(error).__name__}: {error}"
                    failed += 1
                seconds = time.perf_counter() - start
                print(f"{model} {mode} {beside}: {outcome} ({seconds:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
