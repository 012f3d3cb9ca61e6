"""Find the dims of the whole model by unifying the factors of all operators, and refine the rules
accordingly.

A dim is a list of **nodes**, outermost first. A value is produced with one list and used with
another, and the two lists are walked together. Nodes of equal size become one. Of two unequal nodes
the larger is refined into a product, outermost first. A node may be a **concatenation** of nodes
(fused query, key and value). When all its parts end in the same inner node, it becomes
(concatenation of the outer parts) x inner. Nodes of size 1 carry nothing. Dims become one because a
value flows from one to the other, never because they have equal sizes.

Afterwards every factor that was refined is replaced in its rule by the product of its pieces, so
that layouts of producers and consumers are written in the same atoms.

Example: a linear layer makes ``[8, 768]``, a view reads it as ``[8, 12, 64]``. Walking (768) and
(12, 64) together refines the 768 into 12 x 64. So the layer's rule gets two factors in the place of
one, and splitting its first factor splits whole heads.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardwright.compiler.ir.dims import DimClass, ModelDims
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import Size, divides, product, quotient
from shardwright.compiler.ops.rule import (
    DimRefs,
    Exchange,
    ExchangeKind,
    Factor,
    FactorKind,
    FactorRef,
    OpRule,
    ParallelForm,
    TensorRefs,
)
from shardwright.compiler.ops.rule_builder import annotation_text
from shardwright.compiler.passes.dim_names import name_classes


@dataclass(eq=False, slots=True)
class Node:
    """One dim, or a product (``kids``) or a concatenation (``parts``) of dims. ``parent``: the node
    that this one was found to be.
    """

    size: Size
    parent: Node | None = None
    kids: list[Node] = field(default_factory=list)
    parts: list[Node] = field(default_factory=list)

    def root(self) -> Node:
        """The node that this one was found to be in the end: itself, or another one."""
        node = self
        while node.parent is not None:
            node = node.parent
        # What was walked points to the end from now on, so that no way stays long.
        walked = self
        while walked is not node:
            assert walked.parent is not None
            walked.parent, walked = node, walked.parent
        return node


def flatten(nodes: Iterable[Node]) -> list[Node]:
    """The nodes that a list of dims is the product of, outermost first, without those of size 1; a
    concatenation counts as one.
    """
    found: list[Node] = []
    for node in nodes:
        if node.parent is not None:
            node = node.root()
        if node.kids:
            found += flatten(node.kids)
        elif node.size != 1:
            found.append(node)
    return found


class Unifier:
    """The union-find forest over all factors of a graph."""

    def __init__(self) -> None:
        self.conflicts: list[str] = []
        self.concatenations: list[Node] = []

    def node(self, segments: tuple[Size, ...]) -> Node:
        """A fresh node; several segments make a concatenation."""
        if len(segments) == 1:
            return Node(segments[0])
        node = Node(sum(segments), parts=[Node(size) for size in segments])
        self.concatenations.append(node)
        return node

    def unify(self, left: list[Node], right: list[Node], where: str) -> None:
        """Make two descriptions of one dim the same, refining where sizes differ."""
        if len(left) == len(right) == 1:  # by far the most: two nodes that are whole
            x, y = left[0].root(), right[0].root()
            if x is y or (x.size == 1 == y.size):
                return
            if x.size == y.size and not (x.kids or y.kids) and self._merge(x, y):
                return
        a, b = flatten(left), flatten(right)
        # Invariant: what stands before ``a`` and ``b`` is the same dims on both sides. Each round
        # makes their first nodes one, or refines the larger of them, and tries again.
        while a and b:
            x, y = a[0].root(), b[0].root()
            if x.kids or y.kids:  # a node may occur twice, and was refined the first time
                a, b = flatten(a), flatten(b)
                continue
            if x is not y and x.size == y.size:
                if not self._merge(x, y):
                    self.conflicts.append(
                        f"{where}: {x.size} is cut as {_sizes(x)} and as {_sizes(y)}"
                    )
                    return
            elif x is not y:
                larger, smaller = (x, y) if divides(y.size, x.size) else (y, x)
                # A concatenation cannot be refined, and 12 and 64 have no product in common.
                if larger.parts or not divides(smaller.size, larger.size):
                    self.conflicts.append(
                        f"{where}: {[n.size for n in a]} against {[n.size for n in b]}"
                    )
                    return
                larger.kids = [Node(smaller.size), Node(quotient(larger.size, smaller.size))]
                continue
            a, b = a[1:], b[1:]

    def _merge(self, x: Node, y: Node) -> bool:
        """Let two nodes of one size be one; false if they are different concatenations."""
        if x.parts and y.parts:
            if [p.size for p in x.parts] != [p.size for p in y.parts]:
                return False
            for p, q in zip(x.parts, y.parts, strict=True):
                self.unify([p], [q], "parts")
        # The concatenation stays, as it says more than a plain node.
        if y.parts:
            x, y = y, x
        y.parent = x
        return True

    def factor_out(self) -> None:
        """Turn concatenations whose parts all end in one inner dim into (concatenation of outer
        parts) x inner. A part may be that very dim: of queries beside keys and values,
        heads + 2 x heads becomes (1 + 2) x heads.
        """
        # Again and again: one inner dim factored out may bring another concatenation's to its end.
        changed = True
        while changed:
            changed = False
            for node in list(self.concatenations):
                if node.root() is node and not node.kids and self._factor_out(node):
                    changed = True

    def _factor_out(self, node: Node) -> bool:
        """Factor the inner dim out of one concatenation; false if its parts have none in common."""
        parts = [flatten([part]) for part in node.parts]
        if (
            any(not part or part[-1].parts for part in parts)
            or len({part[-1].size for part in parts}) != 1
        ):
            return False
        # Parts that are products of equal inner size are taken to have one inner dim (head_dim of
        # query, key and value). A part that is a plain node must be that very node.
        lengths, is_one = set(map(len, parts)), all(part[-1] is parts[0][-1] for part in parts)
        if max(lengths) < 2 or (min(lengths) < 2 and not is_one):
            return False
        for part in parts[1:]:
            self.unify([parts[0][-1]], [part[-1]], "inner dim of a concatenation")
        outer_parts = []
        for part in parts:
            outer = part[:-1]
            outer_parts.append(
                outer[0] if len(outer) == 1 else Node(product(n.size for n in outer), kids=outer)
            )
        outer_node = Node(sum(p.size for p in outer_parts), parts=outer_parts)
        self.concatenations.append(outer_node)
        node.kids = [outer_node, parts[0][-1]]
        return True


def _segments(node: Node) -> tuple[Size, ...]:
    """The sizes of the parts of a concatenation; of any other node its own."""
    return tuple([part.size for part in node.parts]) if node.parts else (node.size,)


def _sizes(node: Node) -> str:
    return "+".join(str(part.size) for part in node.parts) or str(node.size)


def infer_dims(graph: IRGraph) -> IRGraph:
    """The graph with refined rules and ``dims`` filled in."""
    unifier = Unifier()
    # A node for each factor of each operator, and for each value the nodes of its dims.
    factor_nodes: dict[tuple[str, str], Node] = {}
    value_nodes: dict[str, list[list[Node]]] = {
        v.name: [[Node(size)] for size in v.shape] for v in graph.sources
    }
    # Forward through the graph: the nodes of a value, as its producer made it, meet those of a
    # reader.
    read: list[IROp] = []
    for op in graph.ops:
        rule = _rule(op)
        if op.operands and (taken_apart := _taken_apart(op, rule, value_nodes)) is not None:
            op, rule = op.changed(rule=taken_apart), taken_apart
        read.append(op)
        for factor in rule.factors:
            factor_nodes[op.name, factor.name] = unifier.node(factor.segments)
        for value, refs in zip(op.operands, rule.operands, strict=True):
            for dim, (nodes, dim_refs) in enumerate(
                zip(value_nodes[value.name], refs, strict=True)
            ):
                unifier.unify(
                    nodes,
                    _nodes(op, dim_refs, factor_nodes),
                    f"{op.name}, dim {dim} of {value.name}",
                )
        # The rule says of which factors each dim of a result is the product.
        for value, refs in zip(op.results, rule.results, strict=True):
            value_nodes[value.name] = [_nodes(op, dim_refs, factor_nodes) for dim_refs in refs]
    graph = graph.with_ops(tuple(read))
    unifier.factor_out()
    _tie_loop_ends(graph, unifier, value_nodes)

    # The roots that are left are the dims of the model; they are numbered as they are met.
    indices: dict[int, int] = {}
    roots: list[Node] = []

    def index_of(node: Node) -> int:
        if id(node) not in indices:
            indices[id(node)] = len(roots)
            roots.append(node)
        return indices[id(node)]

    # Most dims are one node, and most nodes are dims of many operators and values.
    leaves: dict[int, tuple[Node, ...]] = {}

    def pieces_of(node: Node) -> tuple[Node, ...]:
        """The leaves of one node."""
        root = node.root()
        if id(root) not in leaves:
            leaves[id(root)] = tuple(flatten((root,)))
        return leaves[id(root)]

    # A factor becomes the product of the leaves of its node, and each leaf is a dim of the model.
    ops, factors = [], {}
    # Calls that share a rule share the refined one, where their factors have the same pieces.
    known: dict[Hashable, tuple[OpRule, list[list[str]]]] = {}
    for op in graph.ops:
        rule = _rule(op)
        pieces = [pieces_of(factor_nodes[op.name, factor.name]) for factor in rule.factors]
        key = id(rule), tuple([tuple(map(_segments, nodes)) for nodes in pieces])
        if key not in known:
            by_name = {f.name: list(nodes) for f, nodes in zip(rule.factors, pieces, strict=True)}
            names = [piece_names(factor, by_name[factor.name]) for factor in rule.factors]
            known[key] = refine(rule, by_name), names
        refined_rule, names = known[key]
        ops.append(op.changed(rule=refined_rule))
        for piece_names_, leaves_ in zip(names, pieces, strict=True):
            for name, node in zip(piece_names_, leaves_, strict=False):
                factors[op.name, name] = index_of(node)
    # Values are told by numbers of dims: ``[8, 12 x 64]`` may be ``((0,), (1, 2))``.
    values: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, dims_nodes in value_nodes.items():
        values[name] = tuple(
            [
                tuple([index_of(leaf) for node in nodes for leaf in pieces_of(node)])
                for nodes in dims_nodes
            ]
        )
    # Where parameters have a dim, such as ``h.0.mlp.weight:1``, which may give it its name.
    parameters: dict[int, list[str]] = {}
    for value in graph.parameters:
        for dim, indices_ in enumerate(values[value.name]):
            for index in indices_:
                parameters.setdefault(index, []).append(f"{value.fqn}:{dim}")
    classes = []
    for i, node in enumerate(roots):
        # A concatenation has the sizes of its parts, as each of them is cut by itself.
        segments = _segments(node)
        classes.append(DimClass(i, f"dim{i}", segments, tuple(parameters.get(i, ()))))
    dims = ModelDims(tuple(classes), factors, values, tuple(unifier.conflicts))
    refined = graph.with_ops(tuple(ops))
    return replace(refined, dims=name_classes(refined, dims))


def warn_of_lost_batch(graph: IRGraph) -> None:
    """Warn if every input has one row. Dims of size 1 have no class, so no plan can split the
    batch.
    """
    rows = [value.shape[0] for value in graph.inputs if value.ndim]
    if rows and all(size == 1 for size in rows):
        warnings.warn(
            f"{graph.name} was traced with one row: no plan can split its batch\n"
            "  why:   the inputs have shapes "
            f"{[tuple(value.shape) for value in graph.inputs]}, and dims of size 1 are told "
            "apart by nothing\n"
            "  try:   dummy arguments with a batch of at least 2",
            stacklevel=2,
        )


def _tie_loop_ends(
    graph: IRGraph, unifier: Unifier, value_nodes: dict[str, list[list[Node]]]
) -> None:
    """Unify the dims of every buffer with those of its new value."""
    for before, after in graph.buffer_updates:
        for left, right in zip(value_nodes[before.name], value_nodes[after.name], strict=True):
            unifier.unify(left, right, f"update of {before.fqn}")


def _taken_apart(
    op: IROp, rule: OpRule, value_nodes: Mapping[str, list[list[Node]]]
) -> OpRule | None:
    """The rule of an operator that takes a concatenation apart into its parts, all of one size;
    ``None`` for any other operator.

    Rules of operators that cut a dim into equal pieces say ``(2^ a), ... -> a, a``. If the dim is a
    concatenation of just these pieces, as in ``torch.cat((x, y)).split(len(x))``, they are its
    segments: ``a[4|4] -> a#0, a#1``. So each piece keeps the dim that it came from, and may be cut
    along it.
    """
    source = rule.operands[0]
    for dim, refs in enumerate(source):
        if len(refs) != 2:  # most dims
            continue
        parts = _parts(value_nodes[op.operands[0].name][dim])
        if len(parts) < 2 or len(parts) != len(rule.results):
            continue
        count, piece = refs
        size = rule.factor(piece.factor).size
        are_pieces = all(
            result == (*source[:dim], (piece,), *source[dim + 1 :]) for result in rule.results
        )
        if are_pieces and rule.frozen(count.factor) and all(part.size == size for part in parts):
            whole = Factor(piece.factor, (size,) * len(parts), rule.factor(piece.factor).kind)
            others = [f for f in rule.factors if f.name not in (count.factor, piece.factor)]
            segments = (replace(piece, segment=index) for index in range(len(parts)))
            results = tuple((*source[:dim], (s,), *source[dim + 1 :]) for s in segments)
            factors = (whole, *others)
            operands = ((*source[:dim], (piece,), *source[dim + 1 :]), *rule.operands[1:])
            text = annotation_text(factors, operands, results)
            return replace(
                rule, annotation=text, factors=factors, operands=operands, results=results
            )
    return None


def _parts(nodes: list[Node]) -> list[Node]:
    """The parts of a dim that is one concatenation and nothing else."""
    found = flatten(nodes)
    return found[0].parts if len(found) == 1 else []


def _rule(op: IROp) -> OpRule:
    assert op.rule is not None, f"{op.name} has no rule"
    return op.rule


def _nodes(op: IROp, refs: DimRefs, factor_nodes: dict[tuple[str, str], Node]) -> list[Node]:
    """The nodes of one dim of an operator's tensor, as its rule refers to factors and segments."""
    nodes = []
    for ref in refs:
        if ref.element is not None:  # of size 1: it carries nothing
            continue
        node = factor_nodes[op.name, ref.factor]
        nodes.append(node if ref.segment is None else node.parts[ref.segment])
    return nodes


# ------------------------------------------------------------------------------------------------
# refining rules


def piece_names(factor: Factor, pieces: list[Node]) -> list[str]:
    """The names of the factors that replace ``factor``; its own name if it stays one."""
    return [factor.name] if len(pieces) <= 1 else [f"{factor.name}.{i}" for i in range(len(pieces))]


def refine(rule: OpRule, pieces: dict[str, list[Node]]) -> OpRule:
    """The rule with every factor replaced by the product of its pieces, and given their segments.

    A parallel form may name the factor. Then only the outermost piece keeps the form, and only if
    it has one segment. The other pieces are frozen: splitting them would give a rank scattered
    parts of the factor. A form that takes pieces from ``anywhere`` keeps them all.
    """
    # A factor of 768 that was refined to 12 x 64 becomes two factors.
    factors: list[Factor] = []
    renamed: dict[str, list[str]] = {}
    form = rule.parallel
    in_form: dict[str, list[str]] = {}  # the pieces that keep the form
    for factor in rule.factors:
        nodes = pieces[factor.name]
        names = piece_names(factor, nodes)
        renamed[factor.name] = names
        entry = form.factors.get(factor.name) if form else None
        # All its pieces have size 1: it is left as it is.
        if not nodes:
            factors.append(factor)
            continue
        for position, (name, node) in enumerate(zip(names, nodes, strict=True)):
            segments = _segments(node)
            contiguous = position == 0 and len(segments) == 1
            if entry is not None and (entry.anywhere or contiguous):
                in_form.setdefault(factor.name, []).append(name)
            frozen = entry is not None and not entry.anywhere and not contiguous
            factors.append(Factor(name, segments, FactorKind.FROZEN if frozen else factor.kind))
    by_name = {factor.name: factor for factor in factors}

    def exchanged(name: str, *, is_ring: bool) -> list[str]:
        """The pieces of a factor that an exchange may cut: of a frozen one only the outermost, as
        of one that has a form; and where edges are exchanged, only of one segment. Of others those
        that are not frozen: a form that deals out experts must be told of their axes.
        """
        names = renamed[name]
        if rule.frozen(name):
            return [n for n in names[:1] if is_ring or len(by_name[n].segments) == 1]
        return [n for n in names if by_name[n].kind is not FactorKind.FROZEN]

    def in_one_piece(exchange: Exchange) -> bool:
        return all(len(renamed[name]) == 1 for name in exchange.pair)

    # An exchange of two dims is one of their pieces, each with each. A ring is told where in the
    # sequence its blocks lie, which can be said of factors in one piece only.
    exchanges: list[Exchange] = []
    for exchange in rule.exchanges:
        is_ring = exchange.kind is ExchangeKind.RING
        if is_ring and not in_one_piece(exchange):
            continue
        pairs = itertools.product(
            exchanged(exchange.source, is_ring=is_ring), exchanged(exchange.target, is_ring=is_ring)
        )
        exchanges += [replace(exchange, source=source, target=target) for source, target in pairs]
    sizes = {factor.name: factor.size for factor in factors}
    return replace(
        rule,
        exchanges=tuple(exchanges),
        factors=tuple(factors),
        operands=tuple(_rename(tensor, renamed, sizes) for tensor in rule.operands),
        results=tuple(_rename(tensor, renamed, sizes) for tensor in rule.results),
        parallel=form and _rename_form(form, in_form),
    )


def _rename(
    tensor: TensorRefs, renamed: dict[str, list[str]], sizes: dict[str, Size]
) -> TensorRefs:
    def refs(ref: FactorRef) -> DimRefs:
        names = renamed[ref.factor]
        if ref.element is not None:  # its index in each of the pieces, of which it is the product
            found, rest = [], ref.element
            for name in reversed(names):
                rest, index = divmod(rest, sizes[name])
                found.append(FactorRef(name, element=index))
            return tuple(reversed(found))
        # a slice takes one segment of the concatenation, which is the outermost piece
        return (FactorRef(names[0], ref.segment), *(FactorRef(name) for name in names[1:]))

    return tuple(tuple(new for ref in dim for new in refs(ref)) for dim in tensor)


def _rename_form(form: ParallelForm, pieces: dict[str, list[str]]) -> ParallelForm:
    return replace(
        form,
        factors={
            name: entry for factor, entry in form.factors.items() for name in pieces.get(factor, [])
        },
        keywords={
            name: keyword
            for factor, keyword in form.keywords.items()
            for name in pieces.get(factor, [])
        },
    )
