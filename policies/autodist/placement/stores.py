"""How parameters, and buffers that operators update, may be held: layouts, seconds per step, bytes
of memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.optimizers.optimizer_memory import (
    gradient_bytes,
    kept_bytes,
    num_copies,
)
from shardwright.compiler.cost.time.adapter_time import message_s, movement_of, step_time
from shardwright.compiler.cost.time.after_backward import parameter_s
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.conversion import convert
from shardwright.compiler.plan.program import Declaration
from shardwright.compiler.plan.zero import in_pieces, is_large, units_of_storage
from shardwright.policies.autodist.placement.draft import Draft
from shardwright.policies.autodist.placement.formulation import StoreNode
from shardwright.policies.autodist.placement.layout_sets import Maker, Reader
from shardwright.policies.autodist.placement.strategies import Seconds, too_mixed, used
from shardwright.runtime.layout import Layout, Mesh


def add_sources(
    draft: Draft, graph: IRGraph, makers: dict[str, Maker], readers: Mapping[str, list[Reader]]
) -> None:
    """A node for every parameter and updated buffer that is read, with what it uses of the memory;
    everything else that comes from outside is made in one given layout.
    """
    request = draft.request
    updated = {
        op.operands[i].name for op in graph.ops if op.rule is not None for i in op.rule.updates
    }
    # Parameters and updated buffers are a choice. Inputs and constants are given.
    for value in graph.sources:
        layout = request.inputs.get(value.name) if value.kind is ValueKind.INPUT else None
        stored = request.constraints.stored_layout(value.fqn) if value.fqn else None
        chosen = value.kind is ValueKind.PARAMETER or value.name in updated
        if not chosen or value.name not in readers:
            given = draft.layout_id(stored or layout or Layout.whole(value.shape), value)
            makers[value.name] = Maker(None, np.array([given]), given)
            continue
        own = readers[value.name]
        candidates = (
            (draft.layout_id(stored, value),)
            if stored is not None
            else _candidates(draft, value, own)
        )
        cost, held, least = _stored(draft, value, candidates, own)
        index = draft.add(StoreNode(value, candidates, least), cost, draft.home_of(None, own))
        draft.usage[index] = held
        makers[value.name] = Maker(index, np.array(candidates), candidates)


def _wanted(readers: Sequence[Reader]) -> Iterator[int]:
    """All layouts that some reader wants, one after the other."""
    for reader in readers:
        for layouts in reader.wants:
            yield from layouts


def _candidates(draft: Draft, value: IRValue, readers: Sequence[Reader]) -> tuple[int, ...]:
    """The layouts a parameter may be held in: whole, as any reader uses it, and cut along any
    factor of its first reader though that must have it whole.
    """
    pricing = draft.pricing
    if value.kind is not ValueKind.PARAMETER:
        return used(_wanted(readers))
    first = draft.operators(readers)[0]
    op = first.op
    assert op.rule is not None
    refs = op.rule.operands[op.operands.index(value)]
    key = ("candidates", id(first.choices), op.operands.index(value), tuple(r.key for r in readers))
    found = pricing.candidates.get(key)
    # A letter for each axis: whole, whole with a partial gradient, or cut along a factor.
    if found is None:
        letters = ["R", *(["G"] if value.requires_grad else [])]
        words: list[tuple[str, str | None]] = [(letter, None) for letter in letters]
        factors = dict.fromkeys(ref.factor for ref in itertools.chain.from_iterable(refs))
        words += [("S", name) for name in factors]
        placed = itertools.product(words, repeat=len(draft.request.mesh.names))
        own = {
            pricing.op_choices.tensor(value, refs, op.rule, each)
            for each in placed
            if not too_mixed(each)
            # Also every layout that a reader wants, so that it can be read without an adapter.
        }
        wanted = {layout for layout in _wanted(readers) if not pricing.layouts[layout].partial}
        found = pricing.candidates[key] = used(own | wanted)
    return found


def _stored(
    draft: Draft, value: IRValue, candidates: tuple[int, ...], readers: Sequence[Reader]
) -> tuple[Seconds, Seconds, Seconds]:
    """What :func:`_storage` says, which is the same for tensors alike, but where ZeRO-3 gathers
    them for their readers.
    """
    if _is_in_pieces(draft, value):
        return _storage(draft, value, candidates, readers)
    key = value.kind, value.dtype, value.requires_grad, candidates
    if key not in draft.storage:
        draft.storage[key] = _storage(draft, value, candidates, readers)
    return draft.storage[key]


def _is_in_pieces(draft: Draft, value: IRValue) -> bool:
    """Whether ZeRO-3 stores a tensor in pieces."""
    return (
        draft.request.config.use_zero == 3 and value.kind is ValueKind.PARAMETER and is_large(value)
    )


def _storage(
    draft: Draft, value: IRValue, candidates: Sequence[int], readers: Sequence[Reader]
) -> tuple[Seconds, Seconds, Seconds]:
    """Seconds, bytes, and least bytes of every way to store a tensor.

    Seconds are per step, of the gradient's sums and the optimizer; with ZeRO-3 also of gathering
    the tensor within the unit, once for every place that reads it. Bytes are held all the time;
    least bytes are held when the forward ends.
    """
    request, config = draft.request, draft.request.config
    cost, held, least = (np.zeros(len(candidates)) for _ in range(3))
    trained = value.requires_grad and value.kind is ValueKind.PARAMETER
    item = value.dtype.itemsize
    # One candidate after the other: its gradient's sums, the update, its bytes.
    for index, candidate in enumerate(candidates):
        layout, mesh = draft.pricing.layouts[candidate], request.mesh
        if _is_in_pieces(draft, value):
            layout, mesh, gathered_s = _in_pieces(draft, value, layout, readers)
            cost[index] += gathered_s
        declaration = Declaration(value, layout)
        num_bytes = local_bytes(layout, value.dtype, mesh)
        held[index] = least[index] = num_bytes
        if trained:
            each_s, once_s = parameter_s(
                declaration,
                mesh,
                config,
                request.hardware,
                request.optimizer,
                request.ranks,
                request.microbatches,
                request.gradients_bytes,
            )
            cost[index] += request.microbatches * each_s + once_s
            state = kept_bytes(request.optimizer, layout, value.dtype, mesh, config)
            gradient = num_bytes / item * gradient_bytes(request.optimizer, value.dtype, config)
            # Gradient and optimizer state beside the value.
            held[index] += gradient + state
            # without a bucket a gradient is made by a backward, which a pipeline may not have had;
            # ZeRO-2 keeps a part of it
            is_made = request.microbatches > 1 and request.in_flight == 1
            table = config.optimizer_table
            has_buffer = num_copies(layout, mesh, config) > 1 and (
                table is None or table.contiguous_grad_buffer
            )
            is_there = is_made or has_buffer
            least[index] += state + (gradient if is_there and config.use_zero != 2 else 0.0)
    return cost, held, least


def _in_pieces(
    draft: Draft, value: IRValue, layout: Layout, readers: Sequence[Reader]
) -> tuple[Layout, Mesh, float]:
    """How ZeRO-3 stores a parameter that its readers have as ``layout``, on which mesh, and the
    seconds of gathering it; those of gathering it from several units are among its adapters
    (:class:`~pricing.OverUnits`).
    """
    request = draft.request
    zero = units_of_storage(request.config)
    axes = [axis for axis in layout.grad_partial if request.mesh.axis_size(axis) > 1]
    stored, mesh = in_pieces(layout, axes, request.mesh, zero), request.mesh.over_units(zero)
    if zero > 1:
        return stored, mesh, 0.0
    seconds = 0.0
    # Each module gathers it for itself.
    places: dict[Hashable, list[Reader]] = {}
    for reader in readers:
        places.setdefault(reader.place.module, []).append(reader)
    # what several stretches of one module read is gathered in front of the first
    inside = [
        len({reader.place for reader in own}) == 1 and own[0].place.runs_again
        for own in places.values()
    ]
    kept = [any(reader.keeps for reader in own) for own in places.values()]
    for step in convert(stored, layout, mesh):
        time = step_time(step, value.dtype, mesh, request.ranks, request.hardware)
        movement = movement_of(step, value.dtype, mesh)
        own_s = message_s(movement, mesh, tuple(request.ranks), request.hardware)
        forward_s = time.forward_s - request.hidden_share * own_s
        # Gathered twice: where the module runs again, or an operator keeps what was gathered.
        for runs_again, is_kept in zip(inside, kept, strict=True):
            runs = 2 if runs_again or (is_kept and step.kind == "all_gather") else 1
            seconds += request.microbatches * (runs * forward_s + time.backward_s)
    return stored, mesh, seconds
