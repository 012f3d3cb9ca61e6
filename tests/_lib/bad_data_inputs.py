"""Calls of what feeds a training run, data and experts."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from bad_input_targets import Target

import shardwright


def data_targets(folder: Path) -> list[Target]:
    """What reads data, and is asked for a batch."""
    data = shardwright.data
    lines, tokens, shard = folder / "lines.jsonl", folder / "tokens", folder / "shard.tar"
    lines.write_text("".join(f"{number}\n" for number in range(8)))
    data.write_token_file(tokens, [[1, 2, 3], [4, 5]])
    with tarfile.open(shard, "w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    workers = data.WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = data.SavableDataset(source=range(8), batch_size=2, worker_config=workers)
    state = next(_stepped(data.get_loader(dataset)))
    made = data.loader(range(8), global_batch=2)
    cut = {"dim": 0, "index": 0, "size": 1}
    table = data.roles(replica=0, num_replicas=1)
    worker = {"rank": 0, "world_size": 1, "num_workers": 0}
    ids = torch.tensor([[1, 1, 2, 0]])
    return [
        Target("data", "loader", _first_batch, lambda: {"dataset": range(8), "global_batch": 2},
            also=LOADER_OPTIONS),
        Target("data", "loader.load_state_dict", made.load_state_dict,
            lambda: {"state": made.state_dict()}),
        *(
            Target(
                "data", f"loader state, {key}", _loader_state(made.state_dict(), key),
                lambda key=key: {"value": made.state_dict()[key]},
            )
            for key in made.state_dict()
        ),
        Target("data", "Packing", _packed, lambda: {"length": 4}),
        Target("data", "document_mask", data.document_mask, lambda: {"document_ids": ids}),
        Target("data", "roles", data.roles, lambda: {"replica": 0, "num_replicas": 1}),
        Target("data", "Roles.on", table.on, lambda: {"rank": 0}),
        Target("data", "EvenCut", data.EvenCut, lambda: dict(cut)),
        Target("data", "EvenCut.runs", data.EvenCut(**cut).runs, lambda: {"length": 4}),
        Target("data", "TarShards", _read(data.TarShards), lambda: {"paths": shard},
            also=("paths", "decode", "keys")),
        Target("data", "JsonLines", _read(data.JsonLines), lambda: {"paths": lines},
            also=("paths",)),
        Target("data", "TokenFile", _read(data.TokenFile), lambda: {"prefix": tokens},
            also=("prefix",)),
        Target("data", "TokenWindows", _read(data.TokenWindows),
            lambda: {"file": tokens, "length": 2}, also=("file", "length", "mask_bounds")),
        Target("data", "write_token_file", data.write_token_file,
            lambda: {"prefix": folder / "written", "documents": [[1]]}),
        Target("data", "WorkerConfig", data.WorkerConfig, lambda: dict(worker)),
        Target("data", "default_worker_config", data.default_worker_config, dict),
        Target("data", "SavableDataset", _first_of_savable,
            lambda: {"source": range(8), "batch_size": 2, "worker_config": workers},
            also=SAVABLE_OPTIONS),
        Target("data", "get_savable_loader", data.get_savable_loader, lambda: {"dataset": dataset}),
        Target("data", "get_loader", data.get_loader, lambda: {"dataset": dataset}),
        Target("data", "restore_state", data.get_loader(dataset).restore_state_rank,
            lambda: {"state": state}),
        Target("data", "redistribute", data.redistribute,
            lambda: {"states": [state], "world_size": 2, "num_workers": 1}),
    ]  # fmt: skip


LOADER_OPTIONS = (
    "dataset", "roles_or_plan", "global_batch", "microbatch", "seed", "shuffle", "shuffle_block",
    "weights", "packing", "num_workers", "prefetch_factor", "collate", "transform", "drop_last",
    "wrap", "uneven", "on_error", "seed_samples", "replay", "device", "pin_memory",
    "multiprocessing_context",
)  # fmt: skip


SAVABLE_OPTIONS = (
    "source", "batch_size", "worker_config", "shuffle_buffer_size", "max_samples_per_sequence",
    "repeat", "weights", "collate", "on_error",
)  # fmt: skip


def _first_batch(**options: Any) -> None:
    next(iter(shardwright.data.loader(**options)), None)


def _first_of_savable(**options: Any) -> None:
    next(_stepped(shardwright.data.get_loader(shardwright.data.SavableDataset(**options))))


def _stepped(loader: Any) -> Iterator[Any]:
    """The state of a loader behind each batch."""
    for _ in loader:
        yield loader.save_state_rank()


def _loader_state(state: Mapping[str, Any], key: str) -> Callable[..., Any]:
    def load(value: Any) -> None:
        shardwright.data.loader(range(8), global_batch=2).load_state_dict({**state, key: value})

    return load


def _packed(**options: Any) -> None:
    packing = shardwright.data.Packing(**{"lengths": [2] * 8, **options})
    _first_batch(dataset=[torch.ones(2)] * 8, global_batch=2, packing=packing)


def _read(source: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: source(**arguments)[0]


def expert_targets(folder: Path) -> list[Target]:
    """Experts in a model of one's own."""
    x, weight = torch.ones(4, 2), torch.ones(3, 5, 2)
    chosen, gains = torch.tensor([[0], [1], [2], [0]]), torch.ones(4, 1)
    experts = shardwright.experts
    rows, _, routing = experts.dispatch(x, chosen, gains, num_experts=3)
    return [
        Target("experts", "dispatch", experts.dispatch,
            lambda: {"x": x, "chosen": chosen, "weights": gains, "num_experts": 3}),
        Target("experts", "grouped_linear", experts.grouped_linear,
            lambda: {"rows": rows, "weight": weight, "routing": routing}),
        Target("experts", "combine", experts.combine, lambda: {"rows": rows, "routing": routing}),
        Target("experts", "within_capacity", experts.within_capacity,
            lambda: {"chosen": chosen, "weights": gains, "num_experts": 3, "factor": 1.0}),
    ]  # fmt: skip
