"""What a compile is recognised by: whatever decides a program gives another key, or the same
program.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import user_ops
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.ir.graph import DynamicDim, IRGraph, Tree
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.serialize import digest
from shardwright.compiler.ir.size import DynamicSize
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.fingerprint import function_digest, operator_digests
from shardwright.compiler.ops.register import register_op
from shardwright.compiler.ops.rule import ParallelFactor, ParallelForm
from shardwright.compiler.trace import trace
from shardwright.frontend.files import cache
from shardwright.frontend.files.cache import Request, source_digest
from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.manifest import Manifest

CONFIG = ComputeConfig(plan_ngpus=2, runtime_ngpus=4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, y: Tensor, factor: float = 2.0) -> Tensor:
        return self.inner(x) @ y + torch.zeros(8, 8) + self.weight * factor


def key_of(graph: IRGraph, config: ComputeConfig = CONFIG, **options: Any) -> str:
    return Request(
        digest(graph), config, "tp", "1.0", operators=operator_digests(graph), **options
    ).key()


def arguments() -> dict[str, Any]:
    return {name: torch.zeros(8, 8, dtype=torch.float32) for name in ("x", "y")}


# ---------------------------------------------------------------- every field


OTHER_SETTINGS: dict[str, Any] = {
    "plan_ngpus": 1,
    "runtime_ngpus": 8,
    "use_zero": 1,
    "zero_ngroups": 2,
    "zero_use_reduce_scatter": True,
    "use_end2end": True,
    "use_async_reducer": True,
    "reducer_bucket_cap_mb": 3.0,
    "inference_only": True,
    "constant_folding": True,
    "pas_config": {"max_axes": 1},
    "user_config": {"mine": 1},
    "rank_order": "dp-tp",
    "outputs": "loss",
    "inputs": {"x": "sharded"},
    "dynamic_dims": {"x": {0: "batch"}},
    "grad_reduction": "mean",
    "rng": "plan_independent",
    "seed": 7,
    "distributed_optimizer": {},
    "constants": {"x": [[1, 2]]},
    "check_ranks_every": 7,
    "overlap_communication": True,
}


def test_every_setting_is_in_the_key() -> None:
    assert OTHER_SETTINGS.keys() == {field.name for field in fields(ComputeConfig)}
    graph = trace(Net(), arguments())
    zero = replace(CONFIG, use_zero=1)
    for name, value in OTHER_SETTINGS.items():
        before = zero if name.startswith("zero_") else CONFIG
        assert key_of(graph, before) != key_of(graph, replace(before, **{name: value})), name


S = DynamicSize("s", 4)
VALUE = IRValue("x", (S, 2), torch.float32, fqn="x", kind=ValueKind.INPUT)
OP = IROp("call", "relu", (("input", VALUE),), (IRValue("y", (S, 2), torch.float32),))
GRAPH = IRGraph(
    "Model",
    (VALUE,),
    (),
    (),
    (OP,),
    Tree("leaf", OP.results[0]),
    dynamic_dims=(DynamicDim("x", 0, "s"),),
)

OTHER_VALUES: dict[str, Any] = {
    "name": "z",
    "shape": (S, 3),
    "dtype": torch.float64,
    "requires_grad": True,
    "kind": ValueKind.BUFFER,
    "fqn": "y",
    "aliases": ("z",),
    "persistent": False,
    "takes_gradient": True,
}
OTHER_OPS: dict[str, Any] = {
    "name": "other",
    "target": "tanh",
    "args": (("input", VALUE), ("inplace", False)),
    "results": (IRValue("y", (4, 3), torch.float32),),
    "module_path": "layers.0",
    "module_type": "Layer",
    "region": "layers.0",
    "autocast": torch.bfloat16,
    "grad_enabled": False,
    "only_in": "train",
    "updates_buffers": True,
}
OTHER_GRAPHS: dict[str, Any] = {
    "name": "Other",
    "inputs": (replace(VALUE, name="z"),),
    "parameters": (replace(VALUE, kind=ValueKind.PARAMETER),),
    "buffers": (replace(VALUE, kind=ValueKind.BUFFER),),
    "ops": (),
    "output": Tree("tuple", children=((0, Tree("leaf", VALUE)),)),
    "signature": (("x", Tree("leaf", VALUE)),),
    "defaults": (("factor", 2.0),),
    "argument_order": ("x", "factor"),
    "constants": ((replace(VALUE, kind=ValueKind.CONSTANT), torch.ones(2)),),
    "buffer_updates": ((VALUE, OP.results[0]),),
    "dynamic_dims": (),
    "conditions": (sympy.Gt(S, 2),),
    "eval_graph": replace(GRAPH, name="Evaluation"),
    "autocast": torch.bfloat16,
    "module_types": {"": "Model"},
    "constant_inputs": (("x", torch.ones(2, dtype=torch.int64)),),
    "constant_buffers": (("length", torch.tensor(3)),),
    "training_only": True,
}
DECIDE_NOTHING = ("source", "rule", "dims", "summed")
"""Comments of generated files name source lines; rules, dims and sums of gradients are found anew,
from what is in the key.
"""


@pytest.mark.parametrize(
    ("kind", "others", "put"),
    [
        (
            IRValue,
            OTHER_VALUES,
            lambda changed: replace(GRAPH, inputs=(replace(VALUE, **changed),)),
        ),
        (IROp, OTHER_OPS, lambda changed: replace(GRAPH, ops=(replace(OP, **changed),))),
        (IRGraph, OTHER_GRAPHS, lambda changed: replace(GRAPH, **changed)),
    ],
)
def test_every_field_of_a_graph_is_in_the_key(
    kind: Any, others: dict[str, Any], put: Callable[..., IRGraph]
) -> None:
    assert others.keys() | set(DECIDE_NOTHING) >= {field.name for field in fields(kind)}
    for name, value in others.items():
        assert digest(put({name: value})) != digest(GRAPH), name


def test_sizes_that_dynamic_dims_have_in_the_dummy_arguments_are_in_the_key() -> None:
    """Planners price a model at these, and say what fits in memory."""
    small, large = (
        trace(nn.ReLU(), {"input": torch.zeros(n, 2)}, dynamic_dims={"input": {0: "b"}})
        for n in (4, 400)
    )
    assert digest(small) != digest(large)


def test_the_order_of_arguments_is_in_the_key() -> None:
    class Swapped(Net):
        def forward(self, y: Tensor, x: Tensor, factor: float = 2.0) -> Tensor:
            return super().forward(x, y, factor)

    assert digest(trace(Net(), arguments())) != digest(trace(Swapped(), arguments(), name="Net"))


# ---------------------------------------------------------------- registered operators


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test registers."""
    monkeypatch.setattr(registry, "OPS", dict(registry.OPS))
    monkeypatch.setattr(registry, "CALLABLES", dict(registry.CALLABLES))


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        return self.function(x * self.weight)


def _form(target: str, count: int) -> ParallelForm:
    return ParallelForm(target, {"b": ParallelFactor()}, {}, lambda op, local: {"count": count})


OPTIONS: list[dict[str, Any]] = [
    {"annotation": "a b^ -> a b"},
    {"annotation": lambda x: "a^ b -> a b" if x.shape[0] == 4 else "a b -> a b"},
    {"linear": ["x"]},
    {"grad_linear": False},
    {"nonempty": True},
    {"localise": lambda op, rule, local: {}},
    {"localise": lambda op, rule, local: {"x": 1}},
    {"parallel": _form("user_ops.mean_square_form", 1), "annotation": "a b^ -> a b"},
    {"parallel": _form("user_ops.mean_square_form", 2), "annotation": "a b^ -> a b"},
    {"parallel": _form("user_ops.plain", 1), "annotation": "a b^ -> a b"},
    {"emit": lambda args: f"{args['x']} * 2"},
    {"emit": lambda args: f"{args['x']} * 2.0" if args["x"] == "other" else f"{args['x']} * 2"},
    {"emit": lambda args: f"{args['x']} * 2", "imports": ("import math",)},
    {"prove": False},
]


def test_everything_that_register_op_is_told_is_in_the_key(registered: None) -> None:
    def key(annotation: Any = "a b -> a b", **options: Any) -> str:
        function = register_op(annotation, name="plain", **options)(user_ops.plain)
        return key_of(trace(Calls(function), {"x": torch.zeros(4, 6)}))

    keys = [key(), *(key(**options) for options in OPTIONS)]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]
    assert key(linear=True) == key(linear=["x"])
    same = [
        key(annotation=lambda x: "a b -> a b"),
        key(fake=torch.empty_like),
        key(input_gen=lambda op: []),
    ]
    assert set(same) == {keys[0]}, "from these the same program follows"


def test_the_program_of_a_wrong_annotation_is_not_served(tmp_path: Path, registered: None) -> None:
    def compiled(annotation: str, **options: Any) -> Path:
        function = register_op(annotation, name="plain")(user_ops.plain)
        model, config = Calls(function), ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
        example = {"x": torch.zeros(4, 6)}
        parallelize(
            model, example, "tp", config, gen_savedir=tmp_path, load_module=False, **options
        )
        (folder,) = (path.parent for path in tmp_path.rglob("manifest.json"))
        return folder

    before = Manifest.read(compiled("a b -> a b"))
    with pytest.raises(
        ConfigError, match="\n  why:   what register_op says of plain has changed\n"
    ):
        compiled("a b^ -> a b")
    assert Manifest.read(compiled("a b^ -> a b", reuse="moo")).key != before.key


def _helper(x: Any) -> Any:
    return x + 1


def test_digests_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(text: str, **names: Any) -> Any:
        scope: dict[str, Any] = {"__name__": "made", "torch": torch, "helper": _helper, **names}
        exec(text, scope)
        return scope["f"]

    first = function_digest(made("def f(x): return helper(x)"))
    assert function_digest(made("\n\ndef f(x):\n    return helper(x)")) == first, (
        "lines do not count"
    )
    others = [
        made("def f(x): return helper(x) * 2"),
        made("def f(x, y=1): return helper(x)"),
        made("def f(x): return helper(x)", helper=lambda x: x + 2),
        made("def f(x): return helper(x) + torch.ones(1)"),
        made("def g(k):\n  def f(x): return helper(x) + k\n  return f\nf = g(1)"),
        made("def g(k):\n  def f(x): return helper(x) + k\n  return f\nf = g(2)"),
        made("f = None"),
    ]
    assert len({first, *map(function_digest, others)}) == len(others) + 1


# ---------------------------------------------------------------- what torch and the module are set
# to


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def test_what_torch_and_the_module_are_set_to() -> None:
    """Either, with another setting of torch, the key differs or the program is the same."""
    backends = torch.backends
    settings: dict[str, Any] = {
        "default dtype": setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "no gradients": torch.no_grad(),
        "deterministic": setting(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        "flash attention": setting(
            backends.cuda.flash_sdp_enabled, backends.cuda.enable_flash_sdp, False
        ),
        "precision": setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        ),
        "threads": setting(torch.get_num_threads, torch.set_num_threads, 1),
    }
    modules: dict[str, Any] = {
        "evaluation": lambda net: net.eval(),
        "evaluation of a part": lambda net: net.inner.eval(),
        "double": lambda net: net.double(),
        "frozen": lambda net: net.weight.requires_grad_(False),
    }
    plain = outcome()
    for name, within in settings.items():
        with within:
            found = outcome()
        assert found[0] != plain[0] or found[1] == plain[1], name
    for name, change in modules.items():
        found = outcome(change)
        assert found[0] != plain[0] or found[1] == plain[1], name


def outcome(change: Callable[[Net], Any] = lambda net: None) -> tuple[str, dict[str, str]]:
    """The key of the small net, and its generated files."""
    net = Net()
    change(net)
    graph = trace(net, {name: x.to(net.weight.dtype) for name, x in arguments().items()})
    files = compile_graph(
        graph, lambda graph, config: graph.builder({"tp": 2}).build(), CONFIG
    ).files
    return key_of(graph), files


# ---------------------------------------------------------------- this package


def test_an_edit_of_this_package_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(**options: Any) -> Path:
        config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1)
        options = {"gen_savedir": tmp_path, "load_module": False, **options}
        parallelize(nn.Linear(2, 2), {"input": torch.zeros(2, 2)}, "dp", config, **options)
        (folder,) = (path.parent for path in tmp_path.rglob("manifest.json"))
        return folder

    compiled()
    compiled()
    monkeypatch.setattr(Request, "__init__", _made_with_another_source(Request.__init__))
    with pytest.raises(
        ConfigError, match="\n  why:   shardwright itself has changed, within one version\n"
    ):
        compiled()
    compiled(reuse="moo")


def _made_with_another_source(init: Any) -> Any:
    def made(self: Request, *args: Any, **options: Any) -> None:
        init(self, *args, **{**options, "source": "edited"})

    return made


def test_the_digest_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", source_digest())
    monkeypatch.setattr(cache, "SOURCE_FOLDERS", ("compiler", "policies"))
    monkeypatch.setattr(cache.resources, "files", lambda package: tmp_path)

    def written(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return source_digest.__wrapped__()

    (tmp_path / "policies" / "__pycache__").mkdir(parents=True)
    (tmp_path / "policies" / "__pycache__" / "tp.py").write_text("")
    first = written("compiler/ops/rules.py", "x = 1")
    assert written("compiler/notes.txt", "nothing") == first
    others = [written("policies/tp.py", "x = 1"), written("compiler/ops/rules.py", "x = 2")]
    assert len({first, *others, written("compiler/ops/more.jinja", "")}) == 4


def test_each_file_that_is_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a job has a million ranks, a line now and then says how many are left."""
    told: list[str] = []
    monkeypatch.setattr(cache, "tell", lambda words, share=None: told.append(words))
    parallelize(Net(), arguments(), "tp", CONFIG, gen_savedir=tmp_path, load_module=False)
    # Besides the two ranks' files there is one that all of them have.
    assert "write gencode0.py, 1 of 3 files" in told and "write gencode1.py, 2 of 3 files" in told
