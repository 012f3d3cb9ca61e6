"""Numbers of NumPy, as schedules made with it have, are saved as Python's own."""

import numpy as np
import pytest

from shardwright.runtime.checkpoint.json_values import decode, encode


@pytest.mark.parametrize(
    "number", [np.float64(0.25), np.float32(0.25), np.int64(3), np.bool_(True), np.float64("inf")]
)
def test_a_number_of_numpy(number):
    found = decode(encode({"lr": number}, "options"))["lr"]
    assert found == number and type(found) in (bool, int, float)
