"""The command line: what it prints, its exit codes, its errors in words."""

import errno
import importlib.metadata
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch
from api_jobs import X, config, net

import shardwright
from shardwright.frontend.cli.command_arguments import NUM_CHOICES
from shardwright.frontend.cli.commands import BROKEN_PIPE, COMMANDS
from shardwright.frontend.cli.main import main
from shardwright.frontend.cli.targets import load_model, read_settings
from shardwright.frontend.files import cache
from shardwright.frontend.files.named_object import load_target
from shardwright.frontend.parallelize import parallelize
from shardwright.frontend.verification.files_check import NOT_CHECKED
from shardwright.frontend.verification.verify import verify
from shardwright.policies.autodist.questions.explain import MOST
from shardwright.runtime.errors import COMPILE_AGAIN, ConfigError
from shardwright.runtime.ranks.threads import run_ranks

MODELS = '''
import warnings

import torch
from torch import nn
from api_jobs import Net, X, net


def make():
    return net(), {"x": X}


class Scalar(Net):
    def forward(self, x):
        return super().forward(x).square().mean()


def scalar():
    return Scalar(), {"x": X}


def only_a_module():
    return net()


def without_values():
    return net().to("meta"), {"x": X}


EXAMPLE = {"x": X.float()}
NUMBER = 3


def replicate(graph, config):
    return graph.builder({"dp": config.plan_ngpus}).build()


def broken():
    raise RuntimeError("no such file: corpus.txt")


class Norm(nn.Module):
    """Layers of one kind, and a function without a rule."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.cumulative_trapezoid(x)


class Narrow(torch.nn.Module):
    """A layer with fewer channels than ranks, and an operator that needs what is split whole."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(3, 2, 1)
        self.wide = torch.nn.Linear(8, 64)
        self.out = torch.nn.Linear(64, 8)

    def forward(self, x):
        x = self.wide(self.conv(x)).sort(-1).values
        return self.out(x)


def narrow():
    return Narrow(), {"x": torch.ones(4, 3, 8)}


class Loud(Norm):
    def forward(self, x):
        warnings.warn("small layers")
        warnings.warn("of no use to users", DeprecationWarning)
        return super().forward(x)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working directory with a module of models."""
    (tmp_path / "my_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    return tmp_path


@pytest.fixture
def run(capsys):
    def run(line, expected=0):
        code = main(line.split())
        out, err = capsys.readouterr()
        assert code == expected, err or out
        return err if expected else out

    return run


NET = ".shardwright/_parallel_modules/api_jobs/Net/_"


def test_compile_and_load(run, folder):
    out = run("compile my_models:make --policy tp --plan-ngpus 2 --dump passes")
    lines = out.splitlines()
    assert lines[0] == "compiled Net (tp, 2 ranks)"
    assert [line.split()[0] for line in lines[1:]] == [
        *("trace", "verify", "rules", "dims", "policy", "lower", "emit", "write", "total", "files:")
    ]
    assert lines[-1] == f"files: {folder / NET}"
    assert [path.name for path in sorted(Path("passes").iterdir())] == [
        "00-trace.txt",
        "01-rules.txt",
        "02-dims.txt",
        "03-policy.txt",
        "04-lower.txt",
        "05-emit.txt",
    ]
    assert Path("passes/05-emit.txt").read_text().startswith("==== gencode0.py\n")
    model = net()  # made once: the ranks are threads, and draw from one generator
    results = run_ranks(2, lambda rank: parallelize(model, {"x": X}, "tp", config())(X))
    torch.testing.assert_close(results[0], model(X), rtol=0, atol=1e-12)
    again = run("compile my_models:make --policy tp --plan-ngpus 2")
    assert again.splitlines()[0] == "found, nothing changed: Net (tp, 2 ranks)"


def test_settings_reach_the_config(run):
    run(
        "compile my_models:Net --args my_models:EXAMPLE --policy my_models:replicate "
        "--plan-ngpus 1 --runtime-ngpus 4 "
        '--set seed=3 --set user_config.run=a --set dynamic_dims={"x":{"0":"batch"}} --dtype '
        "float32 --instance-name small "
        "--gen-savedir out --reuse override"
    )
    request = json.loads(
        Path("out/_parallel_modules/api_jobs/Net/small/manifest.json").read_text()
    )["request"]
    fields = ("plan_ngpus", "runtime_ngpus", "seed", "user_config", "dynamic_dims")
    assert [request["config"][name] for name in fields] == [
        1,
        4,
        3,
        {"run": "a"},
        {"x": {"0": "batch"}},
    ]
    assert request["policy"] == "my_models.replicate"


def test_inspect(run):
    run("compile my_models:make --policy tp --plan-ngpus 2 --runtime-ngpus 4")
    out = " ".join(run(f"inspect {NET}").split())
    assert (
        f"model Net policy tp mesh tp=2, 2 units made by shardwright {shardwright.__version__}"
        in out
    )
    assert "up.weight parameter float64 [16/tp, 8]" in out and "table buffer float64 [8]" in out
    assert "name tp" in out and "up split hidden" in out and "down split hidden" in out
    assert out.endswith("No operator fell back to replication.")


def test_warnings_are_printed_as_errors_are(folder, capsys):
    """The model's own say where they come from, and those of other kinds are left to Python."""
    command = "compile my_models:Loud --args my_models:EXAMPLE --policy tp --plan-ngpus 2"
    with pytest.warns(DeprecationWarning, match="of no use") as others:
        assert main(command.split()) == 0
    assert not [other for other in others if other.category is UserWarning]
    at = MODELS[: MODELS.index("    warnings.warn")].count("\n") + 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "warning: small layers",
        f"  where: {folder / 'my_models.py'}:{at}",
        "warning: no rule for operator torch.cumulative_trapezoid: it runs replicated on every "
        "rank",
    ]
    assert lines[3].startswith(f"  where: {folder / 'my_models.py'}:")
    assert [line.split(":")[0] for line in lines].count("  where") == 2


def test_inspect_groups_layers_and_says_where_it_replicates(run):
    run("compile my_models:Norm --args my_models:EXAMPLE --policy tp --plan-ngpus 2")
    directory = ".shardwright/_parallel_modules/my_models/Norm/_"
    assert "layers.*.bias  x" in run(f"inspect {directory}")
    out = run(f"inspect {directory} --every-layer")
    assert "layers.*" not in out and "layers.0.bias" in out


def test_inspect_says_where_and_why_a_layer_is_replicated(run):
    out = run("compile my_models:narrow --policy tp --plan-ngpus 4")
    directory = ".shardwright/_parallel_modules/my_models/Narrow/_"
    assert out.endswith(
        f"2 operators could not be split: shardwright inspect {Path(directory).absolute()}\n"
    )
    at = f"    my_models.py:{MODELS[: MODELS.index('self.conv(')].count(chr(10)) + 1}"
    assert run(f"inspect {directory}").split("Replicated\n")[1].splitlines() == [
        "conv over tp: conv1d has no dim to split: "
        "conv_dim (3) and conv_dim (2) would leave some of the 4 ranks without a piece",
        at,
        "sort over tp: sort needs dim hidden whole; it is gathered before it",
        at,
    ]


def test_verify(run, monkeypatch, capsys):
    out = run("verify my_models:scalar --policy data --plan-ngpus 2 --runtime-ngpus 4 --steps 2")
    assert out.startswith("4 ranks in units of dp=2, compared with the model on one device\n")
    assert [line.split()[0] for line in out.splitlines()[2:]] == [
        "losses",
        "gradients",
        "parameters",
        "buffers",
    ]
    assert "differ" not in out
    monkeypatch.setattr(
        "shardwright.runtime.adapters.all_reduce", lambda x, axis, backward="identity": x
    )
    assert (
        main(["verify", "my_models:scalar", "--policy", "tp", "--plan-ngpus", "2", "--steps", "1"])
        == 1
    )
    assert "differ" in capsys.readouterr().out


def test_verify_takes_files_where_they_are_checked_from_outside(run, capsys):
    model = "my_models:Scalar --args my_models:EXAMPLE"
    made = run(f"compile {model} --policy tp --plan-ngpus 2 --runtime-ngpus 4")
    folder = made.rpartition("files: ")[2].strip()
    accepted, told = run(f"verify {folder} --outside").splitlines()
    assert "accepts gencode0.py" in accepted and told == NOT_CHECKED
    for file in Path(folder).glob("gencode*.py"):
        source = file.read_text()
        assert "all_reduce(" in source
        file.write_text(re.sub(r"= all_reduce\((\w+), tp\)", r"= 1 * \1", source))
    assert main(["verify", folder, "--outside"]) == 1  # nobody has accepted the edit
    assert "shardwright accept" in capsys.readouterr().err
    command = run(f"accept {folder}").split("`")[1]
    assert command == f"shardwright verify {folder} --outside"
    assert main(command.split()[1:]) == 1
    assert "refuses gencode0.py" in capsys.readouterr().out
    refused = {
        f"verify {folder}": f"{folder} cannot be compared with one device",
        f"verify {folder} --outside --policy tp --set seed=1 --steps 2": "--policy, --set, --steps "
        "cannot be given for files that are compiled",
        f"verify {folder} --outside --args my_models:NUMBER": "my_models:NUMBER gives no arguments",
        f"verify {folder}/none --outside": f"there is no folder {folder}/none",
        "verify my_models:scalar": "there is no plan to verify",
    }
    for line, what in refused.items():
        assert main(line.split()) == 1
        assert capsys.readouterr().err.splitlines()[0] == f"error: {what}"


def test_a_model_with_a_table_in_a_plain_attribute_is_verified_in_float64():
    class Shifted(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 6)
            self.table = torch.arange(4.0)

        def forward(self, x):
            return super().forward(x + self.table).square().mean()

    model = Shifted()
    report = verify(
        model, {"x": torch.ones(2, 4)}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1
    )
    assert report.ok, report
    assert model.table.dtype == model.weight.dtype == torch.float32


def test_accept(run):
    run("compile my_models:make --policy tp --plan-ngpus 2")
    assert run(f"accept {NET}") == "nothing to accept: no file was edited\n"
    with Path(NET, "gencode1.py").open("a") as file:
        file.write("# mine\n")
    assert run(f"accept {NET}").startswith("accepted gencode1.py\nnot checked yet: ")


def test_errors_are_words_without_a_traceback(run, folder):
    assert run("compile my_models:make --policy dp --plan-ngpus 2", 1) == (
        "error: policy 'dp' copies the model over units, so a plan has one rank\n"
        "  why:   plan_ngpus=2\n"
        "  try:   plan_ngpus=1 with runtime_ngpus=2, or policy 'data' to split the batch "
        "inside a unit\n"
    )
    assert run("compile my_models:broken --policy tp --plan-ngpus 2", 1) == (
        "error: RuntimeError: no such file: corpus.txt\n"
        "  try:   run the command again with --debug to see where it was raised\n"
    )
    assert run("inspect nowhere", 1).startswith(
        "error: nowhere holds no compiled module\n  why:   there is no manifest.json\n"
    )
    assert run("inspect my_models.py", 1).startswith(
        "error: my_models.py holds no compiled module\n"
    )
    assert run("compile my_models:make --policy tp --plan-ngpus 2 --set plan_ngpus=3", 1) == (
        "error: plan_ngpus is not for --set\n  try:   --plan-ngpus 3\n"
    )
    assert run("compile my_models:make --policy tp --plan-ngpus 2 --set sed=3", 1) == (
        "error: ComputeConfig has no field 'sed'\n  try:   did you mean 'seed'?\n"
    )
    assert run("compile my_models:make --policy tp --plan-ngpus 2 --dtype bfloat", 1) == (
        "error: there is no floating dtype 'bfloat'\n  try:   did you mean 'bfloat16'?\n"
    )
    with pytest.raises(RuntimeError, match=r"no such file: corpus\.txt"):
        main(["compile", "my_models:broken", "--policy", "tp", "--plan-ngpus", "2", "--debug"])


def test_what_cannot_be_written_is_said_in_words(run, folder):
    (folder / "file").write_text("mine")
    command = "compile my_models:make --policy tp --plan-ngpus 2"
    directory = folder / "file/_parallel_modules/api_jobs/Net/_"
    assert run(f"{command} --gen-savedir file", 1) == (
        f"error: generated files cannot be written to {directory}\n"
        f"  why:   Not a directory: {directory.parent}\n"
        "  try:   another gen_savedir (--gen-savedir), or room and permission to write there\n"
    )
    assert run(f"{command} --dump file", 1) == (
        "error: dump cannot be written to file\n"
        "  why:   File exists: file\n"
        "  try:   name a new folder, or one that takes files\n"
    )
    assert (folder / "file").read_text() == "mine"


def test_a_full_disk_leaves_what_was_there(run, monkeypatch):
    run("compile my_models:make --policy tp --plan-ngpus 2")
    before = {path.name: path.read_bytes() for path in Path(NET).iterdir()}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(cache, "write_tensors", full)
        shown = run("compile my_models:make --policy data --plan-ngpus 2 --reuse override", 1)
    assert shown == (
        f"error: generated files cannot be written to {Path(NET).absolute()}\n"
        "  why:   No space left on device\n"
        "  try:   another gen_savedir (--gen-savedir), or room and permission to write there\n"
    )
    assert {path.name: path.read_bytes() for path in Path(NET).iterdir()} == before


def test_files_in_a_place_that_takes_none_are_found(run, monkeypatch):
    command = "compile my_models:make --policy tp --plan-ngpus 2"
    run(command)

    def refused(self, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", self.lock_file)

    monkeypatch.setattr(filelock.FileLock, "acquire", refused)
    assert run(command).startswith("found, nothing changed: Net")
    shown = run(f"{command} --instance-name other", 1)
    assert (
        shown.startswith("error: generated files cannot be written to ")
        and "Read-only file system" in shown
    )


def test_a_plan_that_is_none_is_named(run):
    run("compile my_models:make --policy tp --plan-ngpus 2")
    Path(NET, "plan.json").write_text("[]")
    assert run(f"inspect {NET}", 1) == (
        f"error: {NET}/plan.json is damaged\n"
        "  why:   the file holds list, not an object\n"
        f"  try:   {COMPILE_AGAIN}\n"
    )


def test_verify_needs_values_and_steps(run):
    assert run("verify my_models:without_values --policy tp --plan-ngpus 2", 1) == (
        "error: the model has no values: up.weight is on the meta device\n"
        "  why:   verify trains it, and compares numbers\n"
        "  try:   make it on the CPU; with fewer and narrower layers if it is large: the "
        "same rules split it\n"
    )
    assert run("verify my_models:make --policy tp --plan-ngpus 2 --steps 0", 1) == (
        "error: there is nothing to compare after 0 steps\n  try:   compare at least one step\n"
    )


def test_command_lines_that_do_not_parse(capsys):
    for line in ("compile my_models:make", "inspect", "train"):
        with pytest.raises(SystemExit) as caught:
            main(line.split())
        assert caught.value.code == 2
    assert "the following arguments are required" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["pan", "my_models:make"])
    assert capsys.readouterr().err.endswith(
        "shardwright: error: there is no command 'pan': did you mean 'plan'?\n"
    )
    for line, end in (
        ("mergecheckpoint a b", "no command 'mergecheckpoint': did you mean 'merge-checkpoint'?\n"),
        ("convert a b --to hf", "argument --to: there is no 'hf': did you mean 'huggingface'?\n"),
    ):
        with pytest.raises(SystemExit):
            main(line.split())
        assert capsys.readouterr().err.endswith(end)


def test_without_a_command_all_of_them_are_listed(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert "Search for the best plan for a machine" in shown and "Merge a checkpoint" in shown
    # A command's line is a whole sentence.
    assert all(command.text.splitlines()[0].endswith(".") for command in COMMANDS.values())


def refusal(act):
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


def test_targets(folder):
    assert load_target("my_models:NUMBER") == 3
    assert refusal(lambda: load_target("my_models")) == (
        "'my_models' is not of the form module:name\n  try:   for example "
        "my_package.models:make_gpt"
    )
    assert refusal(lambda: load_target("my_model:make")) == (
        "there is no module 'my_model'\n"
        "  why:   No module named 'my_model'\n"
        "  try:   run in the folder that holds it, or add that folder to PYTHONPATH"
    )
    assert refusal(lambda: load_target("my_models:mak")) == (
        f"module 'my_models' has no 'mak'\n  where: {folder / 'my_models.py'}\n  try:   did "
        "you mean 'make'?"
    )
    (folder / "needy.py").write_text("import not_installed")
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        load_target("needy:x")


def test_models_and_their_arguments():
    source, dummy_args = load_model("my_models:make", None)
    assert source.module is not None and list(dummy_args) == ["x"]
    assert refusal(lambda: load_model("my_models:only_a_module", None)) == (
        "there are no dummy arguments for my_models:only_a_module\n"
        "  why:   it gives a module only\n"
        "  try:   return (module, dummy_args), or name them with --args module:name"
    )
    assert refusal(lambda: load_model("my_models:make", "my_models:NUMBER")) == (
        "there are no dummy arguments for my_models:make\n"
        "  why:   they are a int, not a dict\n"
        "  try:   return (module, dummy_args), or name them with --args module:name"
    )
    assert refusal(lambda: load_model("my_models:NUMBER", None)) == (
        "my_models:NUMBER gives no module\n  why:   it gave int\n  try:   return the module, "
        "or (module, dummy_args)"
    )


def test_settings():
    settings = ["a=1", "b=text", "c.d=[1, 2]", "c.e=None", "f=True", "g=a=b"]
    assert read_settings(settings) == {
        "a": 1,
        "b": "text",
        "c": {"d": [1, 2], "e": None},
        "f": True,
        "g": "a=b",
    }
    assert refusal(lambda: read_settings(["a"])) == (
        "'a' is not of the form key=value\n  try:   for example seed=3 or pas_config.num_stages=2"
    )
    assert (
        refusal(lambda: read_settings(["a=1", "a.b=2"]))
        == "'a.b' and 'a' are both set\n  try:   set one of them"
    )
    assert refusal(lambda: read_settings(["dynamic_dims={x: 0}"])) == (
        "the value of dynamic_dims is not JSON\n"
        "  why:   Expecting property name enclosed in double quotes: line 1 column 2 (char "
        "1) of {x: 0}\n"
        "  try:   names in double quotes, those of dims too: "
        """--set 'dynamic_dims={"x": {"0": "batch"}}'"""
    )


def test_version_and_help_import_no_torch():
    """So that they answer at once, whatever command they are asked of."""
    lines = [["--version"], ["--help"], [], ["plam"], *([name, "--help"] for name in COMMANDS)]
    code = f"""
import sys
from shardwright.frontend.cli.main import main
for line in {lines!r}:
    try:
        main(line)
    except SystemExit:
        pass
slow = {{"torch", "numpy", "rich", "yaml"}} & sys.modules.keys()
assert not slow, slow
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The version of the installed package, of which torch's own may say more: 2.11.0+cu130.
    installed = importlib.metadata.version("torch")
    assert torch.__version__.startswith(installed)
    version = f"shardwright {shardwright.__version__} (torch {installed})\n"
    assert run.stdout.startswith(version)
    listed = run.stdout.replace("\n              ", " ")
    for name, command in COMMANDS.items():
        assert f"\n    {name} " in listed and f"usage: shardwright {name} " in listed
        assert command.text in run.stdout
        assert callable(pkgutil.resolve_name(command.function))
    assert "there is no command 'plam': did you mean 'plan'?" in run.stderr


def test_as_many_choices_are_explained_as_asked_for():
    assert NUM_CHOICES == MOST


@pytest.mark.parametrize("command", ["compile", "verify", "inspect", "accept"])
def test_every_command_has_help(command, capsys):
    for line in ("--help", f"{command} --help"):
        with pytest.raises(SystemExit) as caught:
            main(line.split())
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


def test_a_shell_completes_commands_options_and_values(capsys) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        line = f"COMP_WORDS=(shardwright {' '.join(map(repr, words))}); COMP_CWORD={len(words)}"
        shell = f"{script}\n{line}\n_shardwright\necho ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-c", shell], capture_output=True, text=True).stdout.split()

    assert completed("merg") == ["merge", "merge-checkpoint"]
    assert completed("merge-checkpoint", "--max") == ["--max-file-size"]
    assert completed("convert", "in", "out", "--to", "") == [
        "shardwright", "huggingface", "full", "dcp",
    ]  # fmt: skip
    assert completed("compile", "--policy", "t") == ["tp", "tensor"]
    assert completed("simulate", "--hardware", "=", "h") == ["h100", "h200"]
    assert completed("plan", "--optimizer", "AdamW") == ["AdamW"]
    assert completed("data", "") == ["redist", "index"]
    assert completed("train", "--schedule.name", "=") == ["constant", "linear", "cosine"]
    assert completed("train", "--checkpoints.in_background", "t") == ["true"]
    assert completed("train", "--optimizer.n") == ["--optimizer.name"]


@pytest.mark.slow
def test_it_ends_quietly_where_nobody_reads() -> None:
    """Nothing is said of a pipe that was closed, as by ``shardwright ... | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardwright", "completion", "bash"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (BROKEN_PIPE, "")
