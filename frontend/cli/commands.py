"""The table of all commands, and the parser made of it.

A command names the function that runs it, which is imported only once its command line has parsed.
So ``--help``, ``--version`` and a mistake in a command line are answered without torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from shardwright import __version__
from shardwright.frontend.cli.command_arguments import (
    add_calibrate,
    add_compile,
    add_completion,
    add_convert,
    add_data,
    add_demo,
    add_diff,
    add_directory,
    add_doctor,
    add_explain,
    add_inspect,
    add_merge,
    add_ops,
    add_plan,
    add_profile,
    add_simulate,
    add_trace,
    add_train,
    add_verify,
)
from shardwright.runtime.errors import did_you_mean

INTERRUPTED, BROKEN_PIPE = 130, 141
"""The exit codes after Ctrl-C, and where nobody reads what is printed, as shells have them."""


@dataclass(frozen=True)
class Command:
    """A command of ``shardwright``.

    ``function``: ``module:name`` of what runs it, from the parsed options to an exit code. ``text``
    is what its ``--help`` says; the first line of it is its line in ``shardwright --help``.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    function: str
    text: str

    @property
    def summary(self) -> str:
        """The first line of the text."""
        return self.text.splitlines()[0].rstrip(".")


COMMANDS: Mapping[str, Command] = {
    "compile": Command(
        add_compile,
        "shardwright.frontend.cli.compiling:run_compile",
        """Compile a module offline: no GPU, no torchrun, no process group.

    shardwright compile my_models:make_gpt --policy tp --plan-ngpus 4
    shardwright compile my_models:Gpt --args my_models:EXAMPLE --policy data --plan-ngpus 2 \\
        --runtime-ngpus 4
    shardwright compile my_models:make_gpt --policy tp --plan-ngpus 4 --set outputs=loss \\
        --set seed=3 --dump passes/

The same parallelize(...) call under torchrun then finds the files and loads them.""",
    ),
    "verify": Command(
        add_verify,
        "shardwright.frontend.cli.compiling:run_verify",
        """Check a plan against one device, in this process.

    shardwright verify my_models:make_gpt --policy tp --plan-ngpus 4

Runs every rank as a thread, trains a few steps in float64, and compares losses, gradients,
parameters and buffers with the model itself. The exit code is 1 if any of them differs by more than
rounding.

    shardwright verify .shardwright/_parallel_modules/my_models/Gpt/_ --outside

Has files of a compile checked by spmd_types alone, without their model.""",
    ),
    "inspect": Command(
        add_inspect,
        "shardwright.frontend.cli.compiling:run_inspect",
        """Show the plan of a compiled module, and where it replicates.

    shardwright inspect .shardwright/_parallel_modules/my_models/Gpt/_

How every tensor lies, what every operator does, where the split fell back to replication and
why. With --data: which rank reads which samples, instead.

    shardwright inspect .shardwright/_parallel_modules/my_models/Gpt/_ --data --ranks 8""",
    ),
    "accept": Command(
        add_directory,
        "shardwright.frontend.cli.compiling:run_accept",
        """Accept edits of generated code.

    shardwright accept .shardwright/_parallel_modules/my_models/Gpt/_

A file that was edited is not loaded, as nobody may have meant it. This makes the files as they are
now the ones to load. It checks nothing of what they compute:

    shardwright verify .shardwright/_parallel_modules/my_models/Gpt/_ --outside

checks them without their model, which an edited folder cannot be compared with.""",
    ),
    "trace": Command(
        add_trace,
        "shardwright.frontend.cli.forms:run_trace",
        """Show a model's program after every pass of a compile.

    shardwright trace my_models:make_gpt --policy tp --plan-ngpus 2
    shardwright trace my_models:make_gpt --policy tp --plan-ngpus 2 --pass lower
    shardwright trace my_models:make_gpt --policy tp --plan-ngpus 2 --out passes/

What `shardwright compile --dump` writes; no files of a compile are made or changed.""",
    ),
    "ops": Command(
        add_ops,
        "shardwright.frontend.cli.forms:run_ops",
        """List the operators of a model that have no rule, with lines to paste.

    shardwright ops my_models:make_gpt
    shardwright ops my_models:make_gpt --all

An operator without a rule is computed whole on every rank: docs/register-op.md. The exit code is 1
if there are any.""",
    ),
    "train": Command(
        add_train,
        "shardwright.frontend.cli.training:run_train",
        """Train a model: the whole run, from the settings in a file.

    shardwright train -c run.yaml
    shardwright train -c run.yaml --steps 100 --parallel.policy tp
    torchrun --nproc-per-node 8 -m shardwright train -c run.yaml
    srun shardwright train -c run.yaml
    shardwright train -c run.yaml --print-config

Under torchrun and srun this process is one of the ranks; alone it starts num_ranks of them. SIGTERM
and SIGUSR1 save and stop, with exit code 75; the same command then goes on from the newest
checkpoint, on another number of ranks too. All settings: docs/finetuning.md.""",
    ),
    "plan": Command(
        add_plan,
        "shardwright.frontend.cli.searches:run_plan",
        """Search for the best plan for a machine.

    shardwright plan my_models:make_gpt --plan-ngpus 8 --hardware h100 --out plan.json \\
        --html plan.html
    shardwright plan my_models:make_gpt --plan-ngpus 64 --set use_end2end=true \\
        --set pas_config.num_microbatches=32
    shardwright compile my_models:make_gpt --policy saved --plan-ngpus 8 \\
        --set pas_config.load_plan=plan.json

Needs no device. Prints what was tried with its time, the least time it could have, and its memory,
and why the rest was refused. Options of the search are those of policy 'autodist': --set
pas_config.KEY=VALUE.""",
    ),
    "explain": Command(
        add_explain,
        "shardwright.frontend.cli.searches:run_explain",
        """Say why the best plan looks as it does.

    shardwright explain my_models:make_gpt --plan-ngpus 8
    shardwright explain my_models:make_gpt --plan-ngpus 8 --op lm_head --against tp=8
    shardwright explain my_models:make_gpt --plan-ngpus 8 --module transformer.h.0.mlp
    shardwright explain my_models:make_gpt --plan plan.json

Searches as 'plan' does, or takes the plan of a file, with its ranks, units, hardware, stage of ZeRO
and microbatches where the command line does not name others. Then looks for plans with one thing
changed: ZeRO, microbatches, what is computed again, other modes of attention over a split sequence;
more memory, faster links, another mesh; or, with the same stages and schedule, an operator or a
module split in another way. Every figure is that of a plan that was audited.""",
    ),
    "simulate": Command(
        add_simulate,
        "shardwright.frontend.cli.given_plans:run_simulate",
        """Predict the time and the memory of a plan.

    shardwright simulate my_models:make_gpt --policy tp --plan-ngpus 8 --hardware h100
    shardwright simulate my_models:make_gpt --policy hybrid --plan-ngpus 8 --set use_end2end=true \\
        --html plan.html
    shardwright simulate my_models:make_gpt --policy saved --set pas_config.load_plan=plan.json

Nothing is written or run: the program that a compile would emit is priced on the machine described.
Memory is that of training with Adam, or with --optimizer.""",
    ),
    "profile": Command(
        add_profile,
        "shardwright.frontend.cli.given_plans:run_profile",
        """Measure the operators of a plan on this machine: a rank's calls, each different one once.

    shardwright profile my_models:make_llama --policy tp --plan-ngpus 8 --hardware laptop.json

Writes laptop.operators.json: seconds by operator, local shapes, dtypes and attributes. simulate,
plan, explain and policy 'autodist' use them in the place of estimates where the hardware is
laptop.json. Calls measured before are kept; --again measures them anew.""",
    ),
    "diff": Command(
        add_diff,
        "shardwright.frontend.cli.given_plans:run_diff",
        """Show what differs between two plans.

    shardwright diff .shardwright/_parallel_modules/my_models/Gpt/a \\
        .shardwright/_parallel_modules/my_models/Gpt/b
    shardwright diff plan.json edited.json --json

The exit code is 1 if anything does.""",
    ),
    "calibrate": Command(
        add_calibrate,
        "shardwright.frontend.cli.calibration:run_calibrate",
        """Measure this machine and write it as a hardware file.

    shardwright calibrate --out laptop.json
    shardwright calibrate --device cpu --ranks 4 --quick
    torchrun --nnodes 2 --nproc-per-node 8 -m shardwright calibrate --out cluster.json

Matrix products over a grid of sizes, memory bandwidth, the least time of an operator, and every
collective by size, in about a minute. Under torchrun the ranks of the job measure, nodes and the
network between them apart. Ctrl-C leaves FILE as it was.""",
    ),
    "data": Command(
        add_data,
        "shardwright.frontend.cli.data:run_data",
        """Work on data: deal saved states of loaders anew, make indexes of shards.

    shardwright data redist dataloader.pt new.pt --world-size 4 --num-workers 2
    shardwright data redist dataloader_rank*.pt 'new_rank{rank}.pt' --world-size 4 --num-workers 2
    shardwright data index shards/

Which rank reads which samples: shardwright inspect DIR --data.""",
    ),
    "demo": Command(
        add_demo,
        "shardwright.frontend.cli.demo:run_demo",
        """Compile a small GPT for two ranks, train it, and compare with one device.

    shardwright demo

Takes about a minute. What it makes stays in .shardwright/demo of the folder that you are in.""",
    ),
    "doctor": Command(
        add_doctor,
        "shardwright.frontend.cli.machine:run_doctor",
        """Look at this machine: versions, devices, disk, a collective of two ranks.

    shardwright doctor

Prints a block to paste into an issue. The exit code is 1 if something is wrong.""",
    ),
    "completion": Command(
        add_completion,
        "shardwright.frontend.cli.completion:run_completion",
        """Print a script that completes commands, options and their values in a shell.

    shardwright completion bash

Write it where the shell reads it: into the folder ~/.local/share/bash-completion/completions, as a
file called shardwright, or at the end of ~/.zshrc. Files are completed as ever.""",
    ),
    "convert": Command(
        add_convert,
        "shardwright.runtime.cli:run_convert",
        """Convert a checkpoint to Hugging Face's form, to DCP's, to whole tensors, or to ours.

    shardwright convert checkpoints/ exported/ --to huggingface --config base-model/
    shardwright convert base-model/ start/ --to shardwright
    shardwright convert checkpoints/ whole/ --to full --max-file-size 5GB
    shardwright convert checkpoints/ for-fsdp/ --to dcp
    shardwright convert fsdp-checkpoint/ start/ --to shardwright

DIR has any of these forms; dcp is that of torch.distributed.checkpoint. Runs on any machine that
has the folder: no GPU, no model code, memory for one tensor. Nothing is unpickled.""",
    ),
    "merge": Command(
        add_merge,
        "shardwright.runtime.cli:run_merge",
        """Merge a checkpoint into whole tensors under the original names.

    shardwright merge checkpoints/ merged/
    shardwright merge checkpoints/000007-step-3500 merged/ --max-file-size 5GB

Runs on any machine that has the folder: no GPU, no model code, memory for one tensor.
OUT/model.safetensors loads into the original module, and OUT is a checkpoint again, which
load_checkpoint loads under any plan.""",
    ),
}
"""The commands by name, in the order of ``--help``."""

ALIASES: Mapping[str, str] = {"merge-checkpoint": "merge"}
"""Other names of commands."""


def parse(arguments: Sequence[str]) -> argparse.Namespace | None:
    """What a command line says; ``None``, with the list of commands shown, if it says nothing.

    ``function`` of the result names what runs the command.

    Raises:
        SystemExit: with code 2, and words, where it does not parse; with 0 after ``--help`` and
            ``--version``.
    """
    parser, _ = _make_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return None
    given = [ALIASES.get(arguments[0], arguments[0]), *arguments[1:]]
    if not given[0].startswith("-") and given[0] not in COMMANDS:
        hint = did_you_mean(given[0], (*COMMANDS, *ALIASES))
        parser.error(f"there is no command {given[0]!r}: {hint}")
    options, rest = parser.parse_known_args(given)
    if rest and not hasattr(options, "rest"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest  # of a command whose options are more than a parser knows
    return options


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command."""
    return _make_parser()[1]


def _make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and those of the commands by name."""
    parser = argparse.ArgumentParser(
        prog="shardwright", description="Compile an ordinary PyTorch module for many devices."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"shardwright {__version__} (torch {version('torch')})",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers = {}
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.summary,
            description=command.text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(added)
        added.add_argument("--debug", action="store_true", help="print a traceback for an error")
        # A name, not the function: importing it would import torch for ``--help``.
        added.set_defaults(function=command.function)
        parsers[name] = added
    return parser, parsers
