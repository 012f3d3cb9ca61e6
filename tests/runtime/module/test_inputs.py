"""The table of arguments a module was compiled for."""

import numpy as np
import pytest
import torch

from shardwright.runtime.errors import InputError
from shardwright.runtime.module import inputs
from shardwright.runtime.module.inputs import ABSENT, InputTable

TABLE = InputTable(
    "Net",
    {
        "ids": ("[batch, 4]", torch.int64),
        "data.mask": ("[batch, seq]", torch.bool),
        "data.pair.0": ("[seq]", torch.float32),
        "scalar": ("[]", torch.float32),
        "use_cache": True,
        "names": None,
    },
)


def arguments(**changes):
    given = {
        "ids": torch.zeros(2, 4, dtype=torch.int64),
        "data": {"mask": torch.zeros(2, 3, dtype=torch.bool), "pair": (torch.zeros(3),)},
        "scalar": torch.tensor(1.0),
        "use_cache": True,
        "names": None,
    }
    return given | changes


def refusal(absent=None, **changes):
    with pytest.raises(InputError) as error:
        TABLE.check(arguments(**changes), absent or {})
    return str(error.value)


def test_what_fits():
    tensors = TABLE.check(arguments(), {"labels": ABSENT})
    assert list(tensors) == ["ids", "data.mask", "data.pair.0", "scalar"]
    larger = {"mask": torch.zeros(5, 9, dtype=torch.bool), "pair": (torch.zeros(9),)}
    TABLE.check(arguments(ids=torch.zeros(5, 4, dtype=torch.int64), data=larger), {})


def test_leaves_may_be_given_by_path():
    given = arguments()
    data = given.pop("data")
    assert list(
        TABLE.check(given | {"data.mask": data["mask"], "data.pair.0": data["pair"][0]}, {})
    ) == [
        "ids",
        "data.mask",
        "data.pair.0",
        "scalar",
    ]


def test_tensors_by_themselves_are_not_looked_into(monkeypatch):
    monkeypatch.setattr(inputs, "flatten", lambda _: pytest.fail("looked for leaves"))
    table = InputTable("Layer", {"x": ("[batch, 4]", torch.float32)})
    assert list(table.check({"x": torch.zeros(5, 4)}, {})) == ["x"]


def test_absent_arguments():
    assert refusal({"labels": None}) == (
        "Net.forward was compiled without the argument 'labels'\n"
        "  why:   the dummy arguments did not have it, so the program ignores it; the call "
        "passes None\n"
        "  try:   leave out labels, or compile again with 'labels' among the dummy arguments"
    )
    assert "the call passes a tensor float32[2]" in refusal({"labels": torch.zeros(2)})


def test_missing_arguments():
    assert refusal(ids=ABSENT) == (
        "Net.forward: argument 'ids' is missing\n  why:   it was compiled with a tensor "
        "int64[batch, 4]\n  try:   pass ids"
    )
    assert "'data.pair.0' is missing" in refusal(data={"mask": torch.zeros(2, 3, dtype=torch.bool)})
    assert "'use_cache' is missing" in refusal(use_cache=ABSENT)


def test_dtypes():
    assert refusal(ids=torch.zeros(2, 4)) == (
        "Net.forward: argument 'ids' has dtype float32, but was compiled for int64\n"
        "  try:   pass ids.to(torch.int64), or compile again with this dtype"
    )


def test_static_sizes():
    assert refusal(ids=torch.zeros(2, 5, dtype=torch.int64)) == (
        "Net.forward: argument 'ids' has shape [2, 5], but was compiled for int64[batch, 4]\n"
        "  why:   dim 1 is 5, not 4\n"
        "  try:   pass the compiled shape, or compile again and name the dims that vary in "
        "ComputeConfig.dynamic_dims"
    )
    assert "it has 1 dims, not 2" in refusal(ids=torch.zeros(4, dtype=torch.int64))
    assert "it has 1 dims, not 0" in refusal(scalar=torch.zeros(1))


def test_sizes_with_a_name_agree():
    text = refusal(data={"mask": torch.zeros(2, 3, dtype=torch.bool), "pair": (torch.zeros(5),)})
    assert "dim 0 is 5, but seq is 3 in dim 1 of 'data.mask'" in text


def test_what_is_no_tensor():
    assert refusal(ids=[1, 2]) == (
        "Net.forward: argument 'ids' is a list, but was compiled as int64[batch, 4]\n  try:  "
        " pass a tensor"
    )
    assert refusal(use_cache=(True,)) == (
        "Net.forward: argument 'use_cache' is a tuple, but was compiled as True\n  try:   pass True"
    )
    assert "argument 'ids' is a ndarray, but was compiled as a tensor int64[batch, 4]" in refusal(
        ids=np.zeros((2, 4))
    )
    assert "argument 'scalar' is 1.5, but was compiled as a tensor float32[]" in refusal(scalar=1.5)


def test_literals_are_fixed():
    assert refusal(use_cache=False) == (
        "Net.forward: argument 'use_cache' is False, but was compiled as True\n"
        "  why:   a value that is not a tensor is fixed when the module is compiled\n"
        "  try:   pass True, or compile again with the value you need"
    )
    assert "'use_cache' is 1, but was compiled as True" in refusal(use_cache=1)
    assert "'names' is a tensor float32[1], but was compiled as None" in refusal(
        names=torch.zeros(1)
    )


def test_numbers_of_numpy_are_numbers():
    table = InputTable("Net", {"size": 3, "rate": 0.5})
    table.check({"size": np.int64(3), "rate": np.float64(0.5)}, {})
    with pytest.raises(InputError, match=r"'size' is np.int64\(4\), but was compiled as 3"):
        table.check({"size": np.int64(4), "rate": 0.5}, {})


def test_tensors_the_program_does_not_know():
    data = {"mask": torch.zeros(2, 3, dtype=torch.bool), "pair": (torch.zeros(3), torch.zeros(3))}
    assert refusal(data=data) == (
        "Net.forward: argument 'data.pair.1' is a tensor float32[3], but was compiled without it\n"
        "  why:   the dummy arguments had ids, data.mask, data.pair.0, scalar, use_cache, names\n"
        "  try:   leave it out, or compile again with it among the dummy arguments"
    )
