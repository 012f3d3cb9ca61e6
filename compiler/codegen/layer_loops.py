"""Calls of repeated layers as loops. Layers make a loop if each reads what the one before it made,
and nothing else reads that.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.repeated_blocks import Item, Run, reads


@dataclass(frozen=True)
class LayerLoop:
    """Layers called one after another. ``carried``: for the position of an input, the output of the
    layer before that it is. All other inputs are the same values for all layers.
    """

    runs: tuple[Run, ...]
    carried: Mapping[int, int]


def readers_of(items: Sequence[Item], kept: Iterable[IRValue]) -> dict[str, set[int]]:
    """The positions of the items that read each value. Those ``kept`` are read behind all items."""
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
) -> LayerLoop | None:
    """The longest loop that begins at an item; ``None`` if it has fewer than two layers.
    ``interrupted``: positions after which something else is to be done.
    """
    first = items[position]
    if not isinstance(first, Run) or first.container is None:
        return None
    runs, carried = [first], None
    for at in range(position + 1, len(items)):
        item, last = items[at], runs[-1]
        if not (isinstance(item, Run) and _is_next(item, last)) or at - 1 in interrupted:
            break
        # A loop carries values from layer to layer in variables. Every layer must take them at the
        # same places, and nobody else may read them.
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
    return LayerLoop(tuple(runs), carried) if carried is not None else None


def _is_next(run: Run, last: Run) -> bool:
    """Whether a run is the call of the next layer in the same list."""
    if run.container is None or last.container is None or run.key != last.key:
        return False
    return run.container == (last.container[0], last.container[1] + 1)


def _carried(run: Run, last: Run) -> dict[int, int] | None:
    """The outputs of the run before that this one's inputs are, by position of the input.

    It is ``None`` if this run does not read some output, or if two inputs of the first layer would
    be one variable.
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
