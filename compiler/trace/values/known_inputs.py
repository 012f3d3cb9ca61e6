"""Inputs whose values a trace may read: those declared as constants, and tables of sizes.

A model that reads ``image_grid_thw.tolist()`` has other operators for other grids. For one set of
grids it has one graph, so their values are compiled in, and every call is checked against them.
``ComputeConfig.constants`` declares such inputs. Others are found:

- A table of sizes (rows of two to four integers) is a constant where ``forward`` reads it.
- Any other tensor of integers is one where ``forward`` reads sizes from it
  (``values/sizes_read.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.trace.dummy_arguments import Arguments
from shardwright.runtime import structure
from shardwright.runtime.errors import ConfigError, did_you_mean

_MOST_SIZES = 4
"""Numbers in a row of a table of sizes: frames, height, width and channels."""


HAVE_VALUES: ContextVar[bool] = ContextVar("have_values", default=True)
"""Whether dummy arguments have values that calls have, too. Where they have only the right shapes,
no input is taken for a constant by itself.
"""


@dataclass(frozen=True)
class KnownInput:
    """The values of one input. ``declared``: by the user."""

    values: torch.Tensor
    declared: bool


def known_inputs(arguments: Arguments, constants: Mapping[str, Any]) -> dict[str, KnownInput]:
    """The inputs whose values may be read, by path.

    Raises :class:`ConfigError` for constants that name no tensor of integers, or that the dummy
    argument contradicts.
    """
    leaves = {
        path: leaf
        for name, value in arguments.given
        for path, leaf in structure.flatten(value, name).items()
        if isinstance(leaf, torch.Tensor)
    }
    # What looks like sizes may be read, and becomes a constant only if forward does read it.
    known = {
        path: KnownInput(leaf.detach().cpu(), False)
        for path, leaf in leaves.items()
        if holds_sizes(leaf) and HAVE_VALUES.get()
    }
    for path, values in constants.items():
        if path not in leaves:
            raise ConfigError(
                f"constants names {path!r}, which is no tensor among the dummy arguments",
                hint=did_you_mean(path, list(leaves)),
            )
        known[path] = KnownInput(_declared(path, leaves[path], values), True)
    return known


def _declared(path: str, given: torch.Tensor, values: Any) -> torch.Tensor:
    if given.is_floating_point() or given.is_complex():
        raise ConfigError(
            f"constants names {path!r}, which holds {given.dtype}",
            why="only integers and truth values are compared exactly in every call",
        )
    table = torch.tensor(values, dtype=given.dtype)
    if table.shape != given.shape or (not given.is_meta and not torch.equal(table, given.cpu())):
        raise ConfigError(
            f"the dummy argument {path!r} differs from constants[{path!r}]",
            why=f"it has shape {list(given.shape)}, the constant {list(table.shape)}"
            if table.shape != given.shape
            else "the shapes are alike, the values are not",
            hint="give both the values that every call has",
        )
    return table


def holds_sizes(leaf: torch.Tensor) -> bool:
    """Whether an input looks like a table of sizes: rows of two to four integers. Ids and masks
    have longer rows.
    """
    whole = not (
        leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool or leaf.is_meta
    )
    return whole and leaf.ndim >= 2 and 1 < leaf.shape[-1] <= _MOST_SIZES


def warn_found(graph: IRGraph, constants: Mapping[str, Any]) -> None:
    """Say which inputs became constants without being declared."""
    leaves = (leaf for name, tree in graph.signature for leaf in tree.leaves(name))
    paths = {value.name: path for path, value in leaves if isinstance(value, IRValue)}
    found = [path for name, _ in graph.constant_inputs if (path := paths[name]) not in constants]
    if graph.constant_buffers:
        buffers = ", ".join(name for name, _ in graph.constant_buffers)
        warnings.warn(
            f"forward reads the values of the buffers {buffers}: those that the model has now are "
            "compiled in, and calls after others were loaded are refused",
            stacklevel=3,
        )
    if found:
        declared = ", ".join(f'"{name}": ...' for name in found)
        warnings.warn(
            f"forward reads the values of {', '.join(found)}: those of the dummy arguments "
            "are compiled in, and a call with others is refused, or gets a program of its own: "
            "made when it comes (max_programs=8), or ahead (more_dummy_args=[...]); "
            f"ComputeConfig(constants={{{declared}}}) declares that and silences this notice",
            stacklevel=3,
        )
