"""The page on hardware: its code runs, its file loads, its numbers are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware, preset_names
from shardwright.compiler.cost.time.collectives import collective_s

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hardware.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_example_takes_as_long_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, in_float8 = blocks("python")
    names: dict[str, object] = {}
    exec(example, names)
    monkeypatch.chdir(tmp_path)
    exec(in_float8, names)
    assert load_hardware("./h100-float8.json").device.linear_dtype == "float8_e4m3fn"
    for call, seconds in re.findall(
        r"^(collective_s.*?)\s+#.*: ([\d.]+) s$", example, flags=re.MULTILINE
    ):
        assert float(f"{eval(call, names):.1g}") == float(seconds)


def test_the_file_of_the_page_loads(tmp_path: Path) -> None:
    (text,) = blocks("json")
    path = tmp_path / "own.json"
    path.write_text(text)
    hardware = load_hardware(str(path))
    assert hardware.tiers[0].sizes == (8, 8, 4) and hardware.num_devices == 20
    shared, alone = (
        collective_s(hardware, "all_gather", 1e9, range(20)),
        collective_s(hardware, "all_gather", 1e9, (0, 8)),
    )
    assert shared > 0.9 * 1e9 / 12e9 and alone == pytest.approx(0.5e9 / 12e9, rel=1e-2)


def test_the_tables_name_every_preset_and_every_key() -> None:
    assert set(preset_names()) == set(
        re.findall(r"`([\w-]+)`", PAGE.partition("| preset |")[2].partition("Rates are")[0])
    )
    fields = load_hardware("cpu").to_json()
    documented = set(re.findall(r"`(\w+)`", PAGE))
    assert {*fields["device"], *fields["tiers"][0], "streams", "kinds", "uplink_bytes_per_s"} - {
        "name"
    } <= documented
    assert {"residuals", "sources", "measurements", "backend"} <= documented
    assert Hardware.from_json(json.loads(blocks("json")[0]), 3).num_devices == 3
