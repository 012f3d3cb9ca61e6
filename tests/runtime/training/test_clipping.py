"""torch's functions that clip gradients, on parallel modules: the numbers of one device, or a
refusal in words.
"""

import copy
import math

import pytest
import torch
from mlp_files import make_batch, make_model, write_files
from mlp_training import ADAMW, adamw
from pipeline_files import Net
from pipeline_training import samples_of, scale, train_reference, write
from pipelines import make_pipe
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from zero_training import Muonlike

from shardwright.runtime.bucket import Bucket, GradientSum
from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Layout
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.all_gradients import AllGradients
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.clipping import watch_clipping
from shardwright.runtime.training.reducer import Reducer
from shardwright.runtime.zero.gathering import gathered_gradients

LIMIT = 1.0
NUM_UNITS = 2

OPTIONS = {
    "plain": {},
    "mean": {"grad_reduction": "mean"},
    "async": {"use_async_reducer": True, "reducer_bucket_cap_mb": 1e-4},
    "zero1": {"use_zero": 1},
    "zero2": {"use_zero": 2, "reducer_bucket_cap_mb": 1e-4},
    "table": {"distributed_optimizer": {"contiguous_grad_buffer": False}},
}


def all_parameters(module, optimizer):
    return module.parameters()


def listed(module, optimizer):
    return [p for _, p in module.named_parameters()]


def of_groups(module, optimizer):
    return (p for group in optimizer.param_groups for p in group["params"])


def weights(module, optimizer):
    return [p for name, p in module.named_parameters() if name.endswith("weight")]


def clip(parameters, order):
    return clip_grad_norm_(parameters, LIMIT, order)


def clip_in_two(parameters, order):
    parameters = list(parameters)
    norm = get_total_norm([p.grad.detach() for p in parameters if p.grad is not None], order)
    clip_grads_with_norm_(parameters, LIMIT, norm)
    return norm


def on_one_device(function, parameters_of, order, options):
    model = make_model()
    losses = torch.stack([model(*make_batch(unit)) for unit in range(NUM_UNITS)])
    (losses.mean() if options.get("grad_reduction") == "mean" else losses.sum()).backward()
    optimizer = adamw(model.parameters())
    norm = function(parameters_of(model, optimizer), order)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return norm, gradients


def on_ranks(directory, function, parameters_of, order, options, make=torch.optim.AdamW):
    config = {"plan_ngpus": 2, "runtime_ngpus": 4, **options}

    def train(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(
            module, make, config, **(ADAMW if make is torch.optim.AdamW else {"lr": 0.1})
        )
        module(*make_batch(module.ranks.unit)).backward()
        norm = function(parameters_of(module, optimizer), order)
        own = optimizer.clip_gnorm()
        return norm, own, gathered_gradients(optimizer._reducer.buckets)

    return run_ranks(4, train)


CASES = [
    *((name, all_parameters, 2.0) for name in OPTIONS),
    *((name, of_groups, 2.0) for name in ("plain", "zero2", "table")),
    ("plain", listed, 1.0),
    ("zero1", weights, math.inf),
    ("zero2", weights, 2.0),
    ("plain", weights, 3.0),
]


@pytest.mark.parametrize(("name", "parameters_of", "order"), CASES)
def test_clip_grad_norm_is_that_of_one_device(tmp_path, name, parameters_of, order):
    """Between backward and step, where nobody has summed the gradients yet; whichever parameters
    are passed, and how.
    """
    check(tmp_path, clip, name, parameters_of, order)


@pytest.mark.parametrize("name", ["plain", "mean", "zero1"])
def test_the_norm_and_the_clipping_apart(tmp_path, name):
    check(tmp_path, clip_in_two, name, weights if name == "plain" else all_parameters, 2.0)


def check(tmp_path, function, name, parameters_of, order, make=torch.optim.AdamW):
    directory = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)
    options = OPTIONS[name]
    norm, gradients = on_one_device(function, parameters_of, order, options)
    after = get_total_norm(list(gradients.values()))
    for found, own, pieces in on_ranks(directory, function, parameters_of, order, options, make):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(own, after, rtol=1e-12, atol=0)
        for key, piece in pieces.items():
            if piece.shape == gradients[key].shape:
                torch.testing.assert_close(piece, gradients[key], rtol=1e-12, atol=1e-14, msg=key)


@pytest.mark.parametrize("name", ["plain", "zero2"])
def test_optimizers_that_get_whole_tensors(tmp_path, name):
    check(
        tmp_path, clip, name, of_groups if name == "plain" else all_parameters, 2.0, make=Muonlike
    )


@pytest.mark.parametrize("name", ["plain", "zero1", "zero2"])
def test_clip_grad_value(tmp_path, name):
    """The sum is clipped, not each rank's summand."""
    check(
        tmp_path, lambda parameters, _: clip_grad_value_(parameters, 0.3), name, all_parameters, 2.0
    )


@pytest.mark.parametrize("parameters_of", [all_parameters, of_groups])
@pytest.mark.parametrize("stage", [0, 2])
def test_masters_of_low_precision_parameters(stage, parameters_of):
    """Clipped is what the optimizer steps along: the gradients of the masters."""

    def train(rank):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 5).bfloat16()
        config = {
            "plan_ngpus": 1,
            "runtime_ngpus": 2,
            "use_zero": stage,
            "distributed_optimizer": {},
        }
        optimizer = build_optimizer(model, torch.optim.SGD, config, lr=1.0)
        model(torch.full((3, 6), 1.0 + rank).bfloat16()).float().square().sum().backward()
        found = clip_grad_norm_(parameters_of(model, optimizer), LIMIT)
        assert all(shard.tensor.dtype == torch.float32 for shard in optimizer.shards)
        return found, optimizer.clip_gnorm()

    for found, after in run_ranks(2, train):
        assert found.dtype == torch.float32 and found > 2 * LIMIT
        torch.testing.assert_close(after, torch.tensor(LIMIT), rtol=1e-5, atol=0)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_parameters_of_others_among_them(tmp_path, is_sharded):
    """An ordinary model beside the parallel one, the same on all ranks, and a non-finite gradient
    in it.
    """
    directory = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)

    def beside(model, others):
        others[0].grad = torch.full((3,), 2.0)
        norm = clip_grad_norm_([*others, *model.parameters()], LIMIT)
        value = others[0].grad.clone()
        others[0].grad.fill_(math.inf)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_([*model.parameters(), *others], LIMIT, error_if_nonfinite=True)
        return norm, value

    model = make_model()
    sum(model(*make_batch(unit)) for unit in range(NUM_UNITS)).backward()
    expected = beside(model, [torch.nn.Parameter(torch.zeros(3))])

    def train(rank):
        module = load_class(directory)()
        config = {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 2 if is_sharded else 0}
        optimizer = build_optimizer(module, torch.optim.AdamW, config, **ADAMW)
        module(*make_batch(module.ranks.unit)).backward()
        return beside(module, [torch.nn.Parameter(torch.zeros(3))]), optimizer

    for found, _ in run_ranks(4, train):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def refused(tmp_path, act, **options):
    """What the ranks of two units of tp=2 say to ``act(module, optimizer)`` after a backward."""
    directory = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)

    def train(rank):
        module = load_class(directory)()
        config = {"plan_ngpus": 2, "runtime_ngpus": 4, **options}
        optimizer = (
            None
            if options.get("alone")
            else build_optimizer(module, torch.optim.SGD, config, lr=0.1)
        )
        module(*make_batch(module.ranks.unit)).backward()
        with pytest.raises(UsageError) as error:
            act(module, optimizer)
        return str(error.value)

    (text,) = set(run_ranks(4, train))
    return text


@pytest.mark.parametrize("is_copy", [False, True])
def test_without_an_optimizer_it_is_refused(tmp_path, is_copy):
    def act(module, optimizer):
        clip_grad_norm_((copy.deepcopy(module) if is_copy else module).parameters(), 1.0)

    assert refused(tmp_path, act, alone=True) == (
        "gradients of MLP were to be clipped, and nobody sums them over the ranks\n"
        "  why:   each rank has a piece or a summand of a gradient, and no optimizer was "
        "made by build_optimizer, which sums "
        "them\n"
        "  try:   optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, lr=...) "
        "before the first backward"
    )


def test_norms_without_an_optimizer_are_refused(tmp_path):
    def act(module, optimizer):
        get_total_norm([p.grad for p in module.parameters()])

    assert refused(tmp_path, act, alone=True).startswith(
        "gradients of MLP were to be measured, and nobody sums them over the ranks\n"
    )


@pytest.mark.parametrize("are_none_left_out", [False, True])
@pytest.mark.parametrize("is_synced", [False, True])
def test_norms_of_scattered_gradients_are_refused(tmp_path, is_synced, are_none_left_out):
    def act(module, optimizer):
        if is_synced:
            optimizer.sync_shard_grad()
        gradients = [p.grad for p in module.parameters()]
        get_total_norm([g for g in gradients if g is not None] if are_none_left_out else gradients)

    assert refused(tmp_path, act, use_zero=1, zero_use_reduce_scatter=True) == (
        "the norm of scattered gradients cannot be had from p.grad\n"
        "  why:   with ZeRO a rank has the sum for the part that it updates, and p.grad of "
        "the parameters is None\n"
        "  try:   pass the parameters, torch.nn.utils.clip_grad_norm_(model.parameters(), "
        "max_norm), "
        "or call optimizer.clip_gnorm(max_norm)"
    )


def test_the_norm_of_weights_and_odd_orders_are_refused(tmp_path):
    text = refused(tmp_path, lambda module, optimizer: get_total_norm(module.parameters()))
    assert text.startswith(
        "get_total_norm was given parameters of a parallel module, not gradients\n"
    )
    text = refused(
        tmp_path / "0", lambda module, optimizer: clip_grad_norm_(module.parameters(), 1.0, 0)
    )
    assert text.startswith(
        "the norm of order 0 of gradients that lie on several ranks is not computed\n"
    )
    text = refused(tmp_path / "held", lambda module, optimizer: held(module, optimizer))
    assert text.startswith("gradients cannot be synchronised inside no_sync()\n")


def held(module, optimizer):
    with optimizer.no_sync():
        clip_grad_norm_(module.parameters(), 1.0)


def test_a_pipeline_is_clipped_as_a_whole(tmp_path):
    """A rank whose stage trains nothing takes part; a part of the parameters is refused."""
    pipe = make_pipe("1f1b", 2, 2)
    directory = write(tmp_path / "files", pipe)

    def train(rank):
        module = load_class(directory)()
        build_optimizer(module, torch.optim.SGD, lr=0.1)
        module.train_step(samples_of(0, 0, 2), scale_fn=scale)
        norm = clip_grad_norm_(module.parameters(), LIMIT)
        with pytest.raises(UsageError) as error:
            clip_grad_norm_([next(module.parameters())], LIMIT)
        return norm, str(error.value)

    (norm,) = train_reference(pipe, Net(2), 1, steps=1)["norms"]
    for rank, (found, text) in enumerate(run_ranks(2, train)):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        assert text.startswith(
            "the norm of some gradients of a pipeline is not known on this rank\n"
        ), text
        assert f"rank {rank} was given 1 of its " in text


def test_a_rank_whose_stages_train_nothing_takes_part():
    """It is given no parameters, and the others wait for it."""

    def clipped(rank):
        world = current_world()
        alone = world.partition([[0], [1]], "units")
        p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        p.grad = p.detach().clone()
        buckets = [Bucket([GradientSum("p", p, alone, 2, Layout.whole((2,)))])] if rank == 0 else []
        gradients = AllGradients(world, Reducer(buckets), is_staged=True)
        watch_clipping()
        norms = [
            clip_grad_norm_([p] if buckets else [], 1.0),
            get_total_norm([p.grad] if buckets else []),
        ]
        assert gradients.is_attached
        return norms

    for clipping, after in run_ranks(2, clipped):
        assert clipping == 5 and torch.allclose(after, torch.ones(()))


def test_ordinary_parameters_are_torchs_affair():
    """Also on ranks that train parallel modules, with torch's own warning for an iterator without
    elements.
    """
    p = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    p.grad = p.detach().clone()
    assert clip_grad_norm_(iter([p]), 1.0) == 5 and torch.allclose(p.grad, torch.tensor([0.6, 0.8]))
    with pytest.warns(UserWarning, match="empty generator"):
        assert clip_grad_norm_((q for q in []), 1.0) == 0
