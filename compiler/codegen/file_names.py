"""The names that mean something in a whole generated file: what it imports, and the variables of
axes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import sympy

from shardwright.compiler.codegen.drawing_calls import (
    RandomFunction,
    functions_of,
    random_functions,
)
from shardwright.compiler.codegen.names import axis_variables
from shardwright.compiler.ir.identifier import axis_variable, is_name
from shardwright.compiler.ir.op import AxisRef
from shardwright.compiler.ir.quote import quoted
from shardwright.compiler.ir.size import Size, to_python, with_axis_variables
from shardwright.compiler.ops.render import Source, imports_of, imports_of_literal, names_bound
from shardwright.compiler.plan.program import Adapt, Program, steps
from shardwright.compiler.plan.repeated_blocks import reads

RUNTIME_IMPORTS = {
    "Mesh": "from shardwright.runtime.layout import Mesh",
    "Cut": "from shardwright.runtime.layout import Cut",
    "Told": "from shardwright.runtime.told import Told",
    "ParallelModule": "from shardwright.runtime.module.parallel_module import ParallelModule",
    "ABSENT": "from shardwright.runtime.module.inputs import ABSENT",
    "flatten": "from shardwright.runtime.structure import flatten",
    "piece_of": "from shardwright.runtime.in_pieces import piece_of",
    "all_gather_together": "from shardwright.runtime.adapters import all_gather_together",
    "Joined": "from shardwright.runtime.in_pieces import Joined",
    "TOTAL": "from shardwright.runtime.in_pieces import TOTAL",
    "Once": "from shardwright.runtime.in_pieces import Once",
    "Gather": "from shardwright.runtime.in_pieces import Gather",
    "rebuild": "from shardwright.runtime.structure import rebuild",
    "start": "from shardwright.runtime.started import start",
    "arrived": "from shardwright.runtime.started import arrived",
}
BUILTINS = {"abs", "bool", "complex", "float", "int", "max", "min", "range", "round", "slice"}
RESERVED = {"self", "torch", "F", "math", "block", "layer", *BUILTINS, *RUNTIME_IMPORTS}
"""Names that bodies read, so that no variable may have them."""


@dataclass
class FileNames:
    """The names of the file of a program.

    ``imports``: the import statements that what was written so far needs.
    """

    program: Program
    imports: set[str] = field(default_factory=set)
    _imported: set[str] | None = None
    _classes: dict[str, str] = field(default_factory=dict)
    _random: dict[int, dict[str, RandomFunction]] = field(default_factory=dict)
    # The variables of axes, by the id of a program.
    _axes: dict[int, dict[tuple[str, ...], str]] = field(default_factory=dict)

    def need(self, *names: str) -> None:
        """Import these names of the runtime."""
        self.imports |= {RUNTIME_IMPORTS[name] for name in names}

    def _programs(self) -> list[Program]:
        """Every program whose body stands in the file."""
        return [self.program, *([self.program.eval_program] if self.program.eval_program else [])]

    def _read(self) -> set[str]:
        """The names of the values that statements of the file read."""
        found: set[str] = set()
        for program in self._programs():
            found |= {value.name for step in program.instructions for value in reads(step)}
            found |= {value.name for value in program.results()}
            found |= {value.name for _, value in program.buffer_updates}
        return found

    def _random_functions(self) -> dict[int, dict[str, RandomFunction]]:
        """What draws random numbers, by the id of a program and the name of what is drawn."""
        if not self._random:
            self._random = random_functions(self._programs())
        return self._random

    def _drawing(self) -> list[RandomFunction]:
        """What draws random numbers, each function once."""
        return functions_of(self._random_functions())

    def _gathers_weights(self) -> bool:
        return any(
            adapter.gathers_weight or adapter.gathers_again
            for program in self._programs()
            for adapter in program.adapters()
        )

    def _reserved(self, program: Program) -> set[str]:
        """Names that no variable may take: those of axes, and of everything the file imports."""
        return RESERVED | self._imports_read() | set(self._axis_variables(program).values())

    def _imports_read(self) -> set[str]:
        """The names that the imports of the file bind."""
        if self._imported is None:
            self._imported = set()
            needed: set[str] = set()
            for instruction in (
                instruction
                for program in self._programs()
                for instruction in steps(program.instructions)
            ):
                if isinstance(instruction, Adapt):
                    self._imported.add(instruction.step.kind)
                else:
                    needed |= imports_of(instruction.op)
            self._imported |= names_bound(needed)
            for program in self._programs():
                for tree in (program.graph.output, *(tree for _, tree in program.graph.signature)):
                    self._imported |= names_bound(
                        s for _, leaf in tree.leaves() for s in imports_of_literal(leaf)
                    )
            self._classes = self._output_classes(self._imported)
            self._imported |= set(self._classes.values())
        return self._imported

    def _output_classes(self, imported: Collection[str]) -> dict[str, str]:
        """The names under which the file imports the classes of objects in results, by the path of
        the class. ``imported``: names that the file imports besides.

        Not among them are classes that no plain import finds where the file is loaded, and such
        whose name means something else in it.
        """
        taken = {*RESERVED, *imported, self.program.graph.name}
        names: dict[str, str] = {}
        for path in (p for program in self._programs() for p in program.graph.output.classes()):
            module, _, name = path.partition(":")
            is_free = path in names or name not in {*taken, *names.values()}
            is_plain = module != "__main__" and all(map(is_name, [*module.split("."), name]))
            if is_plain and is_free:
                names[path] = name
        return names

    def _axis_variables(self, program: Program) -> dict[tuple[str, ...], str]:
        """The variables that stand for the groups of a program's axes: ``tp``, ``tp_tp2``."""
        if id(program) not in self._axes:
            graph = program.graph
            taken = RESERVED | self._imports_read() | {dim.symbol for dim in graph.dynamic_dims}
            self._axes[id(program)] = axis_variables(
                program, taken | {f"{name}_leaves" for name in graph.argument_order}
            )
        return self._axes[id(program)]

    def _with_axes(self, program: Program) -> Callable[[Any], Any]:
        """A function that puts the variables of axes into an argument or a size. It changes nothing
        if all of them have their usual names.
        """
        variables = self._axis_variables(program)
        renamed = {
            axes[0]: name
            for axes, name in variables.items()
            if len(axes) == 1 and name != axis_variable(axes[0])
        }

        def replaced(leaf: Any) -> Any:
            if isinstance(leaf, AxisRef):
                return Source(renamed.get(leaf.name, axis_variable(leaf.name)))
            return with_axis_variables(leaf, renamed) if isinstance(leaf, sympy.Expr) else leaf

        return replaced if renamed else _as_it_is

    def _source_of(self, program: Program) -> Callable[[Size], str]:
        """A function that writes the source of a size."""
        replaced = self._with_axes(program)
        return to_python if replaced is _as_it_is else lambda size: to_python(replaced(size))

    def _class(self, path: str) -> str:
        """The source of a class in a result. ``torch.compile`` does not read a call that imports,
        so that the file imports it where it can.
        """
        self._imports_read()
        if path not in self._classes:
            return quoted(path)
        module, _, name = path.partition(":")
        self.imports.add(f"from {module} import {name}")
        return name


def _as_it_is(leaf: Any) -> Any:
    return leaf
