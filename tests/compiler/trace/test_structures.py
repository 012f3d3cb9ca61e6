"""Arguments and results of every shape: dicts, tuples, dataclasses, named tuples, caches,
literals.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, deque
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from tracing import traced

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.trace import trace
from shardwright.frontend.parallelize import parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InputError, TraceError
from shardwright.runtime.ranks.threads import run_ranks

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclasses.dataclass
class Batch:
    x: Tensor
    scale: float = 1.0
    extra: dict[str, Tensor] | None = None


class Holder:
    """A plain object with attributes."""

    def __init__(self, values: list[Tensor], note: str) -> None:
        raise AssertionError("rebuilding does not run the constructor")

    @classmethod
    def of(cls, values: list[Tensor], note: str) -> Holder:
        holder = cls.__new__(cls)
        holder.values, holder.note = values, note
        return holder


class Nested(nn.Module):
    def forward(
        self,
        batch: Batch,
        pairs: list[Any],
        *,
        options: dict[str, Any] | None = None,
        unused: int = 3,
        **more: Any,
    ) -> Any:
        x = batch.x * batch.scale + (batch.extra["bias"] if batch.extra else 0)
        a, (b, c) = pairs
        if options and options["negate"]:
            x = -x
        x = x + more["also"] if "also" in more else x
        return {
            "pair": Pair(x + a, None),
            "list": [b * c, (x.shape[0], "text", None, 2.5, torch.float64)],
            "batch": Batch(x, 2.0, {"twice": x * 2}),
            "held": Holder.of([x.sum(), x], "kept"),
            "ordered": OrderedDict(b=x, a=a),
        }


def arguments() -> dict[str, Any]:
    return {
        "also": X[0],
        "pairs": [X + 1, (X + 2, X + 3)],
        "batch": Batch(X, 0.5, {"bias": X[0]}),
        "options": {"negate": True},
    }


def test_nested_arguments_and_results() -> None:
    graph = traced(Nested(), arguments())
    assert [value.name for value in graph.inputs] == [
        "batch_x",
        "batch_extra_bias",
        "pairs_0",
        "pairs_1_0",
        "pairs_1_1",
        "also",
    ]
    assert [name for name, _ in graph.signature] == ["batch", "pairs", "options", "also"]
    assert graph.defaults == (("unused", 3),)
    leaves = dict(dict(graph.signature)["batch"].leaves())
    assert leaves["scale"] == 0.5 and isinstance(leaves["extra.bias"], IRValue)


def test_the_same_tensor_in_two_places_is_two_inputs() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y.detach()

    graph = traced(Product(), {"x": X, "y": X})
    assert [value.name for value in graph.inputs] == ["x", "y"]


def test_an_argument_that_is_returned() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(X.clone())

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x, self.weight, x

    assert len(traced(Same(), {"x": X}).outputs) == 3


def test_none_literals_and_numbers_are_baked() -> None:
    class Optional(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None, power: int) -> Tensor:
            return x**power if y is None else x * y

    graph = traced(Optional(), {"x": X, "y": None, "power": 3})
    assert dict(graph.signature)["y"].value is None and dict(graph.signature)["power"].value == 3


def test_a_cache_as_argument() -> None:
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=11,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    length = cache.get_seq_length()
    graph = trace(model, {"input_ids": ids, "past_key_values": cache})
    assert cache.get_seq_length() == length, "the caller's cache is left alone"
    names = [value.name for value in graph.inputs]
    assert names == [
        "input_ids",
        "past_key_values_layers_0_keys",
        "past_key_values_layers_0_values",
    ]
    key = dict(graph.output.leaves())["past_key_values.layers.0.keys"]
    assert key.shape == (1, 1, 8, 4)


def test_positional_only_parameters_are_refused() -> None:
    class PositionalOnly(nn.Module):
        def forward(self, x: Tensor, /, y: Tensor) -> Tensor:
            return x + y

    with pytest.raises(TraceError) as caught:
        trace(PositionalOnly(), {"x": X, "y": X})
    assert str(caught.value) == (
        "PositionalOnly.forward has positional-only parameters: x\n"
        "  where: PositionalOnly.forward(x: 'Tensor', /, y: 'Tensor') -> 'Tensor'\n"
        "  why:   arguments are bound and checked by name\n"
        "  try:   remove the '/' from the signature, or wrap the module in one that takes keywords"
    )


def test_unknown_and_missing_arguments() -> None:
    class Add(nn.Module):
        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
            return hidden + mask

    with pytest.raises(
        TraceError,
        match="Add.forward has no parameter 'hiden'\n.*\n  try:   did you mean 'hidden'?",
    ):
        trace(Add(), {"hiden": X, "mask": X})
    with pytest.raises(TraceError, match="the dummy arguments lack mask\n"):
        trace(Add(), {"hidden": X})


def test_a_result_of_a_local_class_is_refused() -> None:
    @dataclasses.dataclass
    class Local:
        x: Tensor

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Local:
            return Local(x)

    with pytest.raises(
        TraceError, match="the result of forward contains an object of the local class .*Local\n"
    ):
        trace(Makes(), {"x": X})


class Around(nn.Module):
    """Puts its result into lists."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: Tensor) -> Any:
        result: Any = x.exp()
        for _ in range(self.levels):
            result = [result]
        if not self.levels:
            result = [result]
            result.append(result)
        return result


class Side(enum.Enum):
    LEFT = 1
    RIGHT = 2


class Many(nn.Module):
    """Takes things of many kinds, and computes something else for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
        return self.scale * x[: given["rows"]].sum() * len(str(given))


KINDS: dict[str, tuple[Any, Any]] = {
    "rows": (np.int64(2), np.int64(1)),
    "side": (Side.LEFT, Side.RIGHT),
    "complex": (1j, 2j),
    "dtype": (torch.float32, torch.float64),
    "bytes": (b"1", b"2"),
    "range": (range(2), range(3)),
}


def test_arguments_of_many_kinds_are_compared(tmp_path: Path) -> None:
    first = {name: pair[0] for name, pair in KINDS.items()}
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1)

    def call(rank: int) -> None:
        module = parallelize(Many(), {"x": X, "given": first}, "dp", config, gen_savedir=tmp_path)
        torch.testing.assert_close(module(X, first), Many()(X, first), rtol=0, atol=1e-12)
        for name, (_, other) in KINDS.items():
            with pytest.raises(InputError, match=f"'given.{name}' is .*, but was compiled as"):
                module(X, {**first, name: other})

    run_ranks(1, call)


@pytest.mark.parametrize("hidden", [np.arange(2), Decimal(2), deque([2])], ids=repr)
def test_what_hides_its_state_is_refused(hidden: Any) -> None:
    kind = f"{type(hidden).__module__}.{type(hidden).__name__}"
    with pytest.raises(TraceError, match=f"an argument of forward contains a {kind}\n.*\n.*numpy"):
        trace(Many(), {"x": X, "given": {"rows": 2, "more": hidden}})

    class Gives(Many):
        def forward(self, x: Tensor, given: dict[str, Any]) -> Any:
            return super().forward(x, given), hidden

    with pytest.raises(TraceError, match=f"the result of forward contains a {kind}"):
        trace(Gives(), {"x": X, "given": {"rows": 2}})


def test_results_without_end_are_refused() -> None:
    with pytest.raises(TraceError, match="the result of forward contains itself: .* type list"):
        trace(Around(0), {"x": X})
    with pytest.raises(TraceError, match="the result of forward is nested in more than 100 levels"):
        trace(Around(5000), {"x": X})


def test_as_many_levels_as_python_reads(tmp_path: Path) -> None:
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1)
    (result,) = run_ranks(
        1,
        lambda rank: parallelize(Around(100), {"x": X}, "dp", config, gen_savedir=tmp_path)(x=X),
    )
    for _ in range(100):
        (result,) = result
    torch.testing.assert_close(result, X.exp())
