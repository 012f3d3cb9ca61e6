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
from dataclasses import dataclass, replace

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
"""The columns of :func:`compare`. ``left out``: meshes with whose plans of simple policies there
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
class Comparison:
    """A published plan beside what a search found for the same work.

    ``published``, ``found``: the plans in words, or why there is none; steps in s and peaks in GB
    are those of their audits. ``gap``: how far the bound of the search is below its step, as a part
    of the step; ``cpu_s``: CPU seconds of the search; ``left_out``: see :data:`COLUMNS`. A search
    without a plan has a step of 0.
    """

    published: str
    published_s: float
    published_gb: float
    fits: bool
    found: str = ""
    cpu_s: float = 0.0
    found_s: float = 0.0
    found_gb: float = 0.0
    gap: float = 0.0
    left_out: int = 0

    @property
    def change(self) -> float | None:
        """How much longer the plan found takes, as a part of the published one's time; ``None``
        where one of them is missing or does not fit.
        """
        return self.found_s / self.published_s - 1 if self.fits and self.found_s else None

    @property
    def cells(self) -> list[str]:
        """Those of :data:`COLUMNS`."""
        step = f"{self.published_s:.3f}"
        cells = [self.published, step if self.fits else f"({step})", f"{self.published_gb:.0f}"]
        if not self.found_s:
            return [*cells, self.found, "", "", "", "", f"{self.cpu_s:.0f}", ""]
        cells += [self.found, f"{self.found_s:.3f}", f"{self.found_gb:.0f}"]
        cells.append("" if self.change is None else f"{self.change:+.1%}")
        return [*cells, f"{self.gap:.1%}", f"{self.cpu_s:.0f}", str(self.left_out)]


def compare(published: Published, search: Callable[[], SearchResult]) -> Comparison:
    """The plan that a search finds, beside a published one."""
    known = best_known(published)
    comparison = Comparison(
        published=f"{published.text}, {known.title}",
        published_s=known.cost.step_s,
        published_gb=known.cost.peak_bytes / 1e9,
        fits=known.fits,
    )
    began = time.process_time()
    try:
        result = search()
        certificate = settled(result, published.config, published.hardware).certificate
    except PlanError as error:
        return replace(comparison, found=f"none: {error.what}", cpu_s=time.process_time() - began)
    best = result.best
    assert best is not None and best.cost is not None and certificate is not None
    return replace(
        comparison,
        found=best.title,
        found_s=best.step_s,
        found_gb=best.cost.peak_bytes / 1e9,
        gap=certificate.gap,
        cpu_s=time.process_time() - began,
        left_out=len(result.not_compared),
    )


def heading(names: Iterable[str]) -> str:
    """The head of a table whose first columns have these names."""
    columns = [*names, *COLUMNS]
    return line(columns) + "\n" + "|---" * len(columns) + "|"


def line(cells: Iterable[str]) -> str:
    """Cells as a line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"
