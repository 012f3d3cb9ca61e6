"""Adapters of peft under every plan, against one device in float64.

    python tests/product/lora.py                          # all models, all plans
    python tests/product/lora.py --model "llama dora" --plan "tp 3"

Losses, gradients and parameters after three steps of AdamW are compared under the bound of parity,
as ``shardwright verify`` does it; ranks are threads.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "_lib"))

import peft_models

from shardwright.frontend.verification.verify import verify

STEPS = {"use_end2end": True}

PLANS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "dp 2": ("dp", 1, 2, {}),
    "dp 4, zero 1": ("dp", 1, 4, {"use_zero": 1}),
    "dp 2, zero 3": ("dp", 1, 2, {"use_zero": 3}),
    "tp 2": ("tp", 2, 2, {}),
    "tp 3": ("tp", 3, 3, {}),
    "tp 2 x 2, zero 1": ("tp", 2, 4, {"use_zero": 1}),
    "tp 2 x 2, zero 3": ("tp", 2, 4, {"use_zero": 3}),
    "data 2": ("data", 2, 2, {}),
    "data 2 x 2, zero 2": ("data", 2, 4, {"use_zero": 2}),
    "pp 2": ("pp", 2, 2, STEPS),
    "pp 2 x 2, zero 3": ("pp", 2, 4, {**STEPS, "use_zero": 3}),
    "hybrid 4": ("hybrid", 4, 4, STEPS),
    "autodist 2": ("autodist", 2, 2, STEPS),
}
"""Plans by name: policy, ranks of a unit, all ranks, further fields of the config."""


def main() -> int:
    """Compare, and say how many are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(peft_models.MODELS))
    parser.add_argument("--plan", choices=tuple(PLANS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    num_equal = num_all = 0
    for name in peft_models.MODELS if options.model is None else (options.model,):
        model, inputs = peft_models.build(name)
        for plan in PLANS if options.plan is None else (options.plan,):
            policy, unit, ranks, fields = PLANS[plan]
            started, num_all = time.perf_counter(), num_all + 1
            config = {"plan_ngpus": unit, "runtime_ngpus": ranks, **fields}
            try:
                report: Any = verify(model, inputs, policy, config)
                is_equal = report.ok
            except Exception as error:
                report, is_equal = f"{type(error).__name__}: {error}", False
            num_equal += is_equal
            verdict = "equal" if is_equal else "DIFFERS"
            seconds = time.perf_counter() - started
            print(f"{name:30} {plan:20} {verdict:8} {seconds:5.1f} s", flush=True)
            if not is_equal:
                print(report, flush=True)
    print(f"{num_equal} of {num_all} equal")
    return 0 if num_equal == num_all else 1


if __name__ == "__main__":
    sys.exit(main())
