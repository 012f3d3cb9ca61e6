"""The executor: runs the actions of one rank in order, whatever schedule they are from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.runtime.errors import UsageError
from shardwright.runtime.pipeline.backward import SplitBackward
from shardwright.runtime.pipeline.segment import Transfer
from shardwright.runtime.pipeline.transfers import Exchange, Routes
from shardwright.runtime.recompute import num_recomputed
from shardwright.runtime.schedule_actions import ActionKind, ScheduleAction
from shardwright.runtime.training.reducer import Reducer

Leaves = dict[str, Tensor]
"""Tensors by their path in a sample or a result."""


class StageRunner(Protocol):
    """The module, as its executor sees it."""

    def run_stage(
        self, stage: int, microbatch: int, arguments: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """The forward of one stage: what its method returns."""

    def enter(self, stage: int, microbatch: int) -> None:
        """Compute for this stage and microbatch from now on: random numbers and mesh axes are
        theirs.
        """


class InFlight:
    """How many microbatches hold activations, as the step goes on.

    ``now``, ``peak``: by stage, now and at most. ``peak_of_rank``: at most, over all stages
    together.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.now = dict.fromkeys(stages, 0)
        self.peak = dict.fromkeys(stages, 0)
        self.peak_of_rank = 0

    def hold(self, stage: int) -> None:
        """One more microbatch holds activations of a stage."""
        self.now[stage] += 1
        self.peak[stage] = max(self.peak[stage], self.now[stage])
        self.peak_of_rank = max(self.peak_of_rank, sum(self.now.values()))

    def release(self, stage: int) -> None:
        """One microbatch of a stage holds nothing any more."""
        self.now[stage] -= 1


@dataclass(eq=False)
class _Held:
    """What the backward of one stage and microbatch needs. Graphs are held by their edges: a result
    that has been sent lives on only where the graph itself saved it.
    """

    inputs: list[tuple[Transfer, Tensor]]
    sent: list[tuple[Transfer, GradientEdge | None]]
    loss: Tensor | None
    recomputes: bool


@dataclass(eq=False)
class Step:
    """One step: what to run it on, and with what.

    ``samples``: by microbatch, the tensors that this rank's stages read. ``dummies``: by
    microbatch, whether nothing is back-propagated. ``loss_path``: of the loss among the outputs.
    ``scaled``: makes of a loss what is differentiated.
    ``reducer``: sums the gradients, in training.
    """

    samples: Sequence[Leaves]
    dummies: Sequence[bool]
    loss_path: str = ""
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss
    reducer: Reducer | None = None
    results: list[Leaves] = field(default_factory=list)


class Executor:
    """Runs one step of a rank. ``actions``: of this rank, without those that are left out;
    ``exchange``: for the same step;
    ``routes``: of each microbatch.

    ``linked``: pairs of stages of this rank that hold a parameter in common. ``open_stages``: those
    of this rank whose gradients are not complete after their last backward.
    """

    def __init__(
        self,
        runner: StageRunner,
        actions: Sequence[ScheduleAction],
        exchange: Exchange,
        routes: Sequence[Routes],
        linked: Sequence[tuple[int, int]] = (),
        open_stages: Collection[int] = (),
    ) -> None:
        self.in_flight = InFlight(list(routes[0].segments))
        self._runner = runner
        self._actions = actions
        self._exchange = exchange
        self._routes = routes
        self._last = _last_gradients(actions, linked, open_stages)
        self._held: dict[tuple[int, int], _Held] = {}
        self._split: dict[tuple[int, int], SplitBackward] = {}

    def run(self, step: Step) -> list[Leaves]:
        """Run all actions; the outputs that are made on this rank, by microbatch."""
        # The loop that runs any schedule: post receives ahead, then the action.
        step.results = [{} for _ in step.samples]
        for index, action in enumerate(self._actions):
            self._exchange.post_ahead(action)
            self._runner.enter(action.stage, action.microbatch)
            if action.kind is ActionKind.FORWARD:
                self._forward(action, step)
                continue
            assert step.reducer is not None, "a schedule for inference has forward actions only"
            # An asynchronous reducer starts to sum when a stage's gradients are complete.
            with nullcontext() if index in self._last else step.reducer.no_sync():
                if action.kind is ActionKind.BACKWARD:
                    self._backward(action, step)
                elif action.kind is ActionKind.INPUT_GRADIENT:
                    self._input_gradients(action, step)
                else:
                    self._weight_gradients(action)
        self._exchange.finish()
        assert not self._held and not self._split, (
            "a schedule for training has a backward for each forward"
        )
        return step.results

    def _forward(self, action: ScheduleAction, step: Step) -> None:
        microbatch = action.microbatch
        segment = self._routes[microbatch].segments[action.stage]
        trains = step.reducer is not None and not step.dummies[microbatch]
        # What comes in is a leaf of this microbatch's graph: gradients stop there, and are sent
        # back.
        received = []
        for arrival, transfer in self._routes[microbatch].needs(action):
            leaf = self._exchange.receive(arrival, transfer).detach()
            leaf.requires_grad_(trains and transfer.differentiable)
            received.append((transfer, leaf))
        arguments = [
            *(step.samples[microbatch][path] for path in segment.reads),
            *(x for _, x in received),
        ]
        # Fewer than before means that a region inside is computed again in backward.
        regions = num_recomputed()
        with torch.set_grad_enabled(trains):
            values = self._runner.run_stage(action.stage, microbatch, arguments)
        # A stage returns what it sends, then what the model returns.
        assert len(values) == len(segment.sends) + len(segment.outputs), (
            f"stage {action.stage} returns {len(values)} values"
        )
        sent = list(zip(segment.sends, values, strict=False))
        outputs = {
            path: x
            for path, x in zip(segment.outputs, values[len(sent) :], strict=True)
            if x is not None
        }
        # In the order of the channel.
        for transfer, x in sorted(sent, key=lambda item: (item[0].stage, item[0].name)):
            self._exchange.send(action, transfer, x)
        step.results[microbatch].update((path, x.detach()) for path, x in outputs.items())
        # Kept until the backward of this microbatch: leaves, edges of what was sent, the loss.
        if trains:
            self._held[action.stage, microbatch] = _Held(
                [(transfer, x) for transfer, x in received if transfer.differentiable],
                [
                    (t, get_gradient_edge(x) if x.requires_grad else None)
                    for t, x in sent
                    if t.differentiable
                ],
                outputs.get(step.loss_path),
                num_recomputed() > regions,
            )
            self.in_flight.hold(action.stage)

    def _backward(self, action: ScheduleAction, step: Step) -> None:
        held = self._held.pop((action.stage, action.microbatch))
        roots = self._roots(action, step, held)
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        self._send_gradients(action, held, [x.grad for _, x in held.inputs])
        self.in_flight.release(action.stage)

    def _input_gradients(self, action: ScheduleAction, step: Step) -> None:
        key = (action.stage, action.microbatch)
        if self._held[key].recomputes:
            # Each pass through the graph would recompute it, and what was recomputed would be held
            # until the second part.
            self._backward(action, step)
            return
        held = self._held.pop(key)
        split = self._split[key] = SplitBackward(
            self._roots(action, step, held), [x for _, x in held.inputs]
        )
        self._send_gradients(action, held, split.input_gradients())

    def _weight_gradients(self, action: ScheduleAction) -> None:
        split = self._split.pop((action.stage, action.microbatch), None)
        if split is not None:  # else the weight gradients came with the others
            split.accumulate()
            self.in_flight.release(action.stage)

    def _roots(
        self, action: ScheduleAction, step: Step, held: _Held
    ) -> list[tuple[GradientEdge, Tensor]]:
        """Where gradients come into the graph of a forward."""
        roots = []
        # Of a tensor that was sent only its edge is kept; the tensor itself may go.
        edges = {(transfer.name, transfer.stage): edge for transfer, edge in held.sent}
        for arrival, transfer in self._routes[action.microbatch].needs(action):
            grad = self._exchange.receive(arrival, transfer)
            edge = edges[transfer.name, transfer.stage]
            if edge is not None:
                roots.append((edge, grad))
        # The loss has no gradient from anywhere: it starts with 1, times the user's scale.
        if held.loss is not None:
            with torch.enable_grad():
                loss = step.scaled(held.loss)
            roots.append((get_gradient_edge(loss), torch.ones_like(loss)))
        return roots

    def _send_gradients(
        self, action: ScheduleAction, held: _Held, gradients: Sequence[Tensor | None]
    ) -> None:
        sent = zip(held.inputs, gradients, strict=True)
        for (transfer, _), grad in sorted(
            sent, key=lambda item: (item[0][0].stage, item[0][0].name)
        ):
            if grad is None:
                raise _no_gradient(action, transfer)
            self._exchange.send(action, transfer, grad)


def _no_gradient(action: ScheduleAction, transfer: Transfer) -> UsageError:
    """An autograd function of the user's may return ``None``. Zeros in its place would be a
    gradient, by which weight decay and momentum change parameters.
    """
    return UsageError(
        f"no gradient of {transfer.name!r} comes out of {action}, and stage {transfer.stage} waits "
        "for it",
        why="an operator between it and the loss returns None as its gradient; on one device the "
        "parameters before it would have none",
        hint=f"let the model say so: .detach() {transfer.name!r} where that operator reads it; or "
        "begin the stages elsewhere",
    )


def _last_gradients(
    actions: Sequence[ScheduleAction],
    linked: Sequence[tuple[int, int]],
    open_stages: Collection[int],
) -> set[int]:
    """The actions that complete the gradients of their stage, by position.

    The earlier one of two linked stages is not among them: the other one still adds to gradients of
    its own.
    """
    last = {
        action.stage: index
        for index, action in enumerate(actions)
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)
    }
    early = {min(pair, key=lambda stage: last.get(stage, -1)) for pair in linked} | set(open_stages)
    return {index for stage, index in last.items() if stage not in early}
