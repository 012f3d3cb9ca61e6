"""Caches of keys and values that programs take and return in pieces.

    [batch, heads, length, width]     -> [batch/dp, heads/tp, length, width]

Each rank holds its own heads, of its own part of the batch, from one call to the next. The length
grows with every token, and is never cut: pieces would move.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.strategy import layouts
from shardwright.compiler.passes.decide import plan_of
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.check import input_paths
from shardwright.compiler.plan.outputs import cut_wish, output_wishes, wished_layout
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.files.cache import read_plan
from shardwright.frontend.huggingface.calls import CACHE
from shardwright.policies.policy import Policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout

CUT_DIMS = (0, 1)
"""The dims of keys and values that may be cut: batch and heads."""


def has_known_cache(model: Any) -> bool:
    """Whether ``generate`` may keep a cache: one that grows with every token, and holds nothing but
    keys and values. Windows, states of recurrences and the like count tokens in plain numbers, for
    each of which another program would be compiled.
    """
    from transformers import cache_utils

    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is None or not supports():
        return False
    config = model.config.get_text_config(decoder=True)
    made = cache_utils.DynamicCache(config=config)
    return all(type(layer) is cache_utils.DynamicLayer for layer in made.layers)


def with_cache(policy: Policy, known: Mapping[str, str]) -> Policy:
    """``policy``, whose plans take and return keys and values in pieces. ``known``: how an earlier
    program has cut them, as wishes for outputs by path.
    """

    def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        plan = plan_of(policy.apply(graph, config), policy.name)
        asked = output_wishes(graph, config)
        wishes: dict[str, str] = {}
        for path, value in _kept(graph):
            if asked.get(path) != "eval":
                natural = cut_wish(_made(graph, plan, value), CUT_DIMS)
                # Every program must take and return keys and values as the first one does: the
                # cache of one call is the input of the next.
                wishes[path] = known.get(path, natural)
        inputs = {}
        for path, value in input_paths(graph).items():
            if _is_kept(path, value):
                wish = known.get(path) or wishes.get(path, "whole")
                inputs[value.name] = wished_layout(wish, value.shape, Layout(()))
        return replace(plan, inputs=inputs, outputs={**plan.outputs, **wishes})

    text = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    return replace(policy, name=f"{policy.name}, caches as {text}", apply=apply)


def known_cuts(directory: Path) -> dict[str, str]:
    """How the program in a folder returns keys and values: wishes by path."""
    outputs = read_plan(directory).outputs
    return {
        path: wish
        for path, wish in outputs.items()
        if isinstance(wish, str) and wish.startswith("cut") and path.startswith(f"{CACHE}.")
    }


def renew(cache: Any, result: Any) -> Any:
    """``result``, with the caller's own cache in it, which now holds what the call has added. So
    does it in a model of one device, which changes it in place.
    """
    if isinstance(result, tuple):
        for leaf in result:
            if type(leaf) is type(cache):
                cache.__dict__.update(leaf.__dict__)
        return tuple(cache if type(leaf) is type(cache) else leaf for leaf in result)
    made = getattr(result, CACHE, None)
    if type(made) is type(cache):
        cache.__dict__.update(made.__dict__)
        # The caller's object, not a new one: code may hold on to the cache that it has passed.
        setattr(result, CACHE, cache)
    return result


def _kept(graph: IRGraph) -> Iterator[tuple[str, IRValue]]:
    for path, value in graph.output.leaves():
        if isinstance(value, IRValue) and _is_kept(path, value):
            yield path, value


def _is_kept(path: str, value: IRValue) -> bool:
    return path.startswith(f"{CACHE}.") and value.ndim == 4


def _made(graph: IRGraph, plan: Plan, value: IRValue) -> Layout:
    """The layout in which its operator makes a value; whole for one that no operator makes."""
    for op in graph.ops:
        for result, index in zip(op.results, range(len(op.results)), strict=True):
            if result.name == value.name and op.rule is not None:
                return layouts(op.rule, plan.assignment(op.name), plan.mesh)[1][index]
    return Layout.whole(value.shape)
