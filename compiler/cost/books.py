"""The books of one rank with what is there before a step: parameters, their gradients and the optimizer's state, samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from shardwright.compiler.cost.body_memory import BodyMemory
from shardwright.compiler.cost.footprint import Footprints, TensorForm, footprints_of
from shardwright.compiler.cost.ledger import Ledger
from shardwright.compiler.cost.local import local_bytes, local_shape
from shardwright.compiler.cost.optimizer_memory import OptimizerMemory, num_copies, num_shards
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh

STEP_TEMPORARIES = 2
"""Tensors of the size of a parameter that torch's optimizers with state make while they update it."""


class Books:
    """The ledger of one rank with what is there before a step."""

    def __init__(self, mesh: Mesh, config: ComputeConfig, optimizer: OptimizerMemory, trains: bool) -> None:
        self.mesh, self.config, self.optimizer, self.trains = mesh, config, optimizer, trains
        self.ledger = Ledger()
        self.footprints = footprints_of(mesh, "plan_independent" if config.rng == "plan_independent" else "fast")
        self.layouts: dict[str, Layout] = {}
        self.made: dict[str, int] = {}  # the gradients that backward has made, of parameters without a bucket
        self.shared: set[str] = set()  # parameters that other stages hold too

    def place(self, declarations: Iterable[Declaration], inputs: Mapping[str, TensorForm]) -> dict[str, tuple[TensorForm, int]]:
        """Put parameters, buffers, constants and inputs into the books, and what training adds to parameters."""
        sources = {}
        for declaration in declarations:
            value = declaration.value
            category = "parameter" if value.kind is ValueKind.PARAMETER else "buffer"
            form = contiguous_form(declaration.layout, value, self.footprints)
            sources[value.name] = form, self.ledger.hold(self.ledger.new(form.num_bytes, category))
            if self.trains and value.kind is ValueKind.PARAMETER and value.requires_grad:
                self.layouts[value.name] = declaration.layout
                self._add_state(value.name, form)
        for name, form in inputs.items():
            sources[name] = form, self.ledger.hold(self.ledger.new(form.num_bytes, "input"))
        self.ledger.restart()
        return sources

    def _add_state(self, name: str, form: TensorForm) -> None:
        elements = math.prod(form.shape)
        state = round(elements / num_shards(self.layouts[name], self.mesh, self.config) * self.optimizer.kept_bytes)
        self.ledger.hold(self.ledger.new(state, "optimizer"))
        if self.is_bucketed(name) and self.config.use_zero != 2:
            gradient = elements * self.optimizer.gradient_bytes(form.dtype.itemsize) + form.dtype.itemsize  # and a flag
            self.ledger.hold(self.ledger.new(round(gradient), "gradient"))

    def is_bucketed(self, name: str) -> bool:
        """Whether the gradient of a parameter is summed over ranks, in a bucket."""
        return num_copies(self.layouts[name], self.mesh, self.config) > 1 or name in self.shared

    def arrive(self, name: str, form: TensorForm, storage: int) -> None:
        """The gradient of a source is complete: it moves into its bucket, or becomes the parameter's own."""
        ledger = self.ledger
        if name not in self.layouts or name in self.made or (self.is_bucketed(name) and self.config.use_zero != 2):
            ledger.release(storage)
            return
        num_bytes = round(math.prod(form.shape) * self.optimizer.gradient_bytes(form.dtype.itemsize))
        made = self.made[name] = ledger.new(num_bytes, "gradient")
        if ledger.holders(storage) == 1:  # taken as it is
            ledger.release(storage)
            ledger.hold(made)
        else:
            ledger.hold(made)
            ledger.use(0, f"gradient of {name}")
            ledger.release(storage)

    @property
    def made_bytes(self) -> int:
        return sum(map(self.ledger.size, self.made.values()))

    def forget(self, names: Iterable[str]) -> None:
        """The gradients of these parameters have not been made."""
        for name in names:
            self.ledger.release(self.made.pop(name))

    def roots(self, program: Program, body: BodyMemory) -> dict[str, tuple[TensorForm, int]]:
        """The gradient of the loss, which is the first result that has one."""
        for _, value in program.output.leaves():
            if isinstance(value, IRValue) and body.values[value.name].form.requires_grad:
                form = body.values[value.name].form
                return {value.name: (form, self.ledger.hold(self.ledger.new(form.num_bytes, "temporary")))}
        return {}

    def step(self, declarations: Iterable[Declaration]) -> None:
        """The optimizer's step: one parameter after the other."""
        trained = [local_bytes(d.layout, d.value.dtype, self.mesh) for d in declarations if d.value.name in self.layouts]
        if trained and self.optimizer.state_bytes_per_element:
            self.ledger.use(STEP_TEMPORARIES * max(trained), "optimizer step")


def contiguous_form(layout: Layout, value: IRValue, footprints: Footprints) -> TensorForm:
    """The piece of a tensor as it comes to the rank."""
    shape = local_shape(layout, footprints.rank.mesh)
    return TensorForm.of(footprints.rank.tensor(shape, value.dtype, requires_grad=value.requires_grad))


def input_forms(program: Program, footprints: Footprints) -> dict[str, TensorForm]:
    """The inputs of a program. Nothing is differentiated for its own sake: floating inputs take no gradient."""
    forms = {}
    for value in program.graph.inputs:
        form = contiguous_form(program.input_layouts[value.name], value, footprints)
        forms[value.name] = TensorForm(form.shape, form.strides, form.dtype)
    return forms
