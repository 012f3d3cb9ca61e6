"""Values as JSON come back as they were; what has no form is refused by name."""

import json
import math
from collections import Counter, OrderedDict, deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwright.runtime.checkpoint.json_values import decode, encode
from shardwright.runtime.errors import CheckpointError

TEXT = st.text('a1 _."\\\n\0é中😀', max_size=4)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXT | st.integers(), inner)
    ),
    max_leaves=12,
)


def through_json(value):
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


@given(PLAIN)
def test_plain_values(value):
    result = through_json(value)
    assert result == value and repr(result) == repr(value)


def test_other_containers():
    value = OrderedDict(
        a=Counter({3: 1, 9: 2}), b=deque([1, (2,)]), c={"tuple": [1]}, d={1, 2}, e=torch.bfloat16
    )
    result = through_json(value)
    assert result == value and [type(item) for item in result.values()] == [
        type(item) for item in value.values()
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
def test_tensors(dtype, shape):
    value = (torch.randn(shape, dtype=torch.float64) * 10).to(dtype)
    result = through_json([value])[0]
    assert result.dtype == dtype and torch.equal(result, value)


def test_floats_that_json_does_not_have():
    result = through_json([math.inf, -math.inf, math.nan, torch.tensor(math.nan)])
    assert (
        result[0] == math.inf
        and result[1] == -math.inf
        and math.isnan(result[2])
        and result[3].isnan()
    )


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            [2],
        ),
    ],
)
def test_schedulers(scheduler):
    made = scheduler(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))
    state = made.state_dict()
    made.load_state_dict(through_json(state))
    assert made.state_dict() == state


def test_what_cannot_be_saved_is_named():
    with pytest.raises(CheckpointError) as error:
        encode({"a": [1, object()]}, "extra")
    assert str(error.value) == (
        "extra['a'][1] cannot be saved\n"
        "  why:   it is a object; checkpoints hold tensors and plain Python values, no "
        "pickled objects\n"
        "  try:   keep numbers, strings, lists, tuples, dicts or tensors there"
    )
