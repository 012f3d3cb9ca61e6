"""What a search asks of placements, mesh by mesh."""

from typing import Any

import plans

from shardwright.policies.autodist.candidates.mesh_requests import AGAIN, MeshRequest, mesh_requests
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.runtime.layout import Mesh


def asked(**fields: Any) -> list[MeshRequest]:
    space = SearchSpace(meshes={}, num_microbatches=8, **fields)
    return list(mesh_requests(plans.zoo_graph("gpt2"), space, 2, Mesh((("tp", 2),)), (0, 1)))


def test_without_a_limit_only_speed_counts() -> None:
    (free,) = asked()
    assert free.memory_bytes is None and free.memory_weight is None and not free.recompute


def test_memory_is_asked_for_by_limit_then_by_price_then_with_all_layers_computed_again() -> None:
    free, limited, priced, again = asked(memory_bytes=1e6)
    assert free.memory_bytes is None
    assert (limited.memory_bytes, limited.in_flight, limited.memory_weight, limited.recompute) == (
        2e6,
        2,
        None,
        (),
    )
    assert (priced.memory_bytes, priced.memory_weight, priced.recompute) == (2e6, AGAIN, ())
    assert (again.memory_bytes, again.memory_weight, again.recompute) == (
        2e6,
        None,
        ("transformer.h.*",),
    )


def test_what_the_user_has_computed_again_is_asked_for_alone() -> None:
    assert [
        mesh_request.recompute
        for mesh_request in asked(memory_bytes=1e6, recompute=("transformer.h.0",))
    ] == [("transformer.h.0",)] * 2
