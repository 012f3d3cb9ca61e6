"""How much of slow messages costs nothing, as the program computes meanwhile
(``overlap_communication``).

    python benchmarks/late_links.py [--pairs 20] [--delay-ms 8] [--hardware FILE]

A GPT is trained with tensor parallelism on two CPU ranks with gloo. Every message of the ranks
arrives a while later than it would (``--delay-ms``), one after the other, as on a slow link; ranks
that wait sleep. The same plan runs with and without ``overlap_communication``, in turn. Printed:

- what could be hidden: of each sum of a gradient the delay, or the time of the products beside it
  if that is shorter. Both ranks measure these products alone, at the same time;
- what is hidden: by how much a step is shorter, of that;
- the largest difference of the gradients of both, which is zero;
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
from models import GPT
from ranks import gloo_rank, parser_of, start_ranks

import shardwright
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.plan.program import Adapt, Program
from shardwright.compiler.trace.entry import trace
from shardwright.frontend.calibrate.calibrate import calibrate
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.ranks.process_group import ProcessGroupTransport

NUM_RANKS = 2
BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE = 8, 128, 2048


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


def make_model() -> GPT:
    """The 4-layer GPT, the same on every rank."""
    torch.manual_seed(0)
    return GPT(
        num_layers=4, hidden_size=384, num_heads=6, vocab_size=VOCAB_SIZE, max_length=SEQ_LENGTH
    )


def make_batch() -> dict[str, torch.Tensor]:
    """Random tokens and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def config_of(*, overlaps: bool) -> shardwright.ComputeConfig:
    """The config with or without overlap."""
    return shardwright.ComputeConfig(
        plan_ngpus=NUM_RANKS, runtime_ngpus=NUM_RANKS, overlap_communication=overlaps
    )


def run_rank(rank: int, folder: str, num_pairs: int, delay_s: float, file: str) -> None:
    """Train with and without overlap in turn; rank 0 prints."""
    batch = make_batch()
    modules = [
        shardwright.parallelize(
            make_model(),
            batch,
            "tp",
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
    products = products_beside(modules[1])
    if rank == 0:
        # The steps of a pair meet the same load, so that their difference tells more than medians.
        saved_s = np.median(times[3:, 0] - times[3:, 1])
        measured = [*np.median(times[3:], 0), saved_s]
        report(measured, products, apart, load_hardware(file), delay_s)


def products_beside(module: Any) -> list[float]:
    """The seconds of the products beside each sum: the least of ten tries."""
    rows = torch.randn(BATCH_SIZE * SEQ_LENGTH, 1)
    found = []
    for names in weights_beside(config_of(overlaps=True)):
        seconds = 0.0
        for name in names:
            out_size, in_size = module.get_parameter(name).shape
            grad, x = rows.repeat(1, out_size), rows.repeat(1, in_size)
            tries = []
            for _ in range(10):
                begin = time.perf_counter()
                torch.mm(grad.t(), x)
                tries.append(time.perf_counter() - begin)
            seconds += min(tries)
        found.append(seconds)
    return found


def weights_beside(config: shardwright.ComputeConfig) -> list[list[str]]:
    """The names of the weights beside each sum."""
    graph = trace(make_model(), make_batch())
    program = compile_graph(graph, find_policy("tp").apply, config).program
    assert isinstance(program, Program)
    adapters = [i for i in program.body if isinstance(i, Adapt) and i.beside]
    return [[str(weight.fqn) for weight in adapter.beside] for adapter in adapters]


def report(
    measured: list[float],
    products: list[float],
    apart: float,
    hardware: Hardware,
    delay_s: float,
) -> None:
    """Print what is hidden, and what the audit says of it. ``measured``: seconds without and with
    overlap, and what it saves.
    """
    graph, slow = trace(make_model(), make_batch()), with_delay(hardware, delay_s)
    predicted = []
    for overlaps in (False, True):
        config = config_of(overlaps=overlaps)
        compiled = compile_graph(graph, find_policy("tp").apply, config)
        parts = audit(compiled.program, config, slow).timeline
        names = ("forward", "backward")
        predicted.append(sum(part.end_s - part.start_s for part in parts if part.name in names))
    could_s = sum(min(delay_s, seconds) for seconds in products)
    did_s = measured[2]
    print(f"delay of a message          {delay_s * 1e3:.1f} ms")
    print(
        f"forward and backward        {measured[0] * 1e3:.1f} ms, with overlap "
        f"{measured[1] * 1e3:.1f} ms"
    )
    print(f"could be hidden             {could_s * 1e3:.1f} ms, in {len(products)} sums")
    print(f"is hidden                   {did_s * 1e3:.1f} ms, {did_s / could_s:.0%}")
    print(
        f"audit                       {predicted[0] * 1e3:.1f} ms, with overlap "
        f"{predicted[1] * 1e3:.1f} ms: {predicted[0] / measured[0] - 1:+.1%}, "
        f"{predicted[1] / measured[1] - 1:+.1%}"
    )
    print(f"gradients differ by         {apart}")


def with_delay(hardware: Hardware, delay_s: float) -> Hardware:
    """The machine with links on which a sum takes so much longer. Waiting for them takes nothing
    from a processor, so that all of it can be hidden.
    """

    def later(added_s: float) -> Hardware:
        tiers = []
        for tier in hardware.tiers:
            kinds = {
                kind: replace(link, latency_s=link.latency_s + added_s)
                for kind, link in tier.kinds.items()
            }
            tiers.append(replace(tier, latency_s=tier.latency_s + added_s, kinds=kinds))
        return replace(hardware, tiers=tuple(tiers))

    def sum_s(machine: Hardware) -> float:
        return collective_s(machine, "all_reduce", 1e6, range(NUM_RANKS))

    # A collective pays a latency several times.
    times = sum_s(later(1.0)) - sum_s(hardware)
    slow = later(delay_s / times)
    return replace(slow, device=replace(slow.device, overlap=1.0))


def main() -> None:
    parser = parser_of(__doc__, rank_in=("DIR",))
    parser.add_argument("--delay-ms", type=float, default=8.0)
    parser.add_argument("--hardware", default="")
    arguments = parser.parse_args()
    if arguments.rank_in:
        with gloo_rank() as rank:
            return run_rank(
                rank,
                *arguments.rank_in,
                arguments.pairs,
                arguments.delay_ms / 1e3,
                arguments.hardware,
            )
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.hardware or f"{folder}/machine.json"
        if not arguments.hardware:
            Path(file).write_text(json.dumps(calibrate("cpu", NUM_RANKS).to_json()))
        options = {"pairs": arguments.pairs, "delay-ms": arguments.delay_ms, "hardware": file}
        start_ranks(__file__, NUM_RANKS, **options)


if __name__ == "__main__":
    main()
