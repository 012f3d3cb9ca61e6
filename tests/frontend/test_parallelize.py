"""parallelize in one process: what it makes, finds, refuses and leaves alone. Ranks are threads."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from api_jobs import Net, X, config, net, refuse
from safetensors.torch import load_file
from torch import nn

import shardwright
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.cost.time.operator_file import dumps_times
from shardwright.frontend.files import cache
from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.errors import (
    COMPILE_AGAIN,
    ConfigError,
    DistributedError,
    FileError,
    LoadError,
    PlanError,
    TraceError,
)
from shardwright.runtime.manifest import Manifest, accept
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.threads import run_ranks


def compile_net(savedir, model=None, policy="tp", **options):
    """Compile only; returns the folder of the files."""
    fields = options.pop("fields", {})
    parallelize(
        model or net(),
        {"x": X},
        policy,
        config(**fields),
        gen_savedir=savedir,
        load_module=False,
        **options,
    )
    return folder_of(savedir)


def folder_of(savedir, instance="_"):
    return Path(savedir) / "_parallel_modules" / "api_jobs" / "Net" / instance


def load_on_ranks(savedir, given=None, act=lambda module: module(X), **options):
    """``act`` of what parallelize returns, on each of two ranks."""
    model = net() if given is None else given

    def run(rank):
        return act(parallelize(model, {"x": X}, "tp", config(), gen_savedir=savedir, **options))

    return run_ranks(2, run)


def snapshot(folder):
    """Content, and what tells a file from one that was written anew."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    return {
        path.name: (path.read_bytes(), (path.stat().st_ino, path.stat().st_mtime_ns))
        for path in files
    }


def refusal(kind, act):
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


# What comes out


def test_offline_and_then_loaded(tmp_path):
    folder = compile_net(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "constants.safetensors",
        "gencode0.py",
        "gencode1.py",
        "manifest.json",
        "plan.json",
        "weights.safetensors",
    ]
    before = snapshot(folder)
    for result in load_on_ranks(tmp_path):
        torch.testing.assert_close(result, net()(X), rtol=0, atol=1e-12)
    assert snapshot(folder) == before


def test_every_form_is_written_down(tmp_path):
    """The passes have something to do for every setting; and nothing where files
    are found.
    """
    fields = {"inference_only": True, "constant_folding": True, "outputs": {"": "sharded"}}

    def into(folder: str) -> None:
        parallelize(
            net(), {"x": X}, "tp", config(**fields), gen_savedir=tmp_path, load_module=False,
            dump=str(tmp_path / folder),
        )  # fmt: skip

    into("first")
    with pytest.warns(UserWarning, match="second has the traced graph alone"):
        into("second")
    written = {
        folder: [path.name.removesuffix(".txt") for path in sorted((tmp_path / folder).iterdir())]
        for folder in ("first", "second")
    }
    names = ["trace", "fold", "inference", "rules", "dims", "policy", "outputs", "lower", "emit"]
    assert written["first"] == [f"{number:02}-{name}" for number, name in enumerate(names)]
    assert written["second"] == written["first"][:2]
    assert '"": "sharded"' not in (tmp_path / "first/05-policy.txt").read_text()


def test_a_module_gives_an_object_and_a_class_gives_a_class(tmp_path):
    model = net().eval()
    for module in load_on_ranks(tmp_path, model, act=lambda module: module):
        assert isinstance(module, ParallelModule) and not module.training

    def construct(given):
        assert issubclass(given, ParallelModule)
        return given()(X)

    for result in load_on_ranks(tmp_path, Net, act=construct, module_fn=net):
        torch.testing.assert_close(result, net()(X), rtol=0, atol=1e-12)


def test_without_initial_values(tmp_path):
    def fill(module):
        with torch.no_grad():
            module.up.weight.fill_(0.25)
        return module.up.weight.sum().item(), module.table.tolist()

    halves = load_on_ranks(tmp_path, act=fill, init_module_params=False)
    assert halves == [(8 * 8 * 0.25, list(range(8)))] * 2


def test_weights_hold_everything_once_under_the_original_names(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    ids = torch.arange(6).reshape(2, 3)
    parallelize(Tied(), {"x": ids}, "tp", config(), gen_savedir=tmp_path, load_module=False)
    (folder,) = [path.parent for path in tmp_path.rglob("manifest.json")]
    assert (
        folder.parent.name
        == "test_weights_hold_everything_once_under_the_original_names.locals.Tied"
    )
    assert list(load_file(folder / "weights.safetensors")) == ["embed.weight"]
    assert Manifest.read(folder).tensors["embed.weight"].aliases == ("head.weight",)
    folder = compile_net(tmp_path)
    saved = ["down.bias", "down.weight", "steps", "up.bias", "up.weight"]
    assert sorted(load_file(folder / "weights.safetensors")) == saved == sorted(net().state_dict())
    assert sorted(load_file(folder / "constants.safetensors")) == ["table"]


def test_files_are_identical_for_identical_input(tmp_path):
    contents = [
        {name: data for name, (data, _) in snapshot(compile_net(tmp_path / side)).items()}
        for side in ("a", "b")
    ]
    assert contents[0] == contents[1]


def test_instances_lie_side_by_side(tmp_path):
    compile_net(tmp_path)
    compile_net(tmp_path, net(hidden=24), instance_name="wide")
    assert folder_of(tmp_path).is_dir() and folder_of(tmp_path, "wide").is_dir()


def test_another_dtype_leaves_the_module_alone(tmp_path):
    model = net()
    before = dict(model.state_dict(keep_vars=True))

    def run(rank):
        options = {"gen_savedir": tmp_path, "module_dtype": torch.float32}
        return parallelize(model, {"x": X.float()}, "tp", config(), **options)(X.float())

    for result in run_ranks(2, run):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, net().float()(X.float()))
    assert {
        tensor.dtype for tensor in load_file(folder_of(tmp_path) / "weights.safetensors").values()
    } == {torch.float32}
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is before[name] for name in before)


def test_a_meta_model(tmp_path):
    def on_meta():
        with torch.device("meta"):
            return Net().double()

    def make(**options):
        return load_on_ranks(tmp_path, Net, module_fn=on_meta, **options)

    constructed = make(act=lambda cls: cls(init_params=False).table.tolist())
    assert constructed == [list(range(8))] * 2
    folder = folder_of(tmp_path)
    assert sorted(load_file(folder / "constants.safetensors")) == ["table"]
    text = refusal(LoadError, lambda: make(act=lambda cls: cls()))
    assert text.startswith(
        f"{folder} has no initial value of 'up.weight'\n  why:   the model was compiled "
        "without weights"
    )


# Reuse


def test_match_finds_and_does_not_plan_again(tmp_path, monkeypatch):
    folder = compile_net(tmp_path)
    before = snapshot(folder)
    # Calling it would fail.
    monkeypatch.setattr("shardwright.frontend.files.module_files.compile_graph", None)
    compile_net(tmp_path)
    assert snapshot(folder) == before


def test_an_edited_model_is_never_served_stale_code(tmp_path):
    folder = compile_net(tmp_path)
    before = snapshot(folder)
    text = refusal(ConfigError, lambda: compile_net(tmp_path, net(hidden=24)))
    assert text == (
        f"{folder} holds files of another compile\n"
        "  why:   the model, or a value among its dummy arguments, changed\n"
        "  try:   reuse='moo' compiles again whenever something changed, reuse='override' always; "
        "another instance_name keeps both"
    )
    assert snapshot(folder) == before
    for result in load_on_ranks(tmp_path, net(hidden=24), reuse="moo"):
        torch.testing.assert_close(result, net(hidden=24)(X), rtol=0, atol=1e-12)


def test_an_edit_of_the_forward_alone_is_noticed(tmp_path, monkeypatch):
    compile_net(tmp_path)
    monkeypatch.setattr(
        Net, "forward", lambda self, x: self.down(torch.tanh(self.up(x + self.table))) * self.steps
    )
    assert "the model, or a value among its dummy arguments, changed" in refusal(
        ConfigError, lambda: compile_net(tmp_path)
    )
    for result in load_on_ranks(tmp_path, reuse="moo"):
        torch.testing.assert_close(result, net()(X), rtol=0, atol=1e-12)


def test_another_config_or_policy_is_named(tmp_path):
    compile_net(tmp_path)
    text = refusal(ConfigError, lambda: compile_net(tmp_path, policy="data", fields={"seed": 5}))
    assert "\n  why:   seed is 5, was 0; policy is 'data', was 'tp'\n" in text


def test_another_machine_of_the_same_name_is_noticed(tmp_path):
    """What a file named by an option says is part of the request."""
    machine, savedir = tmp_path / "own.json", tmp_path / "files"
    fields = {"pas_config": {"hardware": str(machine), "mesh": {"tp": 2}}}

    def describe(num_bytes):
        hardware = load_hardware("cpu", 2)
        machine.write_text(
            replace(hardware, device=replace(hardware.device, memory_bytes=num_bytes)).dumps()
        )

    describe(1e9)
    before = snapshot(compile_net(savedir, policy="autodist", fields=fields))
    assert snapshot(compile_net(savedir, policy="autodist", fields=fields)) == before
    describe(2e9)
    text = refusal(ConfigError, lambda: compile_net(savedir, policy="autodist", fields=fields))
    assert f"\n  why:   the file {machine} has changed\n" in text
    compile_net(savedir, policy="autodist", fields=fields, reuse="moo")
    (tmp_path / "own.operators.json").write_text(dumps_times(OperatorTimes()))
    text = refusal(ConfigError, lambda: compile_net(savedir, policy="autodist", fields=fields))
    assert f"\n  why:   the file {machine.with_suffix('.operators.json')} has changed\n" in text


def test_a_plan_to_be_saved_is_saved_when_the_compile_is_found_made(tmp_path):
    fields = {"pas_config": {"mesh": {"tp": 2}, "save_plan": str(tmp_path / "plan.json")}}
    folder = compile_net(tmp_path, policy="autodist", fields=fields)
    (tmp_path / "plan.json").unlink()
    before = snapshot(folder)
    compile_net(tmp_path, policy="autodist", fields=fields)
    assert snapshot(folder) == before
    assert (tmp_path / "plan.json").read_text() == (folder / "plan.json").read_text()


def test_moo_keeps_what_matches(tmp_path):
    folder = compile_net(tmp_path)
    before = snapshot(folder)
    compile_net(tmp_path, reuse="moo")
    assert snapshot(folder) == before


def test_other_initial_weights_rewrite_the_weight_file_alone(tmp_path):
    folder = compile_net(tmp_path)
    before = snapshot(folder)
    for result in load_on_ranks(tmp_path, net(seed=1)):
        torch.testing.assert_close(result, net(seed=1)(X), rtol=0, atol=1e-12)
    after = snapshot(folder)
    assert {name for name in before if after[name][1] != before[name][1]} == {
        "manifest.json",
        "weights.safetensors",
    }
    assert Manifest.read(folder).key == cache.Stored.read(folder).manifest.key


@pytest.mark.parametrize("reuse", ["match", "moo", "graph"])
def test_flipped_bytes_of_stored_values_do_not_load(tmp_path, reuse):
    """Nothing says so but their digest: the values that the model has now are those that were
    written.
    """
    folder = compile_net(tmp_path)
    expected = load_on_ranks(tmp_path)
    path = folder / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)
    text = refusal(LoadError, lambda: load_on_ranks(tmp_path, reuse=reuse))
    assert text.splitlines()[:3] == [
        f"{path} is not the file that was written",
        f"  why:   the sha256 of its bytes 0 to {len(data)} is not that of what was written",
        (f"  try:   {COMPILE_AGAIN}; if it is meant, accept it with `shardwright accept {folder}`"),
    ]
    torch.testing.assert_close(load_on_ranks(tmp_path, reuse="override"), expected, rtol=0, atol=0)


def test_other_files_are_what_was_written(tmp_path):
    folder = compile_net(tmp_path)
    for name, old, new in (
        ("manifest.json", '"Net"', '"Ne7"'),
        ("plan.json", '"policy": "tp"', '"policy": "tq"'),
    ):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(old, new))
        assert "its sha256 is not that of what was written" in refusal(
            LoadError, lambda: cache.read_plan(folder)
        )
        (folder / name).write_text(text)
    assert cache.read_plan(folder)


def test_half_made_folders_of_killed_compiles_go(tmp_path):
    folder = compile_net(tmp_path)
    left = folder.with_name("._.new.01234567")
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"half a file")
    compile_net(tmp_path)  # which finds everything made
    assert sorted(path.name for path in folder.parent.iterdir()) == ["_", "_.lock"]


def test_override_writes_everything_and_graph_keeps_equal_weights(tmp_path):
    folder = compile_net(tmp_path)
    before = snapshot(folder)

    def rewritten(reuse):
        compile_net(tmp_path, reuse=reuse)
        after = snapshot(folder)
        assert {name: data for name, (data, _) in after.items()} == {
            name: data for name, (data, _) in before.items()
        }
        return {name for name in before if after[name][1] != before[name][1]}

    assert rewritten("graph") == {"gencode0.py", "gencode1.py", "manifest.json", "plan.json"}
    assert rewritten("override") == set(before)


def test_a_users_policy_runs_again_and_plans_are_compared(tmp_path):
    calls = []
    cut = ["R"]

    def policy(graph, config):
        calls.append(cut[0])
        builder = graph.builder({"tp": 2})
        if cut[0] != "R":
            builder.split(graph.dims.of_factor("up", "n"), "tp")
        return builder.build()

    folder = compile_net(tmp_path, policy=policy)
    before = snapshot(folder)
    compile_net(tmp_path, policy=policy)
    assert snapshot(folder) == before and calls == ["R", "R"]
    cut[0] = "S"
    text = refusal(ConfigError, lambda: compile_net(tmp_path, policy=policy))
    assert "policy.<locals>" not in text and "policy made another plan" in text
    assert snapshot(folder) == before
    compile_net(tmp_path, policy=policy, reuse="moo")
    assert snapshot(folder)["plan.json"] != before["plan.json"]


# Failures


@pytest.mark.parametrize("reuse", ["match", "override", "moo", "graph"])
def test_a_failed_compile_leaves_what_was_there(tmp_path, reuse):
    folder = compile_net(tmp_path)
    before = snapshot(folder)
    model = net(hidden=24) if reuse != "match" else net()
    kind = ConfigError if reuse == "match" else PlanError
    refusal(kind, lambda: compile_net(tmp_path, model, policy=refuse, reuse=reuse))
    assert snapshot(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["_", "_.lock"]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    folder = compile_net(tmp_path)
    before = snapshot(folder)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_tensors", full)
    assert refusal(OSError, lambda: compile_net(tmp_path, reuse="override")) == (
        f"generated files cannot be written to {folder}\n"
        "  why:   No space left on device\n"
        "  try:   another gen_savedir (--gen-savedir), or room and permission to write there"
    )
    refusal(FileError, lambda: compile_net(tmp_path, net(seed=1)))
    assert snapshot(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == ["_", "_.lock"]


def test_a_process_killed_between_the_two_renames(tmp_path, monkeypatch):
    """The first rename is done, the second never happens, and nobody cleans up."""
    folder = compile_net(tmp_path)
    before = snapshot(folder)
    rename, done = os.rename, []

    def killed(source, target):
        if done:
            raise KeyboardInterrupt
        done.append(source)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("shardwright.runtime.swap.os.rename", killed)
        with pytest.raises(KeyboardInterrupt):
            compile_net(tmp_path, net(hidden=24), reuse="override")
    assert not folder.exists()
    compile_net(tmp_path)
    assert snapshot(folder) == before


def test_edited_code_is_refused_until_it_is_accepted(tmp_path):
    folder = compile_net(tmp_path)
    path = folder / "gencode0.py"
    path.write_text(path.read_text() + "\n# an edit\n")
    text = refusal(LoadError, lambda: load_on_ranks(tmp_path))
    assert (
        text.startswith(f"{path} is not the file that was generated\n")
        and f"shardwright accept {folder}" in text
    )
    accept(folder)
    load_on_ranks(tmp_path)
    load_on_ranks(tmp_path, net(seed=1))  # new weights keep the edit
    assert path.read_text().endswith("# an edit\n")


def test_missing_and_damaged_files(tmp_path):
    folder = compile_net(tmp_path)
    (folder / "gencode1.py").unlink()
    assert refusal(LoadError, lambda: compile_net(tmp_path)) == (
        f"{folder / 'gencode1.py'} is missing\n"
        "  why:   manifest.json lists it\n"
        f"  try:   copy the whole directory, or {COMPILE_AGAIN}"
    )
    compile_net(tmp_path, reuse="moo")
    (folder / "gencode1.py").unlink()
    (folder / "gencode1.py").mkdir()
    assert refusal(LoadError, lambda: compile_net(tmp_path)).startswith(
        f"{folder / 'gencode1.py'} is a folder\n  why:   manifest.json lists it\n"
    )
    compile_net(tmp_path, reuse="moo")
    lock = folder.with_name("_.lock")
    lock.unlink()
    lock.mkdir()
    assert refusal(FileError, lambda: compile_net(tmp_path)) == (
        f"generated files cannot be written to {folder}\n"
        f"  why:   a file belongs where a folder is: {lock}\n"
        "  try:   move the folder away, or another gen_savedir (--gen-savedir), or room and "
        "permission to write there"
    )
    lock.rmdir()
    (folder / "manifest.json").write_text("{")
    assert refusal(LoadError, lambda: compile_net(tmp_path)).startswith(
        f"{folder / 'manifest.json'} is damaged\n"
    )
    (folder / "manifest.json").write_text('{"format_version": 99}')
    assert f"{folder} was compiled with another version" in refusal(
        LoadError, lambda: compile_net(tmp_path)
    )
    compile_net(tmp_path, reuse="moo")
    (folder / "weights.safetensors").unlink()
    compile_net(tmp_path)
    assert (folder / "weights.safetensors").exists()


def test_files_of_the_user_stay(tmp_path):
    folder = compile_net(tmp_path)
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step3").write_text("also mine")
    compile_net(tmp_path, net(hidden=24), reuse="override")
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "checkpoints" / "step3").read_text() == "also mine"


# Arguments


def test_loading_needs_a_job(tmp_path):
    act = lambda: parallelize(net(), {"x": X}, "tp", config(), gen_savedir=tmp_path)  # noqa: E731
    assert refusal(DistributedError, act) == (
        "a parallel module is loaded in a job\n"
        "  why:   torch.distributed is not initialised\n"
        "  try:   run with torchrun --nproc_per_node=2 and call "
        "torch.distributed.init_process_group, "
        "or pass load_module=False to compile only"
    )
    assert list(tmp_path.iterdir()) == []
    assert refusal(ConfigError, lambda: compile_net(tmp_path, broadcast_strategy="all")) == (
        "broadcast_strategy='all' needs a job\n"
        "  why:   torch.distributed is not initialised, so there are no other nodes to send "
        "files to\n"
        "  try:   run under torchrun and call torch.distributed.init_process_group, or leave "
        "it at 'none'"
    )


def test_the_number_of_ranks_must_be_the_one_asked_for(tmp_path):
    def run(rank):
        return parallelize(net(), {"x": X}, "tp", config(runtime_ngpus=4), gen_savedir=tmp_path)

    assert refusal(DistributedError, lambda: run_ranks(2, run)) == (
        "the module is compiled for runtime_ngpus=4, but 2 ranks are running\n"
        "  try:   torchrun --nproc_per_node=4, or set runtime_ngpus=2"
    )


def test_arguments_are_refused_in_words(tmp_path):
    assert refusal(ConfigError, lambda: compile_net(tmp_path, reuse="overide")) == (
        "reuse cannot be 'overide'\n  try:   did you mean 'override'?"
    )
    assert refusal(ConfigError, lambda: compile_net(tmp_path, broadcast_strategy="some")) == (
        "broadcast_strategy cannot be 'some'\n  try:   one of 'all', 'code', 'no_weights', 'none'"
    )
    assert refusal(ConfigError, lambda: compile_net(tmp_path, instance_name="../x")) == (
        "instance_name is a name for a folder\n"
        "  why:   it is '../x'\n"
        "  try:   letters, digits, '_', '-' and '.', the first one no '-' or '.'"
    )
    assert refusal(ConfigError, lambda: compile_net(tmp_path, module_dtype=torch.int64)) == (
        "module_dtype is a floating dtype, or None\n  why:   it is torch.int64"
    )
    assert refusal(PlanError, lambda: compile_net(tmp_path, policy="tpp")) == (
        "there is no policy 'tpp'\n  try:   did you mean 'tp'?"
    )
    assert refusal(
        ConfigError, lambda: compile_net(tmp_path, fields={"pas_config": {"num_stages": 2}})
    ) == (
        "policy 'tp' has no option 'num_stages'\n"
        "  try:   it is an option of 'pp', 'hybrid', 'tensor', 'autodist'"
    )
    assert refusal(PlanError, lambda: compile_net(tmp_path, policy="dp")).startswith(
        "policy 'dp' copies the model over units, so a plan has one rank\n"
    )
    with pytest.raises(TypeError, match="positional"):
        parallelize(net(), {"x": X}, "tp", config(), tmp_path)
    assert list(tmp_path.rglob("manifest.json")) == []


def test_a_parallel_module_is_refused(tmp_path):
    (text, _) = load_on_ranks(
        tmp_path, act=lambda module: refusal(ConfigError, lambda: compile_net(tmp_path, module))
    )
    assert (
        text
        == "Net is a parallel module already\n  try:   pass the module that it was compiled from"
    )


def test_positional_only_arguments_are_refused(tmp_path):
    class Positional(nn.Module):
        def forward(self, x, /):
            return x

    def act():
        parallelize(Positional(), {"x": X}, "tp", config(), gen_savedir=tmp_path, load_module=False)

    assert refusal(TraceError, act).startswith(
        "Positional.forward has positional-only parameters: x\n"
    )


def test_the_rank_order_is_kept_or_refused(tmp_path):
    def policy(graph, config):
        return graph.builder({"dp": 2, "tp": 2}).build()

    def compile_in(order):
        fields = {"plan_ngpus": 4, "runtime_ngpus": 4, "rank_order": order}
        return compile_net(tmp_path, policy=policy, fields=fields, reuse="moo")

    assert Manifest.read(compile_in("pp-dp-tp")).mesh.names == ("dp", "tp")
    for order in ("tp-dp", "dp"):
        assert refusal(PlanError, lambda order=order: compile_in(order)) == (
            "the plan's mesh does not follow rank_order\n"
            f"  why:   rank_order is {order!r}, the axes of the mesh are 'dp-tp', major to minor\n"
            "  try:   leave rank_order out, or use a policy that builds its mesh in this order"
        )


def test_a_dict_for_a_config(tmp_path):
    parallelize(
        net(),
        {"x": X},
        "tp",
        {"plan_ngpus": 2, "runtime_ngpus": 4},
        gen_savedir=tmp_path,
        load_module=False,
    )
    assert Manifest.read(folder_of(tmp_path)).request["config"]["runtime_ngpus"] == 4


def test_a_class_of_the_running_script_lies_where_it_is_imported_from(monkeypatch):
    main = type("Main", (), {"__spec__": None, "__file__": "/home/me/train.py"})()
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)
    cls = type("Gpt", (nn.Module,), {"__module__": "__main__"})
    assert cache.generated_directory("/x", cls, None) == Path("/x/_parallel_modules/train/Gpt/_")


def test_it_is_exported():
    assert shardwright.parallelize is parallelize
