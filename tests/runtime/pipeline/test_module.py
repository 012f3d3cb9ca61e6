"""Pipelined modules: what they are to a user, what they refuse, and what they say."""

import re

import pytest
import torch
from pipeline_files import BATCH, WORDS, Net, make_sample
from pipeline_training import adamw, assert_equal, samples_of, train_rank, train_reference, write
from pipelines import make_pipe

from shardwright.runtime.errors import CheckpointError, DistributedError, InputError, UsageError
from shardwright.runtime.loader import load_class
from shardwright.runtime.module.end2end import reducer_of
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

SAMPLES = [make_sample(m) for m in range(3)]


@pytest.fixture
def files(tmp_path):
    return write(tmp_path / "files", make_pipe("1f1b", 2, 3))


def on_ranks(files, fn, num_ranks=2):
    return run_ranks(num_ranks, lambda rank: fn(load_class(files)()))


def failing(files, fn, kind=InputError, num_ranks=2):
    """The full text of the error that calling ``fn`` on each rank raises."""
    with pytest.raises(kind) as caught:
        on_ranks(files, fn, num_ranks)
    return str(caught.value)


def test_a_rank_holds_the_tensors_of_its_stages(files):
    first, second = on_ranks(
        files, lambda module: [name for name, _ in module.named_parameters(remove_duplicate=False)]
    )
    inner = ["up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"]
    assert first == ["emb.weight", *(f"blocks.0.{name}" for name in inner), "head.weight"]
    assert second == ["emb.weight", *(f"blocks.1.{name}" for name in inner), "head.weight"]
    text = on_ranks(files, repr)[1]
    assert text.startswith("Net(\n  stage 1 of 2; by hand, 3 microbatches; rank 1; unit 0 of 1\n")


def test_inference_gives_all_results_to_all_ranks(files):
    model = Net(2)
    model.train()
    expected = [model(sample) for sample in SAMPLES]
    for evaluates in (False, True):
        results = on_ranks(
            files, lambda module, e=evaluates: module.train(not e).infer_step(SAMPLES)
        )
        if evaluates:
            fresh = Net(2).eval()
            expected = [fresh(sample) for sample in SAMPLES]
        for mine in results:
            for (loss, rest), (expected_loss, expected_rest) in zip(mine, expected, strict=True):
                assert not loss.requires_grad
                torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
                torch.testing.assert_close(
                    rest["logits"], expected_rest["logits"].detach(), rtol=1e-12, atol=1e-12
                )
                assert rest["any"].equal(expected_rest["any"]) and rest["count"].equal(
                    expected_rest["count"]
                )
                assert rest["dropped"] is None


def test_training_clears_gradients_first_and_reduces_them_last(files):
    def train(module):
        module.train_step(SAMPLES)
        assert module.reducer.is_synced
        once = {name: p.grad.clone() for name, p in module.named_parameters()}
        module.train_step(SAMPLES)
        return once, {name: p.grad for name, p in module.named_parameters()}

    for once, twice in on_ranks(files, train):
        for name in once:
            torch.testing.assert_close(once[name], twice[name], rtol=1e-12, atol=1e-14)


def test_a_reducer_made_on_the_spot_gives_way_to_that_of_the_optimizer(files):
    def train(module):
        module.train_step(SAMPLES)
        first = module.reducer
        optimizer = build_optimizer(module, adamw)
        assert module.reducer is not first and not first.is_attached
        module.train_step(SAMPLES)
        optimizer.step()
        return module.reducer.is_synced

    assert on_ranks(files, train) == [False, False]


def test_a_state_dict_goes_on_where_it_was_saved(files):
    pipe = make_pipe("1f1b", 2, 3)
    expected = train_reference(pipe, Net(2))

    def go_on(module):
        optimizer = build_optimizer(module, adamw)
        module.train_step(samples_of(0, 0, 3), scale_fn=lambda loss: 0.7 * loss)
        optimizer.clip_gnorm(0.5)
        optimizer.step()
        saved, kept = module.state_dict(), optimizer.state_dict()
        fresh = type(module)(init_params=False)
        fresh.load_state_dict(saved)
        assert fresh.rng.step == 1
        optimizer = build_optimizer(fresh, adamw)
        optimizer.load_state_dict(kept)
        for step in (1, 2):
            fresh.train_step(samples_of(step, 0, 3), scale_fn=lambda loss: 0.7 * loss)
            optimizer.clip_gnorm(0.5)
            optimizer.step()
        return {name: x.clone() for name, x in fresh.state_dict().items() if name != "_extra_state"}

    for state in on_ranks(files, go_on):
        for name, x in state.items():
            torch.testing.assert_close(x, expected["tensors"][name], rtol=1e-12, atol=1e-12)


def test_a_state_dict_of_other_stages_is_refused(files, tmp_path):
    other = write(tmp_path / "other", make_pipe("zb_v", 2, 3, 2))

    def mix(rank):
        load_class(files)().load_state_dict(load_class(other)().state_dict(), strict=False)

    with pytest.raises(CheckpointError, match="is of other pipeline stages"):
        run_ranks(2, mix)


@pytest.mark.parametrize("num_samples", [1, 2, 4])
@pytest.mark.parametrize("method", ["train_step", "infer_step"])
def test_a_wrong_number_of_samples(files, num_samples, method):
    text = failing(files, lambda module: getattr(module, method)([SAMPLES[0]] * num_samples))
    assert text == (
        f"Net.{method} was given {num_samples} sample{'s' if num_samples > 1 else ''}, but "
        "its schedule is for 3\n"
        "  why:   the order of all forward and backward passes was fixed for this number of "
        "microbatches\n"
        "  try:   pass 3 samples (further ones may be dummies, see is_dummy_batch), "
        "or compile for another number of microbatches"
    )


def test_a_single_sample_is_no_list(files):
    assert failing(files, lambda module: module.train_step(SAMPLES[0])) == (
        "Net.train_step takes a list of samples, one per microbatch\n"
        "  why:   it was given a dict\n"
        "  try:   put a single sample into a list: [sample]"
    )


def test_dummies_of_another_number(files):
    assert failing(files, lambda module: module.train_step(SAMPLES, [True])) == (
        "Net.train_step was given 3 samples, but is_dummy_batch has 1 entries\n"
        "  try:   is_dummy_batch tells of each sample whether it is a dummy"
    )


def test_a_loss_that_is_no_scalar(tmp_path):
    files = write(tmp_path / "files", make_pipe("1f1b", 2, 3, hidden_loss=True))
    assert failing(files, lambda module: module.train_step(SAMPLES)) == (
        "the first result of Net is no scalar loss\n"
        f"  why:   it is a tensor float64[{BATCH}, {WORDS}]; train_step differentiates the "
        "first result\n"
        "  try:   let forward return the loss first, a floating-point tensor of shape []"
    )
    assert (
        on_ranks(files, lambda module: module.infer_step(SAMPLES)[0][0].shape)
        == [(BATCH, WORDS)] * 2
    )


def test_a_scale_function_that_returns_no_scalar(files):
    text = failing(
        files, lambda module: module.train_step(SAMPLES, scale_fn=lambda loss: loss.expand(2))
    )
    assert (
        "scale_fn of Net.train_step did not return a scalar tensor\n  why:   it returned a "
        "Tensor of shape [2]\n" in text
    )


def test_calling_the_module_is_refused(files):
    text = failing(files, lambda module: module(SAMPLES[0]), UsageError)
    assert text == (
        "Net was compiled end to end and is not called directly\n"
        "  why:   it accumulates gradients over samples, and its schedule was made for whole "
        "steps\n"
        "  try:   call train_step(samples) or infer_step(samples)"
    )
    text = failing(files, lambda module: module.register_forward_hook(print), UsageError)
    assert text.startswith("a forward hook on the parallel module Net would never run\n")


def test_none_where_a_stage_reads(files):
    text = failing(files, lambda module: module.train_step([None] * 3))
    assert re.fullmatch(
        r"Net\.train_step: argument 'sample\.(tokens|target)' is missing\n.*\n  try:   pass "
        r"sample\.\1",
        text,
        re.DOTALL,
    )


def test_none_where_no_stage_reads(tmp_path):
    pipe = make_pipe("1f1b", 3, 2)
    train_rank_files = write(tmp_path / "files", pipe)
    # It passes None on rank 1.
    results = run_ranks(3, lambda rank: train_rank(train_rank_files, steps=1))
    assert_equal(pipe, train_reference(pipe, Net(3), steps=1), results)


def test_samples_of_another_shape_or_dtype(files):
    wrong = [{**SAMPLES[0], "target": torch.zeros(BATCH, 2, dtype=torch.float64)}] * 3
    text = failing(files, lambda module: module.train_step(wrong))
    assert (
        f"Net.train_step: argument 'sample.target' has shape [{BATCH}, 2], but was compiled "
        "for float64[4, 9]" in text
    )


def test_samples_that_differ_within_a_unit(files):
    def train(module):
        samples = [dict(sample) for sample in SAMPLES]
        samples[1]["target"] = samples[1]["target"] + module.rank
        module.train_step(samples)

    assert failing(files, train) == (
        "Net.train_step: 'sample.target' of sample 1 differs between the ranks of a unit\n"
        "  why:   these ranks agree with each other: 0; 1\n"
        "  try:   give the 2 ranks of a unit the same samples: shard the data over 1 "
        "unit(s), by rank // 2"
    )


def test_stages_that_share_a_parameter_must_start_alike(files):
    def train(module):
        optimizer = build_optimizer(module, adamw)
        if module.rank == 1:
            with torch.no_grad():
                module.emb.weight += 1
        module.train_step(SAMPLES)
        optimizer.step()

    text = failing(files, train, UsageError)
    assert text.startswith(
        "parameter 'emb.weight' does not start with the same values everywhere\n"
    )
    assert "these ranks agree with each other: 0; 1" in text


def test_a_number_of_ranks_that_makes_no_units(files):
    def construct(rank):
        load_class(files, rank=0)()

    with pytest.raises(DistributedError, match="3 ranks cannot run a plan for 2"):
        run_ranks(3, construct)


def test_a_rank_that_raises_ends_the_others_and_says_who_waits(files):
    def train(rank):
        module = load_class(files)()
        if rank == 1:

            def fail(*_):
                raise ZeroDivisionError("in stage 1")

            module.stage1 = fail
        module.train_step(SAMPLES)

    with pytest.raises(ZeroDivisionError, match="in stage 1") as caught:
        run_ranks(2, train)
    assert caught.value.__notes__ == [
        "raised on rank 1 of 2",
        "rank 0 waits in 0B0 for the gradient of 'hidden' from rank 1",
    ]


def test_a_rank_that_leaves_is_missed_by_name(files):
    def train(rank):
        module = load_class(files)()
        if rank == 0:
            module._inputs_compared = True
            module.train_step(SAMPLES)
        else:
            module._inputs_compared = True
            reducer_of(module)

    with pytest.raises(DistributedError) as caught:
        run_ranks(2, train)
    assert str(caught.value) == (
        "rank 1 ended while others wait for it\n  why:   rank 0 waits in 0B0 for the "
        "gradient of 'hidden' from rank 1"
    )


def test_random_numbers_are_those_of_step_and_microbatch(tmp_path):
    """Numbered as in a module without stages, which counts the calls of each step from 1;
    evaluation draws nothing.
    """
    files = write(tmp_path / "files", make_pipe("zb_v", 2, 3, 2, (2, 1), dropout=0.5))

    def train(module):
        moments, run_stage = {}, module.run_stage

        def noting(stage, microbatch, arguments):
            assert module.rng.mesh == module.stages[stage].mesh and module.rng.coords == {
                "tp": module.rank % 2
            }
            moments.setdefault(stage, []).append((microbatch, module.rng.moment))
            return run_stage(stage, microbatch, arguments)

        module.run_stage = noting
        optimizer = build_optimizer(module, adamw)
        results = module.train_step([SAMPLES[0]] * 3)
        module.infer_step(SAMPLES)
        optimizer.step()
        module.eval().infer_step(SAMPLES)
        return moments, [logits["logits"] for _, logits in results]

    for moments, (first, second, third) in on_ranks(files, train, num_ranks=3):
        for found in moments.values():
            assert found == [
                *((m, (0, 1 + m)) for m in range(3)),
                *((m, (0, 4 + m)) for m in range(3)),
                *((m, (1, 0)) for m in range(3)),
            ]
        assert not first.equal(second) and not second.equal(third) and not first.equal(third)


def test_random_numbers_do_not_depend_on_the_stages(tmp_path):
    """Given ``plan_independent`` draws, one stage and four on two ranks train alike, dropout
    included.
    """
    records = []
    for name, num_ranks, chunks in (
        ("1f1b", 4, 1),
        ("1f1b_interleaved", 2, 2),
        ("zb_v", 2, 2),
        ("gpipe", 4, 1),
    ):
        pipe = make_pipe(name, num_ranks, 4, chunks, dropout=0.5)
        files = write(tmp_path / name, pipe)
        records.append(run_ranks(num_ranks, lambda rank, files=files: train_rank(files))[0])
    first, *others = records
    without = run_ranks(
        4, lambda rank: train_rank(write(tmp_path / f"plain{rank}", make_pipe("1f1b", 4, 4)))
    )[0]
    assert first["losses"] != without["losses"]
    for other in others:
        torch.testing.assert_close(
            torch.tensor(first["losses"]), torch.tensor(other["losses"]), rtol=1e-12, atol=0
        )
