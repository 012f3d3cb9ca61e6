"""Merging offline, in Python and from the command line."""

import re
import subprocess
import sys
import weakref

import checkpoints as c
import pytest
import torch
from precision import float64_casts
from safetensors.torch import load_file, load_model
from torch import nn

import shardwright
from shardwright.__main__ import main
from shardwright.runtime.checkpoint import merge_files, tensor_files
from shardwright.runtime.errors import CheckpointError, FileError

PLAN = ("tp", 2, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A checkpoint of two ranks, what they compute next, and the folder."""
    directory = tmp_path_factory.mktemp("run")

    def train():
        trainer = c.trainer("gpt2", PLAN)
        trainer.steps(range(2))
        shardwright.save_checkpoint(
            directory, trainer.module, trainer.optimizer, step=2, extra={"a": (1,)}
        )
        return trainer.steps([2, 3])

    return directory, c.on("gpt2", PLAN, train)[0]


def test_the_original_model_and_optimizer_go_on(run, tmp_path):
    directory, losses = run
    out = shardwright.merge_checkpoint(directory, tmp_path / "merged")
    assert sorted(path.name for path in out.iterdir()) == [
        "index.json",
        "model.safetensors",
        "optimizer.safetensors",
    ]
    trainer = c.original("gpt2")
    load_model(trainer.module, out / "model.safetensors")  # tied names as safetensors writes them
    whole = shardwright.read_checkpoint(out)
    assert whole.step == 2 and whole.extra == {"a": (1,)}
    c.assert_same(trainer.module.state_dict(), dict(whole.module))
    assert whole.module["lm_head.weight"] is whole.module["transformer.wte.weight"]
    trainer.module.load_state_dict(whole.module)
    trainer.optimizer.load_state_dict(whole.optimizer)
    with float64_casts():
        more = trainer.steps([2, 3])
    for loss, expected in zip(more, losses, strict=True):
        assert abs(loss - expected) <= 1e-10 * abs(expected)


def test_a_merged_checkpoint_loads_under_any_plan(run, tmp_path):
    directory, losses = run
    out = shardwright.merge_checkpoint(directory, tmp_path / "merged", max_file_bytes=5000)

    def resume():
        trainer = c.trainer("gpt2", PLAN)
        shardwright.load_checkpoint(out, trainer.module, trainer.optimizer)
        return trainer.steps([2, 3])

    assert c.on("gpt2", PLAN, resume) == [losses, losses]


def test_several_files(run, tmp_path):
    directory, _ = run
    out = shardwright.merge_checkpoint(directory, tmp_path / "merged", max_file_bytes=5000)
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    together = {}
    for file in files:
        tensors = load_file(file)
        assert sum(value.nbytes for value in tensors.values()) <= 5000 or len(tensors) == 1
        together.update(tensors)
    one = shardwright.merge_checkpoint(directory, tmp_path / "one")
    c.assert_same(together, load_file(one / "model.safetensors"))


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Merging holds the tensor it writes, and no other."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    shardwright.save_checkpoint(tmp_path / "run", net)
    buffers = []
    read, bytes_of = merge_files.Contents.read, tensor_files.bytes_of

    def watched_read(*arguments):
        assert not [buffer for buffer in buffers if buffer() is not None]
        return read(*arguments)

    def watched_bytes(value):
        view = bytes_of(value)
        buffers.append(weakref.ref(view.obj))
        return view

    monkeypatch.setattr(merge_files.Contents, "read", watched_read)
    monkeypatch.setattr(tensor_files, "bytes_of", watched_bytes)
    shardwright.merge_checkpoint(tmp_path / "run", tmp_path / "merged")
    assert len(buffers) == 12


def test_what_is_in_the_way(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"exists\n  why:   merging would replace it"):
        shardwright.merge_checkpoint(run[0], tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        shardwright.merge_checkpoint(tmp_path, tmp_path / "merged")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        shardwright.merge_checkpoint(tmp_path / "file", tmp_path / "merged")
    with pytest.raises(
        FileError,
        match=r"the merged checkpoint cannot be written to .*file/merged\n  why:   Not a directory",
    ):
        shardwright.merge_checkpoint(run[0], tmp_path / "file" / "merged")


def test_a_damaged_checkpoint_leaves_nothing_behind(run, tmp_path, monkeypatch):
    net = nn.Linear(2, 2)
    shardwright.save_checkpoint(tmp_path / "run", net)
    path = tmp_path / "run" / "000001" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors was altered"):
        shardwright.merge_checkpoint(tmp_path / "run", tmp_path / "merged")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_the_command(run, tmp_path, capsys):
    directory, _ = run
    assert main(["merge", str(directory), str(tmp_path / "merged"), "--max-file-size", "5KB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith(f"merged {directory / '000001-step-2'} of step 2: ")
        and lines[1] == f"files: {tmp_path / 'merged'}"
    )
    assert re.search(r": \d+ tensors, \d+(\.\d+)? [kM]?B in \d+ files?$", lines[0])
    assert main(["merge", str(directory), str(tmp_path / "merged")]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'merged'} exists\n"
        "  why:   merging would replace it\n"
        "  try:   name a new folder, or delete it first\n"
    )
    assert main(["merge", str(directory), str(tmp_path / "other"), "--max-file-size", "big"]) == 1
    assert "'big' is no size" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "merge" in capsys.readouterr().out


def test_the_command_needs_no_compiler(run, tmp_path):
    code = f"""
import sys
import weakref
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ortools", "networkx", "jinja2", "rich", "sympy", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, Refusing())
from shardwright.__main__ import main
assert main(["merge", {str(run[0])!r}, {str(tmp_path / "merged")!r}]) == 0
assert not [name for name in sys.modules if name.startswith("shardwright.compiler")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.equal(
        load_file(tmp_path / "merged" / "model.safetensors")["transformer.ln_f.bias"],
        shardwright.read_checkpoint(run[0]).module["transformer.ln_f.bias"],
    )
