"""Trace a module into a graph: the unmodified ``forward`` runs on fake tensors, under a function
mode that records it.
"""

from shardwright.compiler.trace.entry import trace

__all__ = ["trace"]
