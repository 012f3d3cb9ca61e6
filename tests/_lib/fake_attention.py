"""What fake attention keeps of each row for its backward."""

import functools

import torch
from torch._subclasses import FakeTensorMode


@functools.cache
def rows_are_float32() -> bool:
    """Whether fake attention of float64 keeps float32 for each row, as that of torch 2.11 does. The
    real one keeps float64.
    """
    with FakeTensorMode():
        x = torch.empty(1, 1, 2, 4, dtype=torch.float64)
        _, rows = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)
    return rows.dtype == torch.float32
