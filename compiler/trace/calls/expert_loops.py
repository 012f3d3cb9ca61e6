"""Modules of transformers that loop over the experts that were hit, taken as the same in one pass.

Such a loop asks which experts got a token, which depends on data, and adds what each makes of its
tokens to the result. What an expert without tokens would add is nothing, so all experts together
may be run on their rows. A module is known by its class and by the parameters of its ``forward``;
one of another version is traced as it is written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.ops.stand_ins import combine, dispatch, grouped_linear
from shardwright.runtime.errors import TraceError

Forward = Callable[..., Tensor]


def expert_loops_of(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """``(owner, name, replacement)`` for each known loop over experts in a module."""
    for cls in dict.fromkeys(type(part) for part in module.modules()):
        known = LOOPS.get(f"{cls.__module__}.{cls.__qualname__}")
        if known is None:
            continue
        parameters, forward = known
        if ", ".join(list(inspect.signature(cls.forward).parameters)[1:]) == parameters:
            yield cls, "forward", functools.wraps(cls.forward)(forward)


def _dbrx(module: Any, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    mlp, num_experts = module.mlp, module.num_experts
    x = hidden_states.reshape(-1, module.hidden_size)
    rows, gains, routing = dispatch(x, chosen, weights, num_experts=num_experts)
    # One matrix, of all experts one below the other.
    shape = (num_experts, module.ffn_hidden_size, module.hidden_size)
    gate = grouped_linear(rows, mlp.w1.view(shape), routing, autocast=True)
    up = grouped_linear(rows, mlp.v1.view(shape), routing, autocast=True)
    rows = mlp.activation_fn(gate) * up
    rows = grouped_linear(rows, mlp.w2.view(shape), routing, transposed=True, autocast=True)
    y = combine(rows * gains.unsqueeze(-1), routing)
    result: Tensor = y.view(hidden_states.shape[0], -1, module.hidden_size)
    return result


def _switch(module: Any, x: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
    """``selected [tokens, 1, experts]``: a one where a token has a place at its expert. A token
    beyond the expert's capacity has none.
    """
    chosen = selected.argmax(-1)
    gains = weights * selected.sum(-1).to(weights.dtype)
    return _each_apart(module, x, chosen, gains, lambda rows: rows)


def _nllb(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    share = module.moe_token_dropout

    def dropped(rows: Tensor) -> Tensor:
        if share == 0:
            return rows
        rows = module.token_dropout(rows) if module.training else rows * (1 - share)
        return rows

    return _each_apart(module, x, chosen, weights, dropped)


def _longcat(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The last ``zero_expert_num`` experts have no matrices: they return their tokens as they are.

    A choice of such an expert becomes one of an expert with matrices, with the weight 0, so that
    every token has ``top_k`` rows; what it returns is added behind.
    """
    num_experts, top_k = module.num_routed_experts, chosen.shape[-1]
    if num_experts < top_k:
        raise TraceError(
            f"a token of a {type(module).__name__} chooses {top_k} experts, and {num_experts} have "
            "matrices",
            hint="n_routed_experts of at least moe_topk",
        )
    returned = chosen >= num_experts
    rows, gains, routing = dispatch(
        x,
        _elsewhere(chosen, returned, num_experts),
        weights.masked_fill(returned, 0.0),
        num_experts=num_experts,
    )
    # [total_experts, 2 * inner, hidden]: what it has for experts without matrices is never read.
    matrices = module.gate_up_proj[:num_experts]
    gate, up = grouped_linear(rows, matrices, routing, autocast=True).chunk(2, dim=-1)
    rows = module.act_fn(gate) * up
    rows = grouped_linear(rows, module.down_proj, routing, autocast=True)
    y = combine((rows * gains.unsqueeze(-1)).to(x.dtype), routing)
    share = weights.masked_fill(~returned, 0.0).sum(-1, keepdim=True)
    return y + (x * share).to(x.dtype)


def _elsewhere(chosen: Tensor, left_out: Tensor, num_experts: int) -> Tensor:
    """Choices of which those that are ``left_out`` name experts that their token has not chosen, as
    the choices of a token differ.

    A token that chose (5, 8, 9) of 8 experts, 8 and 9 left out, gets (5, 6, 7): they are counted on
    from its first choice, so that not all tokens get the same ones.
    """
    experts = torch.arange(num_experts, device=chosen.device)
    behind = (experts - chosen[:, :1]) % num_experts  # [tokens, experts]
    taken = (chosen.unsqueeze(-1) == experts).sum(1)
    spare = (behind + taken * num_experts).argsort(dim=-1)
    place = (left_out.cumsum(-1) - 1).clamp(min=0)
    return torch.where(left_out, spare.gather(1, place), chosen)


def _each_apart(
    module: Any, x: Tensor, chosen: Tensor, weights: Tensor, after: Callable[[Tensor], Tensor]
) -> Tensor:
    """Experts that are modules of their own. ``after``: what becomes of their weighted rows."""
    experts = [module[f"expert_{index}"] for index in range(module.num_experts)]
    rows, gains, routing = dispatch(x, chosen, weights, num_experts=module.num_experts)
    rows = together(experts, rows, routing)
    rows = after(rows * gains.unsqueeze(-1))
    y = combine(rows.to(x.dtype), routing)
    return y


def together(experts: Sequence[nn.Module], rows: Tensor, routing: Tensor) -> Tensor:
    """What experts that are alike make of their rows: the forward of the first one, in which every
    linear layer has the weights of all.
    """
    with ExitStack() as stack:
        for name, part in experts[0].named_modules():
            if isinstance(part, nn.Linear):
                layers = [expert.get_submodule(name) for expert in experts]
                part.__dict__["forward"] = functools.partial(_linear_of_all, layers, routing)
                stack.callback(part.__dict__.pop, "forward")
        rows = experts[0](rows)
    return rows


def _linear_of_all(layers: Sequence[Any], routing: Tensor, input: Tensor) -> Tensor:
    weight = torch.stack([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.stack([layer.bias for layer in layers])
    return grouped_linear(input, weight, routing, bias, autocast=True)


_MODELS = "transformers.models"
LOOPS: dict[str, tuple[str, Forward]] = {
    f"{_MODELS}.dbrx.modeling_dbrx.DbrxExperts": (
        "hidden_states, top_k_index, top_k_weights",
        _dbrx,
    ),
    f"{_MODELS}.switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": (
        "hidden_states, selected_experts, routing_weights",
        _switch,
    ),
    f"{_MODELS}.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": (
        "hidden_states, top_k_index, top_k_weights",
        _longcat,
    ),
    f"{_MODELS}.nllb_moe.modeling_nllb_moe.NllbMoeExperts": (
        "hidden_states, router_mask, router_probs",
        _nllb,
    ),
}
"""The parameters of ``forward`` that each entry is for, and what stands in its place."""
