"""Calls of repeated layers as loops: where each layer reads what the one before it made, and
nothing else of it is read.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.repeated_blocks import Item, Run, reads


@dataclass(frozen=True)
class Loop:
    """Layers called one after another. ``carried``: by position of an input, which output of the
    layer before it is; all other inputs are the same values for all layers.
    """

    runs: tuple[Run, ...]
    carried: Mapping[int, int]


def readers_of(items: Sequence[Item], kept: Iterable[IRValue]) -> dict[str, set[int]]:
    """The positions of the items that read each value; behind all of them for what is ``kept``."""
    readers: dict[str, set[int]] = {value.name: {len(items)} for value in kept}
    for position, item in enumerate(items):
        for value in item.inputs if isinstance(item, Run) else reads(item):
            readers.setdefault(value.name, set()).add(position)
    return readers


def loop_at(
    items: Sequence[Item],
    position: int,
    readers: Mapping[str, set[int]],
    interrupted: Container[int],
) -> Loop | None:
    """The longest loop that begins at an item, if at least two layers do. ``interrupted``:
    positions after which something else is to be done.
    """
    first = items[position]
    if not isinstance(first, Run) or first.container is None:
        return None
    runs, carried = [first], None
    for at in range(position + 1, len(items)):
        item, last = items[at], runs[-1]
        if not (isinstance(item, Run) and _is_next(item, last)) or at - 1 in interrupted:
            break
        found = _carried(item, last)
        alone = all(readers.get(value.name, set()) <= {at} for value in last.outputs)
        if (
            found is None
            or not alone
            or (carried is not None and found != carried)
            or not _same_rest(item, first, found)
        ):
            break
        runs, carried = [*runs, item], found
    return Loop(tuple(runs), carried) if carried is not None else None


def _is_next(run: Run, last: Run) -> bool:
    """Whether it is the call of the next layer of the same list."""
    if run.container is None or last.container is None or run.key != last.key:
        return False
    return run.container == (last.container[0], last.container[1] + 1)


def _carried(run: Run, last: Run) -> dict[int, int] | None:
    """Which output of the run before each input is, by the position of the input.

    ``None`` where some output is not read by this run, or
    where two inputs of the first layer would be one variable.
    """
    outputs = {value.name: index for index, value in enumerate(last.outputs)}
    found = {
        at: outputs[value.name] for at, value in enumerate(run.inputs) if value.name in outputs
    }
    return found if sorted(found.values()) == list(range(len(outputs))) and found else None


def _same_rest(run: Run, first: Run, carried: Mapping[int, int]) -> bool:
    pairs = enumerate(zip(run.inputs, first.inputs, strict=True))
    return run.symbols == first.symbols and all(
        at in carried or a.name == b.name for at, (a, b) in pairs
    )
