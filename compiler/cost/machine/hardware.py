"""The machines a plan is made for: one kind of device, and the links between devices in tiers.

Devices are numbered so that neighbours are close: rank ``r`` of a job is device ``r``. **Tiers**
say which devices are joined by what. The innermost comes first; each group of a tier is a run of
whole groups of the tier inside it, and the one group of the outermost tier is all devices:

    nvlink      8 8 8 4      28 devices in nodes, the last one has 4
    infiniband  28           all of them

Two devices talk over the innermost tier that has both in one group. Rates are those that are
reached, not those of data sheets; ``docs/hardware.md`` describes the JSON form and the presets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardwright.compiler.cost.machine.backend import Backend
from shardwright.compiler.cost.machine.device import Device as Device
from shardwright.compiler.cost.machine.device import device_json, read_device
from shardwright.compiler.cost.machine.json_fields import Fields
from shardwright.runtime.arguments import checked, checked_fields
from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.mesh import MOST_RANKS

FORMAT = 1
"""The version of the JSON form."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
"""The collectives that ``collective_s`` knows. A ``send`` goes from one device to another."""


SizeRule = int | Literal["all"] | tuple[int, ...]
"""The sizes of a tier for any number of devices: groups of one size (8), one group ("all"), or a
list from which the first groups are taken.
"""


@checked_fields
@dataclass(frozen=True)
class Link:
    """What sending over a tier costs one device: ``latency_s`` per message, and ``bytes_per_s`` in
    each direction.
    """

    latency_s: float
    bytes_per_s: float


@checked_fields
@dataclass(frozen=True)
class Tier:
    """One level of links.

    - ``sizes``: the number of devices of each group.
    - ``latency_s``, ``bytes_per_s``: the latency of a message, and the rate of one device in one
      direction. ``kinds`` has other numbers for single :data:`COLLECTIVES`, as measured ones
      differ.
    - ``uplink_bytes_per_s``: what one group of the tier inside this one sends out over this tier
      together (one network card for eight devices).
    - ``fabric_bytes_per_s``: what a whole group of this tier moves at once (a memory bus, an
      oversubscribed switch). For both, ``None`` means that only the devices' own links limit.
    - ``rule``: what a hardware file says of the sizes, whatever the number of devices; ``None`` if
      nothing but the sizes is known.
    """

    name: str
    sizes: tuple[int, ...]
    latency_s: float
    bytes_per_s: float
    kinds: Mapping[str, Link] = field(default_factory=dict)
    uplink_bytes_per_s: float | None = None
    fabric_bytes_per_s: float | None = None
    rule: SizeRule | None = field(default=None, compare=False)

    def link(self, kind: str) -> Link:
        """The numbers for one kind of collective."""
        return self.kinds.get(kind) or Link(self.latency_s, self.bytes_per_s)

    @cached_property
    def group_of(self) -> npt.NDArray[np.int64]:
        """The group index of every device."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)


@dataclass(frozen=True)
class Network:
    """What of a machine decides how long messages take. Machines whose devices alone differ have
    equal ones.
    """

    name: str
    tiers: tuple[Tier, ...]
    late_s: float

    def __hash__(self) -> int:
        return hash((self.name, self.late_s, self.num_devices))  # tiers have long lists

    @property
    def num_devices(self) -> int:
        return sum(self.tiers[-1].sizes)


@checked_fields
@dataclass(frozen=True)
class Hardware:
    """All devices of a job. Its :meth:`digest` covers what decides costs: device, tiers, backend
    and ``late_s``.

    ``backend``: what ranks communicate through, which decides how much memory messages need.
    ``late_s``: the seconds that two ranks wait for each other when they meet in a collective, as
    they do not come to it at the same moment; more ranks wait longer, by as much for each doubling.
    ``residuals``: the relative errors of a calibration, by what was fitted (``"all_reduce"``).
    ``sources``: where numbers come from, by JSON path. ``measurements``: the raw points of a
    calibration.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    backend: Backend = "nccl"
    late_s: float = 0.0
    residuals: Mapping[str, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    measurements: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_tiers(self.tiers, self.name)

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def num_devices(self) -> int:
        return self.network.num_devices

    @cached_property
    def network(self) -> Network:
        return Network(self.name, self.tiers, self.late_s)

    def digest(self) -> str:
        """A SHA-256 of all that decides costs."""
        return self._digest

    @cached_property
    def call_times(self) -> dict[Hashable, Any]:
        """The times of calls on this hardware, as far as ``op_time`` was asked for them."""
        return {}

    @cached_property
    def _digest(self) -> str:
        tiers = [_tier_json(replace(tier, rule=None)) for tier in self.tiers]
        data = {
            "num_devices": self.num_devices,
            "device": device_json(self.device),
            "tiers": tiers,
            **self._messages_json(),
        }
        # Names, sources and measurements are for people: they change no cost.
        decisive = json.dumps(data, sort_keys=True)
        return hashlib.sha256(decisive.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The JSON form of this hardware. :meth:`from_json` is the inverse."""
        extra = {
            key: dict(getattr(self, key))
            for key in ("residuals", "sources", "measurements")
            if getattr(self, key)
        }
        return {
            "format": FORMAT,
            "name": self.name,
            "num_devices": self.num_devices,
            "device": device_json(self.device),
            "tiers": [_tier_json(tier) for tier in self.tiers],
            **self._messages_json(),
            **extra,
        }

    def _messages_json(self) -> dict[str, Any]:
        # Left out where they are the usual ones.
        usual = self.backend == _usual_backend(self.device)
        backend = {} if usual else {"backend": self.backend}
        return backend | ({"late_s": self.late_s} if self.late_s else {})

    def dumps(self) -> str:
        """The text of a hardware file."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    @classmethod
    @checked
    def from_json(
        cls, data: object, num_devices: int | None = None, where: str = "hardware"
    ) -> Hardware:
        """The hardware that JSON ``data`` describes, with ``num_devices`` devices if given;
        ``where`` names it in errors.

        Raises:
            ConfigError: a key that is missing, unknown or has a value it cannot have (by its path),
                or more devices than the data says how to connect.
        """
        fields = Fields(data, where)
        if fields.count("format") != FORMAT:
            raise fields.error("format", f"is {FORMAT} in this version")
        # A preset describes a large machine; a job uses the first devices of it.
        count = fields.count("num_devices") if num_devices is None else num_devices
        if not 1 <= count <= MOST_RANKS:
            raise ConfigError(
                f"num_devices is from 1 to {MOST_RANKS:,}", where=where, why=f"it is {brief(count)}"
            )
        device = read_device(fields.child("device"))
        hardware = cls(
            name=fields.text("name"),
            device=device,
            tiers=tuple(_read_tier(tier, count) for tier in fields.children("tiers")),
            backend=_read_backend(fields, device),
            late_s=fields.number("late_s", zero=True) if fields.has("late_s") else 0.0,
            residuals=fields.numbers("residuals", optional=True),
            sources=fields.texts("sources", optional=True),
            measurements=fields.mapping("measurements", optional=True),
        )
        fields.finish("num_devices")
        return hardware


def preset_names() -> tuple[str, ...]:
    """The names of the presets."""
    return tuple(
        sorted(
            file.name.removesuffix(".json")
            for file in _presets().iterdir()
            if file.name.endswith(".json")
        )
    )


SHORT_NAMES = {"a100": "a100-80gb", "gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}
"""Presets by what people call the device."""


@checked
def load_hardware(name_or_path: str, num_devices: int | None = None) -> Hardware:
    """The hardware of a preset, or of a JSON file. A text that ends in ``.json`` or has a slash is
    a path. ``h100+float8_e4m3fn`` is the preset or file in front of the ``+`` with that
    ``linear_dtype``, unless there is a file of that path.

    ``num_devices``: how many devices it has; the last node may be a partial one.

    Raises:
        ConfigError: an unknown preset, a file that cannot be read, or what it says is no hardware;
            names path and key.
    """
    base, dtype = _parts(name_or_path)
    if dtype:
        before, other = _parts(base)
        if other:
            raise ConfigError(
                f"{name_or_path} names two dtypes",
                why="linear layers multiply in one",
                hint=f"--hardware {before}+{dtype}",
            )
        return _with_linear_dtype(load_hardware(base, num_devices), dtype, base)
    name_or_path = SHORT_NAMES.get(name_or_path, name_or_path)
    # A name is a preset. Anything with a slash or ``.json`` is a file.
    if not name_or_path.endswith(".json") and "/" not in name_or_path:
        if name_or_path not in preset_names():
            raise ConfigError(
                f"there is no hardware {name_or_path!r}",
                why=f"the presets are {', '.join(preset_names())}",
                hint=f"{did_you_mean(name_or_path, preset_names())} (the name of a file ends in "
                ".json)",
            )
        text, where = (
            (_presets() / f"{name_or_path}.json").read_text(encoding="utf-8"),
            f"preset {name_or_path}",
        )
    else:
        where = name_or_path
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = (
                f"shardwright calibrate --out {name_or_path} makes one; the presets are "
                f"{', '.join(preset_names())}"
            )
            raise ConfigError(
                f"cannot read the hardware file {name_or_path}", why=str(error), hint=hint
            ) from error
    try:
        data = parse_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "a hardware file that is not JSON", where=f"{where}, line {error.lineno}", why=error.msg
        ) from error
    return Hardware.from_json(data, num_devices, where)


def _parts(name_or_path: str) -> tuple[str, str]:
    """A preset or file, and the dtype behind its ``+``, or nothing."""
    base, plus, dtype = name_or_path.rpartition("+")
    is_path = "/" in dtype or dtype.endswith(".json")
    if not plus or is_path or ("/" in base and Path(name_or_path).is_file()):
        return name_or_path, ""
    return base, dtype


def _with_linear_dtype(hardware: Hardware, dtype: str, given: str) -> Hardware:
    """The machine with products of linear layers in that dtype. ``given``: the preset or file that
    it is of.
    """
    rates = hardware.device.flops_per_s
    small = [name for name in rates if name.startswith(("float8", "float4"))]
    if dtype not in small:
        known = f"it has rates of {', '.join(small)}" if small else "it has a rate of no float8"
        raise ConfigError(
            f"{hardware.name} does not multiply in {dtype!r}",
            why=f"{known}, in which linear layers may multiply",
            hint=f"--hardware {given}+{small[0]}"
            if small
            else f"--hardware {given}, or a file with such a rate in flops_per_s",
        )
    device = replace(hardware.device, linear_dtype=dtype)
    return replace(hardware, name=f"{hardware.name}+{dtype}", device=device)


def _presets() -> Any:
    return resources.files("shardwright.compiler.cost.machine") / "presets"


def _check_tiers(tiers: tuple[Tier, ...], name: str) -> None:
    """Check that groups nest, and that the outermost tier joins all devices."""
    if not tiers:
        raise ConfigError(
            f"hardware {name!r} has no tiers", hint="one device alone has one tier of size 1"
        )
    total = sum(tiers[-1].sizes)
    # Every group of an outer tier is made of whole groups of the inner one.
    for inner, outer in itertools.pairwise(tiers):
        bounds = set(itertools.accumulate(inner.sizes))
        for bound in itertools.accumulate(outer.sizes):
            if bound not in bounds:
                raise ConfigError(
                    f"tier {outer.name!r} of hardware {name!r} cuts through a group of tier "
                    f"{inner.name!r}",
                    why=f"a group of {outer.name} ends after device {bound - 1}, none of "
                    f"{inner.name} does",
                    hint="a group of a tier is a run of whole groups of the tier before it in the "
                    "list",
                )
        if sum(inner.sizes) != total:
            raise ConfigError(
                f"the tiers of hardware {name!r} disagree on the number of devices",
                why=f"{inner.name} has {sum(inner.sizes)}, {tiers[-1].name} has {total}",
            )
    if len(tiers[-1].sizes) > 1:
        raise ConfigError(
            f"the devices of hardware {name!r} are not connected",
            why=f"its outermost tier, {tiers[-1].name}, has {len(tiers[-1].sizes)} groups for "
            f"{total} devices",
            hint="ask for fewer devices, calibrate with more ranks, or add a tier with sizes "
            "'all' that joins the groups",
        )


def _usual_backend(device: Device) -> Backend:
    """What a file means that names no backend: calibrations of CPUs have the time of their host."""
    return "gloo" if any(device.host_s) else "nccl"


def _read_backend(fields: Fields, device: Device) -> Backend:
    if not fields.has("backend"):
        return _usual_backend(device)
    name = fields.text("backend")
    for backend in get_args(Backend):
        if name == backend:
            return backend  # type: ignore[no-any-return]
    raise fields.error("backend", f"is {' or '.join(get_args(Backend))}")


def _read_tier(fields: Fields, num_devices: int) -> Tier:
    name, rule = fields.text("name"), _read_rule(fields, num_devices)
    tier = Tier(
        name=name,
        sizes=_sizes(rule, num_devices),
        latency_s=fields.number("latency_s", zero=True),
        bytes_per_s=fields.number("bytes_per_s"),
        kinds=_read_kinds(fields),
        uplink_bytes_per_s=fields.optional_number("uplink_bytes_per_s"),
        fabric_bytes_per_s=fields.optional_number("fabric_bytes_per_s"),
        rule=rule,
    )
    fields.finish()
    return tier


def _read_kinds(fields: Fields) -> Mapping[str, Link]:
    if not fields.has("kinds"):
        return {}
    kinds, links = fields.child("kinds"), {}
    for kind in kinds.names():
        if kind not in COLLECTIVES:
            raise kinds.error(kind, f"is no collective: {did_you_mean(kind, COLLECTIVES)}")
        link = kinds.child(kind)
        links[kind] = Link(link.number("latency_s", zero=True), link.number("bytes_per_s"))
        link.finish()
    return links


def _read_rule(fields: Fields, num_devices: int) -> SizeRule:
    value = fields.value("sizes")
    if value == "all":
        return "all"
    if not isinstance(value, list):
        return fields.count("sizes")
    sizes = fields.counts("sizes")
    if sum(sizes) < num_devices:
        raise fields.error(
            "sizes", f"has {sum(sizes)} devices; nothing says how {num_devices} are connected"
        )
    return sizes


def _sizes(rule: SizeRule, num_devices: int) -> tuple[int, ...]:
    if rule == "all":
        return (num_devices,)
    return _cut(
        (rule,) * math.ceil(num_devices / rule) if isinstance(rule, int) else rule, num_devices
    )


def _cut(sizes: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    """The first groups, with ``num_devices`` devices in all."""
    ends = list(itertools.accumulate(sizes))
    return tuple(
        min(size, num_devices - (end - size))
        for size, end in zip(sizes, ends, strict=True)
        if end - size < num_devices
    )


def _tier_json(tier: Tier) -> dict[str, Any]:
    total = sum(tier.sizes)
    # Write the shortest rule that gives these sizes: the one read, one size for all, or all sizes.
    rules: tuple[SizeRule | None, ...] = (tier.rule, tier.sizes[0], tier.sizes)
    rule = next(rule for rule in rules if rule is not None and _sizes(rule, total) == tier.sizes)
    shared = {
        key: getattr(tier, key)
        for key in ("uplink_bytes_per_s", "fabric_bytes_per_s")
        if getattr(tier, key) is not None
    }
    kinds = {
        kind: {"latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
        for kind, link in tier.kinds.items()
    }
    return {
        "name": tier.name,
        "sizes": list(rule) if isinstance(rule, tuple) else rule,
        "latency_s": tier.latency_s,
        "bytes_per_s": tier.bytes_per_s,
        **({"kinds": kinds} if kinds else {}),
        **shared,
    }
