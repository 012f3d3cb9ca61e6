"""How well any model could order published runs: laws of plans, perfect models, learners, pairs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("published_ceiling")


def runs_of_table(script: ModuleType, study: str) -> list[Any]:
    """The runs of a study as they were measured, "predicted" to take as long."""
    tables = sorted(script.TABLES.glob("*.csv"))
    fitted = script.load_machines()[study].fitted_on
    return [
        script.Run(row, row.iter_s, row.name not in fitted)
        for row in script.read_tables(tables)
        if row.study == study
    ]


def by_law(run: Any, factor: float = 1.0) -> Any:
    """The run as if it had taken one second, and for each microbatch 0.1 and 0.2 for a sample."""
    row = run.row
    slots = row.num_microbatches + row.pp - 1
    seconds = factor * (1.0 + slots * (0.1 + 0.2 * row.microbatch))
    return replace(run, row=replace(row, iter_s=seconds), predicted_s=seconds / factor)


def test_what_no_plan_explains_is_scatter(script: ModuleType) -> None:
    runs = runs_of_table(script, script.SEVERAL)
    plan = [run for run in runs if run.plan == ("GPT 39.1B", 512, 8, 8)]
    assert script.scatter([by_law(run) for run in plan]) == pytest.approx((0, 4), abs=1e-12)
    rng = np.random.default_rng(0)
    drawn = [by_law(run, np.exp(0.05 * rng.standard_normal())) for run in plan * 30]
    left, freedom = script.scatter(drawn)
    assert np.sqrt(left / freedom) == pytest.approx(0.05, rel=0.1)
    # The table itself: pipelines whose samples share nodes do not repeat as well as others.
    parts = script.scatter_of_parts(runs)
    assert parts[True][0] > 3 * parts[False][0]


def test_a_perfect_model_is_as_good_as_the_runs_repeat(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DRAWS", 200)
    seconds = np.geomspace(1, 2, 30)
    assert script.perfect(seconds, 0.0).min() == pytest.approx(1)
    found = [script.perfect(seconds, spread).mean() for spread in (0.02, 0.05, 0.2)]
    assert 1 > found[0] > found[1] > found[2]
    assert abs(script.perfect(np.full(30, 1.0) + 1e-9 * seconds, 0.1).mean()) < 0.05


def test_a_missing_price_is_found_if_it_is_the_only_one(script: ModuleType) -> None:
    runs = runs_of_table(script, script.SEVERAL)
    for name in ("waiting for the pipeline", "gradients of a rank"):
        price = script.PRICES[name]
        amounts = np.array([price(run) for run in runs])
        seconds = script.measured(runs) + 30 * amounts / amounts.max()
        missing = [
            replace(run, row=replace(run.row, iter_s=float(slow)))
            for run, slow in zip(runs, seconds, strict=True)
        ]
        (_, without), *found = script.with_price(missing, price)
        rank, error = min(found, key=lambda pair: pair[1])
        assert rank > 0.99 and error < 0.03 < without, name


def test_learners_find_a_law_in_other_rows_and_nothing_in_noise(script: ModuleType) -> None:
    rng = np.random.default_rng(0)
    features = script.standardized(rng.uniform(-1, 1, (3, 40)))
    law = np.exp(features[:, 0]) + features[:, 1] ** 2
    noise = rng.standard_normal(40)
    folds = np.array_split(np.arange(40), 8)
    for learner in (script.gaussian_process, script.boosted_trees, script.ranking):
        learned = script.left_out(learner, features, law, folds)
        assert script.Score.of(learned, law).rank > 0.85, learner.__name__
        learned = script.left_out(learner, features, noise, folds)
        assert script.Score.of(learned, noise).rank < 0.4, learner.__name__


def test_a_factor_of_its_own_is_that_of_other_rows(script: ModuleType) -> None:
    runs = runs_of_table(script, script.SEVERAL)[:3]
    runs = [
        replace(run, predicted_s=run.row.iter_s / factor)
        for run, factor in zip(runs, (2, 2, 3), strict=True)
    ]
    found = script.own_factor(runs, lambda run: run.row.tp)
    factors = found / script.predicted(runs)
    assert factors == pytest.approx([2, 2, 1])  # the third has tp=2, and no other row has


def test_pairs_differ_in_tp_against_pp_and_one_can_be_out_of_reach(script: ModuleType) -> None:
    runs = runs_of_table(script, script.ONE)
    pairs = script.tp_against_pp(runs)
    assert len(pairs) == 72
    assert script.in_order(pairs, lambda run: run.row.iter_s) == 72
    assert script.in_order(pairs, lambda run: -run.row.iter_s) == 0
    one = next(run for run in runs if script.setting_of(run) == (2048, 2, 2))

    layers = {(2048, 2, 2): 4e-3, (2048, 4, 2): 3e-3}

    def run_of(tp: int, layer_s: float) -> Any:
        """Four microbatches without a pipeline, whose layers took so long."""
        row = replace(one.row, name=str(tp), tp=tp, pp=1, gpus=tp, batch=4 * one.row.microbatch)
        count = 4 * row.sizes.layers
        row = replace(row, iter_s=count * layer_s)
        return script.Run(row, count * layers[2048, tp, 2], True)

    def most(pair: tuple[Any, Any], within: float) -> int | None:
        found: int | None = script.LayerTimes(layers).most_in_order([pair], within)
        return found

    two = run_of(2, 4e-3)
    assert most((run_of(4, 2.5e-3), two), 0.01) == 1
    # Twice the ranks are at most twice as fast, so no such time is near 1 ms beside one near 4.
    assert most((run_of(4, 1e-3), two), 0.3) is None
    assert most((run_of(4, 1e-3), two), 0.4) == 1
    # A run cannot be ahead of another by times that are near both.
    assert most((two, run_of(4, 3e-3)), 0.01) == 0
