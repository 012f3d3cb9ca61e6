"""Optimizers that need whole tensors on parameters that the plan cuts: the numbers of one device,
and state in one place.
"""

import copy

import pytest
import torch
from covers import spread
from mlp_files import make_batch, make_model, write_files
from pipeline_files import Net
from pipeline_training import assert_equal, write
from pipeline_training import train_rank as train_stage
from pipeline_training import train_reference as train_stages
from pipelines import make_pipe
from zero_training import OPTIMIZERS, Muonlike, check, state_elements, train_reference

from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.runtime.checkpoint.merged import merge_state_dicts
from shardwright.runtime.errors import CheckpointError, ConfigError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

SMALL = {"reducer_bucket_cap_mb": 4e-4}
CASES = [
    (1, 2, 1, {}),
    (1, 4, 1, SMALL),  # 10 hidden units over 4
    (2, 2, 1, {}),
    (1, 2, 2, {"use_zero": 1}),
    (1, 3, 2, {"use_zero": 2, **SMALL}),
    (2, 2, 1, {"use_zero": 1, "zero_use_reduce_scatter": True, "use_async_reducer": True}),
    (1, 2, 4, {"use_zero": 2, "zero_ngroups": 2, **SMALL}),
    (
        1,
        2,
        2,
        {"distributed_optimizer": {"overlap_param_sync": True, "contiguous_param_buffer": True}},
    ),
    (2, 2, 2, {"distributed_optimizer": {"contiguous_grad_buffer": False, "bucket_cap_mb": 4e-4}}),
]


@pytest.mark.parametrize(("dp", "tp", "units", "options"), spread(CASES, 2), ids=str)
def test_training_equals_one_device(tmp_path, dp, tp, units, options):
    directory = write_files(tmp_path / "mlp", make_model(), dp, tp)
    name = ("muonlike", "adafactor")[CASES.index((dp, tp, units, options)) % 2]
    results = check(directory, dp * tp * units, units, name, accumulate=2, **options)
    mine = [result["state_elements"] for result in results]
    if options.get("use_zero") or "distributed_optimizer" in options:
        alike = (tp - 1) * 18  # of three vectors tp holds copies whose gradients need no sum
        assert sum(mine) == options.get("zero_ngroups", 1) * (_whole_state(name) + alike), (
            "the others' exists once in a group"
        )


def _whole_state(name):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    model(*make_batch(0)).backward()
    optimizer.step()
    return state_elements(optimizer)


@pytest.mark.parametrize(("options", "rows"), [({}, 2), ({"use_zero": 1}, 1)])
def test_owners_are_balanced(tmp_path, options, rows):
    """60, 60 and 10 elements that tp=2 cuts; two units, each with an owner of its own without
    ZeRO.
    """
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def on_rank(rank):
        optimizer = build_optimizer(
            load_class(directory)(), Muonlike, {"plan_ngpus": 2, "runtime_ngpus": 4, **options}
        )
        for group in optimizer.param_groups:
            assert [p.ndim for p in group["params"]] == [1, 1, 2, 1, 2, 1, 1, 1], (
                "whatever a rank has of them"
            )
        return {
            whole.name: (whole.owner, whole.is_counted)
            for whole in optimizer.wholes
            if whole.is_owner
        }

    results = run_ranks(4, on_rank)
    owners = [name for result in results for name in result]
    assert sorted(owners) == sorted(rows * ["layers.0.bias", "layers.0.weight", "layers.1.weight"])
    assert max(sum(name.endswith("weight") for name in result) for result in results) == 1
    assert sum(counted for result in results for _, counted in result.values()) == 3, (
        "each is counted once"
    )
    assert all(owner == rank for rank, result in enumerate(results) for owner, _ in result.values())


def test_a_tensor_has_values_while_a_step_runs(tmp_path):
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    class Starting(Muonlike):
        """Keeps what the parameters are when it is made."""

        def __init__(self, params):
            super().__init__(params)
            self.start = [
                p.detach().clone() for group in self.param_groups for p in group["params"]
            ]

    def on_rank(rank):
        optimizer = build_optimizer(load_class(directory)(), Starting)
        module = next(iter(optimizer._model.parallel_modules))
        names = [name for group in optimizer.param_groups for name in group["param_names"]]
        for name, x in zip(names, optimizer.start, strict=True):
            if x.numel():
                torch.testing.assert_close(x, expected[name], rtol=0, atol=0)
        owned = [whole for whole in optimizer.wholes if whole.is_owner]
        assert all(
            whole.tensor.isnan().all() and whole.tensor.untyped_storage().nbytes() == 8
            for whole in owned
        )
        seen = []
        optimizer.register_step_post_hook(
            lambda *_: seen.extend(bool(w.tensor.isfinite().all()) for w in owned)
        )
        module(*make_batch(0)).backward()
        optimizer.sync_shard_grad()
        assert all(whole.tensor.grad.shape == whole.shape for whole in owned)
        optimizer.step()
        assert all(whole.tensor.isnan().all() for whole in owned)
        return len(owned), seen

    expected = {name: p.detach() for name, p in make_model().named_parameters()}
    results = run_ranks(2, on_rank)
    assert sum(count for count, _ in results) == 3 and all(
        seen == [True] * count for count, seen in results
    )


@pytest.mark.parametrize("options", [{}, {"use_zero": 2}], ids=str)
def test_a_parameter_that_nobody_used_has_no_gradient(tmp_path, options):
    """And one of which some ranks have a gradient has zeros in the other pieces."""
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def on_rank(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(
            module, Muonlike, {"plan_ngpus": 2, "runtime_ngpus": 4, **options}
        )
        with optimizer.no_sync():
            module(*make_batch(0)).backward()
        module.get_parameter("layers.0.weight").grad = None
        if rank % 2:
            module.get_parameter("layers.1.weight").grad = None
        optimizer.sync_shard_grad()
        found = {whole.name: whole.tensor.grad for whole in optimizer.wholes if whole.is_owner}
        optimizer.step()
        return found, {whole.name for whole in optimizer.wholes if whole.tensor in optimizer.state}

    found, stepped = {}, set()
    for gradients, names in run_ranks(4, on_rank):
        found |= gradients
        stepped |= names
    assert found["layers.0.weight"] is None and stepped == {"layers.0.bias", "layers.1.weight"}
    assert found["layers.1.weight"][:, :5].all() and not found["layers.1.weight"][:, 5:].any()


def test_what_moves(tmp_path):
    """Each rank receives, of the 130 elements that are cut, what it owns and does not have, for
    gradients and for values, and afterwards what it has and does not own; a flag comes with each
    piece.
    """
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def on_rank(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(module, Muonlike)
        module(*make_batch(0)).backward()
        with count_communication() as volume:
            optimizer.step()
        owned = [whole for whole in optimizer.wholes if whole.is_owner]
        arriving = sum(whole.pieces[1 - rank].num_elements + 1 for whole in owned)
        back = sum(
            whole.pieces[rank].num_elements for whole in optimizer.wholes if not whole.is_owner
        )
        assert volume.total(phase="gradients", axis="wholes").received == 2 * arriving + back

    run_ranks(2, on_rank)


def test_a_closure(tmp_path):
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    class Twice(Muonlike):
        """Evaluates after a step, and steps again."""

        def step(self, closure):
            with torch.enable_grad():
                closure()
            super().step()
            with torch.enable_grad():
                loss = closure()
            super().step()
            return loss

    def train(module, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = module(*make_batch(0))
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(2)]

    model = make_model()
    expected = train(model, Twice(model.parameters()))

    def on_rank(rank):
        module = load_class(directory)()
        return train(module, build_optimizer(module, Twice))

    for losses in run_ranks(2, on_rank):
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


def test_torchs_own_muon_beside_what_it_leaves_alone(tmp_path):
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def make(parameters):
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02, weight_decay=0.1)

    def train(module, optimizer):
        for step in range(2):
            optimizer.zero_grad()
            module(*make_batch(step)).backward()
            optimizer.step()
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    model = make_model()
    expected = train(model, make(model.parameters()))

    def on_rank(rank):
        module = load_class(directory)()
        found = train(module, build_optimizer(module, make))
        return found, {d.name: d.layout for d in module.declarations}, module.mesh

    for rank, (found, layouts, mesh) in enumerate(run_ranks(2, on_rank)):
        for name, p in found.items():
            whole = expected[name]
            for dim in range(whole.ndim):
                runs = layouts[name].runs(dim, mesh, mesh.coords(rank))
                whole = torch.cat(
                    [whole.narrow(dim, start, stop - start) for start, stop in runs], dim
                )
            # Muon itself iterates in bfloat16: what rounding makes of a gradient is the same, as
            # the gradient is.
            torch.testing.assert_close(p, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    spread(
        [
            ("zb_v", {}),
            ("1f1b", {"use_zero": 2, "reducer_bucket_cap_mb": 1e-6}),
            pytest.param("1f1b", {}, marks=pytest.mark.slow),
            pytest.param(
                "zb_v", {"use_zero": 2, "reducer_bucket_cap_mb": 1e-6}, marks=pytest.mark.slow
            ),
        ],
        2,
        first=1,
    ),
    ids=str,
)
def test_pipelines(tmp_path, name, options):
    """Stages cut over tp with an embedding that two of them share, in two units."""
    pipe = make_pipe(name, 2, 4, SCHEDULES[name].min_chunks, tp=(2, 2))
    directory = write(tmp_path / "files", pipe)
    num_ranks = 2 * pipe.num_ranks
    config = {"plan_ngpus": pipe.num_ranks, "runtime_ngpus": num_ranks, **options}
    results = run_ranks(num_ranks, lambda rank: train_stage(directory, config, make=Muonlike))
    assert_equal(
        pipe, train_stages(pipe, Net(pipe.num_stages, pipe.tied), 2, make=Muonlike), results
    )


def test_masters_of_whole_tensors(tmp_path):
    """float16 masters of float64 parameters, saved and loaded: on the owner only, equal to those of
    a plan without cuts.
    """
    options = {"distributed_optimizer": {"dtype": "float16", "grad_sync_dtype": "float32"}}

    def train(tp, units):
        directory = write_files(tmp_path / f"mlp {tp}", make_model(), 1, tp)

        def on_rank(rank):
            module = load_class(directory)()
            config = {"plan_ngpus": tp, "runtime_ngpus": tp * units, **options}
            optimizer = build_optimizer(module, OPTIMIZERS["muonlike"], config)
            for step in range(2):
                optimizer.zero_grad()
                module(*make_batch(step)).backward()
                optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
            masters = {
                whole.name: whole.tensor.detach().clone()
                for whole in optimizer.wholes
                if whole.is_owner
            }
            for whole in optimizer.wholes:
                whole.tensor.detach().zero_()
            optimizer.load_state_dict(saved)
            for whole in optimizer.wholes:
                if whole.is_owner:
                    assert whole.tensor.dtype == torch.float16 and torch.equal(
                        whole.tensor, masters[whole.name]
                    )
            return module.state_dict(), saved

        results = run_ranks(tp * units, on_rank)
        return merge_state_dicts([module for module, _ in results], [saved for _, saved in results])

    (cut, cut_state), (plain, plain_state) = train(2, 2), train(1, 2)
    assert cut_state["masters"].keys() == plain_state["masters"].keys()
    for number, master in plain_state["masters"].items():
        assert torch.equal(cut_state["masters"][number], master)
    for name, p in plain.items():
        assert torch.equal(cut[name], p)


def test_state_of_another_plan_is_refused(tmp_path):
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def on_rank(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(module, Muonlike)
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["param_shards"] = [
                [0, 0] if bounds == "whole" else bounds for bounds in group["param_shards"]
            ]
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict(state)
        return str(caught.value)

    texts = run_ranks(2, on_rank)
    assert texts[0].startswith(
        "the optimizer state is of other shards of the parameters\n"
        "  why:   of 'layers.0.weight' it has no element, and this rank has the whole tensor\n"
    )


def test_what_looks_at_all_parameters_is_refused(tmp_path):
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def on_rank(rank):
        with pytest.raises(ConfigError) as caught:
            build_optimizer(load_class(directory)(), torch.optim.LBFGS)
        return str(caught.value)

    assert set(run_ranks(2, on_rank)) == {
        "LBFGS cannot train a model of which ranks have different parts\n"
        "  why:   its update of a parameter depends on the gradients of all others, and "
        "'layers.0.weight' lies in pieces as "
        "[10/tp, 6] G(dp)\n"
        "  try:   plan with dp, or use an optimizer that treats each parameter by itself"
    }


def test_remainders_are_refused(tmp_path):
    options = {"distributed_optimizer": {"store_param_remainders": True}}
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def on_rank(rank):
        module = load_class(directory)()
        for p in module.parameters():
            p.data = p.data.bfloat16()
        with pytest.raises(ConfigError) as caught:
            build_optimizer(
                module, Muonlike, {"plan_ngpus": 2, "runtime_ngpus": 2, "use_zero": 0, **options}
            )
        return str(caught.value)

    assert set(run_ranks(2, on_rank)) == {
        "store_param_remainders is not possible for an optimizer that needs whole tensors of "
        "parameters that the plan cuts\n"
        "  why:   all of the master of 'layers.0.bias' lies on one rank, which holds a piece "
        "of the parameter\n"
        "  try:   leave it out, or use an optimizer that treats every element by itself"
    }


def test_steps_taken_by_hand_scale_what_the_owner_has(tmp_path):
    """Scaling after the gradients have come to their owners reaches the owners."""
    directory = write_files(tmp_path / "mlp", make_model(), 1, 2)

    def on_rank(rank, halve):
        module = load_class(directory)()
        optimizer = build_optimizer(module, Muonlike)
        (module(*make_batch(0)) * (2.0 if halve else 1.0)).backward()
        optimizer.sync_shard_grad()
        if halve:
            optimizer.scale_grads(0.5)
        norm = optimizer.clip_gnorm()
        optimizer.step()
        return norm, {name: p.detach().clone() for name, p in module.named_parameters()}

    for (norm, found), (expected_norm, expected) in zip(
        run_ranks(2, on_rank, True), run_ranks(2, on_rank, False), strict=True
    ):
        torch.testing.assert_close(norm, expected_norm, rtol=1e-14, atol=0)
        for name, p in found.items():
            torch.testing.assert_close(p, expected[name], rtol=1e-14, atol=1e-15)
    reference = train_reference(OPTIMIZERS["muonlike"], 1, steps=1)
    torch.testing.assert_close(expected_norm, reference["norms"][0], rtol=1e-12, atol=0)
