"""Gradients that somebody else has summed over the replicas: ``DistributedDataParallel`` around a
model of :func:`shardwright.initialize`, or a job of one replica.

Nothing is left to be sent. But of a cut parameter each rank still has a piece of the gradient, and
functions that clip have to know that: the norm of one device is that of all pieces.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from shardwright.runtime.training.gradients import TrainedModel
from shardwright.runtime.zero.settings import ReductionSettings


def note_gradients(module: nn.Module) -> None:
    """Let functions that clip find the gradients of ``module``, whose backward leaves whole sums of
    them on every rank. Collective, as making any reducer is.
    """
    model = TrainedModel(module, None)
    alone = model.world.partition([], "own")
    model.sums = [replace(item, communicator=alone) for item in model.sums]
    # Whoever sums has divided, too.
    model.settings = ReductionSettings()
    model.make_reducer()
