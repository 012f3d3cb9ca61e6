"""What a step of training holds on a rank: over time, at its peak, and what for.

A step is one of many: gradients have been cleared, optimizer state and the buffers of gradient buckets exist. Then come forward
and backward (:mod:`~shardwright.compiler.cost.body_memory`), or the actions of a pipeline's schedule, and the optimizer. The
rank is the one at index 0 of every axis of its mesh, which has the largest pieces.

In a pipeline every microbatch of a stage needs the same, so each stage is walked once. What its forward leaves behind is held
from there to the end of its backward, and the actions of a rank say how much of it is held at a time.

Not in the numbers: buffers that kernels use inside, what an allocator keeps, and the temporary lists of fused optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.cost.body_memory import BodyMemory
from shardwright.compiler.cost.footprint import Footprints, TensorForm, footprints_of
from shardwright.compiler.cost.ledger import Ledger, Moment
from shardwright.compiler.cost.local import local_bytes, local_shape
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.compiler.schedule.planned import planned_schedule
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import ZERO, Layout, Mesh
from shardwright.runtime.schedule import ActionKind, ScheduleAction

CATEGORIES = ("parameter", "buffer", "input", "optimizer", "gradient", "activation", "temporary", "communication")
"""``gradient``: of parameters. ``activation``: what autograd and variables hold. ``temporary``: of an operator while it runs,
and gradients on their way. ``communication``: messages of a pipeline."""

RECEIVED_AHEAD = 2
"""For how many later actions a rank of a pipeline has posted receives (``runtime.pipeline.transfers.AHEAD``)."""

STEP_TEMPORARIES = 2
"""Tensors of the size of a parameter that torch's optimizers with state make while they update it."""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer keeps for each local element of a parameter, in bytes.

    ``state_bytes_per_element``: its state (two float32 moments of Adam by default). ``master_bytes_per_element``: a copy of
    the parameter in higher precision, if it keeps one. ``grad_bytes_per_element``: of a gradient, where that has not the
    dtype of its parameter.
    """

    state_bytes_per_element: float = 8.0
    master_bytes_per_element: float = 0.0
    grad_bytes_per_element: float | None = None

    def gradient_bytes(self, element_bytes: float) -> float:
        """Of one element, for a parameter of ``element_bytes`` an element."""
        return element_bytes if self.grad_bytes_per_element is None else self.grad_bytes_per_element

    @property
    def kept_bytes(self) -> float:
        """State and master copy of one element."""
        return self.state_bytes_per_element + self.master_bytes_per_element


ADAM = OptimizerMemory()


def num_copies(layout: Layout, mesh: Mesh, config: ComputeConfig) -> int:
    """The ranks among which the gradient of a parameter is summed. ``mesh``: on which it is stored."""
    units = config.num_units
    units //= mesh.axis_size(ZERO) if ZERO in layout.cut_axes else 1
    return units * math.prod(mesh.axis_size(a) for a in layout.grad_partial if a in mesh.names)


def num_shards(layout: Layout, mesh: Mesh, config: ComputeConfig) -> int:
    """Into how many parts ZeRO splits the optimizer state of a parameter."""
    if config.use_zero not in (1, 2):  # stage 3 cuts the parameter itself
        return 1
    return max(1, num_copies(layout, mesh, config) // config.zero_ngroups)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak of one unit rank. ``by_category``: the bytes at that time by :data:`CATEGORIES`; ``moment``: what ran (an
    operator, ``backward of ...``, ``optimizer step``). ``assumed``: operators of which everything was taken to be kept, and
    backwards (``backward of ...``) of which only the gradients count.
    """

    rank: int
    by_category: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return sum(self.by_category.values())

    @property
    def parameter_bytes(self) -> int:
        return self.by_category.get("parameter", 0)

    @property
    def gradient_bytes(self) -> int:
        return self.by_category.get("gradient", 0)

    @property
    def optimizer_bytes(self) -> int:
        return self.by_category.get("optimizer", 0)

    @property
    def activation_bytes(self) -> int:
        """With what is temporary."""
        return self.by_category.get("activation", 0) + self.by_category.get("temporary", 0)

    @property
    def buffer_bytes(self) -> int:
        """Buffers and constants of the model, its inputs, and messages."""
        return sum(self.by_category.get(key, 0) for key in ("buffer", "input", "communication"))

    def at(self, rank: int) -> RankMemory:
        """The same of another rank."""
        return replace(self, rank=rank)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "peak_bytes": self.peak_bytes,
            "moment": self.moment,
            "by_category": dict(self.by_category),
            "assumed": list(self.assumed),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankMemory:
        return cls(data["rank"], dict(data["by_category"]), data["moment"], tuple(data["assumed"]))


def program_memory(
    program: Program,
    config: ComputeConfig,
    optimizer: OptimizerMemory = ADAM,
    *,
    trains: bool = True,
    num_microbatches: int = 1,
) -> RankMemory:
    """The memory of rank 0 of a program without stages, in one step of ``num_microbatches``, whose samples are all there;
    ``trains`` is false for inference.

    The second microbatch finds the gradients of the first, and its result; those after it only more results.
    """
    trains = trains and not config.inference_only
    books = _Books(program.plan.storage_mesh, config, optimizer, trains)
    inputs = _input_forms(program, books.footprints)
    sources = books.place(program.declarations, inputs)
    more = sum(form.num_bytes for form in inputs.values()) * (num_microbatches - 1)
    books.ledger.hold(books.ledger.new(more, "input"))
    books.ledger.restart()
    earlier = min(num_microbatches - 1, 1)
    for index in range(earlier + 1):
        books.accumulates = index > 0
        body = BodyMemory(program, books.footprints, books.ledger, sources, books.arrive, trains=trains)
        body.forward()
        if trains:
            body.backward(books.roots(program, body))
        if index < earlier:
            results = sum(books.ledger.size(storage) for storage in set(body.outputs))
            body.finish()
            books.ledger.hold(books.ledger.new((num_microbatches - 1) * results, "activation"))
    if trains:
        books.step(program.declarations)
    body.finish()
    return _rank_memory(0, books.ledger.peak, body.inexact)


def pipeline_memory(
    program: PipelineProgram, config: ComputeConfig, optimizer: OptimizerMemory = ADAM
) -> tuple[RankMemory, ...]:
    """The memory of every unit rank in one step; ranks of a stage are taken to be alike."""
    schedule = planned_schedule(program.plan)
    positions: dict[tuple[int, ...], int] = {}
    for stage in program.plan.stages:
        positions.setdefault(stage.ranks, len(positions))
    found: dict[int, RankMemory] = {}
    for ranks, position in positions.items():
        own = program.stages_of(ranks[0])
        memory = _position_memory(program, config, optimizer, own, schedule.actions[position])
        for rank in ranks:
            found[rank] = memory.at(rank)
    return tuple(found[rank] for rank in sorted(found))


# ------------------------------------------------------------------------------------------------ static memory


class _Books:
    """The ledger of one rank with what is there before a step."""

    def __init__(self, mesh: Mesh, config: ComputeConfig, optimizer: OptimizerMemory, trains: bool) -> None:
        self.mesh, self.config, self.optimizer, self.trains = mesh, config, optimizer, trains
        self.ledger = Ledger()
        self.footprints = footprints_of(mesh, "plan_independent" if config.rng == "plan_independent" else "fast")
        self.layouts: dict[str, Layout] = {}
        self.accumulates = False  # gradients are there from an earlier microbatch
        self.shared: set[str] = set()  # parameters that other stages hold too

    def place(self, declarations: Iterable[Declaration], inputs: Mapping[str, TensorForm]) -> dict[str, tuple[TensorForm, int]]:
        """Put parameters, buffers, constants and inputs into the books, and what training adds to parameters."""
        sources = {}
        for declaration in declarations:
            value = declaration.value
            category = "parameter" if value.kind is ValueKind.PARAMETER else "buffer"
            form = _contiguous(declaration.layout, value, self.footprints)
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
        if name not in self.layouts or self.accumulates or (self.is_bucketed(name) and self.config.use_zero != 2):
            ledger.release(storage)
            return
        num_bytes = round(math.prod(form.shape) * self.optimizer.gradient_bytes(form.dtype.itemsize))
        if ledger.holders(storage) == 1:  # taken as it is
            ledger.release(storage)
            ledger.hold(ledger.new(num_bytes, "gradient"))
        else:
            ledger.hold(ledger.new(num_bytes, "gradient"))
            ledger.use(0, f"gradient of {name}")
            ledger.release(storage)

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


def _contiguous(layout: Layout, value: IRValue, footprints: Footprints) -> TensorForm:
    """The piece of a tensor as it comes to the rank."""
    shape = local_shape(layout, footprints.rank.mesh)
    return TensorForm.of(footprints.rank.tensor(shape, value.dtype, requires_grad=value.requires_grad))


def _input_forms(program: Program, footprints: Footprints) -> dict[str, TensorForm]:
    """The inputs of a program. Nothing is differentiated for its own sake: floating inputs take no gradient."""
    forms = {}
    for value in program.graph.inputs:
        form = _contiguous(program.input_layouts[value.name], value, footprints)
        forms[value.name] = TensorForm(form.shape, form.strides, form.dtype)
    return forms


def _rank_memory(rank: int, peak: Moment, assumed: Iterable[str]) -> RankMemory:
    ordered = {key: peak.by_category[key] for key in CATEGORIES if peak.by_category.get(key)}
    return RankMemory(rank, ordered, peak.name, tuple(sorted(assumed)))


# ------------------------------------------------------------------------------------------------ pipelines


@dataclass(frozen=True)
class _Messages:
    """Bytes of one microbatch that come from other ranks."""

    activations: int = 0
    gradients: int = 0

    def received_by(self, kind: ActionKind) -> int:
        if kind is ActionKind.FORWARD:
            return self.activations
        return 0 if kind is ActionKind.WEIGHT_GRADIENT else self.gradients


@dataclass(frozen=True)
class _StageMemory:
    """Of one microbatch, beyond what is there before its action: ``held`` from forward to backward, ``outputs`` from then to
    the end of the step, the most while each runs, and what a split backward notes between its parts (``deferred``).
    ``first``: the most in the first backward, which makes ``gradients`` that stay.
    """

    held: Mapping[str, int]
    outputs: int
    forward: Moment
    backward: Moment
    deferred: int
    messages: _Messages
    first: Moment = field(default_factory=Moment)
    gradients: int = 0

    def moment(self, kind: ActionKind, *, first: bool) -> Moment:
        """The most while an action runs; the ``first`` backward of a stage makes the gradients of its parameters. A split
        backward keeps what was saved, and notes gradients for its second part.
        """
        if kind is ActionKind.FORWARD:
            return self.forward
        backward = self.first if first else self.backward
        if kind is ActionKind.BACKWARD:
            return backward
        totals = dict(backward.by_category)
        totals["activation"] = self.held.get("activation", 0) + self.deferred
        return Moment(sum(totals.values()), totals, backward.name)


def _position_memory(
    program: PipelineProgram,
    config: ComputeConfig,
    optimizer: OptimizerMemory,
    own: Sequence[int],
    actions: Sequence[ScheduleAction],
) -> RankMemory:
    mesh = program.programs[own[0]].plan.storage_mesh
    books = _Books(mesh, config, optimizer, True)
    num_inputs = program.plan.num_microbatches
    declarations = program.declarations_of(own)
    stages_of = {fqn: {program.plan.stages[index].ranks for index in found} for fqn, found in program.shared.items()}
    books.shared = {d.value.name for d in declarations if len(stages_of.get(d.value.fqn or "", ())) > 1}
    sources = books.place(declarations, {})
    whole = sum(local_bytes(Layout.whole(v.shape), v.dtype, mesh) for v in program.graph.inputs)
    books.ledger.hold(books.ledger.new(whole * num_inputs, "input"))
    assumed: set[str] = set()
    base = books.ledger.snapshot()
    stages: dict[int, _StageMemory] = {}
    for index in own:
        books.accumulates = False
        first = _stage_memory(program, index, books, sources, assumed)
        gradients = books.ledger.snapshot().get("gradient", 0) - base.get("gradient", 0)
        gradients -= sum(stage.gradients for stage in stages.values())
        books.accumulates = True
        later = _stage_memory(program, index, books, sources, assumed)
        stages[index] = replace(later, first=first.backward, gradients=gradients)
    peak = _schedule_peak(base, stages, actions)
    books.ledger.restart()
    books.step(declarations)
    step = books.ledger.peak
    return _rank_memory(0, max(peak, step, key=lambda moment: moment.num_bytes), assumed)


def _stage_memory(
    program: PipelineProgram,
    index: int,
    books: _Books,
    sources: Mapping[str, tuple[TensorForm, int]],
    assumed: set[str],
) -> _StageMemory:
    stage, body_program, ledger = program.stages[index], program.programs[index], books.ledger
    before = ledger.snapshot()
    ledger.restart()
    received = {value.name for value, _ in stage.receives}
    own = dict(sources)
    arrived: list[int] = []
    for value in body_program.graph.inputs:
        form = _contiguous(body_program.input_layouts[value.name], value, books.footprints)
        if value.name in received:
            storage = ledger.hold(ledger.new(form.num_bytes, "activation"))
            arrived.append(storage)
        else:
            form = TensorForm(form.shape, form.strides, form.dtype)
            storage = ledger.hold(ledger.new(0, "input"))  # counted with all microbatches
            arrived.append(storage)
        own[value.name] = form, storage
    body = BodyMemory(body_program, books.footprints, ledger, own, books.arrive)
    body.forward()
    forward = ledger.peak.beyond(before)
    leaves = [value for _, value in body_program.output.leaves() if isinstance(value, IRValue)]
    sent, results = leaves[: len(stage.sends)], leaves[len(stage.sends) :]
    for storage in body.outputs[: len(sent)]:
        ledger.release(storage)
    body.outputs = body.outputs[len(sent) :]
    held = _minus(ledger.snapshot(), before)
    outputs = sum(body.values[value.name].form.num_bytes for value in results)
    ledger.restart()
    roots: dict[str, tuple[TensorForm, int]] = {}
    for value in sent:
        form = body.values[value.name].form
        if form.requires_grad and value.name not in roots:
            roots[value.name] = form, ledger.hold(ledger.new(form.num_bytes, "temporary"))
    if not sent or not roots:
        roots = books.roots(body_program, body)
    arrived += [ledger.hold(storage) for _, storage in roots.values()]  # the executor holds them until its action is done
    body.backward(roots)
    backward = ledger.peak.beyond(before)
    body.finish()
    for storage in arrived:
        ledger.release(storage)
    assumed |= body.inexact
    deferred = sum(body.deferred.values())
    return _StageMemory(held, outputs, forward, backward, deferred, _messages(program, index))


def _messages(program: PipelineProgram, index: int) -> _Messages:
    """What comes to a stage, in the largest pieces. Messages it sends are taken to be gone by the next action."""
    activations = gradients = 0
    for crossing in program.crossings:
        if set(crossing.sent.ranks) & set(crossing.received.ranks):
            continue  # handed over
        if crossing.target == index:
            activations += local_bytes(crossing.received.layout, crossing.value.dtype, crossing.received.mesh)
        if crossing.source == index and crossing.value.requires_grad:
            gradients += local_bytes(crossing.sent.layout, crossing.value.dtype, crossing.sent.mesh)
    return _Messages(activations, gradients)


def _schedule_peak(base: Mapping[str, int], stages: Mapping[int, _StageMemory], actions: Sequence[ScheduleAction]) -> Moment:
    """The most while the actions of a rank run in order."""
    actions = [action for action in actions if action.kind in _COMPUTES]
    received = [stages[action.stage].messages.received_by(action.kind) for action in actions]
    in_flight = dict.fromkeys(stages, 0)
    noted = kept = 0
    begun: set[int] = set()  # stages whose parameters have gradients
    peak = Moment(sum(base.values()), base)
    for position, action in enumerate(actions):
        stage = stages[action.stage]
        totals = dict(base)
        for index, count in in_flight.items():
            own = index == action.stage and action.kind is not ActionKind.FORWARD
            _add(totals, stages[index].held, count - own)
        posted = [num_bytes for num_bytes in received[position + 1 :] if num_bytes][:RECEIVED_AHEAD]
        waiting = noted - stage.deferred * (action.kind is ActionKind.WEIGHT_GRADIENT)
        _add(totals, {"activation": kept + waiting, "communication": sum(posted)}, 1)
        _add(totals, {"gradient": sum(stages[index].gradients for index in begun)}, 1)
        moment = stage.moment(action.kind, first=action.stage not in begun)
        _add(totals, moment.by_category, 1)
        total = sum(totals.values())
        if total > peak.num_bytes:
            peak = Moment(total, totals, f"{action}: {moment.name}")
        if action.kind is ActionKind.FORWARD:
            in_flight[action.stage] += 1
        elif action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            in_flight[action.stage] -= 1
            kept += stage.outputs
            begun.add(action.stage)
        noted += stage.deferred * _NOTES.get(action.kind, 0)
    return peak


_NOTES = {ActionKind.INPUT_GRADIENT: 1, ActionKind.WEIGHT_GRADIENT: -1}
_COMPUTES = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)


def _add(totals: dict[str, int], more: Mapping[str, int], times: int) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0) + times * value


def _minus(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
