"""No statement of a file goes by the rank that runs it."""

import pytest

from shardwright.frontend.verification.outside.by_rank import IN_PLACE, NO_OPERATOR, goes_by_rank

FILE = '''"""Generated."""

import math
import torch
import torch.nn.functional as F
import torch.special
import my_project.layers
from types import SimpleNamespace

from shardwright.runtime.adapters import all_reduce


class Net(ParallelModule):
    rank = 1
    inputs = {"x": ("[8, seq]", torch.float64), "cache.0": ("[4/tp, past]", torch.float64)}

    def declare(self):
        self.parameter("up.weight", "[8/tp, 4]", torch.float32)
        for layer in range(3):
            self.parameter(f"blocks.{layer}.rank.weight", "[4]", torch.float32)

    def forward(self, x, cache, F):
        cache_leaves = flatten(cache, "cache")
        self.check_inputs({"x": x, **cache_leaves})
        cache_0 = cache_leaves["cache.0"]
        seq = x.size(1)
        past = cache_0.size(1)
        tp = self.axis("tp")
        size = tp.local_size(8)
        cut = Cut((tp.local_size(4), 3), element=(tp.place_of(1, 2), 2))
        heads = x.view(3 * size, max(tp.local_size(5), 1), 4)
        own = my_project.layers.rows(x, size, tp.offset(30))
        with torch.no_grad():
            abs = torch.abs(x) + torch.ones_like(x) + torch.special.airy_ai(x).view_as(x)
        mean = x.sum() / tp.size
        rows = embedding(x, self.up.weight, axes=(tp,), start=2 * tp.offset(30))
        left = rows[:, : tp.local_size(4)]
        scale = 0.5 if not self.training else 1.0
        for layer in range(1, 3):
            rank = self.blocks[layer].rank.weight.t() / float(abs(seq - past * tp.size))
        steps = []
        steps.append(self.blocks[0].rank.weight.t().amax(dim=0))
        self.require(seq > 2, f"{seq} > 2")

        def rows_piece(piece, rows_of_it):
            return torch.linalg.norm(rows_of_it.view(piece.local_size(8), -1))

        joined = self.in_pieces(rows_piece, torch.float32)
        kept = {name: left for name in ("logits", "count")}
        if self.trains:
            return all_reduce(left, tp)
        y = left
        return rebuild(SimpleNamespace, (y,))

    def x_block(self, block):
        return block.rank.weight
'''
NO_CHECKS = "the compiler writes none, so the checks do not know what it may do"
NO_SIZE = "is the size of a piece, and"
A_SIZE = f"{NO_SIZE} may be told to calls that take sizes only"
A_CONDITION = "a condition may ask `self.training` and `self.trains` only"
A_LOOP = "a loop may run over `range` of numbers or constants only"
A_CONTEXT = "a `with` may enter `torch.no_grad()` or `torch.autocast` only"
A_PIECE = "the size of a piece may differ from rank to rank"
NO_VALUE = "the compiler asks no value for its"
A_ROW = "may be the `start` of cross_entropy, embedding, linear_cross_entropy, nll_loss only"


def test_what_the_compiler_writes_goes_by_no_rank() -> None:
    assert goes_by_rank(FILE, 1) == ()


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        # Kinds of statements, and names of Python.
        ("while size: size = size + 1", f"`while`: {NO_CHECKS}"),
        ("import os; y = y * os.getpid()", "`import os`: the compiler imports at the top only"),
        ("y = y * __file__[-4]", "`__file__` tells which rank this is"),
        ("try: y = y + 1\n        finally: pass", f"`try`: {NO_CHECKS}"),
        ("y = (lambda z: z)(y)", f"`lambda`: {NO_CHECKS}"),
        ("y = (z := y)", f"assignment inside an expression (`:=`): {NO_CHECKS}"),
        ('y = y * getattr(self, "rank")', "the compiler writes no `getattr`"),
        ("module = self", "`self` may be asked for its parts only"),
        ("y = size > 2 and x or y", "`size > 2 and x or y` computes one operand or the other"),
        ("with x.lock(): y = y + 1", f"`x.lock()`: {A_CONTEXT}"),
        # What is asked.
        ("if torch.any(x): y = torch.relu(y)", f"`torch.any(x)`: {A_CONDITION}"),
        ("y = y if tp.local_size(5) > 2 else x", f"`tp.local_size(5) > 2`: {A_CONDITION}"),
        ("y = {z: y for z in range(2) if size}", f"`size`: {A_CONDITION}"),
        ("for _ in range(size): y = torch.relu(y)", f"`range(size)`: {A_LOOP}"),
        ("y = {z: y for z in (x, size)}", f"`(x, size)`: {A_LOOP}"),
        # What tells the rank.
        ("y = y * (1 + self.rank)", "`self.rank` tells which rank this is"),
        ("y = y * self.coords", "`self.coords` tells which rank this is"),
        ("y = y * x.__dict__[0]", "`x.__dict__` tells which rank this is"),
        ("y = y * Net.rank", "`Net.rank`: the compiler asks no value for its `rank`"),
        ("y = y * layers.get_rank()", "`layers.get_rank` tells which rank this is"),
        ("y = y * layers.environ", "`layers.environ` tells which rank this is"),
        ("y = y * tp.index", "`tp.index` tells which rank this is"),
        ('y = y * self.axis("tp").index', "`self.axis('tp').index` tells which rank this is"),
        # Places and sizes of pieces.
        ("y = torch.mul(y, 1 + tp.offset(1))", f"`tp.offset(...)` {A_ROW}"),
        ("y = embedding(y, rows, num_embeddings=tp.offset(1))", f"`tp.offset(...)` {A_ROW}"),
        ("y = y[tp.offset(1) :]", f"`tp.offset(...)` {A_ROW}"),
        ("y = y * tp.place_of(1, 2)", "`tp.place_of(...)` may be an argument of `Cut` only"),
        ("y = y * tp.local_size(5)", f"`tp.local_size(...)` {A_SIZE}"),
        ("y = y * float(size)", f"`size` {A_SIZE}"),
        ("y = torch.mul(y, size)", f"`size` {NO_SIZE} `torch.mul` takes no size there"),
        ("y = mean(y, count=size)", f"`size` {NO_SIZE} `mean` takes no size there"),
        ("y = y * torch.full((4,), size)", f"`size` {NO_SIZE} `torch.full` takes no size there"),
        # What tensors and torch are asked for.
        ("y = y * x.shape[0]", f"`x.shape`: {A_PIECE}"),
        ("y = y * x.size(1)", f"`x.size(...)`: {A_PIECE}"),
        ("seq = y.size(1)", f"`y.size(...)`: {A_PIECE}"),
        ("seq = x.size(0)", f"`x.size(...)`: {A_PIECE}"),
        ("past = cache_0.size(0)", f"`cache_0.size(...)`: {A_PIECE}"),
        (
            "y = y * self.blocks[0].rank.weight.numel()",
            f"`self.blocks[0].rank.weight.numel(...)`: {A_PIECE}",
        ),
        ("y = y * x.data_ptr()", f"`x.data_ptr(...)`: {NO_VALUE} `data_ptr`"),
        ("y = y * self.device.index", f"`self.device.index`: {NO_VALUE} `index`"),
        (
            "y = y * torch.initial_seed()",
            f"the compiler knows no operator `torch.initial_seed`, {NO_OPERATOR}",
        ),
        (
            "y = torch.get_device(y)",
            f"the compiler knows no operator `torch.get_device`, {NO_OPERATOR}",
        ),
        (
            "y = torch._shape_as_tensor(y)",
            f"the compiler knows no operator `torch._shape_as_tensor`, {NO_OPERATOR}",
        ),
        ("y = y.add_(x)", f"`y.add_(...)` {IN_PLACE}"),
        ("y = torch.relu_(y)", f"`torch.relu_` {IN_PLACE}"),
        ("y = torch.add(y, x, out=y)", f"`torch.add(..., out=...)` {IN_PLACE}"),
        ("y = F.relu(y, inplace=True)", f"`F.relu(..., inplace=...)` {IN_PLACE}"),
        (
            "y = y * float(x)",
            "`float(x)` makes a number of `x`, and may make one of sizes and numbers only",
        ),
        (
            "y = y * my_project.rand(size)",
            "`my_project.rand(size)`: functions of the model are called with tensors",
        ),
        ("y = y * len(x)", "the compiler writes no `len`"),
        ("z = float(f'{x}')", "`x` in a text may be a size or a number only"),
        ("torch.relu(y)", "`torch.relu(y)`: the compiler gives every value a name"),
        ("y[0] = x", "`y[0]`: the compiler gives values to variables only"),
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
            "    def forward(self, x, cache, F):",
            "    def forward(self, x, cache, F, n=rank):",
            "`rank` tells which rank",
        ),
        ("    rank = 1\n", "    rank = 1\n    own = (rank,)\n", "`rank` tells which rank this is"),
        ("class Net(", "class mean(", ""),  # a variable has the name of the class
        ("import math\n", "import random\n", "`import random`: the compiler imports no such thing"),
        ("import math\n", "import math as os\n", "`import math as os`: the compiler imports no"),
        ("rebuild(Simple", "tuple_of(Simple", "`from types import SimpleNamespace`: the compiler"),
        ("runtime.adapters import", "runtime.mesh import", "all_reduce`: the compiler imports no"),
        ("    def x_block(", "    def axis(", "`axis` replaces a method that modules have"),
        ("    def x_block(", "    @jit\n    def x_block(", "`@jit`: the compiler decorates"),
        ("class Net(", "rank = 1\n\n\nclass Net(", "the compiler writes imports and a class at"),
    ],
)
def test_what_stands_outside_of_methods_goes_by_no_rank(before: str, after: str, why: str) -> None:
    assert FILE.count(before) == 1
    said = goes_by_rank(FILE.replace(before, after), 1)
    assert len(said) == bool(why) and why in "".join(said)
