"""Float64 all the way: casts to float32 inside model code made to mean float64.

Model code casts to float32 in norms, rotary embeddings, softmax and losses. Such a cast costs 1e-7,
a thousand times the bound that parity is held to, and would hide a wrong formula behind rounding.
Parity checks therefore build, trace and run models inside :func:`float64_casts`.

The reference is then what the model is in a dtype of its own, and not what ``model.double()`` is
alone. Example: the eager attention of Gemma 2 adds the least number of its dtype where a mask is
closed, and casts the sum to float32. That is finite for a model in float32 or bfloat16; of float64
the cast makes minus infinity, and NaN for a token that may see nothing, such as left padding.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

import safetensors.torch  # noqa: F401  (its table of dtypes, too)
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright.compiler.ops.tables  # (they know torch's functions by what their names mean now)
import shardwright.frontend.parallelize  # noqa: F401  (no table of dtypes may be made while the names are rebound)
from shardwright.runtime.arguments import checked


def _make_tables() -> None:
    """Let torch make the tables by which it names dtypes in files. It keeps them for good: made
    while the names are rebound they would call float64 float32, and files could not be read.
    """
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    torch.load(file, weights_only=True)


_make_tables()


def _to_float64(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor.to(torch.float64, *args, **kwargs)


def _grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor | None = None, **kwargs: Any) -> Tensor:
    """``F.grouped_mm`` by single products of float64, which torch has no kernel for; a trace sees
    the call itself.
    """
    if a.dtype != torch.float64 or kwargs or torch.overrides.has_torch_function((a, b, offs)):
        return _REAL_GROUPED_MM(a, b, offs=offs, **kwargs)
    if offs is None:
        return a @ b
    bounds = [0, *offs.tolist()]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    if a.ndim == 3:
        # a [groups, m, k], b [k, n]: the columns of b are in groups.
        parts = [x @ b[:, span] for x, span in zip(a, spans, strict=True)]
        return torch.cat([*parts, b.new_zeros(a.shape[1], b.shape[1] - bounds[-1])], dim=1)
    if b.ndim == 3:
        # a [m, k], b [groups, k, n]: the rows of a are in groups.
        parts = [a[span] @ x for x, span in zip(b, spans, strict=True)]
        return torch.cat([*parts, a.new_zeros(a.shape[0] - bounds[-1], b.shape[2])])
    # a [m, k], b [k, n]: the summed dim is in groups, so each gives a product of its own.
    return torch.stack([a[:, span] @ b[span] for span in spans])


_REAL_GROUPED_MM = F.grouped_mm
_WIDER = {"float32": torch.float64, "float": torch.float64, "cfloat": torch.complex128}
"""What names of dtypes mean instead. Torch itself promotes by the name complex64, and complex
buffers keep that dtype.
"""


_WIDER_DTYPES = {torch.float32: torch.float64}


_LOCK = threading.RLock()
_UNDO = contextlib.ExitStack()
"""What is undone when the last context is left."""
_num_active = 0


@contextlib.contextmanager
@checked
def float64_casts(*models: nn.Module) -> Iterator[None]:
    """While active, ``torch.float32``, ``torch.float``, ``Tensor.float`` and the default dtype are
    float64, and ``torch.cfloat`` is complex128.

    The rebinding is global to the process, and lasts until the last of several contexts is left, in
    whichever order threads leave theirs. Code that took its own reference before (``from torch
    import float32``, ``def f(x, dtype=torch.float32)``) is reached in the files that the classes of
    ``models`` come from, and nowhere else; C++ code is not, apart from the default dtype.
    """
    global _num_active
    with _LOCK:
        if not _num_active:
            _UNDO.enter_context(_torch_wider())
        _UNDO.enter_context(_own_references_wider(models))
        _num_active += 1
    try:
        yield
    finally:
        with _LOCK:
            _num_active -= 1
            if not _num_active:
                _UNDO.close()


@contextlib.contextmanager
def _torch_wider() -> Iterator[None]:
    """Rebind torch's own names."""
    names = {name: getattr(torch, name) for name in _WIDER}
    default = torch.get_default_dtype()
    grouped_mm = F.grouped_mm
    # None: inherited from the C base class, the normal state.
    method = torch.Tensor.__dict__.get("float")
    try:
        for name, wider in _WIDER.items():
            setattr(torch, name, wider)
        setattr(torch.Tensor, "float", _to_float64)  # noqa: B010 (a method is not assigned to, says mypy)
        torch.set_default_dtype(torch.float64)
        setattr(F, "grouped_mm", _grouped_mm)  # noqa: B010
        yield
    finally:
        setattr(F, "grouped_mm", grouped_mm)  # noqa: B010
        torch.set_default_dtype(default)
        if method is None:
            del torch.Tensor.float
        else:
            setattr(torch.Tensor, "float", method)  # noqa: B010
        for name, dtype in names.items():
            setattr(torch, name, dtype)


@contextlib.contextmanager
def _own_references_wider(models: Sequence[nn.Module]) -> Iterator[None]:
    """Rebind the names of float32 and the default arguments that hold it in the files that define
    the classes of ``models``.
    """
    names: list[tuple[ModuleType, str, torch.dtype]] = []
    # ``def norm(x, dtype=torch.float32)`` has bound its dtype when it was defined, whatever the
    # name means later.
    defaults: list[tuple[FunctionType, tuple[Any, ...] | None, dict[str, Any] | None]] = []
    try:
        for module in _files_of(models):
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.dtype) and value in _WIDER_DTYPES:
                    names.append((module, name, value))
                    setattr(module, name, _WIDER_DTYPES[value])
            for function in _functions_in(module):
                by_place, by_name = function.__defaults__, function.__kwdefaults__
                if _holds_float32(by_place or ()) or _holds_float32((by_name or {}).values()):
                    defaults.append((function, by_place, by_name))
                    function.__defaults__ = by_place and tuple(map(_wider, by_place))
                    function.__kwdefaults__ = by_name and {
                        key: _wider(value) for key, value in by_name.items()
                    }
        yield
    finally:
        for module, name, dtype in names:
            setattr(module, name, dtype)
        for function, by_place, by_name in defaults:
            function.__defaults__, function.__kwdefaults__ = by_place, by_name


def _files_of(models: Sequence[nn.Module]) -> list[ModuleType]:
    """The Python modules, other than torch's, that the classes of all parts of ``models`` come
    from, and their base classes.
    """
    classes = set()
    for model in models:
        for part in model.modules():
            classes |= set(type(part).__mro__)
    names = sorted(
        {
            cls.__module__
            for cls in classes
            if cls.__module__.partition(".")[0] not in ("torch", "builtins")
        }
    )
    return [sys.modules[name] for name in names if name in sys.modules]


def _functions_in(module: ModuleType) -> Iterator[FunctionType]:
    """The functions and methods that a Python module defines, those inside of decorators too."""
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for value in list(vars(owner).values()):
            method = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            # Asked first, as files hold many thousand names and few decorated functions.
            function = inspect.unwrap(method) if hasattr(method, "__wrapped__") else method
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function


def _holds_float32(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.dtype) and value in _WIDER_DTYPES for value in values)


def _wider(value: Any) -> Any:
    return _WIDER_DTYPES.get(value, value) if isinstance(value, torch.dtype) else value
