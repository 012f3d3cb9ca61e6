"""What generated bodies do beyond plain operators, each held to the module itself: repeated layers,
recompute, autocast, no_grad, evaluation, buffers, structures, random numbers and dynamic sizes.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import plans
import pytest
import torch
import torch.nn.functional as F
import zoo
from covers import spread
from parity import assert_close_tree, tensors_of
from precision import float64_casts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.compiler.compile import Compiled
from shardwright.compiler.trace.entry import trace
from shardwright.runtime.errors import InputError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks

X = {"x": torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
POLICIES = ["tp", "data"]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def on_ranks(
    model: nn.Module,
    inputs: Any,
    policy: str,
    directory: Path,
    function: Callable[[Any], Any],
    **options: Any,
) -> list:
    """What ``function`` returns for the compiled module of each of two ranks."""
    compiled = plans.compile_with(plans.traced(model, inputs), policy, 2, **options)
    plans.write(directory, compiled, model)
    with float64_casts():
        return run_ranks(2, lambda rank: function(load_class(directory)()))


def methods_of(compiled: Compiled) -> list[str]:
    (cls,) = (
        node
        for node in ast.parse(compiled.files["gencode0.py"]).body
        if isinstance(node, ast.ClassDef)
    )
    return [node.name for node in cls.body if isinstance(node, ast.FunctionDef)]


def body_of(compiled: Compiled, method: str) -> str:
    (cls,) = (
        node
        for node in ast.parse(compiled.files["gencode0.py"]).body
        if isinstance(node, ast.ClassDef)
    )
    return next(
        ast.unparse(node)
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == method
    )


# ------------------------------------------------------------------------------------------------
# repeated layers


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))).sin())


class Stack(nn.Module):
    """``places``: in front, so that what the first layer reads takes a gradient that is worth
    reducing first, and it is planned as all others.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.ones(4, 6))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("policy", spread(POLICIES, 2))
def test_many_equal_layers_are_one_method(policy: str, tmp_path: Path) -> None:
    compiled, _ = plans.check_policy(
        seeded(lambda: Stack(*(Layer() for _ in range(24)))), X, policy, 2, tmp_path
    )
    assert methods_of(compiled) == ["declare", "forward", "layers_block"]
    text = compiled.files["gencode0.py"]
    assert (
        text.count("F.layer_norm(") == 1 and text.count("self.layers_block(self.layers[layer]") == 1
    )
    assert body_of(compiled, "forward").count("for layer in range(24):") == 1
    assert body_of(compiled, "declare").count("for layer in range(24):") == 1
    declared = [d.value.fqn for d in compiled.program.declarations]
    assert declared == [
        name for name, _ in seeded(lambda: Stack(*(Layer() for _ in range(24)))).named_parameters()
    ]


def test_a_layer_that_differs_stays_apart(tmp_path: Path) -> None:
    layers = [lambda: Layer(), lambda: Layer(), lambda: Layer(10), lambda: Layer()]
    compiled, _ = plans.check_policy(
        seeded(lambda: Stack(*(make() for make in layers))), X, "tp", 2, tmp_path
    )
    assert methods_of(compiled) == ["declare", "forward", "layers_block"]
    calls = [
        line for line in body_of(compiled, "forward").splitlines() if "self.layers_block(" in line
    ]
    assert len(calls) == 2 and "self.layers[layer]" in calls[0] and "self.layers[3]" in calls[1]
    assert "self.layers[2].up.weight" in compiled.files["gencode0.py"]


class Called(Stack):
    """Layers called in the order given, and what is kept of each: ``all``, what goes into the
    ``middle`` one, or nothing.
    """

    def __init__(self, order: tuple[int, ...], kept: str = "", count: int = 4) -> None:
        super().__init__(*(Layer() for _ in range(count)))
        self.order, self.kept = order, kept

    def forward(
        self, x: Tensor, layer: float = 2.0
    ) -> Tensor:  # an argument called like the number of a loop
        found = []
        x = x + self.places
        for position, index in enumerate(self.order):
            if self.kept == "all" or (self.kept == "middle" and position == 2):
                found.append(x)
            x = self.layers[index](x)
        return sum((y.square().mean() for y in found), x.square().mean()) + x.mean() * layer


LOOPS = {
    "in order": (Called((0, 1, 2, 3)), ["range(4)"]),
    "the last ones": (Called((2, 3, 1)), ["range(2, 4)"]),
    "backwards": (Called((3, 2, 1, 0)), []),
    "all leave": (Called((0, 1, 2, 3), "all"), []),
    "one leaves": (Called((0, 1, 2, 3), "middle"), ["range(2)", "range(2, 4)"]),
}


@pytest.mark.parametrize(("model", "loops"), LOOPS.values(), ids=LOOPS)
def test_layers_are_a_loop_where_nothing_of_each_leaves(
    model: nn.Module, loops: list[str], tmp_path: Path
) -> None:
    compiled, _ = plans.check_policy(seeded(lambda: model), {**X, "layer": 2.0}, "tp", 2, tmp_path)
    lines = "\n".join(
        body_of(compiled, name) for name in methods_of(compiled) if name.startswith("forward")
    ).splitlines()
    assert [
        line.split(" in ")[1].rstrip(":") for line in lines if line.strip().startswith("for layer")
    ] == loops


class TwoBranches(nn.Module):
    """Two branches that read one input, as attention and feed-forward of GPT-NeoX do."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(6, 8) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(8, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.norms, self.ups, self.downs, strict=True)
        left, right = (down(F.relu(up(norm(x)))) for norm, up, down in parts)
        return left + right + x


def test_what_every_layer_adapts_is_adapted_in_the_method(tmp_path: Path) -> None:
    """The two branches share an adapter, which would part the calls of a loop."""

    def policy(graph, config):
        builder = graph.builder(mesh={"tp": 2}).split("ups_dim", "tp")
        for op in graph.ops:
            if op.target == "layer_norm":
                builder.strategy(op, "tp", "G")
        return builder.build()

    model = seeded(lambda: Stack(*(TwoBranches() for _ in range(3))))
    compiled, _ = plans.check_policy(model, X, policy, 2, tmp_path)
    forward = body_of(compiled, "forward")
    assert "for layer in range(3):" in forward and "_tp_in" not in forward
    assert "x_tp_in = grad_all_reduce(x, tp)" in body_of(compiled, "layers_block")


def test_two_kinds_of_layers_are_two_methods(tmp_path: Path) -> None:
    model = seeded(lambda: Stack(Layer(), Layer(10), Layer(), Layer(10)))
    compiled, _ = plans.check_policy(model, X, "tp", 2, tmp_path)
    assert methods_of(compiled) == ["declare", "forward", "layers_block", "layers_block_2"]


def test_a_plan_that_differs_keeps_a_layer_apart(tmp_path: Path) -> None:
    def policy(graph, config):
        b = graph.builder(mesh={"tp": 2})
        for dim in graph.dims.classes:
            if any(
                re.match(r"layers\.[012]\.up\.weight:0", parameter) for parameter in dim.parameters
            ):
                b.split(dim, "tp")
        return b.build()

    compiled, _ = plans.check_policy(
        seeded(lambda: Stack(*(Layer() for _ in range(5)))), X, policy, 2, tmp_path
    )
    assert methods_of(compiled) == ["declare", "forward", "layers_block", "layers_block_2"]


def test_statistics_of_repeated_layers_are_updated_in_the_method(tmp_path: Path) -> None:
    """Batch norm in repeated layers: each layer has its own buffers; nothing of them leaves the
    method.
    """

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.relu(self.norm(self.up(x))).sin())

    def make() -> nn.Module:
        return seeded(lambda: Stack(Normed(), Normed(), Normed()))

    model = make()
    compiled, _ = plans.check_policy(model, X, "data", 2, tmp_path)
    assert "self.update_buffer(f'layers.{layer}.norm.num_batches_tracked'" in body_of(
        compiled, "layers_block"
    )

    def after_two_steps_and_evaluation(module: Any) -> dict[str, Tensor]:
        for _ in range(2):
            module(**X)
        module.eval()
        outputs = module(**X)
        return {"loss": outputs.detach(), **{name: b.clone() for name, b in module.named_buffers()}}

    expected = after_two_steps_and_evaluation(model)
    for found in on_ranks(
        seeded(lambda: Stack(Normed(), Normed(), Normed())),
        X,
        "data",
        tmp_path / "b",
        after_two_steps_and_evaluation,
    ):
        assert_close_tree(found, expected)


# ------------------------------------------------------------------------------------------------
# regions


class Recomputing(nn.Module):
    """Every layer is recomputed in backward, as ``torch.utils.checkpoint`` does."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.ones(4, 6))  # as in Stack
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.dropout(layer(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        for layer in self.layers:
            x = checkpoint(self.run, layer, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("policy", ["dp", *POLICIES])
def test_recomputed_layers_have_the_same_gradients(policy: str, tmp_path: Path) -> None:
    compiled, _ = plans.check_policy(
        seeded(Recomputing), X, policy, 1 if policy == "dp" else 2, tmp_path
    )
    forward = body_of(compiled, "forward")
    # The dropout behind each layer included.
    assert forward.count("recompute(self.layers_block, self.layers[layer]") == 1
    assert forward.count("for layer in range(3):") == 1
    assert methods_of(compiled) == ["declare", "forward", "layers_block"]


def test_recomputed_activations_are_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    original = F.layer_norm

    def counting(*args: Any) -> Tensor:
        calls.append(1)
        return original(*args)

    def step(module: Any) -> None:
        module(**X).backward()

    for make, expected in ((Recomputing, 6), (lambda: Stack(*(Layer() for _ in range(3))), 3)):
        model = seeded(make)
        compiled = plans.compile_with(plans.traced(model, X), "tp", 2)
        directory = tmp_path / str(expected)
        plans.write(directory, compiled, model)
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(F, "layer_norm", counting)
            run_ranks(2, lambda rank, directory=directory: step(load_class(directory)()))
        assert len(calls) == 2 * expected


def test_a_region_of_several_layers_is_recomputed_as_one(tmp_path: Path) -> None:
    """What lies between its layers is not kept either."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def two(self, index: int, x: Tensor) -> Tensor:
            return self.layers[index + 1](self.layers[index](x))

        def forward(self, x: Tensor) -> Tensor:
            for index in (0, 2):
                x = checkpoint(self.two, index, x, use_reentrant=False)
            return x.square().mean()

    compiled, _ = plans.check_policy(seeded(Pairs), X, "tp", 2, tmp_path)
    assert body_of(compiled, "forward").count("recompute(") == 2


@pytest.mark.slow
def test_gradient_checkpointing_of_transformers(tmp_path: Path) -> None:
    entry = zoo.get("gpt2")
    model, inputs = entry.build(), entry.inputs()
    plain = plans.reference_run(model, [inputs], steps=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compiled = plans.compile_with(plans.traced(model, inputs), "tp", 2)
    plans.check(model, inputs, compiled, tmp_path, plain)
    assert body_of(compiled, "forward").count("recompute(self.") == 1


def test_dropout_is_the_same_when_it_is_recomputed(tmp_path: Path) -> None:
    """Gradients of a step with recompute are those of the same draws without."""

    class Plain(Recomputing):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.places
            for layer in self.layers:
                x = self.run(layer, x)
            return x.square().mean()

    def gradients(module: Any) -> dict[str, Tensor]:
        loss = module(**X)
        loss.backward()
        return {
            "loss": loss.detach(),
            **{name: p.grad.clone() for name, p in module.named_parameters()},
        }

    options = {"rng": "plan_independent", "seed": 3}
    recomputed = on_ranks(
        seeded(lambda: Recomputing(0.5)), X, "tp", tmp_path / "a", gradients, **options
    )
    plain = on_ranks(seeded(lambda: Plain(0.5)), X, "tp", tmp_path / "b", gradients, **options)
    for found, expected in zip(recomputed, plain, strict=True):
        assert_close_tree(found, expected)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = F.relu(self.up(x.float()))
            dtype_probe = self.down(hidden)
        with torch.no_grad():
            scale = x.square().mean()
        return (dtype_probe.float() * scale.detach()).square().mean()


def test_autocast_regions_are_kept(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Autocast()
    inputs = {"x": X["x"].float()}
    compiled = plans.compile_with(trace(model, inputs), "tp", 2)
    assert (
        "with torch.autocast(self.device.type, dtype=torch.bfloat16):"
        in compiled.files["gencode0.py"]
    )
    plans.write(tmp_path, compiled, model)
    expected = model(**inputs)
    for loss in run_ranks(2, lambda rank: load_class(tmp_path)()(**inputs).detach()):
        # Partial sums add a rounding of bfloat16.
        torch.testing.assert_close(loss, expected.detach(), rtol=2**-8, atol=0)
    with torch.no_grad():
        assert (
            expected
            != (model.down(F.relu(model.up(inputs["x"]))) * inputs["x"].square().mean())
            .square()
            .mean()
        )


def test_no_grad_regions_stop_gradients(tmp_path: Path) -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.down(torch.tanh(self.up(x))) + 1
            return (self.down(torch.tanh(self.up(x))) - target).square().mean()

    for policy in POLICIES:
        compiled, _ = plans.check_policy(seeded(Stopped), X, policy, 2, tmp_path / policy)
        assert "with torch.no_grad():" in compiled.files["gencode0.py"]


# ------------------------------------------------------------------------------------------------
# evaluation


class TwoBodies(nn.Module):
    """Another computation in evaluation, with a constant of its own; parameters and statistics are
    shared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return {"loss": self.down(F.relu(self.up(x))).square().mean() * scale}
        y = self.down(torch.tanh(self.up(x - self.mean))) * torch.tensor(
            [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
        )
        return {"loss": y.abs().mean(), "y": y}


@pytest.mark.parametrize("policy", spread(POLICIES, 2))
def test_evaluation_has_a_body_of_its_own(policy: str, tmp_path: Path) -> None:
    def both(module: Any) -> dict[str, Tensor]:
        trained = module(**X, scale=3.0)
        trained["loss"].backward()
        module.eval()
        with torch.no_grad():
            evaluated = module(**X, scale=3.0)
        return tensors_of({"train": trained, "eval": evaluated, "mean": module.mean})

    expected = both(seeded(TwoBodies))
    for found in on_ranks(seeded(TwoBodies), {**X, "scale": 3.0}, policy, tmp_path / "run", both):
        assert_close_tree(found, expected)
    compiled, _ = plans.check_policy(
        seeded(TwoBodies), {**X, "scale": 3.0}, policy, 2, tmp_path / "check"
    )
    assert methods_of(compiled) == ["declare", "forward", "forward_eval"]
    assert compiled.files["gencode0.py"].count('self.parameter("up.weight"') == 1
    if policy == "tp":  # both bodies split the same dim, so that the weights are held in one way
        assert "all_gather" not in compiled.files["gencode0.py"]


def test_a_fixed_argument_is_checked_in_evaluation_too(tmp_path: Path) -> None:
    def refused(module: Any) -> str:
        module.eval()
        with pytest.raises(InputError) as caught:
            module(**X, scale=4.0)
        return str(caught.value)

    for text in on_ranks(seeded(TwoBodies), {**X, "scale": 3.0}, "tp", tmp_path, refused):
        assert text.startswith(
            "TwoBodies.forward: argument 'scale' is 4.0, but was compiled as 3.0"
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", spread(["resnet", "gpt2-padded"], 2))
def test_evaluation_equals_the_module_in_evaluation(name: str, policy: str, tmp_path: Path) -> None:
    """After a step of training: batch norm with the statistics it gathered, dropout off."""

    def outputs(module: Any) -> dict[str, Tensor]:
        module(**inputs)
        module.eval()
        with torch.no_grad():
            return tensors_of(module(**inputs))

    entry = zoo.get(name)
    inputs = entry.inputs()
    with float64_casts():
        expected = outputs(entry.build())
    for found in on_ranks(entry.build(), inputs, policy, tmp_path, outputs):
        assert_close_tree({k: v.detach() for k, v in found.items()}, expected)


def test_a_training_only_update_leaves_evaluation_alone(tmp_path: Path) -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            if self.training:
                self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
            return y.sin().mean()

    def run(module: Any) -> dict[str, Tensor]:
        module(**X)
        module.eval()
        module(**X)
        return {"mean": module.mean.clone()}

    expected = run(seeded(Average))
    for policy in POLICIES:
        for found in on_ranks(seeded(Average), X, policy, tmp_path / policy, run):
            assert_close_tree(found, expected)


# ------------------------------------------------------------------------------------------------
# structures


@dataclasses.dataclass
class Batch:
    """A sample with nested parts."""

    features: dict[str, Tensor]
    pair: tuple[Tensor, list[Tensor]]
    flag: bool = True


class Scores(NamedTuple):
    """A result with named parts."""

    loss: Tensor
    parts: dict[str, Tensor]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, batch: Batch, weights: tuple[Tensor, dict[str, Tensor]]) -> Scores:
        first, (second,) = batch.pair
        y = self.down(F.relu(self.up(batch.features["x"]))) * first + second
        y = y * weights[0] + weights[1]["bias"]
        return Scores(y.square().mean(), {"y": y, "list": [y.sum(0), None, 3]})


def structured_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    a, b, c, d = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(4))
    return {"batch": Batch({"x": X["x"]}, (a, [b])), "weights": (c, {"bias": d})}


@pytest.mark.parametrize("policy", spread(POLICIES, 2, first=1))
def test_nested_arguments_and_results(policy: str, tmp_path: Path) -> None:
    model, inputs = seeded(Structured), structured_inputs()
    expected = model(**inputs)
    for found in on_ranks(
        model, inputs, policy, tmp_path / "run", lambda module: module(**inputs), outputs="all"
    ):
        assert type(found) is Scores and found.parts["list"][1:] == [None, 3]
        assert_close_tree(
            tensors_of(found.parts["y"].detach()), tensors_of(expected.parts["y"].detach())
        )
    plans.check_policy(model, inputs, policy, 2, tmp_path / "check")


# ------------------------------------------------------------------------------------------------
# random numbers


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x), 0.3, self.training)
        return (x + torch.rand_like(x)).square().mean()


def test_plan_independent_draws_are_the_same_under_every_plan(tmp_path: Path) -> None:
    model = seeded(Dropping)
    graph = plans.traced(model, X)
    found = {}
    for policy, num_ranks in (("dp", 1), ("tp", 2), ("tp", 4), ("data", 2), ("data", 4)):
        compiled = plans.compile_with(graph, policy, num_ranks, rng="plan_independent", seed=5)
        directory = tmp_path / f"{policy}{num_ranks}"
        plans.write(directory, compiled, model)
        outcome = plans.run_once(directory, compiled, X)
        found[policy, num_ranks] = {"loss": outcome.loss, **outcome.gradients}
    for outcome in found.values():
        assert_close_tree(outcome, found["dp", 1])
    other = plans.compile_with(graph, "dp", 1, rng="plan_independent", seed=6)
    plans.write(tmp_path / "other", other, model)
    assert plans.run_once(tmp_path / "other", other, X).loss != found["dp", 1]["loss"]


# ------------------------------------------------------------------------------------------------
# dynamic sizes


def test_another_size_than_the_compiled_one_is_refused(tmp_path: Path) -> None:
    def refused(module: Any) -> str:
        with pytest.raises(InputError) as caught:
            module(x=X["x"][:2])
        return str(caught.value)

    model = seeded(lambda: Stack(Layer()))
    for text in on_ranks(model, X, "tp", tmp_path, refused):
        assert text == (
            "Stack.forward: argument 'x' has shape [2, 6], but was compiled for float64[4, 6]\n"
            "  why:   dim 0 is 2, not 4\n"
            "  try:   pass the compiled shape, or compile again and name the dims that vary "
            "in ComputeConfig.dynamic_dims"
        )


class Contrast(nn.Module):
    """A layer without tensors, as the embeddings by contrast of Grounding DINO are."""

    def forward(self, x: Tensor) -> Tensor:
        y = (2 * x).tanh() + 0.5 * x.sin()
        return (y - y.mean(-1, keepdim=True)).exp() * x


class Contrasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.contrasts = nn.ModuleList(Contrast() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(x))
        for contrast in self.contrasts:
            x = contrast(x)
        return x.square().mean()


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_without_tensors_are_no_part_of_the_module(policy: str, tmp_path: Path) -> None:
    compiled, _ = plans.check_policy(seeded(Contrasts), X, policy, 2, tmp_path)
    assert [name for name in methods_of(compiled) if name.endswith("block")]
