"""An operator without a rule: the warning, and that the stub it prints works when it is pasted."""

import inspect
import warnings

import opaque_functions
import pytest
import torch
from torch import nn

from shardwright.compiler.ops import registry
from shardwright.compiler.passes.rules import attach_rules
from shardwright.compiler.trace import trace


class Norms(nn.Module):
    def forward(self, x):
        return torch.linalg.matrix_norm(x)


class Scaled(nn.Module):
    def forward(self, x):
        return opaque_functions.Cube.apply(x, 2.0)


class Halves(nn.Module):
    def forward(self, x):
        first, second = opaque_functions.Split.apply(x)
        return first + second


class Doubled(nn.Module):
    def forward(self, x):
        return opaque_functions.double(x) + torch.linalg.vecdot(x, x)[0, 0]


@pytest.fixture
def registered(monkeypatch):
    """Forget afterwards what a test registers."""
    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))
    monkeypatch.setattr(registry, "CALLABLES", dict(registry.CALLABLES))


def warnings_of(module):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attach_rules(trace(module, {"x": torch.ones(2, 3, 3)}))
    return [warning for warning in caught if "no rule for operator" in str(warning.message)]


def test_the_warning_stands_at_the_users_line():
    (warning,) = warnings_of(Norms())
    lines, start = inspect.getsourcelines(Norms.forward)
    assert (warning.filename, warning.lineno) == (__file__, start + 1) and "matrix_norm" in lines[1]
    assert str(warning.message) == (
        "no rule for operator torch._C._linalg.linalg_matrix_norm: it runs replicated on "
        "every rank\n"
        f"  where: {__file__}:{start + 1} (top-level forward)\n"
        "  why:   operand shapes [(2, 3, 3)], result shapes [(2,)]\n"
        "  try:   say which dims may be split: drop the ^ there, and write one letter for "
        "equal dims\n"
        "         import torch, shardwright\n"
        '         shardwright.register_op("a^ b^ c^ -> d^")(torch._C._linalg.linalg_matrix_norm)'
    )


@pytest.mark.parametrize(
    "module", [Norms(), Scaled(), Halves(), Doubled()], ids=lambda module: type(module).__name__
)
def test_the_stub_works_when_pasted(module, registered):
    found = warnings_of(module)
    assert found
    for warning in found:
        exec("\n".join(line.strip() for line in str(warning.message).splitlines()[-2:]), {})
    assert not warnings_of(module)
    rules = [op.rule for op in attach_rules(trace(module, {"x": torch.ones(2, 3, 3)})).ops]
    assert all(rule.known for rule in rules)


def test_each_operator_is_named_once():
    class Twice(nn.Module):
        def forward(self, x):
            return torch.linalg.matrix_norm(x) + torch.linalg.matrix_norm(2 * x)

    assert len(warnings_of(Twice())) == 1
