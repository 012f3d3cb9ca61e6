"""The commands: ``compile``, ``verify``, ``inspect``, ``accept``, and those of
:mod:`shardwright.frontend.cli.searches`, :mod:`shardwright.frontend.cli.given_plans`,
:mod:`shardwright.frontend.cli.data`, :mod:`shardwright.frontend.calibrate.command` and
:mod:`shardwright.runtime.cli`.

Exit codes: 0 done; 1 an error, printed in words (``--debug``: with its traceback), or a plan that
``verify`` finds to differ from one device; 2 a command line that does not parse; 130 interrupted by
Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from shardwright.data.rank_roles import roles
from shardwright.frontend.calibrate import command as calibrate_command
from shardwright.frontend.cli import data as cli_data
from shardwright.frontend.cli import forms as cli_forms
from shardwright.frontend.cli import given_plans
from shardwright.frontend.cli import machine as cli_machine
from shardwright.frontend.cli import searches as cli_search
from shardwright.frontend.cli import training as cli_training
from shardwright.frontend.cli.model_arguments import (
    add_model,
    make_console,
    read_dtype,
    read_plan_request,
)
from shardwright.frontend.cli.targets import load_model
from shardwright.frontend.files.cache import generated_directory, read_plan
from shardwright.frontend.files.module_files import Generated, Order, generate
from shardwright.frontend.report.plan_tables import show_directory
from shardwright.frontend.verification.verify import verify
from shardwright.runtime import cli as runtime_cli
from shardwright.runtime.commands import HELP, main_parser
from shardwright.runtime.config import ReuseType
from shardwright.runtime.errors import ShardwrightError, did_you_mean, format_error
from shardwright.runtime.manifest import Manifest, accept


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options = _parsed(sys.argv[1:] if arguments is None else arguments)
    if options is None:
        return 2
    # Errors of ours are shown as they are; others ask for a report.
    try:
        code: int = options.run(options)
    except ShardwrightError as error:
        if options.debug:
            raise
        _print_error(str(error))
        return 1
    except KeyboardInterrupt:
        if options.debug:
            raise
        _print_error(
            format_error("interrupted", why="by Ctrl-C, before there was anything to answer with")
        )
        return calibrate_command.INTERRUPTED
    except Exception as error:
        if options.debug:
            raise
        what = f"{type(error).__name__}: {error}"
        _print_error(
            format_error(what, hint="run the command again with --debug to see where it was raised")
        )
        return 1
    return code


def command_options() -> dict[str, list[str]]:
    """The options of every command, long ones only."""
    parser, _ = _parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: [flag for flag in command._option_string_actions if flag.startswith("--")]
        for name, command in commands.choices.items()
    }


def _parsed(given: Sequence[str]) -> argparse.Namespace | None:
    """What a command line says; ``None``, with the list of commands shown, if it says nothing.

    Raises:
        SystemExit: with code 2, and words, where it does not parse; with 0 after ``--help`` and
            ``--version``.
    """
    parser, commands = _parser()
    if not given:
        parser.print_help(sys.stderr)
        return None
    if not given[0].startswith("-") and given[0] not in commands:
        parser.error(f"there is no command {given[0]!r}: {did_you_mean(given[0], commands)}")
    options, rest = parser.parse_known_args(given)
    if rest and not hasattr(options, "rest"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest  # of a command whose options are more than a parser knows
    return options


def _parser() -> tuple[argparse.ArgumentParser, tuple[str, ...]]:
    """The parser, and the names of the commands."""
    # All commands with the function that adds their arguments; this parser knows nothing of them.
    parser, commands = main_parser()
    others = {
        **cli_forms.COMMANDS,
        **cli_training.COMMANDS,
        **cli_search.COMMANDS,
        **given_plans.COMMANDS,
        **calibrate_command.COMMANDS,
        **cli_data.COMMANDS,
        **cli_machine.COMMANDS,
        **runtime_cli.COMMANDS,
    }
    every = {**_COMMANDS, **others}
    for name, (add_arguments, run, text) in every.items():
        command = commands.add_parser(
            name,
            help=HELP[name],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(command)
        command.add_argument("--debug", action="store_true", help="print a traceback for an error")
        command.set_defaults(run=run)
    return parser, tuple(every)


def _add_compile(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--dtype",
        help="compile as if the module had been cast to this dtype: bfloat16, float64, ...",
    )
    parser.add_argument(
        "--gen-savedir",
        default=".shardwright",
        metavar="DIR",
        help="where the files go (default: %(default)s)",
    )
    parser.add_argument("--instance-name", metavar="NAME", help="tells compiles of one class apart")
    parser.add_argument(
        "--reuse",
        choices=[mode.value for mode in ReuseType],
        default=ReuseType.MOO.value,
        help="what to do with files of an earlier compile (default: %(default)s, compile again if "
        "something changed)",
    )
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write the form of the program after every pass"
    )


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    _add_directory(parser)
    parser.add_argument(
        "--every-layer",
        action="store_true",
        help="a row for every operator and tensor, not one per kind of layer",
    )
    parser.add_argument(
        "--data",
        action="store_true",
        help="show which rank reads which samples, which ranks are twins, and who saves the state "
        "of the loader",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="with --data: the ranks of the job (default: runtime_ngpus of the compile)",
    )


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the folder with manifest.json and gencode0.py"
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--steps",
        type=int,
        default=3,
        metavar="N",
        help="optimizer steps to compare (default: %(default)s)",
    )


def _compile(options: argparse.Namespace) -> int:
    # A command is a call of the library with arguments read from text.
    source, dummy_args = load_model(options.target, options.args)
    policy, config = read_plan_request(options)
    order = Order(
        source=source,
        dummy_args=dummy_args,
        policy=policy,
        config=config,
        directory=generated_directory(options.gen_savedir, source.cls, options.instance_name),
        reuse=ReuseType(options.reuse),
        module_dtype=read_dtype(options.dtype),
        dump=options.dump,
    )
    _report(generate(order), order)
    return 0


def _verify(options: argparse.Namespace) -> int:
    source, dummy_args = load_model(options.target, options.args)
    policy, config = read_plan_request(options)
    report = verify(
        source.make(),
        dummy_args,
        policy.name if policy.built_in else policy.apply,
        config,
        steps=options.steps,
    )
    make_console().print(str(report), soft_wrap=True)
    return 0 if report.ok else 1


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


def _inspect(options: argparse.Namespace) -> int:
    if options.data:
        make_console().print(str(roles(options.directory, num_ranks=options.ranks)), soft_wrap=True)
        return 0
    manifest, plan = Manifest.read(options.directory), read_plan(options.directory)
    show_directory(
        make_console(), options.directory, manifest, plan, every_layer=options.every_layer
    )
    return 0


def _accept(options: argparse.Namespace) -> int:
    changed = accept(options.directory)
    make_console().print(
        f"accepted {', '.join(changed)}" if changed else "nothing to accept: no file was edited",
        soft_wrap=True,
    )
    return 0


_COMMANDS: Mapping[
    str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]
] = {
    "compile": (
        _add_compile,
        _compile,
        """Compile a module offline: no GPU, no torchrun, no process group.

    shardwright compile my_models:make_gpt --policy tp --plan-ngpus 4
    shardwright compile my_models:Gpt --args my_models:EXAMPLE --policy data --plan-ngpus 2 \\
        --runtime-ngpus 4
    shardwright compile my_models:make_gpt --policy tp --plan-ngpus 4 --set outputs=loss \\
        --set seed=3 --dump passes/

The same parallelize(...) call under torchrun then finds the files and loads them.""",
    ),
    "verify": (
        _add_verify,
        _verify,
        """Check a plan against one device, in this process.

    shardwright verify my_models:make_gpt --policy tp --plan-ngpus 4

Runs every rank as a thread, trains a few steps in float64, and compares losses, gradients,
parameters and buffers with the model itself. The exit code is 1 if any of them differs by more than
rounding.""",
    ),
    "inspect": (
        _add_inspect,
        _inspect,
        """Show the plan of a compiled module, and where it replicates.

    shardwright inspect .shardwright/_parallel_modules/my_models/Gpt/_

How every tensor lies, what every operator does, where the split fell back to replication and
why. With --data: which rank reads which samples, instead.

    shardwright inspect .shardwright/_parallel_modules/my_models/Gpt/_ --data --ranks 8""",
    ),
    "accept": (
        _add_directory,
        _accept,
        """Accept edits of generated code.

    shardwright accept .shardwright/_parallel_modules/my_models/Gpt/_

A file that was edited is not loaded, as nobody may have meant it. This makes the files as they are
now the ones to load.""",
    ),
}
"""Name to what adds its arguments, what runs it, and its help."""


def _print_error(text: str) -> None:
    console = Console(stderr=True, markup=False, highlight=False)
    what, *rest = text.splitlines()
    console.print(Text(f"error: {what}", "bold red"), soft_wrap=True)
    for line in rest:
        console.print(line, soft_wrap=True)
