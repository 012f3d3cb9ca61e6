"""The calls of a generated file under ``spmd_types``: what stands between the two."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import spmd_types as spmd
import torch
from spmd_types import SpmdTypeError
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from shardwright.frontend.verification.outside import typed_operators
from shardwright.frontend.verification.outside.claims import (
    claim_of,
    claims_of,
    transitions_of,
    unread,
)
from shardwright.frontend.verification.outside.piece_sizes import axes_of, known_sizes
from shardwright.frontend.verification.outside.process_draws import ProcessDraws
from shardwright.frontend.verification.outside.spmd_layouts import (
    LETTERS,
    Refusal,
    Typed,
    TypedMesh,
    in_words,
    listed,
    local_types,
    needs_gradient,
    shard_axes,
    stand_in,
)
from shardwright.frontend.verification.outside.typed_functions import (
    brought_along,
    typed_function,
)
from shardwright.frontend.verification.outside.typed_moves import moved
from shardwright.runtime import ops
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ops.random_functions import replace_functions
from shardwright.runtime.structure import flatten

# What generated code calls that is no part of the program: checks of arguments.
spmd.register_no_typecheck(ParallelModule.check_inputs)


MOVEMENTS = frozenset({"__getitem__", "chunk", "flatten", "reshape", "split", "unflatten", "view"})
"""The functions whose results may have cut dims that ``spmd_types`` cannot find: they take a dim
apart, of which it only knows that an axis cuts it, take a part of it, or join dims.
"""

FACTORIES = (
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.arange,
    torch.linspace,
    torch.eye,
)
"""They make the same numbers on all ranks, unless an argument tells the rank's place."""


class TypedCalls(TorchFunctionMode):
    """Sees every call of torch before ``spmd_types`` does.

    Types are always derived by ``spmd_types``. Of some functions it does not know where a cut dim
    goes: views that take a dim apart, for one. There the letters are derived, and the dims are read
    from the comment of the statement, and ``told`` counts these calls. Everywhere else the comment
    is compared with what was derived.
    """

    def __init__(self, source: str, file: str) -> None:
        super().__init__()
        self.claims, self.file = claims_of(source), file
        self.transitions, self.unread = transitions_of(source), unread(source)
        self.mesh = TypedMesh(Mesh(), ())
        self.told: Counter[str] = Counter()
        self.by_rule: Counter[str] = Counter()
        self.by_function: Counter[str] = Counter()
        self.num_calls = 0
        self.has_draw = False

    @contextmanager
    def on(self, mesh: TypedMesh) -> Iterator[None]:
        """Calls of this thread are seen inside the ``with`` block, on a mesh."""
        self.mesh = mesh
        with self, known_sizes(self.file):
            yield

    def wrap(self, namespace: ModuleType, module: Any) -> None:
        """Let the operators of ours that a generated file has imported follow their rules, and
        those that its module draws random numbers with.
        """
        if getattr(namespace, "stacked", None) is ops.stacked:
            setattr(namespace, "stacked", self.stacked)  # noqa: B010
        for name, function in list(vars(namespace).items()):
            known = name in typed_operators.RULES and getattr(ops, name, None) is function
            if known and function is not None:
                setattr(namespace, name, self._following(name, function))
        names = {getattr(ops, name, None): name for name in typed_operators.RULES}
        replace_functions(
            module.random,
            lambda function: (
                self._following(names[function], function)
                if function in names
                else self._drawing(function)
            ),
        )

    def _drawing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function without a rule that is given a draw. It may set the generator of the process
        to the seed of that draw, as the one of recurrent layers does.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            self.has_draw = True
            try:
                return function(*args, **kwargs)
            finally:
                self.has_draw = False

        return call

    def stacked(self, tensors: Sequence[Tensor], dim: int = 0, *, shape: Sequence[int]) -> Tensor:
        """Elements as one tensor. Which axes deal them out is read from the comment."""
        if not spmd.is_type_checking():
            return ops.stacked(tensors, dim, shape=shape)
        self.num_calls += 1
        self.told["stacked"] += 1
        with spmd.no_typecheck():
            result = ops.stacked(tensors, dim, shape=shape)
        layouts = claim_of(self.claims, self.line(), 1)
        # Each element lies on one rank of these axes; stacked they are a dim that the axes cut.
        cut = [{axis for axes in shard_axes(x) for axis in axes} for x in tensors]
        stated = set(self.mesh.ordered(layouts[0].cut_axes)) if layouts else set()
        if any(axes - set(self.mesh.outer) != stated for axes in cut):
            found = " and ".join(dict.fromkeys(map(listed, cut)))
            raise Refusal(f"elements that are cut over {found} are stacked over {listed(stated)}")
        spmd.assert_type(result, local_types(tensors[0]))
        spmd.assert_type(
            result, local_types(tensors[0]), self.mesh.type_of(layouts[0]).partition_spec
        )
        return result

    def _following(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        rule = typed_operators.RULES[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not spmd.is_type_checking():
                return function(*args, **kwargs)
            self.num_calls += 1
            self.by_rule[name] += 1
            with telling(name, args, kwargs):
                result = typed_operators.typed_call(function, rule, args, kwargs)
            return self.compared(result)

        return call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not spmd.is_type_checking() or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        self.num_calls += 1
        if (owner := brought_along(func)) is not None:
            self.by_function[getattr(owner, "__name__", str(owner))] += 1
            with telling(name, args, kwargs):
                result = typed_function(owner, func, args, kwargs)
            return self.compared(result)
        if name == "apply" and isinstance(getattr(func, "__self__", None), type):
            self.by_rule[func.__self__.__name__.lstrip("_")] += 1
            tensors = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            return self.of_adapter(handle_torch_function(func, tensors, *args, **kwargs))
        with ProcessDraws() as draws:
            result = self.typed(name, func, args, kwargs)
        if draws.found and not self.has_draw:
            self.check_drawn(name, result)
        self.check_sized(name, axes_of([*args, kwargs]), result)
        return result

    def of_adapter(self, result: Any) -> Any:
        """The result of an adapter, whose placement is that of the comment."""
        stated = self.transitions.get(self.line())
        if isinstance(result, Tensor) and stated is not None and spmd.has_local_type(result):
            for axis, letter in local_types(result).items():
                wanted = LETTERS.get(stated.target)
                # A piece is compared where it is used: its dim is no letter.
                if axis not in stated.axes or wanted is None:
                    continue
                if not is_same(letter, wanted, result):
                    raise Refusal(
                        f"the comment states {stated.target} over {axis}, and spmd_types derives "
                        f"{in_words(result)}"
                    )
        return self.compared(result)

    def typed(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The typed result of a call of torch."""
        # From what has a rule of ours to what the checker knows by itself.
        if func in typed_operators.TORCH:
            with telling(name, args, kwargs):
                result = typed_operators.typed_call(func, typed_operators.TORCH[func], args, kwargs)
            return self.compared(result)
        if func in FACTORIES:
            return self.compared(self.made(func, args, kwargs))
        if name == "expand":
            return self.compared(self.spread(func, args, kwargs))
        try:
            with telling(name, args, kwargs):
                result = func(*args, **kwargs)
        except SpmdTypeError as error:
            return self.told_dims(name, func, args, kwargs, error)
        except Exception as error:
            with spmd.no_typecheck():
                func(*args, **kwargs)  # raises the error of a call that is wrong by itself
            raise Refusal(untyped(name, [*args, *kwargs.values()], error)) from error
        try:
            return self.compared(result)
        except SpmdTypeError as error:
            return self.told_dims(name, func, args, kwargs, error)

    def check_sized(self, name: str, axes: Collection[str], result: Any) -> None:
        """Refuse what is made with the size of a piece, and is whole on each rank."""
        for x in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(x, Tensor) or not spmd.has_local_type(x):
                continue
            cut = {axis for axes in shard_axes(x) for axis in axes}
            if whole := {*self.mesh.ordered(axes)} - cut:
                raise Refusal(
                    f"{name} is told the size of a piece over {listed(whole)}, and makes "
                    f"{in_words(x)}, which is no such piece: it may be longer on one rank than on "
                    "another"
                )

    def check_drawn(self, name: str, result: Any) -> None:
        """Refuse random numbers of this process for what other ranks hold, too."""
        for x in [result] if isinstance(result, Tensor) else result:
            if not isinstance(x, Tensor) or not spmd.has_local_type(x):
                continue
            cut = {*self.mesh.outer, *(axis for axes in shard_axes(x) for axis in axes)}
            whole = sorted(
                axis
                for axis, letter in local_types(x).items()
                if axis not in cut and letter is not spmd.V
            )
            if whole:
                raise Refusal(
                    f"{name} draws from the generator of its process, so the ranks of "
                    f"{', '.join(whole)} draw different numbers for a value that all of them hold; "
                    "self.random.NAME(...) draws the same"
                )

    def made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor. A rank makes its piece of it where the file says that it is cut."""
        layouts = claim_of(self.claims, self.line(), 1)
        # What is drawn like an empty tensor differs between units.
        has_values = func is not torch.empty
        if not layouts or (has_values and not layouts[0].cut_axes):
            return func(*args, **kwargs)
        with spmd.no_typecheck():
            result = func(*args, **kwargs)
        if result.ndim != len(layouts[0].dims):  # the comment is that of another call
            return func(*args, **kwargs)
        if layouts[0].cut_axes:
            self.told[func.__name__] += 1
        spmd.assert_type(result, self.mesh.type_of(layouts[0], of_samples=True))
        return result

    def spread(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The copies of a tensor along dims of size 1, or new ones. A rank makes its piece of them
        where the file says that they are cut.
        """
        (x, *_), line = args, self.line()
        layouts = claim_of(self.claims, line, 1)
        with spmd.no_typecheck():
            result = func(*args, **kwargs)
        more = result.ndim - x.ndim
        typed: Typed = stand_in(local_types(x), [()] * more + shard_axes(x))
        typed = typed_operators.einsum("...->...", typed, linear_in=(0,))
        stated = (
            [self.mesh.ordered(layouts[0].dim_axes(d)) for d in range(result.ndim)]
            if layouts
            else []
        )
        for dim, axes in enumerate(stated):
            made_here = dim < more or x.shape[dim - more] == 1
            for axis in axes:
                if made_here and axis not in shard_axes(typed)[dim]:
                    # A copy that needs no gradient may be I as well as R.
                    src = spmd.R if x.requires_grad else local_types(typed)[axis]
                    typed = moved(typed, "convert", axis, src, spmd.S(dim))
        typed_operators.retyped(result, typed)
        return result

    def told_dims(self, name: str, func: Any, args: Any, kwargs: Any, error: SpmdTypeError) -> Any:
        """The result, with letters as derived and dims as the file states them."""
        if name not in MOVEMENTS:
            raise error
        line = self.line()
        with spmd.local():
            result = func(*args, **kwargs)
        tensors = [result] if isinstance(result, Tensor) else list(result)
        layouts = claim_of(self.claims, line, len(tensors))
        if not layouts:
            raise error
        self.told[name] += 1
        for x, layout in zip(tensors, layouts, strict=True):
            self.tell(x, layout, error)
        return result

    def tell(self, x: Tensor, layout: Layout, error: SpmdTypeError) -> None:
        cut = {a for a, letter in local_types(x).items() if letter is spmd.V} - set(self.mesh.outer)
        stated = set(self.mesh.ordered(layout.cut_axes))
        if cut != stated or len(layout.dims) != x.ndim:
            raise error
        spec = self.mesh.type_of(layout).partition_spec
        spmd.assert_type(x, dict.fromkeys(cut, spmd.V), spec)

    def compared(self, result: Any) -> Any:
        """The result, whose type is that of the comment."""
        tensors = [result] if isinstance(result, Tensor) else result
        if not isinstance(tensors, tuple | list):
            return result
        layouts = claim_of(self.claims, self.line(), len(tensors))
        for x, layout in zip(tensors, layouts, strict=False):
            if isinstance(x, Tensor) and spmd.has_local_type(x):
                self.compare(x, layout)
        name = self.unread.get(self.line())
        if name and any(isinstance(x, Tensor) and needs_gradient(x) for x in tensors):
            raise Refusal(f"{name} is computed and has no effect: no result depends on it")
        return result

    def compare(self, x: Tensor, layout: Layout) -> None:
        if len(layout.dims) != x.ndim:
            return
        stated = [self.mesh.ordered(layout.dim_axes(dim)) for dim in range(x.ndim)]
        derived = [tuple(a for a in axes if a not in self.mesh.outer) for axes in shard_axes(x)]
        same_dims = [set(a) for a in stated] == [set(a) for a in derived]
        letters = self.mesh.type_of(layout, of_samples=True).local_type
        wrong = []
        for axis, letter in local_types(x).items():
            if axis not in letters or axis in self.mesh.outer or letter is letters[axis]:
                continue
            if not is_same(letter, letters[axis], x):
                wrong.append(axis)
        if not same_dims or wrong:
            raise Refusal(f"the comment states {layout}, and spmd_types derives {in_words(x)}")

    def line(self) -> int:
        """The line of the generated file that is being run."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else 0


@contextmanager
def telling(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """A refusal inside the ``with`` block has a note of the operands of its call."""
    try:
        yield
    except SpmdTypeError as error:
        given = [x for x in flatten([*args, kwargs]).values() if isinstance(x, Tensor)]
        if operands := ", ".join(map(in_words, filter(spmd.has_local_type, given))):
            error.add_note(f"operands of {name}: {operands}")
        raise


def is_same(letter: Any, wanted: Any, x: Tensor) -> bool:
    """Whether a tensor's letter is the wanted one. Without a gradient, I and R are the same: a
    whole value on every rank.
    """
    return letter is wanted or (not x.requires_grad and {letter, wanted} == {spmd.I, spmd.R})


def untyped(name: str, arguments: Sequence[Any], error: Exception) -> str:
    """What is said of a call that runs, and whose type ``spmd_types`` cannot derive."""
    operands = [x for x in arguments if isinstance(x, Tensor) and spmd.has_local_type(x)]
    # Of a maximum over a cut dim, say, it says that it knows no Partial but sums.
    of_pieces = "sum-Partial" in str(error)
    why = "each rank has that of its own piece, and nothing puts these together"
    return f"{name} of {', '.join(map(in_words, operands))} has no type: " + (
        why if of_pieces else f"spmd_types has no rule for it ({type(error).__name__}: {error})"
    )
