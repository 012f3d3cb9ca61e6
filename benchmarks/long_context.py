"""Long sequences over several ranks: the work, the memory and the bytes of a rank, by way.

    python benchmarks/long_context.py --ranks 4 --seq 131072

Nothing runs: pairs of queries and keys are counted, steps and peaks are those of ``shardwright``'s
own audit (docs/cost-model.md) of Llama layers in bfloat16 on A100s.

- **work**: of the rank with most pairs of a query and a key that it sees, over the mean of all
  ranks; one run of positions to a rank beside two in zigzag. The same of windows that are a part of
  the sequence, in zigzag, before and after queries move.
- **packed**: the same of rows of documents whose lengths are log-normal, by the number of turns in
  which positions are dealt: where each rank computes its own queries, and where some are computed
  by ranks that have less to do. Beside it what a rank gets, on average, in parts of the row: keys,
  queries of others; and the tiles in which it computes attention.
- **peak**: bytes of the busiest rank over those of one rank that has the whole sequence. An even
  split of everything would be 1/n. Weights, their gradients and the state of the optimizer are not
  split by a context axis; *state* is what they take. *sent*: bytes that go through
  the collectives of the busiest rank, as ``count_communication`` counts them.
- **longest** (``--memory 80``): the longest sequence whose step needs at most so many GB on each
  rank, and how many times that of one rank it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import ComputeConfig
from shardwright.compiler.compile import annotate, compile_graph, pass_manager
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.trace import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.errors import ShardwrightError
from shardwright.runtime.marks import Seen
from shardwright.runtime.ops.attention_steps import Place, steps_of
from shardwright.runtime.ops.split_attention import call_pairs
from shardwright.runtime.runs import dealt
from shardwright.runtime.visible_keys import Band, Bands, earlier_keys, pairs

ROWS = 40
"""Rows of documents."""

WAYS: dict[str, dict[str, Any]] = {
    "gather": {"cp_mode": "gather", "cp_turns": 0},
    "gather, zigzag": {"cp_mode": "gather", "cp_turns": 1},
    "ulysses": {"cp_mode": "ulysses"},
    "ring": {"cp_mode": "ring", "cp_turns": 0},
    "ring, zigzag": {"cp_mode": "ring", "cp_turns": 1},
}


def most_over_mean(length: int, num_ranks: int, *, turns: int) -> float:
    """The pairs of the rank with most of them in causal attention, over the mean."""
    bands = earlier_keys(length, length)
    found = [pairs(bands, dealt(length, num_ranks, rank, turns=turns)) for rank in range(num_ranks)]
    return max(found) * num_ranks / sum(found)


def window_shares(length: int, num_ranks: int, part: int, of_call: int) -> list[float]:
    """The pairs of the busiest rank over the mean, of a window that is ``1 / part`` of the
    sequence, in zigzag: where each rank computes its own queries, and where some are computed by
    ranks that have less to do.
    """
    seen = (Seen((0, 1), earlier_keys(length, length, length // part)),)
    found = []
    for evens_out in (False, True):
        work = []
        for rank in range(num_ranks):
            place = Place(num_ranks, rank, 1, is_ring=True)
            steps = steps_of((place,), (length, length), 1, seen, of_call, evens_out=evens_out)
            parts = [part for step in steps.steps for share in step.shares for part in share.parts]
            work.append(sum(part.tile.num_pairs for part in parts))
        found.append(max(work) * num_ranks / sum(work))
    return found


def packed_row(length: int, num_documents: int, random: Random) -> Bands:
    """What is seen in a row of documents whose lengths have a long tail."""
    shares = [random.lognormvariate(0, 1) for _ in range(num_documents)]
    ends = [round(length * share / sum(shares)) for share in accumulate(shares)]
    starts = [0, *ends[:-1]]
    return tuple(
        Band(start, end, start, start + 1, 0, 1)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    )


@dataclass
class Packed:
    """The pairs of the busiest rank over the mean, on average and of the worst row; the keys and
    the queries of others that a rank gets, as parts of the row; its tiles.
    """

    mean: float
    worst: float
    keys: float
    queries: float
    tiles: float


def packed_rows(
    length: int, num_ranks: int, turns: int, of_call: int, *, evens_out: bool
) -> Packed:
    """What a ring does with documents. ``of_call``: the pairs that a call costs."""
    random = Random(0)
    shares, num_keys, num_queries, num_tiles = [], 0, 0, 0
    for _ in range(ROWS):
        seen = (Seen((0, 1), packed_row(length, 33, random)),)
        found = []
        for rank in range(num_ranks):
            place = Place(num_ranks, rank, turns, is_ring=True)
            steps = steps_of((place,), (length, length), 1, seen, of_call, evens_out=evens_out)
            work = [share for step in steps.steps for share in step.shares]
            found.append(sum(part.tile.num_pairs for share in work for part in share.parts))
            num_keys += sum(share.num_keys for share in work[1:])
            num_queries += sum(guest.count for guest in steps.guests)
            num_tiles += sum(len(share.parts) for share in work)
        shares.append(max(found) * num_ranks / sum(found))
    ranks = ROWS * num_ranks
    return Packed(
        sum(shares) / ROWS,
        max(shares),
        num_keys / ranks / length,
        num_queries / ranks / length,
        num_tiles / ranks,
    )


def llama(layers: int, hidden: int, heads: int, groups: int, length: int) -> LlamaForCausalLM:
    """Llama layers without values."""
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32000,
                hidden_size=hidden,
                intermediate_size=hidden * 8 // 3,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=groups,
                max_position_embeddings=length,
                use_cache=False,
            )
        ).to(torch.bfloat16)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seq", type=int, default=131072)
    parser.add_argument("--packed", type=int, default=32768, help="positions of a packed row")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--memory", type=float, help="GB of a rank, for the longest sequence")
    given = parser.parse_args()
    for turns in (0, 1):
        share = most_over_mean(given.seq, given.ranks, turns=turns)
        print(f"work, {'in zigzag' if turns else 'one run each'}: {share:.3f} of the mean")
    # As on GPUs, where a call costs more pairs.
    of_call = call_pairs("cuda", given.heads, 2 * given.hidden // given.heads)
    for part in (2, 3, 4, 8):
        before, after = window_shares(given.seq, given.ranks, part, of_call)
        print(f"work, window of 1/{part}: {before:.3f} of the mean, evened out {after:.3f}")
    for turns, evens_out in ((1, True), (1, False), (16, False), (64, False)):
        packed = packed_rows(given.packed, given.ranks, turns, of_call, evens_out=evens_out)
        print(
            f"packed rows of {given.packed}, {turns:2} turns{', evened out' * evens_out}: "
            f"{packed.mean:.3f} of the mean, the worst of {ROWS} rows {packed.worst:.3f}; "
            f"{packed.keys:.3f} of the keys, {packed.queries:.3f} of the queries, "
            f"{packed.tiles:.0f} tiles",
            flush=True,
        )
    graph = _graph(given, given.seq)
    print(f"{given.ranks} ranks, {given.seq} positions, {given.layers} layers of {given.hidden}")
    alone = _audited(graph, "dp", 1, {})
    print(
        f"  {'one rank':<16} {1e3 * alone.step_s:9.1f} ms  {alone.peak_bytes / 1e9:7.2f} GB, "
        f"state {_state_bytes(alone) / 1e9:.2f} GB"
    )
    for name, options in WAYS.items():
        try:
            cost = _audited(graph, "cp", given.ranks, options)
        except ShardwrightError as error:
            print(f"  {name:<16} {error.what}")
            continue
        peak, state = cost.peak_bytes, _state_bytes(cost)
        split = (peak - state) / (alone.peak_bytes - _state_bytes(alone))
        print(
            f"  {name:<16} {1e3 * cost.step_s:9.1f} ms  {peak / 1e9:7.2f} GB  "
            f"{peak / alone.peak_bytes:.3f} of one rank's, {split:.3f} without state, "
            f"{_sent_bytes(cost) / 1e9:.2f} GB sent",
            flush=True,
        )
    if given.memory:
        _print_longest(given)


def _print_longest(given: argparse.Namespace) -> None:
    most = given.memory * 1e9
    alone = longest(lambda length: _audited(_graph(given, length), "dp", 1, {}).peak_bytes, most)
    print(f"longest sequence in {given.memory:.0f} GB of each rank")
    print(f"  {'one rank':<16} {alone:9}")
    for name, options in WAYS.items():

        def peak(length: int, options: dict[str, Any] = options) -> float:
            return float(_audited(_graph(given, length), "cp", given.ranks, options).peak_bytes)

        try:
            found = longest(peak, most)
        except ShardwrightError as error:
            print(f"  {name:<16} {error.what}")
            continue
        print(f"  {name:<16} {found:9}  {found / alone:.2f} times that of one rank", flush=True)


def longest(peak: Callable[[int], float], most: float) -> int:
    """The longest sequence, a multiple of 1024 positions, whose peak is at most ``most`` bytes.
    Peaks grow evenly with the length, but for what a larger part of the step takes at its own peak;
    so the length that two peaks foretell is tried, and those beside it.
    """
    low, high = 16, 32
    peaks = {length: peak(1024 * length) for length in (low, high)}
    slope = (peaks[high] - peaks[low]) / (high - low)
    found = int(high + (most - peaks[high]) / slope)
    while peak(1024 * (found + 1)) <= most:
        found += 1
    while found and peak(1024 * found) > most:
        found -= 1
    return 1024 * found


def _graph(given: argparse.Namespace, length: int) -> IRGraph:
    module = llama(given.layers, given.hidden, given.heads, given.groups, length)
    tokens = torch.zeros(1, length, dtype=torch.int64)
    return annotate(trace(module, {"input_ids": tokens, "labels": tokens}), pass_manager())


def _state_bytes(cost: PlanCost) -> int:
    """Weights, gradients and the optimizer's state of the rank with the highest peak."""
    memory = max(cost.memory, key=lambda rank: sum(rank.by_category.values()))
    kinds = ("parameter", "gradient", "optimizer")
    return sum(memory.by_category.get(kind, 0) for kind in kinds)


def _sent_bytes(cost: PlanCost) -> float:
    """The bytes that the busiest rank exchanges for activations; sums of gradients aside."""
    return max(
        sum(size for name, size in rank.comm_bytes.items() if "gradients" not in name)
        for rank in cost.ranks
    )


def _audited(graph: IRGraph, policy: str, num_ranks: int, options: dict[str, Any]) -> PlanCost:
    config = ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks, outputs="loss", pas_config=options
    )
    compiled = compile_graph(graph, find_policy(policy).apply, config, policy_name=policy)
    return audit(compiled.program, config, load_hardware("a100-80gb", num_ranks))


if __name__ == "__main__":
    main()
