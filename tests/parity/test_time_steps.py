"""Loops over time steps that a model writes in Python: one operator, right under every plan."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covers import spread
from torch import Tensor, nn

from shardwright import ComputeConfig, parallelize
from shardwright.compiler.ir.time_steps import TIME_STEPS
from shardwright.compiler.trace.entry import trace
from shardwright.frontend.verification.verify import verify


def inputs(steps: int = 20) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (4, steps, 8)
    return {
        "x": torch.randn(shape, generator=generator),
        "y": torch.randn(shape, generator=generator),
    }


class Gru(nn.Module):
    """A cell of one's own; the first step, which has no state yet, is unlike the others."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(8, 24), nn.Linear(8, 24, bias=False)

    def cell(self, state: Tensor, x: Tensor) -> Tensor:
        reset, update, new = self.w(x).chunk(3, 1)
        old_reset, old_update, old_new = self.u(state).chunk(3, 1)
        gate = torch.sigmoid(update + old_update)
        new = torch.tanh(new + torch.sigmoid(reset + old_reset) * old_new)
        return (1 - gate) * new + gate * state

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state, states = None, []
        for t in range(x.shape[1]):
            state = torch.tanh(x[:, t]) if state is None else self.cell(state, x[:, t])
            states.append(state)
        return F.mse_loss(torch.stack(states, 1), y) + state.sum()


class Backwards(Gru):
    """Reversed time into a tensor of one's own, rows of different lengths."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state, out = x.new_zeros(x.shape[0], 8), torch.zeros_like(y)
        lengths = torch.tensor([20, 7, 13, 2])
        for t in range(x.shape[1] - 1, -1, -1):
            state = torch.where((t < lengths)[:, None], self.cell(state, x[:, t]), state)
            out[:, t] = state
        return F.mse_loss(out, y)


class BothWays(Gru):
    """Two loops in one, the second over reversed time, whose results are put in front."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        there = back = x.new_zeros(x.shape[0], 8)
        first, second = [], []
        for t in range(x.shape[1]):
            there = self.cell(there, x[:, t])
            first.append(there)
            back = self.cell(back, x[:, -1 - t])
            second.insert(0, back)
        return F.mse_loss(torch.stack(first, 1) * torch.stack(second, 1), y)


class Lstm(nn.Module):
    """Two layers, each with a tuple of states, over the pieces of ``unbind``."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(8, 8) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for cell in self.cells:
            state = x.new_zeros(x.shape[0], 8), x.new_zeros(x.shape[0], 8)
            states = []
            for x_t in x.unbind(1):
                state = cell(x_t, state)
                states.append(state[0].unsqueeze(1))
            x = torch.cat(states, 1)
        return F.mse_loss(x, y) + state[1].mean()


class StateSpace(nn.Module):
    """A selective scan, written out: its channels are computed one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mixed = nn.Linear(8, 16), nn.Linear(8, 6)
        self.a, self.skip = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.ones(8))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u, dt = self.into(x).chunk(2, -1)
        dt, decay = F.softplus(dt), -torch.exp(self.a)
        b, c = self.mixed(x).chunk(2, -1)
        state, out = torch.zeros(x.shape[0], 8, 3, dtype=x.dtype), torch.empty_like(u)
        for t in range(x.shape[1]):
            state = torch.exp(dt[:, t, :, None] * decay) * state
            state = state + dt[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
            out[:, t] = (state * c[:, t, None]).sum(-1) + self.skip * u[:, t]
        return F.mse_loss(self.out(out), y)


class Heads(nn.Module):
    """Linear attention with a state for each head, and its normaliser."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(8, 24), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows, steps, _ = x.shape
        q, k, v = self.qkv(x).view(rows, steps, 3, 2, 4).unbind(2)
        gate = torch.sigmoid(self.gate(x))
        state, norm, out = x.new_zeros(rows, 2, 4, 4), x.new_zeros(rows, 2, 4), []
        for t in range(steps):
            state = state * gate[:, t, :, None, None] + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(
                -2
            )
            norm = norm * gate[:, t, :, None] + k[:, t]
            read = torch.einsum("bhk,bhkv->bhv", q[:, t], state)
            out.append(read / (1 + (q[:, t] * norm).sum(-1, keepdim=True).abs()))
        return F.mse_loss(self.out(torch.stack(out, 1).reshape(rows, steps, 8)), y)


class TwoBack(nn.Module):
    """Each step reads the two before it; single steps are read beside all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.a, self.c = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = self.linear(x)
        inputs, made = [mixed[:, t] for t in range(x.shape[1])], [x[:, 0], x[:, 1]]
        for t in range(2, x.shape[1]):
            made.append(torch.tanh(self.a * made[-1] + self.c * made[-2] + inputs[t] + x[:, t - 1]))
        return F.mse_loss(torch.stack(made, 1), y) + made[3].mean() + made[-1].square().sum()


class Losses(nn.Module):
    """Nothing is kept of the steps but the sum of their losses, and the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss, state = x.new_zeros(()), x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            state = torch.tanh(self.linear(x[:, t]) + 0.5 * state)
            loss = loss + F.mse_loss(state, y[:, t])
        return loss / x.shape[1] + state.square().mean()


class Pieces(nn.Module):
    """Steps of four places each, of ``split`` and of slices; two loops, the second reads the
    first one's steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 8), nn.Parameter(torch.rand(8, 8) * 0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, found = x.new_zeros(x.shape[0], 8, 8), []
        for piece in x.split(4, 1):
            found.append(piece @ memory + self.linear(piece))
            memory = 0.9 * memory + piece.transpose(1, 2) @ piece * self.gain
        state, made = x.new_zeros(x.shape[0], 4, 8), []
        for number, start in enumerate(range(0, x.shape[1], 4)):
            state = torch.tanh(state + x[:, start : start + 4] + found[number])
            made.append(state)
        return F.mse_loss(torch.cat(made, 1), y)


def num_loops(model: nn.Module, given: dict[str, Tensor]) -> int:
    return sum(op.target == TIME_STEPS for op in trace(model, given).ops)


CASES: list[tuple[type[nn.Module], int, int, tuple[str, ...]]] = [
    (Gru, 20, 1, ("data",)),
    (Backwards, 20, 1, ("tp",)),
    (BothWays, 20, 1, ("data",)),
    (Lstm, 20, 2, ("data",)),
    (StateSpace, 20, 1, ("tp", "data")),
    (Heads, 20, 1, ("tp", "data")),
    (TwoBack, 20, 1, ("tp",)),
    (Losses, 20, 1, ("data",)),
    (Pieces, 64, 2, ("data",)),
]


@pytest.mark.parametrize(
    ("model", "steps", "loops", "policies"),
    spread(
        [
            pytest.param(*case, marks=pytest.mark.slow if case[0] in (BothWays, StateSpace) else ())
            for case in CASES
        ],
        2,
    ),
)
def test_a_loop_is_one_operator_and_computes_what_the_model_does(
    model: type[nn.Module], steps: int, loops: int, policies: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    made, given = model(), inputs(steps)
    assert num_loops(made, given) == loops
    for policy in policies:
        config = {"plan_ngpus": 2, "runtime_ngpus": 2}
        report = verify(made, given, policy, config, steps=2)
        assert report.ok, f"{policy}: {report}"


@pytest.mark.parametrize(
    ("model", "policy"),
    spread([(Losses, "data"), (StateSpace, "data"), (StateSpace, "tp"), (Heads, "tp")], 2),
)
def test_ranks_share_the_work_of_a_loop(model: type[nn.Module], policy: str) -> None:
    """None of them says that each rank does much more than its part. Three ranks share four rows
    or eight channels unevenly.
    """
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ranks = 3 if policy == "data" else 2
        config = {"plan_ngpus": ranks, "runtime_ngpus": ranks}
        assert verify(model(), inputs(), policy, config, steps=1).ok
    assert not [str(w.message) for w in told if "does much more" in str(w.message)]


def generated(model: nn.Module, steps: int, folder: Path, policy: str = "tp") -> str:
    parallelize(
        model,
        inputs(steps),
        policy,
        ComputeConfig(plan_ngpus=2, runtime_ngpus=2),
        gen_savedir=folder,
        load_module=False,
    )
    return next(folder.rglob("gencode0.py")).read_text()


@pytest.mark.slow
def test_a_file_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    short, long = (generated(StateSpace(), n, tmp_path / str(n)) for n in (20, 200))
    assert short.count("\n") == long.count("\n")
    assert "for t in range(20):" in short
    assert "for t in range(200):" in long


class Loop(nn.Module):
    """``kind``: what keeps the loop from being one operator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state, out = x[:, 0], []
        for t in range(8 if self.kind == "few" else x.shape[1]):
            now: Any = x[:, 0] if self.kind == "depth" else x[:, t]
            if self.kind == "growing":
                now = x[:, : t + 1].mean(1)
            if self.kind == "sums":
                state = state + self.linear(now)
                continue
            state = torch.tanh(self.linear(now + state))
            if self.kind == "random":
                state = F.dropout(state, 0.5, self.training)
            if self.kind == "scaled":
                state = state * 0.9**t
            out.append(state)
        return state.square().mean()


@pytest.mark.parametrize("kind", ["few", "depth", "growing", "sums", "scaled", "random"])
def test_a_loop_that_is_not_shown_to_be_one_stays_unrolled(kind: str) -> None:
    """Few steps; layers that share weights, which read nothing that moves on; steps that read more
    and more; a sum, whose summands can be computed side by side; numbers that do not grow evenly;
    and random numbers, in training.
    """
    assert num_loops(Loop(kind), inputs()) == 0


class RandomLoop(nn.Module):
    """A loop of random updates of random states, of which random results are kept."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.linear, self.mixed = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decay = nn.Parameter(torch.rand(8) * 0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Drawn anew in every call, so that all calls are the same.
        draw, first = random.Random(self.seed), self.linear(x[:, 1])
        steps = range(draw.choice([0, 1, 2]), x.shape[1] - draw.choice([0, 1, 3]))
        states = [draw.choice([x[:, 0], torch.zeros_like(first), first]) for _ in range(3)]
        updates = [[draw.randrange(n) for n in (5, 3, 3)] for _ in range(draw.choice([2, 3, 5]))]
        kept, written, total = [], torch.zeros_like(y), x.new_zeros(())
        for t in reversed(steps) if draw.random() < 0.3 else steps:
            for kind, to, of in updates:
                states[to] = self.updated(kind, states[to], states[of], x[:, t])
            kept.append(states[0])
            written[:, t] = states[0] * 1.5
            total = total + (states[0] * y[:, t]).mean()
        results = [
            lambda: torch.stack(kept, 1).sin().mean() + first.mean(),
            lambda: F.mse_loss(written, y) + first.mean(),
            lambda: states[0].square().sum() + states[2].mean() + first.mean(),
            lambda: total / len(kept) + first.mean(),
            lambda: torch.stack(kept[::-1]).square().mean() + kept[5].mean() + first.mean(),
            lambda: torch.stack(kept[2:-1], 2).sin().mean() + first.mean(),
        ]
        return draw.choice(results)()

    def updated(self, kind: int, state: Tensor, other: Tensor, x: Tensor) -> Tensor:
        if kind == 0:
            return torch.tanh(other + x)
        if kind == 1:
            return state * self.decay + self.linear(x)
        if kind == 2:
            return state * torch.sigmoid(other) + x
        if kind == 3:
            return torch.tanh(self.mixed(other))
        return torch.where(x > 0, state, other * 0.5)


@pytest.mark.slow
def test_random_loops_compute_what_their_models_do() -> None:
    num_rolled = 0
    for seed in range(10):
        torch.manual_seed(seed)
        model, given = RandomLoop(seed), inputs(24)
        num_rolled += num_loops(model, given)
        policy = ("data", "tp")[seed % 2]
        report = verify(model, given, policy, {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1)
        assert report.ok, f"seed {seed}: {report}"
    assert num_rolled >= 6  # the results of the others do not read the loop
