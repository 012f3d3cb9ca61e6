"""How much of slow messages costs nothing, as the program computes meanwhile
(``overlap_communication``).

    python benchmarks/late_links.py [--model gpt] [--pairs 20] [--delay-ms 8] [--hardware FILE]
        [--elsewhere 0.08]

A model is trained on two CPU ranks with gloo: a GPT with tensor parallelism, or layers of experts
and shared experts with the experts on both ranks (``--model experts``), or the GPT with ZeRO-3
(``--model zero3``; what is compared there is to gather no weight ahead), also with its layers
computed again in backward (``zero3-again``). Every message of the ranks arrives ``--delay-ms``
after it was sent, at the earliest (see ``late_messages.py``). The same plan runs with and without
``overlap_communication``, in turn. A pair of steps counts if other processes took no more of the
cores meanwhile than ``--elsewhere``. At most three times ``--pairs`` are run; lines on stderr tell
of what comes before, how long all pairs may take, and of each pair. Printed:

- what a message takes without overlap, and how much of that is CPU time of its rank: gloo's threads
  and the system copy and add. In the rest of it the rank is idle;
- what the program computes between sending and waiting, and how long its products take alone, on
  both ranks at the same time: if they took longer, the program would wait too early. (Those that
  the plan puts beside messages: of ZeRO-3 there are none);
- what could be hidden: of each message the time in which the rank is idle, or that of the work
  beside it if that is shorter;
- what is hidden of that: by how much a step is shorter, with an interval of 90 %;
- how long the program with overlap still waits for these messages;
- the largest difference of the gradients of both. It is zero for the GPT; beside experts gradients
  of one value are added in another order;
- the audit of both programs beside what was measured. ``--hardware`` names a file of this machine;
  without one it is calibrated first. Its links get the delay as their latency.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from late_messages import LateMessages
from models import GPT
from ranks import gloo_rank, parser_of, start_ranks
from torch import Tensor, nn

import shardwright
from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import COLLECTIVES, Hardware, load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.plan.program import Adapt, Compute, Program
from shardwright.compiler.trace.entry import trace
from shardwright.experts import combine, dispatch, grouped_linear
from shardwright.frontend.calibrate.calibrate import calibrate
from shardwright.frontend.cli.progress_text import ProgressText
from shardwright.policies.known_policies import find_policy
from shardwright.runtime import gathered_weights
from shardwright.runtime.activity import listening
from shardwright.runtime.errors import ConfigError

NUM_RANKS = 2
BATCH_SIZE, SEQ_LENGTH, VOCAB_SIZE = 8, 128, 2048
HIDDEN, SHARED, INNER, EXPERTS = 384, 768, 192, 8
POLICIES = {"gpt": "tp", "experts": "ep", "zero3": "data", "zero3-again": "data"}

WARM_UP = 3
"""Pairs before the first one that counts."""

MOST_TRIES = 3
"""How many pairs are run for one that counts, at most."""

BOARD_SIZE = 1024
"""The number of messages of which ranks know when each of them sent its part."""

LEAST_WORK_S = 2e-4
"""A message with less to do before it is waited for has no work beside it."""


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


def config_of(name: str, *, overlaps: bool) -> shardwright.ComputeConfig:
    """The config with or without overlap. ZeRO-3 gathers ahead with any."""
    if name.startswith("zero3"):
        options = {"recompute": ("blocks.*",)} if name == "zero3-again" else {}
        return shardwright.ComputeConfig(
            plan_ngpus=1, runtime_ngpus=NUM_RANKS, use_zero=3, pas_config=options
        )
    return shardwright.ComputeConfig(
        plan_ngpus=NUM_RANKS, runtime_ngpus=NUM_RANKS, overlap_communication=overlaps
    )


def run_rank(
    rank: int,
    refusal: str,
    folder: str,
    name: str,
    num_pairs: int,
    delay_s: float,
    file: str,
    most_elsewhere: float,
) -> None:
    """Train with and without overlap in turn; rank 0 prints. ``refusal``: the file in which it says
    so if no pair counts.
    """
    if rank == 0:
        say(f"compiling with and without overlap for {NUM_RANKS} ranks")
    batch = make_batch(name)
    modules = [
        shardwright.parallelize(
            make_model(name),
            batch,
            POLICIES[name],
            config_of(name, overlaps=overlaps),
            gen_savedir=f"{folder}/{overlaps}",
            reuse="moo",
        )
        for overlaps in (False, True)
    ]
    pairs: list[Pair] = []
    taken: list[float] = []  # what other processes took, of every pair
    if rank == 0:
        np.memmap(f"{folder}/sent", np.float64, "w+", shape=(NUM_RANKS, BOARD_SIZE)).flush()
    dist.barrier()
    board = np.memmap(f"{folder}/sent", np.float64, "r+", shape=(NUM_RANKS, BOARD_SIZE))
    with LateMessages(delay_s, rank, board) as late:

        def step(side: int) -> tuple[float, np.ndarray]:
            modules[side].zero_grad()
            dist.barrier()
            late.take()
            begin = time.perf_counter()
            with nullcontext() if side else nothing_ahead():
                modules[side](**batch).backward()
            stamps = late.take()
            dist.barrier()
            return time.perf_counter() - begin, stamps

        most_tries = MOST_TRIES * num_pairs
        for number in range(-WARM_UP, most_tries):
            began_s, cores = time.monotonic(), Cores()
            order = (0, 1) if number % 2 == 0 else (1, 0)
            steps = {side: step(side) for side in order}
            elsewhere = cores.elsewhere()
            counts = number >= 0 and elsewhere <= most_elsewhere
            if number >= 0:
                taken.append(elsewhere)
            if counts:
                pairs.append(Pair(steps[0], steps[1], elsewhere))
            if rank == 0:
                tell_pair(number, most_tries, elsewhere, counts, f"{len(pairs)} of {num_pairs}")
                if number == -1:
                    say(expectation(num_pairs, time.monotonic() - began_s))
            if len(pairs) == num_pairs:
                break
    plain, beside = (dict(module.named_parameters()) for module in modules)
    apart = max(float((plain[n].grad - beside[n].grad).abs().max()) for n in plain)
    products_s = sum(products_beside(modules[1], name))
    by_rank: list[list[Pair]] = [[] for _ in range(NUM_RANKS)]
    dist.all_gather_object(by_rank, pairs)
    if rank == 0:
        if not pairs:
            Path(refusal).write_text(none_counts(taken, most_elsewhere))
            return
        print(f"{'pairs':<28}{len(pairs)} of {len(taken)}")
        report(name, by_rank, products_s, apart, load_hardware(file), delay_s)


def tell_pair(number: int, most: int, elsewhere: float, counts: bool, so_far: str) -> None:
    """A line on stderr for a pair of steps: a run takes minutes on a busy machine."""
    name = f"pair {number + 1} of at most {most}" if number >= 0 else "a pair to warm up"
    verdict = "counts" if counts else "does not count"
    say(f"{name}: other processes took {elsewhere:.0%} of the cores, {verdict} ({so_far})")


def expectation(num_pairs: int, pair_s: float) -> str:
    """How long the pairs take, by what the last one took."""
    all_s = num_pairs * pair_s
    return (
        f"about {all_s:.0f} s for pairs 1 to {num_pairs} if all of them count, at most "
        f"{MOST_TRIES * all_s:.0f} s"
    )


def say(line: str) -> None:
    """A line on stderr, which is seen at once where it is a pipe, too."""
    print(line, file=sys.stderr, flush=True)


def none_counts(taken: list[float], most: float) -> str:
    """What is said if other processes took too much of the cores in every pair."""
    least = min(taken)
    # Rounded up, so that the pair with the least would count.
    enough = math.ceil(100 * least) / 100
    return (
        f"error: no pair of steps counts\n"
        f"  why:   in each of {len(taken)} pairs other processes took {least:.0%} of the cores or "
        f"more, and --elsewhere allows {most:.0%}\n"
        f"  try:   again when less runs here, or --elsewhere {enough:.2f}, which says less of what "
        "is hidden"
    )


@contextmanager
def nothing_ahead() -> Iterator[None]:
    """Inside of the block weights in pieces are gathered when they are used, none ahead of time."""
    move, start_next = gathered_weights._Run.move, gathered_weights._start_next

    def moved(run: gathered_weights._Run, batch: Any) -> Any:
        run._expected = []
        return move(run, batch)

    gathered_weights._Run.move = moved  # type: ignore[method-assign]
    gathered_weights._start_next = lambda after: None
    try:
        yield
    finally:
        gathered_weights._Run.move = move  # type: ignore[method-assign]
        gathered_weights._start_next = start_next


@dataclass
class Pair:
    """A step without overlap and one with it: the seconds of each, and the stamps of its messages.
    ``elsewhere``: the part of the cores that other processes took meanwhile, as all ranks saw it.
    """

    plain: tuple[float, np.ndarray]
    overlapped: tuple[float, np.ndarray]
    elsewhere: float


class Cores:
    """What all processes take of the cores from now on. The kernel counts in ticks of 10 ms."""

    def __init__(self) -> None:
        self._busy_s, self._all_s, self._own_s = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        ticks = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
        idle = ticks[3] + ticks[4]  # idle, and waiting for disks
        rate = os.sysconf("SC_CLK_TCK")
        return (sum(ticks) - idle) / rate, sum(ticks) / rate, time.process_time()

    def elsewhere(self) -> float:
        """The part of the cores that other processes than the ranks took. Collective."""
        busy_s, all_s, own_s = self._now()
        taken = torch.tensor([own_s - self._own_s])
        dist.all_reduce(taken)
        found = [(busy_s - self._busy_s - float(taken)) / (all_s - self._all_s)]
        dist.broadcast_object_list(found)  # all of them must see the same
        return found[0]


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
    program = compile_graph(graph, policy, config_of(name, overlaps=overlaps)).program
    assert isinstance(program, Program)
    return program


def report(
    name: str,
    by_rank: list[list[Pair]],
    products_s: float,
    apart: float,
    hardware: Hardware,
    delay_s: float,
) -> None:
    """Print what is hidden, and what the audit says of it."""
    steps_s = np.array([[pair.plain[0], pair.overlapped[0]] for pair in by_rank[0]])
    plain, overlapped = (
        Messages(np.array([[getattr(pair, side)[1] for pair in pairs] for pairs in by_rank]))
        for side in ("plain", "overlapped")
    )
    # What is computed between sending and waiting where nothing is put there is left out.
    beside_s = np.maximum(overlapped.busy_s - plain.busy_s, 0)
    has_work = beside_s > LEAST_WORK_S
    could_s = np.minimum(plain.idle_s, beside_s)[has_work].sum()
    # The steps of a pair meet the same load, so that their difference tells more than medians.
    saved_s = steps_s[:, 0] - steps_s[:, 1]
    did_s = np.median(saved_s)
    drawn = np.random.default_rng(0).choice(saved_s, (2000, len(saved_s)))
    low_s, high_s = np.quantile(np.median(drawn, 1), (0.05, 0.95))
    without_s, with_s = np.median(steps_s, 0)
    predicted = [
        predicted_s(name, hardware, delay_s, len(has_work), overlaps=overlaps)
        for overlaps in (False, True)
    ]
    lines = {
        "delay of a message": f"{delay_s * 1e3:.1f} ms",
        "other processes took": f"{np.median([pair.elsewhere for pair in by_rank[0]]):.0%} of the "
        "cores",
        "forward and backward": f"{without_s * 1e3:.1f} ms, with overlap {with_s * 1e3:.1f} ms",
        "messages": f"{len(has_work)}, {has_work.sum()} of them with work beside",
        "such a message takes": f"{plain.whole_s[has_work].mean() * 1e3:.1f} ms without overlap, "
        f"{plain.cpu_s[has_work].mean() * 1e3:.1f} ms of it CPU time",
        "idle in all of these": f"{plain.idle_s[has_work].sum() * 1e3:.1f} ms",
        "the work beside takes": f"{beside_s[has_work].sum() * 1e3:.1f} ms, its products alone "
        f"{products_s * 1e3:.1f} ms",
        "could be hidden": f"{could_s * 1e3:.1f} ms",
        "is hidden": f"{did_s * 1e3:.1f} ms [{low_s * 1e3:.1f}, {high_s * 1e3:.1f}], "
        f"{did_s / could_s:.0%} [{low_s / could_s:.0%}, {high_s / could_s:.0%}]",
        "still waited for": f"{overlapped.waited_s[has_work].sum() * 1e3:.1f} ms",
        "audit": f"{predicted[0] * 1e3:.1f} ms, with overlap {predicted[1] * 1e3:.1f} ms: "
        f"{predicted[0] / without_s - 1:+.1%}, {predicted[1] / with_s - 1:+.1%}",
        "gradients differ by": f"{apart}",
    }
    for what, found in lines.items():
        print(f"{what:<28}{found}")


class Messages:
    """The messages of a step, by their order. Medians over pairs, means over ranks; in seconds.

    - ``whole_s``: from when the last rank has sent its part until the message is there.
    - ``cpu_s``: what a rank computes for it, in all of its threads.
    - ``idle_s``: the rest, in which it computes nothing.
    - ``busy_s``: what the program computes before it waits.
    - ``waited_s``: how long it waits when all ranks have sent.

    ``stamps``: ``[ranks, pairs, messages, fields of Stamps]``.
    """

    def __init__(self, stamps: np.ndarray) -> None:
        _, last, awaited, there, busy, cpu = np.moveaxis(stamps, -1, 0)
        self.whole_s = np.median((there - last).mean(0), 0)
        self.cpu_s = np.median(cpu.mean(0), 0)
        self.idle_s = np.median((there - last - cpu).mean(0), 0)
        self.busy_s = np.median(busy.mean(0), 0)
        self.waited_s = np.median((there - np.maximum(awaited, last)).mean(0), 0)


def predicted_s(
    name: str, hardware: Hardware, delay_s: float, num_messages: int, *, overlaps: bool
) -> float:
    """The seconds of a forward and a backward on a machine whose messages arrive late, by the
    audit.
    """

    def cost_on(machine: Hardware, *, overlaps: bool) -> PlanCost:
        return audit(
            program_of(name, overlaps=overlaps),
            config_of(name, overlaps=overlaps),
            machine,
            gathers_ahead=overlaps,
        )

    own_s = sum(cost_on(hardware, overlaps=False).ranks[0].comm_s.values()) / num_messages
    parts = cost_on(with_delay(hardware, delay_s, own_s), overlaps=overlaps).timeline
    names = ("forward", "backward")
    return sum(part.end_s - part.start_s for part in parts if part.name in names)


def with_delay(hardware: Hardware, delay_s: float, own_s: float) -> Hardware:
    """The machine with links on which every collective takes ``delay_s``, if that is longer than
    ``own_s``, which a message takes without. What it takes of a processor stays the same.
    """
    if own_s >= delay_s:
        return hardware
    tiers = []
    for tier in hardware.tiers:
        kinds = {}
        for kind in COLLECTIVES:
            link = tier.link(kind)
            # Bytes take no time. A collective pays a latency once or several times.
            one = replace(tier, kinds={kind: replace(link, latency_s=1.0, bytes_per_s=1e18)})
            times = collective_s(replace(hardware, tiers=(one,)), kind, 1.0, range(NUM_RANKS))
            kinds[kind] = replace(link, latency_s=delay_s / times, bytes_per_s=1e18)
        tiers.append(replace(tier, kinds=kinds))
    device = hardware.device
    computing_s = (1 - device.overlap) * own_s
    device = replace(device, overlap=1 - computing_s / delay_s)
    return replace(hardware, tiers=tuple(tiers), device=device)


def main() -> None:
    parser = parser_of(__doc__, rank_in=("REFUSAL", "DIR"))
    parser.add_argument("--model", choices=sorted(POLICIES), default="gpt")
    parser.add_argument("--delay-ms", type=float, default=8.0)
    parser.add_argument("--hardware", default="")
    parser.add_argument("--elsewhere", type=float, default=0.08)
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
                arguments.elsewhere,
            )
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.hardware or f"{folder}/machine.json"
        if not arguments.hardware:
            try:
                with listening(ProgressText()):
                    machine = calibrate("cpu", NUM_RANKS)
                Path(file).write_text(json.dumps(machine.to_json()))
            except ConfigError as error:
                # Its hint names options of the command ``shardwright calibrate``.
                sys.exit(
                    f"error: {error.what}\n  why:   {error.why}\n  try:   again when nothing else "
                    "runs here, or --hardware FILE that `shardwright calibrate` has written"
                )
        options = {
            "model": arguments.model,
            "pairs": arguments.pairs,
            "delay-ms": arguments.delay_ms,
            "hardware": file,
            "elsewhere": arguments.elsewhere,
        }
        refusal = Path(folder, "refusal")
        start_ranks(__file__, NUM_RANKS, (str(refusal),), **options)
        if refusal.exists():
            sys.exit(refusal.read_text())


if __name__ == "__main__":
    main()
