"""What other libraries and parts of torch do with a module: right on a parallel module, or refused
in words.
"""

import copy
import importlib
import io
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict_saver as saver
from mlp_files import make_batch, make_model, write_files
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwright
from shardwright.runtime.errors import UsageError
from shardwright.runtime.loader import load_class
from shardwright.runtime.module import distributed_checkpoints
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Around(nn.Module):
    """An ordinary model with a parallel part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6).double()
        self.part = part

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.part(self.before(x), target)


class DeepSpeedEngine(nn.Module):
    """Named like that of a library that is not installed, and holds the module as that does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def trained(module):
    """FullyShardedDataParallel flattens parameters of which all are trained, or none."""
    for p in module.parameters():
        p.requires_grad_(True)
    return module


WRAPPERS = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "DeepSpeedEngine": DeepSpeedEngine,
}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("ignore")
def test_wrappers_that_train_on_many_ranks_in_their_own_way(tmp_path, group, name, is_inside):
    module = load_class(write_files(tmp_path, make_model(), 1, 1))()
    with pytest.raises(UsageError) as error:
        WRAPPERS[name](Around(module) if is_inside else module)
    what, why, hint = str(error.value).split("\n")
    assert what == f"{name} cannot wrap MLP: it is or contains a parallel module"
    assert why == (
        "  why:   every rank has pieces of its own there, and the wrapper would treat them "
        "as copies of one tensor"
    )
    assert "shardwright.build_optimizer(model, torch.optim.AdamW, ...)" in hint


SHARDS = {
    "fully_shard": (
        lambda module: fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,))),
        "be given a",
    ),
    "FullyShardedDataParallel": (
        lambda module: FullyShardedDataParallel(trained(module), device_id=torch.device("cpu")),
        "lose its",
    ),
}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.filterwarnings("ignore")
def test_wrappers_that_cut_parameters_again(tmp_path, group, name, is_inside):
    """They are stopped at the first parameter, and the module has all of its own."""
    module = load_class(write_files(tmp_path, make_model(), 1, 1))()
    shard, words = SHARDS[name]
    before = list(module.state_dict())
    with pytest.raises(
        UsageError,
        match=f"cannot {words} (parameter|wrapper) .*\n(.*\n)*.*leave that out: build_optimizer",
    ):
        shard(Around(module) if is_inside else module)
    assert list(module.state_dict()) == before
    assert list(copy.deepcopy(module).state_dict()) == before


@pytest.mark.filterwarnings("ignore")
def test_ordinary_parts_that_torch_cuts_around_a_parallel_module(tmp_path, group):
    """``fully_shard`` that ignores the parameters of a parallel part leaves it alone, and trains
    what is around it; an optimizer of both would sum gradients twice.
    """
    directory = write_files(tmp_path, make_model(), 1, 1)

    def losses(is_cut):
        torch.manual_seed(0)
        model = Around(load_class(directory)())
        if is_cut:
            mesh = dist.init_device_mesh("cpu", (1,))
            fully_shard(model, mesh=mesh, ignored_params=set(model.part.parameters()))
            with pytest.raises(UsageError) as error:
                build_optimizer(model, torch.optim.SGD, lr=0.1)
            what, why, hint = str(error.value).split("\n")
            assert (
                what == "build_optimizer cannot take parameter 'before.weight', which is a DTensor"
            )
            assert "build_optimizer would sum it again" in why
            assert "give build_optimizer the parallel part alone (part), and" in hint
        optimizers = [
            build_optimizer(model.part, torch.optim.SGD, lr=0.1),
            torch.optim.SGD(model.before.parameters(), lr=0.1),
        ]
        found = []
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            x, target = make_batch(0)
            loss = model(x, target)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            found.append(loss.item())
        return found

    assert losses(is_cut=True) == losses(is_cut=False)


def test_an_optimizer_that_sends_parameters_over_those_of_others(tmp_path, group):
    directory = write_files(tmp_path, make_model(), 1, 2)

    def train(rank):
        module = load_class(directory)()
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
        module(*make_batch(0)).backward()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        with pytest.raises(UsageError) as error:
            optimizer.step()
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
        return str(error.value)

    assert set(run_ranks(2, train)) == {
        "ZeroRedundancyOptimizer cannot update parameters of MLP, a parallel module\n"
        "  why:   every rank has pieces of its own, and one rank's 'gain' would be sent "
        "over those of all\n"
        "  try:   optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, lr=...); "
        "ComputeConfig(use_zero=1) splits its state over the ranks"
    }


@pytest.mark.parametrize("form", ["module", "optimizer"])
def test_parameters_that_are_averaged_between_steps(tmp_path, group, form):
    directory = write_files(tmp_path, make_model(), 1, 2)

    def train(rank):
        module = load_class(directory)()
        optimizer = shardwright.build_optimizer(module, torch.optim.SGD, lr=0.1)
        averager = PeriodicModelAverager(period=1)
        module(*make_batch(0)).backward()
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        with pytest.raises(UsageError) as error:
            averager.average_parameters(
                module.parameters() if form == "module" else optimizer.param_groups
            )
        assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
        return str(error.value)

    assert set(run_ranks(2, train)) == {
        "parameters of MLP, a parallel module, cannot be averaged over ranks\n"
        "  why:   every rank has pieces of its own, and 'norm.weight' would be the mean of "
        "different ones\n"
        "  try:   leave the averager out: shardwright.build_optimizer(model, torch.optim.AdamW, "
        "lr=...) sums gradients over the ranks in every step"
    }
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    PeriodicModelAverager(period=1).average_parameters(plain.parameters())


SAVES = {
    "state dict": lambda module: {"model": module.state_dict()},
    "module": lambda module: {"model": module},
    "module inside": lambda module: {"app": {"model": Around(module).state_dict()}},
    "parameters": lambda module: dict(module.named_parameters()),
    "tensors": lambda module: {
        name: x for name, x in module.state_dict().items() if isinstance(x, Tensor)
    },
}
WITH_EXTRA_STATE = ("state dict", "module", "module inside")


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_of_pieces(tmp_path, name):
    """torch's would keep one rank's pieces as the whole model. Of replicas it is right."""
    directory = write_files(tmp_path / "code", make_model(), 1, 2)

    def save(rank):
        module = load_class(directory)()
        with pytest.raises(UsageError) as error:
            dcp.save(SAVES[name](module), checkpoint_id=tmp_path / "saved", no_dist=True)
        return str(error.value).split("\n")

    for rank, (what, why, hint) in enumerate(run_ranks(2, save)):
        holder = f"plan rank {rank}" if name in WITH_EXTRA_STATE else "a rank of MLP"
        assert what == (
            f"torch.distributed.checkpoint would save what {holder} holds as the whole model"
        )
        example = "'layers.0.weight' is [10/tp, 6] G(dp)" if name in WITH_EXTRA_STATE else "'gain'"
        assert why.endswith(f": {example}")
        assert "`shardwright convert directory out --to dcp`" in hint
    assert not (tmp_path / "saved").exists()
    alone = load_class(write_files(tmp_path / "alone", make_model(), 1, 1))()
    dcp.save(SAVES[name](alone), checkpoint_id=tmp_path / "saved", no_dist=True)
    assert (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("plan_ngpus", "use_zero"), [(2, 0), (1, 1)], ids=["cut", "zero"])
def test_a_distributed_checkpoint_of_an_optimizer(tmp_path, plan_ngpus, use_zero):
    """The state of an optimizer is in pieces as the parameters are, or as ZeRO deals it."""
    config = {"plan_ngpus": plan_ngpus, "runtime_ngpus": 2, "use_zero": use_zero}
    directory = write_files(tmp_path / "code", make_model(), 1, plan_ngpus, config)

    def save(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.AdamW, lr=0.1)
        module(*make_batch(0)).backward()
        optimizer.step()
        for value in (optimizer, optimizer.state_dict()):
            with pytest.raises(UsageError, match="would save what a rank of Parallel"):
                dcp.save({"optimizer": value}, checkpoint_id=tmp_path / "saved", no_dist=True)

    run_ranks(2, save)


@pytest.mark.filterwarnings("ignore")
def test_loading_a_distributed_checkpoint_into_pieces(tmp_path):
    dcp.save({"model": make_model()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    directory = write_files(tmp_path / "code", make_model(), 1, 2)

    def load(rank):
        module = load_class(directory)()
        with pytest.raises(UsageError) as error:
            dcp.load({"model": module}, checkpoint_id=tmp_path / "saved", no_dist=True)
        with pytest.raises(UsageError, match="dcp`? makes|cannot be made of MLP"):
            get_model_state_dict(module)
        shardwright.load_checkpoint(tmp_path / "saved", module)
        return str(error.value)

    for rank, text in enumerate(run_ranks(2, load)):
        assert text == (
            "torch.distributed.checkpoint would load whole tensors into what plan rank "
            f"{rank} holds\n"
            "  why:   the ranks of a parallel module hold pieces: 'layers.0.weight' is "
            "[10/tp, 6] G(dp)\n"
            "  try:   shardwright.load_checkpoint(directory, model, optimizer), which reads "
            "checkpoints of torch.distributed.checkpoint too"
        )


def test_state_dicts_of_torch_of_a_whole_module(tmp_path):
    """They find submodules as attributes. The model has one that is called ``mesh``."""
    module = load_class(write_files(tmp_path, make_model(), 1, 1))()
    with pytest.raises(UsageError, match="they look for its submodule 'mesh' as an attribute"):
        get_model_state_dict(module)


def test_functions_are_replaced_when_they_are_imported(tmp_path, monkeypatch):
    """Who never saves with torch's functions does not pay for importing them."""
    load_class(write_files(tmp_path / "code", make_model(), 1, 1))()
    (tmp_path / "late_saver.py").write_text("def save(state_dict):\n    return 'saved'\n")
    monkeypatch.syspath_prepend(tmp_path)
    watched = distributed_checkpoints._WATCHED
    monkeypatch.setitem(
        watched, "late_saver", {"save": watched[saver.__name__]["_save_state_dict"]}
    )
    late = importlib.import_module("late_saver")
    assert late.save({}) == "saved"
    assert hasattr(late.save, distributed_checkpoints._MARK)


def test_others_are_wrapped_as_ever(group):
    DistributedDataParallel(nn.Linear(2, 2))
    nn.DataParallel(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torch_jit(tmp_path):
    module = load_class(write_files(tmp_path, make_model(), 1, 1))()
    with pytest.raises(UsageError, match="the parallel module MLP cannot be traced by torch.jit\n"):
        torch.jit.trace(module, make_batch(0))


class Loss(nn.Module):
    """A linear layer and a loss, or a loss around another module."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = nn.Linear(6, 6).double() if part is None else part

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if isinstance(self.part, nn.Linear):
            return nn.functional.mse_loss(self.part(x), target)
        return 2 * self.part(x, target)


def compiled_loss(tmp_path):
    """Compiled, as nothing of its own has a name that torch.export cannot read."""
    return shardwright.parallelize(
        Loss(),
        dict(zip(("x", "target"), make_batch(0), strict=True)),
        "dp",
        shardwright.ComputeConfig(plan_ngpus=1, runtime_ngpus=1),
        gen_savedir=tmp_path,
    )


TRACERS = {
    "torch.export": lambda module: torch.export.export(module, make_batch(0)),
    "torch.fx": torch.fx.symbolic_trace,
    "make_fx": lambda module: make_fx(module)(*make_batch(0)),
    "torch.onnx": lambda module: torch.onnx.export(
        module, make_batch(0), io.BytesIO(), dynamo=False
    ),
}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("name", TRACERS)
@pytest.mark.filterwarnings("ignore")
def test_tracers_of_torch(tmp_path, group, name, is_inside):
    module = compiled_loss(tmp_path)
    with pytest.raises(UsageError) as error:
        TRACERS[name](Loss(module) if is_inside else module)
    what, why, hint = str(error.value).split("\n")
    assert what == f"the parallel module Loss cannot be traced by {name}"
    assert "communication" in why
    assert hint == "  try:   trace the original module; torch.compile takes the parallel one"


@pytest.mark.slow
def test_strict_export(tmp_path, group):
    with pytest.raises(
        Unsupported,
        match="the parallel module Loss cannot be traced by torch.export; trace the original",
    ):
        torch.export.export(compiled_loss(tmp_path), make_batch(0), strict=True)


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev], ids=lambda f: f.__name__
)
def test_transforms_of_functions(tmp_path, group, transform):
    module = compiled_loss(tmp_path)
    x, target = make_batch(0)
    with pytest.raises(
        UsageError,
        match="the parallel module Loss cannot be called under a transform of torch.func",
    ):
        transform(lambda x: module(x, target))(x)
    module(x, target).backward()


def test_parameters_are_not_pickled_with_their_optimizer(tmp_path):
    module = load_class(write_files(tmp_path, make_model(), 1, 1))()
    torch.save(list(module.parameters()), tmp_path / "free.pt")
    build_optimizer(module, torch.optim.SGD, lr=0.1)
    with pytest.raises(
        UsageError,
        match="parameters that an optimizer of build_optimizer updates cannot be pickled\n",
    ):
        torch.save(list(module.parameters()), tmp_path / "held.pt")


def test_other_parameters_in_the_place_of_the_modules_own(tmp_path):
    module = load_class(write_files(tmp_path, make_model(), 1, 1))()
    own = module.layers[0].bias
    module.layers[0]._parameters["bias"] = nn.Parameter(own.detach().clone())
    with pytest.raises(UsageError) as error:
        module(*make_batch(0))
    assert str(error.value).startswith(
        "parameter 'layers.0.bias' of MLP is not the one that the module was made with\n"
        "  why:   a Parameter lies in its place; gradients are summed for the parameter that "
        "was there\n"
    )
    with torch.no_grad():
        module(*make_batch(0))  # other weights may be evaluated
    del module.layers[0]._parameters["bias"]
    with pytest.raises(
        UsageError, match="why:   somebody has taken it out; the program reads it\n"
    ):
        module(*make_batch(0))


def test_parameters_that_are_assigned_by_loading(tmp_path):
    module = load_class(write_files(tmp_path, make_model(), 1, 1))()
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in module.state_dict().items()
    }
    module.load_state_dict(state, assign=True)
    assert module.layers[0].bias.data_ptr() == state["layers.0.bias"].data_ptr()
    module(*make_batch(0))
    build_optimizer(module, torch.optim.SGD, lr=0.1)
    module.load_state_dict(state, assign=True)
    with pytest.raises(
        UsageError, match="'norm.weight' of MLP was replaced after its optimizer was built\n"
    ):
        module(*make_batch(0))


@pytest.mark.parametrize("stage", [0, 1])
def test_averages_of_weights(tmp_path, stage):
    """Each rank averages its pieces."""
    directory = write_files(tmp_path, make_model(), 1, 2)

    def average(model, optimizer, batches):
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for seeds in batches:
            optimizer.zero_grad()
            sum(model(*make_batch(seed)) for seed in seeds).backward()
            optimizer.step()
            averaged.update_parameters(model)
        return averaged

    def train(rank):
        module = load_class(directory)()
        config = {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": stage}
        optimizer = build_optimizer(module, torch.optim.SGD, config, lr=0.01)
        averaged = average(module, optimizer, [[2 * step + module.ranks.unit] for step in range(3)])
        with torch.no_grad():
            return averaged(*make_batch(9))

    model = make_model()
    averaged = average(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        [[2 * step, 2 * step + 1] for step in range(3)],
    )
    with torch.no_grad():
        expected = averaged(*make_batch(9))
    for found in run_ranks(4, train):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_torch_compile(tmp_path):
    """Numbers stay, and what is counted and checked in a call makes no call compile again."""
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    def losses(wrap):
        module = load_class(write_files(tmp_path / "mlp", make_model(), 1, 1))()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.01)
        called, found = wrap(module), []
        for step in range(6):
            optimizer.zero_grad()
            loss = called(*make_batch(step))
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            found.append((loss.item(), len(compiled)))
        return found

    ours = losses(lambda module: torch.compile(module, backend=backend))
    assert ours[1][1] == ours[-1][1] > 0
    torch.testing.assert_close(
        [loss for loss, _ in ours], [loss for loss, _ in losses(lambda module: module)]
    )
