"""Loss scaling: the course of torch's scaler on one device, and every rank decides alike."""

import overflows
import pytest
import torch
from covers import spread
from mlp_files import make_batch, make_model, write_files
from mlp_training import adamw, piece_of
from overflows import OPTIONS, STEPS, assert_same_course
from pipeline_files import Net
from pipeline_training import samples_of, write
from pipelines import make_pipe
from zero_training import Muonlike

from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.checkpoint.load import load_checkpoint
from shardwright.runtime.checkpoint.merged import merge_state_dicts
from shardwright.runtime.checkpoint.save import save_checkpoint
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.loss_scaling import LossScaler

ZERO = [
    {"use_zero": 1},
    {"use_zero": 1, "zero_use_reduce_scatter": True, "use_async_reducer": True},
    {"use_zero": 2, "reducer_bucket_cap_mb": 1e-4},
    {"distributed_optimizer": {"overlap_param_sync": True, "contiguous_grad_buffer": False}},
]


def torch_scaler():
    return torch.amp.GradScaler("cpu", **OPTIONS)


def batches(step, unit, count):
    return [make_batch(100 * step + 10 * unit + index) for index in range(count)]


def reference(num_units, accumulate, element, factory=adamw):
    """One device under torch's scaler. ``element``: of the weight that tp cuts by rows, where
    gradients overflow.
    """
    model = make_model()
    scaler = torch_scaler()

    def backward(step):
        losses = [
            model(*batch) for unit in range(num_units) for batch in batches(step, unit, accumulate)
        ]
        scaler.scale(torch.stack(losses).sum()).backward()

    return overflows.train(
        model, factory(model.parameters()), scaler, backward, (model.layers[0].weight, element)
    )


def train_rank(rank, files, config, accumulate, poisoned_rank, factory):
    module = load_class(files)()
    optimizer = build_optimizer(module, factory, config)
    scaler = LossScaler(**OPTIONS)

    def backward(step):
        *first, last = batches(step, module.ranks.unit, accumulate)
        for batch in first:
            with optimizer.no_sync():
                scaler.scale(module(*batch)).backward()
        scaler.scale(module(*last)).backward()

    poisoned = (module.layers[0].weight, 3) if rank == poisoned_rank else None
    return {
        **overflows.train(module, optimizer, scaler, backward, poisoned),
        "state": module.state_dict(),
    }


def check(files, tp, options, *, accumulate=1, poisoned_rank=1, num_units=2, factory=adamw):
    num_ranks = tp * num_units
    config = {"plan_ngpus": tp, "runtime_ngpus": num_ranks, **options}
    # Rank 1 of 2 has the second half of the weight's ten rows.
    expected = reference(num_units, accumulate, 3 + (poisoned_rank % tp) * 5 * 6, factory)
    for rank, record in enumerate(
        run_ranks(num_ranks, train_rank, files, config, accumulate, poisoned_rank, factory)
    ):
        assert_same_course(record, expected)
        cls = load_class(files, rank)
        for name, found in record["parameters"].items():
            wanted = piece_of(cls, rank, name, expected["parameters"][name])
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13, msg=name)


# ------------------------------------------------------------------------------------------------
# parity with one device


@pytest.mark.parametrize(("accumulate", "poisoned_rank"), [(1, 1), (3, 2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path, poisoned_rank, accumulate):
    """The gradient that overflows is of a weight that tp cuts: no sum brings it to the other half
    of the ranks.
    """
    files = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)
    check(files, 2, {}, accumulate=accumulate, poisoned_rank=poisoned_rank)


@pytest.mark.parametrize("options", spread(ZERO, 2), ids=str)
def test_with_split_optimizer_state(tmp_path, options):
    """Each rank has gradients of its part only."""
    files = write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)
    check(files, 1, options, accumulate=2, num_units=4)


@pytest.mark.parametrize("options", spread([{}, ZERO[0], ZERO[2]], 2), ids=str)
def test_an_optimizer_that_needs_whole_tensors_of_cut_parameters(tmp_path, options):
    files = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)
    check(files, 2, options, factory=Muonlike)


@pytest.mark.parametrize(("policy", "plan_ngpus"), spread([("dp", 1), ("tp", 2)], 2, first=1))
def test_with_parameters_in_pieces(tmp_path, policy, plan_ngpus):
    """ZeRO-3: the gradient that overflows is of a piece, which one rank has."""
    config = {"plan_ngpus": plan_ngpus, "runtime_ngpus": 2 * plan_ngpus, "use_zero": 3}
    x, target = make_batch(0)
    files = compile_into(
        tmp_path, make_model(), {"x": x, "target": target}, policy, ComputeConfig.of(config)
    )
    results = run_ranks(2 * plan_ngpus, train_rank, files, config, 2, 1, adamw)
    expected = reference(2, 2, 3)
    for record in results:
        assert_same_course(record, expected)
    merged, _ = merge_state_dicts([record["state"] for record in results])
    for name, wanted in expected["parameters"].items():
        torch.testing.assert_close(merged[name], wanted, rtol=1e-12, atol=1e-13, msg=name)


def train_pipe(rank, files, config, steps=range(STEPS), folder=None):
    module = load_class(files)()
    optimizer, scaler = build_optimizer(module, adamw, config), LossScaler(**OPTIONS)
    if steps.start:
        scaler.load_state_dict(load_checkpoint(folder, module, optimizer).extra["scaler"])

    def backward(step):
        module.train_step(
            samples_of(step, module.ranks.unit, module.num_microbatches), scale_fn=scaler.scale
        )

    weights = dict(module.named_parameters())
    # Of the first stage, of one unit.
    poisoned = (weights["blocks.0.norm.bias"], 2) if rank == 0 else None
    record = overflows.train(module, optimizer, scaler, backward, poisoned, steps)
    if folder is not None:
        save_checkpoint(folder, module, optimizer, extra={"scaler": scaler.state_dict()})
    return record


def pipe_reference(pipe, num_units):
    model, scaler = Net(pipe.num_stages), torch_scaler()

    def backward(step):
        for unit in range(num_units):
            for sample in samples_of(step, unit, pipe.num_microbatches):
                scaler.scale(model(sample)[0]).backward()

    weights = dict(model.named_parameters())
    return overflows.train(
        model, adamw(model.parameters()), scaler, backward, (weights["blocks.0.norm.bias"], 2)
    )


@pytest.mark.parametrize(
    "options",
    spread([pytest.param({}, marks=pytest.mark.slow), ZERO[2], ZERO[3]], 2, first=1),
    ids=str,
)
def test_in_a_pipeline_with_tied_weights(tmp_path, options):
    """Most stages see no loss, and the one where gradients overflow is not the one that has it."""
    pipe = make_pipe("1f1b", 3, 4)
    files = write(tmp_path / "files", pipe)
    results = run_ranks(6, train_pipe, files, {"plan_ngpus": 3, "runtime_ngpus": 6, **options})
    expected = pipe_reference(pipe, 2)
    for record in results:
        assert_same_course(record, expected)
        for name, found in record["parameters"].items():
            torch.testing.assert_close(
                found, expected["parameters"][name], rtol=1e-11, atol=1e-12, msg=name
            )


def test_resuming_goes_on_exactly(tmp_path):
    """Saved after a skipped step, with the scale reduced."""
    files = write(tmp_path / "files", make_pipe("1f1b", 2, 2))
    config = {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 1}
    whole = run_ranks(4, train_pipe, files, config)
    for step in (2, 4):
        folder = tmp_path / f"saved-{step}"
        run_ranks(4, train_pipe, files, config, range(step), folder)
        for record, expected in zip(
            run_ranks(4, train_pipe, files, config, range(step, STEPS), folder), whole, strict=True
        ):
            assert (
                record["scales"] == expected["scales"][step:]
                and record["taken"] == expected["taken"][step:]
            )
            for name, found in record["parameters"].items():
                assert torch.equal(found, expected["parameters"][name]), name


def test_not_a_number_skips_too_and_ranks_without_parameters_take_part():
    def on_rank(rank):
        model = torch.nn.ModuleDict(
            {"a": torch.nn.Linear(2, 1, bias=False), "b": torch.nn.Linear(2, 1)}
        )
        for p in model.parameters():
            torch.nn.init.ones_(p)
        optimizer = build_optimizer(
            model, torch.optim.SGD, {"plan_ngpus": 1, "runtime_ngpus": 4, "use_zero": 1}, lr=1.0
        )
        scaler = LossScaler(init_scale=8.0)
        x = torch.tensor([1.0, float("nan") if rank == 3 else 2.0])
        scaler.scale(model["a"](x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return (
            scaler.get_scale(),
            model["a"].weight.detach().clone(),
            [s.num_elements for s in optimizer.shards],
        )

    results = run_ranks(4, on_rank)
    assert [scale for scale, _, _ in results] == [4.0] * 4
    assert all(torch.equal(weight, torch.ones(1, 2)) for _, weight, _ in results)
    assert any(sum(sizes) < 2 for _, _, sizes in results)


def test_a_skipped_step_leaves_everything_as_it_was(tmp_path):
    module = load_class(write_files(tmp_path, make_model(), dp=1, tp=1))()
    optimizer, scaler = build_optimizer(module, adamw), LossScaler()
    with overflows.overflow(module.layers[0].weight, 0):
        scaler.scale(module(*make_batch(0))).backward()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert scaler.step(optimizer) is None
    assert not optimizer.state and module.rng.moment == (0, 1)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(module(*make_batch(0))).backward()
    scaler.step(optimizer)
    assert optimizer.state and module.rng.moment == (1, 0)


# ------------------------------------------------------------------------------------------------
# the scale itself


def test_the_scale_moves_as_in_torch():
    """Losses, steps and state dicts, for a random course of overflows."""
    weight = torch.nn.Parameter(torch.ones(2))
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(2))
    options = {
        "init_scale": 2.0**100,
        "growth_factor": 2.0**6,
        "backoff_factor": 2.0**-9,
        "growth_interval": 2,
    }
    pairs = [
        (torch.amp.GradScaler("cpu", **options), torch.optim.SGD([weight], lr=0.25), weight),
        (LossScaler(**options), build_optimizer(module, torch.optim.SGD, lr=0.25), module.weight),
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        factor = float("inf") if torch.rand((), generator=generator) < 0.2 else 2.0**-20
        found = []
        for scaler, optimizer, parameter in pairs:
            optimizer.zero_grad()
            loss = scaler.scale((parameter * factor).sum())
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            found.append((loss.item(), scaler.state_dict(), parameter.tolist()))
        assert found[0] == found[1]
    ours = pairs[1][0]
    assert ours.state_dict().keys() == {
        "scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "_growth_tracker",
    }
    again = LossScaler()
    again.load_state_dict(pairs[0][0].state_dict())
    assert again.state_dict() == ours.state_dict()
    ours.update(3.0)
    assert ours.get_scale() == 3.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_losses_are_scaled_as_in_torch(dtype):
    loss = torch.tensor(1.5, dtype=dtype)
    mine, theirs = LossScaler().scale(loss), torch.amp.GradScaler("cpu").scale(loss)
    assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_switched_off_it_does_nothing(tmp_path):
    module = load_class(write_files(tmp_path, make_model(), dp=1, tp=1))()
    optimizer, scaler = build_optimizer(module, adamw), LossScaler(enabled=False)
    loss = module(*make_batch(0))
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and not scaler.is_enabled()
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state and scaler.state_dict() == {}
    scaler.load_state_dict({})


# ------------------------------------------------------------------------------------------------
# refusals


def text_of(fn, error=UsageError):
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


def trained(scaler, dtype=torch.float32):
    model = torch.nn.Linear(2, 1).to(dtype)
    optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
    scaler.scale(model(torch.ones(2, dtype=dtype)).sum()).backward()
    return optimizer


def test_the_order_of_calls():
    scaler = LossScaler()
    optimizer = trained(scaler)
    assert text_of(scaler.update) == (
        "update() was called without a step since the last one\n"
        "  why:   whether gradients have overflowed is not known\n"
        "  try:   call scaler.step(optimizer) first"
    )
    scaler.unscale_(optimizer)
    assert text_of(lambda: scaler.unscale_(optimizer)) == (
        "unscale_() was called twice for one optimizer\n"
        "  why:   gradients would be divided by the scale twice\n"
        "  try:   call scaler.update() at the end of every step"
    )
    scaler.step(optimizer)
    assert text_of(lambda: scaler.step(optimizer)) == (
        "step() was called twice for one optimizer\n  try:   call scaler.update() at the end "
        "of every step"
    )


def test_torchs_scaler_is_refused():
    scaler = torch.amp.GradScaler("cpu")
    optimizer = trained(scaler)
    assert text_of(lambda: scaler.step(optimizer)) == (
        "torch.amp.GradScaler cannot scale the losses of an optimizer made by build_optimizer\n"
        "  why:   it looks for overflow in what this rank holds of the gradients; ranks "
        "would disagree on which steps to skip\n"
        "  try:   use shardwright.LossScaler: it has the same methods, and loads the state "
        "dict of torch's"
    )


def test_another_optimizer_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert text_of(lambda: LossScaler().step(optimizer)) == (
        "LossScaler was given a SGD that build_optimizer has not made\n"
        "  why:   only its optimizers know which gradients are summed over which ranks\n"
        "  try:   make it by build_optimizer(module, ...), or use torch.amp.GradScaler for it"
    )


def test_float16_gradients_are_refused():
    scaler = LossScaler()
    optimizer = trained(scaler, torch.float16)
    assert text_of(lambda: scaler.step(optimizer)) == (
        "gradients are float16, and dividing them by the scale would lose what it was for\n"
        "  why:   the parameters are float16 and the optimizer updates them directly\n"
        "  try:   keep float32 parameters and compute in autocast, or let the optimizer keep "
        "float32 masters: "
        "ComputeConfig(distributed_optimizer={})"
    )


MASTERS = [
    {"distributed_optimizer": {}},
    {"distributed_optimizer": {}, "use_zero": 2},
    {"distributed_optimizer": {}, "use_zero": 0},
    {"distributed_optimizer": {"contiguous_grad_buffer": False}},
]


@pytest.mark.parametrize("options", MASTERS, ids=str)
def test_masters_of_float16_parameters_get_gradients_that_float16_cannot_hold(options):
    def on_rank(rank):
        model = torch.nn.Linear(2, 1, bias=False).half()
        torch.nn.init.ones_(model.weight)
        config = {"plan_ngpus": 1, "runtime_ngpus": 2, **options}
        optimizer, scaler = (
            build_optimizer(model, torch.optim.SGD, config, lr=1.0),
            LossScaler(init_scale=2.0**12),
        )
        # In float16 the gradient itself, 2**-26, would be zero.
        loss = model(torch.full((2,), 2.0**-13, dtype=torch.float16)).float().sum() * 2.0**-13
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        return [shard.tensor.grad.clone() for shard in optimizer.shards]

    for (gradient,) in run_ranks(2, on_rank):
        assert torch.equal(gradient.view(-1), torch.full((gradient.numel(),), 2.0**-25))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"init_scale": 0.0}, "init_scale is a positive finite number\n  why:   it is 0.0"),
        (
            {"growth_factor": 1.0},
            "growth_factor is above 1\n  why:   it is 1.0: the scale would never grow",
        ),
        (
            {"backoff_factor": 1.0},
            "backoff_factor is between 0 and 1\n  why:   it is 1.0: the scale would never shrink",
        ),
        (
            {"growth_interval": 0},
            "growth_interval is a number of steps, at least 1\n  why:   it is 0",
        ),
    ],
    ids=str,
)
def test_options(options, text):
    assert text_of(lambda: LossScaler(**options), ConfigError) == text


def test_the_state_of_a_scaler_that_was_off():
    assert text_of(lambda: LossScaler().load_state_dict({})) == (
        "the state dict of the loss scaler is empty\n"
        "  why:   it was saved by a scaler with enabled=False\n"
        "  try:   do not load it, or make this scaler with enabled=False too"
    )
