"""No statement of a file goes by the rank that runs it."""

import pytest

from shardwright.frontend.verification.outside.by_rank import goes_by_rank

FILE = '''"""Generated."""

import os
import torch
import torch.distributed as dist


class Net(ParallelModule):
    rank = 1

    def declare(self):
        self.parameter("up.weight", "[8/tp, 4]", torch.float32)

    def forward(self, x):
        tp = self.axis("tp")
        size = tp.local_size(8)
        mean = x.sum() / tp.size
        rows = embedding(x, self.up.weight, axes=(tp,), start=2 * tp.offset(30))
        left = rows[:, : tp.local_size(4)]
        scale = 0.5 if not self.training else 1.0
        for i in range(1, 3):
            rank = self.blocks[i].rank.weight
        kept = {name: left for name in ("logits", "count")}
        if self.trains:
            return all_reduce(left, tp)
        y = left
        return y
'''
A_CONDITION = "a condition may ask `self.training` and `self.trains` only"
A_LOOP = "a loop may run over `range` of numbers or constants only"
AN_ARGUMENT = "may be an argument of a call only"


def test_what_the_compiler_writes_goes_by_no_rank() -> None:
    assert goes_by_rank(FILE, 1) == ()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("if torch.any(x): y = torch.relu(y)", f"`torch.any(x)`: {A_CONDITION}"),
        ("y = y if tp.local_size(5) > 2 else x", f"`tp.local_size(5) > 2`: {A_CONDITION}"),
        ("while not size: size += 1", f"`not size`: {A_CONDITION}"),
        ("y = [z for z in range(2) if size]", f"`size`: {A_CONDITION}"),
        ("for _ in range(size): y = torch.relu(y)", f"`range(size)`: {A_LOOP}"),
        ("y = [z for z in (x, size)]", f"`(x, size)`: {A_LOOP}"),
        ("y = y * (1 + self.rank)", "`self.rank` tells which rank this is"),
        ("y = y * Net.rank", "`Net.rank` tells which rank this is"),
        ("y = y * dist.get_rank()", "`dist.get_rank` tells which rank this is"),
        ('y = y * int(os.environ["RANK"])', "`os.environ` tells which rank this is"),
        ("y = y * tp.index", "`tp.index` tells which rank this is"),
        ('y = y * self.axis("tp").index', "`self.axis('tp').index` tells which rank this is"),
        ("y = y * (1 + tp.offset(1))", f"`tp.offset(...)` {AN_ARGUMENT}"),
        ("y = [y, x][tp.offset(1)]", f"`tp.offset(...)` {AN_ARGUMENT}"),
        ("place = tp", f"`tp` is an axis, which {AN_ARGUMENT}"),
    ],
)
def test_statements_that_go_by_the_rank(statement: str, why: str) -> None:
    source = FILE.replace("        y = left\n", f"        y = left\n        {statement}\n")
    (said,) = goes_by_rank(source, 1)
    place, reason = said.splitlines()
    assert place == f"gencode1.py:27: {statement}"
    assert reason == f"  {why}"
