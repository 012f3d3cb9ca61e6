"""What typing rules of operators refuse besides types."""

import pytest
import spmd_types as spmd
import torch

from shardwright.frontend.verification.outside.spmd_layouts import TypedMesh
from shardwright.frontend.verification.outside.typed_operators import check_count
from shardwright.runtime.layout import Layout, Mesh


@pytest.mark.parametrize(
    ("size", "counts", "wrong"),
    [
        (2, (3, 4, 5), (1, 2, 7)),  # 3 elements on two ranks are 2 and 1, 5 are 3 and 2
        (1, (2, 3), (1, 4)),
        (0, (0, 1, 9), ()),  # a rank without any knows nothing
    ],
)
def test_a_mean_is_over_as_many_elements_as_ranks_can_hold(
    size: int, counts: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    mesh = TypedMesh(Mesh((("tp", 2),)), ())
    with spmd.set_current_mesh(mesh.axes()):
        x = torch.empty(size, 3)
        spmd.assert_type(x, mesh.type_of(Layout.parse("[4/tp, 3]")))
        for count in counts:
            check_count(x, [0], count)
            check_count(x, [0, 1], 3 * count)
        for count in wrong:
            with pytest.raises(spmd.SpmdTypeError, match="a mean is taken over"):
                check_count(x, [0], count)
        check_count(x, [1], 3)
