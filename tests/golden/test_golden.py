"""What compiles of small models print and write, as files to read.

Reviewing a change of the compiler is reading a diff.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plans
import pytest
import tiny_gpt
import zoo
from covers import spread
from torch import nn

from shardwright.compiler.compile import Compiled, compile_graph, pass_manager
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.printer import print_graph
from shardwright.compiler.pass_manager import FunctionPass, PassManager
from shardwright.compiler.passes.decide import plan_of
from shardwright.compiler.passes.fold import fold_constants
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.trace.entry import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig

HERE = Path(__file__).parent


def small_llama() -> nn.Module:
    """Two layers of transformers' Llama, in the dtype of its configuration."""
    return zoo.get("llama").build().float()


SMALL_GPT = functools.partial(tiny_gpt.GPT, num_layers=2)


@dataclass(frozen=True)
class Case:
    """A compile whose forms are golden files. ``ranks``: those whose programs are.

    ``recompute``: modules that the plan computes again, beside what the policy says.
    """

    policy: str
    config: Mapping[str, Any]
    model: Callable[[], nn.Module] = tiny_gpt.GPT
    inputs: Callable[[], dict[str, Any]] = tiny_gpt.dummy_args
    ranks: tuple[int, ...] = (0,)
    recompute: tuple[str, ...] = ()

    def graph(self) -> IRGraph:
        config = ComputeConfig(**self.config)
        return trace(self.model(), self.inputs(), dynamic_dims=config.dim_symbols())

    def plan(self, graph: PlannableGraph, config: ComputeConfig) -> Plan:
        plan = plan_of(find_policy(self.policy).apply(graph, config), self.policy)
        return replace(plan, recompute=(*plan.recompute, *self.recompute))

    def compile(self, graph: IRGraph, manager: PassManager | None = None) -> Compiled:
        return compile_graph(
            graph,
            self.plan,
            ComputeConfig(**self.config),
            policy_name=self.policy,
            digest="0123abcd",
            version="0.1.0",
            manager=manager,
        )


TWO = {"plan_ngpus": 2, "runtime_ngpus": 2}
STAGES = {"use_end2end": True, "pas_config": {"stage_starts": ["blocks.2"]}}
VARYING = {0: "batch", 1: "seq"}
CASES = {
    "gpt.dp": Case("dp", {"plan_ngpus": 1, "runtime_ngpus": 1}),
    "gpt.tp": Case("tp", TWO),
    "gpt.data": Case("data", TWO),
    # Copies on two units that store parameters in pieces.
    "gpt.zero3": Case("dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3}),
    "gpt.pp": Case("pp", {**TWO, **STAGES}, ranks=(0, 1)),
    "gpt.tp_pp": Case(
        "hybrid",
        {
            "plan_ngpus": 4,
            "runtime_ngpus": 4,
            "use_end2end": True,
            "pas_config": {"stage_starts": ["blocks.1"], "num_microbatches": 4},
        },
        SMALL_GPT,
        ranks=(0, 2),
    ),
    "gpt.recompute": Case("tp", TWO, SMALL_GPT, recompute=("blocks.*",)),
    "gpt.dynamic": Case(
        "data", {**TWO, "dynamic_dims": {"tokens": VARYING, "labels": VARYING}}, SMALL_GPT
    ),
    "llama.tp": Case("tp", TWO, small_llama, zoo.get("llama").inputs),
}
ALIKE = ["gpt.dp", "gpt.tp", "gpt.data", "gpt.zero3"]
"""Three layers, and ranks that run one program."""
WIDTH = 128


@functools.cache
def compiled(name: str) -> Compiled:
    return CASES[name].compile(CASES[name].graph())


def test_the_graph(golden: Callable[[str, str], None]) -> None:
    graph = plans.annotated(trace(tiny_gpt.GPT(num_layers=1), tiny_gpt.dummy_args()))
    golden("gpt.graph.txt", print_graph(graph))


@pytest.mark.parametrize("case", CASES)
def test_the_program(case: str, golden: Callable[[str, str], None]) -> None:
    program = compiled(case).program
    golden(f"{case}.program.txt", pass_manager().printers[type(program)](program) + "\n")


@pytest.mark.parametrize("case", CASES)
def test_the_files(case: str, golden: Callable[[str, str], None]) -> None:
    files = compiled(case).files
    for rank in CASES[case].ranks:
        golden(f"{case}.{rank}.py" if rank else f"{case}.py", files[f"gencode{rank}.py"])
    golden(f"{case}.plan.json", files["plan.json"] + "\n")


def test_the_form_after_every_pass(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """One layer, and a setting for every pass that trains."""
    case = Case(
        "tp",
        {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": 3, "outputs": "loss"},
        functools.partial(tiny_gpt.GPT, num_layers=1),
        recompute=("blocks.*",),
    )
    manager = pass_manager(dump=tmp_path)
    graph = manager.run(FunctionPass("trace", lambda _: case.graph()), None)
    graph = manager.run(FunctionPass("fold", fold_constants), graph)
    case.compile(graph, manager)
    written = sorted(tmp_path.iterdir())
    assert " ".join(path.stem.partition("-")[2] for path in written) == (
        "trace fold rules dims policy zero outputs recompute lower draws emit"
    )
    for path in written:
        golden(f"gpt.passes.{path.name}", path.read_text())


@pytest.mark.parametrize("policy", ["tp", "data"])
def test_ranks_differ_in_two_lines(policy: str) -> None:
    first, second = (
        compiled(f"gpt.{policy}").files[f"gencode{rank}.py"].splitlines() for rank in range(2)
    )
    differing = [(a, b) for a, b in zip(first, second, strict=True) if a != b]
    axis = {"tp": "tp", "data": "dp"}[policy]
    assert differing == [
        (f"rank    0 ({axis}=0)", f"rank    1 ({axis}=1)"),
        ("    rank = 0", "    rank = 1"),
    ]


@pytest.mark.parametrize("case", spread(CASES, 3))
def test_generated_files_are_formatted(case: str, tmp_path: Path) -> None:
    """Files are as ``ruff format`` leaves them, imports sorted, none unused, no line too long."""
    text = compiled(case).files["gencode0.py"]
    path = tmp_path / "gencode0.py"
    path.write_text(text)
    isort = 'lint.isort.known-first-party = ["shardwright"]'
    for arguments in (
        ["format", "--check", "--diff"],
        ["check", "--select", "E,F,W,I,UP,B", "--config", isort],
    ):
        command = [
            sys.executable,
            "-m",
            "ruff",
            *arguments,
            "--isolated",
            "--line-length",
            str(WIDTH),
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize("case", ALIKE)
def test_three_layers_are_one_method(case: str) -> None:
    tree = ast.parse(compiled(case).files["gencode0.py"])
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert [node.name for node in cls.body if isinstance(node, ast.FunctionDef)] == [
        "declare",
        "forward",
        "blocks_block",
    ]
    text = compiled(case).files["gencode0.py"]
    assert (
        text.count("self.blocks_block(") == 1 and text.count("        for layer in range(3):") == 3
    )  # in declare, for tensors and for what draws random numbers, and in forward


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {folders!r}
import test_golden

for name in {cases!r}:
    for file, text in test_golden.compiled(name).files.items():
        Path(sys.argv[1], f"{{name}}.{{file}}").write_text(text)
"""


@pytest.mark.slow
def test_files_are_the_same_in_every_process(tmp_path: Path) -> None:
    """Byte for byte, whatever the order of sets and dicts of strings. The golden files themselves
    were written by another process, with another seed.
    """
    cases = list(CASES)
    script = SCRIPT.format(folders=[str(HERE), str(HERE.parent / "_lib")], cases=cases)
    environment = {**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here = {f"{case}.{name}": text for case in cases for name, text in compiled(case).files.items()}
    there = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert there.keys() == here.keys()
    for name, text in here.items():
        assert there[name].splitlines() == text.splitlines(), name
        assert there[name] == text, name
