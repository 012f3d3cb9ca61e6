"""Tensor parallelism in two and three dims: what it sends, what it holds, and its numbers."""

import math

import plans
import pytest
import torch
import zoo
from covers import spread
from parity import assert_close_tree
from plans import compile_with, zoo_traced
from precision import float64_casts
from torch import nn
from verified import verify_zoo

import shardwright
from shardwright import count_communication, run_ranks
from shardwright.policies.tensor import TensorOptions, mesh_sizes
from shardwright.runtime.errors import ConfigError, ShardwrightError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.communicator import Communicator

M, K, N = 24, 12, 36


class Linears(nn.Module):
    """Linears of ``[N, K]`` and ``[K, N]``, one after the other."""

    def __init__(self, pairs):
        super().__init__()
        shapes = [(K, N), (N, K)] * pairs
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes).double()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def received(pairs, options, folder):
    """Elements that rank 0 receives in the forward and in the backward of a step."""
    ranks = math.prod(options["shape"])
    config = {"plan_ngpus": ranks, "runtime_ngpus": ranks, "pas_config": options}
    x = torch.randn(M, K, dtype=torch.float64)
    with torch.random.fork_rng():
        model = Linears(pairs)

    def step(rank):
        module = shardwright.parallelize(
            model, {"x": x}, "tensor", config, gen_savedir=folder, instance_name=str(pairs)
        )
        optimizer = shardwright.build_optimizer(module, torch.optim.SGD, lr=0.1)
        module(x)  # the first call compares inputs
        with count_communication() as forward:
            loss = module(x)
        with count_communication() as backward:
            loss.backward()
            optimizer.sync_shard_grad()
        return forward, backward

    return [
        sum(volume.received for key, volume in found.items() if key.phase != "setup")
        for found in run_ranks(ranks, step)[0]
    ]


X, W = M * K + M * N, 2 * K * N  # elements of the inputs and of the weights of two linears
STEPS = {"gather": "steps", "steps": 2}
FLAGS = 2  # beside each summed gradient travels one element: whether any rank has it


@pytest.mark.parametrize(
    "options, forward, backward",
    spread(
        [
            ({"mode": "2d", "shape": [2, 2]}, (X + W) / 4, 2 * (X + W) / 4),
            ({"mode": "2d", "shape": [2, 3]}, 2 / 6 * X + W / 6, 2 * (2 / 6 * X + W / 6)),
            (
                {"mode": "2.5d", "shape": [2, 2, 2]},
                (X / 2 + W) / 4,
                2 * (X / 2 + W) / 4 + W / 4 + FLAGS,
            ),
            ({"mode": "3d", "shape": [2, 2, 2]}, (X + W + X) / 8, (X + W + X) / 8),
            ({"mode": "2d", "shape": [2, 3], **STEPS}, 2 / 6 * X + W / 6, 2 * (2 / 6 * X + W / 6)),
            (
                {"mode": "2.5d", "shape": [2, 2, 2], **STEPS},
                (X / 2 + W) / 4,
                2 * (X / 2 + W) / 4 + W / 4 + FLAGS,
            ),
            # Inputs and weights again, their gradients, and the gradients of results.
            ({"mode": "3d", "shape": [2, 2, 2], **STEPS}, (X + W + X) / 8, 2 * (X + W) / 8 + X / 8),
        ],
        2,
        first=1,
    ),
    ids=["2d", "2d 2x3", "2.5d", "3d", "2d 2x3 steps", "2.5d steps", "3d steps"],
)
def test_linears_receive_what_the_formulas_say(options, forward, backward, tmp_path):
    """Two linears in the middle of a model, so that its ends do not count."""
    short, long = (received(pairs, options, tmp_path) for pairs in (1, 2))
    assert [b - a for a, b in zip(short, long, strict=True)] == pytest.approx([forward, backward])


def test_weights_and_activations_in_pieces(tmp_path):
    """Each rank stores 1/p of every weight, and holds 1/p of every activation."""
    for mode, ranks in (("2d", 4), ("3d", 8)):
        compiled = compile_with(zoo_traced("gpt2"), "tensor", ranks, pas_config={"mode": mode})
        mesh, program = compiled.plan.mesh, compiled.program
        assert isinstance(mesh, Mesh)
        for declaration in program.declarations:
            if declaration.value.ndim > 1 and "wpe" not in declaration.value.fqn:
                held = math.prod(declaration.layout.local_shape(mesh, dict.fromkeys(mesh.names, 0)))
                assert held * ranks == math.prod(declaration.value.shape), declaration
        for call in program.body:
            if (
                getattr(call, "original", None) is None
                or not call.original.results[0].takes_gradient
            ):
                continue
            value, layout = call.original.results[0], call.layouts[0]
            if value.ndim > 2 and value.shape[0] > 1 and not layout.partial:
                assert set(layout.cut_axes) == set(mesh.names), call


def parity(name, options, folder, **sizes):
    graph, entry = zoo_traced(name, **sizes), zoo.get(name)
    ranks = math.prod(options["shape"])
    compiled = compile_with(graph, "tensor", ranks, pas_config=options)
    inputs = entry.inputs(**sizes)
    reference = plans.reference_run(entry.build(), [inputs], steps=1)
    return compiled, plans.check(entry.build(), inputs, compiled, folder, reference)


@pytest.mark.parametrize(
    "name, options",
    spread(
        [
            ("gpt2", {"mode": "2d", "shape": [2, 3]}),
            ("mlp", {"mode": "2.5d", "shape": [2, 2, 2], "gather": "steps"}),
            ("mlp-uneven", {"mode": "3d", "shape": [2, 2, 2]}),
        ],
        2,
    ),
)
def test_numbers_are_those_of_one_device(name, options, tmp_path):
    compiled, _ = parity(name, options, tmp_path)
    assert compiled.plan.policy == "tensor"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mode, beside",
    [
        ("bert-uneven", "2d 2x3", {}),
        ("gpt2", "2.5d", {"use_zero": 1, "units": 2}),
        ("gpt2", "3d", {"stages": 2}),
        ("llama-uneven", "3d", {"recompute": ["model.layers.*"]}),
        ("llama", "2d steps", {"use_zero": 3, "units": 2}),
    ],
)
def test_models_train_as_on_one_device(name, mode, beside):
    """A cover of models, modes and what goes with them; tests/product/tensor_modes.py has all."""
    kind, *given = mode.split()
    shape = {"2d": [2, 2], "2.5d": [2, 2, 2], "3d": [2, 2, 2]}[kind]
    steps = {"gather": "steps", "steps": 3} if "steps" in given else {}
    shape = [int(size) for size in given[0].split("x")] if given and not steps else shape
    settings = dict(beside)
    stages, units = settings.pop("stages", 1), settings.pop("units", 1)
    options = {"mode": kind, "shape": shape, "recompute": settings.pop("recompute", []), **steps}
    options |= {"num_stages": stages, "num_microbatches": 4} if stages > 1 else {}
    ranks = math.prod(shape) * stages
    report = verify_zoo(
        name,
        "tensor",
        {
            "plan_ngpus": ranks,
            "runtime_ngpus": ranks * units,
            "use_end2end": stages > 1,
            "pas_config": options,
            "outputs": "loss",
            **settings,
        },
    )
    assert report.ok, str(report)


@pytest.mark.slow
def test_a_checkpoint_of_3d_goes_on_under_tp(tmp_path):
    """Save after a step on 8 ranks of 3d, go on under tp on 2: as if nothing had happened."""
    graph, entry = zoo_traced("gpt2"), zoo.get("gpt2")
    batches = [entry.inputs(seed=seed) for seed in (1, 2)]

    def files(policy, ranks, **options):
        folder = tmp_path / policy
        plans.write(folder, compile_with(graph, policy, ranks, pas_config=options), entry.build())
        return folder

    folders = {8: files("tensor", 8, mode="3d"), 2: files("tp", 2)}

    def built(ranks):
        module = load_class(folders[ranks])()
        return module, shardwright.build_optimizer(module, torch.optim.AdamW, lr=0.1, eps=1e-4)

    def step(module, optimizer, batch):
        optimizer.zero_grad()
        zoo.loss_of(module(**batch)).backward()
        optimizer.step()

    def before(rank):
        module, optimizer = built(8)
        step(module, optimizer, batches[0])
        shardwright.save_checkpoint(tmp_path / "run", module, optimizer)

    def after(rank):
        module, optimizer = built(2)
        shardwright.load_checkpoint(tmp_path / "run", module, optimizer)
        step(module, optimizer, batches[1])
        return module.state_dict()

    run_ranks(8, before)
    merged, _ = shardwright.merge_state_dicts(run_ranks(2, after))
    model = entry.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-4)
    with float64_casts():
        for batch in batches:
            step(model, optimizer, batch)
    ours = {name: value for name, value in merged.items() if name in dict(model.named_parameters())}
    assert_close_tree(ours, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    "options, num_ranks, text",
    [
        (
            TensorOptions(mode="2d"),
            6,
            "6 ranks are not q x q, as mode '2d' wants them\n"
            "  try:   4, 9, 16 or 25 ranks would do; or give the sizes of a rectangle: "
            "shape=[2, 3]",
        ),
        (TensorOptions(mode="2.5d"), 8, "mode '2.5d' needs its depth"),
        (TensorOptions(mode="2.5d", depth=2), 12, "12 ranks are not 2 x q x q"),
        (TensorOptions(mode="3d"), 12, "12 ranks are not l x l x l"),
        (TensorOptions(mode="2d", shape=(2, 2)), 8, "shape [2, 2] is none of mode '2d' on 8 ranks"),
        (TensorOptions(mode="2d", depth=2), 4, "mode '2d' has no depth"),
        (TensorOptions(mode="2.5d", depth=2, shape=(1, 2, 2)), 4, "depth 2 contradicts shape"),
    ],
)
def test_shapes_that_do_not_fit(options, num_ranks, text):
    with pytest.raises(ConfigError) as caught:
        mesh_sizes(options, num_ranks)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"mode": "2d", "steps": 4}, "option 'steps' is 4, and everything is gathered at once"),
        ({"mode": "1d", "gather": "steps"}, "mode '1d' gathers nothing in steps"),
        (
            {"mode": "2d", "gather": "steps", "gathers_again": False},
            "gathers_again=False contradicts gather='steps'",
        ),
        ({"mode": "2d", "gather": "steps", "steps": 1}, "there are 2 steps or more, not 1"),
        ({"mode": "2d", "gather": "steps", "steps": 99}, "policy 'tensor' can run no product"),
    ],
)
def test_steps_that_mean_nothing(options, text):
    with pytest.raises(ShardwrightError) as caught:
        compile_with(zoo_traced("mlp"), "tensor", 4, pas_config=options)
    assert str(caught.value).startswith(text)


def test_a_dim_that_lies_in_other_blocks_is_gathered_at_once():
    """A note says so: 21 columns over 2 ranks are no even blocks."""
    options = {"mode": "2d", "gather": "steps"}
    plan = compile_with(zoo_traced("bert-uneven"), "tensor", 4, pas_config=options).plan
    reasons = {note.reason for note in plan.notes if note.axis == "steps"}
    assert reasons == {"gathers at once: its dim of 21 does not lie in 2 blocks"}
    assert len(plan.loops["steps"].strategies) == 12


LOST = [
    ("2d", [2, 2], "all_reduce", "c"),
    ("2d", [2, 2], "reduce_scatter", "c"),
    ("2d", [2, 2], "reduce_scatter", "r"),
    ("3d", [2, 2, 2], "all_reduce", "k"),
    ("3d", [2, 2, 2], "reduce_scatter", "i"),
    ("3d", [2, 2, 2], "reduce_scatter", "j"),
    ("3d", [2, 2, 2], "reduce_scatter", "k"),
]
"""Sums that are left out, by mode and axis."""


@pytest.mark.slow
def test_a_sum_that_is_left_out_is_seen(tmp_path, monkeypatch):
    """Each rank takes its own summand for the sum: the loss or a gradient is another one then."""
    entry, graph = zoo.get("gpt2"), zoo_traced("gpt2")
    reference = plans.reference_run(entry.build(), [entry.inputs()], steps=1)
    real = {name: getattr(Communicator, name) for name in ("all_reduce", "reduce_scatter_pieces")}
    for mode, shape, lost, axis in LOST:
        compiled = compile_with(graph, "tensor", math.prod(shape), pas_config={"mode": mode})

        def summed(self, x, *args, of=axis if lost == "all_reduce" else "", **options):
            found = real["all_reduce"](self, x, *args, **options)
            return x.detach().clone() if self.name == of else found

        def scattered(self, pieces, *, of=axis if lost == "reduce_scatter" else "", **options):
            found = real["reduce_scatter_pieces"](self, pieces, **options)
            return pieces[self.index].detach().clone() if self.name == of else found

        def in_pieces(self, x, dim=0, sizes=None, **options):
            sizes = sizes or [x.shape[dim] // self.size] * self.size
            return self.reduce_scatter_pieces(torch.split(x, list(sizes), dim), **options)

        with monkeypatch.context() as broken:
            broken.setattr(Communicator, "all_reduce", summed)
            broken.setattr(Communicator, "reduce_scatter_pieces", scattered)
            broken.setattr(Communicator, "reduce_scatter", in_pieces)
            with pytest.raises(AssertionError, match="differ|close|max"):
                plans.check(entry.build(), entry.inputs(), compiled, tmp_path / mode, reference)
