"""The command ``shardwright calibrate``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from rich.console import Console

from shardwright.compiler.cost.machine.efficiency import EfficiencyTable
from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.plan.amounts import amount
from shardwright.frontend.calibrate.calibrate import calibrate
from shardwright.frontend.cli.commands import INTERRUPTED
from shardwright.frontend.cli.progress_text import ProgressText
from shardwright.frontend.report.plan_tables import new_table
from shardwright.runtime.activity import listening
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.swap import check_target, write_file


def run_calibrate(options: argparse.Namespace) -> int:
    """Measure, show, write. Nothing is written before everything is measured."""
    out: Path = options.out
    if out.suffix != ".json":
        raise ConfigError(
            f"--out {out} does not end in .json",
            why="the other commands know a hardware file by that",
        )
    check_target(out, "--out", "hardware.json")
    console = Console(markup=False, emoji=False, highlight=False)
    shown = contextlib.nullcontext() if sys.stderr.isatty() else listening(ProgressText())
    try:
        with shown:
            hardware = calibrate(options.device, options.ranks, quick=options.quick)
    except KeyboardInterrupt:
        print(f"interrupted: {out} was not written", file=sys.stderr)
        return INTERRUPTED
    if int(os.environ.get("RANK", "0")) == 0:
        show(console, hardware)
        write_file(out, hardware.dumps().encode())
        console.print(f"file: {out}", soft_wrap=True)
    return 0


def show(console: Console, hardware: Hardware) -> None:
    """Two small tables: the device and the links, each number with the error of its fit."""
    device, errors = hardware.device, hardware.residuals
    took = f"{hardware.measurements['seconds']:.0f} s"
    console.print(f"{device.name}: {hardware.sources['device']}, {took}", soft_wrap=True)
    table = new_table("Device", "", "reached", "products from .. to", "error")
    efficiency = device.matmul_efficiency
    for dtype, flops_per_s in device.flops_per_s.items():
        measured = efficiency[dtype] if isinstance(efficiency, dict) else None
        grid = (
            f"{measured.m[0]} .. {measured.m[-1]}" if isinstance(measured, EfficiencyTable) else ""
        )
        table.add_row(
            f"products, {dtype}",
            f"{flops_per_s / 1e9:.4g} Gflop/s",
            grid,
            _percent(errors[f"products.{dtype}"]),
        )
    table.add_row("memory", _rate(device.bytes_per_s), "", _percent(errors["streams"]))
    table.add_row(
        "least time of an operator", amount(device.launch_s, "s"), "", _percent(errors["launches"])
    )
    console.print(table)
    if device.sharing is not None:
        ranks, cores = device.sharing.num_ranks, device.sharing.num_cores
        console.print(
            f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''}: these are the "
            "rates of one while all compute, for"
            f" jobs of {ranks} ranks on a machine. In a pipeline ranks that wait leave their "
            "cores to the others.",
            soft_wrap=True,
        )
    links = new_table("Links", "link", "collective", "latency", "bandwidth", "error")
    for tier in hardware.tiers:
        for kind, link in tier.kinds.items():
            numbers = (
                amount(link.latency_s, "s"),
                _rate(link.bytes_per_s),
                _percent(errors[f"{tier.name}.{kind}"]),
            )
            links.add_row(tier.name, kind, *numbers)
    if links.row_count:
        console.print(links)
        console.print(
            f"Of a message {device.overlap:.0%} costs no time while ranks compute for as long.",
            soft_wrap=True,
        )
    for name, source in hardware.sources.items():
        if name not in ("device", "tiers"):
            console.print(
                f"{name}: {source}. On a quiet machine, and without --quick, it can be told.",
                soft_wrap=True,
            )


def _rate(bytes_per_s: float) -> str:
    return f"{amount(bytes_per_s, 'B', digits=4)}/s"


def _percent(error: float) -> str:
    return f"{error:.0%}"
