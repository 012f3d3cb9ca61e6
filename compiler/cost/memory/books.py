"""The ledger of one rank with what is there before a step begins: parameters, buffers, samples, the
optimizer's state, and buffers for gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwright.compiler.cost.local_calls import estimated_size, local_shape
from shardwright.compiler.cost.machine.backend import MOST_MEMORY, Backend
from shardwright.compiler.cost.memory.body_memory import BodyMemory
from shardwright.compiler.cost.memory.footprint import Footprints, TensorForm, footprints_of
from shardwright.compiler.cost.memory.gradient_books import GradientBooks
from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.cost.memory.trained_parameters import Trained
from shardwright.compiler.cost.optimizers.optimizer_memory import (
    OptimizerMemory,
    exchanged_over,
    num_copies,
    num_shards,
    sum_group,
)
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.dealing import in_use_order
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.zero.settings import ReductionSettings


class Books:
    """The ledger of one rank, and what it says of gradients. The rank communicates through
    ``backend``.

    ``gradients``: the books of its parameters' gradients, when it trains. ``summed_in``: a function
    from the dtype of a parameter to the dtype in which its gradient is summed.
    """

    gradients: GradientBooks

    def __init__(
        self,
        mesh: Mesh,
        config: ComputeConfig,
        optimizer: OptimizerMemory,
        trains: bool,
        backend: Backend = MOST_MEMORY,
    ) -> None:
        self.mesh, self.config, self.optimizer, self.trains = mesh, config, optimizer, trains
        self.ledger = Ledger()
        self.footprints = footprints_of(mesh, config.rng, backend)
        self.summed_in = ReductionSettings(table=config.optimizer_table).gradient_dtype
        self._trained: set[str] = set()

    def place(
        self,
        declarations: Iterable[Declaration],
        inputs: Mapping[str, TensorForm],
        programs: Sequence[Program],
        shared: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
        *,
        staged: bool = False,
    ) -> dict[str, tuple[TensorForm, int]]:
        """Put parameters, buffers, constants and inputs into the books, and what training adds to
        parameters. Returns the form and the storage of each by name of the value.

        - ``programs``: what the rank runs, in order.
        - ``shared``: the ranks of other stages that hold a parameter too, by its FQN.
        - ``staged``: whether the rank is a position of a pipeline.
        """
        sources = {}
        trained: dict[str, Trained] = {}
        # Every tensor that lies on the rank from the start to the end.
        for declaration in declarations:
            value, layout = declaration.value, declaration.layout
            category = "parameter" if value.kind is ValueKind.PARAMETER else "buffer"
            form = contiguous_form(layout, value, self.footprints)
            sources[value.name] = form, self.ledger.hold(self.ledger.new(form.num_bytes, category))
            # What training adds to it follows from who else has copies of it, and who updates which
            # part.
            if self.trains and value.kind is ValueKind.PARAMETER and value.requires_grad:
                elsewhere = tuple((shared or {}).get(value.fqn or "", ()))
                num_stages = 1 + len(elsewhere)
                # Ranks with equal copies, and the parts into which ZeRO cuts the update.
                copies = num_copies(layout, self.mesh, self.config, num_stages)
                shards = num_shards(layout, self.mesh, self.config, num_stages)
                group = sum_group(layout, self.mesh, self.config, elsewhere)
                # For optimizers that need whole tensors: the axes over which pieces are brought
                # together.
                cut = exchanged_over(layout, self.mesh, self.optimizer)
                whole = tuple(map(estimated_size, layout.shape))
                trained[value.name] = Trained(
                    value.name,
                    tuple(form.shape),
                    value.dtype,
                    copies,
                    shards,
                    group,
                    whole,
                    cut,
                    value.fqn or value.name,
                )
        for name, form in inputs.items():
            sources[name] = form, self.ledger.hold(self.ledger.new(form.num_bytes, "input"))
        self._trained = set(trained)
        if self.trains:
            # Buckets depend on the order in which forward uses parameters, so the books take them
            # in the order that the runtime takes them in.
            names = list(trained)
            used = [value.name for program in programs for value in program.graph.used_parameters]
            listed = [trained[names[index]] for index in in_use_order(names, used)]
            self.gradients = GradientBooks(
                self.ledger,
                listed,
                self.config,
                self.optimizer,
                staged=staged,
                backend=self.footprints.rank.backend,
            )
        # The peak counts from here on.
        self.ledger.restart()
        return sources

    def arrive(self, name: str, form: TensorForm, storage: int) -> None:
        """Take the complete gradient of a source. Only parameters keep theirs."""
        del form
        if name in self._trained:
            self.gradients.arrive(name, storage)
        else:
            self.ledger.release(storage)

    def roots(self, program: Program, body: BodyMemory) -> dict[str, tuple[TensorForm, int]]:
        """The gradient where a backward starts: of the loss, the first result that takes one."""
        # Users call ``backward`` on the first result with a gradient: that is the loss.
        for _, value in program.output.leaves():
            if isinstance(value, IRValue) and body.values[value.name].form.requires_grad:
                form = body.values[value.name].form
                return {
                    value.name: (
                        form,
                        self.ledger.hold(self.ledger.new(form.num_bytes, "temporary")),
                    )
                }
        return {}


def contiguous_form(layout: Layout, value: IRValue, footprints: Footprints) -> TensorForm:
    """The form of the rank's piece of a tensor, contiguous as loading and sending make it."""
    shape = local_shape(layout, footprints.rank.mesh)
    return TensorForm.contiguous(tuple(shape), value.dtype, value.takes_gradient)


def input_forms(program: Program, footprints: Footprints) -> dict[str, TensorForm]:
    """The form of each input of a program, by name of the value."""
    return {
        value.name: contiguous_form(program.input_layouts[value.name], value, footprints)
        for value in program.graph.inputs
    }
