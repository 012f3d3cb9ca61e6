"""Roles: which rank reads which samples, and which ranks read the same.

A **replica** is a copy of the model that is fed samples of its own: a unit of a plan, a
data-parallel rank of Megatron. Of each global batch every replica takes one piece. Within a replica
several ranks may read, and they need not read the same:

- tensor-parallel ranks are **twins**: they read the same samples, and nothing is sent;
- the first stage of a pipeline reads its inputs, the last one reads labels, others read nothing;
- where the plan cuts the batch or the sequence of an input before the model, each rank takes its
  **part**.

An example: data 2 x pipeline 2 x tensor 2, data outermost.

    rank  replica  reads           twins  saves
    0     0/2      all inputs      0, 1   yes
    1     0/2      all inputs      0, 1
    2     0/2      nothing
    3     0/2      nothing
    4     1/2      all inputs      4, 5   yes
    ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.data.cuts import Cut, EvenCut, LayoutCut, even_piece, is_cut
from shardwright.runtime.argument_kinds import is_path
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import COMPILE_AGAIN, ArgumentError, ConfigError, UsageError, brief
from shardwright.runtime.input_readers import InputReader
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.manifest import MANIFEST_FILE, Manifest
from shardwright.runtime.mesh import MOST_RANKS
from shardwright.runtime.module.declared_module import directory_of_class
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.mpu import MPU
from shardwright.runtime.ranks.role_table import RoleTable
from shardwright.runtime.ranks.world import current_world

ALL_INPUTS = ""
"""Stands for every input, where nobody says which there are."""


@dataclass(frozen=True)
class Role:
    """What one rank has to do with data.

    ``rank``: its number in the job. ``replica`` of ``num_replicas``: which piece of every global
    batch is its replica's. ``inputs``: the paths of the tensors that it reads; ``None`` stands for
    whatever there is, and no path for a rank that reads nothing. ``part``: ``(index, count)`` where
    ranks of a replica take parts of each microbatch. ``cuts``: how other dims of an input are cut,
    by path (``""``: of every input). ``twins``: the ranks that read the same, this one included.
    ``saves``: whether this rank saves the loader's state, if states are saved by replica.
    ``shapes``: by path, the shape of an input that the model was compiled for, of a replica's whole
    microbatch; ``None`` for a dim that may vary.
    """

    rank: int
    replica: int
    num_replicas: int
    inputs: tuple[str, ...] | None = None
    part: tuple[int, int] = (0, 1)
    cuts: Mapping[str, tuple[Cut, ...]] = field(default_factory=dict)
    twins: tuple[int, ...] = ()
    saves: bool = False
    shapes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)

    @property
    def reads(self) -> bool:
        """Whether the rank reads samples at all."""
        return self.inputs is None or bool(self.inputs)

    @property
    def data_rank(self) -> int:
        """The rank's number among those that read different samples."""
        return self.replica * self.part[1] + self.part[0]

    @property
    def data_size(self) -> int:
        """How many ranks read different samples."""
        return self.num_replicas * self.part[1]

    def reads_input(self, path: str) -> bool:
        """Whether the rank reads the input at ``path``."""
        return self.inputs is None or path in self.inputs

    def _identity(self) -> tuple[Any, ...]:
        """Equal for ranks that read the same."""
        cuts = tuple((path, tuple(map(str, cuts))) for path, cuts in sorted(self.cuts.items()))
        return self.replica, self.part, self.inputs, cuts


@dataclass(frozen=True)
class Roles:
    """The roles of all ranks of a job, and which of them this rank has.

    ``all``: by rank. ``rank``: this one's number. ``num_microbatches``: into how many microbatches
    a replica's piece of a global batch is cut, where the plan says so. ``takes_list``: the model
    takes lists of microbatches (``train_step``). ``microbatch``: the number of samples that the
    model was compiled for, where that is fixed. ``data_parallel_group``: the process group of this
    rank that a foreign ``mpu`` has.

    What is asked of a single role may be asked of this: ``roles.replica``, ``roles.reads``. ``str``
    gives a table of all ranks.
    """

    all: tuple[Role, ...]
    rank: int = 0
    num_microbatches: int | None = None
    takes_list: bool = False
    microbatch: int | None = None
    data_parallel_group: Any = field(default=None, compare=False)

    @property
    def mine(self) -> Role:
        """The role of this rank."""
        return self.all[self.rank]

    @property
    def replica(self) -> int:
        """See :class:`Role`."""
        return self.mine.replica

    @property
    def num_replicas(self) -> int:
        """See :class:`Role`."""
        return self.mine.num_replicas

    @property
    def reads(self) -> bool:
        """See :class:`Role`."""
        return self.mine.reads

    @property
    def inputs(self) -> tuple[str, ...] | None:
        """See :class:`Role`."""
        return self.mine.inputs

    @property
    def twins(self) -> tuple[int, ...]:
        """See :class:`Role`."""
        return self.mine.twins

    @property
    def saves(self) -> bool:
        """See :class:`Role`."""
        return self.mine.saves

    @checked
    def on(self, rank: int) -> Roles:
        """Look at the table from another rank."""
        if not 0 <= rank < len(self.all):
            raise ConfigError(
                f"there is no rank {rank}", why=f"the roles are those of {len(self.all)} ranks"
            )
        return replace(self, rank=rank)

    def data_groups(self) -> list[tuple[int, ...]]:
        """The groups of ranks that hold the same place in different replicas, each by the samples
        that they read, as process groups are made: in one order on all ranks.

        In the example above these are ``(0, 4)`` and ``(1, 5)``.
        """
        places: dict[Any, list[int]] = {}
        for role in sorted(self.all, key=lambda role: role.data_rank):
            if role.reads:
                index = role.twins.index(role.rank)
                cuts = tuple((p, tuple(map(str, c))) for p, c in sorted(role.cuts.items()))
                places.setdefault((role.inputs, cuts, index), []).append(role.rank)
        return [tuple(ranks) for ranks in places.values()]

    def data_group(self) -> tuple[int, ...] | None:
        """The group of :meth:`data_groups` that this rank is in; ``None`` if it reads nothing, or
        if the table is that of a foreign ``mpu``, which does not number the ranks of the job.
        """
        if self.data_parallel_group is not None:
            return None
        return next((ranks for ranks in self.data_groups() if self.mine.rank in ranks), None)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("rank", "replica", "reads", "takes", "twins", "saves")]
        rows += [_row(role) for role in self.all]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join(lines)


def _row(role: Role) -> tuple[str, ...]:
    if not role.reads:
        return str(role.rank), f"{role.replica}/{role.num_replicas}", "nothing", "", "", ""
    takes = [f"samples {role.part[0]}/{role.part[1]}"] if role.part[1] > 1 else []
    for path, cuts in role.cuts.items():
        takes += [f"{path} {cut}".strip() for cut in cuts]
    return (
        str(role.rank),
        f"{role.replica}/{role.num_replicas}",
        "all inputs" if role.inputs is None else ", ".join(role.inputs),
        "; ".join(takes) or "everything",
        ", ".join(map(str, role.twins)),
        "yes" if role.saves else "",
    )


@checked
def roles(
    source: Any = None,
    *,
    replica: int | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    num_ranks: int | None = None,
    cuts: Mapping[str, Sequence[Any]] | None = None,
) -> Roles:
    """Which rank reads what.

    ``source``: a :class:`~shardwright.ParallelModule`; a plan, with ``num_ranks``; the folder of a
    compiled module; a :class:`~shardwright.MPU`, or another object with the methods of Megatron's
    ``mpu``; or nothing, with ``replica`` and ``num_replicas``: data parallelism alone. ``rank``:
    which rank asks; the current one by default. ``num_ranks``: of the job; by default as many as
    there are, or one unit. ``cuts``: by path of an input, how its dims are cut
    (``{"input_ids": [EvenCut(1, 0, 2, "zigzag")]}``), where ``source`` does not say.

    Nothing is sent. Raises :class:`ConfigError` for numbers that do not fit, and
    :class:`UsageError` for a pipeline of which nobody has noted which stage reads what.
    """
    explicit = replica is not None or num_replicas is not None
    if source is not None and explicit:
        raise ConfigError(
            "roles are those of a plan, or explicit",
            why=f"replica={replica} and num_replicas={num_replicas} were given beside "
            f"{brief(source)}",
            hint="leave out replica and num_replicas",
        )
    if isinstance(source, Roles):
        return source
    # From the most explicit to what is told by its methods alone.
    if source is None:
        made = _explicit(replica, num_replicas)
    elif isinstance(source, ParallelModule):
        made = _of_module(source)
    elif isinstance(source, str | Path):
        made = _of_folder(Path(source), rank, num_ranks)
    elif isinstance(source, MPU):
        made = _of_table(source.table, _own_rank(rank, source.world.size))
    elif hasattr(source, "get_data_parallel_rank"):
        made = _of_mpu(source)
    elif isinstance(getattr(source, "mesh", None), Mesh) and hasattr(source, "stages"):
        made = _of_plan(source, rank, num_ranks)
    else:
        raise ArgumentError(
            f"roles cannot be read off {brief(source)}",
            why="it is neither a ParallelModule, a plan, a folder of a compiled module, nor an "
            "object with get_data_parallel_rank()",
            hint="data.roles(module), or data.roles(replica=0, num_replicas=2)",
        )
    return made if cuts is None else _with_cuts(made, cuts)


def _explicit(replica: int | None, num_replicas: int | None) -> Roles:
    if replica is None and num_replicas is None:
        world = current_world()
        replica, num_replicas = world.rank, world.size
    if replica is None or num_replicas is None or not 0 <= replica < num_replicas:
        raise ConfigError(
            f"there is no replica {replica} of {num_replicas}",
            why="replicas count from 0, and both numbers are needed",
            hint="data.roles(replica=0, num_replicas=2)",
        )
    if num_replicas > MOST_RANKS:
        raise ConfigError(
            f"num_replicas={brief(num_replicas)} is beyond all use",
            why=f"a job has at most {MOST_RANKS} ranks",
        )
    every = range(num_replicas)
    return Roles(tuple(Role(r, r, num_replicas, twins=(r,), saves=True) for r in every), replica)


def _with_cuts(made: Roles, cuts: Mapping[str, Sequence[Any]]) -> Roles:
    for path, listed in cuts.items():
        for cut in listed:
            if not isinstance(cut, EvenCut | LayoutCut):
                raise ConfigError(
                    f"the cut of {path!r} is {brief(cut)}", hint="write data.EvenCut(dim, index, n)"
                )
    mine = replace(made.mine, cuts={path: tuple(listed) for path, listed in cuts.items()})
    return replace(made, all=(*made.all[: made.rank], mine, *made.all[made.rank + 1 :]))


# An MPU: ours, Megatron's, OSLO's


def _of_table(table: RoleTable, rank: int) -> Roles:
    """The roles of all ranks of an MPU of ours, which knows the coordinates of everybody."""
    num_replicas = len(table.groups["data"][0])
    every = []
    for member in sorted(itertools.chain(*table.positions)):
        piece = (0, 1)  # a compiled model cuts positions itself, and takes whole samples
        if not table.takes_wholes:
            piece = table.index("context", member), len(table.groups["context"][0])
        role = _of_coordinates(
            member,
            table.index("data", member),
            num_replicas,
            is_first=member in table.first,
            is_last=member in table.last,
            tensor=table.index("tensor", member),
            context=piece,
        )
        every.append(role)
    # Twins are found within a replica: ranks of different replicas read different samples.
    replicas: dict[int, list[Role]] = {}
    for role in every:
        replicas.setdefault(role.replica, []).append(role)
    return Roles(tuple(_with_twins(role, replicas[role.replica]) for role in every), rank)


def _of_mpu(mpu: Any) -> Roles:
    """The role of this rank; the table has one row for each data-parallel rank, as a foreign
    ``mpu`` knows its own coordinates only.
    """
    replica = int(mpu.get_data_parallel_rank())
    num_replicas = int(mpu.get_data_parallel_world_size())
    if not 0 <= replica < num_replicas:
        raise ConfigError(
            f"the mpu says data-parallel rank {replica} of {num_replicas}",
            why="ranks count from 0",
            hint="give roles an mpu that is initialised",
        )
    # Megatron's name first, then DeepSpeed's shorter one.
    stages = _asked(mpu, "get_pipeline_model_parallel_world_size", 1) or _asked(
        mpu, "get_pipeline_parallel_world_size", 1
    )
    tensor = _asked(mpu, "get_tensor_model_parallel_rank", 0) or _asked(
        mpu, "get_tensor_parallel_rank", 0
    )
    mine = _of_coordinates(
        replica,
        replica,
        num_replicas,
        is_first=stages == 1 or _asked(mpu, "is_pipeline_first_stage", True),
        is_last=stages == 1 or _asked(mpu, "is_pipeline_last_stage", True),
        tensor=tensor,
        context=(
            _asked(mpu, "get_context_parallel_rank", 0),
            _asked(mpu, "get_context_parallel_world_size", 1),
        ),
    )
    every = (
        replace(mine, rank=r, replica=r, twins=(r,) if mine.reads else ())
        for r in range(num_replicas)
    )
    group = _asked(mpu, "get_data_parallel_group", None)
    return Roles(tuple(every), replica, data_parallel_group=group)


def _of_coordinates(
    rank: int,
    replica: int,
    num_replicas: int,
    *,
    is_first: bool,
    is_last: bool,
    tensor: int,
    context: tuple[int, int],
) -> Role:
    """The role of a rank, without its twins. The first and the last stage read. ``context``: which
    piece of each sequence it reads, of how many; they are dealt as balances causal attention.
    """
    # Which of the inputs these stages read is not known here: loaders give them all.
    reads = is_first or is_last
    index, count = context
    cuts: dict[str, tuple[Cut, ...]] = {}
    if count > 1:
        cuts[ALL_INPUTS] = (EvenCut(1, index, count, "zigzag"),)
    return Role(
        rank,
        replica,
        num_replicas,
        inputs=None if reads else (),
        cuts=cuts,
        # One rank of each replica saves the state of its loader.
        saves=is_first and tensor == 0 and index == 0,
    )


def _asked(mpu: Any, name: str, default: Any) -> Any:
    """What a method of the mpu says; not every mpu has every method."""
    method: Callable[[], Any] | None = getattr(mpu, name, None)
    return default if method is None else method()


# Plans, compiled modules and their folders


def _of_module(module: ParallelModule) -> Roles:
    manifest = Manifest.read(directory_of_class(type(module)))
    ranks = module.ranks
    made = _of_manifest(manifest, ranks.world.rank, ranks.world.size)
    # The file that runs knows it best: it may have been edited and accepted.
    return replace(made, num_microbatches=getattr(module, "num_microbatches", None))


def _of_folder(folder: Path, rank: int | None, num_ranks: int | None) -> Roles:
    if not is_path(folder) or not folder.is_dir():
        raise ConfigError(
            f"{brief(str(folder))} is no folder of a compiled module",
            why=f"such a folder has a {MANIFEST_FILE}",
            hint="give the folder that `shardwright compile` prints",
        )
    manifest = Manifest.read(folder)
    config = manifest.config
    if num_ranks is None:
        num_ranks = manifest.plan_ngpus if config is None else config.runtime_ngpus
    return _of_manifest(manifest, rank, num_ranks or manifest.plan_ngpus)


def _of_manifest(manifest: Manifest, rank: int | None, num_ranks: int) -> Roles:
    readers = manifest.inputs
    if readers is None:
        raise UsageError(
            f"nobody has noted which ranks read which inputs of {manifest.class_name}",
            why=f"its {MANIFEST_FILE} was written by an earlier version",
            hint=COMPILE_AGAIN,
        )
    made = _of_readers(readers, manifest.plan_ngpus, rank, num_ranks)
    config = manifest.config
    end2end = config is not None and bool(config.use_end2end)
    return replace(made, takes_list=end2end, microbatch=_samples(readers))


def _samples(readers: Sequence[InputReader]) -> int | None:
    """The samples of a microbatch, if the first dims of all inputs have one size that is fixed."""
    sizes = {reader.layout.shape[0] for reader in readers if reader.layout.dims}
    (size, *others) = sizes or {None}
    return size if type(size) is int and not others else None


def _of_plan(plan: Any, rank: int | None, num_ranks: int | None) -> Roles:
    """The roles of a plan that nobody has compiled. Which stage of a pipeline reads which input is
    known once the model is cut; the first and the last may read anything.
    """
    size = plan.mesh.size
    num_ranks = num_ranks or size
    if plan.stages:
        # Mostly tokens go into the first stage, and labels into the last one.
        places = [plan.stages[0], plan.stages[-1]]
        readers = []
        for path in plan.inputs or (ALL_INPUTS,):
            layout = plan.inputs.get(path, Layout(()))
            readers += [InputReader(path, stage.ranks, stage.mesh, layout) for stage in places]
    else:
        every = tuple(range(size))
        paths = plan.inputs or {ALL_INPUTS: Layout(())}
        readers = [InputReader(p, every, plan.mesh, layout) for p, layout in paths.items()]
    made = _of_readers(tuple(readers), size, rank, num_ranks, names_all=False)
    listed = bool(plan.stages)
    return replace(
        made, takes_list=listed, num_microbatches=plan.num_microbatches if listed else None
    )


def _of_readers(
    readers: Sequence[InputReader],
    unit_size: int,
    rank: int | None,
    num_ranks: int,
    *,
    names_all: bool = True,
) -> Roles:
    """The roles that follow from who reads what. ``names_all``: the readers name every input, so
    that a rank may be given no others.
    """
    if num_ranks % unit_size:
        raise ConfigError(
            f"{num_ranks} ranks do not divide into units of {unit_size}",
            why=f"the plan is for {unit_size} ranks, and a job has a multiple of that",
        )
    num_units = num_ranks // unit_size
    # All units are alike but for the samples that they take.
    members = [_member(readers, place, names_all=names_all) for place in range(unit_size)]
    every: list[Role] = []
    for unit in range(num_units):
        mine = [
            replace(role, rank=unit * unit_size + role.rank, replica=unit, num_replicas=num_units)
            for role in members
        ]
        every += [_with_twins(role, mine) for role in mine]
    return Roles(tuple(every), _own_rank(rank, num_ranks))


def _own_rank(rank: int | None, num_ranks: int) -> int:
    if rank is None:
        world = current_world()
        rank = world.rank if world.size == num_ranks else 0
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"there is no rank {rank} of {num_ranks}")
    return rank


def _member(readers: Sequence[InputReader], place: int, *, names_all: bool) -> Role:
    """The role of a unit rank, in unit 0, without its twins."""
    own = [reader for reader in readers if place in reader.ranks]
    paths = tuple(dict.fromkeys(reader.path for reader in own))
    part = _part(own, place)
    cuts: dict[str, tuple[Cut, ...]] = {}
    for reader in own:
        found = _cuts(reader, place, skip_batch=part[1] > 1)
        if found:
            cuts[reader.path] = found
    inputs = paths if names_all or not paths else None
    # The sizes of a plan that nobody has compiled are no promise yet.
    shapes = {r.path: _fixed_sizes(r.layout) for r in own} if names_all else {}
    return Role(place, 0, 1, inputs, part, cuts, shapes=shapes)


def _fixed_sizes(layout: Layout) -> tuple[int | None, ...]:
    return tuple(size if type(size) is int else None for size in layout.shape)


def _part(own: Sequence[InputReader], place: int) -> tuple[int, int]:
    """Which part of each microbatch a rank reads: where the first dim of all its inputs is cut
    alike, it need not read the samples of others.
    """
    parts = set()
    for reader in own:
        dims = reader.layout.dims
        at = reader.mesh.coords(reader.ranks.index(place))
        parts.add(even_piece(dims[0], reader.mesh, at) if dims else (0, 1))
    (part, *others) = parts or {(0, 1)}
    return (0, 1) if others or part is None else part


def _cuts(reader: InputReader, place: int, *, skip_batch: bool) -> tuple[Cut, ...]:
    coords = reader.mesh.coords(reader.ranks.index(place))
    return tuple(
        LayoutCut(dim, atoms, reader.mesh, tuple(coords.items()))
        for dim, atoms in enumerate(reader.layout.dims)
        if is_cut(atoms) and not (skip_batch and dim == 0)
    )


def _with_twins(role: Role, unit: Sequence[Role]) -> Role:
    if not role.reads:
        return role
    twins = tuple(other.rank for other in unit if other._identity() == role._identity())
    readers = [other.rank for other in unit if other.reads and other.part == role.part]
    return replace(role, twins=twins, saves=role.rank == min(readers))
