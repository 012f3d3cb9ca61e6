"""Calls that draw random numbers from the generator of their process.

Generated files draw with ``self.random.NAME(...)``: ranks that hold copies draw the same numbers. A
call of torch such as ``F.dropout(x, training=True)`` draws what no other rank draws. That is right
for a piece that no other rank has, and wrong for a value that several ranks hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ProcessDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``found``: the operators that drew without a generator of their own inside the ``with``
    block.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.found.append(str(func))
        return func(*args, **kwargs)


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator that may draw does, and from no generator that it is given."""
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("generator") is not None:
        return False
    # An operator of attention draws if anything is dropped, one of dropout while training.
    nothing = given.get("dropout_p", 1) == 0 or given.get("p", 1) == 0
    return not nothing and given.get("training", True) and given.get("train", True) is not False
