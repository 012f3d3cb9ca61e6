"""Remainders: the float32 master of a bfloat16 parameter as the parameter itself and 16 more bits.

A float32 number has the sign, the exponent and seven bits of the fraction of a bfloat16 number, and
16 bits more. The parameter is the master rounded to the nearest bfloat16: the upper half of its
bits, or the upper half plus one. So the difference between master and parameter, as integers, fits
into 16 bits with a sign.

Example: the master 0x3F80C000 has the halves 0x3F80 and 0xC000. The parameter is 0x3F81, as 0xC000
is more than half of 0x10000, and the remainder is 0xC000 - 0x10000 = -0x4000.

Ties need care. If the lower half is exactly 0x8000, two parameters are equally near, and torch
takes the even one. An even parameter would then belong to 65537 masters, one more than 16 bits can
tell apart. So ties are rounded away from zero here, which is just as near.

(NeMo's and Apex's optimizers call the option ``store_param_remainders``.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALF, NOT_A_NUMBER = 0x8000, 0x7FC00000


@dataclass(slots=True, eq=False)
class Remainder:
    """What a parameter lacks of its master.

    ``low``: int16 [elements]; the parameter's bits and these give the master. ``is_current``:
    whether they do so now. They do not while the optimizer steps, and between the loading of a
    master and the next step: there the master lies in the shard's tensor.
    """

    low: Tensor
    is_current: bool = False

    def split(self, master: Tensor, high: Tensor) -> None:
        """Write a float32 ``master`` into ``high``, which is bfloat16, and into the remainder. The
        payload of a NaN is lost.
        """
        bits = master.view(torch.int32)
        # All NaNs become one: adding to the bits of another one could make it infinity or zero.
        bits = torch.where(master.isnan(), NOT_A_NUMBER, bits)
        self.low.copy_(bits.reshape(-1))  # int32 to int16 keeps the lower bits
        # Adding half of the lower part carries into the upper half exactly when it must round up.
        high.view(torch.int16).copy_(bits.add_(HALF).bitwise_right_shift_(16).view(high.shape))

    def joined(self, high: Tensor) -> Tensor:
        """The float32 master, in the shape of ``high``."""
        bits = high.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        # ``low`` has a sign: where the parameter was rounded up, this takes the carry back.
        return bits.add_(self.low.view(bits.shape)).view(torch.float32)


def placeholder(like: Tensor) -> Tensor:
    """A tensor in the place of a master that is elsewhere: it has the master's shape, but only one
    element in memory, which is NaN.
    """
    return like.new_full((), torch.nan).expand(like.shape)


def is_rounded(master: Tensor, parameter: Tensor) -> Tensor:
    """Whether each element of ``parameter`` is ``master`` rounded to the nearest, ties in either
    direction.
    """
    same = master.to(parameter.dtype) == parameter
    if master.dtype == torch.float32 and parameter.dtype == torch.bfloat16:
        away = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        Remainder(torch.empty(master.numel(), dtype=torch.int16, device=master.device)).split(
            master, away
        )
        same |= away == parameter
    return same
