"""Reading initial weights: the pieces of this rank, whatever the layout, and nothing else."""

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shardwright.runtime.errors import LoadError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.module import weights
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.module.weights import WeightFiles

MESH = Mesh((("dp", 2), ("tp", 3)))


def declared(layout, dtype=torch.float64):
    return Declaration("w", "parameter", Layout.parse(layout), dtype)


@pytest.mark.parametrize(
    "layout",
    [
        "[7, 4]",
        "[7/tp, 4]",
        "[4, 7/tp]",
        "[7/dp/tp, 5]",
        "[7/dp, 5/tp, 2]",
        "[3, 3 * 4/tp * 2]",
        "[5+3+2/tp * 2, 3]",
        "[2 * 5/tp, 4/dp * 3]",
        "[2/tp, 3]",  # the last rank holds nothing
        "[]",
        "[6] G(tp)",
    ],
)
def test_pieces_tile_the_tensor(tmp_path, layout):
    declaration = declared(layout)
    whole = torch.arange(math.prod(declaration.layout.shape), dtype=torch.float64).view(
        declaration.layout.shape
    )
    save_file({"w": whole}, tmp_path / "weights.safetensors")
    seen = torch.zeros_like(whole)
    with WeightFiles(tmp_path) as files:
        for coords in MESH.all_coords():
            piece = files.read(declaration, MESH, coords)
            assert tuple(piece.shape) == declaration.layout.local_shape(MESH, coords)
            assert (
                piece.is_contiguous() and piece.untyped_storage().nbytes() == piece.numel() * 8
            ), "no view of the file"
            index = [
                torch.tensor(
                    [
                        i
                        for start, stop in declaration.layout.runs(dim, MESH, coords)
                        for i in range(start, stop)
                    ]
                )
                for dim in range(whole.ndim)
            ]
            expected = whole
            for dim, rows in enumerate(index):
                expected = expected.index_select(dim, rows.long())
            assert torch.equal(piece, expected)
            if all(
                coords[axis] == 0 for axis in MESH.names if axis not in declaration.layout.cut_axes
            ):
                mask = torch.zeros_like(whole).flatten()
                mask[expected.long().flatten()] = 1
                seen += mask.view(whole.shape)
    assert torch.equal(seen, torch.ones_like(seen))


def test_only_the_piece_is_asked_for(tmp_path, monkeypatch):
    save_file(
        {"w": torch.zeros(12, 8, dtype=torch.float64), "other": torch.zeros(99)},
        tmp_path / "weights.safetensors",
    )
    fetched = []

    class Recording:
        def __init__(self, stored):
            self.stored = stored

        def get_shape(self):
            return self.stored.get_shape()

        def __getitem__(self, index):
            block = self.stored[index]
            fetched.append(block.numel())
            return block

    class Handle:
        def __init__(self, path, framework):
            self.file = safe_open(path, framework=framework)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def keys(self):
            return self.file.keys()

        def get_slice(self, name):
            assert name == "w"
            return Recording(self.file.get_slice(name))

    monkeypatch.setattr(weights, "safe_open", Handle)
    with WeightFiles(tmp_path) as files:
        files.read(declared("[12/tp, 2 * 4/dp]"), MESH, {"dp": 1, "tp": 2})
    assert fetched == [8, 8]


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(),
    reason="the system does not tell which pages were touched",
)
def test_the_rest_of_the_file_is_not_read(tmp_path):
    rows, columns = 512, 16384  # 64 MiB
    save_file(
        {"w": torch.zeros(rows, columns, dtype=torch.float64)}, tmp_path / "weights.safetensors"
    )
    with WeightFiles(tmp_path) as files:
        piece = files.read(
            declared(f"[{rows}/eight, {columns}]"), Mesh((("eight", 8),)), {"eight": 5}
        )
        touched = touched_mib(str(tmp_path / "weights.safetensors"))
    assert piece.shape == (rows // 8, columns)
    assert 8 <= touched < 16, "of 64 MiB it needs 8, and whole pages around them"


def touched_mib(path):
    """How much of a mapped file this process has read."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(path)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total / 1024


def refusal(tmp_path, declaration):
    with WeightFiles(tmp_path) as files, pytest.raises(LoadError) as error:
        files.read(declaration, MESH, {"dp": 0, "tp": 0})
    return str(error.value)


def test_what_does_not_fit_is_refused(tmp_path):
    save_file({"w": torch.zeros(3, dtype=torch.float32)}, tmp_path / "weights.safetensors")
    assert refusal(tmp_path, declared("[4/tp]")) == (
        f"the initial value of 'w' in {tmp_path} has shape [3]\n"
        "  why:   the program was compiled for [4]\n"
        "  try:   if its declaration was edited, edit it back; else compile again with "
        "reuse='override', which loses edits of the files"
    )
    assert refusal(tmp_path, declared("[3/tp]")) == (
        f"the initial value of 'w' in {tmp_path} is torch.float32\n"
        "  why:   the program was compiled for torch.float64\n"
        "  try:   if its declaration was edited, edit it back; else compile again with "
        "reuse='override', which loses edits of the files"
    )
    constant = Declaration("c", "constant", Layout.parse("[3]"), torch.float32, persistent=False)
    assert refusal(tmp_path, constant) == (
        f"{tmp_path} has no initial value of 'c'\n"
        "  why:   not stored\n"
        "  try:   copy constants.safetensors and weights.safetensors there, or compile again"
    )


def test_a_damaged_file(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"\x00" * 5)
    with (
        pytest.raises(LoadError, match=r"weights.safetensors cannot be read"),
        WeightFiles(tmp_path),
    ):
        pass


def test_constants_may_lie_in_a_file_of_their_own(tmp_path):
    save_file({"c": torch.ones(3)}, tmp_path / "constants.safetensors")
    constant = Declaration("c", "constant", Layout.parse("[3]"), torch.float32, persistent=False)
    with WeightFiles(tmp_path) as files:
        assert files.read(constant, MESH, {"dp": 0, "tp": 0}).sum() == 3
