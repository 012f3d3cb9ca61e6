"""A job under torchrun: trains a compiled pipeline of three ranks; the last goes away in the middle
of its second step.

torchrun --nproc-per-node 3 -m dying_job FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import leaving
import torch
import torch.distributed as dist
from tied import SAMPLES, Tied

import shardwright


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = shardwright.ComputeConfig(
        plan_ngpus=3, runtime_ngpus=3, use_end2end=True, pas_config={"num_microbatches": 4}
    )
    module = shardwright.parallelize(Tied(), SAMPLES[0], "pp", config, gen_savedir=folder)
    module.train_step(SAMPLES)
    leaving.tell_of_waiting(Path(folder))
    if dist.get_rank() == 2:
        module.stage2 = lambda *arguments: leaving.leave_when_awaited(Path(folder), (0, 1))
    module.train_step(SAMPLES)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
