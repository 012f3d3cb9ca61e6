"""The difference of two plans, as data and as a person reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import plans
import pytest

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.cli.main import main
from shardwright.frontend.report.diff import Change, diff
from shardwright.runtime.layout import Layout


@pytest.fixture(scope="module")
def made() -> tuple[PlannableGraph, Plan, Plan]:
    graph = plans.zoo_traced("gpt2")
    return (
        plans.zoo_graph("gpt2"),
        plans.compile_with(graph, "tp", 2).plan,
        plans.compile_with(graph, "data", 2).plan,
    )


def test_a_plan_does_not_differ_from_itself(made: tuple[PlannableGraph, Plan, Plan]) -> None:
    _, tp, _ = made
    assert not diff(tp, Plan.from_json(json.loads(tp.dumps())))


def test_one_edit_is_one_change(made: tuple[PlannableGraph, Plan, Plan]) -> None:
    _, tp, _ = made
    name = next(
        op
        for op, assignment in tp.strategies.items()
        if assignment.get("tp", "").startswith("split:")
    )
    edited = replace(
        tp,
        strategies={**tp.strategies, name: {"tp": "R"}},
        stored={**tp.stored, "transformer.ln_f.weight": Layout.parse("[64]")},
        outputs={**tp.outputs, "logits": None},
    )
    found = diff(tp, edited)
    assert found.settings == ()
    assert found.operators == (Change(name, f"tp: split {tp.dims[name]['tp']}", "-"),)
    assert found.tensors == (
        Change("output logits", "eval", "dropped"),
        Change("transformer.ln_f.weight", "-", "[64]"),
    )


def test_an_edited_strategy_shows_though_its_name_is_the_same(
    made: tuple[PlannableGraph, Plan, Plan],
) -> None:
    """Nobody edits the names of dims; and plans that differ in these alone do the same."""
    _, tp, _ = made
    name = "transformer_h_0_mlp_c_fc_x"
    edited = replace(tp, strategies={**tp.strategies, name: {"tp": "split:k"}})
    (change,) = diff(tp, edited).operators
    assert (
        change == Change(name, f"tp: {tp.strategies[name]['tp']}", "tp: split:k")
        and change.before != change.after
    )
    summands = [
        replace(tp, strategies={**tp.strategies, name: {"tp": f"linear:{index}"}}, dims={})
        for index in (0, 1)
    ]
    assert diff(*summands).operators == (Change(name, "tp: linear:0", "tp: linear:1"),)
    assert not diff(tp, replace(tp, dims={}))


def test_policies_differ_in_settings_and_operators(made: tuple[PlannableGraph, Plan, Plan]) -> None:
    _, tp, data = made
    found = diff(tp, data)
    assert Change("policy", "tp", "data") in found.settings
    assert Change("mesh", "tp=2", "dp=2") in found.settings
    changed = {change.name: (change.before, change.after) for change in found.operators}
    assert changed["transformer_h_0_mlp_c_fc_x"] == ("tp: split ffn", "dp: split batch")


def test_the_command(
    made: tuple[PlannableGraph, Plan, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tp, data = made
    (tmp_path / "plan.json").write_text(tp.dumps())
    (tmp_path / "data.json").write_text(data.dumps())
    assert main(["diff", str(tmp_path), str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == "The plans are the same.\n"
    assert main(["diff", str(tmp_path), str(tmp_path / "data.json")]) == 1
    shown = capsys.readouterr().out
    assert (
        "transformer_h_*_mlp_c_fc_x  x2" in shown
        and "tp: split ffn" in shown
        and "dp: split batch" in shown
    )
    assert main(["diff", str(tmp_path), str(tmp_path / "data.json"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == diff(tp, data).to_json()
    assert main(["diff", str(tmp_path), str(tmp_path / "missing.json")]) == 1
    assert "no plan can be read from" in capsys.readouterr().err
