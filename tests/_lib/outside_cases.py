"""Programs of the museum under ``spmd_types``, right ones and mutated ones."""

from __future__ import annotations

import ast
import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
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
from shardwright.runtime.manifest import accept

Mutation = Callable[[Any], Any]
Edit = Callable[[], None]


@contextlib.contextmanager
def written(
    case: str, mutation: Mutation | None = None
) -> Iterator[tuple[Path, ComputeConfig, list[list[dict[str, Any]]]]]:
    """The files of a case, whose program is mutated first, its config, and samples of its units."""
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
        yield Path(folder), config, samples


def report_of(case: str, mutation: Mutation | None = None) -> OutsideReport:
    """What ``spmd_types`` says of the files of a case, whose program is mutated first."""
    with written(case, mutation) as (directory, config, samples):
        return outside_certificate(directory, config, samples)


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
    stops = [rank.stopped for rank in report.ranks if rank.stopped]
    if stops and not report.problems:
        return f"stopped: {stops[0]}"
    return f"refused: {report.problems[0]}" if report.problems else "accepted"


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


def edits_of(source: str, start: int = 0, step: int = 1) -> Iterator[tuple[str, str]]:
    """Each ``step``-th edit of a single statement of what a file computes, with its kind."""
    count = len([*_places(ast.parse(source))])
    for index in range(start, count, step):
        tree = ast.parse(source)
        kind, edit = next(islice(_places(tree), index, None))
        edit()
        yield kind, ast.unparse(tree) + "\n"


def _places(tree: ast.Module) -> Iterator[tuple[str, Edit]]:
    """What may be edited in a tree: the kind of the edit, and a function that makes it."""
    for method in ast.walk(tree):
        if not isinstance(method, ast.FunctionDef) or method.name in ("declare", "output"):
            continue
        for index, statement in enumerate(method.body):
            if isinstance(statement, ast.Assign):
                yield "a dropped statement", lambda m=method, i=index: m.body.pop(i)  # type: ignore[misc]
                yield "an added factor", lambda s=statement: _with_factor(s)  # type: ignore[misc]
            for node in ast.walk(statement):
                yield from _of_node(node)


def _with_factor(statement: ast.Assign) -> None:
    statement.value = ast.BinOp(statement.value, ast.Mult(), ast.Constant(1.5))


def _of_node(node: ast.AST) -> Iterator[tuple[str, Edit]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "another constant", lambda: setattr(node, "value", value)
    elif isinstance(node, ast.BinOp):
        sign = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "another operator", lambda: setattr(node, "op", sign)
        pair = node.right, node.left
        if ast.dump(pair[0]) != ast.dump(pair[1]):
            yield "swapped operands", lambda: vars(node).update(left=pair[0], right=pair[1])
    elif isinstance(node, ast.Call):
        name = ast.Attribute(ast.Name("torch"), "tanh")
        yield "another operator", lambda: setattr(node, "func", name)
        first, second, *rest = [*node.args, None, None]
        if second is not None and ast.dump(first) != ast.dump(second):  # type: ignore[arg-type]
            swapped = [second, first, *rest[:-2]]
            yield "swapped operands", lambda: setattr(node, "args", swapped)


def edits_of_one_file(case: str, step: int = 1) -> Iterator[tuple[str, str]]:
    """Each ``step``-th edit of each file of a case, by itself: the kind of the edit, and what is
    said of the files, if anything.
    """
    with written(case) as (directory, config, samples):
        for rank in range(config.plan_ngpus):
            file = directory / f"gencode{rank}.py"
            source = file.read_text()
            for kind, text in edits_of(source, rank % step, step):
                file.write_text(text)
                accept(directory)
                yield kind, "\n".join(outside_certificate(directory, config, samples).different)
            file.write_text(source)
