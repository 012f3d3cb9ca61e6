"""What the tables of published plans beside a search share: a published plan in all its forms, the
search for a better one on the same ranks, and a line that compares them.

Both sides are priced by the audit of the program emitted; nothing is run. The forms of a plan are
what its table leaves open, or what does not fit as it stands: with no, some or full recomputation,
with and without sequence parallelism. The fastest that fits is the published plan. Where none fits,
it is the one with the least memory, in brackets.

Example: of ``tp=8``, full recomputation takes 1.42 s and none 1.07 s, both within 80 GB. The search
finds 0.94 s. The line says 1.07, 0.94 and -12.1 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.autodist_policy import settled
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.search.auditing import Auditor
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

COLUMNS = (
    "published plan",
    "s",
    "GB",
    "autodist's plan",
    "s",
    "GB",
    "",
    "gap",
    "CPU s",
    "left out",
)
"""The columns of :func:`cells`. ``left out``: meshes with whose plans of simple policies there
was no time to compare.
"""


@dataclass(frozen=True)
class Published:
    """A published plan and the work it is for. ``text``: the plan in words. ``forms``: what makes
    its forms, each with a title.
    """

    text: str
    graph: PlannableGraph
    config: ComputeConfig
    hardware: Hardware
    num_microbatches: int
    forms: Callable[[], Iterable[tuple[str, Plan]]]


@dataclass(frozen=True)
class Known:
    """The best form of a published plan, and whether it fits the memory."""

    title: str
    cost: PlanCost
    fits: bool


def best_known(published: Published) -> Known:
    """The fastest form that fits the memory, else the one with the least."""
    audit = Auditor(
        published.graph,
        published.config,
        published.hardware,
        published.num_microbatches,
    )
    memory_bytes = published.hardware.device.memory_bytes
    costs = [(title, audit(plan)) for title, plan in published.forms()]
    found = [Known(title, cost, cost.peak_bytes <= memory_bytes) for title, cost in costs]
    fitting = [known for known in found if known.fits]
    if fitting:
        return min(fitting, key=lambda known: known.cost.step_s)
    return min(found, key=lambda known: known.cost.peak_bytes)


@dataclass(frozen=True)
class Theirs:
    """What audits say of the best form of a published plan. Steps in s, peaks in GB."""

    published: str
    published_s: float
    published_gb: float
    fits: bool


@dataclass(frozen=True)
class Found:
    """What a search found: a plan in words, or why there is none. A step of 0 says that there is
    none.

    ``gap``: how far the bound is below the step, as a part of the step; ``cpu_s``: CPU seconds of
    the search; ``left_out``: see :data:`COLUMNS`.
    """

    found: str
    cpu_s: float
    found_s: float = 0.0
    found_gb: float = 0.0
    gap: float = 0.0
    left_out: int = 0


def audited(published: Published) -> Theirs:
    """The best form of a published plan, as the audit has it."""
    known = best_known(published)
    text = f"{published.text}, {known.title}"
    return Theirs(text, known.cost.step_s, known.cost.peak_bytes / 1e9, known.fits)


def found_for(published: Published, search: Callable[[], SearchResult]) -> Found:
    """What a search finds for the work of a published plan."""
    began = time.process_time()
    try:
        result = search()
        certificate = settled(result, published.config, published.hardware).certificate
    except PlanError as error:
        return Found(f"none: {error.what}", time.process_time() - began)
    best = result.best
    assert best is not None and best.cost is not None and certificate is not None
    return Found(
        best.title,
        time.process_time() - began,
        best.step_s,
        best.cost.peak_bytes / 1e9,
        certificate.gap,
        len(result.not_compared),
    )


def change(theirs: Theirs, found: Found) -> float | None:
    """How much longer the plan found takes, as a part of the published one's time; ``None`` where
    one of them is missing or does not fit.
    """
    return found.found_s / theirs.published_s - 1 if theirs.fits and found.found_s else None


def cells(theirs: Theirs, found: Found) -> list[str]:
    """The cells of :data:`COLUMNS`."""
    step, more = f"{theirs.published_s:.3f}", change(theirs, found)
    listed = [theirs.published, step if theirs.fits else f"({step})", f"{theirs.published_gb:.0f}"]
    if not found.found_s:
        return [*listed, found.found, "", "", "", "", f"{found.cpu_s:.0f}", ""]
    listed += [found.found, f"{found.found_s:.3f}", f"{found.found_gb:.0f}"]
    listed.append("" if more is None else f"{more:+.1%}")
    return [*listed, f"{found.gap:.1%}", f"{found.cpu_s:.0f}", str(found.left_out)]


def heading(names: Iterable[str]) -> str:
    """The head of a table whose first columns have these names."""
    columns = [*names, *COLUMNS]
    return line(columns) + "\n" + "|---" * len(columns) + "|"


def line(cells: Iterable[str]) -> str:
    """Cells as a line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
