"""Dummy arguments against the signature of forward."""

import pytest
import torch
from torch import nn

from shardwright.compiler.arguments import check_dummy_arguments
from shardwright.runtime.errors import InputError


class Named(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        return x


class PositionalOnly(nn.Module):
    def forward(self, x, y, /, mask=None):
        return x


class TakesAny(nn.Module):
    def forward(self, x, **others):
        return x


def refusal(cls, dummy_args):
    with pytest.raises(InputError) as caught:
        check_dummy_arguments(cls, dummy_args)
    return str(caught.value)


def line_of(cls):
    return f"{__file__}:{cls.forward.__code__.co_firstlineno}"


def test_accepted():
    check_dummy_arguments(Named, {"x": torch.zeros(1)})
    check_dummy_arguments(Named, {"x": 1, "mask": None, "scale": 2.0})
    check_dummy_arguments(TakesAny, {"x": 1, "anything": 2})


def test_positional_only():
    assert refusal(PositionalOnly, {"x": 1}) == (
        "PositionalOnly.forward has positional-only arguments\n"
        f"  where: {line_of(PositionalOnly)}\n"
        "  why:   x, y cannot be passed by name, and a parallel module takes its arguments by name\n"
        "  try:   remove the '/' from its signature, or wrap the module in one whose forward has named arguments"
    )


def test_unknown_missing_and_misshapen():
    assert refusal(Named, {"x": 1, "maks": 1}) == (
        f"Named.forward has no argument 'maks'\n  where: {line_of(Named)}\n  try:   did you mean 'mask'?"
    )
    assert refusal(Named, {"mask": 1}) == (
        f"the dummy arguments lack x\n  where: {line_of(Named)}\n  why:   Named.forward has no default for it"
    )
    assert refusal(Named, [1]) == (
        "the dummy arguments are a dict from the argument names of Named.forward to values\n"
        "  why:   they are a list\n"
        "  try:   for example {'x': torch.zeros(4, 8)}"
    )
