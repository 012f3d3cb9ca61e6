"""What a step of training holds on a rank: over time, at its peak, and what for.

The step is one in the middle of a run: gradients have been cleared, and the optimizer's state and
the buffers of gradient buckets exist. It consists of forward and backward (``body_memory.py``), or
of the actions of a pipeline's schedule (``pipeline_memory.py``), and of the optimizer.

The rank is the one at index 0 of every axis of its mesh, which has the largest pieces. If one rank
keeps a value and the others make zeros in its place, it counts as one that makes zeros.

The numbers do not include buffers that kernels use inside, what an allocator keeps, and the
temporary lists of fused optimizers.
"""

from __future__ import annotations

from shardwright.compiler.cost.machine.backend import MOST_MEMORY, Backend
from shardwright.compiler.cost.memory.body_memory import BodyMemory
from shardwright.compiler.cost.memory.books import Books, input_forms
from shardwright.compiler.cost.memory.ledger import Moment
from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.plan.program import Program
from shardwright.runtime.config import ComputeConfig


def program_memory(
    program: Program,
    config: ComputeConfig,
    optimizer: OptimizerMemory = ADAM,
    *,
    trains: bool = True,
    num_microbatches: int = 1,
    backend: Backend = MOST_MEMORY,
) -> RankMemory:
    """The memory of rank 0 of a program without stages, in one step of ``num_microbatches``.

    The samples of all microbatches are there from the start. ``trains`` is false for inference.
    ``backend``: what the rank communicates through; where no machine is known, what needs most.
    """
    books, inexact = _step(
        program,
        config,
        optimizer,
        trains=trains,
        num_microbatches=num_microbatches,
        backend=backend,
    )
    return RankMemory.of(0, books.ledger.peak, inexact)


def memory_over_time(
    program: Program,
    config: ComputeConfig,
    optimizer: OptimizerMemory = ADAM,
    *,
    num_microbatches: int = 1,
    backend: Backend = MOST_MEMORY,
) -> list[Moment]:
    """What rank 0 of a program without stages holds while each operator runs, in the order of a
    step. Of several microbatches there are two.
    """
    history: list[Moment] = []
    _step(
        program,
        config,
        optimizer,
        num_microbatches=num_microbatches,
        backend=backend,
        history=history,
    )
    return history


def _step(
    program: Program,
    config: ComputeConfig,
    optimizer: OptimizerMemory,
    *,
    trains: bool = True,
    num_microbatches: int,
    backend: Backend,
    history: list[Moment] | None = None,
) -> tuple[Books, tuple[str, ...]]:
    """The books after one step, and the operators whose memory is assumed."""
    trains = trains and not config.inference_only
    books = Books(program.plan.storage_mesh, config, optimizer, trains, backend)
    books.ledger.history = history
    inputs = input_forms(program, books.footprints)
    sources = books.place(program.declarations, inputs, [program])
    # Samples of the other microbatches lie beside those of the first.
    more = sum(form.num_bytes for form in inputs.values()) * (num_microbatches - 1)
    books.ledger.hold(books.ledger.new(more, "input"))
    books.ledger.restart()
    # Two microbatches tell everything: the second one finds the gradients and the result of the
    # first, and any later one would find more results only.
    earlier = min(num_microbatches - 1, 1)
    for index in range(earlier + 1):
        body = BodyMemory(
            program,
            books.footprints,
            books.ledger,
            sources,
            books.arrive,
            trains=trains,
            summed_in=books.summed_in,
        )
        body.forward()
        if trains:
            # Gradients are summed in the last backward, or in each of them.
            books.gradients.reduces = index == earlier
            body.backward(books.roots(program, body))
            books.gradients.end_backward()
        if index < earlier:
            results = sum(books.ledger.size(storage) for storage in set(body.outputs))
            body.finish()
            # Every later microbatch leaves a result, until the step is over.
            books.ledger.hold(books.ledger.new((num_microbatches - 1) * results, "activation"))
    if trains:
        books.gradients.step()
    body.finish()
    return books, tuple(body.inexact)
