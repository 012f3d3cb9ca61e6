"""Images and sequences that are cut along space and time: loss, gradients, and what is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from covers import spread
from planning import graph_of, mesh_of, request, slow_machine
from torch import Tensor, nn

from shardwright.compiler.cost.edge_messages import edge_messages
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ops.strategy import allowed, layouts, strategies
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.placement.place import Placement, place
from shardwright.runtime.layout import Mesh
from shardwright.runtime.runs import dealt, joined


class Residual(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, num_in), nn.Conv2d(num_in, num_out, 3, padding=1)
        self.skip = nn.Conv2d(num_in, num_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x))) + self.skip(x)


class UNet(nn.Module):
    """One level down, by a stride, and up again, by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left = nn.Conv2d(2, 4, 3, padding=1), Residual(4, 4)
        self.down, self.middle = nn.Conv2d(4, 8, 3, stride=2, padding=1), Residual(8, 8)
        self.right, self.last = Residual(12, 4), nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.left(self.first(x))
        up = F.interpolate(self.middle(self.down(left)), scale_factor=2.0)
        return F.mse_loss(F.max_pool2d(self.last(self.right(torch.cat([up, left], 1))), 2), y)


class Causal(nn.Module):
    """Causal convolutions as models write them, positions from a mask, and labels shifted by
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.cut = nn.Conv1d(6, 6, 4, groups=6, padding=3)
        self.padded = nn.Conv1d(6, 6, 3, dilation=2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        x = x + F.silu(self.cut(x)[..., : ids.shape[1]])
        x = x + self.padded(F.pad(x, (4, 0))).cumsum(-1)
        logits = self.head(x.transpose(1, 2))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Attending(Causal):
    """Attention in the place of the sum, so that positions are dealt in zigzag."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        x = x + F.silu(self.cut(x)[..., : ids.shape[1]])
        x = (x + self.padded(F.pad(x, (4, 0)))).transpose(1, 2).unsqueeze(1)
        x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        logits = self.head(x.squeeze(1))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def image_inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(1, 2, 10, 6, dtype=torch.float64) for name in "xy"}


def text_inputs() -> dict[str, Tensor]:
    return {"ids": torch.randint(11, (1, 13), generator=torch.Generator().manual_seed(0))}


MODELS = {"unet": (UNet, image_inputs), "causal": (Causal, text_inputs)}


def follow(graph: IRGraph, mesh: Mesh, starts: dict[str, dict[str, str]]) -> Plan:
    """The plan in which operators leave values cut as they come: along each axis the first strategy
    that takes its operands as they are. ``starts``: by axis, how the inputs are cut.
    """
    assignments: dict[str, dict[str, str]] = {op.name: {} for op in graph.ops}
    for axis in mesh.names:
        held = dict(starts[axis])
        for op in graph.ops:
            assert op.rule is not None
            for strategy in strategies(op.rule):
                whole = {**assignments[op.name], axis: strategy}
                if strategy in ("R", "G") or not allowed(op.rule, whole, mesh):
                    continue
                operands, results = layouts(op.rule, {axis: strategy}, mesh)
                pairs = list(zip(op.operands, operands, strict=True))
                if any(v.name in held for v, _ in pairs) and all(
                    held.get(v.name, layout.placement(axis)) == layout.placement(axis)
                    for v, layout in pairs
                ):
                    assignments[op.name] = whole
                    for value, layout in zip(op.results, results, strict=True):
                        if layout.placement(axis).startswith("S"):
                            held[value.name] = layout.placement(axis)
                    break
    return Plan(mesh, assignments, {}, policy="follow")


@pytest.mark.parametrize(
    ("name", "mesh", "starts"),
    spread(
        [
            ("unet", "2x2", {"x": {"x": "S(2)", "y": "S(2)"}, "y": {"x": "S(3)", "y": "S(3)"}}),
            ("unet", "3", {"x": {"x": "S(2)", "y": "S(2)"}}),
            ("causal", "3", {"x": {"ids": "S(1)"}}),
            ("causal", "2x2", {"x": {"ids": "S(1)"}, "y": {"ids": "S(1)"}}),
        ],
        2,
        first=1,
    ),
)
def test_everything_is_cut_along_space(
    name: str, mesh: str, starts: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, given = make().double(), inputs()
    graph = graph_of(model, given)
    plan = follow(graph, mesh_of(mesh), starts)
    compiled = plans.compile_plan(graph, plan)
    outcome = plans.check(
        model, given, compiled, tmp_path, plans.reference_run(model, [given], steps=1)
    )
    # Nothing is gathered: inputs are cut, weights are G, losses are summed, and the rest is edges.
    kinds = {step.step.kind for step in compiled.program.adapters()}
    assert kinds <= {"narrow", "grad_all_reduce", "all_reduce"}
    assert compiled.files["gencode0.py"].count("edges=") >= 4
    assert "all_to_all" in {key.collective for found in outcome.traffic for key in found}


@pytest.mark.parametrize(("name", "mesh"), spread([("unet", "3"), ("causal", "3")], 2, first=1))
def test_autodist_cuts_space(name: str, mesh: str, tmp_path: Path) -> None:
    """A batch of one, on devices that take long to compute: there is little else to split."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model, given = make().double(), inputs()
    graph = graph_of(model, given)
    machine = slow_machine(mesh_of(mesh).size, bytes_per_s=1e9)
    found = place(request(graph, mesh_of(mesh), machine))
    assert isinstance(found, Placement)
    compiled = plans.compile_plan(graph, found.plan)
    reference = plans.reference_run(model, [given], steps=1)
    plans.check(model, given, compiled, tmp_path, reference)
    assert "edges=" in compiled.files["gencode0.py"]


@pytest.mark.parametrize(("make", "turns"), [(Causal, 0), (Attending, 1)])
def test_a_sequence_stays_cut_from_inputs_to_loss(
    make: type[Causal], turns: int, tmp_path: Path
) -> None:
    """Policy ``cp`` follows it through padding, slices and the shift of labels."""
    torch.manual_seed(0)
    compiled, _ = plans.check_policy(
        make().double(), text_inputs(), "cp", 3, tmp_path, pas_config={"cp_mode": "ring"}
    )
    assert compiled.plan.mesh.turns_of("cp") == turns
    assert not [step for step in compiled.program.adapters() if step.step.kind == "all_gather"]
    assert not compiled.plan.notes


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 5, stride=2, padding=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).square().sum()


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_only_what_a_rank_lacks_is_sent(turns: int, tmp_path: Path) -> None:
    """Forward and backward, by counting places; the audit tells the busiest rank's bytes."""
    size = 9 if not turns else 29
    model, given = Strided().double(), {"x": torch.randn(1, 2, size, dtype=torch.float64)}
    graph, num_ranks = graph_of(model, given), 4
    mesh = Mesh((("x", num_ranks),), (("x", turns),) if turns else ())
    compiled = plans.compile_plan(graph, follow(graph, mesh, {"x": {"x": "S(2)"}}))
    outcome = plans.check(
        model, given, compiled, tmp_path, plans.reference_run(model, [given], steps=1)
    )
    held, read = [], []
    for rank in range(num_ranks):
        own, made = (
            joined(dealt(count, num_ranks, rank, turns=turns)) for count in (size, size // 2 + 3)
        )
        held.append({at for start, count in own for at in range(start, start + count)})
        # Each run of the result reads what it needs, also what another one reads.
        read.append([2 * first - 4 + at for first, count in made for at in range(2 * count + 3)])
    lacked = [
        [2 * sum(at in held[a] for at in read[b]) for b in range(num_ranks) if b != a]
        for a in range(num_ranks)
    ]
    counted = [_elements(outcome, rank, "forward") for rank in range(num_ranks)]
    assert counted == [sum(sent) for sent in lacked]
    conv = next(op for op in graph.ops if op.target == "conv1d")
    (message,) = edge_messages(
        conv, compiled.program.plan.assignment(conv.name), compiled.plan.mesh
    )
    assert message.forward_bytes == 8 * max(counted)


def _elements(outcome: plans.Outcome, rank: int, phase: str) -> Any:
    return sum(
        volume.elements
        for key, volume in outcome.traffic[rank].items()
        if key.phase == phase and key.collective == "all_to_all"
    )
