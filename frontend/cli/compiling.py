"""The commands about one compile: ``compile``, ``verify``, ``inspect``, ``accept``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.text import Text

from shardwright.data.rank_roles import roles
from shardwright.frontend.cli.model_arguments import (
    ModelRequest,
    make_console,
    read_dtype,
    read_model_request,
)
from shardwright.frontend.cli.targets import load_args
from shardwright.frontend.files.cache import generated_directory, read_plan
from shardwright.frontend.files.module_files import Generated, Order, generate
from shardwright.frontend.report.plan_tables import show_directory
from shardwright.frontend.verification.files_check import NOT_CHECKED, check_files
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.config import ReuseType
from shardwright.runtime.errors import ConfigError
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
    directory = Path(options.target)
    if directory.is_dir():
        return _verify_files(directory, options)
    if ":" not in options.target and options.policy is None:
        raise ConfigError(
            f"there is no folder {options.target}",
            why="and a model would be written MODULE:NAME",
            hint="name the folder with manifest.json and gencode0.py, as `compile` prints it",
        )
    if options.policy is None and options.parallel is None:
        raise ConfigError(
            "there is no plan to verify",
            why=f"{options.target} names a model, and neither --policy nor --parallel is given",
            hint="--policy NAME --plan-ngpus N; or the folder of a compile, with --outside",
        )
    request = read_model_request(options)
    _print_sources(request)
    policy = request.policy
    report = verify(
        request.source.make(),
        request.dummy_args,
        policy.name if policy.built_in else policy.apply,
        request.config,
        steps=3 if options.steps is None else options.steps,
        outside=options.outside,
        device=options.device or "cpu",
    )
    make_console().print(str(report), soft_wrap=True)
    return 0 if report.ok else 1


def _verify_files(directory: Path, options: argparse.Namespace) -> int:
    """Run ``verify`` of a folder, whose files have a plan and no model.

    Raises :class:`ConfigError` for arguments that are about a model.
    """
    if not options.outside:
        raise ConfigError(
            f"{directory} cannot be compared with one device",
            why="it is a folder, and has no model",
            hint="name the model, MODULE:NAME, and a plan; or check the files alone: --outside",
        )
    of_a_model = (
        "policy",
        "parallel",
        "plan_ngpus",
        "runtime_ngpus",
        "settings",
        "steps",
        "device",
    )
    given = [name for name in of_a_model if getattr(options, name) not in (None, [])]
    if given:
        words = {"settings": "--set"}
        named = ", ".join(words.get(name, f"--{name.replace('_', '-')}") for name in given)
        raise ConfigError(
            f"{named} cannot be given for files that are compiled",
            why=f"{directory} has its plan, and one step of it runs on the CPU",
            hint="leave it out, or name the model, MODULE:NAME, in the place of the folder",
        )
    args = None if options.args is None else load_args(options.args)
    report = check_files(directory, args)
    console = make_console()
    console.print(str(report), soft_wrap=True)
    console.print(NOT_CHECKED, soft_wrap=True)
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
    console = make_console()
    if not changed:
        console.print("nothing to accept: no file was edited", soft_wrap=True)
        return 0
    console.print(f"accepted {', '.join(changed)}", soft_wrap=True)
    # Values alone change no placement.
    if any(name.endswith(".py") for name in changed):
        console.print(
            f"not checked yet: `shardwright verify {options.directory} --outside` checks where "
            "values lie on each rank, and that sums are taken. Numbers are compared with nothing, "
            "as the folder has no model: compare a few losses with those of before",
            soft_wrap=True,
        )
    return 0
