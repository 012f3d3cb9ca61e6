"""What a plan costs, in words: every kind of rank, or of many kinds the telling ones."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.plan_cost import PlanCost, RankCost

MB, MS = 10**6, 1e-3


def cost_of(figures: Sequence[tuple[float, int]], ranks_each: int = 1) -> PlanCost:
    """The cost of stages of so many ms and MB, on as many ranks each."""
    by_rank = [figure for figure in figures for _ in range(ranks_each)]
    return PlanCost(
        "h100",
        0.1,
        tuple(
            RankCost(rank, ms * MS, {"tp all_reduce": ms * 0.1 * MS}, idle_s=(100 - 1.1 * ms) * MS)
            for rank, (ms, _) in enumerate(by_rank)
        ),
        tuple(
            RankMemory(rank, {"parameter": mb * MB}, moment=f"{rank}B0")
            for rank, (_, mb) in enumerate(by_rank)
        ),
    )


def titles(text: str) -> list[str]:
    return [line.partition(":")[0].strip() for line in text.splitlines() if "compute" in line]


def test_of_many_kinds_of_ranks_the_telling_ones_are_listed() -> None:
    stages = [(10, 50), (20, 80), (40, 70), (20, 60), (20, 55), (20, 45), (30, 40)]
    cost = cost_of(stages, ranks_each=2)
    text = cost.in_words(see_each="see the page")
    assert titles(text) == [
        "ranks 0-1",
        "ranks 2-3 (most memory)",
        "ranks 4-5 (computes longest)",
        "ranks 12-13",
        "ranks 6-11",
    ]
    assert text.endswith(
        "\n  ranks 6-11: compute 20 ms, communication 2 ms, idle 78 ms, memory 45 MB to 60 MB; "
        "see the page"
    )
    assert (
        "ranks 2-3 (most memory): compute 20 ms, tp all_reduce 2 ms, idle 78 ms\n    80 MB" in text
    )
    # Where each is asked for, or they are few, nothing is left out.
    assert titles(str(cost)) == [f"ranks {rank}-{rank + 1}" for rank in range(0, 14, 2)]
    few = cost_of(stages[:5])
    assert few.in_words(see_each="see the page") == str(few)


def test_ranks_that_compute_longest_but_for_rounding_are_one() -> None:
    stages = [(10, 50), (40, 80), (40.0000001, 70), (20, 60), (20, 55), (30, 40)]
    text = cost_of(stages).in_words(see_each="")
    assert titles(text) == [
        "rank 0",
        "rank 1 (computes longest, most memory)",
        "rank 5",
        "ranks 2-4",
    ]
