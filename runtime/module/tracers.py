"""Tracers and transforms of torch that run a module to make something else of it. Of a parallel
module they are refused.

``torch.export``, ``torch.fx`` and the like record the operators of one call. The recording would
lack the checks of the arguments, and have the random numbers and the communication of one rank in
one call. ``torch.func`` differentiates or maps functions of tensors; the program of a rank also
sends, draws and counts. ``torch.compile`` keeps the module as it is, and works.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from shardwright.runtime.errors import UsageError


def refuse_tracers(owner: str, arguments: Iterable[Any]) -> None:
    """Raise :class:`UsageError` if a call of the module ``owner`` is made by a tracer.
    ``arguments``: those of the call.
    """
    if torch.compiler.is_dynamo_compiling():
        # The compiler reads these lines instead of running them. It knows no errors of ours; what
        # it cannot go past it shows with the reason.
        if torch.compiler.is_exporting():
            torch._dynamo.graph_break(
                msg=f"the parallel module {owner} cannot be traced by torch.export; "
                "trace the original module"
            )
        return
    if torch.compiler.is_exporting():
        _refuse_tracer(owner, "torch.export")
    fx = sys.modules.get("torch.fx")
    if fx is not None:
        for argument in arguments:
            if isinstance(argument, fx.Proxy):
                _refuse_tracer(owner, "torch.fx")
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        _refuse_tracer(owner, "make_fx")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UsageError(
            f"the parallel module {owner} cannot be called under a transform of torch.func",
            why="grad, jvp, vmap and their kin take functions of tensors; this module also "
            "communicates, draws random numbers and adds up gradients",
            hint="transform the original module; for gradients call backward() on the loss",
        )


def refuse_onnx(owner: str) -> None:
    """Raise :class:`UsageError` if ``torch.onnx.export`` asks for the state of a module."""
    onnx = sys.modules.get("torch.onnx")
    if onnx is not None and onnx.is_in_onnx_export():
        _refuse_tracer(owner, "torch.onnx")


def _refuse_tracer(owner: str, tracer: str) -> NoReturn:
    raise UsageError(
        f"the parallel module {owner} cannot be traced by {tracer}",
        why="the trace would not have the checks, the random numbers and all of the "
        "communication of its program",
        hint="trace the original module; torch.compile takes the parallel one",
    )
