import compiled_jobs
import pytest
import torch
from spawn import run_processes

from shardwright import ComputeConfig, parallelize
from shardwright.runtime.errors import ArgumentError, InputError, UsageError
from shardwright.runtime.ranks.threads import run_ranks


@pytest.mark.slow
def test_compiled_modules_train_as_they_do_without(tmp_path):
    """One graph each, or one for a stage, with dropout and microbatches: losses and parameters are
    those of the eager module. ZeRO-3 is compiled between its gathers, others between what a
    graph cannot hold.
    """
    for found in run_processes(2, "compiled_jobs:eager_and_compiled", str(tmp_path)):
        assert found.keys() == compiled_jobs.PLANS.keys()
        for name, (expected, compiled, num_graphs, refusal) in found.items():
            (losses, parameters), (ours, our_parameters) = expected, compiled
            several = name in compiled_jobs.SEVERAL_GRAPHS
            assert num_graphs > 1 if several else num_graphs == 1, (name, num_graphs)
            torch.testing.assert_close(ours, losses, rtol=1e-12, atol=0)
            torch.testing.assert_close(our_parameters, parameters, rtol=1e-12, atol=1e-14)
            is_one_unit = name in ("tp", "recompute", "plan_independent")
            assert ("is not the same on all ranks of a unit" in refusal) is is_one_unit, name


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "backend"), [("ring", "inductor")])
def test_compiled_modules_even_out_packed_rows(mode, backend, tmp_path):
    """Lengths of documents differ from step to step, and so does what ranks send: it is that of the
    eager module, between a graph before each attention and one behind the last.
    """
    for found in run_processes(2, "compiled_jobs:packed_rows", str(tmp_path), mode, backend):
        eager, compiled, num_graphs, refusal = found
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-14)
        received = [num_bytes for _, num_bytes in compiled[0]]
        # A single document needs no moves; with whole keys nothing else is exchanged.
        assert received[0] > 0 and (received[1] == 0) is (mode == "gather")
        assert num_graphs == 3
        assert "attention in blocks depends on values" in refusal
        assert "leave fullgraph=True out" in refusal


def test_compiling_the_calls_of_a_module_that_is_called_by_its_steps(tmp_path):
    model, (x, y) = compiled_jobs.Loss().double(), compiled_jobs.batch(0)
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, use_end2end=True)

    def compiled(rank):
        module = parallelize(model, {"x": x, "y": y}, "dp", config, gen_savedir=tmp_path)
        torch.compile(module)

    with pytest.raises(UsageError) as caught:
        run_ranks(1, compiled)
    assert str(caught.value) == (
        "torch.compile(Loss) would compile nothing\n"
        "  why:   it compiles calls of a module, and a module that was compiled end to end is "
        "called by train_step and infer_step\n"
        "  try:   model.compile(...) takes the same arguments, and the steps run what it compiles"
    )


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [pytest.param(False, marks=pytest.mark.slow), True])
def test_arguments_that_a_compiled_module_was_not_made_for(in_place, tmp_path):
    """They are told in our words, not in those of torch's compiler; sizes that vary do vary."""

    def calls(rank):
        x, y = (value.detach() for value in compiled_jobs.batch(0))
        model = compiled_jobs.Loss().double().eval()
        config = {
            "plan_ngpus": 1, "runtime_ngpus": 1,
            "dynamic_dims": {"x": {0: "batch"}, "y": {0: "batch"}},
        }  # fmt: skip
        module = parallelize(model, {"x": x, "y": y}, "dp", config, gen_savedir=tmp_path).eval()
        called = module
        if in_place:
            module.compile(fullgraph=True, backend="eager")
        else:
            called = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(called(x, y), model(x, y))
        torch.testing.assert_close(called(x[:3], y[:3]), model(x[:3], y[:3]))
        with pytest.raises(
            InputError, match=r"'x' has shape \[4, 7\], but was compiled for float64"
        ):
            called(x[:4, :7], y[:4])
        with pytest.raises(InputError, match="dim 0 is 3, but batch is 4 in dim 0 of 'x'"):
            called(x[:4], y[:3])
        with pytest.raises(ArgumentError, match="missing a required argument: 'y'"):
            called(x)

    run_ranks(1, calls)
