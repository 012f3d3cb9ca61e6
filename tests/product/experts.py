"""Random plans of mixtures of experts, against one device.

    python tests/product/experts.py [--plans 200] [--seed 0] [--models mixtral qwen3_moe]

Every plan is a family of ``tests/_lib/expert_models.py`` and a draw of: 2, 3, 4 or 8 ranks
(threads), units, policy (``ep``, ``tp`` or ``hybrid``), the sizes dp, cp, tp, pp, ep and etp, the
schedule, the number of microbatches, what is recomputed, the stage of ZeRO, the reduction of
gradients, and the rows of a batch. ``verify`` compares losses, gradients and parameters after three
steps. One line is printed for each, then the counts; the exit status is
1 if some plan differs. Draws that the compiler refuses are counted beside, and another is drawn.

``--only 17`` runs the draw of that number alone: draws depend on the seed and the number, not on
each other.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import expert_models
from random_draws import try_draws

from shardwright.compiler.schedule.published import SCHEDULES

RANKS = (2, 3, 4, 4, 8, 8)
STEPS = 3
MOST_REFUSED = 4
"""How many draws are refused, for each that is not, before the script gives up."""


@dataclass(frozen=True)
class Draw:
    """One plan of one model."""

    number: int
    model: str
    policy: str
    batch: int
    config: dict[str, Any]

    def __str__(self) -> str:
        config = {name: value for name, value in self.config.items() if name != "pas_config"}
        shown = {**config, **self.config["pas_config"]}
        fields = " ".join(f"{name}={value}" for name, value in shown.items())
        return f"{self.number:4} {self.model} {self.policy} batch={self.batch} {fields}"


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def draw(number: int, seed: int, models: list[str]) -> Draw:
    """The draw of a number."""
    rng = random.Random(f"{seed} {number}")
    ranks, model = rng.choice(RANKS), rng.choice(models)
    plan_ranks = rng.choice([size for size in divisors(ranks) if size > 1])
    plan_ranks = max(plan_ranks, rng.choice(divisors(ranks)))
    policy = rng.choice(["ep", "tp", "hybrid", "hybrid"])
    config: dict[str, Any] = {"plan_ngpus": plan_ranks, "runtime_ngpus": ranks}
    stage = rng.choice([0, 0, 1, 2, 3])
    if stage:
        config["use_zero"] = stage
    if rng.random() < 0.3:
        config["grad_reduction"] = "mean"
    options: dict[str, Any] = {}
    inner = plan_ranks
    if policy == "hybrid":
        options["num_stages"] = rng.choice([1, 2, rng.choice(divisors(plan_ranks))])
        if plan_ranks % options["num_stages"]:
            options["num_stages"] = 1
        inner = plan_ranks // options["num_stages"]
        options["tp"] = rng.choice(divisors(inner))
        options["dp"] = inner // options["tp"]
        # The ranks of a sequence, or of the batch, and what tp leaves whole along the sequence.
        if rng.random() < 0.4:
            options["cp"] = rng.choice(divisors(options["dp"]))
            options["dp"] //= options["cp"]
            options["cp_mode"] = rng.choice(["gather", "ring"])
            options["sequence_parallel"] = rng.random() < 0.5
        options["schedule"] = rng.choice([n for n, found in SCHEDULES.items() if found.trains])
        options["num_microbatches"] = rng.choice([1, 2, 3, 4])
        if rng.random() < 0.3:
            options["recompute"] = [rng.choice(["stage:0", "*.*.*"])]
        config["use_end2end"] = True
    options["ep"] = max(rng.choice(divisors(inner)) for _ in range(2))
    if rng.random() < 0.5 or policy == "ep":
        options["etp"] = rng.choice(divisors(inner // options["ep"]))
    if rng.random() < 0.3:  # over nodes, and within them
        nodes = rng.choice(divisors(options["ep"]))
        options["ep"] = (nodes, options["ep"] // nodes)
    config["pas_config"] = options
    return Draw(number, model, policy, rng.choice([3, 4, 4, 5]), config)


def run(found: Draw) -> str:
    """What is wrong with a plan, ``""`` if nothing is. Raises what the compiler refuses it with."""
    report = expert_models.verify_experts(
        found.model, found.policy, found.config, batch=found.batch, steps=STEPS
    )
    return "" if report.ok else str(report)


if __name__ == "__main__":
    sys.exit(try_draws(__doc__, expert_models.MODELS, draw, run, MOST_REFUSED))
