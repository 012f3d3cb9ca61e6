"""Parameters that stages with meshes of different shape use: the first stage owns them, the others
hold copies.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same
from covers import spread
from parity import assert_close_tree
from tied import SAMPLES, Tied
from traces import shared_traces
from verified import verify_zoo

import shardwright
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.passes.stages import stage_of_ops
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.compiler.schedule.published import generate
from shardwright.frontend.verification.one_device import adamw, reference_run
from shardwright.frontend.verification.verify import compile_into
from shardwright.policies.batches import batch_classes
from shardwright.policies.choice import choose_dims
from shardwright.policies.partition import stage_starts
from shardwright.policies.policy import PolicyFunction
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer


def unequal(
    meshes: list[dict[str, int]],
    placement: list[int],
    num_microbatches: int,
    schedule: str = "1f1b",
) -> PolicyFunction:
    """``meshes``: of each position in the pipeline, of the axes ``dp`` and ``tp``. ``placement``:
    each stage's position.
    """

    def apply(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        positions = [Mesh.of(mesh) for mesh in meshes]
        first = [sum(mesh.size for mesh in positions[:index]) for index in range(len(positions))]
        order = generate(
            schedule, len(positions), num_microbatches, len(placement) // len(positions)
        )
        starts = stage_starts(
            graph, Plan(Mesh(())), order, config, load_hardware("a100-80gb", config.runtime_ngpus)
        )
        stages = tuple(
            StagePlan(op, positions[at], tuple(range(first[at], first[at] + positions[at].size)))
            for op, at in zip(["", *starts], placement, strict=True)
        )
        whole = Mesh.of({"rank": sum(mesh.size for mesh in positions)})
        plan = Plan(whole, stages=stages, schedule=schedule, num_microbatches=num_microbatches)
        strategies = {}
        for op, stage in stage_of_ops(graph, plan).items():
            strategies[op] = _strategies(graph, stages[stage].mesh)[op]
        return Plan(
            whole, strategies, stages=stages, schedule=schedule, num_microbatches=num_microbatches
        )

    cache: dict[Mesh, dict[str, dict[str, str]]] = {}

    def _strategies(graph: PlannableGraph, mesh: Mesh) -> dict[str, dict[str, str]]:
        if mesh not in cache:
            builder = graph.builder(mesh)
            if "dp" in mesh.names:
                split_dims(builder, "dp", batch_classes(graph))
            if "tp" in mesh.names:
                split_dims(builder, "tp", choose_dims(graph, mesh.axis_size("tp")))
            found = builder.plan("by mesh").strategies
            cache[mesh] = {op.name: dict(found.get(op.name, {})) for op in graph.ops}
        return cache[mesh]

    return apply


ONE: dict[str, int] = {}
PIPELINES: dict[str, tuple[Any, ...]] = {
    "tp=2 to one": ([{"tp": 2}, ONE], [0, 1], 4),
    "one to tp=2": ([ONE, {"tp": 2}], [0, 1], 4),
    "dp=2 to tp=3": ([{"dp": 2}, {"tp": 3}], [0, 1], 4),
    "tp=2 to dp=2 x tp=2": ([{"tp": 2}, {"dp": 2, "tp": 2}], [0, 1], 3),
    "a V of tp=2 and one": ([ONE, {"tp": 2}], [0, 1, 1, 0], 3, "zb_v"),
    "three": ([{"tp": 2}, ONE, {"dp": 2}], [0, 1, 2], 5, "gpipe"),
}


def check(name: str, case: str, num_units: int, **settings: Any) -> None:
    meshes = PIPELINES[case][0]
    num_ranks = sum(torch.Size(mesh.values()).numel() for mesh in meshes)
    config = {
        "plan_ngpus": num_ranks,
        "runtime_ngpus": num_ranks * num_units,
        "use_end2end": True,
        **settings,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify_zoo(name, unequal(*PIPELINES[case]), config)
    assert report.ok, str(report)


QUICK = ("tp=2 to one", "dp=2 to tp=3", "a V of tp=2 and one")


@pytest.mark.parametrize(
    "case",
    spread([pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in PIPELINES], 2),
)
def test_tied_embeddings(case: str) -> None:
    check("gpt2", case, 1)


@pytest.mark.parametrize(
    ("name", "case", "num_units", "settings"),
    spread(
        [
            pytest.param("t5", "tp=2 to one", 2, {}, marks=pytest.mark.slow),
            pytest.param(
                "t5",
                "three",
                1,
                {"use_async_reducer": True, "reducer_bucket_cap_mb": 1e-6},
                marks=pytest.mark.slow,
            ),
            ("gpt2", "dp=2 to tp=3", 2, {"use_async_reducer": True, "grad_reduction": "mean"}),
            pytest.param("gpt2", "tp=2 to one", 2, {"use_zero": True}, marks=pytest.mark.slow),
            (
                "gpt2",
                "tp=2 to one",
                2,
                {"distributed_optimizer": {"overlap_param_sync": True, "bucket_cap_mb": 1e-3}},
            ),
            pytest.param(
                "gpt2",
                "dp=2 to tp=3",
                2,
                {"use_zero": 2, "reducer_bucket_cap_mb": 1e-6},
                marks=pytest.mark.slow,
            ),
            ("gpt2", "tp=2 to one", 2, {"use_zero": 3}),
        ],
        3,
    ),
)
def test_units_and_ways_to_reduce(
    name: str, case: str, num_units: int, settings: dict[str, Any]
) -> None:
    check(name, case, num_units, **settings)


def compiled(folder: Path, case: str, num_ranks: int) -> Path:
    config = ComputeConfig(plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_end2end=True)
    with shared_traces("tied"):
        return compile_into(folder, Tied(), SAMPLES[0], unequal(*PIPELINES[case]), config)


def test_copies_follow_their_owner_under_any_optimizer(tmp_path: Path) -> None:
    """Copies follow at once after a step of ``build_optimizer``'s, before the next step of the
    module with others; they have no state.
    """

    def on_rank(built: bool) -> tuple[list[Any], list[bool]]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw) if built else adamw(module.parameters())
        embedding = module.words.weight
        seen, has_state = [], []
        for _ in range(2):
            module.train_step(SAMPLES)
            optimizer.step()
            module.infer_step(SAMPLES)
            seen.append(embedding.detach().clone())
            has_state.append(embedding in optimizer.state)
        return seen, has_state

    directory = compiled(tmp_path, "one to tp=2", 3)
    expected = [reference_run(Tied(), [SAMPLES], adamw, steps).parameters for steps in (1, 2)]
    for built in (True, False):
        (whole, owns), *copies = run_ranks(3, lambda _, built=built: on_rank(built))
        assert owns == [True, True] and all(has_state == [False, False] for _, has_state in copies)
        assert_close_tree(whole, [parameters["words.weight"] for parameters in expected])
        for step in (0, 1):
            rows = [seen[step] for seen, _ in copies]
            assert torch.equal(
                torch.cat(rows) if rows[0].shape != whole[step].shape else rows[0], whole[step]
            )


def test_gradients_of_copies_are_added_up_in_the_dtype_of_their_owners(tmp_path: Path) -> None:
    """bfloat16 copies of a parameter with a float32 master: their gradients accumulate and travel
    in float32.
    """
    options = {"use_end2end": True, "use_zero": 0, "distributed_optimizer": {}}
    config = ComputeConfig(plan_ngpus=3, runtime_ngpus=3, **options)  # type: ignore[arg-type]
    directory = compile_into(
        tmp_path, Tied().bfloat16(), SAMPLES[0], unequal(*PIPELINES["one to tp=2"]), config
    )

    def on_rank(rank: int) -> tuple[Any, ...]:
        module = load_class(directory)()
        build_optimizer(module, adamw)
        with count_communication() as volume:
            module.train_step(SAMPLES)
        sent = volume.total("send", phase="gradients")
        gradient = module.words.weight.grad
        return sent.num_bytes, sent.elements, None if gradient is None else gradient.clone()

    (_, _, gradient), *copies = run_ranks(3, on_rank)
    assert all(
        num_bytes == 4 * elements > 0 and kept is None for num_bytes, elements, kept in copies
    )
    reference = reference_run(Tied().bfloat16().double(), [SAMPLES], adamw, 1).gradients[
        "words.weight"
    ]
    assert (
        gradient.dtype == torch.float32 and (gradient - reference).norm() < 0.02 * reference.norm()
    )


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    """Saved, deduped and merged, and loaded under the same plan and another one: training goes on
    as before.
    """

    def train(module: Any, optimizer: Any, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            module.train_step(SAMPLES)
            optimizer.step()
        return {
            name: x.clone()
            for name, x in module.state_dict().items()
            if isinstance(x, torch.Tensor)
        }

    def save(rank: int) -> Any:
        module = load_class(first)()
        optimizer = build_optimizer(module, adamw)
        train(module, optimizer, 2)
        shardwright.save_checkpoint(tmp_path / "run", module, optimizer, step=2)
        states = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        deduped = copy.deepcopy(shardwright.deduped_state_dict(module, optimizer))
        went_on = train(module, optimizer, 2)
        shardwright.load_deduped_state_dict(module, deduped[0], optimizer, deduped[1])
        assert_same(train(module, optimizer, 2), went_on)
        return states, deduped

    def resume(rank: int, directory: Path, state: Any) -> Any:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        if state is None:
            assert shardwright.load_checkpoint(tmp_path / "run", module, optimizer).step == 2
        else:
            shardwright.load_merged_state_dicts(module, state[0], optimizer, state[1])
        train(module, optimizer, 2)
        return copy.deepcopy((module.state_dict(), optimizer.state_dict()))

    first, second = (
        compiled(tmp_path / "a", "tp=2 to one", 3),
        compiled(tmp_path / "b", "dp=2 to tp=3", 5),
    )
    saved = run_ranks(3, save)
    reference = reference_run(Tied(), [SAMPLES], adamw, 4)
    merged = [
        shardwright.merge_state_dicts([r[kind][0] for r in saved], [r[kind][1] for r in saved])
        for kind in (0, 1)
    ]
    assert_same(merged[0][0], merged[1][0])
    for number, entries in merged[0][1]["state"].items():
        assert_same(entries, merged[1][1]["state"][number])
    for directory, num_ranks in ((first, 3), (second, 5)):
        for state in (None, merged[0]):
            ranks = run_ranks(num_ranks, lambda rank, d=directory, s=state: resume(rank, d, s))
            module, optimizer = shardwright.merge_state_dicts(
                [r[0] for r in ranks], [r[1] for r in ranks]
            )
            assert_close_tree({n: module[n] for n in reference.parameters}, reference.parameters)
            assert len(optimizer["state"]) == len(reference.parameters)
