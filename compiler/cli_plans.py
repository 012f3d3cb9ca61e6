"""The commands about plans and what they cost: ``plan``, ``simulate``, ``diff``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from shardwright.compiler.cli_request import add_model, add_model_target, add_ranks, make_console, read_dtype, read_plan_request
from shardwright.compiler.cli_targets import load_model
from shardwright.compiler.compile import annotate, compile_graph, pass_manager
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.hardware import load_hardware
from shardwright.compiler.module_source import in_dtype
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.report.diff import diff, show_diff
from shardwright.compiler.report.page import Section, page
from shardwright.compiler.report.pictures import amount
from shardwright.compiler.report.plan_tables import new_table
from shardwright.compiler.trace import trace
from shardwright.policies.autodist.policy import AutodistOptions, search, settled
from shardwright.policies.autodist.search import Found
from shardwright.policies.policy import read_options
from shardwright.policies.saved import read_plan_file
from shardwright.runtime.swap import write_file


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add_model_target(parser)
    add_ranks(parser)
    _add_machine(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the plan, for policy 'saved'")
    parser.set_defaults(policy="autodist")


def _plan(options: argparse.Namespace) -> int:
    source, dummy_args = load_model(options.target, options.args)
    policy, config = read_plan_request(options)
    chosen = read_options(AutodistOptions, {**config.pas_config, "hardware": options.hardware}, policy=policy.name)
    hardware = load_hardware(options.hardware, config.runtime_ngpus)
    module = source.make()
    with in_dtype(module, read_dtype(options.dtype)):
        graph = annotate(trace(module, dummy_args, dynamic_dims=config.dim_symbols()), pass_manager())
    found = search(graph, config, chosen, hardware)
    console = make_console()
    console.print(candidate_table(found))
    plan = settled(found, config, hardware)
    assert plan.certificate is not None and found.best is not None and found.best.cost is not None
    console.print(str(plan.certificate), soft_wrap=True)
    if options.out is not None:
        write_file(options.out, plan.dumps().encode())
        console.print(f"plan: {options.out}", soft_wrap=True)
    if options.html is not None:
        named = replace(plan, dims=split_dim_names(graph, plan))
        sections, facts = [candidate_section(found)], [("above the bound at most", f"{plan.certificate.gap:.2%}")]
        text = page(graph.name, named, found.best.cost, hardware, num_units=config.num_units, sections=sections, facts=facts)
        write_file(options.html, text.encode())
    return 0


def candidate_table(found: Found) -> Table:
    """What a search tried, best first."""
    table = new_table("Plans", *CANDIDATE_COLUMNS)
    for row in candidate_rows(found):
        table.add_row(*row)
    return table


def candidate_section(found: Found) -> Section:
    """The same on a page."""
    ended = f" The search ended by {found.interrupted}." if found.interrupted else ""
    text = f"{found.seconds:.1f} s.{ended} Predicted times are by the model of stages; audited ones of the program emitted."
    return Section(title="What was tried", text=text, columns=CANDIDATE_COLUMNS, rows=candidate_rows(found))


CANDIDATE_COLUMNS = ("plan", "step", "at least", "peak memory", "")


def candidate_rows(found: Found) -> list[tuple[str, ...]]:
    """A row for every candidate, and for what was refused."""
    rows: list[tuple[str, ...]] = []
    for candidate in (*found.audited, *found.others):
        step, least = amount(candidate.step_s, "s"), amount(candidate.bound_s, "s")
        peak, how = ("", "predicted") if candidate.cost is None else (amount(candidate.cost.peak_bytes, "B"), "audited")
        rows.append((candidate.title, step, least, peak, how))
    return [*rows, *((title, "", "", "", reason) for title, reason in found.refused.items())]


def _add_machine(parser: argparse.ArgumentParser) -> None:
    """The machine a plan is for, and where a page goes."""
    parser.add_argument("--dtype", help="as if the module had been cast to this dtype: bfloat16, ...")
    parser.add_argument(
        "--hardware", default="a100-80gb", metavar="NAME|FILE", help="a preset or a hardware file (default: %(default)s)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    _add_machine(parser)
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
        text = page(graph.name, compiled.plan, cost, hardware, num_units=config.num_units)
        write_file(options.html, text.encode())
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
    "plan": (
        _add_plan,
        _plan,
        """Search for the best plan for a machine.

    shardwright plan my_models:make_gpt --plan-ngpus 8 --hardware h100 --out plan.json --html plan.html
    shardwright plan my_models:make_gpt --plan-ngpus 64 --set use_end2end=true --set pas_config.num_microbatches=32
    shardwright compile my_models:make_gpt --policy saved --plan-ngpus 8 --set pas_config.load_plan=plan.json

Needs no device. Prints what was tried with its time, the least time it could have, and its memory, and why the rest was
refused.
Options of the search are those of policy 'autodist': --set pas_config.KEY=VALUE.""",
    ),
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
