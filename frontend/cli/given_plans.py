"""The commands about given plans and what they cost: ``simulate``, ``profile``, ``diff``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace

import torch

from shardwright import __version__
from shardwright.compiler.compile import MUCH_MORE, Compiled, compile_graph, warn_of_work
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM, OptimizerMemory
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.cost.time.operator_file import dumps_times, load_times, times_file
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.passes.chosen_rows import (
    check_has_experts,
    check_imbalance,
    imbalance_of,
)
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.imbalance import Imbalance, imbalance_text
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.trace import trace
from shardwright.frontend.calibrate.profile import profile
from shardwright.frontend.cli.model_arguments import (
    SEE_EACH,
    ModelRequest,
    make_console,
    memory_limit_bytes,
    on_machine,
    read_dtype,
    read_imbalance,
    read_model_request,
)
from shardwright.frontend.files.module_source import in_dtype
from shardwright.frontend.huggingface.tp_plan import tp_plan_of
from shardwright.frontend.report.diff import diff, show_diff
from shardwright.frontend.report.page import page
from shardwright.frontend.report.plan_details import Details, stored_layouts
from shardwright.policies.autodist.questions.launches import (
    bound_by_launches,
    host_unknown,
    num_needed,
    repeated_work,
)
from shardwright.policies.saved_plan import read_plan_file
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.swap import check_target, write_file


def _traced(options: argparse.Namespace, request: ModelRequest) -> IRGraph:
    """The graph of the model that a command line names."""
    module, config = request.source.make(), request.config
    with in_dtype(module, read_dtype(options.dtype)):
        return trace(
            module,
            request.dummy_args,
            dynamic_dims=config.dim_symbols(),
            constants=config.constants,
        )


def run_simulate(options: argparse.Namespace) -> int:
    """Run ``simulate``."""
    if options.html is not None:
        check_target(options.html, "--html", "plan.html")
    if options.tp_plan is not None:
        check_target(options.tp_plan, "--tp-plan", "tp_plan.json")
    request = read_model_request(options)
    policy = request.policy
    machine, config = on_machine(options, request)
    hardware = load_hardware(machine, config.runtime_ngpus)
    # What is printed as JSON stands alone.
    for line in request.sources(hardware.name, options.microbatches):
        print(line, file=sys.stderr if options.json else sys.stdout)
    imbalance = read_imbalance(options.imbalance, config.plan_ngpus)
    graph = _traced(options, request)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{MUCH_MORE}")  # said below, if it is
        compiled = compile_graph(
            graph, policy.apply, config, policy_name=policy.name, version=__version__
        )
    # Work that is repeated is said by itself.
    if compiled.work is not None and compiled.work.is_uneven_on(num_needed(compiled.plan)):
        warn_of_work(compiled.program.graph.name, compiled.work)
    if imbalance is not None:
        check_imbalance(compiled.program.graph, imbalance)
        check_has_experts(compiled.program.graph, "--imbalance")

    def compiled_with(imbalance: Imbalance) -> Compiled:
        """Compile the plan for tokens that choose experts as unevenly as that."""
        plan = replace(compiled.plan, imbalance=imbalance)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of this plan they were said already
            return compile_graph(
                graph, policy.apply, config, policy_name=policy.name, plan=plan, version=__version__
            )

    if imbalance is not None and imbalance != imbalance_of(compiled.program.graph):
        compiled = compiled_with(imbalance)
    times = load_times(machine)
    optimizer = (
        ADAM
        if options.optimizer is None
        else OptimizerMemory(named=NamedOptimizer(options.optimizer))
    )

    microbatches = options.microbatches
    if microbatches is None and request.named is not None:
        microbatches = request.named.added_up

    def cost_of(
        compiled: Compiled, machine: Hardware = hardware, config: ComputeConfig | None = None
    ) -> PlanCost:
        return audit(
            compiled.program, config or compiled.config, machine,
            optimizer=optimizer, times=times, num_microbatches=microbatches,
        )  # fmt: skip

    cost = cost_of(compiled)
    see_each = None if options.all else SEE_EACH
    print(cost.dumps() if options.json else cost.in_words(see_each=see_each))
    if not options.json:

        def step_on(machine: Hardware, config: ComputeConfig = compiled.config) -> float:
            return cost_of(compiled, machine, config).step_s

        for told in (
            request.unsaid(compiled.config, cost),
            bound_by_launches(compiled.plan, cost.step_s, hardware, compiled.config, step_on),
            repeated_work(compiled.plan, config.num_units),
            host_unknown(cost.step_s, hardware, step_on),
        ):
            if told is not None:
                print(told)
    assumed = imbalance_of(compiled.program.graph)
    if assumed is not None and config.plan_ngpus > 1 and not options.json:
        # No rank gets more than all rows: as many times its share as there are ranks.
        worst = cost_of(compiled_with(float(config.plan_ngpus)))
        print(
            f"experts: with {imbalance_text(assumed)} times an even share of tokens on the busiest "
            f"rank; with all on one: {amount(worst.step_s, 's')}, {amount(worst.peak_bytes, 'B')}"
        )
    limit = memory_limit_bytes(policy, config, hardware)
    if cost.peak_bytes > limit and not options.json:
        has = "a device has" if limit == hardware.device.memory_bytes else "memory_limit_gb allows"
        print(f"does not fit: {has} {amount(limit, 'B')}")
    if options.html is not None:
        details = Details.of(
            compiled, cost, hardware,
            optimizer=optimizer, times=times, num_microbatches=microbatches,
        )  # fmt: skip
        text = page(
            graph.name, compiled.plan, cost, hardware, num_units=config.num_units,
            memory_bytes=limit, stored=stored_layouts(compiled), details=details,
        )  # fmt: skip
        write_file(options.html, text.encode())
        print(f"page: {options.html}", file=sys.stderr if options.json else sys.stdout)
    if options.tp_plan is not None:
        text = json.dumps(tp_plan_of(compiled.program), indent=1) + "\n"
        write_file(options.tp_plan, text.encode())
        print(f"tp_plan: {options.tp_plan}", file=sys.stderr if options.json else sys.stdout)
    return 0


def run_profile(options: argparse.Namespace) -> int:
    """Run ``profile``."""
    file = times_file(options.hardware)
    if file is None:
        raise ConfigError(
            f"--hardware {options.hardware} is no hardware file",
            why="times are kept beside the file of the machine they were measured on",
            hint="shardwright calibrate --out laptop.json writes one",
        )
    check_target(file, "the file of times")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device to measure", hint="--device cpu")
    request = read_model_request(options)
    policy, config = request.policy, request.config
    load_hardware(options.hardware, config.runtime_ngpus)  # refused before anything is measured
    program = compile_graph(
        _traced(options, request), policy.apply, config, policy_name=policy.name
    ).program
    known = None if options.again else load_times(options.hardware)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as under torchrun
    programs = program.programs if isinstance(program, PipelineProgram) else (program,)
    found = profile(programs, torch.device(options.device), known=known)
    before = len(known.entries) if known is not None else 0
    write_file(file, dumps_times(found.times).encode())
    print(
        f"{len(found.times.entries) - before} calls measured, {before} known before; file: {file}"
    )
    for name, reason in found.failed.items():
        print(f"not measured: {name} ({reason}); its time stays an estimate", file=sys.stderr)
    return 0


def run_diff(options: argparse.Namespace) -> int:
    """Run ``diff``."""
    found = diff(
        *(
            read_plan_file(path / "plan.json" if path.is_dir() else path)
            for path in (options.before, options.after)
        )
    )
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        make_console().print(show_diff(found, every_layer=options.every_layer))
    return 1 if found else 0
