"""What a pipelined module runs in one mode on one rank, whatever the sizes of a sample.

Where sizes vary between samples, the ends of each transfer follow from its layouts, which generated
code states as a function of the sizes. They are worked out once for every combination of sizes that
occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from shardwright.runtime.layout import Layout
from shardwright.runtime.pipeline.segment import Segment, Stage, Transfer
from shardwright.runtime.pipeline.transfers import Routes
from shardwright.runtime.transfer import Holding, end_of

Sizes = tuple[int, ...]
"""The sizes of one sample, in the order of the module's ``sizes``; empty where none vary."""

LayoutsAt = Callable[..., Mapping[tuple[str, int, int], tuple[str, str]]]
"""A function of sizes that gives the layouts of each value where it is sent and where it is
received, by value and the two stages.
"""

ShapesAt = Callable[..., Mapping[str, tuple[int, ...]]]
"""A function of sizes that gives the shapes of results, by path."""

MAX_KNOWN_SIZES = 1024
"""The most combinations of sizes for which routes are kept."""


class Body:
    """One of the bodies of a module. ``ending``: what the names of its methods end with.

    ``segments``: of this rank. ``output_stages``: by path of a result, the stage that makes it, its
    shape (``None`` where that varies) and its dtype. ``layouts`` and ``shapes``: where sizes vary,
    transfers and results as functions of them.
    """

    def __init__(
        self,
        ending: str,
        rank: int,
        stages: Sequence[Stage],
        segments: Mapping[int, Segment],
        output_stages: Mapping[str, tuple[int, tuple[int, ...] | None, torch.dtype]],
        layouts: LayoutsAt | None,
        shapes: ShapesAt | None,
    ) -> None:
        self.ending = ending
        self.segments = segments
        self.output_stages = output_stages
        self._rank = rank
        self._stages = stages
        self._layouts = layouts
        self._shapes = shapes
        self.routes = lru_cache(MAX_KNOWN_SIZES)(self._routes)
        self.shapes = lru_cache(MAX_KNOWN_SIZES)(self._shapes_at)

    @property
    def senders(self) -> set[int]:
        """The unit ranks that may send to this one."""
        return self.routes(()).senders if self._layouts is None else self._neighbours()

    @property
    def receivers(self) -> set[int]:
        """The unit ranks that this one may send to."""
        return self.routes(()).receivers if self._layouts is None else self._neighbours()

    def _neighbours(self) -> set[int]:
        """The ranks of all stages that this rank exchanges something with; sizes decide which of
        them.
        """
        transfers = [
            t for segment in self.segments.values() for t in (*segment.receives, *segment.sends)
        ]
        return {rank for transfer in transfers for rank in self._stages[transfer.stage].ranks} - {
            self._rank
        }

    def _routes(self, sizes: Sizes) -> Routes:
        """What crosses between stages for a sample of these sizes."""
        # Nothing varies: routes are written in the file.
        if self._layouts is None:
            return Routes(self._rank, self.segments)
        layouts = self._layouts(*sizes)

        # A transfer with the shape and the pieces that it has for these sizes.
        def sized(transfer: Transfer, stage: int, *, arriving: bool) -> Transfer:
            source, target = (transfer.stage, stage) if arriving else (stage, transfer.stage)
            sent, received = (
                Holding(Layout.parse(text), self._stages[at].mesh, self._stages[at].ranks)
                for text, at in zip(
                    layouts[transfer.name, source, target], (source, target), strict=True
                )
            )
            # Both ends work out the same pieces from the two layouts, and take their own part of
            # them.
            end = end_of(
                sent,
                received,
                self._rank,
                arriving=arriving,
                differentiable=transfer.differentiable,
            )
            return replace(
                transfer, shape=end.shape, pieces=end.pieces, grad_pieces=end.grad_pieces
            )

        segments = {}
        for stage, segment in self.segments.items():
            receives = tuple(sized(transfer, stage, arriving=True) for transfer in segment.receives)
            sends = tuple(sized(transfer, stage, arriving=False) for transfer in segment.sends)
            segments[stage] = replace(segment, receives=receives, sends=sends)
        return Routes(self._rank, segments)

    def _shapes_at(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the results of a sample of these sizes, by path."""
        if self._shapes is not None:
            return self._shapes(*sizes)
        return {
            path: shape for path, (_, shape, _) in self.output_stages.items() if shape is not None
        }
