"""What is said when ranks fail each other: who waited for whom, in which collective, for which part
of the model.

All of this is worked out when a collective has failed. A step that goes well pays for a ``with``
block around each bucket of gradients and each gathered weight, and for nothing else.

    CollectiveError: rank 1: all_reduce over tp with rank 0 failed
      where: next to 'layers.0.mlp.down_proj.weight', gencode1.py:57: x = all_reduce(x, tp)
      why:   Connection closed by peer; rank 0 (process 4711 on node3) is gone
      try:   look for the first error on rank 0, or on the ranks that it waits for
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import CollectiveError
from shardwright.runtime.ranks.hub import in_words
from shardwright.runtime.ranks.late import Waiting
from shardwright.runtime.waiting import LIMIT_HINT

GENERATED = "shardwright_generated_"
"""How the names of modules begin that hold generated code."""

_MANY_NODES = 10_000
"""The most nodes of an autograd graph that are looked at to find a parameter."""
_MANY_NAMES = 3

Subject = str | Callable[[], str]


class _Subjects(threading.local):
    """What the calling thread communicates for, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Subject] = []


_subjects = _Subjects()
_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class concerning(AbstractContextManager[None]):
    """What communication inside the ``with`` block is for, as text or as a function that makes it:
    named if it fails.
    """

    __slots__ = ("_subject",)

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        _subjects.stack.append(self._subject)

    def __exit__(self, *_: object) -> None:
        _subjects.stack.pop()


def names_parameters(model: nn.Module) -> None:
    """Let messages call the parameters of ``model`` by its names, as long as it lives."""
    _models.add(model)


def name_of(x: Tensor) -> str | None:
    """The name of the parameter or buffer that ``x`` is, or shares memory with."""
    address = _address(x)
    alike = None
    for name, tensor in _named_tensors():
        if tensor is x:
            return name
        if alike is None and address is not None and _address(tensor) == address:
            alike = name
    return alike


def _named_tensors() -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of all models. Reading a parameter may wait for it to arrive, so
    modules are not asked.
    """
    for model in tuple(_models):
        for prefix, part in model.named_modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in dict.items(held):
                    if tensor is not None:
                        yield f"{prefix}.{name}" if prefix else name, tensor


def listed(names: Sequence[str]) -> str:
    """Several names, in few words."""
    shown = ", ".join(map(repr, names[:_MANY_NAMES]))
    return shown if len(names) <= _MANY_NAMES else f"{shown} and {len(names) - _MANY_NAMES} more"


def collective_failed(
    collective: str,
    axis: str,
    rank: int,
    others: Iterable[int],
    x: Tensor | None,
    error: BaseException,
    peers: str,
) -> CollectiveError:
    """The error of ``rank`` in a collective with ``others``. ``x``: what it gave. ``peers``: how
    the others are, in words.
    """
    whom = in_words(sorted(others))
    return CollectiveError(
        f"rank {rank}: {collective} over {axis} with {whom} failed",
        where=_where(x),
        why="; ".join(filter(None, (first_line(error), peers))),
        hint=f"look for the first error on {whom}; {LIMIT_HINT}",
    )


def collective_waits(
    collective: str, axis: str, rank: int, others: Iterable[int], x: Tensor | None
) -> Waiting:
    """Who waits in which collective and for what, as long as it goes well."""
    call, where = f"{collective} over {axis}", _where(x)
    text = f"rank {rank} waits in {call} with {in_words(sorted(others))}"
    return Waiting(call, f"{text}, {where}" if where else text)


def first_line(error: BaseException) -> str:
    """What torch says of a failure, without the stack of C++ functions behind it."""
    line = str(error).partition("\n")[0]
    line = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", line)  # gloo's own source file
    return line.partition(". This is typically caused")[0]


def _where(x: Tensor | None) -> str | None:
    """The part of the model that communicates: what the caller has said, else what the graph of
    autograd and the stack tell.
    """
    parts = []
    if _subjects.stack:
        subject = _subjects.stack[-1]
        parts.append(subject if isinstance(subject, str) else subject())
    else:
        # In backward the stack has no line of the model: the node that autograd runs tells the
        # place.
        node = torch._C._current_autograd_node()
        in_backward = node is not None
        name = None if x is None or in_backward else name_of(x)
        name = name or _nearest_parameter(node if in_backward else getattr(x, "grad_fn", None))
        if name is not None:
            parts.append(f"next to {name!r}{', in backward' if in_backward else ''}")
    line = _generated_line()
    return ", ".join([*parts, *([line] if line else [])]) or None


def _nearest_parameter(node: Any) -> str | None:
    """The name of the parameter that autograd's graph reaches first from a node, towards the
    inputs.
    """
    # Breadth first, so that the nearest one is found first. Large graphs are given up.
    waiting, seen = deque([node] if node is not None else []), {node}
    while waiting and len(seen) < _MANY_NODES:
        following = waiting.popleft()
        variable = getattr(following, "variable", None)
        name = None if variable is None else name_of(variable)
        if name is not None:
            return name
        for after, _ in following.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                waiting.append(after)
    return None


def _generated_line() -> str | None:
    """The innermost line of generated code that is being executed."""
    frame = sys._getframe()
    while frame is not None:
        # Innermost first: a method of a block says more than the forward that calls it.
        if str(frame.f_globals.get("__name__", "")).startswith(GENERATED):
            file, line = frame.f_code.co_filename, frame.f_lineno
            text = linecache.getline(file, line).strip()
            return f"{Path(file).name}:{line}" + (f": {text}" if text else "")
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _address(x: Tensor) -> int | None:
    try:
        return x.data_ptr() or None
    except (NotImplementedError, RuntimeError):  # sparse tensors, and fake ones
        return None
