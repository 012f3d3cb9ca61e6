"""The commands about plans and what they cost: ``simulate``, ``diff``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from shardwright.compiler.cli_request import add_model, make_console, read_dtype, read_plan_request
from shardwright.compiler.cli_targets import load_model
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.hardware import load_hardware
from shardwright.compiler.module_source import in_dtype
from shardwright.compiler.report.diff import diff, show_diff
from shardwright.compiler.report.page import page
from shardwright.compiler.trace import trace
from shardwright.policies.saved import read_plan_file


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--dtype", help="as if the module had been cast to this dtype: bfloat16, ...")
    parser.add_argument(
        "--hardware", default="a100-80gb", metavar="NAME|FILE", help="a preset or a hardware file (default: %(default)s)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--json", action="store_true", help="print the cost as JSON")


def _simulate(options: argparse.Namespace) -> int:
    source, dummy_args = load_model(options.target, options.args)
    policy, config = read_plan_request(options)
    hardware = load_hardware(options.hardware, config.runtime_ngpus)
    module = source.make()
    with in_dtype(module, read_dtype(options.dtype)):
        graph = trace(module, dummy_args, dynamic_dims=config.dim_symbols())
    compiled = compile_graph(graph, policy.apply, config, policy_name=policy.name)
    cost = audit(compiled.program, config, hardware)
    if options.html is not None:
        options.html.write_text(page(graph.name, compiled.plan, cost, hardware, num_units=config.num_units))
    print(cost.dumps() if options.json else cost)
    return 0


def _add_diff(parser: argparse.ArgumentParser) -> None:
    for name in ("before", "after"):
        parser.add_argument(name, type=Path, metavar=name.upper(), help="a plan.json, or the folder of a compile")
    parser.add_argument("--every-layer", action="store_true", help="a row for every operator, not one per kind of layer")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def _diff(options: argparse.Namespace) -> int:
    found = diff(*(read_plan_file(path / "plan.json" if path.is_dir() else path) for path in (options.before, options.after)))
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        make_console().print(show_diff(found, every_layer=options.every_layer))
    return 1 if found else 0


COMMANDS: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]] = {
    "simulate": (
        _add_simulate,
        _simulate,
        """Predict the time and the memory of a plan.

    shardwright simulate my_models:make_gpt --policy tp --plan-ngpus 8 --hardware h100
    shardwright simulate my_models:make_gpt --policy hybrid --plan-ngpus 8 --set use_end2end=true --html plan.html
    shardwright simulate my_models:make_gpt --policy saved --set pas_config.load_plan=plan.json --plan-ngpus 8

Nothing is written or run: the program that a compile would emit is priced on the machine described. Memory is that of training
with Adam.""",
    ),
    "diff": (
        _add_diff,
        _diff,
        """Show what differs between two plans.

    shardwright diff .shardwright/_parallel_modules/my_models/Gpt/a .shardwright/_parallel_modules/my_models/Gpt/b
    shardwright diff plan.json edited.json --json

The exit code is 1 if anything does.""",
    ),
}
"""Name to what adds its arguments, what runs it, and its help."""
