"""Rules of library functions that loop over time steps: each is proved, and a model with one
compiles as fast as it is long.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from precision import float64_casts
from torch import Tensor, nn

from shardwright.compiler.ops.known_loops import KNOWN_LOOPS, as_operator, known_loop
from shardwright.compiler.ops.prover import prove
from shardwright.compiler.ops.registry import OPS
from shardwright.compiler.trace import trace

HOMES = {
    "mamba_selective_scan": "mamba",
    "torch_chunk_gated_delta_rule": "qwen3_next",
    "torch_recurrent_gated_delta_rule": "qwen3_next",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mlstm_chunkwise_recurrent_fw_C": "xlstm",
    "rwkv_linear_attention": "rwkv",
    "RecurrentGemmaRglru._rnn_scan": "recurrent_gemma",
}
BATCH, STEPS, HEADS, KEY, VALUE = 4, 5, 3, 2, 6


def draw(*shape: int) -> Tensor:
    return (
        torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
        + 0.1
    )


def scanned(**options: Any) -> dict[str, Any]:
    x, b = draw(BATCH, VALUE, STEPS), draw(BATCH, KEY, STEPS)
    arguments = {
        "hidden_states": x,
        "dt": draw(BATCH, VALUE, STEPS),
        "A": -draw(VALUE, KEY),
        "B": b,
        "C": draw(*b.shape),
    }
    return {**arguments, **options}


def ruled(value_heads: int = HEADS, decays: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
    keys, values = (BATCH, STEPS, HEADS, KEY), (BATCH, STEPS, value_heads, VALUE)
    arguments = {
        "query": draw(*keys),
        "key": draw(*keys),
        "value": draw(*values),
        "g": -draw(*values[:3], *decays),
    }
    return {**arguments, "beta": draw(*values[:3]), **options}


def attended(**options: Any) -> dict[str, Any]:
    key = (BATCH, STEPS, VALUE)
    return {
        "time_decay": draw(VALUE),
        "time_first": draw(VALUE),
        "key": draw(*key),
        "value": draw(*key),
        **options,
    }


def recurred(**options: Any) -> dict[str, Any]:
    x = (BATCH, STEPS, VALUE)
    reset = torch.zeros(BATCH, STEPS, 1, dtype=torch.bool)
    return {
        "self": None,
        "hidden_states": draw(*x),
        "recurrent_gate": draw(*x),
        "reset": reset,
        "recurrent_states": None,
        **options,
    }


def chunked(**options: Any) -> dict[str, Any]:
    """Two chunks of three steps."""
    keys, gates = (BATCH, HEADS, 6, KEY), (BATCH, HEADS, 2, 3)
    sizes = {"chunk_size": 3, "num_chunks": 2}
    return {
        "matK": draw(*keys),
        "matV": draw(*keys[:3], VALUE),
        "vecB": -draw(*gates),
        "vecI": draw(*gates),
        **sizes,
        **options,
    }


FIRST = {
    "matC_initial": draw(BATCH, HEADS, KEY, VALUE),
    "vecN_initial": draw(BATCH, HEADS, KEY),
    "scaMinter_initial": draw(BATCH, HEADS, 1),
}
STATE = {"initial_state": draw(BATCH, HEADS, KEY, VALUE), "output_final_state": True}
GATED = {
    "D": draw(VALUE),
    "z": draw(BATCH, VALUE, STEPS),
    "delta_bias": draw(VALUE),
    "delta_softplus": True,
}
CALLS: dict[str, list[dict[str, Any]]] = {
    "mamba_selective_scan": [scanned(), scanned(**GATED, return_last_state=True)],
    "torch_chunk_gated_delta_rule": [
        ruled(chunk_size=2),
        ruled(2 * HEADS, use_qk_l2norm_in_kernel=True),
        ruled(**STATE),
    ],
    "torch_recurrent_gated_delta_rule": [ruled(), ruled(2 * HEADS), ruled(**STATE)],
    "chunk_kimi_delta_attention": [
        ruled(decays=(KEY,), chunk_size=2),
        ruled(decays=(KEY,), chunk_size=4, **STATE),
    ],
    "mlstm_chunkwise_recurrent_fw_C": [chunked(), chunked(**FIRST)],
    "rwkv_linear_attention": [attended(), attended(return_state=True)],
    "RecurrentGemmaRglru._rnn_scan": [recurred(), recurred(recurrent_states=draw(BATCH, VALUE))],
}


def griffin() -> nn.Module:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "lru_width": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    return transformers.RecurrentGemmaModel(
        transformers.RecurrentGemmaConfig(**sizes, intermediate_size=8, pad_token_id=0)
    )


def library_function(path: str, home: str) -> Any:
    found = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    for part in path.split("."):
        found = getattr(found, part)
    return found


def operator_of(function: Callable[..., Any]) -> Any:
    """What the registry knows of a library function after it was met."""
    loop = known_loop(function)
    assert loop is not None
    as_operator(function, loop)
    return OPS[f"{function.__module__}.{function.__qualname__}"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", KNOWN_LOOPS)
def test_rules_are_proved(path: str) -> None:
    function = library_function(path, HOMES[path])
    # The functions compute in float32, some by a default of theirs.
    models = [griffin()] if path.startswith("RecurrentGemma") else []
    for call in CALLS[path]:
        with float64_casts(*models):
            report = prove(operator_of(function), (), call, num_ranks=(2,))
        splits = {trial.name for trial in report.trials if trial.name.startswith("split")}
        assert report.ok and len(splits) >= 2, str(report)


def mamba(num_tokens: int) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.MambaConfig(
        vocab_size=32, hidden_size=12, state_size=4, num_hidden_layers=2
    )
    with torch.device("meta"):
        model = transformers.MambaForCausalLM(config)
    return model, {"input_ids": torch.zeros(2, num_tokens, dtype=torch.int64)}


@pytest.mark.filterwarnings("ignore")
def test_graph_does_not_grow_with_the_sequence() -> None:
    """One operator a layer, at the line and under the name that the model gives it."""
    short, long = (trace(*mamba(num_tokens)) for num_tokens in (8, 4096))
    assert len(short.ops) == len(long.ops)
    scans = [op for op in long.ops if op.target.endswith("mamba_selective_scan")]
    assert [op.results[0].shape for op in scans] == [(2, 24, 4096)] * 2
    assert scans[0].results[0].name == "backbone_layers_0_mixer_scan_result"
    assert "modeling_mamba.py" in str(scans[0].source)


_TINY: dict[str, Any] = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2}
_ATTENTION: dict[str, Any] = {
    **_TINY, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16,
    "attn_layer_period": 2, "attn_layer_offset": 1,
}  # fmt: skip
_MAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 2, "use_mamba_kernels": False}
_HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Jamba": {**_ATTENTION, **_MAMBA, "num_experts": 2, "num_experts_per_tok": 1},
    "Zamba": {**_ATTENTION, **_MAMBA, **_HYBRID, "n_mamba_heads": 2},
    "Rwkv": {**_TINY, "attention_hidden_size": 16, "context_length": 4096},
    "RecurrentGemma": {
        **_TINY, "num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 16,
        "intermediate_size": 16, "attention_window_size": 32,
        "block_types": ("recurrent", "attention"),
    },
}  # fmt: skip
"""Families of transformers with scans, beside Mamba, and settings that make them tiny."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    ["Jamba", pytest.param("Zamba", marks=pytest.mark.slow), "Rwkv", "RecurrentGemma"],
)
def test_graphs_of_families_do_not_grow_with_the_sequence(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    graphs = []
    for num_tokens in (64, 2048):
        ids = torch.zeros(2, num_tokens, dtype=torch.int64)
        graphs.append(trace(model, {"input_ids": ids, "labels": ids, "use_cache": False}))
    targets = [[op.target for op in graph.ops] for graph in graphs]
    assert targets[0] == targets[1]
    assert any(known.rpartition(".")[2] in target for known in HOMES for target in targets[0])


def test_library_is_left_as_it_was() -> None:
    before = library_function("mamba_selective_scan", "mamba")
    trace(*mamba(4))
    assert library_function("mamba_selective_scan", "mamba") is before


def of_library(function: Any) -> Any:
    function.__module__, function.__qualname__ = "transformers.models.mine", "rwkv_linear_attention"
    return function


def test_function_of_another_version_is_traced_through() -> None:
    def more(
        time_decay: Any,
        time_first: Any,
        key: Any,
        value: Any,
        mask: Any,
        state: Any = None,
        return_state: bool = False,
    ) -> None: ...
    def renamed(
        decay: Any,
        time_first: Any,
        key: Any,
        value: Any,
        state: Any = None,
        return_state: bool = False,
    ) -> None: ...
    def default(
        time_decay: Any,
        time_first: Any,
        key: Any,
        value: Any,
        state: Any = None,
        return_state: bool = True,
    ) -> None: ...
    def known(
        time_decay: Any,
        time_first: Any,
        key: Any,
        value: Any,
        state: Any = None,
        return_state: bool = False,
    ) -> None: ...

    assert [
        known_loop(of_library(function)) is not None for function in (more, renamed, default, known)
    ] == [False] * 3 + [True]
    known.__module__ = "my_project"
    assert known_loop(known) is None


class Recurrence(nn.Module):
    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.weight, self.num_steps = nn.Parameter(torch.ones(3)), num_steps

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in range(self.num_steps):
            state = F.dropout(state * self.weight, 0.1) + x[:, step]  # a loop with noise stays
        return state.sum()


def test_unrolled_loop_is_said() -> None:
    with pytest.warns(UserWarning, match="a loop in forward is unrolled") as caught:
        trace(Recurrence(128), {"x": torch.zeros(2, 128, 3)})
    text = str(next(w.message for w in caught if "unrolled" in str(w.message)))
    line = inspect.getsourcelines(Recurrence.forward)[1] + 3
    assert (
        f"test_known_loops.py:{line} runs" in text
        and "128 times in the model" in text
        and "register_op" in text
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(Recurrence(100), {"x": torch.zeros(2, 128, 3)})
