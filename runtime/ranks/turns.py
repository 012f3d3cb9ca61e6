"""Which of the threads of one process runs: one at a time, in the order in which they could go on.

Threads that all could run take the interpreter's lock from each other at every operator of torch,
which lets go of it while it computes: many small operators then take much longer than on one
thread. Here a rank runs until it has to wait for others, so that runs have one order too. Only
where a rank keeps others from running for long, by a large operator or because it waits for
something that is none of its turns, the next one runs beside it.
"""

from __future__ import annotations

import threading
from collections import deque

PATIENCE_S = 0.05
"""How long those who could run wait for the one that runs."""


class Turns:
    """Whose turn it is. A rank has its turn from :meth:`begin` to :meth:`end`, but not while it is
    in :meth:`wait`.

    ``lock`` guards this object, and what changes together with it: ``wait``, ``call`` and ``end``
    are called by its holder.
    """

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.RLock()
        self._gates = [threading.Lock() for _ in range(num_ranks)]
        for gate in self._gates:
            gate.acquire()
        self._called = deque(range(num_ranks))  # could run
        self._asleep: set[int] = set()  # could not
        self._num_running = 0
        self._num_turns = 0
        self._num_seen = 0
        self._give_next()

    def begin(self, rank: int) -> None:
        """Wait for the first turn of a rank."""
        self._gates[rank].acquire()

    def wait(self, rank: int, timeout_s: float) -> bool:
        """Let others run until ``rank`` has been called, and then has its turn. Whether that was so
        in time; it runs anyhow.
        """
        self._asleep.add(rank)
        self.end()
        self.lock.release()
        in_time = self._gates[rank].acquire(timeout=timeout_s)
        self.lock.acquire()
        # The call may have come between the end of the wait and the lock.
        if in_time or self._gates[rank].acquire(blocking=False):
            return True
        self.call(rank)
        self._called.remove(rank)
        self._num_running += 1
        return False

    def call(self, rank: int) -> None:
        """``rank`` could run on, if it waits."""
        if rank in self._asleep:
            self._asleep.remove(rank)
            self._called.append(rank)

    def end(self) -> None:
        """The rank that runs has returned."""
        self._num_running -= 1
        if self._num_running == 0:
            self._give_next()

    def free(self) -> None:
        """Let everyone run."""
        with self.lock:
            for rank in sorted(self._asleep):
                self.call(rank)
            while self._called:
                self._give_next()

    def hurry(self) -> None:
        """Give one more turn if nobody has passed one on since the last call; for a clock of
        :data:`PATIENCE_S`.
        """
        with self.lock:
            if self._num_turns == self._num_seen:
                self._give_next()
            self._num_seen = self._num_turns

    def _give_next(self) -> None:
        if self._called:
            self._num_running += 1
            self._num_turns += 1
            self._gates[self._called.popleft()].release()
