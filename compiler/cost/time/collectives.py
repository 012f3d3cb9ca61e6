"""Seconds of one collective over a group of devices: latency plus bytes over bandwidth, by the
algorithms libraries use.

Every algorithm is a line ``latency + bytes * seconds per byte``; the cheapest counts, as
communication libraries choose so too. With ``p`` devices on one tier of latency ``a`` and ``B``
bytes/s the lines are those of textbooks (Thakur et al. 2005, "Optimization of collective
communication operations in MPICH"):

    reduce_scatter, all_gather   ring (p-1) a + (p-1)/p n/B
    all_reduce                   twice that, or              double tree 2 ceil(log2 p) a + 2 n/B
    all_to_all                   pairwise (p-1) a + (p-1)/p n/B
    broadcast                    chain (p-1) a + n/B             binary tree ceil(log2 p) (a + n/B)
    send                         a + n/B

A group that spans tiers:

- a **ring** visits devices in order, so it leaves each node once; a message passes every hop but
  one. It is as fast as the slowest tier, where all members in a node use their links at once, as
  several rings with different entries do;
- a **tree** is one tree per tier, one inside the other;
- a **hierarchical** all-reduce finishes each tier before the next: reduce-scatter inside the nodes,
  all-reduce the pieces between equal members of all nodes, all-gather inside. In uneven groups the
  smallest node says into how many pieces. An all-to-all can go tier by tier, too.

Gathers and reduce-scatters have rings alone: NCCL's trees are for all-reduce (NVIDIA/nccl, issues
1413, 1473 and 1594), so that over many ranks small ones wait for every hop.

Ranks that do not come to a collective at the same moment wait for the last one (``late_s``): the
latest of ``p`` waits about as many times longer as ``p`` has doublings.

All groups along an axis of a mesh, or along several, communicate at once. Links that are shared
(``Tier.uplink_bytes_per_s``, ``fabric_bytes_per_s``) are divided by the devices that use them then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardwright.compiler.cost.machine.hardware import COLLECTIVES, Hardware, Link, Network
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, InternalError, did_you_mean
from shardwright.runtime.layout import Mesh

Line = tuple[float, float]
"""``(seconds, seconds per byte)`` of one algorithm."""

Ids = npt.NDArray[np.int64]


@checked
def collective_s(hardware: Hardware, kind: str, num_bytes: float, ranks: Sequence[int]) -> float:
    """Seconds of one collective over ``ranks``, while no other group communicates; 0.0 for one
    rank.

    ``kind`` is one of :data:`COLLECTIVES`. ``num_bytes`` are those of

    - the tensor, for ``all_reduce`` and ``broadcast``;
    - the gathered result, for ``all_gather``;
    - what goes in on one rank, for ``reduce_scatter``;
    - what one rank holds, for ``all_to_all``;
    - the message, for ``send``, which goes from one of two ranks to the other.

    Raises:
        ConfigError: an unknown kind, a rank that the hardware does not have or that is named twice.
    """
    if not ranks:
        raise ConfigError(f"a {kind} needs at least one rank", hint="name the ranks that take part")
    network, group = hardware.network, tuple(ranks)
    if len(set(group)) == len(group) == 2 and not any(_lacks(network, rank) for rank in group):
        group = _pairs(network)[_tier_of(network, group)]
    return _seconds(_group_lines(network, kind, group), num_bytes)


def groups_collective_s(
    hardware: Hardware, kind: str, num_bytes: float, groups: Sequence[Sequence[int]]
) -> float:
    """Seconds until the last of several groups of equal size is done, when all start the same
    collective at once.
    """
    return _seconds(
        _groups_lines(hardware.network, kind, tuple(tuple(group) for group in groups)), num_bytes
    )


def rows_collective_s(hardware: Hardware, kind: str, num_bytes: float, rows: Ids) -> float:
    """Seconds like those of :func:`groups_collective_s`, for groups that are the rows of an array.
    There may be a million, so nothing is kept by them.
    """
    return _seconds(_pattern_lines(hardware.network, kind, rows), num_bytes)


def rows_line(hardware: Hardware, kind: str, num_bytes: float, rows: Ids) -> Line:
    """The seconds of :func:`rows_collective_s` as a line: what no byte takes, and what each of
    ``num_bytes`` adds.

    The slowest groups are those for ``num_bytes``, at both ends of the line. They take the cheapest
    of several algorithms for each size, so that no message of fewer bytes takes less than the line.
    """
    patterns = _pattern_lines(hardware.network, kind, rows)
    seconds, latency_s = max(
        ((_seconds((lines,), num_bytes), _seconds((lines,), 0.0)) for lines in patterns),
        default=(0.0, 0.0),
    )
    return latency_s, (seconds - latency_s) / num_bytes


def axes_collective_s(
    hardware: Hardware,
    kind: str,
    num_bytes: float,
    mesh: Mesh,
    axes: tuple[str, ...],
    ranks: Sequence[int],
) -> float:
    """Seconds until the slowest group along ``axes`` is done, all groups communicating at once."""
    return _seconds(_axes_lines(hardware.network, kind, mesh, axes, tuple(ranks)), num_bytes)


def flat_lines(kind: str, num_ranks: int) -> tuple[Line, ...]:
    """The algorithms over ``num_ranks`` of one tier, in units of its latency and of bytes over its
    bandwidth.
    """
    return _lines(
        kind,
        _levels(
            [Link(1.0, 1.0)], np.zeros((1, num_ranks), dtype=np.int64), np.ones((1, num_ranks))
        ),
    )


def _seconds(patterns: tuple[tuple[Line, ...], ...], num_bytes: float) -> float:
    """The slowest pattern of groups, each by its cheapest algorithm."""
    return max(
        (min(latency + num_bytes * per_byte for latency, per_byte in lines) for lines in patterns),
        default=0.0,
    )


def _lacks(network: Network, rank: int) -> bool:
    return not 0 <= rank < network.num_devices


def _tier_of(network: Network, group: Sequence[int]) -> int:
    """The innermost tier that has two ranks in one group."""
    first, second = group
    return next(
        index
        for index, tier in enumerate(network.tiers)
        if tier.group_of[first] == tier.group_of[second]
    )


@lru_cache(maxsize=64)
def _pairs(network: Network) -> tuple[tuple[int, ...], ...]:
    """Two neighbours that each tier is the innermost to have in one group. A message between any
    other two of that tier takes as long, so that of 65,536 pairs of 512 ranks few are priced.
    """
    inner, found = np.arange(network.num_devices), list[tuple[int, ...]]()
    for tier in network.tiers:
        outer = tier.group_of
        joined = np.flatnonzero((outer[1:] == outer[:-1]) & (inner[1:] != inner[:-1]))
        found.append((int(joined[0]), int(joined[0]) + 1) if len(joined) else ())
        inner = outer
    return tuple(found)


@lru_cache(maxsize=4096)
def _group_lines(
    network: Network, kind: str, ranks: tuple[int, ...]
) -> tuple[tuple[Line, ...], ...]:
    return _pattern_lines(network, kind, np.array([ranks], dtype=np.int64))


@lru_cache(maxsize=1024)
def _groups_lines(
    network: Network, kind: str, groups: tuple[tuple[int, ...], ...]
) -> tuple[tuple[Line, ...], ...]:
    if len({len(group) for group in groups}) > 1:
        raise InternalError(
            "groups that communicate at once differ in size",
            why=str(sorted({len(g) for g in groups})),
        )
    return _pattern_lines(network, kind, np.array(groups, dtype=np.int64)) if groups else ()


@lru_cache(maxsize=4096)
def _axes_lines(
    network: Network, kind: str, mesh: Mesh, axes: tuple[str, ...], ranks: tuple[int, ...]
) -> tuple[tuple[Line, ...], ...]:
    return _pattern_lines(network, kind, _axes_rows(mesh, axes, ranks))


def _axes_rows(mesh: Mesh, axes: tuple[str, ...], ranks: Sequence[int]) -> Ids:
    """The ranks of all groups along ``axes``, as an array ``[groups, ranks of a group]``. Along a
    loop, an axis of time, the same ranks communicate once for each piece, and count once here.
    """
    rows = group_rows(mesh, axes, ranks)
    return np.unique(rows, axis=0) if len(set(ranks)) < len(ranks) else rows


def group_rows(mesh: Mesh, axes: tuple[str, ...], ranks: Sequence[int]) -> Ids:
    """The ranks at the places of ``mesh.groups(axes)``, a group in a row, for axes in the order of
    the mesh.
    """
    grid = np.array(ranks, dtype=np.int64).reshape([size for _, size in mesh.axes])
    last = range(-len(axes), 0)
    moved = np.moveaxis(grid, [mesh.names.index(axis) for axis in axes], last)
    return moved.reshape(-1, mesh.num_ranks(axes))


def _pattern_lines(network: Network, kind: str, rows: Ids) -> tuple[tuple[Line, ...], ...]:
    """The lines of every distinct pattern among groups that communicate at once. Groups of one rank
    have no pattern, as they send nothing.

    Two groups have one pattern if their devices fall into the same relative groups of every tier,
    at the same rates. Most meshes have one or two patterns, however many groups there are.
    """
    _check(network, kind, rows)
    if rows.shape[1] < 2:
        return ()
    rows = np.sort(rows, axis=1)
    ids = np.stack([tier.group_of[rows] for tier in network.tiers])  # [tiers, groups, ranks]
    rates = _rates(network, kind, rows, ids)
    relative = ids - ids[:, :, :1]
    # [groups, 2 * tiers * ranks]
    keys = np.concatenate([*relative.astype(np.float64), *rates], axis=1)
    firsts = _first_of_each(keys)
    links = [tier.link(kind) for tier in network.tiers]
    late_s = network.late_s * math.ceil(math.log2(rows.shape[1]))
    patterns = [_lines(kind, _levels(links, ids[:, first], rates[:, first])) for first in firsts]
    late = (tuple((late_s + latency, slope) for latency, slope in lines) for lines in patterns)
    return tuple(dict.fromkeys(late))  # a set would not keep the order


def _first_of_each(keys: npt.NDArray[np.float64]) -> list[int]:
    """The first of all rows that are alike, for each kind of rows."""
    # Nearly always a million rows are of one or two kinds: each is compared with all rows at once.
    firsts, left = list[int](), np.arange(len(keys))
    while len(left) and len(firsts) < 8:
        firsts.append(int(left[0]))
        left = left[(keys[left] != keys[left[0]]).any(axis=1)]
    # Those of further kinds by their bytes: numpy would sort them number by number.
    further: dict[bytes, int] = {}
    for row in left.tolist():
        further.setdefault(keys[row].tobytes(), row)
    return [*firsts, *further.values()]


def _check(network: Network, kind: str, rows: Ids) -> None:
    if kind not in COLLECTIVES:
        raise ConfigError(f"there is no collective {kind!r}", hint=did_you_mean(kind, COLLECTIVES))
    if rows.min() < 0 or rows.max() >= network.num_devices:
        wrong = int(rows.max()) if rows.max() >= network.num_devices else int(rows.min())
        raise ConfigError(
            f"hardware {network.name!r} has no device {wrong}",
            why=f"it has {network.num_devices}, numbered from 0",
            hint="load_hardware(name, num_devices=...) describes as many as there are ranks",
        )
    in_order = np.sort(rows, axis=None)
    if (in_order[1:] == in_order[:-1]).any():
        raise ConfigError(
            "a rank is named twice in a collective", why=f"ranks {rows.ravel().tolist()[:16]}"
        )
    if kind == "send" and rows.shape[1] > 2:
        raise ConfigError("a send is between two ranks", why=f"{rows.shape[1]} are named")


def _rates(network: Network, kind: str, rows: Ids, ids: Ids) -> npt.NDArray[np.float64]:
    """``[tiers, groups, ranks]``: the bytes/s each device gets on each tier, while all devices that
    use it send.
    """
    rates = np.empty(ids.shape)
    for index, tier in enumerate(network.tiers):
        # A rank uses this tier if its group has a member in another group of the tier inside.
        inner = network.tiers[index - 1].group_of if index else np.arange(network.num_devices)
        uses = _crosses(ids[index], inner[rows])
        rates[index] = tier.link(kind).bytes_per_s
        for shared, shares in (
            (tier.uplink_bytes_per_s, inner),
            (tier.fabric_bytes_per_s, tier.group_of),
        ):
            if shared is not None:
                users = np.bincount(shares[rows[uses]], minlength=network.num_devices)
                rates[index] = np.minimum(rates[index], shared / np.maximum(users[shares[rows]], 1))
    return rates


def _crosses(outer: Ids, inner: Ids) -> npt.NDArray[np.bool_]:
    """``[groups, ranks]``: whether a rank's group has another member in the same ``outer`` but a
    different ``inner`` group.

    Ids ascend along a row, so members of one outer group are neighbours.
    """
    first = np.ones((len(outer), 1), dtype=bool)
    begins = np.hstack([first, outer[:, 1:] != outer[:, :-1]])
    joins = ~begins & np.hstack([~first, inner[:, 1:] != inner[:, :-1]])
    # Neighbours of one outer group are a run; runs are numbered over all rows.
    run = begins.cumsum().reshape(outer.shape) - 1
    has_join = np.zeros(begins.sum(), dtype=bool)
    has_join[run[joins]] = True
    uses: npt.NDArray[np.bool_] = has_join[run]
    return uses


@dataclass(frozen=True)
class _Level:
    """What one group of ranks does on one tier whose links it uses. A *child* is a group of the
    tier inside this one, or a device of the innermost tier.
    """

    link: Link
    fanout: int  # the most children that one group of this tier joins
    hops: int  # how many hops of the ring over all members run over this tier
    ring_rate: float  # bytes/s of all members of a child together, in the slowest child
    rate: float  # bytes/s of the slowest member
    members: int  # the fewest members of a child
    peers: int  # the most members that one member reaches over this tier
    even: bool  # whether all children, and all groups of this tier, are alike


def _levels(links: list[Link], ids: Ids, rates: npt.NDArray[np.float64]) -> tuple[_Level, ...]:
    """The tiers that one group uses, innermost first; ``ids`` and ``rates`` are ``[tiers, ranks]``,
    ranks ascending.
    """
    # Tier of the hop from each rank to the next one, and from the last to the first: the number of
    # tiers, counted from the innermost, that do not have both in one group.
    hop_tiers = (ids != np.roll(ids, -1, axis=1)).sum(axis=0)
    # From the inside out: a tier joins the groups of the tier below it, its children.
    child_of, levels = np.arange(ids.shape[1]), []
    for index, link in enumerate(links):
        _, first, child, members = np.unique(
            child_of, return_index=True, return_inverse=True, return_counts=True
        )
        # How many ranks each group of this tier has, and of how many children.
        _, parent, size = np.unique(ids[index], return_inverse=True, return_counts=True)
        fanouts = np.bincount(parent[first])
        # The tier plays a part where a group of it has several children.
        joins = fanouts[parent] > 1  # [ranks]
        if joins.any():
            levels.append(
                _Level(
                    link=link,
                    fanout=int(fanouts.max()),
                    hops=int((hop_tiers == index).sum()),
                    ring_rate=float(np.bincount(child, weights=rates[index])[child[joins]].min()),
                    rate=float(rates[index][joins].min()),
                    members=int(members[child[joins]].min()),
                    peers=int((size[parent] - members[child]).max()),
                    even=len(set(fanouts.tolist())) == len(set(members.tolist())) == 1,
                )
            )
        child_of = ids[index]
    return tuple(levels)


def _lines(kind: str, levels: tuple[_Level, ...]) -> tuple[Line, ...]:
    """The algorithms of one collective, by the formulas at the top of this file.

    ``around`` is the latency of a ring, which passes every hop but one; ``deep`` that of a tree.
    """
    num_ranks = sum(level.hops for level in levels)  # a ring has as many hops as members
    share = (num_ranks - 1) / num_ranks
    around = sum(level.hops * level.link.latency_s for level in levels) - min(
        level.link.latency_s for level in levels
    )
    deep = sum(math.ceil(math.log2(level.fanout)) * level.link.latency_s for level in levels)
    per_byte = 1 / min(level.ring_rate for level in levels)
    if kind in ("reduce_scatter", "all_gather", "all_reduce"):
        ring = (around, share * per_byte)
        if kind != "all_reduce":
            return (ring,)
        # An all-reduce is a reduce-scatter and an all-gather.
        halves = ring, (deep, per_byte), _by_tier(levels, tree=False), _by_tier(levels, tree=True)
        return tuple((2 * latency, 2 * seconds) for latency, seconds in halves)
    if kind == "all_to_all":
        pairwise = sum(level.peers * level.link.latency_s for level in levels)
        busiest = max(level.peers / num_ranks / level.rate for level in levels)
        return (
            ((pairwise, busiest), _by_exchange(levels))
            if all(level.even for level in levels)
            else ((pairwise, busiest),)
        )
    if kind == "broadcast":
        tree = sum(math.ceil(math.log2(level.fanout)) / level.rate for level in levels)
        return (around, per_byte), (deep, tree)
    return ((levels[0].link.latency_s, 1 / levels[0].rate),)


def _by_tier(levels: tuple[_Level, ...], *, tree: bool) -> Line:
    """Reduce-scatter one tier after the other: each works on the piece that the tiers inside it
    left.
    """
    latency = per_byte = 0.0
    for level in levels:
        steps = math.ceil(math.log2(level.fanout)) if tree else level.fanout - 1
        share = 1.0 if tree else (level.fanout - 1) / level.fanout
        latency += steps * level.link.latency_s
        per_byte += share / level.members / level.rate
    return latency, per_byte


def _by_exchange(levels: tuple[_Level, ...]) -> Line:
    """All-to-all one tier after the other, where all groups are even: inside nodes, then between
    equal members.
    """
    latency = sum((level.fanout - 1) * level.link.latency_s for level in levels)
    return latency, sum((level.fanout - 1) / level.fanout / level.rate for level in levels)
