"""Objects that operators in the graphs of ``torch.compile`` look at.

The compiler reads ``forward`` once, and then runs a graph of tensor operators. What differs from
call to call and is no tensor cannot be in a graph: whether the parameters are still those of the
module, whether the ranks of a unit were given the same values, and for which microbatch random
numbers are drawn. So graphs hold operators of ours for that. Torch does not look into them, and
they find the object that knows, a module or its random numbers, by a number.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("shardwright", "FRAGMENT")  # type: ignore[no-untyped-call]

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def numbered(found: Any) -> int:
    """A new number for an object, by which operators find it as long as it lives."""
    number = next(_numbers)
    _objects[number] = found
    return number


def object_of(number: int) -> Any:
    """The object with this number."""
    return _objects[number]


def define_operator(
    schema: str,
    run: Callable[..., Any],
    run_without_values: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Define ``torch.ops.shardwright.<name>``. ``schema``: its name and types, as torch writes
    them. ``run_without_values``: what the compiler runs, on tensors that have shapes only.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tuple(tags))  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, run_without_values, "Meta")  # type: ignore[no-untyped-call]
