"""Traces that do on the dummy arguments what the module does without a trace.

Libraries ask whether they are traced before they look at values
(``values/questions.py``), and take another way where they are:
transformers builds an attention mask where eager finds that nothing is masked and passes none.
Mostly both compute the same, and the way that looks at nothing is right for all calls. Not always:
a decoder whose attention is not causal attends to everything without a mask, and not with the
causal mask that was built for it.

So the module is traced the way of eager first. Often no value is looked at: GPT-2 without a mask
asks, and then reads nothing of its arguments. Such a graph is what eager does in every call, and it
stands. Else the module is traced again, by the way that looks at nothing. Where the two graphs are
alike on the dummy arguments, the second stands. Where they are not, the one of eager stands; it
holds for the values that it has looked at, so these inputs become constants, which every call is
checked against. The graphs are also compared for masks of ones, which calls without padding have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping

import torch

from shardwright.compiler.trace.run import Traced
from shardwright.compiler.trace.values.alike import Likeness
from shardwright.compiler.trace.values.questions import Question, Questions
from shardwright.runtime.errors import TraceError

Values = Mapping[str, torch.Tensor]
Run = Callable[[Questions, Values], Traced]
"""Traces the module with answers to questions, and with values that stand for those of some dummy
arguments.
"""


Said = tuple[str, type[Warning], str, int]
"""A warning: its text, category, file and line."""


def as_eager(run: Run, said: set[Said]) -> Traced:
    """What ``run`` traces, alike to what the module does on the dummy arguments without a trace.

    ``said``: what this trace of the module has warned of before, in another mode. It grows.

    Raises :class:`TraceError` where the two differ and the dummy arguments have no values (on the
    meta device).
    """
    looked, warned = _looking(run, {})
    if looked.questions.hold_in_every_call:
        return _standing(looked, warned, said)
    unlooked = run(Questions(), {})
    # Masks on the meta device have no values. Libraries mostly ask whether anything is masked: all
    # ones, that is "no", stand in for them.
    stood_for = _ones(looked, unlooked, only_meta=True)
    if stood_for:
        looked, warned = _looking(run, stood_for)
    # The values that were looked at have changed the graph: they are compiled in, and checked.
    if not _alike(unlooked, looked, stood_for):
        looked, warned = _with_fewest_questions(run, looked, warned, stood_for)
        if stood_for.keys() & dict(looked.graph.constant_inputs).keys():
            raise _without_values(looked, stood_for)
        return _standing(looked, warned, said)
    # Nothing has changed with these values. Would it without any masked place?
    unmasked = _ones(looked, unlooked, only_meta=False)
    if unmasked and not _alike(unlooked, _looking(run, unmasked)[0], unmasked):
        return _standing(looked, warned, said)
    return unlooked


def _looking(
    run: Run, values: Values, answered: Collection[Question] | None = None
) -> tuple[Traced, list[warnings.WarningMessage]]:
    """The trace of a module that may look at values, and what it warns of. Questions about values
    that follow from more than arguments stay without an answer.
    """
    refused: set[Question] = set()
    while True:
        questions = Questions(answered, refused)
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                return run(questions, values), warned
        except TraceError:
            if not questions.unanswered:
                _say(warned, set())
                raise
            refused |= questions.unanswered.keys()


def _standing(traced: Traced, warned: list[warnings.WarningMessage], said: set[Said]) -> Traced:
    """The trace that stands. What it warns of is said now."""
    _say(warned, said)
    return traced


def _say(warned: list[warnings.WarningMessage], said: set[Said]) -> None:
    """Warn once of each of ``warned`` that is not ``said`` yet."""
    for warning in warned:
        key = (str(warning.message), warning.category, warning.filename, warning.lineno)
        if key not in said:
            said.add(key)
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )


def _with_fewest_questions(
    run: Run, looked: Traced, warned: list[warnings.WarningMessage], values: Values
) -> tuple[Traced, list[warnings.WarningMessage]]:
    """Trace again with as few looks at values as that graph takes. Values that nothing follows from
    need not be the same in every call.
    """
    needed = list(looked.questions.asked)
    for question in list(needed):
        fewer = [other for other in needed if other != question]
        trial, said = _looking(run, values, fewer)
        if _alike(trial, looked, values):
            needed, looked, warned = fewer, trial, said
    return looked, warned


def _alike(one: Traced, other: Traced, values: Values) -> bool:
    """Whether two graphs compute the same for the values that either has looked at."""
    read = {name for traced in (one, other) for name, _ in traced.constants.inputs_read()}
    for traced in (one, other):
        traced.constants.replace_dummies(values)
    likeness = Likeness(read)
    return likeness.of(one.graph, one.constants) == likeness.of(other.graph, other.constants)


def _ones(looked: Traced, unlooked: Traced, *, only_meta: bool) -> dict[str, torch.Tensor]:
    """Ones for the inputs that have been looked at and are masks with a zero; or for those that
    have no values at all. What is a constant both ways has no other values.
    """
    if only_meta:
        return {
            value.name: torch.ones(unlooked.constants.example_shape(value), dtype=value.dtype)
            for value in unlooked.graph.inputs
            if unlooked.constants.dummy(value.name) is None and not value.dtype.is_floating_point
        }
    constant = dict(unlooked.constants.inputs_read()).keys()
    read = {name: x for name, x in looked.constants.inputs_read() if name not in constant}
    return {name: torch.ones_like(mask) for name, mask in read.items() if _masks_something(mask)}


def _masks_something(values: torch.Tensor) -> bool:
    zeros, ones = values == 0, values == 1
    return bool((zeros | ones).all()) and bool(zeros.any())


def _without_values(looked: Traced, stood_for: Values) -> TraceError:
    names = ", ".join(name for name, _ in looked.graph.constant_inputs if name in stood_for)
    return TraceError(
        f"what forward computes depends on the values of {names}, which the dummy arguments "
        "do not have",
        where=", ".join(f"{file}:{line}" for file, line, _ in looked.questions.asked),
        why="without a trace forward looks at them and takes one of two ways, which do not "
        "compute the same",
        hint=f"give {names} with values in the dummy arguments, not on the meta device",
    )
