"""The reducer: each gradient summed once, in the same order on all ranks, and refusals of what
would count twice.
"""

import warnings

import pytest
import torch
from mlp_files import make_batch, make_model, write_files
from mlp_training import adamw

from shardwright.frontend.verification.verify import compile_into, verify
from shardwright.runtime.bucket import GradientSum, pack
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Layout
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.counters import CommunicationCounters
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

ASYNC = {"plan_ngpus": 1, "runtime_ngpus": 2, "use_async_reducer": True}


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path / "mlp", make_model(), dp=1, tp=1)


def alone(ranks=(0,)):
    return Communicator(None, ranks, 0, "units", CommunicationCounters())


def test_buckets_fill_in_order_and_never_mix():
    a, b = alone(), alone((1,))
    double, single = torch.float64, torch.float32
    sizes = [(a, 10, double), (b, 10, double), (a, 10, double), (a, 10, single), (a, 100, double)]
    sums = [
        GradientSum(
            str(index),
            torch.nn.Parameter(torch.zeros(size, dtype=dtype)),
            group,
            size,
            Layout.whole((size,)),
        )
        for index, (group, size, dtype) in enumerate(sizes)
    ]
    buckets = [[member.name for member in members] for members in pack(sums, 200)]
    assert buckets == [["1"], ["0", "2"], ["3"], ["4"]]
    assert [[m.name for m in members] for members in pack(sums, 1)] == [[str(i)] for i in range(5)]


def test_gradients_are_views_of_the_buckets_and_are_reduced_in_one_call(files):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw)
        module(*make_batch(rank)).backward()
        with count_communication() as volume:
            optimizer.sync_shard_grad()
            optimizer.sync_shard_grad()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        assert len({g.untyped_storage().data_ptr() for g in grads}) == 1
        # 60 + 10 + 60 + 6 elements of the layers, 6 + 6 + 6 of the vectors, and a flag for each of
        # the 7 parameters
        assert volume.elements("all_reduce", phase="gradients") == 154 + 7
        assert volume.calls("all_reduce") == 1

    run_ranks(2, train)


def test_with_overlap_the_sums_start_in_backward(files):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw, {**ASYNC, "reducer_bucket_cap_mb": 1e-6})
        with count_communication() as volume:
            module(*make_batch(rank)).backward()
        in_backward = volume.calls("all_reduce", phase="gradients")
        with count_communication() as volume:
            optimizer.sync_shard_grad()
        return in_backward, volume.calls("all_reduce", phase="gradients")

    assert run_ranks(2, train) == [(7, 0), (7, 0)]


def test_ranks_that_use_different_parameters_reduce_in_one_order():
    def train(rank):
        model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False).double() for _ in range(4)])
        for p in model.parameters():
            torch.nn.init.ones_(p)
        optimizer = build_optimizer(
            model, torch.optim.SGD, {**ASYNC, "reducer_bucket_cap_mb": 1e-6}, lr=1.0
        )
        x = torch.ones(1, dtype=torch.float64) * (rank + 1)
        for index in (0, 2, 3) if rank == 0 else (1, 3):
            x = model[index](x)
        x.backward()
        optimizer.sync_shard_grad()
        return [p.grad.item() for p in model.parameters()]

    assert run_ranks(2, train) == [[1.0, 2.0, 1.0, 3.0]] * 2


def test_hooks_see_flat_gradients_before_and_after(files):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw)
        seen = []
        before = optimizer.register_reducer_pre_hook(lambda reducer, gradients: gradients.div_(4))
        optimizer.register_reducer_pre_hook(lambda reducer, gradients: seen.append(gradients.shape))
        optimizer.register_reducer_post_hook(lambda reducer, gradients: gradients.mul_(4))
        module(*make_batch(rank)).backward()
        optimizer.sync_shard_grad()
        first = module.norm.weight.grad.clone()
        before.remove()
        optimizer.zero_grad()
        module(*make_batch(rank)).backward()
        optimizer.sync_shard_grad()
        torch.testing.assert_close(module.norm.weight.grad, 4 * first)
        assert seen == [(154,), (154,)]
        return first

    reference = make_model()
    sum(reference(*make_batch(unit)) for unit in range(2)).backward()
    for gradient in run_ranks(2, train):
        torch.testing.assert_close(gradient, reference.norm.weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_whose_gradients_are_summed_later_are_said_once(files, register):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw)
        for parameter in filter(lambda x: x.requires_grad, module.parameters()):
            getattr(parameter, register)(lambda gradient: None)
        for _ in range(2):
            optimizer.zero_grad()
            module(*make_batch(rank)).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"(?s)summand.*summands of 2 ranks.*sync_shard") as told:
        run_ranks(2, train)
    assert len([w for w in told if "hooks on the parameter" in str(w.message)]) == 2  # one a rank
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(1, train)  # a rank alone has the gradient


def test_gradients_may_be_changed_once_they_are_summed(files):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.5)
        module(*make_batch(rank)).backward()
        optimizer.sync_shard_grad()
        module.norm.weight.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        return module.norm.weight.detach().clone()

    reference = make_model()
    sum(reference(*make_batch(unit)) for unit in range(2)).backward()
    expected = reference.norm.weight - 0.5 * reference.norm.weight.grad.clamp(-0.01, 0.01)
    for weight in run_ranks(2, train):
        torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_backward_after_synchronising_is_refused(files, num_ranks):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw)
        module(*make_batch(0)).backward()
        optimizer.sync_shard_grad()
        with pytest.raises(UsageError) as error:
            module(*make_batch(1)).backward()
        return str(error.value)

    for text in run_ranks(num_ranks, train):
        assert "after its gradient was synchronised" in text.splitlines()[0]
        assert text.splitlines()[1:] == [
            (
                "  why:   each gradient is summed over the ranks once; adding to a sum would "
                "count it again"
            ),
            (
                "  try:   call optimizer.zero_grad() before this backward; to accumulate, "
                "synchronise after the last one"
            ),
        ]


def test_a_backward_after_the_step_needs_cleared_gradients(files):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw)
        module(*make_batch(0)).backward()
        optimizer.step()
        with pytest.raises(UsageError, match=r"call optimizer.zero_grad\(\) before this backward"):
            module(*make_batch(1)).backward()

    run_ranks(2, train)


@pytest.mark.parametrize("clear", ["optimizer", "optimizer_to_zero", "module", "by_hand"])
@pytest.mark.parametrize("overlap", [False, True])
def test_every_way_to_clear_gradients_begins_a_new_round(files, clear, overlap):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(
            module, torch.optim.SGD, {**ASYNC, "use_async_reducer": overlap}, lr=0.0
        )
        for step in range(3):
            module(*make_batch(10 * step + rank)).backward()
            optimizer.step()
            gradient = module.norm.weight.grad.clone()
            if clear == "module":
                module.zero_grad()
            elif clear == "by_hand":
                for p in module.parameters():
                    p.grad = None
            else:
                optimizer.zero_grad(set_to_none=clear == "optimizer")
        return gradient

    reference = make_model()
    sum(reference(*make_batch(20 + unit)) for unit in range(2)).backward()
    for gradient in run_ranks(2, train):
        torch.testing.assert_close(gradient, reference.norm.weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_may_be_looked_at_and_dropped(files, overlap):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw, {**ASYNC, "use_async_reducer": overlap})
        for step in range(2):
            module.zero_grad()
            module(*make_batch(10 * step + rank)).backward()
            optimizer.sync_shard_grad()
        return module.norm.weight.grad

    reference = make_model()
    sum(reference(*make_batch(10 + unit)) for unit in range(2)).backward()
    for gradient in run_ranks(2, train):
        torch.testing.assert_close(gradient, reference.norm.weight.grad, rtol=1e-12, atol=0)


def test_a_second_step_without_backward_reduces_nothing_again(files):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.0)
        module(*make_batch(rank)).backward()
        optimizer.step()
        first = module.norm.weight.grad.clone()
        optimizer.step()
        assert torch.equal(module.norm.weight.grad, first)

    run_ranks(2, train)


def test_gradients_may_be_dropped_while_sums_are_under_way(files, monkeypatch):
    waited, start = [], Communicator.all_reduce_async

    class Watched:
        def __init__(self, work):
            self.work = work

        def wait(self):
            waited.append(self)
            self.work.wait()

    monkeypatch.setattr(Communicator, "all_reduce_async", lambda self, x: Watched(start(self, x)))

    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw, ASYNC)
        module(*make_batch(rank + 5)).backward()
        optimizer.zero_grad()
        module(*make_batch(rank)).backward()
        optimizer.sync_shard_grad()
        return module.norm.weight.grad

    reference = make_model()
    sum(reference(*make_batch(unit)) for unit in range(2)).backward()
    for gradient in run_ranks(2, train):
        torch.testing.assert_close(gradient, reference.norm.weight.grad, rtol=1e-12, atol=0)
    assert len(waited) == 4, (
        "the buffer of a sum under way must not be written to: both of each rank are waited for"
    )


def test_with_overlap_a_second_backward_needs_no_sync(files):
    def train(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, adamw, ASYNC)
        module(*make_batch(0)).backward()
        with pytest.raises(UsageError) as error:
            module(*make_batch(1)).backward()
        optimizer.zero_grad()
        return str(error.value)

    for text in run_ranks(2, train):
        assert text.splitlines()[1:] == [
            (
                "  why:   with use_async_reducer the first one already started to sum gradients "
                "over the ranks"
            ),
            "  try:   run all backward passes but the last inside `with optimizer.no_sync():`, "
            "or train without use_async_reducer",
        ]


def test_synchronising_inside_no_sync_is_refused(files):
    module = load_class(files)()
    optimizer = build_optimizer(module, adamw)
    with optimizer.no_sync(), pytest.raises(UsageError) as error:
        optimizer.step()
    assert str(error.value) == (
        "gradients cannot be synchronised inside no_sync()\n"
        "  why:   there they are only accumulated\n"
        "  try:   leave the no_sync() block before the last backward"
    )


class Backwards(torch.nn.Module):
    """Registered in the reverse order of their use, with one that is not used at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in ("idle", "last", "middle", "first"):
            setattr(self, name, torch.nn.Linear(4, 4, bias=False))

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().sum()


@pytest.mark.parametrize(("policy", "plan_ngpus"), [("dp", 1), ("pp", 2)])
def test_buckets_are_in_the_reverse_order_of_use(tmp_path, policy, plan_ngpus):
    config = {
        "plan_ngpus": plan_ngpus,
        "runtime_ngpus": 2 * plan_ngpus,
        "use_end2end": True,
        "reducer_bucket_cap_mb": 1e-6,
    }
    x = torch.ones(2, 4)
    directory = compile_into(
        tmp_path,
        Backwards(),
        {"x": x},
        policy,
        ComputeConfig.of({**config, "use_async_reducer": True}),
    )

    def on_rank(rank):
        module = load_class(directory)()
        reducer = build_optimizer(module, adamw)._reducer
        order = []
        for bucket in reducer.buckets:
            (member,) = bucket.members
            member.parameter.register_hook(lambda grad, name=member.name: order.append(name))
        module.train_step([x] * getattr(module, "num_microbatches", 1))
        return [bucket.members[0].name for bucket in reducer.buckets], list(dict.fromkeys(order))

    for buckets, arrived in run_ranks(2 * plan_ngpus, on_rank):
        assert buckets[: len(arrived)] == arrived, "the one that is never reached comes last"
        assert arrived and all(name == "idle.weight" for name in buckets[len(arrived) :])


class Rounded(torch.autograd.Function):
    """Multiples of a step, which gets no gradient."""

    @staticmethod
    def forward(ctx, x, step):
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Quantized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        self.step = torch.nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x):
        return self.down(Rounded.apply(self.up(x), self.step)).square().mean()


@pytest.mark.filterwarnings("ignore:no rule for operator")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_async_reducer": True},
        {"use_zero": 1},
        {"use_zero": 2, "use_end2end": True},
        {"use_zero": 3},
    ],
)
def test_a_parameter_that_backward_brings_none_for_has_none(fields):
    torch.manual_seed(0)
    report = verify(
        Quantized(), {"x": torch.randn(6, 4)}, "dp", {"plan_ngpus": 1, "runtime_ngpus": 2, **fields}
    )
    assert report.ok, str(report)
    assert {d.name for d in report.deviations["gradients"]} == {
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
    }
