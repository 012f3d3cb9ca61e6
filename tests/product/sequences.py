"""Random plans that split sequences, against one device; and a table of them.

    python tests/product/sequences.py [--plans 200] [--seed 0] [--models llama t5] [--every]

Every plan is a model of ``tests/_lib/sequence_models.py`` and a draw of: 2, 3, 4, 6 or 8 ranks
(threads), units, policy (``cp``, ``tp`` or ``hybrid``), the sizes dp, tp, pp and cp, one axis for
the sequence or two, their modes, whether tensor parallelism splits the sequence and gathers again,
the schedule, the number of microbatches, what is recomputed, and the stage of ZeRO. ``verify``
compares losses, gradients and parameters after two steps. One line is printed for each, then the
counts; the exit status is 1 if some plan differs. Draws that the compiler refuses are counted
beside, and another is drawn.

``--every`` tries a table in the place of draws: each family in each mode on 2, 3 and 4 ranks, and
beside tensor parallelism, stages, recomputation and ZeRO.

``--only 17`` runs the draw of that number alone: draws depend on the seed and the number, not on
each other.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import sequence_models
from random_draws import try_draws

from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.policies.context_axes import MODES

RANKS = (2, 3, 4, 4, 6, 8)
STEPS = 2
FAMILIES = (
    *("gpt2-uneven", "llama-uneven", "mistral-uneven", "gemma2-padded", "gemma3", "gpt-oss"),
    *("llama-packed", "prefixed", "t5-uneven", "vit-uneven", "whisper", "mamba", "unet"),
)
"""The models of ``--every``."""
MOST_REFUSED = 4
"""How many draws are refused, for each that is not, before the script gives up."""


@dataclass(frozen=True)
class Draw:
    """One plan of one model."""

    number: int
    model: str
    policy: str
    config: dict[str, Any]

    def __str__(self) -> str:
        config = {name: value for name, value in self.config.items() if name != "pas_config"}
        shown = {**config, **self.config["pas_config"]}
        fields = " ".join(f"{name}={value}" for name, value in shown.items())
        return f"{self.number:4} {self.model} {self.policy} {fields}"


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def context(rng: random.Random, size: int) -> dict[str, Any]:
    """How a number of ranks shares a sequence: over one axis, or two."""
    outer = rng.choice([found for found in divisors(size) if found < size] or [1])
    if outer > 1:
        return {"cp": [outer, size // outer], "cp_mode": [rng.choice(MODES) for _ in range(2)]}
    return {"cp": size, "cp_mode": rng.choice(MODES)}


def draw(number: int, seed: int, models: list[str]) -> Draw:
    """The draw of a number."""
    rng = random.Random(f"{seed} {number}")
    ranks, model = rng.choice(RANKS), rng.choice(models)
    plan_ranks = max(rng.choice(divisors(ranks)) for _ in range(2))
    policy = rng.choice(["cp", "tp", "hybrid", "hybrid"])
    config: dict[str, Any] = {"plan_ngpus": plan_ranks, "runtime_ngpus": ranks}
    stage = rng.choice([0, 0, 1, 2, 3])
    if stage:
        config["use_zero"] = stage
    options: dict[str, Any] = {}
    if policy == "cp":
        options = context(rng, plan_ranks)
        if rng.random() < 0.5:
            options["cp_turns"] = rng.choice([0, 1, 2, 3])
    if policy == "tp":
        options = {"sequence_parallel": True, "gathers_again": rng.random() < 0.3}
    if policy == "hybrid":
        stages = rng.choice([size for size in divisors(plan_ranks) if size <= 2])
        dp = rng.choice([size for size in divisors(plan_ranks // stages) if size <= 2])
        options = context(rng, rng.choice(divisors(plan_ranks // stages // dp)))
        options |= {"num_stages": stages, "dp": dp, "sequence_parallel": rng.random() < 0.5}
        options["schedule"] = rng.choice([n for n, found in SCHEDULES.items() if found.trains])
        options["num_microbatches"] = rng.choice([1, 2, 3, 4])
        config["use_end2end"] = True
    if rng.random() < 0.3:
        modules = ["*.*.*", "stage:0"] if policy == "hybrid" else ["*.*.*"]
        options["recompute"] = [rng.choice(modules)]
    config["pas_config"] = options | named(model)
    return Draw(number, model, policy, config)


def named(model: str) -> dict[str, Any]:
    """What a policy is told of the sequence of a model."""
    names = sequence_models.NAMED.get(model)
    return {"sequence": names} if names else {}


def every() -> list[Draw]:
    """The table of ``--every``."""
    found: list[Draw] = []
    for model, mode in product(FAMILIES, MODES[1:]):
        plans: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("cp", {"plan_ngpus": ranks, "runtime_ngpus": ranks}, {}) for ranks in (2, 3, 4)
        ]
        plans += [
            (
                "hybrid",
                {"plan_ngpus": 4, "runtime_ngpus": 8, "use_end2end": True, "use_zero": zero},
                {"cp": 2, **beside},
            )
            for zero, beside in (
                (1, {"num_stages": 1, "tp": 2, "sequence_parallel": True, "recompute": ["*.*.*"]}),
                (2, {"num_stages": 2, "tp": 1, "num_microbatches": 2}),
                (3, {"num_stages": 1, "dp": 2, "tp": 1}),
            )
        ]
        for policy, config, beside in plans:
            options = {**beside, "cp_mode": mode, **named(model)}
            found.append(Draw(len(found), model, policy, {**config, "pas_config": options}))
    return found


def run(found: Draw) -> str:
    """What is wrong with a plan, ``""`` if nothing is. Raises what the compiler refuses it with."""
    report = sequence_models.verify_sequences(found.model, found.policy, found.config, steps=STEPS)
    return "" if report.ok else str(report)


if __name__ == "__main__":
    sys.exit(try_draws(__doc__, sequence_models.MODELS, draw, run, MOST_REFUSED, every()))
