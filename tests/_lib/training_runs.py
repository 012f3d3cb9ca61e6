"""Models, data and a loop by hand for tests of :mod:`shardwright.frontend.training`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.data.make_loader import loader
from shardwright.data.rank_roles import roles
from shardwright.frontend.training.learning_rates import part_of_rate
from shardwright.frontend.training.read_settings import read_run
from shardwright.frontend.training.run_settings import RunSettings
from shardwright.frontend.training.run_state import RunResult
from shardwright.frontend.training.trainer import train
from shardwright.runtime.ranks.threads import run_ranks

VOCAB, LENGTH, SAMPLES = 16, 6, 24

ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
"""Gradients that are zero but for rounding (CONTRACT of parity) are not blown up by this eps."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tagger(nn.Module):
    """Labels for tokens; some labels do not count. Told their number, it divides by it."""

    def __init__(self, width: int = 8, num_blocks: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCAB)

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        x = self.token(input_ids)
        for block in self.blocks:
            x = block(x)
        logits, labels = self.head(x).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:
            return F.cross_entropy(logits, labels)
        return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


class Deaf(Tagger):
    """Takes the number of labels, and does not use it."""

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, labels)


def tagger() -> nn.Module:
    return Tagger().double()


def deaf() -> nn.Module:
    return Deaf().double()


def lora() -> nn.Module:
    """A tiny Llama with an adapter of peft."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    made: nn.Module = peft.get_peft_model(model, adapter).double()
    return made


class Rows:
    """Rows of tokens, of which the later ones have fewer labels."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (LENGTH,), generator=generator)
        labels = (ids * 3 + 1) % VOCAB
        labels[1 + index % LENGTH :] = -100
        return {"input_ids": ids, "labels": labels}


def rows() -> Rows:
    return Rows()


def settings(output: Path, **changes: Any) -> RunSettings:
    """The settings of a run of 6 steps, with ``changes`` by path (``parallel__policy="tp"``)."""
    flags = {
        "output": str(output),
        "model.function": "training_runs:tagger",
        "data.function": "training_runs:rows",
        "global_batch": 8,
        "steps": 6,
        "clip_norm": 0.5,
        "optimizer.options": ADAMW,
        "schedule.name": "cosine",
        "schedule.warmup_steps": 2,
        "log.bar": False,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    given = [f"--{name}={json.dumps(value)}" for name, value in flags.items()]
    return read_run(None, given).settings


def run(num_ranks: int, chosen: RunSettings, **hooks: Any) -> RunResult:
    """Train on ranks that are threads."""

    def of_rank(rank: int) -> RunResult:
        return train(chosen, hooks=hooks)

    return run_ranks(num_ranks, of_rank)[0]


def records(chosen: RunSettings, event: str = "step") -> list[dict[str, Any]]:
    """The records of a run."""
    lines = Path(chosen.output, "log.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def by_step(chosen: RunSettings) -> dict[int, tuple[float, float]]:
    """Loss and norm of each step; of a step that was repeated, the last."""
    return {r["step"]: (r["loss"], r["grad_norm"]) for r in records(chosen)}


def alone(chosen: RunSettings, model: nn.Module, dataset: Any) -> dict[int, tuple[float, float]]:
    """Train in a loop by hand on one device, on whole global batches: loss and norm by
    step. ``model`` is trained in place.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]
    options: Mapping[str, Any] = chosen.optimizer.options
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], **options
    )
    part = part_of_rate(chosen.schedule, chosen.steps or 0)
    batches = loader(
        dataset,
        roles(replica=0, num_replicas=1),
        global_batch=chosen.global_batch,
        seed=chosen.data.seed,
        shuffle=True,
    )
    found: dict[int, tuple[float, float]] = {}
    while len(found) < (chosen.steps or 0):
        for batch in batches:
            for group in optimizer.param_groups:
                group["lr"] = options["lr"] * part(len(found))
            optimizer.zero_grad()
            result = model(**batch)
            loss = result if isinstance(result, Tensor) else result[0]
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), chosen.clip_norm or 1e9)
            optimizer.step()
            found[len(found) + 1] = (loss.item(), norm.item())
            if len(found) == chosen.steps:
                break
    return found
