"""``trace``: a module and example arguments in, a graph out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.trace.calls.repeated_calls import Known
from shardwright.compiler.trace.calls.view_writes import ParameterChanged
from shardwright.compiler.trace.checks import (
    check_hooks,
    warn_mixed_training,
    warn_state_hooks,
    watched_hooks,
)
from shardwright.compiler.trace.dummy_arguments import bind_arguments
from shardwright.compiler.trace.run import Traced, run_once
from shardwright.compiler.trace.train_eval import merge
from shardwright.compiler.trace.values.as_eager import Said, as_eager
from shardwright.compiler.trace.values.known_inputs import known_inputs, warn_found
from shardwright.compiler.trace.values.questions import Questions
from shardwright.runtime.arguments import checked_late


@checked_late
def trace(
    module: torch.nn.Module,
    dummy_args: Mapping[str, Any],
    *,
    dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
    constants: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> IRGraph:
    """The graph of ``module.forward`` for arguments like ``dummy_args``, in training and in eval
    mode.

    ``forward`` runs unmodified on fake tensors: nothing is computed, no memory is allocated for
    weights, and modules on the meta device are fine. ``dynamic_dims`` maps the path of an input
    (``"input_ids"``, ``"batch.mask"``) to ``{dim: name}``; equal names mean equal sizes.
    ``constants`` maps the paths of integer inputs to values that ``forward`` may read, as they are
    the same in every call. ``name`` defaults to the class name. The module is left exactly as it
    was.

    Raises :class:`TraceError` when ``forward`` needs the values of a tensor, fixes a dynamic dim,
    changes a parameter, or relies on hooks that no graph can show; the text names the line.
    """
    arguments = bind_arguments(module, dummy_args)
    # Before anything runs: hooks and mixed modes would shape the trace in silence.
    check_hooks(module)
    warn_mixed_training(module)
    name, dims = name or type(module).__name__, dynamic_dims or {}
    known = known_inputs(arguments, constants or {})

    said: set[Said] = set()
    calls: Known = {}

    # One trace in a mode, and again where the library looks at values.
    def once(training: bool) -> Traced:
        def run(questions: Questions, dummies: Mapping[str, torch.Tensor]) -> Traced:
            return run_once(
                module,
                arguments,
                dims,
                known,
                name,
                training=training,
                questions=questions,
                dummies=dummies,
                calls=calls,
            )

        return as_eager(run, said)

    with watched_hooks(module):
        train = once(training=True)
    warn_state_hooks(module)
    # Nothing has asked for the mode: one graph serves both.
    if not train.reads_training:
        graph = train.graph.live()
    else:
        try:
            evaluation = once(training=False).graph
        except ParameterChanged as error:
            graph = replace(train.graph.live(), training_only=True)
            warnings.warn(
                f"the compiled module trains and does not evaluate: in eval mode {error}",
                stacklevel=2,
            )
        else:
            graph = merge(train.graph, evaluation)
    warn_found(graph, constants or {})
    return graph
