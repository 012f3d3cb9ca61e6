"""Checking the arguments of a call against those a module was compiled for.

A generated class lists the leaves of its arguments by path, as
:func:`~shardwright.runtime.structure.flatten` names them:

    inputs = {
        "input_ids": ("[batch, 128]", torch.int64),     # a name: this size may vary between calls
        "keys": ("[batch, 8/tp, past, 64]", torch.float32), # this rank's piece, see ComputeConfig
        "grids": ("[1, 3]", torch.int64, [[1, 4, 4]]),  # constant values, or the digest of them
        "use_cache": True,                              # the trace took this value for granted
        "activation": Told("function torch.nn.functional.gelu"),  # what has no literal: as a text
    }

Equal names mean equal sizes, in all arguments of one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from shardwright.runtime.atoms import Atom
from shardwright.runtime.errors import InputError, brief
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import Coords
from shardwright.runtime.pieces import local_piece
from shardwright.runtime.structure import (
    flatten,
    hides_state,
    map_leaves,
    plain_number,
    values_digest,
)
from shardwright.runtime.told import Told, UntoldError, told


class _Absent:
    """See :data:`ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()
"""The default of every argument of a generated ``forward``: the caller did not pass it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The tensor expected at one path. A ``str`` in ``shape`` names a size that may vary between
    calls. ``values``: nested lists, or a digest, if they must be the same in every call.
    ``layout``: of a tensor of which each rank is given a piece, with the same names for sizes.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    values: Any = None
    layout: Layout | None = None

    @classmethod
    def parse(cls, shape: str, dtype: torch.dtype, values: Any = None) -> TensorSpec:
        """The spec of a shape in words: ``"[batch, 128]"``."""
        sizes = [size.strip() for size in shape.strip("[] ").split(",") if size.strip()]
        if any("/" in size for size in sizes):
            layout = Layout.parse(shape)
            return cls(layout.shape, dtype, values, layout)
        return cls(tuple(int(size) if size.isdecimal() else size for size in sizes), dtype, values)

    def layout_for(self, sizes: Mapping[str, int]) -> Layout:
        """The layout of a piece, with numbers for the sizes that vary."""
        assert self.layout is not None
        dims = []
        for dim in self.layout.dims:
            segments = (tuple(sizes.get(s, s) for s in atom.segments) for atom in dim)
            dims.append(tuple(map(Atom, segments, (atom.axes for atom in dim))))
        return Layout(tuple(dims))

    def __str__(self) -> str:
        if self.layout is not None:
            return f"{_dtype(self.dtype)}{self.layout}"
        return f"{_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


class InputTable:
    """The arguments a class was compiled for. ``owner``: the name of the class, ``method``: what is
    called; for messages. ``mesh``, ``coords``: the mesh of the unit and this rank's place on it,
    where arguments may be given in pieces.
    """

    def __init__(
        self,
        owner: str,
        table: Mapping[str, Any],
        method: str = "forward",
        mesh: Mesh | None = None,
        coords: Coords | None = None,
    ) -> None:
        self.owner = f"{owner}.{method}"
        self._mesh, self._coords = mesh or Mesh(()), coords or {}
        self.leaves = {
            path: TensorSpec.parse(*leaf) if _is_tensor(leaf) else leaf
            for path, leaf in table.items()
        }
        self.pieces = tuple(
            path
            for path, leaf in self.leaves.items()
            if isinstance(leaf, TensorSpec) and leaf.layout is not None
        )
        """The paths of what is given in pieces."""
        # This rank's shapes of what has no sizes that vary, worked out once for all calls.
        self._fixed: dict[str, tuple[int | str, ...]] = {}
        for path, leaf in self.leaves.items():
            if isinstance(leaf, TensorSpec) and all(isinstance(size, int) for size in leaf.shape):
                layout = leaf.layout
                self._fixed[path] = (
                    leaf.shape if layout is None else layout.local_shape(self._mesh, self._coords)
                )
        self.tensors = tuple(
            path for path, leaf in self.leaves.items() if isinstance(leaf, TensorSpec)
        )
        """The paths of the tensors, in order."""

    def cut(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with this rank's pieces where it takes pieces of what is given
        whole. Containers on the way to them are copied.

        Raises :class:`InputError` for what is no tensor of that number of dims.
        """
        leaves = flatten(dict(given))
        # Sizes that vary are told by the tensors that are given: ``{"batch": 8}``.
        sizes: dict[str, int] = {}
        for path, spec in self.leaves.items():
            value = leaves.get(path)
            if isinstance(spec, TensorSpec) and isinstance(value, Tensor):
                if value.ndim != len(spec.shape):
                    self._refuse_shape(path, spec, value, f"it has {value.ndim} dims")
                named = zip(spec.shape, value.shape, strict=True)
                sizes.update({name: size for name, size in named if isinstance(name, str)})

        def piece(path: str, leaf: Any) -> Any:
            spec = self.leaves.get(path)
            if path not in self.pieces or not isinstance(leaf, Tensor):
                return leaf
            assert isinstance(spec, TensorSpec)
            layout = spec.layout_for(sizes)
            if tuple(leaf.shape) != layout.shape:
                self._refuse_shape(path, spec, leaf, "the whole tensor is to be cut")
            return local_piece(leaf, layout, self._mesh, self._coords).contiguous()

        found = dict(given)
        for name, value in given.items():
            if any(path == name or path.startswith(f"{name}.") for path in self.pieces):
                found[name] = map_leaves(value, piece, name)
        return found

    def check(self, given: Mapping[str, Any], absent: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of ``given`` by path. ``absent``: the arguments that the compiled call did
        not have.

        Raises :class:`InputError` where a call differs from the compiled one in more than the
        values of tensors and the sizes that may vary.
        """
        for name, value in absent.items():
            if value is not ABSENT:
                raise InputError(
                    f"{self.owner} was compiled without the argument {name!r}",
                    why="the dummy arguments did not have it, so the program ignores it; the "
                    f"call passes {_brief(value)}",
                    hint=f"leave out {name}, or compile again with {name!r} among the dummy "
                    "arguments",
                )
        # Leaves by path, as a nested dict of tensors has them.
        for value in given.values():
            if type(value) is not Tensor:
                leaves = flatten(dict(given))
                break
        else:
            leaves = dict(given)
        sizes: dict[str, tuple[int, str]] = {}
        tensors: dict[str, Tensor] = {}
        # What was compiled is taken out; what is left over was not.
        for path, expected in self.leaves.items():
            value = leaves.pop(path, ABSENT)
            if value is ABSENT:
                self._refuse_missing(path, expected, given)
            elif isinstance(expected, TensorSpec):
                tensors[path] = self._check_tensor(path, expected, value, sizes)
            elif not _same_literal(expected, value):
                was = expected.text if isinstance(expected, Told) else repr(expected)
                raise InputError(
                    f"{self.owner}: argument {path!r} is {_given(expected, value)}, but was "
                    f"compiled as {was}",
                    why="a value that is not a tensor is fixed when the module is compiled",
                    hint=f"pass {was}, or compile again with the value you need",
                )
        # What is too much would not be read, and that is a mistake. Devices are each rank's own.
        for path, value in leaves.items():
            if value is not None and not isinstance(value, torch.device):
                raise InputError(
                    f"{self.owner}: argument {path!r} is {_brief(value)}, but was compiled "
                    "without it",
                    why=f"the dummy arguments had {', '.join(self.leaves) or 'nothing'}",
                    hint="leave it out, or compile again with it among the dummy arguments",
                )
        for path in self.pieces:
            if tensors[path].shape != self._fixed.get(path):
                self._check_piece(
                    path, tensors[path], {name: size for name, (size, _) in sizes.items()}
                )
        return tensors

    def _check_piece(self, path: str, value: Tensor, sizes: Mapping[str, int]) -> None:
        """Refuse a tensor that does not have the size of this rank's piece. ``sizes``: those that
        vary, by name; whole inputs have told them.
        """
        spec = self.leaves[path]
        assert isinstance(spec, TensorSpec)
        layout = spec.layout_for(sizes)
        expected = layout.local_shape(self._mesh, self._coords)
        if tuple(value.shape) != tuple(expected):
            self._refuse_shape(
                path,
                spec,
                value,
                f"it is given in pieces, and this rank's is {list(expected)} of "
                f"{list(layout.shape)}",
                "pass what an earlier call returned in pieces, or cut a whole one: "
                "module.cut_inputs(...)",
            )

    def _check_tensor(
        self, path: str, spec: TensorSpec, value: Any, sizes: dict[str, tuple[int, str]]
    ) -> Tensor:
        """``value`` if it fits. ``sizes``: what each varying size is in this call, and where it was
        read first.
        """
        if not isinstance(value, Tensor):
            raise InputError(
                f"{self.owner}: argument {path!r} is {_brief(value)}, but was compiled as a "
                f"tensor {spec}",
                hint="pass a tensor",
            )
        if value.dtype != spec.dtype:
            raise InputError(
                f"{self.owner}: argument {path!r} has dtype {_dtype(value.dtype)}, but was "
                f"compiled for {_dtype(spec.dtype)}",
                hint=f"pass {path}.to(torch.{_dtype(spec.dtype)}), or compile again with this "
                "dtype",
            )
        if value.ndim != len(spec.shape):
            self._refuse_shape(
                path, spec, value, f"it has {value.ndim} dims, not {len(spec.shape)}"
            )
        if value.shape != self._fixed.get(path):
            self._check_sizes(path, spec, value, sizes)
        if spec.values is not None:
            self._check_values(path, spec.values, value)
        return value

    def _check_sizes(
        self, path: str, spec: TensorSpec, value: Tensor, sizes: dict[str, tuple[int, str]]
    ) -> None:
        # A number is fixed; a name is a size that varies, the same wherever it occurs.
        for dim, (size, expected) in enumerate(zip(value.shape, spec.shape, strict=True)):
            if spec.layout is not None and spec.layout.dim_axes(dim):
                continue  # a piece: its size follows from those of the others
            if isinstance(expected, int):
                if size != expected:
                    self._refuse_shape(path, spec, value, f"dim {dim} is {size}, not {expected}")
            else:
                known, source = sizes.setdefault(expected, (size, f"dim {dim} of {path!r}"))
                if size != known:
                    self._refuse_shape(
                        path,
                        spec,
                        value,
                        f"dim {dim} is {size}, but {expected} is {known} in {source}",
                    )

    def _check_values(self, path: str, expected: Any, value: Tensor) -> None:
        digested = isinstance(expected, str)
        now = values_digest(value) if digested else value.tolist()
        if now != expected:
            raise InputError(
                f"{self.owner}: argument {path!r} has other values than the module was "
                "compiled for",
                why="sizes follow from them"
                if digested
                else f"sizes follow from them; it is {now}, compiled as {expected}",
                hint="pass the compiled values, or compile another module for these",
            )

    def _refuse_missing(self, path: str, expected: Any, given: Mapping[str, Any]) -> None:
        # A container, an array: something that is no leaf.
        if given.get(path, ABSENT) is not ABSENT:
            raise InputError(
                f"{self.owner}: argument {path!r} is a {type(given[path]).__name__}, but was "
                f"compiled as {expected}",
                hint="pass a tensor" if isinstance(expected, TensorSpec) else f"pass {expected!r}",
            )
        what = f"a tensor {expected}" if isinstance(expected, TensorSpec) else repr(expected)
        raise InputError(
            f"{self.owner}: argument {path!r} is missing",
            why=f"it was compiled with {what}",
            hint=f"pass {path}",
        )

    def _refuse_shape(
        self, path: str, spec: TensorSpec, value: Tensor, why: str, hint: str = ""
    ) -> None:
        raise InputError(
            f"{self.owner}: argument {path!r} has shape {list(value.shape)}, but was "
            f"compiled for {spec}",
            why=why,
            hint=hint
            or "pass the compiled shape, or compile again and name the dims that vary in "
            "ComputeConfig.dynamic_dims",
        )


def compiled_in(table: Mapping[str, Any]) -> list[str]:
    """The paths of the inputs whose values a class has compiled in, from its ``inputs``."""
    return [path for path, leaf in table.items() if _is_tensor(leaf) and len(leaf) > 2]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and len(leaf) in (2, 3) and isinstance(leaf[1], torch.dtype)


def _given(expected: Any, value: Any) -> str:
    """A value in words, such as show how it differs from what was compiled."""
    try:
        return told(value) if isinstance(expected, Told) else _brief(value)
    except UntoldError as error:
        return str(error)


def _same_literal(expected: Any, value: Any) -> bool:
    if isinstance(expected, Told):
        return expected.fits(value)
    value = plain_number(value)
    # ``True == 1``, but a program traced with one is not the program traced with the other.
    if value is expected or type(value) is not type(expected) or isinstance(value, Tensor):
        return value is expected
    # NaN is what it was compiled as, though it equals nothing; -0.0 equals 0.0 and is another
    # number.
    return repr(value) == repr(expected) if isinstance(value, float) else bool(value == expected)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {_dtype(value.dtype)}{list(value.shape)}"
    text = f"a {type(value).__name__}" if hides_state(plain_number(value)) else brief(value)
    if len(text) <= 60:
        return text
    # Both ends of a string: what a function is called, and the digest of its code.
    return f"{text[:38]}...{text[-19:]}" if isinstance(value, str) else f"a {type(value).__name__}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
