"""What loops over time steps cost, known by short runs of them, is what whole runs say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright.compiler.cost.memory.footprint as footprint
from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.memory.footprint import Footprints, TensorForm
from shardwright.compiler.cost.step_calls import is_long
from shardwright.compiler.cost.time.arithmetic import arithmetic_s
from shardwright.compiler.cost.work_share import _COUNTING
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.time_steps import TIME_STEPS
from shardwright.compiler.passes.rules import attach_rules
from shardwright.compiler.plan.program import Compute
from shardwright.compiler.trace.entry import trace
from shardwright.runtime.layout import Layout, Mesh

ROWS, STEPS, WIDTH = 4, 40, 8


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[0], WIDTH), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.into(x[:, t]) + self.again(state))
            states.append(state)
        return torch.stack(states, 1).square().mean()


@pytest.fixture(scope="module")
def loop() -> IROp:
    graph = attach_rules(trace(Cell(), {"x": torch.zeros(ROWS, STEPS, WIDTH)}))
    return next(op for op in graph.ops if op.target == TIME_STEPS)


@pytest.mark.slow
def test_memory_is_that_of_all_steps(loop: IROp, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Compute(loop, loop, {}, tuple(Layout.whole(v.shape) for v in loop.results))
    forms = [TensorForm.contiguous(v.shape, v.dtype, v.requires_grad) for v in loop.operands]
    incoming = [TensorForm.contiguous(v.shape, v.dtype) for v in loop.results]
    assert is_long(loop)
    short = Footprints(Mesh(()))
    told = short.forward(call, forms), short.backward(call, forms, incoming)
    monkeypatch.setattr(footprint, "is_long", lambda op: False)
    whole = Footprints(Mesh(()))
    forward, backward = whole.forward(call, forms), whole.backward(call, forms, incoming)
    assert told[0].results == forward.results and told[0].peak == forward.peak
    assert told[1].gradients == backward.gradients and told[1].peak == backward.peak
    # What the steps keep is many storages in the one, and a single one in the other.
    first = len(forms)
    kept = [sum(f.made[n - first] for n in f.saved if n >= first) for f in (told[0], forward)]
    assert kept[0] == kept[1] > 0


def test_products_count_in_every_step(loop: IROp) -> None:
    call = local_call(loop, {}, Mesh(()))
    forward, _ = arithmetic_s(call, call.differentiated, _COUNTING)
    assert forward == STEPS * 2 * (2 * ROWS * WIDTH * WIDTH)
