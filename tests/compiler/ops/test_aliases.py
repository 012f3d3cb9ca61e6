"""Every alias of the structural operators binds to the canonical one, whose source computes the
same.

(The aliases of pointwise operators are tested beside their rules; aliases with arguments of their
own beside theirs.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import split_check
import torch
from in_shares import Named, check_each, shares

from shardwright.compiler.ops import registry

X = torch.randn(4, 6, dtype=torch.float64)
ROWS = torch.tensor([2, 0])
PLACES = torch.tensor([[0, 1, 2, 3, 0, 1]])

SAMPLES: dict[str, tuple[Any, ...]] = {
    "adjoint": (X,),
    "alias": (X,),
    "broadcast_tensors": (X, X[0]),
    "bucketize": (X, torch.linspace(-1, 1, 3, dtype=torch.float64)),
    "cat": ((X, X),),
    "chunk": (X, 2),
    "clone": (X,),
    "contiguous": (X,),
    "detach": (X,),
    "diag_embed": (X,),
    "diagonal": (X,),
    "diagonal_scatter": (X, X[:, 0]),
    "diff": (X,),
    "expand": (X, (2, 4, 6)),
    "flatten": (X,),
    "flip": (X, (0,)),
    "gather": (X, 0, PLACES),
    "getitem": (X, (slice(None), 1)),
    "glu": (X,),
    "index_add": (X, 0, ROWS, X[:2]),
    "index_copy": (X, 0, ROWS, X[:2]),
    "index_fill": (X, 0, ROWS, 0.5),
    "index_put": (X, (ROWS,), X[:2]),
    "index_put_dims": (X, (None, ROWS), X[:, :2]),
    "index_select": (X, 0, ROWS),
    "isin": (ROWS, PLACES),
    "masked_scatter": (X, X > 0, X),
    "meshgrid": (X[0], X[1]),
    "movedim": (X, 0, 1),
    "narrow": (X, 1, 0, 2),
    "pad": (X, (1, 1)),
    "permute": (X, (1, 0)),
    "repeat": (X, (2, 1)),
    "repeat_interleave": (X, 2),
    "reshape": (X, (6, 4)),
    "roll": (X, 1, 0),
    "scatter": (X, 0, PLACES, X),
    "scatter_add": (X, 0, PLACES, X),
    "scatter_reduce": (X, 0, PLACES, X, "sum"),
    "select": (X, 0, 1),
    "select_scatter": (X, X[0], 0, 1),
    "slice_scatter": (X, X[:2], 0, 1, 3),
    "split": (X, (2, 4), 1),
    "squeeze": (X[:1],),
    "stack": ((X, X),),
    "t": (X,),
    "take": (X, ROWS),
    "take_along_dim": (X, PLACES, 0),
    "tensor_split": (X, 2),
    "to": (X,),
    "transpose": (X, 0, 1),
    "tril": (X,),
    "triu": (X,),
    "unbind": (X,),
    "unflatten": (X, 1, (3, 2)),
    "unfold": (X, 1, 2, 2),
    "unsqueeze": (X, 0),
    "view": (X, (6, 4)),
    "view_as_complex": (X.reshape(4, 3, 2),),
    "view_as_real": (torch.complex(X, X),),
}

OWN_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    torch.Tensor.to: (X, torch.float32),
    torch.Tensor.type: (X, torch.float32),
    torch.Tensor.type_as: (X, X.float()),
    torch.Tensor.view_as: (X, X.reshape(6, 4)),
    torch.Tensor.reshape_as: (X, X.reshape(6, 4)),
    torch.Tensor.expand_as: (X, X[None]),
    torch.Tensor.mT.__get__: (X,),
    torch.Tensor.T.__get__: (X,),
    **dict.fromkeys([torch.flipud, torch.fliplr, torch.Tensor.flipud, torch.Tensor.fliplr], (X,)),
    torch.unsafe_split: (X, 2, 1),
    torch.Tensor.unsafe_split: (X, 2, 1),
}


def aliases() -> list[Any]:
    tables = [
        f"shardwright.compiler.ops.tables.{name}"
        for name in ("shape", "joining", "positions", "indexing", "cast")
    ]
    names = {name for name, opdef in registry.OPS.items() if opdef.rule.__module__ in tables}
    # Their rule is that of linear pointwise operators.
    names |= {
        "alias",
        "clone",
        "contiguous",
        "detach",
    }
    assert names == SAMPLES.keys()
    # (there is no GPU to move to)
    found = [
        (f, name)
        for f, (name, _) in registry.CALLABLES.items()
        if name in names and f is not torch.Tensor.cuda
    ]
    return [(f"{name}:{split_check.title(f)}", (f, name)) for f, name in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("listed", shares(aliases()))
def test_aliases(listed: Sequence[Named]) -> None:
    check_each(listed, check_alias)


def check_alias(title: str, alias: tuple[Callable[..., Any], str]) -> None:
    function, name = alias
    args = OWN_ARGUMENTS.get(function, SAMPLES[name])
    expected = [result.clone() for result in split_check.listed(function(*copies(args)))]
    op, *_ = split_check.trace(function, *copies(args))
    assert op.target == name
    tensors = iter(leaf for leaf in flat(args) if isinstance(leaf, torch.Tensor))
    results = split_check.run(
        op, {value.name: tensor for value, tensor in zip(op.operands, tensors, strict=False)}
    )
    assert len(results) == len(expected)
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == reference.dtype
        assert torch.equal(result, reference)


def copies(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(map(copies, arg))
    return arg.clone() if isinstance(arg, torch.Tensor) else arg


def flat(arg: Any) -> list[Any]:
    return [leaf for item in arg for leaf in flat(item)] if isinstance(arg, tuple) else [arg]
