"""The commands about one compile: ``compile``, ``verify``, ``inspect``, ``accept``."""

from __future__ import annotations

import argparse

from rich.text import Text

from shardwright.data.rank_roles import roles
from shardwright.frontend.cli.model_arguments import (
    ModelRequest,
    make_console,
    read_dtype,
    read_model_request,
)
from shardwright.frontend.files.cache import generated_directory, read_plan
from shardwright.frontend.files.module_files import Generated, Order, generate
from shardwright.frontend.report.plan_tables import show_directory
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.config import ReuseType
from shardwright.runtime.manifest import Manifest, accept


def run_compile(options: argparse.Namespace) -> int:
    """Run ``compile``."""
    # A command is a call of the library with arguments read from text.
    request = read_model_request(options)
    _print_sources(request)
    order = Order(
        source=request.source,
        dummy_args=request.dummy_args,
        policy=request.policy,
        config=request.config,
        directory=generated_directory(
            options.gen_savedir, request.source.cls, options.instance_name
        ),
        reuse=ReuseType(options.reuse),
        module_dtype=read_dtype(options.dtype),
        dump=options.dump,
    )
    _report(generate(order), order)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Run ``verify``."""
    request = read_model_request(options)
    _print_sources(request)
    policy = request.policy
    report = verify(
        request.source.make(),
        request.dummy_args,
        policy.name if policy.built_in else policy.apply,
        request.config,
        steps=options.steps,
        outside=options.outside,
        device=options.device,
    )
    make_console().print(str(report), soft_wrap=True)
    return 0 if report.ok else 1


def _print_sources(request: ModelRequest) -> None:
    """Say what was taken from the file of a plan, and what not."""
    for line in request.sources():
        make_console().print(line, soft_wrap=True)


def _report(generated: Generated, order: Order) -> None:
    console = make_console()
    # What was done, by what had to be made.
    done = {
        "code": "compiled",
        "weights": "found; new initial weights written for",
        "nothing": "found, nothing changed:",
    }
    ranks = f"{order.config.plan_ngpus} rank{'s' if order.config.plan_ngpus > 1 else ''}"
    manifest, directory = generated.manifest, generated.directory
    console.print(
        Text(f"{done[generated.made]} {manifest.class_name} ({manifest.policy}, {ranks})", "bold")
    )
    console.print(str(generated.report))
    console.print(f"files: {directory}", soft_wrap=True)
    plan = read_plan(directory)
    if plan.certificate is not None:
        console.print(str(plan.certificate), soft_wrap=True)
    if plan.batch is not None:
        console.print(f"a step of a unit: {plan.batch} samples", soft_wrap=True)
    num_notes = len(plan.notes)
    if num_notes:
        operators = "operator" if num_notes == 1 else "operators"
        console.print(
            f"{num_notes} {operators} could not be split: shardwright inspect {directory}",
            soft_wrap=True,
        )


def run_inspect(options: argparse.Namespace) -> int:
    """Run ``inspect``."""
    if options.data:
        make_console().print(str(roles(options.directory, num_ranks=options.ranks)), soft_wrap=True)
        return 0
    manifest, plan = Manifest.read(options.directory), read_plan(options.directory)
    show_directory(
        make_console(), options.directory, manifest, plan, every_layer=options.every_layer
    )
    return 0


def run_accept(options: argparse.Namespace) -> int:
    """Run ``accept``."""
    changed = accept(options.directory)
    make_console().print(
        f"accepted {', '.join(changed)}" if changed else "nothing to accept: no file was edited",
        soft_wrap=True,
    )
    return 0
