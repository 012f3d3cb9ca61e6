"""Functions of torch that were replaced before the operator tables were loaded."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from shardwright.compiler.ops.originals import unpatched


def mine(*arguments):
    return arguments


def test_torchs_functions_are_in_their_places(monkeypatch):
    relu, half = torch.relu, torch.Tensor.half
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double, raising=False)
    monkeypatch.setattr(torch.Tensor, "half", mine, raising=False)
    monkeypatch.setattr(torch, "relu", mine)
    with unpatched() as stand_ins:
        assert (
            torch.Tensor.float is torch._C.TensorBase.float
            and torch.relu is relu
            and torch.Tensor.half is half
        )
        assert not stand_ins
    assert torch.Tensor.float is torch.Tensor.double and torch.relu is torch.Tensor.half is mine


def test_what_cannot_be_found_has_a_stand_in(monkeypatch):
    monkeypatch.setattr(F, "mse_loss", F.l1_loss)
    monkeypatch.setattr(torch, "save", mine)
    with unpatched() as stand_ins:
        assert {stand_ins[F.mse_loss], stand_ins[torch.save]} == {
            "torch.nn.functional.mse_loss",
            "torch.save",
        }
    assert F.mse_loss is F.l1_loss and torch.save is mine


def test_of_an_untouched_torch_nothing_is_replaced():
    before = dict(vars(F))
    with unpatched() as stand_ins:
        assert not stand_ins and dict(vars(F)) == before


FIRST = """
import warnings
import torch
import torch.nn.functional as F
kept, F.mse_loss = F.mse_loss, F.l1_loss
torch.Tensor.float = torch.Tensor.double
torch.save = print
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from shardwright.compiler.ops import registry
for warning in caught:
    print(warning.message)
assert F.mse_loss is F.l1_loss and kept not in registry.CALLABLES
assert registry.CALLABLES[F.l1_loss][0] == "l1_loss"
assert registry.CALLABLES[torch._C.TensorBase.float] != registry.CALLABLES[torch.Tensor.double]
"""


@pytest.mark.slow
def test_the_tables_mean_what_torch_calls_so():
    """This runs in a process of its own, as before a first compile; what no operator is may be
    anything.
    """
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "torch.nn.functional.mse_loss had been replaced before the first compile\n"
        "  why:   the function of torch that stood there cannot be found: where it is "
        "called, its operator has no rule\n"
        "  try:   import shardwright.compiler.ops.tables before it is replaced\n"
    )
