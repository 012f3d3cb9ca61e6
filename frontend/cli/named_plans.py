"""The file of a plan that a command line names: what the file says is taken where the command line
says nothing.

Example: ``plan.json`` was searched for two units of 8 H100, with stage 2 of ZeRO, microbatches of
32 samples and buckets of 100 MiB. ``explain my_models:make --plan plan.json`` takes all of that.
With ``--hardware a100-80gb`` the plan is priced on that machine, and the command says that the file
names another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.compiler.cost.machine.hardware import preset_names
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.cost.time.after_backward import GRADIENTS
from shardwright.compiler.plan.certified import settings_of
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.cli.command_arguments import AUTO, HARDWARE
from shardwright.policies.policy import read_options
from shardwright.policies.saved_plan import SavedOptions, read_plan_file
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.distributed_config import DistributedOptimizerConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.zero.settings import ReductionSettings


@dataclass(frozen=True)
class NamedPlan:
    """A plan and its file. ``num_ranks``: those of a unit, with the sizes of axes that the command
    line gives. ``asked_microbatches``: those of a step that policy ``saved`` is to run instead of
    the plan's.
    """

    path: str
    plan: Plan
    num_ranks: int
    asked_microbatches: int | None = None

    @classmethod
    def of(cls, options: argparse.Namespace, fields: Mapping[str, Any]) -> NamedPlan | None:
        """The plan of ``--plan``, or the one that policy ``saved`` loads; ``None`` without either.

        Raises :class:`PlanError` for a file that holds no plan, and :class:`ConfigError` for
        options that policy ``saved`` does not take.
        """
        sizes: Mapping[str, int] = {}
        microbatches = None
        path = getattr(options, "plan", None)
        if path is None:
            pas_config = fields.get("pas_config", {})
            if options.policy != "saved" or not isinstance(pas_config, Mapping):
                return None
            saved = read_options(SavedOptions, pas_config, policy="saved")
            path, sizes, microbatches = saved.load_plan, saved.mesh, saved.num_microbatches
        plan = read_plan_file(path)
        mesh = plan.mesh.of_axes((name, sizes.get(name, size)) for name, size in plan.mesh.axes)
        return cls(str(path), plan, mesh.size, microbatches)

    @property
    def num_units(self) -> int | None:
        """The units that the plan was searched for; ``None`` if the file does not say."""
        certificate = self.plan.certificate
        if certificate is None or certificate.runtime_ngpus is None:
            return None
        return certificate.runtime_ngpus // self.plan.mesh.size

    @property
    def added_up(self) -> int | None:
        """The microbatches whose gradients a step adds up, of a plan that was searched for a number
        of them and holds none itself; ``None`` if the file does not say.
        """
        certificate = self.plan.certificate
        return None if certificate is None else certificate.num_microbatches

    @property
    def _num_microbatches(self) -> int | None:
        """The microbatches of a step, wherever the file says them."""
        if self.plan.batch is not None:
            return self.plan.batch.num_microbatches
        return self.plan.num_microbatches if self.plan.stages else self.added_up

    @property
    def _settings(self) -> Mapping[str, Any] | None:
        """The settings of the search (``certified.py``); ``None`` if the file does not say."""
        return None if self.plan.certificate is None else self.plan.certificate.settings

    @property
    def hardware(self) -> str | None:
        """The machine that the plan was searched for; ``None`` if the file does not say."""
        return None if self.plan.certificate is None else self.plan.certificate.hardware

    def filled(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a config, with those of the plan where they are not given."""
        given = dict(fields)
        # The plan's own number of ranks is the best there is of it.
        if given.get("plan_ngpus") == AUTO:
            del given["plan_ngpus"]
        ranks = given.get("plan_ngpus", self.num_ranks)
        own = {"plan_ngpus": ranks, "runtime_ngpus": ranks * (self.num_units or 1)}
        own |= self._settings or {}
        table, asked = own.get(TABLE), given.get(TABLE)
        # What is given of a table changes that of the file.
        if table is not None and isinstance(asked, Mapping):
            given[TABLE] = {**table, **asked}
        # A table says a stage, too, which is not that of the file.
        if table is not None:
            own["use_zero"] = self.plan.zero_stage or 0
        elif self.plan.zero_stage is not None and TABLE not in given:
            own["use_zero"] = self.plan.zero_stage
        # A pipeline runs whole steps.
        if self.plan.stages:
            own["use_end2end"] = True
        return {**own, **given}

    def machine(self) -> str:
        """The preset to price the plan on, where the command line names none.

        Raises :class:`ConfigError` if the plan was searched for a machine of a file.
        """
        name = self.hardware or HARDWARE
        preset, _, _ = name.partition("+")  # behind it may be a ``linear_dtype``
        if preset not in preset_names():
            raise ConfigError(
                f"the plan in {self.path} was searched for the machine {name!r}, which is no "
                "preset",
                why="a plan names its machine, and not the file that describes it",
                hint=f"--hardware FILE with that of {name}, or --hardware with a preset",
            )
        return name

    def sources(
        self, config: ComputeConfig, machine: str | None, num_microbatches: int | None
    ) -> list[str]:
        """What the file says, and what is not taken from it, a line each. ``machine``: the name of
        the one that the plan is priced on, ``None`` if it is not priced. ``num_microbatches``:
        those of a step, where the command line says them.
        """
        said = [_count(self.num_ranks, "rank")]
        if self.num_units is not None:
            said[0] += f" in {_count(self.num_units, 'unit')}"
        if self.plan.zero_stage is not None:
            said.append(f"stage {self.plan.zero_stage} of ZeRO")
        if self.plan.stages:
            said.append("a pipeline (use_end2end=true)")
        own, of_now = _by_option(self._settings or {}), _by_option(settings_of(config))
        said += [f"{name}={value}" for name, value in own.items() if of_now.get(name) == value]
        if machine is not None and self.hardware is not None:
            said.append(self.hardware)
        if self.plan.batch is not None:
            said.append(
                f"{self.plan.batch} samples (the dummy arguments are cut or repeated to that)"
            )
        elif (self._num_microbatches or 1) > 1:
            said.append(f"{self._num_microbatches} microbatches")
        lines = [f"{self.path} is for {', '.join(said)}"]
        otherwise = [*self._otherwise(config)]
        # A pipeline has the number of its policy, whatever else is said.
        if self.asked_microbatches is not None:
            num_microbatches = self.asked_microbatches
        if machine is not None and machine != self.hardware:
            otherwise.append(machine)
        if num_microbatches not in (None, self._num_microbatches):
            otherwise.append(_count(num_microbatches or 1, "microbatch", "microbatches"))
        if otherwise:
            lines.append(f"not from the file: {', '.join(otherwise)}")
        return lines

    def _otherwise(self, config: ComputeConfig) -> list[str]:
        """What of the config is not as in the file, or not in it."""
        found = []
        if config.plan_ngpus != self.num_ranks:
            found.append(_count(config.plan_ngpus, "rank"))
        if config.num_units != self.num_units:
            found.append(_count(config.num_units, "unit"))
        zero = config.use_zero
        if zero and self.plan.zero_stage is None and not config.leaves_zero_to_plan:
            found.append(f"stage {config.zero_stage} of ZeRO")
        own, of_now = _by_option(self._settings or {}), _by_option(settings_of(config))
        found += [f"{name}={value}" for name, value in of_now.items() if own.get(name) != value]
        found += [f"{name} as by default" for name in own if name not in of_now]
        return found

    def unsaid(self, config: ComputeConfig, cost: PlanCost) -> str | None:
        """What is said of a file that does not say how gradients are summed, if they are and the
        command line does not say it either.
        """
        parts = {name for rank in cost.ranks for name, seconds in rank.comm_s.items() if seconds}
        is_summed = any(name.endswith(GRADIENTS) for name in parts)
        if not is_summed or self._settings is not None or settings_of(config):
            return None
        settings = ReductionSettings.of(config, config.num_units)
        is_early = settings.asynchronous or settings.frees_gradients
        when = "while backward runs" if is_early else "after backward"
        return (
            f"{self.path} does not say how gradients are summed: taken as by default, in buckets "
            f"of {settings.bucket_cap_mb:g} MiB {when} (--set reducer_bucket_cap_mb, "
            "use_async_reducer, distributed_optimizer)"
        )


TABLE = "distributed_optimizer"


def _by_option(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings and their values as ``--set`` takes them: of a table the options that are not as by
    default.
    """
    found = {name: value for name, value in settings.items() if name != TABLE}
    table = settings.get(TABLE)
    if table is not None:
        usual = DistributedOptimizerConfig().to_json()
        changed = {name: value for name, value in table.items() if value != usual.get(name)}
        found |= {f"{TABLE}.{name}": value for name, value in changed.items()} or {TABLE: {}}
    return {name: json.dumps(value) for name, value in found.items()}


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
