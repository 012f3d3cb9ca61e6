"""Programs of the documents that readers of NeMo and Colossal-AI come from, as they would type them
here, on 4 and 8 processes. OSLO's is the page ``docs/huggingface.md``, which a test runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from spawn import run_script

MODEL = """
import torch
import torch.distributed as dist

import shardwright

dist.init_process_group("gloo")
torch.set_num_threads(1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = (8, 16, 8, 16, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(a, b).double() for a, b in zip(sizes, sizes[1:])
        )

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x).relu()
        return (x - y).square().mean()


def samples(step, unit):
    generator = torch.Generator().manual_seed(10 * step + unit)
    shapes = {"x": (8, 4, 8), "y": (8, 4, 8)}
    return [
        {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
        for _ in range(2)
    ]


def on_one_device(num_units):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        batch = [one for unit in range(num_units) for one in samples(step, unit)]
        step_losses = [model(**one) for one in batch]
        torch.stack(step_losses).mean().backward()
        optimizer.step()
        losses.append([loss.item() for loss in step_losses])
    return losses


def check(found, unit, num_units):
    expected = on_one_device(num_units)
    for step in range(3):
        own = torch.tensor(expected[step][2 * unit : 2 * unit + 2], dtype=torch.float64)
        error = (torch.tensor(found[step], dtype=torch.float64) - own).abs().max()
        assert error < 1e-12, (step, found[step], own)
"""

COLOSSAL = """
parallel = dict(PARALLEL)

model = shardwright.parallelize(
    Net(),
    samples(0, 0)[0],
    parallel,
    dict(use_end2end=True, grad_reduction="mean", pas_config=dict(OPTIONS)),
)
optimizer = shardwright.build_optimizer(model, torch.optim.SGD, lr=0.1)
mpu = model.mpu
assert mpu.get_tensor_parallel_world_size() == TENSOR
assert mpu.get_pipeline_parallel_world_size() == PIPELINE
units = mpu.get_data_parallel_world_size()
assert units * TENSOR * PIPELINE == dist.get_world_size()
unit, found = mpu.get_data_parallel_rank(), []
for step in range(3):
    losses = model.train_step(samples(step, unit), scale_fn=lambda loss: loss / 2)
    optimizer.step()
    found.append([loss.item() for loss in losses])
check(found, unit, units)
"""

NEMO = """
mpu = shardwright.MPU(tensor_parallel_size=2, pipeline_parallel_size=2)
sizes = {"tp": 2, "dp": dist.get_world_size() // 4, "pp": 2}
for axis, ranks in (
    ("tp", mpu.get_tensor_parallel_group()),
    ("dp", mpu.get_data_parallel_group()),
    ("pp", mpu.get_pipeline_parallel_group()),
):
    groups = shardwright.rank_groups("tp-cp-ep-dp-pp", sizes, axis)
    assert dist.get_process_group_ranks(ranks) in groups, (axis, groups)

# Distributed data parallelism with ZeRO-1, and tensor parallelism with the sequence in pieces.
config = shardwright.ComputeConfig(
    plan_ngpus=2,
    runtime_ngpus=dist.get_world_size(),
    grad_reduction="mean",
    distributed_optimizer={"overlap_grad_sync": True, "bucket_cap_mb": 100},
    pas_config={"sequence_parallel": True, "sequence": ["dim1"]},
    use_end2end=True,
)
model = shardwright.parallelize(Net(), samples(0, 0)[0], "tp", config)
optimizer = shardwright.build_optimizer(model, torch.optim.SGD, lr=0.1)
unit, found = model.mpu.get_data_parallel_rank(), []
for step in range(3):
    losses = model.train_step(samples(step, unit), scale_fn=lambda loss: loss / 2)
    optimizer.step()
    found.append([loss.item() for loss in losses])
check(found, unit, model.mpu.get_data_parallel_world_size())
"""

PROGRAMS = [
    (4, 'tensor=dict(size=4, mode="1d")', "", 4, 1),
    (4, 'tensor=dict(size=4, mode="2d")', "", 4, 1),
    (8, 'tensor=dict(size=8, mode="3d")', "", 8, 1),
    (8, 'pipeline=dict(size=2), tensor=dict(size=4, mode="2d")', "num_microbatches=2", 4, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel", "options", "tensor", "pipeline"), PROGRAMS, ids=str)
def test_colossals_dict(
    ranks: int, parallel: str, options: str, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    text = COLOSSAL.replace("PARALLEL", parallel, 1).replace("OPTIONS", options)
    text = text.replace("TENSOR", str(tensor)).replace("PIPELINE", str(pipeline))
    (tmp_path / "train.py").write_text(MODEL + text)
    run_script(ranks, tmp_path, "train.py")


@pytest.mark.slow
def test_nemos_roles_and_optimizer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL + NEMO)
    run_script(8, tmp_path, "train.py")
