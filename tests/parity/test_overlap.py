"""Communication beside products: the numbers of one device, and bit by bit those of the same plan
without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from covers import spread
from verified import verify_zoo

from shardwright.compiler.plan.program import Adapt, Program

STAGES = {"tp": 2, "num_stages": 2, "num_microbatches": 4}


@pytest.mark.parametrize(
    ("name", "policy", "config"),
    spread(
        [
            ("gpt2", "hybrid", {"plan_ngpus": 4, "pas_config": STAGES, "use_end2end": True}),
            pytest.param(
                "llama",
                "hybrid",
                {
                    "plan_ngpus": 4,
                    "runtime_ngpus": 8,
                    "use_zero": 3,
                    "use_end2end": True,
                    "pas_config": {"dp": 2, "tp": 2, "num_stages": 1},
                },
                marks=pytest.mark.slow,
            ),
            ("t5", "tp", {"plan_ngpus": 2}),
        ],
        2,
        first=1,
    ),
    ids=["stages", "zero 3", "encoder and decoder"],
)
def test_numbers_are_those_of_one_device(name: str, policy: str, config: dict[str, Any]) -> None:
    given = {"runtime_ngpus": config["plan_ngpus"], **config, "overlap_communication": True}
    report = verify_zoo(name, policy, given, steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("name", "options"), spread([("gpt2", {"sequence_parallel": True}), ("llama", {})], 2), ids=str
)
def test_bits_are_those_of_the_plan_without(
    name: str, options: dict[str, bool], tmp_path: Path
) -> None:
    entry = zoo.get(name)
    model, inputs = entry.build(), entry.inputs()
    outcomes = []
    for overlaps in (False, True):
        compiled = plans.compile_with(
            plans.traced(model, inputs),
            "tp",
            2,
            pas_config=options,
            overlap_communication=overlaps,
        )
        assert isinstance(compiled.program, Program)
        found = [i for i in compiled.program.body if isinstance(i, Adapt) and i.beside]
        assert bool(found) is overlaps
        folder = tmp_path / str(overlaps)
        plans.write(folder, compiled, model)
        outcomes.append(plans.run_once(folder, compiled, inputs))
    before, after = outcomes
    assert torch.equal(before.loss, after.loss) and before.traffic == after.traffic
    for parameter, (pieces, _) in before.pieces.items():
        for mine, theirs in zip(after.pieces[parameter][0], pieces, strict=True):
            assert mine is None if theirs is None else torch.equal(mine, theirs), parameter
