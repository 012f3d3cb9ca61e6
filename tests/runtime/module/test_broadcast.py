"""Broadcasting the weights of the first unit."""

import pytest
import torch
from mlp_files import make_model, write_files

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.loader import load_class
from shardwright.runtime.module.broadcast import broadcast_weights
from shardwright.runtime.ranks.threads import run_ranks


def test_units_without_weights_get_those_of_the_first(tmp_path):
    files = write_files(tmp_path / "mlp", make_model(), dp=1, tp=2)

    def run(rank):
        module = load_class(files)(init_params=rank < 2)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.mul_(1 if rank < 2 else 0).add_(rank)
        broadcast_weights(module, 2)
        return {
            name: tensor.detach()
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }

    results = run_ranks(4, run)
    whole = make_model()
    for rank in range(4):
        assert torch.equal(
            results[rank]["layers.0.weight"], whole.layers[0].weight.chunk(2)[rank % 2] + rank % 2
        )
        for name, tensor in results[rank % 2].items():
            assert torch.equal(results[rank][name], tensor), name


def test_a_stride_that_does_not_divide():
    with pytest.raises(DistributedError) as error:
        broadcast_weights(torch.nn.Linear(1, 1), 2)
    assert str(error.value) == (
        "weights cannot be broadcast with a stride of 2\n"
        "  why:   1 ranks are running, which is no multiple of it\n"
        "  try:   pass the plan_ngpus that the module was compiled with"
    )
