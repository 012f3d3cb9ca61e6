"""Measure a machine and describe it as :class:`Hardware`.

Rates are of one rank while all ranks work, with the threads a rank has in a job: what is shared is
measured as shared. Only where ranks share cores
(``Sharing``) the share of each is counted, not
measured.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from shardwright.compiler.cost.machine.hardware import COLLECTIVES, Device, Hardware, Tier
from shardwright.compiler.schedule.shared_cores import Sharing
from shardwright.frontend.calibrate.effort import (
    Effort,
    effort_for,
    expected_s,
    share_of_links,
)
from shardwright.frontend.calibrate.fit import (
    Points,
    fit_fetches,
    fit_host,
    fit_launches,
    fit_link,
    fit_products,
    fit_rates,
    fit_streams,
    fit_unaligned,
)
from shardwright.frontend.calibrate.hidden_messages import measure_overlap, overlap_of
from shardwright.frontend.calibrate.links import Groups, measure_links
from shardwright.frontend.calibrate.measured_operators import (
    measure_launches,
    measure_products,
    measure_streams,
    measure_unaligned,
)
from shardwright.frontend.calibrate.measuring_ranks import (
    in_job,
    measure_in_job,
    measure_in_processes,
)
from shardwright.frontend.calibrate.reference_programs import (
    attention_efficiency,
    measure_attention,
    measure_fetches,
    measure_host,
    measure_references,
)
from shardwright.runtime.activity import activity, preceded, tell
from shardwright.runtime.errors import ConfigError, on_lines
from shardwright.runtime.ranks.world import World

TIER_NAMES = ("node", "network")
"""Innermost first; ranks of one machine have the first only."""

DEFAULT_RANKS_ON_CPU = 8
"""The most processes that are started on a CPU, at most one per core, unless asked for more."""


def calibrate(
    device_type: str | None = None, num_ranks: int | None = None, *, quick: bool = False
) -> Hardware:
    """The hardware this runs on, measured over ``num_ranks`` new processes, or over the ranks of
    the ``torchrun`` job.

    ``device_type`` is ``"cpu"`` or ``"cuda"``; CUDA where there is some if not given. ``num_ranks``
    is by default the number of CUDA devices, or of CPU cores (at least 2, at most 8). It takes
    about a minute, ``quick`` a few seconds; whoever listens (:mod:`shardwright.runtime.activity`)
    hears what it is about. What no fit comes near is measured again.

    Raises:
        ConfigError: no such device, more ranks than CUDA devices, or ``num_ranks`` other than the
            job's; a machine that is too busy for its numbers to be told.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    _check_request(device_type, num_ranks)
    # All ranks of a job are watched by one terminal, which has room for the line of one.
    is_first = int(os.environ.get("RANK", "0")) == 0
    with activity(_title(device_type, num_ranks, quick)) if is_first else contextlib.nullcontext():
        if in_job():
            measured = measure_in_job(measure_rank, device_type, quick)
        else:
            measured = measure_in_processes(
                measure_rank, device_type, num_ranks or default_ranks(device_type), quick
            )
    hardware = describe(measured)
    found = doubts(hardware)
    if found:
        raise ConfigError(
            "what was measured does not describe this machine, and nothing is written",
            why=on_lines(doubt.words for doubt in found),
            hint="other work keeps it busy: stop that, leave --quick out, or measure with fewer "
            "--ranks",
        )
    return hardware


def _title(device_type: str, num_ranks: int | None, quick: bool) -> str:
    """What is done, and about how long it takes."""
    num_ranks = int(os.environ["WORLD_SIZE"]) if in_job() else num_ranks
    num_tiers = 0 if (num_ranks or default_ranks(device_type)) == 1 else 1
    if in_job() and int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        num_tiers = 2
    return (
        f"calibrating for about {expected_s(effort_for(device_type, quick=quick), num_tiers):.0f} s"
    )


def default_ranks(device_type: str) -> int:
    """A rank for every CUDA device, or CPU core up to 8; on a CPU at least 2, so that there is
    something to connect.
    """
    if device_type == "cuda":
        return torch.cuda.device_count()
    return max(2, min(DEFAULT_RANKS_ON_CPU, len(_own_cores())))


def measure_rank(world: World, quick: bool) -> dict[str, Any]:
    """One rank's part, with the effort that fits the device."""
    sharing = _sharing(_num_cores(world)) if world.device.type == "cpu" else None
    measures = sharing is None or int(os.environ.get("LOCAL_RANK", "0")) < sharing.num_cores
    effort = effort_for(world.device.type, quick=quick, measures=measures)
    return measure_until_certain(world, effort)


def measure_until_certain(world: World, effort: Effort) -> dict[str, Any]:
    """Everything that is measured, and once more, up to :data:`REPEATS` times, what no fit comes
    near. Collective.
    """
    found = measure(world, effort)
    for _ in range(REPEATS):
        parts = {doubt.part for doubt in doubts(describe(found))}
        if not parts:
            break
        # Other work on the machine makes points slow, hardly ever twice the same ones.
        with preceded("again, as no fit comes near: "):
            again = measure(world, effort, parts)
        found |= again | {"seconds": found["seconds"] + again["seconds"]}
    return found


def measure(world: World, effort: Effort, only: Collection[str] | None = None) -> dict[str, Any]:
    """Everything that is measured, or ``only`` these parts, as JSON values, the same on all ranks.
    Collective.
    """
    start = time.perf_counter()
    sizes, tiers = _tiers(world)
    # What to measure, in order; links last, as they take longest.
    parts: dict[str, Callable[[], Any]] = {
        "products": lambda: measure_products(world, effort),
        "streams": lambda: measure_streams(world, effort),
        "launches": lambda: measure_launches(world, effort),
        "attention": lambda: measure_attention(world, effort),
    }
    # The kernels of matrix units read rows in pieces of 16 bytes.
    if world.device.type != "cpu":
        parts["unaligned"] = lambda: measure_unaligned(world, effort)
    # What counts where a device waits for its host, and has nothing to do meanwhile.
    if world.device.type == "cpu":
        parts["host"] = lambda: measure_host(world, effort)
        parts["fetches"] = lambda: measure_fetches(world, effort)
        parts["references"] = lambda: measure_references(world, effort)
    parts["overlap"] = lambda: measure_overlap(world, effort)
    parts["links"] = lambda: measure_links(world, tiers, effort, share_of_others)
    found: dict[str, Any] = {"device": _device_facts(world), "sizes": sizes}
    chosen = [name for name in parts if only is None or name in only]
    num_others = len([name for name in chosen if name != "links"])
    share_of_others = 1 - share_of_links(effort, len(tiers)) if num_others else 0.0
    for number, name in enumerate(chosen):
        tell(TITLES[name], share_of_others * number / max(num_others, 1))
        found[name] = parts[name]()
    return {**found, "seconds": time.perf_counter() - start}


TITLES = {
    "products": "matrix products",
    "unaligned": "products of odd sizes",
    "streams": "memory",
    "launches": "the least time of an operator",
    "attention": "attention",
    "host": "a program beside its operators",
    "fetches": "products that fetch from memory",
    "references": "operators of a model",
    "overlap": "a message while ranks compute",
    "links": "collectives",
}


@dataclass(frozen=True)
class Doubt:
    """A number that cannot be: ``part`` of the measurement that it comes from, and what is wrong
    with it in words.
    """

    part: str
    words: str


def doubts(hardware: Hardware) -> list[Doubt]:
    """What of a calibrated machine cannot be: fits far from what was measured, and messages that
    take no time.
    """
    found = []
    for name, error in hardware.residuals.items():
        # ``products.float32`` belongs to the part ``products``.
        part = name.split(".")[0]
        if error > MOST_ERROR:
            words = (
                f"{name}: on average the fit is {1 + error:.3g} times what was measured, or the "
                "other way round"
            )
            found.append(Doubt(part if part in TITLES else "links", words))
    for tier in hardware.tiers if hardware.num_devices > 1 else ():
        for kind, link in tier.kinds.items():
            if link.latency_s <= 0:
                found.append(
                    Doubt(
                        "links", f"{tier.name}.{kind}: a message without bytes would take no time"
                    )
                )
    return found


MOST_ERROR = 3.0
"""How far a fit may be off: on average it is no more than four times as much as what was measured,
or as little.
"""

REPEATS = 2
"""So often is measured again what no fit comes near."""


def describe(measured: dict[str, Any]) -> Hardware:
    """The hardware that fits what :func:`measure` returned."""
    facts = measured["device"]
    peaks, tables, errors = fit_products(measured["products"])
    residuals = {f"products.{dtype}": error for dtype, error in errors.items()}
    bytes_per_s, streams, residuals["streams"] = fit_streams(measured["streams"])
    launch_s, residuals["launches"] = fit_launches(measured["launches"])
    device = Device(
        facts["name"], facts["memory_bytes"], peaks, bytes_per_s, launch_s, tables, streams
    )
    reached = attention_efficiency(device, measured["attention"])
    overlap = overlap_of(measured["overlap"])
    device = replace(device, attention_efficiency=reached, overlap=overlap)
    if "unaligned" in measured:
        device = replace(device, unaligned_efficiency=fit_unaligned(measured["unaligned"]))
    # Only on a CPU: a device without a queue waits for its host.
    if "host" in measured:
        device, errors = _describe_program(device, measured)
        residuals |= errors
    if facts.get("sharing"):
        device = while_all_compute(device, Sharing(**facts["sharing"]))
    # Each tier by the points that were measured on it.
    tiers: list[Tier] = []
    untold: dict[str, str] = {}
    for name, sizes in measured["sizes"].items():
        points = [point for point in measured["links"] if point["tier"] == name]
        tier, errors, own = _describe_tier(name, tuple(sizes), points, bytes_per_s)
        tiers.append(tier)
        residuals |= errors
        untold |= own
    how = (
        f"measured by shardwright calibrate, {date.today()}, torch {torch.__version__}, "
        f"{facts['ranks']}"
    )
    return Hardware(
        name=facts["host"],
        device=device,
        tiers=tuple(tiers),
        residuals=residuals,
        sources={"device": how, "tiers": how, **untold},
        measurements={
            key: value for key, value in measured.items() if key not in ("device", "sizes")
        },
        backend="gloo" if "host" in measured else "nccl",
    )


def _describe_program(device: Device, measured: dict[str, Any]) -> tuple[Device, dict[str, float]]:
    fetch_bytes_per_s, error = fit_fetches(measured["fetches"])
    found = replace(
        device,
        host_s=fit_host(measured["host"], device.launch_s),
        fetch_bytes_per_s=fetch_bytes_per_s,
        rates=fit_rates(measured["references"]),
    )
    return found, {"fetches": error}


def while_all_compute(device: Device, sharing: Sharing) -> Device:
    """A device that was measured with a core for each rank, as it is while all ranks of its machine
    compute.
    """
    # What a rank has of the cores.
    slower = sharing.num_ranks / sharing.num_cores

    def both(pair: tuple[float, float], factor: float) -> tuple[float, float]:
        return pair[0] * factor, pair[1] * factor

    streams, fetches = device.streams, device.fetch_bytes_per_s
    return replace(
        device,
        flops_per_s={dtype: rate / slower for dtype, rate in device.flops_per_s.items()},
        bytes_per_s=device.bytes_per_s / slower,
        launch_s=device.launch_s * slower,
        streams=streams
        and replace(streams, bytes_per_s=tuple(rate / slower for rate in streams.bytes_per_s)),
        host_s=both(device.host_s, slower),
        fetch_bytes_per_s=fetches and fetches / slower,
        rates={name: both(rates, 1 / slower) for name, rates in device.rates.items()},
        sharing=sharing,
    )


def _describe_tier(
    name: str, sizes: tuple[int, ...], points: Points, copy_bytes_per_s: float
) -> tuple[Tier, dict[str, float], dict[str, str]]:
    """One tier: numbers for every kind of collective, and of all of them for those there will be;
    the errors of the fits; and where numbers come from that the points do not tell.
    """
    if not points:  # a device alone: no collective ever asks
        return Tier(name, sizes, 0.0, copy_bytes_per_s), {}, {}
    link, error = fit_link(points, copy_bytes_per_s)
    # A fit for every kind of collective, and one for all of them, for kinds that were not measured.
    fits = {
        kind: fit_link([p for p in points if p["kind"] == kind], link.bytes_per_s)
        for kind in COLLECTIVES
    }
    tier = Tier(
        name,
        sizes,
        link.latency_s,
        link.bytes_per_s,
        kinds={kind: fit for kind, (fit, _) in fits.items()},
    )
    errors = {f"{name}.all kinds": error} | {
        f"{name}.{kind}": error for kind, (_, error) in fits.items()
    }
    untold = {
        f"{name}.{kind}": OF_ALL_KINDS
        for kind, (fit, _) in fits.items()
        if _same(fit.bytes_per_s, link.bytes_per_s)
    }
    if _same(link.bytes_per_s, copy_bytes_per_s):
        untold = {f"{name}.all kinds": OF_MEMORY, **untold}
    return tier, errors, untold


OF_ALL_KINDS = "larger messages took no longer, so that its bandwidth is that of all kinds"
OF_MEMORY = "larger messages took no longer, so that the bandwidth is that of memory"
"""What a hardware file's sources say of a link whose bandwidth no measured message tells."""


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-12)


def _check_request(device_type: str, num_ranks: int | None) -> None:
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device to measure", hint="--device cpu")
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError(f"--ranks is at least 1, not {num_ranks}")
    if in_job():
        world_size = int(os.environ["WORLD_SIZE"])
        if num_ranks not in (None, world_size):
            raise ConfigError(
                f"--ranks {num_ranks} under torchrun",
                why=f"the job has {world_size} ranks, and all of them measure",
                hint="leave --ranks out",
            )
    elif device_type == "cuda" and num_ranks is not None and num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"--ranks {num_ranks} is more than there are CUDA devices",
            why=f"{torch.cuda.device_count()} are here",
        )


def _tiers(world: World) -> tuple[dict[str, list[int]], list[tuple[str, list[Groups]]]]:
    """The devices of each tier's groups by its name, and the groups to measure. Ranks of a node are
    neighbours.
    """
    if world.size == 1:
        return {TIER_NAMES[0]: [1]}, []
    node_of = world.all_gather_object(_node())
    nodes = [
        tuple(rank for rank, _ in members)
        for _, members in itertools.groupby(enumerate(node_of), key=lambda item: item[1])
    ]
    sizes, tiers = {TIER_NAMES[0]: [len(node) for node in nodes]}, []
    least = min(sizes[TIER_NAMES[0]])
    # Groups of one list have one size, as the points of a fit do: of uneven nodes the first ranks.
    inside = [tuple(node[:least] for node in nodes)] if least > 1 else []
    # Pairs as well, so that the fit tells what a step costs from what a byte costs.
    if least >= 4:
        inside.append(tuple(node[i : i + 2] for node in nodes for i in range(0, least - 1, 2)))
    tiers.append((TIER_NAMES[0], inside))
    if len(nodes) > 1:
        sizes[TIER_NAMES[1]] = [world.size]
        tiers.append(
            (TIER_NAMES[1], [tuple(tuple(node[i] for node in nodes) for i in range(least))])
        )
    return sizes, tiers


def _device_facts(world: World) -> dict[str, Any]:
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        return {
            "host": platform.node(),
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "ranks": ranks,
        }
    num_cores = _num_cores(world)
    threads, sharing = torch.get_num_threads(), _sharing(num_cores)
    return {
        "host": platform.node(),
        "name": f"{_cpu_name()}, {_local_ranks()} ranks on {num_cores} cores",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _local_ranks(),
        "ranks": f"{ranks} with {threads} thread{'s' if threads > 1 else ''} each",
        "sharing": sharing and asdict(sharing),
    }


def _sharing(num_cores: int) -> Sharing | None:
    """The way in which the ranks of this machine share its cores; ``None`` if each has as many
    cores as threads.
    """
    ranks, room = _local_ranks(), max(1, num_cores // torch.get_num_threads())
    return Sharing(ranks, room) if ranks > room else None


def _num_cores(world: World) -> int:
    """How many cores the ranks of the first machine may use, all together. Collective."""
    everyone = world.all_gather_object((_node(), sorted(_own_cores())))
    return len({core for node, cores in everyone if node == everyone[0][0] for core in cores})


def _own_cores() -> set[int]:
    """The cores that this process may run on: all, unless it was bound to some."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))  # systems that bind no processes


def _node() -> int:
    """Which machine of the job this rank is on."""
    return int(os.environ.get("GROUP_RANK", "0"))


def _local_ranks() -> int:
    """The ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines: Sequence[str] = (
        cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else ()
    )
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
