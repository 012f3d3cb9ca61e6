"""Scopes: the tree of plain modules that gives tensors their original dotted names.

A generated class keeps its parameters where the user's model had them, so that
``named_parameters()`` and ``state_dict()`` speak the original names and generated code reads
``self.transformer.h[0].attn.c_attn.weight``.

A scope looks like the submodule of the original that it stands for, but nobody calls it: the
generated forward computes what all submodules did. What people do with submodules, and would have
no effect here or a wrong one, is refused in words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import UsageError, format_error

_CHANGE_BEFORE = (
    "change the original module before parallelize; where another library does this to split, "
    "prune or wrap the module, leave that out: build_optimizer sums gradients, "
    "ComputeConfig(use_zero=3) shards parameters"
)


class Scope(nn.Module):
    """One level of names: an ``nn.Module`` with indexing, that holds the tensors it was made with
    and no others.

    ``is_called``: whether calls go through ``nn.Module.__call__``, which runs hooks.
    """

    is_called: ClassVar[bool] = False

    _path: str = ""  # its name in the parallel module
    _is_loading: bool = False

    # What has no effect on a module that nobody calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: what the submodule of the original did is a part of the generated forward."""
        raise UsageError(
            f"{self._title()} cannot be called",
            why="the parallel module computes what its submodules did in one generated forward",
            hint="call the parallel module; to run a submodule alone, parallelize it by itself",
        )

    def train(self, mode: bool = True) -> Any:
        """Refused if it changes the mode: the whole parallel module is in one."""
        if bool(mode) != self.training:
            raise UsageError(
                f"{self._title()} cannot be set to {'training' if mode else 'evaluation'} by "
                "itself",
                why="the generated forward looks at the mode of the whole parallel module",
                hint="set the mode of the submodule before parallelize, or that of the whole "
                "module",
            )
        return self

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``nn.Module.__call__`` runs in the place of ``forward`` while ``torch.jit`` traces.
        Refused.
        """
        raise UsageError(
            f"{self._title()} cannot be traced by torch.jit",
            why="the trace would not have the checks, the random numbers and all of the "
            "communication of its program",
            hint="trace the original module; torch.compile takes the parallel one",
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """What ``torch.jit.script`` asks a module for. Refused."""
        raise UsageError(
            f"{self._title()} cannot be compiled by torch.jit.script",
            why="TorchScript has no form for the checks, the random numbers and the "
            "communication of its program",
            hint="script the original module; torch.compile takes the parallel one",
        )

    def apply(self, fn: Any) -> Any:
        """Refused: functions for this look for layers by their classes, and here are none."""
        raise UsageError(
            f"{self._title()} has no layers that apply() could find",
            why="its submodules only hold parameters; a function that looks for nn.Linear would "
            "do nothing, silently",
            hint="original.apply(fn) before parallelize; for values afterwards load_state_dict or "
            "load_merged_state_dict",
        )

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Refused where nobody would call the hook, and of ``fully_shard``, which cuts parameters
        after it.
        """
        self._check_called("a forward pre-hook")
        hook = args[0] if args else kwargs.get("hook")
        if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
            self._refuse_change("wrapper fully_shard")
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Refused where nobody would call the hook."""
        self._check_called("a forward hook")
        return super().register_forward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Refused where nobody would call the hook."""
        self._check_called("a backward pre-hook")
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Refused where nobody would call the hook."""
        self._check_called("a backward hook")
        return super().register_full_backward_hook(*args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Refused where nobody would call the hook."""
        self._check_called("a backward hook")
        return super().register_backward_hook(*args, **kwargs)

    def _check_called(self, what: str) -> None:
        if not self.is_called:
            raise UsageError(
                f"{what} on {self._title()} would never run",
                why="hooks run where a module is called, and generated code computes what this "
                "one did without a call",
                hint="return the value from forward, so that it is an output; or hook the module "
                "that you call",
            )

    # What would change the tensors under the program

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refused: the program was made for the parameters there are."""
        self._refuse_change(f"parameter {name!r}")

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Refused: the program was made for the buffers there are."""
        self._refuse_change(f"buffer {name!r}")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused: the program was made for the submodules there are."""
        self._refuse_change(f"submodule {name!r}")

    register_module = add_module

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would change the tensors; warn of a setting of a submodule that no program
        reads.
        """
        if isinstance(value, nn.Parameter):
            # `scope.weight += x` puts back what lies there.
            if not self._is_loading and self._parameters.get(name) is not value:
                self._refuse_change(f"parameter {name!r}")
            self._parameters[name] = value
            return
        # Buffers may be replaced, as models do in forward.
        if name in self._buffers and isinstance(value, Tensor):
            self._buffers[name] = value
            return
        if value is None and name in self._modules:
            self._refuse_loss(f"submodule {name!r}")
        if isinstance(value, nn.Module):
            self._refuse_change(f"submodule {name!r}")
        elif name == "__class__":
            self._refuse_change(f"class {value.__name__}")
        elif name == "qconfig":
            raise UsageError(
                f"{self._title()} cannot be quantized",
                why="torch.ao.quantization replaces layers that it knows by their classes, and "
                "here are none: it would change nothing",
                hint="quantize an ordinary module, with the weights that merge_checkpoint gives it",
            )
        # No program reads it: the value was compiled in.
        elif self._path and not name.startswith("_"):
            self._warn_of_setting(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refused for what the program reads, or a checkpoint holds."""
        for kind, names in (
            ("parameter", self._parameters),
            ("buffer", self._buffers),
            ("submodule", self._modules),
        ):
            if name in names:
                self._refuse_loss(f"{kind} {name!r}")
        super().__delattr__(name)

    def _refuse_loss(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self._title()} cannot lose its {what}",
            why="its program reads it all the same; the optimizer and checkpoints would miss it",
            hint=_CHANGE_BEFORE,
        )

    def _warn_of_setting(self, name: str) -> None:
        if name == "forward":
            self._check_called("another forward")
        else:
            warnings.warn(
                format_error(
                    f"{self._path}.{name} has no effect on a parallel module",
                    why="the program was made with the settings that the submodules of the "
                    "original had",
                    hint="change the original module, and call parallelize again",
                ),
                stacklevel=3,
            )

    def _refuse_change(self, what: str) -> NoReturn:
        raise UsageError(
            f"{self._title()} cannot be given a {what}",
            why="a parallel module has the parameters and buffers that its program was made for, "
            "each rank its pieces",
            hint=_CHANGE_BEFORE,
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        # With assign=True, torch puts other parameters in the place of those there are.
        self.__dict__["_is_loading"] = True
        try:
            super()._load_from_state_dict(*args)
        finally:
            del self.__dict__["_is_loading"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for dtype, device in {
            (tensor.dtype, tensor.device) for tensor in (*self.parameters(), *self.buffers())
        }:
            converted = fn(torch.empty(0, dtype=dtype, device=device)).dtype
            if converted != dtype:
                self._refuse_dtype(dtype, converted)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _refuse_dtype(self, old: torch.dtype, new: torch.dtype) -> NoReturn:
        names = [str(dtype).removeprefix("torch.") for dtype in (old, new)]
        raise UsageError(
            f"{self._title()} cannot be converted from {names[0]} to {names[1]}",
            why="its program was made for these dtypes: casts, buckets of gradients and inputs "
            "depend on them",
            hint=f"convert the original before parallelize or initialize, "
            f"module.to(torch.{names[1]}); parallelize also takes module_dtype=torch.{names[1]}",
        )

    @property
    def is_root(self) -> bool:
        """Whether it is a parallel module, not a submodule of one."""
        return not self._path

    def _title(self) -> str:
        return (
            f"submodule {self._path!r} of a parallel module"
            if self._path
            else f"the parallel module {type(self).__name__}"
        )

    def __getattr__(self, name: str) -> Any:
        """What ``nn.Module`` finds; :class:`AttributeError` says in words what a submodule of a
        parallel module has.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            kinds = ("_parameters", "_buffers", "_modules")  # not there before __init__
            held = [item for kind in kinds for item in self.__dict__.get(kind, ())]
            shown = ", ".join(repr(item) for item in held[:8]) or "nothing"
            text = format_error(
                f"{self._title()} has no attribute {name!r}",
                why="it stands for a submodule of the original, and has its parameters, buffers "
                f"and submodules alone: {shown}{', ...' if len(held) > 8 else ''}",
                hint="read other attributes and call methods of the original",
            )
        raise AttributeError(text, name=name, obj=self)

    def __getitem__(self, path: int | str) -> Any:
        """What lies at a path of names, ``scope[0]`` or ``scope["a-b.weight"]``: a scope, parameter
        or buffer.

        For names that are numbers or no identifiers, and for those that mean something else as an
        attribute.
        """
        found: Any = self
        for name in str(path).split("."):
            found = _named(found, name)
        return found

    def _get_name(self) -> str:
        return ""  # the tree prints as names, not as a class nobody wrote


def _named(scope: nn.Module, name: str) -> Any:
    for children in (scope._parameters, scope._buffers, scope._modules):
        if name in children:
            return children[name]
    raise KeyError(name)


class Place(NamedTuple):
    """Where a tensor lives: a module and the last part of the tensor's name."""

    scope: nn.Module
    leaf: str

    def put_parameter(self, parameter: nn.Parameter) -> None:
        """Put a parameter there, where nothing lies yet."""
        self._check_free()
        # register_parameter refuses names that nn.Module uses itself; those are read by indexing.
        self.scope._parameters[self.leaf] = parameter

    def put_buffer(self, buffer: Tensor, *, persistent: bool) -> None:
        """Put a buffer there, where nothing lies yet."""
        self._check_free()
        self.scope._buffers[self.leaf] = buffer
        if not persistent:
            self.scope._non_persistent_buffers_set.add(self.leaf)

    def _check_free(self) -> None:
        taken = (self.scope._parameters, self.scope._buffers, self.scope._modules)
        assert not any(self.leaf in names for names in taken), f"{self.leaf} is declared twice"


def place(root: nn.Module, fqn: str) -> Place:
    """Where ``fqn`` belongs below ``root``; scopes on the way are made as needed."""
    *path, leaf = fqn.split(".")
    scope = root
    for name in path:
        child = scope._modules.get(name)
        if child is None:
            child = _add_child(scope, name)
        scope = child
    return Place(scope, leaf)


def _add_child(scope: nn.Module, name: str) -> Scope:
    """A new child, also as an ordinary attribute: Python finds those without a call of
    ``nn.Module.__getattr__``, which generated code would make several times for every weight.
    (Parameters are left to it, as torch may replace them.)
    """
    # Else the name means something there, and the child is read by indexing.
    is_free = not hasattr(scope, name)
    child = scope._modules[name] = Scope()
    path = scope.__dict__.get("_path", "")
    child.__dict__["_path"] = f"{path}.{name}" if path else name
    if is_free:
        scope.__dict__[name] = child
    return child
