"""Parallel modules: original names, this rank's pieces, checks of the arguments, state dicts."""

import copy
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from mlp_files import make_batch, make_model, write_files

from shardwright.runtime.checkpoint.load import load_checkpoint
from shardwright.runtime.checkpoint.save import save_checkpoint
from shardwright.runtime.errors import (
    CheckpointError,
    DistributedError,
    InputError,
    LoadError,
    UsageError,
)
from shardwright.runtime.layout import Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.module.declared_module import directory_of_class
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)


@pytest.fixture
def whole_files(tmp_path):
    return write_files(tmp_path / "mlp_1", make_model(), dp=1, tp=1)


def on_ranks(num_ranks, fn):
    return run_ranks(num_ranks, lambda rank: fn(rank))


def message(error):
    return str(error.value)


def test_original_names_and_order(files):
    original = make_model()

    def check(rank):
        module = load_class(files)()
        assert [name for name, _ in module.named_parameters()] == [
            name for name, _ in original.named_parameters()
        ]
        assert set(module.state_dict()) == {*original.state_dict(), "_extra_state"}
        assert module.norm.weight is module.head.weight is module["norm.weight"]
        assert not module.gain.requires_grad
        assert {name for name, _ in module.named_buffers()} == {"mean", "shift", "const_0"}
        assert module.weights("mesh.weight") is dict(module.named_parameters())["mesh.weight"]
        assert module.mesh == Mesh((("dp", 1), ("tp", 2)))

    on_ranks(2, check)


def test_an_optimizer_that_nobody_told_about_the_other_ranks_is_refused(files):
    def train(rank):
        module = load_class(files)()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.step()  # without gradients it changes nothing
        module(*make_batch(0)).backward()
        before = module.norm.weight.detach().clone()
        with pytest.raises(UsageError) as error:
            optimizer.step()
        assert torch.equal(module.norm.weight, before)
        return message(error)

    assert set(run_ranks(2, train)) == {
        "SGD.step() would follow gradients of MLP that nobody has summed over the ranks\n"
        "  why:   that of 'norm.weight' is the sum of what several ranks compute, and "
        "build_optimizer has not made this "
        "optimizer\n"
        "  try:   optimizer = shardwright.build_optimizer(model, torch.optim.SGD, lr=...)"
    }


def test_steps_along_gradients_that_nobody_has_summed_are_warned_of(files):
    """Steps by hand, without an optimizer that could be asked."""

    class ByHand:
        def __init__(self, module):
            self.parameters = list(module.parameters())

        def zero_grad(self):
            for p in self.parameters:
                p.grad = None

        def step(self):
            with torch.no_grad():
                for p in self.parameters:
                    if p.grad is not None:
                        p -= 0.1 * p.grad

    def train(rank, make):
        module = load_class(files)()
        optimizer = make(module)
        for _ in range(3):
            optimizer.zero_grad()
            module(*make_batch(0)).backward()
            optimizer.step()

    with pytest.warns(UserWarning) as caught:
        run_ranks(2, train, ByHand)
    assert [str(warning.message) for warning in caught] == [
        "parameters of MLP have changed since it was called, and nobody sums their gradients\n"
        "  why:   that of 'norm.weight' is the sum of what several ranks compute, and no "
        "optimizer was made by "
        "build_optimizer\n"
        "  try:   optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, lr=...) "
        "in the place of your own"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, train, lambda module: build_optimizer(module, torch.optim.SGD, lr=0.1))


def test_nobody_is_warned_of_values_that_are_loaded_between_calls(files, tmp_path):
    def run(rank):
        module = load_class(files)()
        for _ in range(2):
            module(*make_batch(0))
            module.load_state_dict(module.state_dict())
        save_checkpoint(tmp_path, module)
        for _ in range(2):
            module(*make_batch(0))
            load_checkpoint(tmp_path, module)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, run)


def test_each_rank_holds_its_pieces(files):
    original = make_model()

    def pieces(rank):
        return {name: p.detach() for name, p in load_class(files)().named_parameters()}

    first, second = on_ranks(2, pieces)
    for name, whole in original.named_parameters():
        if name in ("layers.0.weight", "layers.0.bias"):
            assert torch.equal(torch.cat([first[name], second[name]]), whole)
        elif name == "layers.1.weight":
            assert torch.equal(torch.cat([first[name], second[name]], 1), whole)
        else:
            assert torch.equal(first[name], whole) and torch.equal(second[name], whole)


def test_forward_equals_the_original(files):
    x, target = make_batch(0)
    original = make_model()
    expected = original(x, target)

    def run(rank):
        module = load_class(files)()
        loss = module(x, target)
        return loss.detach(), module.state_dict()["mean"]

    for loss, mean in on_ranks(4, run):  # two units
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(mean, original.mean, rtol=1e-13, atol=1e-15)


def test_eval_updates_no_buffer(files):
    x, target = make_batch(0)

    def run(rank):
        module = load_class(files)().eval()
        module(x, target)
        return module.mean, module.rng.moment

    for mean, moment in on_ranks(2, run):
        assert not mean.any()
        assert moment == (0, 0)


def test_a_buffer_update_spares_what_backward_saved_and_the_value(whole_files):
    module = load_class(whole_files)()
    value = torch.ones(6, dtype=torch.float64)
    y = (module.gain.detach().requires_grad_() * module.mean).sum()
    module.update_buffer("mean", value)
    y.backward()
    value.zero_()
    assert module.mean.sum() == 6 and module["mean"] is module.mean


def test_init_params_false_still_has_what_no_checkpoint_holds(files):
    (files / "weights.safetensors").unlink()
    original = make_model()

    def run(rank):
        module = load_class(files)(init_params=False)
        assert torch.equal(module.shift, original.shift)
        assert torch.equal(module.const_0, original.captured)
        assert module.layers[0].weight.shape == (5, 6)
        with pytest.raises(LoadError) as error:
            load_class(files)()
        return message(error)

    for text in on_ranks(2, run):
        assert text == (
            f"{files} has no initial value of 'gain'\n"
            "  why:   there is no weights.safetensors\n"
            "  try:   put weights.safetensors there; or construct with init_params=False and "
            "load a checkpoint or "
            "broadcast_weights"
        )


def test_weights_that_were_never_real(whole_files):
    from safetensors.torch import save_file

    save_file({"mean": torch.zeros(6, dtype=torch.float64)}, whole_files / "weights.safetensors")
    with pytest.raises(
        LoadError, match=re.escape("the model was compiled without weights (on the meta device)")
    ):
        load_class(whole_files)()


def test_a_file_of_another_rank(files):
    def run(rank):
        load_class(files, rank=1)()

    with pytest.raises(DistributedError) as error:
        on_ranks(2, run)
    assert message(error) == (
        "MLP is the part of plan rank 1, but this is rank 0\n"
        "  why:   in units of 2 that is plan rank 0\n"
        "  try:   let shardwright.parallelize or load_class choose the file of this rank"
    )


def test_arguments_are_checked(whole_files):
    module = load_class(whole_files)()
    x, target = make_batch(0)
    with pytest.raises(InputError) as error:
        module(x, target, scale=2.0)
    assert message(error) == (
        "MLP.forward was compiled without the argument 'scale'\n"
        "  why:   the dummy arguments did not have it, so the program ignores it; the call "
        "passes 2.0\n"
        "  try:   leave out scale, or compile again with 'scale' among the dummy arguments"
    )
    with pytest.raises(InputError) as error:
        module(x, target[:3])
    assert message(error) == (
        "MLP.forward: argument 'target' has shape [3, 6], but was compiled for float64[batch, 6]\n"
        "  why:   dim 0 is 3, but batch is 4 in dim 0 of 'x'\n"
        "  try:   pass the compiled shape, or compile again and name the dims that vary in "
        "ComputeConfig.dynamic_dims"
    )


def test_requires_grad_toggled_after_compiling(whole_files):
    module = load_class(whole_files)()
    x, target = make_batch(0)
    module.layers[0].bias.requires_grad_(False)
    with pytest.raises(InputError) as error:
        module(x, target)
    assert message(error) == (
        "parameter 'layers.0.bias' of MLP is frozen, but was trained when it was compiled\n"
        "  why:   which gradients are communicated, and how, was decided then\n"
        "  try:   set its requires_grad back to True, or set it on the original module and "
        "compile again"
    )
    with torch.no_grad():
        module(x, target)  # no gradient is wanted, so nothing depends on it
    module.layers[0].bias.requires_grad_(True)
    module.gain.requires_grad_(True)
    with pytest.raises(InputError, match="'gain' of MLP is trained, but was frozen"):
        module(x, target)


def test_ranks_of_a_unit_with_different_inputs(files):
    def run(rank):
        x, target = make_batch(0 if rank < 3 else 1)
        load_class(files)()(x, target)

    with pytest.raises(InputError) as error:
        on_ranks(4, run)
    assert message(error) == (
        "MLP.forward: argument 'x' is not the same on all ranks of a unit\n"
        "  why:   these ranks agree with each other: 2; 3\n"
        "  try:   give the 2 ranks of a unit the same batch: shard the data over 2 unit(s), "
        "by rank // 2"
    )


def test_inputs_are_compared_at_the_first_call_only(files):
    def run(rank):
        module = load_class(files)()
        volumes = []
        for _ in range(2):
            with count_communication() as volume:
                module(*make_batch(0))
            volumes.append(volume.elements(phase="setup"))
        return volumes

    for first, second in on_ranks(2, run):
        assert first > 0 and second == 0


def test_state_dict_goes_back_where_it_came_from(files):
    def run(rank):
        module, fresh = load_class(files)(), load_class(files)(init_params=False)
        module(*make_batch(0))
        fresh.load_state_dict(module.state_dict())
        assert fresh.rng.moment == module.rng.moment == (0, 1)
        for name, tensor in module.state_dict().items():
            if name != "_extra_state":
                assert torch.equal(tensor, fresh.state_dict()[name]), name
        return module.state_dict()

    states = on_ranks(2, run)

    def other_rank(rank):
        load_class(files)().load_state_dict(states[1 - rank])

    with pytest.raises(CheckpointError) as error:
        on_ranks(2, other_rank)
    assert "the state dict of MLP is of another plan rank" in message(error)


def test_state_dict_of_another_layout(files):
    def run(rank):
        module = load_class(files)()
        state = module.state_dict()
        state["_extra_state"]["layouts"]["layers.1.bias"] = "[6/tp]"
        module.load_state_dict(state)

    with pytest.raises(CheckpointError) as error:
        on_ranks(2, run)
    assert message(error) == (
        "the state dict of MLP holds 'layers.1.bias' in another layout\n"
        "  why:   it was saved as [6/tp], here it is [6] G(dp)\n"
        "  try:   load it where it was saved, or merge the state dicts of all ranks and load "
        "the merged one"
    )


def test_state_dict_of_the_original(files, whole_files):
    original = make_model(seed=7)
    module = load_class(whole_files)()
    module.load_state_dict(original.state_dict())
    assert torch.equal(module.layers[0].weight, original.layers[0].weight)

    def run(rank):
        load_class(files)().load_state_dict(original.state_dict())

    with pytest.raises(CheckpointError, match="the state dict has no layouts for MLP"):
        on_ranks(2, run)


def test_conversion_keeps_ties_and_the_device(whole_files):
    module = load_class(whole_files)().to(torch.float64)
    assert module.device == torch.device("cpu")
    with pytest.raises(
        UsageError, match="the parallel module MLP cannot be converted from float64 to float32"
    ):
        module.float()
    with pytest.raises(
        UsageError, match="the parallel module MLP cannot be converted from float64 to bfloat16"
    ):
        torch.nn.Sequential(module).to(torch.bfloat16)
    assert module.norm.weight is module.head.weight
    assert module.to("meta").device == torch.device("meta") and module.norm.weight.is_meta


def test_a_deep_copy_has_tensors_of_its_own(files):
    x, target = make_batch(0)

    def run(rank):
        module = load_class(files)()
        module(x, target).backward()
        copied = copy.deepcopy(module)
        own = {p.data_ptr() for p in module.parameters()}
        assert not own & {p.data_ptr() for p in copied.parameters()} and all(
            p.grad is None for p in copied.parameters()
        )
        assert copied.norm.weight is copied.head.weight is copied["norm.weight"]
        assert torch.equal(copied.mean, module.mean)
        with torch.no_grad():
            copied.layers[0].weight.zero_()
        copied.layers[0].weight.requires_grad_(False)
        with pytest.raises(InputError, match="'layers.0.weight' of MLP is frozen"):
            copied(x, target)
        copied.layers[0].weight.requires_grad_(True)
        copied(x, target).backward()
        return (
            module(x, target).detach(),
            module.layers[0].weight.grad,
            copied.layers[0].weight.grad,
        )

    original = make_model()
    original(x, target)
    expected = original(x, target).detach()
    for loss, grad, other_grad in on_ranks(2, run):
        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
        assert grad.abs().sum() > 0 and not torch.equal(grad, other_grad)


def test_a_parallel_module_is_not_pickled(whole_files):
    with pytest.raises(UsageError) as error:
        pickle.dumps(load_class(whole_files)())
    assert message(error) == (
        "MLP cannot be pickled\n"
        "  why:   it is one rank's part of a compiled module, and holds process groups\n"
        "  try:   save its state_dict(), or all ranks together with shardwright.save_checkpoint"
    )


def test_what_the_original_had_besides_tensors(whole_files):
    module = load_class(whole_files)()
    with pytest.raises(AttributeError) as error:
        module.generate  # noqa: B018
    assert message(error) == (
        "the parallel module 'MLP' has no attribute 'generate'\n"
        "  why:   it has the forward, the parameters and the buffers of the original module, "
        "not its other attributes\n"
        "  try:   read it from the original; methods of the original that call forward, such "
        "as generate(), run this module "
        "after original.forward = parallel"
    )
    with pytest.raises(AttributeError, match=r"try:   with optimizer\.no_sync\(\): around all "):
        module.no_sync  # noqa: B018
    assert not hasattr(module, "config") and module.norm.weight is module.head.weight
    with pytest.raises(AttributeError) as error:
        module.layers[0].in_features  # noqa: B018
    assert message(error) == (
        "submodule 'layers.0' of a parallel module has no attribute 'in_features'\n"
        "  why:   it stands for a submodule of the original, and has its parameters, buffers and "
        "submodules alone: 'weight', 'bias'\n"
        "  try:   read other attributes and call methods of the original"
    )
    assert not hasattr(module.layers[0], "in_features")


def test_arguments_on_another_device(whole_files):
    x, target = make_batch(0)
    module = load_class(whole_files)()
    with pytest.raises(InputError) as error:
        module(x, target.to("meta"))
    assert message(error) == (
        "MLP.forward: argument 'target' is on meta, but the module is on cpu\n  try:   pass "
        "target.to(model.device)"
    )


def test_printing_shows_the_rank(files):
    text = on_ranks(4, lambda rank: repr(load_class(files)()))[3]
    assert "mesh dp=1 x tp=2; rank 1 (dp=0, tp=1); unit 1 of 2" in text


def test_children_whose_names_are_no_identifiers(tmp_path):
    class Odd(ParallelModule):
        mesh, rank, inputs = Mesh(), 0, {}

        def declare(self):
            self.parameter("layers.a-b.0", "[2]", torch.float64)
            self.parameter("0.weight", "[2]", torch.float64)
            self.buffer("training", "[1]", torch.float64)

    from safetensors.torch import save_file

    tensors = {"layers.a-b.0": torch.ones(2), "0.weight": torch.zeros(2), "training": torch.ones(1)}
    save_file({name: x.double() for name, x in tensors.items()}, tmp_path / "weights.safetensors")
    Odd.__module__ = "odd_module"
    import sys
    import types

    sys.modules["odd_module"] = types.SimpleNamespace(__file__=str(tmp_path / "gencode0.py"))
    try:
        module = Odd()
    finally:
        del sys.modules["odd_module"]
    assert (
        module.layers["a-b.0"].sum() == 2
        and module[0].weight.sum() == 0
        and module.weights("0.weight").shape == (2,)
    )
    assert module.weights("training").sum() == 1 and module.training is True


def test_a_declaration_round_trips_through_json():
    from mlp_files import declarations

    for declaration in declarations():
        assert Declaration.from_json(declaration.name, declaration.to_json()) == declaration


def test_the_directory_of_a_class_is_that_of_its_file(files):
    assert directory_of_class(load_class(files, rank=0)) == Path(files)
