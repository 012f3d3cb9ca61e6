"""Loading generated files: what is executed is what was checked."""

import gc
import inspect
import json
import linecache
import sys
import traceback
import weakref
from dataclasses import replace

import pytest
import torch
from mlp_files import declarations, make_batch, make_model, write_files
from safetensors.torch import load_file, save_file

from shardwright import build_optimizer, parallelize
from shardwright.runtime.checkpoint.tensor_files import digest_file
from shardwright.runtime.errors import COMPILE_AGAIN, LoadError
from shardwright.runtime.file_digests import ChunkHasher
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import FORMAT_VERSION, Manifest, accept
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.module.weights import WeightFiles
from shardwright.runtime.ranks.threads import run_ranks


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)


def refusal(*args):
    with pytest.raises(LoadError) as error:
        load_class(*args)
    return str(error.value)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_every_rank_of_every_unit_loads_its_file(files):
    assert [cls.rank for cls in run_ranks(4, lambda rank: load_class(files))] == [0, 1, 0, 1]
    assert load_class(files, rank=3).rank == 1
    assert load_class(str(files), 0).__mro__[1] is ParallelModule


def test_each_load_is_a_module_of_its_own(files):
    first, second = load_class(files, 0), load_class(files, 0)
    assert first is not second and first.__module__ != second.__module__
    assert sys.modules[first.__module__].MLP is first
    assert not list(files.glob("**/*.pyc"))


def generated():
    """The names of the modules of generated code that are there."""
    return {name for name in sys.modules if name.startswith("shardwright_generated")}


def test_what_is_loaded_again_and_again_is_let_go(tmp_path):
    """Modules, classes, lines for tracebacks: all of it, after training too; what lives still shows
    its lines.
    """
    files = write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)
    before = generated()
    kept = load_class(files, 0)
    alive = []
    for _ in range(3):
        module = load_class(files, 0)()
        build_optimizer(module, torch.optim.SGD, lr=0.1)
        module(*make_batch(0)).sum().backward()
        alive += [weakref.ref(type(module)), weakref.ref(sys.modules[type(module).__module__])]
        del module
    gc.collect()
    assert [reference() for reference in alive[::2]] == [None] * 3
    # The rest goes then.
    other = load_class(write_files(tmp_path / "other", make_model(), dp=1, tp=1), 0)
    assert [reference() for reference in alive[1::2]] == [None] * 3
    assert generated() - before == {kept.__module__, other.__module__}
    assert "h = torch.tanh(" in "".join(linecache.getlines(str(files / "gencode0.py")))
    del kept
    gc.collect()
    assert load_class(tmp_path / "other", 0) and str(files / "gencode0.py") not in linecache.cache


def test_what_parallelize_has_loaded_is_let_go_with_the_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = generated()

    def act(rank):
        module = parallelize(
            torch.nn.Linear(2, 2),
            {"input": torch.ones(2, 2)},
            "dp",
            {"plan_ngpus": 1, "runtime_ngpus": 2},
        )
        return module(torch.ones(2, 2)).detach()

    for _ in range(3):
        run_ranks(2, act)
        gc.collect()
    assert len(generated() - before) <= 2  # those of the last time


def test_the_lines_of_an_older_load_come_back(tmp_path):
    files = write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)
    older = load_class(files, 0)
    edit(files / "gencode0.py", "h = torch.tanh(", "h = torch.relu(")
    accept(str(files))
    newer = load_class(files, 0)
    assert "h = torch.relu(" in inspect.getsource(newer.forward)
    del newer
    gc.collect()
    load_class(write_files(tmp_path / "other", make_model(), dp=1, tp=1), 0)
    assert "h = torch.tanh(" in inspect.getsource(older.forward)


def test_an_edit_may_name_the_class(files):
    edit(
        files / "gencode0.py",
        "        h = torch.tanh(",
        "        assert type(self) is MLP\n        h = torch.tanh(",
    )
    accept(str(files))
    cls = load_class(files, 0)
    assert cls.forward.__globals__["MLP"] is cls


def test_source_and_tracebacks_show_what_was_executed(tmp_path):
    files = write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)
    cls = load_class(files, 0)
    edit(files / "gencode0.py", "h = torch.tanh(", "h = torch.relu(")
    assert "h = torch.tanh(" in inspect.getsource(cls.forward)
    module = cls()
    module.layers[0].bias.data = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(RuntimeError) as error:
        module(*make_batch(0))
    assert "h = torch.tanh(" in "".join(traceback.format_exception(error.value))


def test_an_edited_file_is_refused_until_it_is_accepted(files):
    edit(files / "gencode1.py", "torch.tanh(", "torch.relu(")
    assert load_class(files, 0)
    lines = refusal(files, 1).splitlines()
    assert lines[0] == f"{files / 'gencode1.py'} is not the file that was generated"
    assert lines[1].startswith("  why:   its sha256 is ") and ", the manifest has " in lines[1]
    assert lines[2] == (
        f"  try:   if the edit is meant, accept it with `shardwright accept {files}`; "
        "otherwise compile again with reuse='override'"
    )
    assert accept(files) == ["gencode1.py"]
    assert load_class(files, 1) and accept(str(files)) == []


def test_nothing_is_executed_before_the_check(files, capsys):
    with open(files / "gencode0.py", "a") as file:
        file.write("print('executed')\n")
    refusal(files, 0)
    assert capsys.readouterr().out == ""


def test_a_stale_bytecode_cache_is_not_used(files):
    cache = files / "__pycache__"
    cache.mkdir()
    (cache / f"gencode0.{sys.implementation.cache_tag}.pyc").write_bytes(b"nonsense")
    assert load_class(files, 0)


def test_a_missing_file(files):
    (files / "gencode1.py").unlink()
    assert refusal(files, 1) == (
        f"{files / 'gencode1.py'} is missing\n"
        "  why:   manifest.json lists it\n"
        f"  try:   copy the whole directory to this node, or {COMPILE_AGAIN}"
    )


def test_a_directory_that_was_never_compiled(tmp_path):
    assert refusal(tmp_path, 0) == (
        f"{tmp_path} holds no compiled module\n"
        "  why:   there is no manifest.json\n"
        "  try:   compile first, with shardwright.parallelize or `shardwright compile`, or "
        "copy the directory to this node"
    )


def test_a_number_of_ranks_that_does_not_fit(files):
    with pytest.raises(LoadError) as error:
        run_ranks(3, lambda rank: load_class(files))
    assert str(error.value) == (
        f"{files} was compiled for 2 ranks, but 3 are running\n"
        "  why:   its mesh is dp=1 x tp=2; the number of ranks must be a multiple of 2\n"
        "  try:   start it with torchrun --nproc_per_node=2, or compile for another plan_ngpus"
    )


@pytest.mark.parametrize(
    ("field", "value", "what", "why"),
    [
        (
            "format_version",
            999,
            "shardwright",
            f"its format version is 999, here it is {FORMAT_VERSION}",
        ),
        ("shardwright_version", "99.1.0", "shardwright", "its shardwright is 99.1.0, here it is "),
        (
            "torch_version",
            "1.13.1",
            "torch",
            f"its torch is 1.13.1, here it is {torch.__version__}",
        ),
    ],
)
def test_a_manifest_of_another_version(files, field, value, what, why):
    path = files / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    lines = refusal(files, 0).splitlines()
    assert lines[0] == f"{files} was compiled with another version of {what}"
    assert lines[1].startswith(f"  why:   {why}")
    assert lines[2] == f"  try:   install the version it was made with, or {COMPILE_AGAIN}"


def test_the_minor_version_of_torch_may_differ(files):
    path = files / "manifest.json"
    major = torch.__version__.split(".")[0]
    path.write_text(
        json.dumps(
            json.loads(path.read_text()) | {"torch_version": f"{major}.999.0", "sha256": None}
        )
    )
    assert load_class(files, 0)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format_version": 1}'])
def test_a_damaged_manifest(files, text):
    (files / "manifest.json").write_text(text)
    assert refusal(files, 0).startswith(f"{files / 'manifest.json'} is damaged\n")


def test_a_manifest_that_lacks_a_field(files):
    path = files / "manifest.json"
    data = json.loads(path.read_text())
    del data["class_name"]
    path.write_text(json.dumps(data))
    assert "why:   its sha256 is not that of what was written" in refusal(files, 0)
    path.write_text(json.dumps({**data, "sha256": None}))
    assert "why:   KeyError: 'class_name'" in refusal(files, 0)


def listed_weights(files):
    """The weight files of the hand-made module, with digests of 64 bytes each in the manifest."""
    manifest = Manifest.read(files)
    paths = [files / name for name in ("weights.safetensors", "constants.safetensors")]
    digests = {path.name: ChunkHasher(path.stat().st_size) for path in paths}
    for path in paths:
        digests[path.name].chunk_bytes = digests[path.name]._room = 64
        digests[path.name].update(memoryview(path.read_bytes()))
    whole = {path.name: digest_file(path) for path in paths}
    chunks = {name: hasher.finish() for name, hasher in digests.items()}
    replace(manifest, files={**manifest.files, **whole}, chunks=chunks).write(files)
    return paths


def pieces_of(files, rank):
    manifest = Manifest.read(files)
    digests = {
        name: manifest.digests_of(name) for name in ("weights.safetensors", "constants.safetensors")
    }
    with WeightFiles(files, digests) as opened:
        coords = manifest.mesh.coords(rank)
        return {d.name: opened.read(d, manifest.mesh, coords) for d in declarations()}


def test_altered_values_are_refused_where_they_are_read(files):
    """Every byte in turn is another one: the ranks that read it refuse, the others load what they
    did before.
    """
    paths = listed_weights(files)
    ranks = [pieces_of(files, rank) for rank in range(2)]
    num_refused = [0, 0]
    for path in paths:
        good = path.read_bytes()
        for position in range(0, len(good), 7):
            path.write_bytes(good[:position] + bytes([good[position] ^ 16]) + good[position + 1 :])

            def load(rank, path=path):
                try:
                    pieces = pieces_of(files, rank)
                    assert all(
                        torch.equal(piece, ranks[rank][name]) for name, piece in pieces.items()
                    )
                except LoadError as error:
                    assert str(error).startswith(
                        f"{path} is not the file that was written\n  why:   the sha256 of "
                        "its bytes "
                    )
                    return 1
                return 0

            refused = [load(0), load(1)]
            assert any(refused)
            num_refused = [total + one for total, one in zip(num_refused, refused, strict=True)]
        path.write_bytes(good[:-1])
        with pytest.raises(LoadError, match=r"is not the file that was written|cannot be read"):
            load_all(files)
        path.write_bytes(good)
    assert min(num_refused) >= 100 and num_refused[0] != num_refused[1]
    load_all(files)


def load_all(files):
    return run_ranks(2, lambda rank: load_class(files)())


def test_values_may_be_accepted(files):
    weights, _ = listed_weights(files)
    values = {name: value + 1 for name, value in load_file(weights).items()}
    save_file(values, weights)
    with pytest.raises(
        LoadError,
        match=r"weights.safetensors is not the file that was written\n.*\n.*`shardwright accept ",
    ):
        load_all(files)
    assert accept(files) == ["weights.safetensors"]
    assert torch.equal(load_all(files)[0].mean, values["mean"])


def test_without_digests_of_chunks_the_whole_file_is_compared(files):
    weights, _ = listed_weights(files)
    manifest = Manifest.read(files)
    replace(manifest, chunks={}).write(files)
    load_all(files)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(LoadError, match="weights.safetensors is not the file that was written"):
        load_all(files)


def test_a_file_without_the_class(files):
    (files / "gencode0.py").write_text("MLP = 3\n")
    accept(files)
    assert refusal(files, 0).startswith(
        f"{files / 'gencode0.py'} defines no ParallelModule named 'MLP'\n"
    )


def test_a_file_that_fails_when_it_runs(files):
    (files / "gencode0.py").write_text("import a_module_that_does_not_exist\n")
    accept(files)
    before = set(sys.modules)
    assert "why:   ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in refusal(
        files, 0
    )
    assert set(sys.modules) == before


def test_invalid_python_is_not_accepted(files):
    (files / "gencode0.py").write_text("class MLP(:\n")
    with pytest.raises(LoadError, match="is not valid Python"):
        accept(files)


def test_a_manifest_round_trips(files):
    manifest = Manifest.read(files)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert manifest.plan_ngpus == 2
    assert list(manifest.tensors)[:2] == ["gain", "norm.weight"]
