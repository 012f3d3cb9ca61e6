"""shardwright: compile an ordinary PyTorch module for many devices.

Names are imported when they are first used, so that ``import shardwright`` loads neither torch nor
the compiler, and a process that only runs generated code never does load the compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.runtime.original_names import ORIGINAL_FUNCTION_NAMES

if TYPE_CHECKING:
    from shardwright import data, experts
    from shardwright.compiler.cost.machine.hardware import load_hardware
    from shardwright.compiler.ir.graph import IRGraph
    from shardwright.compiler.ops.register import register_op
    from shardwright.compiler.plan.plan import Plan
    from shardwright.frontend.huggingface.initialize import initialize
    from shardwright.frontend.huggingface.peft_folders import export_peft, load_peft, start_peft
    from shardwright.frontend.parallelize import parallelize
    from shardwright.frontend.search_plan import search_plan
    from shardwright.frontend.verification.verify import verify
    from shardwright.policies.known_policies import register_policy
    from shardwright.runtime.checkpoint.deduped import deduped_state_dict, load_deduped_state_dict
    from shardwright.runtime.checkpoint.load import load_checkpoint
    from shardwright.runtime.checkpoint.merge_files import merge_checkpoint, read_checkpoint
    from shardwright.runtime.checkpoint.merged import load_merged_state_dicts, merge_state_dicts
    from shardwright.runtime.checkpoint.merged import (
        load_merged_state_dicts as load_merged_state_dict,
    )
    from shardwright.runtime.checkpoint.pretrained import export_pretrained, load_pretrained
    from shardwright.runtime.checkpoint.save import save_checkpoint
    from shardwright.runtime.config import BroadcastGenFilesStrategy, ComputeConfig, ReuseType
    from shardwright.runtime.distributed_config import DistributedOptimizerConfig
    from shardwright.runtime.errors import (
        AnnotationError,
        ArgumentError,
        CheckpointError,
        ConfigError,
        DataError,
        DistributedError,
        FileError,
        InputError,
        InternalError,
        LoadError,
        PlanError,
        ShardwrightError,
        TraceError,
        UsageError,
    )
    from shardwright.runtime.layout import Layout, Mesh
    from shardwright.runtime.loader import load_class
    from shardwright.runtime.module.broadcast import broadcast_weights
    from shardwright.runtime.module.parallel_module import ParallelModule
    from shardwright.runtime.ranks.mpu import MPU
    from shardwright.runtime.ranks.rank_groups import rank_groups
    from shardwright.runtime.ranks.threads import run_ranks
    from shardwright.runtime.ranks.world import count_communication
    from shardwright.runtime.training.build_optimizer import build_optimizer
    from shardwright.runtime.training.loss_scaling import LossScaler

__version__ = "0.1.0"

__all__ = [
    "MPU",
    "AnnotationError",
    "ArgumentError",
    "BroadcastGenFilesStrategy",
    "CheckpointError",
    "ComputeConfig",
    "ConfigError",
    "DataError",
    "DistributedError",
    "DistributedOptimizerConfig",
    "FileError",
    "IRGraph",
    "InputError",
    "InternalError",
    "Layout",
    "LoadError",
    "LossScaler",
    "Mesh",
    "ParallelModule",
    "Plan",
    "PlanError",
    "ReuseType",
    "ShardwrightError",
    "TraceError",
    "UsageError",
    "__version__",
    "broadcast_weights",
    "build_optimizer",
    "count_communication",
    "data",
    "deduped_state_dict",
    "experts",
    "export_peft",
    "export_pretrained",
    "initialize",
    "load_checkpoint",
    "load_class",
    "load_deduped_state_dict",
    "load_hardware",
    "load_merged_state_dict",
    "load_merged_state_dicts",
    "load_peft",
    "load_pretrained",
    "merge_checkpoint",
    "merge_state_dicts",
    "parallelize",
    "rank_groups",
    "read_checkpoint",
    "register_op",
    "register_policy",
    "run_ranks",
    "save_checkpoint",
    "search_plan",
    "start_peft",
    "verify",
]

_MODULES = {
    "MPU": "shardwright.runtime.ranks.mpu",
    "AnnotationError": "shardwright.runtime.errors",
    "ArgumentError": "shardwright.runtime.errors",
    "BroadcastGenFilesStrategy": "shardwright.runtime.config",
    "CheckpointError": "shardwright.runtime.errors",
    "ComputeConfig": "shardwright.runtime.config",
    "ConfigError": "shardwright.runtime.errors",
    "DataError": "shardwright.runtime.errors",
    "DistributedError": "shardwright.runtime.errors",
    "DistributedOptimizerConfig": "shardwright.runtime.distributed_config",
    "FileError": "shardwright.runtime.errors",
    "IRGraph": "shardwright.compiler.ir.graph",
    "InputError": "shardwright.runtime.errors",
    "InternalError": "shardwright.runtime.errors",
    "Layout": "shardwright.runtime.layout",
    "LoadError": "shardwright.runtime.errors",
    "LossScaler": "shardwright.runtime.training.loss_scaling",
    "Mesh": "shardwright.runtime.layout",
    "ParallelModule": "shardwright.runtime.module.parallel_module",
    "Plan": "shardwright.compiler.plan.plan",
    "PlanError": "shardwright.runtime.errors",
    "ReuseType": "shardwright.runtime.config",
    "ShardwrightError": "shardwright.runtime.errors",
    "TraceError": "shardwright.runtime.errors",
    "UsageError": "shardwright.runtime.errors",
    "broadcast_weights": "shardwright.runtime.module.broadcast",
    "build_optimizer": "shardwright.runtime.training.build_optimizer",
    "count_communication": "shardwright.runtime.ranks.world",
    "deduped_state_dict": "shardwright.runtime.checkpoint.deduped",
    "export_peft": "shardwright.frontend.huggingface.peft_folders",
    "export_pretrained": "shardwright.runtime.checkpoint.pretrained",
    "initialize": "shardwright.frontend.huggingface.initialize",
    "load_checkpoint": "shardwright.runtime.checkpoint.load",
    "load_class": "shardwright.runtime.loader",
    "load_deduped_state_dict": "shardwright.runtime.checkpoint.deduped",
    "load_hardware": "shardwright.compiler.cost.machine.hardware",
    "load_merged_state_dict": "shardwright.runtime.checkpoint.merged",
    "load_merged_state_dicts": "shardwright.runtime.checkpoint.merged",
    "load_peft": "shardwright.frontend.huggingface.peft_folders",
    "load_pretrained": "shardwright.runtime.checkpoint.pretrained",
    "merge_checkpoint": "shardwright.runtime.checkpoint.merge_files",
    "merge_state_dicts": "shardwright.runtime.checkpoint.merged",
    "parallelize": "shardwright.frontend.parallelize",
    "rank_groups": "shardwright.runtime.ranks.rank_groups",
    "read_checkpoint": "shardwright.runtime.checkpoint.merge_files",
    "register_op": "shardwright.compiler.ops.register",
    "register_policy": "shardwright.policies.known_policies",
    "run_ranks": "shardwright.runtime.ranks.threads",
    "save_checkpoint": "shardwright.runtime.checkpoint.save",
    "search_plan": "shardwright.frontend.search_plan",
    "start_peft": "shardwright.frontend.huggingface.peft_folders",
    "verify": "shardwright.frontend.verification.verify",
}


_PACKAGES = ("data", "experts")
"""Packages whose names are used through them: ``shardwright.data.loader``."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), ORIGINAL_FUNCTION_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
