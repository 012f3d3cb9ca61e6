"""What the page of a plan says of the program itself: the model, its stages and layers, memory over
time, and where each module stands in the generated file.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.compile import Compiled
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.memory.ledger import Moment
from shardwright.compiler.cost.memory.pipeline_memory import pipeline_memory_over_time
from shardwright.compiler.cost.memory.step_memory import memory_over_time
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.plan_cost import PlanCost, spans
from shardwright.compiler.cost.time.body_time import BodyTime, body_time
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.cost.work_share import one_device_operations
from shardwright.compiler.ir.size import in_example
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Compute, Declaration, Program, steps
from shardwright.runtime.layout import Layout

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NAMED_DIMS = 4
"""The most inputs whose shapes are facts of the page."""


@dataclass(frozen=True)
class Layer:
    """The seconds of one microbatch in a layer: in its operators, forward and backward, and in what
    its ranks exchange.
    """

    name: str
    computing_s: float = 0.0
    communicating_s: float = 0.0


@dataclass(frozen=True)
class StageRow:
    """A stage: its ranks, the layers that it runs, its parameters, and its seconds for a
    microbatch. ``parts``: those of the layers that another stage runs a part of, too.
    ``begins_inside``: the module in which such a layer goes on here; empty where none does.
    """

    index: int
    ranks: Sequence[int]
    layers: tuple[str, ...]
    parts: tuple[str, ...]
    begins_inside: str
    num_parameters: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Details:
    """What a page can say of a compiled plan. ``facts``: pairs of name and value. ``moments``: what
    ranks hold during a step, by the ranks that are alike. ``modules``: the path of the module of
    each operator. ``sources``: generated files by rank, one for each position of a pipeline.
    """

    facts: list[tuple[str, str]]
    layers: list[Layer]
    stages: list[StageRow]
    modules: dict[str, str] = field(default_factory=dict)
    moments: dict[tuple[int, ...], list[Moment]] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        compiled: Compiled,
        cost: PlanCost,
        hardware: Hardware,
        *,
        optimizer: OptimizerMemory = ADAM,
        times: OperatorTimes | None = None,
        num_microbatches: int | None = None,
    ) -> Details:
        """The details of a plan that was priced as ``cost``. ``optimizer``, ``times`` and
        ``num_microbatches``: those that it was priced with.
        """
        program, config = compiled.program, compiled.config
        parts = [program] if isinstance(program, Program) else list(program.programs)
        ranks = [range(config.plan_ngpus)] if isinstance(program, Program) else [
            stage.ranks for stage in program.plan.stages
        ]  # fmt: skip
        bodies = [
            body_time(
                part, hardware, tuple(own), times,
                trains=not config.inference_only, unit_size=config.plan_ngpus,
            )
            for part, own in zip(parts, ranks, strict=True)
        ]  # fmt: skip
        count = num_microbatches or _microbatches(program)
        if isinstance(program, PipelineProgram):
            stages = _stages(parts, ranks, bodies)
            moments = pipeline_memory_over_time(program, config, optimizer, hardware.backend)
        else:
            stages = []
            alone = memory_over_time(
                program,
                config,
                optimizer,
                num_microbatches=count,
                backend=hardware.backend,
            )
            moments = {tuple(range(config.plan_ngpus)): alone}
        return cls(
            _facts(compiled, parts, cost, hardware, count),
            layers_of(bodies),
            stages,
            {op.name: op.module_path for op in program.graph.ops},
            moments,
            {own[0]: compiled.files[f"gencode{own[0]}.py"] for own in moments},
        )


def stored_layouts(compiled: Compiled) -> dict[str, Layout]:
    """How each tensor is held, by name."""
    return {d.value.fqn or d.value.name: d.layout for d in compiled.declarations}


def _microbatches(program: Program | PipelineProgram) -> int:
    if isinstance(program, PipelineProgram):
        return program.plan.num_microbatches
    return 1 if program.plan.batch is None else program.plan.batch.num_microbatches


def _facts(
    compiled: Compiled,
    parts: Sequence[Program],
    cost: PlanCost,
    hardware: Hardware,
    num_microbatches: int,
) -> list[tuple[str, str]]:
    """The model, and the speed that is predicted for it."""
    config, graph = compiled.config, compiled.program.graph
    parameters = _parameters(compiled.declarations)
    kinds = sorted({_dtype(value) for value in parameters})
    count = sum(map(_elements, parameters))
    facts = [("parameters", counted(count)), ("dtype", ", ".join(kinds) or "none")]
    inputs = [v for v in graph.inputs if v.shape][:_NAMED_DIMS]
    if inputs and _is_text(inputs[0]):
        batch, length = _sizes(inputs[0])
        facts += [("samples of a microbatch", str(batch)), ("sequence", str(length))]
    facts += [(f"{v.name}", f"{_dtype(v)}{_sizes(v)}") for v in inputs]
    facts += [("microbatches of a step", str(num_microbatches))]
    stage = compiled.plan.zero_stage if compiled.plan.zero_stage is not None else config.use_zero
    facts += [("ZeRO", f"stage {int(stage)}" if stage else "off")]
    recomputed = compiled.plan.recompute
    named = ", ".join(recomputed) if len(recomputed) < 3 else f"{len(recomputed)} modules"
    facts += [("computed again", named or "nothing")]
    if cost.step_s > 0:
        samples = num_microbatches * config.num_units
        facts += _speed(parts, cost.step_s, samples, inputs, kinds, hardware, config.runtime_ngpus)
    return facts


def _speed(
    parts: Sequence[Program],
    step_s: float,
    samples: int,
    inputs: Sequence[IRValue],
    kinds: Sequence[str],
    hardware: Hardware,
    num_devices: int,
) -> list[tuple[str, str]]:
    """Elements of the first input per second, which are tokens for a language model, and the part
    of the devices' arithmetic that the model makes use of.
    """
    found = []
    if inputs:
        first = inputs[0]
        num = math.prod(_sizes(first)) if _is_text(first) else _sizes(first)[0]
        what = "tokens/s" if _is_text(first) else "samples/s"
        found.append((what, f"{num * samples / step_s:,.0f}"))
    if len(kinds) == 1 and kinds[0] in hardware.device.flops_per_s:
        peak = hardware.device.peak_flops_per_s(kinds[0]) * num_devices
        used = sum(map(one_device_operations, parts)) * samples
        found.append(("MFU", f"{used / peak / step_s:.1%}"))
    return found


def _is_text(value: IRValue) -> bool:
    """Whether an input is rows of tokens."""
    return not value.dtype.is_floating_point and len(value.shape) == 2


def layers_of(bodies: Iterable[BodyTime]) -> list[Layer]:
    """The layers of a model in the order in which they first run. An adapter belongs to the layer
    of the operator before it.
    """
    found: dict[str, Layer] = {}
    for body in bodies:
        name = ""
        for instruction, time in body.instructions:
            is_call = isinstance(instruction, Compute)
            if isinstance(instruction, Compute):
                name = layer_name(instruction.original.module_path)
            layer = found.get(name, Layer(name))
            found[name] = Layer(
                name,
                layer.computing_s + (time.total_s if is_call else 0.0),
                layer.communicating_s + (0.0 if is_call else time.total_s),
            )
    return [layer for layer in found.values() if layer.computing_s + layer.communicating_s > 0]


def layer_name(path: str) -> str:
    """The layer of a module: ``model.layers.3`` for ``model.layers.3.mlp.up``; the whole path where
    it has no number.
    """
    match = re.match(r"(.*?\.)?\d+(?=\.|$)", path)
    return match[0] if match else path


def _stages(
    parts: Sequence[Program], ranks: Sequence[Sequence[int]], bodies: Sequence[BodyTime]
) -> list[StageRow]:
    # The modules of each stage in the order in which it calls them.
    modules = [
        [call.original.module_path for call in steps(part.body) if isinstance(call, Compute)]
        for part in parts
    ]
    layers = [dict.fromkeys(map(layer_name, paths)) for paths in modules]
    found = []
    for index, (part, own, body) in enumerate(zip(parts, ranks, bodies, strict=True)):
        others = [names for other, names in enumerate(layers) if other != index]
        # What is no numbered layer, such as the model's own forward, lies in several stages anyway.
        shared = [
            name
            for name in layers[index]
            if _NUMBER.search(f".{name}") and any(name in names for names in others)
        ]
        before = {name for names in layers[:index] for name in names}
        inside = (
            path for path in modules[index] if layer_name(path) in before.intersection(shared)
        )
        names = [name for name in layers[index] if not _is_above(name, layers[index])]
        count = sum(map(_elements, _parameters(part.declarations)))
        found.append(
            StageRow(
                index, own, tuple(names), tuple(shared), next(inside, ""), count,
                body.forward_s, body.backward_s,
            )
        )  # fmt: skip
    return found


def _is_above(name: str, others: Iterable[str]) -> bool:
    """Whether a module holds another of these."""
    return any(other.startswith(f"{name}.") for other in others) if name else False


def _parameters(declarations: Iterable[Declaration]) -> list[IRValue]:
    return [d.value for d in declarations if d.value.kind is ValueKind.PARAMETER]


def _elements(value: IRValue) -> int:
    return math.prod(_sizes(value))


def _sizes(value: IRValue) -> list[int]:
    """The sizes of a tensor; one that varies is that of the example."""
    return [size if isinstance(size, int) else int(in_example(size)) for size in value.shape]


def named_apart(name: str, others: Iterable[str]) -> str:
    """A layer by a name that says whether it is what a module computes besides others of these."""
    return f"{name} itself" if _is_above(name, others) else name


def in_runs(names: Iterable[str]) -> str:
    """Layers in a few words: ``h.0-5, ln_f`` for seven of them."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        head, _, last = name.rpartition(".")
        if last.isdigit():
            numbers.setdefault(f"{head}.", []).append(int(last))
        else:
            numbers.setdefault(name or "top-level forward", [])
    return ", ".join(
        f"{head}{spans(sorted(found))}" if found else head for head, found in numbers.items()
    )


def lines_of(source: str) -> dict[str, int]:
    """The line of a generated file at which each module begins, by its path with ``*`` for the
    number of a layer, and at which each variable is first assigned, by its name.
    """
    found: dict[str, int] = {}
    container = ""
    for number, line in enumerate(source.splitlines(), 1):
        if block := re.match(r'\s+"""``block`` is one of ``(.+?)``', line):
            container = f"{block[1]}.*"
            found.setdefault(container, number)
        elif re.match(r"    def forward", line):
            container = ""
        elif header := re.fullmatch(r"        # ([\w.]+)", line):
            own = "" if header[1] == "block" else header[1]
            path = ".".join(part for part in (container, own) if part)
            found.setdefault(_NUMBER.sub("*", path), number)
        elif assigned := re.match(r"        (\w+) = ", line):
            found.setdefault(assigned[1], number)
    return found


def anchor(rank: int, line: int) -> str:
    """The anchor of a line in the file of a rank."""
    return f"rank{rank}-{line}"


def numbered_source(source: str, rank: int) -> str:
    """The file of a rank as HTML, with an anchor in each line."""
    lines = (
        f'<span id="{anchor(rank, number)}">{html.escape(line)}</span>'
        for number, line in enumerate(source.splitlines(), 1)
    )
    return "\n".join(lines)


def starred(path: str) -> str:
    """A module path with ``*`` for the number of a layer."""
    return _NUMBER.sub("*", path)


def _dtype(value: IRValue) -> str:
    return str(value.dtype).removeprefix("torch.")


def counted(count: float) -> str:
    """A number of parameters: ``6.74 billion``, ``124 million``, ``512``."""
    for size, name in ((1e9, " billion"), (1e6, " million")):
        if count >= size:
            return f"{count / size:.3g}{name}"
    return f"{count:,.0f}"


def over_tiers(
    hardware: Hardware, names: Iterable[str], axes: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """Over which tier each exchange goes, by its name, such as ``tp all_reduce``. ``axes``: the
    ranks of the first group along each axis.
    """
    found = {}
    for name in names:
        own = [axes[axis] for axis in re.split(r"[+ ]", name)[:-1] if axis in axes]
        ranks = sorted({rank for group in own for rank in group})
        if len(ranks) > 1:
            found[name] = tier_of(hardware, ranks)
    return found


def tier_of(hardware: Hardware, ranks: Sequence[int]) -> str:
    """The innermost tier that has all of these devices in one group."""
    for tier in hardware.tiers:
        groups = tier.group_of
        if len({int(groups[rank]) for rank in ranks if rank < len(groups)}) == 1:
            return tier.name
    return hardware.tiers[-1].name if hardware.tiers else ""
