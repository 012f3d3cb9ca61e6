"""The module on fake tensors: parameters and buffers without memory, everything put back
afterwards.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.naming import Namer
from shardwright.runtime.errors import TraceError


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that keep out of the tracer's sight: what torch calls to make them is not part
    of the model.

    ``lift`` is called with every real tensor that comes to life in forward other than by a call the
    tracer sees (``torch.from_numpy``, ``torch.Tensor([1.0])``).
    """

    lift: Callable[[torch.Tensor], torch.Tensor] | None = None

    @functools.cached_property
    def _attributes(self) -> dict[str, Any]:
        """What torch gives every fake tensor on the CPU of this mode."""
        return dict(FakeTensor(self, torch.empty(0, device="meta"), _CPU).__dict__)

    def fake(self, memory: torch.Tensor) -> FakeTensor:
        """The fake tensor on the CPU that ``FakeTensor(self, memory, cpu)`` makes, without its
        checks of these arguments, which take four times as long. ``memory``: on the meta device.
        """
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.__dict__.update(self._attributes)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and not self.in_kernel_invocation:  # autograd asks for each result
            return args[0].fake_device
        with torch._C.DisableTorchFunction():
            if func in _LIFTS and self.lift is not None and type(args[0]) is torch.Tensor:
                return self.lift(args[0])
            return _DISPATCH(self, func, types, args, kwargs)


_DISPATCH = inspect.unwrap(FakeTensorMode.__torch_dispatch__)
"""Without the wrapper that keeps ``torch.compile`` out of it, which nobody runs here: it costs a
tenth of a trace.
"""
TraceMode.__torch_dispatch__ = inspect.unwrap(TraceMode.__torch_dispatch__)  # type: ignore[method-assign]

_DEVICE_OF = torch.ops.prim.device.default
_CPU = torch.device("cpu")

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


@dataclass(frozen=True)
class ModuleTensor:
    """A parameter or buffer: all its names (the first is its FQN), and the places that hold it."""

    original: torch.Tensor
    names: tuple[str, ...]
    is_parameter: bool
    persistent: bool
    places: tuple[tuple[dict[str, Any], str], ...]


def module_tensors(module: torch.nn.Module) -> list[ModuleTensor]:
    """The parameters, then the buffers, in the module's own order; tied ones are one entry."""
    found: dict[int, ModuleTensor] = {}
    for kind in ("_parameters", "_buffers"):
        # Names of tied tensors, too: ``remove_duplicate`` would leave out modules that occur twice.
        for path, submodule in module.named_modules(remove_duplicate=False):
            holder: dict[str, torch.Tensor | None] = getattr(submodule, kind)
            for key, tensor in holder.items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                if is_lazy(tensor):
                    raise TraceError(
                        f"{name} is not initialized",
                        hint="call the lazy module once before compiling it",
                    )
                persistent = key not in submodule._non_persistent_buffers_set
                # Seen under another name: one entry with both.
                old = found.get(id(tensor))
                names = (*old.names, name) if old else (name,)
                places = (*(old.places if old else ()), (holder, key))
                found[id(tensor)] = ModuleTensor(
                    tensor, names, kind == "_parameters", persistent, places
                )
    return sorted(found.values(), key=lambda tensor: not tensor.is_parameter)


def new_fake(
    mode: TraceMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> FakeTensor:
    """A fake tensor on the CPU, made at once: as a call of ``torch.empty_strided`` would make it in
    the end.
    """
    with torch._C._DisableTorchDispatch():
        memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return mode.fake(memory)


def fake_like(mode: TraceMode, tensor: torch.Tensor, *, parameter: bool) -> torch.Tensor:
    """A fake tensor on the CPU with the shape, strides and dtype of ``tensor``."""
    fake = new_fake(mode, tensor.shape, tensor.stride(), tensor.dtype)
    if parameter:  # what ``torch.nn.Parameter(fake)`` makes, which copies it first
        fake._is_param = True
    return fake.requires_grad_(tensor.requires_grad)


def source_value(tensor: ModuleTensor, names: Namer) -> IRValue:
    """The graph value of a parameter or buffer."""
    return IRValue(
        names.unique(tensor.names[0]),
        tuple(tensor.original.shape),
        tensor.original.dtype,
        tensor.original.requires_grad,
        ValueKind.PARAMETER if tensor.is_parameter else ValueKind.BUFFER,
        fqn=tensor.names[0],
        aliases=tensor.names[1:],
        persistent=tensor.persistent,
        takes_gradient=tensor.is_parameter and tensor.original.requires_grad,
    )


def _warn_counted(module: torch.nn.Module, before: Mapping[str, Any]) -> None:
    """Warn of numbers and flags among the attributes of a module that forward changed: they are no
    part of a graph.
    """
    for name, value in before.items():
        now = module.__dict__.get(name)
        if (
            name != "training"
            and isinstance(value, int | float)
            and isinstance(now, int | float)
            and now != value
        ):
            warnings.warn(
                f"forward changes {type(module).__name__}.{name} from {value} to {now}; the "
                "compiled module does in every "
                "call what it does in the first one: keep what changes from call to call in "
                "a buffer",
                stacklevel=2,
            )


@contextmanager
def without_logs_of_fakes() -> Iterator[None]:
    """Torch logs the whole traceback of a call that fails on fake tensors, then raises: once is
    enough.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def caches_without_fakes() -> Iterator[None]:
    """Clear on exit the caches of functions (``functools.lru_cache``) that keep fakes: these have
    no values for later calls.
    """
    try:
        yield
    finally:
        note_caches()
        for cached, counts in list(_counts_without_fakes.items()):
            # Only a cache that was used since may have taken a fake; looking into all would take
            # long.
            if counts != cached.cache_info():
                if any(map(_holds_fake, gc.get_referents(cached))):
                    cached.cache_clear()
                _counts_without_fakes[cached] = cached.cache_info()


def note_caches() -> None:
    """Find the cached functions that the collector looks at: they stay known when ``gc.freeze``
    hides them.
    """
    for found in gc.get_referrers(_CachedFunction):  # all instances refer to their type
        # These caches are large, and keep layouts, rules, expressions and the like: never a tensor.
        if type(found) is _CachedFunction and not str(found.__module__).startswith(_TENSORLESS):
            _counts_without_fakes.setdefault(found, None)


_TENSORLESS = (f"{__name__.partition('.')[0]}.", "sympy.")
_CachedFunction = functools._lru_cache_wrapper
_counts_without_fakes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The ``cache_info`` of every cached function known, from a time when it kept no fakes. As long as
nobody calls it, it keeps none.
"""


def _holds_fake(kept: Any) -> bool:
    if isinstance(kept, FakeTensor):
        return True
    if isinstance(kept, dict):
        return any(map(_holds_fake, kept.values()))
    return isinstance(kept, list | tuple) and any(map(_holds_fake, kept))


@contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Restore the attributes of every submodule on exit, the contents of their lists, dicts and
    sets included.
    """
    # Forward may count its calls or fill caches, and while it is traced it would keep fakes there.
    # Shallow copies are enough for what it sets, appends or deletes.
    saved = [(submodule, dict(submodule.__dict__)) for submodule in module.modules()]
    contents = [
        (value, value.copy())
        for _, attributes in saved
        for value in attributes.values()
        if isinstance(value, list | dict | set)
    ]
    try:
        yield
        for submodule, attributes in saved:
            _warn_counted(submodule, attributes)
    finally:
        # In place, as others may hold the same list.
        for container, copy in contents:
            if isinstance(container, list):
                container[:] = copy
            else:
                container.clear()
                container.update(copy)
        for submodule, attributes in saved:
            submodule.__dict__.clear()
            submodule.__dict__.update(attributes)
