"""Reference programs: what a device without a queue of launches takes beyond products and memory
streams.

A CPU waits for Python and autograd at every operator, computes exponentials slower than it moves
memory, and fetches what a product needs before it computes. Each of these is measured by a small
program of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.cost.local_calls import LocalCall, local_call
from shardwright.compiler.cost.machine.device import Device
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.operator_time import roofline
from shardwright.compiler.cost.time.operator_traffic import call_bytes
from shardwright.compiler.cost.time.token_copies import ROUTED
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule import KERNEL_ATTENTION
from shardwright.compiler.passes.rules import attach_rules
from shardwright.compiler.trace.entry import trace
from shardwright.experts import combine, dispatch
from shardwright.frontend.calibrate.effort import Effort
from shardwright.frontend.calibrate.measured_operators import Point, median_of_all, of_all
from shardwright.frontend.calibrate.profile import profile_call
from shardwright.runtime.layout import Mesh
from shardwright.runtime.ranks.world import World

FETCHED = ((256, 256, 256), (512, 192, 768), (512, 768, 192))
"""``(m, n, k)`` of products whose operands are fetched from memory."""

FETCHED_BYTES = 2**27
"""So much memory lies between two uses of an operand: more than caches hold."""

NUM_LAYERS = 6


TOKENS, WIDTH, EXPERTS = 512, 256, 8


class Operators(nn.Module):
    """One of each operator that computes more than it moves, or moves it here and there, on tensors
    that fit into a cache: x [TOKENS, WIDTH].
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        x = x * self.scale  # so that it takes a gradient
        made = [
            *(F.gelu(x), F.silu(x), F.relu(x), torch.tanh(x), torch.sigmoid(x), torch.exp(x)),
            *(
                F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias),
                F.rms_norm(x, (WIDTH,), self.scale),
            ),
            *(F.softmax(x, -1), F.log_softmax(x, -1), F.dropout(x, 0.5), x * x),
        ]
        chosen = torch.stack([classes, classes + 1], 1)
        rows, routing = dispatch(x, chosen, num_experts=EXPERTS)
        made.append(combine(rows, routing))
        total = F.cross_entropy(x, classes)
        for y in made:
            total = total + y.sum()
        return total


REFERENCES = (
    "gelu",
    "silu",
    "relu",
    "tanh",
    "sigmoid",
    "exp",
    "layer_norm",
    "rms_norm",
    "softmax",
    "log_softmax",
    "dropout",
    "cross_entropy",
    "dispatch",
    "combine",
)
"""Operators of :class:`Operators` that are measured by bytes per second."""


def measure_references(world: World, effort: Effort) -> list[Point]:
    """``{operator, forward_bytes, backward_bytes, forward_s, backward_s}`` of each operator, the
    median over the ranks.
    """
    points: list[Point] = []
    for op in _reference_ops().values():
        call = local_call(op, {}, Mesh())
        if op.target in ROUTED:
            time = _measured_routed(op.target, world, effort)
        else:
            time = _measured(op, call, world, effort)
        forward_bytes, backward_bytes = call_bytes(call)
        sizes = {"forward_bytes": forward_bytes, "backward_bytes": backward_bytes}
        times = {"forward_s": time.forward_s, "backward_s": time.backward_s}
        points.append({"operator": op.target, **sizes, **times})
    return points


def _measured_routed(target: str, world: World, effort: Effort) -> OpTime:
    """The time of ``dispatch`` or ``combine``, whose routing is no tensor of zeros."""
    x = torch.randn(TOKENS, WIDTH, device=world.device, requires_grad=True)
    chosen = torch.arange(2 * TOKENS, device=world.device).view(TOKENS, 2).mul(5) % EXPERTS
    rows, routing = dispatch(x, chosen, num_experts=EXPERTS)
    rows = rows.detach().requires_grad_()
    into = x if target == "dispatch" else rows

    calls: dict[str, Callable[[], Tensor]] = {
        "dispatch": lambda: dispatch(x, chosen, num_experts=EXPERTS)[0],
        "combine": lambda: combine(rows, routing),
    }
    forward = calls[target]
    made = forward()
    ones = torch.ones_like(made)
    forward_s = of_all(world, forward, effort)
    backward = partial(torch.autograd.grad, made, into, ones, retain_graph=True)
    return OpTime(forward_s, of_all(world, backward, effort))


def _measured(op: IROp, call: LocalCall, world: World, effort: Effort) -> OpTime:
    """The median over the ranks of the time of a call."""
    # All ranks measure at once, and each time anew: the second of two calls has found its kernels
    # loaded.
    world.barrier()
    mine: tuple[float | None, float | None] = None, None
    if effort.measures:
        time = profile_call(
            op, call, Mesh(), world.device, effort.point_s, effort.sample_s, most_copies=1
        )
        mine = time.forward_s, time.backward_s
    return OpTime(*(median_of_all(world, seconds) for seconds in mine))


def measure_attention(world: World, effort: Effort) -> list[Point]:
    """``{shape, dtype, forward_s, backward_s}`` of causal attention in each of the shapes ``[batch,
    heads, queries, width]``.
    """
    points: list[Point] = []
    for shape in effort.attention:
        op = _attention_op(shape, effort.attention_dtype)
        time = _measured(op, local_call(op, {}, Mesh()), world, effort)
        sizes = {"shape": list(shape), "dtype": str(effort.attention_dtype)}
        points.append({**sizes, "forward_s": time.forward_s, "backward_s": time.backward_s})
    return points


def attention_efficiency(device: Device, points: list[Point]) -> tuple[float, float]:
    """The part of the rate of its products that attention reaches on a device, as its products are
    described, forward and backward: the geometric mean over the points.
    """
    device = replace(device, attention_efficiency=(1.0, 1.0))
    logs: list[tuple[float, float]] = []
    for point in points:
        dtype = getattr(torch, point["dtype"].removeprefix("torch."))
        op = _attention_op(tuple(point["shape"]), dtype)
        alone = roofline(local_call(op, {}, Mesh()), device)
        forward, backward = (
            alone.forward_s / point["forward_s"],
            alone.backward_s / point["backward_s"],
        )
        logs.append((math.log(forward), math.log(backward)))
    forwards, backwards = zip(*logs, strict=True)
    return math.exp(statistics.fmean(forwards)), math.exp(statistics.fmean(backwards))


def measure_fetches(world: World, effort: Effort) -> list[Point]:
    """Products whose operands and results were used last or long ago: ``{m, n, k, bytes, cached_s,
    seconds}``.
    """
    points: list[Point] = []
    for m, n, k in FETCHED:
        size = 4 * (m * k + n * k + m * n)
        # Many copies of the operands: by the time that one is used again it is out of the cache.
        copies = [
            tuple(torch.randn(shape, device=world.device) for shape in ((m, k), (k, n), (m, n)))
            for _ in range(2)
        ]
        copies += [
            tuple(torch.empty_like(x).copy_(x) for x in copies[0])
            for _ in range(FETCHED_BYTES // size - 2)
        ]
        turns = itertools.cycle(copies)

        def fetched(turns: Any = turns) -> Tensor:
            a, b, out = next(turns)
            return torch.mm(a, b, out=out)

        a, b, out = copies[0]
        cached_s = of_all(world, partial(torch.mm, a, b, out=out), effort, 2)
        seconds = of_all(world, fetched, effort, 4)
        points.append(
            {"m": m, "n": n, "k": k, "bytes": size, "cached_s": cached_s, "seconds": seconds}
        )
    return points


def measure_host(world: World, effort: Effort) -> Mapping[str, float]:
    """Seconds per operator of a program of many kinds on tiny tensors: ``{"forward_s",
    "backward_s"}``.
    """
    program = _Tiny()
    x = torch.ones(2, 2, 4)
    program(x).backward()  # the first one allocates
    forward_s = of_all(world, partial(program, x), effort, 5)

    def both() -> None:
        program.zero_grad()
        program(x).backward()

    both_s = of_all(world, both, effort, 5)
    number = NUM_LAYERS * _Tiny.OPERATORS + 1
    return {"forward_s": forward_s / number, "backward_s": (both_s - forward_s) / number}


class _Tiny(nn.Module):
    """Layers of a transformer on next to no numbers: all their time is the host's. x [2, 2, 4]."""

    OPERATORS = 13

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(4) for _ in range(2 * NUM_LAYERS))
        self.matrices = nn.ParameterList(torch.eye(4) for _ in range(2 * NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        vectors, matrices = iter(self.vectors), iter(self.matrices)
        for norm, bias, up, down in zip(vectors, vectors, matrices, matrices, strict=True):
            y = F.layer_norm(x, (4,), norm, bias)
            y = F.linear(y, up, bias)
            # What a transformer does between products, on tensors so small that the host's time is
            # all.
            y = y.view(2, 2, 2, 2)
            y = y.transpose(1, 2)
            y = y * y
            y = y.transpose(1, 2)
            y = y.flatten(2)
            x = x + F.linear(y, down, bias)
            y = F.layer_norm(x, (4,), norm, bias)
            y = F.gelu(F.linear(y, up, bias))
            x = x + y
        return x.sum()


@functools.cache
def _traced() -> tuple[IROp, ...]:
    x, classes = torch.zeros(TOKENS, WIDTH), torch.zeros(TOKENS, dtype=torch.int64)
    return attach_rules(trace(Operators(), {"x": x, "classes": classes})).ops


_tracing = threading.Lock()  # ranks may be threads, and tracing is for one at a time


def _reference_ops() -> dict[str, IROp]:
    """The first call of each operator that a reference measures, by target."""
    with _tracing:
        ops = _traced()
    found: dict[str, IROp] = {}
    for op in ops:
        if op.target in REFERENCES:
            found.setdefault(op.target, op)
    return found


class Attention(nn.Module):
    """Causal attention of a tensor ``[batch, heads, queries, width]`` to itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale  # so that it takes a gradient
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


def _attention_op(shape: tuple[int, ...], dtype: torch.dtype) -> IROp:
    with _tracing:
        return _traced_attention(shape, dtype)


@functools.cache
def _traced_attention(shape: tuple[int, ...], dtype: torch.dtype) -> IROp:
    ops = attach_rules(trace(Attention(dtype), {"x": torch.zeros(shape, dtype=dtype)})).ops
    return next(op for op in ops if op.target == KERNEL_ATTENTION)
