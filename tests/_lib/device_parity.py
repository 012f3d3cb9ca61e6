"""Training plans on the device of the current world, and comparing each rank's pieces with one
device.

Every rank trains the reference for itself and compares what it holds, so nothing but verdicts
travels. Used on fake CUDA devices by tests, and on GPUs by ``tests/product/gpus.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zoo
from torch import Tensor

from shardwright.frontend.files.cache import read_plan
from shardwright.frontend.parallelize import parallelize
from shardwright.frontend.verification.deviation import deviations, tensors_of
from shardwright.frontend.verification.one_device import Reference, adamw, reference_run
from shardwright.frontend.verification.precision import float64_casts
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.trained_ranks import Held, train_rank
from shardwright.runtime import structure
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.ranks.world import current_world


@dataclass(frozen=True)
class Case:
    """One training that is compared. ``config``: fields besides the numbers of ranks;
    ``plan_ngpus``: 0 means all ranks.
    """

    name: str
    model: str
    policy: str
    plan_ngpus: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


def cases(num_ranks: int) -> list[Case]:
    """What ``num_ranks`` ranks can run."""
    everywhere = [
        Case("dp, all-reduced", "gpt2", "dp", 1),
        Case(
            "dp, overlapped, small buckets",
            "llama",
            "dp",
            1,
            {"use_async_reducer": True, "reducer_bucket_cap_mb": 1e-3},
        ),
        Case("dp, batch norm", "resnet", "dp", 1),
        Case("ZeRO-1", "gpt2", "dp", 1, {"use_zero": 1}),
        Case(
            "ZeRO-2, overlapped",
            "llama",
            "dp",
            1,
            {"use_zero": 2, "use_async_reducer": True, "reducer_bucket_cap_mb": 1e-3},
        ),
        Case("ZeRO-3", "gpt2", "dp", 1, {"use_zero": 3}),
    ]
    if num_ranks == 1:
        return [case for case in everywhere if case.config.get("use_zero") != 3]
    end2end = {"use_end2end": True}
    several = [
        Case("tp", "llama", "tp"),
        Case("tp, uneven", "gpt2-uneven", "tp"),
        Case("data", "gpt2", "data"),
        Case("data, batch norm", "resnet", "data"),
        Case("pp, 1F1B", "gpt2-untied", "pp", 2, end2end),
        Case("pp, tied embeddings", "gpt2", "pp", 2, end2end),
        Case(
            "pp, ZB-H1",
            "llama",
            "pp",
            2,
            {**end2end, "pas_config": {"schedule": "zb_h1", "num_microbatches": 4}},
        ),
        Case("pp, interleaved, tied", "gpt2", "pp", 2, {**end2end, "pas_config": _INTERLEAVED}),
        Case(
            "pp, recomputed",
            "gpt2",
            "pp",
            2,
            {**end2end, "pas_config": {"recompute": ["transformer.h.*"]}},
        ),
        Case("pp, encoder and decoder", "t5", "pp", 2, end2end),
    ]
    if num_ranks < 4:
        return everywhere + several
    return [
        *everywhere,
        *several,
        Case("tp in units, ZeRO-1", "llama", "tp", 2, {"use_zero": 1}),
        Case("hybrid", "gpt2", "hybrid", 4, end2end),
        Case("hybrid, ZeRO-2", "llama", "hybrid", 4, {**end2end, "use_zero": 2}),
        Case("pp 4", "llama", "pp", 4, {**end2end, "pas_config": {"num_microbatches": 6}}),
    ]


_INTERLEAVED = {"schedule": "1f1b_interleaved", "chunks": 2, "num_microbatches": 4}


def compare(case: Case, folder: Path, steps: int = 3) -> dict[str, float]:
    """Train ``case`` on this rank; by kind of tensor, the farthest of them from one device in units
    of what is allowed.

    ``folder`` is the same on all ranks. Collective.
    """
    world = current_world()
    config = ComputeConfig(
        plan_ngpus=case.plan_ngpus or world.size, runtime_ngpus=world.size, **case.config
    )
    entry = zoo.get(case.model)
    with float64_casts():
        model = entry.build()
        parallelize(
            model, entry.inputs(), case.policy, config, gen_savedir=folder, load_module=False
        )
        (directory,) = {path.parent for path in folder.rglob("manifest.json")}
        num_samples = num_samples_of(directory, config)
        samples = [
            [rolled(entry.inputs(), u + n * config.num_units) for n in range(num_samples)]
            for u in range(config.num_units)
        ]
        held = train_rank(
            directory, config, on_device(samples), world.rank, steps, adamw, training=True
        )
    reference = reference_run(model, samples, adamw, steps)
    return farthest(held, reference, world.rank // config.plan_ngpus, num_samples)


def farthest(held: Held, reference: Reference, unit: int, num_samples: int) -> dict[str, float]:
    """The largest excess of what a rank holds, by kind. Buffers are compared on unit 0, losses with
    those of the unit.
    """
    mine = slice(unit * num_samples, (unit + 1) * num_samples)
    pairs: dict[str, tuple[Any, Any]] = {
        "losses": (held.losses, [losses[mine] for losses in reference.losses]),
        "gradients": _placed(held, held.gradients, reference.gradients),
        "parameters": _placed(held, held.parameters, reference.parameters),
    }
    if unit == 0:
        pairs["buffers"] = _placed(held, held.buffers, reference.buffers)
    found = {kind: deviations(host(ours), wanted) for kind, (ours, wanted) in pairs.items()}
    return {kind: max((d.excess for d in of_kind), default=0.0) for kind, of_kind in found.items()}


def _placed(
    held: Held, pieces: Mapping[str, Tensor | None], wholes: Mapping[str, Tensor | None]
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The pieces of a rank in their places in copies of the reference, and the reference of those
    tensors.
    """
    ours: dict[str, Tensor | None] = {}
    for name, piece in pieces.items():
        whole = wholes[name]
        if piece is None or whole is None:
            ours[name] = piece
            continue
        runs = [
            torch.tensor([i for start, stop in span for i in range(start, stop)], dtype=torch.long)
            for span in held.spans[name]
        ]
        ours[name] = whole.clone()
        ours[name][torch.meshgrid(*runs, indexing="ij") if runs else ...] = piece.to(
            "cpu", whole.dtype
        )
    return ours, {name: wholes[name] for name in pieces}


def num_samples_of(directory: Path, config: ComputeConfig) -> int:
    """How many samples a step has."""
    return 1 if not config.use_end2end else read_plan(directory).num_microbatches


def on_device(tree: Any) -> Any:
    """The structure with tensors on the device of this rank."""
    return structure.map_leaves(
        tree, lambda path, x: x.to(current_world().device) if isinstance(x, Tensor) else x, ""
    )


def host(tree: Any) -> Any:
    return {path: x.cpu() for path, x in tensors_of(tree).items()}


def compare_all(folder: str, names: list[str]) -> dict[str, dict[str, float]]:
    """:func:`compare` for the cases of these names. What one raises has a note that names the case.
    Collective.
    """
    results = {}
    for number, case in enumerate(
        case for case in cases(current_world().size) if case.name in names
    ):
        try:
            results[case.name] = compare(case, Path(folder) / str(number))
        except Exception as error:
            error.add_note(f"in the case {case.name!r}")
            raise
    return results
