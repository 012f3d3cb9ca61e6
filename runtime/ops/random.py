"""Random numbers that depend on the plan in a known way, and never on the global generators.

Every draw has a generator of its own, seeded by a hash of the module's seed, the name of the draw,
the step, the microbatch, the unit and, in mode ``"fast"``, this rank's coordinates along the axes
that cut the tensor drawn. So ranks that hold copies (or summands) draw the same numbers, ranks that
hold different pieces draw different ones, and a recomputation draws what the first computation
drew. In mode ``"plan_independent"`` every rank draws the numbers of the whole tensor and keeps its
piece: slower, but the same under every plan, one rank included.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.atoms import AXIS, Atom
from shardwright.runtime.config import RngMode
from shardwright.runtime.errors import LoadError, UsageError
from shardwright.runtime.graph_objects import define_operator, numbered, object_of
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.pieces import local_piece

Moment = tuple[int, int]
"""Step and microbatch."""

NamedSizes = Mapping[str, int]
"""The values of the sizes that occur by name in the text of a layout."""

NO_SIZES: NamedSizes = MappingProxyType({})


class RngState:
    """What all draws of one module on one rank depend on.

    ``step`` and ``microbatch`` advance with :meth:`next_step` and :meth:`next_microbatch`; seed,
    step and microbatch are what a checkpoint saves. ``repeats``: the module's present call is the
    second run of an earlier one, and nobody knows of which.
    """

    repeats = False

    def __init__(
        self,
        seed: int,
        mode: RngMode = "fast",
        mesh: Mesh | None = None,
        coords: Mapping[str, int] | None = None,
        unit: int = 0,
    ) -> None:
        self.seed = seed
        self.mode = mode
        self.mesh = mesh if mesh is not None else Mesh()
        self.coords = dict(coords or {})
        self.unit = unit
        self.step = 0
        self.microbatch = 0
        self.number = numbered(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RngState:
        """A copy with a number of its own: operators of graphs find the state by it."""
        made = copy.copy(self)
        made.number = numbered(made)
        return made

    def next_microbatch(self) -> None:
        """Draw for the next forward of this step, from now on."""
        self.microbatch += 1

    def next_step(self) -> None:
        """Draw for the first forward of the next step, from now on."""
        self.step, self.microbatch = self.step + 1, 0

    @property
    def moment(self) -> Moment:
        """Which forward is drawn for: to draw the same again, see :meth:`at`."""
        return self.step, self.microbatch

    @contextmanager
    def at(self, moment: Moment) -> Iterator[None]:
        """Draw as in the forward of ``moment`` inside the ``with`` block, to recompute it."""
        now = self.moment
        self.step, self.microbatch = moment
        try:
            yield
        finally:
            self.step, self.microbatch = now

    @contextmanager
    def in_piece(self, loop: str, count: int, index: int) -> Iterator[None]:
        """Draw as for piece ``index`` of ``count`` inside the ``with`` block: along ``loop``, an
        axis without ranks, pieces draw as ranks along any other axis do.
        """
        mesh, coords = self.mesh, self.coords
        self.mesh = mesh.of_axes((*mesh.axes, (loop, count)))
        self.coords = {**coords, loop: index}
        try:
            yield
        finally:
            self.mesh, self.coords = mesh, coords

    def draw(
        self, name: str, *axes: str, layout: str | None = None, sizes: NamedSizes = NO_SIZES
    ) -> Draw:
        """The draw of this name, of which ranks along ``axes`` have different parts. ``layout``:
        that of the whole tensor, of which every plan draws the same; it has dims by name whose
        values are ``sizes``.

        Raises :class:`LoadError` where the whole tensor is to be drawn, and no layout says what
        that is.
        """
        if layout is not None:
            known = tuple((dim, int(size)) for dim, size in sizes.items())
            found = read_layout(layout, known)
            return Draw(self, name, found.cut_axes, found)
        if axes and self.mode != "fast":
            raise LoadError(
                f"{name} cannot be drawn alike under every plan",
                why='its call was written for rng="fast", and the module has rng_mode = '
                f'"{self.mode}"',
                hint="compile with ComputeConfig(rng=...), which writes other calls",
            )
        return Draw(self, name, axes)

    def to_json(self) -> dict[str, int]:
        return {"seed": self.seed, "step": self.step, "microbatch": self.microbatch}

    def load_json(self, state: Mapping[str, int]) -> None:
        """Continue where a saved state was; which rank this is does not change."""
        self.seed, self.step, self.microbatch = state["seed"], state["step"], state["microbatch"]

    def generator_seed(self, draw: str, axes: Sequence[str] = ()) -> int:
        """The 64-bit seed of a draw; ``axes``: those along which ranks draw differently."""
        text = f"{self.seed}|{draw}|{self.step}|{self.microbatch}|{self.unit}"
        if axes and self.mode == "fast":
            text += "".join([f"|{axis}={self.coords[axis]}" for axis in sorted(axes)])
        # A hash instead of a sum of the parts: neighbouring steps and ranks get seeds that have
        # nothing to do with each other. 63 bits, as torch's seeds have a sign.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

    def generator(
        self, draw: str, device: torch.device, axes: Sequence[str] = ()
    ) -> torch.Generator:
        """A fresh generator for one draw.

        Raises :class:`UsageError` where the numbers would have to be those of an earlier call.
        """
        if self.repeats:
            raise UsageError(
                f"{draw!r} draws random numbers in a call that is made inside backward",
                why="torch.utils.checkpoint around a parallel module runs it a second time there, "
                "which would draw other numbers than the first: gradients would be wrong",
                hint="leave it out, and name the modules to recompute: pas_config={'recompute': "
                "[path, ...]}; or put it into forward of the model, before that is compiled",
            )
        return torch.Generator(device).manual_seed(self.generator_seed(draw, axes))


Make = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""Draws a tensor of a shape from a generator."""


@lru_cache(maxsize=4096)
def read_layout(text: str, sizes: tuple[tuple[str, int], ...] = ()) -> Layout:
    """Parse a layout whose sizes may be expressions of names, given their values.

    ``read_layout("[batch/dp, 4 * 3/tp, past + seq]", (("batch", 6), ("past", 0), ("seq", 8)))``.
    Atoms are joined by a star between spaces and segments by a plus without, as in ``str(layout)``;
    other signs belong to an expression.

    Raises :class:`LoadError` if it does not parse.
    """
    if not sizes:
        return Layout.parse(text)
    dims, bracket, marks = text.strip().removeprefix("[").partition("]")
    try:
        numbers = ", ".join(
            " * ".join(_numeric_atom(atom, dict(sizes)) for atom in dim.split(" * "))
            for dim in dims.split(", ")
        )
    except (SyntaxError, KeyError) as error:
        raise LoadError(
            f"the layout {text!r} does not parse", why=f"the sizes given are {dict(sizes)}"
        ) from error
    return Layout.parse(f"[{numbers}{bracket}{marks}")


def _numeric_atom(text: str, values: Mapping[str, int]) -> str:
    """``"past + seq+3/tp"`` as ``"8+3/tp"``."""
    match = re.fullmatch(rf"(.*?)((?:/{AXIS})*)", text)
    assert match is not None
    # A plus between segments has no blanks around it, one inside of an expression has.
    segments = re.split(r"(?<! )\+(?! )", match[1])
    return (
        "+".join(
            str(_evaluate(ast.parse(segment.strip(), mode="eval").body, values))
            for segment in segments
        )
        + match[2]
    )


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Pow: operator.pow,
}


def _evaluate(node: ast.expr, values: Mapping[str, int]) -> int:
    """The value of an expression of sizes. Its quotients are whole, as a size is."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATIONS[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.Call(func=ast.Name(id="floor"), args=[argument]):
            return _evaluate(argument, values)
    raise SyntaxError(f"{ast.unparse(node)} is no size")


@dataclass(slots=True, eq=False)
class Draw:
    """What an operator draws: see :meth:`RngState.draw`.

    ``axes``: those along which ranks draw different numbers. ``layout``: that of the tensor drawn,
    where every plan draws the same; ``None``: a rank draws for the piece at hand. The functions
    that draw are given the shape of that piece.
    """

    rng: RngState
    name: str
    axes: tuple[str, ...] = ()
    layout: Layout | None = None

    def named(self, name: str) -> Draw:
        """The draw under another name."""
        return Draw(self.rng, name, self.axes, self.layout)

    def kept_here(self) -> Draw:
        """The draw with a random state that does not move on, for a backward in a later step."""
        return Draw(copy.copy(self.rng), self.name, self.axes, self.layout)

    def with_dim(self, dim: int, size: int) -> Draw:
        """The draw with another, uncut dim in the place of ``dim``."""
        if self.layout is None:
            return self
        layout = self.layout.with_dim(dim % len(self.layout.dims), (Atom((size,)),))
        return Draw(self.rng, self.name, layout.cut_axes, layout)

    def piece(self, shape: Sequence[int], device: torch.device, make: Make) -> Tensor:
        """Draw with ``make(shape, generator)``; the result is this rank's piece."""
        rng, layout = self.rng, self.layout
        generator = rng.generator(self.name, device, self.axes)
        if layout is None or rng.mode == "fast" or not self.axes:
            return make(tuple(shape), generator)
        # Every rank draws the whole and takes its piece: slow, and the same under every plan.
        return local_piece(make(layout.shape, generator), layout, rng.mesh, rng.coords)

    def uniform(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers from ``[0, 1)``."""
        return self.piece(
            shape,
            device,
            lambda shape, g: torch.rand(shape, generator=g, device=device, dtype=dtype),
        )

    def normal(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers from the standard normal distribution."""
        return self.piece(
            shape,
            device,
            lambda shape, g: torch.randn(shape, generator=g, device=device, dtype=dtype),
        )

    def exponential(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers from the exponential distribution of rate 1."""
        return self.piece(
            shape,
            device,
            lambda shape, g: torch.empty(shape, device=device, dtype=dtype).exponential_(
                generator=g
            ),
        )

    def kept(
        self, shape: Sequence[int], device: torch.device, dtype: torch.dtype, probability: float
    ) -> Tensor:
        """Ones with this probability, zeros else."""
        if self.layout is None and torch.compiler.is_compiling():
            draw = self.rng.number, self.name, shape, self.axes
            return torch.ops.shardwright.kept(*draw, probability, dtype, device)  # type: ignore[no-any-return]
        return self.piece(
            shape,
            device,
            lambda shape, g: torch.empty(shape, device=device, dtype=dtype).bernoulli_(
                probability, generator=g
            ),
        )


def _kept(
    rng: int,
    draw: str,
    shape: Sequence[int],
    axes: Sequence[str],
    probability: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return Draw(object_of(rng), draw, tuple(axes)).kept(shape, device, dtype, probability)


def _kept_without_values(
    rng: int,
    draw: str,
    shape: Sequence[int],
    axes: Sequence[str],
    probability: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


# A mask of dropout in the graphs of torch.compile. The tag keeps torch from drawing it again in
# backward, when the moment may be another.
define_operator(
    "kept(int rng, str draw, SymInt[] shape, str[] axes, float probability, ScalarType dtype, "
    "Device device) -> Tensor",
    _kept,
    _kept_without_values,
    tags=[torch.Tag.nondeterministic_seeded],
)
