"""Tensors with values of their own: literals made in forward, and tensors the model captured."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from shardwright.compiler.ir.op import Arg, RankDevice, leaves, map_leaves
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.normalise import FACTORIES
from shardwright.compiler.trace.recorder import Recorder
from shardwright.runtime.errors import TraceError

RANDOM = {
    "dropout",
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "multinomial",
}
RANDOM |= {"bernoulli", "uniform", "poisson", "empty", "empty_like", "new_empty"}

SIZED = {"view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "split", "narrow", "roll", "pad"}
SIZED |= {"interpolate", "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"}
"""Operators whose sizes may be tensors of one integer; a graph holds numbers there."""


class _NotConstant(Exception):
    """The value depends on an input, a parameter or a random number."""


class Constants:
    """Binds real tensors to constant values of the graph; ``fake`` gives what the running model sees of one."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode, module: torch.nn.Module) -> None:
        self._recorder, self._mode = recorder, mode
        self._fakes: dict[int, torch.Tensor] = {}
        self._real: dict[str, torch.Tensor] = {}
        self._made_of: dict[str, frozenset[str]] = {}  # of values in _real: the buffers they follow from
        self.read: set[str] = set()
        """Names of the buffers whose values forward has looked at."""
        self._attributes = {
            id(value): f"{path}.{name}" if path else name
            for path, submodule in module.named_modules()
            for name, value in submodule.__dict__.items()
            if isinstance(value, torch.Tensor)
        }

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor that stands for a real one, the same each time."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            self._refuse_trained(tensor)
        known = self._fakes.get(id(tensor))
        if known is None:
            name = self._attributes.get(id(tensor), "const")
            known = self._fakes[id(tensor)] = self._bind(tensor, name)
            self._recorder.captured.add(self._recorder.variables[id(known)].value.name)
        return known

    def literal(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The constant that a call such as ``torch.tensor([1, 2])`` makes."""
        with unset_fake_temporarily():
            return self._bind(function(*args, **kwargs), "const")

    def add_buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Let the values of a buffer be known that no checkpoint holds: a part of how the module was built."""
        if not tensor.is_meta:
            self._real[name] = tensor.detach().cpu()
            self._made_of[name] = frozenset((name,))

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that follows from constants alone, computed for real; ``None`` for any other."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._recorder.variables:
            return None
        with unset_fake_temporarily(), torch.no_grad():
            value = self._recorder.value(tensor)
            try:
                real = self._evaluate(value)
            except _NotConstant:
                return None
            self.read |= self._made_of.get(value.name, frozenset())
            return real

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor follow from random numbers and constants alone."""
        if id(tensor) not in self._recorder.variables:
            return False
        drawn, seen = False, {(first := self._recorder.value(tensor)).name}
        ways = [first]
        while ways:
            value = ways.pop()
            made_by = self._recorder.calls.get(value.name)
            if made_by is None:
                if value.kind is not ValueKind.CONSTANT:
                    return False
                continue
            call = made_by[0]
            drawn |= call.name in RANDOM
            for read in (leaf for arg in (*call.args, *call.kwargs.values()) for leaf in leaves(arg)):
                if isinstance(read, IRValue) and read.name not in seen:
                    seen.add(read.name)
                    ways.append(read)
        return drawn

    def sizes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operator of :data:`SIZED` with numbers in the place of tensors whose values are known."""

        def number(arg: Any) -> Any:
            if type(arg) in (tuple, list):
                return type(arg)(number(item) for item in arg)
            if not isinstance(arg, torch.Tensor) or arg.ndim or arg.is_floating_point() or arg.is_complex():
                return arg
            real = self.real(arg)
            with unset_fake_temporarily():
                return arg if real is None else real.item()

        kept = 0 if name in FACTORIES else 1
        named = {key: arg if key in ("input", "self") else number(arg) for key, arg in kwargs.items()}
        return (*args[:kept], *map(number, args[kept:])), named

    def _evaluate(self, value: IRValue) -> torch.Tensor:
        known = self._real.get(value.name)
        if known is None:
            made_by = self._recorder.calls.get(value.name)
            if made_by is None or made_by[0].name in RANDOM:
                raise _NotConstant
            call, index = made_by
            args = map_leaves(call.args, self._real_argument)
            kwargs = {name: map_leaves(arg, self._real_argument) for name, arg in call.kwargs.items()}
            result = call.function(*args, **kwargs)
            known = self._real[value.name] = result if isinstance(result, torch.Tensor) else result[index]
            read = (leaf for arg in (*call.args, *call.kwargs.values()) for leaf in leaves(arg) if isinstance(leaf, IRValue))
            self._made_of[value.name] = frozenset().union(*(self._made_of.get(leaf.name, ()) for leaf in read))
        return known

    def _real_argument(self, leaf: Arg) -> Any:
        if isinstance(leaf, IRValue):
            return self._evaluate(leaf)
        if isinstance(leaf, sympy.Basic):  # a dynamic size
            raise _NotConstant
        return torch.device("cpu") if isinstance(leaf, RankDevice) else leaf

    def _refuse_trained(self, tensor: torch.Tensor) -> None:
        name = self._attributes.get(id(tensor))
        raise TraceError(
            f"forward uses a tensor that requires gradients and is no parameter of the module{f': {name}' if name else ''}",
            where=self._recorder.where(),
            why=f"its shape is {list(tensor.shape)}; as a constant it would never be trained",
            hint="make it an nn.Parameter of a module, keep modules in nn.ModuleList or nn.ModuleDict instead of a list or "
            "dict, or detach() it",
        )

    def _bind(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if tensor.is_meta:
            raise TraceError(
                f"the model uses a tensor on the meta device that is neither parameter nor buffer: {name}",
                where=self._recorder.where(),
                why="its values are needed and do not exist",
                hint="make it a buffer, or build the module outside torch.device('meta')",
            )
        label = self._recorder.names.unique(name if name != "const" else f"const_{len(self._recorder.constants)}")
        value = IRValue(label, tuple(tensor.shape), tensor.dtype, False, ValueKind.CONSTANT)
        with self._mode, torch.no_grad():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        with unset_fake_temporarily(), torch.no_grad():
            real = tensor.detach().cpu().clone()  # the values of now
        self._recorder.constants.append((value, real))
        self._recorder.bind_source(fake, value)
        self._recorder.keep(tensor)
        self._real[label] = real
        return fake
