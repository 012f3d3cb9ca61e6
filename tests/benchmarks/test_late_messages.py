"""Late messages of benchmarks/late_messages.py: no way of sending goes around them."""

from spawn import run_processes

DELAY_S = 0.02


def test_every_collective_is_late_whatever_starts_it() -> None:
    for found in run_processes(2, "late_jobs:every_collective", DELAY_S):
        assert found.pop("afterwards") == []
        for name, messages in found.items():
            assert len(messages) == 1, name
            ((sent_s, last_s, awaited_s, there_s, busy_s, cpu_s),) = messages
            assert sent_s == last_s <= awaited_s < there_s, name
            assert there_s - sent_s >= DELAY_S, name
            assert 0 <= busy_s <= cpu_s < 2 * (there_s - sent_s), name
