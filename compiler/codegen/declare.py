"""The declarations of a generated class: one statement for a tensor, or a function that draws
random numbers, and one for that of all layers. A comment tells of parameters that nothing reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwright.compiler.codegen.drawing_calls import RandomFunction
from shardwright.compiler.codegen.literals import named, range_text, source
from shardwright.compiler.codegen.text import Line, layout_lines
from shardwright.compiler.ir.quote import quoted
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.program import Declaration
from shardwright.compiler.plan.repeated_blocks import container_of

UNREAD = "no statement reads it"
"""The comment of a parameter that the model has and does not use."""

_METHODS = {ValueKind.PARAMETER: "parameter", ValueKind.BUFFER: "buffer"}


@dataclass(frozen=True)
class _Layer:
    """Neighbouring declarations of one layer, or of none, each with whether it is a parameter that
    nothing reads. Layers that are alike have the same ``statements``.
    """

    container: tuple[str, int] | None
    declarations: tuple[tuple[Declaration | RandomFunction, bool], ...]

    @property
    def statements(self) -> list[Line]:
        return self.written(self.container)

    def written(self, container: tuple[str, int] | None) -> list[Line]:
        """The statements with the variable ``layer`` for the number of a container, or without."""
        return [
            Line(_statement(declaration, container), UNREAD if is_unread else "")
            for declaration, is_unread in self.declarations
        ]

    def follows(self, earlier: _Layer) -> bool:
        """Whether it is the next layer of the same list, and like ``earlier``."""
        if self.container is None or earlier.container is None:
            return False
        (prefix, index), (earlier_prefix, earlier_index) = self.container, earlier.container
        return (prefix, index) == (
            earlier_prefix,
            earlier_index + 1,
        ) and self.statements == earlier.statements


def declaration_lines(
    declarations: Iterable[Declaration | RandomFunction], read: Collection[str]
) -> list[str]:
    """The body of ``declare``, in the order of the declarations. Layers that are alike are a loop
    over their numbers. ``read``: the names of the values that statements of the file read.
    """
    known = [(declaration, _is_unread(declaration, read)) for declaration in declarations]
    # Neighbours of one layer together.
    layers = [
        _Layer(key, tuple(group))
        for key, group in groupby(known, lambda pair: container_of(_name(pair[0])))
    ]
    lines = []
    # Layers with equal declarations become a loop over their numbers.
    for alike in _stretches(layers):
        first = alike[0]
        # A single layer, or parameters of no layer: written out one by one.
        if len(alike) == 1 or first.container is None:
            lines += _placed(first.written(None), 8)
            continue
        lines.append(f"for layer in {range_text(first.container[1], len(alike))}:")
        lines += [f"    {line}" for line in _placed(first.statements, 12)]
    return lines


def _is_unread(declaration: Declaration | RandomFunction, read: Collection[str]) -> bool:
    if isinstance(declaration, RandomFunction):
        return False
    value = declaration.value
    return value.kind is ValueKind.PARAMETER and value.name not in read


def _placed(lines: list[Line], indent: int) -> list[str]:
    """The text of statements that stand at a column, from that column on."""
    return [line[indent:] for line in layout_lines(lines, indent)]


def _stretches(layers: Sequence[_Layer]) -> Iterator[list[_Layer]]:
    """Layers, each with those that follow it and are alike."""
    stretch: list[_Layer] = []
    for layer in layers:
        if stretch and not layer.follows(stretch[-1]):
            yield stretch
            stretch = []
        stretch.append(layer)
    if stretch:
        yield stretch


def _name(declaration: Declaration | RandomFunction) -> str:
    if isinstance(declaration, RandomFunction):
        return declaration.path
    return declaration.value.fqn or declaration.value.name


def _statement(declaration: Declaration | RandomFunction, container: tuple[str, int] | None) -> str:
    """``self.parameter("up.weight", "[32/tp, 8]", torch.float32)``; of a layer with the variable
    ``layer`` for its number.
    """
    if isinstance(declaration, RandomFunction):
        return declaration.statement(container)
    value = declaration.value
    words = [
        source(named(_name(declaration), container)),
        quoted(str(declaration.layout)),
        str(value.dtype),
    ]
    if value.kind is ValueKind.PARAMETER and not value.requires_grad:
        words.append("requires_grad=False")
    if value.kind is ValueKind.BUFFER and not value.persistent:
        words.append("persistent=False")
    if value.aliases:
        words.append(f"aliases={source(tuple(named(alias, container) for alias in value.aliases))}")
    return f"self.{_METHODS.get(value.kind, 'constant')}({', '.join(words)})"
