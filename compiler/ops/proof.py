"""Proofs of the rules of a user's own operators, made when a model that calls them is compiled.

A rule is what ``register_op`` was told. Everything else that the compiler knows is proved by its
own tests; this is proved here, on small random calls (``sample_calls.py``) by the same prover. What
was proved is known by a digest of rule, function, shapes and versions, so that it is proved once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from pkgutil import resolve_name

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.size import to_python
from shardwright.compiler.ops import registry
from shardwright.compiler.ops.annotation import instantiate
from shardwright.compiler.ops.fingerprint import digest_of, function_digest, rule_text
from shardwright.compiler.ops.prover import Trial
from shardwright.compiler.ops.register import UserOpDef
from shardwright.compiler.ops.render import call_source
from shardwright.compiler.ops.rule import FactorKind, OpRule
from shardwright.compiler.ops.sample_calls import Sample, sample_calls
from shardwright.compiler.ops.strategy import split_factor, strategies
from shardwright.runtime.errors import AnnotationError, on_lines

LIMIT_S = 120.0
"""How long the proof of one call may take."""

_NOTICE_S = 10.0
_ROUNDING = 1e-2
"""Below it, a difference in float64 may be what is left of fewer bits inside of a kernel."""

_proved: set[str] = set()
"""The digests of what this process has proved."""

logger = logging.getLogger(__name__)


def unproved(graph: IRGraph) -> tuple[str, ...]:
    """The operators of a graph whose rules are taken on trust, as ``register_op(prove=False)``
    asks.
    """
    targets = dict.fromkeys(op.target for body in graph.bodies for op in body.ops)
    opdefs = [registry.get(target) for target in targets]
    return tuple(
        opdef.name for opdef in opdefs if isinstance(opdef, UserOpDef) and opdef.proof == "nobody"
    )


def prove_operators(graph: IRGraph, known: Collection[str], versions: str) -> list[str]:
    """Prove the rules of all calls of a user's own operators. Returns the digests of those that are
    not ``known`` yet.

    ``versions``: what else a proof depends on.

    Raises :class:`AnnotationError` for a rule that is wrong, or that cannot be proved.
    """
    new: list[str] = []
    for op in (op for body in graph.bodies for op in body.ops):
        opdef = registry.get(op.target)
        if not isinstance(opdef, UserOpDef) or opdef.proof != "compile":
            continue
        rule = instantiate(opdef, op)
        # Every rank computes all of it: there is nothing to be wrong.
        if strategies(rule) == ("R",):
            continue
        digest = _digest(op, opdef, rule, versions)
        # Layers of one kind make one call, which is proved once.
        if digest in known or digest in new:
            continue
        if digest not in _proved:
            _prove(op, opdef)
            _proved.add(digest)
        new.append(digest)
    return new


def _digest(op: IROp, opdef: UserOpDef, rule: OpRule, versions: str) -> str:
    """The digest of all that a proof depends on."""
    operands = [
        f"{value.shape} {value.dtype} {value.requires_grad and op.grad_enabled}"
        for value in op.operands
    ]
    functions = [opdef.function, opdef.input_gen]
    functions += [resolve_name(rule.parallel.target)] if rule.parallel is not None else []
    # Versions, the rule, the example call with its operands, and what the function computes.
    return digest_of(
        [
            *(
                versions,
                str(torch.__version__),
                str(torch.cuda.is_available()),
                opdef.name,
                rule_text(rule),
            ),
            *(call_source(op, lambda value: value.name, to_python), *operands),
            *map(function_digest, functions),
        ]
    )


def _prove(op: IROp, opdef: UserOpDef) -> None:
    """Prove the rule of one call. Raises :class:`AnnotationError`."""
    clock = _Clock(op)
    reasons: list[str] = []
    wrong: AnnotationError | None = None
    for sample in sample_calls(op, opdef):
        clock.check("no small call of it was found")
        if not isinstance(sample, Sample):
            reasons.append(str(sample))
            continue
        # One sample in float64 has shown a difference: only one in the model's dtypes can clear it.
        if wrong is not None and sample.casts is not None:
            continue
        failures, count = _tried(sample, clock)
        if not failures:
            return
        wrong = _wrong(op, sample, failures, count)
        # Kernels that are not torch's may compute in fewer bits than their tensors have. A small
        # difference is then tried again in the dtypes of the model, where its bound is wider.
        opaque = sample.casts is not None and sample.casts.opaque
        if not opaque or any(not 0 < trial.error < _ROUNDING for trial in failures):
            raise wrong
    if wrong is not None:
        raise wrong
    raise AnnotationError(
        f"the annotation of {op.target} cannot be proved",
        where=_where(op),
        why=on_lines(
            ["no call of it with small tensors could be tried:", *list(dict.fromkeys(reasons))[-3:]]
        ),
        hint="register_op(input_gen=...) makes the tensors of a call, see docs/register-op.md; "
        "register_op(prove=False) takes "
        "the annotation on trust, which generated files say",
    )


def _tried(sample: Sample, clock: _Clock) -> tuple[list[Trial], int]:
    """The trials that failed, and the number of all. What fails along one axis is not tried along
    two.
    """
    failures, count = [], 0
    for meshes in _meshes(sample.call.rule):
        for trial in sample.call.trials(meshes):
            count += 1
            failures += [trial] if trial.failure is not None else []
            clock.check(f"{count} ways to split it were tried on {sample.shapes}")
        if failures:
            break
    return failures, count


def _meshes(rule: OpRule) -> list[list[int | dict[str, int]]]:
    """Two ranks, and three for pieces of different sizes; then two by two, where that is not too
    much.
    """
    return [[2, 3], [{"a": 2, "b": 2}]] if len(strategies(rule)) <= 8 else [[2, 3]]


class _Clock:
    """Ends a proof that takes too long, in words, and says before that it takes long."""

    def __init__(self, op: IROp) -> None:
        self._op, self._start, self._said = op, time.monotonic(), False

    def check(self, done: str) -> None:
        """``done``: how far the proof is."""
        seconds = time.monotonic() - self._start
        if seconds > LIMIT_S:
            raise AnnotationError(
                f"the annotation of {self._op.target} could not be proved within {LIMIT_S:.0f} s",
                where=_where(self._op),
                why=done,
                hint="annotate sizes that may be small, or take the annotation on trust: "
                "register_op(prove=False)",
            )
        if seconds > _NOTICE_S and not self._said:
            self._said = True
            logger.warning("proving the annotation of %s takes long; %s", self._op.target, done)


def _wrong(op: IROp, sample: Sample, failures: list[Trial], count: int) -> AnnotationError:
    """What is wrong with the annotation, and how to mend it."""
    rule = sample.call.rule
    shown = [f"{trial.name}: {trial.failure}" for trial in failures[:4]]
    more = [f"... and {len(failures) - len(shown)} more"] if len(failures) > len(shown) else []
    return AnnotationError(
        f"the annotation of {op.target} is wrong: {len(failures)} of {count} ways to split a "
        "call differ from one device",
        where=_where(op),
        why=on_lines([rule.annotation, f"tried on {sample.shapes}", *shown, *more]),
        hint=on_lines(dict.fromkeys(_advice(failures[0], rule))),
    )


def _advice(trial: Trial, rule: OpRule) -> Iterator[str]:
    """How to mend a rule of which a trial failed."""
    # The strategy that fails tells which claim of the annotation is wrong.
    for strategy in trial.assignment.values():
        name = split_factor(strategy)
        if name is not None:
            yield _advice_on(name, rule)
        elif strategy == "G":
            yield (
                "leave grad_linear=True out: the backward is not linear in the gradients that it "
                "is given"
            )
        elif strategy.startswith("linear:"):
            yield "leave linear= out, or name the parameters for which f(a + b) = f(a) + f(b)"
        else:
            yield (
                "make the function compute from its arguments alone, the same whenever it is called"
            )


def _advice_on(name: str, rule: OpRule) -> str:
    """How to mend a rule that must not split a factor."""
    written = name if name.isidentifier() else "the dim"
    if rule.factor(name).kind is FactorKind.SUMMED:
        return (
            f"write {written}^, not {written}+, unless the result is the plain sum over pieces of "
            f"{written}: a mean, a maximum or a norm is not; parameters that are added to the sum, "
            "like a bias, go into additive=[...]"
        )
    return (
        f"write {written}^, so that {written} stays whole, if the function needs all of it "
        "(a norm, "
        "a softmax, an order of dims); if an argument is a size, localise= shrinks it"
    )


def _where(op: IROp) -> str | None:
    places = [str(op.source)] if op.source else []
    return ", ".join([*places, *([op.module_path] if op.module_path else [])]) or None
