"""The files of a unit, of which each is made when somebody asks for it.

The ranks of a program without stages have one file but for two lines. Half a megabyte of source for
each of 65,536 ranks would be 32 GB at once, and who prices a plan reads none of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

PLAN_FILE = "plan.json"


@dataclass(frozen=True, eq=False)
class UnitFiles(Mapping[str, str]):
    """File names to texts: ``gencode<rank>.py`` of every rank, which ``source`` makes, and
    ``plan.json``, whose text is ``plan``.
    """

    num_ranks: int
    source: Callable[[int], str]
    plan: str

    def __getitem__(self, name: str) -> str:
        if name == PLAN_FILE:
            return self.plan
        found = re.fullmatch(r"gencode(0|[1-9][0-9]*)\.py", name)
        if found is None or int(found[1]) >= self.num_ranks:
            raise KeyError(name)
        return self.source(int(found[1]))

    def __iter__(self) -> Iterator[str]:
        yield from (f"gencode{rank}.py" for rank in range(self.num_ranks))
        yield PLAN_FILE

    def __len__(self) -> int:
        return self.num_ranks + 1
