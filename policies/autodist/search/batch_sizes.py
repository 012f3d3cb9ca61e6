"""The batch of a step as microbatches: which dims of the inputs count samples, and into how many
microbatches of which size a unit's share of the batch may be cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.check import input_paths, suggestion
from shardwright.compiler.plan.plan import Batch
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError

BATCH = "batch"
"""The name of the dim that counts samples, in the dims of the model and in ``dynamic_dims``."""

MOST_SIZES = 5
"""How many sizes of a microbatch are tried where none are named."""

MOST_OF_A_RANK = 16
"""The most samples of a microbatch for each rank of a unit, where none are named."""

HINT = (
    "name them: --batch-dims input_ids=0,labels=0 of a command, in Python "
    "batch_dims={'input_ids': 0, 'labels': 0}"
)


def batch_dims(graph: IRGraph, named: Mapping[str, int], config: ComputeConfig) -> dict[str, int]:
    """The dim of each input, by path, that counts samples: as ``named``, else as the config
    declares a dynamic dim of the name ``batch``, else the one kind of dim that the model calls so.

    Raises:
        ConfigError: inputs or dims that the model lacks; dims that disagree on the number of
            samples, or cannot be told.
    """
    values = input_paths(graph)
    declared = {
        path: dim
        for path, dims in config.dim_symbols().items()
        for dim, name in dims.items()
        if name == BATCH
    }
    # The first that says anything: the option, the config, the model's names.
    found = (
        dict(named)
        or {path: dim for path, dim in declared.items() if path in values}
        or _by_name(graph, values)
    )
    for path, dim in found.items():
        if path not in values:
            raise ConfigError(
                f"batch_dims names {path!r}, which is no input of the model",
                hint=suggestion(path, values),
            )
        if not 0 <= dim < values[path].ndim:
            raise ConfigError(
                f"batch_dims says dim {dim} of {path!r}",
                why=f"it has {values[path].ndim} dims, numbered from 0",
            )
    # All inputs have one number of samples.
    sizes = {path: values[path].shape[dim] for path, dim in found.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            "the inputs disagree on the number of samples",
            why=", ".join(
                f"dim {found[path]} of {path!r} has {size}" for path, size in sizes.items()
            ),
            hint=HINT,
        )
    _check_all(graph, found, values)
    return found


def check_can_be_told(
    shapes: Mapping[str, Sequence[int]], named: Mapping[str, int], config: ComputeConfig
) -> None:
    """Refuse arguments of one sample, before a model is traced, if nothing says which of their dims
    count samples. No model tells whether a dim of size 1 counts samples or something else.
    ``shapes``: the shapes of all tensors among the arguments, by path.

    Raises:
        ConfigError: the first dim of every tensor has size 1, and no dim is named.
    """
    symbols = [name for dims in config.dim_symbols().values() for name in dims.values()]
    if (
        named
        or BATCH in symbols
        or any(size != 1 for shape in shapes.values() for size in shape[:1])
    ):
        return
    dims = [path for path, shape in shapes.items() if shape]
    if not dims:
        return  # there is nothing to name
    options = ",".join(f"{path}=0" for path in dims)
    raise ConfigError(
        "it cannot be told which dims of the inputs count samples",
        why=", ".join(f"{path} is {list(shape)}" for path, shape in shapes.items())
        + ": dims of size 1 look alike",
        hint=f"dummy arguments of two samples or more, or name the dims: --batch-dims {options} of "
        f"a command, in Python batch_dims={dict.fromkeys(dims, 0)}",
    )


def _check_all(graph: IRGraph, found: Mapping[str, int], values: Mapping[str, IRValue]) -> None:
    """Refuse to leave out an input that has as many samples by what the model does with it: one of
    another size would broadcast, if it did not fail.
    """
    assert graph.dims is not None
    of_value = graph.dims.values
    kinds = {of_value[values[path].name][dim] for path, dim in found.items()} - {()}
    for path, value in values.items():
        for dim, indices in enumerate(of_value[value.name]):
            if indices in kinds and path not in found:
                raise ConfigError(
                    f"batch_dims leaves out {path!r}",
                    why=f"its dim {dim} is the same dim of the model as {_where(found)}",
                    hint=f"add {path}={dim} to --batch-dims of a command, in Python {path!r}: "
                    f"{dim}",
                )


def _by_name(graph: IRGraph, values: Mapping[str, IRValue]) -> dict[str, int]:
    assert graph.dims is not None
    dims = graph.dims
    # Kinds of dims of inputs; the batch is the one of that name.
    kinds: set[int] = set()
    for value in values.values():
        kinds.update(*dims.values[value.name])
    batch = tuple(index for index in kinds if dims.classes[index].name == BATCH)

    def batch_dims_of(value: IRValue) -> list[int]:
        return [dim for dim, kind in enumerate(dims.values[value.name]) if kind == batch]

    found = {path: batch_dims_of(value) for path, value in values.items()}
    if (
        len(batch) != 1
        or any(len(where) > 1 for where in found.values())
        or not any(found.values())
    ):
        raise ConfigError(
            "it cannot be told which dims of the inputs count samples",
            why=", ".join(
                f"{path} is {dims.describe(value.name)}" for path, value in values.items()
            ),
            hint=HINT,
        )
    return {path: where[0] for path, where in found.items() if where}


def num_samples(graph: IRGraph, dims: Mapping[str, int]) -> int:
    """How many samples the graph was traced for.

    Raises:
        ConfigError: their number is dynamic.
    """
    values = input_paths(graph)
    size = next(values[path].shape[dim] for path, dim in dims.items())
    if not isinstance(size, int):
        raise ConfigError(
            "global_batch needs a model that was traced for a number of samples",
            why=f"{', '.join(dims)} have the dynamic size {size} there, and what a microbatch of "
            "it costs is not known",
            hint=f"call it 'batch' in dynamic_dims, or {HINT}",
        )
    return size


def sizes_for(share: int, num_ranks: int) -> list[int]:
    """The sizes of a microbatch that are tried where none are named: some of those that divide a
    unit's ``share`` of the batch, from 1 to :data:`MOST_OF_A_RANK` for each of its ranks, evenly
    spread by ratio.

    Ranks that all split the batch take as many samples at a time as there are ranks, and those of a
    pipeline one. Example: ``1, 2, 4, 8, 16`` for one rank, ``1, 4, 16, 64, 256`` for 64 ranks and a
    batch of 256.
    """
    most = min(share, MOST_OF_A_RANK * num_ranks)
    possible = [size for size in range(1, most + 1) if share % size == 0]
    spread = [possible[-1] ** (step / (MOST_SIZES - 1)) for step in range(MOST_SIZES)]
    nearest = {min(possible, key=lambda size: abs(math.log(size / wanted))) for wanted in spread}
    return sorted(nearest)


def batches(
    config: ComputeConfig, global_batch: int, sizes: Sequence[int] | None, dims: Mapping[str, int]
) -> list[Batch]:
    """The ways to cut a unit's share of ``global_batch`` samples into microbatches of ``sizes``
    (``None``: :func:`sizes_for`).

    Raises:
        ConfigError: samples that cannot be dealt out evenly.
    """
    share, rest = divmod(global_batch, config.num_units)
    if global_batch < 1 or rest:
        raise ConfigError(
            f"a batch of {global_batch} samples cannot be dealt to {config.num_units} units",
            why=f"runtime_ngpus={config.runtime_ngpus}, plan_ngpus={config.plan_ngpus}, and "
            "units have as many samples each",
            hint=f"global_batch={max(1, global_batch // config.num_units) * config.num_units}",
        )
    # Sizes that the search picks itself fit by construction; the user's may not, and are not
    # dropped in silence.
    wanted = sizes_for(share, config.plan_ngpus) if sizes is None else sorted(sizes)
    unfit = [size for size in wanted if size < 1 or share % size]
    if unfit or not wanted or len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"option 'microbatch' of policy 'autodist' cannot be {list(sizes or ())!r}",
            why=f"a unit has {share} of the {global_batch} samples of a step, and the option "
            "lists sizes, each once, into "
            "which they can be cut",
            hint="some of "
            f"{', '.join(str(size) for size in range(1, share + 1) if share % size == 0)}",
        )
    return [Batch(size, share // size, dims) for size in wanted]


def sizes_by_unit(
    configs: Mapping[int, ComputeConfig], global_batch: int, sizes: Sequence[int]
) -> dict[int, list[int]]:
    """The sizes of a microbatch, of those that are named, for every size of a unit: those into
    which the samples of such a unit can be cut.

    Example: of 4, 8 and 16 for 64 samples on 16 ranks, 4 for units of one rank, which have 4
    samples each; 4 and 8 for units of two ranks.

    Raises:
        ConfigError: a size that fits no unit.
    """
    shares = {unit: global_batch // config.num_units for unit, config in configs.items()}
    fitting = {
        unit: [size for size in sizes if size >= 1 and share % size == 0]
        for unit, share in shares.items()
    }
    lost = [size for size in sizes if not any(size in fits for fits in fitting.values())]
    if lost or not sizes:
        units = ", ".join(f"{share} in units of {unit}" for unit, share in shares.items())
        raise ConfigError(
            f"option 'microbatch' of policy 'autodist' cannot be {list(sizes)!r}",
            why=f"a unit has these of the {global_batch} samples of a step: {units}; "
            f"{', '.join(map(str, lost)) or 'nothing'} divides none of them",
            hint=f"some of the sizes that divide {max(shares.values())}",
        )
    return fitting


def own_batch(
    graph: IRGraph,
    config: ComputeConfig,
    global_batch: int,
    sizes: Sequence[int] | None,
    named: Mapping[str, int],
) -> Batch:
    """The microbatches of the size that the graph was traced for.

    Raises:
        ConfigError: ``sizes`` names another one, the samples cannot be dealt out, or their dims
            cannot be told.
    """
    dims = batch_dims(graph, named, config)
    own = num_samples(graph, dims)
    if sizes is not None and tuple(sizes) != (own,):
        raise ConfigError(
            f"microbatch={list(sizes)} asks for other sizes than the one the model was traced for",
            why=f"the dummy arguments have {own} samples, by {_where(dims)}",
            hint="search with `shardwright plan` or shardwright.search_plan, which trace the "
            "model for every size",
        )
    return batches(config, global_batch, [own], dims)[0]


def _where(dims: Mapping[str, int]) -> str:
    return ", ".join(f"dim {dim} of {path!r}" for path, dim in dims.items())
