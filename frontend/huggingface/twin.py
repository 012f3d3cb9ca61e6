"""The twin of a model: its modules and buffers, with parameters that have shapes and no values.

Programs for further kinds of calls are traced when such a call comes. By then the model holds this
rank's pieces, and a trace needs the shapes of the whole. The twin has them, and takes no memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.frontend.files.module_source import RealTables
from shardwright.runtime.errors import ConfigError


def twin_of(model: nn.Module) -> nn.Module:
    """The twin of a model. Both share their config, so what is changed there is seen by later
    traces.

    A model that lies on the meta device has no values in its tables (rotary frequencies, position
    ids), which no checkpoint holds either. Its twin is made anew from the config, with tables that
    are real: see [Note: meta modules] in ``frontend/files/module_source.py``.
    """
    if any(buffer.is_meta for buffer in model.buffers()):
        return _made_again(model)
    memo: dict[int, Any] = {id(model.config): model.config}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = _stand_in(tensor)
    return copy.deepcopy(model, memo)


def _stand_in(tensor: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(
            torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad
        )
    return tensor.detach().to("cpu", copy=True)


def _made_again(model: nn.Module) -> nn.Module:
    cls: Any = type(model)
    config: Any = model.config
    with RealTables(), torch.device("meta"):
        made: nn.Module = cls(config)
    theirs, ours = dict(model.named_parameters()), dict(made.named_parameters())
    if {name: p.shape for name, p in theirs.items()} != {name: p.shape for name, p in ours.items()}:
        different = sorted(theirs.keys() ^ ours.keys())
        raise ConfigError(
            f"{cls.__name__} on the meta device is not what its config makes",
            why=f"these parameters differ: {', '.join(different[:4])}"
            if different
            else "shapes of parameters differ",
            hint="change the config, and make the model of it under torch.device('meta')",
        )
    for name, parameter in ours.items():
        # In the dtype that the model was given, and frozen where it is.
        parameter.data = parameter.data.to(theirs[name].dtype)
        parameter.requires_grad_(theirs[name].requires_grad)
    return made.train(model.training)
