"""The programs of one model: one for every kind of call, all on the same tensors.

    model(input_ids, attention_mask, labels)      # compiled by initialize
    model(input_ids)                              # another program, compiled at the first such call

The tensors are the model's own: its ``nn.Parameter`` objects, which an optimizer may hold, now with
this rank's pieces in them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.frontend.huggingface.calls import Call
from shardwright.frontend.huggingface.same_pieces import with_same_pieces
from shardwright.frontend.huggingface.settings import Settings
from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.errors import format_error
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.module.scope import Place

MANY = 8
"""A number of programs. Each further one is told of: calls may differ by mistake."""


class Programs:
    """The programs of ``model``. ``twin``: what is traced. ``main``: the first one, to which
    optimizers and checkpoints look.
    """

    main: ParallelModule

    def __init__(
        self, twin: nn.Module, settings: Settings, gen_savedir: str | Path, reuse: str
    ) -> None:
        self.twin = twin
        self.settings = settings
        self._gen_savedir = gen_savedir
        self._reuse = reuse
        self._made: dict[tuple[str, str], ParallelModule] = {}
        # Each program, with the first names of its buffers by those they have in it.
        self._buffers: list[tuple[ParallelModule, dict[str, str]]] = []

    def compile(self, call: Call) -> None:
        """Make the files of the first program, and nothing else. No job is needed."""
        self._parallelize("", call, load_module=False)

    def make_first(self, call: Call) -> ParallelModule:
        """Compile the program that decides how tensors are stored; its own have no values yet.
        Collective.
        """
        self.main = self._parallelize("", call)
        self._made["", call.key] = self.main
        return self.main

    def get(self, path: str, call: Call) -> ParallelModule:
        """The program for a call of the submodule at ``path`` (``""``: the model). The first call
        of its kind compiles it, which all ranks do together.
        """
        found = self._made.get((path, call.key))
        if found is None:
            if len(self._made) >= MANY:
                self._warn(call)
            found = self._parallelize(path, call)
            self._share(found, path)
            self._made[path, call.key] = found
        return found

    def all(self) -> tuple[ParallelModule, ...]:
        """Every program there is, the main one first."""
        return tuple(self._made.values())

    def stored(self) -> dict[str, Declaration]:
        """What is stored how, by all names of each tensor."""
        return {name: one for one in self.main.declarations for name in one.names if _is_held(one)}

    def _warn(self, call: Call) -> None:
        title = type(self.twin).__name__
        warnings.warn(
            format_error(
                f"{title} is compiled for the {len(self._made) + 1}th kind of call",
                why=f"names, dtypes, fixed sizes or plain values differ from all calls before: "
                f"{call}",
                hint="pass tensors in the place of plain values that change, and pad sizes other "
                "than batch and sequence to one size",
            ),
            stacklevel=6,
        )

    def _parallelize(self, path: str, call: Call, *, load_module: bool = True) -> ParallelModule:
        layouts = None
        if self._made:
            prefix = f"{path}." if path else ""
            layouts = {
                name.removeprefix(prefix): str(one.layout)
                for name, one in self.stored().items()
                if name.startswith(prefix)
            }
        policy = with_same_pieces(self.settings.policy, layouts)
        config = replace(self.settings.config, dynamic_dims=call.dims)
        name = call.digest(config.digest(), policy.name, path)
        # Calls inside generate() come without gradients; a program for them serves training too.
        with torch.inference_mode(False), torch.enable_grad():
            made: Any = parallelize(
                self.twin.get_submodule(path),
                call.examples(),
                policy,
                config,
                gen_savedir=self._gen_savedir,
                reuse=self._reuse,
                instance_name=f"call_{name}",
                load_module=load_module,
                init_module_params=False,
            )
        program: ParallelModule = made
        return program

    def _share(self, program: ParallelModule, path: str) -> None:
        """Let a further program have the model's tensors and random numbers."""
        prefix = f"{path}." if path else ""
        first = {name: declaration.name for name, declaration in self.stored().items()}
        names = {
            one.name: first[prefix + one.name] for one in program.declarations if _is_held(one)
        }
        program.take_tensors({own: self.main.weights(name) for own, name in names.items()})
        program.rng = self.main.rng
        program.reducer = self.main.reducer
        self._join_buffers(program, names)

    def _join_buffers(self, program: ParallelModule, names: Mapping[str, str]) -> None:
        """Let buffers be the same in all programs, whichever updates them. ``names``: the first
        names of tensors by those that they have in ``program``.
        """
        buffers = {one.name for one in program.declarations if one.kind == "buffer"}
        self._buffers.append((program, {own: n for own, n in names.items() if own in buffers}))
        for name in self._buffers[-1][1].values():
            same = [(p, o) for p, held in self._buffers for o, n in held.items() if n == name]
            places = tuple(place for p, o in same for place in p.places(o))
            for other, other_name in same:
                other.put_also_at(other_name, places)

    def join_again(self) -> None:
        """Let buffers be the same everywhere, after they have been moved."""
        for program, names in self._buffers:
            for own in names:
                program.put_also_at(own, ())

    def join_model(self, model: nn.Module) -> None:
        """Let the model's own modules have the buffers of the first program."""
        names = {one.name: one.name for one in self.main.declarations if _is_held(one)}
        for one in self.main.declarations:
            if _is_held(one) and one.kind == "buffer":
                self.main.put_also_at(one.name, [place_in(model, name) for name in one.names])
        self._join_buffers(self.main, names)


def place_in(model: nn.Module, name: str) -> Place:
    """Where a tensor of the user's model lies."""
    path, _, leaf = name.rpartition(".")
    return Place(model.get_submodule(path), leaf)


def _is_held(declaration: Declaration) -> bool:
    return declaration.is_initial_weight
