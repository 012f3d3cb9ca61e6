"""Fourier transforms: linear, and whole along the dims that they transform."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.aliases import callables, without
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import (
    FROZEN,
    RuleBuilder,
    all_dims,
    linear_sets,
    whole_rule,
)


def _transform(op: IROp, dims: tuple[int, ...]) -> OpRule:
    """The dims transformed are whole before and after: their sizes may change. Kernels refuse empty
    tensors.
    """
    build = RuleBuilder()
    source = build.tensor(op.operands[0].shape, frozen=dims)
    result = tuple(
        build.dim(op.results[0].shape[dim], FROZEN) if dim in dims else refs
        for dim, refs in enumerate(source)
    )
    return replace(
        build.rule([source], [result], linear=linear_sets(op, ("input",))), nonempty=True
    )


def _one_dim(op: IROp) -> OpRule:
    return _transform(op, all_dims(op.arg("dim", -1), op.operands[0].ndim))


def _two_dims(op: IROp) -> OpRule:
    return _transform(op, all_dims(op.arg("dim", (-2, -1)), op.operands[0].ndim))


def _some_dims(op: IROp) -> OpRule:
    """The rule of a transform of all dims, or of the last ones if sizes are given without dims."""
    dim, sizes = op.arg("dim"), op.arg("s")
    if dim is None and isinstance(sizes, tuple | list):
        dim = tuple(range(-len(sizes), 0))
    return _transform(op, all_dims(dim, op.operands[0].ndim))


def _shift(op: IROp) -> OpRule:
    return _transform(op, all_dims(op.arg("dim"), op.operands[0].ndim))


_FFT, _OUT = torch.fft, without("out")
for _names, _arguments, _rule in (
    (("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"), "n=None, dim=-1, norm=None", _one_dim),
    (
        ("fft2", "ifft2", "rfft2", "irfft2", "hfft2", "ihfft2"),
        "s=None, dim=(-2, -1), norm=None",
        _two_dims,
    ),
    (
        ("fftn", "ifftn", "rfftn", "irfftn", "hfftn", "ihfftn"),
        "s=None, dim=None, norm=None",
        _some_dims,
    ),
    (("fftshift", "ifftshift"), "dim=None", _shift),
):
    for _name in _names:
        define(
            _name, f"input, {_arguments}", f"torch.fft.{_name}", _rule, (getattr(_FFT, _name), _OUT)
        )
for _name in ("fftfreq", "rfftfreq"):
    _other = without("out", "layout", "pin_memory", "requires_grad")
    define(
        _name,
        "n, d=1.0, *, dtype=None, device=None",
        f"torch.fft.{_name}",
        whole_rule,
        (getattr(_FFT, _name), _other),
    )


def _of_signals(op: IROp) -> OpRule:
    """``stft`` and ``istft``: signals are apart from each other, all of one signal is whole, and so
    is the window.
    """
    build = RuleBuilder()
    source, result = op.operands[0].shape, op.results[0].shape
    batched = len(source) == (2 if op.target == "stft" else 3)
    signals = (build.dim(source[0]),) if batched else ()
    operands = [
        (*signals, *build.whole(source[len(signals) :])),
        *(build.whole(value.shape) for value in op.operands[1:]),
    ]
    results = [(*signals, *build.whole(result[len(signals) :]))]
    return replace(build.rule(operands, results, linear=linear_sets(op, ("input",))), nonempty=True)


_FRAMES = "input, n_fft, hop_length=None, win_length=None, window=None, center=True"
define(
    "stft",
    f"{_FRAMES}, pad_mode='reflect', normalized=False, onesided=None, return_complex=None, "
    "align_to_window=None",
    "torch.stft",
    _of_signals,
    *callables("stft"),
)
define(
    "istft",
    f"{_FRAMES}, normalized=False, onesided=None, length=None, return_complex=False",
    "torch.istft",
    _of_signals,
    *callables("istft"),
)
