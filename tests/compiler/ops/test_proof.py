"""What register_op is told is proved when a model is compiled: once, on small calls, or refused in
words.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import tried_ops
import user_ops
from torch import Tensor, nn

from shardwright.compiler.ops import proof, registry
from shardwright.compiler.ops.proof import prove_operators
from shardwright.compiler.ops.register import UserOpDef, register_op
from shardwright.compiler.ops.sample_calls import Sample, sample_calls
from shardwright.compiler.trace import trace
from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import AnnotationError, ArgumentError, TraceError
from shardwright.runtime.ranks.threads import run_ranks


@pytest.fixture(autouse=True)
def nothing_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what is proved, as in a new process."""
    monkeypatch.setattr(proof, "_proved", set())


class Model(nn.Module):
    """Calls one function on its input, other tensors and literals."""

    def __init__(self, function: Any, *rest: Any) -> None:
        super().__init__()
        self.function, self.rest = function, rest
        for i, tensor in enumerate(rest):
            if isinstance(tensor, Tensor):
                self.register_buffer(f"t{i}", tensor)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        rest = [
            getattr(self, f"t{i}") if isinstance(arg, Tensor) else arg
            for i, arg in enumerate(self.rest)
        ]
        return self.function(x * self.weight if x.is_floating_point() else x, *rest)


def clipped(x: Tensor, w: Tensor) -> Any:
    return user_ops.Clipped.apply(x, w)


def squashed(x: Tensor) -> Any:
    return tried_ops.Squashed.apply(x)


def clamped(x: Tensor) -> Any:
    return user_ops.WrongBackward.apply(x)


def proved(function: Any, x: Tensor, *rest: Any, **options: Any) -> list[str]:
    graph = trace(Model(function, *rest), {"x": x}, **options)
    return prove_operators(graph, (), "")


X = torch.zeros(40, 64)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (user_ops.scaled, (torch.zeros(40, 6, 64), torch.zeros(64))),
        (user_ops.affine, (X, torch.zeros(30, 64), torch.zeros(30))),
        (user_ops.by_value, (X,)),
        (clipped, (torch.zeros(40, 50, 64), torch.zeros(64))),
        (user_ops.tripled, (X,)),
        (user_ops.compiled, (X,)),
        (user_ops.row_blocks, (X, 4)),
        (user_ops.mean_square, (X,)),  # communicates
        (tried_ops.float32_norm, (X, torch.zeros(64))),  # rounds inside
        (tried_ops.rows, (torch.arange(10), torch.zeros(100, 64))),  # indices
        (tried_ops.masked, (X, torch.ones(40, 64, dtype=torch.bool), float("-inf"))),
        (tried_ops.logarithm, (X,)),  # of positive numbers only
        (tried_ops.unfolded, (X, 10)),  # a size as an argument
        (tried_ops.segment_sums, (X, torch.tensor([0, 10, 20, 40]))),  # numbers of its own
        (tried_ops.float32_only, (X,)),  # a kernel for float32
        (tried_ops.float32_inside, (X,)),  # a kernel that rounds
    ],
)
def test_what_is_right_is_proved(function: Any, args: tuple[Any, ...]) -> None:
    assert len(proved(function, *args)) == 1


@pytest.mark.parametrize(
    ("function", "args", "strategy"),
    [
        (user_ops.wrong_free, (X,), "split:b"),
        (user_ops.wrong_summed, (X,), "split:b"),
        (user_ops.wrong_order, (torch.zeros(64, 64),), "split:a"),
        (user_ops.wrong_linear, (X,), "linear:0"),
        (user_ops.wrong_additive, (X, torch.zeros(30, 64), torch.zeros(30)), "split:k"),
        (user_ops.wrong_local, (torch.zeros(64),), "split:a"),
        (clamped, (X,), "G"),
        (squashed, (X,), "split:a"),
        (tried_ops.scaled_product, (X, torch.zeros(30, 64)), "split:k"),
        (tried_ops.normed, (X, torch.zeros(64)), "split:h"),
        (tried_ops.in_bfloat16, (X.bfloat16(),), "split:b"),
        (tried_ops.wrong_float32_only, (X,), "split:b"),
        (tried_ops.running, (X,), "split:s"),
        (tried_ops.unfolded_without, (X, 10), "split:s"),
    ],
)
def test_what_is_wrong_is_refused(function: Any, args: tuple[Any, ...], strategy: str) -> None:
    with pytest.raises(
        AnnotationError,
        match=rf"ways to split a call differ from one device[\s\S]*\n +{strategy} over 2: ",
    ):
        proved(function, *args)


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (tried_ops.noisy, (X,), "the same call gives other results the second time"),
        (tried_ops.counting, (X,), "the same call gives other results the second time"),
        (
            tried_ops.segment_sums_unhelped,
            (X, torch.tensor([0, 10, 40])),
            "the call raises ValueError: offsets end where x",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused(function: Any, args: tuple[Any, ...], why: str) -> None:
    with pytest.raises(AnnotationError) as caught:
        proved(function, *args)
    text = str(caught.value)
    assert (
        f"the annotation of tried_ops.{function.__name__} cannot be proved\n" in text
        and why in text
    )
    assert "register_op(prove=False) takes the annotation on trust" in text


def test_the_words_for_a_wrong_annotation() -> None:
    with pytest.raises(AnnotationError) as caught:
        proved(user_ops.wrong_summed, torch.zeros(400, 640))
    lines = str(caught.value).splitlines()
    assert (
        lines[0]
        == "the annotation of wrong.summed is wrong: 2 of 8 ways to split a call differ from "
        "one device"
    )
    assert lines[1].startswith(f"  where: {__file__}:")
    assert lines[2:4] == ["  why:   a b+ -> a", "         tried on x [4, 6]"]
    assert lines[4].startswith("         split:b over 2: result 0 is wrong by ")
    assert lines[-1] == (
        "  try:   write b^, not b+, unless the result is the plain sum over pieces of b: a "
        "mean, a maximum or a norm "
        "is not; parameters that are added to the sum, like a bias, go into additive=[...]"
    )


def test_dynamic_sizes_are_tried_as_others_are() -> None:
    dims = {"x": {0: "batch", 1: "width"}}
    assert (
        len(proved(user_ops.affine, X, torch.zeros(30, 64), dynamic_dims={"x": {0: "batch"}})) == 1
    )
    with pytest.raises(AnnotationError, match="tried on x \\[4, 6\\]"):
        proved(user_ops.wrong_summed, X, dynamic_dims=dims)


def test_large_calls_become_small_ones() -> None:
    graph = trace(
        Model(user_ops.affine, torch.empty(2**15, 2**14, device="meta")),
        {"x": torch.empty(8, 2**14)},
    )
    op = graph.ops[-1]
    opdef = registry.get(op.target)
    assert isinstance(opdef, UserOpDef)
    sample = next(sample_calls(op, opdef))
    assert isinstance(sample, Sample)
    assert sample.shapes == "x [4, 6], weight [8, 6]"
    assert {x.dtype for x in sample.call.operands} == {torch.float64}


def test_numbers_that_are_all_alike_are_no_sample() -> None:
    """An input_gen made for profiling alone gives zeros: with them, anything would be right."""
    (op,) = (
        op
        for op in trace(Model(user_ops.row_blocks, 4), {"x": X}).ops
        if op.target == "user_ops.row_blocks"
    )
    opdef = registry.get(op.target)
    assert isinstance(opdef, UserOpDef)
    sample = next(sample_calls(op, opdef))
    assert isinstance(sample, Sample)
    assert sample.call.operands[0].unique().numel() > 1


def test_a_proof_that_takes_too_long_ends_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "LIMIT_S", -1.0)
    with pytest.raises(
        AnnotationError, match=r"the annotation of user_ops.scaled could not be proved within -1 s"
    ):
        proved(user_ops.scaled, torch.zeros(4, 6, 8), torch.zeros(8))


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    proved(user_ops.affine, X, torch.zeros(30, 64))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("argument", [torch.relu, user_ops.plain, (1, lambda x: x)])
def test_a_function_as_an_argument_is_refused_in_words(argument: Any) -> None:
    with pytest.raises(
        TraceError, match="got an argument of type .*, which a graph cannot hold"
    ) as caught:
        trace(Model(tried_ops.mapped, argument), {"x": X})
    assert caught.value.hint is not None and caught.value.hint.startswith(
        "register a function that calls it"
    )


def test_dynamic_sizes_as_arguments(tmp_path: Path) -> None:
    """Sizes, expressions of them and tuples that hold them are arguments of registered functions
    like others.
    """

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = tried_ops.scaled_by(self.up(x), 2 * x.shape[0] - 1)
            y = tried_ops.scaled_by(y, 1 / x.shape[0])
            return tried_ops.viewed(y, (x.shape[0], 2, 4)).square().mean()

    torch.manual_seed(0)
    model, batches = Sized().double(), [torch.randn(n, 8, dtype=torch.float64) for n in (8, 5)]
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, dynamic_dims={"x": {0: "batch"}})

    def rank(_: int) -> list[Tensor]:
        module = parallelize(model, {"x": batches[0]}, "data", config, gen_savedir=tmp_path)
        return [module(x=x).detach() for x in batches]

    for found in run_ranks(2, rank):
        torch.testing.assert_close(
            found, [model(x).detach() for x in batches], rtol=1e-12, atol=1e-12
        )


# ---------------------------------------------------------------- in a compile


def compiled(folder: Path, function: Any, *rest: Any, ngpus: int = 2, **options: Any) -> Path:
    def policy(graph: Any, config: Any) -> Any:
        return graph.builder({"tp": config.plan_ngpus}).build()

    config = ComputeConfig(plan_ngpus=ngpus, runtime_ngpus=ngpus)
    parallelize(
        Model(function, *rest),
        {"x": X},
        policy,
        config,
        gen_savedir=folder,
        load_module=False,
        **options,
    )
    (made,) = (path.parent for path in folder.rglob("manifest.json"))
    return made


def test_a_wrong_annotation_never_gets_into_files(tmp_path: Path) -> None:
    with pytest.raises(AnnotationError):
        compiled(tmp_path, user_ops.wrong_summed)
    assert not list(tmp_path.rglob("gencode*"))
    compiled(tmp_path, user_ops.wrong_summed, ngpus=1)  # one rank splits nothing


def test_a_proof_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(proof, "_prove", lambda op, opdef: tried.append(op.target))
    folder = compiled(tmp_path, tried_ops.logarithm)
    assert (
        tried == ["tried_ops.logarithm"]
        and len(json.loads((folder / "proofs.json").read_text())) == 1
    )
    monkeypatch.setattr(proof, "_proved", set())
    compiled(tmp_path, tried_ops.logarithm)
    compiled(tmp_path, tried_ops.logarithm, reuse="override")
    assert len(tried) == 1
    (folder / "proofs.json").write_text("damaged")
    monkeypatch.setattr(proof, "_proved", set())
    compiled(tmp_path, tried_ops.logarithm)
    assert len(tried) == 2


def test_an_edited_function_is_proved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the program stays the same: it calls the function by its name."""
    compiled(tmp_path, tried_ops.edited)
    monkeypatch.setattr(tried_ops, "_inside", lambda x: x.softmax(-1))
    with pytest.raises(AnnotationError, match="split:b over 2"):
        compiled(tmp_path, tried_ops.edited)


def test_trust_is_said_in_the_files(tmp_path: Path) -> None:
    folder = compiled(tmp_path, tried_ops.trusted)
    for name in ("gencode0.py", "gencode1.py"):
        header = (folder / name).read_text().partition("import torch")[0]
        assert "register_op(prove=False), so nobody has proved the annotations of" in header
        assert "tried_ops.trusted" in header
    with pytest.raises(ArgumentError, match="argument 'prove' is True or False"):
        register_op("a -> a", prove="no")  # type: ignore[arg-type]


def test_nothing_is_said_of_what_is_proved(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder = compiled(tmp_path, tried_ops.logarithm)
    assert "trusts" not in (folder / "gencode0.py").read_text()
