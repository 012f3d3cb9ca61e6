"""The peers of ``experts.py``: expert parallelism as one writes it with ``torch.distributed``.

A row for each choice of an expert is sorted by expert, sent to the expert's rank with
``all_to_all_single``, multiplied there, and sent back. Parameters that all ranks hold are reduced
by DistributedDataParallel.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Products = Literal["loop", "grouped_mm"]


class AllToAll(torch.autograd.Function):
    """Rows to and from every rank; gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.send, ctx.receive = send, receive
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive)
        return out, None, None


class ExpertsByHand(nn.Module):
    """The calling rank's share of the experts of a Qwen3-MoE layer, in the place of all of them."""

    def __init__(self, experts: nn.Module, products: Products) -> None:
        super().__init__()
        self.num_ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.num_experts = experts.num_experts
        self.products = products
        self.act_fn = experts.act_fn
        for name in ("gate_up_proj", "down_proj"):
            mine = getattr(experts, name).detach().chunk(self.num_ranks)[self.rank].clone()
            setattr(self, name, nn.Parameter(mine))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        num_tokens, top_k = chosen.shape
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        counts_in = torch.empty_like(counts)
        dist.all_to_all_single(counts_in, counts)
        per_rank = self.num_experts // self.num_ranks
        send = counts.view(self.num_ranks, per_rank).sum(1).tolist()
        receive = counts_in.view(self.num_ranks, per_rank).sum(1).tolist()
        rows = AllToAll.apply(x[order // top_k], send, receive)

        expert = torch.arange(per_rank).repeat(self.num_ranks).repeat_interleave(counts_in)
        by_expert = expert.argsort(stable=True)
        here = counts_in.view(self.num_ranks, per_rank).sum(0)
        gate, up = self.product(rows[by_expert], self.gate_up_proj, here).chunk(2, -1)
        rows = self.product(self.act_fn(gate) * up, self.down_proj, here)

        rows = AllToAll.apply(rows[by_expert.argsort()], receive, send)
        rows = rows[order.argsort()].view(num_tokens, top_k, -1)
        return (rows * weights.unsqueeze(-1)).sum(1)

    def product(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Each row by the matrix of its expert."""
        if self.products == "grouped_mm":
            offsets = counts.cumsum(0).to(torch.int32)
            return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)
        parts = zip(rows.split_with_sizes(counts.tolist()), weight.unbind(0), strict=True)
        return torch.cat([F.linear(part, matrix) for part, matrix in parts])


def by_hand(model: nn.Module, products: Products) -> nn.Module:
    """The model with its experts on different ranks, and all else under DDP. Call
    :func:`average_experts` of :func:`own_experts` after backward.
    """
    found = [(name, module) for name, module in model.named_modules() if name.endswith("experts")]
    for name, experts in found:
        parent = model.get_submodule(name.rpartition(".")[0])
        parent.experts = ExpertsByHand(experts, products)
    own = [name for name, _ in model.named_parameters() if ".experts." in name]
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, own)
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def own_experts(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the calling rank's experts."""
    return [p for name, p in model.named_parameters() if ".experts." in name]


def average_experts(experts: list[nn.Parameter]) -> None:
    """Losses are means over each rank's tokens, and DDP averages what it reduces. A rank's experts
    have sums over the tokens of all ranks.
    """
    grads = [p.grad for p in experts if p.grad is not None]
    torch._foreach_div_(grads, dist.get_world_size())
