"""Operators that compute each element of the result from the elements at the same place, after
broadcasting.

Every dim is free. An operand of size 1 in a dim of the result lacks its factor: when the dim is
split, the operand is whole on each rank and its gradient is a sum. Comparisons, rounding and logic
have no linear set and no gradient.
"""

from __future__ import annotations

import torch

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.aliases import (
    callables,
    functions,
    getter,
    rewriting,
    swapped,
    through,
    without,
)
from shardwright.compiler.ops.definitions import define
from shardwright.compiler.ops.opdef import RuleMaker
from shardwright.compiler.ops.rule import OpRule
from shardwright.compiler.ops.rule_builder import RuleBuilder, broadcast, linear_sets


def pointwise(*joint: tuple[str, ...]) -> RuleMaker:
    """The rule maker of an operator that broadcasts its operands. ``joint``: groups of parameters
    in which it is linear.
    """

    def rule(op: IROp) -> OpRule:
        build = RuleBuilder()
        result = build.tensor(op.results[0].shape)
        operands = [broadcast(value.shape, result) for value in op.operands]
        return build.rule(operands, [result] * len(op.results), linear=linear_sets(op, *joint))

    return rule


NONLINEAR = pointwise()
LINEAR = pointwise(("input",))


def _divide(op: IROp) -> OpRule | str:
    return (NONLINEAR if op.has_arg("rounding_mode") else pointwise(("input",)))(op)


# ------------------------------------------------------------------------------------------------
# operator signs


def _sign(name: str, sign: str, rule: RuleMaker, signature: str, dunder: str, *others: str) -> None:
    """An operator with a sign of its own: functions, methods, and the special methods, reflected
    ones with swapped operands.
    """
    plain = callables(name, *others, f"__{dunder}__", f"__i{dunder}__")
    reflected = [method for method in callables(f"__r{dunder}__") if method not in plain]
    define(name, signature, sign, rule, *plain, *through(swapped, reflected))


_SUM = pointwise(("input", "other"))
_PRODUCT = pointwise(("input",), ("other",))

_sign("add", "+", _SUM, "input, other, *, alpha=1", "add")
_sign("sub", "-", _SUM, "input, other, *, alpha=1", "sub", "subtract")
_sign("mul", "*", _PRODUCT, "input, other", "mul", "multiply")
_sign(
    "div",
    "/",
    _divide,
    "input, other, *, rounding_mode=None",
    "truediv",
    "divide",
    "true_divide",
    "__div__",
    "__idiv__",
)
_sign("floor_divide", "//", NONLINEAR, "input, other", "floordiv")
_sign("remainder", "%", NONLINEAR, "input, other", "mod")
_sign("pow", "**", NONLINEAR, "input, exponent", "pow")
_sign("eq", "==", NONLINEAR, "input, other", "eq")
_sign("ne", "!=", NONLINEAR, "input, other", "ne", "not_equal")
_sign("lt", "<", NONLINEAR, "input, other", "lt", "less")
_sign("le", "<=", NONLINEAR, "input, other", "le", "less_equal")
_sign("gt", ">", NONLINEAR, "input, other", "gt", "greater")
_sign("ge", ">=", NONLINEAR, "input, other", "ge", "greater_equal")
_sign("bitwise_and", "&", NONLINEAR, "input, other", "and")
_sign("bitwise_or", "|", NONLINEAR, "input, other", "or")
_sign("bitwise_xor", "^", NONLINEAR, "input, other", "xor")
_sign("bitwise_left_shift", "<<", NONLINEAR, "input, other", "lshift")
_sign("bitwise_right_shift", ">>", NONLINEAR, "input, other", "rshift")
define("neg", "input", "-", LINEAR, *callables("neg", "negative", "__neg__"))
define("bitwise_not", "input", "~", NONLINEAR, *callables("bitwise_not", "__invert__"))
define("rsub", "input, other, *, alpha=1", "torch.rsub", _SUM, torch.rsub)

# -------------------------------------------------------------------------------------------------
# one operand

_UNARY = {
    # canonical name: other names
    "abs": ("absolute", "__abs__"),
    "acos": ("arccos",),
    "acosh": ("arccosh",),
    "angle": (),
    "asin": ("arcsin",),
    "asinh": ("arcsinh",),
    "atan": ("arctan",),
    "atanh": ("arctanh",),
    "ceil": (),
    "cos": (),
    "cosh": (),
    "digamma": ("psi",),
    "erf": (),
    "erfc": (),
    "erfinv": (),
    "exp": (),
    "exp2": (),
    "expm1": (),
    "floor": (),
    "frac": (),
    "i0": (),
    "isfinite": (),
    "isinf": (),
    "isnan": (),
    "isneginf": (),
    "isposinf": (),
    "isreal": (),
    "lgamma": ("gammaln",),
    "log": (),
    "log10": (),
    "log1p": (),
    "log2": (),
    "logical_not": (),
    "reciprocal": (),
    "rsqrt": (),
    "sgn": (),
    "sigmoid": ("expit",),
    "sign": (),
    "signbit": (),
    "sin": (),
    "sinc": (),
    "sinh": (),
    "sqrt": (),
    "square": (),
    "tan": (),
    "tanh": (),
    "trunc": ("fix",),
}
for _name, _others in _UNARY.items():
    define(_name, "input", f"torch.{_name}", NONLINEAR, *callables(_name, *_others))
for _name in (
    "bessel_j0",
    "bessel_j1",
    "entr",
    "erfcx",
    "i0e",
    "i1",
    "i1e",
    "log_ndtr",
    "ndtr",
    "ndtri",
):
    define(_name, "input", f"torch.special.{_name}", NONLINEAR, getattr(torch.special, _name))
for _name in ("deg2rad", "rad2deg", "positive", "conj_physical", "resolve_conj", "resolve_neg"):
    define(_name, "input", f"torch.{_name}", LINEAR, *callables(_name))
define("conj", "input", "torch.conj", LINEAR, *callables("conj"))
define("real", "input", "torch.real", LINEAR, *functions("real"), getter("real"))
define("imag", "input", "torch.imag", LINEAR, *functions("imag"), getter("imag"))
define("round", "input, *, decimals=0", "torch.round", NONLINEAR, *callables("round"))
define("logit", "input, eps=None", "torch.logit", NONLINEAR, *callables("logit"))
define(
    "nan_to_num",
    "input, nan=None, posinf=None, neginf=None",
    "torch.nan_to_num",
    NONLINEAR,
    *callables("nan_to_num"),
)
define(
    "polygamma", "n, input", "torch.polygamma", NONLINEAR, torch.polygamma, torch.special.polygamma
)

# -------------------------------------------------------------------------------------------------
# activations


def _activation(name: str, signature: str, *others: str) -> None:
    """An activation function; whether it may overwrite its input does not matter."""
    aliases = callables(name, *others)
    define(
        name,
        signature,
        f"F.{name}",
        NONLINEAR,
        *through(without("inplace", after=len(signature.split(","))), aliases),
    )


_activation("celu", "input, alpha=1.0")
_activation("elu", "input, alpha=1.0")
_activation("gelu", "input, *, approximate='none'")
_activation("hardshrink", "input, lambd=0.5")
_activation("hardsigmoid", "input")
_activation("hardswish", "input")
_activation("hardtanh", "input, min_val=-1.0, max_val=1.0")
_activation("leaky_relu", "input, negative_slope=0.01")
_activation("logsigmoid", "input", "log_sigmoid")
_activation("mish", "input")
_activation("relu", "input")
_activation("relu6", "input")
_activation("selu", "input")
_activation("silu", "input")
_activation("softplus", "input, beta=1, threshold=20")
_activation("softshrink", "input, lambd=0.5")
_activation("softsign", "input")
_activation("tanhshrink", "input")
_activation("threshold", "input, threshold, value")


def _prelu(op: IROp) -> OpRule:
    build = RuleBuilder()
    refs = build.tensor(op.results[0].shape)
    channels = refs[1] if len(refs) > 1 and op.operands[1].shape != (1,) else ()
    weight = (channels,) * op.operands[1].ndim
    return build.rule([refs, weight], [refs])


define("prelu", "input, weight", "F.prelu", _prelu, *callables("prelu"))

# -------------------------------------------------------------------------------------------------
# several operands

for _name, _others in {
    "atan2": ("arctan2",),
    "copysign": (),
    "float_power": (),
    "fmax": (),
    "fmin": (),
    "fmod": (),
    "gcd": (),
    "heaviside": (),
    "hypot": (),
    "lcm": (),
    "ldexp": (),
    "logaddexp": (),
    "logaddexp2": (),
    "logical_and": (),
    "logical_or": (),
    "logical_xor": (),
    "maximum": (),
    "minimum": (),
    "nextafter": (),
    "xlog1py": (),
    "xlogy": (),
    "zeta": (),
}.items():
    _module = "torch" if hasattr(torch, _name) else "torch.special"
    _second = {"heaviside": "values", "float_power": "exponent"}.get(_name, "other")
    define(_name, f"input, {_second}", f"{_module}.{_name}", NONLINEAR, *callables(_name, *_others))
define(
    "isclose",
    "input, other, rtol=1e-05, atol=1e-08, equal_nan=False",
    "torch.isclose",
    NONLINEAR,
    *callables("isclose"),
)
define("clamp", "input, min=None, max=None", "torch.clamp", NONLINEAR, *callables("clamp", "clip"))
define("clamp_min", "input, min", "torch.clamp_min", NONLINEAR, *callables("clamp_min"))
define("clamp_max", "input, max", "torch.clamp_max", NONLINEAR, *callables("clamp_max"))
define("lerp", "input, end, weight", "torch.lerp", pointwise(("input", "end")), *callables("lerp"))
define("complex", "real, imag", "torch.complex", pointwise(("real", "imag")), torch.complex)
# Its backward takes abs to be positive.
define("polar", "abs, angle", "torch.polar", NONLINEAR, torch.polar)
define(
    "addcmul",
    "input, tensor1, tensor2, *, value=1",
    "torch.addcmul",
    pointwise(("input", "tensor1"), ("input", "tensor2")),
    *callables("addcmul"),
)
define(
    "addcdiv",
    "input, tensor1, tensor2, *, value=1",
    "torch.addcdiv",
    pointwise(("input", "tensor1")),
    *callables("addcdiv"),
)
define(
    "where",
    "condition, input, other",
    "torch.where",
    pointwise(("input", "other")),
    torch.where,
    (
        torch.Tensor.where,
        rewriting(
            lambda self, condition, other: {"condition": condition, "input": self, "other": other}
        ),
    ),
)
define(
    "masked_fill",
    "input, mask, value",
    ".masked_fill",
    pointwise(("input", "value")),
    *callables("masked_fill"),
)
