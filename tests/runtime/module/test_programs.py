"""Several programs of one module: one for each set of sizes that inputs hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from covers import spread
from torch import Tensor, nn

from shardwright import parallelize
from shardwright.frontend.verification.one_device import adamw
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InputError, PlanError
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.pieces import local_piece
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer


class Grids(nn.Module):
    """Means of patches in grids whose heights and widths are an input, as vision models take
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 16).double()
        self.norm = nn.BatchNorm1d(16).double()
        self.down = nn.Linear(16, 4).double()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.float64))

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        hidden = self.norm(self.up(patches)).relu()
        self.num_calls += 1
        means, start = [], 0
        for height, width in grid.tolist():
            image = hidden[start : start + height * width].view(height, width, 16)
            means.append(image.cumsum(0).mean((0, 1)))
            start += height * width
        return self.down(torch.stack(means)).square().mean()


def sample(*grid: tuple[int, int], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    count = sum(height * width for height, width in grid)
    patches = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    return {"patches": patches, "grid": torch.tensor(grid)}


SETS = [((2, 4), (2, 2)), ((3, 4),), ((1, 2), (2, 3), (2, 2))]
"""All have 12 patches, so that only the values of the grid tell them apart, not the shapes."""
ORDER = [0, 1, 0, 2, 1, 2]


def expected() -> dict[str, Tensor]:
    model = Grids()
    optimizer = adamw(model.parameters())
    for step, index in enumerate(ORDER):
        optimizer.zero_grad()
        model(**sample(*SETS[index], seed=step)).backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:forward reads the values")
@pytest.mark.parametrize(
    ("options", "ahead"),
    spread(
        [
            ({"plan_ngpus": 2}, True),
            ({"plan_ngpus": 1, "use_zero": 3}, False),
            pytest.param({"plan_ngpus": 2}, False, marks=pytest.mark.slow),
            pytest.param({"plan_ngpus": 1, "use_zero": 3}, True, marks=pytest.mark.slow),
        ],
        2,
    ),
    ids=str,
)
def test_programs_train_one_set_of_parameters(
    options: dict[str, Any], ahead: bool, tmp_path: Path
) -> None:
    """Parameters and buffers after steps that need one program, then another."""
    config = ComputeConfig(runtime_ngpus=2, grad_reduction="mean", **options)
    policy = "tp" if config.plan_ngpus == 2 else "dp"
    more: dict[str, Any] = {"more_dummy_args": [sample(*grid) for grid in SETS[1:]]}

    def train(rank: int) -> tuple[dict[str, Tensor], ParallelModule]:
        choice = more if ahead else {"max_programs": 3}
        module = parallelize(
            Grids(), sample(*SETS[0]), policy, config, gen_savedir=tmp_path, **choice
        )
        optimizer = build_optimizer(module, adamw, config)
        for step, index in enumerate(ORDER):
            optimizer.zero_grad()
            module(**sample(*SETS[index], seed=step)).backward()
            optimizer.step()
        assert len(module.programs().all) == 3
        found = {d.name: module.weights(d.name).detach() for d in module.declarations}
        # One set of tensors: what a state dict holds is what every program reads.
        other = module.programs().all[1]
        assert all(
            other.weights(name) is module.weights(name)
            for name in ("up.weight", "norm.running_mean")
        )
        with pytest.raises(InputError, match="'grid'"):
            module(**sample((1, 12)))
        return found, module

    wholes = expected()
    for found, module in run_ranks(2, train):
        for declaration in module.declarations:
            name, ranks = declaration.name, module.ranks_of(declaration)
            if name in wholes:
                piece = local_piece(wholes[name], declaration.layout, ranks.mesh, ranks.coords)
                parity.assert_close_tree({name: found[name]}, {name: piece})
        assert any(declaration.layout.cut_axes for declaration in module.declarations)


@pytest.mark.filterwarnings("ignore:forward reads the values")
def test_ranks_that_need_different_programs(tmp_path: Path) -> None:
    """Nobody runs anything: the ranks of a unit would wait for each other in other collectives."""
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)

    def call(rank: int) -> str:
        module = parallelize(
            Grids(),
            sample(*SETS[0]),
            "tp",
            config,
            gen_savedir=tmp_path,
            more_dummy_args=[sample(*SETS[1])],
        )
        with pytest.raises(InputError) as error:
            module(**sample(*SETS[current_world().rank]))
        module(**sample(*SETS[1]))
        return str(error.value)

    assert run_ranks(2, call)[1] == (
        "the arguments of this call of Grids need different programs on different ranks\n"
        "  why:   this rank needs program 1 of 2; ranks that send to each other run the same one\n"
        "  try:   give all ranks of a unit the same values of grid"
    )


class Layers(nn.Module):
    """Layers that two stages share out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def test_a_pipeline_has_one_program(tmp_path: Path) -> None:
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config={"num_microbatches": 2}
    )
    with pytest.raises(PlanError) as error:
        parallelize(
            Layers(),
            {"x": torch.zeros(2, 4)},
            "pp",
            config,
            gen_savedir=tmp_path,
            load_module=False,
            more_dummy_args=[{"x": torch.zeros(3, 4)}],
        )
    assert str(error.value) == (
        "a pipeline has one program, and several sets of dummy arguments were given\n"
        "  why:   every program would have stages of its own, with other parameters on a rank\n"
        "  try:   name the sizes that vary in ComputeConfig(dynamic_dims=...), compile each set "
        "under an instance_name of its own, or take a policy without stages"
    )


class Ends(nn.Module):
    """Reads a vector of lengths, which does not look like a table of sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        ends = [row[:size].square().sum() for row, size in zip(self.layer(x), lengths, strict=True)]
        return torch.stack(ends).sum()


@pytest.mark.filterwarnings("ignore:forward reads the values")
@pytest.mark.parametrize("ahead", [False, True])
def test_programs_are_told_apart_by_inputs_that_were_found(ahead: bool, tmp_path: Path) -> None:
    """Each set of lengths has files of its own, and the same ones again in the next job."""
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sets = [{"x": x, "lengths": torch.tensor(sizes)} for sizes in ([1, 2], [3, 6], [5, 2])]
    choice: dict[str, Any] = {"more_dummy_args": sets[1:]} if ahead else {"max_programs": 3}
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)

    def call(rank: int) -> list[Tensor]:
        module = parallelize(Ends(), sets[0], "tp", config, gen_savedir=tmp_path, **choice)
        return [module(**one).detach() for one in (*sets, *sets)]

    for _ in range(2):
        for found in run_ranks(2, call):
            expected = [Ends()(**one).detach() for one in (*sets, *sets)]
            parity.assert_close_tree(dict(enumerate(found)), dict(enumerate(expected)))
        assert len(list(tmp_path.rglob("programs/*/manifest.json"))) == 2
