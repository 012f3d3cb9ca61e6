"""How fast sharded training state is saved and loaded, beside ``torch.distributed.checkpoint`` used
directly.

    python benchmarks/checkpoint.py [--pairs 7] [--layers 8]

A GPT in float32 with AdamW, two ranks with one thread each, gloo: ``use_zero=3`` on our side, FSDP2
on the other, so that each rank holds and writes half of everything. Both sides write to the same
file system in turn, flush what they wrote, and load it again; reads come from the page cache. Ours
writes digests and, unless told not to, compares them when it loads. The peer's times include
``get_state_dict`` and ``set_state_dict``, without which it has nothing to save.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fully_sharded import Side, fsdp2, ours
from pairs import compare
from ranks import gloo_rank, parser_of, start_ranks
from step_time import make_batch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardwright


def peer(side: Side, folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """Saving and loading, as the documentation of ``torch.distributed.checkpoint`` has it."""
    _, model, optimizer = side

    def save() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save(
            {"model": model_state, "optimizer": optimizer_state},
            storage_writer=dcp.FileSystemWriter(folder),
        )

    def load() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    return save, load


def run_rank(folder: Path, num_layers: int, num_pairs: int) -> None:
    """The comparison on the calling rank; rank 0 prints."""
    batch = make_batch(seed=dist.get_rank())
    mine, theirs = ours(num_layers, str(folder / "files"), batch), fsdp2(num_layers, batch)
    mine[0](), theirs[0]()
    _, model, optimizer = mine
    their_save, their_load = peer(theirs, folder / "theirs")
    own = folder / "ours"
    cases = {
        "save": (lambda: shardwright.save_checkpoint(own, model, optimizer, keep=1), their_save),
        "load, digests compared": (
            lambda: shardwright.load_checkpoint(own, model, optimizer),
            their_load,
        ),
        "load": (
            lambda: shardwright.load_checkpoint(own, model, optimizer, verify=False),
            their_load,
        ),
    }
    for name, (our_call, their_call) in cases.items():
        ratio = compare(
            our_call, their_call, num_pairs=num_pairs, num_warmup=1, barrier=dist.barrier
        )
        if dist.get_rank() == 0:
            num_bytes = sum(path.stat().st_size for path in own.glob("*/*.safetensors"))
            rates = " against ".join(
                f"{num_bytes / 1e6 / seconds:.0f} MB/s"
                for seconds in (ratio.ours_s, ratio.theirs_s)
            )
            print(f"{name:24s}{ratio}  {num_bytes / 1e6:.0f} MB, {rates}", flush=True)


def main() -> None:
    parser = parser_of(__doc__, pairs=7, rank_in=("DIR",))
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.rank_in:
        with gloo_rank():
            return run_rank(Path(*arguments.rank_in), arguments.layers, arguments.pairs)
    print(f"{'':24s}ours / theirs [95 % interval]", flush=True)
    start_ranks(__file__, 2, pairs=arguments.pairs, layers=arguments.layers)


if __name__ == "__main__":
    main()
