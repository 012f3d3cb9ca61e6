"""Where graphs of ``torch.compile`` end: in front of operators whose sizes follow from values."""

from __future__ import annotations

import torch


def leave_graph(what: str) -> None:
    """End a graph of torch's compiler, where one is made. ``what``: the reason, for users who asked
    for one whole graph. What the caller calls next is under ``_disable_dynamo``.
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(
            msg=f"{what}: a compiled module runs it between two graphs, so leave fullgraph=True out"
        )
