"""Everything on the GPUs of this machine, held to one device.

    torchrun --nproc_per_node=4 tests/product/gpus.py [--only tp pp] [--backend nccl] [--eager]
    [--zoo]

Trains small models in float64 under data, tensor, pipeline and hybrid plans, with every stage of
ZeRO, and compares losses, gradients and parameters of each rank with the model on the CPU, within
the bound of all parity tests; resumes from checkpoints; trains in autocast with scaled losses;
recomputes dropout. Prints a line for each and a verdict; the exit status tells whether all is well.
Run it with 1, 2, 4 and 8 ranks, with ``--eager`` and without. NCCL serves ranks that have a GPU
each; with fewer GPUs it says so and takes gloo and the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import cuda_jobs
import device_parity
import torch
import torch.distributed as dist
import zoo

from shardwright.runtime.ranks.world import current_world


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="what has one of these words in its name"
    )
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        help="default: nccl where each rank has a GPU, else gloo",
    )
    parser.add_argument(
        "--eager",
        action="store_true",
        help="NCCL makes communicators with the groups (device_id is given)",
    )
    parser.add_argument("--zoo", action="store_true", help="all models of the tests, too, under tp")
    options = parser.parse_args()
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= num_local
    backend = options.backend or ("nccl" if has_gpus else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    eager = options.eager and backend == "nccl"
    dist.init_process_group(backend, device_id=torch.device("cuda", local_rank) if eager else None)
    world = current_world()
    say = print if world.rank == 0 else lambda *args, **kwargs: None
    where = (
        torch.cuda.get_device_name()
        if backend == "nccl"
        else f"the CPU ({torch.cuda.device_count()} GPUs for {num_local} ranks)"
    )
    say(f"torch {torch.__version__}, {world.size} rank(s) over {backend} on {where}")
    warnings.simplefilter("ignore")
    (folder,) = world.broadcast_object([tempfile.mkdtemp() if world.rank == 0 else ""])
    cases = device_parity.cases(world.size)
    cases += [device_parity.Case("zoo, tp", model, "tp") for model in zoo.names() if options.zoo]
    checks = {
        name: check
        for name, check in _checks(cases, world.size).items()
        if any(word in name for word in options.only)
    }
    failed = []
    for number, (name, check) in enumerate(checks.items()):
        try:
            found = check(Path(folder) / str(number))
        except Exception:
            # The other ranks may wait in a collective: nothing can be said after this.
            print(
                f"rank {world.rank}, {name}: failed\n{traceback.format_exc()}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
        verdicts = world.all_gather_object(found)
        wrong = [f"rank {rank}: {verdict}" for rank, verdict in enumerate(verdicts) if verdict]
        failed += [name] if wrong else []
        say(
            f"  {'wrong' if wrong else 'ok':6}{name}",
            *wrong,
            sep="\n          " if wrong else " ",
            flush=True,
        )
    say(
        f"{len(checks) - len(failed)} of {len(checks)} are right"
        + (f"; wrong: {', '.join(failed)}" if failed else "")
    )
    dist.destroy_process_group()
    return bool(failed)


Check = Callable[[Path], str]
"""What is wrong with something, on this rank, in a folder of its own."""


def _checks(cases: list[device_parity.Case], num_ranks: int) -> dict[str, Check]:
    def trained(case: device_parity.Case) -> Check:
        def check(folder: Path) -> str:
            found = device_parity.compare(case, folder)
            return "" if max(found.values()) <= 1 else f"times what is allowed: {found}"

        return check

    def acted(act: Callable[[Path], Any], judge: Callable[[Any], bool]) -> Check:
        def check(folder: Path) -> str:
            found = act(folder)
            return "" if judge(found) else str(found)

        return check

    checks = {f"{case.name} ({case.model})": trained(case) for case in cases}
    for name, act in cuda_jobs.ACTS.items():
        kind, _, plan = name.partition(" ")
        if kind != "waits" and (num_ranks > 1 or plan == "dp"):  # waits are seen on fake devices
            checks[name] = acted(act, cuda_jobs.RIGHT[kind])
    return checks


if __name__ == "__main__":
    sys.exit(main())
