"""The files of ranks that run the same stages have one program."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shardwright.frontend.verification.outside.one_program import differences

FILE = '''"""Generated.

rank    {rank}
"""

import torch
from torch import Tensor


class Net(PipelineModule):
    rank = {rank}
    seed = 0
    actions = {{"train": "{stage}F0 {stage}B0"}}
    segments = {{
        {stage}: Segment(
            reads=("x",),
            sends=(
                Transfer("y", stage=1, shape=({rank}, 8), pieces=(({rank}, ((0, 4),)),)),
            ),
        ),
    }}

    def declare(self):
        self.parameter("up.weight", "[8/tp, 4]", torch.float32)

    def stage{stage}(self, x):
        tp = self.axis("tp")
        up = F.linear(x, self.up.weight)  # [4, 8/tp]
        both = up + x
        y = F.gelu(
            both, approximate="tanh"
        )
        if self.trains:
            return y * 0.5
        return y
'''
STAGES = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
"""The stage of each rank."""

Edit = Callable[[str], str]


def said(folder: Path, edits: Mapping[int, Edit]) -> str:
    """What is said of five files, some of which are edited."""
    groups: dict[str, list[int]] = {}
    for rank, stage in STAGES.items():
        groups.setdefault(f"stage {stage}", []).append(rank)
        source = FILE.format(rank=rank, stage=stage)
        edited = edits.get(rank, str)(source)
        assert rank not in edits or edited != source
        (folder / f"gencode{rank}.py").write_text(edited)
    return "\n".join(differences(folder, groups))


def changed(before: str, after: str) -> Edit:
    return lambda source: source.replace(before, after)


def test_what_is_of_a_rank_alone_may_differ(tmp_path: Path) -> None:
    assert said(tmp_path, {}) == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [("[4, 8/tp]", "[4, 8]"), ("up + x\n", "up + x\n\n"), ('"tanh"', "'tanh'")],
)
def test_how_a_file_is_written_may_differ(tmp_path: Path, before: str, after: str) -> None:
    assert said(tmp_path, {1: changed(before, after)}) == ""


GELU = 'y = F.gelu( both, approximate="tanh" )'


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("F.gelu", "F.relu", [
            f"gencode0.py:30: {GELU}",
            f"gencode1.py:30: {GELU.replace('gelu', 'relu')}",
            "F.gelu in the first, F.relu in the second",
        ]),
        ('"tanh"', '"none"', [
            f"gencode0.py:30: {GELU}",
            f"gencode1.py:30: {GELU.replace('tanh', 'none')}",
            "'tanh' in the first, 'none' in the second",
        ]),
        ("up + x", "x + up", [
            "gencode0.py:29: both = up + x",
            "gencode1.py:29: both = x + up",
            "up + x in the first, x + up in the second",
        ]),
        ("up + x", "up - x", [
            "gencode0.py:29: both = up + x",
            "gencode1.py:29: both = up - x",
            "up + x in the first, up - x in the second",
        ]),
        ("            return y * 0.5\n", "            return 0.5 * y * 2\n", [
            "gencode0.py:34: return y * 0.5",
            "gencode1.py:34: return 0.5 * y * 2",
            "y * 0.5 in the first, 0.5 * y * 2 in the second",
        ]),
        ("        both = up + x\n", "", [
            "gencode0.py:29: both = up + x",
            f"gencode1.py:29: no such statement, here stands: {GELU}",
        ]),
        ("        return y\n", "        return y\n        print(y)\n", [
            "gencode0.py:35: no such statement, here stands: return y",
            "gencode1.py:36: print(y)",
        ]),
        ("        if self.trains:\n", "        while self.trains:\n", [
            "gencode0.py:33: if self.trains:",
            "gencode1.py:33: while self.trains:",
        ]),
        ("[8/tp, 4]", "[8, 4/tp]", [
            'gencode0.py:24: self.parameter("up.weight", "[8/tp, 4]", torch.float32)',
            'gencode1.py:24: self.parameter("up.weight", "[8, 4/tp]", torch.float32)',
            "'[8/tp, 4]' in the first, '[8, 4/tp]' in the second",
        ]),
        ('"y", stage=1', '"y", stage=2', None),
        ("import Tensor", "import Tensor, nn", [
            "gencode0.py:7: from torch import Tensor",
            "gencode1.py:7: from torch import Tensor, nn",
        ]),
    ],
)  # fmt: skip
def test_what_files_compute_may_not_differ(
    tmp_path: Path, before: str, after: str, wanted: list[str] | None
) -> None:
    head, *lines = said(tmp_path, {1: changed(before, after)}).splitlines()
    assert head == (
        "gencode1.py does not compute what gencode0.py and 1 other do, though each runs stage 0"
    )
    if wanted is not None:
        assert [line.removeprefix("  ") for line in lines] == wanted


def test_a_file_has_the_number_of_its_rank(tmp_path: Path) -> None:
    assert said(tmp_path, {1: changed("rank = 1", "rank = 2")}).splitlines() == [
        "gencode1.py has the number of another rank, and is the file of rank 1",
        "  gencode1.py:11: rank = 2",
    ]


def test_the_file_is_named_that_is_alone(tmp_path: Path) -> None:
    """It may be that of the first rank, and each program of its own is told."""
    edits = {0: changed("gelu", "relu"), 4: changed("* 0.5", "* 0.25")}
    heads = [line for line in said(tmp_path, edits).splitlines() if line.startswith("gencode")]
    assert heads == [
        "gencode0.py does not compute what gencode1.py and 1 other do, though each runs stage 0",
        "gencode4.py does not compute what gencode3.py does, though each runs stage 1",
    ]


def test_ranks_of_all_stages_declare_the_same_pipeline(tmp_path: Path) -> None:
    edits = dict.fromkeys((3, 4), changed("seed = 0", "seed = 1"))
    assert said(tmp_path, edits).splitlines() == [
        "gencode3.py does not compute what gencode0.py does, though each is of one pipeline",
        "  gencode0.py:12: seed = 0",
        "  gencode3.py:12: seed = 1",
        "  0 in the first, 1 in the second",
    ]
