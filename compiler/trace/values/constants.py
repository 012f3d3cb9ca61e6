"""Tensors with values of their own: literals made in forward, and tensors the model captured."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from shardwright.compiler.ir.op import Arg, RankDevice, leaves, map_leaves
from shardwright.compiler.ir.size import in_example
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.trace.calls.normalise import FACTORIES
from shardwright.compiler.trace.recorder import Call, Recorder
from shardwright.compiler.trace.values.known_inputs import HAVE_VALUES, KnownInput
from shardwright.runtime.errors import TraceError

RANDOM = {
    "dropout", "rand", "randn", "randint", "randperm", "rand_like", "randn_like",
    "randint_like", "normal", "multinomial", "bernoulli", "uniform", "poisson", "empty",
    "empty_like", "new_empty",
}  # fmt: skip

SIZED = {
    "view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "split",
    "narrow", "roll", "pad", "interpolate", "zeros", "ones", "empty", "full", "new_zeros",
    "new_ones", "new_empty", "new_full",
}  # fmt: skip
"""Operators whose sizes may be tensors of one integer; a graph holds numbers there."""

SHAPED_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""Operators that read the shape and dtype of their first operand, and none of its values."""


MOST_KNOWN = 16
"""Numbers in a persistent buffer whose values forward may read: lengths, limits and flags."""


class _NotConstant(Exception):
    """The value depends on an input, a parameter or a random number."""


@dataclass(frozen=True)
class _Known:
    """Values by name, and the buffers and inputs that each follows from. ``in_dummies``: those of
    the dummy arguments and the sizes of dynamic dims in them are among these.
    """

    real: MutableMapping[str, torch.Tensor] = field(default_factory=dict)
    made_of: MutableMapping[str, frozenset[str]] = field(default_factory=dict)
    in_dummies: bool = False


class Constants:
    """Binds real tensors to constant values of the graph; ``fake`` gives what the running model
    sees of one.
    """

    def __init__(self, recorder: Recorder, mode: FakeTensorMode, module: torch.nn.Module) -> None:
        self._recorder, self._mode = recorder, mode
        self._fakes: dict[int, torch.Tensor] = {}
        self._known = _Known()
        self.read: set[str] = set()
        """Names of the buffers and inputs whose values forward has looked at."""
        self._inputs: dict[str, KnownInput] = {}
        self._buffers: set[str] = set()  # those among ``_inputs`` that are persistent buffers
        self._dummies: dict[str, torch.Tensor] = {}
        self._stood_for: set[str] = set()  # those of which other values stand in for their own
        self._in_dummies: _Known | None = None
        self._paths: dict[str, str] = {}
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
        # By identity: a table that all layers read is one constant.
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

    def add_buffer(self, name: str, tensor: torch.Tensor, *, persistent: bool) -> None:
        """Let the values of a buffer be known. One that no checkpoint holds is a part of how the
        module was built. A ``persistent`` one is taken for a constant if it is small and forward
        reads it, as an undeclared input is: the module checks it from then on.
        """
        if tensor.is_meta or (persistent and tensor.numel() > MOST_KNOWN):
            return
        values = tensor.detach().cpu()
        if persistent:
            self._inputs[name] = KnownInput(values.clone(), False)
            self._buffers.add(name)
        self._known.real[name] = values
        self._known.made_of[name] = frozenset((name,))

    def add_input(self, name: str, known: KnownInput) -> None:
        """Let the values of an input be known."""
        self._inputs[name] = known
        self._known.real[name] = known.values
        self._known.made_of[name] = frozenset((name,))

    def inputs_read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and values of every input whose values forward has looked at."""
        read = self._inputs.keys() & self.read - self._buffers
        return ((name, known.values) for name, known in self._inputs.items() if name in read)

    def buffers_read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and values of every persistent buffer whose values forward has looked at."""
        return ((name, self._inputs[name].values) for name in sorted(self._buffers & self.read))

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor that follows from constants alone, computed for real; ``None`` for
        any other.
        """
        found = self.followed(tensor)
        if found is None:
            return None
        real, made_of = found
        self.read |= made_of
        return real

    def certain(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, for a model that has a way without them: those of undeclared
        inputs stay unknown.
        """
        return None if self.is_assumed(tensor) else self.real(tensor)

    def is_assumed(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known only if an input is a constant that nobody has
        declared as one.
        """
        found = self.followed(tensor) if self._inputs else None
        return found is not None and any(
            name in self._inputs and not self._inputs[name].declared for name in found[1]
        )

    def followed(self, tensor: torch.Tensor) -> tuple[torch.Tensor, frozenset[str]] | None:
        """The values of a tensor, and the buffers and inputs they follow from; ``None`` if they
        follow from more.

        Nothing counts as read.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor, frozenset()
        if id(tensor) not in self._recorder.variables:
            return None
        with unset_fake_temporarily(), torch.no_grad():
            value = self._recorder.value(tensor)
            try:
                real = self._evaluate(value, self._known)
            except _NotConstant:
                return None
        return real, self._known.made_of.get(value.name, frozenset())

    def whole_inputs(self, tensor: torch.Tensor) -> list[str]:
        """The paths of the integer inputs that a tensor follows from and whose values are unknown,
        if it follows from integer inputs and constants alone; else nothing.
        """
        unknown = (v for v in self._inputs_of(tensor) if v.name not in self._known.real)
        return [self._paths[value.name] for value in unknown]

    def _inputs_of(self, tensor: torch.Tensor) -> list[IRValue]:
        if id(tensor) not in self._recorder.variables:
            return []
        found: list[IRValue] = []
        for value, call in self._history(tensor):
            # Declaring inputs constant would not help: these values differ in each call.
            if call is not None and call.name in RANDOM:
                return []
            if call is None and value.kind is ValueKind.INPUT and not value.dtype.is_floating_point:
                found.append(value)
            elif call is None and value.name not in self._known.real:
                return []
        return found

    def assume(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Take the integer inputs for constants that these tensors follow from, as if they had been
        declared with the values of the dummy arguments. Whether any has become one.

        A tensor that follows from anything else, or from an input without values or with a dynamic
        dim, is left out.
        """
        before = len(self._inputs)
        for tensor in tensors:
            inputs = [value for value in self._inputs_of(tensor) if value.name not in self._inputs]
            if all(map(self._can_be_assumed, inputs)):
                for value in inputs:
                    values = self._dummies[value.name].cpu()
                    self.add_input(value.name, KnownInput(values, False))
        return len(self._inputs) > before

    def _can_be_assumed(self, value: IRValue) -> bool:
        is_fixed = all(isinstance(size, int) for size in value.shape)
        own = self._dummies.keys() - self._stood_for
        has_values = HAVE_VALUES.get() and value.name in own
        return is_fixed and has_values and value.dtype != torch.bool

    def _history(self, tensor: torch.Tensor) -> Iterator[tuple[IRValue, Call | None]]:
        """Every value that a tensor is made of, itself first, with the call that has made it, if
        one has.
        """
        # Each value once, though many calls may read it.
        seen = {(first := self._recorder.value(tensor)).name}
        ways = [first]
        while ways:
            value = ways.pop()
            made_by = self._recorder.calls.get(value.name)
            call = None if made_by is None else made_by[0]
            yield value, call
            if call is None:
                continue
            for read in _values_read(call):
                if read.name not in seen:
                    seen.add(read.name)
                    ways.append(read)

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor follow from random numbers and constants alone."""
        if id(tensor) not in self._recorder.variables:
            return False
        drawn = False
        for value, call in self._history(tensor):
            if call is None and value.kind is not ValueKind.CONSTANT:
                return False
            drawn |= call is not None and call.name in RANDOM
        return drawn

    def sizes(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operator of :data:`SIZED` with numbers in the place of tensors whose
        values are known.
        """
        # The first argument of other operators is the tensor that gets the size.
        kept = 0 if name in FACTORIES else 1
        named = {
            key: arg if key in ("input", "self") else self._number(arg)
            for key, arg in kwargs.items()
        }
        return (*args[:kept], *map(self._number, args[kept:])), named

    def repeats(
        self, input: torch.Tensor, repeats: Any, dim: int | None = None
    ) -> torch.Tensor | None:
        """The index of the element that each element of ``repeat_interleave`` is a copy of, where
        the values of ``repeats`` are known. Example: ``[0, 0, 1]`` for 2 and 1 repeats.
        """
        real = self.real(repeats) if isinstance(repeats, torch.Tensor) else None
        if real is None:
            return None
        size = input.numel() if dim is None else input.shape[dim]
        with unset_fake_temporarily():
            return torch.arange(size).repeat_interleave(real)

    def slices(self, index: Any) -> Any:
        """An index with numbers in the place of bounds of slices that are tensors whose values are
        known.
        """
        if isinstance(index, tuple):
            return tuple(map(self.slices, index))
        if not isinstance(index, slice):
            return index
        return slice(*map(self._number, (index.start, index.stop, index.step)))

    def _number(self, arg: Any) -> Any:
        """A tensor of one integer as a number, where its value is known; also inside of lists."""
        if type(arg) in (tuple, list):
            return type(arg)(self._number(item) for item in arg)
        if (
            not isinstance(arg, torch.Tensor)
            or arg.ndim
            or arg.is_floating_point()
            or arg.is_complex()
        ):
            return arg
        real = self.real(arg)
        with unset_fake_temporarily():
            return arg if real is None else real.item()

    def add_dummy(self, name: str, path: str, tensor: torch.Tensor) -> None:
        """Remember the dummy argument of an input and its path, so that masks made of it are
        known.
        """
        self._paths[name] = path
        if not tensor.is_meta:
            self._dummies[name] = tensor.detach()

    def all_true_in_dummies(self, mask: torch.Tensor) -> bool:
        """Whether a mask follows from inputs and constants alone, and is true everywhere for the
        dummy arguments.
        """
        found = self.in_dummies(self._recorder.value(mask))
        with unset_fake_temporarily():
            return found is not None and bool(found[0].all())

    def in_dummies(self, value: IRValue) -> tuple[torch.Tensor, frozenset[str]] | None:
        """What a value is for the dummy arguments, and the inputs and buffers it follows from;
        ``None`` if it follows from more. Nothing counts as read.
        """
        if self._in_dummies is None:
            made_of = {name: frozenset((name,)) for name in self._dummies}
            self._in_dummies = _Known(
                # What is found out goes into the first map: it is true of the dummy arguments, not
                # of every call.
                ChainMap({}, self._known.real, self._dummies),
                ChainMap({}, self._known.made_of, made_of),
                in_dummies=True,
            )
        with unset_fake_temporarily(), torch.no_grad():
            try:
                real = self._evaluate(value, self._in_dummies)
            except _NotConstant:
                return None
        return real, self._in_dummies.made_of.get(value.name, frozenset())

    def replace_dummies(self, dummies: Mapping[str, torch.Tensor]) -> None:
        """Let other values stand for some of the dummy arguments from here on."""
        self._dummies |= dummies
        self._stood_for |= dummies.keys()
        self._in_dummies = None

    def example_shape(self, value: IRValue) -> tuple[int, ...]:
        """The shape of a value for the dummy arguments."""
        return tuple(
            size if isinstance(size, int) else int(in_example(size)) for size in value.shape
        )

    def dummy(self, name: str) -> torch.Tensor | None:
        """The dummy argument of an input, if it has values."""
        return self._dummies.get(name)

    def look(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor for the dummy arguments, which from here on are those of every
        call.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor
        found = (
            self.in_dummies(self._recorder.value(tensor))
            if id(tensor) in self._recorder.variables
            else None
        )
        if found is None:
            return None
        real, made_of = found
        # What was looked at is compiled in: the input becomes a constant, which every call
        # compares.
        for name in made_of & self._dummies.keys():
            self._inputs.setdefault(name, KnownInput(self._dummies[name].cpu(), False))
        self.read |= made_of
        return real

    def take_as_true(self, mask: torch.Tensor) -> None:
        """Let every element of a mask be known as true; the program checks it."""
        value = self._recorder.value(mask)
        with unset_fake_temporarily():
            self._known.real[value.name] = torch.ones(value.shape, dtype=torch.bool)

    def _evaluate(self, value: IRValue, known: _Known) -> torch.Tensor:
        real = known.real.get(value.name)
        if real is None:
            made_by = self._recorder.calls.get(value.name)
            # An input, a parameter, or a draw: different in every call.
            if made_by is None or made_by[0].name in RANDOM:
                raise _NotConstant
            call, index = made_by

            # The call is repeated with real tensors; its operands first, if nobody has asked for
            # them.
            def argument(leaf: Arg) -> Any:
                return self._real_argument(leaf, known)

            first: tuple[torch.Tensor, ...] = ()
            if call.name in SHAPED_LIKE and call.args:
                first = (self._of_shape(call, known),)
            args = (*first, *map_leaves(call.args[len(first) :], argument))
            kwargs = {name: map_leaves(arg, argument) for name, arg in call.kwargs.items()}
            result = call.function(*args, **kwargs)
            real = known.real[value.name] = (
                result if isinstance(result, torch.Tensor) else result[index]
            )
            # What it follows from, so that reading it makes constants of exactly these inputs.
            known.made_of[value.name] = frozenset().union(
                *(known.made_of.get(leaf.name, ()) for leaf in _values_read(call))
            )
        return real

    def _of_shape(self, call: Call, known: _Known) -> torch.Tensor:
        """A tensor that stands for the first operand of a call of :data:`SHAPED_LIKE`."""
        operand: Any = call.args[0]
        sizes = operand.shape if call.name.endswith("_like") else ()
        shape = tuple(self._real_argument(size, known) for size in sizes)
        return torch.empty((), dtype=operand.dtype).expand(shape)

    def _real_argument(self, leaf: Arg, known: _Known) -> Any:
        if isinstance(leaf, IRValue):
            return self._evaluate(leaf, known)
        if isinstance(leaf, sympy.Basic):  # a dynamic size
            if not known.in_dummies:
                raise _NotConstant
            return in_example(leaf)
        return torch.device("cpu") if isinstance(leaf, RankDevice) else leaf

    def _refuse_trained(self, tensor: torch.Tensor) -> None:
        name = self._attributes.get(id(tensor))
        raise TraceError(
            "forward uses a tensor that requires gradients and is no parameter of the "
            f"module{f': {name}' if name else ''}",
            where=self._recorder.where(),
            why=f"its shape is {list(tensor.shape)}; as a constant it would never be trained",
            hint="make it an nn.Parameter of a module, keep modules in nn.ModuleList or "
            "nn.ModuleDict instead of a list or "
            "dict, or detach() it",
        )

    def _bind(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if tensor.is_meta:
            raise TraceError(
                "the model uses a tensor on the meta device that is neither parameter nor "
                f"buffer: {name}",
                where=self._recorder.where(),
                why="its values are needed and do not exist",
                hint="make it a buffer, or build the module outside torch.device('meta')",
            )
        label = self._recorder.names.unique(
            name if name != "const" else f"const_{len(self._recorder.constants)}"
        )
        value = IRValue(label, tuple(tensor.shape), tensor.dtype, False, ValueKind.CONSTANT)
        with self._mode, torch.no_grad():
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
        with unset_fake_temporarily(), torch.no_grad():
            real = tensor.detach().cpu().clone()  # the values of now
        self._recorder.constants.append((value, real))
        self._recorder.bind_source(fake, value)
        self._recorder.keep(tensor)
        self._known.real[label] = real
        return fake


def _values_read(call: Call) -> Iterator[IRValue]:
    """The operands of a call that its result follows from."""
    args = call.args[1:] if call.name in SHAPED_LIKE else call.args
    for arg in (*args, *call.kwargs.values()):
        yield from (leaf for leaf in leaves(arg) if isinstance(leaf, IRValue))
