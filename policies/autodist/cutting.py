"""Cut an attempt into stages: the chains that the model is seen as, what their blocks cost, and the plan of the best cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.program import Program
from shardwright.compiler.schedule.generate import SCHEDULES, generate
from shardwright.compiler.schedule.memory import peak_in_flight
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.policies.autodist.blocks import Costs, Setting, block_costs, operator_times
from shardwright.policies.autodist.candidates import Pace, staged
from shardwright.policies.autodist.chain import Part, block_starts, layer_blocks, layer_list, layer_parts
from shardwright.policies.autodist.found import Attempt, Candidate
from shardwright.policies.autodist.space import Space
from shardwright.policies.autodist.stages import Block, InFlight, NoFit, Split, split_stages
from shardwright.policies.autodist.words import again_in_words


class Cutter:
    """Cuts attempts on one graph into stages."""

    def __init__(self, graph: PlannableGraph, space: Space) -> None:
        self.graph, self.space = graph, space

    def cut(self, attempt: Attempt, memory_bytes: float) -> Candidate | NoFit:
        """The best stages for the schedule of an attempt that take no more than ``memory_bytes`` by the model of stages."""
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
        return NoFit(needed * pace.chunks) if best is None else best

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
        title = attempt.title + again_in_words([way.parts for way in chosen], layers)
        used = split.used_bytes * pace.chunks
        return Candidate(title, plan, predicted, attempt.placed, split.bound_s, used_bytes=used, attempt=attempt)


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


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(a, b) for a, b in zip(parts, wanted, strict=True))


def _shortened(parts: Sequence[Part], layers: Mapping[int, str]) -> tuple[str, ...]:
    """Their paths; ``model.layers.*`` or ``model.layers.*.mlp`` where those of all layers of a list are meant."""
    every = Counter(layer_list(path) for path in layers.values())
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.pattern, []).append(part)
    names: list[str] = []
    for pattern, members in found.items():
        stem = layer_list(pattern.replace("*", "0", 1))
        names += [pattern] if len(members) == every[stem] > 1 else [part.path for part in members]
    return tuple(names)
