"""Files of right plans are accepted by ``spmd_types``, and changed ones refused."""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expert_models import verify_experts
from museum_models import CASES
from outside_cases import edits_of_one_file, exhibits, verdict
from torch import nn
from verified import verify_zoo

from shardwright.frontend.verification import verify as verification
from shardwright.frontend.verification.outside import outside_run
from shardwright.frontend.verification.outside.outside_run import OutsideReport, outside_certificate
from shardwright.frontend.verification.verify import compile_into
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, LoadError
from shardwright.runtime.manifest import accept

BOTH = (0, 1)
TWO = {"plan_ngpus": 2, "runtime_ngpus": 2}
ZERO_3 = {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3, "use_end2end": True}
MODE_3D = {"plan_ngpus": 8, "runtime_ngpus": 8, "pas_config": {"mode": "3d"}}
STAGES = {
    "plan_ngpus": 4,
    "runtime_ngpus": 4,
    "use_end2end": True,
    "pas_config": {"pp_size": 2, "tp": 2},
}


def certificate(name: str, policy: str, config: dict[str, Any]) -> OutsideReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify_zoo(name, policy, config, steps=1, outside=True)
    assert report.ok and report.outside is not None
    return report.outside


@pytest.mark.parametrize(
    ("name", "policy", "config"),
    [
        ("mlp", "tp", TWO),
        pytest.param("gpt2", "tp", {"plan_ngpus": 2, "runtime_ngpus": 4}, marks=pytest.mark.slow),
        pytest.param("llama", "tp", TWO, marks=pytest.mark.slow),
        pytest.param("llama", "dp", ZERO_3, marks=pytest.mark.slow),
        pytest.param("llama", "tensor", MODE_3D, marks=pytest.mark.slow),
        pytest.param("gpt2-uneven", "hybrid", STAGES, marks=pytest.mark.slow),
    ],
)
def test_right_files_are_accepted(name: str, policy: str, config: dict[str, Any]) -> None:
    report = certificate(name, policy, config)
    assert report.ok and "accepts gencode0.py" in str(report)
    assert set(report.ranks[0].told) <= {"reshape", "split", "view"}
    assert all(rank.num_calls for rank in report.ranks)


@pytest.mark.parametrize(
    ("name", "policy", "config"),
    [
        ("gpt_oss", "tp", {"plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"ep": 2}}),
        pytest.param("deepseek_v3", "tp", TWO, marks=pytest.mark.slow),
        pytest.param("phimoe", "data", TWO, marks=pytest.mark.slow),
        pytest.param("jamba", "tp", TWO, marks=pytest.mark.slow),
    ],
)
def test_files_with_experts_are_accepted(name: str, policy: str, config: dict[str, Any]) -> None:
    """Summands of rows add up, gates take a part of a cut dim, dims of comments have names, and
    functions of the model's own follow their annotations.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify_experts(name, policy, config, steps=1, outside=True).outside
    assert report is not None and report.ok, report


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"(?s)spmd_types is not installed.*shardwright\[outside\]"
    ):
        verify_zoo("mlp", "tp", TWO, outside=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=pytest.mark.slow if case in ("tp", "sp", "cp", "experts-tp") else ()
        )
        for case in CASES
    ],
)
def test_programs_of_the_museum_are_right(case: str) -> None:
    assert verdict(case) == "accepted"


UNSEEN = {
    # A number: the types say how a value is held, not which value it is.
    "An auxiliary loss times the number of ranks",
    # A gradient that our program says ends early: the files that are made of it are the right ones.
    "A router cut from its loss",
    "A rank without tokens leaves the backward",
}
"""The exhibits that ``spmd_types`` accepts."""

STOPPED = {
    "A mean where a sum belongs",
    "Label smoothing over a part of the vocabulary",
    "Expert gradients that grow with the ranks",
    "Experts counted from zero on every rank",
}
"""The exhibits without a file that loads, or whose run ends with an error of its own."""

QUICK = {
    "The last layer norm",
    "The bias of a row-parallel linear",
    "The router's weight",
    "The gradient below the experts",
    "The scale of the router's losses",
    "Tied embeddings in two stages",
    "Tied embeddings in other pieces",
}


@pytest.mark.parametrize(
    "title",
    [t if t in QUICK else pytest.param(t, marks=pytest.mark.slow) for t in exhibits()],
)
def test_faults_of_the_museum(title: str) -> None:
    """Most published faults are refused; the others are listed."""
    wanted = "refused"
    if title in UNSEEN:
        wanted = "accepted"
    elif title in STOPPED:
        wanted = "stopped"
    assert verdict(*exhibits()[title]).split(":")[0] == wanted


SEVERAL_RANKS = [case for case, given in CASES.items() if given.num_ranks > 1]


@pytest.mark.parametrize(
    ("case", "step"),
    [
        ("pipeline", 10),
        *(pytest.param(case, 8, marks=pytest.mark.slow) for case in SEVERAL_RANKS),
    ],
)
def test_edits_of_one_file(case: str, step: int) -> None:
    """No statement may be another one in the file of one rank alone."""
    found = [*edits_of_one_file(case, step)]
    assert len({kind for kind, _ in found}) >= 4
    assert [kind for kind, said in found if not said] == []


class OneHead(nn.Module):
    """A product over a dim of size 1, and a tensor that is filled piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.key(x.unsqueeze(1))
        both = x.new_empty(*key.shape[:-1], 24)
        both[..., :16] = key
        both[..., 16:] = x.unsqueeze(1)
        return both.square().sum()


def test_what_latent_attention_is_made_of_is_accepted() -> None:
    x = torch.ones(4, 6, 8, dtype=torch.float64)
    report = verification.verify(OneHead().double(), {"x": x}, "data", TWO, outside=True)
    assert report.ok and report.outside is not None and "accepts" in str(report.outside)


class Noisy(nn.Module):
    """Random numbers of many kinds: for pieces and wholes, for channels, in attention, and in a
    recurrent layer, which draws from the generator of its process, with the seed of its draw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.steps = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.up(x), 0.3)
        hidden = F.rrelu(hidden, training=True) + torch.rand_like(hidden)
        heads = hidden.unflatten(-1, (4, 4)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)
        out = self.down(F.dropout2d(heads, 0.3).transpose(1, 2).flatten(2))
        steps, _ = self.steps(F.gumbel_softmax(out, dim=-1))
        return F.dropout(steps, 0.2).square().sum()


def test_random_numbers_of_right_files_are_accepted() -> None:
    """It is compiled several times, which warns of uneven work once."""
    x = torch.rand(4, 6, 8, dtype=torch.float64)
    with pytest.warns(match="each rank of Noisy does much more than its part") as said:
        report = verification.verify(Noisy().double(), {"x": x}, "tp", TWO, steps=1, outside=True)
    assert len(said) == 1
    assert report.ok and "accepts gencode0.py" in str(report.outside), report


def edited(folder: Path, ranks: Iterable[int], before: str, after: str) -> OutsideReport:
    """What is said of the files of MLPs under tp, where the files of some ranks are edited."""
    torch.manual_seed(0)
    module, x = MLPs().double(), torch.rand(4, 8, dtype=torch.float64)
    policy, config = find_policy("tp"), ComputeConfig(**TWO)
    directory = compile_into(folder, module, {"x": x}, policy, config)
    for rank in ranks:
        file = directory / f"gencode{rank}.py"
        source = file.read_text()
        assert before in source
        file.write_text(source.replace(before, after, 1))
    accept(directory)
    return outside_certificate(directory, config, [[{"x": x}]])


class MLP(nn.Module):
    """Two linear layers, the first of which is split over its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).softmax(0))


class MLPs(nn.Module):
    """Layers that are alike, which a file has as one method, a loss, and a weight without use."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.zeros(3))
        self.layers = nn.ModuleList(MLP() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_an_error_of_edited_files_is_told_with_its_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no verdict then."""
    monkeypatch.setattr(outside_run, "PATIENCE_S", 0.5)
    report = edited(tmp_path, BOTH, "all_reduce(down, tp)", "all_reduce(down - upwards, tp)")
    assert not report.ok and all(typed.stopped for typed in report.ranks)
    head, place, ended, error, raised, *_ = str(report).splitlines()
    known = "spmd_types 0.3.1 has no verdict on gencode0.py and 1 more of its program: "
    assert head.startswith(known)
    assert re.fullmatch(r"  gencode[01].py:\d+: .*all_reduce\(down - upwards, tp\).*", place)
    assert ended == "  the run of the files has ended with an error, so its types are not known"
    assert error == "  NameError: name 'upwards' is not defined"
    assert re.fullmatch(r"  raised on rank [01] of 2", raised)


def test_a_run_that_ends_before_the_typed_rank_has_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as any other."""
    monkeypatch.setattr(outside_run, "PATIENCE_S", 0.5)
    declare = "def declare(self):"
    report = edited(tmp_path, BOTH, declare, f"{declare}\n        nothing = 1 / 0")
    assert [rank.num_calls for rank in report.ranks] == [0] and not report.ok
    assert "ZeroDivisionError" in report.ranks[0].stopped


@pytest.mark.parametrize("rank", BOTH)
def test_a_file_that_cannot_be_loaded_is_an_error(tmp_path: Path, rank: int) -> None:
    with pytest.raises(LoadError, match=rf"gencode{rank}.py fails when it is loaded"):
        edited(tmp_path, [rank], "import torch\n", "import torch_\n")


def test_an_edit_of_one_file_is_refused(tmp_path: Path) -> None:
    """Types would accept both files: they do not say which function it is."""
    report = edited(tmp_path, [1], "F.softmax(up, dim=0)", "torch.log_softmax(up, dim=0)")
    assert not report.ok and not report.ranks
    head, first, second, parts, hint = str(report).splitlines()
    assert head == (
        "gencode1.py does not compute what gencode0.py does, though each runs the whole model"
    )
    statement = r":\d+: softmax = {}\(up, dim=0\) # \[batch, up_dim/tp\] .*"
    assert re.fullmatch(f"  gencode0.py{statement.format('F.softmax')}", first)
    assert re.fullmatch(f"  gencode1.py{statement.format('torch.log_softmax')}", second)
    assert parts == "  F.softmax in the first, torch.log_softmax in the second"
    assert hint == outside_run.ONE_PROGRAM


@pytest.mark.parametrize("rank", BOTH)
def test_an_edit_that_one_rank_runs_is_refused(tmp_path: Path, rank: int) -> None:
    """It stands in both files, and types would accept it, whether or not that rank is typed."""
    edit = f"{{}}\n        if self.rank == {rank}: softmax = torch.relu(softmax)"
    report = edited(tmp_path, BOTH, "softmax = F.softmax(up, dim=0)", edit.format("softmax = up"))
    assert not report.ok and not report.ranks
    head, place, why, hint = str(report).splitlines()
    assert head == f"gencode0.py and 1 more of its program {outside_run.OTHER_THINGS}"
    assert re.match(rf"gencode0.py:\d+: if self.rank == {rank}: softmax = ", place)
    assert why == (
        f"  `self.rank == {rank}`: a condition may ask `self.training` and `self.trains` only"
    )
    assert hint == outside_run.ONE_WAY


@pytest.mark.parametrize(
    ("before", "after", "parameter"),
    [
        ("block.up.weight, block.up.bias", "block.up.weight", "layers.0.up.bias"),
        # Another name for a weight is no use of it.
        (
            "up = F.linear(x_tp_in, block.up.weight, block.up.bias)",
            "b = block.up.bias; b = x; up = F.linear(b, block.up.weight)",
            "layers.0.up.bias",
        ),
        (
            "= x\n        for layer in range(4)",
            "= x\n        for layer in range(3)",
            "layers.3.up.weight",
        ),
        ("  # no statement reads it", "", "spare"),
    ],
)
def test_a_parameter_that_nothing_reads_is_refused(
    tmp_path: Path, before: str, after: str, parameter: str
) -> None:
    """The model may have no use for one: then its declaration says so."""
    report = edited(tmp_path, BOTH, before, after)
    assert not report.ok and not report.ranks
    head, place, why, *_ = str(report).splitlines()
    assert head == "gencode0.py and 1 more of its program leave parameters unread"
    assert re.match(r"gencode0.py:\d+: self.parameter\(", place)
    assert why.startswith(f"  no statement reads {parameter}, and no comment says so")


OF_PROCESS = "draws from the generator of its process, so the ranks of tp draw different numbers"


@pytest.mark.parametrize(
    ("value", "changed", "problem"),
    [
        # What all ranks hold; without a draw it is the same on all.
        ("down_tp_sum", "F.dropout({})", f"dropout {OF_PROCESS}"),
        ("down_tp_sum", "{} * torch.rand_like({})", f"rand_like {OF_PROCESS}"),
        ("down_tp_sum", "F.dropout(F.dropout({}, training=False), p=0.0)", ""),
        # What nothing reads, and a backward that is not that of the comment.
        (
            "down_tp_sum",
            "{}\n        lost = x * 2",
            "lost is computed and has no effect: no result depends on it",
        ),
        (
            "down",
            "all_reduce(down, tp, backward='all_reduce')",
            "the comment states R over tp, and spmd_types derives [-, -] G(tp)",
        ),
        # A size of a piece for what is none: its length would depend on the rank.
        (
            "down_tp_sum",
            "{}[:, : tp.local_size(5)].sum()",
            "__getitem__ is told the size of a piece over tp, and makes [-, -], which is no",
        ),
        ("down", "all_reduce(F.relu(down), tp)", "an operand is P over tp=2, which must be summed"),
        ("down", "all_reduce(down + 1, tp)", "what is P may be added to what is P only"),
        # Operators under other names, and one that no table has.
        ("up", "{} * torch.ones_like({})", ""),
        ("down_tp_sum", "{} * torch.nn.functional.gelu(torch.kron({}, {})[:4, :8])", ""),
        ("down", "all_reduce(torch.ones_like(down), tp)", "an operand is P over tp=2, which must"),
        ("up", "torch.kron({}, {})[:4, :8]", "spmd_types has no rule for kron of operands that tp"),
        ("up", "torch.cat(({}, x))", "cut over tp=2 in one operand, and over no axis in"),
        ("up", "{}.flatten()", "tp=2 cuts an inner one of the dims that flatten joins, and spmd_"),
        ("up", "{} * torch.rand(8)", "an operand has no type: nothing tells whether all ranks"),
        # A summand in another dtype, which is one as long as it is a float.
        ("down", "all_reduce(down.to(torch.float32).to(torch.float64), tp)", ""),
        (
            "down",
            "all_reduce(down.to(torch.int64).to(torch.float64), tp)",
            "an operand is P over tp=2",
        ),
        # A piece, which no other rank has.
        ("up", "F.dropout({})", ""),
        ("up", "{} - {}.amax(dim=0)", ""),
        (
            "up",
            "{} - {}.amax(dim=1, keepdim=True)",
            "amax of [-, tp] has no type: each rank has that of its own piece, and nothing puts "
            "these together",
        ),
    ],
)
def test_edited_statements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, changed: str, problem: str
) -> None:
    monkeypatch.setattr(outside_run, "PATIENCE_S", 0.5)
    readers = {"up": "F.softmax(up, dim=0)", "down_tp_sum": "x + down_tp_sum"}
    reader = readers.get(value, "all_reduce(down, tp)")
    after = changed if value not in readers else reader.replace(value, changed.replace("{}", value))
    typed = edited(tmp_path, BOTH, reader, after).ranks[0]
    assert not typed.stopped and bool(typed.problem) == bool(problem)
    assert problem in typed.problem
