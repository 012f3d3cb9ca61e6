"""ZeRO-3: parameters stored in pieces over the units (and over the axes that split the batch), held
to one device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zero3_jobs
import zoo
from covers import spread
from precision import float64_casts
from spawn import run_processes
from torch import Tensor, nn
from traces import shared_traces
from verified import verify_zoo

from shardwright.compiler.passes.gathers import GatherTogether
from shardwright.frontend.verification.one_device import OptimizerFactory, adamw
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime import gathered_weights
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication, current_world
from shardwright.runtime.training.build_optimizer import build_optimizer

Case = tuple[str, str, int, int, dict[str, Any]]
"""Model, policy, ranks of a unit, units, further fields of the config."""

MEAN = {"grad_reduction": "mean"}
GROUPS = {"zero_ngroups": 2, **MEAN}
STEPS = {"use_end2end": True}
TWO_STAGES = {"use_end2end": True, "pas_config": {"num_stages": 2}}

CASES: list[Case] = [
    ("gpt2", "dp", 1, 2, {}),
    ("llama-frozen", "dp", 1, 2, MEAN),
    ("resnet", "dp", 1, 2, MEAN),
    ("gpt2-uneven", "tp", 3, 2, MEAN),
    ("gpt2", "pp", 2, 2, {**STEPS, **MEAN}),
    ("llama", "hybrid", 4, 2, TWO_STAGES),
    ("llama", "pp", 2, 2, {**STEPS, "pas_config": {"recompute": ["model.layers.*.mlp"]}}),
    (
        "gpt2",
        "tp",
        2,
        2,
        {
            **STEPS,
            "distributed_optimizer": {"bucket_cap_mb": 1e-3, "contiguous_param_buffer": True},
        },
    ),
]

MORE_CASES: list[Case] = [
    ("resnet", "data", 2, 2, {}),
    ("llama", "tp", 2, 4, {**STEPS, **GROUPS}),
    ("gpt2", "tp", 2, 2, {}),
    ("resnet", "hybrid", 2, 2, {**TWO_STAGES, **MEAN}),
    ("llama", "data", 2, 2, {**STEPS, **MEAN, "reducer_bucket_cap_mb": 1e-4}),
    ("gpt2-uneven", "dp", 1, 4, GROUPS),
    ("gpt2", "pp", 2, 2, {**STEPS, "pas_config": {"schedule": "zb_v", "num_microbatches": 4}}),
    (
        "gpt2",
        "pp",
        2,
        2,
        {**STEPS, "use_async_reducer": True, "pas_config": {"schedule": "1f1b_interleaved"}},
    ),
    ("bert", "dp", 1, 3, {**MEAN, "zero_use_reduce_scatter": True}),
]


def config_of(case: Case) -> dict[str, Any]:
    _, _, plan_ngpus, units, options = case
    return {
        "plan_ngpus": plan_ngpus,
        "runtime_ngpus": plan_ngpus * units,
        "use_zero": 3,
        "outputs": "loss",
        "check_ranks_every": 1,  # copies never drift apart
        **options,
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    "case",
    spread(
        [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)],
        2,
        whole=True,
    ),
    ids=str,
)
def test_training_equals_one_device(case: Case) -> None:
    """Losses, gradients, parameters and buffers over several steps. With ``use_end2end`` two
    samples (or as many as the schedule has) are accumulated.
    """
    optimizer: OptimizerFactory = sgd if "grad_reduction" in case[4] else adamw
    report = verify_zoo(case[0], case[1], config_of(case), steps=2, optimizer=optimizer)
    assert report.ok, str(report)


def test_without_the_reduce_scatter_gradients_are_wrong_and_losses_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered_weights, "reduced_piece", gathered_weights.sliced_piece)
    report = verify_zoo("gpt2", "dp", config_of(CASES[0]), steps=1)
    assert all(d.excess <= 1 for d in report.deviations["losses"])
    wrong = {d.name for d in report.deviations["gradients"] if d.excess > 1}
    assert {
        "transformer.h.0.mlp.c_fc.weight",
        "lm_head.weight",
    } & wrong and "transformer.ln_f.weight" not in wrong


# ------------------------------------------------------------------------------------ what is held,
# and what is sent


def compiled(folder: Path, case: Case) -> Path:
    entry = zoo.get(case[0])
    with float64_casts(), shared_traces(case[0]):
        return compile_into(
            folder, entry.build(), entry.inputs(), case[1], ComputeConfig.of(config_of(case))
        )


def is_cut(parameter: Tensor) -> bool:
    return parameter.ndim > 1


@pytest.mark.parametrize(
    "case",
    spread(
        [("gpt2", "dp", 1, 2, {}), ("gpt2", "dp", 1, 4, {}), ("resnet", "dp", 1, 2, {})],
        2,
        whole=True,
    ),
    ids=str,
)
def test_a_rank_holds_its_part_of_every_matrix(case: Case, tmp_path: Path) -> None:
    """Parameters and the optimizer's state, counted in elements."""
    directory, units, model = compiled(tmp_path, case), case[3], zoo.get(case[0]).build()
    matrices = sum(p.numel() for p in model.parameters() if is_cut(p))
    vectors = sum(p.numel() for p in model.parameters() if not is_cut(p))

    def rank(index: int) -> None:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        loss = zoo.loss_of(module(**zoo.get(case[0]).inputs()))
        assert sum(p.numel() for p in module.parameters()) == matrices // units + vectors
        loss.backward()
        optimizer.step()
        held = [
            x for state in optimizer.state.values() for key, x in state.items() if key != "step"
        ]
        assert sum(x.numel() for x in held) == 2 * (matrices // units + vectors)

    assert matrices % units == 0
    with float64_casts():
        run_ranks(units, rank)


@pytest.mark.parametrize("units", [2, 4])
def test_each_weight_is_gathered_twice_and_reduced_once(units: int, tmp_path: Path) -> None:
    """A lookup needs its table in forward only. The tied table is used twice, far apart: each use
    gathers and reduces.
    """
    directory = compiled(tmp_path, ("gpt2", "dp", 1, units, {}))
    entry = zoo.get("gpt2")
    matrices = {name: p.numel() for name, p in entry.build().named_parameters() if is_cut(p)}
    tied, position = matrices["transformer.wte.weight"], matrices["transformer.wpe.weight"]

    def rank(index: int) -> None:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        for _ in range(2):
            optimizer.zero_grad()
            with count_communication() as volume:
                zoo.loss_of(module(**entry.inputs())).backward()
            every, again = sum(matrices.values()) + tied, sum(matrices.values()) - position
            assert volume.elements("all_gather", axis=ZERO, phase="forward") == every
            assert volume.elements("all_gather", axis=ZERO, phase="backward") == again
            assert volume.elements("reduce_scatter", axis=ZERO, phase="backward") == every
            # Both tables come together, and of each layer the two weights of its attention.
            calls = len(matrices) + 1 - 3
            assert volume.calls("all_gather", phase="forward") == calls
            assert volume.calls("all_gather", phase="backward") == calls - 1
            assert volume.calls("reduce_scatter") == calls
            optimizer.step()

    with float64_casts():
        run_ranks(units, rank)


@pytest.mark.parametrize("name", spread(["llama", "t5"], 2))
def test_gathers_that_join_change_no_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer collectives move the same bytes to the same numbers."""
    case: Case = (name, "dp", 1, 2, {})
    together = compiled(tmp_path / "together", case)
    monkeypatch.setattr(GatherTogether, "__call__", lambda self, program: program)
    alone = compiled(tmp_path / "alone", case)

    def rank(directory: Path) -> tuple[dict[str, Tensor], int, int]:
        with count_communication() as volume:
            found = zero3_jobs.train(directory, name)
        return found, volume.calls("all_gather"), volume.elements("all_gather")

    with float64_casts():
        ours = run_ranks(2, lambda index: rank(together))
        theirs = run_ranks(2, lambda index: rank(alone))
    for (found, calls, elements), (expected, more_calls, same) in zip(ours, theirs, strict=True):
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        assert calls < 0.85 * more_calls and elements == same


def test_clipping_counts_every_element_once(tmp_path: Path) -> None:
    """The norm over pieces on 4 ranks, as 2 x 2, is that of one device, in steps that clip."""
    case: Case = ("gpt2", "tp", 2, 2, MEAN)
    directory, entry = compiled(tmp_path, case), zoo.get("gpt2")
    inputs = [rolled(entry.inputs(), number) for number in range(4)]

    def steps(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[Any]], clip: Any
    ) -> list[Tensor]:
        norms = []
        for batch in batches:
            optimizer.zero_grad()
            for sample in batch:
                (zoo.loss_of(model(**sample)) / len(batch)).backward()
            norms.append(clip())
            optimizer.step()
        return norms

    model = entry.build()
    optimizer = adamw(model.parameters())
    with float64_casts():
        clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
        expected = steps(model, optimizer, [inputs[:2], inputs[2:]], clip)

    def rank(index: int) -> list[Tensor]:
        module = load_class(directory)()
        stepper = build_optimizer(module, adamw)
        unit = module.ranks.unit
        return steps(
            module, stepper, [[inputs[unit]], [inputs[2 + unit]]], lambda: stepper.clip_gnorm(0.1)
        )

    with float64_casts():
        for norms in run_ranks(4, rank):
            parity.assert_close_tree({"norms": norms}, {"norms": expected})


@pytest.mark.slow
def test_processes_compute_what_threads_do(tmp_path: Path) -> None:
    """Gathers that are really under way while operators compute."""
    directory = compiled(tmp_path, ("gpt2-uneven", "dp", 1, 2, {}))
    with float64_casts():
        threads = run_ranks(2, lambda rank: zero3_jobs.train(directory, "gpt2-uneven"))
    processes = run_processes(2, "zero3_jobs:train_in_process", directory, "gpt2-uneven")
    for ours, theirs in zip(processes, threads, strict=True):
        parity.assert_close_tree(ours, theirs, "parameters")


# ------------------------------------------------------------------------------------------------
# what is refused


def test_another_number_of_units(tmp_path: Path) -> None:
    directory = compiled(tmp_path, ("gpt2", "dp", 1, 4, {}))
    with pytest.raises(Exception) as error:
        run_ranks(2, lambda rank: load_class(directory)())
    assert str(error.value) == (
        "GPT2LMHeadModel stores its parameters in pieces over 4 units\n"
        "  why:   2 ranks in units of 1 are 2 unit(s)\n"
        "  try:   start a multiple of 4 ranks, or compile for these with use_zero=3"
    )


def test_pieces_are_not_broadcast_from_one_unit_to_others(tmp_path: Path) -> None:
    from shardwright.runtime.module.broadcast import broadcast_weights

    directory = compiled(tmp_path, ("gpt2", "dp", 1, 4, GROUPS))

    def rank(index: int) -> str:
        module: ParallelModule = load_class(directory)(init_params=index < 2)
        with pytest.raises(Exception) as error:
            broadcast_weights(module, 1)
        broadcast_weights(module, 2)
        other = load_class(directory)()
        for mine, expected in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, expected)
        assert current_world().rank == index
        return str(error.value)

    with float64_casts():
        assert run_ranks(4, rank)[0] == (
            "weights cannot be broadcast with a stride of 1\n"
            "  why:   GPT2LMHeadModel stores its parameters in pieces over 2 ranks\n"
            "  try:   pass a multiple of 2"
        )
