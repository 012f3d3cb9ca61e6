"""Rules of functions of well-known libraries that loop over time steps in Python.

Such a function is one operator of the graph. Traced through, it would be as many operators as the
sequence has steps, times a dozen: a Mamba of two layers and 2,048 tokens has 50,000. The loop
itself stays where it is, in the library, which may run a fused kernel in its place where one is
installed.

A function is known by its name and by its parameters; nothing is imported for this. One of another
version, with other parameters, is traced through. So is a call with packed rows.

Example: ``mamba_selective_scan`` of 4 sequences of 2,048 tokens, 64 channels and a state of 16 is

    b d l^, b d l^, d n^, b n^ l^, b n^ l^, d, b d l^, d -> b d l^

so the batch and the channels may be split, and the sequence stays whole, as one step needs the one
before it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.compiler.ops import registry
from shardwright.compiler.ops.register import proved_by_tests, register_op
from shardwright.runtime.structure import tensors_of


@dataclass(frozen=True)
class KnownLoop:
    """A function of a library, and its rule.

    ``parameters``: those that the rule speaks of, with their defaults; the function may have
    ``**kwargs`` beside them.
    ``annotation``: from the arguments, ``None`` for tensors that are not given, the annotation of
    ``register_op``.
    ``results``: from the arguments, empty tensors in the structure that the function returns.
    """

    parameters: str
    annotation: Callable[..., str]
    results: Callable[..., Any]

    @property
    def signature(self) -> inspect.Signature:
        """The parameters as Python reads them."""
        made: dict[str, Any] = {}
        exec(f"def function({self.parameters}): pass", made)  # the text is a literal of this file
        return inspect.signature(made["function"])


def _selective_scan(
    x: Any, dt: Any, a: Any, b: Any, c: Any, skip: Any, gate: Any, bias: Any, *options: Any
) -> str:
    terms = [
        "b d l^",
        "b d l^",
        "d n^",
        "b n^ l^",
        "b n^ l^",
        _if(skip, "d"),
        _if(gate, "b d l^"),
        _if(bias, "d"),
    ]
    # Whether the last state is returned as well.
    return_last_state = options[1]
    return f"{', '.join(terms)} -> b d l^{', b d n^' if return_last_state else ''}"


def _selective_scan_results(
    hidden_states: Any, A: Any, return_last_state: bool = False, **others: Any
) -> Any:
    out = torch.empty_like(hidden_states)
    return (
        (out, hidden_states.new_empty((*hidden_states.shape[:2], A.shape[1])))
        if return_last_state
        else out
    )


def _delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, *others: Any, decays_by_key: bool = False
) -> str:
    """Queries and keys of ``g`` heads, each of which serves ``r`` heads of values; a state of ``k x
    v`` per head of values.
    """
    initial_state, output_final_state = others[-3], others[-2]
    grouped = query.shape[2] != value.shape[2]
    heads = f"(g={query.shape[2]} r)" if grouped else "g"
    decay = f"b l^ {heads} k^" if decays_by_key else f"b l^ {heads}"
    terms = ["b l^ g k^", "b l^ g k^", f"b l^ {heads} v", decay, f"b l^ {heads}"]
    terms += ["?"] * (len(others) - 3) + [_if(initial_state, f"b {heads} k^ v")]
    return (
        f"{', '.join(terms)} -> b l^ {heads} v{f', b {heads} k^ v' if output_final_state else ''}"
    )


def _delta_rule_results(
    query: Any, key: Any, value: Any, output_final_state: bool = False, **others: Any
) -> Any:
    state = (value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    last = torch.empty(state, dtype=torch.float32) if output_final_state else None
    return torch.empty_like(value, dtype=query.dtype), last


def _linear_attention(
    time_decay: Any, time_first: Any, key: Any, value: Any, state: Any, return_state: bool
) -> str:
    states = ", b h, b h, b h" if return_state else ""
    return f"h, h, b l^ h, b l^ h -> b l^ h{states}"


def _linear_attention_results(key: Any, return_state: bool = False, **others: Any) -> Any:
    states = [torch.empty_like(key[:, 0], dtype=torch.float32) for _ in range(3)]
    return torch.empty_like(key), states if return_state else None


def _rnn_scan(module: Any, x: Any, gate: Any, reset: Any, states: Any) -> str:
    # The positions that reset the state may be one row for the whole batch.
    rows = "1" if reset.shape[0] == 1 else "b"
    return f"?, b l^ d, b l^ d, {rows} l^ 1, {_if(states, 'b d')} -> b l^ d, b d"


def _rnn_scan_results(hidden_states: Any, **others: Any) -> Any:
    return torch.empty_like(hidden_states), torch.empty_like(
        hidden_states[:, 0], dtype=torch.float32
    )


def _mlstm_states(key: Any, value: Any, decays: Any, gates: Any, *others: Any) -> str:
    """States in front of each chunk, and the last one, laid end to end: ``c k`` matrices of ``k x
    v``, vectors of ``k``, numbers.
    """
    states, vectors, numbers, first, first_vector, first_number = others[:6]
    terms = ["b h s^ k^", "b h s^ v^", "b h c^ l^", "b h c^ l^"]
    terms += [_if(states, "b h x^ v^"), _if(vectors, "b h x^"), _if(numbers, "b h y^")]
    terms += [_if(first, "b h k^ v^"), _if(first_vector, "b h k^"), _if(first_number, "b h 1")]
    return f"{', '.join(terms)} -> b h x^ v^, b h x^, b h y^"


def _mlstm_states_results(matK: Any, matV: Any, num_chunks: int = 1, **others: Any) -> Any:
    heads, keys, values = matK.shape[:2], matK.shape[3], matV.shape[3]
    stored = num_chunks + 1
    return (
        matK.new_empty((*heads, stored * keys, values)),
        matK.new_empty((*heads, stored * keys)),
        matK.new_empty((*heads, stored)),
    )


def _if(tensor: Any, term: str) -> str:
    return "?" if tensor is None else term


_STEPS = "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False"
_DELTA = "query, key, value, g, beta"
_DECAYS_BY_KEY = functools.partial(_delta_rule, decays_by_key=True)

KNOWN_LOOPS: Mapping[str, KnownLoop] = {
    "mamba_selective_scan": KnownLoop(
        "hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, "
        "return_last_state=False, "
        "use_mambapy=False, use_associative_scan=False",
        _selective_scan,
        _selective_scan_results,
    ),
    "torch_chunk_gated_delta_rule": KnownLoop(
        f"{_DELTA}, chunk_size=64, {_STEPS}", _delta_rule, _delta_rule_results
    ),
    "torch_recurrent_gated_delta_rule": KnownLoop(
        f"{_DELTA}, {_STEPS}", _delta_rule, _delta_rule_results
    ),
    "chunk_kimi_delta_attention": KnownLoop(
        f"{_DELTA}, chunk_size=64, {_STEPS}", _DECAYS_BY_KEY, _delta_rule_results
    ),
    "mlstm_chunkwise_recurrent_fw_C": KnownLoop(
        "matK, matV, vecB, vecI, matC_states=None, vecN_states=None, scaMinter_states=None, "
        "matC_initial=None, vecN_initial=None, scaMinter_initial=None, qk_scale=None, "
        "chunk_size=64, num_chunks=1",
        _mlstm_states,
        _mlstm_states_results,
    ),
    "rwkv_linear_attention": KnownLoop(
        "time_decay, time_first, key, value, state=None, return_state=False",
        _linear_attention,
        _linear_attention_results,
    ),
    "RecurrentGemmaRglru._rnn_scan": KnownLoop(
        "self, hidden_states, recurrent_gate, reset, recurrent_states", _rnn_scan, _rnn_scan_results
    ),
}
"""The known loops by the qualified name of the function in its file, which is one of
``transformers.models``.
"""

LIBRARY = "transformers.models."
_PACKED = ("cu_seqlens", "seq_idx")
"""Arguments that say where the documents of a packed row begin. Such a call is traced through.
Others that the rules do not speak of are the library's own (``position_ids``, ``use_cache``),
handed on to every function and read by none of these.
"""


def known_loop(function: Any) -> KnownLoop | None:
    """The entry of a function, if its file is one of the library's and it has the parameters that
    the rule is for.
    """
    loop = KNOWN_LOOPS.get(getattr(function, "__qualname__", ""))
    if loop is None or not function.__module__.startswith(LIBRARY):
        return None
    parameters = inspect.signature(function).parameters.values()
    # The library may add options; what the rule speaks of must be there, with the same defaults.
    named = [
        p
        for p in parameters
        if p.kind is not inspect.Parameter.VAR_KEYWORD and not _is_dtype(p.default)
    ]
    expected = list(loop.signature.parameters.values())
    alike = [p.name for p in named] == [p.name for p in expected] and all(
        ours.default in (theirs.default, inspect.Parameter.empty)
        or theirs.default is inspect.Parameter.empty
        for ours, theirs in zip(expected, named, strict=True)
    )
    return loop if alike else None


def _is_dtype(default: Any) -> bool:
    return isinstance(default, torch.dtype)


@functools.cache
def as_operator(function: Callable[..., Any], loop: KnownLoop) -> Callable[..., Any]:
    """The function as something that a trace records as one operator; it takes what the function
    takes.

    A function that a user has registered keeps the user's rule.
    """
    if registry.find(function) is not None:
        return function
    signature = loop.signature

    @functools.wraps(function)
    def flat(**arguments: Any) -> Any:
        return tensors_of(function(**arguments))

    def empty(**arguments: Any) -> Any:
        return tensors_of(loop.results(**arguments))

    def write(texts: Mapping[str, str]) -> str:
        arguments = ", ".join(f"{name}={text}" for name, text in texts.items())
        return f"tensors_of({path}({arguments}))"

    path = f"{function.__module__}.{function.__qualname__}"
    flat.__signature__ = signature  # type: ignore[attr-defined]
    imports = (
        f"import {function.__module__}",
        "from shardwright.runtime.structure import tensors_of",
    )
    # Some compute sizes as -1, which is ambiguous where a rank has nothing.
    operator = register_op(
        loop.annotation, path, emit=write, imports=imports, fake=empty, nonempty=True
    )(flat)
    proved_by_tests(path)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) is not None for name in _PACKED):
            return function(*args, **kwargs)
        given = {key: value for key, value in kwargs.items() if key in signature.parameters}
        arguments = signature.bind(*args, **given).arguments
        if "self" in arguments:  # a method that reads nothing of its object
            arguments["self"] = None
        with torch._C.DisableTorchFunction():  # only the structure is asked for: nothing to record
            structure = loop.results(**arguments)
        return _structured(structure, operator(**arguments))

    return called


def _structured(structure: Any, result: Any) -> Any:
    """The tensors of ``result``, one or several, in the place of those of ``structure``."""
    tensors = iter(result if isinstance(result, tuple) else (result,))

    def filled(node: Any) -> Any:
        if isinstance(node, tuple | list):
            return type(node)(map(filled, node))
        return None if node is None else next(tensors)

    return filled(structure)
