"""Training with build_optimizer: the numbers of one device, and what users may do with the
object.
"""

import pytest
import torch
from covers import spread
from mlp_files import make_batch, make_model, write_files
from mlp_training import ADAMW, Mixed, adamw, assert_equal_pieces, train_rank, train_reference
from spawn import run_processes

from shardwright.runtime.errors import ConfigError, InputError, UsageError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer


def compiled(tmp_path, dp=1, tp=2):
    return write_files(tmp_path / f"mlp_{dp}_{tp}", make_model(), dp, tp)


def text_of(error):
    return str(error.value)


# ------------------------------------------------------------------------------------------------
# parity with one device


@pytest.mark.parametrize(
    ("dp", "tp", "num_units", "overlap"),
    spread(
        [(1, 1, 2, False), (1, 2, 2, False), (1, 2, 2, True), (2, 2, 1, True), (1, 4, 1, False)],
        2,
        first=1,
    ),
)
def test_training_equals_one_device(tmp_path, dp, tp, num_units, overlap):
    directory, num_ranks = compiled(tmp_path, dp, tp), dp * tp * num_units
    config = {"plan_ngpus": dp * tp, "runtime_ngpus": num_ranks, "use_async_reducer": overlap}
    results = run_ranks(num_ranks, lambda rank: train_rank(directory, config))
    assert_equal_pieces(directory, train_reference(make_model(), num_units), results)


def test_the_mean_over_units(tmp_path):
    directory = compiled(tmp_path)
    config = {"plan_ngpus": 2, "runtime_ngpus": 4, "grad_reduction": "mean"}
    results = run_ranks(4, lambda rank: train_rank(directory, config))
    assert_equal_pieces(directory, train_reference(make_model(), 2, mean=True), results)


def test_without_a_config_the_one_it_was_compiled_with_holds(tmp_path):
    config = {
        "plan_ngpus": 2,
        "runtime_ngpus": 4,
        "grad_reduction": "mean",
        "use_async_reducer": True,
    }
    directory = write_files(
        tmp_path, make_model(), config={**config, "reducer_bucket_cap_mb": 1e-4}
    )

    def train(rank):
        reducer = build_optimizer(load_class(directory)(), adamw)._reducer
        return train_rank(directory, None), reducer.asynchronous, len(reducer.buckets)

    results = run_ranks(4, train)
    assert_equal_pieces(
        directory, train_reference(make_model(), 2, mean=True), [result for result, _, _ in results]
    )
    assert all(asynchronous and num_buckets > 2 for _, asynchronous, num_buckets in results)


@pytest.mark.parametrize("cap_mb", [1e-6, 1e-4, 100])
def test_bucket_sizes_do_not_matter(tmp_path, cap_mb):
    directory = compiled(tmp_path)
    config = {
        "plan_ngpus": 2,
        "runtime_ngpus": 4,
        "reducer_bucket_cap_mb": cap_mb,
        "use_async_reducer": True,
    }
    results = run_ranks(4, lambda rank: train_rank(directory, config))
    assert_equal_pieces(directory, train_reference(make_model(), 2), results)


@pytest.mark.parametrize("num_units", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_on_processes(tmp_path, num_units):
    directory = compiled(tmp_path)
    config = {"plan_ngpus": 2, "runtime_ngpus": 2 * num_units, "use_async_reducer": True}
    results = run_processes(2 * num_units, "mlp_training:train_rank", str(directory), config)
    assert_equal_pieces(directory, train_reference(make_model(), num_units), results)


@pytest.mark.parametrize("overlap", [False, True])
def test_compiled_parts_inside_an_ordinary_module(tmp_path, overlap):
    directory, num_units = compiled(tmp_path), 2
    reference = Mixed(make_model)
    optimizer = adamw(reference.parameters())
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        sum(reference(*make_batch(10 * step + unit)) for unit in range(num_units)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        optimizer.step()

    def train(rank):
        model = Mixed(load_class(directory))
        config = {"plan_ngpus": 2, "runtime_ngpus": 4, "use_async_reducer": overlap}
        optimizer = build_optimizer(model, torch.optim.AdamW, config, **ADAMW)
        for step in range(3):
            optimizer.zero_grad()
            model(*make_batch(10 * step + rank // 2)).backward()
            torch.testing.assert_close(optimizer.clip_gnorm(1.0), norms[step], rtol=1e-12, atol=0)
            optimizer.step()
        assert model.unused.weight.grad is None
        return {name: p.detach() for name, p in model.named_parameters()}

    for rank, parameters in enumerate(run_ranks(4, train)):
        for name, expected in reference.named_parameters():
            if name.endswith(("layers.0.weight", "layers.0.bias")):
                expected = expected.chunk(2)[rank % 2]
            elif name.endswith("layers.1.weight"):
                expected = expected.chunk(2, 1)[rank % 2]
            torch.testing.assert_close(
                parameters[name], expected.detach(), rtol=1e-12, atol=1e-13, msg=name
            )


def test_an_ordinary_module_alone():
    def train(rank):
        model = torch.nn.Linear(3, 2).double()
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
        x = torch.arange(3.0, dtype=torch.float64) + rank
        model(x).sum().backward()
        optimizer.step()
        return model.weight.grad, model.weight.detach()

    for gradient, weight in run_ranks(2, train):
        assert torch.equal(gradient, torch.tensor([[1.0, 3.0, 5.0]] * 2, dtype=torch.float64))
        torch.testing.assert_close(weight, 1 - 0.1 * gradient)


def test_a_parameter_that_only_one_unit_uses_steps_on_both():
    def train(rank):
        model = torch.nn.ModuleDict(
            {name: torch.nn.Linear(2, 1, bias=False).double() for name in ("a", "b", "c")}
        )
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1)
        optimizer = build_optimizer(model, torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        x = torch.ones(2, dtype=torch.float64)
        (model["a"](x) + (model["b"](x) if rank == 0 else 0)).sum().backward()
        optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}, model[
            "c"
        ].weight.grad

    (first, grad_0), (second, grad_1) = run_ranks(2, train)
    assert grad_0 is grad_1 is None
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
    assert torch.equal(first["c.weight"], torch.ones(1, 2, dtype=torch.float64)), (
        "nobody used it: not even weight decay"
    )
    assert not torch.equal(first["b.weight"], first["c.weight"])


def test_several_backwards_add_up(tmp_path):
    directory = compiled(tmp_path)

    def gradients(rank, overlap, hold):
        module = load_class(directory)()
        optimizer = build_optimizer(
            module, adamw, {"plan_ngpus": 2, "runtime_ngpus": 4, "use_async_reducer": overlap}
        )
        for index in range(3):
            if hold and index < 2:
                with optimizer.no_sync():
                    module(*make_batch(index + 10 * module.ranks.unit)).backward()
            else:
                module(*make_batch(index + 10 * module.ranks.unit)).backward()
        optimizer.sync_shard_grad()
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    plain = run_ranks(4, gradients, False, False)
    assert all(len(g) == 7 for g in plain)
    for other in (run_ranks(4, gradients, True, True), run_ranks(4, gradients, False, True)):
        for mine, theirs in zip(plain, other, strict=True):
            for name, gradient in mine.items():
                torch.testing.assert_close(gradient, theirs[name], rtol=1e-13, atol=1e-14)


# ------------------------------------------------------------------------------------------------
# the object users hold


def test_it_is_the_users_optimizer(tmp_path):
    module = load_class(compiled(tmp_path, 1, 1))()
    optimizer = build_optimizer(module, torch.optim.AdamW, lr=0.1)
    assert isinstance(optimizer, torch.optim.AdamW) and isinstance(optimizer, ParallelOptimizer)
    assert type(optimizer).__name__ == "ParallelAdamW"
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in module.parameters()
    ]
    assert (
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step.__func__
        is torch.optim.AdamW.step
    )

    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(opt))
    for _ in range(2):
        optimizer.zero_grad()
        module(*make_batch(0)).backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025 and calls == [optimizer, optimizer]

    state = optimizer.state_dict()
    assert state["state"].keys() == set(range(1, 8)), (
        "numbered like the original's parameters; `gain` is frozen"
    )
    other = build_optimizer(load_class(compiled(tmp_path, 1, 1))(), torch.optim.AdamW, lr=0.3)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.025
    other.register_step_pre_hook(lambda opt, args, kwargs: calls.append(opt))
    other.step()
    assert calls == [optimizer, optimizer, other], (
        "loading a state dict must not make hooks run twice"
    )


def test_each_step_is_a_new_moment_for_random_numbers(tmp_path):
    module = load_class(compiled(tmp_path, 1, 1))()
    optimizer = build_optimizer(module, adamw)
    module(*make_batch(0)).backward()
    assert module.rng.moment == (0, 1)
    optimizer.step()
    assert module.rng.moment == (1, 0)


def test_a_closure_is_synchronised_each_time(tmp_path):
    directory = compiled(tmp_path)

    def train(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.01)

        def closure():
            optimizer.zero_grad()
            loss = module(*make_batch(module.ranks.unit))
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        return losses, module.layers[1].bias.detach()

    reference = make_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    expected = []
    for _ in range(2):
        optimizer.zero_grad()
        losses = [reference(*make_batch(unit)) for unit in range(2)]
        sum(losses).backward()
        optimizer.step()
        expected.append(sum(losses).item())
    for losses, bias in run_ranks(4, train):
        assert losses == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(bias, reference.layers[1].bias.detach(), rtol=1e-12, atol=1e-14)


def test_lbfgs_works_where_nothing_is_cut(tmp_path):
    directory = compiled(tmp_path, 1, 1)

    def train(rank):
        module = load_class(directory)()
        optimizer = build_optimizer(
            module, torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
        )

        def closure():
            optimizer.zero_grad()
            loss = module(*make_batch(rank))
            loss.backward()
            return loss

        optimizer.step(closure)
        return module.layers[0].weight.detach().clone()

    first, second = run_ranks(2, train)
    assert torch.equal(first, second)

    reference = make_model()
    optimizer = torch.optim.LBFGS(
        reference.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = sum(reference(*make_batch(unit)) for unit in range(2))
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(first, reference.layers[0].weight.detach(), rtol=1e-10, atol=1e-12)


def test_groups_by_name(tmp_path):
    module = load_class(compiled(tmp_path, 1, 1))()
    optimizer = build_optimizer(
        module,
        torch.optim.AdamW,
        param_groups=lambda fqn, p: (
            {"weight_decay": 0.0} if p.ndim < 2 else {"lr": 0.5, "weight_decay": 0.2}
        ),
        lr=0.1,
    )
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [
        ([names[id(p)] for p in g["params"]], g["lr"], g["weight_decay"])
        for g in optimizer.param_groups
    ]
    assert groups == [
        (
            ["gain", "norm.weight", "layers.0.bias", "layers.1.bias", "mesh.weight", "head.bias"],
            0.1,
            0.0,
        ),
        (["layers.0.weight", "layers.1.weight"], 0.5, 0.2),
    ]


def test_scaling_only_after_synchronising(tmp_path):
    module = load_class(compiled(tmp_path, 1, 1))()
    optimizer = build_optimizer(module, adamw)
    module(*make_batch(0)).backward()
    with pytest.raises(UsageError) as error:
        optimizer.scale_grads(0.5)
    assert text_of(error) == (
        "scale_grads() was called before the gradients were synchronised\n"
        "  why:   what the other ranks add would not be scaled\n"
        "  try:   call optimizer.sync_shard_grad() first"
    )
    before = module.layers[0].weight.grad.clone()
    optimizer.sync_shard_grad()
    optimizer.scale_grads(0.5)
    assert torch.equal(module.layers[0].weight.grad, before / 2)


def test_the_norm_alone_clips_nothing(tmp_path):
    module = load_class(compiled(tmp_path, 1, 1))()
    optimizer = build_optimizer(module, adamw)
    module(*make_batch(0)).backward()
    before = module.layers[0].weight.grad.clone()
    norm = optimizer.clip_gnorm()
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9))
    assert torch.equal(module.layers[0].weight.grad, before)


def test_a_new_optimizer_replaces_the_old_one(tmp_path):
    directory = compiled(tmp_path)

    def train(rank):
        module = load_class(directory)()
        old = build_optimizer(module, adamw)
        new = build_optimizer(module, adamw)
        module(*make_batch(0)).backward()
        with pytest.raises(UsageError, match="this optimizer was replaced"):
            old.step()
        new.sync_shard_grad()
        return module.norm.weight.grad

    reference = make_model()
    (2 * reference(*make_batch(0))).backward()
    for gradient in run_ranks(4, train):
        torch.testing.assert_close(gradient, reference.norm.weight.grad, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------------
# refusals


def test_ordinary_parameters_that_start_differently():
    def train(rank):
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, rank == 1)
        torch.nn.init.zeros_(model.bias)
        build_optimizer(model, torch.optim.SGD, lr=0.1).step()

    with pytest.raises(UsageError) as error:
        run_ranks(3, train)
    assert text_of(error) == (
        "parameter 'weight' does not start with the same values everywhere\n"
        "  why:   these ranks agree with each other: 0, 2; 1\n"
        "  try:   seed all ranks alike before making the module, or call "
        "broadcast_weights(module, 1) before the first step"
    )


def test_units_that_start_differently(tmp_path):
    directory = compiled(tmp_path)

    def train(rank):
        module = load_class(directory)()
        with torch.no_grad():
            module.layers[0].weight.add_(rank == 3)
        optimizer = build_optimizer(module, adamw)
        module(*make_batch(0)).backward()
        with pytest.raises(UsageError) as error:
            optimizer.step()
        return text_of(error)

    for text in run_ranks(4, train):
        assert "parameter 'layers.0.weight' does not start with the same values everywhere" in text
        assert (
            "these ranks agree with each other: 1; 3" in text
            and "broadcast_weights(module, 2)" in text
        )


def refused(fn, *args, error=ConfigError, **kwargs):
    with pytest.raises(error) as caught:
        fn(*args, **kwargs)
    return str(caught.value)


def test_groups_cannot_be_added_later(tmp_path):
    optimizer = build_optimizer(load_class(compiled(tmp_path, 1, 1))(), adamw)
    text = refused(
        optimizer.add_param_group,
        {"params": [torch.zeros(1, requires_grad=True)]},
        error=UsageError,
    )
    assert text == (
        "parameters cannot be added to an optimizer made by build_optimizer\n"
        "  try:   pass param_groups=fn(fqn, parameter) -> options to build_optimizer, or "
        "build a new optimizer"
    )


def test_what_is_no_optimizer():
    model = torch.nn.Linear(1, 1)
    assert "it returned a list" in refused(build_optimizer, model, list)
    foreign = torch.nn.Parameter(torch.zeros(3))
    text = refused(build_optimizer, model, lambda params: torch.optim.SGD([foreign], lr=1))
    assert (
        "updates parameters that the module does not have" in text
        and "1 of them, the first of shape [3]" in text
    )


def test_a_config_of_another_run(tmp_path):
    module = load_class(compiled(tmp_path, 1, 1))()
    text = refused(build_optimizer, module, adamw, {"plan_ngpus": 1, "runtime_ngpus": 2})
    assert text == (
        "compute_config does not describe this run\n"
        "  why:   it has plan_ngpus=1 and runtime_ngpus=2; units have 1 rank(s) here and 1 "
        "are running\n"
        "  try:   pass the config that the module was compiled with, or leave it out"
    )


def test_a_config_that_contradicts_the_compiled_one(tmp_path):
    config = {"plan_ngpus": 1, "runtime_ngpus": 1}
    module = load_class(
        write_files(tmp_path, make_model(), 1, 1, {**config, "grad_reduction": "mean"})
    )()
    build_optimizer(module, adamw, {**config, "grad_reduction": "mean"})
    assert refused(build_optimizer, module, adamw, config) == (
        "compute_config has grad_reduction='sum', but MLP was compiled with 'mean'\n"
        "  try:   leave compute_config out, or compile again with the same one"
    )


def test_a_config_that_leaves_the_stage_to_a_plan_that_is_not_there():
    config = {"plan_ngpus": 1, "runtime_ngpus": 1, "use_zero": "auto"}
    assert refused(build_optimizer, make_model(), adamw, config) == (
        "use_zero='auto' leaves the stage of ZeRO to a plan, and there is none\n"
        "  why:   no part of the module was compiled\n"
        "  try:   name a stage, use_zero=0 to 3"
    )


def test_parts_compiled_with_different_settings(tmp_path):
    config = {"plan_ngpus": 1, "runtime_ngpus": 1}
    one = write_files(tmp_path / "one", make_model(), 1, 1, config)
    two = write_files(tmp_path / "two", make_model(), 1, 1, {**config, "reducer_bucket_cap_mb": 25})
    model = torch.nn.ModuleList([load_class(one)(), load_class(two)()])
    assert refused(build_optimizer, model, adamw) == (
        "the compiled modules disagree on reducer_bucket_cap_mb\n"
        "  why:   MLP is compiled with None, MLP is compiled with 25\n"
        "  try:   compile all of them with one reducer_bucket_cap_mb: their gradients are "
        "reduced together"
    )


def test_a_module_compiled_for_inference(tmp_path):
    config = {"plan_ngpus": 1, "runtime_ngpus": 1, "inference_only": True}
    module = load_class(write_files(tmp_path, make_model(), 1, 1, config))()
    assert refused(build_optimizer, module, adamw) == (
        "MLP was compiled for inference and cannot be trained\n"
        "  why:   it has inference_only=True: no backward was made, and its parameters get "
        "no gradients\n"
        "  try:   compile it without inference_only"
    )


@pytest.mark.parametrize("num_units", [1, 2])
def test_a_parameter_that_was_frozen_since_the_module_was_compiled(tmp_path, num_units):
    directory = compiled(tmp_path, 1, num_units)

    def build(rank):
        module = load_class(directory)()
        module.layers[0].bias.requires_grad_(False)
        with pytest.raises(InputError, match="'layers.0.bias' of MLP is frozen, but was trained"):
            build_optimizer(module, adamw)

    run_ranks(num_units, build)


def test_parts_compiled_for_different_units(tmp_path):
    one, two = compiled(tmp_path, 1, 1), compiled(tmp_path, 1, 2)

    def build(rank):
        model = torch.nn.ModuleList([load_class(one)(), load_class(two)()])
        return refused(build_optimizer, model, adamw)

    assert (
        "the compiled modules disagree on the number of ranks in a unit" in run_ranks(2, build)[0]
    )
