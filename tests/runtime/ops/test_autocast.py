"""Under autocast, operators with a split factor compute in the dtype that PyTorch's own compute
in.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from shardwright.runtime import ops
from shardwright.runtime.layout import Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks

MESH = Mesh((("tp", 2),))
LOGITS = torch.sin(torch.arange(4.0 * 6)).view(4, 6)
TARGET = torch.tensor([5, 0, 3, 2])

CASES = {
    "softmax": (partial(F.softmax, dim=1), lambda x, tp, start: ops.softmax(x, 1, dim_axes=(tp,))),
    "log_softmax": (
        partial(F.log_softmax, dim=1),
        lambda x, tp, start: ops.log_softmax(x, 1, dim_axes=(tp,)),
    ),
    "logsumexp": (
        partial(torch.logsumexp, dim=1),
        lambda x, tp, start: ops.logsumexp(x, 1, dim_axes=(tp,)),
    ),
    "nll_loss": (
        lambda x: F.nll_loss(x, TARGET),
        lambda x, tp, start: ops.nll_loss(x, TARGET, class_axes=(tp,), start=start),
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(x, TARGET),
        lambda x, tp, start: ops.cross_entropy(
            x, TARGET, class_axes=(tp,), num_classes=6, start=start
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_dtype_is_pytorchs(name, dtype):
    plain, parallel = CASES[name]

    def on_rank(rank):
        x = LOGITS[:, 3 * rank : 3 * rank + 3].to(dtype).requires_grad_()
        found = parallel(x, RankMesh(MESH).axis("tp"), 3 * rank)
        found.sum().backward()
        assert x.grad.dtype == dtype
        return found.detach()

    with torch.autocast("cpu", dtype):
        expected = plain(LOGITS.to(dtype))
        results = run_ranks(2, on_rank)
    for rank, found in enumerate(results):
        wanted = expected[:, 3 * rank : 3 * rank + 3] if expected.ndim == 2 else expected
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, wanted)
