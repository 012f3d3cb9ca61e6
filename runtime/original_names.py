"""What nnScaler calls things that have another name here, for those who come from there. This is
the only place that knows such names.
"""

from __future__ import annotations

from collections.abc import Mapping

ORIGINAL_FUNCTION_NAMES: Mapping[str, str] = {
    "load_merged_state_dict": "load_merged_state_dicts",
}
"""nnScaler's names of functions: ``shardwright.load_merged_state_dict`` is the function that is
called ``load_merged_state_dicts`` here.
"""

ORIGINAL_OPTION_NAMES: Mapping[str, str] = {
    "pipeline_nmicros": "num_microbatches",
    "pipeline_nstages": "num_stages",
    "pp_size": "num_stages",
    "pipeline_scheduler": "schedule",
    "pipeline_pivots": "stage_starts",
    "recompute_modules": "recompute",
    "mem_constraint": "memory_limit_gb",
    "max_partition_degree": "max_split",
    "load_plan_path": "load_plan",
    "save_plan_path": "save_plan",
}
"""nnScaler's names of policy options that have another name here. ``update_freq`` kept its own."""

ORIGINAL_OPTIONS_ELSEWHERE: Mapping[str, str] = {
    "use_bf16": "the module's dtypes are what is planned for: parallelize(..., "
    "module_dtype=torch.bfloat16), with "
    "ComputeConfig(distributed_optimizer={}) for float32 masters; or enter autocast in forward",
    "use_fp16": "the module's dtypes are what is planned for: parallelize(..., "
    "module_dtype=torch.float16), with "
    "ComputeConfig(distributed_optimizer={}) for float32 masters; or enter autocast in "
    "forward. Scale losses by LossScaler",
    "update_freq": (
        "give train_step several samples, or run all backward passes but the last under "
        "optimizer.no_sync()"
    ),
}
"""nnScaler's policy options that are no business of a policy here, with what to do instead. A
policy that declares an option of that name takes it (``autodist`` counts ``update_freq``).
"""
