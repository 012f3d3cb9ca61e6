"""What a training step with experts on different ranks costs, beside the same experts by hand and
beside experts that are cut through their inner width; what each rank holds; and how long a large
model with experts compiles.

    python benchmarks/experts.py [--pairs 20] [--only layer-loop] [--ranks 2 4]

CPU with one thread per rank, gloo, float32, AdamW. Every case compares policy ``ep`` with a peer:

    layer-loop    one layer of experts; by hand, a product for each expert in a loop
    layer-kernel  the same layer; by hand, F.grouped_mm
    model-kernel  a Qwen3-MoE of four layers; by hand, F.grouped_mm
    model-hf      the same model; transformers' own expert parallelism, all-to-all with FSDP2
    model-tp      the same model under policy tp, which cuts the inner width of every expert

What is written by hand is in ``experts_by_hand.py``. ``model-hf`` also compares the gradients of
transformers' first step with those of one device, and prints how far they are apart at most. Both
sides live in the same processes and take turns step by step, so that load from elsewhere meets
both. A step is zero_grad, forward, backward, reduction of gradients, optimizer step, for one batch
of which both sides give each rank its rows. It returns the loss of the whole batch, which takes a
sum over the ranks. With ``--own-losses 1`` a peer's step returns the loss of a rank's own part
instead, which takes none; ours sums it all the same. Both sides begin with the same weights, and
their losses are compared.

``memory`` prints what rank 0 holds of parameters, gradients and optimizer state, by experts per
rank. ``compile`` compiles the shape of Qwen3-235B-A22B for 64 ranks, weights on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from compile_time import EXPERTS_CASE, run_in_process
from experts_by_hand import average_experts, by_hand, own_experts
from models import qwen3_moe
from pairs import compare
from ranks import assert_same_training, gloo_rank, parser_of, start_ranks
from storage_bytes import kept_by
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeSparseMoeBlock

import shardwright

BATCH_SIZE, SEQ_LENGTH = 8, 128
LEARNING_RATE = 1e-3
NUM_RANKS = (2, 4)
STEPS = ("layer-loop", "layer-kernel", "model-kernel", "model-hf", "model-tp")

Step = Callable[[], float]
"""One training step; returns the loss."""

Batch = dict[str, Tensor]
Side = tuple[Step, nn.Module, torch.optim.Optimizer]


class Layer(nn.Module):
    """A norm and one layer of experts, and the distance of what they make from ``target``."""

    def __init__(self) -> None:
        super().__init__()
        config = qwen3_moe().config
        self.norm = Qwen3MoeRMSNorm(config.hidden_size)
        self.mlp = Qwen3MoeSparseMoeBlock(config)
        for parameter in self.mlp.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(x + self.mlp(self.norm(x)), target)


def make(case: str, num_experts: int = 16) -> tuple[nn.Module, Batch]:
    """A model, the same on every rank, and the batch of all ranks."""
    torch.manual_seed(0)
    if case.startswith("layer"):
        layer = Layer()
        shape = (BATCH_SIZE, SEQ_LENGTH, layer.norm.weight.numel())
        return layer, {"x": torch.randn(shape), "target": torch.randn(shape)}
    model = qwen3_moe(num_experts)
    tokens = torch.randint(model.config.vocab_size, (BATCH_SIZE, SEQ_LENGTH))
    return model, {"input_ids": tokens, "labels": tokens}


def loss_of(result: Tensor | dict[str, Tensor]) -> Tensor:
    return result if isinstance(result, Tensor) else result["loss"]


def ours(case: str, policy: str, folder: str, num_experts: int = 16) -> Side:
    """The module compiled by shardwright."""
    num_ranks = dist.get_world_size()
    model, batch = make(case, num_experts)
    # Every rank is given its rows of the batch, as those of a peer are.
    config = shardwright.ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks,
        inputs=dict.fromkeys(batch, "sharded"),
        outputs="loss",
        use_async_reducer=True,
    )
    module = shardwright.parallelize(
        model, batch, policy, config, gen_savedir=f"{folder}/{policy}{num_experts}", reuse="moo"
    )
    optimizer = shardwright.build_optimizer(module, torch.optim.AdamW, config, lr=LEARNING_RATE)
    mine = module.cut_inputs(**batch)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(module(**mine))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, module, optimizer


def peer(case: str, folder: str, *, own_losses: bool) -> Side:
    """The other side of a case. ``own_losses``: its steps return the loss of a rank's own part."""
    if case == "model-tp":
        return ours(case, "tp", folder)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    model, batch = make(case)
    if case == "model-hf":
        module = by_transformers(model, f"{folder}/weights")
    else:
        module = by_hand(model, "loop" if case.endswith("loop") else "grouped_mm")
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    experts = own_experts(module)
    mine = {name: value.chunk(num_ranks)[rank] for name, value in batch.items()}

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(module(**mine))
        loss.backward()
        if case != "model-hf":  # FSDP2 reduces all gradients by itself
            average_experts(experts)
        optimizer.step()
        return loss.item() if own_losses else mean_over_ranks(loss.item())

    if case == "model-hf":
        loss_of(module(**mine)).backward()
        distance = gradient_distance(module, model, batch)
        if rank == 0:
            print(f"model-hf     their gradients beside one device: {distance:.1e}", flush=True)
    return step, module, optimizer


def by_transformers(model: nn.Module, folder: str) -> nn.Module:
    """The model as transformers itself distributes it: every rank has its own rows of the batch and
    its own experts, all other parameters lie in pieces (FSDP2). It distributes only what it loads
    from files.
    """
    if dist.get_rank() == 0:
        model.save_pretrained(Path(folder))
    dist.barrier()
    num_ranks = dist.get_world_size()
    config = DistributedConfig(
        fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation="all_to_all"
    )
    return type(model).from_pretrained(
        folder, distributed_config=config, dtype=torch.float32, experts_implementation="grouped_mm"
    )


def gradient_distance(module: nn.Module, model: nn.Module, batch: Batch) -> float:
    """The largest distance of a gradient of ``module`` from that of ``model``, which has the whole
    batch on one device, relative to the norm of the latter.
    """
    loss_of(model(**batch)).backward()
    alone = dict(model.named_parameters())
    worst = 0.0
    for name, parameter in module.named_parameters():
        found, wanted = parameter.grad, alone[name].grad
        assert found is not None and wanted is not None, f"{name} has no gradient"
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        worst = max(worst, float((whole - wanted).norm() / wanted.norm()))
    model.zero_grad()
    return worst


def mean_over_ranks(loss: float) -> float:
    """The loss of the whole batch, from those of its equal parts."""
    losses = torch.tensor(loss)
    dist.all_reduce(losses)
    return losses.item() / dist.get_world_size()


def run_steps(rank: int, case: str, folder: str, num_pairs: int, *, own_losses: bool) -> None:
    """One comparison on the calling rank; rank 0 prints."""
    our_step = ours(case, "ep", folder)[0]
    their_step = peer(case, folder, own_losses=own_losses)[0]
    for _ in range(3):
        first, second = our_step(), their_step()
    is_part = own_losses and case != "model-tp"
    assert_same_training(first, mean_over_ranks(second) if is_part else second)
    ratio = compare(our_step, their_step, num_pairs=num_pairs, barrier=dist.barrier)
    if rank == 0:
        print(f"{case:12} {dist.get_world_size()} ranks  {ratio}", flush=True)


def run_memory(rank: int, folder: str) -> None:
    """What rank 0 holds between steps, by experts; rank 0 prints."""
    num_ranks = dist.get_world_size()
    for num_experts in (num_ranks, 8, 16, 32):
        step, module, optimizer = ours("model", "ep", folder, num_experts)
        step()
        kept = {x.data_ptr(): x.nbytes for x in kept_by(module, optimizer)}
        experts = sum(p.nbytes for name, p in module.named_parameters() if "experts" in name)
        if rank == 0:
            print(
                f"memory       {num_ranks} ranks  {num_experts // num_ranks} of {num_experts} "
                f"experts: {experts / 2**20:.2f} MiB of their parameters, "
                f"{sum(kept.values()) / 2**20:.2f} MiB between steps",
                flush=True,
            )


def run_compile() -> None:
    """One compile in a process of its own."""
    result = run_in_process(EXPERTS_CASE, 1)
    stages = ", ".join(f"{name} {s:.2f}" for name, s in result["stages"].items() if s >= 0.01)
    print(f"compile      {result['wall_s']:.2f} s, {result['cpu_s']:.2f} CPU s ({stages})")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=[*STEPS, "memory", "compile"])
    parser.add_argument("--ranks", type=int, nargs="+", default=NUM_RANKS)
    parser.add_argument("--own-losses", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.rank_in:
        case, folder = arguments.rank_in
        with gloo_rank() as rank:
            if case == "memory":
                return run_memory(rank, folder)
            own_losses = bool(arguments.own_losses)
            return run_steps(rank, case, folder, arguments.pairs, own_losses=own_losses)
    print("case         ours / theirs [95 % interval]", flush=True)
    for num_ranks in arguments.ranks:
        for case in (*STEPS, "memory"):
            if arguments.only in (None, case):
                options = {"pairs": arguments.pairs, "own-losses": arguments.own_losses}
                start_ranks(__file__, num_ranks, [case], **options)
    if arguments.only in (None, "compile"):
        run_compile()


if __name__ == "__main__":
    main()
