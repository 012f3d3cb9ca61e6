"""The parameters of a file that nothing reads."""

from shardwright.frontend.verification.outside.unread_weights import unread_weights

FILE = """
class Net(ParallelModule):
    def declare(self):
        self.parameter("block.weight", "[4]", torch.float64)
        self.parameter("block.bias", "[4]", torch.float64)

    def forward(self, x):
        bias = self.block.bias
        return x * self.block.weight
"""


def test_a_module_may_be_called_as_the_argument_of_a_method_is() -> None:
    (said,) = unread_weights(FILE, 0)
    assert "no statement reads block.bias" in said
