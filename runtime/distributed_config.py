"""The option table of the distributed optimizer, with the names and defaults that NeMo's users
know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardwright.runtime.errors import ConfigError, brief, did_you_mean
from shardwright.runtime.named_fields import named_fields

DTYPES: Mapping[str, str] = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""What a dtype of the table may be called, and torch's name of it. A ``torch.dtype`` is accepted
too.
"""


@named_fields
@dataclass(frozen=True, kw_only=True)
class DistributedOptimizerConfig:
    """The options of the distributed optimizer: the precision in which its state is kept, and how
    gradients and parameters travel, at every stage of ZeRO.

    ``dtype``: the dtype of the optimizer's state and of what it updates: float32, float16 or
    bfloat16, kept by name. Where a parameter is of another dtype, the optimizer updates a *master*
    copy of its shard, which is rounded into the parameter after each step. With float32 (and
    ``None``, which means it) a wider parameter keeps its own dtype.

    ``grad_sync_dtype``: the dtype in which gradients are accumulated and reduced; ``None`` is the
    dtype of the state. ``bucket_cap_mb``: MiB of gradients in a bucket, counted in that dtype.

    ``overlap_grad_sync``: the reduction of a bucket starts in backward, as soon as all its
    gradients are there.
    ``overlap_param_sync``: after a step, parameters are gathered until the next forward first uses
    them.
    ``contiguous_grad_buffer``: gradients are views of one buffer for each dtype, which stays (with
    stage 2 of one for each bucket, which is freed); else they are tensors of their own, copied into
    a buffer while they are reduced.
    ``contiguous_param_buffer``: parameters are views of one buffer for each dtype, which saves a
    copy and memory when they are gathered.

    ``store_param_remainders``: of a float32 master of a bfloat16 parameter only the 16 bits are
    kept that the parameter lacks. The optimizer sees float32 tensors while it steps.
    """

    dtype: Any = "float32"
    grad_sync_dtype: Any = None
    overlap_grad_sync: bool = True
    overlap_param_sync: bool = False
    bucket_cap_mb: float = 100
    contiguous_param_buffer: bool = False
    contiguous_grad_buffer: bool = True
    store_param_remainders: bool = False

    def __post_init__(self) -> None:
        for name in ("dtype", "grad_sync_dtype"):
            object.__setattr__(self, name, _read_dtype(name, getattr(self, name)))
        for field in fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                title = f"{field.name} of distributed_optimizer is True or False"
                raise ConfigError(title, why=f"it is {brief(getattr(self, field.name))}")
        cap = self.bucket_cap_mb
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf:
            raise ConfigError(
                "bucket_cap_mb of distributed_optimizer is a size in MiB above 0",
                why=f"it is {brief(cap)}",
            )
        if self.store_param_remainders and self.dtype not in (None, "float32"):
            raise ConfigError(
                f"store_param_remainders has no meaning with dtype={self.dtype!r}",
                why="a remainder is what a bfloat16 parameter lacks of a float32 master",
                hint="leave out dtype, or store_param_remainders",
            )

    @classmethod
    def of(
        cls, options: DistributedOptimizerConfig | Mapping[str, Any]
    ) -> DistributedOptimizerConfig:
        """The options themselves, or those of a mapping of names to values.

        Raises :class:`ConfigError` for an unknown name.
        """
        if isinstance(options, DistributedOptimizerConfig):
            return options
        if not isinstance(options, Mapping):
            raise ConfigError(
                "distributed_optimizer is a DistributedOptimizerConfig, or a dict of its fields",
                why=f"it is a {type(options).__name__}",
            )
        known = tuple(field.name for field in fields(cls))
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"distributed_optimizer has no option {brief(name)}",
                    hint=did_you_mean(name, known),
                )
        return cls(**options)

    def to_json(self) -> dict[str, Any]:
        """All options as JSON values, in one order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _read_dtype(name: str, value: Any) -> str | None:
    if value is None:
        return None
    text = brief(value).strip("'").removeprefix("torch.")
    if text not in DTYPES:
        raise ConfigError(
            f"{name} of distributed_optimizer is float32, float16 or bfloat16",
            why=f"it is {brief(value)}",
            hint="float64 parameters keep their dtype with float32" if text == "float64" else None,
        )
    return DTYPES[text]
