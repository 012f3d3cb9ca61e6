"""``verify --outside`` of a folder: the files of a compile under ``spmd_types``, without the model.

Nothing is compared with one device, as a folder has no model. All ranks run one step of the files,
with the weights that lie beside them, in the dtypes that they were compiled for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.frontend.files.further_programs import constants_of
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.verify import outside_certificate, samples_per_step
from shardwright.runtime.activity import activity
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.module.inputs import InputTable, TensorSpec

if TYPE_CHECKING:
    from shardwright.frontend.verification.outside.outside_run import OutsideReport

NOT_CHECKED = (
    "nothing is compared with one device, as a folder has no model: numbers, and the code of a "
    "backward, are not checked"
)
"""What is said beside the report of a folder."""


def check_files(directory: Path, args: Mapping[str, Any] | None = None) -> OutsideReport:
    """What ``spmd_types`` says of the files in ``directory``.

    ``args``: the arguments of ``forward``, as the module was compiled for. Without them tensors are
    made that have the shapes which the files state, integers of zeros.

    Raises :class:`LoadError` for files that cannot be loaded, or were edited and not accepted;
    :class:`ConfigError` if ``spmd_types`` is not installed, if no compile made the files, or if
    they do not say what their arguments are.
    """
    certify = outside_certificate()
    config = Manifest.read(directory).config
    if config is None:
        raise ConfigError(
            f"{directory} was made by no compile",
            why="its manifest has no config, which says how many ranks run the files",
            hint="name the folder that `shardwright compile` prints",
        )
    given = made_args(directory) if args is None else args
    constants = constants_of(directory)
    units = config.runtime_ngpus // config.plan_ngpus
    with activity("verifying"):
        samples = [
            [
                rolled(given, number * units + unit, constants)
                for number in range(samples_per_step(directory, config))
            ]
            for unit in range(units)
        ]
        return certify(directory, config, samples)


def made_args(directory: Path) -> dict[str, Any]:
    """Arguments like those that the files in ``directory`` were compiled for.

    Raises :class:`ConfigError` for what the files do not say enough of.
    """
    cls = load_class(directory, 0)
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Any] = {}
    for path, leaf in InputTable(cls.__name__, cls.inputs).leaves.items():
        why = ""
        if not path.isidentifier():
            why = "it lies inside another argument"
        elif isinstance(leaf, TensorSpec) and leaf.values is not None:
            why = "its values are compiled in"
        elif isinstance(leaf, TensorSpec) and not all(isinstance(n, int) for n in leaf.shape):
            why = f"its sizes may vary: {leaf}"
        if why:
            raise ConfigError(
                f"the files do not say what to give as {path}",
                why=why,
                hint="name a dict of arguments, or a function that makes it: --args MODULE:NAME",
            )
        made[path] = _made(leaf, generator) if isinstance(leaf, TensorSpec) else leaf
    return made


def _made(spec: TensorSpec, generator: torch.Generator) -> Tensor:
    """A tensor of this shape. Zeros are indices of whatever is looked up; a mask shows all."""
    shape = [int(size) for size in spec.shape]
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.rand(shape, generator=generator).to(spec.dtype)
    return torch.full(shape, spec.dtype is torch.bool, dtype=spec.dtype)
