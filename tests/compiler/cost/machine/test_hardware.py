"""Hardware files: presets, the JSON form, and what is said about bad files."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.cost.machine.device import Tiling
from shardwright.compiler.cost.machine.efficiency import BandwidthTable, EfficiencyTable
from shardwright.compiler.cost.machine.hardware import (
    Device,
    Hardware,
    Link,
    Tier,
    load_hardware,
    preset_names,
)
from shardwright.compiler.schedule.shared_cores import Sharing
from shardwright.runtime.errors import ConfigError

PRESETS = (
    "a100-40gb",
    "a100-80gb",
    "b200",
    "cpu",
    "gb200-nvl72",
    "gb300-nvl72",
    "h100",
    "h200",
    "mi300x",
)

SMALL: dict[str, Any] = {
    "format": 1,
    "name": "small",
    "num_devices": 4,
    "device": {
        "name": "d",
        "memory_bytes": 16e9,
        "flops_per_s": {"float32": 1e12},
        "bytes_per_s": 1e11,
        "launch_s": 0,
        "matmul_efficiency": 0.5,
    },
    "tiers": [
        {"name": "node", "sizes": [2, 1, 1], "latency_s": 1e-6, "bytes_per_s": 1e10},
        {
            "name": "net",
            "sizes": "all",
            "latency_s": 1e-5,
            "bytes_per_s": 1e9,
            "kinds": {"send": {"latency_s": 0, "bytes_per_s": 2e9}},
        },
    ],
}


def small(change: Callable[[Any], object] = lambda data: None) -> dict[str, Any]:
    data = copy.deepcopy(SMALL)
    change(data)
    return data


def test_the_presets() -> None:
    assert preset_names() == PRESETS
    assert load_hardware("a100", 16) == load_hardware("a100-80gb", 16)
    assert load_hardware("gb200") == load_hardware("gb200-nvl72")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_a_source_for_every_number_and_its_own_name(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    for field in hardware.to_json()["device"].keys() - {"name"}:
        assert hardware.sources[f"device.{field}"]
    # What sends computes nothing meanwhile; of a GPU that has no such source, and of a CPU, nothing
    # is known.
    unknown = name in ("cpu", "mi300x")
    assert (hardware.device.overlap == 1.0) == unknown
    if not unknown:
        sent = re.match(r"(\d+) of (\d+) multiprocessors", hardware.sources["device.overlap"])
        assert sent is not None and hardware.device.tiles is not None
        sending, count = map(int, sent.groups())
        assert count == hardware.device.tiles.num_units
        assert hardware.device.overlap == pytest.approx(1 - sending / count, abs=5e-3)
    for tier in hardware.to_json()["tiers"]:
        for field in tier.keys() - {"name"}:
            assert hardware.sources[f"tiers.{tier['name']}.{field}"]
    assert {"float64", "float32", "bfloat16", "float16"} <= hardware.device.flops_per_s.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read_back(name: str) -> None:
    for num_devices in (1, 20, 4096):
        hardware = load_hardware(name, num_devices)
        assert hardware.num_devices == num_devices
        assert Hardware.from_json(json.loads(hardware.dumps())) == hardware


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_says_how_more_devices_are_connected(name: str) -> None:
    for written, wanted in ((1, 20), (20, 4), (20, 4096)):
        data = json.loads(load_hardware(name, written).dumps())
        assert Hardware.from_json(data, wanted) == load_hardware(name, wanted)
        assert Hardware.from_json(data, wanted).dumps() == load_hardware(name, wanted).dumps()
        assert data["tiers"][-1]["sizes"] == "all"
    few = Hardware.from_json(SMALL, 3)
    assert [tier["sizes"] for tier in few.to_json()["tiers"]] == [[2, 1, 1], "all"]
    other = replace(few, tiers=(replace(few.tiers[0], sizes=(1, 2)), few.tiers[1]))
    assert [tier["sizes"] for tier in other.to_json()["tiers"]] == [[1, 2], "all"]


def test_everything_a_file_can_say_is_read_back(tmp_path: Path) -> None:
    hardware = Hardware(
        name="own",
        device=Device(
            "d",
            10**9,
            {"float32": 1e12, "float8_e4m3fn": 4e12},
            1e11,
            0.0,
            {"float32": EfficiencyTable((1, 8), (4,), (2, 3), (0.1, 0.2, 0.3, 0.4))},
            linear_dtype="float8_e4m3fn",
            linear_cast_bytes=(4.0, 0.0, 4.0),
            unaligned_efficiency=0.25,
            queue_s=(3e-6, 4e-6),
            queue_stops=True,
            experts_one_by_one=True,
            overlap=0.5,
            host_s=(1e-6, 2e-6),
            fetch_bytes_per_s=1e9,
            rates={"gelu": (1e9, 2e9)},
            attention_efficiency=(0.5, 0.25),
            sharing=Sharing(6, 2),
        ),
        tiers=(
            Tier(
                "node",
                (3, 1, 2),
                1e-6,
                1e10,
                kinds={"all_to_all": Link(0.0, 5.0)},
                fabric_bytes_per_s=3.0,
            ),
            Tier("net", (6,), 1e-5, 1e9, uplink_bytes_per_s=7e8),
        ),
        late_s=1e-5,
        residuals={"all_reduce": 0.0},
        sources={"device": "hand"},
        measurements={"points": [[1, 2.5]]},
        backend="gloo",
    )
    path = tmp_path / "own.json"
    path.write_text(hardware.dumps())
    assert load_hardware(str(path)) == hardware
    streams = BandwidthTable((10, 1000), (2e9, 1e9))
    other = replace(
        hardware,
        device=replace(
            hardware.device, matmul_efficiency=0.5, tiles=Tiling(9, ((8, 4, 0.7),)), streams=streams
        ),
    )
    assert (
        Hardware.from_json(json.loads(other.dumps())) == other
        and other.digest() != hardware.digest()
    )
    assert other.device.memory_s(100) == pytest.approx(100 / 2**0.5 / 1e9)
    assert other.device.memory_s(0) == 0.0 and other.device.memory_s(1e6) == pytest.approx(1e-3)
    assert streams.covers(10) and not streams.covers(1001)


@pytest.mark.parametrize("host_s", [(1e-6, 0.0), (0.0, 1e-6), (0.0, 0.0)])
def test_a_host_may_add_nothing_to_one_of_two_directions(host_s: tuple[float, float]) -> None:
    """A calibration finds this where the least time of an operator is that of its backward in a
    program.
    """
    found = load_hardware("cpu", 2)
    hardware = replace(found, device=replace(found.device, host_s=host_s))
    assert Hardware.from_json(json.loads(hardware.dumps())).device.host_s == host_s


def test_a_name_may_say_in_what_linear_layers_multiply(tmp_path: Path) -> None:
    plain, in_float8 = load_hardware("h100", 16), load_hardware("h100+float8_e4m3fn", 16)
    assert in_float8.name == "h100+float8_e4m3fn"
    device = replace(plain.device, linear_dtype="float8_e4m3fn")
    assert replace(in_float8, name="h100") == replace(plain, device=device)
    file = tmp_path / "a+b.json"
    file.write_text(plain.dumps())
    assert load_hardware(str(file)).name == "h100"
    assert load_hardware(f"{file}+float8_e5m2").device.linear_dtype == "float8_e5m2"
    assert load_hardware("gb200+float8_e4m3fn").name == "gb200-nvl72+float8_e4m3fn"
    plain_name = tmp_path / "a+b"
    plain_name.write_text(plain.dumps())
    assert load_hardware(str(plain_name)).name == "h100"
    in_file = load_hardware(f"{plain_name}+float8_e5m2")
    assert in_file.device.linear_dtype == "float8_e5m2"
    with pytest.raises(ConfigError) as caught:
        load_hardware(f"{plain_name}+float8_e5m3")
    assert caught.value.hint == f"--hardware {plain_name}+float8_e4m3fn"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "h100+bfloat16",
            "h100 does not multiply in 'bfloat16'\n"
            "  why:   it has rates of float8_e4m3fn, float8_e5m2, in which linear layers may "
            "multiply\n"
            "  try:   --hardware h100+float8_e4m3fn",
        ),
        (
            "a100+float8_e4m3fn",
            "a100-80gb does not multiply in 'float8_e4m3fn'\n"
            "  why:   it has a rate of no float8, in which linear layers may multiply\n"
            "  try:   --hardware a100, or a file with such a rate in flops_per_s",
        ),
        (
            "h100+float8_e5m2+float8_e4m3fn",
            "h100+float8_e5m2+float8_e4m3fn names two dtypes\n"
            "  why:   linear layers multiply in one\n"
            "  try:   --hardware h100+float8_e4m3fn",
        ),
    ],
)
def test_a_dtype_that_a_machine_does_not_multiply_in_is_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hardware(name)
    assert str(caught.value) == text


def test_ranks_that_share_nothing_are_refused() -> None:
    data = small(lambda data: data["device"].update(sharing={"num_ranks": 2, "num_cores": 2}))
    with pytest.raises(ConfigError) as caught:
        Hardware.from_json(data)
    rule = "is more than num_cores: else every rank has a core for itself; leave sharing out"
    assert f"device.sharing.num_ranks {rule}" in str(caught.value)


def test_the_digest_covers_what_decides_costs() -> None:
    one, other = load_hardware("a100-80gb"), load_hardware("a100-80gb", 16)
    assert one.digest() == load_hardware("a100-80gb", 8).digest() != other.digest()
    assert hash(one) == hash(load_hardware("a100-80gb"))
    data = one.to_json()
    assert Hardware.from_json({**data, "name": "mine", "sources": {}}).digest() == one.digest()
    data["tiers"][-1]["sizes"] = one.num_devices  # says less of more devices, and the same of these
    assert Hardware.from_json(data).digest() == one.digest()
    data["tiers"][0]["latency_s"] *= 2
    assert Hardware.from_json(data).digest() != one.digest()
    assert replace(one, backend="gloo").digest() != one.digest()
    assert replace(one, late_s=1e-6).digest() != one.digest()


def test_ranks_of_the_cpu_communicate_over_gloo() -> None:
    assert {name for name in PRESETS if load_hardware(name).backend == "gloo"} == {"cpu"}
    with pytest.raises(ConfigError) as caught:
        Hardware.from_json(small(lambda data: data.update(backend="mpi")))
    assert "backend is nccl or gloo" in str(caught.value)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_file_of_a_cpu_that_names_no_backend_means_gloo(backend: Literal["nccl", "gloo"]) -> None:
    data = small(lambda data: data["device"].update(host_s=[1e-6, 0.0]))
    read = Hardware.from_json(data)
    assert read.backend == "gloo"
    other = replace(read, backend=backend)
    assert Hardware.from_json(other.to_json()) == other


def test_nodes_are_whole_or_partial() -> None:
    assert load_hardware("a100-80gb", 20).tiers[0].sizes == (8, 8, 4)
    assert load_hardware("a100-80gb", 3).tiers[0].sizes == (3,)
    assert load_hardware("a100-80gb", 20).tiers[1].sizes == (20,)
    uneven = Hardware.from_json(SMALL, 3)
    assert [tier.sizes for tier in uneven.tiers] == [(2, 1), (3,)]


def test_products_take_the_efficiency_of_their_size() -> None:
    table = EfficiencyTable((16, 64), (16, 64), (16, 64), (0.1, 0.2, 0.2, 0.4, 0.2, 0.4, 0.4, 0.8))
    device = Device("d", 1, {"float32": 1e9, "float64": 5e8}, 1.0, 0.0, {"float32": table})
    assert table.at(16, 64, 16) == pytest.approx(0.2)
    # Halfway in log space along each dim, each a factor of sqrt 2.
    assert table.at(32, 32, 32) == pytest.approx(0.1 * 2**1.5)
    assert device.matmul_s(64, 64, 64, "float32") == pytest.approx(2 * 64**3 / 0.8e9)
    assert device.matmul_s(16, 64, 64, "float32", batch=4) == device.matmul_s(64, 64, 64, "float32")
    assert device.matmul_s(0, 64, 64, "float32") == 0.0
    # Outside the grid the edge counts, and is no measurement.
    assert table.at(4, 1000, 64) == table.at(16, 64, 64)
    assert device.measured(16, 16, 64, "float32") and device.measured(4, 20, 64, "float32", batch=4)
    assert not device.measured(4, 20, 64, "float32") and not device.measured(16, 16, 65, "float32")
    assert device.matmul_s(64, 64, 64, "float64") == pytest.approx(2 * 64**3 / 5e8)
    assert not device.measured(16, 16, 16, "float64") and not load_hardware("h100").device.measured(
        64, 64, 64, "bfloat16"
    )


def test_products_fill_units_in_rounds_of_tiles() -> None:
    tiling = Tiling(100, ((128, 128, 1.0), (64, 64, 0.5)))
    assert tiling.fraction(1280, 1280, 64) == 1.0  # 100 tiles, one round
    # 110 tiles, two rounds.
    assert tiling.fraction(1281, 1280, 64) == pytest.approx(1281 / 1280 / 2)
    assert tiling.fraction(128, 12801, 64) == pytest.approx(0.50004, rel=1e-4)
    assert tiling.fraction(128, 1280, 64, batch=10) == 1.0
    # Fewer tiles than units: each is shared by units that sum over parts of k, as long as those are
    # long.
    assert tiling.fraction(640, 640, 4096) == 1.0 and tiling.fraction(
        640, 640, 256
    ) == pytest.approx(0.5)
    device = Device("d", 1, {"float16": 1e12}, 1.0, 0.0, 0.8, tiles=tiling)
    assert device.matmul_s(1280, 1280, 64, "float16") == pytest.approx(
        2 * 1280 * 1280 * 64 / 0.8e12
    )


@given(
    st.lists(st.integers(1, 5000), min_size=4, max_size=4), st.integers(0, 3), st.integers(1, 1000)
)
def test_a_larger_product_never_takes_less(sizes: list[int], index: int, more: int) -> None:
    device = load_hardware("a100-80gb").device
    m, n, k, batch = (size + more * (i == index) for i, size in enumerate(sizes))
    assert device.matmul_s(*sizes[:3], "bfloat16", sizes[3]) <= device.matmul_s(
        m, n, k, "bfloat16", batch
    ) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"queue_stops": 1}, "queue_stops is true or false"),
        ({"experts_one_by_one": True}, "experts_one_by_one is about the queue of launches"),
    ],
)
def test_flags_are_true_or_false_and_need_what_they_are_about(
    fields: dict[str, object], words: str
) -> None:
    data = {**SMALL, "device": {**SMALL["device"], **fields}}
    with pytest.raises(ConfigError, match=words):
        Hardware.from_json(data, 3)


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        load_hardware("cpu").device.matmul_s(1, 1, 1, "int8")
    assert str(error.value) == (
        "device 'one core of a laptop CPU' has no rate for products in int8\n"
        "  why:   its flops_per_s has float64, float32, bfloat16, float16\n"
        "  try:   add 'int8' to flops_per_s in the hardware file"
    )


def test_an_unknown_preset() -> None:
    with pytest.raises(ConfigError) as error:
        load_hardware("a100-80g")
    assert str(error.value) == (
        "there is no hardware 'a100-80g'\n"
        f"  why:   the presets are {', '.join(PRESETS)}\n"
        "  try:   did you mean 'a100-80gb'? (the name of a file ends in .json)"
    )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(ConfigError) as error:
        load_hardware(str(path))
    assert str(error.value) == (
        f"cannot read the hardware file {path}\n"
        f"  why:   [Errno 2] No such file or directory: '{path}'\n"
        f"  try:   shardwright calibrate --out {path} makes one; the presets are "
        f"{', '.join(PRESETS)}"
    )
    path.write_text('{"format": 1,\n oops')
    with pytest.raises(ConfigError) as error:
        load_hardware(str(path))
    assert str(error.value) == (
        f"a hardware file that is not JSON\n  where: {path}, line 2\n  why:   Expecting "
        "property name enclosed in double quotes"
    )


def _error(data: object, num_devices: int | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        Hardware.from_json(data, num_devices, where="own.json")
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda d: d.update(format=2),
            "format is 1 in this version\n  where: own.json\n  why:   it is 2",
        ),
        (
            lambda d: d["device"].update(launch=d["device"].pop("launch_s")),
            "device.launch_s is missing\n  where: own.json\n"
            "  why:   it has name, memory_bytes, flops_per_s, bytes_per_s, "
            "matmul_efficiency, launch\n"
            "  try:   rename 'launch'",
        ),
        (
            lambda d: d["device"].update(rates={"gelu": [1e9]}),
            "device.rates.gelu has two numbers, of the forward and of the backward\n  where: "
            "own.json\n"
            "  why:   it is [1000000000.0]",
        ),
        (
            lambda d: d["tiers"][1].update(latency=3),
            "tiers[1].latency is not a key of a hardware file\n  where: own.json\n  try:   "
            "did you mean 'latency_s'?",
        ),
        (
            lambda d: d["device"]["flops_per_s"].update(float32="fast"),
            "device.flops_per_s.float32 is a positive number\n  where: own.json\n  why:   it "
            "is 'fast'",
        ),
        (
            lambda d: d["device"].update(bytes_per_s=0),
            "device.bytes_per_s is a positive number\n  where: own.json\n  why:   it is 0",
        ),
        (
            lambda d: d["tiers"][0].update(latency_s=-1),
            "tiers[0].latency_s is a number of at least 0\n  where: own.json\n  why:   it is -1",
        ),
        (
            lambda d: d["tiers"][0].update(sizes=1.5),
            "tiers[0].sizes is a whole number\n  where: own.json\n  why:   it is 1.5",
        ),
        (
            lambda d: d["tiers"][0].update(sizes=[2, True]),
            "tiers[0].sizes is a list of whole numbers of at least 1\n  where: own.json\n  "
            "why:   it is [2, True]",
        ),
        (
            lambda d: d["tiers"][1]["kinds"].update(allreduce=d["tiers"][1]["kinds"].pop("send")),
            "tiers[1].kinds.allreduce is no collective: did you mean 'all_reduce'?\n  where: "
            "own.json\n"
            "  why:   it is {'bytes_per_s': 2000000000.0, 'latency_s': 0}",
        ),
        (
            lambda d: d.update(device=[]),
            "device is a JSON object with names and values\n  where: own.json\n  why:   it is []",
        ),
        (
            lambda d: d.update(tiers={}),
            "tiers is a list of objects\n  where: own.json\n  why:   it is {}",
        ),
        (
            lambda d: d["device"].update(matmul_efficiency={"float16": {}}),
            "device.matmul_efficiency.float16 has no peak in flops_per_s\n  where: "
            "own.json\n  why:   it is {}",
        ),
        (
            lambda d: d["device"].update(
                matmul_efficiency={"float32": {"m": [1, 2], "n": [1], "k": [1], "fractions": [1]}}
            ),
            "device.matmul_efficiency.float32.fractions has 2 numbers, one per (m, n, k); k "
            "varies fastest\n"
            "  where: own.json\n  why:   it is [1]",
        ),
        (
            lambda d: d["device"].update(
                matmul_efficiency={
                    "float32": {"m": [2, 1], "n": [1], "k": [1], "fractions": [1, 1]}
                }
            ),
            "device.matmul_efficiency.float32.m is a list of ascending sizes\n  where: "
            "own.json\n  why:   it is [2, 1]",
        ),
        (
            lambda d: d["device"].update(streams={"num_bytes": [1, 2], "bytes_per_s": [1]}),
            "device.streams.bytes_per_s has 2 numbers, one per size in num_bytes\n  where: "
            "own.json\n  why:   it is [1]",
        ),
        (
            lambda d: d["device"].update(tiles={"num_units": 4, "shapes": []}),
            "device.tiles.shapes has at least one shape\n  where: own.json\n  why:   it is []",
        ),
        (
            lambda d: d["device"].update(matmul_efficiency={}, tiles={}),
            "device.tiles is for an efficiency that is one number: a measured table has the "
            "effect in it\n"
            "  where: own.json\n  why:   it is {}",
        ),
    ],
)
def test_bad_values_are_named_by_their_path(change: Callable[[Any], object], text: str) -> None:
    assert _error(small(change)) == text


def test_a_file_that_is_no_object() -> None:
    assert (
        _error([1])
        == "the file is a JSON object with names and values\n  where: own.json\n  why:   it is [1]"
    )


def test_more_devices_than_a_file_connects() -> None:
    assert _error(SMALL, 5) == (
        "tiers[0].sizes has 4 devices; nothing says how 5 are connected\n  where: own.json\n "
        " why:   it is [2, 1, 1]"
    )
    assert _error(small(lambda d: d["tiers"].pop()), 4) == (
        "the devices of hardware 'small' are not connected\n"
        "  why:   its outermost tier, node, has 3 groups for 4 devices\n"
        "  try:   ask for fewer devices, calibrate with more ranks, or add a tier with sizes "
        "'all' that joins the groups"
    )
    assert (
        _error(SMALL, 0)
        == "num_devices is from 1 to 1,048,576\n  where: own.json\n  why:   it is 0"
    )


def test_tiers_that_do_not_nest() -> None:
    assert _error(
        small(
            lambda d: (
                d["tiers"][0].update(sizes=[1, 3])
                or d["tiers"].insert(1, {**d["tiers"][0], "name": "row", "sizes": 2})
            )
        )
    ) == (
        "tier 'row' of hardware 'small' cuts through a group of tier 'node'\n"
        "  why:   a group of row ends after device 1, none of node does\n"
        "  try:   a group of a tier is a run of whole groups of the tier before it in the list"
    )
    assert (
        _error(small(lambda d: d.update(tiers=[])))
        == "hardware 'small' has no tiers\n  try:   one device alone has one tier of size 1"
    )
