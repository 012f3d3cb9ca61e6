"""State dicts in memory: merged ones go into the original module and optimizer and back; deduped
ones hold every piece once.
"""

import copy
import io
from collections import Counter

import checkpoints as c
import pytest
import torch
from covers import spread
from mlp_files import make_batch, make_model, write_files
from mlp_training import Mixed
from precision import float64_casts
from torch import Tensor, nn

import shardwright
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.build_optimizer import build_optimizer

TOLERANCE = 1e-10

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-4, amsgrad=True),
    "adamw": c.adamw,
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.02, eps=1e-4),
    "rmsprop": lambda params: torch.optim.RMSprop(
        params, lr=0.02, eps=1e-4, momentum=0.5, centered=True
    ),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.02),
}


def blank():
    """The model with its non-persistent buffer and constant, and nothing that a state dict
    restores.
    """
    model = make_model()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.mean):
            tensor.fill_(7.0)
    return model


def decayed(name, parameter):
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {}


class Model:
    """The hand-made model on a mesh: tied, frozen and awkwardly named parameters, both kinds of
    buffers.
    """

    def __init__(self, folder, dp, tp, units=1):
        self.num_ranks = dp * tp * units
        self.files = write_files(
            folder, make_model(), dp, tp, {"plan_ngpus": dp * tp, "runtime_ngpus": self.num_ranks}
        )

    def trainer(self, optimizer, **options):
        module = load_class(self.files)()
        built = build_optimizer(module, optimizer, **options)

        def step(number):
            built.zero_grad()
            module(*make_batch(number)).div(self.num_ranks // module.mesh.size).backward()
            built.step()

        return module, built, step

    def trained(self, optimizer, steps=2, **options):
        """The state dicts of all ranks."""

        def rank(index):
            module, built, step = self.trainer(optimizer, **options)
            for number in range(steps):
                step(number)
            return copy.deepcopy(
                (
                    module.state_dict(),
                    built.state_dict(),
                    *shardwright.deduped_state_dict(module, built),
                )
            )

        return list(zip(*run_ranks(self.num_ranks, rank), strict=True))


def reference(optimizer, steps=2, groups=None):
    model = make_model()
    params = list(model.parameters())
    built = optimizer(params if groups is None else groups(model))
    for number in range(steps):
        built.zero_grad()
        model(*make_batch(number)).backward()
        built.step()
    return model, built


@pytest.mark.parametrize("name", spread(OPTIMIZERS, 2))
def test_merged_equals_one_device_and_goes_on_there(tmp_path, name):
    optimizer = OPTIMIZERS[name]
    modules, optimizers, _, _ = Model(tmp_path, 2, 2).trained(optimizer)
    module_state, optimizer_state = shardwright.merge_state_dicts(modules, optimizers)
    model, built = reference(optimizer)
    c.assert_same(dict(module_state), model.state_dict(), TOLERANCE)
    fresh = blank()
    fresh.load_state_dict(module_state)
    other = optimizer(fresh.parameters())
    other.load_state_dict(optimizer_state)
    # Torch gives some numbers the dtype of the parameters when it loads them.
    built.load_state_dict(built.state_dict())
    c.assert_same(c.optimizer_tensors(other), c.optimizer_tensors(built), TOLERANCE)
    for trained, stepper in ((model, built), (fresh, other)):
        stepper.zero_grad()
        trained(*make_batch(9)).backward()
        stepper.step()
    c.assert_same(fresh.state_dict(), model.state_dict(), TOLERANCE)


@pytest.mark.parametrize(
    ("mesh", "through"),
    spread(
        [
            ((1, 1), "deduped merged"),
            ((1, 3), "merged"),
            ((1, 3), "one device"),
            ((2, 2), "deduped merged"),
            ((4, 1), "merged"),
            ((4, 1), "one device"),
        ],
        2,
        first=1,
    ),
)
def test_merged_state_loads_under_another_plan(tmp_path, mesh, through):
    optimizer = OPTIMIZERS["adam"]
    modules, optimizers, deduped, deduped_optimizers = Model(
        tmp_path / "from", 1, 2, units=2
    ).trained(optimizer)
    if through == "merged":
        merged = shardwright.merge_state_dicts(modules, optimizers)
    elif through == "deduped merged":
        merged = shardwright.merge_state_dicts(deduped, deduped_optimizers)
    else:
        model, built = reference(optimizer)
        merged = model.state_dict(), built.state_dict()
    to = Model(tmp_path / "to", *mesh)
    expected, expected_optimizer = reference(optimizer, steps=3)

    def rank(index):
        module, built, step = to.trainer(optimizer)
        shardwright.load_merged_state_dicts(module, merged[0], built, merged[1])
        step(2)
        return copy.deepcopy((module.state_dict(), built.state_dict(), module.shift))

    results = run_ranks(to.num_ranks, rank)
    state, optimizer_state = shardwright.merge_state_dicts(
        *zip(*(result[:2] for result in results), strict=True)
    )
    c.assert_same(dict(state), expected.state_dict(), TOLERANCE)
    assert all(torch.equal(result[2], expected.shift) for result in results)  # not persistent
    other = optimizer(expected.parameters())
    other.load_state_dict(optimizer_state)
    c.assert_same(c.optimizer_tensors(other), c.optimizer_tensors(expected_optimizer), TOLERANCE)


def test_parameter_groups(tmp_path):
    optimizer = OPTIMIZERS["adamw"]
    modules, optimizers, _, _ = Model(tmp_path, 1, 2).trained(optimizer, param_groups=decayed)
    module_state, optimizer_state = shardwright.merge_state_dicts(modules, optimizers)

    def groups(model):
        flat = [p for p in model.parameters() if p.ndim < 2]
        return [
            {"params": flat, "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if p.ndim >= 2]},
        ]

    model, built = reference(optimizer, groups=groups)
    names = [name for name, _ in model.named_parameters()]
    assert [[names[n] for n in group["params"]] for group in optimizer_state["param_groups"]] == [
        [name for name, p in model.named_parameters() if (p.ndim < 2) == flat]
        for flat in (True, False)
    ]
    fresh = blank()
    fresh.load_state_dict(module_state)
    other = optimizer(groups(fresh))
    other.load_state_dict(optimizer_state)
    c.assert_same(c.optimizer_tensors(other), c.optimizer_tensors(built), TOLERANCE)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.1]


def test_every_distinct_piece_is_kept_once(tmp_path):
    modules, optimizers, deduped, deduped_optimizers = Model(tmp_path, 2, 2, units=2).trained(
        OPTIMIZERS["adamw"]
    )
    merged = shardwright.merge_state_dicts(modules, optimizers)
    elements = Counter()
    for state in deduped:
        seen = {
            value.data_ptr(): (name, value)
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        elements.update({name: value.numel() for name, value in seen.values()})
    whole = {id(value): value.numel() for value in merged[0].values()}
    assert sum(elements.values()) == sum(whole.values())
    state_elements = [
        sum(
            value.numel()
            for state in states
            for entry in state["state"].values()
            for value in entry.values()
            if value.ndim
        )
        for states in (deduped_optimizers, [merged[1]])
    ]
    assert state_elements[0] == state_elements[1]
    assert [len(state) for state in deduped[4:]] == [
        1
    ] * 4  # the second unit keeps what its plan is
    again = shardwright.merge_state_dicts(deduped, deduped_optimizers)
    c.assert_same(dict(again[0]), dict(merged[0]))


def test_deduped_state_goes_back(tmp_path):
    model, optimizer = Model(tmp_path, 2, 2, units=2), OPTIMIZERS["adamw"]
    modules, optimizers, deduped, deduped_optimizers = model.trained(optimizer)

    def rank(index):
        module, built, _ = model.trainer(optimizer)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        shardwright.load_deduped_state_dict(
            module, deduped[index], built, deduped_optimizers[index]
        )
        for own, state in (
            (c.state_of(module), modules[index]),
            (built.state_dict()["state"], optimizers[index]["state"]),
        ):
            if "_extra_state" in state:
                assert module.state_dict()["_extra_state"] == state["_extra_state"]
                c.assert_same(
                    own, {key: value for key, value in state.items() if isinstance(value, Tensor)}
                )
            else:
                assert own.keys() == state.keys()
                for number in state:
                    c.assert_same(own[number], state[number])

    run_ranks(model.num_ranks, rank)


def test_deduped_state_that_lacks_a_piece(tmp_path):
    model = Model(tmp_path, 1, 2)
    _, _, deduped, _ = model.trained(OPTIMIZERS["sgd"])
    state = {key: value for key, value in deduped[1].items() if key != "layers.0.weight"}

    def rank(index):
        shardwright.load_deduped_state_dict(
            load_class(model.files)(), deduped[0] if index == 0 else state
        )

    with pytest.raises(
        CheckpointError,
        match=r"no rank was given some pieces\n  why:   'layers.0.weight' on ranks \[1\]",
    ):
        run_ranks(2, rank)


def test_compiled_parts_of_an_ordinary_model(tmp_path):
    """Two compiled parts between ordinary layers, one of which is not used."""
    files = write_files(tmp_path, make_model(), 1, 2, {"plan_ngpus": 2, "runtime_ngpus": 4})

    def trained(module, optimizer, divisor, steps):
        for number in steps:
            optimizer.zero_grad()
            module(*make_batch(number)).div(divisor).backward()
            optimizer.step()

    def rank(index):
        module = Mixed(lambda: load_class(files)())
        optimizer = build_optimizer(module, c.adamw)
        trained(module, optimizer, 2, range(2))
        full = copy.deepcopy(
            (
                module.state_dict(),
                optimizer.state_dict(),
                *shardwright.deduped_state_dict(module, optimizer),
            )
        )
        trained(module, optimizer, 2, [2])
        later = c.state_of(module)
        shardwright.load_deduped_state_dict(module, full[2], optimizer, full[3])
        trained(module, optimizer, 2, [2])
        c.assert_same(c.state_of(module), later)
        return full

    results = run_ranks(4, rank)
    model = Mixed(make_model)
    optimizer = c.adamw(model.parameters())
    trained(model, optimizer, 1, range(2))
    for which in (0, 2):
        states = [[result[which + part] for result in results] for part in (0, 1)]
        module_state, optimizer_state = shardwright.merge_state_dicts(*states)
        c.assert_same(dict(module_state), model.state_dict(), TOLERANCE)
        fresh = Mixed(blank)
        fresh.load_state_dict(module_state)
        other = c.adamw(fresh.parameters())
        other.load_state_dict(optimizer_state)
        c.assert_same(c.optimizer_tensors(other), c.optimizer_tensors(optimizer), TOLERANCE)
    assert results[3][2].keys() == {"first._extra_state", "second._extra_state"}


def test_state_dicts_survive_torch_save(tmp_path):
    modules, optimizers, _, _ = Model(tmp_path, 1, 2).trained(OPTIMIZERS["adamw"])
    buffer = io.BytesIO()
    torch.save((modules, optimizers), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    c.assert_same(
        dict(shardwright.merge_state_dicts(*loaded)[0]),
        dict(shardwright.merge_state_dicts(modules)[0]),
    )


def test_the_statistics_of_the_first_unit_are_taken_whatever_the_order(tmp_path):
    def rank(index):
        module = load_class(files)()
        module(*make_batch(module.ranks.unit))
        return copy.deepcopy(module.state_dict())

    files = Model(tmp_path, 1, 2, units=2).files
    states = run_ranks(4, rank)
    assert not torch.equal(states[0]["mean"], states[2]["mean"])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        assert torch.equal(
            shardwright.merge_state_dicts([states[i] for i in order])[0]["mean"], states[0]["mean"]
        )


def test_random_numbers_go_along(tmp_path):
    model = Model(tmp_path, 1, 2)
    modules, _, _, _ = model.trained(OPTIMIZERS["sgd"], steps=3)
    merged, _ = shardwright.merge_state_dicts(modules)

    def rank(index):
        module = load_class(model.files)()
        shardwright.load_merged_state_dict(module, merged)
        return module.rng.step

    assert run_ranks(2, rank) == [3, 3]


def test_tied_parameters_stay_tied(tmp_path):
    modules, _, _, _ = Model(tmp_path, 1, 2).trained(OPTIMIZERS["sgd"])
    merged, _ = shardwright.merge_state_dicts(modules)
    assert merged["norm.weight"] is merged["head.weight"]


def test_missing_ranks(tmp_path):
    modules, _, _, _ = Model(tmp_path, 1, 2).trained(OPTIMIZERS["sgd"])
    with pytest.raises(CheckpointError) as error:
        shardwright.merge_state_dicts(modules[:1])
    assert str(error.value) == (
        "the state dicts do not cover the whole model\n"
        "  why:   30 of 60 elements of 'layers.0.weight'; 5 of 10 elements of 'layers.0.bias'; "
        "30 of 60 elements of 'layers.1.weight'\n"
        "  try:   pass the state dicts of all ranks of a unit"
    )
    with pytest.raises(CheckpointError, match="there is nothing to merge"):
        shardwright.merge_state_dicts([])
    with pytest.raises(CheckpointError, match="there are 2 of the module and 1 of the optimizer"):
        shardwright.merge_state_dicts(modules, [{}])


def test_entries_that_do_not_fit_are_named(tmp_path):
    files = Model(tmp_path, 1, 1).files
    state = make_model().state_dict()
    del state["gain"]
    state["layers.1.bias"] = torch.zeros(7)
    state["other"] = torch.zeros(2)
    module = load_class(files)()
    before = c.state_of(module)
    with pytest.raises(CheckpointError) as error:
        shardwright.load_merged_state_dicts(module, state)
    assert str(error.value) == (
        "the state dict does not fit MLP\n"
        "  why:   'gain' is missing; 'layers.1.bias' is [7] there and [6] here; 'other' is "
        "not in the module"
    )
    c.assert_same(c.state_of(module), before)


def test_an_optimizer_that_names_no_parameters():
    module = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="does not name its parameters"):
        shardwright.merge_state_dicts(
            [module.state_dict()], [torch.optim.SGD(module.parameters()).state_dict()]
        )


def test_state_of_another_shape_than_the_piece_is_refused(tmp_path):
    class Rows(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["rows"] = torch.ones(3)

    modules, optimizers, _, _ = Model(tmp_path, 1, 2).trained(
        lambda params: Rows(params, lr=0.1), elementwise=True
    )
    with pytest.raises(
        CheckpointError, match=r"the optimizer state 'rows' of 'layers.0.weight' cannot be saved"
    ):
        shardwright.merge_state_dicts(modules, optimizers)
    assert current_world().size == 1


def test_parameters_in_pieces_over_units(tmp_path):
    """Merged from all ranks it is what one device has, deduped it goes back, and each piece is kept
    once.
    """
    plan = ("tp+zero3", 2, 4)

    def rank():
        trainer = c.trainer("gpt2", plan)
        trainer.steps(range(2))
        full = copy.deepcopy((trainer.module.state_dict(), trainer.optimizer.state_dict()))
        deduped = copy.deepcopy(shardwright.deduped_state_dict(trainer.module, trainer.optimizer))
        expected = trainer.step(2), c.state_of(trainer.module)
        shardwright.load_deduped_state_dict(
            trainer.module, deduped[0], trainer.optimizer, deduped[1]
        )
        assert torch.equal(trainer.step(2), expected[0])
        c.assert_same(c.state_of(trainer.module), expected[1])
        return *full, *deduped

    modules, optimizers, deduped, deduped_optimizers = zip(*c.on("gpt2", plan, rank), strict=True)
    reference = c.original("gpt2")
    with float64_casts():
        reference.steps(range(2))
    for states in ((modules, optimizers), (deduped, deduped_optimizers)):
        merged, optimizer = shardwright.merge_state_dicts(*states)
        c.assert_same(dict(merged), reference.module.state_dict(), TOLERANCE)
        other = c.original("gpt2")
        other.optimizer.load_state_dict(optimizer)
        c.assert_same(
            c.optimizer_tensors(other.optimizer),
            c.optimizer_tensors(reference.optimizer),
            TOLERANCE,
        )
    elements = sum(
        value.numel() for state in deduped for value in state.values() if isinstance(value, Tensor)
    )
    tensors = {id(value): value for value in reference.module.state_dict(keep_vars=True).values()}
    # Under both names.
    tied = sum(value.numel() for name, value in deduped[0].items() if name == "lm_head.weight")
    assert elements == sum(x.numel() for x in tensors.values()) + tied * len(modules)


def test_a_piece_of_another_unit_is_refused():
    plan = ("dp+zero3", 1, 2)
    states = c.on("gpt2", plan, lambda: copy.deepcopy(c.trainer("gpt2", plan).module.state_dict()))

    def rank():
        module = c.trainer("gpt2", plan).module
        with pytest.raises(CheckpointError) as error:
            module.load_state_dict(states[1 - current_world().rank])
        return str(error.value)

    assert c.on("gpt2", plan, rank)[0] == (
        "the state dict of GPT2LMHeadModel holds another piece of 'lm_head.weight'\n"
        "  why:   it was saved at place [[['zero', 2]], 1] (mesh, rank on it), here is "
        "[[['zero', 2]], 0]\n"
        "  try:   load it where it was saved, or merge the state dicts of all ranks and load "
        "the merged one"
    )
