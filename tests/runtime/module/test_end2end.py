"""End-to-end modules without stages: gradients of samples added up, results returned, misuse
refused.
"""

import pytest
import torch
from covers import spread
from mlp_files import MLP, make_batch, make_model, write_files
from mlp_training import adamw, assert_equal_pieces

from shardwright.runtime.errors import InputError, UsageError
from shardwright.runtime.loader import load_class
from shardwright.runtime.module.end2end import arguments_of
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)


def end2end(files, rank=None):
    """The class of :mod:`mlp_files` as a compile with ``use_end2end`` makes it."""
    cls = load_class(files, rank)
    cls.end2end, cls.arguments = True, ("x", "target")
    return cls


def batches(step, unit, count=3):
    return [make_batch(100 * step + 10 * unit + i) for i in range(count)]


def train_reference(model: MLP, num_units, dummies=(), steps=3):
    optimizer = adamw(model.parameters())
    record = {"norms": []}
    for step in range(steps):
        optimizer.zero_grad()
        for unit in range(num_units):
            for i, batch in enumerate(batches(step, unit)):
                if i not in dummies:
                    (0.5 * model(*batch)).backward()
        record["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0))
        record["gradients"] = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
    return {**record, "parameters": dict(model.named_parameters())}


@pytest.mark.parametrize("dummies", spread([(), (2,), (0, 1)], 2, whole=True))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_equals_one_device(files, dummies, asynchronous):
    config = {"plan_ngpus": 2, "runtime_ngpus": 4, "use_async_reducer": asynchronous}

    def train(rank):
        module = end2end(files)()
        optimizer = build_optimizer(module, adamw, config)
        record = {"norms": [], "rank": rank}
        for step in range(3):
            samples = batches(step, module.ranks.unit)
            losses = module.train_step(
                samples, [i in dummies for i in range(3)], lambda loss: 0.5 * loss
            )
            assert all(loss.shape == () and not loss.requires_grad for loss in losses)
            record["norms"].append(optimizer.clip_gnorm(5.0))
            record["gradients"] = {
                name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
            }
            optimizer.step()
        return {**record, "parameters": {name: p.detach() for name, p in module.named_parameters()}}

    assert_equal_pieces(files, train_reference(make_model(), 2, dummies), run_ranks(4, train))


def test_losses_are_returned_unscaled_and_inference_gives_them_too(files):
    def step(rank):
        module = end2end(files)()
        samples = batches(0, 0)
        losses = module.train_step(samples, scale_fn=lambda loss: 0 * loss)
        return [loss.item() for loss in losses], [
            loss.item() for loss in module.infer_step(samples)
        ]

    model = make_model()
    expected = [model(*batch).item() for batch in batches(0, 0)]
    for trained, inferred in run_ranks(2, step):
        assert trained == pytest.approx(expected, rel=1e-12)
        assert inferred == pytest.approx(expected, rel=1e-12)


def failing(files, fn, kind):
    with pytest.raises(kind) as caught:
        run_ranks(2, lambda rank: fn(end2end(files)()))
    return str(caught.value)


def test_misuse(files):
    sample = make_batch(0)
    assert failing(files, lambda module: module(*sample), UsageError).startswith(
        "MLP was compiled end to end and is not called directly\n"
    )
    assert failing(files, lambda module: module.train_step([]), InputError) == (
        "MLP.train_step was given no samples\n  try:   pass at least one; it may be a dummy, "
        "see is_dummy_batch"
    )

    def ordinary(module):
        type(module).end2end = False
        module.train_step([sample])

    assert failing(files, ordinary, UsageError) == (
        "MLP has no train_step: it was not compiled end to end\n"
        "  try:   call it like an ordinary module, or compile with ComputeConfig(use_end2end=True)"
    )


def test_a_loss_that_is_no_scalar(files):
    def train(module):
        forward = module.forward
        module.forward = lambda *args, **kwargs: {"y": forward(*args, **kwargs).expand(3)}
        module.train_step(batches(0, 0))

    assert (
        "the first result of MLP is no scalar loss\n  why:   it is a tensor float64[3]; train_step"
        in failing(files, train, InputError)
    )


def test_a_loss_without_trained_parameters(files):
    def train(module):
        forward = module.forward
        module.forward = lambda *args, **kwargs: forward(*args, **kwargs).detach()
        module.train_step(batches(0, 0))

    assert failing(files, train, UsageError).startswith(
        "the loss of MLP does not depend on any trained parameter\n"
    )


def test_what_a_sample_stands_for():
    x, y = torch.zeros(1), torch.ones(1)
    assert arguments_of(x, ["x"], {"x": ()}) == {"x": x}
    assert arguments_of({"a": x, "b": y}, ["batch"], {"batch.a": (), "batch.b": ()}) == {
        "batch": {"a": x, "b": y}
    }
    assert arguments_of({"a": x, "b": y}, ["a", "b"], {"a": (), "b": ()}) == {"a": x, "b": y}
    assert arguments_of((x, y), ["a", "b"], {"a": (), "b": ()}) == {"a": x, "b": y}
    assert arguments_of((x, y), ["pair"], {"pair.0": (), "pair.1": ()}) == {"pair": (x, y)}
    assert arguments_of({"x": x}, ["x"], {"x.x": ()}) == {"x": {"x": x}}
    assert arguments_of({"x": x}, ["x"], {"x": (), "factor": 2.0}) == {"x": x, "factor": 2.0}
    assert arguments_of(None, [], {}) == {}
