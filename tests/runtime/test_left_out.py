"""What stands for an output that a training step leaves out: it can be passed on, and every use
says how to get it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from shardwright.runtime import structure
from shardwright.runtime.errors import UsageError
from shardwright.runtime.left_out import LeftOut

LOGITS = LeftOut("Model", "logits")


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.shape,
        lambda x: x.argmax(-1),
        lambda x: x[..., 0],
        lambda x: x + 1,
        lambda x: 2 * x,
        lambda x: -x,
        lambda x: x == 1,
        lambda x: len(x),
        lambda x: list(x),
        lambda x: float(x),
        lambda x: bool(x),
        lambda x: torch.argmax(x, -1),
        lambda x: torch.stack([torch.ones(1), x]),
        lambda x: torch.ones(1) + x,
        lambda x: torch.nn.functional.cross_entropy(input=x, target=torch.ones(1)),
    ],
)
def test_a_use_says_how_to_get_it(use: Any) -> None:
    with pytest.raises(UsageError) as caught:
        use(LOGITS)
    assert str(caught.value) == (
        "Model leaves the output 'logits' out of training steps\n"
        "  why:   it is trained with its loss, and every step would send the other outputs "
        "to all ranks\n"
        "  try:   model.eval() or torch.no_grad() around the call gives all outputs; "
        'ComputeConfig(outputs="all") gives them in training too, outputs={"logits": '
        '"whole"} this one'
    )


def test_what_is_no_use_is_let_pass() -> None:
    result = CausalLMOutput(loss=torch.ones(()), logits=LOGITS)
    assert repr(LOGITS) == "LeftOut('logits')" and LOGITS is not None and {LOGITS}
    assert (
        result.logits is LOGITS
        and result["logits"] is LOGITS
        and result[1] is LOGITS
        and result.keys() == {"loss", "logits"}
    )
    assert structure.flatten(result)["logits"] is LOGITS
    assert structure.map_leaves(result, lambda path, leaf: leaf).logits is LOGITS
    assert copy.copy(result)["loss"] is result.loss
    assert not hasattr(LOGITS, "__array_interface__")
    assert not hasattr(LOGITS, "name") and getattr(LOGITS, "shape", None) is None
