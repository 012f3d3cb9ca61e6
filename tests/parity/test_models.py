"""Every model of the zoo under every built-in policy against one device: loss, gradients,
parameters after AdamW steps.

The tests run a cover: every model under one of the eight configurations, and a family of models
under as many as it has members. Of it, most variants of a family are slow, and so is a fourteenth
of the rest of the product; tests/product/models.py runs all of it.
"""

import warnings

import pytest
import zoo
from verified import verify_zoo

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
    families: dict[str, list[str]] = {}
    for name in zoo.names():
        families.setdefault(name.split("-")[0], []).append(name)
    chosen, start = set(), 0
    for members in families.values():
        count = min(len(members), len(CONFIGURATIONS))  # dealt to the members in turn
        chosen |= {
            (members[i % len(members)], (start + i) % len(CONFIGURATIONS)) for i in range(count)
        }
        start += count
    pairs = [(name, index) for name in zoo.names() for index in range(len(CONFIGURATIONS))]
    return [pair for pair in pairs if pair in chosen], [
        pair for pair in pairs if pair not in chosen
    ]


COVER, REST = _cover()
SAMPLE = REST[::14]


def check(name: str, index: int) -> None:
    policy, plan_ngpus, runtime_ngpus = CONFIGURATIONS[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = {"plan_ngpus": plan_ngpus, "runtime_ngpus": runtime_ngpus}
        report = verify_zoo(name, policy, config)
    assert report.ok, str(report)


QUICK = {
    *("gpt2", "llama", "bert", "vit", "resnet", "dit", "mlp"),
    *("gpt2-uneven", "mlp-uneven", "resnet-uneven", "llama-frozen", "encoder-decoder"),
}
"""Models of all kinds: those with decoders beside encoders go through tests/parity/test_overlap.py
too, and those of which more is to be said through the tests of that.
"""


@pytest.mark.parametrize(
    ("name", "index"),
    [
        pytest.param(name, index, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, index in COVER
    ],
    ids=[f"{n}-{'-'.join(map(str, CONFIGURATIONS[i]))}" for n, i in COVER],
)
def test_model(name: str, index: int) -> None:
    check(name, index)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "index"),
    SAMPLE,
    ids=[f"{n}-{'-'.join(map(str, CONFIGURATIONS[i]))}" for n, i in SAMPLE],
)
def test_model_in_the_rest_of_the_product(name: str, index: int) -> None:
    check(name, index)
