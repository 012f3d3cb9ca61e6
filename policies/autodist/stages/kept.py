"""What the operators of a program keep for the backward, and what is saved where some of them are
computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from shardwright.compiler.cost.fake.saved_tensors import saved_for_backward
from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.time.kept_weights import VIEWS
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.program import Compute, Step
from shardwright.runtime.config import RngMode
from shardwright.runtime.layout import Layout, Mesh


class Kept:
    """Bytes of one microbatch on one rank. Places are positions in the operators of the graph; an
    adapter has that of the next operator. Views count with the tensor whose memory they share, its
    *root*.
    """

    def __init__(
        self,
        instructions: Iterable[tuple[int, Step]],
        own: set[str],
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        rng: RngMode = "fast",
    ) -> None:
        self._mesh, self._layouts, self._rng = mesh, layouts, rng
        self._own = own = set(own)
        self._roots: dict[str, str] = {}
        self._made: dict[str, int] = {}  # place where a root is made
        self._keepers: dict[
            str, list[int]
        ] = {}  # places of the operators that keep a root, ascending
        self._bytes: dict[str, int] = {}  # of a root, as it is kept or read first
        self._touched: dict[
            int, dict[str, set[str]]
        ] = {}  # roots made or read at a place, by which adapter, or ""
        self._internal: dict[int, int] = {}  # made inside an operator and kept
        for place, instruction in instructions:
            if isinstance(instruction, Compute):
                for value in instruction.op.operands:
                    self._touch(place, value)
                self._keep(place, instruction)
                continue
            self._touch(place, instruction.value, instruction.result.name)
            if instruction.value.name in own:
                # A weight is gathered again in the backward, not kept.
                own.add(instruction.result.name)
            else:
                shares = instruction.value if instruction.step.kind in VIEWS else None
                self._result(place, instruction.result, shares, instruction.result.name)

    def first(self, start: int, stop: int) -> int:
        """Bytes that are kept by the operators of a range and by none before them."""
        roots = (
            root
            for root in self._of(start, stop)
            if self._keepers.get(root, [-1])[0] in range(start, stop)
        )
        return sum(self._bytes[root] for root in roots) + self._inside(start, stop)

    def saved(self, start: int, stop: int, front: Set[str] = frozenset()) -> int:
        """Bytes that computing a range again saves: what only the range keeps of what it makes,
        less what it reads and nothing keeps so far. ``front``: the names of what adapters in front
        of the range make for it.
        """
        saved = self._inside(start, stop)
        for root in self._of(start, stop, front):
            keepers, made = self._keepers.get(root, []), self._made.get(root)
            inside = made is not None and start <= made and root not in front
            # Made inside and kept by nobody behind: then it need not be kept at all.
            if inside and keepers and keepers[-1] < stop:
                saved += self._bytes[root]
            elif made is not None and not inside and not keepers:
                # Made outside and so far kept by nobody: computing again has to keep it.
                saved -= self._bytes[root]
        return saved

    def _of(self, start: int, stop: int, front: Set[str] = frozenset()) -> dict[str, None]:
        """The roots of a range, as far as adapters that are not in front of it, or operators, make
        or read them.
        """
        listed = (self._touched.get(place, {}) for place in range(start, stop))
        return {root: None for touched in listed for root, by in touched.items() if not by <= front}

    def _inside(self, start: int, stop: int) -> int:
        return sum(self._internal.get(place, 0) for place in range(start, stop))

    def _touch(self, place: int, value: IRValue, adapter: str = "") -> str | None:
        """The root of a value, noted; None for parameters, buffers and constants. ``adapter``: the
        name of what one makes.
        """
        root = self._roots.get(value.name, value.name)
        if root in self._own:
            return None
        self._touched.setdefault(place, {}).setdefault(root, set()).add(adapter)
        if root not in self._bytes:
            layout = self._layouts.get(value.name)
            self._bytes[root] = (
                local_bytes(layout, value.dtype, self._mesh) if layout is not None else 0
            )
        return root

    def _result(
        self, place: int, value: IRValue, shares: IRValue | None, adapter: str = ""
    ) -> None:
        if shares is not None:
            self._roots[value.name] = self._roots.get(shares.name, shares.name)
        else:
            self._made[value.name] = place
            self._touch(place, value, adapter)

    def _keep(self, place: int, instruction: Compute) -> None:
        saved = saved_for_backward(
            instruction.original, instruction.assignment, self._mesh, self._rng
        )
        # A view has the memory of what it views.
        for result, position in zip(instruction.op.results, saved.views, strict=False):
            self._result(
                place, result, None if position is None else instruction.op.operands[position]
            )
        if saved.internal_bytes:
            self._internal[place] = saved.internal_bytes
        values = [instruction.op.operands[i] for i in saved.operands] + [
            instruction.op.results[i] for i in saved.results
        ]
        # Every tensor counts at its root, once, however many keep it.
        for value in values:
            root = self._touch(place, value)
            if root is not None:
                self._keepers.setdefault(root, []).append(place)
