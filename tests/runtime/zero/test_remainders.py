"""Masters as 16 bits beside a bfloat16 parameter: exact, and as good as float32 masters in
training.
"""

from typing import Any

import pytest
import torch
from covers import spread
from torch import Tensor, nn

from shardwright.runtime.errors import ConfigError
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer
from shardwright.runtime.zero import shards
from shardwright.runtime.zero.remainders import Remainder, is_rounded
from shardwright.runtime.zero.state_masters import MASTER

STEPS = 5


def away(master: Tensor) -> Tensor:
    """Rounded to the nearest bfloat16, ties away from zero: by magnitude, in integers that have
    room.
    """
    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    sign, magnitude = bits >> 31, bits & 0x7FFFFFFF
    upper = (magnitude >> 16) + ((magnitude & 0xFFFF) >= 0x8000).long() + (sign << 15)
    rounded = (
        torch.where(upper >= 0x8000, upper - 0x10000, upper).to(torch.int16).view(torch.bfloat16)
    )
    return torch.where(master.isnan(), master.to(torch.bfloat16), rounded)


def every_kind() -> Tensor:
    """All upper halves with lower halves around 0, ties and the ends, and all lower halves with
    some upper ones.
    """
    upper = torch.arange(0x10000)[:, None] << 16
    lower = torch.tensor(
        [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF, 0x1234, 0xABCD]
    )
    some = (
        torch.tensor([0x3F80, 0x3F81, 0xBF80, 0x0000, 0x8000, 0x7F7F, 0x0080, 0xC2C8])[:, None]
        << 16
    )
    bits = torch.cat([(upper | lower).reshape(-1), (some | torch.arange(0x10000)).reshape(-1)])
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def test_the_round_trip_is_exact() -> None:
    master = every_kind()
    parameter = torch.empty(master.shape, dtype=torch.bfloat16)
    remainder = Remainder(torch.empty(master.shape, dtype=torch.int16))
    remainder.split(master, parameter)
    again, numbers = remainder.joined(parameter), ~master.isnan()
    assert numbers.sum() > 1e6 and torch.equal(
        again[numbers].view(torch.int32), master[numbers].view(torch.int32)
    )
    assert again[~numbers].isnan().all() and parameter[~numbers].isnan().all()
    assert torch.equal(parameter[numbers], away(master)[numbers])
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(parameter[numbers & ~ties], master.to(torch.bfloat16)[numbers & ~ties])
    assert (
        is_rounded(master, parameter)[numbers].all()
        and is_rounded(master, master.to(torch.bfloat16))[numbers].all()
    )
    other = torch.where(parameter == 1, 2, 1).to(torch.bfloat16)
    assert not is_rounded(master, other)[(master - other.float()).abs() > 0.1].any()


# ------------------------------------------------------------------------------------------------
# training


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model.bfloat16()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


def build(
    model: nn.Module, num_ranks: int, stage: int, optimizer: Any = torch.optim.AdamW, **table: Any
) -> ParallelOptimizer:
    table = {"store_param_remainders": True, **table}
    config = {
        "plan_ngpus": 1,
        "runtime_ngpus": num_ranks,
        "use_zero": stage,
        "distributed_optimizer": table,
    }
    return build_optimizer(
        model, optimizer, config, lr=1.0 if optimizer is torch.optim.LBFGS else 0.01
    )


def step(model: nn.Module, optimizer: ParallelOptimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, number)).square().sum().backward()
    optimizer.step()


def trained(
    num_ranks: int, stage: int, **table: Any
) -> list[tuple[dict[str, Tensor], list[Any], list[Tensor]]]:
    """Masters, moments and parameters of each rank."""
    models = [net() for _ in range(num_ranks)]

    def on_rank(rank: int) -> tuple[dict[str, Tensor], list[Any], list[Tensor]]:
        optimizer = build(models[rank], num_ranks, stage, **table)
        for number in range(STEPS):
            step(models[rank], optimizer, rank, number)
        optimizer.wait_for_parameters()
        moments = [
            x
            for state in optimizer.state_dict()["state"].values()
            for key, x in state.items()
            if key != MASTER
        ]
        return (
            {s.name: s.value for s in optimizer.shards},
            moments,
            [p.detach() for p in models[rank].parameters()],
        )

    return run_ranks(num_ranks, on_rank)


def round_ties_away(target: Tensor, source: Tensor) -> None:
    target.copy_(away(source.contiguous()) if source.dtype == torch.float32 else source)


@pytest.mark.parametrize(
    "table",
    [{}, {"contiguous_param_buffer": True, "bucket_cap_mb": 1e-3}, {"overlap_param_sync": True}],
)
@pytest.mark.parametrize(
    ("num_ranks", "stage"), spread([(1, 0), (2, 0), (1, 1), (3, 1), (2, 2)], 2)
)
def test_training_is_that_of_float32_masters(
    num_ranks: int, stage: int, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: masters, moments and parameters, where the float32 masters are rounded alike."""
    if not stage and "overlap_param_sync" in table:
        table = {"contiguous_grad_buffer": False}
    ours = trained(num_ranks, stage, **table)
    monkeypatch.setattr(shards, "fill", round_ties_away)
    theirs = trained(num_ranks, stage, **table, store_param_remainders=False)
    for (masters, moments, parameters), (expected, their_moments, their_parameters) in zip(
        ours, theirs, strict=True
    ):
        for name, master in masters.items():
            assert master.dtype == torch.float32 and torch.equal(master, expected[name])
        for mine, other in zip(
            [*moments, *parameters], [*their_moments, *their_parameters], strict=True
        ):
            assert torch.equal(mine, other)
        assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values() if m.numel())


def test_what_is_held() -> None:
    """Two bytes for each element between steps; float32 while the optimizer is made and while it
    steps.
    """
    seen = []

    class Watching(torch.optim.SGD):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr, momentum=0.9)
            self.look()

        def look(self) -> None:
            tensors = [p for group in self.param_groups for p in group["params"]]
            seen.append(
                all(
                    not p.isnan().any() and p.untyped_storage().nbytes() == 4 * p.numel()
                    for p in tensors
                )
            )

        def step(self, closure: Any = None) -> Any:
            self.look()
            return super().step(closure)

    model = net()
    optimizer = build(model, 1, 0, Watching)
    for number in range(2):
        step(model, optimizer, 0, number)
        for shard in optimizer.shards:
            assert (
                shard.remainder is not None and shard.remainder.low.nbytes == 2 * shard.num_elements
            )
            assert shard.tensor.untyped_storage().nbytes() == 4, (
                "one element stands for all of them"
            )
            assert shard.tensor.shape == shard.parameter.shape and shard.tensor.isnan().all()
    assert seen == [True] * 3


def test_a_closure_sees_the_parameters_of_its_iteration() -> None:
    model = net()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = build(model, 1, 0, torch.optim.LBFGS, overlap_grad_sync=False)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(0, 0)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(losses) > 5 and losses[-1] < 0.9 * losses[0]
    assert not all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------
# state


@pytest.mark.parametrize("order", ["module first", "optimizer first"])
@pytest.mark.parametrize("there", [True, False], ids=["to remainders", "to float32"])
@pytest.mark.parametrize("here", [True, False], ids=["from remainders", "from float32"])
def test_state_dicts(here: bool, there: bool, order: str) -> None:
    """They hold float32 masters, so they load into either form; nothing is lost, ties included."""

    def tie(optimizer: ParallelOptimizer) -> None:
        """Give elements masters that are ties, between an even and an odd parameter and the other
        way round.
        """
        state = optimizer.state_dict()
        for values in state["state"].values():
            values[MASTER].view(-1)[:2].view(torch.int32).copy_(
                torch.tensor([0x3F808000, 0x3F818000])
            )
        optimizer.load_state_dict(state)

    model = net()
    optimizer = build(model, 1, 0, torch.optim.SGD, store_param_remainders=here)
    for number in range(2):
        step(model, optimizer, 0, number)
    tie(optimizer)
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros(p.shape)
    optimizer.step()  # rounds the masters into the parameters
    state, masters = optimizer.state_dict(), [shard.value.clone() for shard in optimizer.shards]
    assert all(set(values) == {MASTER} for values in state["state"].values())
    assert masters[0].view(-1)[0].view(torch.int32) == 0x3F808000

    again = net()
    other = build(again, 1, 0, torch.optim.SGD, store_param_remainders=there)
    for part in (again, other) if order == "module first" else (other, again):
        part.load_state_dict(model.state_dict() if part is again else state)
    for _ in range(2):
        assert all(
            torch.equal(s.value, master) for s, master in zip(other.shards, masters, strict=True)
        )
        for p in again.parameters():
            p.grad = torch.zeros(p.shape)
        other.step()  # nothing moves, and remainders are made
        other.zero_grad()
    assert all(
        torch.equal(s.value, master) for s, master in zip(other.shards, masters, strict=True)
    )

    for values in state["state"].values():
        del values[MASTER]
    other.load_state_dict(state)
    assert all(torch.equal(shard.value, shard.parameter.float()) for shard in other.shards), (
        "as there are none"
    )


def test_parameters_that_somebody_else_sets() -> None:
    """The remainder stays, which is at most half a step of the parameter's: what is put back is
    exact.
    """
    model = net()
    optimizer = build(model, 1, 0, torch.optim.SGD)
    step(model, optimizer, 0, 0)
    masters = [shard.value.clone() for shard in optimizer.shards]
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(kept)
    assert all(
        torch.equal(shard.value, master)
        for shard, master in zip(optimizer.shards, masters, strict=True)
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    for shard in optimizer.shards:
        assert ((shard.value - shard.parameter).abs() <= shard.parameter.abs().float() / 2**8).all()


# ------------------------------------------------------------------------------------------------
# errors


def test_errors() -> None:
    def text(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            build(options.pop("model", net()), 1, 0, **options)
        return str(caught.value)

    assert text(dtype="bf16") == (
        "store_param_remainders has no meaning with dtype='bfloat16'\n"
        "  why:   a remainder is what a bfloat16 parameter lacks of a float32 master\n"
        "  try:   leave out dtype, or store_param_remainders"
    )
    assert text(model=net().half()) == (
        "store_param_remainders is not possible for float16 parameters\n"
        "  why:   '0.weight' is one, and no part of a float32 number: its exponent has fewer bits\n"
        "  try:   leave out store_param_remainders, or train in bfloat16"
    )
    assert text(model=net().float()) == (
        "store_param_remainders has nothing to do\n"
        "  why:   no trained parameter is of bfloat16: '0.weight' is torch.float32\n"
        "  try:   leave it out, or convert the module to bfloat16 before it is compiled"
    )
    model = net()
    optimizer = build(model, 1, 0, torch.optim.SGD)
    model.float()
    with pytest.raises(shards.UsageError) as caught:
        optimizer.state_dict()
    assert str(caught.value) == (
        "parameter '0.weight' has moved since the optimizer was built\n"
        "  why:   it is torch.float32 on cpu, and the optimizer's state is made for "
        "torch.bfloat16 on cpu\n"
        "  try:   move or convert the module before build_optimizer"
    )
