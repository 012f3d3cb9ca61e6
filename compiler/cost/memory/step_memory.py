"""What a step of training holds on a rank: over time, at its peak, and what for.

A step is one of many: gradients have been cleared, optimizer state and the buffers of gradient
buckets exist. Then come forward and backward
(:mod:`~shardwright.compiler.cost.memory.body_memory`), or the actions of a pipeline's schedule
(:mod:`~shardwright.compiler.cost.memory.pipeline_memory`), and the optimizer. The rank is the one
at index 0 of every axis of its mesh, which has the largest pieces; where one rank keeps a value and
others make zeros, these count.

Not in the numbers: buffers that kernels use inside, what an allocator keeps, and the temporary
lists of fused optimizers.
"""

from __future__ import annotations

from shardwright.compiler.cost.memory.body_memory import BodyMemory
from shardwright.compiler.cost.memory.books import Books, input_forms
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
) -> RankMemory:
    """The memory of rank 0 of a program without stages, in one step of ``num_microbatches``, whose
    samples are all there; ``trains`` is false for inference.

    The second microbatch finds the gradients of the first, and its result; those after it only more
    results.
    """
    trains = trains and not config.inference_only
    books = Books(program.plan.storage_mesh, config, optimizer, trains)
    inputs = input_forms(program, books.footprints)
    sources = books.place(program.declarations, inputs, [program])
    more = sum(form.num_bytes for form in inputs.values()) * (num_microbatches - 1)
    books.ledger.hold(books.ledger.new(more, "input"))
    books.ledger.restart()
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
            books.gradients.reduces = index == earlier
            body.backward(books.roots(program, body))
            books.gradients.end_backward()
        if index < earlier:
            results = sum(books.ledger.size(storage) for storage in set(body.outputs))
            body.finish()
            books.ledger.hold(books.ledger.new((num_microbatches - 1) * results, "activation"))
    if trains:
        books.gradients.step()
    body.finish()
    return RankMemory.of(0, books.ledger.peak, body.inexact)
