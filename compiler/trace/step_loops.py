"""Finds the step that a stretch of operators repeats, and shows that it is a loop.

- Operators that are ``period`` places apart have the same function, line, module, shapes and
  arguments, but for values and numbers.
- A number is the same in every step, or grows by the same amount from each step to the next.
- A value that a step reads is made in the same step at the same place, or by the step before at the
  same place (it is *carried*), or outside of the loop. If it is made outside, it is the same in all
  steps, or a slice that moves on with them.

Example: 512 steps of ``h = torch.tanh(x[:, t] + h)`` are 1,536 operators. The period is 3, ``t`` is
the number that grows, ``h`` is carried, ``x`` is the same in all steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import Arg, IROp, leaves, map_leaves
from shardwright.compiler.ir.time_steps import StepIndex
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.tables.stepped import can_be_a_step
from shardwright.compiler.trace.naming import Namer

MIN_STEPS = 16
"""The fewest steps that become a loop. Fewer are as easily read one by one, and may be split in
more ways.
"""

MANY_STEPS = 128
"""The fewest steps that become a loop if nothing but sums is carried from step to step."""

MOST_PERIODS = 32
"""The number of periods that are tried, the most frequent first."""

MOST_PEELED = 3
"""How many steps at the beginning may be unlike the others."""

_PIECES = ("unbind", "split", "chunk")
"""Operators that cut a tensor into one piece for each step."""


# -------------------------------------------------------------------------------------------------
# finding stretches that repeat


@dataclass(frozen=True)
class Run:
    """A stretch of operators in which each is like the one ``period`` places behind it."""

    start: int
    length: int
    period: int

    @property
    def count(self) -> int:
        return self.length // self.period

    @property
    def stop(self) -> int:
        return self.start + self.length


def key_of(op: IROp) -> Hashable:
    """What an operator has in common with the same one in another step."""

    def leaf(arg: Arg) -> Arg:
        if isinstance(arg, IRValue):
            return "value"
        return "number" if type(arg) is int else (type(arg).__name__, str(arg))

    return (
        op.target,
        op.module_path,
        op.source,
        repr([(name, map_leaves(arg, leaf)) for name, arg in op.args]),
        tuple((value.shape, value.dtype) for value in op.results),
        (op.autocast, op.grad_enabled, op.region, op.only_in),
    )


def may_repeat(ops: Sequence[IROp]) -> bool:
    """Whether some line of some module makes one call often enough for a loop. Most models have
    none, and then nobody need work out all keys.
    """
    calls = Counter((op.target, op.module_path, op.source) for op in ops)
    return any(times >= MIN_STEPS for times in calls.values())


def runs(keys: Sequence[Hashable]) -> list[Run]:
    """Stretches that repeat often enough and do not overlap, in order; longer ones win."""
    places: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        places.setdefault(key, []).append(position)
    # The distance at which an operator comes again most often is a period.
    periods: Counter[int] = Counter()
    for found in places.values():
        if len(found) >= MIN_STEPS:
            distances = Counter(b - a for a, b in pairwise(found))
            distance, times = distances.most_common(1)[0]
            if times >= MIN_STEPS - 1:
                periods[distance] += times
    numbers: dict[Hashable, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in keys]
    candidates = [
        run
        for period, _ in periods.most_common(MOST_PERIODS)
        for run in _runs_of(ids, period)
        if run.count >= MIN_STEPS
    ]
    candidates.sort(key=lambda run: (-run.count * run.period, run.period, run.start))
    chosen: list[Run] = []
    for run in candidates:
        if all(run.stop <= other.start or other.stop <= run.start for other in chosen):
            chosen.append(run)
    return sorted(chosen, key=lambda run: run.start)


def _runs_of(ids: Sequence[int], period: int) -> Iterator[Run]:
    """The stretches in which every operator is like the one ``period`` behind it."""
    start = None
    for position in range(len(ids) - period + 1):
        alike = position < len(ids) - period and ids[position] == ids[position + period]
        if alike and start is None:
            start = position
        elif not alike and start is not None:
            yield Run(start, position - start + period, period)
            start = None


# -------------------------------------------------------------------------------------------------
# showing that a stretch is a loop


class _Unlike(Exception):
    """A stretch is no loop. ``peel``: it may be one without its first step."""

    def __init__(self, *, peel: bool = False) -> None:
        super().__init__()
        self.peel = peel


Place = tuple[int, int]
"""Which operator of a step makes a value, and which of its results it is."""

Carry = tuple[Place, int]
"""A place, and how many steps ago its value was made."""


@dataclass
class StepLoop:
    """A stretch that was shown to be a loop, still in the values of the graph.

    ``args``: of each operator of a step, with a place, a carry or a value of outside in a
    :class:`Read` for every value. ``carried``: the value that each carry has in front of the
    loop. ``moving``: whether something in it moves on from step to step.
    """

    start: int
    period: int
    count: int
    args: list[tuple[tuple[str, Arg], ...]] = field(default_factory=list)
    carried: dict[Carry, IRValue] = field(default_factory=dict)
    moving: bool = False


@dataclass(frozen=True)
class Read:
    """What an operator of a step reads: a value of this step (``place``), one of an earlier step
    (``carry``), one of outside (``value``), or a slice of one of outside that moves on with the
    steps (``index``).
    """

    place: Place | None = None
    carry: Carry | None = None
    value: IRValue | None = None
    index: tuple[Arg, ...] | None = None


class StepLoops:
    """What is known of a graph while stretches of it become loops.

    ``made``: the position of the operator that makes each value, and which of its results it is.
    ``uses``: the positions of those that read it. ``producers``: the operator that makes it now.
    ``given``: the values that the graph returns. ``names``: of all values and operators.
    ``instead``: what stands in the place of an operator now, by its position.
    """

    def __init__(self, graph: IRGraph) -> None:
        self.graph, self.ops = graph, graph.ops
        self.made: dict[str, tuple[int, int]] = {}
        self.producers: dict[str, tuple[IROp, int]] = dict(graph.producers())
        self.names = Namer()
        for value in graph.sources:
            self.names.unique(value.name)
        for position, op in enumerate(self.ops):
            self.names.unique(op.name)
            for index, value in enumerate(op.results):
                self.names.unique(value.name)
                self.made[value.name] = position, index
        self.uses: dict[str, list[int]] = {}
        for position, op in enumerate(self.ops):
            for value in op.operands:
                self.uses.setdefault(value.name, []).append(position)
        given = (*graph.outputs, *(after for _, after in graph.buffer_updates))
        self.given = {value.name for value in given}
        self.instead: dict[int, list[IROp]] = {}

    def loop(self, run: Run) -> StepLoop | None:
        """The loop that a stretch is, if it is one."""
        start = run.start + self._best_cut(run)
        for _ in range(MOST_PEELED + 1):
            count = (run.stop - start) // run.period
            if count < MIN_STEPS:
                return None
            step = self.ops[start : start + run.period]
            facts = {(op.autocast, op.grad_enabled, op.region) for op in step}
            if len(facts) > 1 or not all(map(can_be_a_step, step)):
                return None
            if any(position in self.instead for position in range(start, run.stop)):
                return None
            loop = StepLoop(start, run.period, count)
            try:
                self._show(loop)
            except _Unlike as unlike:
                if not unlike.peel:
                    return None
                start += run.period
                continue
            sums_only = all(self._is_summed(loop, carry) for carry in loop.carried)
            few = MANY_STEPS if sums_only else MIN_STEPS
            return loop if loop.moving and count >= few else None
        return None

    def _best_cut(self, run: Run) -> int:
        """Where in a stretch the first step begins: where the fewest values pass from one step to
        the next.
        """
        span = range(run.start, min(run.stop, run.start + 3 * run.period))
        crossing = Counter[int]()
        for position in span:
            for value in self.ops[position].results:
                last = max((use for use in self.uses.get(value.name, ()) if use in span), default=0)
                for cut in range(position + 1, last + 1):
                    crossing[cut] += 1
        # Within the middle step everything that passes is seen; no step may be lost by the choice.
        spare = run.length - run.count * run.period
        cuts = range(min(spare, run.period - 1) + 1)
        return min(cuts, key=lambda cut: crossing[run.start + run.period + cut])

    # -- one stretch

    def _show(self, loop: StepLoop) -> None:
        """Show that the stretch is a loop. Raises :class:`_Unlike`."""
        for place in range(loop.period):
            ops = self.ops[loop.start + place : loop.start + loop.period * loop.count : loop.period]
            args = []
            for number, (name, _) in enumerate(ops[0].args):
                args.append((name, self._common(loop, [op.args[number][1] for op in ops])))
            loop.args.append(tuple(args))

    def _common(self, loop: StepLoop, args: Sequence[Arg]) -> Arg:
        """What an argument is in every step."""
        first = args[0]
        if isinstance(first, tuple):
            columns = zip(*args, strict=True)
            return tuple(self._common(loop, column) for column in columns)
        if isinstance(first, slice):
            return slice(
                self._common(loop, [arg.start for arg in args]),
                self._common(loop, [arg.stop for arg in args]),
                self._common(loop, [arg.step for arg in args]),
            )
        if isinstance(first, IRValue):
            return self._read(loop, args)
        if type(first) is not int:
            return first  # the keys are equal
        stride = args[1] - first
        number = StepIndex(first, stride)
        if any(arg != number.at(step) for step, arg in enumerate(args)):
            later = all(b - a == args[2] - args[1] for a, b in pairwise(args[1:]))
            raise _Unlike(peel=later)
        loop.moving |= stride != 0
        return number if stride else first

    def _read(self, loop: StepLoop, values: Sequence[IRValue]) -> Read:
        """What a value is in every step."""
        last = self._place(loop, values[-1])
        if last is None:
            return self._read_outside(loop, values)
        (step, place, index), distance = last, 0
        distance = loop.count - 1 - step
        for step, value in enumerate(values):
            found = self._place(loop, value)
            expected = (step - distance, place, index)
            if step < distance:
                # What it is in front of the loop: made outside, of the same form.
                if found is not None:
                    raise _Unlike(peel=True)
                self._begin(loop, ((place, index), distance - step), value)
            elif found != expected:
                raise _Unlike(peel=step <= MOST_PEELED)
        here = (place, index)
        return Read(carry=(here, distance)) if distance else Read(place=here)

    def _begin(self, loop: StepLoop, carry: Carry, value: IRValue) -> None:
        (place, index), _ = carry
        later = self.ops[loop.start + place].results[index]
        fits = value.shape == later.shape and value.dtype == later.dtype
        if not fits or loop.carried.setdefault(carry, value).name != value.name:
            raise _Unlike(peel=True)

    def _place(self, loop: StepLoop, value: IRValue) -> tuple[int, int, int] | None:
        """The step, the operator and the result that a value is; ``None`` if it is made outside."""
        position, index = self.made.get(value.name, (-1, 0))
        if not loop.start <= position < loop.start + loop.period * loop.count:
            return None
        return (*divmod(position - loop.start, loop.period), index)

    def _read_outside(self, loop: StepLoop, values: Sequence[IRValue]) -> Read:
        if any(self._place(loop, value) is not None for value in values):
            raise _Unlike
        if all(value.name == values[0].name for value in values):
            return Read(value=values[0])
        made = [self.producers.get(value.name) for value in values]
        alike = values[1:] and all(found is not None for found in made)
        if not alike:
            raise _Unlike(peel=True)
        loop.moving = True
        return self._slices([found for found in made if found is not None], loop)

    def _slices(self, made: Sequence[tuple[IROp, int]], loop: StepLoop) -> Read:
        """Slices of one tensor, one for each step."""
        op = made[0][0]
        source = op.operands[0]
        if any(other.operands[:1] != (source,) or len(other.operands) > 1 for other, _ in made):
            raise _Unlike(peel=True)
        same_facts = all(
            (other.target, other.grad_enabled, other.autocast)
            == (op.target, op.grad_enabled, op.autocast)
            for other, _ in made
        )
        if not same_facts or not op.grad_enabled:
            raise _Unlike(peel=True)
        if op.target == "getitem" and len({key_of(replace(o, source=None)) for o, _ in made}) == 1:
            index = self._common(loop, [other.arg("index") for other, _ in made])
            assert isinstance(index, tuple)
            return Read(value=source, index=index)
        # The pieces of one operator, in order.
        numbers = self._common(loop, [index for _, index in made])
        if op.target not in _PIECES or any(other is not op for other, _ in made):
            raise _Unlike(peel=True)
        dim = op.arg("dim", 0)
        dim %= source.ndim
        assert isinstance(numbers, StepIndex)
        if op.target == "unbind":
            return Read(value=source, index=(*(slice(None),) * dim, numbers))
        width = op.results[0].shape[dim]
        if any(op.results[index].shape[dim] != width for _, index in made):
            raise _Unlike
        start, stride = width * numbers.start, width * numbers.stride
        piece = slice(StepIndex(start, stride), StepIndex(start + width, stride), None)
        return Read(value=source, index=(*(slice(None),) * dim, piece))

    def _is_summed(self, loop: StepLoop, carry: Carry) -> bool:
        """Whether a carried value is only added to, or written to at other places: its steps need
        not run one after the other.
        """
        (place, _), _ = carry
        readers = [
            number
            for number, args in enumerate(loop.args)
            for _, arg in args
            for leaf in leaves(arg)
            if isinstance(leaf, Read) and leaf.carry is not None and leaf.carry[0] == carry[0]
        ]
        target = self.ops[loop.start + place].target
        return readers == [place] and target in ("add", "select_scatter")
