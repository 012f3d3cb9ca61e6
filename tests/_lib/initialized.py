"""Models of transformers made parallel by ``shardwright.initialize``, as its users train them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from parity import assert_close_tree
from precision import float64_casts
from spawn import run_processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwright
from shardwright.runtime.pieces import local_piece

VOCAB = 101
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QUIET_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
QUIET_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDLESS = {"bos_token_id": None, "eos_token_id": None}


def _gpt2(**fields: Any) -> nn.Module:
    settings = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 4}
    config = transformers.GPT2Config(**{**settings, **QUIET_GPT2, **ENDLESS, **fields})
    return transformers.GPT2LMHeadModel(config)


def _llama(**fields: Any) -> nn.Module:
    settings = {"vocab_size": VOCAB, "num_key_value_heads": 2, **SMALL, **ENDLESS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **fields}))


def _qwen3(**fields: Any) -> nn.Module:
    settings = {"vocab_size": VOCAB, "num_key_value_heads": 2, "head_dim": 4, **SMALL, **ENDLESS}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**settings, **fields}))


def _bert(**fields: Any) -> nn.Module:
    settings = {"vocab_size": VOCAB, **SMALL, **QUIET_BERT}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**settings, **fields}))


def _t5(**fields: Any) -> nn.Module:
    settings = {
        "vocab_size": VOCAB,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "eos_token_id": None,
    }
    config = transformers.T5Config(**{**settings, **fields})
    return transformers.T5ForConditionalGeneration(config)


MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen3": _qwen3,
    "bert": _bert,
    "t5": _t5,
}


def make(name: str, seed: int = 0, **fields: Any) -> Any:
    """A tiny model in float64, of the same values wherever it is made."""
    model = MODELS[name](**fields).double()
    # Ranks may be threads, which share torch's own generator.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(0.3 * values)
    return model


def batch(name: str, step: int, size: int = 4) -> dict[str, Tensor]:
    """Tokens whose batch is ``size``; the length of the sequence differs by step."""
    generator = torch.Generator().manual_seed(100 + step)
    length = 5 + step
    tokens = torch.randint(2, 100, (size, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, length - 2 :] = 0
    labels = tokens if name != "t5" else torch.randint(2, 100, (size, 7), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


_LOADING = threading.Lock()


def loaded(kind: Any, folder: Path | str) -> Any:
    """What ``from_pretrained`` reads, in one thread at a time: while it reads, transformers takes
    ``tie_weights`` away from all models, and two at once would leave it so.
    """
    with _LOADING:
        return kind.from_pretrained(folder)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose state matters to the next step."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def prompt(name: str) -> dict[str, Tensor]:
    """What ``generate`` is given."""
    tokens = torch.randint(2, 100, (2, 4), generator=torch.Generator().manual_seed(7))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def train(
    model: Any, engine: Any, optimizer: torch.optim.Optimizer, name: str, steps: range, share: slice
) -> list[float]:
    """The losses of some steps on a share of each batch, with gradients clipped."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        mine = {key: value[share] for key, value in batch(name, step).items()}
        loss = engine(**mine).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def tokens_of(model: Any, name: str, seed: int = 3) -> list[Tensor]:
    """Greedy and sampled tokens."""
    found = []
    for draws in (False, True):
        torch.manual_seed(seed)
        found.append(model.generate(**prompt(name), do_sample=draws, max_new_tokens=5))
    return found


def on_one_device(name: str, num_steps: int, **fields: Any) -> tuple[list[float], Any]:
    """Losses and the model of an ordinary run."""
    with float64_casts():
        model = make(name, **fields)
        losses = train(model, model, sgd(model), name, range(num_steps), slice(None))
    return losses, model


def parallel(num_ranks_per_model: int, folder: Path | str, name: str, **fields: Any) -> Any:
    """A model and its optimizer, which was made before."""
    model = make(name, **fields)
    optimizer = sgd(model)
    shardwright.initialize(model, tensor_parallel(num_ranks_per_model), gen_savedir=folder)
    return model, optimizer


def wrapped(model: Any) -> Any:
    """The model in ``DistributedDataParallel``, as OSLO's users wrap it."""
    return DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())


def my_share(model: Any, size: int = 4) -> slice:
    """The samples of a batch that this rank's copy of the model is given."""
    each = size // model.mpu.get_data_parallel_world_size()
    rank = model.mpu.get_data_parallel_rank()
    return slice(rank * each, (rank + 1) * each)


def begin(folder: str, name: str) -> list[float]:
    """Train two steps on 4 ranks, two to a model, and save the pieces."""
    with float64_casts():
        model, optimizer = parallel(2, folder + "/gen", name)
        losses = train(model, wrapped(model), optimizer, name, range(2), my_share(model))
        model.save_parallelized(folder + "/pieces", optimizer=optimizer, step=2)
        return losses


def go_on(folder: str, name: str) -> dict[str, Any]:
    """Load in new processes, train another step, merge, and generate."""
    with float64_casts():
        model, optimizer = parallel(2, folder + "/gen", name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert model.from_parallelized(folder + "/pieces", optimizer=optimizer) is model
        assert model.loaded_checkpoint.step == 2
        losses = train(model, wrapped(model), optimizer, name, range(2, 3), my_share(model))
        model.save_parallelized(folder + "/merged", merge_checkpoints=True)
        tokens = tokens_of(model.eval(), name) if model.can_generate() else []
    return {"losses": losses, "tokens": tokens, "differing": differing_pieces(model, folder)}


def check_family(name: str, folder: Path) -> None:
    """Train on 4 ranks, end all processes, go on in others, merge and generate: all as on one
    device.
    """
    losses, reference = on_one_device(name, 3)
    begun = run_processes(4, "initialized:begin", str(folder), name)
    ended = run_processes(4, "initialized:go_on", str(folder), name)
    # Ranks 0 and 1 share a model, 2 and 3 another one, and each model has half of the batch.
    one, other = (begun[rank] + ended[rank]["losses"] for rank in (0, 2))
    found = [(first + second) / 2 for first, second in zip(one, other, strict=True)]
    assert_close_tree(torch.tensor(found), torch.tensor(losses), "losses")
    merged = type(reference).from_pretrained(folder / "merged")
    assert_close_tree(
        dict(merged.named_parameters()), dict(reference.named_parameters()), "parameters"
    )
    assert [rank["differing"] for rank in ended] == [[]] * 4
    if reference.can_generate():
        with float64_casts():
            expected = tokens_of(reference.eval(), name)
        assert len(set(expected[0].flatten().tolist())) > 4
        for rank in ended:
            assert all(map(torch.equal, rank["tokens"], expected))


def train_in_pieces(folder: str) -> dict[str, Any]:
    """Train two steps with ZeRO-3 on two replicas, generate as many tokens as the rank says, and
    merge.
    """
    with float64_casts():
        model = make("gpt2")
        settings = {"use_zero": 3, "grad_reduction": "mean"}
        shardwright.initialize(model, tensor_parallel(1, **settings), gen_savedir=folder + "/gen")
        optimizer = shardwright.build_optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
        losses = train(model, model, optimizer, "gpt2", range(2), my_share(model))
        held = sum(parameter.numel() for parameter in model.parameters())
        rank = model.mpu.get_data_parallel_rank()
        tokens = model.eval().generate(
            **prompt("gpt2"), do_sample=False, max_new_tokens=3 + 4 * rank
        )
        model.save_parallelized(folder + "/merged", merge_checkpoints=True)
    return {"losses": losses, "held": held, "tokens": tokens}


def check_pieces_over_replicas(folder: Path) -> None:
    """Train with parameters in pieces over two replicas, of which one generates more tokens than
    the other: all as on one device.
    """
    losses, reference = on_one_device("gpt2", 2)
    ranks = run_processes(2, "initialized:train_in_pieces", str(folder))
    found = [sum(both) / 2 for both in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert_close_tree(torch.tensor(found), torch.tensor(losses), "losses")
    merged = type(reference).from_pretrained(folder / "merged")
    assert_close_tree(
        dict(merged.named_parameters()), dict(reference.named_parameters()), "parameters"
    )
    whole = sum(parameter.numel() for parameter in reference.parameters())
    assert all(rank["held"] < 0.6 * whole for rank in ranks)
    for number, rank in enumerate(ranks):
        with float64_casts():
            expected = reference.eval().generate(
                **prompt("gpt2"), do_sample=False, max_new_tokens=3 + 4 * number
            )
        assert torch.equal(rank["tokens"], expected)


def differing_pieces(model: Any, folder: str) -> list[str]:
    """The parameters of which this rank's piece is not, to the last bit, what ``from_pretrained``
    reads from the merged folder.
    """
    original = type(model).__bases__[1]
    whole = loaded(original, folder + "/merged").state_dict()
    program = model.parallel_module
    return [
        one.name
        for one in program.declarations
        if one.is_initial_weight
        and not torch.equal(
            program.weights(one.name),
            local_piece(whole[one.name], one.layout, program.mesh, program.ranks.coords),
        )
    ]


def tensor_parallel(size: int, **fields: Any) -> dict[str, Any]:
    """A config as OSLO's users write it."""
    return {"model_parallelism": {"enable": True, "tensor_parallel_size": size}, **fields}
