"""Control flow on a dynamic size is traced for one outcome; a call with the other outcome is
refused, never computed wrong.
"""

from pathlib import Path

import plans
import pytest
import torch

from shardwright.compiler.compile import compile_graph
from shardwright.policies import data
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InputError


class DoublesLargeBatches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if x.shape[0] > 3:
            y = y * 2
        return y.sum()


def test_a_size_that_takes_another_branch_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = DoublesLargeBatches()
    example = torch.randn(4, 6, dtype=torch.float64)
    graph = plans.traced(model, {"x": example}, dynamic_dims={"x": {0: "rows"}})
    compiled = compile_graph(graph, data.apply, ComputeConfig(plan_ngpus=2, runtime_ngpus=2))
    plans.write(tmp_path, compiled, model)
    seven = torch.randn(7, 6, dtype=torch.float64)
    torch.testing.assert_close(
        plans.run_once(tmp_path, compiled, {"x": seven}).loss,
        model(seven).detach(),
        rtol=0,
        atol=1e-12,
    )
    with pytest.raises(InputError) as error:
        plans.run_once(tmp_path, compiled, {"x": example[:3]})
    assert str(error.value) == (
        "DoublesLargeBatches was traced for sizes with rows > 3, and this call has others\n"
        "  why:   the model does something else for such sizes, and the traced graph does "
        "not have it\n"
        "  try:   compile for these sizes too, under another instance_name, or leave the dim static"
    )
