"""One device: what it computes, moves and holds, and its form in hardware files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwright.compiler.cost.machine.efficiency import BandwidthTable, EfficiencyTable
from shardwright.compiler.cost.machine.json_fields import Fields
from shardwright.compiler.schedule.shared_cores import Sharing
from shardwright.runtime.arguments import checked_fields
from shardwright.runtime.errors import ConfigError


@dataclass(frozen=True)
class Tiling:
    """How the units of a device share a matrix product: its result is computed in tiles, one per
    unit at a time.

    ``shapes`` are ``(rows, columns, fraction)``: the fraction of the rate that tiles of this shape
    reach, 1.0 for the best. The last round of tiles may leave units idle, which is why products of
    some sizes are slower than others.
    """

    num_units: int
    shapes: tuple[tuple[int, int, float], ...]

    def fraction(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """The part of the device's rate that ``batch`` products ``[m, k] x [k, n]`` get, with the
        best shape of tiles.
        """
        return max(
            fraction * self._used(m, n, k, batch, rows, columns)
            for rows, columns, fraction in self.shapes
        )

    def _used(self, m: float, n: float, k: float, batch: float, rows: int, columns: int) -> float:
        """The part of all units' time in which they compute elements of the result."""
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        if tiles >= self.num_units:
            rounds: float = math.ceil(tiles / self.num_units)
        else:  # several units share a tile, each sums over a part of k
            rounds = 1 / min(self.num_units // tiles, max(1.0, k / LEAST_SUMMED))
        return batch * m * n / (rounds * self.num_units * rows * columns)


LEAST_SUMMED = 256
"""The fewest elements of k over which a unit sums, where several units share a tile."""

Both = tuple[float, float]
"""A number for the forward, and one for the backward."""

Casts = tuple[float, float, float]
"""A number for the input of a linear layer, one for its weight, and one for the gradient of what
comes out.
"""

CASTS: Casts = (3.0, 3.0, 3.0)
"""The bytes that a cast from two bytes to one reads and writes for each element."""


@checked_fields
@dataclass(frozen=True)
class Device:
    """One device.

    - ``flops_per_s``: the dense peak of each dtype, by name (``"bfloat16"``).
    - ``matmul_efficiency``: the fraction of the peak that matrix products reach. It is one number
      (of what ``tiles`` leave, if given), or a table by size for each dtype.
    - ``bytes_per_s``: the memory bandwidth that large streaming operators reach, read and written
      bytes together. ``streams`` has it by size, as small tensors stay in caches.
    - ``launch_s``: the least time of one operator.

    - ``linear_dtype``: the dtype to which linear layers cast their operands before they multiply,
      where these are of two bytes: a float8 of ``flops_per_s``. ``None``: they multiply as they
      are. Whether a model may be trained so is for its user to say.
    - ``linear_cast_bytes``: the bytes that this cast reads and writes for each element of the
      input, of the weight and of the result's gradient.
    - ``unaligned_efficiency``: the part of their rate that products in two bytes or less reach
      where rows of an operand or of the result are no multiple of 16 bytes: a vocabulary of 50,257.
    - ``queue_s``: the seconds that the host takes to launch one operator, forward and backward.
      They hide behind the work of the device as long as its queue is full: an operator starts when
      it has been launched and all before it have ended.
    - ``queue_stops``: whether the host waits, at the end of each forward, until the device is done:
      for a clock or a loss that it reads there. Then none of the backward has been launched.
    - ``experts_one_by_one``: whether the host launches a product for each expert, and not one for
      all of them: where there is no kernel for all.

    - ``overlap``: the part of a message that costs no time while the device computes at least as
      long; 1: all of it.

    Further fields describe a device without a queue of launches, such as a CPU:

    - ``host_s``: what Python and autograd add to one operator in a program. (A queue would hide it
      behind the work before.)
    - ``fetch_bytes_per_s``: the rate at which products fetch tensors that no cache has, on top of
      their arithmetic; ``None`` if the two run beside each other.
    - ``rates``: the most bytes per second that single operators get through, counted as
      ``operator_time.py`` counts them.
    - ``attention_efficiency``: the part of the rate of its products that attention reaches.
    - ``sharing``: several ranks share the cores of a machine. Then all numbers are those of one
      rank while all of them compute.
    """

    name: str
    memory_bytes: float
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    launch_s: float
    matmul_efficiency: float | Mapping[str, EfficiencyTable] = 1.0
    streams: BandwidthTable | None = None
    tiles: Tiling | None = None
    linear_dtype: str | None = None
    linear_cast_bytes: Casts = CASTS
    unaligned_efficiency: float = 1.0
    queue_s: Both = (0.0, 0.0)
    queue_stops: bool = False
    experts_one_by_one: bool = False
    overlap: float = 1.0
    host_s: Both = (0.0, 0.0)
    fetch_bytes_per_s: float | None = None
    rates: Mapping[str, Both] = field(default_factory=dict)
    attention_efficiency: Both = (1.0, 1.0)
    sharing: Sharing | None = None

    def matmul_s(self, m: float, n: float, k: float, dtype: str, batch: float = 1) -> float:
        """Seconds of ``batch`` products ``[m, k] x [k, n]``, arithmetic only. In a table a batch
        counts like more rows.

        Raises:
            ConfigError: nothing is known of ``dtype``.
        """
        flops = 2.0 * batch * m * n * k
        if not flops:
            return 0.0
        return flops / (self.peak_flops_per_s(dtype) * self._efficiency(m, n, k, batch, dtype))

    @property
    def has_tables(self) -> bool:
        """Whether any of its rates were measured by size."""
        return isinstance(self.matmul_efficiency, Mapping) or self.streams is not None

    def measured(self, m: float, n: float, k: float, dtype: str, batch: float = 1) -> bool:
        """Whether the efficiency at this size was measured, rather than taken from the edge of the
        table or a constant.
        """
        if not isinstance(self.matmul_efficiency, Mapping) or dtype not in self.matmul_efficiency:
            return False
        return self.matmul_efficiency[dtype].covers(batch * m, n, k)

    def memory_s(self, num_bytes: float) -> float:
        """Seconds of one operator that reads and writes ``num_bytes`` in all."""
        if not num_bytes:
            return 0.0
        rate = self.bytes_per_s if self.streams is None else self.streams.at(num_bytes)
        return num_bytes / rate

    def fetch_s(self, num_bytes: float) -> float:
        """Seconds that a product takes beyond its arithmetic. ``num_bytes``: those of all operands
        and results.
        """
        return num_bytes / self.fetch_bytes_per_s if self.fetch_bytes_per_s else 0.0

    def pass_s(self, target: str, num_bytes: float, direction: int) -> float:
        """Seconds of one operator by name that goes over ``num_bytes``: :meth:`memory_s`, or longer
        if the operator has a slower rate of its own. ``direction``: 0 forward, 1 backward.
        """
        seconds = self.memory_s(num_bytes)
        if target not in self.rates:
            return seconds
        return max(seconds, num_bytes / self.rates[target][direction])

    def hidden_s(self, message_s: float, busy_s: float) -> float:
        """The seconds of a message that cost nothing, as the device computes for ``busy_s``."""
        return self.overlap * min(message_s, busy_s)

    def peak_flops_per_s(self, dtype: str) -> float:
        """The dense peak of ``dtype``.

        Raises:
            ConfigError: nothing is known of ``dtype``.
        """
        if dtype not in self.flops_per_s:
            raise ConfigError(
                f"device {self.name!r} has no rate for products in {dtype}",
                why=f"its flops_per_s has {', '.join(self.flops_per_s)}",
                hint=f"add {dtype!r} to flops_per_s in the hardware file",
            )
        return self.flops_per_s[dtype]

    def _efficiency(self, m: float, n: float, k: float, batch: float, dtype: str) -> float:
        if isinstance(self.matmul_efficiency, Mapping):
            table = self.matmul_efficiency.get(dtype)
            return 1.0 if table is None else table.at(batch * m, n, k)
        return self.matmul_efficiency * (
            1.0 if self.tiles is None else self.tiles.fraction(m, n, k, batch)
        )


def read_device(fields: Fields) -> Device:
    """The device of a hardware file.

    Raises:
        ConfigError: a key that is missing, unknown or has a value it cannot have.
    """
    device = Device(
        name=fields.text("name"),
        memory_bytes=fields.count("memory_bytes"),
        flops_per_s=fields.numbers("flops_per_s"),
        bytes_per_s=fields.number("bytes_per_s"),
        launch_s=fields.number("launch_s", zero=True),
        matmul_efficiency=_read_efficiency(fields),
        streams=_read_streams(fields),
        tiles=_read_tiles(fields),
        linear_dtype=_read_linear_dtype(fields),
        linear_cast_bytes=_read_casts(fields),
        unaligned_efficiency=_read_part(fields, "unaligned_efficiency"),
        queue_s=_read_both(fields, "queue_s", (0.0, 0.0), zero=True),
        queue_stops=_read_flag(fields, "queue_stops"),
        experts_one_by_one=_read_flag(fields, "experts_one_by_one"),
        overlap=_read_part(fields, "overlap", zero=True),
        host_s=_read_both(fields, "host_s", (0.0, 0.0), zero=True),
        fetch_bytes_per_s=fields.optional_number("fetch_bytes_per_s"),
        rates=_read_rates(fields),
        attention_efficiency=_read_both(fields, "attention_efficiency", (1.0, 1.0)),
        sharing=_read_sharing(fields),
    )
    # A key that nothing has read is unknown, and refused with its path.
    fields.finish()
    return device


def _read_efficiency(fields: Fields) -> float | Mapping[str, EfficiencyTable]:
    if not fields.is_mapping("matmul_efficiency"):
        return fields.number("matmul_efficiency")
    tables, rates = {}, fields.numbers("flops_per_s")
    by_dtype = fields.child("matmul_efficiency")
    for dtype in by_dtype.names():
        table = by_dtype.child(dtype)
        if dtype not in rates:
            raise by_dtype.error(dtype, "has no peak in flops_per_s")
        # A fraction of the peak for every corner of the grid m x n x k; sizes between are
        # interpolated.
        m, n, k = (table.counts(key) for key in ("m", "n", "k"))
        for key in ("m", "n", "k"):
            _check_ascending(table, key)
        fractions = table.number_list("fractions")
        if len(fractions) != len(m) * len(n) * len(k):
            raise table.error(
                "fractions",
                f"has {len(m) * len(n) * len(k)} numbers, one per (m, n, k); k varies fastest",
            )
        table.finish()
        tables[dtype] = EfficiencyTable(m, n, k, fractions)
    return tables


def _read_streams(fields: Fields) -> BandwidthTable | None:
    if not fields.has("streams"):
        return None
    table = fields.child("streams")
    num_bytes, bytes_per_s = table.counts("num_bytes"), table.number_list("bytes_per_s")
    _check_ascending(table, "num_bytes")
    if len(bytes_per_s) != len(num_bytes):
        raise table.error("bytes_per_s", f"has {len(num_bytes)} numbers, one per size in num_bytes")
    table.finish()
    return BandwidthTable(num_bytes, bytes_per_s)


def _read_tiles(fields: Fields) -> Tiling | None:
    if not fields.has("tiles"):
        return None
    # Tiles say by themselves what a table would.
    if fields.is_mapping("matmul_efficiency"):
        raise fields.error(
            "tiles",
            "is for an efficiency that is one number: a measured table has the effect in it",
        )
    tiles = fields.child("tiles")
    shapes = tuple(
        (shape.count("rows"), shape.count("columns"), shape.number("fraction"))
        for shape in tiles.children("shapes")
    )
    if not shapes:
        raise tiles.error("shapes", "has at least one shape")
    tiling = Tiling(tiles.count("num_units"), shapes)
    tiles.finish()
    return tiling


def _read_linear_dtype(fields: Fields) -> str | None:
    if not fields.has("linear_dtype"):
        return None
    name, rates = fields.text("linear_dtype"), fields.numbers("flops_per_s")
    if name not in rates:
        raise fields.error("linear_dtype", f"has a rate in flops_per_s: {', '.join(rates)}")
    return name


def _read_casts(fields: Fields) -> Casts:
    if not fields.has("linear_cast_bytes"):
        return CASTS
    numbers = fields.number_list("linear_cast_bytes", zero=True)
    if len(numbers) != 3:
        raise fields.error("linear_cast_bytes", "has three numbers: input, weight, gradient")
    return numbers[0], numbers[1], numbers[2]


def _read_part(fields: Fields, key: str, *, zero: bool = False) -> float:
    """A number up to 1, which it is where nothing is said; ``zero`` allows 0."""
    if not fields.has(key):
        return 1.0
    part = fields.number(key, zero=zero)
    if part > 1:
        raise fields.error(key, "is a part, from 0 to 1")
    return part


def _read_flag(fields: Fields, key: str) -> bool:
    """Something that is so of a queue of launches."""
    flag = fields.value(key) if fields.has(key) else False
    if not isinstance(flag, bool):
        raise fields.error(key, "is true or false")
    if flag and not fields.has("queue_s"):
        raise fields.error(key, "is about the queue of launches, which begins with queue_s")
    return flag


def _read_rates(fields: Fields) -> Mapping[str, Both]:
    if not fields.has("rates"):
        return {}
    rates = fields.child("rates")
    return {name: _read_both(rates, name) for name in rates.names()}


def _read_sharing(fields: Fields) -> Sharing | None:
    if not fields.has("sharing"):
        return None
    shared = fields.child("sharing")
    sharing = Sharing(shared.count("num_ranks"), shared.count("num_cores"))
    if sharing.num_ranks <= sharing.num_cores:
        raise shared.error(
            "num_ranks",
            "is more than num_cores: else every rank has a core for itself; leave sharing out",
        )
    shared.finish()
    return sharing


def _read_both(
    fields: Fields, key: str, default: Both | None = None, *, zero: bool = False
) -> Both:
    """A list of two numbers: forward and backward; ``zero`` allows 0."""
    if default is not None and not fields.has(key):
        return default
    numbers = fields.number_list(key, zero=zero)
    if len(numbers) != 2:
        raise fields.error(key, "has two numbers, of the forward and of the backward")
    return numbers[0], numbers[1]


def _check_ascending(fields: Fields, key: str) -> None:
    sizes = fields.counts(key)
    if list(sizes) != sorted(set(sizes)):
        raise fields.error(key, "is a list of ascending sizes")


def device_json(device: Device) -> dict[str, Any]:
    """The JSON form of a device. :func:`read_device` is the inverse."""
    efficiency = device.matmul_efficiency
    return {
        "name": device.name,
        "memory_bytes": device.memory_bytes,
        "flops_per_s": dict(device.flops_per_s),
        "bytes_per_s": device.bytes_per_s,
        "launch_s": device.launch_s,
        "matmul_efficiency": (
            {dtype: _table_json(table) for dtype, table in efficiency.items()}
            if isinstance(efficiency, Mapping)
            else efficiency
        ),
        # Fields with their usual value are left out.
        **({"streams": _streams_json(device.streams)} if device.streams else {}),
        **({"tiles": _tiles_json(device.tiles)} if device.tiles else {}),
        **({"linear_dtype": device.linear_dtype} if device.linear_dtype else {}),
        **(
            {"linear_cast_bytes": list(device.linear_cast_bytes)}
            if device.linear_cast_bytes != CASTS
            else {}
        ),
        **(
            {"unaligned_efficiency": device.unaligned_efficiency}
            if device.unaligned_efficiency != 1
            else {}
        ),
        **({"queue_s": list(device.queue_s)} if any(device.queue_s) else {}),
        **({"queue_stops": True} if device.queue_stops else {}),
        **({"experts_one_by_one": True} if device.experts_one_by_one else {}),
        **({"overlap": device.overlap} if device.overlap != 1 else {}),
        **({"host_s": list(device.host_s)} if any(device.host_s) else {}),
        **({"fetch_bytes_per_s": device.fetch_bytes_per_s} if device.fetch_bytes_per_s else {}),
        **(
            {"rates": {name: list(both) for name, both in device.rates.items()}}
            if device.rates
            else {}
        ),
        **(
            {"attention_efficiency": list(device.attention_efficiency)}
            if device.attention_efficiency != (1.0, 1.0)
            else {}
        ),
        **({"sharing": asdict(device.sharing)} if device.sharing else {}),
    }


def _streams_json(table: BandwidthTable) -> dict[str, Any]:
    return {"num_bytes": list(table.num_bytes), "bytes_per_s": list(table.bytes_per_s)}


def _table_json(table: EfficiencyTable) -> dict[str, Any]:
    return {
        "m": list(table.m),
        "n": list(table.n),
        "k": list(table.k),
        "fractions": list(table.fractions),
    }


def _tiles_json(tiling: Tiling) -> dict[str, Any]:
    shapes = [
        {"rows": rows, "columns": columns, "fraction": fraction}
        for rows, columns, fraction in tiling.shapes
    ]
    return {"num_units": tiling.num_units, "shapes": shapes}
