"""Runs generated files under ``spmd_types``, and reports what it accepts.

All ranks run as threads of this process, with real values. One of them is typed: its parameters,
buffers and inputs get the types of their layouts, and ``spmd_types`` derives that of everything
else or refuses it. The others run as they always do. One rank of each stage is typed. It speaks for
all of its stage, whose files must have one program that does not go by the rank.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import spmd_types as spmd
import spmd_types.checker
from spmd_types import SpmdTypeError
from torch import Tensor

from shardwright.frontend.verification.deviation import tensors_of
from shardwright.frontend.verification.one_device import loss_of
from shardwright.frontend.verification.outside.by_rank import goes_by_rank
from shardwright.frontend.verification.outside.claims import received_by
from shardwright.frontend.verification.outside.one_program import differences
from shardwright.frontend.verification.outside.spmd_layouts import (
    Refusal,
    TypedMesh,
    in_words,
    local_types,
    shard_axes,
)
from shardwright.frontend.verification.outside.their_words import in_our_words
from shardwright.frontend.verification.outside.typed_calls import TypedCalls
from shardwright.frontend.verification.outside.typed_functions import known_loops
from shardwright.frontend.verification.outside.typed_moves import typed_moves
from shardwright.frontend.verification.outside.unread_weights import unread_weights
from shardwright.frontend.verification.trained_ranks import Samples, sample_of
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ShardwrightError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import code_file
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.module.inputs import InputTable, TensorSpec
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.pipeline.module import PipelineModule
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.started import at_once, start
from shardwright.runtime.structure import flatten, map_leaves


@dataclass(frozen=True)
class TypedRank:
    """What was found of the file of one rank.

    - ``num_calls``: the calls of functions that were typed.
    - ``by_rule``: those of our operators and adapters, by name, which follow typing rules of ours.
    - ``told``: those of which ``spmd_types`` did not know where cut dims go, by name.
    - ``by_function``: those of functions that the model brings along, by name, which follow their
      annotations.
    - ``problem``: what was refused, or nothing. ``stopped``: the error that has ended the run
      before its types were known, or nothing.
    - ``declarations``: the tensors of its module. ``num_alike``: how many other files have its
      program.
    """

    rank: int
    num_calls: int
    by_rule: Mapping[str, int]
    told: Mapping[str, int]
    problem: str = ""
    stopped: str = ""
    declarations: tuple[Declaration, ...] = ()
    num_alike: int = 0
    by_function: Mapping[str, int] = field(default_factory=dict)


MEANING = (
    "It may be a fault of the file, or a rule that the checker lacks. It is most likely the second "
    "where `verify` of the model finds it equal to one device: docs/outside-certificate.md"
)
"""What is said of a refusal."""

ONE_PROGRAM = (
    "Nothing was typed, as the types of one file stand for those of all that run the same stage. "
    "If an edit is meant, make it in each of these files: docs/outside-certificate.md"
)
"""What is said of files that differ."""

ONE_WAY = (
    "Nothing was typed, as the types of one rank stand for those of all that run the same stage. "
    "A file may hold what the compiler writes. Of anything else nobody knows whether it does the "
    "same on each rank: docs/outside-certificate.md"
)
"""What is said of files whose statements go by the rank."""

OTHER_THINGS = "have statements that may do other things on other ranks"
"""The heading above these statements."""

ALL_READ = (
    "Nothing was typed, as types follow values from where they are read. If a parameter shall have "
    "no use, write the comment `# no statement reads it` behind its declaration: "
    "docs/outside-certificate.md"
)
"""What is said of files in which nothing reads a parameter."""


@dataclass(frozen=True)
class OutsideReport:
    """What ``spmd_types`` says of a plan's files. ``different``: how files of one stage differ.
    ``by_rank``: the statements that go by the rank. ``unread``: the parameters that nothing reads.
    If there are any of these, it is not asked.
    """

    version: str
    ranks: tuple[TypedRank, ...]
    different: tuple[str, ...] = ()
    by_rank: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was refused, and every run has come to its end."""
        return not self.problems and not any(rank.stopped for rank in self.ranks)

    @property
    def problems(self) -> tuple[str, ...]:
        """All that was refused."""
        of_types = (rank.problem for rank in self.ranks if rank.problem)
        return (*self.different, *self.by_rank, *self.unread, *of_types)

    def __str__(self) -> str:
        lines = [*self.different, ONE_PROGRAM] if self.different else []
        lines += [*self.by_rank, ONE_WAY] if self.by_rank else []
        lines += [*self.unread, ALL_READ] if self.unread else []
        for one in self.ranks:
            verdict = "refuses" if one.problem else "accepts"
            if one.stopped:
                verdict = "has no verdict on"  # whichever file the error is in
            files = code_file(one.rank)
            if one.num_alike:
                files += f" and {one.num_alike} more of its program"
            lines.append(
                f"spmd_types {self.version} {verdict} {files}: {one.num_calls} calls, "
                f"{sum(one.by_rule.values())} of adapters and operators of ours"
            )
            if one.told:
                lines.append(f"  dims taken from the file's comments: {_counted(one.told)}")
            if one.by_function:
                functions = _counted(one.by_function)
                lines.append(f"  functions of the model's own, by their annotations: {functions}")
            lines += [f"  {line}" for line in (one.problem or one.stopped).splitlines()]
            if one.problem:
                lines.append(f"  {MEANING}")
        return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    """``2 split, 6 view``."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


PATIENCE_S = 5.0
"""How long a rank that fails waits for the verdict of the typed one."""


class _Refused(Exception):
    """The typed rank stops here."""


def outside_certificate(
    directory: Path, config: ComputeConfig, samples: Samples, training: bool = True
) -> OutsideReport:
    """Run one step of the files in ``directory`` under ``spmd_types``.

    Raises:
        LoadError: a file that cannot be loaded, of any rank.
    """
    # Before any of them runs, as how far a run gets would depend on who fails first.
    first, *_ = [load_class(directory, rank) for rank in range(config.plan_ngpus)]
    groups = _groups(first, config.plan_ngpus)
    if different := differences(directory, groups):
        return OutsideReport(version("spmd_types"), (), different)
    if by_rank := _said(goes_by_rank, OTHER_THINGS, directory, groups):
        return OutsideReport(version("spmd_types"), (), by_rank=by_rank)
    if unread := _said(unread_weights, "leave parameters unread", directory, groups):
        return OutsideReport(version("spmd_types"), (), unread=unread)
    found: list[TypedRank] = []
    held: dict[str, dict[int, Layout]] = {}
    for rank, *others in groups.values():
        typed = _typed_rank(directory, config, samples, training, rank)
        typed = replace(typed, num_alike=len(others))
        if not (typed.problem or typed.stopped) and issubclass(first, PipelineModule):
            typed = replace(typed, problem=_apart(first, typed, held))
        found.append(typed)
    return OutsideReport(version("spmd_types"), tuple(found))


def _apart(cls: type[PipelineModule], typed: TypedRank, held: dict[str, dict[int, Layout]]) -> str:
    """What is wrong with a parameter that this rank and one of another stage hold, or nothing.

    Along stages such a parameter is G: each has a summand of its gradient. The class says who adds
    them: ``shared`` between stages that hold the same pieces, ``owned`` where they hold others.
    ``held``: by parameter and stage, the layouts on ranks before this one, to which its are added.
    """
    for declaration in typed.declarations:
        if not declaration.requires_grad or declaration.stage is None:
            continue
        name, stage, layout = declaration.name, declaration.stage, declaration.layout
        others = held.setdefault(name, {})
        for other, its_layout in others.items():
            if other == stage or {other, stage} <= {*cls.owned.get(name, {})}:
                continue
            if not {other, stage} <= {*cls.shared.get(name, ())}:
                return (
                    f"stages {other} and {stage} hold {name}, and `shared` does not say so: "
                    "nobody adds their gradients"
                )
            if its_layout != layout:
                return (
                    f"stages {other} and {stage} share {name}, and hold it as {its_layout} and "
                    f"{layout}: their gradients are of other pieces"
                )
        others[stage] = layout
    return ""


def _said(
    question: Callable[[str, int], tuple[str, ...]],
    what: str,
    directory: Path,
    groups: Mapping[str, Sequence[int]],
) -> tuple[str, ...]:
    """What a question finds in the sources of files, once for those that have one program.
    ``what``: what such files do, in words.
    """
    found: list[str] = []
    for rank, *others in groups.values():
        said = question(directory.joinpath(code_file(rank)).read_text(encoding="utf-8"), rank)
        if said and others:
            found.append(f"{code_file(rank)} and {len(others)} more of its program {what}")
        found += said
    return tuple(found)


def _groups(first: type[ParallelModule], num_ranks: int) -> dict[str, list[int]]:
    """The ranks that run the same stages, under the words for these stages. ``first``: the class of
    rank 0.
    """
    if not issubclass(first, PipelineModule):
        return {"the whole model": [*range(num_ranks)]}
    found: dict[str, list[int]] = {}
    for rank in range(num_ranks):
        own = [str(number) for number, stage in enumerate(first.stages) if rank in stage.ranks]
        found.setdefault(f"stage{'s' * (len(own) > 1)} {', '.join(own)}", []).append(rank)
    return found


def _typed_rank(
    directory: Path, config: ComputeConfig, samples: Samples, training: bool, typed: int
) -> TypedRank:
    runs: list[_TypedRun] = []
    is_done = threading.Event()

    def run(rank: int) -> None:
        try:
            module = load_class(directory)()
            _wait_at_once(module)
            module.train(training)
            # One rank is typed at a time: the checker's state belongs to the process, and ranks are
            # threads.
            if rank == typed:
                runs.append(_TypedRun(module))
            step(rank, module)
        except Exception:  # what the types say of a fault comes first, if that rank gets as far
            if rank != typed:
                is_done.wait(PATIENCE_S)
            raise
        finally:
            if rank == typed:
                is_done.set()

    def step(rank: int, module: Any) -> None:
        unit_samples = [_asking(inputs) for inputs in samples[rank // config.plan_ngpus]]
        if config.use_end2end:
            module.train_step([sample_of(module, inputs) for inputs in unit_samples])
        else:
            result = module(**module.cut_inputs(**unit_samples[0]))
            loss_of(result).backward()  # type: ignore[no-untyped-call]

    problem = stopped = ""
    try:
        with _quiet(), known_loops():
            run_ranks(config.runtime_ngpus, run)
    except _Refused as error:
        problem = str(error)
    except Exception as error:
        stopped = _stopped(error, directory)
    if not runs:  # the run has ended before the typed rank had a module
        return TypedRank(typed, 0, {}, {}, problem, stopped)
    calls = runs[0].calls
    declared = tuple(runs[0].module.declarations)
    if isinstance(module := runs[0].module, PipelineModule):  # a file of one stage need not name it
        only, *_ = module.segments
        declared = tuple(replace(d, stage=only if d.stage is None else d.stage) for d in declared)
    by_rule, told = dict(calls.by_rule), dict(calls.told)
    found = TypedRank(typed, calls.num_calls, by_rule, told, problem, stopped, declared)
    return replace(found, by_function=dict(calls.by_function))


def _asking(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's own copy of the inputs of a call, whose gradients are asked for, as any caller may.
    So whatever is computed from them alone is compared with its gradient, too.
    """

    def asked(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.is_floating_point())

    return {name: map_leaves(value, asked, name) for name, value in inputs.items()}


def _stopped(error: Exception, directory: Path) -> str:
    """What is said of a run that an error has ended: the statement of a file, and the error."""
    what = str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"
    ended = f"the run of the files has ended with an error, so its types are not known\n{what}"
    files = {str(file) for file in directory.glob("gencode*.py")}
    return "\n".join([*_statement(error, files), ended, *getattr(error, "__notes__", ())])


def _statement(error: Exception, files: Collection[str]) -> list[str]:
    """The innermost statement of these files that an error went through, with its place."""
    found, traceback = [], error.__traceback__
    while traceback is not None:
        file, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        if file in files:
            statement = Path(file).read_text(encoding="utf-8").splitlines()[line - 1].strip()
            found = [f"{Path(file).name}:{line}: {statement}"]
        traceback = traceback.tb_next
    return found


def _wait_at_once(module: ParallelModule) -> None:
    """Let the file of a module wait for what it starts at once: types do not tell whether a message
    is under way.
    """
    namespace = sys.modules[type(module).__module__]
    if getattr(namespace, "start", None) is start:
        setattr(namespace, "start", at_once)  # noqa: B010


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch logs of shardings that ``spmd_types`` tries in vain."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled


class _TypedRun:
    """A module whose ``forward``, or stages, run under ``spmd_types`` from now on."""

    def __init__(self, module: ParallelModule) -> None:
        self.module = module
        namespace = sys.modules[type(module).__module__]
        self.file = str(namespace.__file__)
        source = Path(self.file).read_text(encoding="utf-8")
        self.calls = TypedCalls(source, self.file)
        self.calls.wrap(namespace, module)
        self.received = received_by(source)
        # A stage at a time: each has a mesh of its own.
        if isinstance(module, PipelineModule):
            for index in module.segments:
                self._type_entry(f"stage{index}", module.stages[index].mesh)
        else:
            self._type_entry("forward", module.mesh)

    def _type_entry(self, name: str, mesh_of_unit: Mesh) -> None:
        module, run = self.module, getattr(self.module, name)
        mesh = TypedMesh.of(mesh_of_unit, module.ranks.num_units, module.zero)
        leaves = InputTable(name, module.inputs).leaves

        def typed(*args: Any, **kwargs: Any) -> Any:
            with self._typing(mesh):
                self._type_tensors(mesh)
                named = {**dict(zip(_names_of(run), args, strict=False)), **kwargs}
                for path, x in flatten(named).items():
                    if isinstance(x, Tensor):
                        self._type_argument(path, x, leaves.get(path), mesh)
                with self.calls.on(mesh):
                    result = run(*args, **kwargs)
                self._check_results(result, mesh)
                return result

        module.__dict__[name] = typed

    @contextmanager
    def _typing(self, mesh: TypedMesh) -> Iterator[None]:
        """``spmd_types`` derives types inside the ``with`` block; what it refuses ends the run."""
        with ExitStack() as stack:
            stack.enter_context(typed_moves())
            stack.enter_context(spmd.set_current_mesh(mesh.axes(), local_axes=mesh.outer))
            stack.enter_context(spmd_types.checker.typecheck("strict", local=False))
            try:
                yield
            except SpmdTypeError as error:
                said = [in_our_words(error, mesh), *getattr(error, "__notes__", ())]
                raise _Refused("\n".join([*_statement(error, {self.file}), *said])) from error

    def _type_tensors(self, mesh: TypedMesh) -> None:
        for declaration in self.module.declarations:
            tensor = self.module.weights(declaration.name)
            used = {*declaration.layout.cut_axes, *declaration.layout.grad_partial}
            if not used <= set(mesh.mesh.names):
                continue  # of a stage on another mesh
            if not spmd.has_local_type(tensor):
                spmd.assert_type(tensor, mesh.type_of(declaration.layout))

    def _type_argument(self, path: str, x: Tensor, spec: Any, mesh: TypedMesh) -> None:
        """An input is whole or a piece, as the file says; so is what other stages sent."""
        layout = Layout.whole(tuple(x.shape))
        if path in self.received:
            layout = self.received[path]
        elif isinstance(spec, TensorSpec) and spec.layout is not None:
            layout = spec.layout
        spmd.assert_type(x, mesh.type_of(layout, of_samples=True))

    def _check_results(self, result: Any, mesh: TypedMesh) -> None:
        """Refuse a result that is a summand, or whose gradient would be one: what leaves the
        program is whole, or a piece.
        """
        for path, x in tensors_of(result).items():
            if not spmd.has_local_type(x):
                continue
            for axis, letter in local_types(x).items():
                cut = any(axis in axes for axes in shard_axes(x))
                if axis in mesh.outer or letter is spmd.I or cut:
                    continue
                if letter is spmd.R and not x.requires_grad:
                    continue
                raise Refusal(f"the result {path or 'of forward'} is {in_words(x)}")


def _names_of(function: Callable[..., Any]) -> Sequence[str]:
    return list(inspect.signature(function).parameters)
