"""A short set of the sweep over the model folders of transformers; the whole of it is
``families.py``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

_SPEC = importlib.util.spec_from_file_location("families", Path(__file__).with_name("families.py"))
assert _SPEC is not None and _SPEC.loader is not None
families: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(families)

FOLDERS = ("llama", "qwen2_vl", "mistral3", "siglip2", "idefics3")
"""A language model, and models that read values in different ways: grids and kinds of tokens,
slices by the sizes of images, shapes of images of unequal size, images that are padding.
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_equals_one_device(folder: str) -> None:
    (*_, row) = families.try_folder(folder, None)
    assert families.outcome_of(row) == "equal", families.summary(row)
    assert max(row[policy]["flops_share"] for policy in families.POLICIES) < families.UNSPLIT


def test_gradients_of_grouped_convolutions_count_as_much_as_the_convolution() -> None:
    convolution = nn.Conv2d(8, 16, 3, groups=4)
    with families._Counting() as counting:
        convolution(torch.ones(2, 8, 5, 5, requires_grad=True)).sum().backward()
    # Outputs, times what each of them adds up; forward, and the gradients of input and weight.
    assert counting.flops == 3 * 2 * (2 * 16 * 3 * 3) * (2 * 3 * 3)


def test_attention_counts() -> None:
    q, k, v = (torch.rand(2, 3, 8, 16).double().requires_grad_() for _ in range(3))
    with families._Counting() as counting:
        nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    # Two products forward; five backward, as it computes the scores again.
    assert counting.flops == 7 * 2 * (2 * 3 * 8 * 8 * 16)


@pytest.mark.slow
def test_channels_of_tiny_convolutions_are_split() -> None:
    (*_, row) = families.try_folder("regnet", None)
    assert row["tp"]["flops_share"] < 0.6


ROWS = [
    {
        "folder": "a",
        "model": "A",
        "tp": {
            "outcome": "equal",
            "flops_share": 0.5,
            "compile_s": 1.25,
            "constants": ["inputs.grid"],
        },
    },
    {
        "folder": "b",
        "model": "B",
        "tp": {
            "outcome": "refused",
            "text": "TraceError: no | way\n  where: /x/b.py:3 in (root) (B)",
        },
    },
    {"folder": "c", "not_run": "ImportError: timm"},
]


def test_the_page() -> None:
    rows = {row["folder"]: dict(row) for row in ROWS}
    for row in rows.values():
        if "tp" in row:
            row["data"] = row["tp"]
    outcomes = [families.outcome_of(row) for row in rows.values()]
    assert outcomes == ["equal", "refused", "not run"]
    text = families.page(rows, families.Counter(outcomes), 2)
    assert "| a | A | 0.50 | 0.50 | 1.2 s | grid |" in text
    assert "| b | B | no / way (b.py:3) |" in text
    assert "- 0 of 1 under `tp`: -" in text
    rows["a"]["data"] = rows["a"]["data"] | {"flops_share": 0.9}
    assert "Of the 2 that one device runs, 50% are equal." in text
    assert text.endswith("| c | ImportError: timm |\n")
    hollow = families.page(rows, families.Counter(outcomes), 2)
    assert "- 1 of 1 under `data`: a" in hollow and "| 0.50 | **0.90** |" in hollow
    # Rows that are not made anew stay as they are.
    for page in (text, hollow):
        assert families.page(families.rows_of_page(page), families.Counter(outcomes), 2) == page


def test_what_one_device_cannot_train_is_no_folder_that_runs() -> None:
    with pytest.raises(ValueError, match="has no gradients"):
        families._with_loss(
            nn.Linear(2, 2).requires_grad_(False), {"input": families.torch.ones(1, 2)}
        )
