"""Programs of the museum under ``spmd_types``, right ones and mutated ones."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plans
import torch
from museum import EXHIBITS, InPipeline, InProgram
from museum_models import CASES, program_of
from precision import float64_casts

from shardwright.compiler.codegen.emit_files import Emit
from shardwright.compiler.compile import Compiled
from shardwright.compiler.pass_manager import CompileReport
from shardwright.frontend.verification.outside.outside_run import OutsideReport, outside_certificate
from shardwright.frontend.verification.sample_inputs import in_float64, rolled
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ShardwrightError

Mutation = Callable[[Any], Any]


def report_of(case: str, mutation: Mutation | None = None) -> OutsideReport:
    """What ``spmd_types`` says of the files of a case, whose program is mutated first."""
    given, program = CASES[case], program_of(case)
    torch.manual_seed(0)
    module, inputs = given.model()
    ranks = {"plan_ngpus": given.num_ranks, "runtime_ngpus": given.num_ranks}
    config = ComputeConfig(**{**ranks, **given.options})
    program = program if mutation is None else mutation(program)
    files = dict(Emit(config, "test", "")(program).files)
    num_samples = program.plan.num_microbatches if program.plan.stages else 1
    units = config.runtime_ngpus // config.plan_ngpus
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        float64_casts(module),
    ):
        warnings.simplefilter("ignore")
        compiled = Compiled(program, files, config, CompileReport(), None)
        plans.write(Path(folder), compiled, module.double())
        args = in_float64(inputs)
        samples = [
            [rolled(args, n * units + u, ()) for n in range(num_samples)] for u in range(units)
        ]
        return outside_certificate(Path(folder), config, samples)


def verdict(case: str, mutation: Mutation | None = None) -> str:
    """``accepted``, ``refused: ...`` by ``spmd_types``, ``stopped: ...`` by an error of the run, or
    ``unwritten: ...`` where no file is made of the program.
    """
    try:
        report = report_of(case, mutation)
    except ShardwrightError as error:
        return f"stopped: {error.what}"
    except (RuntimeError, AssertionError, ValueError, TypeError, KeyError, IndexError) as error:
        return f"stopped: {type(error).__name__} {error}"
    problems = [rank.problem for rank in report.ranks if rank.problem]
    stops = [rank.stopped for rank in report.ranks if rank.stopped]
    if stops and not problems:
        return f"stopped: {stops[0]}"
    return f"refused: {problems[0]}" if problems else "accepted"


def exhibits() -> dict[str, tuple[str, Mutation]]:
    """The exhibits that are mutated programs, by title."""
    found: dict[str, tuple[str, Mutation]] = {}
    for exhibit in EXHIBITS:
        with contextlib.suppress(AttributeError):
            if isinstance(exhibit.written, InProgram):
                found[exhibit.title] = (exhibit.written.case, exhibit.written.mutation)
            elif isinstance(exhibit.written, InPipeline):
                found[exhibit.title] = ("pipeline", exhibit.written.mutation)
    return found
