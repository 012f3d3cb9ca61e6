"""What draws random numbers in a generated file: each such operator is declared, and called by its
path, ``self.random.h[layer].mlp.dropout(x, p=0.1)``. The runtime part is
:mod:`shardwright.runtime.ops.random_functions`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardwright.compiler.codegen.literals import named, source
from shardwright.compiler.codegen.names import attribute_path
from shardwright.compiler.ir.identifier import identifier
from shardwright.compiler.ir.op import IROp, RankDraw
from shardwright.compiler.ir.quote import quoted
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ops import registry
from shardwright.compiler.plan.program import Compute, Program, steps
from shardwright.compiler.plan.repeated_blocks import container_path


@dataclass(frozen=True)
class RandomFunction:
    """What a file declares of an operator: the name of its function, and of what it draws."""

    path: str
    function: str
    draw: str
    axes: tuple[str, ...]
    layout: str | None

    def statement(self, container: tuple[str, int] | None) -> str:
        """``self.random_function("up.dropout", dropout, "tp")``; of a layer with the variable
        ``layer`` for its number.
        """
        words = [source(named(self.path, container)), self.function]
        if self.layout is None:
            words += map(quoted, self.axes)
        else:
            words.append(f"layout={quoted(self.layout)}")
        if self.path.replace(".", "_") != self.draw:
            words.append(f"name={source(named(self.draw, container, identifier))}")
        return f"self.random_function({', '.join(words)})"


def drawn_by(op: IROp) -> RankDraw | None:
    """What a local call draws, if anything."""
    draw = op.arg("draw")
    return draw if isinstance(draw, RankDraw) else None


def without_draw(op: IROp) -> IROp:
    """A local call without what it draws."""
    return op.changed(args=tuple((name, arg) for name, arg in op.args if name != "draw"))


def random_functions(programs: Iterable[Program]) -> dict[int, dict[str, RandomFunction]]:
    """The functions that the programs of a file call: by the id of the program, by the name of what
    is drawn. Programs share what is alike. One that differs from those before it has other paths.
    """
    paths: dict[str, RandomFunction] = {}
    found: dict[int, dict[str, RandomFunction]] = {}
    for number, program in enumerate(programs):
        own = _called(program)
        if any(paths.get(one.path, one) != one for one in own):
            own = [replace(one, path=f"{one.path}_{number}") for one in own]
        paths |= {one.path: one for one in own}
        found[id(program)] = {one.draw: one for one in own}
    return found


def functions_of(found: Mapping[int, Mapping[str, RandomFunction]]) -> list[RandomFunction]:
    """All functions of a file, each once, in the order of their first calls."""
    return list({one.path: one for own in found.values() for one in own.values()}.values())


def _called(program: Program) -> list[RandomFunction]:
    """The functions of a program. Paths tell what functions do, unless two would be the same
    then.
    """
    called = [
        (step, draw)
        for step in steps(program.instructions)
        if isinstance(step, Compute) and (draw := drawn_by(step.op)) is not None
    ]
    found: list[RandomFunction] = []
    for tells in (True, False):
        found = []
        for step, draw in called:
            function = registry.OPS[step.op.target].code.rpartition(".")[2]
            path = _path(step.original.module_path, draw.name, function if tells else "")
            found.append(RandomFunction(path, function, draw.name, draw.axes, draw.layout))
        if len({one.path for one in found}) == len(found):
            break
    return found


def _path(module_path: str, name: str, function: str) -> str:
    """The path of what is called ``name`` in a module. It tells of the function:

    - ``h.0.dropout`` for ``h_0_dropout``, which the module of this path makes, or ``h.0``;
    - ``h.0.dropout_1`` for ``h_0_dropout_1``, which a module makes that is called again;
    - ``h.0.hidden_dropout`` for a variable ``hidden`` in ``h.0``.
    """
    path, below = module_path, name
    while path:
        start = identifier(path)
        if name == start:
            return path
        if name.startswith(f"{start}_"):
            below = name.removeprefix(f"{start}_")
            break
        path = path.rpartition(".")[0]
    if path and below.isdigit():
        return f"{path}_{below}"
    below = below if function in below else f"{below}_{function}"
    return f"{path}.{below}" if path else below


def drawing_source(
    code: str, function: RandomFunction, draw: RankDraw, container: tuple[str, int] | None
) -> str:
    """The source of a call that draws, ``code`` being that of the plain operator.
    ``container``: the layer whose method it stands in, if any.
    """
    arguments = code.removeprefix(f"{function.function}(").removesuffix(")")
    if draw.sizes:
        pairs = (f"{quoted(name)}: {to_python(size)}" for name, size in draw.sizes)
        arguments += f", sizes={{{', '.join(pairs)}}}"
    return f"{_read_function(function, container)}({arguments})"


def _read_function(function: RandomFunction, container: tuple[str, int] | None) -> str:
    """``self.random.h[layer].mlp.dropout`` in the method of a layer."""
    root, path, start = "self.random", function.path, container_path(container)
    if container is not None and f"{path}.".startswith(f"{start}."):
        prefix, below = container[0], path[len(start) + 1 :]
        root = f"{_read(prefix, root) if prefix else root}[layer]"
        return _read(below, root) if below else root
    written = named(path, container)
    return _read(path, root) if written == path else f"{root}[{source(written)}]"


def _read(path: str, root: str) -> str:
    # Names that begin with an underscore are no attributes there.
    if any(name.startswith("_") for name in path.split(".")):
        return f"{root}[{quoted(path)}]"
    return attribute_path(path, root=root)
