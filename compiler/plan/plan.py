"""The plan: who computes what, as data.

A plan names a mesh, one strategy per operator and mesh axis, and the stored layout of every
parameter and buffer. Everything else (layouts of values, adapters, gradient reductions) follows
from it. It is complete and consistent with one graph; stable names make it readable, diffable and
editable by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.compiler.ops.strategy import Assignment
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.imbalance import Imbalance
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import PlanError, malformed
from shardwright.runtime.layout import Layout, Mesh

PLAN_FORMAT = 1

KEEP, AGAIN = "keep", "again"
"""What happens to a value that was made whole for an operator which needs it in backward too."""


@dataclass(frozen=True)
class Note:
    """Something a person may want to know of the plan: an operator that stayed replicated, and
    why.
    """

    op: str
    module_path: str
    source: str
    axis: str
    reason: str


def _mesh_to_json(mesh: Mesh) -> dict[str, Any]:
    """The entries of a plan that tell a mesh; :func:`_mesh_from_json` is the inverse."""
    return {
        "mesh": dict(mesh.axes),
        **({"turns": dict(mesh.turns)} if mesh.turns else {}),
    }


def _mesh_from_json(data: Mapping[str, Any]) -> Mesh:
    return Mesh(tuple(data["mesh"].items()), tuple(data.get("turns", {}).items()))


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage: the operators from ``first_op`` (in the order of the graph) up to the next
    stage's, on the unit ranks ``ranks``, in the order of ``mesh``. Stages with the same ranks have
    the same mesh; the others' ranks are disjoint.
    """

    first_op: str
    mesh: Mesh
    ranks: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"first_op": self.first_op, **_mesh_to_json(self.mesh), "ranks": list(self.ranks)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StagePlan:
        return cls(data["first_op"], _mesh_from_json(data), tuple(data["ranks"]))


@dataclass(frozen=True)
class PlannedLoop:
    """Operators that run in ``count`` pieces, one after the other. ``strategies``: what each of
    them does along the loop, which is an axis of time without ranks. Those that hand values to each
    other run in one loop; others, such as the same operators of the next layer, in one of their
    own.

    ``blocks``: operators whose operands are gathered over ranks piece by piece, each in a loop of
    its own. The number says in how many blocks the dim lies that the loop cuts; a piece has a part
    of each block, so that every rank has a part of every piece. Where the dim is a product already,
    such as heads times their width, it is 1.
    """

    count: int
    strategies: Mapping[str, str] = field(hash=False)
    blocks: Mapping[str, int] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        found = {"count": self.count, "strategies": dict(self.strategies)}
        return {**found, "blocks": dict(self.blocks)} if self.blocks else found


@dataclass(frozen=True)
class Batch:
    """How the samples of a step reach a unit: ``num_microbatches`` microbatches of ``samples``
    each. ``dims``: by path of an input, the dim that counts samples.
    """

    samples: int
    num_microbatches: int
    dims: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return (
            f"{self.num_microbatches} microbatch{'es' if self.num_microbatches > 1 else ''} of "
            f"{self.samples}"
        )

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "dims": dict(self.dims)}


@dataclass(frozen=True)
class Certificate:
    """What a search knows of its plan: it takes ``cost_s`` seconds per step on ``hardware``, and no
    plan that the bound ``covers`` takes less than ``bound_s``. ``apart_s``: the seconds with each
    message by itself, where a compile joins some or hides them behind other work; the bound is of
    such programs, as they are before that.

    ``space``: the plan's title, and among what it was chosen there. ``proof``: where the bound
    comes from and what it leaves out, a sentence each. ``found``: what was tried besides, such as
    other meshes. ``digest``: binds it to the plan (``certified.py``). ``runtime_ngpus``: the ranks
    of all units; ``num_microbatches``: how many make up the step, of a plan that has neither stages
    nor a batch. ``None``: the file does not say. ``cut_short``: of a search that was ended before
    it had a bound but for the arithmetic of the model, a sentence on what was looked at.
    ``settings``: those of the config that the cost depends on and the plan does not hold, where
    they are not as by default, such as the size of a bucket of gradients (``certified.py``).
    """

    cost_s: float
    bound_s: float
    proof: tuple[str, ...]
    space: str
    hardware: str
    found: tuple[str, ...] = ()
    digest: str = ""
    runtime_ngpus: int | None = None
    num_microbatches: int | None = None
    covers: str = "any plan of its space"
    apart_s: float | None = None
    cut_short: str | None = None
    settings: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def gap(self) -> float:
        """How far above the bound the cost is, relative to the cost, each message by itself; 0:
        proved optimal among what the bound covers.
        """
        cost_s = self.cost_s if self.apart_s is None else self.apart_s
        return max(0.0, (cost_s - self.bound_s) / cost_s) if cost_s > 0 else 0.0

    @property
    def claim(self) -> str:
        """The cost, the bound and what it is of, on one line."""
        cost, bound = (amount(seconds, "s", digits=6) for seconds in (self.cost_s, self.bound_s))
        step, gap = f"{cost} per step on {self.hardware}", f"(gap {self.gap:.2%})"
        if self.apart_s is not None:
            step += f"; with each message by itself {amount(self.apart_s, 's', digits=6)}"
        if self.cut_short is not None:
            return (
                f"{step}: {self.space}. {self.cut_short}. Others may be faster; none takes less "
                f"than {bound}, the arithmetic of the model alone {gap}"
            )
        return f"{step}, at least {bound} for {self.covers} {gap}: {self.space}"

    def __str__(self) -> str:
        """The claim, and under it what is to be known of its bound."""
        return "\n".join([self.claim, *(f"  - {sentence}" for sentence in self.proof)])

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name, value in vars(self).items() if value is not None}
        return {**known, "proof": list(self.proof), "found": list(self.found)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        return cls(**{**data, "proof": tuple(data["proof"]), "found": tuple(data["found"])})


@dataclass(frozen=True)
class Plan:
    """A plan for one graph.

    ``strategies``: operator name to its assignment; operators and axes left out are ``R``.
    ``stored``: layout of parameters and buffers by FQN; what is left out is chosen while lowering,
    so that its uses need the least communication. ``inputs`` / ``outputs``: layouts by path where
    they are not whole; an output may be ``None``: not needed, dropped; or ``"eval"``: left out of
    training steps. ``policy`` and ``notes`` say where the plan comes from. ``dims``: operator name
    and axis to the name of the dim split there, for people; nothing is decided by it.
    ``certificate``: of a plan that was searched for.

    With ``stages`` the plan is a pipeline: ``mesh`` then counts all ranks, and strategies speak of
    the axes of the stages' meshes. ``schedule`` names the order of forwards and backwards of
    ``num_microbatches`` samples; ``actions`` writes it out by position, where it is the user's own.
    ``recompute``: the module paths whose activations are computed again in backward.

    ``zero``: over how many units ZeRO-3 stores parameters in pieces (see ``zero.py``); 0 without
    it. It follows from the config, with the stage that the plan has chosen.

    ``zero_stage``: the stage of ZeRO that the plan was searched for, or that the search has chosen
    (``ComputeConfig(use_zero="auto")``); ``None``: any.
    ``batch``: the microbatches that it was chosen for, where their size was; inputs are of that
    size then.
    ``gathers``: by FQN of a parameter or name of an activation, whether a value that is gathered
    is kept for backward (``"keep"``) or gathered again there (``"again"``), which holds a piece of
    it meanwhile. What is left out: weights are gathered again, activations kept.
    ``loops``: the operators that run in pieces, by the name of an axis that is none of the mesh.
    ``imbalance``: of a model with experts, how many times its even share of rows the busiest rank
    is assumed to get, for all layers or by module; ``None``: as the cost model has it.
    """

    mesh: Mesh
    strategies: Mapping[str, Assignment] = field(default_factory=dict)
    stored: Mapping[str, Layout] = field(default_factory=dict)
    inputs: Mapping[str, Layout] = field(default_factory=dict)
    outputs: Mapping[str, Layout | str | None] = field(default_factory=dict)
    policy: str = "custom"
    notes: tuple[Note, ...] = ()
    stages: tuple[StagePlan, ...] = ()
    schedule: str = ""
    num_microbatches: int = 1
    actions: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    dims: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    certificate: Certificate | None = None
    zero: int = 0
    zero_stage: int | None = None
    batch: Batch | None = None
    imbalance: Imbalance | None = None
    gathers: Mapping[str, str] = field(default_factory=dict)
    loops: Mapping[str, PlannedLoop] = field(default_factory=dict)

    @property
    def computing_mesh(self) -> Mesh:
        """The mesh along which operators are split: the plan's own, and inside of it the loops."""
        return self.with_loops(self.mesh)

    def with_loops(self, mesh: Mesh) -> Mesh:
        """A mesh with the loops as its innermost axes."""
        loops = tuple((name, loop.count) for name, loop in self.loops.items())
        return mesh.of_axes((*mesh.axes, *loops)) if loops else mesh

    @property
    def storage_mesh(self) -> Mesh:
        """The mesh on which tensors are stored: the plan's own, with ZeRO-3 that of several
        units.
        """
        return self.mesh.over_units(self.zero)

    def assignment(self, op: str) -> Assignment:
        """The strategies of an operator, by axis."""
        return self.strategies.get(op, {})

    def to_json(self) -> dict[str, Any]:
        """JSON values; :meth:`from_json` is the inverse."""

        def layout(item: Layout | str | None) -> Any:
            return str(item) if isinstance(item, Layout) else item

        return {
            "format": PLAN_FORMAT,
            "policy": self.policy,
            **_mesh_to_json(self.mesh),
            "strategies": {
                op: dict(assignment) for op, assignment in self.strategies.items() if assignment
            },
            "dims": {op: dict(named) for op, named in self.dims.items()},
            "stored": {fqn: str(item) for fqn, item in self.stored.items()},
            "inputs": {name: str(item) for name, item in self.inputs.items()},
            "outputs": {path: layout(item) for path, item in self.outputs.items()},
            "notes": [vars(note) for note in self.notes],
            "recompute": list(self.recompute),
            # Fields with their usual value are left out, so that plans stay short and old ones are
            # read.
            **({"zero": self.zero} if self.zero else {}),
            **({"zero_stage": self.zero_stage} if self.zero_stage is not None else {}),
            **({"batch": self.batch.to_json()} if self.batch is not None else {}),
            **({"imbalance": self.imbalance} if self.imbalance is not None else {}),
            **({"gathers": dict(self.gathers)} if self.gathers else {}),
            **(
                {"loops": {name: loop.to_json() for name, loop in self.loops.items()}}
                if self.loops
                else {}
            ),
            **(
                {
                    "stages": [stage.to_json() for stage in self.stages],
                    "schedule": self.schedule,
                    "num_microbatches": self.num_microbatches,
                    "actions": list(self.actions),
                }
                if self.stages
                else {}
            ),
            **({"certificate": self.certificate.to_json()} if self.certificate is not None else {}),
        }

    @classmethod
    @checked
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The reverse of :meth:`to_json`."""

        def layout(item: str | None) -> Layout | str | None:
            # An output is a layout, ``[8, 64/tp]``, or a word: ``whole``, ``drop``.
            return Layout.parse(item) if isinstance(item, str) and item.startswith("[") else item

        with malformed(
            PlanError, "this is no plan", hint="compare it with the plan.json of a compile"
        ):
            return cls(
                _mesh_from_json(data),
                data["strategies"],
                {fqn: Layout.parse(text) for fqn, text in data["stored"].items()},
                {name: Layout.parse(text) for name, text in data["inputs"].items()},
                {path: layout(item) for path, item in data["outputs"].items()},
                data["policy"],
                tuple(Note(**note) for note in data["notes"]),
                tuple(StagePlan.from_json(stage) for stage in data.get("stages", ())),
                data.get("schedule", ""),
                data.get("num_microbatches", 1),
                tuple(data.get("actions", ())),
                tuple(data.get("recompute", ())),
                data.get("dims", {}),
                Certificate.from_json(data["certificate"]) if "certificate" in data else None,
                data.get("zero", 0),
                data.get("zero_stage"),
                Batch(**data["batch"]) if "batch" in data else None,
                data.get("imbalance"),
                data.get("gathers", {}),
                {
                    name: PlannedLoop(
                        int(loop["count"]), loop["strategies"], loop.get("blocks", {})
                    )
                    for name, loop in data.get("loops", {}).items()
                },
            )

    def dumps(self) -> str:
        """The text of a plan file."""
        return json.dumps(self.to_json(), indent=1)
