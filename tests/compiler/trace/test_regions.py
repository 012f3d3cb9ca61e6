"""What is recorded beside the operators: recompute, autocast and gradient regions, modules, source
lines, names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from opaque_functions import Cube, Registered, Split, double, gated, route
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tracing import traced

from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.ir.serialize import digest
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import TraceError, UsageError

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8).double()
        self.down = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_regions(use_reentrant: bool) -> None:
    graph = traced(Checkpointed(use_reentrant), {"x": X})
    regions = {op.module_path: op.region for op in graph.ops}
    assert regions["blocks.0"] is None and regions["blocks.0.up"] is None
    assert regions["blocks.1"] == regions["blocks.1.up"] == "recompute_0"
    assert regions["blocks.2"] == "recompute_1"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_of_transformers(use_reentrant: bool) -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    ids = torch.tensor([[1, 2, 3, 4]])
    graph = trace(model, {"input_ids": ids, "labels": ids, "use_cache": False})
    regions = {
        op.module_path.split(".")[2]: op.region
        for op in graph.ops
        if op.module_path.startswith("transformer.h.")
    }
    assert regions == {"0": "recompute_0", "1": "recompute_1"}
    assert all(
        op.region is None for op in graph.ops if not op.module_path.startswith("transformer.h.")
    )


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        with torch.inference_mode():
            shift = x.sum() * 0
        return y.float() * scale + shift.clone()


def test_autocast_and_gradient_regions() -> None:
    graph = trace(Regions(), {"x": X.float()})
    by_name = {op.name: op for op in graph.ops}
    assert not by_name["scale"].grad_enabled and not by_name["scale"].results[0].requires_grad
    linear = by_name["linear"]
    assert (
        linear.autocast is torch.bfloat16
        and linear.results[0].dtype is torch.bfloat16
        and linear.results[0].requires_grad
    )
    assert not by_name["sum_1"].grad_enabled and by_name["mul"].autocast is None


def test_autocast_for_another_device_type() -> None:
    class Cuda(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return self.linear(x)

    (op,) = trace(Cuda(), {"x": X.float()}).ops
    assert op.autocast is torch.bfloat16 and op.results[0].dtype is torch.bfloat16


def test_names_sources_and_modules() -> None:
    graph = traced(nn.ModuleDict({"a": Block()})["a"], {"x": X})
    assert [op.name for op in graph.ops] == ["up", "hidden", "down", "add"]
    nested = trace(nn.Sequential(Block(), Block()), {"input": X})
    assert [op.name for op in nested.ops] == [
        "_0_up",
        "_0_hidden",
        "_0_down",
        "_0_add",
        "_1_up",
        "_1_hidden",
        "_1_down",
        "_1_add",
    ]
    hidden = nested.ops[1]
    assert (hidden.module_path, hidden.module_type) == ("0", "Block")
    assert (
        hidden.source is not None
        and hidden.source.file == __file__
        and hidden.source.function == "forward"
    )
    assert [v.name for v in nested.parameters[:2]] == ["_0_up_weight", "_0_up_bias"]
    (alone,) = trace(nn.Linear(3, 2), {"input": torch.zeros(4, 3)}).ops
    assert (alone.source, alone.place) == (None, "top-level forward")
    assert nested.module_types["1.up"] == "Linear"


def test_tied_parameters_are_one_value() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4).double()
            self.head = nn.Linear(4, 5, bias=False).double()
            self.head.weight = self.embed.weight
            self.again = self.head

        def forward(self, ids: Tensor) -> Tensor:
            return self.again(self.embed(ids))

    (weight,) = traced(Tied(), {"ids": torch.tensor([0, 3])}).parameters
    assert (
        weight.fqn == "embed.weight"
        and weight.aliases == ("head.weight", "again.weight")
        and weight.kind is ValueKind.PARAMETER
    )


def test_requires_grad_is_propagated() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(4, 4).double().requires_grad_(False)
            self.free = nn.Linear(4, 4).double()

        def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            table = self.frozen(torch.eye(4, dtype=torch.float64))
            looked_up = F.embedding(ids, table)
            return (
                looked_up,
                self.free(looked_up),
                self.frozen(x),
                self.free(x).detach(),
                x.argmax(-1),
            )

    graph = traced(Mixed(), {"ids": torch.tensor([0, 3]), "x": X})
    assert [value.requires_grad for value in graph.outputs] == [False, True, True, False, False]
    assert [value.requires_grad for value in graph.inputs] == [False, True]
    assert [value.requires_grad for value in graph.parameters] == [False, False, True, True]
    # of the caller's inputs none takes a gradient unless it is asked for, nor does what only inputs
    # are made into
    assert [value.takes_gradient for value in graph.outputs] == [False, True, False, False, False]
    assert not any(value.takes_gradient for value in graph.inputs)
    assert [value.takes_gradient for value in graph.parameters] == [False, False, True, True]


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = Split.apply(Cube.apply(x, 0.5))
        return double(a) + b


def test_autograd_functions_and_custom_ops_stay_one_operator() -> None:
    graph = traced(Opaque(), {"x": X})
    targets = [op.target for op in graph.ops]
    assert targets[:3] == [
        "opaque_functions.Cube.apply",
        "opaque_functions.Split.apply",
        "torch.ops.shardwright_tests.double.default",
    ]
    assert len(targets) == 4


class Routes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(X[0].clone())

    def forward(self, x: Tensor) -> Tensor:
        return Registered.apply(route(gated(x, self.gate, power=2), 0.1), 2.0)


def test_registered_functions_stay_one_operator() -> None:
    graph = traced(Routes(), {"x": X})
    assert [op.target for op in graph.ops] == [
        "opaque_functions.gated",
        "opaque_functions.route",
        "cube",
    ]
    assert graph.ops[0].arg("power") == 2 and graph.ops[1].results[0].requires_grad
    assert graph.ops[0].source is not None and graph.ops[0].source.file == __file__


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.sigmoid() * 2


@torch.compile(backend="eager")  # any backend does, and importing the default one takes a second
def compiled(x: Tensor) -> Tensor:
    return x.tanh() + 1


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = torch.compile(Block(), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.block(scripted(x) + compiled(x))


def test_scripted_and_compiled_functions_are_traced_through() -> None:
    graph = trace(Wrapped(), {"x": X})
    targets = [op.target for op in graph.ops]
    assert "sigmoid" in targets[0] and any("tanh" in target for target in targets)
    assert sum("linear" in target for target in targets) == 2
    assert scripted(X).shape == X.shape, "the scripted function is scripted again"


def test_composites_are_opened() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True).double()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            for row in x:
                x = x + row
            return self.attention(x, x, x, need_weights=False)[0], 1 - x, 2**x

    graph = traced(Attention(), {"x": X[None]})
    targets = {op.target.rsplit(".")[-1] for op in graph.ops}
    assert "linear" in targets and "scaled_dot_product_attention" in targets
    assert not any("multi_head" in target for target in targets)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_of_modules_are_part_of_the_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert [op.target for op in traced(model, {"input": X}).ops] == ["linear", "mul", "add", "tanh"]
    seen: list[Any] = []
    handle = model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    hooks = dict(model[1]._forward_hooks)
    with pytest.warns(
        UserWarning,
        match=r"^a forward hook of 1 \(Tanh\) returns nothing, so it ran for the trace and ",
    ):
        traced(model, {"input": X})
    assert seen and model[1]._forward_hooks == hooks
    handle.remove()
    torch.nn.utils.weight_norm(model[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(model, {"input": X})


def test_gradient_checkpointing_says_nothing_of_its_hook() -> None:
    """transformers has the embeddings ask for gradients; layers that run again do not need it."""
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=16)
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable()
    assert model.get_input_embeddings()._forward_hooks
    for parameter in model.transformer.wte.parameters():
        parameter.requires_grad_(False)
    tokens = torch.arange(8)[None]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        report = verify(
            model, {"input_ids": tokens, "labels": tokens}, "tp",
            {"plan_ngpus": 2, "runtime_ngpus": 2}, steps=1,
        )  # fmt: skip
    assert report.ok
    assert not any("hook" in str(warning.message) for warning in told)


def test_devices_are_the_ranks_own() -> None:
    class Devices(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.zeros(4, device="cuda", dtype=x.dtype) + torch.ones(
                4, device=x.device, dtype=x.dtype
            )
            return x.to("cuda:1") + y.cuda() + x.to(x.device, torch.float64)

    graph = trace(Devices(), {"x": X})
    assert "cuda" not in str([op.args for op in graph.ops])


def dtypes_of(forward: Callable[[nn.Module, Tensor], Tensor]) -> list[torch.dtype | None]:
    """The autocast dtype of each operator that ``forward`` calls."""
    module = type("M", (nn.Module,), {"forward": forward})
    return [op.autocast for op in trace(module(), {"x": X.float()}).ops]


def test_the_innermost_autocast_region_decides_whichever_device_it_names() -> None:
    made_before = torch.autocast("cpu", dtype=torch.float16)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda"):
            a = x @ x.T
            with torch.autocast("cpu", enabled=False):
                b = x @ x.T
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    c = x @ x.T
            with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cuda"):
                d = x @ x.T
        with made_before:
            e = x @ x.T
        return a + b + c + d + e

    half, brain = torch.float16, torch.bfloat16
    # Each product is of a transpose.
    assert dtypes_of(forward) == [
        half,
        half,
        None,
        None,
        brain,
        brain,
        brain,
        brain,
        half,
        half,
        None,
        None,
        None,
        None,
    ]


def test_what_torch_says_about_autocast_in_a_trace() -> None:
    """Transformers asks before it leaves autocast for rotary embeddings, others to cast by hand."""
    answers = []

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        for device in ("cuda", "cpu"):
            answers.append((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)))
            with torch.autocast(device, dtype=torch.bfloat16):
                answers.append(
                    (
                        torch.is_autocast_enabled(),
                        torch.is_autocast_enabled("cpu"),
                        torch.get_autocast_dtype("cuda"),
                    )
                )
        return x + 1

    before = (torch.autocast.__enter__, torch.is_autocast_enabled, torch.get_autocast_dtype)
    dtypes_of(forward)
    inside = (True, True, torch.bfloat16)
    assert answers == [(False, torch.float16), inside, (False, torch.bfloat16), inside]
    assert before == (torch.autocast.__enter__, torch.is_autocast_enabled, torch.get_autocast_dtype)


def test_a_trace_inside_autocast_stands_in_it() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        graph = trace(Regions(), {"x": X.float()})
        assert torch.get_autocast_dtype("cpu") is torch.float16 and torch.is_autocast_enabled("cpu")
    by_name = {op.name: op.autocast for op in graph.ops}
    assert by_name["linear"] is torch.bfloat16 and by_name["mul"] is torch.float16
    assert graph.autocast is torch.float16 and print_graph(graph).startswith(
        "graph Regions  autocast(f16)\n"
    )
    outside = trace(Regions(), {"x": X.float()})
    assert outside.autocast is None and digest(outside) != digest(graph)


def test_two_blocks_of_autocast_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    outer, inner = (
        torch.autocast("cuda", dtype=torch.float16),
        torch.autocast("cpu", dtype=torch.bfloat16),
    )
    with outer, inner, pytest.raises(TraceError) as caught:
        trace(Regions(), {"x": X.float()})
    assert str(caught.value) == (
        "the module is compiled inside two autocast blocks that differ\n"
        "  why:   cuda is cast to float16, cpu is cast to bfloat16\n"
        "  try:   enter autocast for the device that the module will run on only"
    )


class ReentrantFirst(nn.Module):
    """A reentrant checkpoint in front of an ordinary layer. ``ask``: its input is made to require a
    gradient.
    """

    def __init__(self, ask: bool = False) -> None:
        super().__init__()
        self.inside, self.behind = Block(), Block()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        if self.ask:
            x.requires_grad_()
        return self.behind(checkpoint(self.inside, x, use_reentrant=True)).sum()


def test_a_reentrant_checkpoint_without_gradients_gives_none_as_in_torch() -> None:
    says = (
        r"no argument of the reentrant checkpoint at .*test_regions.py:\d+ in .* requires a "
        r"gradient"
    )
    with pytest.warns(UserWarning, match=says):
        graph = trace(ReentrantFirst(), {"x": X})
    inside = [op for op in graph.ops if op.module_path.startswith("inside")]
    assert inside and all(
        op.region is None and not op.grad_enabled and not op.results[0].requires_grad
        for op in inside
    )
    assert graph.outputs[0].takes_gradient

    with pytest.warns(UserWarning, match="requires a gradient|have requires_grad=True"):
        assert verify(ReentrantFirst(), {"x": X}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2}).ok
    with (
        pytest.warns(UserWarning, match=says),
        pytest.raises(UsageError, match="loss of ReentrantAlone does not"),
    ):
        verify(ReentrantAlone(), {"x": X}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2})


class ReentrantAlone(ReentrantFirst):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=True).sum()


@pytest.mark.parametrize(("ask", "x"), [(True, X), (False, X.clone().requires_grad_())])
def test_a_reentrant_checkpoint_whose_input_is_made_to_require_a_gradient(
    ask: bool, x: Tensor
) -> None:
    graph = trace(ReentrantFirst(ask), {"x": x})
    assert {op.region for op in graph.ops if op.module_path.startswith("inside")} == {"recompute_0"}
    assert verify(ReentrantFirst(ask), {"x": x}, "tp", {"plan_ngpus": 2, "runtime_ngpus": 2}).ok
