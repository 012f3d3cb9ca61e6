"""Ranks fail together: an error on one is raised on all, so that none waits for it in a
collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.runtime.errors import CheckpointError, ShardwrightError
from shardwright.runtime.ranks.world import World


@contextmanager
def together(world: World) -> Iterator[None]:
    """Run a block that does not communicate; then all ranks go on, or all raise. Collective at the
    end of the block.

    The block may take as long as it needs: ranks wait for those that live.

    Raises the rank's own error where it has one, and elsewhere :class:`CheckpointError` with the
    text of the first one.
    """
    failure: Exception | None = None
    exchange = world.exchange()
    with exchange.working():
        try:
            yield
        except Exception as error:
            failure = error
        except BaseException as error:
            exchange.leave(error)
            raise
        # Even a rank that has failed takes part in the exchange: the others wait for its word.
        mine: list[str] | None = None
        if failure is not None:
            mine = [str(failure) if isinstance(failure, ShardwrightError) else repr(failure)]
        texts = exchange.all_gather_object(mine)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            what, *rest = text[0].splitlines()
            raise CheckpointError("\n".join([f"rank {rank}: {what}", *rest]))
