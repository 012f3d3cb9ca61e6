"""Traces do on the dummy arguments what the module does without a trace, where libraries ask
whether they are traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import plans
import pytest
import tiny_families
import torch
import torch.nn.functional as F
import transformers
from covers import spread
from torch import Tensor, nn
from tracing import same_as_eager, traced
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)

from shardwright.compiler.trace import entry, trace
from shardwright.runtime.errors import InputError, TraceError

CONFIG = transformers.LlamaConfig(
    hidden_size=8, num_attention_heads=2, num_key_value_heads=2, attn_implementation="sdpa"
)
ONES = torch.ones(2, 5, dtype=torch.long)
PADDED = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
X = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Attends(nn.Module):
    """Attention as transformers writes it. ``causal`` is its own opinion, which the mask that is
    built does not ask for.
    """

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.mix, self.causal = nn.Linear(8, 24).double(), causal

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = create_causal_mask(CONFIG, x, attention_mask, None)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and self.causal)
        return out.square().mean()


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8).double()

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        hidden, mask = self.mix(x), create_recurrent_attention_mask(CONFIG, x, attention_mask)
        return (
            (hidden if mask is None else (hidden * mask[:, :, None]).to(x.dtype))
            .cumsum(1)
            .square()
            .mean()
        )


class Slides(nn.Module):
    """Asks whether the mask is traced. The window is shorter than the sequence, so no value of the
    mask is read then.
    """

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        config = transformers.MistralConfig(
            hidden_size=8, num_attention_heads=2, sliding_window=2, attn_implementation="sdpa"
        )
        mask = create_sliding_window_causal_mask(config, x, attention_mask, None)
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, mask).square().mean()


class Counts(nn.Module):
    """Takes another way for ones, and says so nowhere."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        mask = create_recurrent_attention_mask(CONFIG, x, attention_mask)
        return x.sum() if mask is None else (2 * x * mask[:, :, None]).sum()


CASES: list[tuple[Callable[[], nn.Module], Tensor, list[str]]] = [
    (lambda: Attends(causal=True), ONES, []),
    (lambda: Attends(causal=True), PADDED, []),
    (lambda: Attends(causal=False), ONES, ["attention_mask"]),
    (lambda: Attends(causal=False), PADDED, ["attention_mask"]),
    (Recurs, ONES, []),
    (Recurs, PADDED, []),
    (Counts, ONES, ["attention_mask"]),
    (Counts, PADDED, ["attention_mask"]),
    (Slides, PADDED, []),
]


@pytest.mark.filterwarnings("ignore:forward reads the values of attention_mask")
@pytest.mark.parametrize(("made", "mask", "constants"), CASES)
def test_the_way_of_eager_is_traced(
    made: Callable[[], nn.Module], mask: Tensor, constants: list[str]
) -> None:
    module = made()
    graph = traced(module, {"x": X, "attention_mask": mask}, exact=False)
    assert [name for name, _ in graph.constant_inputs] == constants
    if not constants:  # it is right for all masks
        same_as_eager(
            graph, module, {"x": X, "attention_mask": PADDED if mask is ONES else ONES}, exact=False
        )


def test_another_mask_is_refused_in_words(tmp_path: Path) -> None:
    module, given = Attends(causal=False), {"x": X, "attention_mask": ONES}
    with pytest.warns(UserWarning, match="forward reads the values of attention_mask"):
        compiled = plans.compile_with(plans.traced(module, given), "data", 2)
    plans.write(tmp_path, compiled, module)
    torch.testing.assert_close(
        plans.run_once(tmp_path, compiled, given).loss, module(**given).detach()
    )
    with pytest.raises(
        InputError,
        match="argument 'attention_mask' has other values than the module was compiled for",
    ):
        plans.run_once(tmp_path, compiled, {**given, "attention_mask": PADDED})


def test_values_that_are_not_there_are_asked_for() -> None:
    given = {"x": X.to("meta"), "attention_mask": ONES.to("meta")}
    trace(Attends(causal=True), given)
    with pytest.raises(
        TraceError,
        match="depends on the values of attention_mask, which the dummy arguments do not have",
    ):
        trace(Attends(causal=False), given)


@pytest.mark.filterwarnings("ignore:forward reads the values of")
@pytest.mark.parametrize(
    "name", spread(["PaliGemmaForConditionalGeneration", "ColPaliForRetrieval"], 2, first=1)
)
def test_prefixes_are_attended_to_as_on_one_device(name: str) -> None:
    torch.manual_seed(0)
    model, given = tiny_families.working(getattr(transformers, name), mask=True, labels=True)
    given.pop("token_type_ids", None)
    graph = traced(model, given, exact=False)
    assert [name for name, _ in graph.constant_inputs] == ["attention_mask"]


def _padding_token() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model that looks at its tokens for nothing but a warning, if it is not traced."""
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, pad_token_id=0, use_cache=False
    )
    return transformers.GPT2Model(config), {"input_ids": torch.zeros(2, 5, dtype=torch.long)}


@pytest.mark.parametrize(
    ("made", "runs"),
    [
        (lambda: (nn.Linear(8, 2).double(), {"input": X}), 1),
        (_padding_token, 2),  # in training and in eval mode: it has dropout
        (lambda: (Slides(), {"x": X, "attention_mask": PADDED}), 1),
        (lambda: (Attends(causal=True), {"x": X, "attention_mask": ONES}), 2),
    ],
    ids=["asks nothing", "only warns", "asks and reads nothing", "reads a mask"],
)
def test_one_trace_where_no_value_is_read(
    made: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
    runs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done, run_once = [], entry.run_once

    def counted(*args: object, **kwargs: object) -> object:
        done.append(kwargs["training"])
        return run_once(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(entry, "run_once", counted)
    module, given = made()
    trace(module, given)
    assert len(done) == runs


def test_a_model_warns_once_of_what_both_modes_do() -> None:
    class Warns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("too long", stacklevel=1)
            return F.dropout(x, 0.1, self.training)

    with pytest.warns(UserWarning) as said:
        trace(Warns(), {"x": X})
    assert [str(warning.message) for warning in said] == ["too long"]
