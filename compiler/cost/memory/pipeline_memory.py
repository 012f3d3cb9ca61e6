"""What a step of a pipeline holds on each rank.

Every microbatch of a stage needs the same memory. So each stage is walked once, whatever the
schedule: forward, then backward in one part or two. Stages that are alike but for names are walked
once in all (``alike_stages.py``). What an action leaves behind is held until the
next action of its microbatch. The order of a rank's actions says how much of that there is at a
time. The bytes of messages come on top (``messages_under_way.py``).

Example: a forward that leaves 10 MB behind for its backward. In 1F1B over 4 stages the first rank
runs 4 forwards before its first backward, so it holds 40 MB of activations; the last one holds 10.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.machine.backend import MOST_MEMORY, Backend
from shardwright.compiler.cost.memory.alike_stages import Signature, signature
from shardwright.compiler.cost.memory.body_memory import BodyMemory, Gradient
from shardwright.compiler.cost.memory.books import Books, contiguous_form
from shardwright.compiler.cost.memory.footprint import TensorForm
from shardwright.compiler.cost.memory.ledger import Moment
from shardwright.compiler.cost.memory.messages_under_way import Value, bytes_under_way
from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.memory.split_backward_memory import SplitMemory
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.schedule.planned import schedule_of_step
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT_GRADIENT, WEIGHT_GRADIENT = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


def pipeline_memory(
    program: PipelineProgram,
    config: ComputeConfig,
    optimizer: OptimizerMemory = ADAM,
    backend: Backend = MOST_MEMORY,
) -> tuple[RankMemory, ...]:
    """The memory of every unit rank in one step; ranks of a stage are taken to be alike.
    ``backend``: what ranks communicate through; where no machine is known, what needs most.
    """
    found: dict[int, RankMemory] = {}
    for ranks, memory, messages in _positions(program, config, optimizer, backend):
        peak = memory.peak(messages)
        found.update((rank, peak.at(rank)) for rank in ranks)
    return tuple(found[rank] for rank in sorted(found))


def pipeline_memory_over_time(
    program: PipelineProgram,
    config: ComputeConfig,
    optimizer: OptimizerMemory = ADAM,
    backend: Backend = MOST_MEMORY,
) -> dict[tuple[int, ...], list[Moment]]:
    """What ranks hold in the course of a step, by the ranks of each position: the fullest moment of
    every action in the order of the schedule, then the step of the optimizer.
    """
    found = {}
    for ranks, memory, messages in _positions(program, config, optimizer, backend):
        memory.history = []
        memory.peak(messages)
        found[ranks] = memory.history
    return found


def _positions(
    program: PipelineProgram, config: ComputeConfig, optimizer: OptimizerMemory, backend: Backend
) -> Iterator[tuple[tuple[int, ...], _PositionMemory, Iterable[int]]]:
    """The ranks of each position, the memory of one of them, and the bytes under way while each of
    its actions runs.
    """
    schedule = schedule_of_step(program.plan, trains=not config.inference_only)
    actions = schedule.actions
    # A *position* is a set of ranks that runs one or several stages; the schedule lists actions by
    # position.
    positions: dict[tuple[int, ...], int] = {}
    for stage in program.plan.stages:
        positions.setdefault(stage.ranks, len(positions))
    position_of = {index: positions[stage.ranks] for index, stage in enumerate(program.plan.stages)}
    walked: dict[Hashable, _Walked] = {}
    for ranks, position in positions.items():
        memory = _PositionMemory(program, config, optimizer, backend, actions[position], walked)
        yield ranks, memory, bytes_under_way(position, actions, position_of, memory.values())


@dataclass(frozen=True, slots=True)
class _Run:
    """The memory of one action of one microbatch, beyond what was there before its forward.

    ``peak``: the most while it runs. ``left``: what is left of the microbatch after it, by
    category. ``gradients``: the bytes of parameters' gradients that it makes and that stay.
    """

    peak: Moment
    left: Mapping[str, int]
    gradients: int = 0


Runs = dict[ActionKind, _Run]


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """The actions of a stage, for the ``first`` microbatch and for ``later`` ones.

    They differ: the first backward makes the gradients of parameters, later ones add to them.
    ``kept``: the names of the values that it sends and autograd saves.
    """

    first: Runs
    later: Runs
    kept: frozenset[str]

    def renamed(self, rename: Callable[[str], str]) -> _StageMemory:
        """The memory of a stage that is alike. ``rename``: from the names of this one to its."""
        first, later = (
            {
                kind: replace(run, peak=replace(run.peak, name=rename(run.peak.name)))
                for kind, run in runs.items()
            }
            for runs in (self.first, self.later)
        )
        return _StageMemory(first, later, frozenset(map(rename, self.kept)))


@dataclass(frozen=True)
class _Walked:
    """What walking a stage has told. ``assumed``: as of :class:`RankMemory`. ``arrived``: the names
    of the sources whose gradients came, in their order.
    """

    signature: Signature
    memory: _StageMemory
    assumed: frozenset[str]
    arrived: tuple[str, ...]


class _PositionMemory:
    """The memory of one rank of a position, which runs ``actions``. ``walked``: the stages of all
    positions that were walked so far. ``history``: every moment that :meth:`peak` looks at, where
    somebody asks for them by setting this to a list.
    """

    history: list[Moment] | None = None

    def __init__(
        self,
        program: PipelineProgram,
        config: ComputeConfig,
        optimizer: OptimizerMemory,
        backend: Backend,
        actions: Sequence[ScheduleAction],
        walked: dict[Hashable, _Walked],
    ) -> None:
        self.program, self.actions, self._walked = program, actions, walked
        own = sorted({action.stage for action in actions})
        self.trains = not config.inference_only
        mesh = program.programs[own[0]].plan.storage_mesh
        self.books = Books(mesh, config, optimizer, self.trains, backend)
        declarations = program.declarations_of(own)
        shared = program.holders_elsewhere(program.plan.stages[own[0]].ranks)
        programs = [program.programs[index] for index in own]
        self.sources = self.books.place(declarations, {}, programs, shared, staged=True)
        # The inputs of a whole step lie on every rank, cut nowhere.
        whole = sum(local_bytes(Layout.whole(v.shape), v.dtype, mesh) for v in program.graph.inputs)
        ledger = self.books.ledger
        ledger.hold(ledger.new(whole * program.plan.num_microbatches, "input"))
        self.assumed: set[str] = set()
        # What is there when nothing is under way.
        self.base = ledger.snapshot()
        kinds = {
            index: {action.kind for action in actions if action.stage == index} for index in own
        }
        self.stages = {index: self._stage(index, kinds[index]) for index in own}

    def values(self) -> list[Value]:
        """The values that cross between stages, with the bytes of their largest pieces."""
        found = []
        for crossing in self.program.crossings:
            sent, received = crossing.sent, crossing.received
            source = self.stages.get(crossing.source)
            found.append(
                Value(
                    crossing.value.name,
                    # What the sender keeps for its own backward is counted there.
                    crossing.source,
                    crossing.target,
                    local_bytes(sent.layout, crossing.value.dtype, sent.mesh),
                    local_bytes(received.layout, crossing.value.dtype, received.mesh),
                    crossing.value.takes_gradient and self.trains,
                    source is not None and crossing.value.name in source.kept,
                )
            )
        return found

    def peak(self, messages: Iterable[int]) -> RankMemory:
        """The peak over the actions and the optimizer's step. ``messages``: bytes under way while
        each action runs.
        """
        peak, results = self._schedule_peak(messages)
        books = self.books
        # After the last action nothing of a microbatch is left but what the module returns. The
        # step of the optimizer comes on top of that, and may be the peak.
        books.ledger.restart()
        books.ledger.history = self.history
        self._deliver(results)
        if self.trains:
            books.gradients.reduces = True
            books.gradients.end_backward()
            books.gradients.step()
        return RankMemory.of(
            0, max(peak, books.ledger.peak, key=lambda moment: moment.num_bytes), self.assumed
        )

    def _deliver(self, own_bytes: int) -> None:
        """Send all results of all microbatches to all ranks of the unit. ``own_bytes``: the bytes
        of the results made here.
        """
        ledger, plan = self.books.ledger, self.program.plan
        ledger.hold(ledger.new(own_bytes, "activation"))
        if len({rank for stage in plan.stages for rank in stage.ranks}) == 1:
            return
        for stage in self.program.stages:
            for path, value in stage.outputs:
                if plan.outputs.get(path) == "eval" and self.trains:
                    continue
                num_bytes = local_bytes(Layout.whole(value.shape), value.dtype, self.books.mesh)
                flat = ledger.hold(ledger.new(num_bytes * plan.num_microbatches, "activation"))
                ledger.use(0, "delivery of results")
                if stage.index in self.stages:  # in the place of what was made here
                    ledger.release(flat)

    def _schedule_peak(self, messages: Iterable[int]) -> tuple[Moment, int]:
        """The peak over the actions, and the bytes of the results that they leave."""
        totals = dict(self.base)
        left: dict[tuple[int, int], Mapping[str, int]] = {}
        begun: set[int] = set()  # stages whose parameters have gradients
        peak = Moment(sum(totals.values()), dict(totals))
        # ``totals`` is what is held between two actions. The memory of a run is counted from before
        # its forward, so what its microbatch has left so far is taken out first.
        for action, under_way in zip(self.actions, messages, strict=True):
            stage = self.stages[action.stage]
            run = (stage.later if action.stage in begun else stage.first)[action.kind]
            _add(totals, left.pop((action.stage, action.microbatch), {}), -1)
            num_bytes = sum(totals.values()) + under_way + run.peak.num_bytes
            if num_bytes > peak.num_bytes or self.history is not None:
                by_category = dict(totals)
                _add(by_category, {"communication": under_way}, 1)
                _add(by_category, run.peak.by_category, 1)
                moment = Moment(num_bytes, by_category, f"{action}: {run.peak.name}")
                peak = max(peak, moment, key=lambda one: one.num_bytes)
                if self.history is not None:
                    self.history.append(moment)
            left[action.stage, action.microbatch] = run.left
            _add(totals, run.left, 1)
            _add(totals, {"gradient": run.gradients}, 1)
            if run.gradients:
                begun.add(action.stage)
        return peak, sum(size for each in left.values() for size in each.values())

    def _stage(self, index: int, kinds: Collection[ActionKind]) -> _StageMemory:
        """The memory of a stage, walked if none was that is alike."""
        stage, program, gradients = (
            self.program.stages[index],
            self.program.programs[index],
            self.books.gradients if self.trains else None,
        )

        def form_of(name: str) -> Hashable:
            standing = None if gradients is None else gradients.standing(name)
            return self.sources[name][0], standing

        own = signature(stage, program, self.sources, form_of)
        key = own.key, self.books.mesh, frozenset(kinds), frozenset(self.books.ledger.snapshot())
        known = self._walked.get(key)
        if known is None:
            # What is assumed of this stage alone.
            others, self.assumed = self.assumed, set()
            self._arrived: list[str] = []
            memory = self._walk_as_scheduled(index, kinds)
            known = _Walked(own, memory, frozenset(self.assumed), tuple(self._arrived))
            self._walked[key] = known
            self.assumed |= others
            return memory
        rename = known.signature.renaming(own)
        self.assumed.update(map(rename, known.assumed))
        # Gradients of parameters stay behind, as after a walk.
        ledger = self.books.ledger
        for name in map(rename, known.arrived):
            form, _ = self.sources[name]
            self.books.arrive(name, form, ledger.hold(ledger.new(form.num_bytes, "temporary")))
        return known.memory.renamed(rename)

    def _walk_as_scheduled(self, index: int, kinds: Collection[ActionKind]) -> _StageMemory:
        """Walk a stage as the schedule does, for the first microbatch and for another one."""
        before = set(self.books.gradients.made) if self.trains else set()
        found: list[Runs] = []
        kept: set[str] = set()
        # Both walks of a kind run on the same books: the second one finds the gradients of the
        # first. The next kind starts without them again.
        for kind in (BACKWARD, INPUT_GRADIENT):
            if kind in kinds:
                self.books.gradients.forget(set(self.books.gradients.made) - before)
                found += [self._walk(index, kind, kept), self._walk(index, kind, kept)]
        if not found:
            found = [self._walk(index, FORWARD, kept)] * 2
        first, later = (
            {kind: run for runs in found[start::2] for kind, run in runs.items()}
            for start in (0, 1)
        )
        return _StageMemory(first, later, frozenset(kept))

    def _walk(self, index: int, kind: ActionKind, kept: set[str]) -> Runs:
        """Walk one microbatch: its forward, then the backward that begins with ``kind``.

        Adds to ``kept`` the names of the values that it sends and autograd saves.
        """
        stage, body_program, ledger = (
            self.program.stages[index],
            self.program.programs[index],
            self.books.ledger,
        )
        # Everything is told relative to what was there before the microbatch.
        before = ledger.snapshot()
        received = {value.name for value, _ in stage.receives}
        sources, held = self._inputs(index, received)
        self._arrived = []

        def arrive(name: str, form: TensorForm, storage: int) -> None:
            if name in received:  # it is sent to the stage before, at the end of the action
                held.append(storage)
            else:
                if name in self.sources:
                    self._arrived.append(name)
                self.books.arrive(name, form, storage)

        runs: Runs = {}

        def note(kind: ActionKind) -> None:
            """Note the run of an action that has just ended."""
            # Gradients stay behind: what this action has added to them, and what else it has left.
            left = {key: value - before.get(key, 0) for key, value in ledger.snapshot().items()}
            made = left.pop("gradient", 0)
            runs[kind] = _Run(
                ledger.peak.beyond(before), left, made - sum(run.gradients for run in runs.values())
            )
            ledger.restart()

        ledger.restart()
        books, trains = self.books, kind is not FORWARD
        body = BodyMemory(
            body_program,
            books.footprints,
            ledger,
            sources,
            arrive,
            trains=trains,
            summed_in=books.summed_in,
        )
        body.forward()
        self.assumed |= body.inexact
        leaves = [value for _, value in body_program.output.leaves() if isinstance(value, IRValue)]
        # Results are what the stage sends, then what the model returns.
        sent, outputs = leaves[: len(stage.sends)], body.outputs[len(stage.sends) :]
        for storage in body.outputs[: len(sent)]:
            ledger.release(storage)
        body.outputs = outputs
        # A value that autograd holds lives on when its message has gone.
        kept.update(value.name for value in sent if ledger.is_held(body.values[value.name].storage))
        if kind is FORWARD:
            body.release(held)
            note(FORWARD)
        else:
            note(FORWARD)
            roots = self._roots(body, sent)
            # Gradients that were received stay until the action is done.
            held += [ledger.hold(storage) for _, storage in roots.values()]
            if kind is BACKWARD or body.regions:  # a backward that recomputes is not split
                body.backward(roots)
                body.release(held)
                note(kind)
            else:
                # Input gradients first, for the stage before; weight gradients when there is time.
                split = SplitMemory(
                    body, [name for name in received if sources[name][0].requires_grad]
                )
                split.input_gradients(roots)
                body.release(held)
                note(kind)
                split.weight_gradients()
            if kind is INPUT_GRADIENT:
                note(WEIGHT_GRADIENT)
            self.assumed |= body.inexact
        body.finish()
        return runs

    def _inputs(
        self, index: int, received: Collection[str]
    ) -> tuple[dict[str, tuple[TensorForm, int]], list[int]]:
        """The sources of a stage, and the storages that are there for one microbatch only."""
        program, ledger = self.program.programs[index], self.books.ledger
        sources, held = dict(self.sources), []
        for value in program.graph.inputs:
            form = contiguous_form(program.input_layouts[value.name], value, self.books.footprints)
            if value.name in received:
                storage = ledger.hold(ledger.new(form.num_bytes, "activation"))
            else:
                # The samples of all microbatches are in the base already.
                storage = ledger.hold(ledger.new(0, "input"))
            held.append(storage)
            sources[value.name] = form, storage
        return sources, held

    def _roots(self, body: BodyMemory, sent: Iterable[IRValue]) -> dict[str, Gradient]:
        """The gradients that come into a stage: those of what it sends, or that of the loss."""
        ledger = self.books.ledger
        roots: dict[str, Gradient] = {}
        for value in sent:
            form = body.values[value.name].form
            if form.requires_grad and value.name not in roots:
                roots[value.name] = form, ledger.hold(ledger.new(form.num_bytes, "temporary"))
        return roots or self.books.roots(body.program, body)


def _add(totals: dict[str, int], more: Mapping[str, int], times: int) -> None:
    for key, value in more.items():
        totals[key] = totals.get(key, 0) + times * value
