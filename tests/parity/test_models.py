"""Every model of the zoo under every built-in policy against one device: loss, gradients, parameters after AdamW steps.

The default tests run a cover: every model under two of the eight configurations, every family under all of them. The slow
tests run the rest of the product.
"""

import warnings

import pytest
import zoo

from shardwright.compiler.verification.verify import verify

CONFIGURATIONS = [
    ("dp", 1, 2),
    ("tp", 2, 2),
    ("data", 2, 4),
    ("tp", 4, 4),
    ("dp", 1, 4),
    ("data", 4, 4),
    ("tp", 2, 4),
    ("data", 2, 2),
]
"""Policy, ranks of the plan, ranks in all."""


def _cover() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(model, configuration) pairs: those of the cover, and the rest."""
    cover, rest = [], []
    counts: dict[str, int] = {}
    for name in zoo.names():
        family = name.split("-")[0]
        start = counts.get(family, 0)
        counts[family] = start + 2
        chosen = {start % 8, (start + 1) % 8}
        for index in range(8):
            (cover if index in chosen else rest).append((name, index))
    return cover, rest


COVER, REST = _cover()


def check(name: str, index: int) -> None:
    policy, plan_ngpus, runtime_ngpus = CONFIGURATIONS[index]
    entry = zoo.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = {"plan_ngpus": plan_ngpus, "runtime_ngpus": runtime_ngpus}
        report = verify(entry.build(), entry.inputs(), policy, config)
    assert report.ok, str(report)


@pytest.mark.parametrize(("name", "index"), COVER, ids=[f"{n}-{'-'.join(map(str, CONFIGURATIONS[i]))}" for n, i in COVER])
def test_model(name: str, index: int) -> None:
    check(name, index)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), REST, ids=[f"{n}-{'-'.join(map(str, CONFIGURATIONS[i]))}" for n, i in REST])
def test_model_in_the_rest_of_the_product(name: str, index: int) -> None:
    check(name, index)
