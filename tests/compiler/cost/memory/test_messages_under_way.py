"""Bytes of messages under way against the exchange of the runtime, with messages that go
nowhere.
"""

from typing import Any

import pytest
import torch

from shardwright.compiler.cost.memory.messages_under_way import Value, bytes_under_way
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.runtime.pipeline.segment import Segment, Transfer
from shardwright.runtime.pipeline.transfers import Exchange, Routes


class _Message:
    def __init__(self, open_messages: dict[int, int], x: torch.Tensor) -> None:
        self.open, self.x = open_messages, x
        open_messages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()

    def wait(self) -> None:
        self.open.pop(self.x.untyped_storage()._cdata, None)

    def is_completed(self) -> bool:
        return False


class _Nowhere:
    """Messages that tell nobody when they are gone. ``open``: bytes of what has not been waited
    for, by storage.
    """

    def __init__(self) -> None:
        self.open: dict[int, int] = {}

    def send(self, x: torch.Tensor, dst: int, what: str, *, phase: str) -> _Message:
        return _Message(self.open, x)

    def receive_(self, x: torch.Tensor, src: int, what: str, *, phase: str) -> _Message:
        return _Message(self.open, x)


def values_of(schedule: Schedule) -> list[Value]:
    """Each stage feeds the next one; the first also the last, which does not answer."""
    last = schedule.num_stages - 1
    chain = [
        Value(f"x{k}", k, k + 1, 4 * (k + 1), 4 * (k + 1), differentiable=True) for k in range(last)
    ]
    return [*chain, Value("mask", 0, last, 400, 400, differentiable=False)] if last > 1 else chain


def exchanged(schedule: Schedule, position: int, values: list[Value]) -> list[int]:
    """The bytes that the runtime's exchange holds during each action, beside what the action itself
    received.
    """
    place = schedule.placement

    def transfer(value: Value, *, arriving: bool) -> Transfer:
        other, num_bytes = (
            (value.source, value.received_bytes) if arriving else (value.target, value.sent_bytes)
        )
        pieces: Any = ((place[other], ((0, num_bytes // 4),)),)
        back = pieces if value.differentiable else ()
        return Transfer(
            value.name, other, torch.float32, (num_bytes // 4,), value.differentiable, pieces, back
        )

    segments = {
        stage: Segment(
            receives=tuple(transfer(v, arriving=True) for v in values if v.target == stage),
            sends=tuple(transfer(v, arriving=False) for v in values if v.source == stage),
        )
        for stage in schedule.stages_of(position)
    }
    routes, messages = Routes(position, segments), _Nowhere()
    actions = dict(enumerate(schedule.actions))
    routes_of = [routes] * schedule.num_microbatches
    exchange = Exchange(
        position, routes_of, actions, messages, lambda rank: rank, torch.device("meta")
    )  # type: ignore[arg-type]
    found = []
    for action in schedule.actions[position]:
        exchange.post_ahead(action)
        for arrival, item in routes.needs(action):
            exchange.receive(arrival, item)
        found.append(sum(messages.open.values()))
        segment = segments[action.stage]
        if action.kind == "F":
            sent: Any = segment.sends
        else:
            sent = (
                [item for item in segment.receives if item.differentiable]
                if action.kind in ("B", "I")
                else []
            )
        made: dict[str, torch.Tensor] = {}
        for item in sorted(sent, key=lambda item: (item.stage, item.name)):
            x = made.setdefault(item.name, torch.empty(item.shape, device="meta"))
            exchange.send(action, item, x)
    exchange.finish()
    return found


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("num_positions", "num_microbatches"), [(2, 4), (3, 7), (4, 8)])
def test_the_runtime_holds_as_much(name: str, num_positions: int, num_microbatches: int) -> None:
    if name == "1f1b_interleaved":
        num_microbatches = 2 * num_positions
    schedule = generate(name, num_positions, num_microbatches, SCHEDULES[name].min_chunks)
    values = values_of(schedule)
    stages = dict(enumerate(schedule.placement))
    for position in range(num_positions):
        found = list(bytes_under_way(position, schedule.actions, stages, values))
        assert found == exchanged(schedule, position, values), f"position {position}"


def test_buffers_are_posted_for_two_actions_and_what_was_sent_goes_with_the_answer() -> None:
    schedule = generate("1f1b", 2, 4, 1)
    # 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3: two gradients are awaited, and one activation has no answer
    # yet.
    sent = Value("x", 0, 1, 8, 8, differentiable=True)
    assert list(bytes_under_way(0, schedule.actions, {0: 0, 1: 1}, [sent])) == [
        16,
        24,
        24,
        24,
        24,
        24,
        16,
        0,
    ]
    kept = Value("x", 0, 1, 8, 8, differentiable=True, is_kept=True)
    assert list(bytes_under_way(0, schedule.actions, {0: 0, 1: 1}, [kept])) == [
        16,
        16,
        16,
        16,
        16,
        16,
        8,
        0,
    ]
