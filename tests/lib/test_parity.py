"""The parity bound fails where it should, and the reference run is one device's training."""

from __future__ import annotations

import math
from functools import partial

import parity
import pytest
import torch
import zoo
from parity import assert_close_tree, reference_run
from precision import float64_casts


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_bound_is_relative_to_each_tensor() -> None:
    reference = {"big": doubles(1e3, 1.0), "small": doubles(1.0)}
    assert_close_tree(
        {"big": doubles(1e3, 1.0 + 0.9e-7), "small": doubles(1.0 + 0.9e-10)}, reference
    )
    with pytest.raises(AssertionError, match="1 of 2 gradients out of the parity bound"):
        assert_close_tree(
            {"big": doubles(1e3, 1.0 + 1.1e-7), "small": doubles(1.0)}, reference, "gradients"
        )
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_close_tree({"big": doubles(1e3, 1.0), "small": doubles(1.0 + 1.1e-10)}, reference)


def test_tensors_near_zero_are_held_to_a_ten_thousandth_of_the_largest() -> None:
    reference = {"largest": doubles(1.0), "zero": doubles(0.0)}
    assert_close_tree({"largest": doubles(1.0), "zero": doubles(0.9e-14)}, reference)
    with pytest.raises(AssertionError, match="zero"):
        assert_close_tree({"largest": doubles(1.0), "zero": doubles(1.1e-14)}, reference)


def test_nothing_odd_passes() -> None:
    for ours, reference in [
        (math.nan, 1.0),
        (math.inf, 1.0),
        (1.0, math.inf),
        (-math.inf, math.inf),
        (math.nan, math.nan),
    ]:
        with pytest.raises(AssertionError):
            assert_close_tree(doubles(ours), doubles(reference))
    assert_close_tree(doubles(-math.inf, 1.0), doubles(-math.inf, 1.0))
    # An infinity in the reference must not widen the bound of the others.
    with pytest.raises(AssertionError):
        assert_close_tree(doubles(-math.inf, 1.1), doubles(-math.inf, 1.0))
    with pytest.raises(AssertionError):
        assert_close_tree({"ids": torch.tensor([10**12])}, {"ids": torch.tensor([10**12 + 1])})


def test_imaginary_parts_are_compared() -> None:
    reference = torch.complex(doubles(1.0), doubles(2.0))
    assert_close_tree(torch.complex(doubles(1.0), doubles(2.0 + 1e-11)), reference)
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_close_tree(torch.complex(doubles(1.0), doubles(2.0 + 1e-9)), reference)


def test_structure_is_compared() -> None:
    reference = {"a": doubles(1.0), "b": [doubles(1.0, 2.0)], "c": None}
    assert_close_tree({"a": doubles(1.0), "b": [doubles(1.0, 2.0)], "c": None}, reference)
    with pytest.raises(AssertionError) as error:
        assert_close_tree({"b": [doubles(1.0).float()], "c": doubles(1.0)}, reference)
    assert str(error.value) == (
        "the trees differ in structure\n"
        "  a: missing\n"
        "  b[0]: (1,) torch.float32, the reference has (2,) torch.float64\n"
        "  c: not in the reference"
    )


def test_the_table_shows_the_worst_first() -> None:
    reference = {"wte.weight": doubles(1.0, 2.0), "ln.bias": doubles(4.0)}
    with pytest.raises(AssertionError) as error:
        assert_close_tree(
            {"wte.weight": doubles(1.0, 2.5), "ln.bias": doubles(4.0)}, reference, "gradients"
        )
    assert str(error.value).splitlines() == [
        "1 of 2 gradients out of the parity bound, worst first",
        "  name                   shape   max|a-b|   max|ref|  error/allowed",
        "  wte.weight              (2,)   5.00e-01   2.00e+00        2.5e+09  <--",
        "  ln.bias                 (1,)   0.00e+00   4.00e+00              0",
    ]


def test_model_outputs_and_caches_are_walked() -> None:
    entry = zoo.get("gpt2-cache")
    with float64_casts():
        found = parity.tensors_of(entry.build()(**entry.inputs()))
    assert {
        "loss",
        "logits",
        "past_key_values.layers[0].keys",
        "past_key_values.layers[1].values",
    } <= found.keys()


def test_reference_run_is_training_on_the_sum_of_the_units_losses() -> None:
    entry = zoo.get("mlp")
    model, inputs = entry.build(), [entry.inputs(seed=1), entry.inputs(seed=2)]
    before = parity.clone(model.state_dict())
    reference = reference_run(model, inputs, steps=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    optimizer = parity.adamw(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        losses = [model(**unit)[0] for unit in inputs]
        sum(losses).backward()
        assert_close_tree(reference.losses[step], losses, "losses")
        if step == 0:
            assert_close_tree(
                reference.gradients,
                {name: p.grad for name, p in model.named_parameters()},
                "gradients",
            )
        optimizer.step()
    assert_close_tree(reference.parameters, dict(model.named_parameters()), "parameters")
    assert reference.outputs[1].keys() == {"[0]", "[1]"}


def test_the_mean_over_units_divides_gradients_and_not_losses() -> None:
    entry = zoo.get("mlp")
    inputs = [entry.inputs(seed=1), entry.inputs(seed=2)]
    summed = reference_run(entry.build(), inputs, steps=1)
    mean = reference_run(entry.build(), inputs, steps=1, reduction="mean")
    assert_close_tree(
        {name: 2 * g for name, g in mean.gradients.items()}, summed.gradients, "gradients"
    )
    assert_close_tree(mean.losses, summed.losses, "losses")


def test_units_keep_their_own_batch_norm_statistics() -> None:
    entry, still = zoo.get("resnet"), partial(torch.optim.SGD, lr=0.0)
    alone = reference_run(entry.build(), [entry.inputs(seed=1)], still, steps=2)
    beside = reference_run(
        entry.build(), [entry.inputs(seed=1), entry.inputs(seed=2)], still, steps=2
    )
    assert_close_tree(beside.buffers, alone.buffers, "buffers")
    assert beside.buffers["stem.1.num_batches_tracked"] == 2


def test_frozen_parameters_have_no_gradient_and_do_not_move() -> None:
    entry = zoo.get("gpt2-frozen")
    model = entry.build()
    reference = reference_run(model, [entry.inputs()], steps=1)
    assert reference.gradients["transformer.wpe.weight"] is None
    assert torch.equal(reference.parameters["transformer.wpe.weight"], model.transformer.wpe.weight)
    assert not torch.equal(
        reference.parameters["transformer.wte.weight"], model.transformer.wte.weight
    )
