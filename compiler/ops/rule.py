"""What the planner must know of an operator: its factors, where they occur, and what may be split.

A rule speaks of one operator call with known shapes. Its **factors** are the named dims of an
einsum-like annotation:

    linear     ``b s k+, n k+, n -> b s n``
    attention  ``b h q d^, b h k^ d^, b h k^ e -> b h q e``

From the factors follow all strategies of the operator along one mesh axis (:func:`strategies` in
``strategy.py``):

1. split a factor: operands that have it are ``S`` there, the others ``G``; results that have it are
   ``S``, those without it are ``P``. When a summed factor is split, an operand listed as additive
   (the bias) is ``P``, not ``G``.
2. all ``R``, or all ``G``.
3. one linear set all ``P``, the other operands ``G``, the results ``P``.
4. exchange two factors: operands ``S`` in the one, results ``S`` in the other. An operand that has
   the second factor only is ``S`` in that, one without both is ``G``. The few operators that can do
   so communicate inside.

Over several axes an operator has a strategy for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from weakref import WeakValueDictionary

from shardwright.compiler.ir.op import Arg, IROp
from shardwright.compiler.ir.size import Size, num_held, product
from shardwright.runtime.layout import Density

KERNEL_ATTENTION = "scaled_dot_product_attention"
"""torch's operator of attention."""

ATTENTION = (KERNEL_ATTENTION, "attention_where")
"""The operators that are attention: query, key and value are their first operands."""


class FactorKind(Enum):
    """How far a factor may be split."""

    FREE = ""  # every result has it
    SUMMED = "+"  # some result lacks it, and is literally the sum of the results over the pieces
    FROZEN = "^"  # must be whole


@dataclass(frozen=True, slots=True)
class Factor:
    """A named dim of an operator. Several ``segments`` mean that it is their concatenation, cut
    segment by segment.
    """

    name: str
    segments: tuple[Size, ...]
    kind: FactorKind = FactorKind.FREE

    @property
    def size(self) -> Size:
        """The sum of the segments."""
        return sum(self.segments) if len(self.segments) > 1 else self.segments[0]


@dataclass(frozen=True, slots=True)
class FactorRef:
    """One occurrence of a factor in a dim. ``segment`` names a single segment of it (a slice that
    takes just that one). ``element`` names a single index of it: the dim has size 1, and is cut as
    this index of the factor is (one of the tensors that a stack makes).
    """

    factor: str
    segment: int | None = None
    element: int | None = None

    def __str__(self) -> str:
        if self.element is not None:
            return f"{self.factor}@{self.element}"
        return self.factor if self.segment is None else f"{self.factor}#{self.segment}"


DimRefs = tuple[FactorRef, ...]
"""A dim as a product of factors, outermost first. Empty: size 1."""

TensorRefs = tuple[DimRefs, ...]
"""The dims of a tensor."""


@dataclass(frozen=True, slots=True)
class ParallelFactor:
    """How the parallel form of an operator treats one factor split over an axis.

    ``operands`` and ``results`` override the placement (``'S'``, ``'R'``, ``'G'``, ``'P'``) that
    the general law would give; ``S`` is where the factor occurs. ``None`` in ``results`` or
    ``operands`` as a whole: the general law holds.
    ``anywhere``: it does not matter where in the factor the pieces lie (the form of a mean only
    counts), so that all pieces of a refined factor keep the form, not just the outermost.
    ``empty``: the form runs on a rank without a piece, though the operator would not.
    """

    operands: tuple[str, ...] | None = None
    results: tuple[str, ...] | None = None
    anywhere: bool = False
    empty: bool = False


@dataclass(frozen=True, slots=True)
class ParallelForm:
    """A runtime function that computes the operator when some of ``factors`` are split.

    ``target`` is a function of ``shardwright.runtime.ops``; it takes the operator's arguments and,
    for each factor in ``keywords``, a keyword ``<keyword>=`` with the tuple of axis groups (major
    to minor) that split it (left out if unsplit; factors that share a keyword add up).
    ``local_args`` gives further keyword arguments (global sizes, offsets). A factor of kind FROZEN
    may be split if it is named here; a factor without communication needs (a mean's) may be named
    only to change the target. ``knows_runs``: the function is told where in a factor its pieces
    lie, so that they may be several runs, as an axis in zigzag deals them.
    """

    target: str
    factors: Mapping[str, ParallelFactor]
    keywords: Mapping[str, str]
    local_args: Callable[[IROp, LocalSizes], Mapping[str, Arg]] | None = None
    knows_runs: bool = False


@dataclass(frozen=True)
class Exchanged:
    """An exchange along ``axis``: operands are cut in factor ``source``, results in ``target``."""

    axis: str
    source: str
    target: str


@dataclass(frozen=True)
class LocalSizes:
    """What one rank sees of a rule's factors: handed to the functions that localise arguments.

    ``segments`` maps each factor to the local sizes of its segments, ``offsets`` to the global
    start of the local piece of its first segment, ``axes`` to the axes that split it, ``full`` to
    its whole size. ``exchanges``: the factors that change places along axes, if any do, in mesh
    order; ``uncut`` are then the sizes without the cuts along these axes.
    """

    segments: Mapping[str, tuple[Size, ...]]
    offsets: Mapping[str, Size]
    axes: Mapping[str, tuple[str, ...]]
    full: Mapping[str, Size]
    exchanges: tuple[Exchanged, ...] = ()
    uncut: LocalSizes | None = None

    def ref_size(self, ref: FactorRef) -> Size:
        """The local size of a factor, or of one segment of it."""
        sizes = self.segments[ref.factor]
        if ref.element is not None:
            axes = self.axes.get(ref.factor, ())
            return num_held((ref.element, self.full[ref.factor]), axes) if axes else 1
        if ref.segment is not None:
            return sizes[ref.segment]
        return sum(sizes) if len(sizes) > 1 else sizes[0]

    def dim_size(self, refs: DimRefs) -> Size:
        """The local size of a dim."""
        return product(self.ref_size(ref) for ref in refs)

    def shape(self, tensor: TensorRefs) -> tuple[Size, ...]:
        """The local shape of a tensor."""
        return tuple(self.dim_size(refs) for refs in tensor)

    def is_split(self, *factors: str) -> bool:
        """Whether some axis splits one of the factors."""
        return any(self.axes.get(factor) for factor in factors)


FactorPair = tuple[str, str]
"""The two factors of an exchange, as a strategy names them."""


class ExchangeKind(Enum):
    """What ranks send each other in an exchange."""

    TOKENS = "tokens"
    """Each row goes to the rank that holds its part of the target: tokens to their experts."""
    RING = "ring"
    """Blocks of the source go round: keys and values, past the queries."""
    EDGES = "edges"
    """Neighbours in a dim that changes its length send what the other reads beyond its cut."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two factors that change places along an axis: operands are cut in ``source``, results in
    ``target``. All that is particular to one exchange is said here.

    ``follows_target``: operand positions that are cut in the target, though they have the source.
    ``is_one_dim``: both factors are one dim of the model, before the operator and after it.
    """

    source: str
    target: str
    kind: ExchangeKind
    follows_target: tuple[int, ...] = ()
    is_one_dim: bool = False

    @property
    def pair(self) -> FactorPair:
        """The two factors."""
        return self.source, self.target


Densities = tuple[tuple[Density | None, ...], tuple[Density | None, ...]]
"""Which rows are stored of every operand and every result; ``None`` where all are."""

Localise = Callable[[IROp, "OpRule", LocalSizes], Mapping[str, Arg]]
"""Gives the arguments that differ on a rank: view sizes, split sizes, slice bounds, ``groups``."""


@dataclass(frozen=True)
class OpRule:
    """The rule of one operator call.

    ``operands`` / ``results``: one :data:`TensorRefs` each, in the order of ``op.operands`` /
    ``op.results``.
    ``additive``: operand positions that enter additively when a summed factor they lack is split.
    ``linear_sets``: sets of operand positions in which the operator is jointly linear, all others
    fixed.
    ``grad_linear``: the backward is a derivative, so all-``G`` is allowed (not for an undeclared
    autograd Function).
    ``localise``: arguments that differ on a rank. ``parallel``: a runtime function for factors that
    need communication (or a global size) inside the operator. ``random``: draws random numbers.
    ``updates``: operand positions changed in place (running statistics). ``nonempty``: the function
    refuses empty tensors, so no rank may be left without a piece.
    ``exchanges``: what the parallel form may exchange along an axis, so that operands are cut in
    one factor and results in another.
    ``densities``: of operands and of results, which rows are stored, where not all are.
    """

    annotation: str
    factors: tuple[Factor, ...]
    operands: tuple[TensorRefs, ...]
    results: tuple[TensorRefs, ...]
    additive: tuple[int, ...] = ()
    linear_sets: tuple[frozenset[int], ...] = ()
    grad_linear: bool = True
    localise: Localise | None = None
    parallel: ParallelForm | None = None
    random: bool = False
    updates: tuple[int, ...] = ()
    nonempty: bool = False
    exchanges: tuple[Exchange, ...] = ()
    densities: Densities | None = None
    known: bool = True  # False: no rule was found, the operator is replicated

    def factor(self, name: str) -> Factor:
        """The factor of that name."""
        return self._by_name[name]

    def with_imbalance(self, imbalance: float) -> OpRule:
        """The rule with another assumption of how unevenly rows are chosen; the same where all rows
        are stored.
        """
        if self.densities is None:
            return self
        # Of operands and of results; ``None`` stands for a tensor of which all rows are there.
        operands, results = (
            tuple(stored and replace(stored, imbalance=imbalance) for stored in side)
            for side in self.densities
        )
        return replace(self, densities=(operands, results))

    @cached_property
    def _by_name(self) -> dict[str, Factor]:
        return {factor.name: factor for factor in self.factors}

    @cached_property
    def form(self) -> RuleForm:
        """One object for all rules from which the same strategies follow, so that it can be a
        key.
        """
        form = self.parallel
        parallel = form and (
            form.target,
            tuple(form.factors.items()),
            tuple(form.keywords.items()),
            form.knows_runs,
        )
        key = (
            *(self.factors, self.operands, self.results, self.additive, self.linear_sets),
            *(self.grad_linear, self.nonempty, parallel, self.exchanges, self.densities),
        )
        # The cache of strategies is by form. The rules of a thousand layers share a few forms.
        return _FORMS.setdefault(key, RuleForm(self))

    def splittable(self, name: str, num_pieces: int = 1) -> bool:
        """Whether the factor may be split over mesh axes, ``num_pieces`` in all."""
        # All layers share a rule, and ask it the same.
        asked = name, num_pieces
        if asked not in self._splittable:
            self._splittable[asked] = self._may_split(name, num_pieces)
        return self._splittable[asked]

    @cached_property
    def _splittable(self) -> dict[tuple[str, int], bool]:
        return {}

    def _may_split(self, name: str, num_pieces: int) -> bool:
        factor = self.factor(name)
        form = self.parallel.factors.get(name) if self.parallel else None
        fills_all = (form is not None and form.empty) or self._reaches_all(factor, num_pieces)
        if self.nonempty and not fills_all:
            return False
        return form is not None or factor.kind is not FactorKind.FROZEN

    def frozen(self, name: str) -> bool:
        """Whether the factor must be whole, but for what a parallel form does."""
        return self.factor(name).kind is FactorKind.FROZEN

    def exchange_of(self, pair: FactorPair) -> Exchange | None:
        """The exchange of these two factors, if the rule has it."""
        return next((exchange for exchange in self.exchanges if exchange.pair == pair), None)

    def _reaches_all(self, factor: Factor, num_pieces: int) -> bool:
        """Whether each of so many ranks gets a piece: of every segment if a tensor has a single
        one, else of some segment. The last rank gets least, as segments are dealt one by one.
        """
        sizes = [size for size in factor.segments if isinstance(size, int)]
        if len(sizes) < len(factor.segments):
            return True  # of dynamic sizes nothing is known yet
        pieces = [size // num_pieces for size in sizes]
        return min(pieces) > 0 if factor.name in self._apart else sum(pieces) > 0

    @cached_property
    def _apart(self) -> frozenset[str]:
        """The factors of which some tensor has a single segment."""
        tensors = (*self.operands, *self.results)
        refs = [ref for tensor in tensors for dim in tensor for ref in dim]
        return frozenset(ref.factor for ref in refs if ref.segment is not None)


@dataclass(frozen=True, eq=False)
class RuleForm:
    """What strategies follow from: a rule, one for all that say the same. Compared by identity."""

    rule: OpRule


_FORMS: WeakValueDictionary[Hashable, RuleForm] = WeakValueDictionary()
"""The forms of the rules that are in use."""
