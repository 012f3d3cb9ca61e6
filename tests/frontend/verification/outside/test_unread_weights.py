"""The parameters of a file that nothing reads."""

import pytest

from shardwright.frontend.verification.outside.unread_weights import unread_weights

FILE = """
class Net(ParallelModule):
    def declare(self):
        self.parameter("block.{layer}", "[4]", torch.float64)
        self.parameter("block.bias", "[4]", torch.float64)
        for layer in range(2):
            self.parameter(f"h.{layer}.{{layer}}", "[4]", torch.float64)

    def forward(self, x):
        for layer in range(2):
            x = self.h_block(self.h[layer], x)
        return x * self.block["{layer}"] + self.block.bias

    def h_block(self, block, x):
        return x * block["{layer}"]
"""


@pytest.mark.parametrize(
    ("before", "after", "unread"),
    [
        ("", "", ""),
        # A module may be called as the argument of a method is.
        (" + self.block.bias", "; bias = self.block.bias", "block.bias"),
        # The name of a parameter may look like a layer's number.
        ("range(2):\n            x", "range(1):\n            x", "h.1.{layer}"),
        ('x * block["{layer}"]', "x", "h.0.{layer}"),
        ('x * self.block["{layer}"]', "x", "block.{layer}"),
    ],
)
def test_what_nothing_reads(before: str, after: str, unread: str) -> None:
    said = unread_weights(FILE.replace(before, after), 0)
    assert len(said) == bool(unread)
    assert all(f"no statement reads {unread}, and no comment" in text for text in said)


def test_a_name_that_is_computed_is_refused() -> None:
    (said,) = unread_weights(FILE.replace('"block.bias"', '"block." + "bias"'), 0)
    assert said.endswith("the name is computed, so the checks do not know what reads the parameter")
