"""Fine-tuning with Hugging Face's Trainer: the stock one on one device, and ours on several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft_models
import torch
import transformers
from precision import float64_casts
from torch import Tensor
from transformers import TrainingArguments

LENGTH, VOCABULARY = 12, 64

COUNTED = ("num_input_tokens_seen", "total_flos")
"""What the Trainer adds up over all ranks."""


class Documents(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens of random lengths: the mean over tokens is not the mean over batches."""

    def __init__(self, size: int, seed: int, *, whole: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCABULARY, (size, LENGTH), generator=generator)
        self.lengths = torch.randint(4, LENGTH, (size,), generator=generator)
        if whole:
            self.lengths.fill_(LENGTH)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[self.lengths[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def tiny(name: str) -> Any:
    """A tiny model with biases, norms and tied weights, in float64."""
    transformers.set_seed(0)
    if name == "llama lora":
        return peft_models.adapted(
            lambda: tiny("llama"), target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if name.startswith("t5"):
        config: Any = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).double()
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def run(
    name: str, out: str, batch: int, parallel: dict[str, Any] | None, resume: str | None = None
) -> None:
    """Train eight steps in ``out``: by the stock Trainer, or by ours where ``parallel`` says how.
    ``batch``: samples of a unit. Leaves ``final`` and ``history.json``.
    """
    kind: Any = TrainingArguments
    base: Any = transformers.Trainer
    more: dict[str, Any] = {}
    if name.startswith("t5"):  # evaluated by the tokens that it generates
        kind, base = transformers.Seq2SeqTrainingArguments, transformers.Seq2SeqTrainer
        more = {"predict_with_generate": True, "generation_max_length": 8}
    arguments = kind(
        out, **more, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2, max_grad_norm=0.3, weight_decay=0.1, learning_rate=1e-2,
        num_train_epochs=2, warmup_steps=2, lr_scheduler_type="cosine", logging_steps=1,
        eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, report_to=[],
        use_cpu=True, disable_tqdm=True, include_num_input_tokens_seen="all",
    )  # fmt: skip
    data: Any = {
        "train_dataset": Documents(32, 1, whole=name.endswith("whole")),
        "eval_dataset": Documents(10, 2),
        "compute_metrics": lambda found: {"sum": float(found.predictions.sum())},
    }
    trainer: Any
    with float64_casts():
        if parallel is None:
            trainer = base(model=tiny(name), args=arguments, **data)
        else:
            from shardwright.integrations.transformers import ShardwrightMixin

            trainer = type("Ours", (ShardwrightMixin, base), {})(
                model=tiny(name),
                args=arguments,
                parallel=parallel,
                initialize_options={"gen_savedir": f"{out}/gen"},
                **data,
            )
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{out}/final")
    if trainer.args.process_index == 0:
        kept = ("step", "loss", "grad_norm", "learning_rate", "eval_sum", *COUNTED)
        history = [{key: x[key] for key in kept if key in x} for x in trainer.state.log_history]
        history[-1]["trainable"] = trainer.get_num_trainable_parameters()
        history[-1]["parameters"] = trainer.model.num_parameters()
        for entry, found in zip(history, trainer.state.log_history, strict=True):
            if "eval_runtime" in found:
                steps = found["eval_steps_per_second"] * found["eval_runtime"]
                entry["eval_steps"] = round(steps)
        (Path(out) / "history.json").write_text(json.dumps(history))
    if torch.distributed.is_initialized():
        # The key-value store lies in the process of rank 0, which must not end first.
        torch.distributed.barrier()


SCRIPT = """
from trainer_runs import run
run(*{arguments!r})
"""
