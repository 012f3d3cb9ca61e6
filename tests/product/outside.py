"""Every model of the zoo and every family with experts under every policy, and every mutation of
the museum, under spmd_types; and edits of one rank's file.

    python tests/product/outside.py zoo [--only REGEX]
    python tests/product/outside.py mutations
    python tests/product/outside.py edits

``zoo`` prints what is accepted and what is not, and exits with 1 if anything is refused.
``mutations`` prints what becomes of each wrong program of the museum. ``edits`` makes every edit of
one statement in one file, for the museum's right programs, and prints how many are refused.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import expert_models
import zoo
from museum_models import CASES
from outside_cases import edits_of_one_file, exhibits, verdict
from precision import float64_casts
from traces import shared_traces

from shardwright.frontend.verification.outside.outside_run import outside_certificate
from shardwright.frontend.verification.sample_inputs import rolled
from shardwright.frontend.verification.verify import compile_into, samples_per_step
from shardwright.policies.parallel_form import without_form
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError, ShardwrightError

STAGES = {"use_end2end": True}
CONFIGURATIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("dp", "dp", {"plan_ngpus": 1, "runtime_ngpus": 2}),
    ("zero3", "dp", {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 3}),
    ("tp", "tp", {"plan_ngpus": 2, "runtime_ngpus": 4}),
    ("tp=4", "tp", {"plan_ngpus": 4, "runtime_ngpus": 4}),
    ("sp", "tp", {"plan_ngpus": 2, "runtime_ngpus": 2, "pas_config": {"sequence_parallel": True}}),
    ("data", "data", {"plan_ngpus": 2, "runtime_ngpus": 4}),
    ("cp", "cp", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    ("pp", "pp", {"plan_ngpus": 2, "runtime_ngpus": 2, **STAGES}),
    ("2d", "tensor", {"plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"mode": "2d"}}),
    ("2.5d", "tensor", {
        "plan_ngpus": 8, "runtime_ngpus": 8, "pas_config": {"mode": "2.5d", "depth": 2}}),
    ("3d", "tensor", {"plan_ngpus": 8, "runtime_ngpus": 8, "pas_config": {"mode": "3d"}}),
    ("hybrid", "hybrid", {
        "plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"pp_size": 2, "tp": 2}, **STAGES}),
    ("hybrid, zero3", "hybrid", {
        "plan_ngpus": 4, "runtime_ngpus": 8, "use_zero": 3, "pas_config": {"tp": 2, "dp": 2},
        **STAGES}),
)  # fmt: skip
"""A name, a policy, and the fields of its config."""

FOR_EXPERTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tp", "tp", {"plan_ngpus": 2, "runtime_ngpus": 4}),
    ("ep", "ep", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    ("ep x tp", "tp", {"plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"ep": 2}}),
    ("data", "data", {"plan_ngpus": 2, "runtime_ngpus": 2}),
    ("hybrid ep", "hybrid", {
        "plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"pp_size": 2, "dp": 2, "ep": 2},
        **STAGES}),
)  # fmt: skip
"""Plans for models with experts, in the same form."""


def said(name: str, policy_name: str, fields: dict[str, Any]) -> str:
    """What is said of a model under a plan: the report, or the error of the compiler."""
    entry = expert_models.get(name) if name in expert_models.MODELS else zoo.get(name)
    model, args = entry.build(), entry.inputs()
    try:
        policy, config = without_form(policy_name, ComputeConfig(**fields))
        with (
            tempfile.TemporaryDirectory() as folder,
            shared_traces(name),
            float64_casts(model),
        ):
            directory = compile_into(Path(folder), model, args, policy, config)
            count = samples_per_step(directory, config)
            units = config.runtime_ngpus // config.plan_ngpus
            samples = [
                [rolled(args, n * units + u, ()) for n in range(count)] for u in range(units)
            ]
            report = outside_certificate(directory, config, samples)
    except (ConfigError, PlanError) as error:
        return f"no plan: {error.what}"
    except ShardwrightError as error:
        return f"stopped: {error.what}"
    except Exception as error:
        return f"stopped: {type(error).__name__} {error}"
    stops = [rank.stopped for rank in report.ranks if rank.stopped]
    if report.problems or stops:
        return f"refused: {report.problems[0]}" if report.problems else f"stopped: {stops[0]}"
    told = sum((Counter(rank.told) for rank in report.ranks), Counter[str]())
    return f"accepted: {sum(rank.num_calls for rank in report.ranks)} calls, told {dict(told)}"


def of_zoo(only: str) -> int:
    """Print what is said of all, and how many are accepted."""
    counts: Counter[str] = Counter()
    plans = dict.fromkeys(zoo.names(), CONFIGURATIONS)
    plans |= dict.fromkeys(expert_models.MODELS, FOR_EXPERTS)
    for name, configurations in plans.items():
        for label, policy, fields in configurations:
            if re.search(only, f"{name} {label}"):
                started = time.perf_counter()
                text = said(name, policy, fields).replace("\n", " | ")
                counts[text.split(":")[0]] += 1
                print(f"{name:24} {label:14} {text[:500]}  {time.perf_counter() - started:.1f} s",
                      flush=True)  # fmt: skip
    print(dict(counts))
    return int(bool(counts["refused"] or counts["stopped"]))


def of_mutations() -> int:
    """Print what becomes of the wrong programs."""
    counts: Counter[str] = Counter()
    for title, (case, mutation) in exhibits().items():
        text = verdict(case, mutation).replace("\n", " | ")
        counts[text.split(":")[0]] += 1
        print(f"{title:55} {case:14} {text[:300]}", flush=True)
    print(dict(counts))
    return 0


def of_edits() -> int:
    """Print how many edits are refused, by kind."""
    made, refused = Counter[str](), Counter[str]()
    for case in (case for case, given in CASES.items() if given.num_ranks > 1):
        for kind, said in edits_of_one_file(case):
            made[kind] += 1
            refused[kind] += bool(said)
        print(case, f"{refused.total()} of {made.total()} refused so far", flush=True)
    for kind, count in sorted(made.items()):
        print(f"{kind:24} {refused[kind]:5} of {count:5} refused")
    return int(refused != made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["zoo", "mutations", "edits"])
    parser.add_argument("--only", default=".", help="models and plans, as a regular expression")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.what == "zoo":
        return of_zoo(options.only)
    return of_edits() if options.what == "edits" else of_mutations()


if __name__ == "__main__":
    sys.exit(main())
