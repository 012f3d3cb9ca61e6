"""What a call of a compiled module is checked for besides its arguments (see
:mod:`shardwright.runtime.module.inputs`).

Devices and the ``requires_grad`` of the parameters at every call, equal values on the ranks of a
unit at the first one, and whether somebody sums the gradients with which parameters are updated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwright.runtime.errors import InputError, UsageError, format_error
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.module.compiled import CompiledModule
from shardwright.runtime.module.declarations import Declaration, DeclaredParameter
from shardwright.runtime.ranks.checksum import differing
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.training.reducer import Reducer


def check_devices(owner: str, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Refuse arguments, by path, that are on another device than the module. ``owner``: the class
    of the module.
    """
    for path, x in tensors.items():
        if x.device != device and x.ndim:  # operators take numbers from any device
            raise InputError(
                f"{owner}.forward: argument {path!r} is on {x.device}, but the module is on "
                f"{device}",
                hint=f"pass {path}.to(model.device)",
            )


def check_parameters(module: nn.Module, declared: Sequence[DeclaredParameter]) -> None:
    """Refuse parameters of ``module`` that others have put in the place of its own, and such that
    are trained now and were not when it was compiled, or the reverse.
    """
    for (scope, leaf), parameter, requires_grad in declared:
        if scope._parameters.get(leaf) is not parameter:
            _refuse_replaced(module, leaf, scope)
        if parameter.requires_grad is not requires_grad:
            _refuse_requires_grad(module, parameter)


def _refuse_replaced(module: nn.Module, leaf: str, scope: nn.Module) -> None:
    name = next(
        f"{path}.{leaf}" if path else leaf for path, part in module.named_modules() if part is scope
    )
    found = scope._parameters.get(leaf)
    raise UsageError(
        f"parameter {name!r} of {type(module).__name__} is not the one that the module was "
        "made with",
        why=f"a {type(found).__name__} lies in its place; gradients are summed for the parameter "
        "that was there"
        if found is not None
        else "somebody has taken it out; the program reads it",
        hint="write values into it, with torch.no_grad(): parameter.copy_(value), or load them "
        "with load_state_dict; evaluate "
        "other weights under torch.no_grad()",
    )


def check_reduced(module: CompiledModule, reducer: Reducer) -> None:
    """Refuse parameters of ``module`` that took the place of those whose gradients ``reducer``
    sums.
    """
    reduced = {id(parameter) for parameter in reducer.parameters}
    for declaration, parameter in module.trained_parameters():
        if id(parameter) not in reduced:
            raise UsageError(
                f"parameter {declaration.name!r} of {type(module).__name__} was replaced "
                "after its optimizer was built",
                why="the optimizer updates the parameter that was there, and gradients are "
                "summed for that one",
                hint="load without assign=True, or call build_optimizer after loading",
            )


def _refuse_requires_grad(module: nn.Module, parameter: nn.Parameter) -> None:
    name = next(name for name, other in module.named_parameters() if other is parameter)
    now, then = ("trained", "frozen") if parameter.requires_grad else ("frozen", "trained")
    raise InputError(
        f"parameter {name!r} of {type(module).__name__} is {now}, but was {then} when it was "
        "compiled",
        why="which gradients are communicated, and how, was decided then",
        hint=f"set its requires_grad back to {not parameter.requires_grad}, or set it on the "
        "original module and compile again",
    )


def compare_inputs(
    owner: str, tensors: Mapping[str, Tensor], unit: Communicator, num_units: int
) -> None:
    """Refuse arguments, by path, of which the ranks of a unit have different values. Collective."""
    found = differing(tensors, unit)
    if found is not None:
        name, alike = found
        raise InputError(
            f"{owner}.forward: argument {name!r} is not the same on all ranks of a unit",
            why="these ranks agree with each other: "
            + "; ".join(", ".join(map(str, ranks)) for ranks in alike),
            hint=f"give the {unit.size} ranks of a unit the same batch: shard the data over "
            f"{num_units} unit(s), by rank // {unit.size}",
        )


class StepsWithoutSums:
    """Notices parameters that change between calls though nobody has been asked to sum their
    gradients: an ordinary optimizer on ``parameters()`` steps along what this rank has of them.
    """

    def __init__(self, module: CompiledModule) -> None:
        summed = (d.name for d, _ in module.trained_parameters() if is_summed(d, module.ranks))
        # One parameter stands for all; None once there is nothing to notice.
        self._name = next(summed, None)
        self._version: int | None = None  # of that parameter, at the last call

    def forget(self) -> None:
        """Values have been loaded: they differ from those of the last call for a good reason."""
        self._version = None

    def check(self, module: CompiledModule) -> None:
        """Warn, once, if the parameter has changed since the last call."""
        if self._name is None:
            return
        # Torch counts writes to a tensor: an optimizer's step is one.
        name, before = self._name, self._version
        self._version = module[name]._version
        if before in (None, self._version):
            return
        # Said once, and by one rank.
        self._name = None
        if module.ranks.rank == module.ranks.unit == 0:
            warnings.warn(
                format_error(
                    f"parameters of {type(module).__name__} have changed since it was "
                    "called, and nobody sums their gradients",
                    why=f"that of {name!r} is the sum of what several ranks compute, and no "
                    "optimizer was made by "
                    "build_optimizer",
                    hint="optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, "
                    "lr=...) in the place of your own",
                ),
                stacklevel=4,
            )


def is_summed(declaration: Declaration, ranks: RankMesh) -> bool:
    """Whether the gradient of a parameter is still to be summed over ranks when backward is
    done.
    """
    layout = declaration.layout
    return bool(layout.grad_partial) or (ranks.num_units > 1 and ZERO not in layout.cut_axes)
