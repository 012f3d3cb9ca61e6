"""The examples of the page about ranks run, and give what it says."""

import re
from pathlib import Path

import shardwright
from shardwright import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"
NUMBERS, MPU, SAMPLER = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def test_groups_as_numbers():
    example = {}
    lines = NUMBERS.strip().splitlines()
    exec("\n".join(lines[:3]), example)
    for line in lines[3:]:
        call, _, said = line.partition("#")
        assert str(eval(call, example)) == said.strip()


def test_the_mpu_and_the_sampler(tmp_path):
    import torch

    config = shardwright.ComputeConfig(plan_ngpus=2, runtime_ngpus=4)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    def on_rank(rank):
        example = {"shardwright": shardwright, "torch": torch}
        exec(MPU.replace("mpu.get_tensor_parallel_group()", "mpu.communicator('tensor')"), example)
        exec(SAMPLER, example)
        parallel = shardwright.parallelize(
            module, {"input": torch.zeros(4, 4)}, "tp", config, gen_savedir=tmp_path
        )
        mpu = parallel.mpu
        assert mpu is parallel.mpu and mpu.get_tensor_parallel_world_size() == 2
        assert mpu.is_pipeline_first_stage() and mpu.is_pipeline_last_stage()
        return mpu.ranks("data"), list(example["sampler_for"](parallel, range(4)))

    found = run_ranks(4, on_rank)
    assert [ranks for ranks, _ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    samples = [set(indices) for _, indices in found]
    assert samples[0] == samples[1] and samples[0] | samples[2] == {0, 1, 2, 3}
