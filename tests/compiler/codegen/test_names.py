"""Names of variables and attribute paths, whatever the user's names are."""

from pathlib import Path

import plans
import pytest
import torch
from covers import spread
from torch import Tensor, nn

from shardwright.compiler.codegen.emit import class_name
from shardwright.compiler.codegen.names import MODULE_ATTRIBUTES, attribute_path
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.pipeline.module import PipelineModule

X = {"x": torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


def test_every_attribute_of_a_parallel_module_is_known() -> None:
    """A model's module of that name must be read by its path."""
    for cls in (ParallelModule, PipelineModule):
        names = {
            *dir(cls),
            *(name for base in cls.__mro__ for name in vars(base).get("__annotations__", {})),
        }
        # Libraries add attributes to all modules when they are imported.
        own = names - set(dir(torch.nn.Module))
        assert {name for name in own if not name.startswith("_")} <= MODULE_ATTRIBUTES


def test_attribute_paths() -> None:
    assert attribute_path("transformer.h.0.attn.weight") == "self.transformer.h[0].attn.weight"
    assert attribute_path("h.10", root="block") == "block.h[10]"
    odd_ones = (
        "mesh.weight",
        "0.weight",
        "_inner.weight",
        "a-b.weight",
        "class.weight",
        "rank",
        "shared.weight",
        "a.b c",
    )
    for odd in (*odd_ones, "stage12.weight", "stage0_eval.weight"):
        assert attribute_path(odd) == f'self.weights("{odd}")'
    assert attribute_path("mesh.weight", root="block") == "block.mesh.weight"


class Named(nn.Module):
    """Two layers under the names given, and what is made of them returned."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.names = (first, second)
        for name, layer in zip(self.names, (nn.Linear(6, 8), nn.Linear(8, 6)), strict=True):
            self._modules[name] = layer

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self._modules[name] for name in self.names)
        return second(torch.relu(first(x))).square().mean()


@pytest.mark.parametrize(
    ("first", "second"),
    spread(
        [
            ("all_reduce", "grad_all_reduce"),  # adapters that the file imports
            ("tp", "F"),  # an axis, and an import
            ("mesh", "rank"),  # attributes of a parallel module
            ("weights", "update_buffer"),
            ("torch", "Mesh"),
            ("x", "self"),
            ("class", "a-b"),
            ("0", "1"),
            ("_first", "ünïcode"),
            ("forward_eval", "tp_block"),
            ("shared", "end2end"),
        ],
        3,
    ),
)
@pytest.mark.parametrize("policy", ["tp", "data"])
def test_awkward_module_names(first: str, second: str, policy: str, tmp_path: Path) -> None:
    plans.check_policy(Named(first, second).double(), X, policy, 2, tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    spread(
        [
            ("stage1", "stage0"),  # the methods of the stages
            ("segment", "run"),
            ("segments", "output"),  # attributes of a pipelined module
            ("actions", "enter"),
            ("Segment", "leaves"),
            ("stage1_eval", "Transfer"),
        ],
        3,
    ),
)
def test_awkward_module_names_in_a_pipeline(first: str, second: str) -> None:
    config = {
        "plan_ngpus": 2,
        "runtime_ngpus": 2,
        "use_end2end": True,
        "pas_config": {"stage_starts": [second]},
    }
    report = verify(Named(first, second), X, "pp", config, steps=1)
    assert report.ok, str(report)


class Arguments(nn.Module):
    """Arguments that are called like an axis, an import and a builtin."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, tp: Tensor, F: Tensor, input: Tensor, all_reduce: float = 2.0) -> Tensor:
        return (self.down(torch.relu(self.up(tp * F))) + input).square().mean() * all_reduce


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_awkward_argument_names(policy: str, tmp_path: Path) -> None:
    (x,) = X.values()
    plans.check_policy(
        Arguments().double(), {"tp": x, "F": x + 1, "input": x * 2}, policy, 2, tmp_path
    )


class OddParameters(nn.Module):
    """Parameters and buffers whose names are no identifiers or mean something else on a module."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name in ("device", "lambda", "w-1", "weight tp", "3"):
            self._parameters[name] = nn.Parameter(torch.randn(6, generator=generator))
        self.register_buffer("inputs", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self._parameters.values():
            x = x * parameter
        return (x + self.inputs).square().mean()


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_awkward_parameter_names(policy: str, tmp_path: Path) -> None:
    plans.check_policy(OddParameters().double(), X, policy, 2, tmp_path)


def sequential(num_layers: int) -> nn.Sequential:
    """Numbered layers at the top level: their weights are ``0.weight``, ``2.weight`` ..."""
    layers = [
        layer
        for _ in range(num_layers)
        for layer in (nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Dropout(0.0))
    ]
    return nn.Sequential(*layers, nn.Linear(6, 1), nn.Flatten(0), nn.Softplus())


class MeanOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mean()


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2))
def test_numbered_modules(policy: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MeanOf(sequential(12)).double()
    plans.check_policy(model, X, policy, 2, tmp_path)


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2, first=1))
def test_numbered_modules_at_the_top(policy: str) -> None:
    """``nn.Sequential`` itself: blocks of one instruction are not worth a method, and paths begin
    with a number.
    """
    files = plans.compile_with(
        plans.traced(sequential(12).double(), {"input": X["x"]}), policy, 2
    ).files
    assert (
        'self.weights("0.weight")' in files["gencode0.py"] and "_block" not in files["gencode0.py"]
    )


class Blocks(nn.Module):
    """Repeated layers in a list, and a module called like the method they become."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._modules[name] = nn.ModuleList(Layer() for _ in range(3))
        self._modules[f"{name}_block"] = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._modules[self.name]:
            x = layer(x)
        return self._modules[f"{self.name}_block"](x).square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))).sin())


@pytest.mark.parametrize("name", spread(["layers", "a-b", "0", "mesh", "class"], 2, first=1))
def test_awkward_names_of_repeated_layers(name: str, tmp_path: Path) -> None:
    compiled, _ = plans.check_policy(Blocks(name).double(), X, "tp", 2, tmp_path)
    assert compiled.files["gencode0.py"].count("_block") >= 4


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_an_argument_called_like_its_dynamic_dim(policy: str, tmp_path: Path) -> None:
    class Rows(Layer):
        def forward(self, batch: Tensor) -> Tensor:
            return (
                super().forward(batch.reshape(batch.shape[0] * 2, 3).reshape(-1, 6)).square().mean()
            )

    inputs = {"batch": X["x"]}
    model = Rows().double()
    compiled = plans.compile_with(
        plans.traced(model, inputs, dynamic_dims={"batch": {0: "batch"}}), policy, 2
    )
    plans.check(model, inputs, compiled, tmp_path, plans.reference_run(model, [inputs], steps=1))


class F(nn.Module):
    """Called like a module that generated code reads at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


def test_a_class_called_like_what_generated_code_reads(tmp_path: Path) -> None:
    compiled, _ = plans.check_policy(F().double(), X, "tp", 2, tmp_path)
    assert "class FModule(ParallelModule):" in compiled.files["gencode0.py"]
    for name, expected in {
        "narrow": "narrowModule",
        "Cut": "CutModule",
        "embedding": "embeddingModule",
        "linear": "linear",
    }.items():
        assert class_name(name) == expected
