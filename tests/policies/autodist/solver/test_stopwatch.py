"""Limits on a machine that others use too: a search without a choice counts what the process had
of the time, one with a choice the wall's.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.solver.problem import Problem, Row, Solution
from shardwright.policies.autodist.solver.progress import Progress
from shardwright.policies.autodist.solver.solve import solve
from shardwright.policies.autodist.solver.stopwatch import Stopwatch


class Machine:
    """The clocks of a machine on which a process gets a ``share`` of the time."""

    def __init__(self, share: float) -> None:
        self.share, self.wall_s, self.cpu_s = share, 0.0, 0.0

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.cpu_s += self.share * seconds

    def watch(self) -> Stopwatch:
        return Stopwatch(lambda: self.wall_s, lambda: self.cpu_s)


def test_work_is_what_the_process_had() -> None:
    for share, worked_s in ((1.0, 8.0), (0.5, 4.0), (0.1, 2.0), (3.0, 8.0)):
        machine = Machine(share)
        watch = machine.watch()
        assert watch.slowdown == 1.0  # nothing is known yet
        machine.pass_s(8.0)
        assert (watch.wall_s, watch.worked_s) == (8.0, worked_s)
        assert watch.slowdown == 8.0 / worked_s


def test_only_a_search_without_a_choice_is_patient() -> None:
    machine = Machine(0.5)
    problem = Problem((np.array([1.0, 2.0]),), (), ())
    progress = Progress(problem, 10.0, watch=machine.watch())
    urgent = Progress(problem, 10.0, urgent=True, watch=machine.watch())
    machine.pass_s(12.0)
    # A library told 8 s of the wall would work for the 4 s that are left.
    assert (progress.left_s, progress.left_wall_s) == (4.0, 8.0) and not progress.done
    assert urgent.left_s == urgent.left_wall_s == -2.0 and urgent.done
    progress.propose((1,))
    assert progress.left_s == -2.0 and progress.done


@pytest.mark.parametrize("share", [1.0, 1 / 3])
def test_a_busy_machine_takes_no_answer_away(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """The process has a second between two looks at the clock of the wall. The first choice within
    the row takes more than a third of the limit: on a busy machine the wall alone would end it.
    """
    machine = Machine(share)

    def look() -> float:
        machine.pass_s(1 / share)
        return machine.wall_s

    monkeypatch.setattr("time.monotonic", look)
    monkeypatch.setattr("time.process_time", lambda: machine.cpu_s)
    rng = np.random.default_rng(0)
    costs = tuple(rng.integers(1, 100, 4).astype(float) for _ in range(40))
    pairs = [(a, b) for a in range(40) for b in range(a + 1, 40)]
    tables = tuple((a, b, rng.integers(0, 50, (4, 4)).astype(float)) for a, b in pairs)
    usage = {node: rng.integers(1, 20, 4).astype(float) for node in range(40)}
    row = Row(1.05 * sum(used.min() for used in usage.values()), usage)
    found = solve(Problem(costs, tables, (row,)), time_limit_s=LIMIT_S)
    assert isinstance(found, Solution)
    assert share == 1.0 or machine.wall_s > LIMIT_S


LIMIT_S = 140.0


def test_a_search_with_nothing_goes_on_until_it_has_worked_so_long() -> None:
    machine = Machine(0.5)
    clock = Clock(100.0, machine.watch())
    machine.pass_s(200.0)
    assert clock.spent() == 2.0 and not clock.is_over
    machine.pass_s(41.0)
    assert clock.is_over
    # With next to nothing for the process it still ends, after four times as long.
    machine = Machine(0.0)
    clock = Clock(100.0, machine.watch())
    machine.pass_s(479.0)
    assert not clock.is_over
    machine.pass_s(2.0)
    assert clock.is_over
