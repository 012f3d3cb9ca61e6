"""What the ranks of a job do with loaders: for tests that start processes."""

from __future__ import annotations

import os
from typing import Any

import torch

import shardwright
from shardwright.data import (
    SavableDataset,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
)
from shardwright.runtime.errors import ShardwrightError


def the_documents_program(folder: str) -> dict[str, Any]:
    """The example of Megatron-Energon's page on parallelism, imports renamed. Its process groups
    are created on all ranks in one order; there, only their members did.
    """
    # Workers of a process that a fork server made would each import torch anew.
    torch.multiprocessing.set_start_method("fork", force=True)
    os.chdir(folder)
    seen: dict[str, Any] = {"batches": [], "restored": [], "global": [], "from_source": []}

    # Get the DP, PP, TP ranks
    global_rank = torch.distributed.get_rank()
    data_parallel_rank = [0, 0, None, None, 1, 1, None, None][global_rank]
    pipeline_parallel_rank = [0, 0, 1, 1, 0, 0, 1, 1][global_rank]
    tensor_parallel_rank = [0, 1, 0, 1, 0, 1, 0, 1][global_rank]

    groups = [torch.distributed.new_group(ranks=ranks) for ranks in ([0, 4], [1, 5])]
    data_parallel_group = groups[tensor_parallel_rank] if data_parallel_rank is not None else None

    def make() -> Any:
        assert pipeline_parallel_rank == 0, "Only Pipeline Parallel ranks 0 load data"
        # Set the worker config correspondingly
        worker_config = WorkerConfig(
            rank=data_parallel_rank,
            world_size=torch.distributed.get_world_size(data_parallel_group),
            num_workers=3,
            data_parallel_group=data_parallel_group,
        )
        # Create the loader with that config
        return get_savable_loader(
            get_train_dataset(
                "coyo-coco-dataset.yaml",
                batch_size=4,
                shuffle_buffer_size=100,
                max_samples_per_sequence=100,
                worker_config=worker_config,
            )
        )

    def texts(loader: Any, count: int) -> list[list[str]]:
        # Iterate the data
        return [batch["txt"] for _, batch in zip(range(count), loader, strict=False)]

    if data_parallel_rank is not None:
        loader = make()
        seen["batches"] = texts(loader, 2)
        if tensor_parallel_rank == 0:
            # Save the state only for the first TP rank (the other TP ranks have a copy)
            state = loader.save_state_rank()
            torch.save(state, f"dataloader_rank{data_parallel_rank}.pt")
        if tensor_parallel_rank == 0:
            # Alternatively, save once for the whole dp group:
            state = loader.save_state_global(global_dst_rank=0)
            if state is not None:
                torch.save(state, "dataloader.pt")
        try:
            loader.save_state_global(global_dst_rank=2)
        except ShardwrightError as error:
            seen["refused"] = error.what
        seen["next"] = texts(loader, 2)
        loader.close()
    torch.distributed.barrier()

    # ... when loading:
    if data_parallel_rank is not None:
        # Restore the state for a new loader
        loader = make()
        state = torch.load(f"dataloader_rank{data_parallel_rank}.pt")
        loader.restore_state_rank(state)
        seen["restored"] = texts(loader, 2)
        loader.close()

        # Alternatively, when using a global checkpoint,
        # load the checkpoint from disk on every dp rank:
        loader = make()
        state = torch.load("dataloader.pt")
        loader.restore_state_global(state)
        seen["global"] = texts(loader, 2)
        loader.close()

        # Or load only once from disk for each dp group:
        loader = make()
        state = torch.load("dataloader.pt") if data_parallel_rank == 0 else None
        loader.restore_state_global(state, src_rank=0)
        seen["from_source"] = texts(loader, 2)
        loader.close()
    return seen


def states_of_a_plan(folder: str) -> dict[str, Any]:
    """States are collected over the groups of a plan, 2 units x tp 2. Nobody makes a group by
    hand.
    """
    rank = torch.distributed.get_rank()
    config = shardwright.ComputeConfig(plan_ngpus=2, runtime_ngpus=4)
    example = {"input": torch.zeros(2, 4)}
    module = shardwright.parallelize(
        torch.nn.Linear(4, 4), example, "tp", config, gen_savedir=folder
    )
    seen: dict[str, Any] = {}
    for name, plan in (("module", module), ("mpu", module.mpu)):
        config = WorkerConfig.from_roles(plan, num_workers=0)
        source = list(range(20))

        def make(config: WorkerConfig = config, source: list[int] = source) -> Any:
            return get_savable_loader(
                SavableDataset(source=source, batch_size=2, worker_config=config)
            )

        loader = make()
        next(iter(loader))
        # As in the document: of each pair of twins one is asked.
        destination = 0 if rank % 2 == 0 else 3
        states = loader.save_state_global(destination)
        again = make()
        again.restore_state_global(states, src_rank=destination // 2)
        seen[name] = {
            "rank": config.rank,
            "global_rank": config.global_rank(),
            "here": None if states is None else [state["rank"] for state in states],
            "next": next(iter(again)).tolist(),
        }
    by_hand = WorkerConfig(rank=rank // 2, world_size=2, num_workers=0)
    try:
        by_hand.process_group()
    except ShardwrightError as error:
        seen["refused"] = str(error)
    return seen
