"""Training with optimizer state split over ranks: the numbers of one device, whatever the stage and
the options.
"""

import itertools

import pytest
from covers import spread
from mlp_files import make_model, write_files
from zero_training import OPTIMIZERS, check

ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("muonlike", "adafactor")]
MESHES = [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 3)]
"""dp, tp, units"""


def files(tmp_path, dp, tp):
    return write_files(tmp_path / f"mlp_{dp}_{tp}", make_model(), dp, tp)


@pytest.mark.parametrize("options", spread([
    {"use_zero": 1},
    {"use_zero": 1, "zero_use_reduce_scatter": True, "use_async_reducer": True},
    {"use_zero": 2, "reducer_bucket_cap_mb": 3e-4},
    {"use_zero": 2, "use_async_reducer": True, "reducer_bucket_cap_mb": 1e-6},
], 3), ids=str)  # fmt: skip
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh(tmp_path, mesh, options):
    dp, tp, units = mesh
    check(files(tmp_path, dp, tp), dp * tp * units, units, **options)


@pytest.mark.parametrize("name", spread(OPTIMIZERS, 2))
@pytest.mark.parametrize("stage", [1, 2])
def test_every_optimizer(tmp_path, name, stage):
    check(
        files(tmp_path, 2, 1),
        4,
        2,
        name,
        use_zero=stage,
        zero_use_reduce_scatter=name > "m",
        reducer_bucket_cap_mb=4e-4,
    )


def test_groups(tmp_path):
    for stage, scatter, name in ((1, False, "adamw"), (1, True, "muonlike"), (2, True, "adam")):
        check(
            files(tmp_path, 1, 1),
            4,
            4,
            name,
            use_zero=stage,
            zero_ngroups=2,
            zero_use_reduce_scatter=scatter,
        )
    check(files(tmp_path, 1, 1), 2, 2, use_zero=1, zero_ngroups=2)


@pytest.mark.parametrize("stage", spread([1, 2], 2, first=1))
@pytest.mark.parametrize("overlap", [False, True])
def test_accumulation(tmp_path, stage, overlap):
    check(files(tmp_path, 1, 2), 4, 2, accumulate=4, use_zero=stage, use_async_reducer=overlap)


PRODUCT = list(
    itertools.product(
        MESHES, ELEMENTWISE, (1, 2), (1, 2), (False, True), (False, True), (1e-6, 4e-4, 25), (1, 4)
    )
)


@pytest.mark.slow
def test_a_sample_of_the_product(tmp_path):
    """tests/product/optimizers.py has all of it."""
    for mesh, name, stage, groups, scatter, overlap, cap_mb, accumulate in PRODUCT[::97]:
        dp, tp, units = mesh
        if units % groups == 0:
            check(
                files(tmp_path, dp, tp),
                dp * tp * units,
                units,
                name,
                accumulate,
                use_zero=stage,
                zero_ngroups=groups,
                zero_use_reduce_scatter=scatter,
                use_async_reducer=overlap,
                reducer_bucket_cap_mb=cap_mb,
            )
