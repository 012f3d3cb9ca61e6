"""Caches of keys and values that ranks hold in pieces between calls: as arguments, as buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import count_communication, parallelize
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InputError, PlanError
from shardwright.runtime.ranks.threads import run_ranks

HEADS, WIDTH = 4, 16


class Decoder(nn.Module):
    """Attention of new positions to all positions so far, whose keys and values are an argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH).double()
        self.out = nn.Linear(WIDTH, WIDTH).double()

    def heads(self, x: Tensor) -> list[Tensor]:
        batch, length, _ = x.shape
        split = self.qkv(x).view(batch, length, HEADS, 3, WIDTH // HEADS)
        return [part.transpose(1, 2) for part in split.unbind(3)]

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> dict[str, Any]:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return {"y": self.out(y.transpose(1, 2).flatten(2)), "cache": [k, v]}


def tokens(length: int, batch: int = 4, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator)


def config(**fields: Any) -> ComputeConfig:
    return ComputeConfig(
        plan_ngpus=2,
        runtime_ngpus=2,
        inference_only=True,
        outputs={"cache": "sharded"},
        **fields,
    )


def prompt_and_next(policy: str, folder: Path) -> Any:
    module = Decoder()
    prompt = parallelize(
        module,
        {"x": tokens(6)},
        policy,
        config(dynamic_dims={"x": {0: "batch", 1: "seq"}}),
        gen_savedir=folder,
        instance_name="prompt",
    )
    past = module(tokens(5))["cache"]
    after = parallelize(
        module,
        {"x": tokens(1), "cache": past},
        policy,
        config(
            inputs={"cache": "sharded"},
            dynamic_dims={
                "x": {0: "batch"},
                "cache.0": {0: "batch", 2: "past"},
                "cache.1": {0: "batch", 2: "past"},
            },
        ),
        gen_savedir=folder,
        instance_name="next",
    )
    return module, prompt, after


@pytest.mark.parametrize("policy", ["tp", pytest.param("data", marks=pytest.mark.slow)])
def test_a_cache_is_held_in_pieces_between_calls(policy: str, tmp_path: Path) -> None:
    """Results are those of one device, and nothing of the cache is sent."""

    def decode(rank: int) -> Any:
        module, prompt, after = prompt_and_next(policy, tmp_path)
        found = [prompt(tokens(3, batch=5))]
        with count_communication() as sent:
            for step in range(2):
                x = tokens(1, batch=5, seed=1 + step)
                found.append(after(x=x, cache=found[-1]["cache"]))
        # A whole cache is cut by the module that takes its pieces.
        whole = module(tokens(3, batch=5))
        x = tokens(1, batch=5, seed=1)
        again = after(**after.cut_inputs(x=x, cache=whole["cache"]))
        parity.assert_close_tree({"y": again["y"]}, {"y": found[1]["y"]})
        with pytest.raises(InputError, match=r"(?s)'cache.0' has shape .* this rank's is \["):
            after(x=x, cache=whole["cache"])
        return found, sent

    with torch.no_grad():
        module = Decoder()
        expected = [module(tokens(3, batch=5))]
        for step in range(2):
            x = tokens(1, batch=5, seed=1 + step)
            expected.append(module(x, expected[-1]["cache"]))
        ranks = run_ranks(2, decode)
    dim = {"tp": 1, "data": 0}[policy]
    for step, one in enumerate(expected):
        for found, _ in ranks:
            parity.assert_close_tree({"y": found[step]["y"]}, {"y": one["y"]})
        for index in (0, 1):
            cache = torch.cat([found[step]["cache"][index] for found, _ in ranks], dim)
            parity.assert_close_tree({"cache": cache}, {"cache": one["cache"][index]})
    for _, sent in ranks:  # the result of ``out`` alone: [5, 1, 16], twice
        assert sent.elements(phase="forward") == 160, str(sent)


class Remembering(Decoder):
    """A decoder whose cache has a fixed length, and lies in buffers that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            shape = (4, HEADS, 8, WIDTH // HEADS)
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x)
        self.keys = self.keys.index_copy(2, at, k)
        self.values = self.values.index_copy(2, at, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values)
        return self.out(y.transpose(1, 2).flatten(2))


def test_buffers_that_forward_updates_are_held_in_pieces(tmp_path: Path) -> None:
    def call(rank: int) -> Any:
        module = parallelize(
            Remembering(),
            {"x": tokens(2), "at": torch.arange(2)},
            "tp",
            ComputeConfig(plan_ngpus=2, runtime_ngpus=2, inference_only=True),
            gen_savedir=tmp_path,
        )
        found = [module(tokens(2, seed=s), torch.arange(2) + 2 * s) for s in range(2)]
        return found, str(module.declarations[-1].layout), module.keys.shape

    model = Remembering()
    with torch.no_grad():
        expected = [model(tokens(2, seed=s), torch.arange(2) + 2 * s) for s in range(2)]
        for found, layout, shape in run_ranks(2, call):
            parity.assert_close_tree(dict(enumerate(found)), dict(enumerate(expected)))
            assert layout == "[4, 4/tp, 8, 4]" and shape == (4, 2, 8, 4)


class Filling(Decoder):
    """A decoder that puts its keys and values into the caller's dict."""

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        q, cache["keys"], cache["values"] = self.heads(x)
        y = F.scaled_dot_product_attention(q, cache["keys"], cache["values"])
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_cache_that_the_caller_does_not_see_updated_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="into its arguments: cache.keys, cache.values; .* as it"):
        parallelize(
            Filling(), {"x": tokens(1), "cache": {}}, "tp",
            ComputeConfig(plan_ngpus=2, runtime_ngpus=2, inference_only=True),
            gen_savedir=tmp_path, load_module=False,
        )  # fmt: skip


def test_what_cannot_be_given_in_pieces_is_said(tmp_path: Path) -> None:
    args = {"x": tokens(1), "cache": Decoder()(tokens(5))["cache"]}
    with pytest.raises(PlanError, match="ComputeConfig.inputs names 'caches'"):
        parallelize(
            Decoder(), args, "tp", config(inputs={"caches": "sharded"}),
            gen_savedir=tmp_path, load_module=False,
        )  # fmt: skip
