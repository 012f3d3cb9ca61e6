"""Calls of what trains: modules, optimizers, checkpoints, jobs of several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from bad_input_targets import ARGS, CONFIG, Net, Target

import shardwright
from shardwright import ComputeConfig
from shardwright.runtime.manifest import accept


def training_targets(folder: Path) -> list[Target]:
    """What is called in a job of one rank."""
    config = ComputeConfig(**CONFIG, use_end2end=True)
    parallelize, build = shardwright.parallelize, shardwright.build_optimizer
    module = parallelize(Net(), ARGS, "dp", config, gen_savedir=folder / "training", reuse="moo")
    assert isinstance(module, shardwright.ParallelModule)
    called = parallelize(Net(), ARGS, "dp", CONFIG, gen_savedir=folder / "called", reuse="moo")
    assert isinstance(called, shardwright.ParallelModule)
    files = next((folder / "training").rglob("manifest.json")).parent
    optimizer = build(module, torch.optim.SGD, lr=0.1)
    scaler = shardwright.LossScaler()
    checkpoints, merged = folder / "checkpoints", folder / "merged"
    shardwright.save_checkpoint(checkpoints, module, optimizer).wait()
    merged_state = shardwright.merge_state_dicts([module.state_dict()], [optimizer.state_dict()])
    deduped = shardwright.deduped_state_dict(module, optimizer)
    numbers = iter(range(10**9))

    def synced(name: str) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            module.train_step([ARGS])
            optimizer.sync_shard_grad()
            return getattr(optimizer, name)(**arguments)

        return run

    def stepped(name: str) -> Callable[..., Any]:
        def run(**arguments: Any) -> Any:
            module.train_step([ARGS])
            try:
                return getattr(scaler, name)(**arguments)
            finally:
                scaler._overflowed, scaler._stepped = {}, set()

        return run

    def saved(**arguments: Any) -> Any:
        return shardwright.save_checkpoint(**arguments).wait()

    made = {"module": module, "optimizer": optimizer}
    states = {"module": module, "module_state_dict": merged_state[0]}
    both = {**states, "optimizer": optimizer, "optimizer_state_dict": merged_state[1]}
    return [
        Target("modules", "forward", called, lambda: dict(ARGS), also=("x", "scale")),
        Target("modules", "train_step", module.train_step, lambda: {"samples": [ARGS]}),
        Target("modules", "infer_step", module.infer_step, lambda: {"samples": [ARGS]}),
        Target("modules", "zero_grad", lambda set_to_none=True: module.zero_grad(set_to_none),
            dict),
        Target("modules", "load_class", shardwright.load_class, lambda: {"directory": files}),
        Target("modules", "accept", accept, lambda: {"directory": files}),
        Target("modules", "broadcast_weights", shardwright.broadcast_weights,
            lambda: {"module": module, "stride_size": 1}),
        Target(
            "optimizers", "build_optimizer", build,
            lambda: {"module": called, "optimizer_fn": torch.optim.SGD}, also=("lr",)
        ),
        Target("optimizers", "step", lambda closure=None: optimizer.step(closure), dict),
        Target("optimizers", "zero_grad", optimizer.zero_grad, dict),
        Target("optimizers", "scale_grads", synced("scale_grads"), lambda: {"factor": 1.0},
            also=("factor",)),
        Target("optimizers", "unscale_grads", synced("unscale_grads"), lambda: {"factor": 1.0},
            also=("factor",)),
        Target("optimizers", "clip_gnorm", synced("clip_gnorm"), dict, also=("max_norm",)),
        Target("optimizers", "pre_hook", optimizer.register_reducer_pre_hook,
            lambda: {"hook": lambda *a: None}),
        Target("optimizers", "post_hook", optimizer.register_reducer_post_hook,
            lambda: {"hook": lambda *a: None}),
        Target(
            "optimizers", "load_state_dict", optimizer.load_state_dict,
            lambda: {"state_dict": optimizer.state_dict()}
        ),
        Target("optimizers", "LossScaler", shardwright.LossScaler, dict),
        Target("optimizers", "scaler.scale", scaler.scale, lambda: {"loss": torch.tensor(1.0)}),
        Target("optimizers", "scaler.unscale_", stepped("unscale_"),
            lambda: {"optimizer": optimizer}, also=("optimizer",)),
        Target("optimizers", "scaler.step", stepped("step"), lambda: {"optimizer": optimizer},
            also=("optimizer",)),
        Target("optimizers", "scaler.update", shardwright.LossScaler().update,
            lambda: {"new_scale": 1.0}),
        Target(
            "optimizers", "scaler.load_state_dict", shardwright.LossScaler().load_state_dict,
            lambda: {"state_dict": scaler.state_dict()},
        ),
        *(
            Target(
                "optimizers", f"scaler state, {key}", _scaler_state(scaler.state_dict(), key),
                lambda key=key: {"value": scaler.state_dict()[key]},
            )
            for key in scaler.state_dict()
        ),
        Target(
            "checkpoints", "save_checkpoint", saved, lambda: {"directory": checkpoints, **made},
            also=("directory", "module", "optimizer", "scheduler", "extra", "step", "keep",
                "async_save"),
        ),
        Target("checkpoints", "load_checkpoint", shardwright.load_checkpoint,
            lambda: {"directory": checkpoints, **made}),
        Target("checkpoints", "read_checkpoint", shardwright.read_checkpoint,
            lambda: {"directory": checkpoints}),
        Target(
            "checkpoints", "merge_checkpoint", shardwright.merge_checkpoint,
            lambda: {"directory": checkpoints, "out": merged / str(next(numbers))},
        ),
        Target(
            "checkpoints", "export_pretrained", shardwright.export_pretrained,
            lambda: {"directory": checkpoints, "out": merged / str(next(numbers)),
                "config": {"model_type": "x"}},
        ),
        Target("checkpoints", "load_pretrained", shardwright.load_pretrained,
            lambda: _pretrained(folder, module)),
        Target("states", "deduped_state_dict", shardwright.deduped_state_dict, lambda: dict(made)),
        Target(
            "states", "merge_state_dicts", shardwright.merge_state_dicts,
            lambda: {"module_state_dicts": [module.state_dict()],
                "optimizer_state_dicts": [optimizer.state_dict()]},
        ),
        Target("states", "load_merged_state_dict", shardwright.load_merged_state_dict,
            lambda: dict(both)),
        Target(
            "states", "load_deduped_state_dict", shardwright.load_deduped_state_dict,
            lambda: {**made, "module_state_dict": deduped[0], "optimizer_state_dict": deduped[1]},
        ),
    ]  # fmt: skip


def _scaler_state(state: Mapping[str, Any], key: str) -> Callable[..., Any]:
    return lambda value: shardwright.LossScaler().load_state_dict({**state, key: value})


def _pretrained(folder: Path, module: Any) -> dict[str, Any]:
    if not (folder / "pretrained").is_dir():
        shardwright.export_pretrained(
            folder / "checkpoints", folder / "pretrained", {"model_type": "x"}
        )
    return {"directory": folder / "pretrained", "module": module}


def initialize_targets(folder: Path) -> list[Target]:
    """What makes models of transformers parallel in place. Files alone are made, as a model is
    taken only once.
    """
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds

    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return [
        Target(
            "initialize", "initialize", shardwright.initialize,
            lambda: {"model": model, "config": dict(CONFIG), "gen_savedir": folder / "initialized",
                "load_module": False},
            without=("load_module",),
        ),
    ]  # fmt: skip


def peft_targets(folder: Path) -> list[Target]:
    """What writes and reads folders of peft: a model with an adapter that one rank has trained."""
    import peft  # takes seconds
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    base.save_pretrained(folder / "peft-base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(folder / "peft-adapter")
    ids = torch.zeros(1, 4, dtype=torch.long)
    args = {"input_ids": ids, "labels": ids}
    module = shardwright.parallelize(model, args, "dp", CONFIG, gen_savedir=folder / "peft-files")
    shardwright.save_checkpoint(folder / "peft-run", module)
    numbers = iter(range(10**9))
    return [
        Target("peft", "export_peft", shardwright.export_peft,
            lambda: {"directory": folder / "peft-run", "model": model,
                "out": folder / f"peft-exported-{next(numbers)}"}),
        Target("peft", "load_peft", shardwright.load_peft,
            lambda: {"module": module, "model": model, "adapter": folder / "peft-adapter",
                "base": folder / "peft-base"}),
        Target("peft", "start_peft", shardwright.start_peft,
            lambda: {"model": model, "base": folder / "peft-base",
                "out": folder / f"peft-started-{next(numbers)}"}),
    ]  # fmt: skip


def rank_targets(folder: Path) -> list[Target]:
    """What starts ranks, numbers them, and says what they do."""
    mpu = shardwright.MPU()
    sizes = {"tp": 2, "dp": 2}
    return [
        Target("ranks", "rank_groups", shardwright.rank_groups,
            lambda: {"order": "tp-dp", "sizes": dict(sizes), "axes": "dp"}),
        Target("ranks", "MPU", shardwright.MPU, dict, also=MPU_OPTIONS),
        Target("ranks", "MPU.ranks", mpu.ranks, lambda: {"role": "data"}),
        *(
            Target("ranks", f"MPU.{name}", getattr(mpu, name), dict)
            for name in sorted(dir(type(mpu)))
            if name.startswith("get_") and inspect.signature(getattr(mpu, name)).parameters
        ),
        Target(
            "ranks",
            "run_ranks",
            shardwright.run_ranks,
            lambda: {"num_ranks": 1, "fn": lambda rank: rank, "timeout_s": 5.0},
        ),
    ]  # fmt: skip


MPU_OPTIONS = (
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
    "expert_parallel_size", "expert_tensor_parallel_size", "order",
)  # fmt: skip
