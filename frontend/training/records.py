"""What a run tells of itself: records, and the lines that people read of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from shardwright.compiler.plan.amounts import amount


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory so far: what tensors took on a CUDA device, what the process took on a
    CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in kB on Linux


def step_line(record: Mapping[str, Any], num_steps: int) -> str:
    """A record of a step on one line; what is not known is left out."""
    parts = [f"step {record['step']:>{len(str(num_steps))}}/{num_steps}"]
    parts.append(f"loss {record['loss']:.6g}")
    if record.get("grad_norm") is not None:
        parts.append(f"norm {record['grad_norm']:.4g}")
    parts.append(f"lr {record['lr']:.3g}")
    if record.get("tokens_per_s") is not None:
        parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
    else:
        parts.append(f"{record['samples_per_s']:,.3g} samples/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    parts.append(_beside(record, "step_s", "s"))
    parts.append(_beside(record, "peak_memory_bytes", "B"))
    if record.get("communication_share") is not None:
        text = f"communication {record['communication_share']:.0%}"
        predicted = record.get("predicted_communication_share")
        parts.append(text if predicted is None else f"{text} ({predicted:.0%} predicted)")
    return "  ".join(parts)


def _beside(record: Mapping[str, Any], name: str, unit: str) -> str:
    """``210 ms (198 ms predicted)``."""
    text = amount(record[name], unit)
    predicted = record.get(f"predicted_{name}")
    return text if predicted is None else f"{text} ({amount(predicted, unit)} predicted)"


def line_of(record: Mapping[str, Any], num_steps: int) -> str:
    """Any record on one line."""
    event = record["event"]
    if event == "step":
        return step_line(record, num_steps)
    rest = {name: value for name, value in record.items() if name not in ("event", "time")}
    return f"{event}: " + ", ".join(f"{name} {_text(value)}" for name, value in rest.items())


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
