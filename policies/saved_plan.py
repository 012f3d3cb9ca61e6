"""``saved``: a plan from a file, on the ranks and the model of now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.certified import checked_certificate
from shardwright.compiler.plan.check import check_batch
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.plan_file import check_plan_file
from shardwright.compiler.plan.refit import refit
from shardwright.compiler.plan.zero import settled_config, units_of_storage
from shardwright.policies.pipeline_mesh import check_end2end
from shardwright.policies.policy import Policy, read_options
from shardwright.runtime.arguments import checked
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.json_text import parse_json


@dataclass(frozen=True, kw_only=True)
class SavedOptions:
    """``load_plan``: the file, a ``plan.json`` of a compile or one edited by hand. ``mesh``: axes
    of its mesh that get another size. ``num_microbatches``: instead of the plan's.
    """

    load_plan: str
    mesh: Mapping[str, int] = field(default_factory=dict)
    num_microbatches: int | None = None


@checked
def read_plan_file(path: str | Path) -> Plan:
    """The plan in a file. Raises :class:`PlanError` if there is none, or the file is not a plan."""
    path = Path(path)
    try:
        data = parse_json(path.read_text())
    except OSError as error:
        raise PlanError(
            f"no plan can be read from {path}",
            why=str(error),
            hint="name the plan.json of a compile",
        ) from error
    except ValueError as error:
        raise _no_plan(path, str(error)) from error
    try:
        check_plan_file(data)
    except PlanError as error:
        raise _no_plan(path, error.what) from error
    return Plan.from_json(data)


def _no_plan(path: Path, why: str) -> PlanError:
    return PlanError(
        f"{path} holds no plan", why=why, hint="compare it with the plan.json of a compile"
    )


def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """The plan of the file, if it fits."""
    return load_plan(read_options(SavedOptions, config.pas_config, policy="saved"), graph, config)


def load_plan(options: SavedOptions, graph: PlannableGraph, config: ComputeConfig) -> Plan:
    """The plan of the options, on the ranks of the config, with its certificate if that is of this
    plan and these inputs. It stores parameters over the units as the config of now says.

    Raises :class:`PlanError` for a plan that does not fit or was chosen for another stage of ZeRO,
    and :class:`ConfigError` for a pipeline without ``use_end2end``.
    """
    saved = read_plan_file(options.load_plan)
    if saved.stages:
        check_end2end(f"the pipeline in {options.load_plan}", config)
    # With a batch of another size many operators may not fit, and all for one reason.
    check_batch(graph, saved)
    plan = refit(saved, graph, config.plan_ngpus, options.mesh)
    # The file may be of another number of units, or of another stage of ZeRO.
    plan = replace(plan, zero=units_of_storage(settled_config(plan, config)))
    if options.num_microbatches is not None:
        plan = _of_microbatches(plan, options.num_microbatches)
    return checked_certificate(plan, graph, config)


def _of_microbatches(plan: Plan, number: int) -> Plan:
    """The plan for another number of microbatches. Raises :class:`PlanError` if it does not leave
    that open.
    """
    if not plan.stages or plan.actions:
        raise PlanError(
            "num_microbatches cannot be changed in this plan",
            why="its schedule is written out action by action"
            if plan.actions
            else "it is no pipeline",
            hint="leave num_microbatches out",
        )
    batch = None if plan.batch is None else replace(plan.batch, num_microbatches=number)
    return replace(plan, num_microbatches=number, batch=batch)


# Not built in: its name does not say what it does, the file does. So it is run again, and plans are
# compared.
POLICY = Policy("saved", apply, SavedOptions)
