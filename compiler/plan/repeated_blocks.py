"""Find what becomes a method of its own in a program: repeated layers, and regions that are
recomputed in the backward.

A **container** is the outermost numbered part of a module path (``transformer.h.0``). A **run** is
a stretch of instructions of one container instance and one recompute region. Runs that are equal
but for their weights, inputs and names are emitted once. A recompute region is a method even if it
occurs once, as it is called through the checkpoint function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import sympy
import torch

from shardwright.compiler.ir.identifier import identifier
from shardwright.compiler.ir.op import Arg, map_leaves
from shardwright.compiler.ir.size import dynamic_sizes
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.conversion import GATHERS
from shardwright.compiler.plan.program import Adapt, Instruction, Loop, Program, gathers_at

# torch numbers the modules of a list without leading zeros, so `block.01` is a name.
_CONTAINER = re.compile(r"(?s)^(?:(?P<prefix>.*?)\.)?(?P<index>0|[1-9][0-9]*)(?:\.|\Z)")
MIN_RUN = 6
"""The fewest instructions of a run. Shorter ones stay inline, as a call would make no file shorter.
"""


@dataclass(frozen=True)
class Run:
    """A stretch of the body that becomes a method.

    - ``container``: the numbered module that it belongs to, ``None`` outside of such modules.
    - ``recompute``: whether backward computes it again.
    - ``inputs``: values from outside in the order of their first use, among them weights of other
      modules than the container.
    - ``outputs``: values made here and read later.
    - ``symbols``: the names of sizes that it uses.
    - ``key``: equal for runs that one method can serve.
    - ``updates``: the buffers of the container that get a value made here.
    """

    container: tuple[str, int] | None
    recompute: bool
    instructions: tuple[Instruction, ...]
    inputs: tuple[IRValue, ...]
    outputs: tuple[IRValue, ...]
    symbols: tuple[str, ...]
    key: Hashable
    updates: tuple[Update, ...] = ()


Update = tuple[IRValue, IRValue]
"""A buffer, and the value it gets."""


Item = Instruction | Run
"""A part of a body once repeated runs are found."""


def container_of(module_path: str) -> tuple[str, int] | None:
    """The container of a module path: ``transformer.h.0.attn`` -> ``("transformer.h", 0)``. It is
    ``None`` for ``down.conv1``, where the number is only a part of a name.
    """
    match = _CONTAINER.match(module_path)
    return (match["prefix"] or "", int(match["index"])) if match else None


def reads(instruction: Instruction) -> tuple[IRValue, ...]:
    """The values that an instruction reads."""
    if isinstance(instruction, Loop):
        return instruction.operands
    if isinstance(instruction, Adapt):
        return (instruction.value, *instruction.beside)
    return instruction.op.operands


def writes(instruction: Instruction) -> tuple[IRValue, ...]:
    """The values that an instruction makes."""
    if isinstance(instruction, Loop):
        return instruction.results
    return (instruction.result,) if isinstance(instruction, Adapt) else instruction.op.results


def path_of(instruction: Instruction) -> str:
    """The path of the module that an instruction belongs to."""
    return (
        instruction.module_path
        if isinstance(instruction, Adapt | Loop)
        else instruction.original.module_path
    )


def region_of(instruction: Instruction) -> str | None:
    """The recompute region that an instruction belongs to, if any."""
    return instruction.region if isinstance(instruction, Adapt | Loop) else instruction.op.region


def container_path(container: tuple[str, int] | None) -> str:
    """The path of a container: ``("transformer.h", 0)`` -> ``transformer.h.0``."""
    return f"{container[0]}.{container[1]}".lstrip(".") if container else ""


def layered(
    text: str, container: tuple[str, int] | None, write: Callable[[str], str] = str
) -> str | tuple[str, str]:
    """The two parts of a name of a layer: before and after the container's number. A name that does
    not start with the container stays as it is.

    ``write`` makes the start of such a name from the container's path. With ``identifier``, the
    parts of ``transformer_h_0_dropout`` are ``transformer_h_`` and ``_dropout``.
    """
    start = write(container_path(container)) if container else ""
    if not start or not re.match(rf"{re.escape(start)}(\W|_|$)", text):
        return text
    return re.sub(r"[0-9]+$", "", start), text[len(start) :]


def weight_path(value: IRValue, container: tuple[str, int] | None) -> str | None:
    """The name of a parameter or buffer below its container, ``attn.weight`` say; ``None`` if it
    does not belong to this container.
    """
    if (
        value.kind not in (ValueKind.PARAMETER, ValueKind.BUFFER)
        or value.fqn is None
        or container is None
    ):
        return None
    start = f"{container_path(container)}."
    return value.fqn.removeprefix(start) if value.fqn.startswith(start) else None


def group_blocks(program: Program) -> Sequence[Item]:
    """The body with the instructions of repeated runs put together. A container that occurs once,
    or never twice alike, stays inline.
    """
    if group_blocks not in program.known:
        program.known[group_blocks] = _grouped(program)
    found: Sequence[Item] = program.known[group_blocks]
    return found


def _grouped(program: Program) -> tuple[Item, ...]:
    # Stretches of instructions, which of their updates they can do, and until when values are read.
    found = _with_own_adapters(program, stretches(program.body))
    updates = _updates_inside(program, found)
    last_read = _last_reads(program, found, updates)
    runs: list[tuple[list[Instruction], Run | None]] = []
    counts: dict[Hashable, int] = {}
    for position, ((container, region), instructions) in enumerate(found):
        run = None
        # Short runs are not worth a method; a recompute region always is one.
        if region is not None or (container is not None and len(instructions) >= MIN_RUN):
            run = _run(
                container, region, instructions, position, last_read, updates.get(position, ())
            )
            counts[run.key] = counts.get(run.key, 0) + 1
        runs.append((instructions, run))
    # Runs of equal keys become calls of one method.
    items: list[Item] = []
    for instructions, run in runs:
        items += (
            [run] if run is not None and (counts[run.key] > 1 or run.recompute) else instructions
        )
    return tuple(items)


Stretch = tuple[tuple[tuple[str, int] | None, str | None], list[Instruction]]
"""A pair (container, recompute region), and consecutive instructions that belong to it."""


def stretches(body: tuple[Instruction, ...]) -> list[Stretch]:
    """The body in stretches: consecutive instructions of one container, or of one recompute region,
    which is recomputed as a whole.

    Adapters of values from outside are moved in front of a block. So the first layer, whose input
    is made in another way, is like the others. Gathers that only a recompute region needs stay in
    it, as nothing that is made inside is kept.
    """
    found: list[Stretch] = []
    for region, in_region in groupby(body, region_of):
        if region is not None:
            instructions = list(in_region)
            containers = {
                owner for i in instructions if (owner := container_of(path_of(i))) is not None
            }
            found.append(
                ((containers.pop() if len(containers) == 1 else None, region), instructions)
            )
            continue
        for container, inside in groupby(
            in_region, lambda instruction: container_of(path_of(instruction))
        ):
            found.append(((container, None), list(inside)))
    # The stretches that read each value.
    readers: dict[str, set[int]] = {}
    for position, (_, instructions) in enumerate(found):
        for instruction in instructions:
            for value in reads(instruction):
                readers.setdefault(value.name, set()).add(position)
    moved: list[Stretch] = []
    # Instructions of the forward itself stay where they are; only blocks give adapters away.
    for position, (place, instructions) in enumerate(found):
        if place == (None, None):
            moved.append((place, instructions))
            continue

        def is_read_later(name: str, position: int = position) -> bool:
            return any(reader > position for reader in readers.get(name, ()))

        front = in_front(instructions, is_read_later, recompute=place[1] is not None)
        # By identity: two equal adapters of one value are two instructions.
        rest = [i for i in instructions if not any(i is f for f in front)]
        moved += [((None, None), front)] if front else []
        moved.append((place, rest))
    return moved


def in_front(
    instructions: Sequence[Instruction], is_read_later: Callable[[str], bool], *, recompute: bool
) -> list[Instruction]:
    """The adapters of a stretch that run in front of it: those of values from outside.

    Three kinds stay inside if nothing but the stretch needs them: adapters of weights, those that
    compute gradients of weights beside them, and gathers in a recompute region. ``is_read_later``:
    whether anything after the stretch reads a value.
    """
    # Made inside of the stretch: what follows from it cannot go in front.
    made = {value.name for i in instructions if not isinstance(i, Adapt) for value in writes(i)}
    front: list[Instruction] = []

    def goes(adapter: Adapt) -> bool:
        shared = any(map(is_read_later, _copies_of(adapter, instructions)))
        is_weight = adapter.of.kind in (ValueKind.PARAMETER, ValueKind.BUFFER)
        gathers_again = recompute and adapter.step.kind in GATHERS
        starts = bool(adapter.beside or adapter.meanwhile)
        stays = is_weight or starts or gathers_again
        return adapter.value.name not in made and (shared or not stays)

    for position, instruction in enumerate(instructions):
        if not isinstance(instruction, Adapt) or instruction.joins:
            continue
        together = gathers_at(instructions, position)  # what goes in one collective stays together
        if all(map(goes, together)):
            front += together
        else:
            # They stay, and so does what is adapted further from them.
            made.update(adapter.result.name for adapter in together)
    return front


def gathered_until(items: Sequence[Item], kept: Iterable[IRValue]) -> dict[int, list[IRValue]]:
    """The values that are gathered again in backward and not needed after an item, by its
    position. Those in ``kept`` are needed to the end.
    """
    last: dict[str, int] = {}
    for position, item in enumerate(items):
        for value in item.inputs if isinstance(item, Run) else reads(item):
            last[value.name] = position
    # The last use counts: behind it backward gathers the value anew.
    names = {value.name for value in kept}
    over: dict[int, list[IRValue]] = {}
    for item in items:
        if isinstance(item, Adapt) and item.gathers_again and item.result.name not in names:
            over.setdefault(last[item.result.name], []).append(item.result)
    return over


def _copies_of(adapter: Adapt, instructions: Iterable[Instruction]) -> set[str]:
    """The names of the values that an adapter, and chains of adapters after it, make."""
    names = {adapter.result.name}
    for instruction in instructions:
        if isinstance(instruction, Adapt) and instruction.value.name in names:
            names.add(instruction.result.name)
    return names


def _with_own_adapters(program: Program, found: list[Stretch]) -> list[Stretch]:
    """The stretches, with the adapters in front of a layer back in it where all layers like it have
    the same ones, and nothing else reads what these make. Two branches that read one adapted input
    are such a case. Then nothing stands between the calls of the layers, and they can be a loop.
    """
    last_read = _last_reads(program, found, {})
    candidates = {
        position for position in range(1, len(found)) if _is_own(found, position, last_read)
    }
    lists = {container[0] for at in candidates if (container := found[at][0][0]) is not None}
    # The layers of these lists that one method can serve, with and without what is in front.
    alike: dict[Hashable, list[int]] = {}
    merged: dict[int, Hashable] = {}
    for position, ((container, region), instructions) in enumerate(found):
        if container is None or container[0] not in lists or region is not None:
            continue
        run = _run(container, None, instructions, position, last_read, ())
        alike.setdefault(run.key, []).append(position)
        if position in candidates:
            both = [*found[position - 1][1], *instructions]
            merged[position] = _run(container, None, both, position, last_read, ()).key
    taken = {
        position
        for positions in alike.values()
        if len(positions) > 1 and len({merged.get(at, at) for at in positions}) == 1
        for position in positions
    }
    joined: list[Stretch] = []
    for position, (place, instructions) in enumerate(found):
        if position in taken:
            joined[-1] = (place, [*joined[-1][1], *instructions])
        else:
            joined.append((place, instructions))
    return joined


def _is_own(found: list[Stretch], position: int, last_read: Mapping[str, int]) -> bool:
    """Whether what stands in front of a stretch is adapters of it, and of nothing else."""
    (place, front), ((container, region), _) = found[position - 1], found[position]
    if place != (None, None) or container is None or region is not None:
        return False
    return all(
        isinstance(i, Adapt)
        and container_of(path_of(i)) == container
        and last_read.get(i.result.name, -1) <= position
        for i in front
    )


def _updates_inside(program: Program, stretches: list[Stretch]) -> dict[int, tuple[Update, ...]]:
    """The updates of buffers that a stretch can do itself, by its position: updates of its own
    container's buffers, which nothing after it reads. A recompute region does none, as it runs
    twice.
    """
    # Where each value is made, and where it is read last.
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, (_, instructions) in enumerate(stretches):
        for instruction in instructions:
            made |= {value.name: position for value in writes(instruction)}
            last |= {value.name: position for value in reads(instruction)}
    inside: dict[int, tuple[Update, ...]] = {}
    for before, after in program.buffer_updates:
        position = made.get(after.name, -1)
        # The stretch that makes the new value.
        container, region = stretches[position][0]
        own = position >= 0 and region is None and weight_path(before, container) is not None
        if own and last.get(before.name, -1) <= position:
            inside[position] = (*inside.get(position, ()), (before, after))
    return inside


def _last_reads(
    program: Program, stretches: list[Stretch], updates: Mapping[int, tuple[Update, ...]]
) -> dict[str, int]:
    """The position of the last stretch that reads each value. A value that the program returns, or
    with which it updates a buffer at its end, is read behind all of them.
    """
    last = {}
    for position, (_, instructions) in enumerate(stretches):
        for instruction in instructions:
            for value in reads(instruction):
                last[value.name] = position
    end = len(stretches)
    for value in (
        *program.results(),
        *(value for instruction in program.tail for value in reads(instruction)),
    ):
        last[value.name] = end
    # A buffer that is updated inside of the stretch is not kept for the end.
    done_inside = {before.name for pairs in updates.values() for before, _ in pairs}
    for before, after in program.buffer_updates:
        if before.name not in done_inside:
            last[after.name] = end
    return last


def _run(
    container: tuple[str, int] | None,
    region: str | None,
    instructions: list[Instruction],
    position: int,
    last_read: dict[str, int],
    updates: tuple[Update, ...],
) -> Run:
    """The run of a stretch, with its key.

    Values in the key are replaced by tokens that two layers share: the number of a value made in
    the run, the name of a weight below the container, or the position of an input.
    """
    made: dict[str, int] = {}
    inputs: dict[str, IRValue] = {}
    symbols: set[str] = set()

    def token(value: IRValue) -> Hashable:
        if value.name in made:
            return made[value.name]
        path = weight_path(value, container)
        if path is not None:
            return path
        inputs.setdefault(value.name, value)
        # Inputs have no name in common, but one method can take those of one shape and dtype alone.
        return ("in", list(inputs).index(value.name), value.shape, value.dtype)

    # Two layers are alike if their instructions are, token by token.
    keys = []
    for instruction in instructions:
        keys.append(instruction_key(instruction, token, container, symbols))
        for value in writes(instruction):
            made[value.name] = len(made)
    # What anything behind the run reads.
    outputs = tuple(
        value
        for i in instructions
        for value in writes(i)
        if last_read.get(value.name, -1) > position
    )
    key = (
        container and container[0],
        region is not None,
        tuple(keys),
        tuple(made[value.name] for value in outputs),
        tuple((weight_path(before, container), made[after.name]) for before, after in updates),
    )
    used = tuple(sorted(symbols))
    return Run(
        container,
        region is not None,
        tuple(instructions),
        tuple(inputs.values()),
        outputs,
        used,
        key,
        updates,
    )


def instruction_key(
    instruction: Instruction,
    token: Callable[[IRValue], Hashable],
    container: tuple[str, int] | None,
    symbols: set[str],
) -> Hashable:
    """The key of an instruction, with values replaced by tokens: equal for one step of two layers.
    Adds the names of its sizes to ``symbols``.
    """
    if isinstance(instruction, Loop):
        return _loop_key(instruction, token, container, symbols)
    if isinstance(instruction, Adapt):
        step = instruction.step
        # Sizes that vary have names, and a method of two layers takes them as arguments.
        cuts = [cut for cut in (step.cut, step.to_cut) if cut is not None]
        for cut in cuts:
            for size in cut.sizes:
                symbols |= size_symbols(size)
        return (
            "adapt",
            step,
            token(instruction.value),
            instruction.region is not None,
            instruction.joins,
            instruction.meanwhile,
            tuple(map(token, instruction.beside)),
        )
    op = instruction.op

    def leaf(arg: Arg) -> Hashable:
        if isinstance(arg, IRValue):
            return ("value", token(arg))
        if isinstance(arg, sympy.Expr):
            symbols.update(size_symbols(arg))
            return str(arg)
        if isinstance(arg, str):
            return ("text", layered(arg, container, identifier))
        if isinstance(arg, torch.Tensor):
            # Two layers share a method only if they share the very constant.
            return id(arg)
        # With the type, as 1 == 1.0 == True, and each is written in another way.
        return (type(arg).__name__, str(arg))

    args = tuple(
        [
            (name, leaf(arg) if type(arg) is IRValue else _freeze(map_leaves(arg, leaf)))
            for name, arg in op.args
        ]
    )
    suffix = layered(instruction.original.module_path, container)
    facts = (op.autocast, op.grad_enabled, op.only_in, op.region is not None, suffix)
    dtypes = tuple(value.dtype for value in op.results)
    return (op.target, args, instruction.layouts, dtypes, instruction.meanwhile, facts)


def _loop_key(
    loop: Loop,
    token: Callable[[IRValue], Hashable],
    container: tuple[str, int] | None,
    symbols: set[str],
) -> Hashable:
    """The key of a loop: values made inside are told by their numbers."""
    made: dict[str, int] = {}

    def inside(value: IRValue) -> Hashable:
        return ("inside", made[value.name]) if value.name in made else token(value)

    keys = []
    for step in (*loop.takes, *loop.body, *loop.gives):
        keys.append(instruction_key(step, inside, container, symbols))
        for value in writes(step):
            made[value.name] = len(made)
    late = tuple(value.name in loop.late for value in loop.results)
    return ("loop", loop.axis, loop.count, tuple(keys), late)


def _freeze(arg: Arg) -> Hashable:
    if isinstance(arg, slice):
        return ("slice", _freeze(arg.start), _freeze(arg.stop), _freeze(arg.step))
    return tuple(_freeze(item) for item in arg) if isinstance(arg, tuple | list) else arg


def size_symbols(size: Arg) -> set[str]:
    """The names of dynamic sizes in an expression."""
    return {str(symbol) for symbol in dynamic_sizes(size)}
