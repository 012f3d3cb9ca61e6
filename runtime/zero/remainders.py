"""Remainders: the float32 master of a bfloat16 parameter as the parameter itself and 16 more bits.

A float32 number has the sign, the exponent and seven bits of the fraction of a bfloat16 number, and
16 bits more. Rounded to the nearest, the parameter is the upper half, or the upper half and one;
what is to be added to it to get the master back fits into 16 bits with a sign. That is exact for
all numbers but one case, the ties: of two parameters that are equally near, torch takes the even
one, and then an even parameter has more neighbours than 16 bits can tell apart. So ties are rounded
away from zero here, which is just as near. (NeMo's and Apex's optimizers call the option
``store_param_remainders``.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALF, NOT_A_NUMBER = 0x8000, 0x7FC00000


@dataclass(slots=True, eq=False)
class Remainder:
    """``low`` [elements], int16: what makes the master, with the parameter. ``is_current``: it does
    so now; while the optimizer steps, and between loading a master and the next step, the master
    lies in the shard's tensor instead.
    """

    low: Tensor
    is_current: bool = False

    def split(self, master: Tensor, high: Tensor) -> None:
        """Write a float32 ``master`` into ``high``, of bfloat16, and the remainder. Of NaN the
        payload is lost.
        """
        bits = master.view(torch.int32)
        bits = torch.where(master.isnan(), NOT_A_NUMBER, bits)
        self.low.copy_(bits.reshape(-1))  # of an integer that is too long the lower bits are kept
        high.view(torch.int16).copy_(bits.add_(HALF).bitwise_right_shift_(16).view(high.shape))

    def joined(self, high: Tensor) -> Tensor:
        """The float32 master, in the shape of ``high``."""
        bits = high.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        return bits.add_(self.low.view(bits.shape)).view(torch.float32)


def placeholder(like: Tensor) -> Tensor:
    """What stands for a master that is elsewhere: of its shape, but of one element, which is no
    number.
    """
    return like.new_full((), torch.nan).expand(like.shape)


def is_rounded(master: Tensor, parameter: Tensor) -> Tensor:
    """By element, whether ``parameter`` is ``master`` rounded to the nearest; at ties whichever
    way.
    """
    same = master.to(parameter.dtype) == parameter
    if master.dtype == torch.float32 and parameter.dtype == torch.bfloat16:
        away = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        Remainder(torch.empty(master.numel(), dtype=torch.int16, device=master.device)).split(
            master, away
        )
        same |= away == parameter
    return same
