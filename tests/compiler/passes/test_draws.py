"""Under ``rng="fast"`` numbers are drawn for the piece at hand, without a layout. The other mode
keeps it.
"""

from __future__ import annotations

import re

import plans
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        middle = F.dropout(self.up(x), 0.5, self.training)
        return (
            F.dropout2d(F.alpha_dropout(self.down(middle), 0.5, self.training), 0.5, self.training)
            .square()
            .mean()
        )


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("tp", {}, ['"tp"', "", ""]),
        ("data", {}, ['"dp"'] * 3),
        (
            "tp",
            {"rng": "plan_independent"},
            ['layout="[2, 3, 5, 8/tp]"', 'layout="[2, 3, 5, 4]"', 'layout="[2, 3, 1, 1]"'],
        ),
    ],
)
def test_what_masks_are_drawn_by(policy: str, options: dict, words: list[str]) -> None:
    graph = plans.traced(Drops().double(), {"x": torch.ones(2, 3, 5, 4, dtype=torch.float64)})
    text = " ".join(plans.compile_with(graph, policy, 2, **options).files["gencode0.py"].split())
    assert draws_in(text) == words, text


def draws_in(text: str) -> list[str]:
    """What functions that draw are declared with, beside paths, names and themselves."""
    found = re.findall(r'self\.random_function\(\s*"[^"]*", \w+([^()]*)\)', text)
    return [re.sub(r'(, )?name="[^"]*"', "", words).lstrip(", ") for words in found]


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        keep = (torch.rand(x.shape[0], 1, dtype=x.dtype) + 0.5).floor()
        hidden = hidden * keep + torch.randn_like(hidden)
        return F.gumbel_softmax(self.down(hidden), dim=-1).square().mean()


@pytest.mark.parametrize(("policy", "axes"), [("tp", 1), ("data", 3)])
def test_noise_is_drawn_for_the_piece_at_hand(policy: str, axes: int) -> None:
    """Along tp the hidden dim alone is cut, along the batch all three draws are."""
    graph = plans.traced(Noise().double(), {"x": torch.ones(6, 4, dtype=torch.float64)})
    text = plans.compile_with(graph, policy, 2).files["gencode0.py"]
    found = draws_in(text)
    assert len(found) == 3 and found.count('"tp"' if policy == "tp" else '"dp"') == axes, text
    assert found.count("") == 3 - axes, text
    text = plans.compile_with(graph, policy, 2, rng="plan_independent").files["gencode0.py"]
    assert [word[:8] for word in draws_in(text)] == ['layout="'] * 3, text


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        query, key, value = (
            t.view(batch, seq, 4, 2).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        rate = 0.5 if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        return self.out(seen.transpose(1, 2).reshape(batch, seq, 8)).square().mean()


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        pytest.param("tp", {}, '"tp"', marks=pytest.mark.slow),
        ("data", {}, '"dp"'),
        (
            "tp",
            {"rng": "plan_independent"},
            'layout="[batch, 4/tp, seq, seq]"',
        ),
    ],
)
def test_what_attention_is_drawn_by(policy: str, options: dict, words: str) -> None:
    """Its weights are drawn: heads are cut in them, whether sizes are numbers or names."""
    x = torch.ones(2, 5, 8, dtype=torch.float64)
    graph = plans.traced(Attends().double(), {"x": x}, dynamic_dims={"x": {0: "batch", 1: "seq"}})
    text = plans.compile_with(graph, policy, 2, **options).files["gencode0.py"]
    (found,) = draws_in(text)
    assert " ".join(found.split()) == words, text
    assert ('sizes={"batch": batch, "seq": seq}' in text) == ("rng" in options), text


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        channels = F.dropout1d(self.lstm(x)[0], 0.5, self.training)
        return F.feature_alpha_dropout(channels, 0.5, self.training).square().mean()


def test_recurrent_layers_draw_without_layouts() -> None:
    x = torch.ones(2, 5, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match="much more than its part"):
        made = plans.compile_with(plans.traced(Recurs().double(), {"x": x}), "tp", 2)
    text = made.files["gencode0.py"]
    assert text.count("self.random.") == 3 == len(draws_in(text)) and "layout=" not in text, text


class Block(nn.Module):
    """Draws by a module, by one that runs again, and for variables: of a name that a parameter
    has, of one that does not tell, and in a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        weight = F.dropout(self.weight, 0.5, self.training)
        hidden = self.drop(self.drop(self.up(x)) * weight)
        return self.net(hidden) + F.alpha_dropout(x, 0.25, self.training)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_functions_that_draw_stand_where_their_modules_stood() -> None:
    """They are declared for all layers at once, and no call is told what it draws."""
    graph = plans.traced(Blocks().double(), {"x": torch.ones(2, 4, dtype=torch.float64)})
    text = plans.compile_with(graph, "data", 2).files["gencode0.py"]
    declared = [line.strip() for line in text.splitlines() if "self.random_function(" in line]
    assert declared == [
        'self.random_function(f"blocks.{layer}.weight_1_dropout", dropout, '
        'name=f"blocks_{layer}_weight_1")',
        'self.random_function(f"blocks.{layer}.drop", dropout, "dp")',
        'self.random_function(f"blocks.{layer}.drop_1", dropout, "dp")',
        'self.random_function(f"blocks.{layer}.net.1", dropout, "dp")',
        'self.random_function(f"blocks.{layer}.alpha_dropout", alpha_dropout, "dp")',
    ], text
    called = re.findall(r"= self\.random\.blocks\[layer\]\.(\S+)\((\S+), (.*)\)", text)
    assert called == [
        ("weight_1_dropout", "block.weight", "training=self.training"),
        ("drop", "up", "training=self.training"),
        ("drop_1", "mul", "training=self.training"),
        ("net[1]", "net_0", "p=0.25, training=self.training"),
        ("alpha_dropout", "x", "p=0.25, training=self.training"),
    ], text
    assert "draw=" not in text, text
