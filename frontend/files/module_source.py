"""The module to compile, as the user gave it: an object, or a class with the function that makes
one.

[Note: meta modules] A model too large to hold is made under ``torch.device("meta")``: its tensors
have shapes and no values. Its parameters are loaded later, but nobody saves a non-persistent buffer
(a rotary table, a mask), nor a tensor kept in a plain attribute. So while the function that makes
the module runs, :class:`RealTables` lets calls that give values (``arange``, ``ones``, ``tensor``,
...) make real tensors in spite of the meta device, and what is computed from them is real too.
Calls that only reserve memory or draw random numbers stay on meta, and with them the large
parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.runtime.errors import ConfigError

_GIVES_VALUES: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.arange,
        torch.blackman_window,
        torch.eye,
        torch.full,
        torch.hamming_window,
        torch.hann_window,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.range,
        torch.scalar_tensor,
        torch.tensor,
        torch.tril_indices,
        torch.triu_indices,
        torch.zeros,
    }
)


class RealTables(TorchFunctionMode):
    """Makes tensors with known values on the CPU where a meta device was asked for."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _GIVES_VALUES:
            device = kwargs.get("device")
            asked = torch.get_default_device() if device is None else torch.device(device)
            if asked.type == "meta":
                # On the meta device a table of positions would have no values, and a trace needs
                # them.
                kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ModuleSource:
    """The source of a module: ``module`` itself, or ``factory``, which makes it when needed."""

    cls: type[nn.Module]
    module: nn.Module | None = None
    factory: Callable[[], nn.Module] | None = None

    @classmethod
    def of(cls, given: Any, module_fn: Callable[[], nn.Module] | None) -> ModuleSource:
        """Read what ``parallelize`` was given; anything but a module or a module class is a
        :class:`ConfigError`.
        """
        if isinstance(given, nn.Module):
            _refuse_wrapped(given)
            if module_fn is not None:
                raise ConfigError(
                    "module_fn is for a module class",
                    why=f"a {type(given).__name__} object was given, so there is nothing to make",
                    hint=f"pass the class {type(given).__name__}, or leave out module_fn",
                )
            return cls(type(given), module=given)
        if isinstance(given, type) and issubclass(given, nn.Module):
            return cls(given, factory=module_fn or given)
        raise ConfigError(
            "parallelize takes a torch.nn.Module, or a class of one", why=f"it was given {given!r}"
        )

    def make(self) -> nn.Module:
        """The module; see [Note: meta modules]."""
        if self.module is not None:
            return self.module
        assert self.factory is not None
        try:
            inspect.signature(self.factory).bind()
        except TypeError as error:
            raise ConfigError(
                f"{self.cls.__name__} cannot be made without arguments",
                why=str(error),
                hint="pass module_fn, a function without arguments that makes it",
            ) from error
        with RealTables():
            module = self.factory()
        if not isinstance(module, self.cls):
            raise ConfigError(
                f"module_fn does not make a {self.cls.__name__}",
                why=f"it returned a {type(module).__name__}",
                hint="the class given is the class of what module_fn returns",
            )
        return module


def _refuse_wrapped(module: nn.Module) -> None:
    """Raise :class:`ConfigError` for modules that something else made of the user's."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"parallelize was given a module inside {type(module).__name__}",
            why="both would copy the module and reduce its gradients",
            hint="pass the module inside, model.module; runtime_ngpus says how many copies there "
            "are",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "parallelize was given a TorchScript module",
            why="a scripted module runs no Python, and tracing follows Python",
            hint="pass the module as it was before torch.jit.script or torch.jit.trace",
        )


@contextmanager
def in_dtype(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Let the module look as if ``module.to(dtype)`` had been called, without copying weights or
    changing it for good.

    Inside, floating parameters are meta tensors of that dtype, and floating buffers are cast
    copies.
    """
    stand_ins: dict[int, Tensor] = {}  # by id of the original, as a tied parameter must stay tied
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for part in module.modules() if dtype is not None else ():
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                        continue
                    if id(tensor) not in stand_ins:
                        stand_ins[id(tensor)] = _in_dtype(tensor, dtype)
                    replaced.append((table, name, tensor))
                    table[name] = stand_ins[id(tensor)]
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def _in_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.to(dtype)
    return nn.Parameter(
        # Parameters have no values in a trace; those of buffers become constants or files.
        torch.empty_like(tensor, dtype=dtype, device="meta"),
        requires_grad=tensor.requires_grad,
    )
