"""How well any model could order published runs, by what their tables themselves tell.

    python benchmarks/published_ceiling.py           # vTrain, several nodes: its 66 tested rows
    python benchmarks/published_ceiling.py --pairs   # vTrain, one node: tp against pp

A rank correlation below its aim has two causes: a model that misses something, and runs that do not
repeat. Five views tell them apart.

- *Order.* Our predictions, also for parts of the table, beside the order of the table itself.
- *Scatter.* A plan whose microbatches are alike takes ``c + (m + pp - 1) * (a + b * samples)``
  seconds, with nothing negative: c once a step, a for each of m microbatches, b for each sample of
  one. What is left of plans with three rows and more cannot come from the plan.
- *A perfect model*: how well true times order measured ones that are off by so much.
- *A missing price*: what the best constant for it would bring, chosen with all rows in view.
- *Learners* that see nearly all rows, and predict those that were left out.

For example, tp=4 on 16 stages takes 14.5, 15.0, 15.6, 20.0 and 27.8 s in microbatches of 2, 3, 4, 6
and 12. The best a, b and c are 8 % off, so the order of two such rows that are nearer is chance.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from ortools.linear_solver.python import model_builder
from published import TABLES, Machine, Programs, Score, load_machines, predict, same_work
from published_learners import (
    Array,
    boosted_trees,
    gaussian_process,
    left_out,
    ranking,
    standardized,
)
from published_runs import Row
from published_tables import read_tables
from rich.console import Console
from rich.table import Table

SEVERAL, ONE = "vTrain, several nodes, A100 80GB", "vTrain, one node, A100"

AIM = 0.97
"""The rank correlation that each study should have."""

MOST_ERROR = 0.08
"""The error that vTrain's several nodes should have at most."""

DRAWS = 2000
"""How often a perfect model is held against runs with drawn errors."""


@dataclass(frozen=True)
class Run:
    """A row with its predicted seconds. ``tested``: whether no constant was fitted on it."""

    row: Row
    predicted_s: float
    tested: bool

    @property
    def plan(self) -> tuple[object, ...]:
        """What runs that differ in microbatches only have in common."""
        return self.row.model, self.row.gpus, self.row.tp, self.row.pp

    @property
    def shares_nodes(self) -> bool:
        """Whether several ranks of a stage that work on other samples lie on one node of eight, in
        a pipeline over nodes.
        """
        return self.row.pp > 1 and self.row.tp < 8


def runs_of(study: str, programs: Programs) -> list[Run]:
    """All runs of a study, predicted with its constants."""
    machine = load_machines()[study]
    rows = [row for row in read_tables(sorted(TABLES.glob("*.csv"))) if row.study == study]
    return [
        Run(row, predict(row, programs, machine), row.name not in machine.fitted_on) for row in rows
    ]


def measured(runs: Sequence[Run]) -> Array:
    """Measured seconds."""
    return np.array([run.row.iter_s for run in runs])


def predicted(runs: Sequence[Run]) -> Array:
    """Predicted seconds."""
    return np.array([run.predicted_s for run in runs])


def correlation(values: Array, runs: Sequence[Run]) -> float:
    """The rank correlation of values with measured seconds."""
    return Score.of(values.tolist(), measured(runs).tolist()).rank


# ------------------------------------------------------------------------------------------------
# order

PARTS: dict[str, Callable[[Run], bool]] = {
    "all": lambda run: True,
    "GPT 3.6B": lambda run: run.row.model == "GPT 3.6B",
    "GPT 39.1B": lambda run: run.row.model == "GPT 39.1B",
    "GPT 39.1B, tp=8": lambda run: run.row.model == "GPT 39.1B" and run.row.tp == 8,
    "GPT 39.1B, tp=1 to 4": lambda run: run.row.model == "GPT 39.1B" and run.row.tp < 8,
    "all but GPT 39.1B, tp=1 to 4": lambda run: run.row.model == "GPT 3.6B" or run.row.tp == 8,
}
"""Parts of the table of several nodes, by what is said of them."""


def order_table(runs: Sequence[Run]) -> Table:
    """Our predictions and the place of a row in the table, by part."""
    heads = ("rows", "count", "error", "rank, ours", "rank, place in the table")
    table = Table(*heads, title="Order", caption=_interval_text(runs))
    places = {run.row.name: float(place) for place, run in enumerate(runs)}
    for name, belongs in PARTS.items():
        part = [run for run in runs if run.tested and belongs(run)]
        score = Score.of(predicted(part).tolist(), measured(part).tolist())
        by_place = correlation(np.array([places[run.row.name] for run in part]), part)
        cells = str(len(part)), f"{score.error:.1%}", f"{score.rank:.3f}", f"{by_place:.3f}"
        table.add_row(name, *cells)
    large = [run for run in runs if PARTS["GPT 39.1B"](run)]
    own = Score.of(predicted(large).tolist(), [places[run.row.name] for run in large]).rank
    table.add_row("GPT 39.1B: ours and the places", str(len(large)), "", f"{own:.3f}", "")
    return table


def _interval_text(runs: Sequence[Run]) -> str:
    """The interval of our rank correlation, if plans are drawn again (bootstrap)."""
    rng, tested = np.random.default_rng(0), [run for run in runs if run.tested]
    plans = [[run for run in tested if run.plan == plan] for plan in {run.plan for run in tested}]
    plans.sort(key=lambda plan: plan[0].row.name)
    found = []
    for _ in range(DRAWS // 2):
        drawn = [run for i in rng.integers(len(plans), size=len(plans)) for run in plans[i]]
        found.append(correlation(predicted(drawn), drawn))
    low, high = np.quantile(found, [0.05, 0.95])
    return f"ours, plans drawn again: {low:.3f} to {high:.3f} (90 %)"


# ------------------------------------------------------------------------------------------------
# scatter


def scatter(runs: Sequence[Run]) -> tuple[float, int]:
    """What is left of one plan's runs beside the best law of the plan: the sum of squared relative
    errors, and how many rows there are more than constants of the law.
    """
    samples = np.array([run.row.microbatch for run in runs])
    slots = np.array([run.row.num_microbatches + run.row.pp - 1 for run in runs])
    terms = np.stack([np.ones(len(runs)), slots, slots * samples], axis=1)
    scaled = terms / measured(runs)[:, None]
    found = []
    for kept in itertools.chain.from_iterable(
        itertools.combinations(range(3), count) for count in (1, 2, 3)
    ):
        constants = np.linalg.lstsq(scaled[:, kept], np.ones(len(runs)), rcond=None)[0]
        if (constants >= 0).all():
            left = float(((scaled[:, kept] @ constants - 1) ** 2).sum())
            found.append((left, len(runs) - len(kept)))
    return min(found)


def pooled_scatter(runs: Sequence[Run]) -> tuple[float, int]:
    """The spread of runs around the laws of their plans, and the freedom that it is taken over."""
    plans: dict[object, list[Run]] = {}
    for run in runs:
        plans.setdefault(run.plan, []).append(run)
    parts = [scatter(plan) for plan in plans.values() if len(plan) >= 3]
    freedom = sum(free for _, free in parts)
    return float(np.sqrt(sum(left for left, _ in parts) / freedom)), freedom


def scatter_of_parts(runs: Sequence[Run]) -> dict[bool, tuple[float, int]]:
    """The scatter of pipelines, by whether samples share nodes."""
    stages = [run for run in runs if run.row.pp > 1]
    return {
        shares: pooled_scatter([run for run in stages if run.shares_nodes == shares])
        for shares in (False, True)
    }


# ------------------------------------------------------------------------------------------------
# a perfect model


def perfect(true_s: Array, spread: Array | float) -> Array:
    """Rank correlations of true times with measured ones that are off by ``spread``, as logarithms,
    in :data:`DRAWS` draws.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = true_s * np.exp(spread * rng.standard_normal(len(true_s)))
        found.append(Score.of(true_s.tolist(), drawn.tolist()).rank)
    return np.array(found)


def perfect_table(runs: Sequence[Run]) -> Table:
    """What a perfect model reaches on the tested rows."""
    parts = scatter_of_parts(runs)
    tested = [run for run in runs if run.tested]
    by_part = np.array([parts[run.shares_nodes][0] for run in tested])
    quiet, loud = parts[False][0], parts[True][0]
    caption = (
        f"scatter of pipelines: {quiet:.1%} on tp=8 (over {parts[False][1]} rows), "
        f"{loud:.1%} on tp=1 to 4 (over {parts[True][1]})"
    )
    heads = ("measured times are off by", "true times", "rank", "90 % within", f"{AIM} or more")
    table = Table(*heads, title="A perfect model", caption=caption)
    spreads: dict[str, Array | float] = {f"{s:.0%}": s for s in (0.03, 0.05, 0.08, 0.1)}
    for name, spread in ({"the scatter of their part": by_part} | spreads).items():
        for truth, seconds in (("predicted", predicted(tested)), ("measured", measured(tested))):
            found = perfect(seconds, spread)
            low, high = np.quantile(found, [0.05, 0.95])
            share = f"{(found >= AIM).mean():.0%} of draws"
            table.add_row(name, truth, f"{found.mean():.3f}", f"{low:.3f} to {high:.3f}", share)
    return table


# ------------------------------------------------------------------------------------------------
# a missing price


def _slots(run: Run) -> int:
    """The microbatches' times that a step of a pipeline lasts."""
    return run.row.num_microbatches + run.row.pp - 1


def _between_stages(run: Run) -> float:
    """The bytes that a rank sends to other stages in a step, without a constant."""
    sizes = run.row.sizes
    return _slots(run) * run.row.microbatch * sizes.hidden * (run.row.pp > 1)


def _gradients(run: Run) -> float:
    """The gradients of a rank, without a constant."""
    sizes = run.row.sizes
    weights = 12 * sizes.layers * sizes.hidden**2 + sizes.vocab * sizes.hidden
    return weights / (run.row.tp * run.row.pp)


PRICES: dict[str, Callable[[Run], float]] = {
    "messages between stages, their number": lambda run: _slots(run) * (run.row.pp > 1),
    "their bytes, of a rank": _between_stages,
    "their bytes, of a node": lambda run: _between_stages(run) * max(8 / run.row.tp, 1),
    "microbatches, times other replicas on the node": lambda run: (
        _slots(run) * max(8 / run.row.tp - 1, 0) * (run.row.pp > 1)
    ),
    "waiting for the pipeline": lambda run: (run.row.pp - 1) * run.predicted_s / _slots(run),
    "gradients of a rank": _gradients,
    "gradients of a node": lambda run: _gradients(run) * min(8, run.row.tp),
    "sums inside layers, their number": lambda run: (
        _slots(run) * run.row.sizes.layers / run.row.pp * (run.row.tp > 1)
    ),
    "layers launched": lambda run: _slots(run) * run.row.sizes.layers / run.row.pp,
}
"""What could be priced too low, by name: the amount of it in a step, without a constant."""


def with_price(runs: Sequence[Run], price: Callable[[Run], float]) -> list[tuple[float, float]]:
    """The rank correlation and error of ``scale * (ours + constant * amount)``, by constant, with
    the scale that makes the error least. Constants and scales see the rows that they are tested on,
    so a model that misses nothing but this price can hardly be better.
    """
    amounts = np.array([price(run) for run in runs])
    amounts = amounts * measured(runs).max() / amounts.max()
    found = []
    for constant in (0.0, *np.geomspace(1e-3, 3, 40)):
        seconds = predicted(runs) + constant * amounts
        rank = correlation(seconds, runs)
        scales = np.linspace(0.3, 1.3, 101)[:, None]
        errors = np.abs(scales * seconds / measured(runs) - 1).mean(axis=1)
        found.append((rank, float(errors.min())))
    return found


def prices_table(runs: Sequence[Run]) -> Table:
    """How far one missing price could bring us on the tested rows."""
    tested = [run for run in runs if run.tested]
    within = f"rank, error at most {MOST_ERROR:.0%}"
    table = Table("more for", "rank (error) at best", within, title="A missing price")
    for name, price in PRICES.items():
        found = with_price(tested, price)
        rank, error = max(found)
        near = max(rank for rank, error in found if error <= MOST_ERROR)
        table.add_row(name, f"{rank:.3f} ({error:.1%})", f"{near:.3f}")
    return table


# ------------------------------------------------------------------------------------------------
# learners


def features_of(runs: Sequence[Run], *, ours: bool) -> Array:
    """A plan as numbers, and with ``ours`` the prediction."""
    rows = [run.row for run in runs]
    columns = [
        np.log2([row.tp for row in rows]),
        np.log2([row.pp for row in rows]),
        np.log2([row.microbatch for row in rows]),
        np.log2([row.num_microbatches for row in rows]),
        np.log([row.sizes.hidden for row in rows]),
    ]
    return standardized(columns + [np.log(predicted(runs))] * ours)


def folds_of(runs: Sequence[Run]) -> dict[str, list[Array]]:
    """What is left out at a time, by name."""
    plans: dict[object, list[int]] = {}
    for index, run in enumerate(runs):
        plans.setdefault(run.plan, []).append(index)
    return {
        "a row": [np.array([index]) for index in range(len(runs))],
        "a plan": [np.array(rows) for rows in plans.values()],
        "all but the fitted rows": [np.flatnonzero([run.tested for run in runs])],
    }


def own_factor(runs: Sequence[Run], key: Callable[[Run], object]) -> Array:
    """Predictions times the mean factor by which other runs of the same ``key`` are off."""
    found = []
    for run in runs:
        others = [other for other in runs if other is not run and key(other) == key(run)]
        off = np.log(measured(others)) - np.log(predicted(others))
        found.append(run.predicted_s * np.exp(off.mean() if len(off) else 0.0))
    return np.array(found)


def learners_table(runs: Sequence[Run]) -> Table:
    """What learners reach on tested rows, by what was left out while they learned."""
    tested = np.array([run.tested for run in runs])
    kept = [run for run in runs if run.tested]
    folds = folds_of(runs)
    title = "Learners: rank correlation (error) on tested rows"
    table = Table("learns", "from", *(f"without {name}" for name in folds), title=title)

    def cell(seconds: Array, is_time: bool = True) -> str:
        rank = correlation(seconds[tested], kept)
        error = np.abs(seconds[tested] / measured(kept) - 1).mean()
        return f"{rank:.3f} ({error:.1%})" if is_time else f"{rank:.3f}"

    own = own_factor(runs, lambda run: run.plan)
    table.add_row("a factor of each plan", "errors of ours", cell(own), *[""] * (len(folds) - 1))
    for learner in (gaussian_process, boosted_trees, ranking):
        for ours in (True, False):
            features = features_of(runs, ours=ours)
            start = np.log(predicted(runs)) * (ours and learner is not ranking)
            targets = np.log(measured(runs)) - start
            cells = [
                cell(
                    np.exp(left_out(learner, features, targets, fold) + start),
                    learner is not ranking,
                )
                for fold in folds.values()
            ]
            source = "plans and ours" if ours else "plans"
            table.add_row(learner.__name__.replace("_", " "), source, *cells)
    return table


# ------------------------------------------------------------------------------------------------
# pairs of plans on one node that differ in tp against pp

Setting = tuple[int, int, int]
"""Width of a model, tp, samples of a microbatch: what a layer's time depends on."""


def setting_of(run: Run) -> Setting:
    """The setting of a run."""
    return run.row.sizes.hidden, run.row.tp, run.row.microbatch


def tp_against_pp(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Every two tested runs that differ in tp against pp and in nothing else, the faster first."""
    found = []
    for one, two in itertools.combinations([run for run in runs if run.tested], 2):
        alike = same_work(one.row) == same_work(two.row)
        alike &= one.row.microbatch == two.row.microbatch and one.row.copies == two.row.copies
        if alike and one.row.tp != two.row.tp:
            found.append((one, two) if one.row.iter_s < two.row.iter_s else (two, one))
    return found


def in_order(pairs: Sequence[tuple[Run, Run]], seconds: Callable[[Run], float]) -> int:
    """How many pairs are ordered right."""
    return sum(seconds(fast) < seconds(slow) for fast, slow in pairs)


def layers_of(runs: Sequence[Run], programs: Programs, machine: Machine) -> dict[Setting, float]:
    """The predicted seconds of one layer's forward and backward, by setting: what a further layer
    and a further microbatch take together, on ranks of one tensor-parallel group.
    """
    found = {}
    for run in runs:
        if setting_of(run) in found:
            continue
        alone = replace(run.row, pp=1, gpus=run.row.tp)
        times = {}
        for layers, count in itertools.product((16, 24), (4, 8)):
            sizes = replace(alone.sizes, layers=layers)
            row = replace(alone, sizes=sizes, batch=count * alone.microbatch)
            times[layers, count] = predict(row, programs, machine)
        mixed = times[24, 8] - times[16, 8] - times[24, 4] + times[16, 4]
        found[setting_of(run)] = mixed / (8 * 4)
    return found


class LayerTimes:
    """Any model in which hosts do not differ, and what is the most that it can order right.

    A layer takes as long as the host, which launches it, or the device, whichever is longer. Hosts
    take any time, not less on more ranks. Devices take two to four times as long on twice the
    width, one to two times on twice the samples, and at least half on twice the ranks. Everything
    else of a step is as predicted. For example, no such model has layers of 4.6 and 2.2 ms on two
    and on four ranks with the same samples, as a device would be more than twice as fast.

    Times are those of layers, in milliseconds; an integer program finds them.
    """

    def __init__(self, layers: dict[Setting, float]) -> None:
        self._layers = layers
        self._model = model = model_builder.Model()
        self._most = 10 * max(layers.values()) * 1e3
        hosts = {tp: self._time() for tp in sorted({tp for _, tp, _ in layers})}
        for fewer, more in itertools.pairwise(hosts.values()):
            model.add(fewer <= more)
        devices = {setting: self._time() for setting in layers}
        self._times = {
            setting: self._longer(hosts[setting[1]], device) for setting, device in devices.items()
        }
        for (width, tp, samples), device in devices.items():
            for larger, least, most in (
                ((2 * width, tp, samples), 2, 4),
                ((width, tp, 2 * samples), 1, 2),
                ((width, 2 * tp, samples), 0.5, 10),
            ):
                if larger in devices:
                    model.add(devices[larger] >= least * device)
                    model.add(devices[larger] <= most * device)

    def _time(self) -> model_builder.Variable:
        return self._model.new_var(0.0, self._most, False, None)

    def _longer(
        self, host: model_builder.Variable, device: model_builder.Variable
    ) -> model_builder.Variable:
        longer, by_device = self._time(), self._model.new_bool_var(None)
        self._model.add(longer >= host)
        self._model.add(longer >= device)
        self._model.add(longer <= host + self._most * by_device)
        self._model.add(longer <= device + self._most * (1 - by_device))
        return longer

    def _step(self, run: Run) -> model_builder.LinearExpr:
        """The milliseconds of a step: as predicted, with the layers' new time."""
        row, setting = run.row, setting_of(run)
        count = (row.num_microbatches + row.pp - 1) * row.sizes.layers / row.pp
        rest = run.predicted_s - count * self._layers[setting]
        return count * self._times[setting] + 1e3 * rest

    def most_in_order(self, pairs: Sequence[tuple[Run, Run]], within: float) -> int | None:
        """The most pairs that are ordered right, with each run at most ``within`` from its measured
        time; ``None`` if no such model is as near.
        """
        for run in {run.row.name: run for pair in pairs for run in pair}.values():
            self._model.add(self._step(run) <= 1e3 * (1 + within) * run.row.iter_s)
            self._model.add(self._step(run) >= 1e3 * (1 - within) * run.row.iter_s)
        right = [self._model.new_bool_var(None) for _ in pairs]
        for is_right, (fast, slow) in zip(right, pairs, strict=True):
            # Binding where the pair counts as right, slack where it does not.
            slack = 2e3 * (1 + within) * max(fast.row.iter_s, slow.row.iter_s)
            ahead = 1e-4 * 1e3 * fast.row.iter_s
            self._model.add(self._step(fast) + ahead <= self._step(slow) + slack * (1 - is_right))
        self._model.maximize(sum(right))
        solver = model_builder.Solver("scip")
        if solver.solve(self._model) != model_builder.SolveStatus.OPTIMAL:
            return None
        return round(solver.objective_value)


def pairs_table(runs: Sequence[Run], layers: dict[Setting, float]) -> Table:
    """How many pairs are ordered right, by what is known."""
    pairs = tp_against_pp(runs)
    own = dict(zip([run.row.name for run in runs], own_factor(runs, setting_of), strict=True))
    learned = _settings_learned(runs)
    table = Table("times of layers", "in order", title=f"tp against pp, {len(pairs)} pairs")
    for name, seconds in (
        ("ours", lambda run: run.predicted_s),
        ("ours, times the factor of other rows of the setting", lambda run: own[run.row.name]),
        (
            "ours, times a factor learned from other settings",
            lambda run: run.predicted_s * learned[setting_of(run)],
        ),
    ):
        table.add_row(name, str(in_order(pairs, seconds)))
    before = None
    for percent in range(1, 100):
        most = LayerTimes(layers).most_in_order(pairs, percent / 100)
        if most != before:
            name = f"any, if hosts do not differ, at most {percent} % off in a row"
            table.add_row(name, f"{most} at most")
            before = most
        if most == len(pairs):
            break
    return table


def _settings_learned(runs: Sequence[Run]) -> dict[Setting, float]:
    """The factor of each setting, as a Gaussian process learns it from all others."""
    settings = sorted({setting_of(run) for run in runs})
    off = []
    for setting in settings:
        part = [run for run in runs if setting_of(run) == setting]
        off.append(np.mean(np.log(measured(part)) - np.log(predicted(part))))
    features = standardized(np.log2(np.array(settings, float)).T)
    each = [np.array([index]) for index in range(len(settings))]
    factors = np.exp(left_out(gaussian_process, features, np.array(off), each))
    return dict(zip(settings, factors.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", action="store_true", help="pairs on one node, tp against pp")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of plans in which ranks do more than their part
    programs, console = Programs(), Console(width=130, markup=False)
    if arguments.pairs:
        runs = runs_of(ONE, programs)
        layers = layers_of(runs, programs, load_machines()[ONE])
        console.print(pairs_table(runs, layers))
        return
    runs = runs_of(SEVERAL, programs)
    for table in (order_table, perfect_table, prices_table, learners_table):
        console.print(table(runs))


if __name__ == "__main__":
    main()
