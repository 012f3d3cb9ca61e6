"""The page of a plan: self-contained HTML with what it promises; and the command that makes it."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import plans
import pytest
import zoo
from covers import spread
from peak_cases import WEIGHTS

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.memory.rank_memory import RankMemory
from shardwright.compiler.cost.plan_cost import PlanCost, RankCost
from shardwright.compiler.cost.time.pipeline_time import transfer_seconds
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.cli import given_plans
from shardwright.frontend.cli.main import main
from shardwright.frontend.report.page import Section, _parts_of_step, page
from shardwright.frontend.report.plan_details import Details, in_runs, lines_of
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh

MODELS = """
import sys
sys.path.insert(0, {lib!r})
import zoo
def make():
    entry = zoo.get("gpt2")
    return entry.build(), entry.inputs()
"""


class Reader(HTMLParser):
    """Checks that tags close in order, and collects texts, headings and what is loaded from
    elsewhere.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_memory_over_time_is_that_of_the_machine() -> None:
    """Gloo needs room to sum gradients, in which the two machines differ."""
    case = WEIGHTS[2]
    config, graph = case.config(2), plans.traced(case.model(), case.sample(2))
    compiled = compile_graph(graph, find_policy("dp").apply, config)
    peaks = set()
    for name in ("cpu", "h100"):
        hardware = load_hardware(name, 2)
        cost = audit(compiled.program, config, hardware)
        (moments,) = Details.of(compiled, cost, hardware).moments.values()
        assert max(moment.num_bytes for moment in moments) == cost.peak_bytes
        peaks.add(cost.peak_bytes)
    assert len(peaks) == 2


@pytest.mark.parametrize("policy", spread(["tp", "hybrid"], 2, first=1))
def test_the_page_has_every_part_and_needs_nothing_else(policy: str) -> None:
    graph = plans.zoo_traced("gpt2")
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=8, use_end2end=policy == "hybrid")
    compiled = plans.compile_with(graph, policy, 4, use_end2end=policy == "hybrid")
    hardware = load_hardware("a100-80gb", 8)
    cost = audit(compiled.program, config, hardware)
    extra = Section(title="<b>Extra</b>", columns=("a",), rows=[("1 < 2",)])
    details = Details.of(replace(compiled, config=config), cost, hardware)
    text = page(
        "GPT-2",
        compiled.plan,
        cost,
        hardware,
        num_units=2,
        details=details,
        sections=[extra],
        facts=[("gap", "0 %")],
    )
    read = Reader(text)
    # Links lead to lines of the generated file, which is a part of the page.
    assert read.loaded and {link.removeprefix("#") for link in read.loaded} <= read.ids
    assert {"MFU", "tokens/s", "ZeRO", "parameters", "transformer.h.*"} <= set(read.texts)
    assert ("Stages" in read.texts) == (policy == "hybrid")
    # Memory over time reaches the peak of each rank, and is drawn for every position.
    most = {ranks: max(m.num_bytes for m in own) for ranks, own in details.moments.items()}
    peaks = {memory.rank: memory.peak_bytes for memory in cost.memory}
    assert {rank: size for ranks, size in most.items() for rank in ranks} == peaks
    assert len(most) == len(details.sources) == (2 if policy == "hybrid" else 1)
    assert {f"gencode{ranks[0]}.py" for ranks in most} <= set(read.texts)
    if policy == "tp":
        spent = sum(a.end_s - a.start_s for a in cost.timeline if a.name in ("forward", "backward"))
        layers = sum(each.computing_s + each.communicating_s for each in details.layers)
        assert layers == pytest.approx(spent, rel=1e-9)
    for heading in (
        "What each layer costs",
        "Memory over time",
        "Generated files",
        "A step in time",
        "Memory at its peak",
        "Where the time goes",
        "Ranks on the machine",
        "<b>Extra</b>",
    ):
        assert heading in read.texts
    assert {"1 < 2", "gap", "0 %", "rank 0", "How tensors are held"} <= set(read.texts)
    assert ("waiting in the pipeline" in read.texts) == (policy == "hybrid")
    if policy == "tp":
        # Bars of memory and of time.
        assert read.texts.count("ranks 0-3") == 2 and "tp all_reduce" in read.texts
        row = read.texts.index("tp all_reduce", read.texts.index("bytes in a step"))
        told = cost.ranks[0].comm_s["tp all_reduce"], cost.ranks[0].comm_bytes["tp all_reduce"]
        assert [text for text in read.texts[row + 1 :] if text][:2] == [
            amount(told[0], "s"),
            amount(told[1], "B"),
        ]
        assert f"tp all_reduce {amount(told[0], 's')} ({amount(told[1], 'B')})" in str(cost)
    else:
        assert {"messages, stage 0 to 1", "messages, stage 1 to 0"} <= set(read.texts)
        row = read.texts.index("messages, stage 0 to 1")
        num_bytes = cost.message_bytes["stage 0 to 1"]
        assert [text for text in read.texts[row + 1 :] if text][1:3] == [
            amount(num_bytes, "B"),
            hardware.tiers[0].name,
        ]
        once = transfer_seconds(compiled.program, hardware)
        assert cost.messages == {
            f"stage {a} to {b}": 4 * seconds for (a, b), seconds in once.items()
        }
        assert PlanCost.from_json(
            json.loads(cost.dumps())
        ) == cost and "messages under way: " in str(cost)


def test_bars_of_time_add_up_to_the_step() -> None:
    """Also where gradients are summed beside the backward."""
    step_s, exposed = (
        1.0,
        RankCost(0, 0.9, {"tp all_reduce": 0.05, "units gradients": 0.2}, idle_s=0.05),
    )
    assert _parts_of_step(exposed, step_s) == pytest.approx(
        {"computing": 0.9, "tp all_reduce": 0.05, "units gradients": 0.05}
    )
    waits = RankCost(0, 0.5, {"units gradients": 0.2}, idle_s=0.3)
    assert _parts_of_step(waits, step_s) == {
        "computing": 0.5,
        "units gradients": 0.2,
        "waiting": 0.3,
    }


def test_what_the_page_says_of_stages_and_tensors() -> None:
    """All stages of a rank, the schedule, what is computed again; and layouts that lowering chose,
    names as they are.
    """
    graph = plans.zoo_traced("gpt2")
    compiled = plans.compile_with(
        graph,
        "pp",
        2,
        use_end2end=True,
        pas_config={"schedule": "1f1b_interleaved", "chunks": 2, "num_microbatches": 4},
    )
    plan = replace(compiled.plan, recompute=("transformer.h.*",))
    hardware = load_hardware("a100-80gb", 2)
    cost = PlanCost("a100-80gb", 1.0, (), ())
    text = page("GPT-2", plan, cost, hardware, stored={"a<b>&c.weight": Layout.parse("[64/tp]")})
    read = Reader(text)
    assert {
        "rank 0: pp 0, stages 0, 2",
        "4 stages in 2 positions, 4 microbatches",
        "1f1b_interleaved",
    } <= set(read.texts)
    assert (
        "One rank of each position. Numbers are microbatches. Paler: later stages of the rank."
        in read.texts
    )
    told = (
        "Every operator is computed whole on every rank of its stage. Computed again in the "
        "backward: transformer.h.*."
    )
    assert (
        told in read.texts
        and "a&lt;b&gt;&amp;c.weight" in text
        and "<b>" not in text.split("How tensors are held")[1]
    )


def test_stages_that_begin_inside_a_layer() -> None:
    compiled = plans.compile_with(plans.zoo_traced("gpt2"), "pp", 4, use_end2end=True)
    hardware = load_hardware("a100-80gb", 4)
    cost = audit(compiled.program, compiled.config, hardware)
    details = Details.of(compiled, cost, hardware)
    first, *others = details.stages
    assert not first.begins_inside and any(row.begins_inside for row in others)
    text = page("GPT-2", compiled.plan, cost, hardware, details=details)
    for row in others:
        # A layer that two stages share is named as a part in both.
        shared = {name for other in details.stages if other is not row for name in other.parts}
        assert set(row.parts) <= shared
        if row.begins_inside:
            assert f"stage {row.index} in {row.begins_inside}" in text
    assert "part of transformer.h.0" in text
    # A module that holds others is not listed beside them.
    assert "transformer" not in first.layers and "transformer.wte" in first.layers


def test_alike_ranks_share_a_bar() -> None:
    hardware = load_hardware("a100-80gb", 128)
    memory = tuple(
        RankMemory(rank, {"parameter": 10**9 * (1 + rank % 2)}, "") for rank in range(128)
    )
    ranks = tuple(RankCost(rank, 1.0 + rank / 1000, {"tp all_reduce": 0.5}) for rank in range(128))
    read = Reader(
        page(
            "Model", Plan(Mesh((("tp", 128),))), PlanCost("a100-80gb", 2.0, ranks, memory), hardware
        )
    )
    assert {"64 ranks from 0", "64 ranks from 1", "1 GB", "2 GB"} <= set(read.texts)
    assert "The first 64 of 128 kinds of ranks." in read.texts


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page_models.py").write_text(MODELS.format(lib=str(Path(zoo.__file__).parent)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    request = [
        "simulate",
        "page_models:make",
        "--policy",
        "tp",
        "--plan-ngpus",
        "2",
        "--hardware",
        "h100",
    ]
    assert main([*request, "--html", "plan.html"]) == 0
    shown = capsys.readouterr().out
    assert (
        shown.startswith("step ")
        and "on h100, peak memory" in shown
        and "ranks 0-1: compute" in shown
    )
    Reader((tmp_path / "plan.html").read_text())
    assert main([*request, "--json"]) == 0
    cost = PlanCost.from_json(json.loads(capsys.readouterr().out))
    assert cost.step_s > 0 and len(cost.memory) == 2
    machine = load_hardware("h100", 2)
    small = replace(machine, device=replace(machine.device, memory_bytes=1000.0))
    monkeypatch.setattr(given_plans, "load_hardware", lambda name, num_devices: small)
    assert main(request) == 0 and capsys.readouterr().out.endswith(
        "\ndoes not fit: a device has 1 kB\n"
    )
    monkeypatch.setattr(given_plans, "load_hardware", load_hardware)
    assert main([*request[:-1], "h1000"]) == 1
    assert "h100" in capsys.readouterr().err


def test_where_the_layers_of_a_loop_begin() -> None:
    source = "    def h_block(self, block):\n" + (
        '        """``block`` is one of ``transformer.h``, number ``layer``."""\n'
    )
    assert lines_of(source) == {"transformer.h.*": 2}


def test_layers_in_runs() -> None:
    names = ["wte", "h.0", "h.1", "h.2", "h.5", "ln_f", ""]
    assert in_runs(names) == "wte, h.0-2, 5, ln_f, top-level forward"
