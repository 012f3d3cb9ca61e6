"""Arguments and results of ``forward`` as trees of the graph."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from shardwright.compiler.ir.graph import Tree
from shardwright.compiler.ir.op import RankDevice
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.render import argument_source
from shardwright.compiler.trace.recorder import Recorder
from shardwright.runtime import structure
from shardwright.runtime.errors import InternalError, TraceError
from shardwright.runtime.mask_functions import BLOCK_MASK, unreadable
from shardwright.runtime.told import UntoldError, told

MOST_LEVELS = 100
"""The most containers around a tensor. Python reads no source with more than 200 brackets inside
each other.
"""


def input_tree(recorder: Recorder, argument: Any, name: str) -> Tree:
    """The tree of the argument ``name``: values for its tensors, literals for the rest."""
    return _checked(
        _tree(recorder, argument, "an argument", set()),
        name,
        f"the argument {name!r}",
        written=False,
    )


def output_tree(recorder: Recorder, result: Any) -> Tree:
    """The tree of the result of ``forward``."""
    return _checked(_tree(recorder, result, "the result", set()), "", "the result", written=True)


def _tree(recorder: Recorder, obj: Any, what: str, seen: set[int]) -> Tree:
    kind = structure.kind(obj)
    if kind == "leaf":
        literal = _leaf(recorder, obj)
        if structure.hides_state(literal):
            raise TraceError(
                f"{what} of forward contains a {type(obj).__module__}.{type(obj).__qualname__}",
                why="its value is in none of its attributes, so it can neither be compared between "
                "calls nor built again",
                hint="use a tensor (torch.from_numpy of an array), or numbers and strings of "
                "Python",
            )
        if what != "the result":
            _check_compared(literal, what)
        return Tree("leaf", literal)
    # Only objects above this one count: the same one twice side by side is no circle.
    if id(obj) in seen:
        raise TraceError(
            f"{what} of forward contains itself: an object of type {type(obj).__name__}"
        )
    if len(seen) == MOST_LEVELS:
        raise TraceError(
            f"{what} of forward is nested in more than {MOST_LEVELS} levels",
            hint="pass and return tensors in a few levels of lists, tuples, dicts or objects",
        )
    if structure.type_path(obj) == BLOCK_MASK:
        _check_block_mask(obj, what)
    children = tuple(
        (key, _tree(recorder, child, what, seen | {id(obj)}))
        for key, child in structure.children(obj)
        # An object in a result is made of its class, which is no attribute to be written.
        if what != "the result" or kind != "object" or key != "__class__"
    )
    if kind != "object":
        return Tree(kind, children=children)
    if "<" in type(obj).__qualname__:
        raise TraceError(
            f"{what} of forward contains an object of the local class {type(obj).__qualname__}",
            why="generated code must import the class to build such an object",
            hint="define the class at the top level of a module",
        )
    return Tree("object", children=children, type_path=structure.type_path(obj))


def _check_compared(leaf: Any, what: str) -> None:
    """Raise :class:`TraceError` for a leaf that cannot be compared with that of another call."""
    if isinstance(leaf, IRValue | RankDevice | sympy.Basic):
        return
    try:
        told(leaf)
    except UntoldError as error:
        name = getattr(leaf, "__name__", None)
        thing = f"the {type(leaf).__name__} {name}" if name else f"a {type(leaf).__name__}"
        raise TraceError(
            f"{what} of forward contains {thing}",
            why=f"it is or holds {error}, by which two calls cannot be compared: the program would "
            "be that of the first one",
            hint="pass its tensors as arguments of their own, or make it a part of the model",
        ) from None


def _check_block_mask(mask: Any, what: str) -> None:
    """Raise :class:`TraceError` for a block mask that is a result, or whose function hides what it
    reads.
    """
    if what == "the result":
        raise TraceError(
            "the result of forward contains a BlockMask",
            why="it holds a function, which generated code cannot write",
            hint="leave it out of the result",
        )
    why = unreadable(mask.mask_mod)
    if why is not None:
        raise TraceError(
            f"{what} of forward contains a BlockMask whose function cannot be read",
            why=f"{why}; what the function reads is passed anew in every call, and may be tensors, "
            "numbers, strings, and functions that read these",
            hint="write the function so, or pass what it reads, such as document ids, and call "
            "create_block_mask in forward",
        )


def _checked(tree: Tree, name: str, what: str, *, written: bool) -> Tree:
    """The tree, whose leaves must have paths of their own. ``written``: generated code builds it,
    so it must be able to write every key and every leaf.
    """
    paths: set[str] = set()
    for path, leaf in tree.leaves(name):
        if path in paths:
            raise TraceError(
                f"{what} of forward has two leaves called {path!r}",
                why="a leaf is known by the keys that lead to it, joined by dots: the key 'a.b' "
                "is like 'b' in 'a', 1 like '1'",
                hint="rename a key, so that the joined names differ",
            )
        paths.add(path)
        if written:
            _check_written(leaf, f"{path!r} in {what}" if path else what)
    if written:
        _check_keys(tree, what)
    return tree


def _check_keys(tree: Tree, what: str) -> None:
    for key, child in tree.children:
        _check_written(key, f"a key of {what}")
        _check_keys(child, what)


def _check_written(literal: Any, what: str) -> None:
    try:
        argument_source(literal, lambda value: value.name, to_python)
    except InternalError:
        raise TraceError(
            f"{what} of forward is a {type(literal).__name__}, which generated code cannot "
            f"write: {literal!r}",
            why="it builds the result of tensors, numbers, strings and their like in tuples, "
            "lists, dicts and objects",
            hint="leave it out of the result",
        ) from None


def _leaf(recorder: Recorder, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return recorder.value(leaf)
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return recorder.dynamic.size(leaf)
    if isinstance(leaf, torch.Size):
        return recorder.arg(tuple(leaf))
    return RankDevice() if isinstance(leaf, torch.device) else structure.plain_number(leaf)
