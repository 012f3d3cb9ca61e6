"""What has to be the same on all ranks is compared now and then: one rank that goes its own way is
named.
"""

import warnings

import pytest
import torch
from mlp_files import make_batch, make_model, write_files
from pipeline_training import samples_of, write
from pipelines import make_pipe

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, InputError, UsageError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

EVERY = 3


def files(folder, every=EVERY):
    return write_files(
        folder / "mlp",
        make_model(),
        1,
        2,
        config={"plan_ngpus": 2, "runtime_ngpus": 4, "check_ranks_every": every},
    )


def train(
    directory, steps, act=None, lr=lambda rank: 0.01, batch=lambda rank, step: make_batch(step)
):
    """Train on two units of tp=2; ``act(rank, step, module, optimizer)`` after each step. Returns
    how far each rank came.
    """

    def on_rank(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=lr(rank), momentum=0.9)
        volumes = []
        for step in range(steps):
            optimizer.zero_grad()
            with count_communication() as volume:
                module(*batch(rank, step)).backward()
                optimizer.step()
            volumes.append(volume.elements(phase="setup"))
            if act is not None:
                act(rank, step, module, optimizer)
        return volumes

    return run_ranks(4, on_rank)


def set_rate(optimizer, rank, step):
    if rank == 2 and step == 4:
        optimizer.param_groups[0]["lr"] = 0.005


def skip_ahead(module):
    module.rng.step += 7


DIVERGING = {
    "another learning rate later": (
        6,
        {"act": lambda rank, step, module, optimizer: set_rate(optimizer, rank, step)},
        "the ranks do not agree on 'lr' of parameter group 0\n"
        "  why:   ranks 0, 1, 3: 0.01; rank 2: 0.005\n"
        "  try:   set options and step schedulers alike on all ranks; what follows from a "
        "loss or a metric must follow from "
        "that of all ranks",
    ),
    "a step more": (
        2,
        {
            "act": lambda rank, step, module, optimizer: (
                optimizer.step() if (rank, step) == (3, 1) else None
            )
        },
        "the ranks do not agree on the number of steps that the optimizer has taken\n"
        "  why:   ranks 0, 1, 2: 2; rank 3: 3\n"
        "  try:   call optimizer.step() equally often on all ranks: what one rank skips, all "
        "of them must skip",
    ),
    "another checkpoint": (
        1,
        {
            "act": lambda rank, step, module, optimizer: (
                skip_ahead(module) if (rank, step) == (0, 0) else None
            )
        },
        "the ranks do not agree on the step at which training stands\n"
        "  why:   rank 0: 8; ranks 1, 2, 3: 1\n"
        "  try:   load the same checkpoint on all ranks",
    ),
}


@pytest.mark.parametrize("name", DIVERGING)
def test_a_rank_that_trains_otherwise_is_named(tmp_path, name):
    step, options, text = DIVERGING[name]
    directory = files(tmp_path)
    if step:
        train(directory, step, **options)  # so long nobody looks
    with pytest.raises(UsageError) as error:
        train(directory, step + 1, **options)
    assert str(error.value) == text


def test_a_step_that_one_rank_leaves_out_is_told_soon(tmp_path):
    """It has taken as many steps as the others at each sum: it meets them one batch late."""
    directory = files(tmp_path, 100)

    def on_rank(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.01)
        for step in range(8):
            optimizer.zero_grad()
            module(*make_batch(step)).backward()
            if (rank, step) not in {(2, 2), (3, 2)}:  # a whole unit, whose own sums agree
                optimizer.step()
            steps[rank] = step

    steps = {}
    with pytest.raises(UsageError) as error:
        run_ranks(4, on_rank)
    assert str(error.value) == (
        "the ranks do not agree on how often gradients were cleared that no step has used\n"
        "  why:   ranks 0, 1: 0; ranks 2, 3: 1\n"
        "  try:   call optimizer.step() equally often on all ranks: what one rank skips, all "
        "of them must skip"
    )
    assert max(steps.values()) <= 4


@pytest.mark.parametrize("clears", ["before", "behind"])
def test_a_batch_that_one_unit_leaves_out_behind_its_forward_is_told_soon(tmp_path, clears):
    """Its next gradients meet those of the others: they are as many and of the same steps."""
    directory = files(tmp_path, 100)

    def on_rank(rank, leaving_out):
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.01)
        loader, num_steps = iter(range(9)), 0
        while num_steps < 7:
            if clears == "before":
                optimizer.zero_grad()
            batch = next(loader)
            loss = module(*make_batch(batch))
            if rank in leaving_out and batch == 2:
                continue
            loss.backward()
            optimizer.step()
            num_steps += 1
            if clears == "behind":
                optimizer.zero_grad()

    for leaving_out in ((), (0, 1, 2, 3), (2, 3)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ranks(4, on_rank, leaving_out)
        assert [str(warning.message) for warning in caught] == (
            [
                "the ranks do not agree on how many calls of the module were followed by no "
                "backward\n"
                "  why:   ranks 0, 1: 0; ranks 2, 3: 1\n"
                "  try:   leave out a batch on all ranks or on none: a rank that leaves one out "
                "meets the others one batch late, and at the end they wait for it"
            ]
            if leaving_out == (2, 3)
            else []
        )


def test_a_step_that_one_rank_of_a_unit_leaves_out_is_told_soon(tmp_path):
    """All of it, forward too: its next batch is another one than that of the unit."""
    directory = files(tmp_path, 100)
    steps = {}

    def batch(rank, step):
        steps[rank] = step
        return make_batch(step + (rank == 3 and step >= 2))

    with pytest.raises(InputError, match="'x' is not the same on all ranks of a unit"):
        train(directory, 8, batch=batch)
    assert max(steps.values()) == 2


def test_other_inputs_than_the_rest_of_the_unit(tmp_path):
    """A rank whose data has shifted by one batch; that of another unit may be any."""
    directory = files(tmp_path)
    train(directory, 6, batch=lambda rank, step: make_batch(step + 10 * (rank // 2)))
    with pytest.raises(InputError) as error:
        train(directory, 5, batch=lambda rank, step: make_batch(step + (rank == 3 and step > 0)))
    assert str(error.value).startswith(
        "MLP.forward: argument 'x' is not the same on all ranks of a unit\n  why:   these "
        "ranks agree with each other: 2; 3\n"
    )


@pytest.mark.parametrize(
    ("every", "due"),
    [(EVERY, [0, 1, 2, 3, 4, 6]), (9, [0, 1, 2, 3, 4, 5]), (0, [0]), (1, list(range(7)))],
)
def test_in_between_nothing_is_sent(tmp_path, every, due):
    """One step after a comparison of all ranks, those of a unit compare the arguments."""
    for volumes in train(files(tmp_path, every), 7):
        assert [step for step, elements in enumerate(volumes) if elements] == due


def test_stages_of_a_pipeline(tmp_path):
    """Ranks have other parameters, and one of them none of the samples: what they have in common is
    compared.
    """
    config = {"plan_ngpus": 2, "runtime_ngpus": 4, "check_ranks_every": 2}
    directory = write(tmp_path / "files", make_pipe("1f1b", 2, 2))

    def on_rank(rank, diverges):
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.SGD, config, lr=0.01)
        for step in range(5):
            if diverges == "lr" and rank == 2 and step == 1:
                optimizer.param_groups[0]["lr"] = 0.5
            shift = 7 if diverges == "samples" and rank == 3 and step > 1 else 0
            module.train_step(samples_of(step + shift, module.ranks.unit, 2))
            optimizer.step()

    run_ranks(4, on_rank, None)
    with pytest.raises(
        UsageError, match="'lr' of parameter group 0\n  why:   ranks 0, 1, 3: 0.01; rank 2: 0.5\n"
    ):
        run_ranks(4, on_rank, "lr")
    with pytest.raises(
        InputError,
        match="of sample 0 differs between the ranks of a unit\n.*agree with each other: 2; 3\n",
    ):
        run_ranks(4, on_rank, "samples")


def test_how_often_is_a_number():
    with pytest.raises(
        ConfigError, match="check_ranks_every is a whole number of at least 0\n  why:   it is -1"
    ):
        ComputeConfig(plan_ngpus=1, runtime_ngpus=1, check_ranks_every=-1)


def drift(name, where=(1,), by=0.01):
    """Numbers of their own in ``name`` on these ranks, after the second step."""

    def act(rank, step, module, optimizer):
        if step == 1 and rank in where:
            with torch.no_grad():
                dict(module.named_parameters())[name].add_(by)

    return act


COPIES = {
    # [WIDTH], computed alike along tp
    "computed alike": (
        "head.bias",
        (1, 3),
        "0, 2; 1, 3; they are up to 0.0",
    ),
    # [HIDDEN/tp, WIDTH]: ranks 0, 2 and ranks 1, 3 have one piece each
    "pieces, over the units": ("layers.0.weight", (3,), "1; 3\n"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_that_a_script_lets_drift_are_named(tmp_path, name):
    parameter, where, text = COPIES[name]
    directory = files(tmp_path)
    train(directory, 4, drift(parameter, where))  # so long nobody looks
    with pytest.raises(UsageError) as error:
        train(directory, 5, drift(parameter, where))
    found = str(error.value)
    assert found.startswith(
        f"parameter {parameter!r} is not the same any more on the ranks with copies of it\n"
        f"  why:   these ranks agree with each other: {text}"
    )
    assert "torch.Generator that is seeded alike" in found


def test_rounding_and_pieces_of_their_own_are_no_drift(tmp_path):
    """Where ranks compute copies, they may round them differently, and pieces are everyone's own;
    ranks that add up one gradient have the same bits.
    """
    directory = files(tmp_path)
    train(directory, 5, drift("head.bias", (1, 3), by=1e-14))
    train(directory, 5, drift("layers.0.weight", (1, 3)))
    with pytest.raises(UsageError, match="'norm.weight' is not the same any more"):
        train(directory, 5, drift("norm.weight", (1, 3), by=1e-14))
