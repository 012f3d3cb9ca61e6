"""The page for people who come from another system: line by line, what it names is there."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import assert_close_tree

import shardwright
from shardwright import data
from shardwright.frontend.huggingface.initialized_model import InitializedModel
from shardwright.policies.hybrid import HybridOptions
from shardwright.policies.known_policies import BUILT_IN, find_policy
from shardwright.policies.policy import read_options
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer

PAGE = (Path(__file__).resolve().parents[2] / "docs/coming-from.md").read_text()

PLACES = {
    "shardwright": shardwright,
    "data": data,
    "ComputeConfig": shardwright.ComputeConfig,
    "DistributedOptimizerConfig": shardwright.DistributedOptimizerConfig,
    "InitializedModel": InitializedModel,
    "MPU": shardwright.MPU,
    "ParallelModule": shardwright.ParallelModule,
    "ParallelOptimizer": ParallelOptimizer,
}

POLICIES = ("dp", "tp", "pp", "data", "hybrid", "autodist", "ep", "tensor")

DOCUMENTED = {
    "nnScaler": "parallelize module_or_module_class dummy_forward_args pas_policy compute_config "
    "gen_savedir reuse instance_name load_module module_dtype module_fn init_module_params "
    "broadcast_strategy broadcast_weights ComputeConfig plan_ngpus runtime_ngpus use_zero "
    "use_end2end dp tp pp data hybrid autodist IRGraph ParallelModule init_params train_step "
    "samples is_dummy_batch scale_fn infer_step build_optimizer optimizer_fn sync_shard_grad "
    "scale_grads clip_gnorm register_reducer_pre_hook register_reducer_post_hook "
    "_non_parallel_module_reducer parameters_for_optimizer gather_params zero_grad "
    "merge_state_dicts load_merged_state_dicts deduped_state_dict load_deduped_state_dict "
    "DistributedSampler self.training",
    "NeMo and Megatron": "DDP model.optim.name=distributed_fused_adam dtype grad_sync_dtype "
    "overlap_grad_sync overlap_param_sync bucket_cap_mb contiguous_param_buffer "
    "contiguous_grad_buffer DistributedFusedAdam megatron_amp_O2 tensor pipeline sequence expert",
    "OSLO": "torch.distributed.launch deepspeed initialize enable model_parallelism "
    "tensor_parallel_size pipeline_parallel_size MPU model.mpu get_data_parallel_group "
    "get_data_parallel_rank get_data_parallel_world_size get_tensor_parallel_group "
    "get_tensor_parallel_rank get_tensor_parallel_world_size get_pipeline_parallel_group "
    "get_pipeline_parallel_rank get_pipeline_parallel_world_size DistributedDataParallel "
    "DistributedSampler save_parallelized save_directory merge_checkpoints from_parallelized",
    "Colossal-AI": "colossalai.launch parallel pipeline tensor size 1d 2d 2.5d 3d depth "
    "colossalai.nn.Linear2D handlers ParallelMode.PIPELINE gpc.get_local_rank ModelFromConfig "
    "MODELS build_pipeline_model_from_cfg build_pipeline_model colossalai.initialize "
    "PipelineSchedule num_microbatches InterleavedPipelineSchedule num_model_chunks "
    "forward_backward_step forward_only sequence",
    "Megatron-Energon": "get_train_dataset batch_size shuffle_buffer_size max_samples_per_sequence "
    "worker_config get_savable_loader WorkerConfig rank world_size num_workers "
    "data_parallel_group save_state_rank restore_state_rank save_state_global global_dst_rank "
    "restore_state_global src_rank torch.save torch.load torch.distributed.new_group",
}
"""Every call and option of each system, by section of the page: each stands on the left."""


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[tuple[str, str]]:
    """The left and the right cell of each line of a section's table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert all(len(cells) == 2 for cells in lines), [cells for cells in lines if len(cells) != 2]
    return [(left, right) for left, right in lines[1:]]


@pytest.mark.parametrize("system", DOCUMENTED)
def test_every_call_and_option_of_a_system_has_its_line(system: str) -> None:
    left = " ".join(cell for cell, _ in rows(sections()[system]))
    words = set(re.findall(r"[\w.]+(?:=distributed_fused_adam)?", left))
    missing = [name for name in DOCUMENTED[system].split() if name not in words]
    assert not missing


def test_every_name_on_the_right_is_there() -> None:
    found = 0
    for text in sections().values():
        for _, right in rows(text):
            for code in re.findall(r"`([^`]+)`", right):
                first, _, path = re.match(r"[\w.]*", code)[0].partition(".")  # type: ignore[index]
                if first not in PLACES or not path:
                    continue
                found += 1
                place: Any = PLACES[first]
                for name in path.split("."):
                    fields = dataclasses.fields(place) if dataclasses.is_dataclass(place) else ()
                    if name in {field.name for field in fields}:
                        break
                    assert hasattr(place, name), f"{code} is not there"
                    place = getattr(place, name)
    assert found > 60


def test_options_and_policies_on_the_right_are_there() -> None:
    options = [
        code
        for text in sections().values()
        for _, right in rows(text)
        for code in re.findall(r"`(\{[^`]+\})`", right)
    ]
    assert len(options) >= 4
    for code in options:
        given = ast.literal_eval(code)
        policy, known = ("tensor", find_policy("tensor").options)
        if "mode" not in given:
            policy, known = "hybrid", HybridOptions
        assert known is not None
        read_options(known, given, policy=policy)
    assert set(POLICIES) <= BUILT_IN.keys()
    assert all(f"`{policy}`" in PAGE for policy in POLICIES)


def test_arguments_that_are_called_the_same_are() -> None:
    same = {
        shardwright.parallelize: "module_or_module_class dummy_forward_args pas_policy "
        "compute_config gen_savedir reuse instance_name load_module module_dtype module_fn "
        "init_module_params broadcast_strategy",
        shardwright.build_optimizer: "module optimizer_fn compute_config kwargs param_groups "
        "elementwise",
        shardwright.ParallelModule.train_step: "samples is_dummy_batch scale_fn",
        shardwright.ParallelModule.infer_step: "samples",
        shardwright.ParallelModule.__init__: "init_params",
        shardwright.initialize: "model config",
        InitializedModel.save_parallelized: "save_directory merge_checkpoints",
        data.get_train_dataset: "path batch_size shuffle_buffer_size max_samples_per_sequence "
        "worker_config",
        data.WorkerConfig: "rank world_size num_workers data_parallel_group",
        data.SavableLoader.save_state_global: "global_dst_rank",
        data.SavableLoader.restore_state_global: "state src_rank",
    }
    for function, names in same.items():
        parameters = inspect.signature(function).parameters
        assert set(names.split()) <= parameters.keys(), function
    assert [member.name for member in shardwright.BroadcastGenFilesStrategy] == [
        "NONE",
        "ALL",
        "NO_WEIGHTS",
        "CODE",
    ]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(x, y), x


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "coming_from"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    assert list((tmp_path / "generated").rglob("gencode1.py"))
    assert names["config"].num_units == 2
    samples = [
        {key: torch.randn(2, 4, dtype=torch.float64) for key in ("x", "y")} for _ in range(2)
    ]
    net = Net().double()

    def job(rank: int) -> tuple[Any, Any]:
        config = shardwright.ComputeConfig(
            plan_ngpus=2,
            runtime_ngpus=2,
            use_end2end=True,
            outputs="all",
            pas_config={"num_microbatches": 2},
        )
        model = shardwright.parallelize(net, samples[0], "pp", config, gen_savedir=tmp_path)
        shardwright.build_optimizer(model, torch.optim.SGD, lr=0.1)
        result = names["forward_backward_step"](model, samples)
        return result, {name: one.grad for name, one in model.named_parameters()}

    (nothing, first), ((output, label, loss), last) = run_ranks(2, job)
    assert nothing == (None, None, None)
    x, y = (torch.cat([sample[key] for sample in samples]) for key in ("x", "y"))
    expected, whole = net(x, y)
    expected.backward()
    assert_close_tree([loss, output], [expected.detach(), whole.detach()])
    assert torch.equal(label, y)
    found = {name: grad for grads in (first, last) for name, grad in grads.items()}
    assert_close_tree(found, {name: one.grad for name, one in net.named_parameters()}, "gradients")
