"""Search for a plan from Python: what ``shardwright plan`` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwright.compiler.collector import only_new_objects
from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.passes.fold import fold_constants
from shardwright.compiler.passes.without_gradients import without_gradients
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.certified import certified
from shardwright.compiler.plan.named import split_dim_names
from shardwright.compiler.plan.plan import Batch, Plan
from shardwright.compiler.trace import trace
from shardwright.frontend.files.module_source import ModuleSource, in_dtype
from shardwright.frontend.sized_inputs import inputs_of_plan, resized
from shardwright.policies.autodist.autodist_policy import (
    check_save,
    options_of,
    save,
    search_each,
    settled,
)
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.options import (
    AutodistOptions,
    check_imbalance_of_ranks,
    check_options,
)
from shardwright.policies.autodist.search.batch_sizes import (
    batch_dims,
    batches,
    check_can_be_told,
    num_samples,
    sizes_by_unit,
)
from shardwright.policies.autodist.search.subsearches import Subsearch, Subsearches
from shardwright.policies.autodist.solver.stopwatch import Stopwatch
from shardwright.policies.policy import read_options
from shardwright.runtime import structure
from shardwright.runtime.activity import activity, tell
from shardwright.runtime.arguments import checked
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError


@dataclass(frozen=True)
class PlanSearch:
    """What is searched, with a graph for every size of a microbatch. ``spent_s``: the seconds of
    the limit that were over when the first of them was traced; others are when they are searched.
    """

    variants: Subsearches
    config: ComputeConfig
    options: AutodistOptions
    hardware: Hardware
    dummy_args: Mapping[str, Any]
    spent_s: float = 0.0

    @classmethod
    def of(
        cls,
        module: nn.Module,
        dummy_args: Mapping[str, Any],
        config: ComputeConfig,
        *,
        module_dtype: torch.dtype | None = None,
        spent_s: float = 0.0,
    ) -> PlanSearch:
        """Trace the module for what the options in ``config.pas_config`` ask for. ``spent_s``: the
        seconds of the limit that are over already, as for importing torch and making the module.

        Raises what tracing raises, and :class:`ConfigError` for options that contradict each other,
        the config or the model.
        """
        options = read_options(AutodistOptions, config.pas_config, policy="autodist")
        if options.load_plan is not None:
            raise ConfigError(
                "a search has no use for load_plan",
                why=f"the plan in {options.load_plan} would be used as it is, and nothing would "
                "be searched",
                hint="leave it out, or compile with it: policy 'saved'",
            )
        check_imbalance_of_ranks(config, options)
        check_save(options)
        if options.global_batch is not None:
            leaves = structure.flatten(dict(dummy_args)).items()
            shapes = {path: tuple(x.shape) for path, x in leaves if isinstance(x, torch.Tensor)}
            check_can_be_told(shapes, options.batch_dims, config)
        hardware = load_hardware(options.hardware, config.runtime_ngpus)
        watch = Stopwatch(since_s=spent_s)
        tracer = _Tracer(module, dummy_args, config, options, module_dtype)
        with activity("tracing"), only_new_objects():
            if options.unit_sizes is None:
                variants = tracer.variants(config, options.microbatch)
            else:
                check_options(config, options)
                variants = Subsearches.of_units(tracer.variants_by_unit(options.unit_sizes))
            # What cannot be traced at all, or be asked of this model, is refused here.
            for variant in variants.listed[:1]:
                variant.make_graph()
        return cls(variants, config, options, hardware, dummy_args, watch.wall_s)

    def run(self) -> SearchResult:
        """Search, in what tracing has left of the limit."""
        with activity("searching"):
            return search_each(self.variants, self.options, self.hardware, self.spent_s)

    def settled(self, found: SearchResult) -> SearchedPlan:
        """The best plan. Raises :class:`PlanError` if nothing fits."""
        plan = settled(found, self.config, self.hardware, self.variants.imbalance)
        variant = self.variants.chosen(plan)
        named = replace(plan, dims=split_dim_names(variant.graph, plan))
        count = self.options.microbatches_of_step
        plan = certified(named, variant.graph, self.config, count)
        return SearchedPlan(plan, inputs_of_plan(self.dummy_args, plan), variant)

    def options_for(self, variant: Subsearch) -> AutodistOptions:
        """The options with all chosen that tells a variant from the others."""
        return options_of(variant, self.options, self.options.time_limit_s)


@dataclass(frozen=True)
class SearchedPlan:
    """The best plan, and the dummy arguments to compile it with: of the size of its microbatches.
    ``variant``: the graph and the config that it is for.
    """

    plan: Plan
    dummy_forward_args: Mapping[str, Any]
    variant: Subsearch

    @property
    def plan_ngpus(self) -> int:
        """The ranks that share one copy of the model."""
        return self.variant.config.plan_ngpus


@checked
def search_plan(
    module_or_module_class: nn.Module | type[nn.Module],
    dummy_forward_args: Mapping[str, Any],
    compute_config: ComputeConfig | Mapping[str, Any],
    *,
    module_dtype: torch.dtype | None = None,
    module_fn: Callable[[], nn.Module] | None = None,
) -> SearchedPlan:
    """Search for the best plan, as policy ``autodist`` with the options in ``pas_config`` of
    ``compute_config`` does, and compile nothing.

    The arguments are those of :func:`parallelize`. ``module_dtype``: as if the module had been cast
    to this dtype; the module given stays as it is. ``module_fn``: makes the module where a class is
    given.

    With the option ``global_batch``, the samples of a step, the size of a microbatch is searched
    too: the module is traced once for every size, with the dummy arguments repeated or cut to it.
    ``microbatch`` lists the sizes, of one unit's microbatch (default: up to five that divide a
    unit's share, up to 16 samples for each of its ranks). With ``unit_sizes``, as in ``[1, 2, 4,
    8]``, the number of ranks that share one copy of the model is searched, too, and
    ``found.plan_ngpus`` says which is best. ``batch_dims`` says which dim of an input counts
    samples, ``{"input_ids": 0, "labels": 0}``, where it cannot be told. What is found is used as
    in::

        found = search_plan(model, dummy_forward_args, config)
        Path("plan.json").write_text(found.plan.dumps())
        saved = replace(
            config, plan_ngpus=found.plan_ngpus, pas_config={"load_plan": "plan.json"}
        )
        parallelize(model, found.dummy_forward_args, "saved", saved)

    and a step has ``found.plan.batch.num_microbatches`` microbatches of
    ``found.plan.batch.samples`` samples on every unit.

    Raises:
        ConfigError: options that contradict each other, the config or the model.
        TraceError: the model cannot be traced.
        PlanError: nothing fits, or constraints name what the model does not have.
    """
    watch = Stopwatch()
    module = ModuleSource.of(module_or_module_class, module_fn).make()
    asked = PlanSearch.of(
        module, dummy_forward_args, ComputeConfig.of(compute_config),
        module_dtype=module_dtype, spent_s=watch.wall_s,
    )  # fmt: skip
    found = asked.settled(asked.run())
    save(asked.options, found.plan)
    return found


@dataclass
class _Tracer:
    """Traces the model as it is, or for sizes of a microbatch, each once and when it is asked for.
    ``dtype``: see :func:`search_plan`.
    """

    module: nn.Module
    dummy_args: Mapping[str, Any]
    config: ComputeConfig
    options: AutodistOptions
    dtype: torch.dtype | None
    traced: dict[int, PlannableGraph] = field(default_factory=dict)

    def variants(self, config: ComputeConfig, sizes: Sequence[int] | None) -> Subsearches:
        """What is searched for units of ``config``, with microbatches of ``sizes``, if any are
        named.
        """
        wanted: list[Batch | None] = [None]
        if self.options.global_batch is not None:
            wanted = [*batches(config, self.options.global_batch, sizes, self._batch_dims)]
        return Subsearches.of(
            _Graphs(self, tuple(wanted)), config, self.options.zero, self.options.imbalance
        )

    def variants_by_unit(self, unit_sizes: Sequence[int]) -> dict[int, Subsearches]:
        """What is searched for every size of a unit. Units that cannot share the samples evenly are
        refused, and sizes of a microbatch where they do not fit, while others are searched.
        """
        every = {size: replace(self.config, plan_ngpus=size) for size in unit_sizes}
        wanted, total = self.options.microbatch, self.options.global_batch
        if total is None:
            return {size: self.variants(config, None) for size, config in every.items()}
        # Without a size that shares them evenly, the first says what is wrong.
        even = {size: config for size, config in every.items() if not total % config.num_units}
        configs = even or every
        found = {
            size: Subsearches(
                (), {"all": f"{config.num_units} units cannot share {total} samples evenly"}
            )
            for size, config in every.items()
            if size not in configs
        }
        if wanted is None:
            return found | {size: self.variants(config, None) for size, config in configs.items()}
        fitting = sizes_by_unit(configs, total, wanted)
        for unit, config in configs.items():
            part = self.variants(config, fitting[unit]) if fitting[unit] else Subsearches((), {})
            why = f"a unit has {total // config.num_units} of the {total} samples of a step"
            left_out = {
                f"microbatches of {size}": f"{why}, which cannot be cut so"
                for size in wanted
                if size not in fitting[unit]
            }
            found[unit] = replace(part, refused={**part.refused, **left_out})
        return found

    def graph(self, batch: Batch | None) -> PlannableGraph:
        """The model as it is, or for the size of a microbatch."""
        if batch is None:
            return self._trace(self.dummy_args, {})
        if batch.samples not in self.traced:
            tell(f"tracing microbatches of {batch.samples}")
            given = resized(self.dummy_args, batch.dims, batch.samples)
            self.traced[batch.samples] = self._trace(given, batch.dims)
        return self.traced[batch.samples]

    @functools.cached_property
    def _batch_dims(self) -> dict[str, int]:
        """Which dims of the inputs count samples, told from a trace of the model as it is."""
        graph = self._trace(self.dummy_args, {})
        dims = batch_dims(graph, self.options.batch_dims, self.config)
        if not self.config.dim_symbols():  # it has the size of the dummy arguments
            self.traced[num_samples(graph, dims)] = graph
        return dims

    def _trace(self, args: Mapping[str, Any], fixed: Mapping[str, int]) -> PlannableGraph:
        """Trace with the dims ``fixed`` static, as nobody knows what a microbatch of any size
        costs.
        """
        config = self.config
        dynamic = {
            path: {dim: name for dim, name in dims.items() if fixed.get(path) != dim}
            for path, dims in config.dim_symbols().items()
        }
        named = {path: dims for path, dims in dynamic.items() if dims}
        with in_dtype(self.module, self.dtype):
            graph = trace(self.module, args, dynamic_dims=named, constants=config.constants)
        graph = fold_constants(graph) if config.constant_folding else graph
        return annotate(
            without_gradients(graph) if config.inference_only else graph, pass_manager()
        )


@dataclass(frozen=True)
class _Graphs(Mapping[Batch | None, PlannableGraph]):
    """The graphs of sizes of a microbatch, traced as they are looked up."""

    tracer: _Tracer
    batches: tuple[Batch | None, ...]

    def __getitem__(self, batch: Batch | None) -> PlannableGraph:
        return self.tracer.graph(batch)

    def __iter__(self) -> Iterator[Batch | None]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
