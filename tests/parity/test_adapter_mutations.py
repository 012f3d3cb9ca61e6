"""Breaking the backward of any adapter leaves the loss right and gives wrong gradients: why every
test compares gradients.

A fixed handful of random plans uses every entry of the adapter table. For each entry only its
backward is exchanged for that of another entry; each plan that uses it must still give the loss,
and at least one must give wrong gradients.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from parity import deviations

from shardwright.compiler.compile import Compiled
from shardwright.compiler.passes.verify_program import TABLE
from shardwright.compiler.plan.program import Program
from shardwright.runtime import adapters
from shardwright.runtime.layout import Mesh

SEEDS = (4, 23, 29, 30)
Backward = Callable[[Any, torch.Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """One random plan, compiled. ``entries``: the adapters it uses, as (kind, backward)."""

    compiled: Compiled
    directory: Path
    entries: frozenset[tuple[str, str | None]]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Case], Any, Any]:
    """The plans, the inputs, and what one device computes."""
    entry = zoo.get("mlp")
    model, inputs = entry.build(), entry.inputs()
    graph = plans.traced(model, inputs)
    annotated, found = plans.annotated(graph), []
    for seed in SEEDS:
        rng = random.Random(seed)
        compiled = plans.compile_plan(
            graph, plans.random_plan(annotated, Mesh.of(rng.choice([{"a": 2}, {"a": 3}])), rng)
        )
        assert isinstance(compiled.program, Program)
        directory = tmp_path_factory.mktemp("plan") / str(seed)
        plans.write(directory, compiled, model)
        used = frozenset(
            (a.step.kind, a.step.backward)
            for a in compiled.program.adapters()
            if a.value.requires_grad
        )
        found.append(Case(compiled, directory, used))
    return found, inputs, plans.reference_run(model, [inputs], steps=1)


def is_right(case: Case, inputs: Any, reference: Any) -> tuple[bool, bool]:
    """Whether the loss, and whether all gradients, are those of one device."""
    outcome = plans.run_once(case.directory, case.compiled, inputs)
    loss = deviations({"loss": outcome.loss}, {"loss": reference.losses[0][0]})
    try:
        ours = plans.without_none(outcome.gradients, reference.gradients)
    except AssertionError:  # copies differ
        right = False
    else:
        right = all(d.excess <= 1 for d in deviations(ours, reference.gradients))
    return all(d.excess <= 1 for d in loss), right


def flipped(function: type[torch.autograd.Function], attribute: str, value: bool) -> Backward:
    """The backward of ``function``, but that calls saved with ``attribute == value`` act like the
    others.
    """
    original = function.backward

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if getattr(ctx, attribute) is value:
            setattr(ctx, attribute, not value)
            result = original(ctx, grad)
            setattr(ctx, attribute, value)
            return result
        return original(ctx, grad)

    return backward


def zeros_around(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """A broken backward of a reduce-scatter: the gradient of this rank's piece only."""
    return adapters._pad_zeros(grad, ctx.axis, ctx.dim, ctx.cut), None, None, None


def summed(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """A broken backward of a pad: summed over the ranks, as if each had a summand."""
    return adapters._scatter_sum(grad, ctx.axis, ctx.dim, ctx.cut, "backward"), None, None, None


def unchanged(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad, None


def from_the_next_rank(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """A broken backward of an all-to-all: the pieces in another order."""
    dim, cut, to_dim, to_cut = ctx.cuts
    grad = grad.flip(to_dim)
    return (
        adapters._exchange(grad, ctx.axis, to_dim, to_cut, dim, cut, "backward"),
        None,
        None,
        None,
        None,
        None,
    )


MUTATIONS: dict[tuple[str, str | None], tuple[type[torch.autograd.Function], Backward]] = {
    ("all_gather", "slice"): (adapters._AllGather, flipped(adapters._AllGather, "reduce", False)),
    ("all_gather", "reduce_scatter"): (
        adapters._AllGather,
        flipped(adapters._AllGather, "reduce", True),
    ),
    ("narrow", "all_gather"): (adapters._Narrow, flipped(adapters._Narrow, "gather", True)),
    ("narrow", "pad"): (adapters._Narrow, flipped(adapters._Narrow, "gather", False)),
    ("all_reduce", "identity"): (
        adapters._AllReduce,
        flipped(adapters._AllReduce, "reduce", False),
    ),
    ("all_reduce", "all_reduce"): (
        adapters._AllReduce,
        flipped(adapters._AllReduce, "reduce", True),
    ),
    ("keep_one", "identity"): (adapters._KeepOne, flipped(adapters._KeepOne, "keep", False)),
    ("keep_one", "keep_one"): (adapters._KeepOne, flipped(adapters._KeepOne, "keep", True)),
    ("reduce_scatter", None): (adapters._ReduceScatter, zeros_around),
    ("pad", None): (adapters._Pad, summed),
    ("grad_all_reduce", None): (adapters._GradAllReduce, unchanged),
    ("grad_keep_one", None): (adapters._GradKeepOne, unchanged),
    ("all_to_all", None): (adapters._AllToAll, from_the_next_rank),
}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_the_plans_use_every_adapter_and_are_right(cases) -> None:
    found, inputs, reference = cases
    assert MUTATIONS.keys() == TABLE.keys() == frozenset().union(*(case.entries for case in found))
    for case in found:
        assert is_right(case, inputs, reference) == (True, True)


@pytest.mark.parametrize("entry", MUTATIONS, ids=lambda entry: "-".join(filter(None, entry)))
def test_a_broken_backward_shows_in_gradients_only(
    entry: tuple[str, str | None], cases, monkeypatch
) -> None:
    found, inputs, reference = cases
    function, backward = MUTATIONS[entry]
    monkeypatch.setattr(function, "backward", staticmethod(backward))
    outcomes = [is_right(case, inputs, reference) for case in found if entry in case.entries]
    assert all(loss for loss, _ in outcomes), "the forward must not change"
    assert not all(gradients for _, gradients in outcomes), "no plan noticed"
