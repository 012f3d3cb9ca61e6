"""A plan and its cost as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, StrictUndefined

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.memory.rank_memory import CATEGORIES
from shardwright.compiler.cost.plan_cost import PlanCost, RankCost, spans
from shardwright.compiler.cost.time.after_backward import GRADIENTS, STAGES
from shardwright.compiler.cost.time.exchange_time import WHOLES
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.report.pictures import (
    Bar,
    Box,
    bars,
    over_time,
    ranks_on_machine,
    timeline,
)
from shardwright.frontend.report.plan_details import (
    Details,
    Layer,
    StageRow,
    anchor,
    counted,
    in_runs,
    layer_name,
    lines_of,
    named_apart,
    numbered_source,
    over_tiers,
    starred,
    tier_of,
)
from shardwright.frontend.report.plan_tables import (
    alike_rows,
    axes_of,
    has_own_meshes,
    in_words,
    mesh_in_words,
    stages_in_words,
)
from shardwright.runtime.layout import Layout
from shardwright.runtime.ranks.groups import UNITS

ROWS_SHOWN = 64
"""Bars beyond that many are left out. Ranks that are alike share one."""

LABEL_LENGTH = 17
"""Letters of a bar's label that there is room for."""

LAYER_LETTERS, LAYER_LABEL = 34, 260
"""Letters of the label of a layer, and the width that they need."""

POSITIONS_SHOWN = 8
"""Positions of a pipeline whose memory over time, and whose files, are shown."""

MODULES_NAMED = 8
"""The most recomputed modules that are named."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A table or a file that a reader unfolds. ``place``: where it stands in a generated file, as
    the anchor and in words. ``source`` is HTML.
    """

    name: str
    text: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    place: tuple[str, str] | None = None
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: a sentence, a picture, a table, and what is unfolded, in this order.
    ``picture`` is HTML.
    """

    title: str
    text: str = ""
    picture: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    groups: Sequence[Group] = ()


def page(
    model: str,
    plan: Plan,
    cost: PlanCost,
    hardware: Hardware,
    *,
    num_units: int = 1,
    memory_bytes: float | None = None,
    stored: Mapping[str, Layout] | None = None,
    details: Details | None = None,
    facts: Iterable[tuple[str, str]] = (),
    sections: Iterable[Section] = (),
) -> str:
    """The page. ``details``: what is known of the program besides its cost. ``facts`` and
    ``sections`` come beside those that every plan has, ``sections`` before them. ``stored``: the
    layouts of tensors by name, with those that lowering has chosen (default: those of the plan).
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    text = (
        resources.files("shardwright.frontend.report")
        .joinpath("templates/page.html.jinja")
        .read_text()
    )
    limit = hardware.device.memory_bytes if memory_bytes is None else memory_bytes
    units = f", {num_units} units" if num_units > 1 else ""
    known = [
        ("per step", amount(cost.step_s, "s")),
        ("on the fullest rank", amount(cost.peak_bytes, "B")),
    ]
    if plan.stages:
        known += [("waiting in the pipeline", f"{cost.bubble:.1%}"), *_about_stages(plan)]
    return environment.from_string(text).render(
        title=f"{model}: {plan.policy} on {mesh_in_words(plan)}",
        subtitle=f"{hardware.name}{units}. Times and bytes are predicted; "
        "docs/cost-model.md says how well.",
        facts=[*known, *([] if details is None else details.facts), *facts],
        sections=[
            *sections,
            *_sections(
                plan, cost, hardware, limit, plan.stored if stored is None else stored, details
            ),
        ],
    )


def _about_stages(plan: Plan) -> list[tuple[str, str]]:
    """The schedule, and how much it runs."""
    counts = (
        f"{stages_in_words(plan)}, {plan.num_microbatches} "
        f"microbatch{'es' if plan.num_microbatches > 1 else ''}"
    )
    return [(counts, plan.schedule)]


def _sections(
    plan: Plan,
    cost: PlanCost,
    hardware: Hardware,
    limit: float,
    stored: Mapping[str, Layout],
    details: Details | None,
) -> list[Section]:
    rows: dict[str, list[Box]] = {}
    for activity in cost.timeline:
        rows.setdefault(f"rank {activity.rank}", []).append(
            Box(activity.name, activity.start_s, activity.end_s)
        )
    # By rank, the parts of its peak in the order of the legend, without empty ones.
    held = (
        {key: float(m.by_category[key]) for key in CATEGORIES if m.by_category.get(key)}
        for m in cost.memory
    )
    memory, more_memory = _alike(zip((m.rank for m in cost.memory), held, strict=True))
    spent, more_spent = _alike(
        (rank.rank, _parts_of_step(rank, cost.step_s)) for rank in cost.ranks
    )
    moments = sorted({(m.moment or "the start") for m in cost.memory})
    return [
        Section(title="A step in time", text=_about_timeline(plan), picture=timeline(rows)),
        *([] if details is None else _of_layers(details)),
        Section(
            title="Memory at its peak",
            text="Reached at: "
            f"{', '.join(moments[:4])}{' and others' if len(moments) > 4 else ''}.{more_memory}",
            picture=bars(memory, "B", limit=limit),
        ),
        *([] if details is None or not details.moments else [_of_moments(details, limit)]),
        Section(
            title="Where the time goes",
            text=f"{_about_hidden(cost)}{more_spent}".strip(),
            picture=bars(spent, "s"),
        ),
        Section(
            title="Communication",
            text=_about_communication(cost),
            columns=(
                "axis and collective, or message",
                "time in a step",
                "bytes in a step",
                "over",
            ),
            rows=_communication(plan, cost, hardware),
        ),
        Section(
            title="Ranks on the machine",
            text=f"A frame is {hardware.tiers[0].name}." if hardware.tiers else "",
            picture=ranks_on_machine(_places(plan), _node_sizes(hardware), _stages_of_ranks(plan)),
        ),
        Section(
            title="What every operator does",
            text=_about_operators(plan),
            groups=_operators(plan, details),
        ),
        Section(
            title="How tensors are held",
            text="" if stored else "The model has no parameters, or nothing is said of them.",
            columns=("tensor", "layout"),
            rows=[
                tuple(row)
                for row in alike_rows((name, str(layout)) for name, layout in stored.items())
            ],
        ),
        *([] if details is None else [_of_files(details)]),
    ]


def _of_layers(details: Details) -> list[Section]:
    """The stages with their layers, and what each layer costs."""
    rows = [
        (
            f"stage {row.index}",
            spans(row.ranks),
            _layers_of_stage(row),
            counted(row.num_parameters),
            amount(row.forward_s, "s"),
            amount(row.backward_s, "s"),
        )
        for row in details.stages
    ]
    columns = ("", "ranks", "layers", "parameters", "forward", "backward")
    text = "Seconds are those of one microbatch."
    inside = [row for row in details.stages if row.begins_inside]
    if inside:
        begins = (f"stage {row.index} in {row.begins_inside}" for row in inside)
        text += f" Begin inside a layer: {', '.join(begins)}."
    stages = Section(title="Stages", text=text, columns=columns, rows=rows)
    layers = Section(
        title="What each layer costs",
        text="Of one microbatch, forward and backward, on a rank that runs it. Alike layers share "
        "a row.",
        picture=bars(_layer_bars(details.layers), "s", left=LAYER_LABEL),
    )
    return [stages, layers] if rows else [layers]


def _layers_of_stage(row: StageRow) -> str:
    """The layers in a few words, in order: ``wte, h.0-4, part of h.5``."""
    return in_runs(f"part of {name}" if name in row.parts else name for name in row.layers)


def _layer_bars(layers: Sequence[Layer]) -> list[Bar]:
    """A bar for all layers that cost the same, to three digits."""
    names = [layer.name for layer in layers]
    alike: dict[tuple[str, ...], list[Layer]] = {}
    for layer in layers:
        costs = amount(layer.computing_s, "s"), amount(layer.communicating_s, "s")
        alike.setdefault((starred(layer.name), *costs), []).append(layer)
    found = []
    for same in alike.values():
        name = in_runs(named_apart(layer.name, names) for layer in same)
        label = name if len(name) <= LAYER_LETTERS else f"…{name[1 - LAYER_LETTERS :]}"
        seconds = {
            "computing": same[0].computing_s,
            "communicating": same[0].communicating_s,
        }
        found.append(Bar(label, {name: value for name, value in seconds.items() if value > 0}))
    return found[:ROWS_SHOWN]


def _of_moments(details: Details, limit: float) -> Section:
    """A picture for the ranks of each position, all on one scale."""
    most = max(moment.num_bytes for own in details.moments.values() for moment in own)
    if details.stages:
        text = "The fullest moment of each action of the schedule, then the optimizer."
    else:
        text = (
            "While one operator after the other runs: forward, backward, then the optimizer. Of "
            "several microbatches there are two."
        )
    pictures = []
    for ranks, moments in list(details.moments.items())[:POSITIONS_SHOWN]:
        named = [
            (moment.name, {k: float(v) for k, v in moment.by_category.items()})
            for moment in moments
        ]
        picture = over_time(named, "B", limit=limit, most=most)
        pictures.append(f"<p>{_named(ranks)}</p>{picture}" if details.stages else picture)
    more = len(details.moments) - POSITIONS_SHOWN
    if more > 0:
        text += f" The first {POSITIONS_SHOWN} of {len(details.moments)} positions."
    return Section(title="Memory over time", text=text, picture="".join(pictures))


def _of_files(details: Details) -> Section:
    files = list(details.sources.items())[:POSITIONS_SHOWN]
    groups = [
        Group(
            name=f"gencode{rank}.py",
            text=f"{len(source.splitlines())} lines",
            source=numbered_source(source, rank),
        )
        for rank, source in files
    ]
    text = "One for each position of the pipeline." if len(files) > 1 else ""
    return Section(
        title="Generated files", text=f"Operators above link into them. {text}".strip(),
        groups=groups,
    )  # fmt: skip


def _about_timeline(plan: Plan) -> str:
    if not plan.stages:
        return ""
    several = len({stage.ranks for stage in plan.stages}) < len(plan.stages)
    return (
        "One rank of each position. Numbers are "
        f"microbatches.{' Paler: later stages of the rank.' if several else ''}"
    )


def _about_hidden(cost: PlanCost) -> str:
    if not any(rank.hidden_s(cost.step_s) for rank in cost.ranks):
        return ""
    return "Gradients are summed beside the backward: of them, what it does not hide."


def _parts_of_step(rank: RankCost, step_s: float) -> dict[str, float]:
    """The parts of a rank's step, which add up to it. Work beside other work counts as far as that
    does not hide it; gradients that are summed beside the backward are such work.
    """
    parts = {"computing": rank.compute_s, **rank.comm_s, "waiting": rank.idle_s}
    hidden_s = rank.hidden_s(step_s)
    for name in ("waiting", *(name for name in rank.comm_s if name.endswith(GRADIENTS))):
        taken = min(hidden_s, parts[name])
        parts[name] -= taken
        hidden_s -= taken
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def _stages_of_ranks(plan: Plan) -> dict[int, str]:
    """The stages of each rank in words: ``stage 1``, or ``stages 0, 3`` if it runs several."""
    found: dict[int, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for rank in stage.ranks:
            found.setdefault(rank, []).append(index)
    return {
        rank: f"stage{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for rank, own in found.items()
    }


def _about_operators(plan: Plan) -> str:
    where = "every rank of its stage" if plan.stages else "every rank"
    if not any(plan.strategies.values()):
        text = f"Every operator is computed whole on {where}."
    else:
        text = f"Alike layers share a row. An operator not listed is computed whole on {where}."
    if plan.recompute:
        first, more = ", ".join(plan.recompute[:MODULES_NAMED]), len(plan.recompute) - MODULES_NAMED
        text += (
            f" Computed again in the backward: {first}{f' and {more} more' if more > 0 else ''}."
        )
    for name, loop in plan.loops.items():
        text += f" Loop {name} runs {len(loop.strategies)} operators in {loop.count} pieces."
    return text


def _communication(
    plan: Plan, cost: PlanCost, hardware: Hardware
) -> list[tuple[str, str, str, str]]:
    most: dict[str, tuple[float, float]] = {}
    for rank in cost.ranks:
        for name, seconds in rank.comm_s.items():
            most[name] = max(most.get(name, (0.0, 0.0)), (seconds, rank.comm_bytes.get(name, 0.0)))
    tiers = over_tiers(hardware, most, _groups_of_axes(plan, hardware))
    first = {f"stage {index}": stage.ranks[0] for index, stage in enumerate(plan.stages)}
    for name, seconds in cost.messages.items():
        title = f"messages, {name}"
        most[title] = seconds, cost.message_bytes.get(name, 0.0)
        source, _, target = name.partition(" to ")
        tiers[title] = tier_of(hardware, (first[source], first[f"stage {target}"]))
    ordered = sorted(most.items(), key=lambda item: -item[1][0])
    return [
        (name, amount(seconds, "s"), amount(num_bytes, "B"), tiers.get(name, ""))
        for name, (seconds, num_bytes) in ordered
    ]


def _groups_of_axes(plan: Plan, hardware: Hardware) -> dict[str, Sequence[int]]:
    """The devices of the first group along each axis, across stages, and along the units."""
    found: dict[str, Sequence[int]] = {}
    for axis, _ in plan.mesh.axes:
        found[axis] = [
            rank
            for rank in range(plan.mesh.size)
            if not any(at for other, at in plan.mesh.coords(rank).items() if other != axis)
        ]
    for stage in plan.stages:
        for axis, _ in stage.mesh.axes:
            group = [
                rank
                for index, rank in enumerate(stage.ranks)
                if not any(at for other, at in stage.mesh.coords(index).items() if other != axis)
            ]
            found.setdefault(axis, group)
    if plan.stages:
        found[STAGES] = sorted({stage.ranks[0] for stage in plan.stages})
    found[UNITS] = range(0, hardware.num_devices, max(1, plan.mesh.size))
    return found


def _about_communication(cost: PlanCost) -> str:
    if not cost.messages and not any(rank.comm_s for rank in cost.ranks):
        return "None."
    words = [
        (
            "Of collectives, on the rank that has most: the bytes of what is summed, gathered or "
            "exchanged."
        )
    ] * any(rank.comm_s for rank in cost.ranks)
    if any(name.endswith(GRADIENTS) for rank in cost.ranks for name in rank.comm_s):
        words.append(
            "Gradients are those of parameters: over axes, over the units that hold copies, "
            "over stages that share them."
        )
    if any(WHOLES in rank.comm_s for rank in cost.ranks):
        words.append(
            "Wholes are parameters that the plan cuts and the optimizer needs whole, on "
            "average over the ranks."
        )
    if cost.messages:
        words.append(
            "Messages between stages are under way beside other work; what that does not "
            "hide is waiting."
        )
        words.append("Their bytes are those of all ranks together.")
    return " ".join(words)


def _alike(parts: Iterable[tuple[int, dict[str, float]]]) -> tuple[list[Bar], str]:
    """A bar for all ranks with the same parts, and a sentence if there are more bars than are
    shown.
    """
    ranks: dict[tuple[tuple[str, float], ...], list[int]] = {}
    for rank, own in parts:
        ranks.setdefault(tuple(own.items()), []).append(rank)
    found = [Bar(_named(own), dict(items)) for items, own in ranks.items()]
    more = f" The first {ROWS_SHOWN} of {len(found)} kinds of ranks."
    return found[:ROWS_SHOWN], more if len(found) > ROWS_SHOWN else ""


def _named(ranks: Sequence[int]) -> str:
    """Ranks in a few words: ``rank 3``, ``ranks 0-63``, ``32 ranks from 1``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    text = f"ranks {spans(ranks)}"
    return text if len(text) <= LABEL_LENGTH else f"{len(ranks)} ranks from {ranks[0]}"


def _places(plan: Plan) -> list[str]:
    """The place of each rank of a unit along the axes of its mesh, in words. In a pipeline on equal
    meshes that includes the axis of stages.
    """
    mesh_of = {rank: (plan.mesh, rank) for rank in range(plan.mesh.size)}
    if has_own_meshes(plan):
        mesh_of |= {
            rank: (stage.mesh, index)
            for stage in plan.stages
            for index, rank in enumerate(stage.ranks)
        }
    places = []
    for mesh, index in mesh_of.values():
        coords = mesh.coords(index).items()
        places.append(", ".join(f"{axis} {at}" for axis, at in coords if mesh.axis_size(axis) > 1))
    return places


def _operators(plan: Plan, details: Details | None) -> list[Group]:
    """A table for each kind of layer; one for all where modules are not known."""
    axes = axes_of(plan)
    modules = {} if details is None else details.modules
    places = {} if details is None else _places_in_files(details)
    rows: dict[str, list[tuple[str, ...]]] = {}
    for op, chosen in plan.strategies.items():
        if chosen:
            module = starred(layer_name(modules.get(op, "")))
            row = (op, *(in_words(plan, op, axis) for axis in axes))
            rows.setdefault(module, []).append(row)
    return [
        Group(
            name=module or ("top-level forward" if modules else "all operators"),
            text=f"{len(own)} operators" if len(own) > 1 else "1 operator",
            columns=("operator", *axes),
            rows=[tuple(row) for row in alike_rows(own)],
            place=next((places[name] for name in (module, own[0][0]) if name in places), None),
        )
        for module, own in rows.items()
    ]


def _places_in_files(details: Details) -> dict[str, tuple[str, str]]:
    """Where modules and variables are first found in a file: the anchor, and in words."""
    found: dict[str, tuple[str, str]] = {}
    for rank, source in list(details.sources.items())[:POSITIONS_SHOWN]:
        for name, line in lines_of(source).items():
            found.setdefault(name, (anchor(rank, line), f"gencode{rank}.py:{line}"))
    return found


def _node_sizes(hardware: Hardware) -> Sequence[int]:
    """The devices of each group of the innermost tier."""
    return hardware.tiers[0].sizes if hardware.tiers else (hardware.num_devices,)
