"""Tensors with values of their own: literals made in forward, and tensors the model captured."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from shardwright.compiler.ir.op import Arg, RankDevice, map_leaves
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.recorder import Recorder
from shardwright.runtime.errors import TraceError

_RANDOM = {
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
_RANDOM |= {"bernoulli", "uniform", "poisson", "empty", "empty_like", "new_empty"}


class _NotConstant(Exception):
    """The value depends on an input, a parameter or a random number."""


class Constants:
    """Binds real tensors to constant values of the graph; ``fake`` gives what the running model sees of one."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode, module: torch.nn.Module) -> None:
        self._recorder, self._mode = recorder, mode
        self._fakes: dict[int, torch.Tensor] = {}
        self._real: dict[str, torch.Tensor] = {}
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

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that follows from constants alone, computed for real; ``None`` for any other."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._recorder.variables:
            return None
        with unset_fake_temporarily(), torch.no_grad():
            try:
                return self._evaluate(self._recorder.value(tensor))
            except _NotConstant:
                return None

    def _evaluate(self, value: IRValue) -> torch.Tensor:
        known = self._real.get(value.name)
        if known is None:
            made_by = self._recorder.calls.get(value.name)
            if made_by is None or made_by[0].name in _RANDOM:
                raise _NotConstant
            call, index = made_by
            args = map_leaves(call.args, self._real_argument)
            kwargs = {name: map_leaves(arg, self._real_argument) for name, arg in call.kwargs.items()}
            result = call.function(*args, **kwargs)
            known = self._real[value.name] = result if isinstance(result, torch.Tensor) else result[index]
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
