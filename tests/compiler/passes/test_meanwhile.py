"""Work behind messages that were started: what is put there, what is refused, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.passes.verify_overlap import check_order
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
from shardwright.compiler.plan.repeated_blocks import writes
from shardwright.experts import combine, dispatch, grouped_linear
from shardwright.runtime import started
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InternalError

HIDDEN, EXPERTS = 8, 4


class Layer(nn.Module):
    """Experts, and a shared expert in front of the router or behind the experts."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN)) for _ in range(2))
        self.wide = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.narrow = nn.Linear(2 * HIDDEN, HIDDEN)

    def shared(self, x: Tensor) -> Tensor:
        y = self.wide(x).relu()
        if self.place == "noisy":
            y = F.dropout(y, 0.5)
        return self.narrow(y)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.shared(x) if self.place in ("front", "noisy") else None
        gains, chosen = self.router(x).softmax(-1).topk(2)
        rows, of_rows, routing = dispatch(x, chosen, gains, num_experts=EXPERTS)
        made = grouped_linear(grouped_linear(rows, self.up, routing).relu(), self.down, routing)
        y = combine(made * of_rows.unsqueeze(-1), routing)
        if beside is None:
            beside = self.shared(x)
        return x + y + beside


class Model(nn.Module):
    """Two such layers and a loss."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(place) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


class Towers(nn.Module):
    """Two branches that do not need each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left_up, self.right_up = (nn.Linear(HIDDEN, 16) for _ in range(2))
        self.left_down, self.right_down = (nn.Linear(16, HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        left = self.left_down(self.left_up(x).relu()).sin()
        return (left + self.right_down(self.right_up(x).relu())).pow(2).sum()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(12, HIDDEN, generator=generator, dtype=torch.float64)}


def compiled(
    model: nn.Module, policy: str = "ep", *, overlaps: bool = True, size: int = 2, **options: object
) -> Compiled:
    graph = plans.traced(model.double(), inputs())
    return plans.compile_with(graph, policy, size, overlap_communication=overlaps, **options)


def program_of(model: nn.Module, **options: object) -> Program:
    program = compiled(model, **options).program  # type: ignore[arg-type]
    assert isinstance(program, Program)
    return program


def name_of(instruction: Instruction) -> str:
    return instruction.original.name if isinstance(instruction, Compute) else ""


def windows(program: Program) -> dict[str, list[str]]:
    """What runs behind each message that is started."""
    found = {}
    for position, message in enumerate(program.body):
        if isinstance(message, Adapt | Compute) and message.meanwhile:
            inside = program.body[position + 1 : position + 1 + message.meanwhile]
            found[writes(message)[0].name] = [name_of(i) for i in inside]
    return found


@pytest.mark.parametrize("place", ["front", "behind"])
def test_a_shared_expert_runs_behind_both_messages(place: str) -> None:
    found = windows(program_of(Model(place)))
    assert len(found) == 4
    there, back, *_ = found.values()
    assert "layers_0_wide" in there and "layers_0_narrow" in back


def test_what_draws_numbers_stays_and_so_does_what_it_needs() -> None:
    found = windows(program_of(Model("noisy"), rng="fast"))
    assert list(found.values()) == [["layers_0_narrow"], ["layers_1_narrow"]]


def test_a_branch_runs_behind_the_sum_of_another() -> None:
    found = windows(program_of(Towers(), policy="tp"))
    assert any("right_up" in inside for inside in found.values())


def test_nothing_is_started_where_nothing_can_run_meanwhile() -> None:
    plain = program_of(Model("front"), overlaps=False)
    assert not windows(plain)
    chain = nn.Sequential(nn.Linear(HIDDEN, 16), nn.ReLU(), nn.Linear(16, HIDDEN))
    graph = plans.traced(chain.double(), {"input": inputs()["x"]})
    program = plans.compile_with(graph, "tp", 2, overlap_communication=True).program
    assert isinstance(program, Program) and not windows(program)


# What does not fit. Each mutation changes the body of a right program.


def _waits_too_late(body: list[Instruction], at: int) -> None:
    body[at] = replace(body[at], meanwhile=body[at].meanwhile + 1)  # type: ignore[union-attr,call-arg]


def _needs_it(body: list[Instruction], at: int) -> None:
    """An operator that reads the rows goes in front of what waits for them."""
    reader = next(i for i in body[at:] if name_of(i).startswith("layers_0_grouped_linear"))
    body.remove(reader)
    body.insert(at + 1, reader)


def _starts_a_product(body: list[Instruction], at: int) -> None:
    router = next(k for k, i in enumerate(body) if name_of(i) == "layers_0_router")
    body[router] = replace(body[router], meanwhile=1)  # type: ignore[call-arg]


def _outlasts_its_layer(body: list[Instruction], at: int) -> None:
    last = max(k for k, i in enumerate(body) if name_of(i).startswith("layers_0_"))
    body[at] = replace(body[at], meanwhile=last - at + 1)  # type: ignore[call-arg]


def _starts_two(body: list[Instruction], at: int) -> None:
    """The sums of the experts start while their tokens are under way."""
    back = next(k for k in range(at + 1, len(body)) if getattr(body[k], "meanwhile", 0))
    body[at] = replace(body[at], meanwhile=back - at)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("mutation", "says"),
    [
        (_waits_too_late, "which is under way"),
        (_needs_it, "which is under way"),
        (_starts_a_product, "cannot be started early"),
        (_outlasts_its_layer, "under way"),
        (_starts_two, "under way"),
    ],
)
def test_what_does_not_fit_is_noticed(
    mutation: Callable[[list[Instruction], int], None], says: str
) -> None:
    program = program_of(Model("front"))
    verify_program(program)
    body = list(program.body)
    mutation(body, next(k for k, i in enumerate(body) if getattr(i, "meanwhile", 0)))
    with pytest.raises(InternalError, match=says):
        verify_program(replace(program, body=tuple(body)))


def test_draws_keep_their_order() -> None:
    """Also where messages are under way, and other operators overtake each other."""

    class Noise(Layer):
        def shared(self, x: Tensor) -> Tensor:
            return self.narrow(F.dropout(F.dropout(self.wide(x), 0.5) * 2, 0.5))

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Noise("front"), Noise("front")

        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) * self.second(x)).sum()

    program = program_of(One(), rng="fast")
    body = list(program.body)

    def of(name: str) -> list[Instruction]:
        """What the second layer does up to its last draw; nothing of it needs the first layer."""
        return [i for i in body if name_of(i).startswith(name)]

    drawn = max(k for k, i in enumerate(of("second")) if _draws(i))
    moved = of("second")[: drawn + 1]
    rest = [i for i in body if not any(i is m for m in moved)]
    at = next(k for k, i in enumerate(rest) if name_of(i).startswith("first"))
    with pytest.raises(InternalError, match="in its order"):
        check_order(replace(program, body=(*rest[:at], *moved, *rest[at:])))


def _draws(instruction: Instruction) -> bool:
    rule = instruction.original.rule if isinstance(instruction, Compute) else None
    return rule is not None and rule.random


def test_hidden_messages_cost_no_time() -> None:
    machine = load_hardware("h100", num_devices=2)
    costs = []
    for overlaps in (False, True):
        config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, overlap_communication=overlaps)
        program = compiled(Model("front"), overlaps=overlaps).program
        costs.append(audit(program, config, machine))
    (before,), (after,) = ([cost.ranks[0]] for cost in costs)
    assert after.compute_s == pytest.approx(before.compute_s, rel=1e-12)
    assert after.comm_bytes == before.comm_bytes
    saved = before.comm_s["ep all_to_all"] - after.comm_s["ep all_to_all"]
    assert 0 < saved < before.comm_s["ep all_to_all"]
    assert costs[0].step_s - costs[1].step_s == pytest.approx(saved, rel=1e-9)


@pytest.mark.parametrize("place", ["front", "behind"])
def test_bits_are_those_of_the_same_order_without(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(place)
    made = compiled(model)
    plans.write(tmp_path, made, model)
    early = plans.run_once(tmp_path, made, inputs())
    names = []

    def at_once(function: Callable[..., Any], *args: Any, **options: Any) -> started.Coming:
        names.append(function.__name__)
        return started.at_once(function, *args, **options)

    monkeypatch.setattr(started, "start", at_once)
    plain = plans.run_once(tmp_path, made, inputs())
    # Two ranks, each with two layers.
    assert sorted(names) == ["combine"] * 4 + ["dispatch"] * 4
    assert torch.equal(early.loss, plain.loss) and early.traffic == plain.traffic
    for parameter, (pieces, _) in early.pieces.items():
        for mine, theirs in zip(pieces, plain.pieces[parameter][0], strict=True):
            assert mine is not None and theirs is not None and torch.equal(mine, theirs), parameter


class Counting(Layer):
    """A shared expert behind a batch norm, whose running mean is read elsewhere, too."""

    def __init__(self) -> None:
        super().__init__("front")
        self.batch_norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        before = self.wide(x - self.batch_norm.running_mean)
        y = super().forward(self.batch_norm(x))
        return y + self.narrow(before + self.wide(self.batch_norm.running_mean))


def test_what_reads_a_buffer_that_is_written_to_stays() -> None:
    program = program_of(Counting(), policy="ep")
    inside = {name for names in windows(program).values() for name in names}
    read = [
        name_of(i)
        for i in program.body
        if isinstance(i, Compute) and any("mean" in value.name for value in i.op.operands)
    ]
    assert inside and len(read) > 1 and not inside & set(read)
