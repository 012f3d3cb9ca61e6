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
        fifth = third + 1
        up = up * 2 if self.training else up
        steps = []
        kept = second
        for layer in range(2):
            steps.append(kept)
            kept = self.norms_block(self.norms[layer], kept)
        again = again_too = up

        def again(y):
            inner = y + 1
            return y * second * sum(steps)

        def other(y):
            return y

        if self.training:
            return again(up)
        up = again(up)
        up = second
        return up
"""


def test_transitions_of_adapters() -> None:
    gathered = Transition(("dp", "ep"), "R")
    assert transitions_of(SOURCE) == {5: Transition(("tp",), "G"), 6: gathered, 7: gathered,
                                      8: gathered}  # fmt: skip


def test_values_without_effect() -> None:
    """One of several results is enough, and inner functions read, too. A value has none if what
    reads it has none, or if its variable gets another one before.
    """
    lost = {11: "lost", 12: "lost", 13: "lost", 15: "third", 16: "fifth", 23: "again"}
    assert unread(SOURCE) == {**lost, 26: "inner", 34: "up"}
