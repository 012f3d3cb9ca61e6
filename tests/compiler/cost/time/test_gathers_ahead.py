"""What gathers of weights cost that the runtime starts one weight ahead: those, and no others, are
hidden behind what the device computes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plans
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.compiler.compile import Compiled, compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.local_calls import local_shape
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.time import body_time as body_times
from shardwright.compiler.cost.time.body_time import BodyTime, body_time
from shardwright.compiler.plan.program import Program, gathers_at
from shardwright.policies.known_policies import find_policy
from shardwright.runtime import gathered_weights
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world

WIDTH, ROWS, BYTES_PER_S = 100, 100, 1e6
PRODUCT_S = 2 * ROWS * WIDTH**2 / 1e9
GATHER_S = 4 * WIDTH**2 / 2 / BYTES_PER_S  # half of a weight comes from the other rank


def machine(bytes_per_s: float = BYTES_PER_S, **device: Any) -> Hardware:
    """Two devices on which only products and messages take time."""
    found = replace(Device("toy", 10**12, {"float32": 1e9}, 1e15, 0.0), **device)
    return Hardware("toy", found, (Tier("link", (2,), 0.0, bytes_per_s),))


class Net(nn.Module):
    """Linear layers one after the other, the ``apart`` in a module of their own."""

    def __init__(self, widths: tuple[int, ...], apart: int = 0) -> None:
        super().__init__()
        layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
        self.first, self.second = layers[0], layers[1]
        self.apart = nn.Sequential(*layers[2 : 2 + apart])
        self.third, self.last = layers[2 + apart :]

    def forward(self, x: Tensor) -> Tensor:
        x = self.apart(self.second(self.first(x)))
        return self.last(self.third(x)).sum()


def compiled(model: nn.Module, width: int, **options: Any) -> tuple[Compiled, ComputeConfig]:
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2, use_zero=3, pas_config=options)
    graph = plans.traced(model, {"x": torch.randn(ROWS, width)})
    return compile_graph(graph, find_policy("dp").apply, config, policy_name="dp"), config


def body(hardware: Hardware, *, ahead: bool = True, **options: Any) -> BodyTime:
    found, _ = compiled(Net((WIDTH,) * 5), WIDTH, **options)
    assert isinstance(found.program, Program)
    return body_time(found.program, hardware, (0,), gathers_ahead=ahead)


def test_gathers_of_all_but_the_first_weight_are_hidden() -> None:
    """Products take 2 ms, gathers 20 ms, and a gradient's reduce-scatter as long. The first weight
    of each direction is waited for whole. (The first layer's input takes no gradient, so backward
    does not gather its weight.)
    """
    found, waited = body(machine()), body(machine(), ahead=False)
    assert waited.forward_s == pytest.approx(4 * (GATHER_S + PRODUCT_S), rel=1e-4)
    assert found.forward_s == pytest.approx(4 * GATHER_S + PRODUCT_S, rel=1e-4)
    # Of the last, third and second weight; the two products of a layer hide the next one's.
    assert waited.backward_s == pytest.approx(7 * GATHER_S + 7 * PRODUCT_S, rel=1e-4)
    assert found.backward_s == pytest.approx(7 * GATHER_S + 3 * PRODUCT_S, rel=1e-4)
    hidden_s = 3 * PRODUCT_S + 4 * PRODUCT_S
    gathered_s = waited.comm_s["zero all_gather"] - found.comm_s["zero all_gather"]
    assert gathered_s == pytest.approx(hidden_s, rel=1e-4)
    assert found.comm_s["zero reduce_scatter"] == waited.comm_s["zero reduce_scatter"]


def test_what_is_computed_hides_no_more_than_there_is() -> None:
    fast = 100 * BYTES_PER_S  # gathers of 0.2 ms behind products of 2 ms
    found = body(machine(fast))
    assert found.comm_s["zero all_gather"] == pytest.approx(2 * GATHER_S / 100, rel=1e-4)
    half = body(machine(fast, overlap=0.5))
    assert half.comm_s["zero all_gather"] == pytest.approx(4.5 * GATHER_S / 100, rel=1e-4)


def test_a_region_that_runs_again_gathers_ahead() -> None:
    """Two layers run again together. The layers around them are as without a region."""
    model = Net((WIDTH,) * 7, apart=2)
    found, _ = compiled(model, WIDTH, recompute=("apart",))
    assert isinstance(found.program, Program)
    ahead, waited = (
        body_time(found.program, machine(), (0,), gathers_ahead=ahead) for ahead in (True, False)
    )
    assert ahead.forward_s == pytest.approx(waited.forward_s - 5 * PRODUCT_S, rel=1e-4)
    # The two products of a layer behind the region hide the gather of the layer before it, be it in
    # the region. There the product of the first layer's second run hides the second one's gather;
    # that product, and the two of its backward, hide that of the layer before the region.
    hidden_s = waited.backward_s - ahead.backward_s
    assert hidden_s == pytest.approx((2 + 2 + 1 + 3) * PRODUCT_S, rel=1e-4)
    again_s = waited.recomputed_s - ahead.recomputed_s
    assert again_s == pytest.approx(hidden_s, rel=1e-4)


def test_an_audit_prices_a_step_with_its_gathers_ahead() -> None:
    found, config = compiled(Net((WIDTH,) * 5), WIDTH)
    ahead, waited = (
        audit(found.program, config, machine(), num_microbatches=3, gathers_ahead=ahead)
        for ahead in (True, False)
    )
    assert waited.step_s - ahead.step_s == pytest.approx(3 * 7 * PRODUCT_S, rel=1e-4)
    assert ahead == audit(found.program, config, machine(), num_microbatches=3)


@pytest.mark.parametrize(
    ("recompute", "count"),
    [((), 4), (("apart",), 4), (("second", "apart", "last"), 4), (("first", "second", "apart"), 5)],
)
def test_what_is_hidden_is_what_ranks_start_early(
    recompute: tuple[str, ...], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks note each gather that begins before another product than the one that needs it."""
    widths = (8, 16, 24, 40, 56, 72, 88)  # each weight is known by its shape
    model = Net(widths, apart=2)
    found, _ = compiled(model, widths[0], recompute=recompute)
    program = found.program
    assert isinstance(program, Program)
    priced: list[dict[int, tuple[float, float]]] = []
    hidden_ahead = body_times.hidden_ahead
    monkeypatch.setattr(
        body_times,
        "hidden_ahead",
        lambda *args: priced.append(hidden_ahead(*args)) or priced[-1],  # type: ignore[func-returns-value]
    )
    body_time(program, machine(), (0,))
    expected = set()
    for position, seconds in priced[0].items():
        gathers = gathers_at(program.body, position)
        mesh = program.plan.storage_mesh
        shapes = tuple(tuple(local_shape(gather.step.before, mesh)) for gather in gathers)
        phases = zip(("forward", "backward"), seconds, strict=True)
        expected |= {(phase, shapes) for phase, hidden_s in phases if hidden_s}
    plans.write(tmp_path, found, model)
    x = torch.randn(ROWS, widths[0])
    notes: dict[int, Noted] = {}
    start = gathered_weights._Batch.start

    def on_rank(rank: int) -> set[Gather]:
        part = load_class(tmp_path)()
        part(x).backward()  # the order of weights is known from now on
        with Noted() as notes[rank]:
            loss = part(x)
            notes[rank].phase = "backward"
            loss.backward()
        return notes[rank].early

    def started(batch: Any, phase: str) -> Any:
        wholes, noted = start(batch, phase), notes.get(current_world().rank)
        return wholes if noted is None else noted.until_there(batch, wholes)

    monkeypatch.setattr(gathered_weights._Batch, "start", started)
    for early in run_ranks(2, on_rank):
        assert early == expected
    # In backward all but the last weight; the first one is gathered again in a region alone.
    assert sum(phase == "backward" for phase, _ in expected) == count


Gather = tuple[str, tuple[tuple[int, ...], ...]]
"""The phase of a gather, and the shapes of the pieces that it gathers."""


class Noted(TorchDispatchMode):
    """Notes the gathers with a product between their start and their end."""

    def __init__(self) -> None:
        super().__init__()
        self.early: set[Gather] = set()
        self.products, self.phase = 0, "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))

    def until_there(self, batch: Any, wholes: Any) -> Any:
        """What has been started, with a note when it is waited for."""
        before, wait = self.products, wholes.wait
        gather = self.phase, tuple(tuple(piece.shape) for piece in batch.pieces)

        def waited() -> Any:
            if self.products > before:
                self.early.add(gather)
            return wait()

        return SimpleNamespace(wait=waited)
