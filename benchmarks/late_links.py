"""How much of slow messages costs nothing, as the program computes meanwhile
(``overlap_communication``).

    python benchmarks/late_links.py [--model gpt] [--pairs 20] [--delay-ms 8] [--hardware FILE]

A model is trained on two CPU ranks with gloo: a GPT with tensor parallelism, or layers of experts
and shared experts with the experts on both ranks (``--model experts``). Every message of the ranks
arrives a while later than it would (``--delay-ms``), one after the other, as on a slow link; ranks
that wait sleep. The same plan runs with and without ``overlap_communication``, in turn. Printed:

- what could be hidden: of each message beside which something runs the delay, or the time of the
  products beside it if that is shorter. Both ranks measure these products alone, at the same time;
- what is hidden: by how much a step is shorter, of that;
- the largest difference of the gradients of both. It is zero for the GPT; beside experts gradients
  of one value are added in another order;
- the audit of both programs beside what was measured. ``--hardware`` names a file of this machine;
  without one it is calibrated first. The delay is added to the latency of its links.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT
from ranks import gloo_rank, parser_of, start_ranks
from torch import Tensor, nn

import shardwright
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import COLLECTIVES, Hardware, load_hardware
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.plan.program import Adapt, Compute, Program
from shardwright.compiler.trace.entry import trace
from shardwright.experts import combine, dispatch, grouped_linear
from shardwright.frontend.calibrate.calibrate import calibrate
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.ranks.process_group import ProcessGroupTransport

NUM_RANKS = 2
BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE = 8, 128, 2048
HIDDEN, SHARED, INNER, EXPERTS = 384, 768, 192, 8
POLICIES = {"gpt": "tp", "experts": "ep"}


class Delayed:
    """A collective that is complete at ``ready_at`` at the earliest."""

    def __init__(self, work: Any, ready_at: float) -> None:
        self._work, self._ready_at = work, ready_at

    def wait(self, *limit: Any) -> Any:
        done = self._work.wait(*limit)
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def late_messages(delay_s: float) -> Any:
    """All collectives of this process arrive late inside of the block, one after the other."""
    start, free_at = ProcessGroupTransport._start, 0.0

    def started(self: Any, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal free_at
        free_at = max(free_at, time.perf_counter()) + delay_s
        return Delayed(start(self, collective, *args, **kwargs), free_at)

    ProcessGroupTransport._start = started  # type: ignore[method-assign]
    try:
        yield
    finally:
        ProcessGroupTransport._start = start  # type: ignore[method-assign]


class Mixture(nn.Module):
    """A router, experts, and a shared expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5)
        self.shared_up = nn.Linear(HIDDEN, SHARED, bias=False)
        self.shared_down = nn.Linear(SHARED, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [tokens, HIDDEN]
        tokens = self.norm(x)
        gains, chosen = self.router(tokens).softmax(-1).topk(2)
        rows, of_rows, routing = dispatch(tokens, chosen, gains, num_experts=EXPERTS)
        made = grouped_linear(F.silu(grouped_linear(rows, self.up, routing)), self.down, routing)
        y = combine(made * of_rows.unsqueeze(-1), routing)
        return x + y + self.shared_down(F.silu(self.shared_up(tokens)))


class Mixtures(nn.Module):
    """Layers of experts, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make_model(name: str) -> nn.Module:
    """The 4-layer GPT or the 6 layers of experts, the same on every rank."""
    torch.manual_seed(0)
    if name == "experts":
        return Mixtures()
    return GPT(
        num_layers=4, hidden_size=HIDDEN, num_heads=6, vocab_size=VOCAB_SIZE, max_length=SEQ_LENGTH
    )


def make_batch(name: str) -> dict[str, Tensor]:
    """Random tokens and labels, or rows of experts, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    if name == "experts":
        return {"x": torch.randn(2 * BATCH_SIZE * SEQ_LENGTH, HIDDEN, generator=generator)}
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def config_of(*, overlaps: bool) -> shardwright.ComputeConfig:
    """The config with or without overlap."""
    return shardwright.ComputeConfig(
        plan_ngpus=NUM_RANKS, runtime_ngpus=NUM_RANKS, overlap_communication=overlaps
    )


def run_rank(rank: int, folder: str, name: str, num_pairs: int, delay_s: float, file: str) -> None:
    """Train with and without overlap in turn; rank 0 prints."""
    batch = make_batch(name)
    modules = [
        shardwright.parallelize(
            make_model(name),
            batch,
            POLICIES[name],
            config_of(overlaps=overlaps),
            gen_savedir=f"{folder}/{overlaps}",
            reuse="moo",
        )
        for overlaps in (False, True)
    ]

    def seconds(module: Any) -> float:
        module.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        module(**batch).backward()
        dist.barrier()
        return time.perf_counter() - begin

    times = np.empty((num_pairs + 3, 2))
    with late_messages(delay_s):
        for pair in range(num_pairs + 3):
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                times[pair, side] = seconds(modules[side])
    plain, beside = (dict(module.named_parameters()) for module in modules)
    apart = max(float((plain[n].grad - beside[n].grad).abs().max()) for n in plain)
    dist.barrier()
    products = products_beside(modules[1], name)
    if rank == 0:
        # The steps of a pair meet the same load, so that their difference tells more than medians.
        saved_s = np.median(times[3:, 0] - times[3:, 1])
        measured = [*np.median(times[3:], 0), saved_s]
        report(name, measured, products, apart, load_hardware(file), delay_s)


def products_beside(module: Any, name: str) -> list[float]:
    """The seconds of the products beside each message: the least of ten tries."""
    program = program_of(name, overlaps=True)
    rows = torch.randn(BATCH_SIZE * SEQ_LENGTH, 1)  # of one rank

    def seconds(weights: list[str], *which: str) -> float:
        """The seconds of products of some weights: their results and gradients."""
        total = 0.0
        for weight in weights:
            value = module.get_parameter(weight).detach()
            out_size, in_size = value.shape
            grad, x = rows.repeat(1, out_size), rows.repeat(1, in_size)
            products = {
                "result": lambda x=x, value=value: torch.mm(x, value.t()),
                "of input": lambda grad=grad, value=value: torch.mm(grad, value),
                "of weight": lambda grad=grad, x=x: torch.mm(grad.t(), x),
            }
            for product in map(products.__getitem__, which):
                tries = []
                for _ in range(10):
                    begin = time.perf_counter()
                    product()
                    tries.append(time.perf_counter() - begin)
                total += min(tries)
        return total

    found = []
    for position, item in enumerate(program.body):
        if isinstance(item, Adapt) and item.beside:
            found.append(seconds([str(weight.fqn) for weight in item.beside], "of weight"))
        elif isinstance(item, Adapt | Compute) and item.meanwhile:
            inside = program.body[position + 1 : position + 1 + item.meanwhile]
            calls = [i.op for i in inside if isinstance(i, Compute) and i.op.target == "linear"]
            weights = [str(call.arg("weight").fqn) for call in calls]
            found += [seconds(weights, "result"), seconds(weights, "of input", "of weight")]
    return found


def program_of(name: str, *, overlaps: bool) -> Program:
    """The program of a rank."""
    graph = trace(make_model(name), make_batch(name))
    policy = find_policy(POLICIES[name]).apply
    program = compile_graph(graph, policy, config_of(overlaps=overlaps)).program
    assert isinstance(program, Program)
    return program


def report(
    name: str,
    measured: list[float],
    products: list[float],
    apart: float,
    hardware: Hardware,
    delay_s: float,
) -> None:
    """Print what is hidden, and what the audit says of it. ``measured``: seconds without and with
    overlap, and what it saves.
    """
    slow, predicted = with_delay(hardware, delay_s), []
    for overlaps in (False, True):
        program = program_of(name, overlaps=overlaps)
        parts = audit(program, config_of(overlaps=overlaps), slow).timeline
        names = ("forward", "backward")
        predicted.append(sum(part.end_s - part.start_s for part in parts if part.name in names))
    could_s = sum(min(delay_s, seconds) for seconds in products)
    did_s = measured[2]
    print(f"delay of a message          {delay_s * 1e3:.1f} ms")
    print(
        f"forward and backward        {measured[0] * 1e3:.1f} ms, with overlap "
        f"{measured[1] * 1e3:.1f} ms"
    )
    print(f"could be hidden             {could_s * 1e3:.1f} ms, in {len(products)} messages")
    print(f"is hidden                   {did_s * 1e3:.1f} ms, {did_s / could_s:.0%}")
    print(
        f"audit                       {predicted[0] * 1e3:.1f} ms, with overlap "
        f"{predicted[1] * 1e3:.1f} ms: {predicted[0] / measured[0] - 1:+.1%}, "
        f"{predicted[1] / measured[1] - 1:+.1%}"
    )
    print(f"gradients differ by         {apart}")


def with_delay(hardware: Hardware, delay_s: float) -> Hardware:
    """The machine with links on which every collective takes so much longer. Waiting for them takes
    nothing from a processor, so that all of it can be hidden.
    """

    def later(added_s: dict[str, float]) -> Hardware:
        tiers = []
        for tier in hardware.tiers:
            links = {kind: tier.link(kind) for kind in COLLECTIVES}
            kinds = {
                kind: replace(link, latency_s=link.latency_s + added_s[kind])
                for kind, link in links.items()
            }
            tiers.append(replace(tier, kinds=kinds))
        return replace(hardware, tiers=tuple(tiers))

    def seconds(machine: Hardware, kind: str) -> float:
        return collective_s(machine, kind, 1e6, range(NUM_RANKS))

    # A collective pays a latency once or several times.
    second_later = later(dict.fromkeys(COLLECTIVES, 1.0))
    times = {kind: seconds(second_later, kind) - seconds(hardware, kind) for kind in COLLECTIVES}
    slow = later({kind: delay_s / count for kind, count in times.items()})
    return replace(slow, device=replace(slow.device, overlap=1.0))


def main() -> None:
    parser = parser_of(__doc__, rank_in=("DIR",))
    parser.add_argument("--model", choices=sorted(POLICIES), default="gpt")
    parser.add_argument("--delay-ms", type=float, default=8.0)
    parser.add_argument("--hardware", default="")
    arguments = parser.parse_args()
    if arguments.rank_in:
        with gloo_rank() as rank:
            return run_rank(
                rank,
                *arguments.rank_in,
                arguments.model,
                arguments.pairs,
                arguments.delay_ms / 1e3,
                arguments.hardware,
            )
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.hardware or f"{folder}/machine.json"
        if not arguments.hardware:
            Path(file).write_text(json.dumps(calibrate("cpu", NUM_RANKS).to_json()))
        options = {
            "model": arguments.model,
            "pairs": arguments.pairs,
            "delay-ms": arguments.delay_ms,
            "hardware": file,
        }
        start_ranks(__file__, NUM_RANKS, **options)


if __name__ == "__main__":
    main()
