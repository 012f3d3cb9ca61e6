"""Inputs whose values decide sizes: declared as constants, or found where they look like tables of
sizes, or where sizes are read from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tolist": lambda h, n: [h[row, :size].sum() for row, size in enumerate(n.tolist())],
    "split": lambda h, n: [
        piece.square().sum() for piece in h.flatten(0, 1).split((4 * n).tolist())
    ],
    "int": lambda h, n: [h[:, : int(n.max())].sum()],
    "item": lambda h, n: [h[:, : n[0].item()].sum()],
    "bound": lambda h, n: [row[:size].sum() for row, size in zip(h, n, strict=True)],
    "written": lambda h, n: [h.clone().index_put_((n - n,), h[0]).sum(), _emptied(h, n).sum()],
    "range": lambda h, n: [h[:, place].sum() for place in range(n[1])],
    "factory": lambda h, n: [h.new_ones(n.max()).sum() * h.sum(), torch.arange(n[2]).sum() * h],
    "size": lambda h, n: [h[:, :4].reshape(n[1], -1).cumsum(0).sum()],
    "repeats": lambda h, n: [h[:, 0].repeat_interleave(n, 0).cos().sum()],
    "rounded": lambda h, n: [
        h[:, : math.ceil(n.max() / 2)].sum(),
        h[:, : int(n.sum() * 0.5)].sum(),
    ],
    "numpy": lambda h, n: [h[:, : n.numpy().max()].sum()],
    "classes": lambda h, n: [(F.one_hot(n)[:, None, :1] * h).sum()],
}


def _emptied(hidden: Tensor, sizes: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden[0, sizes[0] :] = 0
    return hidden


class Reads(nn.Module):
    """Reads sizes in one way, and then branches by them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.layer = way, nn.Linear(4, 6).double()

    def forward(self, x: Tensor, sizes: dict[str, Tensor]) -> Tensor:
        hidden = self.layer(x).tanh()
        total = sum(part.square().mean() for part in WAYS[self.way](hidden, sizes["n"]))
        return total * 2 if sizes["n"].max() > 4 else total  # known by now


SIZES = torch.tensor([2, 4, 6])
"""Twelve in all, so that ``4 * n`` cuts 48 rows."""


def reading(sizes: Tensor = SIZES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 16, 4, dtype=torch.float64, generator=generator)
    return {"x": x, "sizes": {"n": sizes}}


@pytest.mark.parametrize("way", WAYS)
def test_integers_that_sizes_are_read_from_are_found(way: str) -> None:
    with pytest.warns(UserWarning) as said:
        report = verify(Reads(way), reading(), "tp", {"plan_ngpus": 2, "runtime_ngpus": 4}, steps=1)
    assert report.ok, report
    assert [str(one.message) for one in said if "reads the values" in str(one.message)] == [
        "forward reads the values of sizes.n: those of the dummy arguments are compiled in, and a "
        "call with others is refused, or gets a program of its own: made when it comes "
        "(max_programs=8), or ahead (more_dummy_args=[...]); "
        'ComputeConfig(constants={"sizes.n": ...}) declares that and silences this notice'
    ]


@pytest.mark.filterwarnings("ignore:forward reads the values")
def test_found_integers_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    graph = plans.traced(Reads("tolist"), reading())
    compiled = plans.compile_with(graph, "data", 2)
    plans.write(tmp_path, compiled, Reads("tolist"))
    torch.testing.assert_close(
        plans.run_once(tmp_path, compiled, reading()).loss,
        Reads("tolist")(**reading()),
        rtol=1e-12,
        atol=0,
    )
    with pytest.raises(
        InputError,
        match=r"'sizes.n' has other values .*\n.*it is \[4, 2, 6\], compiled as \[2, 4, 6\]",
    ):
        plans.run_once(tmp_path, compiled, reading(torch.tensor([4, 2, 6])))


class Branches(Reads):
    def forward(self, x: Tensor, sizes: dict[str, Tensor]) -> Tensor:
        return self.layer(x).sum() * (2 if sizes["n"].max() > 4 else 1)


class Repeats(nn.Module):
    """Repeats tokens, which are integers, too, but no sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids: Tensor, sizes: Tensor) -> Tensor:
        tokens = ids[0, :3].repeat_interleave(sizes)
        return self.table(tokens).square().mean() + ids[:, : sizes.max()].float().mean()


@pytest.mark.parametrize(
    ("model", "sizes", "dims"),
    [
        pytest.param(Branches("int"), SIZES, {}, id="a branch"),
        pytest.param(Reads("int"), SIZES > 3, {}, id="truth values"),
        pytest.param(Reads("int"), SIZES, {"sizes.n": {0: "b"}, "x": {0: "b"}}, id="a dynamic dim"),
        pytest.param(Reads("int"), SIZES.to("meta"), {}, id="no values"),
    ],
)
def test_what_must_be_declared(model: nn.Module, sizes: Tensor, dims: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match=r'declare so.*constants=\{"sizes.n": \[...\]\}'):
        trace(model, reading(sizes), dynamic_dims=dims)
    if not sizes.is_meta and not dims:
        constants = {"sizes.n": sizes.tolist()}
        assert trace(model, reading(sizes), constants=constants).constant_inputs


def test_numbers_with_fractions_and_tokens_make_no_constants() -> None:
    with pytest.raises(TraceError, match="apply a mask|use the tensor itself as an index"):
        trace(Reads("int"), reading(SIZES.double()))
    tokens = {"ids": torch.tensor([[3, 1, 4, 1, 5, 8]]), "sizes": torch.tensor([1, 2, 4])}
    with pytest.warns(UserWarning, match="reads the values of sizes:"):
        graph = trace(Repeats(), tokens)
    assert [name for name, _ in graph.constant_inputs] == ["sizes"]


def test_a_mask_that_a_size_is_read_from() -> None:
    given = {"x": torch.rand(2, 8), "mask": MASK.repeat(1, 3)[:, :8]}
    with pytest.warns(UserWarning, match="reads the values of mask:"):
        assert trace(Lengths(), given).constant_inputs
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
