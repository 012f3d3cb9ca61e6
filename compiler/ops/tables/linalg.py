"""Functions of matrices: decompositions, inverses, determinants, solutions. A matrix is whole;
stacks of them may be split.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.aliases import callables, through, without
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import RuleBuilder, broadcast, linear_sets, whole_rule

_OUT = without("out")


def _of_matrices(op: IROp) -> OpRule:
    """One operand [*, m, n]; every result begins with the same leading dims."""
    build = RuleBuilder()
    shape = op.operands[0].shape
    stack = build.tensor(shape[:-2])
    results = [(*stack, *build.whole(result.shape[len(stack) :])) for result in op.results]
    return build.rule([(*stack, *build.whole(shape[-2:]))], results)


def _determinant(op: IROp) -> OpRule:
    """``det`` of a stack. In torch 2.11 an empty stack gets no gradient: a rank with an empty piece
    would leave the backward, and the others would wait for it. The rule is the same for every
    torch, as files may run on another than the one that compiled them.
    """
    return replace(_of_matrices(op), nonempty=True)


def _solve(op: IROp) -> OpRule:
    """``solve(A, B)`` with ``B`` [*, n, k]; columns of ``B`` are apart from each other. A vector
    keeps everything whole.
    """
    matrix, right = op.operands
    if op.arg("left", True) is not True or right.ndim < 2 or right.ndim != matrix.ndim:
        return whole_rule(op)
    build = RuleBuilder()
    result = (
        # The columns of ``B`` are solved by themselves, its rows are not.
        *build.tensor(op.results[0].shape[:-1], frozen=(right.ndim - 2,)),
        build.dim(right.shape[-1]),
    )
    operands = [
        (*broadcast(matrix.shape[:-2], result[:-2]), *build.whole(matrix.shape[-2:])),
        (*broadcast(right.shape[:-2], result[:-2]), *result[-2:]),
    ]
    return build.rule(operands, [result], linear=linear_sets(op, ("B",)))


_MATRICES = {
    # canonical name: parameters after the matrix, other names in torch
    "cholesky": ("*, upper=False", ()),
    "inv": ("", ("inverse",)),
    "det": ("", ("det",)),
    "slogdet": ("", ("slogdet",)),
    "matrix_exp": ("", ("matrix_exp",)),
    "matrix_power": ("n", ("matrix_power",)),
    "qr": ("mode='reduced'", ()),
    "svd": ("full_matrices=True, *, driver=None", ()),
    "svdvals": ("*, driver=None", ()),
    "eigh": ("UPLO='L'", ()),
    "eigvalsh": ("UPLO='L'", ()),
    "pinv": ("*, atol=None, rtol=None, hermitian=False", ()),
}
for _name, (_parameters, _others) in _MATRICES.items():
    _rule = _determinant if _name == "det" else _of_matrices
    _aliases = through(_OUT, [getattr(torch.linalg, _name), *callables(*_others)])
    _signature = f"input, {_parameters}".rstrip(", ")
    define(_name, _signature, f"torch.linalg.{_name}", _rule, *_aliases, renames={"A": "input"})
define("logdet", "input", "torch.logdet", _of_matrices, *callables("logdet"))
define("trace", "input", "torch.trace", whole_rule, *callables("trace"))

define("solve", "A, B, *, left=True", "torch.linalg.solve", _solve, (torch.linalg.solve, _OUT))
define(
    "solve_triangular",
    "A, B, *, upper, left=True, unitriangular=False",
    "torch.linalg.solve_triangular",
    _solve,
    (torch.linalg.solve_triangular, _OUT),
)
