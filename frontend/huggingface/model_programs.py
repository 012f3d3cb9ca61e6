"""The programs of one model: one for every kind of call, all on the same tensors.

    model(input_ids, attention_mask, labels)      # compiled by initialize
    model(input_ids)                              # another program, compiled at the first such call

The first program holds the model's own tensors: its ``nn.Parameter`` objects, which an optimizer
may hold, now with this rank's pieces in them. All others share them, as programs of one module do
(:mod:`shardwright.runtime.module.programs`). What is here decides which program a call needs, and
has it made.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.trace.run import UPDATES_ARGUMENTS
from shardwright.compiler.trace.values.known_inputs import HAVE_VALUES
from shardwright.frontend.files.cache import generated_directory
from shardwright.frontend.files.further_programs import make_program
from shardwright.frontend.files.module_files import Order
from shardwright.frontend.files.module_source import ModuleSource
from shardwright.frontend.huggingface.caches import known_cuts, with_cache
from shardwright.frontend.huggingface.calls import CACHE, EXAMPLE_SIZES, Call
from shardwright.frontend.huggingface.initialize_settings import Settings
from shardwright.frontend.huggingface.whole_gradients import with_whole_gradients
from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
from shardwright.runtime.errors import format_error
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.module.scope import Place
from shardwright.runtime.structure import flatten

MANY = 8
"""A number of programs. Each further one is told of: calls may differ by mistake."""


class Programs:
    """The programs of ``model``. ``twin``: what is traced, with batches and sequences of ``sizes``.
    ``main``: the first one, to which optimizers and checkpoints look.
    """

    main: ParallelModule

    def __init__(
        self,
        twin: nn.Module,
        settings: Settings,
        gen_savedir: str | Path,
        reuse: str,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.twin = twin
        self.settings = settings
        self.sizes: Mapping[str, int] = EXAMPLE_SIZES if sizes is None else sizes
        self._policy = with_whole_gradients(settings.policy)
        self._gen_savedir = gen_savedir
        self._reuse = reuse
        self._made: dict[tuple[str, str], ParallelModule] = {}
        # How keys and values are cut, by path, once a program has returned any.
        self._cuts: dict[str, str] = {}
        # How many heads the whole of each has, of which this rank has some.
        self.heads: dict[str, int] = {}
        self._noted: list[ParallelModule] = []

    def compile(self, call: Call) -> None:
        """Make the files of the first program, and nothing else. No job is needed."""
        self._parallelize(call, load_module=False)

    def make_first(self, call: Call) -> ParallelModule:
        """Compile the program that decides how tensors are stored; its own have no values yet.
        Collective.
        """
        self._first = self._directory("", call)
        self.main = self._parallelize(call)
        self._made["", call.key] = self.main
        self._cuts = known_cuts(self._first)
        return self.main

    def get(self, path: str, call: Call) -> ParallelModule:
        """The program for a call of the submodule at ``path`` (``""``: the model). The first call
        of its kind compiles it, which all ranks do together.
        """
        found = self._made.get((path, call.key))
        if found is None:
            if len(self._made) >= MANY:
                self._warn(call)
            found = self.main.programs().add(self._make(path, call), path)
            self._made[path, call.key] = found
        return found

    def note_heads(self, program: ParallelModule, cache: Any) -> None:
        """Find out how many heads keys and values have, the first time that a program has returned
        them. Collective.
        """
        if any(program is one for one in self._noted):
            return
        self._noted.append(program)
        leaves = flatten(cache, CACHE)
        held = {path: x for path, x in leaves.items() if isinstance(x, Tensor) and x.ndim == 4}
        if held.keys() <= self.heads.keys():
            return
        sizes = torch.tensor([x.shape[1] for x in held.values()], device=self.main.device)
        for axis in self.main.mesh.names:
            is_cut = [axis in _axes_of_heads(self._cuts.get(path, "")) for path in held]
            if any(is_cut):
                group = self.main.ranks.group((axis,))
                # Ranks may have unequal numbers of heads, so they are counted and not multiplied.
                summed = group.all_reduce(sizes.clone(), "sum", phase="setup")
                sizes = torch.where(torch.tensor(is_cut, device=sizes.device), summed, sizes)
        self.heads = dict(zip(held, sizes.tolist(), strict=True))

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

    def _parallelize(self, call: Call, *, load_module: bool = True) -> Any:
        with _compiling():
            return parallelize(
                self.twin,
                call.examples(self.sizes),
                with_cache(self._policy, {}),
                self._config(call),
                gen_savedir=self._gen_savedir,
                reuse=self._reuse,
                instance_name=self._name("", call),
                load_module=load_module,
                init_module_params=False,
            )

    def _make(self, path: str, call: Call) -> type[ParallelModule]:
        """The class of another program for the tensors there are. Collective."""
        directory = self._directory(path, call)
        order = Order(
            source=ModuleSource.of(self.twin.get_submodule(path), None),
            dummy_args=call.examples(self.sizes),
            policy=with_cache(self._policy, self._cuts),
            config=self._config(call),
            directory=directory,
            reuse=ReuseType(self._reuse),
            like=self._first,
            path=path,
        )
        with _compiling():
            made = make_program(order, BroadcastGenFilesStrategy.NONE)
        self._cuts = {**known_cuts(directory), **self._cuts}
        return made

    def _config(self, call: Call) -> ComputeConfig:
        return replace(self.settings.config, dynamic_dims=call.dims)

    def _name(self, path: str, call: Call) -> str:
        sizes = [] if self.sizes is EXAMPLE_SIZES else [str(sorted(self.sizes.items()))]
        return f"call_{call.digest(self._config(call).digest(), self._policy.name, path, *sizes)}"

    def _directory(self, path: str, call: Call) -> Path:
        part = self.twin.get_submodule(path)
        return generated_directory(self._gen_savedir, type(part), self._name(path, call))

    def join_buffers(self, model: nn.Module) -> None:
        """Let the model's own modules have the buffers of the programs, after either of them has
        been moved.
        """
        for one in self.main.declarations:
            if one.kind == "buffer" and one.is_initial_weight:
                self.main.put_also_at(one.name, [place_in(model, name) for name in one.names])


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile for training too: calls inside generate() come without gradients. What forward puts
    into a cache is put into the caller's own after the call. The dummy arguments are zeros, so no
    sizes are read from them.
    """
    token, values = UPDATES_ARGUMENTS.set(True), HAVE_VALUES.set(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        UPDATES_ARGUMENTS.reset(token)
        HAVE_VALUES.reset(values)


def _axes_of_heads(wish: str) -> list[str]:
    """The axes over which a wish for keys or values cuts their heads."""
    words = (word.split("/") for word in wish.split()[1:])
    return next((axes for dim, *axes in words if dim == "1"), [])


def place_in(model: nn.Module, name: str) -> Place:
    """Where a tensor of the user's model lies."""
    path, _, leaf = name.rpartition(".")
    return Place(model.get_submodule(path), leaf)
