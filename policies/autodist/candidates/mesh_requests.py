"""What a search asks of the placement for one mesh, one thing after the other, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ops.rule import ATTENTION
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.placement.least_memory import MemoryWeight
from shardwright.policies.autodist.stages.chain import layer_blocks, layer_pattern
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh


class PipelineMesh(NamedTuple):
    """The ranks of a unit as the search divides them.

    ``num_positions`` of a pipeline have a ``mesh`` each. The pipeline axis stands before the axis
    of the mesh with the number ``pp_place``. Example: ``(2, x=4, 0)`` are two positions, each of
    four ranks that are neighbours.
    """

    num_positions: int
    mesh: Mesh
    pp_place: int


@dataclass(frozen=True)
class MeshRequest:
    """A request to place the whole model on a mesh.

    - ``mesh``, ``ranks``: the mesh, and the ranks of the unit that it lies on, in its order: those
      of the first of ``num_positions`` pipeline positions that will share the model.
    - ``memory_bytes``: what the whole model may take on a rank, with the activations of
      ``in_flight`` microbatches; ``None`` for any.
    - ``memory_weight``: the price of memory beside time, in the place of that limit.
    - ``recompute``: the modules whose activations are computed again.
    - ``hurried``: whether any placement that fits will do, as long as it is found soon.
    - ``hides_gathers``: whether gathers of weights are priced as hidden, which no plan is below;
      else as waited for.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    num_microbatches: int
    memory_bytes: float | None = None
    in_flight: int = 1
    recompute: tuple[str, ...] = ()
    hurried: bool = False
    memory_weight: MemoryWeight | None = None
    num_positions: int = 1
    hides_gathers: bool = True

    @property
    def waits(self) -> bool:
        """Whether it is for speed alone, with each gather of a weight waited for."""
        return not self.hides_gathers and self.memory_bytes is None


@dataclass(frozen=True)
class PlacedModel:
    """The best placement of the whole model on one mesh.

    - ``cost_s``: seconds per step by the problem that it solves.
    - ``bound_s``: no placement in ``space`` takes less per step, for the reason ``proof``.
    - ``longest_s``: seconds per step that no placement takes less in one operator.
    - ``interrupted``: whether it is what the solver had when it was interrupted from the keyboard.
    """

    plan: Plan
    bound_s: float
    proof: str
    space: str
    interrupted: bool = False
    cost_s: float = 0.0
    longest_s: float = 0.0

    def share_s(self, num_positions: int) -> float:
        """Seconds per step that some pipeline position takes at least, in any placement on this
        mesh: its share of the work, or an operator, which one of them has whole.
        """
        return max(self.bound_s / num_positions, self.longest_s)


class NoPlacement(PlanError):
    """No placement on a mesh fits. ``needed_bytes``: what any needs on a device; infinite where
    that is not known.
    """

    def __init__(self, why: str, needed_bytes: float) -> None:
        super().__init__("no placement fits", why=why)
        self.needed_bytes = needed_bytes


Place = Callable[[MeshRequest], PlacedModel]
"""Places the model. Raises :class:`PlanError` if nothing is allowed, or nothing fits."""

LeastStep = Callable[[MeshRequest], float]
"""The least seconds per step of any plan within the memory of a request, whatever layers are
computed again besides; ``inf`` where none fits.
"""


@dataclass(frozen=True)
class PlacedMesh:
    """A mesh of one pipeline position with the fastest placement of the model on it, whatever
    memory that takes, on the ranks of the first position.

    ``pp_place``: before which of its axes the pipeline axis stands. ``request``: what was asked
    for. ``further``: the requests that remain for this mesh, if the fastest placement does not fit.
    ``memory_binds``: whether nothing that fits is as fast; ``never_fits``: whether it is proved
    that nothing fits at all.
    """

    num_positions: int
    mesh: Mesh
    pp_place: int
    fastest: PlacedModel
    request: MeshRequest
    further: tuple[MeshRequest, ...]
    memory_binds: bool = False
    never_fits: bool = False

    @property
    def where(self) -> PipelineMesh:
        """What tells it from other placed meshes."""
        return PipelineMesh(self.num_positions, self.mesh, self.pp_place)

    @property
    def bound_s(self) -> float:
        """No plan of so many positions on this mesh takes less."""
        return self.fastest.share_s(self.num_positions)


AGAIN = MemoryWeight(heavy=1 / 3, momentary=0.0)
"""The price of memory where activations are computed again: a forward, which is a third of a step,
for all that is kept.
"""


def mesh_requests(
    graph: IRGraph, space: SearchSpace, num_positions: int, mesh: Mesh, ranks: tuple[int, ...]
) -> Iterable[MeshRequest]:
    """The whole model for speed alone; for the memory of all positions too; for time and memory, at
    the price that computing again has; and for the memory with all layers computed again.
    """
    given = tuple(space.recompute or ())
    # The first of the positions has as many microbatches in flight as there are positions, and a
    # share of the model.
    memory, in_flight = (
        space.memory_bytes * num_positions,
        min(num_positions, space.num_microbatches),
    )
    mesh_request = MeshRequest(
        mesh,
        ranks,
        space.num_microbatches,
        in_flight=in_flight,
        recompute=given,
        num_positions=num_positions,
    )
    yield mesh_request
    if space.memory_bytes < float("inf"):
        mesh_request = replace(mesh_request, memory_bytes=memory)
        yield mesh_request
        if space.recompute is None and (every := every_layer(graph)):
            yield replace(mesh_request, memory_weight=AGAIN)
            yield replace(mesh_request, recompute=every)


def around_attention(graph: IRGraph) -> tuple[str, ...]:
    """The patterns of what the layers have beside attention: the largest modules without any, but
    for those inside of a module that attends. They are much of what is kept, and where a sequence
    is long little of what takes time. None in a model without such layers.

    Example: ``model.layers.*.mlp`` and both norms of a Llama, and not ``self_attn.q_proj``.
    """
    layers = set(layer_blocks(graph)[1].values())
    attending = {op.module_path for op in graph.ops if op.target in ATTENTION}
    # What holds attention somewhere: ``model``, ``model.layers.3``, ``model.layers.3.self_attn``.
    holding = {front for path in attending for front in _fronts(path)}
    found: dict[str, None] = {}
    for op in graph.ops:
        fronts = _fronts(op.module_path)
        layer = next((front for front in fronts if front in layers), None)
        # The outermost module of the operator that has no attention in it.
        module = next((front for front in fronts if front not in holding), None)
        if layer not in holding or layer is None or module is None:
            continue
        if module.rpartition(".")[0] not in attending:
            found[layer_pattern(layer) + module.removeprefix(layer)] = None
    return tuple(found)


def _fronts(path: str) -> list[str]:
    """``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    names = path.split(".")
    return [".".join(names[: index + 1]) for index in range(len(names))]


def every_layer(graph: IRGraph) -> tuple[str, ...]:
    """The patterns of all layers, as ``recompute`` has them; none in a model without layers."""
    return tuple(dict.fromkeys(map(layer_pattern, layer_blocks(graph)[1].values())))
