"""What a mask of attention says, as comparisons of marks: a vector of the queries with one of the
keys (``runtime/marks.py``).

A mask that a model computes is followed back through its conjunctions to comparisons of which one
side has the positions of queries and the other those of keys, and to vectors of one of them:

    (kv <= q) & (kv > q - 4) & padding[:, None, None, :]   three comparisons

Comparisons of what follows from sizes alone (``arange`` and arithmetic) are made here, while
compiling, and become **bands**, plain numbers. So does any other mask that follows from sizes, if
what a query sees of it is an interval of keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, is_static
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.passes.fold import MAX_COMPUTED_BYTES, FoldedValues
from shardwright.runtime.marks import MOST_BANDS, bands_of, intervals, marks_of, runs_of
from shardwright.runtime.visible_keys import Band, Bands

_TURNED = {"eq": "eq", "le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}
"""A comparison with its sides exchanged."""

_DENIED = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "ne": "eq"}

_NOT = frozenset(("bitwise_not", "logical_not"))
_AND = frozenset(("bitwise_and", "logical_and"))
_OR = frozenset(("bitwise_or", "logical_or"))

_PASSED_ON = frozenset(("expand", "to", "contiguous", "clone", "detach"))
"""Operators whose result says what their operand does, as far as dims are counted from the last."""

_NEW_DIMS = frozenset(("unsqueeze", "getitem", "view", "reshape"))

Atom = tuple[Arg, str, Arg]
"""A mark of the queries, how that of a key is compared with it, and the mark of the key."""


@dataclass(frozen=True, slots=True)
class MaskMarks:
    """What a mask says. ``bands``: what follows from sizes; ``None`` if nothing does."""

    atoms: tuple[Atom, ...]
    bands: Bands | None
    sees_itself: bool = False
    """Whether every query is known to see the key at its own position."""

    @property
    def arguments(self) -> Mapping[str, Arg]:
        """Arguments of ``attention_where``."""
        bands = None
        if self.bands is not None:
            bands = tuple(
                (b.start, b.stop, b.low, b.end, b.low_step, b.end_step) for b in self.bands
            )
        return {
            "query_marks": tuple(atom[0] for atom in self.atoms),
            "key_marks": tuple(atom[2] for atom in self.atoms),
            "comparisons": tuple(atom[1] for atom in self.atoms),
            "bands": bands,
        }

    def is_causal(self, lengths: tuple[Size, Size]) -> bool:
        """Whether a query sees the keys up to its own, and nothing else is known."""
        queries, keys = lengths
        return not self.atoms and queries == keys and self.bands == (Band(0, keys, 0, 1, 0, 1),)

    @property
    def all_see(self) -> bool:
        """Whether every query is known to see a key."""
        if self.sees_itself:
            return True
        if self.atoms or self.bands is None:
            return not self.atoms
        return self.bands_have_all

    @property
    def bands_have_all(self) -> bool:
        """Whether every query is in a band."""
        bands = self.bands or ()
        return bool(bands) and sum(band.stop - band.start for band in bands) == bands[-1].stop


@dataclass
class MaskReader:
    """Reads the masks of one graph, each once."""

    graph: IRGraph
    _read: dict[tuple[Any, ...], MaskMarks | None] = field(default_factory=dict)

    def of(self, mask: IRValue, lengths: tuple[Size, Size]) -> MaskMarks | None:
        """What a boolean mask ``[samples or 1, 1, queries or 1, keys or 1]``, or with fewer dims in
        front, says of so many queries and keys; ``None`` if that is no comparison of marks.
        """
        question = (mask.name, *lengths)
        if question not in self._read:
            self._read[question] = self._marks(mask, lengths)
        return self._read[question]

    def made_by(self, value: Arg, *targets: str) -> IROp | None:
        """The operator of one of these kinds that makes a value, if one does."""
        if not isinstance(value, IRValue) or value.name not in self._producers:
            return None
        op = self._producers[value.name][0]
        return op if op.target in targets else None

    def maker_of(self, value: IRValue) -> IROp | None:
        """The operator that makes a value."""
        found = self._producers.get(value.name)
        return None if found is None else found[0]

    def number(self, value: Arg) -> float | None:
        """The one number that a value holds, if that is known while compiling."""
        if not isinstance(value, IRValue):
            return value if isinstance(value, int | float) else None
        if value.ndim or not self._folded.known(value):
            return None
        found = self._folded.of(value)
        return None if found is None else float(found)

    @cached_property
    def _producers(self) -> Mapping[str, tuple[IROp, int]]:
        return self.graph.producers()

    @cached_property
    def _folded(self) -> FoldedValues:
        return FoldedValues(self.graph)

    def _marks(self, mask: IRValue, lengths: tuple[Size, Size]) -> MaskMarks | None:
        # With one query or one key, rows and columns of the mask cannot be told apart.
        if not 2 <= mask.ndim <= 4 or 1 in lengths:
            return None
        found: list[Atom] = []
        bands: list[Bands] = []
        if not self._collect(mask, found, bands):
            return None
        # What follows from sizes alone (causal, windows) is known while compiling. What depends on
        # values (padding, documents) is compared at run time.
        by_size = [atom for atom in found if self._is_by_size(atom)]
        by_value = [atom for atom in found if atom not in by_size]
        made = self._bands(by_size, bands, lengths) if by_size or bands else None
        if made is None and bands:
            return None
        atoms = tuple(found if made is None else by_value)
        return MaskMarks(atoms, made, self._sees_itself(atoms, made, lengths))

    def _sees_itself(
        self, atoms: tuple[Atom, ...], bands: Bands | None, lengths: tuple[Size, Size]
    ) -> bool:
        """Whether every query is known to see the key at its own position."""
        if lengths[0] != lengths[1]:
            return False
        # A band's ends move evenly: what holds of its first and last query holds of all.
        for band in bands or ():
            for query in (band.start, band.stop - 1):
                step = query - band.start
                low, end = band.low + step * band.low_step, band.end + step * band.end_step
                if not low <= query < end:
                    return False
        if bands is not None and sum(b.stop - b.start for b in bands) != lengths[0]:
            return False
        # A document is its own, and a position is not behind itself.
        return all(
            name in ("eq", "le", "ge") and self._are_of_one(left, right, lengths[0])
            for left, name, right in atoms
        )

    def _are_of_one(self, left: Arg, right: Arg, length: Size) -> bool:
        """Whether a mark of queries and one of keys are the same numbers, by their positions."""
        if not (isinstance(left, IRValue) and isinstance(right, IRValue)):
            return False
        if min(left.ndim, right.ndim) < 2 or left.shape[-2] != length or right.shape[-1] != length:
            return False
        return self._source(left) == self._source(right)

    def _source(self, mark: IRValue) -> tuple[IRValue, tuple[Size, ...]]:
        """What a mark is a view of, with dims of size 1 more or less; and its other dims."""
        kept = _long(mark)
        while (op := self.made_by(mark, *_NEW_DIMS, *_PASSED_ON)) is not None:
            if len(op.operands) != 1 or op.operands[0].dtype != mark.dtype:
                break
            if _long(op.operands[0]) != kept:
                break
            mark = op.operands[0]
        return mark, kept

    def _bands(
        self, atoms: list[Atom], bands: list[Bands], lengths: tuple[Size, Size]
    ) -> Bands | None:
        """What all of these let a query see, if that is an interval of keys and few bands."""
        if not all(map(is_static, lengths)):
            return None
        sizes = (int(lengths[0]), int(lengths[1]))
        queries, names, keys = (list(part) for part in zip(*atoms, strict=True)) if atoms else (
            [], [], []
        )  # fmt: skip
        cpu = torch.device("cpu")
        parts = [
            marks_of([self._number(x) for x in queries], [self._number(x) for x in keys], names,
                     None, sizes, cpu),
            *(marks_of((), (), (), some, sizes, cpu) for some in bands),
        ]  # fmt: skip
        marks = parts[0]
        for part in parts[1:]:
            marks = marks.joined(part)
        low, end, exact = intervals(marks)
        made = bands_of(low[0], end[0])
        return made if bool(exact.all()) and len(made) <= MOST_BANDS else None

    def _number(self, mark: Arg) -> torch.Tensor | int:
        if not isinstance(mark, IRValue):
            return int(mark)
        found = self._folded.of(mark)
        assert found is not None, f"{mark.name} is not known while compiling"
        return found

    def _is_by_size(self, atom: Atom) -> bool:
        values = [mark for mark in (atom[0], atom[2]) if isinstance(mark, IRValue)]
        return all(math.prod(v.shape[:-2]) == 1 and self._folded.known(v) for v in values)

    def _collect(
        self, value: Arg, found: list[Atom], bands: list[Bands], *, denied: bool = False
    ) -> bool:
        """Add what a part of a mask says to ``found`` or ``bands``; false if it cannot be said.
        ``denied``: the part tells what is hidden.
        """
        if not isinstance(value, IRValue):
            return value is not denied and isinstance(value, bool)
        if value.dtype != torch.bool:
            return False
        op = self._producers[value.name][0] if value.name in self._producers else None
        if op is not None and op.target in _NOT and op.operands[0].dtype == torch.bool:
            return self._collect(op.operands[0], found, bands, denied=not denied)
        of_queries, of_keys = _positions(value)
        # Truth along queries alone or keys alone, as padding has it, is a mark by itself.
        if not (of_queries and of_keys):
            if op is not None and op.target == "ones" and not denied:
                return True
            if not _is_mark(value):
                return False
            truth = not denied
            found.append((value, "eq", truth) if of_queries else (truth, "eq", value))
            return True
        if op is None:
            return self._by_size(value, bands, denied)
        # What is hidden by one or the other is seen where neither hides it.
        if op.target in (_OR if denied else _AND):
            before = len(found), len(bands)
            sides = (op.arg("input"), op.arg("other"))
            if all(self._collect(side, found, bands, denied=denied) for side in sides):
                return True
            # Sides of which one says nothing may follow from sizes together.
            del found[before[0] :], bands[before[1] :]
            return self._by_size(value, bands, denied)
        # Casts, copies and new dims leave truth as it is: look behind them.
        (operand, *_) = op.operands
        is_same = op.target in _NEW_DIMS and operand.ndim == 2
        is_same = is_same and operand.shape == value.shape[-2:]
        if operand.dtype == torch.bool and (op.target in _PASSED_ON or is_same):
            return self._collect(operand, found, bands, denied=denied)
        chosen = self.made_by(operand, "where") if op.target == "to" else None
        if chosen is not None:
            # Of ``where(seen, 0, least)`` as booleans, and the like.
            kept, other = (self.number(chosen.arg(name)) for name in ("input", "other"))
            if kept is not None and other is not None and (kept == 0) != (other == 0):
                seen = chosen.arg("condition")
                return self._collect(seen, found, bands, denied=denied != (kept == 0))
        atom = self._comparison(op, denied)
        if atom is not None:
            found.append(atom)
            return True
        return self._by_size(value, bands, denied)

    @staticmethod
    def _comparison(op: IROp, denied: bool) -> Atom | None:
        name = _DENIED.get(op.target, "") if denied else op.target
        if name not in _TURNED:
            return None
        left, right = op.arg("input"), op.arg("other")
        if not (_is_mark(left) and _is_mark(right)):
            return None
        # Always as query marks against key marks: with the sides changed, ``<`` becomes ``>``.
        if not _positions(left)[0] and not _positions(right)[1]:
            return right, name, left
        if not _positions(left)[1] and not _positions(right)[0]:
            return left, _TURNED[name], right
        return None

    def _by_size(self, value: IRValue, bands: list[Bands], denied: bool) -> bool:
        """Whether a mask follows from sizes and is an interval for each query; then its bands."""
        if math.prod(value.shape[:-2]) != 1 or not all(map(is_static, value.shape)):
            return False
        if math.prod(value.shape) > MAX_COMPUTED_BYTES or not self._folded.known(value):
            return False
        mask = self._folded.of(value)
        assert mask is not None
        if denied:
            mask = mask.logical_not()
        # By query: the first key it sees and the one behind the last; ``exact``: it sees all
        # between.
        low, end, exact = runs_of(mask.view(mask.shape[-2:]))
        if not bool(exact.all()):
            return False
        bands.append(bands_of(low.squeeze(1), end.squeeze(1)))
        return True


def _long(value: IRValue) -> tuple[Size, ...]:
    return tuple(size for size in value.shape if size != 1)


def _positions(value: Arg) -> tuple[bool, bool]:
    """Whether a value has the positions of queries, and those of keys."""
    if not isinstance(value, IRValue):
        return False, False
    shape = (1, 1, *value.shape)
    return shape[-2] != 1, shape[-1] != 1


def _is_mark(value: Arg) -> bool:
    """Whether a value may be compared as a mark: an integer, or integers that all heads share."""
    if not isinstance(value, IRValue):
        return isinstance(value, int)
    dtype = value.dtype
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    return is_whole and value.ndim <= 4 and (value.ndim < 3 or value.shape[-3] == 1)
