"""Predicted peaks against the bytes that really live, on ranks that are threads, and laws of the
books.
"""

from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from covers import spread
from memory_ranks import measured_peaks
from peak_cases import WEIGHTS
from peak_ranks import PeakCase
from plans import traced, zoo_traced

from shardwright.compiler.compile import Compiled, compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.memory.body_memory import BodyMemory
from shardwright.compiler.cost.memory.books import Books, contiguous_form
from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.cost.memory.pipeline_memory import pipeline_memory
from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.memory.split_backward_memory import SplitMemory
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout

CASES: list[Any] = [
    ("gpt2", "dp", 1, 2, {}),
    ("gpt2", "tp", 2, 2, {}),
    ("gpt2", "dp", 1, 1, {"recompute": ("transformer.h.*",)}),
    ("gpt2", "pp", 2, 2, {"num_microbatches": 4, "recompute": ("stage:0",)}),
    ("gpt2", "hybrid", 4, 4, {"num_microbatches": 4}),
    ("resnet", "data", 2, 2, {}),
    ("resnet", "pp", 2, 2, {"num_microbatches": 3}),
]
MORE: list[Any] = [
    ("gpt2", "data", 2, 2, {}),
    ("gpt2", "pp", 2, 2, {"num_microbatches": 4}),
    ("llama", "cp", 2, 2, {"cp_mode": "ring"}),
    ("llama", "tp", 2, 2, {"recompute": ("model.layers.*",)}),
    ("llama", "pp", 2, 2, {"num_microbatches": 4}),
    ("gpt2", "dp", 1, 1, {}),
    ("llama", "tp", 2, 2, {}),
    ("resnet", "dp", 1, 1, {}),
    ("gpt2", "cp", 2, 2, {"cp_mode": "gather"}),
    ("llama", "cp", 2, 2, {"cp_mode": "ulysses"}),
    ("mistral", "cp", 4, 4, {"cp_mode": "ring", "cp_turns": 0}),
]


def compiled_case(
    name: str, policy: str, plan: int, runtime: int, options: dict[str, Any], **fields: Any
) -> tuple[Any, Any, Compiled, Any]:
    entry = zoo.get(name)
    model, inputs = entry.build(), entry.inputs(batch=8)
    chosen = {key: value for key, value in options.items() if key != "recompute"}
    config = ComputeConfig(
        plan_ngpus=plan, runtime_ngpus=runtime, use_end2end=True, pas_config=chosen, **fields
    )

    def apply(graph: Any, config: ComputeConfig) -> Plan:
        found = find_policy(policy).apply(graph, config)
        made: Plan = getattr(found, "plan", found)
        return replace(made, recompute=options.get("recompute", ()))

    compiled = compile_graph(zoo_traced(name, batch=8), apply, config, policy_name=policy)
    return model, inputs, compiled, config


def predicted(compiled: Compiled, config: ComputeConfig) -> tuple[RankMemory, ...]:
    if compiled.plan.stages:
        return pipeline_memory(compiled.program, config)  # type: ignore[arg-type]
    found = program_memory(compiled.program, config)  # type: ignore[arg-type]
    return tuple(found.at(rank) for rank in range(config.plan_ngpus))


@pytest.mark.parametrize(
    "case",
    spread(
        [*CASES, *[pytest.param(case, marks=pytest.mark.slow) for case in MORE]],
        2,
        first=1,
        whole=True,
    ),
    ids=lambda case: "-".join(map(str, case[:4])) + "-".join(map(str, case[4])),
)
def test_peaks_are_those_measured(case: Any, tmp_path: Path) -> None:
    model, inputs, compiled, config = compiled_case(*case)
    memory = predicted(compiled, config)
    assert not any(rank.assumed for rank in memory)
    for index, measured in enumerate(measured_peaks(tmp_path, compiled, model, inputs, config)):
        found = memory[index % config.plan_ngpus]
        assert found.peak_bytes == pytest.approx(measured, rel=0.05), f"rank {index}: {found}"


@pytest.mark.parametrize(
    ("policy", "plan", "runtime", "zero"),
    spread([("tp", 2, 2, 0), ("dp", 1, 2, 0), ("dp", 1, 2, 2)], 3),
)
def test_several_microbatches_hold_gradients_and_samples(
    policy: str, plan: int, runtime: int, zero: int, tmp_path: Path
) -> None:
    model, inputs, compiled, config = compiled_case("gpt2", policy, plan, runtime, {})
    config = replace(config, use_zero=zero)
    compiled = compile_graph(
        zoo_traced("gpt2", batch=8), find_policy(policy).apply, config, policy_name=policy
    )
    found = program_memory(compiled.program, config, num_microbatches=3)  # type: ignore[arg-type]
    for measured in measured_peaks(tmp_path, compiled, model, inputs, config, 3):
        assert found.peak_bytes == pytest.approx(measured, rel=0.05)


def test_recomputing_and_splitting_hold_less() -> None:
    def peak(*case: Any) -> int:
        _, _, compiled, config = compiled_case(*case)
        return max(rank.peak_bytes for rank in predicted(compiled, config))

    whole = peak("gpt2", "dp", 1, 1, {})
    assert peak("gpt2", "dp", 1, 1, {"recompute": ("transformer.h.*",)}) < 0.8 * whole
    assert peak("gpt2", "tp", 2, 2, {}) < 0.8 * whole


def test_zero_splits_the_state() -> None:
    _, _, compiled, config = compiled_case("gpt2", "dp", 1, 4, {})
    whole = program_memory(compiled.program, config)  # type: ignore[arg-type]
    split = program_memory(compiled.program, replace(config, use_zero=1))  # type: ignore[arg-type]
    two = program_memory(compiled.program, replace(config, use_zero=1, zero_ngroups=2))  # type: ignore[arg-type]
    assert split.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 4, rel=1e-3)
    assert two.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 2, rel=1e-3)


@pytest.mark.parametrize(("runtime", "groups"), spread([(2, 1), (4, 1), (4, 2)], 2))
def test_zero_splits_what_stages_share_between_them_too(runtime: int, groups: int) -> None:
    """Costs split as the runtime does: over all ranks that hold a copy, whichever stage they are
    of.
    """
    _, _, compiled, config = compiled_case("gpt2", "pp", 2, runtime, {"num_microbatches": 2})
    plain = predicted(compiled, config)
    split = predicted(compiled, replace(config, use_zero=1, zero_ngroups=groups))
    (tied,) = (
        value
        for value in compiled.program.graph.parameters
        if value.fqn == "transformer.wte.weight"
    )
    tied_bytes, units = 2 * tied.dtype.itemsize * prod(tied.shape), runtime // 2 // groups
    for before, after in zip(plain, split, strict=True):
        expected = (before.optimizer_bytes - tied_bytes) / units + tied_bytes / (2 * units)
        assert after.optimizer_bytes == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "policy", "plan", "runtime", "recompute"),
    spread([("gpt2", "dp", 1, 2, ("transformer.h.*",)), ("llama", "tp", 2, 4, ())], 2),
)
def test_zero_3_holds_pieces(
    name: str, policy: str, plan: int, runtime: int, recompute: tuple[str, ...], tmp_path: Path
) -> None:
    """What is gathered again in a region that runs again lives no longer than other tensors
    there.
    """
    model, inputs, compiled, config = compiled_case(
        name, policy, plan, runtime, {"recompute": recompute} if recompute else {}, use_zero=3
    )
    (memory, *_) = predicted(compiled, config)
    for measured in measured_peaks(tmp_path, compiled, model, inputs, config):
        assert memory.peak_bytes == pytest.approx(measured, rel=0.05)


class Regions(torch.nn.Module):
    """Linear layers one after the other, of these widths, those in ``again`` two by two."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers = [torch.nn.Linear(a, b, bias=False) for a, b in pairwise(widths)]
        self.first, self.last = layers[0], layers[-1]
        pairs = zip(layers[1:-1:2], layers[2:-1:2], strict=True)
        self.again = torch.nn.ModuleList(torch.nn.Sequential(*pair) for pair in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for pair in self.again:
            x = pair(x.tanh())
        return self.last(x).square().mean()


@pytest.mark.parametrize(
    "widths",
    [
        (4, 64, 64, 64, 64, 64, 64),
        (4, 16, 256, 16, 256, 16, 16),
        (4, 256, 16, 256, 16, 16, 16),
    ],
)
def test_regions_have_the_weight_on_its_way(widths: tuple[int, ...], tmp_path: Path) -> None:
    """Weights are most of the memory, and all but the first take no gradient. The next one is there
    while a region runs again, and while its backward runs.
    """
    model, inputs = Regions(widths), {"x": torch.randn(4, widths[0])}
    for module in (model.again, model.last):
        module.requires_grad_(False)
    options = {"recompute": ("again.*",)}
    config = ComputeConfig(
        plan_ngpus=1, runtime_ngpus=2, use_zero=3, use_end2end=True, pas_config=options
    )
    compiled = compile_graph(traced(model, inputs), find_policy("dp").apply, config)
    (memory,) = predicted(compiled, config)
    for measured in measured_peaks(tmp_path, compiled, model, inputs, config):
        assert memory.peak_bytes == pytest.approx(measured, rel=0.015)


@pytest.mark.parametrize("case", WEIGHTS[:3], ids=str)
def test_gradients_are_summed_in_room_of_its_own_by_gloo_alone(
    case: PeakCase, tmp_path: Path
) -> None:
    """Ranks that are threads hold what they would hold over NCCL, byte by byte but for the flags of
    a bucket.
    """
    model, inputs, config = case.model(), case.sample(2), case.config(2)
    compiled = compile_graph(traced(model, inputs), find_policy("dp").apply, config)

    def peak(hardware: str) -> int:
        return audit(
            compiled.program,
            config,
            load_hardware(hardware, 2),
            num_microbatches=case.num_microbatches,
        ).peak_bytes

    assert peak("cpu") > 1.03 * peak("h100")
    for measured in measured_peaks(
        tmp_path, compiled, model, inputs, config, case.num_microbatches
    ):
        assert peak("h100") == pytest.approx(measured, rel=3e-4)


def test_inference_holds_no_training_state() -> None:
    _, _, compiled, config = compiled_case("gpt2", "dp", 1, 1, {})
    found = program_memory(compiled.program, config, trains=False)  # type: ignore[arg-type]
    assert found.optimizer_bytes == found.gradient_bytes == 0
    assert found.peak_bytes < 0.7 * program_memory(compiled.program, config).peak_bytes  # type: ignore[arg-type]


def test_json_keeps_everything() -> None:
    memory = RankMemory(
        3, {"parameter": 8, "activation": 16, "temporary": 4}, "backward of loss", ("odd",)
    )
    assert RankMemory.from_json(memory.to_json()) == memory
    assert (memory.peak_bytes, memory.activation_bytes, memory.buffer_bytes) == (28, 20, 0)


def test_a_ledger_counts_each_storage_once() -> None:
    ledger = Ledger()
    first = ledger.hold(ledger.new(10, "activation"))
    ledger.hold(first)
    ledger.use(5, "gelu")
    ledger.release(first)
    assert ledger.now == 10 and ledger.peak.num_bytes == 15 and ledger.peak.name == "gelu"
    assert ledger.peak.by_category == {"activation": 10, "temporary": 5}
    ledger.release(first)
    assert ledger.now == 0 and ledger.snapshot() == {}


def test_dtypes_count() -> None:
    linear = torch.nn.Linear(64, 64, bias=False)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    def memory(dtype: torch.dtype, **fields: Any) -> RankMemory:
        model, inputs = Net().to(dtype), {"x": torch.zeros(32, 64, dtype=dtype)}
        config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, **fields)
        compiled = compile_graph(traced(model, inputs), find_policy("dp").apply, config)
        return program_memory(compiled.program, config)  # type: ignore[arg-type]

    single, half = memory(torch.float32), memory(torch.bfloat16)
    mastered = memory(torch.bfloat16, use_zero=0, distributed_optimizer={})
    assert half.parameter_bytes * 2 == single.parameter_bytes == 4 * 64 * 64
    # Two moments, in the dtype of what is updated: the parameter, or its master in float32, which
    # is there besides.
    assert [found.optimizer_bytes for found in (single, half, mastered)] == [
        8 * 64 * 64,
        4 * 64 * 64,
        12 * 64 * 64,
    ]


def test_inputs_of_a_stage_live_until_its_weights_have_their_gradients() -> None:
    """The residual is saved by nobody: it is a leaf of the graph that the second part needs, as
    autograd has it.
    """

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = (
                torch.nn.Linear(8, 16),
                torch.nn.LayerNorm(16),
                torch.nn.Linear(16, 16),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            residual = self.first(x)
            return (residual + self.second(self.norm(residual))).sum()

    options = {"num_microbatches": 2, "schedule": "zb_h1", "stage_starts": ("second",)}
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config=options)
    graph = traced(Net(), {"x": torch.zeros(32, 8)})
    program: Any = compile_graph(graph, find_policy("pp").apply, config, policy_name="pp").program
    assert {value.name for value, _ in program.stages[1].receives} == {"first", "norm"}
    own, received = program.programs[1], [value for value, _ in program.stages[1].receives]
    books = Books(own.plan.storage_mesh, config, ADAM, True)
    ledger = books.ledger
    sources = books.place(own.declarations, {}, [own], staged=True)
    forms = {
        value.name: contiguous_form(Layout.whole(value.shape), value, books.footprints)
        for value in received
    }
    held = {
        name: ledger.hold(ledger.new(form.num_bytes, "activation")) for name, form in forms.items()
    }
    sources |= {name: (forms[name], storage) for name, storage in held.items()}
    body = BodyMemory(
        own, books.footprints, ledger, sources, lambda name, form, storage: ledger.release(storage)
    )
    body.forward()
    split = SplitMemory(body, list(held))
    split.input_gradients(books.roots(own, body))
    for storage in held.values():
        ledger.release(storage)
    assert all(ledger.is_held(storage) for storage in held.values())
    split.weight_gradients()
    assert not any(ledger.is_held(storage) for storage in held.values())
