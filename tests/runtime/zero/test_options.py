"""The option table of the distributed optimizer: every option changes what it says, and no
number.
"""

import itertools

import pytest
import torch
from covers import spread
from mlp_files import make_batch, make_model, write_files
from zero_training import OPTIMIZERS, check, state_elements

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.zero.settings import ReductionSettings
from shardwright.runtime.zero.state_masters import MASTER

FLAGS = (
    "overlap_grad_sync",
    "overlap_param_sync",
    "contiguous_param_buffer",
    "contiguous_grad_buffer",
)
TABLES = [
    dict(zip(FLAGS, values, strict=True)) for values in itertools.product((False, True), repeat=4)
]


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path / "mlp", make_model(), 1, 1)


def config_of(num_ranks=2, **table):
    return {"plan_ngpus": 1, "runtime_ngpus": num_ranks, "distributed_optimizer": table}


def test_dtypes():
    def dtypes(of, **table):
        settings = ReductionSettings.of(ComputeConfig.of(config_of(**table)), 2)
        return settings.state_dtype(of), settings.gradient_dtype(of)

    low, single, double = torch.bfloat16, torch.float32, torch.float64
    assert [dtypes(dtype) for dtype in (low, single, double)] == [
        (single, single),
        (single, single),
        (double, double),
    ]
    assert dtypes(double, dtype=None) == (double, double)
    assert dtypes(single, dtype="bf16", grad_sync_dtype="float16") == (low, torch.float16)
    assert dtypes(single, dtype="bf16") == (low, low) and dtypes(low, grad_sync_dtype="bf16") == (
        single,
        low,
    )


def test_buckets_grow_with_the_ring_that_they_go_around():
    def size(num_units, **given):
        return ReductionSettings.of(
            ComputeConfig(plan_ngpus=1, runtime_ngpus=num_units, **given), num_units
        ).bucket_cap_mb

    assert [size(n) for n in (1, 8, 64, 4096)] == [25.0, 25.0, 128.0, 512.0]
    assert size(64, reducer_bucket_cap_mb=1) == 1
    assert size(64, distributed_optimizer={"bucket_cap_mb": 50}) == 50


@pytest.mark.parametrize("index", spread(range(16), 2))
def test_every_combination(tmp_path, index):
    table = {**TABLES[index], "bucket_cap_mb": 3e-4 if index % 3 else 100}
    name = ("adamw", "muonlike", "sgd")[index % 3]
    directory = write_files(tmp_path / "mlp", make_model(), 1 + index % 2, 1)
    num_ranks = 2 * (1 + index % 2)
    stage = (index // 4) % 3 or int(table["overlap_param_sync"])
    check(directory, num_ranks, 2, name, distributed_optimizer=table, use_zero=stage)
    if index % 4 == 1:
        check(
            directory,
            num_ranks,
            2,
            name,
            2,
            distributed_optimizer=table,
            use_zero=2,
            zero_ngroups=2,
        )


def test_buckets_are_counted_in_the_dtype_of_the_gradients():
    def sizes(rank, dtype):
        model = torch.nn.ModuleList([torch.nn.Linear(16, 16, bias=False) for _ in range(4)])
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        table = {"grad_sync_dtype": dtype, "bucket_cap_mb": 2 * 16 * 16 * 4 / 2**20}
        optimizer = build_optimizer(model, torch.optim.SGD, config_of(**table), lr=0.1)
        return [len(bucket.members) for bucket in optimizer._reducer.buckets]

    assert run_ranks(2, sizes, "float32")[0] == [2, 2]
    assert run_ranks(2, sizes, "bfloat16")[0] == [4]


def test_gradients_travel_in_their_dtype(files):
    def traffic(rank):
        module = load_class(files)()
        optimizer = build_optimizer(module, OPTIMIZERS["adamw"], config_of(grad_sync_dtype="bf16"))
        with optimizer.no_sync():
            module(*make_batch(rank)).backward()
        assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.bfloat16}
        with count_communication() as volume:
            optimizer.sync_shard_grad()
        assert {shard.tensor.grad.dtype for shard in optimizer.shards if shard.num_elements} == {
            torch.float64
        }
        total = volume.total("reduce_scatter", phase="gradients")
        return total.num_bytes / total.elements

    assert run_ranks(2, traffic) == [2, 2]


def test_views_of_one_buffer(files):
    def storages(rank, **table):
        module = load_class(files)()
        build_optimizer(module, OPTIMIZERS["adamw"], config_of(**table))
        module(*make_batch(rank)).backward()
        trained = [p for p in module.parameters() if p.requires_grad]
        return [
            len({x.untyped_storage().data_ptr() for x in of})
            for of in (trained, [p.grad for p in trained])
        ]

    default = {"overlap_grad_sync": False, "bucket_cap_mb": 3e-4}
    assert run_ranks(2, lambda rank: storages(rank, **default)) == [[7, 1]] * 2
    flags = {"contiguous_grad_buffer": False, "contiguous_param_buffer": True}
    assert run_ranks(2, lambda rank: storages(rank, **default, **flags)) == [[1, 7]] * 2


def test_gradients_are_reduced_in_backward(files):
    def calls(rank, overlap):
        module = load_class(files)()
        optimizer = build_optimizer(
            module, OPTIMIZERS["adamw"], config_of(overlap_grad_sync=overlap, bucket_cap_mb=1e-6)
        )
        with count_communication() as volume:
            module(*make_batch(rank)).backward()
        in_backward = volume.calls("reduce_scatter")
        with count_communication() as volume:
            optimizer.step()
        return (
            in_backward,
            volume.calls("reduce_scatter"),
            volume.calls("all_gather", phase="gradients"),
        )

    assert run_ranks(2, calls, True) == [(7, 0, 7)] * 2
    assert run_ranks(2, calls, False) == [(0, 7, 7)] * 2


def test_parameters_arrive_when_they_are_first_read(files):
    def on_rank(rank):
        module = load_class(files)()
        table = {"overlap_param_sync": True, "bucket_cap_mb": 1e-6}
        optimizer = build_optimizer(module, OPTIMIZERS["adamw"], config_of(**table))
        gatherings = optimizer._gathering._gatherings

        def under_way():
            return sum(gathering.is_under_way for gathering in gatherings)

        plain = type(module.norm._parameters)
        module(*make_batch(rank)).backward()
        optimizer.step()
        seen = [under_way()]
        before = {
            name: id(p)
            for scope in (module.norm, module.layers[0])
            for name, p in dict.items(scope._parameters)
        }
        assert module.norm.weight is not None
        seen.append(under_way())
        assert module.layers[0].bias is not None
        seen.append(under_way())
        loss = module(*make_batch(rank))
        seen.append(under_way())
        assert (
            type(module.norm._parameters) is plain and id(module.layers[0].bias) == before["bias"]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(under_way())
        state = {
            name: x.clone()
            for name, x in module.state_dict().items()
            if isinstance(x, torch.Tensor)
        }
        seen.append(under_way())
        optimizer.step()
        optimizer.wait_for_parameters()
        seen.append(under_way())
        return seen, state

    results = run_ranks(2, on_rank)
    for seen, state in results:
        assert seen == [7, 6, 5, 0, 7, 0, 0]
        for name, x in state.items():
            assert name == "mean" or torch.equal(x, results[0][1][name]), (
                "a state dict holds what was gathered"
            )


# ------------------------------------------------------------------------------------------------
# masters


def low_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    ).bfloat16()
    return model


def low_batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()


def low_reference(num_ranks, steps):
    """A float32 master of each parameter, updated by float32 sums of the ranks' bfloat16
    gradients.
    """
    model = low_model()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    for step in range(steps):
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(num_ranks):
            model.zero_grad()
            model(low_batch(rank, step)).square().sum().backward()
            for total, p in zip(sums, model.parameters(), strict=True):
                total += p.grad
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return masters, list(model.parameters())


@pytest.mark.parametrize(
    "flags", [{}, {"contiguous_param_buffer": True}, {"overlap_param_sync": True}], ids=str
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_float32_masters_of_bfloat16_parameters(num_ranks, flags):
    models = [low_model() for _ in range(num_ranks)]  # threads share the global generator

    def train(rank):
        model = models[rank]
        optimizer = build_optimizer(
            model, torch.optim.AdamW, config_of(num_ranks, **flags), lr=0.01
        )
        for step in range(5):
            optimizer.zero_grad()
            model(low_batch(rank, step)).square().sum().backward()
            optimizer.step()
        optimizer.wait_for_parameters()
        assert all(shard.tensor.dtype == torch.float32 for shard in optimizer.shards)
        assert {x.dtype for state in optimizer.state.values() for x in state.values()} == {
            torch.float32
        }
        masters = {s.name: (s.start, s.stop, s.tensor.detach()) for s in optimizer.shards}
        return masters, [p.detach() for p in model.parameters()], state_elements(optimizer)

    masters, parameters = low_reference(num_ranks, 5)
    results = run_ranks(num_ranks, train)
    names = [name for name, _ in low_model().named_parameters()]
    for found, ours, _ in results:
        for name, master, expected, mine in zip(names, masters, parameters, ours, strict=True):
            start, stop, tensor = found[name]
            assert torch.equal(tensor, master.detach().view(-1)[start:stop])
            assert torch.equal(mine, expected)
    total = sum(master.numel() for master in masters)
    assert sum(elements for _, _, elements in results) == 2 * total


def test_masters_are_part_of_the_state():
    model = low_model()
    optimizer = build_optimizer(model, torch.optim.SGD, config_of(1), lr=1e-4)
    for step in range(3):
        optimizer.zero_grad()
        model(low_batch(0, step)).square().sum().backward()
        optimizer.step()
    state = optimizer.state_dict()
    assert [set(values) for values in state["state"].values()] == [{MASTER}] * 4

    again = low_model()
    again.load_state_dict(model.state_dict())
    other = build_optimizer(again, torch.optim.SGD, config_of(1), lr=1e-4)
    other.load_state_dict(state)
    for mine, theirs in zip(optimizer.shards, other.shards, strict=True):
        assert torch.equal(mine.tensor, theirs.tensor) and not torch.equal(
            mine.tensor, mine.parameter.float().view(-1)
        )

    for order in (("module", "optimizer"), ("optimizer", "module")):
        fresh = low_model()
        third = build_optimizer(fresh, torch.optim.SGD, config_of(1), lr=1e-4)
        for part in order:
            (fresh if part == "module" else third).load_state_dict(
                model.state_dict() if part == "module" else state
            )
        third.step()
        for mine, theirs in zip(optimizer.shards, third.shards, strict=True):
            assert torch.equal(mine.tensor, theirs.tensor), order

    for values in state["state"].values():
        del values[MASTER]
    other.load_state_dict(state)
    for shard in other.shards:
        assert torch.equal(shard.tensor, shard.parameter.float().view(-1)), (
            "without masters the parameters are as they are"
        )


@pytest.mark.parametrize(
    "flags", [{}, {"contiguous_param_buffer": True}, {"overlap_param_sync": True}], ids=str
)
def test_masters_follow_parameters_that_somebody_else_sets(flags):
    models, other = [low_model() for _ in range(2)], low_model()
    with torch.no_grad():
        other[0].weight.mul_(3)

    def on_rank(rank):
        optimizer = build_optimizer(models[rank], torch.optim.SGD, config_of(2, **flags), lr=1e-4)
        for step in range(2):
            if step == 1:
                models[rank].load_state_dict(other.state_dict())
            models[rank](low_batch(rank, step)).square().sum().backward()
            before = [shard.tensor.detach().clone() for shard in optimizer.shards]
            optimizer.sync_shard_grad()
            updates = [1e-4 * s.tensor.grad if s.num_elements else 0 for s in optimizer.shards]
            optimizer.step()
            optimizer.zero_grad()
        for shard, stale, update in zip(optimizer.shards, before, updates, strict=True):
            start = (
                other.get_parameter(shard.name).detach().float().view(-1)[shard.start : shard.stop]
            )
            # What was set anew is exact in float32. The others were set to what they rounded to,
            # and their masters stay.
            rtol = 1e-6 if shard.name == "0.weight" else 2**-8
            torch.testing.assert_close(shard.tensor.detach(), start - update, rtol=rtol, atol=1e-6)
            if shard.name == "0.weight" and shard.num_elements:
                assert (shard.tensor - stale).abs().max() > 0.1

    run_ranks(2, on_rank)
