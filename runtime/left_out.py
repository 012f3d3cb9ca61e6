"""What stands in a result for an output that a training step leaves out.

A model that returns its loss and other tensors is trained with the loss alone. To make the others
whole on every rank would send them in every step, so a step does not, unless the config asks for
it. In their place the result has a :class:`LeftOut`. It can be passed on, compared with ``is`` and
printed; whoever uses it as a tensor is told how to get it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from shardwright.runtime.errors import UsageError


class LeftOutError(UsageError, AttributeError):
    """A use of an output that a training step left out.

    It is an ``AttributeError`` too: ``hasattr(output, "name")`` is false, so code that walks
    through results, and asks what each of them is, passes it by.
    """


class LeftOut:
    """An output that this call did not make whole. Every use of it raises
    :class:`LeftOutError`, which is a :class:`UsageError`.
    """

    __slots__ = ("_owner", "_path")

    def __init__(self, owner: str, path: str) -> None:
        self._owner, self._path = owner, path

    def __repr__(self) -> str:
        return f"LeftOut({self._path!r})"

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise LeftOutError(
            f"{self._owner} leaves the output {self._path!r} out of training steps",
            why="it is trained with its loss, and every step would send the other outputs to all "
            "ranks",
            hint="model.eval() or torch.no_grad() around the call gives all outputs; "
            'ComputeConfig(outputs="all") gives them in training too, '
            f'outputs={{"{self._path}": "whole"}} this one',
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and libraries ask every object for
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = next(
            arg for arg in _flat((*args, *(kwargs or {}).values())) if isinstance(arg, LeftOut)
        )
        found._refuse()


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [
        leaf
        for arg in args
        for leaf in (_flat(tuple(arg)) if isinstance(arg, tuple | list) else [arg])
    ]


def _refusing() -> Callable[..., NoReturn]:
    return lambda self, *args, **options: self._refuse()


_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rmatmul", "rtruediv", "rpow", "neg", "abs", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float", "index", "array"),
    *("getitem", "setitem", "len", "iter", "contains", "call"),
)
for _name in _OPERATORS:
    setattr(LeftOut, f"__{_name}__", _refusing())
LeftOut.__hash__ = object.__hash__  # type: ignore[method-assign]
