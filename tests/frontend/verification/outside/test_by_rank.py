"""No statement of a file goes by the rank that runs it."""

import pytest

from shardwright.frontend.verification.outside.by_rank import goes_by_rank

FILE = '''"""Generated."""

import os
import torch
import torch.distributed as dist
import my_project.layers


class Net(ParallelModule):
    rank = 1

    def declare(self):
        self.parameter("up.weight", "[8/tp, 4]", torch.float32)
        for layer in range(3):
            self.parameter(f"blocks.{layer}.rank.weight", "[4]", torch.float32)

    def forward(self, x):
        tp = self.axis("tp")
        size = tp.local_size(8)
        cut = Cut((tp.local_size(4), 3), element=(tp.place_of(1, 2), 2))
        heads = x.view(3 * size, max(tp.local_size(5), 1), 4)
        own = my_project.layers.rows(x, size, tp.offset(30))
        with torch.no_grad():
            abs = torch.abs(x)
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
NO_SIZE = "is the size of a piece, and"
A_SIZE = f"{NO_SIZE} may be told to calls that take sizes only"
A_CONDITION = "a condition may ask `self.training` and `self.trains` only"
A_LOOP = "a loop may run over `range` of numbers or constants only"
A_CONTEXT = "a `with` may enter `torch.no_grad()` or `torch.autocast` only"
A_ROW = "may be the `start` of cross_entropy, embedding, linear_cross_entropy, nll_loss only"


def test_what_the_compiler_writes_goes_by_no_rank() -> None:
    assert goes_by_rank(FILE, 1) == ()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        # Kinds of statements, and names of Python.
        ("while size: size += 1", "the compiler writes no `while`"),
        ("import os; y = y * os.getpid()", "`import os`: the compiler imports at the top only"),
        ("y = y * int(__file__[-4])", "`__file__` tells which rank this is"),
        ("try: y = y + 1\n        finally: pass", "the compiler writes no `try`"),
        ("y = (lambda z: z)(y)", "the compiler writes no `lambda`"),
        ('y = y * getattr(self, "rank")', "the compiler writes no `getattr`"),
        ("module = self", "`self` may be asked for its parts only"),
        ("y = size > 2 and x or y", "`size > 2 and x or y` computes one operand or the other"),
        ("with x.lock(): y = y + 1", f"`x.lock()`: {A_CONTEXT}"),
        # What is asked.
        ("if torch.any(x): y = torch.relu(y)", f"`torch.any(x)`: {A_CONDITION}"),
        ("y = y if tp.local_size(5) > 2 else x", f"`tp.local_size(5) > 2`: {A_CONDITION}"),
        ("y = [z for z in range(2) if size]", f"`size`: {A_CONDITION}"),
        ("for _ in range(size): y = torch.relu(y)", f"`range(size)`: {A_LOOP}"),
        ("y = [z for z in (x, size)]", f"`(x, size)`: {A_LOOP}"),
        # What tells the rank.
        ("y = y * (1 + self.rank)", "`self.rank` tells which rank this is"),
        ("y = y * self.coords", "`self.coords` tells which rank this is"),
        ("y = y * x.__dict__[0]", "`x.__dict__` tells which rank this is"),
        ("y = y * Net.rank", "`Net.rank` tells which rank this is"),
        ("y = y * dist.get_rank()", "`dist.get_rank` tells which rank this is"),
        ('y = y * int(os.environ["RANK"])', "`os.environ` tells which rank this is"),
        ("y = y * tp.index", "`tp.index` tells which rank this is"),
        ('y = y * self.axis("tp").index', "`self.axis('tp').index` tells which rank this is"),
        # Places and sizes of pieces.
        ("y = torch.mul(y, 1 + tp.offset(1))", f"`tp.offset(...)` {A_ROW}"),
        ("y = embedding(y, rows, num_embeddings=tp.offset(1))", f"`tp.offset(...)` {A_ROW}"),
        ("y = y[tp.offset(1) :]", f"`tp.offset(...)` {A_ROW}"),
        ("y = y * tp.place_of(1, 2)", "`tp.place_of(...)` may be an argument of `Cut` only"),
        ("y = y * tp.local_size(5)", f"`tp.local_size(...)` {A_SIZE}"),
        ("y = y * float(size)", f"`size` {A_SIZE}"),
        ("y = torch.mul(y, size)", f"`size` {NO_SIZE} `torch.mul` takes no size"),
        ("y = mean(y, count=size)", f"`size` {NO_SIZE} `mean` takes no size"),
        ("place = tp", "`tp` is an axis, which may be an argument of a call only"),
    ],
)
def test_statements_that_go_by_the_rank(statement: str, why: str) -> None:
    source = FILE.replace("        y = left\n", f"        y = left\n        {statement}\n")
    (said,) = goes_by_rank(source, 1)
    place, reason = said.splitlines()
    line = FILE.splitlines().index("        y = left") + 2
    assert place.startswith(f"gencode1.py:{line}: {statement.split(chr(10))[0]}")
    assert reason == f"  {why}"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (
            "    def forward(self, x):",
            "    def forward(self, x, n=rank):",
            "`rank` tells which rank",
        ),
        ("    rank = 1\n", "    rank = 1\n    own = (rank,)\n", "`rank` tells which rank this is"),
        ("class Net(", "class mean(", ""),  # a variable has the name of the class
    ],
)
def test_what_stands_outside_of_methods_goes_by_no_rank(before: str, after: str, why: str) -> None:
    assert FILE.count(before) == 1
    said = goes_by_rank(FILE.replace(before, after), 1)
    assert len(said) == bool(why) and why in "".join(said)
