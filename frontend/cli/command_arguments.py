"""The arguments of every command.

Nothing here imports torch or the compiler, so that ``shardwright COMMAND --help`` and a mistake in
a command line are answered at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwright.policies.built_in_policies import BUILT_IN
from shardwright.runtime.config import ReuseType
from shardwright.runtime.errors import did_you_mean

HARDWARE = "a100-80gb"
"""The machine where none is named."""

AUTO = "auto"
"""``--plan-ngpus auto``: the search chooses among the powers of 2 that divide all ranks."""

OF_A_PLAN = "those of the plan in a file, else as many as --plan-ngpus"
"""The ranks in all where a command line may name the file of a plan."""

NUM_CHOICES = 10
"""The choices that ``explain`` shows where ``--most`` does not say how many."""


def add_model(parser: argparse.ArgumentParser, *, or_files: bool = False) -> None:
    """Arguments for a model, a policy, and the ranks. ``or_files``: the target may be a folder of
    generated files, which have a plan.
    """
    add_model_target(parser, or_files=or_files)
    chosen = parser.add_mutually_exclusive_group(required=not or_files)
    chosen.add_argument(
        "--policy", help=f"one of {', '.join(BUILT_IN)}, or MODULE:NAME of a policy function"
    )
    chosen.add_argument(
        "--parallel",
        metavar="TEXT|FILE",
        help="pipeline, tensor and data as JSON or YAML, such as '{pipeline: 2, tensor: {size: 4, "
        "mode: 2d}}', or a file with it; --plan-ngpus may be left out then",
    )
    add_ranks(parser, required=False, default=OF_A_PLAN)


def add_model_target(parser: argparse.ArgumentParser, *, or_files: bool = False) -> None:
    """Arguments for a model. ``or_files``: or for a folder of generated files."""
    parser.add_argument(
        "target",
        metavar="MODULE:NAME|DIR" if or_files else "MODULE:NAME",
        help="a function that returns (module, dummy_args) or a module; a module class; a module"
        + ("; with --outside also the folder of a compile" if or_files else ""),
    )
    parser.add_argument(
        "--args",
        metavar="MODULE:NAME",
        help="the dict of dummy arguments, or a function that returns it",
    )


def add_ranks(
    parser: argparse.ArgumentParser,
    *,
    required: bool = True,
    searched: bool = False,
    default: str = "as many as --plan-ngpus",
) -> None:
    """Arguments for the ranks, and settings. ``searched``: how many ranks share one copy of the
    model may be left to the search. ``default``: what ``--runtime-ngpus`` is then.
    """
    parser.add_argument(
        "--plan-ngpus",
        type=_count_or_auto if searched else int,
        required=required,
        metavar="N|auto" if searched else "N",
        help="ranks that share one copy of the model"
        + ("; auto: searched, for the samples of --global-batch" if searched else ""),
    )
    parser.add_argument(
        "--runtime-ngpus",
        type=int,
        metavar="N",
        help=f"ranks in all (default: {default})",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="a field of ComputeConfig; values are JSON; pas_config.KEY=VALUE for an option of "
        "the policy; repeatable",
    )


def _count_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


def add_machine(parser: argparse.ArgumentParser, *, html: bool = True) -> None:
    """Arguments for the machine that a plan is for, and for where a page goes."""
    parser.add_argument(
        "--dtype", help="as if the module had been cast to this dtype: bfloat16, ..."
    )
    parser.add_argument(
        "--hardware", metavar="NAME|FILE", help=f"a preset or a hardware file (default: {HARDWARE})"
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME|MODULE:NAME",
        help="whose state is counted: AdamW, 'SGD(momentum=0.9)', my_module:make (default: Adam's "
        "two moments)",
    )
    parser.add_argument(
        "--imbalance",
        metavar="NUMBER|FILE",
        help="how many times its even share of tokens the busiest rank of experts gets: 1.5, or a "
        'JSON file with a number or numbers by module, {"model.layers.0": 1.5}',
    )
    if html:
        parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compile``."""
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
        **_one_of(*(mode.value for mode in ReuseType)),
        default=ReuseType.MOO.value,
        help="what to do with files of an earlier compile (default: %(default)s, compile again if "
        "something changed)",
    )
    parser.add_argument(
        "--dump", type=Path, metavar="DIR", help="write the form of the program after every pass"
    )


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add_model(parser, or_files=True)
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="optimizer steps to compare (default: 3)",
    )
    parser.add_argument(
        "--outside",
        action="store_true",
        help="run the files under spmd_types, too, a type checker of others",
    )
    parser.add_argument(
        "--device",
        help="what all ranks compute on: cpu, or cuda for one GPU (default: cpu)",
    )


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``inspect``."""
    add_directory(parser)
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


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add the folder of a compile, which is all that ``accept`` takes."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the folder with manifest.json and gencode0.py"
    )


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``trace``."""
    add_model(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the forms there, in the place of printing"
    )
    parser.add_argument(
        "--pass", dest="only", metavar="NAME", help="print the form after this pass alone: lower"
    )


def add_ops(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ops``."""
    add_model_target(parser)
    parser.add_argument("--all", action="store_true", help="list those that have a rule, too")


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``train`` itself; settings of the run are read from the rest."""
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="the settings of the run, as YAML",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings with where each came from, and run nothing",
    )
    parser.epilog = (
        "Any setting is an option by its path, and counts in the place of the file's: "
        "--steps 100 --optimizer.options.lr 3e-4. With --print-config all of them are listed."
    )
    parser.set_defaults(rest=[])


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    add_model_target(parser)
    add_ranks(parser, searched=True)
    add_machine(parser)
    _add_batch(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the plan, for policy 'saved'"
    )
    parser.add_argument(
        "--all", action="store_true", help="print all plans that were tried, not ten of them"
    )
    parser.set_defaults(policy="autodist")


def _add_batch(parser: argparse.ArgumentParser) -> None:
    """The samples of a step."""
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="samples of a step, over all ranks; the size of a microbatch is searched, too",
    )
    parser.add_argument(
        "--microbatch",
        metavar="N,...",
        help="sizes to choose from (default: up to five, from 1 to 16 for each rank)",
    )
    parser.add_argument(
        "--batch-dims",
        metavar="INPUT=DIM,...",
        help="the dim of an input that counts samples, where it cannot be told",
    )


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain``."""
    add_model_target(parser)
    add_ranks(parser, required=False, searched=True, default=OF_A_PLAN)
    add_machine(parser, html=False)
    _add_batch(parser)
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="explain the plan of this file, without a search; ranks, units, stage of ZeRO, "
        "hardware and microbatches are those of the file where nothing else is said",
    )
    parser.add_argument("--op", metavar="NAME", help="the runners-up of an operator")
    parser.add_argument("--module", metavar="PATH", help="what a module would cost split otherwise")
    parser.add_argument(
        "--against",
        metavar="AXIS=N,...",
        help="compare with the best plan on another mesh: tp=8; pp=2,tp=4",
    )
    parser.add_argument(
        "--most",
        type=int,
        default=NUM_CHOICES,
        metavar="N",
        help="choices to show (default: %(default)s)",
    )
    _add_all_ranks(parser)
    parser.set_defaults(policy="autodist")


def _add_all_ranks(parser: argparse.ArgumentParser) -> None:
    """Whether each rank is printed, or the telling ones alone."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="print the cost of every rank; otherwise, of many different ones, the first, the "
        "last and the extremes",
    )


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``simulate``."""
    add_model(parser)
    add_machine(parser)
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="microbatches whose gradients a step adds up (default: the plan's, else 1)",
    )
    _add_all_ranks(parser)
    parser.add_argument("--json", action="store_true", help="print the cost as JSON")
    parser.add_argument(
        "--tp-plan",
        type=Path,
        metavar="FILE",
        help="write the plan as JSON under the names of transformers' tp_plan, if it can be said "
        "in them",
    )


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``profile``."""
    add_model(parser)
    parser.add_argument(
        "--hardware", required=True, metavar="FILE", help="the hardware file of this machine"
    )
    parser.add_argument(
        "--dtype", help="as if the module had been cast to this dtype: bfloat16, ..."
    )
    parser.add_argument(
        "--device",
        **_one_of("cpu", "cuda"),
        default="cpu",
        help="what to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--again", action="store_true", help="measure calls that were measured before, too"
    )


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``diff``."""
    for name in ("before", "after"):
        parser.add_argument(
            name, type=Path, metavar=name.upper(), help="a plan.json, or the folder of a compile"
        )
    parser.add_argument(
        "--every-layer",
        action="store_true",
        help="a row for every operator, not one per kind of layer",
    )
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``calibrate``."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("hardware.json"),
        metavar="FILE",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes to measure with (default: one per GPU, or per core)",
    )
    parser.add_argument(
        "--device",
        **_one_of("cpu", "cuda"),
        help="what to measure (default: cuda where there is some)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, fewer sizes, wider errors"
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the actions of ``data`` with their arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    redist = actions.add_parser(
        "redist", help="deal saved states to another number of ranks or workers"
    )
    redist.add_argument(
        "states",
        type=Path,
        nargs="+",
        metavar="STATE",
        help="what save_state_global gave, in one file, or a file for each rank (.pt or .json)",
    )
    redist.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        help="the file to write (.pt or .json); with {rank} in its name, one for each rank",
    )
    redist.add_argument("--world-size", type=int, required=True, help="data-parallel ranks")
    redist.add_argument("--num-workers", type=int, required=True, help="workers of each rank")
    redist.add_argument(
        "--batch-size", type=int, help="samples of a batch of a rank (default: as saved)"
    )
    index = actions.add_parser("index", help="make the indexes of tar shards or JSON lines anew")
    index.add_argument("paths", nargs="+", metavar="PATH", help="a file, or a folder of shards")


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``demo``: there are none."""


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument(
        "--no-ranks", action="store_true", help="leave out the collective of two processes"
    )


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``completion``."""
    parser.add_argument("shell", **_one_of("bash", "zsh"), help="for which shell")


def _one_of(*choices: str) -> dict[str, Any]:
    """How to add an argument that is one of some words. Another one is refused with the nearest."""

    def known(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"there is no {text!r}: {did_you_mean(text, choices)}")
        return text

    return {"type": known, "choices": choices}


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``convert``."""
    parser.add_argument("source", type=Path, metavar="DIR", help="a checkpoint, of any form")
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder to write")
    parser.add_argument(
        "--to",
        required=True,
        **_one_of("shardwright", "huggingface", "full", "dcp"),
        help="the form to write",
    )
    parser.add_argument(
        "--config", type=Path, metavar="DIR", help="with --to huggingface: where config.json is"
    )
    parser.add_argument(
        "--max-file-size",
        metavar="SIZE",
        help="begin another file when one would grow larger: 5GB, 500MB (default: one file)",
    )


def add_merge(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``merge``."""
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="what save_checkpoint was called with, or a folder in it",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the new folder to write")
    parser.add_argument(
        "--max-file-size",
        metavar="SIZE",
        help="begin another file when one would grow larger: 5GB, 500MB (default: one file)",
    )
