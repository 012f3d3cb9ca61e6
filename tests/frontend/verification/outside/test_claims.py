"""What a generated file states of its statements, read from its source."""

from shardwright.frontend.verification.outside.claims import Transition, transitions_of, unread

SOURCE = """
class Net(ParallelModule):
    def forward(self, x):
        tp = self.axis("tp")
        x_in = grad_all_reduce(x, tp)  # tp: R -> G
        whole = all_gather(
            x_in, tp, dim=1, backward="slice"
        )  # dp, ep: S(1) -> R
        up = F.linear(whole, self.up.weight)  # [batch, hidden/tp]  net.py:9
        first, second = torch.chunk(up, 2)  # each [batch]  net.py:10
        lost = (
            second.square()
        )
        self.steps = lost_too = second + 1
        third, fourth = torch.chunk(up, 2)

        def again(y):
            return y * second

        return again(up)
"""


def test_transitions_of_adapters() -> None:
    gathered = Transition(("dp", "ep"), "R")
    assert transitions_of(SOURCE) == {5: Transition(("tp",), "G"), 6: gathered, 7: gathered,
                                      8: gathered}  # fmt: skip


def test_values_that_nothing_reads() -> None:
    """One of several results is enough, and inner functions read, too."""
    assert unread(SOURCE) == {11: "lost", 12: "lost", 13: "lost", 15: "third"}
