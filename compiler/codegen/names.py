"""Names in generated code: local variables from the names of values, attribute paths of weights."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection

from torch import nn

from shardwright.compiler.ir.identifier import axis_variable, is_name
from shardwright.compiler.ir.quote import quoted
from shardwright.compiler.ir.size import LocalSize
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.program import Program
from shardwright.compiler.plan.repeated_blocks import weight_path

MODULE_ATTRIBUTES = frozenset(dir(nn.Module)) | {
    "actions",
    "add_program",
    "all_declarations",
    "argument_names",
    "arguments",
    "autocast",
    "axis",
    "begin_call",
    "buffer",
    "call_program",
    "cut_inputs",
    "check_arguments",
    "check_inputs",
    "check_mode",
    "compute_config",
    "constant",
    "copied_parameters",
    "declarations",
    "declare",
    "device",
    "end2end",
    "enter",
    "expect_comparison",
    "finish_step",
    "forward_eval",
    "forward_renamed",
    "gathered",
    "gathered_together",
    "gathers_weights",
    "gradient_groups",
    "in_flight",
    "in_pieces",
    "infer_step",
    "inputs",
    "is_called",
    "is_copy",
    "is_counted",
    "is_root",
    "is_staged",
    "is_summed_elsewhere",
    "joined_axes",
    "known_buffers",
    "layouts",
    "layouts_eval",
    "leave_sums",
    "left_out",
    "left_out_of_training",
    "mesh",
    "mpu",
    "note_loaded",
    "num_microbatches",
    "other_programs",
    "output",
    "output_eval",
    "output_shapes",
    "output_shapes_eval",
    "output_stages",
    "output_stages_eval",
    "own_parameters",
    "owned",
    "parameter",
    "places",
    "programs",
    "put_also_at",
    "random",
    "random_function",
    "rank",
    "ranks",
    "ranks_of",
    "recompute",
    "reducer",
    "refresh_copies",
    "require",
    "rng",
    "rng_mode",
    "run_stage",
    "schedule",
    "seed",
    "segments",
    "segments_eval",
    "shared",
    "sizes",
    "stages",
    "take_tensors",
    "train_step",
    "trained_parameters",
    "training",
    "training_only",
    "trains",
    "update_buffer",
    "use_order",
    "weight_digests",
    "weights",
    "zero",
}
"""Attributes of a ParallelModule that a model's own top-level names may collide with."""

STAGE_METHOD = re.compile(r"stage\d+(_eval)?")
"""The names of the methods of a pipeline's stages, which a model's own names may collide with, too.
"""


_MODULE_NAMES = frozenset((*dir(nn.Module), "training"))
_INDEX = re.compile(r"0|[1-9][0-9]*")


def attribute_path(path: str, *, root: str = "self") -> str:
    """The source that reads a module or weight by its path: ``transformer.h.0.attn`` ->
    ``self.transformer.h[0].attn``. Odd or colliding names go through ``self.weights("...")``, or
    ``block["..."]``.
    """
    parts = path.split(".")
    odd = any(
        not _INDEX.fullmatch(part) and (not is_name(part) or part in _MODULE_NAMES)
        for part in parts
    )
    first = parts[0]
    taken = (
        first in MODULE_ATTRIBUTES
        or _INDEX.fullmatch(first)
        # torch keeps state of its own in attributes that begin so (``_parameters``, ``_hooks``).
        or first.startswith("_")
        or STAGE_METHOD.fullmatch(first)
    )
    if root == "self" and (odd or taken):
        return f"self.weights({quoted(path)})"
    if odd:
        return f"{root}[{quoted(path)}]"
    return root + "".join(f"[{part}]" if _INDEX.fullmatch(part) else f".{part}" for part in parts)


def axis_variables(program: Program, taken: Collection[str] = ()) -> dict[tuple[str, ...], str]:
    """The variables for the groups of each axis, and of each set of axes that one adapter goes
    over; a loop's is the piece that it is at. None of them is among the names ``taken``, whatever
    the axes are called.
    """
    names: dict[tuple[str, ...], str] = {}
    for axes in (*((axis,) for axis in program.plan.storage_mesh.names), *program.joined_axes):
        name = "_".join(map(axis_variable, axes))
        while name in names.values() or name in taken:
            name += "_"
        names[axes] = name
    # Loops do not stand in each other, so one name does for all.
    name = "piece"
    while name in names.values() or name in taken:
        name += "_"
    return names | {(axis,): name for axis in program.plan.loops}


class Scope:
    """The variables of one method.

    ``strip``: a prefix that names lose here. ``block``: the container whose weights are read
    through the argument ``block``. ``given``: the names of values that are arguments here.
    """

    def __init__(self, reserved: set[str]) -> None:
        self._taken = set(reserved)
        self._names: dict[str, str] = {}
        self.strip = ""
        self.block: tuple[str, int] | None = None
        self.given: set[str] = set()
        self.sizes: dict[
            tuple[LocalSize, str], str
        ] = {}  # the variables of sizes of pieces, by size and wish

    def reserve(self, name: str) -> None:
        """Let no variable have that name."""
        self._taken.add(name)

    def bind(self, value: IRValue, name: str) -> None:
        """Let a value go by a name that is given."""
        self._names[value.name] = name
        self._taken.add(name)

    def define(self, value: IRValue, wish: str = "") -> None:
        """Give a new variable its own name, or the one wished for. If that is taken, it gets
        another number.
        """
        wish = wish or (value.name.removeprefix(self.strip) if self.strip else value.name)
        wish = re.sub(r"\W", "_", wish)
        if not wish.isidentifier() or keyword.iskeyword(wish):
            wish = f"x_{wish}"
        self.bind(value, self.unused(wish))

    def define_adapted(self, value: IRValue, source: IRValue) -> None:
        """Give a variable for an adapted ``source`` its own name. An argument goes by another name
        than its value, and so does what is adapted from it.
        """
        suffix = value.name.removeprefix(source.name)
        is_argument = source.name in self.given and suffix != value.name
        self.define(value, f"{self.name(source)}{suffix}" if is_argument else "")

    def size_variable(self, size: LocalSize, wish: str) -> str:
        """The variable that holds the size of a rank's piece of a dim."""
        if (size, wish) not in self.sizes:
            self.sizes[size, wish] = self.unused(wish)
            self.reserve(self.sizes[size, wish])
        return self.sizes[size, wish]

    def unused(self, wish: str) -> str:
        """The name ``wish``, with another number if it is taken. The name is not taken by this
        call.
        """
        name, count = wish, 0
        while name in self._taken:
            count += 1
            name = f"{re.sub(r'_[0-9]+$', '', wish)}_{count}"
        return name

    def name(self, value: IRValue) -> str:
        """The source text that reads a value."""
        if value.name in self._names:
            return self._names[value.name]
        # Inside the method of a layer, its weights are read from the argument ``block``.
        if self.block is not None:
            below = weight_path(value, self.block)
            if below is not None:
                return attribute_path(below, root="block")
        if value.kind in (ValueKind.PARAMETER, ValueKind.BUFFER):
            assert value.fqn is not None
            return attribute_path(value.fqn)
        if value.kind is ValueKind.CONSTANT:
            return attribute_path(value.name)
        self.define(value)
        return self._names[value.name]
