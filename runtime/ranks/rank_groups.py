"""Which ranks form a group: numbers only, for any order of the axes.

Ranks are numbered over a grid of axes. An **order** names the axes by which they are numbered, the
one that varies fastest first, as Megatron writes it. Eight ranks, two along each axis:

    order         tp                         dp                         pp
    tp-dp-pp      [0,1] [2,3] [4,5] [6,7]    [0,2] [1,3] [4,6] [5,7]    [0,4] [1,5] [2,6] [3,7]
    tp-pp-dp      [0,1] [2,3] [4,5] [6,7]    [0,4] [1,5] [2,6] [3,7]    [0,2] [1,3] [4,6] [5,7]

A group along several axes holds the ranks that differ along these only: along ``tp-dp`` they are
``[0, 1, 2, 3]`` and ``[4, 5, 6, 7]`` in the first order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.layout import Mesh

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""The order of Megatron, of OSLO and of torchtitan: pipeline stages are outermost."""


@checked
def rank_groups(order: str, sizes: Mapping[str, int], axes: str | Sequence[str]) -> list[list[int]]:
    """The groups of ranks that differ along ``axes`` only, by their first rank; each group in
    ascending order.

    ``order``: the axes, fastest first, joined by ``-``. ``sizes``: the number of ranks along each
    axis; an axis that is left out has one. ``axes``: one or several, ``"tp-dp"`` or
    ``["tp", "dp"]``. Nothing is sent, and no process group is made.

    ::

        rank_groups("tp-cp-ep-dp-pp", {"tp": 2, "dp": 2, "pp": 2}, "dp")
        # [[0, 2], [1, 3], [4, 6], [5, 7]]

    Raises :class:`ConfigError` for an axis of several ranks that the order lacks, an unknown axis,
    an axis named twice, and a size that is none.
    """
    mesh = mesh_of_order(order, sizes)
    asked = _names("axes", axes)
    known = dict.fromkeys((*mesh.names, *sizes))
    for name in asked:
        if name not in known:
            raise ConfigError(
                f"there is no axis {name!r}",
                why=f"the order is {order!r}",
                hint=did_you_mean(name, mesh.names),
            )
    return [list(group) for group in mesh.groups(tuple(n for n in asked if n in mesh.names))]


def mesh_of_order(order: str, sizes: Mapping[str, int]) -> Mesh:
    """The mesh whose ranks are numbered by ``order``. See :func:`rank_groups`."""
    names = _names("order", order)
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ConfigError(
                f"the size of axis {name!r} is a whole number of at least 1",
                why=f"it is {brief(size)}",
            )
        if name not in names and size > 1:
            raise ConfigError(
                f"the order {order!r} lacks the axis {name!r}",
                why=f"{size} ranks differ along it",
                hint=f"name every axis, the fastest first: {_with_all(names, sizes)}",
            )
    # A mesh is written major to minor, an order fastest first.
    return Mesh(tuple((name, sizes.get(name, 1)) for name in reversed(names)))


def _with_all(names: Sequence[str], sizes: Mapping[str, int]) -> str:
    """The known axes of an order, with those that it lacks in front of ``dp``, or last."""
    known = [name for name in names if name in sizes or name in DEFAULT_ORDER.split("-")]
    lacking = [name for name in sizes if name not in names]
    at = known.index("dp") if "dp" in known else len(known)
    return "-".join([*known[:at], *lacking, *known[at:]])


def _names(what: str, given: str | Sequence[str]) -> tuple[str, ...]:
    names = tuple(given.split("-")) if isinstance(given, str) and given else tuple(given)
    if len(set(names)) != len(names) or "" in names:
        raise ConfigError(
            f"{what} is names of axes joined by '-', each once",
            why=f"it is {brief(given)}",
            hint=f"write {DEFAULT_ORDER!r}: the axis along which ranks are neighbours comes first",
        )
    return names
