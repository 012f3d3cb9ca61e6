"""What is trained, and how its gradients lie on the ranks: the compiled and the ordinary parts of
one model.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import torch
from torch import Tensor, nn

from shardwright.runtime.bucket import Bucket, DtypeRule, GradientSum, hold_gradients_in, pack
from shardwright.runtime.config import CHECK_RANKS_EVERY, ComputeConfig
from shardwright.runtime.dealing import in_use_order
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.module.compiled import compiled_parts
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.world import current_world
from shardwright.runtime.training.agreement import TrainingAgreement
from shardwright.runtime.training.all_gradients import AllGradients
from shardwright.runtime.training.clipping import watch_clipping
from shardwright.runtime.training.copies import Copies
from shardwright.runtime.training.gradnorm import counts_here
from shardwright.runtime.training.reducer import Reducer
from shardwright.runtime.zero.build import sharded_buckets
from shardwright.runtime.zero.settings import ReductionSettings
from shardwright.runtime.zero.whole_tensors import CutParameter


class TrainedModel:
    """A module to be trained. Making one is collective: it makes the groups that gradients are
    summed over.

    ``parallel_modules``: the compiled parts. ``ranks``: this rank's place in the units. ``sums``:
    over which ranks each gradient is summed. ``cut``: the parameters of which this rank holds a
    piece only. ``settings``: how gradients are reduced, and optimizer state is split.

    The gradient of a compiled parameter is summed over the axes on which its layout is
    gradient-partial, over the pipeline stages that hold it, and over the units. Ordinary parts run
    alike on all ranks of a unit, so their gradients are summed over the units only.

    How gradients are reduced is what the compiled parts were compiled with, or what ``config`` says
    where there are none.

    Raises :class:`ConfigError` if the compiled parts, ``config`` and the world do not agree on the
    size of a unit or on how gradients are reduced, or if a part was compiled for inference.
    """

    gradients: AllGradients  # once there is a reducer
    agreement: TrainingAgreement

    def __init__(self, module: nn.Module, config: ComputeConfig | None) -> None:
        watch_clipping()
        self.world = current_world()
        # The same one may lie under two paths.
        parts = {id(part): part for part in compiled_parts(module).values()}
        self.parallel_modules = list(parts.values())
        self.ranks = self._unit(config)
        self._config = self._agreed(config)
        self.settings = ReductionSettings.of(self._config, self.ranks.num_units)
        self.sums: list[GradientSum] = []
        self.cut: list[CutParameter] = []
        self._ordinary: set[str] = set()
        self._copies = Copies(self.world)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        compiled = {
            id(parameter) for part in self.parallel_modules for parameter in part.parameters()
        }
        # Ordinary parts come first, so that their buckets are the last: backward reaches them
        # before and after the compiled ones, and a bucket that completes late must not hold up
        # others.
        for name, parameter in module.named_parameters():
            if id(parameter) not in compiled and parameter.requires_grad:
                layout = Layout.whole(tuple(parameter.shape))
                self._add(
                    name,
                    parameter,
                    layout,
                    self.ranks,
                    self.ranks.units.communicator,
                    counts_here(layout, self.ranks),
                )
                self._ordinary.add(name)
                everyone = range(self.world.size)
                self._copies.add(name, parameter, self.ranks.units.communicator, everyone)
        for part in self.parallel_modules:
            groups = part.gradient_groups()
            # Backward reaches last what forward uses first. What it never reaches must not hold up
            # others either.
            trained = list(part.trained_parameters())
            for index in in_use_order(
                [declaration.name for declaration, _ in trained], part.use_order
            ):
                declaration, parameter = trained[index]
                name, group = names[id(parameter)], groups[declaration.name]
                is_counted = part.is_counted(declaration)
                is_shared = declaration.name in part.shared
                layout, home = declaration.layout, part.ranks_of(declaration)
                self._add(name, parameter, layout, home, group, is_counted, is_shared)
                # Ranks that differ along an axis that cuts it hold pieces of their own.
                axes = [axis for axis in home.mesh.names if axis not in layout.cut_axes]
                holders = home.world_ranks(home.alike(home.coords, axes))
                self._copies.add(name, parameter, group, holders)

    def part_elsewhere(self) -> str | None:
        """One thing of the model that this rank does not have all of, in words, if there is any."""
        for item in self.cut:
            return f"{item.name!r} lies in pieces as {item.layout}"
        for part in self.parallel_modules:
            held = dict(part.named_parameters())
            for name in part.use_order:
                if name not in held:
                    return f"{name!r} is on other pipeline stages than rank {self.world.rank}"
        return None

    def check_copies(self) -> None:
        """Compare the trained parameters of which several ranks hold copies: ordinary ones on all
        ranks, compiled ones where units, pipeline stages, or the ranks along an axis hold the same.
        Collective.

        Raises :class:`UsageError` naming the parameter and the ranks: trained on, the copies would
        stay different.
        """
        found = self._copies.find_on_all_ranks()
        if found is not None:
            stride = 1 if found.name in self._ordinary else self.ranks.mesh.size
            raise UsageError(
                f"parameter {found.name!r} does not start with the same values everywhere",
                why=str(found),
                hint="seed all ranks alike before making the module, or call "
                f"broadcast_weights(module, {stride}) before the first step",
            )

    def total_loss(self, loss: Tensor | float, divisor: int) -> Tensor | float:
        """The sum over the units of each one's scalar loss, divided by ``divisor``. Collective."""
        if self.ranks.num_units == 1:
            return loss
        total = self.ranks.units.communicator.all_reduce(
            torch.as_tensor(loss, device=self.world.device), phase="gradients"
        )
        return total / divisor if isinstance(loss, Tensor) else float(total) / divisor

    def make_reducer(
        self, whole_parameters: bool | None = None, exchanged: Collection[str] = ()
    ) -> Reducer:
        """A reducer for all gradients. It takes the parameters over from reducers made earlier.
        Collective.

        ``whole_parameters``: where optimizer state is split, whether each parameter goes to one
        rank; ``None`` for a reducer without an optimizer, which gives all ranks all gradients, in
        the dtype of the parameters. ``exchanged``: names of parameters whose whole tensors the
        optimizer gets from several ranks.
        """
        # A parameter has one reducer: hooks of an older one would sum twice.
        for item in self.sums:
            older = getattr(item.parameter, _REDUCER, None)
            if older is not None:
                older.detach()
        settings = self.settings
        sharded = whole_parameters is not None and settings.makes_shards
        # Filled from the end, as backward does.
        # Gradients that are exchanged have buckets of their own.
        dtype_of: DtypeRule = settings.gradient_dtype if sharded else _unchanged
        packed = pack(
            list(reversed(self.sums)), settings.bucket_cap_bytes, dtype_of, apart=exchanged
        )
        buckets: list[Bucket]
        if sharded:
            owned = bool(whole_parameters)
            buckets = sharded_buckets(
                self.world, packed, settings, whole_parameters=owned, exchanged=exchanged
            )
        else:
            buckets = [Bucket(members) for members in packed]
        reducer = Reducer(
            buckets,
            divisor=settings.divisor,
            asynchronous=settings.asynchronous,
            frees_gradients=sharded and settings.frees_gradients,
            cause=settings.early_cause if sharded else "use_async_reducer",
        )
        # Every so many steps ranks compare what must be the same on all of them.
        interval = CHECK_RANKS_EVERY if self._config is None else self._config.check_ranks_every
        reducer.agreement = self.agreement = TrainingAgreement(
            self.world, self.parallel_modules, self._copies, interval
        )
        self.gradients = AllGradients(
            self.world, reducer, is_staged=any(part.is_staged for part in self.parallel_modules)
        )
        # Found again by the next reducer.
        for item in self.sums:
            setattr(item.parameter, _REDUCER, reducer)
        for part in self.parallel_modules:
            part.reducer = reducer
            for parameter in part.copied_parameters():  # as on the ranks that train them
                held = dtype_of if settings.contiguous_gradients else _unchanged
                hold_gradients_in(parameter, held(parameter.dtype))
                self.gradients.note_copy(parameter)
        return reducer

    def _add(
        self,
        name: str,
        parameter: nn.Parameter,
        layout: Layout,
        ranks: RankMesh,
        group: Communicator,
        is_counted: bool,
        is_shared: bool = False,
    ) -> None:
        largest = prod(layout.largest_shape(ranks.mesh))
        self.sums.append(
            GradientSum(name, parameter, group, largest, layout, is_counted, is_shared)
        )
        if any(ranks.mesh.axis_size(axis) > 1 for axis in layout.cut_axes):
            self.cut.append(CutParameter(name, parameter, layout, ranks, is_counted))

    def _agreed(self, config: ComputeConfig | None) -> ComputeConfig | None:
        """The config whose settings of the reducer hold, if there is any."""
        # Modules in one model were compiled with one set of settings, or contradict each other.
        configs = [(type(part).__name__, part.compute_config) for part in self.parallel_modules]
        known = [(title, compiled) for title, compiled in configs if compiled is not None]
        for title, compiled in known:
            if compiled.inference_only:
                raise ConfigError(
                    f"{title} was compiled for inference and cannot be trained",
                    why="it has inference_only=True: no backward was made, and its parameters "
                    "get no gradients",
                    hint="compile it without inference_only",
                )
        asked = config
        # ``use_zero="auto"`` means what the plan has chosen.
        if config is not None and config.leaves_zero_to_plan:
            if not known:
                raise ConfigError(
                    "use_zero='auto' leaves the stage of ZeRO to a plan, and there is none",
                    why="no part of the module was compiled",
                    hint="name a stage, use_zero=0 to 3",
                )
            asked = config.with_zero(known[0][1].zero_stage)
        for name in REDUCER_SETTINGS:
            values = {repr(getattr(compiled, name)): title for title, compiled in known}
            if len(values) > 1:
                raise ConfigError(
                    f"the compiled modules disagree on {name}",
                    why=", ".join(
                        f"{title} is compiled with {value}" for value, title in values.items()
                    ),
                    hint=f"compile all of them with one {name}: their gradients are reduced "
                    "together",
                )
            if asked is not None and known and getattr(asked, name) != getattr(known[0][1], name):
                raise ConfigError(
                    f"compute_config has {name}={getattr(asked, name)!r}, "
                    f"but {known[0][0]} was compiled with {getattr(known[0][1], name)!r}",
                    hint="leave compute_config out, or compile again with the same one",
                )
        return known[0][1] if known else config

    def _unit(self, config: ComputeConfig | None) -> RankMesh:
        sizes = {part.mesh.size: type(part).__name__ for part in self.parallel_modules}
        if len(sizes) > 1:
            raise ConfigError(
                "the compiled modules disagree on the number of ranks in a unit",
                why=", ".join(
                    f"{name} is compiled for {size}" for size, name in sorted(sizes.items())
                ),
                hint="compile all of them with one plan_ngpus",
            )
        # Without a compiled module the config says how many ranks are a unit.
        plan_ngpus = next(iter(sizes), 1 if config is None else config.plan_ngpus)
        if config is not None and (config.plan_ngpus, config.runtime_ngpus) != (
            plan_ngpus,
            self.world.size,
        ):
            raise ConfigError(
                "compute_config does not describe this run",
                why=f"it has plan_ngpus={config.plan_ngpus} and "
                f"runtime_ngpus={config.runtime_ngpus}; "
                f"units have {plan_ngpus} rank(s) here and {self.world.size} are running",
                hint="pass the config that the module was compiled with, or leave it out",
            )
        if self.parallel_modules:
            return self.parallel_modules[0].ranks
        return RankMesh(Mesh((("unit", plan_ngpus),)), self.world)


def _unchanged(dtype: torch.dtype) -> torch.dtype:
    return dtype


REDUCER_SETTINGS = (
    "grad_reduction",
    "use_async_reducer",
    "reducer_bucket_cap_mb",
    "use_zero",
    "zero_ngroups",
    "zero_use_reduce_scatter",
    "distributed_optimizer",
)
"""The fields of a config that say how gradients are reduced, and how optimizer state is split."""

# A parameter has one reducer at a time: two would sum its gradient twice.
_REDUCER = "_shardwright_reducer"
