"""Inputs whose values decide sizes: declared as constants, or found where they look like tables of
sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import ConfigError, InputError, TraceError

GRIDS = torch.tensor([[2, 2], [1, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


class Grids(nn.Module):
    """Reads grids in the ways that models of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.table = nn.Embedding(8, 6)

    def forward(self, patches: Tensor, grids: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is not None and labels.max() > 100:
            raise ValueError("no such class")
        places = torch.cat([torch.arange(height * width) for height, width in grids.tolist()])
        owner = torch.repeat_interleave(torch.arange(len(grids)), grids.prod(-1))
        cut = F.pad(grids.prod(-1).cumsum(0), (1, 0))
        hidden = self.layer(patches) + self.table(places) + owner[:, None]
        rows = hidden.split((grids[:, 0] * grids[:, 1]).tolist())
        inside = torch.arange(int(cut[-1])) < cut[1]
        return (
            torch.stack([row.square().mean() for row in rows]).sum()
            + (hidden * inside[:, None]).sum()
        )


def arguments(**other: Any) -> dict[str, Any]:
    return {"patches": torch.rand(8, 4, dtype=torch.float64), "grids": GRIDS, **other}


def test_a_table_of_sizes_is_found_and_said() -> None:
    with pytest.warns(
        UserWarning, match=r"forward reads the values of grids.*constants=\{\"grids\": \.\.\.\}"
    ):
        graph = trace(Grids(), arguments())
    assert [name for name, _ in graph.constant_inputs] == ["grids"]


def test_declared_constants_are_silent(recwarn: pytest.WarningsRecorder) -> None:
    graph = trace(Grids(), arguments(), constants={"grids": GRIDS.tolist()})
    assert torch.equal(dict(graph.constant_inputs)["grids"], GRIDS)
    assert not recwarn.list


def test_a_check_of_values_makes_no_constant() -> None:
    labels = torch.tensor([[1, 2], [3, 4]])
    with pytest.warns(UserWarning, match="leaves out a check of values"):
        graph = trace(Grids(), arguments(labels=labels), constants={"grids": GRIDS.tolist()})
    assert [name for name, _ in graph.constant_inputs] == ["grids"]


def test_a_mask_of_short_rows_makes_no_constant() -> None:
    class Chooses(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return x[labels >= 0].sum() + labels[labels > 0].sum()

    given = {
        "x": torch.rand(2, 3, dtype=torch.float64),
        "labels": torch.tensor([[1, 2, -1], [0, -1, -1]]),
    }
    assert not traced(Chooses(), given, exact=False).constant_inputs


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        longest = int(mask.sum(-1).max())
        return x[:, :longest].sum() * self.scale


def test_other_inputs_must_be_declared() -> None:
    given = {"x": torch.rand(2, 4), "mask": MASK.repeat(1, 3)[:, :8]}
    with pytest.raises(
        TraceError,
        match=r'if mask is the same in every call, declare so.*constants=\{"mask": \[...\]\}',
    ):
        trace(Lengths(), given)
    assert trace(Lengths(), given, constants={"mask": given["mask"].tolist()}).constant_inputs


class Lasting(nn.Module):
    """Repeats each sound of a text for the frames it lasts, as FastSpeech 2 does it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, text: Tensor, durations: Tensor) -> Tensor:
        hidden = self.up(text)
        frames = hidden.new_zeros(len(text), durations.sum(1).max(), 6)
        for row, (sounds, lasts) in enumerate(zip(hidden, durations, strict=True)):
            repeated = torch.repeat_interleave(sounds, lasts, dim=0)
            frames[row, : repeated.size(0)] = repeated
        all_of_them = text.flatten(0, 1).repeat_interleave(durations.flatten(), 0)
        return self.down(frames.tanh()).square().mean() + self.up(all_of_them).cos().mean()


def test_elements_are_repeated_as_often_as_constants_say() -> None:
    durations = torch.tensor([[2, 0, 3], [1, 1, 1]])
    text = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    given = {"text": text, "durations": durations}
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "constants": {"durations": durations.tolist()}}
    report = verify(Lasting(), given, "tp", config, steps=1)
    assert report.ok, report
    graph = trace(Lasting(), given, constants={"durations": durations.tolist()})
    assert not [op for op in graph.ops if op.target == "repeat_interleave"]


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"grid": [[1]]}, "constants names 'grid', which is no tensor among the dummy arguments"),
        ({"patches": [[1]]}, "constants names 'patches', which holds torch.float64"),
        (
            {"grids": [[2, 2], [1, 3]]},
            "the dummy argument 'grids' differs from constants\\['grids'\\]",
        ),
    ],
)
def test_wrong_constants_are_refused(constants: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace(Grids(), arguments(), constants=constants)


@pytest.mark.parametrize("policy", ["tp", "data", "pp"])
def test_the_compiled_module_equals_one_device(policy: str) -> None:
    config = {
        "plan_ngpus": 2,
        "runtime_ngpus": 2,
        "constants": {"grids": GRIDS},
        "use_end2end": policy == "pp",
    }
    assert verify(Grids(), arguments(), policy, config, steps=1).ok


def test_numbers_and_slices_that_follow_from_an_input() -> None:
    class Cuts(nn.Module):
        def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
            pieces = [
                row[: size[0] // 2, : size[1]].mean() for row, size in zip(x, sizes, strict=True)
            ]
            x = x * torch.tensor([pieces[0], 3, pieces[1]])[0]
            x[:, : sizes[0, 1]] = 0
            return x.sum() + torch.zeros(sizes[0, 0], dtype=x.dtype).numel()

    traced(
        Cuts(),
        {"x": torch.rand(2, 6, 5, dtype=torch.float64), "sizes": torch.tensor([[4, 3], [6, 2]])},
    )


@pytest.mark.parametrize("many", [False, True])
def test_every_call_is_checked(many: bool, tmp_path: Path) -> None:
    mask = torch.cat([MASK, torch.zeros(2, 12 if many else 0, dtype=torch.int64)], 1)
    given = {"x": torch.rand(mask.shape, dtype=torch.float64), "mask": mask}
    graph = plans.traced(Lengths(), given, constants={"mask": mask.tolist()})
    compiled = plans.compile_with(graph, "data", 2)
    plans.write(tmp_path, compiled, Lengths())
    torch.testing.assert_close(
        plans.run_once(tmp_path, compiled, given).loss, given["x"][:, :3].sum()
    )
    with pytest.raises(
        InputError, match="argument 'mask' has other values than the module was compiled for"
    ):
        plans.run_once(tmp_path, compiled, {**given, "mask": mask.flip(0)})
