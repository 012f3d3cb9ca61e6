"""The outer search: meshes, pipeline stages, schedules, and what is computed again.

    for every number of pipeline positions, and every mesh of the ranks of one position:
        place the whole model on that mesh                                    (placement.py: every operator, exact or bounded)
        for every schedule: cut the chain of blocks into stages               (stages.py: exact under its model)
    lower the most promising plans and audit them: adapters, messages and actions that are really emitted
        one that takes more memory than was predicted is cut into stages again, with as much less to be used
    the best that fits the memory is the answer

Costs that decide are audited ones. What the search covers exactly and what it restricts is in the certificate: stages have
equal meshes, consecutive ranks, and the placement that is best for the whole model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.operators import OperatorTimes
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.passes.recompute import mark_recompute
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.blocks import container_of
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.schedule.generate import SCHEDULES, generate
from shardwright.compiler.schedule.memory import peak_in_flight
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.blocks import Costs, Setting, block_costs, operator_times
from shardwright.policies.autodist.candidates import Pace, divisors, paces, staged
from shardwright.policies.autodist.chain import Part, block_starts, layer_blocks, layer_parts
from shardwright.policies.autodist.stages import Block, InFlight, NoFit, Split, split_stages
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True)
class Placed:
    """The best placement of the whole model on one mesh. ``bound_s``: no placement on it takes less per step, for the reason
    ``proof``, of those in ``space``.
    """

    plan: Plan
    bound_s: float
    proof: str
    space: str


@dataclass(frozen=True)
class Wish:
    """What is to be placed: the whole model on a mesh over the first ranks of the unit.

    ``memory_bytes``: what all of it may take on a rank, with ``in_flight`` microbatches' activations; those of ``recompute``
    are computed again.
    """

    mesh: Mesh
    num_microbatches: int
    memory_bytes: float | None = None
    in_flight: int = 1
    recompute: tuple[str, ...] = ()


MAX_CORRECTIONS = 3
"""How often the stages of a schedule are cut again because the audit finds more memory used than the model of stages."""

CORRECTION = 1.05
"""By how much of that the limit is lowered."""

Placer = Callable[[Wish], Placed]
"""Raises :class:`PlanError` if nothing is allowed, or nothing fits."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched. ``None`` leaves a choice to the search.

    ``num_positions``: pipeline positions; 1 is no pipeline. ``meshes``: of the ranks of one position, by their number.
    ``recompute``: module paths computed again, whatever the memory; ``None``: layers, as few as memory asks for.
    """

    meshes: Mapping[int, Sequence[Mesh]]
    num_microbatches: int
    num_positions: int | None = None
    schedules: Sequence[str] = ("1f1b",)
    chunks: int | None = None
    stage_starts: Sequence[str] | None = None
    recompute: Sequence[str] | None = None
    memory_bytes: float = float("inf")
    audits: int = 6


@dataclass(frozen=True)
class Attempt:
    """What a candidate was made of: a placement lowered on the mesh of one position, to be cut into stages for a schedule."""

    title: str
    placed: Placed
    program: Program
    setting: Setting
    num_positions: int
    pace: Pace


@dataclass(frozen=True)
class Candidate:
    """A plan and what it costs. ``predicted_s``: by the model of stages; ``cost``: audited. ``used_bytes``: of the fullest
    rank, by that model.
    """

    title: str
    plan: Plan
    predicted_s: float
    placed: Placed
    split_bound_s: float = 0.0
    cost: PlanCost | None = None
    used_bytes: float = 0.0
    attempt: Attempt | None = field(default=None, repr=False, compare=False)

    @property
    def bound_s(self) -> float:
        """Of a pipeline on these meshes: the share of a position in the work of any placement, and what no split of this
        placement into stages can avoid.
        """
        positions = dict(self.plan.mesh.axes).get("pp", 1) if self.plan.stages else 1
        return max(self.placed.bound_s / positions, self.split_bound_s if self.plan.stages else 0.0)

    @property
    def step_s(self) -> float:
        return self.predicted_s if self.cost is None else self.cost.step_s


@dataclass
class Found:
    """What a search has found so far. ``audited``: candidates that were lowered, best first; ``others``: predicted only;
    ``refused``: what was tried and why it is no candidate.
    """

    audited: list[Candidate] = field(default_factory=list)
    others: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None
    seconds: float = 0.0

    @property
    def best(self) -> Candidate | None:
        return self.audited[0] if self.audited else None

    @property
    def bound_s(self) -> float:
        """No plan of the space takes less, as far as placements have been bounded."""
        return min((c.bound_s for c in (*self.audited, *self.others)), default=float("inf"))


class Search:
    """One search. ``found`` is valid at any time, so an interrupted search still has an answer."""

    def __init__(
        self,
        graph: PlannableGraph,
        config: ComputeConfig,
        hardware: Hardware,
        space: Space,
        place: Placer,
        *,
        optimizer: OptimizerMemory = ADAM,
        times: OperatorTimes | None = None,
        time_limit_s: float = float("inf"),
    ) -> None:
        self.graph, self.config, self.space, self.place = graph, config, space, place
        self.hardware, self.optimizer, self.times = hardware, optimizer, times
        self.time_limit_s = time_limit_s
        self.found = Found()

    def run(self) -> Found:
        """Search until done, out of time, or interrupted from the keyboard."""
        began = time.monotonic()
        try:
            for num_positions, mesh in self._meshes():
                if time.monotonic() - began > self.time_limit_s and self.found.others:
                    self.found.interrupted = f"the time limit of {self.time_limit_s:.0f} s"
                    break
                self._try_mesh(num_positions, mesh)
            self._audit_best()
        except KeyboardInterrupt:
            if not self.found.others and not self.found.audited:
                raise
            self.found.interrupted = "Ctrl-C"
            self._audit_best(most=1)
        self.found.seconds = time.monotonic() - began
        return self.found

    # -------------------------------------------------------------------------------------------- candidates

    def _meshes(self) -> Iterable[tuple[int, Mesh]]:
        """Numbers of positions and the meshes of one; without a pipeline first."""
        numbers = [self.space.num_positions] if self.space.num_positions else divisors(self.config.plan_ngpus)
        for number in numbers:
            if number == 1 or (self.config.use_end2end and number <= len(self.graph.ops)):
                for mesh in self.space.meshes.get(self.config.plan_ngpus // number, ()):
                    yield number, mesh

    def _try_mesh(self, num_positions: int, mesh: Mesh) -> None:
        """All schedules on one mesh: placed for speed alone first, and for the memory too if that does not fit, or only with
        layers computed again.
        """
        space, title = self.space, _title(num_positions, mesh)
        seen: list[Plan] = []
        for wish in self._wishes(num_positions, mesh):
            try:
                placed = self._over_units(self.place(wish))
            except PlanError as error:
                self.found.refused[title] = f"{error.what}: {error.why}" if error.why else error.what
                continue
            if any(placed.plan.strategies == plan.strategies and placed.plan.stored == plan.stored for plan in seen):
                continue
            seen.append(placed.plan)
            title = _title(num_positions, placed.plan.mesh)  # its axes may have better names by now
            ranks = tuple(range(mesh.size))
            setting = Setting(self.hardware, self.config, ranks, self.optimizer, self.times, space.num_microbatches)
            program = lower(self.graph, placed.plan)
            tried = [
                self._try(Attempt(_paced(title, pace), placed, program, setting, num_positions, pace), space.memory_bytes)
                for pace in self._paces(num_positions)
            ]
            self.found.others += filter(None, tried)
            if any(candidate is not None and not candidate.plan.recompute for candidate in tried):
                return

    def _over_units(self, placed: Placed) -> Placed:
        """With parameters stored over the units where the config has ZeRO-3: so the program will be."""
        return replace(placed, plan=replace(placed.plan, zero=units_of_storage(self.config)))

    def _wishes(self, num_positions: int, mesh: Mesh) -> Iterable[Wish]:
        """What to ask of the placement, one after the other."""
        space = self.space
        given = tuple(space.recompute or ())
        yield Wish(mesh, space.num_microbatches, recompute=given)
        if space.memory_bytes < float("inf"):
            # The first of the positions has as many microbatches in flight as there are positions, and a share of the model.
            memory, in_flight = space.memory_bytes * num_positions, min(num_positions, space.num_microbatches)
            yield Wish(mesh, space.num_microbatches, memory, in_flight, given)
            if space.recompute is None:
                layers = layer_blocks(self.graph)[1]
                every = tuple(dict.fromkeys(f"{_stem(path)}.*" for path in layers.values()))
                if every:
                    yield Wish(mesh, space.num_microbatches, memory, in_flight, every)

    def _paces(self, num_positions: int) -> Sequence[Pace]:
        if num_positions == 1:
            return (Pace("", 1),)
        space = self.space
        return paces(num_positions, space.num_microbatches, space.schedules, space.chunks, most=len(self.graph.ops))

    def _try(self, attempt: Attempt, memory_bytes: float) -> Candidate | None:
        """The best stages for a schedule, if any fit."""
        pace, program = attempt.pace, attempt.program
        best: Candidate | None = None
        needed = float("inf")
        for starts, layers in self._chains(program, attempt.setting, attempt.num_positions * pace.chunks):
            costs = self._costs(program, starts, layers, attempt.setting)
            split = self._split(costs.free(), attempt.num_positions, pace, attempt.placed.plan.mesh.size, memory_bytes)
            if isinstance(split, NoFit):
                needed = min(needed, split.needed_bytes)
                continue
            candidate = self._candidate(attempt, split, starts, layers, costs)
            if best is None or candidate.predicted_s < best.predicted_s:
                best = candidate
        if best is None:
            self.found.refused[attempt.title] = _too_large(needed * pace.chunks, self.space.memory_bytes)
        else:
            self.found.refused.pop(attempt.title, None)
        return best

    def _chains(self, program: Program, setting: Setting, num_stages: int) -> Sequence[tuple[list[int], Mapping[int, str]]]:
        """The ways to see the model as blocks: finely, where nothing is computed again, and by layers, which may be."""
        if self.space.stage_starts is not None:
            position = {op.name: index for index, op in enumerate(self.graph.ops)}
            return [([0, *(position[name] for name in self.space.stage_starts)], {})]
        by_layer, layers = layer_blocks(self.graph)
        found: list[tuple[list[int], Mapping[int, str]]] = []
        if self.space.recompute is None or not self.space.recompute:
            times = operator_times(program, setting)
            found.append((block_starts(self.graph, [times[op.name] for op in self.graph.ops], num_stages), {}))
        if layers and len(by_layer) >= num_stages:
            found.append((by_layer, layers))
        return found

    def _costs(self, program: Program, starts: Sequence[int], layers: Mapping[int, str], setting: Setting) -> Costs:
        """The costs of the blocks; what the user wants computed again is, in all of them."""
        wishes = self.space.recompute

        def wished(part: Part) -> bool:
            return any(_matches(part.path, wish) for wish in wishes or ())

        parts = layer_parts(self.graph, starts, layers)
        return block_costs(program, starts, parts, setting, None if wishes is None else wished)

    def _split(self, blocks: Sequence[Block], num_positions: int, pace: Pace, size: int, memory_bytes: float) -> Split | NoFit:
        """The best stages. Several stages on one position share its memory evenly."""
        num_stages = num_positions * pace.chunks
        count = self.space.num_microbatches
        return split_stages(
            {size: blocks},
            num_stages * size,
            num_stages,
            count,
            memory_bytes=memory_bytes / pace.chunks,
            in_flight=_in_flight(num_positions, pace, count),
            splits_backward=pace.schedule != "" and SCHEDULES[pace.schedule].splits_backward,
        )

    def _candidate(
        self, attempt: Attempt, split: Split, starts: Sequence[int], layers: Mapping[int, str], costs: Costs
    ) -> Candidate:
        count, pace = self.space.num_microbatches, attempt.pace
        chosen = [costs.ways[block][way] for stage in split.stages for block, way in stage.recomputed]
        recompute = self.space.recompute
        if recompute is None:
            recompute = _shortened([part for way in chosen for part in way.parts], layers)
        plan = replace(attempt.placed.plan, recompute=tuple(recompute))
        if attempt.num_positions > 1:
            first_ops = [self.graph.ops[starts[stage.start]].name for stage in split.stages[1:]]
            plan = staged(plan, first_ops, attempt.num_positions, pace, count)
        predicted = _predicted_s(split, costs.free(), attempt.num_positions, pace, count)
        title = attempt.title + _again_in_words([way.parts for way in chosen], layers)
        used = split.used_bytes * pace.chunks
        return Candidate(title, plan, predicted, attempt.placed, split.bound_s, used_bytes=used, attempt=attempt)

    # -------------------------------------------------------------------------------------------- audits

    def _audit_best(self, most: int | None = None) -> None:
        """Lower and audit the most promising candidates; what does not fit is cut again for less memory, or refused."""
        waiting = [(candidate, 0) for candidate in self.found.others]
        wanted = self.space.audits if most is None else most
        audits = 0
        while waiting and (audits < wanted or not self.found.audited):
            waiting.sort(key=lambda item: item[0].predicted_s)
            candidate, corrections = waiting.pop(0)
            audits += 1
            cost = self.audited(candidate.plan)
            if cost.peak_bytes <= self.space.memory_bytes:
                self.found.audited.append(replace(candidate, cost=cost))
            else:
                self.found.refused[candidate.title] = _too_large(cost.peak_bytes, self.space.memory_bytes)
                mended = self._mended(candidate, cost.peak_bytes) if corrections < MAX_CORRECTIONS else None
                if mended is not None:
                    self.found.refused.pop(candidate.title, None)
                    waiting.append((mended, corrections + 1))
            self.found.audited.sort(key=lambda candidate: candidate.step_s)
            self.found.others = [candidate for candidate, _ in waiting]

    def _mended(self, candidate: Candidate, peak_bytes: float) -> Candidate | None:
        """The candidate cut again, for as much less memory as it took too much; None if that leaves nothing else."""
        attempt = candidate.attempt
        if attempt is None:
            return None
        found = self._try(attempt, candidate.used_bytes - CORRECTION * (peak_bytes - self.space.memory_bytes))
        return None if found is None or found.plan == candidate.plan else found

    def audited(self, plan: Plan) -> PlanCost:
        """The cost of a plan, from the program that is really emitted."""
        graph: IRGraph = self.graph
        if plan.recompute:
            graph = mark_recompute(graph, plan.recompute, stage_of_ops(graph, plan) if plan.stages else {})
        if plan.stages:
            return audit(lower_stages(graph, plan), self.config, self.hardware, optimizer=self.optimizer, times=self.times)
        return audit(
            lower(graph, plan), self.config, self.hardware,
            optimizer=self.optimizer, times=self.times, num_microbatches=self.space.num_microbatches,
        )  # fmt: skip


def _paced(title: str, pace: Pace) -> str:
    return f"{title}, {pace.schedule}" + (f" x{pace.chunks}" if pace.chunks > 1 else "") if pace.schedule else title


def _title(num_positions: int, mesh: Mesh) -> str:
    sizes = [f"pp={num_positions}"] * (num_positions > 1) + [str(mesh)] * (mesh.size > 1)
    return " x ".join(sizes) or "one rank"


def _in_flight(num_positions: int, pace: Pace, num_microbatches: int) -> InFlight:
    """Microbatches that a stage holds by its place from the end, taken from the schedule itself."""
    if not pace.schedule:
        return lambda place: 1
    schedule = generate(pace.schedule, num_positions, num_microbatches, pace.chunks)
    peaks = [-(-peak // pace.chunks) for peak in peak_in_flight(schedule)]
    return lambda place: peaks[schedule.placement[schedule.num_stages - place]]


def _predicted_s(split: Split, blocks: Sequence[Block], num_positions: int, pace: Pace, num_microbatches: int) -> float:
    """The time of a step: the formula of the split for schedules it is exact for, a simulation for the others."""
    if pace.schedule in ("", "1f1b", "gpipe") and pace.chunks == 1:
        return split.cost_s
    times, once = [], [0.0] * num_positions
    schedule = generate(pace.schedule, num_positions, num_microbatches, pace.chunks)
    for index, stage in enumerate(split.stages):
        own = blocks[stage.start : stage.stop]
        forward = sum(block.forward_s for block in own)
        backward = sum(block.backward_s for block in own) + sum(blocks[i].again[way].time_s for i, way in stage.recomputed)
        times.append(StageTimes(forward, backward / 2, backward / 2))
        once[schedule.placement[index]] += sum(block.once_s for block in own)
    transfers: dict[tuple[int, int], float] = {}
    for index, stage in enumerate(split.stages[1:], start=1):
        one_way = blocks[stage.start].transfer_s / 2
        transfers |= {(index - 1, index): one_way, (index, index - 1): one_way}
    return simulate(schedule, times, transfers).makespan_s + max(once)


def _too_large(needed_bytes: float, limit_bytes: float) -> str:
    if needed_bytes == float("inf"):
        return "the model cannot be cut into so many stages"
    return f"it needs {needed_bytes / 1e9:.2f} GB on a device, and {limit_bytes / 1e9:.2f} GB are allowed"


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(a, b) for a, b in zip(parts, wanted, strict=True))


def _shortened(parts: Sequence[Part], layers: Mapping[int, str]) -> tuple[str, ...]:
    """Their paths; ``model.layers.*`` or ``model.layers.*.mlp`` where those of all layers of a list are meant."""
    every = Counter(_stem(path) for path in layers.values())
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.pattern, []).append(part)
    names: list[str] = []
    for pattern, members in found.items():
        stem = _stem(pattern.replace("*", "0", 1))
        names += [pattern] if len(members) == every[stem] > 1 else [part.path for part in members]
    return tuple(names)


def _stem(path: str) -> str:
    """``model.layers`` of ``model.layers.3`` and what is inside of it."""
    found = container_of(path)
    assert found is not None
    return found[0]


def _again_in_words(chosen: Sequence[Sequence[Part]], layers: Mapping[int, str]) -> str:
    """``, 3 of 8 layers computed again``, and of how many some modules."""
    whole = sum(1 for parts in chosen if any(part.path in layers.values() for part in parts))
    words = [f"{whole} of {len(layers)} layers"] if whole else []
    words += [f"parts of {len(chosen) - whole}"] if len(chosen) > whole else []
    return f", {' and '.join(words)}{'' if whole else f' of {len(layers)} layers'} computed again" if words else ""
