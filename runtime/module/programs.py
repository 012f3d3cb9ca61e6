"""Several programs of one module: one for each kind of call.

A model that reads ``image_grid_thw.tolist()`` has other operators for other grids, and one that
generates text has other operators for a prompt and for the next token. Each has a program of its
own: a class generated from other dummy arguments. All of them run on the tensors of the first one,
so parameters, gradients, optimizer and checkpoints are those of one module.

    module(x, grid_a)     # the program that was compiled for grid_a
    module(x, grid_b)     # the one for grid_b: the same parameters

A program may be that of a submodule, which then shares the scope of that name: the encoder of a
model that has been compiled as a whole.

Each call takes the first program whose declared inputs its arguments fit, unless the caller names
one (``ParallelModule.call_program``). Programs send other messages, so ranks that send to each
other must take the same one. They compare their choices before they run it: ranks of a unit always,
and all ranks where units meet inside a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.runtime.errors import InputError, LoadError
from shardwright.runtime.gathered_weights import WeightGathering
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.module.declared_module import directory_of_class
from shardwright.runtime.module.inputs import ABSENT, compiled_in
from shardwright.runtime.module.known_buffers import KnownBuffers
from shardwright.runtime.module.scope import Scope, place
from shardwright.runtime.module.weights import WeightFiles
from shardwright.runtime.ops.random_functions import RandomFunctions

if TYPE_CHECKING:
    from shardwright.runtime.module.parallel_module import ParallelModule

CompileAnother = Callable[[Mapping[str, Any]], "type[ParallelModule]"]
"""Makes the program for the arguments of a call, by name. All ranks of the world call it together.
"""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Programs:
    """The programs of a module. ``main``: the one whose tensors they share, the first of ``all``.

    ``compile_another`` makes one for a call that none fits, as long as there are fewer than
    ``most``.
    """

    def __init__(self, main: ParallelModule) -> None:
        self.all: list[ParallelModule] = [main]
        self.compile_another: CompileAnother | None = None
        self.most = 1

    @property
    def main(self) -> ParallelModule:
        return self.all[0]

    def add(self, program_class: type[ParallelModule], path: str = "") -> ParallelModule:
        """Add a program, which shares the tensors of the first one, and return it. Collective.
        ``path``: of the submodule that it computes.

        Raises :class:`LoadError` if the class is for other tensors.
        """
        self.all.append(_sharing(self.main, program_class, path))
        return self.all[-1]

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move what the other programs hold for themselves: constants. The shared tensors move
        with the first program.
        """
        for program in self.all[1:]:
            for name, buffer in program._buffers.items():
                if buffer is not None and name not in self.main._buffers:
                    program._buffers[name] = fn(buffer)

    def prepare(self, program: ParallelModule) -> None:
        """Let a program run as the module does: in its mode, with its random numbers, hooks and
        reducer.
        """
        if program is not self.main:
            _follow(program, self.main)

    def chosen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ParallelModule:
        """The program for the arguments of a call. Where none fits it is the first one, which says
        what it does not take.

        Raises :class:`InputError` where the ranks need different programs.
        """
        given = self._bound(args, kwargs)
        found = self._agreed(self._fitting(given))
        if found < 0 and self.compile_another is not None and len(self.all) < self.most:
            self.add(self.compile_another(given))
            found = len(self.all) - 1
        return self.all[max(found, 0)]

    def _bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(self.main.forward).bind(*args, **kwargs)
        return {name: value for name, value in bound.arguments.items() if value is not ABSENT}

    def _fitting(self, given: Mapping[str, Any]) -> int:
        """The index of the first program that takes these arguments, -1 if none does."""
        for index, program in enumerate(self.all):
            try:
                program._input_table.check(given, {})
            except InputError:
                continue
            return index
        return -1

    def _agreed(self, index: int) -> int:
        """``index``, which must be that of all ranks that run one program together."""
        main = self.main
        meets_units = main.zero > 1 or self.compile_another is not None
        # Gradients are then reduced inside backward, so units meet there, too.
        if main.reducer is not None and main.reducer.asynchronous:
            meets_units = True
        group = main.ranks.world.everyone if meets_units else main._unit
        if group.size == 1:
            return index
        # One collective for the largest and the smallest: max(-x) is -min(x).
        both = torch.tensor([index, -index], device=main._device)
        most, least = group.all_reduce(both, "max", phase="setup").tolist()
        if most != -least:
            mine = "no program" if index < 0 else f"program {index}"
            raise InputError(
                f"the arguments of this call of {type(main).__name__} need different programs on "
                "different ranks",
                why=f"this rank needs {mine} of {len(self.all)}; ranks that send to each other run "
                "the same one",
                hint="give all ranks of a unit the same values of "
                f"{', '.join(self.constants()) or 'the arguments'}"
                + ("; here all units need the same ones, too" if meets_units else ""),
            )
        return index

    def constants(self) -> list[str]:
        """The inputs whose values some program has compiled in."""
        found = [path for program in self.all for path in compiled_in(program.inputs)]
        return list(dict.fromkeys(found))


def _follow(program: ParallelModule, main: ParallelModule) -> None:
    state = program.__dict__
    for name in ("training", "rng", "reducer", "_device", "_in_step", "_steps_without_sums"):
        if name in main.__dict__:
            state[name] = main.__dict__[name]
    state.update({name: main.__dict__[name] for name in _HOOKS})
    program._parameters_declared, program._are_replaced = main.own_parameters(), False
    program._inputs_compared = program._inputs_compared and main._inputs_compared
    # Buffers that lie beside the program's own constants, at its root.
    for name, places in program._places.items():
        if name in program._buffers:
            scope, leaf = places[0]
            program._buffers[name] = scope._buffers[leaf]


def _sharing(
    main: ParallelModule, program_class: type[ParallelModule], path: str
) -> ParallelModule:
    """An object of another class on the tensors of a module, or of its submodule at ``path``.
    Collective.
    """
    made = program_class.__new__(program_class)
    Scope.__init__(made)
    made.ranks, made._unit, made.rng = main.ranks, main._unit, main.rng
    made._stored_over_units, made._device = main._stored_over_units, main._device
    made._make_input_table()
    made._declarations, made._places, made._parameters_declared = {}, {}, []
    made._gathering = WeightGathering()
    made._known_buffers = KnownBuffers(made)
    made.random = RandomFunctions()
    made._steps_without_sums = main._steps_without_sums
    made.declare()
    shared = _shared(main, program_class, made._declarations, path)
    for axes in program_class.joined_axes:
        main.ranks.join(axes)
    scope = main[path] if path else main
    # What generated code of this class reads as attributes: names that mean nothing else here.
    readable = {
        name: child
        for name, child in scope._modules.items()
        if scope.__dict__.get(name) is child and not hasattr(made, name)
    }
    # The very dicts: what is replaced in one of the modules is replaced in all.
    made.__dict__["_modules"], made.__dict__["_parameters"] = scope._modules, scope._parameters
    made.__dict__.update(readable)
    with WeightFiles(directory_of_class(program_class), program_class.weight_digests) as files:
        for declaration in made._declarations.values():
            name = declaration.name
            if name in shared:
                made._places[name] = main._places[shared[name]]
                if declaration.kind == "buffer" and "." not in name:
                    made._buffers[name] = main.weights(shared[name])
                continue
            # Constants that this program has captured: under names of its own, at its root.
            ranks = made.ranks_of(declaration)
            value = files.read(declaration, ranks.mesh, ranks.coords).to(main._device)
            place(made, name).put_buffer(value, persistent=False)
    return made


def _shared(
    main: ParallelModule,
    other: type[ParallelModule],
    declared: Mapping[str, Declaration],
    path: str,
) -> dict[str, str]:
    """The tensors that a class shares with a module: by its own name of each the module's.

    Raises :class:`LoadError` if it is for another rank, mesh or mode, or if its parameters or
    buffers are others or lie elsewhere.
    """
    prefix = f"{path}." if path else ""
    own = {name: one for one in main.declarations if one.kind != "constant" for name in one.names}
    found, why = {}, ""
    for name in ("mesh", "rank", "zero", "end2end", "rng_mode", "seed"):
        mine, theirs = getattr(main, name), getattr(other, name)
        if mine != theirs:
            why = f"its {name} is {theirs}, that of the module is {mine}"
    for one in declared.values():
        here = own.get(prefix + one.name)
        # Constants are the program's own. What is no weight of the user's, such as a copy that one
        # program alone needs, may be missing.
        if one.kind == "constant" or (here is None and not one.is_initial_weight):
            continue
        if here is None or not _are_alike(one, here):
            why = f"{one.name!r} is {one}, in the module {here or 'missing'}"
            break
        found[one.name] = here.name
    # A program of the whole module must hold all its weights; one of a part need not.
    if not path and not why:
        for one in main.declarations:
            if one.is_initial_weight and one.name not in found:
                why = f"{one.name!r} is missing, in the module it is {one}"
                break
    if why:
        raise LoadError(
            f"{other.__name__} cannot run on the tensors of a module of another program",
            why=why,
            hint="compile both with one call: parallelize(..., more_dummy_args=[...])",
        )
    return found


def _are_alike(one: Declaration, other: Declaration) -> bool:
    """Whether two declarations are of one tensor, whatever its names are."""
    return replace(one, name="", aliases=()) == replace(other, name="", aliases=())
