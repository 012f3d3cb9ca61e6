"""Every adapter of the placement table: the value survives the forward, the gradient the
backward.
"""

import itertools

import pytest
import runtime_ranks
import torch
from covers import spread
from placements import Sharded, convert, decode, encode, transposed
from spawn import run_processes

from shardwright.runtime import adapters
from shardwright.runtime.layout import Cut, Mesh
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication

SHARDED = {
    "even": ((12, 24), [Sharded(0, Cut((12,))), Sharded(1, Cut((24,)))]),
    "uneven": ((7, 5), [Sharded(0, Cut((7,))), Sharded(1, Cut((5,)))]),
    "empty pieces": ((2, 1), [Sharded(0, Cut((2,))), Sharded(1, Cut((1,)))]),
    "segments": (
        (7, 24),
        [
            Sharded(0, Cut((7,))),
            Sharded(1, Cut((12, 12))),
            Sharded(1, Cut((24,))),
            Sharded(1, Cut((6, 1, 5), 2)),
        ],
    ),
    "inner": (
        (5, 28),
        [
            Sharded(1, Cut((7,), 2, 2)),
            Sharded(1, Cut((7,), 1, 4)),
            Sharded(1, Cut((3, 4), 2, 2)),
            Sharded(0, Cut((5,))),
        ],
    ),
    "middle dim": (
        (2, 6, 3),
        [Sharded(1, Cut((6,))), Sharded(2, Cut((3,))), Sharded(1, Cut((2, 1), 2, 1))],
    ),
}


def pairs(sharded):
    return [(a, b) for a, b in itertools.product([*sharded, "R", "P", "G"], repeat=2) if a != b]


def axis_of(num_ranks):
    return RankMesh(Mesh((("tp", num_ranks),))).axis("tp")


def run_adapter(num_ranks, source, target, pieces, grads):
    """Forward and backward of one adapter on all ranks: outputs and input gradients."""

    def on_rank(rank):
        x = pieces[rank].clone().requires_grad_()
        y = convert(x, axis_of(num_ranks), source, target)
        (grad,) = torch.autograd.grad(y, x, grads[rank])
        return y.detach(), grad

    return [list(results) for results in zip(*run_ranks(num_ranks, on_rank), strict=True)]


@pytest.mark.parametrize("num_ranks", spread([2, 3, 4], 3, first=1))
@pytest.mark.parametrize("case", SHARDED)
def test_value_and_gradient_survive(case, num_ranks):
    torch.manual_seed(0)
    shape, sharded = SHARDED[case]
    for source, target in pairs(sharded):
        value, gradient = (
            torch.randn(shape, dtype=torch.float64),
            torch.randn(shape, dtype=torch.float64),
        )
        pieces, grads = (
            encode(value, source, num_ranks),
            encode(gradient, transposed(target), num_ranks),
        )
        outputs, input_grads = run_adapter(num_ranks, source, target, pieces, grads)
        torch.testing.assert_close(
            decode(outputs, target),
            value,
            rtol=0,
            atol=1e-13,
            msg=lambda m: f"{source}->{target}: {m}",  # noqa: B023
        )
        decoded = decode(input_grads, transposed(source))
        torch.testing.assert_close(
            decoded,
            gradient,
            rtol=0,
            atol=1e-13,
            msg=lambda m: f"{source}->{target}: {m}",  # noqa: B023
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_other_dtypes_go_forward(dtype):
    value = torch.arange(10).view(2, 5).remainder(3).to(dtype)
    sharded = [Sharded(1, Cut((5,))), Sharded(0, Cut((2,)))]
    for source, target in pairs(sharded):
        if dtype == torch.bool and source == "P":
            continue  # no summands of a boolean
        if source == "P":
            pieces = [value, torch.zeros_like(value), torch.zeros_like(value)]
        else:
            pieces = encode(value, source, 3)
        outputs = run_ranks(
            3,
            lambda r, source, target, pieces: convert(pieces[r], axis_of(3), source, target),
            source,
            target,
            pieces,
        )
        assert all(y.dtype == dtype and not y.requires_grad for y in outputs)
        if target == "P":
            assert torch.equal(torch.stack(outputs).sum(0).to(dtype), value)
        else:
            assert torch.equal(decode(outputs, target), value), (source, target)


def test_non_contiguous_and_negative_dims():
    value, gradient = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    sharded = [Sharded(0, Cut((4,))), Sharded(1, Cut((6,)))]
    for source, target in pairs(sharded):
        pieces = [p.t().contiguous().t() for p in encode(value, source, 2)]
        grads = [g.t().contiguous().t() for g in encode(gradient, transposed(target), 2)]
        outputs, input_grads = run_adapter(2, source, target, pieces, grads)
        torch.testing.assert_close(decode(outputs, target), value)
        torch.testing.assert_close(decode(input_grads, transposed(source)), gradient)

    def on_rank(rank):
        return adapters.all_gather(torch.full((2, 1), rank), axis_of(2), -1)

    assert run_ranks(2, on_rank)[0].tolist() == [[0, 1], [0, 1]]


def test_without_cut_one_segment():
    value = torch.arange(7.0)

    def on_rank(rank):
        axis = axis_of(2)
        piece = adapters.narrow(value, axis, 0)
        summed = adapters.reduce_scatter(value, axis, 0)
        padded = adapters.pad(value[:3] + rank, axis, 0)
        return piece, summed, padded

    first, second = run_ranks(2, on_rank)
    assert torch.equal(torch.cat([first[0], second[0]]), value)
    assert torch.equal(torch.cat([first[1], second[1]]), 2 * value)
    assert first[2].tolist() == [0, 1, 2, 0, 0, 0] and second[2].tolist() == [0, 0, 0, 1, 2, 3]


def test_axis_of_size_one_returns_the_tensor_itself():
    axis, x, cut = axis_of(1), torch.ones(2, 2, requires_grad=True), Cut((2,))
    for target in (Sharded(0, cut), "R", "P", "G"):
        for source in (Sharded(1, cut), "R", "P", "G"):
            if source != target:
                assert convert(x, axis, source, target) is x


def test_outputs_alias_neither_inputs_nor_other_ranks():
    """A gathered tensor, a sum, a slice or a summand may be changed in place without anybody else
    seeing it.
    """
    value = torch.arange(6.0).view(2, 3)
    sharded = [Sharded(0, Cut((2,))), Sharded(1, Cut((3,)))]
    for source, target in pairs(sharded):
        if (source, target) in [("R", "G"), ("G", "R")]:
            continue  # on every rank the tensor itself
        pieces = encode(value, source, 2)
        kept = [p.clone() for p in pieces]

        def on_rank(rank, source, target, pieces):
            y = convert(pieces[rank], axis_of(2), source, target)
            before = y.clone()
            y.fill_(rank + 100)
            return before

        outputs = run_ranks(2, on_rank, source, target, pieces)
        assert all(torch.equal(a, b) for a, b in zip(pieces, kept, strict=True)), (source, target)
        torch.testing.assert_close(decode(outputs, target), value)


def test_communication_is_counted_per_phase():
    def on_rank(rank):
        axis = axis_of(2)
        with count_communication() as volume:
            x = torch.ones(2, 3, requires_grad=True)
            y = adapters.all_reduce(adapters.grad_all_reduce(x, axis), axis)  # Megatron's f and g
            z = adapters.all_gather(y, axis, 1, backward="reduce_scatter")
            z.sum().backward()
        return volume

    volume = run_ranks(2, on_rank)[1]
    assert [
        (k.phase, k.collective, v.calls, v.elements, v.num_bytes, v.received)
        for k, v in volume.items()
    ] == [
        ("backward", "all_reduce", 1, 6, 24, 6.0),
        ("backward", "reduce_scatter", 1, 12, 48, 6),
        ("forward", "all_gather", 1, 12, 48, 6),
        ("forward", "all_reduce", 1, 6, 24, 6.0),
    ]
    assert (
        volume.total(axis="tp", phase="forward").calls == 2 and volume.elements("all_reduce") == 12
    )


@pytest.mark.parametrize(
    ("num_ranks", "turns", "cut"),
    [(2, 0, Cut((12,))), (3, 1, Cut((7,))), (3, 1, Cut((2, 6), 2, 2)), (4, 1, Cut((3,)))],
)
@pytest.mark.parametrize("backward", ["slice", "reduce_scatter"])
def test_several_gathered_in_one_collective_are_as_each_by_itself(num_ranks, turns, cut, backward):
    """Values, gradients and elements are the same to the bit; the collectives are half as many."""
    mesh = Mesh((("cp", num_ranks),), turns=(("cp", turns),) if turns else ())

    def on_rank(rank):
        axis = RankMesh(mesh).axis("cp")
        length = adapters.cut_of(axis, cut).local_length(num_ranks, rank)
        torch.manual_seed(rank)
        # The second is no contiguous tensor, and has other sizes in front and behind.
        shapes = [(2, length, 3), (4, length, 2)]
        kept = [torch.randn(shape) for shape in shapes]
        kept[1] = kept[1].transpose(0, 1).contiguous().transpose(0, 1)
        grads = [torch.randn(shape[0], cut.length, shape[2]) for shape in shapes]
        found = []
        for together in (True, False):
            xs = [x.clone().requires_grad_() for x in kept]
            with count_communication() as volume:
                if together:
                    wholes = adapters.all_gather_together(xs, axis, -2, cut, backward)
                else:
                    wholes = [adapters.all_gather(x, axis, -2, cut, backward) for x in xs]
                torch.autograd.backward(wholes, grads)
            sent = {
                (key.phase, key.collective): (v.elements, v.num_bytes, v.received)
                for key, v in volume.items()
            }
            found.append(([*wholes, *(x.grad for x in xs)], sent, volume.total().calls))
        return found

    for (tensors, sent, calls), (wanted, as_each, calls_of_each) in run_ranks(num_ranks, on_rank):
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
        assert sent == as_each and 2 * calls == calls_of_each > 0


def test_processes_agree_with_threads():
    """The whole table over gloo, three ranks, uneven pieces: the same outputs and gradients as over
    threads.
    """
    processes = run_processes(3, "runtime_ranks:all_adapters", 3)
    threads = run_ranks(3, lambda rank: runtime_ranks.all_adapters(3))
    for of_process, of_thread in zip(processes, threads, strict=True):
        assert of_process.keys() == of_thread.keys() and len(of_thread) == 30
        for pair, tensors in of_thread.items():
            for a, b in zip(of_process[pair], tensors, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-14, msg=lambda m: f"{pair}: {m}")  # noqa: B023


@pytest.mark.slow
def test_adapters_compile_without_a_break():
    """torch.compile takes every adapter into one graph, over gloo, and the numbers stay."""
    for eager, compiled in run_processes(2, "runtime_ranks:compiled_adapters"):
        torch.testing.assert_close(compiled, eager, rtol=1e-14, atol=1e-14)
