"""The commands that look at a model before it is compiled: ``trace`` and ``ops``."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops import registry
from shardwright.compiler.passes.rules import unknown_op_message
from shardwright.compiler.trace import trace
from shardwright.frontend.cli.model_arguments import (
    make_console,
    read_model_request,
)
from shardwright.frontend.cli.targets import load_model
from shardwright.frontend.files.cache import generated_directory
from shardwright.frontend.files.module_files import Order, generate
from shardwright.runtime.config import ReuseType
from shardwright.runtime.errors import ConfigError


def run_trace(options: argparse.Namespace) -> int:
    """Run ``trace``."""
    request = read_model_request(options)
    with tempfile.TemporaryDirectory() as folder:
        forms = Path(folder, "forms") if options.out is None else options.out
        order = Order(
            source=request.source,
            dummy_args=request.dummy_args,
            policy=request.policy,
            config=request.config,
            # What a compile would leave there is thrown away: the files of a real one stay.
            directory=generated_directory(Path(folder, "files"), request.source.cls, None),
            reuse=ReuseType.OVERRIDE,
            dump=forms,
        )
        generate(order)
        written = sorted(forms.glob("*.txt"))
        if options.only is not None:
            written = [path for path in written if _pass_of(path) == options.only]
        if not written:
            known = ", ".join(dict.fromkeys(map(_pass_of, sorted(forms.glob("*.txt")))))
            raise ConfigError(f"no pass is called {options.only!r}", hint=f"one of {known}")
        console = make_console()
        for path in written:
            if options.out is not None:
                console.print(str(path), soft_wrap=True)
                continue
            if options.only is None:
                console.print(f"==== {path.stem} ====", soft_wrap=True)
            console.print(path.read_text(), soft_wrap=True)
    return 0


def _pass_of(path: Path) -> str:
    """The name of the pass: ``lower`` of ``07-lower.txt``."""
    return path.stem.partition("-")[2]


def run_ops(options: argparse.Namespace) -> int:
    """Run ``ops``."""
    source, dummy_args = load_model(options.target, options.args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is said here anyway
        graph = trace(source.make(), dummy_args)
    calls: dict[str, list[IROp]] = {}
    for op in graph.ops:
        calls.setdefault(op.target, []).append(op)
    unknown = {name: ops for name, ops in calls.items() if registry.get(name) is None}
    console = make_console()
    if options.all:
        for name in sorted(calls.keys() - unknown.keys()):
            console.print(f"{len(calls[name]):5} x {name}", soft_wrap=True)
    for ops in unknown.values():
        console.print(unknown_op_message(ops[0]), soft_wrap=True)
        if len(ops) > 1:
            console.print(f"         {len(ops)} calls of it in all", soft_wrap=True)
    verdict = f"{len(unknown)} without a rule" if unknown else "all of them have a rule"
    console.print(
        f"{graph.name}: {len(graph.ops)} operators of {len(calls)} kinds, {verdict}", soft_wrap=True
    )
    return 1 if unknown else 0
