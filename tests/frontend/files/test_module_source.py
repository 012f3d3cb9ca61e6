"""Where the module comes from: objects, classes, meta models, other dtypes."""

import pytest
import torch
from torch import nn

from shardwright.frontend.files.module_source import ModuleSource, in_dtype
from shardwright.runtime.errors import ConfigError


class Rotary(nn.Module):
    """Parameters, a table that is not saved, a mask, a plain tensor attribute, and a tied
    weight.
    """

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, size)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer(
            "inv_freq", 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size), persistent=False
        )
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.scale = torch.tensor(0.5)


def on_meta():
    with torch.device("meta"):
        return Rotary()


def check_real_tables(module):
    real = Rotary()
    assert (
        module.embed.weight.is_meta
        and module.head.weight is module.embed.weight
        and module.norm.weight.is_meta
    )
    assert torch.equal(module.inv_freq, real.inv_freq)
    assert torch.equal(module.mask, real.mask)
    assert torch.equal(module.scale, real.scale)


def test_a_meta_models_tables_are_real():
    check_real_tables(ModuleSource.of(Rotary, on_meta).make())


def test_tables_are_real_too_where_the_caller_set_the_device():
    with torch.device("meta"):
        module = ModuleSource.of(Rotary, None).make()
    check_real_tables(module)


def test_a_real_model_is_made_as_it_is():
    module = ModuleSource.of(Rotary, lambda: Rotary(4)).make()
    assert not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    assert module.embed.embedding_dim == 4
    given = Rotary()
    assert ModuleSource.of(given, None).make() is given


def refusal(act):
    with pytest.raises(ConfigError) as caught:
        act()
    return str(caught.value)


def test_refusals():
    assert refusal(lambda: ModuleSource.of(3, None)) == (
        "parallelize takes a torch.nn.Module, or a class of one\n  why:   it was given 3"
    )
    assert refusal(lambda: ModuleSource.of(Rotary(), Rotary)) == (
        "module_fn is for a module class\n"
        "  why:   a Rotary object was given, so there is nothing to make\n"
        "  try:   pass the class Rotary, or leave out module_fn"
    )
    assert refusal(lambda: ModuleSource.of(nn.Linear, None).make()) == (
        "Linear cannot be made without arguments\n"
        "  why:   missing a required argument: 'in_features'\n"
        "  try:   pass module_fn, a function without arguments that makes it"
    )
    assert refusal(lambda: ModuleSource.of(nn.Linear, Rotary).make()) == (
        "module_fn does not make a Linear\n"
        "  why:   it returned a Rotary\n"
        "  try:   the class given is the class of what module_fn returns"
    )


def test_modules_that_are_no_longer_plain():
    assert refusal(lambda: ModuleSource.of(nn.DataParallel(Rotary()), None)) == (
        "parallelize was given a module inside DataParallel\n"
        "  why:   both would copy the module and reduce its gradients\n"
        "  try:   pass the module inside, model.module; runtime_ngpus says how many copies "
        "there are"
    )
    assert refusal(
        lambda: ModuleSource.of(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), None)
    ) == (
        "parallelize was given a TorchScript module\n"
        "  why:   a scripted module runs no Python, and tracing follows Python\n"
        "  try:   pass the module as it was before torch.jit.script or torch.jit.trace"
    )


def test_an_error_inside_the_users_constructor_is_the_users():
    class Broken(nn.Module):
        def __init__(self):
            len(3)

    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        ModuleSource.of(Broken, None).make()


def test_another_dtype_for_a_while():
    module = Rotary()
    before = dict([*module.named_parameters(), *module.named_buffers()])
    module.embed.weight.requires_grad_(False)
    with in_dtype(module, torch.bfloat16):
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
        assert module.embed.weight.is_meta and module.head.weight is module.embed.weight
        assert not module.embed.weight.requires_grad and module.norm.weight.requires_grad
        assert module.inv_freq.dtype == torch.bfloat16 and not module.inv_freq.is_meta
        assert module.mask is before["mask"]
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert all(after[name] is before[name] for name in before)


def test_the_module_is_restored_after_an_error():
    module = Rotary()
    weight = module.embed.weight
    with pytest.raises(ValueError), in_dtype(module, torch.float16):
        raise ValueError
    assert module.embed.weight is weight
    with in_dtype(module, None):
        assert module.embed.weight is weight
