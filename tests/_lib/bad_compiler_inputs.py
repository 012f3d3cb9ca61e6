"""Calls of what plans and compiles: configs, machines, schedules, graphs, plans, operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import plans
import torch
from bad_input_targets import ARGS, CONFIG, Net, Target
from bad_values import as_json

import shardwright
from shardwright import ComputeConfig
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
