"""The measurement itself: on threads with next to no effort, in processes, under torchrun; and what
is refused.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch
from rich.console import Console
from spawn import run_processes

from shardwright.compiler.cost.machine.hardware import COLLECTIVES, Hardware, Link, load_hardware
from shardwright.compiler.cost.time.collectives import collective_s, flat_lines
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.schedule.shared_cores import Sharing
from shardwright.frontend.calibrate import calibrate as calibrate_module
from shardwright.frontend.calibrate import links, profile, reference_programs, timing
from shardwright.frontend.calibrate import measured_operators as operators
from shardwright.frontend.calibrate.calibrate import default_ranks, describe, measure
from shardwright.frontend.calibrate.effort import Effort, effort_for
from shardwright.frontend.calibrate.hidden_messages import overlap_of
from shardwright.frontend.calibrate.measuring_ranks import measure_in_processes
from shardwright.frontend.calibrate.reference_programs import REFERENCES, attention_efficiency
from shardwright.frontend.calibrate.timing import seconds_per_call
from shardwright.frontend.cli import calibration
from shardwright.frontend.cli.commands import INTERRUPTED
from shardwright.frontend.cli.main import main
from shardwright.runtime.activity import listening, tell
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import World, current_world

TINY = Effort(
    (2, 4), 1.0, (256, 1024), (256, 4096), 1e-4, 1e-5, dtypes=(torch.float32, torch.float64)
)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is out of the cache need not be, where nobody looks at the figures."""
    monkeypatch.setattr(reference_programs, "FETCHED_BYTES", 2**20)


def measured(num_ranks: int, effort: Effort = TINY) -> Hardware:
    if num_ranks == 1:
        return describe(measure(current_world(), effort))
    results = run_ranks(num_ranks, lambda rank: measure(current_world(), effort))
    facts = [
        {key: value for key, value in result.items() if key != "seconds"} for result in results
    ]
    assert all(fact == facts[0] for fact in facts)
    return describe(results[0])


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_everything_is_measured_and_described(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    hardware = measured(num_ranks)
    assert Hardware.from_json(json.loads(hardware.dumps())) == hardware
    assert hardware.num_devices == num_ranks and len(hardware.tiers) == 1
    assert hardware.backend == "gloo"
    device = hardware.device
    assert f"{num_ranks} ranks on {len(os.sched_getaffinity(0))} cores" in device.name
    assert (
        device.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
    )
    assert set(device.flops_per_s) == {"float32", "float64"} and device.streams is not None
    assert device.measured(3, 3, 3, "float32") and not device.measured(8, 3, 3, "float32")
    expected = {"products.float32", "products.float64", "streams", "launches", "fetches"}
    if num_ranks > 1:
        expected |= {f"node.{kind}" for kind in COLLECTIVES} | {"node.all kinds"}
        assert all(collective_s(hardware, kind, 1e6, range(2)) > 0 for kind in COLLECTIVES)
        sizes = {point["ranks"] for point in hardware.measurements["links"]}
        assert sizes == ({2, 4} if num_ranks == 4 else {2})
        assert device.overlap == overlap_of(hardware.measurements["overlap"])
    assert hardware.residuals.keys() == expected and all(
        error >= 0 for error in hardware.residuals.values()
    )


def test_what_is_hidden_is_what_both_at_once_take_less() -> None:
    def point(both_s: float) -> dict[str, float]:
        return {"work_s": 10.0, "message_s": 8.0, "both_s": both_s}

    found = [overlap_of([point(both_s)]) for both_s in (10.0, 13.0, 18.0, 20.0)]
    assert found == [1.0, 0.625, 0.0, 0.0]
    assert overlap_of([]) == 1.0


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="the fake device is for a build of torch without CUDA"
)
@pytest.mark.skipif(fake_cuda.compiler() is None, reason="the fake device needs a C++ compiler")
@pytest.mark.slow
def test_cuda_devices_are_measured_by_the_events_of_their_stream() -> None:
    """What is of a CPU only is left out; every rank has a device, however many cores there are."""
    fake_cuda.build()
    results = run_processes(4, "cuda_jobs:calibrated", fake_cuda=True)
    for text, parts in results:
        hardware = Hardware.from_json(json.loads(text))
        assert set(parts) == {
            *("attention", "device", "launches", "links", "overlap", "products", "seconds"),
            *("sizes", "streams", "unaligned"),
        }
        assert len(hardware.measurements["attention"]) == 2
        assert hardware.num_devices == 4 and len(hardware.tiers) == 1
        assert hardware.backend == "nccl"
        assert (
            hardware.device.name == "fake"
            and hardware.device.memory_bytes == 2**34
            and hardware.device.sharing is None
        )
        assert set(hardware.device.flops_per_s) == {"float32", "float64", "bfloat16", "float16"}
        assert "4 ranks" in hardware.sources["device"] and set(hardware.tiers[0].kinds) == set(
            COLLECTIVES
        )
        assert all(collective_s(hardware, kind, 1e6, range(2)) > 0 for kind in COLLECTIVES)
        assert {point["ranks"] for point in hardware.measurements["links"]} == {2, 4}
    assert len({json.dumps(json.loads(text)["device"]) for text, _ in results}) == 1


def test_of_ranks_that_share_cores_as_many_measure_as_have_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measuring: set[int] = set()

    def noted(*arguments: Any) -> float:
        measuring.add(current_world().rank)
        return seconds_per_call(*arguments)

    for module in (operators, profile):
        monkeypatch.setattr(module, "seconds_per_call", noted)
    run_ranks(2, lambda rank: measure(current_world(), replace(TINY, measures=rank == 0)))
    assert measuring == {0}


def test_ranks_that_share_cores_are_slower_while_all_compute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = measure(current_world(), TINY)
    alone = describe({**found, "device": {**found["device"], "sharing": None}})
    shared = describe(
        {**found, "device": {**found["device"], "sharing": {"num_ranks": 6, "num_cores": 2}}}
    )
    mine, theirs = alone.device, shared.device
    assert theirs.sharing == Sharing(6, 2) and mine.sharing is None
    call = 4, 4, 4, "float32"
    assert theirs.matmul_s(*call) == pytest.approx(3 * mine.matmul_s(*call))
    assert theirs.memory_s(1000) == pytest.approx(3 * mine.memory_s(1000))
    assert theirs.pass_s("gelu", 1e6, 1) == pytest.approx(3 * mine.pass_s("gelu", 1e6, 1))
    assert theirs.launch_s == pytest.approx(3 * mine.launch_s) and theirs.host_s[
        1
    ] == pytest.approx(3 * mine.host_s[1])
    assert theirs.fetch_s(1e6) == pytest.approx(3 * mine.fetch_s(1e6))
    assert theirs.attention_efficiency == mine.attention_efficiency
    calibration.show(Console(width=200), shared)
    shown = capsys.readouterr().out
    assert (
        "6 ranks share 2 cores: these are the rates of one while all compute, for jobs of 6 ranks"
        in shown
    )
    rows = {tuple(line.split("  ")[0].split()): line for line in shown.splitlines()}
    assert f" {amount(theirs.launch_s, 's')} " in rows["least", "time", "of", "an", "operator"]
    assert f" {amount(theirs.bytes_per_s, 'B', digits=4)}/s " in rows[("memory",)]


def test_links_whose_larger_messages_take_no_longer_have_the_bandwidth_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """None is made up, and the file and the command say so."""
    sizes, flat = (1024, 65536, 4194304), {"all_gather"}

    def seconds(kind: str, num_bytes: int) -> float:
        return (
            max(flat_lines(kind, 2))[0] * 1e-4 * num_bytes**-0.01
            if kind in flat
            else 1e-5 + num_bytes / 1e9
        )

    found = run_ranks(2, lambda rank: measure(current_world(), TINY))[0]
    points = [
        {"tier": "node", "kind": k, "ranks": 2, "bytes": n, "seconds": seconds(k, n)}
        for k in COLLECTIVES
        for n in sizes
    ]
    hardware = describe({**found, "links": points})
    (tier,) = hardware.tiers
    assert tier.kinds["all_gather"].bytes_per_s == pytest.approx(tier.bytes_per_s)
    assert tier.kinds["all_gather"].latency_s == pytest.approx(1e-4, rel=0.5)
    told = "larger messages took no longer, so that its bandwidth is that of all kinds"
    assert {name: source for name, source in hardware.sources.items() if "." in name} == {
        "node.all_gather": told
    }
    calibration.show(Console(width=200), hardware)
    assert f"node.all_gather: {told}. On a quiet machine" in capsys.readouterr().out
    flat |= set(COLLECTIVES)
    hardware = describe(
        {
            **found,
            "links": [
                {**point, "seconds": seconds(point["kind"], point["bytes"])} for point in points
            ],
        }
    )
    assert hardware.tiers[0].bytes_per_s == pytest.approx(hardware.device.bytes_per_s)
    assert "node.all kinds" in hardware.sources


def test_a_cpu_waits_for_its_host() -> None:
    device = measured(1).device
    assert min(device.host_s) >= 0 and device.host_s[1] > 0
    assert set(REFERENCES) == device.rates.keys()
    assert all(rate > 0 for both in device.rates.values() for rate in both)
    assert min(device.attention_efficiency) > 0


def test_collectives_are_timed_without_the_work_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The median of batches after work counts, less that of the work alone."""
    spread = itertools.cycle([0.0, 1e-3, 5e-3])

    def batch(world: World, call: Callable[[int], object], calls: int, work: links.Work) -> float:
        return 0.5 if call is links.nothing else 0.502 + next(spread)

    world = current_world()
    work = links.Work(world, 1e-6)
    monkeypatch.setattr(links, "_batch", batch)
    assert links.slowest(world, lambda index: None, 1e-3, work) == pytest.approx(3e-3)
    assert links.slowest(world, lambda index: None, 1e-3, links.Work(world, 0.0)) == pytest.approx(
        0.502
    )


@pytest.mark.slow
def test_nodes_of_a_job_become_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks on two nodes: groups of equal size inside them, and one pair of ranks between for
    each of the smaller's.
    """
    monkeypatch.setattr(calibrate_module, "_node", lambda: int(current_world().rank >= 3))
    hardware = measured(5, replace(TINY, dtypes=(torch.float32,)))
    assert [(tier.name, tier.sizes) for tier in hardware.tiers] == [
        ("node", (3, 2)),
        ("network", (5,)),
    ]
    assert {(point["tier"], point["ranks"]) for point in hardware.measurements["links"]} == {
        ("node", 2),
        ("network", 2),
    }
    assert {f"network.{kind}" for kind in COLLECTIVES} <= hardware.residuals.keys()


def test_large_products_of_slow_dtypes_are_left_out() -> None:
    impatient = Effort((2, 4, 2**20), 1e-3, (256,), (256,), 1e-4, 1e-5, dtypes=(torch.float32,))
    table = describe(measure(current_world(), impatient)).device.matmul_efficiency
    assert table["float32"].m == (2, 4)


def test_nothing_larger_is_sent_or_copied_than_what_takes_long() -> None:
    impatient = replace(TINY, longest_s=1e-9, product_sizes=(2, 4))
    found = run_ranks(2, lambda rank: measure(current_world(), impatient))[0]
    assert {point["size"] for point in found["streams"]} == {TINY.stream_bytes[0]}
    assert {point["bytes"] for point in found["links"]} == {TINY.message_bytes[0]}
    assert {point["kind"] for point in found["links"]} == set(COLLECTIVES)


def test_a_sample_is_many_calls_where_one_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only calls move: each takes 10 us, the first 3 ms, and one of every hundred 1
    ms more.
    """
    calls: list[float] = []

    def call() -> None:
        calls.append(3e-3 if not calls else 1e-5 + 1e-3 * (len(calls) % 100 == 50))

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: sum(calls)))
    # Samples without the millisecond.
    assert seconds_per_call(call, torch.device("cpu"), 0.0, 2e-4) == pytest.approx(1e-5)
    assert len(calls) == 2 + 3 * 20
    calls.clear()
    assert seconds_per_call(call, torch.device("cpu"), 1.9e-3, 2e-4) == pytest.approx(1e-5)
    assert len(calls) == 2 + 5 * 20  # 0.2 ms each, but one of 1.2 ms


@pytest.mark.parametrize(
    ("bound", "num_cores", "sharing"),
    [([{0}, {1}], 2, None), ([{3}, {3}], 1, Sharing(2, 1)), ([{0, 1}, {0, 1}], 2, None)],
)
def test_cores_are_those_that_the_ranks_may_use(
    bound: list[set[int]], num_cores: int, sharing: Sharing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores are told of however many there are: each rank bound to one of its own, both to the same
    one, both to the same two.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: bound[current_world().rank])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    facts = run_ranks(2, lambda rank: calibrate_module._device_facts(current_world()))
    expected = (
        None
        if sharing is None
        else {"num_ranks": sharing.num_ranks, "num_cores": sharing.num_cores}
    )
    assert all(
        fact["sharing"] == expected and fact["name"].endswith(f"2 ranks on {num_cores} cores")
        for fact in facts
    )


def test_as_many_ranks_as_cores_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {2, 5, 7})
    assert default_ranks("cpu") == 3


def test_attention_is_measured_beside_its_products() -> None:
    """A quarter of the rate of the products forward, half of it backward."""
    device = load_hardware("h100").device
    points = []
    for queries, width in ((1024, 64), (4096, 128)):
        sizes = {"shape": [4, 8, queries, width], "dtype": "torch.bfloat16"}
        products_s = sum(
            device.matmul_s(queries, *nk, "bfloat16", 16)
            for nk in ((queries, width), (width, queries))
        )
        points.append({**sizes, "forward_s": 4 * products_s, "backward_s": 5 * products_s})
    assert attention_efficiency(device, points) == pytest.approx((0.25, 0.5))


def test_quick_measures_less() -> None:
    full, quick = (effort_for("cpu", quick=quick) for quick in (False, True))
    assert set(quick.product_sizes) < set(full.product_sizes) and set(quick.message_bytes) < set(
        full.message_bytes
    )
    assert quick.point_s < full.point_s
    assert effort_for("cuda", quick=False).product_sizes[-1] > full.product_sizes[-1]
    assert 2 <= default_ranks("cpu") <= 8
    for device_type, num_sizes, largest in (("cpu", 3, 512), ("cuda", 4, 8192)):
        sizes = effort_for(device_type, quick=True).product_sizes
        assert len(sizes) == num_sizes and sizes[-1] == largest


def test_sizes_of_products_are_judged_each_by_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU takes as long for small products as for tiny ones."""
    asked: list[int] = []

    def seconds(call: Callable[[], torch.Tensor], *_: object) -> float:
        size = call().shape[0]
        asked.append(size)
        return max(1e-5, 2 * size**3 / 700e12)

    monkeypatch.setattr(operators, "seconds_per_call", seconds)
    effort = replace(effort_for("cuda", quick=False), product_sizes=(16, 64, 256, 1024, 2**20))
    sizes = operators._feasible_sizes(current_world(), torch.float32, effort)
    assert sizes == (16, 64, 256, 1024) and asked == [64, 256, 1024]


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["calibrate", *arguments]) == 1
    return capsys.readouterr().err


def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = str(tmp_path / "own.json")
    assert _refused(capsys, "--out", "own") == (
        "error: --out own does not end in .json\n  why:   the other commands know a hardware "
        "file by that\n"
    )
    assert _refused(capsys, "--out", "none/own.json") == (
        "error: --out none/own.json cannot be written\n"
        "  why:   none: No such file or directory\n"
        "  try:   make the folder, or name a file in another one\n"
    )
    assert _refused(capsys, "--out", out, "--ranks", "0") == "error: --ranks is at least 1, not 0\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _refused(capsys, "--out", out, "--device", "cuda") == (
        "error: there is no CUDA device to measure\n  try:   --device cpu\n"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _refused(capsys, "--out", out, "--ranks", "3") == (
        "error: --ranks 3 is more than there are CUDA devices\n  why:   2 are here\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert _refused(capsys, "--out", out, "--ranks", "3") == (
        "error: --ranks 3 under torchrun\n  why:   the job has 8 ranks, and all of them "
        "measure\n  try:   leave --ranks out\n"
    )


def test_an_interrupt_leaves_the_file_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "own.json"
    out.write_text("old")

    def interrupted(*arguments: object, **options: object) -> Hardware:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "calibrate", interrupted)
    assert main(["calibrate", "--out", str(out)]) == INTERRUPTED
    assert capsys.readouterr().err == f"interrupted: {out} was not written\n"
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
def test_the_command_measures_this_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "own.json"
    refused = main(["calibrate", "--quick", "--device", "cpu", "--ranks", "2", "--out", str(out)])
    printed, told = capsys.readouterr()
    if refused:  # this machine is too busy
        assert "what was measured does not describe this machine" in told and not out.exists()
        return
    assert "products, float32" in printed and "all_reduce" in printed and f"file: {out}" in printed
    hardware = load_hardware(str(out))
    assert hardware.num_devices == 2
    assert 1e8 < hardware.device.flops_per_s["float32"] < 1e14
    assert hardware.device.matmul_s(512, 512, 512, "float64") > hardware.device.matmul_s(
        64, 64, 64, "float64"
    )
    assert (
        collective_s(hardware, "all_reduce", 2**24, (0, 1))
        > collective_s(hardware, "all_reduce", 2**8, (0, 1))
        > 0
    )


@pytest.mark.slow
def test_under_torchrun_the_ranks_of_the_job_measure(tmp_path: Path) -> None:
    out = tmp_path / "job.json"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [
        *launch,
        "-m",
        "shardwright",
        "calibrate",
        "--quick",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if run.returncode:  # this machine is too busy
        assert "what was measured does not describe this machine" in run.stderr and not out.exists()
        return
    assert run.stdout.count(f"file: {out}") == 1
    assert run.stderr.count(": matrix products\n") == 1, "one rank tells what it does"
    assert re.search(r"calibrating for about \d+ s: all_reduce of 2 ranks, node\n", run.stderr)
    assert load_hardware(str(out)).num_devices == 2


def made_up(error: float = 0.1, latency_s: float = 1e-6) -> Hardware:
    """A machine whose products are fitted with ``error`` and whose messages take ``latency_s``."""
    found = load_hardware("a100-80gb", 2)
    tiers = tuple(
        replace(tier, kinds={"all_reduce": Link(latency_s, 1e9)}) for tier in found.tiers[:1]
    )
    return replace(found, tiers=tiers, residuals={"products.float32": error})


def test_what_no_fit_comes_near_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only that; until it is near, or three times in all."""
    asked: list[Any] = []
    machines = iter([made_up(error=100.0, latency_s=0.0), made_up(latency_s=0.0), made_up()])

    def measured_again(world: World, effort: Effort, only: Any = None) -> dict[str, Any]:
        asked.append(only)
        for part in sorted(only or {"all"}):
            tell(part)
        return {"seconds": 2.0}

    monkeypatch.setattr(calibrate_module, "measure", measured_again)
    monkeypatch.setattr(calibrate_module, "describe", lambda found: next(machines))
    heard = Heard()
    with listening(heard):
        found = calibrate_module.measure_until_certain(current_world(), TINY)
    assert asked == [None, {"products", "links"}, {"links"}] and found == {"seconds": 6.0}
    assert [words for words, _ in heard.told] == [
        "all",
        "again, as no fit comes near: links",
        "again, as no fit comes near: products",
        "again, as no fit comes near: links",
    ]


def test_numbers_that_cannot_be_are_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibrate_module, "measure_in_processes", lambda *arguments: {})
    monkeypatch.setattr(
        calibrate_module, "describe", lambda found: made_up(error=100.0, latency_s=0.0)
    )
    out = tmp_path / "own.json"
    said = _refused(capsys, "--device", "cpu", "--ranks", "2", "--out", str(out))
    begun, _, error = said.partition("\n")
    assert re.fullmatch(r"calibrating for about \d+ s", begun)
    assert error == (
        "error: what was measured does not describe this machine, and nothing is written\n"
        "  why:   products.float32: on average the fit is 101 times what was measured, or "
        "the other way round\n"
        "         nvlink.all_reduce: a message without bytes would take no time\n"
        "  try:   other work keeps it busy: stop that, leave --quick out, or measure with "
        "fewer --ranks\n"
    )
    assert not out.exists()


class Heard:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float | None]] = []
        self.titles: list[str] = []

    def begin(self, words: str) -> None:
        self.titles.append(words)

    def tell(self, words: str, share: float | None) -> None:
        self.told.append((words, share))

    def end(self) -> None:
        self.titles.append("ends")


def test_a_calibration_says_what_it_is_about() -> None:
    heard = Heard()
    with listening(heard):
        measure(current_world(), TINY)
    titles = [title for part, title in calibrate_module.TITLES.items() if part != "unaligned"]
    # A rank alone has no collectives, which would come last and take their share of the time.
    shares = [number / (len(titles) - 1) for number in range(len(titles))]
    assert heard.told == list(zip(titles, shares, strict=True))
    assert 30 < calibrate_module.expected_s(effort_for("cpu", quick=False), 1) < 120
    assert calibrate_module.expected_s(effort_for("cpu", quick=True), 1) < 20


def told_in_a_process(world: World, quick: bool) -> dict[str, Any]:
    """Measures nothing, and says so for longer than anybody looks away."""
    if world.rank == 0:
        tell("nothing", 0.25)
        time.sleep(2.0)
    return {}


@pytest.mark.slow
def test_what_new_processes_do_is_heard_here() -> None:
    heard = Heard()
    with listening(heard):
        measure_in_processes(told_in_a_process, "cpu", 1, True)
    assert ("nothing", 0.25) in heard.told
