"""A plan file edited by hand: what is said of an edit that makes it none. Files of all kinds of
plans pass.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from functools import reduce
from pathlib import Path
from typing import Any

import plans
import pytest

from shardwright.compiler.plan.plan import Batch, Certificate, Note, Plan, PlannedLoop, StagePlan
from shardwright.compiler.plan.plan_file import KEYS, check_plan_file
from shardwright.policies.known_policies import find_policy
from shardwright.policies.saved_plan import read_plan_file
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout, Mesh

CERTIFICATE = Certificate(
    1.0, 0.5, ("optimal", "of one"), "all", "h100", ("tp=2: 1 s",), "0" * 64, 8, 4,
    settings={"reducer_bucket_cap_mb": 8},
)  # fmt: skip

FULL = Plan(
    Mesh((("pp", 2), ("tp", 2)), (("tp", 3),)),
    {"up": {"tp": "split:n"}},
    {"up.weight": Layout.parse("[8/tp, 4] G(dp)")},
    {"x": Layout.parse("[4, 4]")},
    {"": None, "loss": "sharded", "hidden": Layout.parse("[4/tp]")},
    "autodist",
    (Note("up", "up", "model.py:3", "tp", "no dim to split"),),
    (StagePlan("", Mesh((("tp", 2),)), (0, 1)), StagePlan("down", Mesh(()), (2,))),
    "1f1b",
    4,
    ("0F0 0B0",),
    ("up",),
    {"up": {"tp": "ffn"}},
    CERTIFICATE,
    2,
    3,
    Batch(4, 4, {"x": 0}),
    1.5,
    {"up.weight": "keep"},
    {"loss": PlannedLoop(4, {"up": "split:b"})},
)
"""A plan with a value for everything."""


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """So every field of a plan has its key here: a new one that is forgotten is refused as
    unknown.
    """
    assert all(getattr(FULL, field.name) for field in fields(Plan))
    path = tmp_path / "plan.json"
    path.write_text(FULL.dumps())
    assert read_plan_file(path) == FULL and set(FULL.to_json()) == set(KEYS)
    check_plan_file(json.loads(Plan(Mesh(())).dumps()))
    config = ComputeConfig(
        plan_ngpus=4, runtime_ngpus=4, use_end2end=True, pas_config={"num_stages": 2}
    )
    made = find_policy("hybrid").apply(plans.zoo_graph("mlp"), config)
    check_plan_file(json.loads((made if isinstance(made, Plan) else made.plan).dumps()))


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("format", 7, "format is 7, and this version reads 1"),
        ("strategys", {}, "the file has a key 'strategys': did you mean 'strategies'?"),
        ("mesh", {"tp": "4"}, "mesh['tp'] is '4', not a whole number from 1"),
        ("mesh", {"tp": 0}, "mesh['tp'] is 0, not a whole number from 1"),
        ("mesh", [4], "mesh is [4], not an object"),
        ("strategies", {"up": 3}, "strategies['up'] is 3, not an object"),
        ("strategies", {"up": {"tp": None}}, "strategies['up']['tp'] is None, not a text"),
        ("stored", {"up.weight": "[8/"}, "stored['up.weight']: the layout '[8/' does not parse"),
        ("stored", {"up.weight": 8}, "stored['up.weight'] is 8, not a layout"),
        (
            "outputs",
            {"loss": "[3/tp/tp]"},
            "outputs['loss']: the layout '[3/tp/tp]' uses the axis 'tp' twice",
        ),
        ("recompute", "up", "recompute is 'up', not a list"),
        ("stages", [{"first_op": "", "mesh": {}}], "key 'ranks' is missing in stages[0]"),
        ("stages.0.ranks", [0, "1"], "stages[0].ranks[1] is '1', not a whole number from 0"),
        ("num_microbatches", True, "num_microbatches is True, not a whole number from 1"),
        ("imbalance", {"up": 0.5}, "imbalance of 'up' is 0.5, not a number from 1"),
        (
            "imbalance",
            {"up": 4, "down": 4.5},
            "imbalance of 'down' is 4.5, more than a rank can get: all tokens "
            "together are 4 times the even share of a rank",
        ),
        ("certificate.cost_s", "1 s", "certificate.cost_s is '1 s', not a number"),
        (
            "certificate.settings",
            {"bucket_cap_mb": 8},
            "certificate.settings has a key 'bucket_cap_mb': did you mean 'reducer_bucket_cap_mb'?",
        ),
    ],
)
def test_edits_that_make_it_no_plan(path: str, value: Any, why: str, tmp_path: Path) -> None:
    data = copy.deepcopy(FULL.to_json())
    *parents, last = path.split(".")
    reduce(lambda node, key: node[int(key) if key.isdecimal() else key], parents, data)[last] = (
        value
    )
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        read_plan_file(file)
    assert (
        str(caught.value)
        == f"{file} holds no plan\n  why:   {why}\n  try:   compare it with the plan.json of a "
        "compile"
    )
