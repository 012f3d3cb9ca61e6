"""Bad values for every argument of everything public, and what came of them.

Each argument of each target is replaced by each value of :data:`VALUES`, the others stay good. A
call is *refused* where one of our errors says so in words, *accepted* where it returns, and *raw*
where any other exception comes out: that is a defect, and so is a call that takes longer than
:data:`LONGEST_S`.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import io
import random
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plans
import torch
from torch import nn

import shardwright
from shardwright import ComputeConfig, ShardwrightError
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Link, Tier, load_hardware
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.ops.prover import prove
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.schedule import files as schedule_files
from shardwright.compiler.schedule.draw import draw_text
from shardwright.compiler.schedule.published import generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.compiler.schedule.simulate import StageTimes, simulate
from shardwright.compiler.schedule.validate import validate
from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.policies.known_policies import find_policy
from shardwright.policies.saved_plan import read_plan_file
from shardwright.runtime.errors import brief
from shardwright.runtime.manifest import accept

LONGEST_S = 30.0
"""A call that takes longer has not noticed how much it was asked for."""

DEPTH = 100_000


def cyclic_list() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def cyclic_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"x": 1}
    value["again"] = value
    return value


def deep(make: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(DEPTH):
        value = make(value)
    return value


class Odd:
    """An object that refuses whatever is asked of it."""

    def __repr__(self) -> str:
        raise ValueError("no text")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = None  # type: ignore[assignment]


VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "10**30": lambda: 10**30,
    "10**5000": lambda: 10**5000,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "''": lambda: "",
    "'nope'": lambda: "nope",
    "'a\\0b'": lambda: "a\0b",
    "'\\ud800'": lambda: "\ud800",
    "'x'*5000": lambda: "x" * 5000,
    "'9'*5000": lambda: "9" * 5000,
    "'['*100000": lambda: "[" * DEPTH,
    "b''": lambda: b"",
    "b'x'": lambda: b"x",
    "[]": list,
    "[1]": lambda: [1],
    "['x']": lambda: ["x"],
    "[None]": lambda: [None],
    "[[]]": lambda: [[]],
    "()": lambda: (),
    "(1, 2, 3)": lambda: (1, 2, 3),
    "{}": dict,
    "{1: 2}": lambda: {1: 2},
    "{'x': 1}": lambda: {"x": 1},
    "{'x': None}": lambda: {"x": None},
    "{'x': {}}": lambda: {"x": {}},
    "set": lambda: {1, 2},
    "object": object,
    "odd": Odd,
    "{'x': odd}": lambda: {"x": Odd()},
    "cyclic list": cyclic_list,
    "cyclic dict": cyclic_dict,
    "deep list": lambda: deep(lambda value: [value]),
    "deep dict": lambda: deep(lambda value: {"x": value}),
    "lambda: 1": lambda: lambda: 1,
    "lambda *a, **k: None": lambda: lambda *a, **k: None,
    "int": lambda: int,
    "nn.Linear": lambda: nn.Linear,
    "Linear": lambda: nn.Linear(2, 2),
    "tensor": lambda: torch.zeros(2, 2),
    "scalar tensor": lambda: torch.tensor(1.0),
    "meta tensor": lambda: torch.zeros(2, device="meta"),
    "torch.float16": lambda: torch.float16,
    "SGD": lambda: torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),
    "ComputeConfig": lambda: ComputeConfig(plan_ngpus=1, runtime_ngpus=1),
    "Path": lambda: Path("/nonexistent/folder"),
    "/dev/null": lambda: "/dev/null",
    "generator": lambda: (i for i in range(3)),
    "range": lambda: range(3),
    "Exception": lambda: ValueError("x"),
}


@dataclass(frozen=True)
class Target:
    """``good`` gives arguments, by name, with which ``function`` returns. ``also``: names beside
    those of its signature;
    ``without``: names that are left alone.
    """

    group: str
    name: str
    function: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    also: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        named = [
            p.name
            for p in inspect.signature(self.function).parameters.values()
            if p.kind not in kinds
        ]
        return [name for name in dict.fromkeys((*named, *self.also)) if name not in self.without]


@dataclass(frozen=True)
class Trouble:
    """One call that ended in a raw exception, or took too long."""

    target: str
    argument: str
    value: str
    what: str

    def __str__(self) -> str:
        return f"{self.target}({self.argument}={self.value}): {self.what}"


@dataclass
class Counts:
    """``refused``, ``accepted`` and ``raw`` calls by group."""

    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    accepted: collections.Counter[str] = field(default_factory=collections.Counter)
    raw: collections.Counter[str] = field(default_factory=collections.Counter)
    troubles: list[Trouble] = field(default_factory=list)

    def table(self) -> str:
        rows = ["| | calls | refused in words | accepted | raw |", "|---|---|---|---|---|"]
        groups = list(dict.fromkeys((*self.refused, *self.accepted, *self.raw)))
        for name, chosen in [*((group, [group]) for group in groups), ("all", groups)]:
            numbers = [
                sum(counter[group] for group in chosen)
                for counter in (self.refused, self.accepted, self.raw)
            ]
            rows.append(
                f"| {name} | {sum(numbers):,} | "
                + " | ".join(f"{number:,}" for number in numbers)
                + " |"
            )
        return "\n".join(rows)


def run(
    *groups: str,
    names: Sequence[str] = (),
    share: float = 1.0,
    tell: Callable[[str], None] = lambda text: None,
    calls: Collection[tuple[str, str]] | None = None,
) -> Counts:
    """:func:`try_all` of the targets of these groups, or of all; with ``names`` of these functions
    alone; with ``calls`` those alone, each an argument and a value.

    It runs in a temporary folder: calls with names like ``nope`` in the place of a path make files
    where they run.
    """

    def on_rank(rank: int) -> Counts:
        targets = [
            target
            for target in targets_of(Path(folder) / "made", *groups)
            if not names or target.name in names
        ]
        return try_all(targets, VALUES, share, tell, calls)

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        (Path(folder) / "made").mkdir()
        (counts,) = shardwright.run_ranks(1, on_rank, timeout_s=86400)
    return counts


def attempt(
    counts: Counts, target: Target, argument: str, value: str, call: Callable[[], Any]
) -> None:
    """Call, and count what comes of it."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except ShardwrightError as error:
        counts.refused[target.group] += 1
        if type(error) is shardwright.InternalError:
            counts.troubles.append(
                Trouble(target.name, argument, value, f"an internal error: {error.what}")
            )
    except Exception as error:
        frames = [
            f"{Path(f.filename).name}:{f.lineno}"
            for f in traceback.extract_tb(error.__traceback__)[-4:]
        ]
        counts.raw[target.group] += 1
        text = f"{type(error).__name__}: {_text_of(error)} ({' > '.join(frames)})"
        counts.troubles.append(Trouble(target.name, argument, value, text))
    else:
        counts.accepted[target.group] += 1
    if time.monotonic() - start > LONGEST_S:
        counts.troubles.append(
            Trouble(target.name, argument, value, f"it took {time.monotonic() - start:.0f} s")
        )


def _text_of(error: Exception) -> str:
    try:
        return str(error)[:100]
    except Exception:  # of a number with too many digits, or of what has no text
        return "without text"


def try_all(
    targets: Sequence[Target],
    values: Mapping[str, Callable[[], Any]],
    share: float = 1.0,
    tell: Callable[[str], None] = lambda text: None,
    calls: Collection[tuple[str, str]] | None = None,
) -> Counts:
    """Try the values on every argument; with ``share`` below 1 a random part of all calls, the same
    each time; with ``calls`` those alone, each an argument and a value. ``tell`` gets each failure
    when it is there, and the names of the targets.
    """
    counts, dice = Counts(), random.Random(0)
    for target in targets:
        start, known = time.monotonic(), len(counts.troubles)
        target.function(**target.good())  # must work, or nothing is told by what follows
        for argument, value in calls_of(target, values):
            if dice.random() <= share and (calls is None or (argument, value) in calls):
                given = {**target.good(), argument: values[value]()} if argument else None
                attempt(
                    counts,
                    target,
                    argument or "<other arguments>",
                    value,
                    _call(target, given, value),
                )
        for trouble in counts.troubles[known:]:
            tell(str(trouble))
        tell(
            f"# {target.name}: {len(counts.troubles) - known} defects, "
            f"{time.monotonic() - start:.1f} s"
        )
    return counts


def calls_of(target: Target, values: Mapping[str, Callable[[], Any]]) -> Iterator[tuple[str, str]]:
    """Argument and value of each call; an empty argument for calls with too few, too many or
    unknown ones.
    """
    if target.function.__module__ != __name__:
        yield from (("", how) for how in ("none", "unknown", "too many"))
    calls = ((argument, value) for argument in target.arguments for value in values)
    yield from (call for call in calls if call not in OWN)


OWN = {
    ("pas_policy", "nn.Linear"),
    ("policy", "nn.Linear"),
    ("scale_fn", "Linear"),
    ("where", "Linear"),
    ("optimizer_fn", "Linear"),
    ("rename", "int"),
    ("rename", "Linear"),
    ("fn", "Linear"),
    ("optimizer", "Linear"),
}
"""Functions of the caller's that fail when they are called: what they raise is the caller's own."""


def _call(target: Target, given: dict[str, Any] | None, how: str) -> Callable[[], Any]:
    if given is not None:
        return lambda: target.function(**given)
    if how == "none":
        return target.function
    if how == "unknown":
        return lambda: target.function(**target.good(), no_such_argument=1)
    return lambda: target.function(*range(40))


class Net(nn.Module):
    """Small, with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = (self.down(self.up(x).relu()) * scale).square().mean()
        return loss


CONFIG = {"plan_ngpus": 1, "runtime_ngpus": 1}
ARGS = {"x": torch.ones(2, 4)}


def config_targets(folder: Path) -> list[Target]:
    return [
        Target("configs", "ComputeConfig", ComputeConfig, lambda: dict(CONFIG)),
        Target(
            "configs", "DistributedOptimizerConfig", shardwright.DistributedOptimizerConfig, dict
        ),
        Target("configs", "ComputeConfig.of", ComputeConfig.of, lambda: {"config": dict(CONFIG)}),
        Target(
            "configs",
            "ComputeConfig.from_json",
            ComputeConfig.from_json,
            lambda: {"data": dict(CONFIG)},
        ),
        Target(
            "configs",
            "ComputeConfig.with_zero",
            ComputeConfig(plan_ngpus=1, runtime_ngpus=2).with_zero,
            lambda: {"stage": 1},
        ),
        Target("configs", "Mesh", shardwright.Mesh, lambda: {"axes": (("tp", 2),)}),
        Target("configs", "Mesh.of", shardwright.Mesh.of, lambda: {"axes": {"tp": 2}}),
        Target(
            "configs",
            "Mesh.axis_size",
            shardwright.Mesh.of({"tp": 2}).axis_size,
            lambda: {"axis": "tp"},
        ),
        Target(
            "configs", "Mesh.coords", shardwright.Mesh.of({"tp": 2}).coords, lambda: {"rank": 1}
        ),
        Target(
            "configs",
            "Mesh.rank",
            shardwright.Mesh.of({"tp": 2}).rank,
            lambda: {"coords": {"tp": 1}},
        ),
        Target(
            "configs", "Mesh.groups", shardwright.Mesh.of({"tp": 2}).groups, lambda: {"axes": "tp"}
        ),
        Target("configs", "Layout.parse", shardwright.Layout.parse, lambda: {"text": "[4/tp]"}),
        Target("configs", "Layout.whole", shardwright.Layout.whole, lambda: {"shape": (4,)}),
        Target(
            "configs",
            "Layout.from_json",
            shardwright.Layout.from_json,
            lambda: {"data": shardwright.Layout.parse("[4/tp]").to_json()},
        ),
    ]


def hardware_targets(folder: Path) -> list[Target]:
    data = load_hardware("a100-80gb", 8).to_json()
    hardware = load_hardware("a100-80gb", 8)
    link = {"latency_s": 1e-6, "bytes_per_s": 1e9}
    (folder / "hardware.json").write_text(hardware.dumps())
    device = {
        "name": "d", "memory_bytes": 10**9, "flops_per_s": {"float32": 1e9}, "bytes_per_s": 1e9,
        "launch_s": 1e-6,
    }  # fmt: skip
    return [
        Target(
            "hardware",
            "load_hardware",
            load_hardware,
            lambda: {"name_or_path": "a100-80gb", "num_devices": 8},
        ),
        Target("hardware", "Hardware.from_json", Hardware.from_json, lambda: {"data": dict(data)}),
        *(
            Target(
                "hardware files",
                f"hardware file, {key}",
                _hardware_of(data, key),
                lambda key=key: {"value": data[key]},
            )
            for key in data
        ),
        Target("hardware", "Link", Link, lambda: dict(link)),
        Target("hardware", "Tier", Tier, lambda: {"name": "t", "sizes": (8,), **link}),
        Target("hardware", "Device", Device, lambda: dict(device)),
        Target(
            "hardware",
            "Hardware",
            Hardware,
            lambda: {"name": "h", "device": hardware.device, "tiers": hardware.tiers},
        ),
        Target(
            "hardware",
            "collective_s",
            collective_s,
            lambda: {"hardware": hardware, "kind": "all_reduce", "num_bytes": 8.0, "ranks": (0, 1)},
        ),
    ]


def _hardware_of(data: Mapping[str, Any], key: str) -> Callable[..., Any]:
    return lambda value: Hardware.from_json({**data, key: value})


def schedule_targets(folder: Path) -> list[Target]:
    schedule = generate("1f1b", 2, 4)
    data = {
        "format": 1, "name": "x", "num_microbatches": 1, "placement": [0, 1],
        "actions": [["0F0", "0B0"], ["1F0", "1B0"]]
    }  # fmt: skip
    csv, file = folder / "schedule.csv", folder / "schedule.json"
    schedule_files.save_schedule(schedule, csv)
    good = {"schedule": schedule}
    return [
        Target(
            "schedules",
            "generate",
            generate,
            lambda: {"name": "1f1b", "num_ranks": 2, "num_microbatches": 4},
        ),
        Target(
            "schedules",
            "Schedule",
            _validated,
            lambda: {"num_microbatches": 1, "placement": (0,), "actions": _actions()},
        ),
        Target("schedules", "validate", validate, lambda: dict(good)),
        Target("schedules", "simulate", simulate, lambda: dict(good)),
        Target("schedules", "StageTimes", _simulated, lambda: {"forward_s": 1.0}),
        Target("schedules", "draw_text", draw_text, lambda: {"timeline": simulate(schedule)}),
        Target(
            "schedules",
            "save_schedule",
            schedule_files.save_schedule,
            lambda: {**good, "path": file},
        ),
        Target("schedules", "load_schedule", schedule_files.load_schedule, lambda: {"path": csv}),
        Target("schedules", "to_csv", schedule_files.to_csv, lambda: dict(good)),
        Target("schedules", "to_json", schedule_files.to_json, lambda: dict(good)),
        Target(
            "schedules",
            "from_csv",
            schedule_files.from_csv,
            lambda: {"text": schedule_files.to_csv(schedule)},
        ),
        Target(
            "schedules",
            "from_json",
            schedule_files.from_json,
            lambda: {"text": schedule_files.to_json(schedule)},
        ),
        *(
            Target(
                "schedule files",
                f"schedule file, {key}",
                _schedule_of(data, key),
                lambda key=key: {"value": data[key]},
            )
            for key in data
        ),
        Target("schedule files", "schedule cell", _cell, lambda: {"cell": "0F0"}),
    ]


def _actions() -> Any:
    return schedule_files.from_csv("0F0,0B0").actions


def _validated(num_microbatches: Any, placement: Any, actions: Any, name: Any = "custom") -> None:
    validate(Schedule(num_microbatches, placement, actions, name))


def _simulated(
    forward_s: Any = 1.0,
    input_gradient_s: Any = 1.0,
    weight_gradient_s: Any = 1.0,
    backward_s: Any = None,
) -> None:
    simulate(
        generate("1f1b", 2, 4),
        StageTimes(forward_s, input_gradient_s, weight_gradient_s, backward_s),
    )


def _schedule_of(data: Mapping[str, Any], key: str) -> Callable[..., Any]:
    def read(value: Any) -> None:
        validate(schedule_files.from_json(as_json({**data, key: value})))

    return read


def _cell(cell: Any) -> None:
    validate(
        schedule_files.from_csv(
            f"{brief(cell)},0B0" if not isinstance(cell, str) else f"{cell},0B0"
        )
    )


def as_json(value: Any) -> str:
    """JSON as a person might write it: what has no form is written as its text, however deep it
    is.
    """
    parts: list[str] = []
    stack: list[Any] = [value]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, _Text):
            parts.append(item.text)
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            stack += _parts(item)
        else:
            parts.append(_scalar(item))
    return "".join(parts)


@dataclass(frozen=True)
class _Text:
    text: str


def _parts(item: Any) -> list[Any]:
    """What a container is written as, last thing first."""
    out: list[Any] = []
    if isinstance(item, dict):
        for index, (key, value) in enumerate(item.items()):
            out += [_Text(f"{', ' if index else ''}{_scalar(str(key))}: "), value]
        return [_Text("}"), *reversed(out), _Text("{")]
    for index, value in enumerate(item):
        out += [*([_Text(", ")] if index else []), value]
    return [_Text("]"), *reversed(out), _Text("[")]


def _scalar(item: Any) -> str:
    if item is None or isinstance(item, bool):
        return {None: "null", True: "true", False: "false"}[item]
    if isinstance(item, int):
        return "9" * 5000 if abs(item) > 10**100 else str(item)
    if isinstance(item, float):
        return {"nan": "NaN", "inf": "Infinity"}.get(str(item), str(item))
    text = item if isinstance(item, str) else type(item).__name__
    return (
        '"'
        + "".join(c if c.isalnum() or c in " .[]*/+-()" else f"\\u{ord(c):04x}" for c in text)
        + '"'
    )


def graph_targets(folder: Path) -> list[Target]:
    graph = plans.annotated(trace(Net(), ARGS))
    op = graph.ops[0]
    builder = graph.builder({"tp": 2})
    dim = next(c.name for c in graph.dims.classes if c.name) if graph.dims else ""
    config = ComputeConfig(**CONFIG)
    compiled = compile_graph(trace(Net(), ARGS), find_policy("dp").apply, config, policy_name="dp")
    plan = compiled.plan.to_json()
    hardware = load_hardware("a100-80gb", 8)
    torch.manual_seed(0)
    return [
        Target("builder", "builder", graph.builder, lambda: {"mesh": {"tp": 2}}),
        Target(
            "builder",
            "strategy",
            builder.strategy,
            lambda: {"op": op, "axis": "tp", "strategy": "R"},
        ),
        Target(
            "builder",
            "partition",
            builder.partition,
            lambda: {"op": op, "factor": op.rule.factors[0].name, "axis": "tp"},
        ),  # type: ignore[union-attr]
        Target("builder", "replicate", builder.replicate, lambda: {"op": op, "axis": "tp"}),
        Target("builder", "split", builder.split, lambda: {"dim": dim, "axis": "tp"}),
        Target(
            "builder", "store", builder.store, lambda: {"fqn": "up.weight", "layout": "[6/tp, 4]"}
        ),
        Target("builder", "output", builder.output, lambda: {"path": "", "wish": "whole"}),
        Target("builder", "pieces", builder.pieces, lambda: {"op": op}),
        Target("builder", "note", builder.note, lambda: {"op": op, "axis": "tp", "reason": "x"}),
        Target("builder", "plan", builder.plan, dict),
        Target("builder", "build", builder.build, dict),
        Target("builder", "IRGraph.op", graph.op, lambda: {"name": op.name}),
        Target("plans", "trace", trace, lambda: {"module": Net(), "dummy_args": dict(ARGS)}),
        Target("plans", "Plan.from_json", Plan.from_json, lambda: {"data": dict(plan)}),
        *(
            Target(
                "plan files",
                f"plan file, {key}",
                _plan_of(folder, plan, key),
                lambda key=key: {"value": plan[key]},
            )
            for key in plan
        ),
        Target(
            "plans",
            "read_plan_file",
            read_plan_file,
            lambda: {"path": _written(folder / "plan.json", as_json(plan))},
        ),
        Target(
            "plans",
            "audit",
            audit,
            lambda: {"program": compiled.program, "config": config, "hardware": hardware},
        ),
        Target("plans", "find_policy", find_policy, lambda: {"policy": "tp"}),
        Target("plans", "register_policy", _registered_policy, lambda: {"name": "mine"}),
        Target(
            "operators",
            "register_op",
            _registered,
            lambda: {"annotation": "a -> a"},
            also=REGISTER_OPTIONS,
        ),
        Target(
            "operators",
            "prove",
            prove,
            lambda: {"operator": torch.relu, "args": (torch.ones(4, dtype=torch.float64),)},
        ),
    ]


def _plan_of(folder: Path, plan: Mapping[str, Any], key: str) -> Callable[..., Any]:
    return lambda value: read_plan_file(
        _written(folder / "bad_plan.json", as_json({**plan, key: value}))
    )


def _written(path: Path, text: str) -> Path:
    path.write_text(text, errors="surrogatepass")
    return path


def double(x: torch.Tensor) -> torch.Tensor:
    """What is registered with every bad argument."""
    return x * 2


def _registered(annotation: Any, name: Any = None, **options: Any) -> None:
    shardwright.register_op(annotation, name, **options)(double)


def _registered_policy(
    name: Any, options: Any = None, function: Any = lambda graph, config: graph
) -> None:
    shardwright.register_policy(name, options=options)(function)


REGISTER_OPTIONS = (
    "code_impl_pattern", "linear", "additive", "grad_linear", "localise", "parallel", "nonempty",
    "emit", "imports",
    "input_gen", "fake",
)  # fmt: skip


def compile_targets(folder: Path) -> list[Target]:
    """What compiles, which takes longer than the others."""
    config, model = ComputeConfig(**CONFIG), Net()
    compile_good = {
        "module_or_module_class": model, "dummy_forward_args": ARGS, "pas_policy": "dp",
        "compute_config": config,
        "gen_savedir": folder / "compiled", "reuse": "moo", "load_module": False,
    }  # fmt: skip
    search = {
        "module_or_module_class": model,
        "dummy_forward_args": ARGS,
        "compute_config": {**CONFIG, "pas_config": {"hardware": "cpu"}},
    }
    check = {
        "module": model, "dummy_forward_args": ARGS, "pas_policy": "dp", "compute_config": config,
        "steps": 1,
    }  # fmt: skip
    return [
        Target("compile", "parallelize", shardwright.parallelize, lambda: dict(compile_good)),
        Target("compile", "search_plan", shardwright.search_plan, lambda: dict(search)),
        Target("compile", "verify", verify, lambda: dict(check), without=("directory",)),
        Target("compile", "compile_graph", _compile, lambda: {"config": config}),
        *(
            Target(
                "options",
                f"pas_config of {policy}, {option}",
                _option(policy, option),
                lambda good=good: {"value": good},
            )
            for policy, option, good in OPTIONS
        ),
    ]


OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("pp", "num_microbatches", 2),
    ("pp", "schedule", "1f1b"),
    ("pp", "num_stages", 2),
    ("hybrid", "tp", 1),
    ("hybrid", "dp", 1),
    ("hybrid", "recompute", []),
    ("autodist", "hardware", "cpu"),
    ("autodist", "num_microbatches", 1),
)


def _option(policy: str, option: str) -> Callable[..., Any]:
    def run(value: Any) -> None:
        ranks = 2 if policy in ("pp", "hybrid") else 1
        base: dict[str, Any] = {"hardware": "cpu"} if policy == "autodist" else {}
        base |= {"num_stages": 2} if policy == "hybrid" else {}
        config = ComputeConfig(
            plan_ngpus=ranks,
            runtime_ngpus=ranks,
            use_end2end=True,
            pas_config={**base, option: value},
        )
        found = find_policy(policy)
        found.check(config)
        compile_graph(trace(Net(), ARGS), found.apply, config, policy_name=policy)

    return run


def _compile(config: Any) -> None:
    compile_graph(
        trace(Net(), ARGS), find_policy("dp").apply, ComputeConfig.of(config), policy_name="dp"
    )


def training_targets(folder: Path) -> list[Target]:
    """What is called in a job of one rank."""
    config = ComputeConfig(**CONFIG, use_end2end=True)
    parallelize, build = shardwright.parallelize, shardwright.build_optimizer
    module = parallelize(Net(), ARGS, "dp", config, gen_savedir=folder / "training", reuse="moo")
    assert isinstance(module, shardwright.ParallelModule)
    called = parallelize(Net(), ARGS, "dp", CONFIG, gen_savedir=folder / "called", reuse="moo")
    assert isinstance(called, shardwright.ParallelModule)
    files = next((folder / "training").rglob("manifest.json")).parent
    optimizer = build(module, torch.optim.SGD, lr=0.1)
    scaler = shardwright.LossScaler()
    checkpoints, merged = folder / "checkpoints", folder / "merged"
    shardwright.save_checkpoint(checkpoints, module, optimizer).wait()
    merged_state = shardwright.merge_state_dicts([module.state_dict()], [optimizer.state_dict()])
    deduped = shardwright.deduped_state_dict(module, optimizer)
    numbers = iter(range(10**9))

    def synced(name: str) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            module.train_step([ARGS])
            optimizer.sync_shard_grad()
            return getattr(optimizer, name)(**arguments)

        return run

    def stepped(name: str) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            module.train_step([ARGS])
            try:
                return getattr(scaler, name)(**arguments)
            finally:
                scaler._overflowed, scaler._stepped = {}, set()

        return run

    def saved(**arguments: Any) -> Any:
        return shardwright.save_checkpoint(**arguments).wait()

    made = {"module": module, "optimizer": optimizer}
    states = {"module": module, "module_state_dict": merged_state[0]}
    both = {**states, "optimizer": optimizer, "optimizer_state_dict": merged_state[1]}
    return [
        Target("modules", "forward", called, lambda: dict(ARGS), also=("x", "scale")),
        Target("modules", "train_step", module.train_step, lambda: {"samples": [ARGS]}),
        Target("modules", "infer_step", module.infer_step, lambda: {"samples": [ARGS]}),
        Target("modules", "zero_grad", lambda set_to_none=True: module.zero_grad(set_to_none),
            dict),
        Target("modules", "load_class", shardwright.load_class, lambda: {"directory": files}),
        Target("modules", "accept", accept, lambda: {"directory": files}),
        Target("modules", "broadcast_weights", shardwright.broadcast_weights,
            lambda: {"module": module, "stride_size": 1}),
        Target(
            "optimizers", "build_optimizer", build,
            lambda: {"module": called, "optimizer_fn": torch.optim.SGD}, also=("lr",)
        ),
        Target("optimizers", "step", lambda closure=None: optimizer.step(closure), dict),
        Target("optimizers", "zero_grad", optimizer.zero_grad, dict),
        Target("optimizers", "scale_grads", synced("scale_grads"), lambda: {"factor": 1.0},
            also=("factor",)),
        Target("optimizers", "unscale_grads", synced("unscale_grads"), lambda: {"factor": 1.0},
            also=("factor",)),
        Target("optimizers", "clip_gnorm", synced("clip_gnorm"), dict, also=("max_norm",)),
        Target("optimizers", "pre_hook", optimizer.register_reducer_pre_hook,
            lambda: {"hook": lambda *a: None}),
        Target("optimizers", "post_hook", optimizer.register_reducer_post_hook,
            lambda: {"hook": lambda *a: None}),
        Target(
            "optimizers", "load_state_dict", optimizer.load_state_dict,
            lambda: {"state_dict": optimizer.state_dict()}
        ),
        Target("optimizers", "LossScaler", shardwright.LossScaler, dict),
        Target("optimizers", "scaler.scale", scaler.scale, lambda: {"loss": torch.tensor(1.0)}),
        Target("optimizers", "scaler.unscale_", stepped("unscale_"),
            lambda: {"optimizer": optimizer}, also=("optimizer",)),
        Target("optimizers", "scaler.step", stepped("step"), lambda: {"optimizer": optimizer},
            also=("optimizer",)),
        Target("optimizers", "scaler.update", shardwright.LossScaler().update,
            lambda: {"new_scale": 1.0}),
        Target(
            "optimizers", "scaler.load_state_dict", shardwright.LossScaler().load_state_dict,
            lambda: {"state_dict": scaler.state_dict()},
        ),
        *(
            Target(
                "optimizers", f"scaler state, {key}", _scaler_state(scaler.state_dict(), key),
                lambda key=key: {"value": scaler.state_dict()[key]},
            )
            for key in scaler.state_dict()
        ),
        Target(
            "checkpoints", "save_checkpoint", saved, lambda: {"directory": checkpoints, **made},
            also=("directory", "module", "optimizer", "scheduler", "extra", "step", "keep",
                "async_save"),
        ),
        Target("checkpoints", "load_checkpoint", shardwright.load_checkpoint,
            lambda: {"directory": checkpoints, **made}),
        Target("checkpoints", "read_checkpoint", shardwright.read_checkpoint,
            lambda: {"directory": checkpoints}),
        Target(
            "checkpoints", "merge_checkpoint", shardwright.merge_checkpoint,
            lambda: {"directory": checkpoints, "out": merged / str(next(numbers))},
        ),
        Target(
            "checkpoints", "export_pretrained", shardwright.export_pretrained,
            lambda: {"directory": checkpoints, "out": merged / str(next(numbers)),
                "config": {"model_type": "x"}},
        ),
        Target("checkpoints", "load_pretrained", shardwright.load_pretrained,
            lambda: _pretrained(folder, module)),
        Target("states", "deduped_state_dict", shardwright.deduped_state_dict, lambda: dict(made)),
        Target(
            "states", "merge_state_dicts", shardwright.merge_state_dicts,
            lambda: {"module_state_dicts": [module.state_dict()],
                "optimizer_state_dicts": [optimizer.state_dict()]},
        ),
        Target("states", "load_merged_state_dict", shardwright.load_merged_state_dict,
            lambda: dict(both)),
        Target(
            "states", "load_deduped_state_dict", shardwright.load_deduped_state_dict,
            lambda: {**made, "module_state_dict": deduped[0], "optimizer_state_dict": deduped[1]},
        ),
    ]  # fmt: skip


def _scaler_state(state: Mapping[str, Any], key: str) -> Callable[..., Any]:
    return lambda value: shardwright.LossScaler().load_state_dict({**state, key: value})


def _pretrained(folder: Path, module: Any) -> dict[str, Any]:
    if not (folder / "pretrained").is_dir():
        shardwright.export_pretrained(
            folder / "checkpoints", folder / "pretrained", {"model_type": "x"}
        )
    return {"directory": folder / "pretrained", "module": module}


def data_targets(folder: Path) -> list[Target]:
    """What reads data, and is asked for a batch."""
    data = shardwright.data
    lines, tokens, shard = folder / "lines.jsonl", folder / "tokens", folder / "shard.tar"
    lines.write_text("".join(f"{number}\n" for number in range(8)))
    data.write_token_file(tokens, [[1, 2, 3], [4, 5]])
    with tarfile.open(shard, "w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    workers = data.WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = data.SavableDataset(source=range(8), batch_size=2, worker_config=workers)
    state = next(_stepped(data.get_loader(dataset)))
    made = data.loader(range(8), global_batch=2)
    cut = {"dim": 0, "index": 0, "size": 1}
    table = data.roles(replica=0, num_replicas=1)
    worker = {"rank": 0, "world_size": 1, "num_workers": 0}
    ids = torch.tensor([[1, 1, 2, 0]])
    return [
        Target("data", "loader", _first_batch, lambda: {"dataset": range(8), "global_batch": 2},
            also=LOADER_OPTIONS),
        Target("data", "loader.load_state_dict", made.load_state_dict,
            lambda: {"state": made.state_dict()}),
        *(
            Target(
                "data", f"loader state, {key}", _loader_state(made.state_dict(), key),
                lambda key=key: {"value": made.state_dict()[key]},
            )
            for key in made.state_dict()
        ),
        Target("data", "Packing", _packed, lambda: {"length": 4}),
        Target("data", "document_mask", data.document_mask, lambda: {"document_ids": ids}),
        Target("data", "roles", data.roles, lambda: {"replica": 0, "num_replicas": 1}),
        Target("data", "Roles.on", table.on, lambda: {"rank": 0}),
        Target("data", "EvenCut", data.EvenCut, lambda: dict(cut)),
        Target("data", "EvenCut.runs", data.EvenCut(**cut).runs, lambda: {"length": 4}),
        Target("data", "TarShards", _read(data.TarShards), lambda: {"paths": shard},
            also=("paths", "decode", "keys")),
        Target("data", "JsonLines", _read(data.JsonLines), lambda: {"paths": lines},
            also=("paths",)),
        Target("data", "TokenFile", _read(data.TokenFile), lambda: {"prefix": tokens},
            also=("prefix",)),
        Target("data", "TokenWindows", _read(data.TokenWindows),
            lambda: {"file": tokens, "length": 2}, also=("file", "length", "mask_bounds")),
        Target("data", "write_token_file", data.write_token_file,
            lambda: {"prefix": folder / "written", "documents": [[1]]}),
        Target("data", "WorkerConfig", data.WorkerConfig, lambda: dict(worker)),
        Target("data", "default_worker_config", data.default_worker_config, dict),
        Target("data", "SavableDataset", _first_of_savable,
            lambda: {"source": range(8), "batch_size": 2, "worker_config": workers},
            also=SAVABLE_OPTIONS),
        Target("data", "get_savable_loader", data.get_savable_loader, lambda: {"dataset": dataset}),
        Target("data", "get_loader", data.get_loader, lambda: {"dataset": dataset}),
        Target("data", "restore_state", data.get_loader(dataset).restore_state_rank,
            lambda: {"state": state}),
        Target("data", "redistribute", data.redistribute,
            lambda: {"states": [state], "world_size": 2, "num_workers": 1}),
    ]  # fmt: skip


LOADER_OPTIONS = (
    "dataset", "roles_or_plan", "global_batch", "microbatch", "seed", "shuffle", "shuffle_block",
    "weights", "packing", "num_workers", "prefetch_factor", "collate", "transform", "drop_last",
    "wrap", "uneven", "on_error", "seed_samples", "replay", "device", "pin_memory",
    "multiprocessing_context",
)  # fmt: skip
SAVABLE_OPTIONS = (
    "source", "batch_size", "worker_config", "shuffle_buffer_size", "max_samples_per_sequence",
    "repeat", "weights", "collate", "on_error",
)  # fmt: skip


def _first_batch(**options: Any) -> None:
    next(iter(shardwright.data.loader(**options)), None)


def _first_of_savable(**options: Any) -> None:
    next(_stepped(shardwright.data.get_loader(shardwright.data.SavableDataset(**options))))


def _stepped(loader: Any) -> Iterator[Any]:
    """The state of a loader behind each batch."""
    for _ in loader:
        yield loader.save_state_rank()


def _loader_state(state: Mapping[str, Any], key: str) -> Callable[..., Any]:
    def load(value: Any) -> None:
        shardwright.data.loader(range(8), global_batch=2).load_state_dict({**state, key: value})

    return load


def _packed(**options: Any) -> None:
    packing = shardwright.data.Packing(**{"lengths": [2] * 8, **options})
    _first_batch(dataset=[torch.ones(2)] * 8, global_batch=2, packing=packing)


def _read(source: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: source(**arguments)[0]


def expert_targets(folder: Path) -> list[Target]:
    """Experts in a model of one's own."""
    x, weight = torch.ones(4, 2), torch.ones(3, 5, 2)
    chosen, gains = torch.tensor([[0], [1], [2], [0]]), torch.ones(4, 1)
    experts = shardwright.experts
    rows, _, routing = experts.dispatch(x, chosen, gains, num_experts=3)
    return [
        Target("experts", "dispatch", experts.dispatch,
            lambda: {"x": x, "chosen": chosen, "weights": gains, "num_experts": 3}),
        Target("experts", "grouped_linear", experts.grouped_linear,
            lambda: {"rows": rows, "weight": weight, "routing": routing}),
        Target("experts", "combine", experts.combine, lambda: {"rows": rows, "routing": routing}),
        Target("experts", "within_capacity", experts.within_capacity,
            lambda: {"chosen": chosen, "weights": gains, "num_experts": 3, "factor": 1.0}),
    ]  # fmt: skip


def initialize_targets(folder: Path) -> list[Target]:
    """What makes models of transformers parallel in place. Files alone are made, as a model is
    taken only once.
    """
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds

    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return [
        Target(
            "initialize", "initialize", shardwright.initialize,
            lambda: {"model": model, "config": dict(CONFIG), "gen_savedir": folder / "initialized",
                "load_module": False},
            without=("load_module",),
        ),
    ]  # fmt: skip


def rank_targets(folder: Path) -> list[Target]:
    """What starts ranks, numbers them, and says what they do."""
    mpu = shardwright.MPU()
    sizes = {"tp": 2, "dp": 2}
    return [
        Target("ranks", "rank_groups", shardwright.rank_groups,
            lambda: {"order": "tp-dp", "sizes": dict(sizes), "axes": "dp"}),
        Target("ranks", "MPU", shardwright.MPU, dict, also=MPU_OPTIONS),
        Target("ranks", "MPU.ranks", mpu.ranks, lambda: {"role": "data"}),
        *(
            Target("ranks", f"MPU.{name}", getattr(mpu, name), dict)
            for name in sorted(dir(type(mpu)))
            if name.startswith("get_") and inspect.signature(getattr(mpu, name)).parameters
        ),
        Target(
            "ranks",
            "run_ranks",
            shardwright.run_ranks,
            lambda: {"num_ranks": 1, "fn": lambda rank: rank, "timeout_s": 5.0},
        ),
    ]  # fmt: skip


MPU_OPTIONS = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
    "expert_parallel_size", "expert_tensor_parallel_size", "order",
)  # fmt: skip


MAKERS: Mapping[Callable[[Path], list[Target]], Sequence[str]] = {
    config_targets: ("configs",),
    hardware_targets: ("hardware", "hardware files"),
    schedule_targets: ("schedules", "schedule files"),
    graph_targets: ("builder", "plans", "plan files", "operators"),
    compile_targets: ("compile", "options"),
    training_targets: ("modules", "optimizers", "checkpoints", "states"),
    rank_targets: ("ranks",),
    data_targets: ("data",),
    expert_targets: ("experts",),
    initialize_targets: ("initialize",),
}
"""What makes targets, and their groups. In a job of one rank, as of :func:`run_ranks`."""


def targets_of(folder: Path, *groups: str) -> list[Target]:
    """The targets of these groups, or of all."""
    made = [
        make(folder)
        for make, found in MAKERS.items()
        if not groups or not set(groups).isdisjoint(found)
    ]
    return [
        target for targets in made for target in targets if not groups or target.group in groups
    ]
