"""A run that moves: again and again it goes on under another plan, on another number of ranks and
workers, and must be given the global batches of one rank that was never interrupted.
"""

from __future__ import annotations

import io
import json
import random
from typing import Any

import torch
from torch import Tensor

import shardwright
from shardwright import data
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.data.global_generators import Generators
from shardwright.data.rank_roles import Role
from shardwright.runtime.layout import Layout, Mesh

LENGTH, GLOBAL_BATCH = 12, 24


class Rows:
    """Rows of numbers: element ``j`` of sample ``i`` is ``100 i + j``; lengths vary for packing."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self.first = first
        self.lengths = [(7 * i) % LENGTH + 1 for i in range(size)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = 100 * (self.first + index) + torch.arange(LENGTH)
        return {"ids": row, "labels": row + 1}


class Documents(Rows):
    """Rows cut to their lengths."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[: self.lengths[index]] for name, x in super().__getitem__(index).items()}


def some_data(draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """A dataset, and options of its loader that do not change while it moves."""
    size = draw.randrange(GLOBAL_BATCH, 150)
    options: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "seed": draw.randrange(99)}
    options["shuffle"] = draw.random() < 0.8
    options["shuffle_block"] = draw.choice([None, 7]) if options["shuffle"] else None
    options["wrap"] = draw.random() < 0.4
    kind = draw.choice(["plain", "blend", "packed"])
    if kind == "blend":
        return [Rows(size), Rows(40, first=size)], {**options, "weights": [2, 1]}
    if kind == "packed":
        packing = data.Packing(LENGTH)
        return Documents(4 * size), {**options, "packing": packing}
    return Rows(size), options


def some_plan(draw: random.Random) -> tuple[Plan, int, str]:
    """A plan, the number of units, and both in words."""
    units = draw.choice([1, 2, 3])
    tp, cp, dp = draw.choice([1, 2]), draw.choice([1, 2, 3]), draw.choice([1, 2])
    pp = draw.choice([1, 1, 2, 3])
    title = f"{units} units of dp{dp} cp{cp} tp{tp} pp{pp}"
    axes = Mesh((("dp", dp), ("cp", cp), ("tp", tp)))
    batch = f"{GLOBAL_BATCH}/dp" if dp > 1 else f"{GLOBAL_BATCH}"
    length = f"{LENGTH}/cp" if cp > 1 else f"{LENGTH}"
    inputs = {name: Layout.parse(f"[{batch}, {length}]") for name in ("ids", "labels")}
    if pp == 1:
        return Plan(axes, inputs=inputs), units, title
    stages = tuple(
        StagePlan(f"op{i}", axes, tuple(range(i * axes.size, (i + 1) * axes.size)))
        for i in range(pp)
    )
    whole = Mesh((("rank", pp * axes.size),))
    micros = draw.choice([1, 2])
    return Plan(whole, inputs=inputs, stages=stages, num_microbatches=micros), units, title


def whole_batch(parts: list[tuple[Role, Any]]) -> Tensor:
    """The ids of a global batch, from what all ranks were given. Twins were given the same."""
    seen: dict[int, Tensor] = {}
    found: dict[tuple[int, int], list[tuple[Role, Any]]] = {}
    for role, given in parts:
        microbatches = given if isinstance(given, list) else [given]
        if not role.reads:
            assert all(microbatch is None for microbatch in microbatches)
            continue
        for twin in role.twins:
            if twin in seen:
                assert torch.equal(seen[twin], _flat(microbatches))
        seen[role.rank] = _flat(microbatches)
        for number, microbatch in enumerate(microbatches):
            found.setdefault((role.replica, number), []).append((role, microbatch))
    rows = []
    for _, pieces in sorted(found.items(), key=lambda item: item[0]):
        by_part: dict[int, dict[int, Tensor]] = {}
        for role, microbatch in pieces:
            columns = by_part.setdefault(role.part[0], {})
            (cut,) = role.cuts.get("ids", (None,))
            start, stop = (0, LENGTH) if cut is None else cut.runs(LENGTH)[0]
            assert microbatch["ids"].shape[1] == stop - start
            columns[start] = microbatch["ids"]
        for _, columns in sorted(by_part.items()):
            rows.append(torch.cat([columns[start] for start in sorted(columns)], 1))
    return torch.cat(rows)


def _flat(microbatches: list[Any]) -> Tensor:
    return torch.cat([microbatch["ids"] for microbatch in microbatches])


def steps(loader: Any, count: int) -> list[Any]:
    """The next steps, over the ends of epochs."""
    found: list[Any] = []
    while len(found) < count:
        for batch in loader:
            found.append(batch)
            if len(found) == count:
                break
    return found


def move(num_moves: int, seed: int, *, moves_each: int = 25, log: Any = None) -> int:
    """Make that many moves, over several kinds of data; return how many steps were compared."""
    draw, before, compared = random.Random(seed), Generators.now(), 0
    done = 0
    while done < num_moves:
        dataset, options = some_data(draw)
        alone = data.loader(dataset, data.roles(replica=0, num_replicas=1), **options)
        state = None
        for _ in range(min(moves_each, num_moves - done)):
            plan, units, title = some_plan(draw)
            num_ranks = units * plan.mesh.size
            count, busy = draw.randrange(0, 5), draw.randrange(num_ranks)
            workers = draw.choice([0, 0, 1, 2])
            loaders, given = [], []
            with shardwright.count_communication() as volume:
                for rank in range(num_ranks):
                    roles = data.roles(plan, num_ranks=num_ranks, rank=rank)
                    own = workers if rank == busy else 0
                    ahead = {"num_workers": own, "prefetch_factor": draw.choice([1, 2, 4])}
                    loaders.append(data.loader(dataset, roles, **options, **ahead))
                    if state is not None:
                        loaders[-1].load_state_dict(state)
                    given.append((roles.mine, steps(loaders[-1], count)))
            assert not volume.total().calls, "nothing is sent"
            expected = steps(alone, count)
            for number in range(count):
                parts = [(role, own_steps[number]) for role, own_steps in given]
                assert torch.equal(whole_batch(parts), expected[number]["ids"]), title
            state = through_a_file(draw.choice(loaders).state_dict(), draw.random() < 0.5)
            assert state == alone.state_dict()
            for loader in loaders:
                loader.close()
            compared += count
            done += 1
            if log is not None and done % 50 == 0:
                log(f"{done} moves, {compared} steps")
    assert before.moved() == [], "no global generator moves"
    return compared


def through_a_file(state: Any, as_json: bool) -> Any:
    """The state as it comes back from a file."""
    if as_json:
        return json.loads(json.dumps(state))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer)
