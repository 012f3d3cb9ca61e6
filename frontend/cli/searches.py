"""The commands that search for a plan: ``plan`` and ``explain``."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from shardwright import __version__
from shardwright.compiler.compile import compile_graph, uneven_work
from shardwright.compiler.cost.time.operator_file import load_times
from shardwright.compiler.cost.work_share import work_share
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.imbalance import imbalance_text
from shardwright.compiler.plan.outputs import returns_more_than_loss
from shardwright.compiler.plan.plan import Certificate, Plan
from shardwright.compiler.plan.zero import settled_config
from shardwright.frontend.cli.command_arguments import AUTO
from shardwright.frontend.cli.model_arguments import (
    SEE_EACH,
    ModelRequest,
    make_console,
    on_machine,
    read_dtype,
    read_imbalance,
    read_model_request,
    with_options,
)
from shardwright.frontend.cli.named_plans import NamedPlan
from shardwright.frontend.report.page import Section, page
from shardwright.frontend.report.pictures import Bar, bars
from shardwright.frontend.report.plan_details import Details, stored_layouts
from shardwright.frontend.report.plan_tables import new_table
from shardwright.frontend.search_plan import PlanSearch, SearchedPlan
from shardwright.policies.autodist.autodist_policy import save
from shardwright.policies.autodist.candidates.results import Candidate, SearchResult
from shardwright.policies.autodist.candidates.titles import in_sizes
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.attention_modes import attention_modes
from shardwright.policies.autodist.questions.explain import (
    Choice,
    Explanation,
    Request,
    check_operator,
    explain_module,
    explain_operator,
    factor_dims,
    operators_of,
)
from shardwright.policies.autodist.questions.launches import (
    bound_by_launches,
    host_unknown,
    num_needed,
    repeated_work,
)
from shardwright.policies.autodist.questions.odd_sizes import slowed_by_odd_sizes
from shardwright.policies.autodist.questions.saved_plans import audited_levers, request_of_plan
from shardwright.policies.autodist.questions.what_if import (
    against,
    levers,
    options_on,
    side_by_side,
)
from shardwright.policies.known_policies import find_policy
from shardwright.policies.saved_plan import SavedOptions, load_plan
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.swap import check_target, write_file


def _asked(options: argparse.Namespace) -> tuple[PlanSearch, ModelRequest]:
    """What a search is asked for on a command line, checked before it takes its time, and the model
    and the plan in a file that the command line names.
    """
    request = read_model_request(options)
    _, config = on_machine(options, request)
    if request.named is not None:
        # One stage of ZeRO, where there may be several to search.
        config = settled_config(request.named.plan, config)
        config = _with_microbatches(request.named, config)
    sizes, most = None, config.plan_ngpus
    if options.plan_ngpus == AUTO and request.named is None:
        _check_has_batch(options, config)
        ranks = most = config.runtime_ngpus
        # Powers of two that divide the ranks.
        sizes = tuple(1 << power for power in range(ranks.bit_length()) if not ranks % (1 << power))
    # Options of the command become options of the policy, so that both are checked alike.
    config = with_options(
        config,
        {
            "--optimizer": ("optimizer", options.optimizer),
            "--imbalance": ("imbalance", read_imbalance(options.imbalance, most)),
            "--global-batch": ("global_batch", options.global_batch),
            "--microbatch": (
                "microbatch",
                None if options.microbatch is None else read_sizes_listed(options.microbatch),
            ),
            "--plan-ngpus": ("unit_sizes", sizes),
            "--batch-dims": (
                "batch_dims",
                None if options.batch_dims is None else read_batch_dims(options.batch_dims),
            ),
        },
    )
    module = request.source.make()
    asked = PlanSearch.of(
        module, request.dummy_args, config,
        module_dtype=read_dtype(options.dtype), spent_s=time.monotonic() - options.began,
    )  # fmt: skip
    return asked, request


def _with_microbatches(named: NamedPlan, config: ComputeConfig) -> ComputeConfig:
    """The config with as many microbatches in a step as the plan was searched for, if neither the
    plan nor the command line has a number of its own.
    """
    given = config.pas_config.keys() & {"num_microbatches", "pipeline_nmicros", "update_freq"}
    if named.added_up is None or given:
        return config
    return replace(config, pas_config={**config.pas_config, "update_freq": named.added_up})


def _check_has_batch(options: argparse.Namespace, config: ComputeConfig) -> None:
    """Refuse to compare units of several sizes without the samples that all of them share."""
    if options.global_batch is None and "global_batch" not in config.pas_config:
        raise ConfigError(
            "--plan-ngpus auto needs --global-batch",
            why="units of several sizes are compared by a step of the same samples over all ranks",
            hint="--plan-ngpus auto --global-batch 256",
        )


def run_explain(options: argparse.Namespace) -> int:
    """Run ``explain``."""
    if options.plan is not None:
        _check_not_searched(options)
    asked, named = _asked(options)
    _check_asked(asked, options)
    console = make_console()
    said = asked.options.num_microbatches or asked.options.update_freq
    for line in named.sources(asked.hardware.name, said):
        console.print(line, soft_wrap=True)
    # The search runs once, or not at all; questions are asked of its result.
    request = _searched(asked) if options.plan is None else _of_file(asked, options)
    plan = request.best.plan
    assert request.best.cost is not None
    unsaid = named.unsaid(request.config, request.best.cost)
    if unsaid is not None:
        console.print(unsaid, soft_wrap=True)
    console.print(_known_of_others(plan, asked.hardware.name), soft_wrap=True)
    _say_what_slows(console, request)
    # Each question has its own table; without one the costs and what would help are shown.
    if options.op is not None:
        _print_choices(
            console, f"Operator {options.op}", explain_operator(request, options.op, options.most)
        )
        dims = ", ".join(
            f"{factor} is {dim}" for factor, dim in factor_dims(request.graph, options.op).items()
        )
        console.print(f"Dims of its rule: {dims or 'none of the model'}", soft_wrap=True)
    if options.module is not None:
        _print_choices(
            console,
            f"Module {options.module}",
            explain_module(request, options.module, options.most),
        )
    if options.against is not None:
        other = against(request, read_sizes(options.against))
        console.print(comparison_table(request.best, other))
    if options.op is None and options.module is None and options.against is None:
        see_each = None if options.all else SEE_EACH
        console.print(request.best.cost.in_words(see_each=see_each), soft_wrap=True)
        title, choices = "What would help, this plan as it is", audited_levers(request)
        if len(choices) > 1:
            console.print(choice_table(title, choices))
        else:
            console.print(f"{title}: {NO_LEVER}", soft_wrap=True)
        ways = attention_modes(request)
        if ways:
            console.print(choice_table("Attention over the split sequence", ways))
        if options.plan is None:
            title = "What would help, on this mesh and schedule"
            console.print(choice_table(title, levers(request)))
    return 0


NO_LEVER = (
    "nothing of what was tried (ZeRO, larger buckets of gradients, other numbers of microbatches, "
    "recomputation)"
)


def _known_of_others(plan: Plan, machine: str) -> str:
    """What is known of other plans on a machine: what the plan's certificate says, if that is of
    this machine.
    """
    certificate = plan.certificate
    if certificate is None:
        return f"{plan.mesh}: nothing is known of other plans"
    if certificate.hardware == machine:
        return str(certificate)
    return (
        f"{plan.mesh}: nothing is known of other plans on {machine}, as the search was for "
        f"{certificate.hardware}. There it has found: {certificate.claim}"
    )


def _searched(asked: PlanSearch) -> Request:
    """What questions are asked of, after a search."""
    found = asked.run()
    return _request(asked, found, asked.settled(found))


def _request(asked: PlanSearch, found: SearchResult, searched: SearchedPlan) -> Request:
    """What questions are asked of: what a search has found, and the plan that was settled on."""
    variant = searched.variant
    assert found.answer is not None
    # The certificate of the whole search, which may have tried other sizes of a microbatch.
    best = replace(found.answer, plan=searched.plan)
    return Request(variant.graph, variant.config, asked.options_for(variant), asked.hardware, best)


def _say_what_slows(console: Console, request: Request) -> None:
    best = request.best
    launches = bound_by_launches(
        best.plan, best.step_s, request.hardware, request.config, request.step_on
    )
    repeated = repeated_work(best.plan, request.config.num_units)
    host = host_unknown(best.step_s, request.hardware, request.step_on)
    uneven = _uneven_work(request)
    for told in (launches, repeated, uneven, host, slowed_by_odd_sizes(request)):
        if told is not None:
            # not markup: it has shapes in brackets
            console.print(told, soft_wrap=True, markup=False)


def _uneven_work(request: Request) -> str | None:
    """What a compile warns of: ranks of the plan that do much more than their part, also of those
    that repeat no other's work, which is said by itself.
    """
    if request.config.plan_ngpus == 1:
        return None
    work = work_share(request.lowered)
    if work is None or not work.is_uneven_on(num_needed(request.best.plan)):
        return None
    return uneven_work(request.graph.name, work)


def _check_not_searched(options: argparse.Namespace) -> None:
    """Refuse what is for a search, beside a plan that is there."""
    for flag in ("global_batch", "microbatch", "batch_dims"):
        if getattr(options, flag) is not None:
            name = flag.replace("_", "-")
            raise ConfigError(
                f"--{name} says what to search, and --plan names a plan that is there",
                hint=f"leave out one of the two; the plan has its own microbatches: --{name} was "
                "for the search that made it",
            )


def _check_microbatches(plan: Plan, options: AutodistOptions) -> None:
    """Refuse another number of microbatches than the plan has, which would not be asked about."""
    if not plan.stages and plan.batch is None:
        return
    own = plan.num_microbatches if plan.batch is None else plan.batch.num_microbatches
    for name in ("num_microbatches", "update_freq"):
        given = getattr(options, name)
        if given not in (None, own):
            raise ConfigError(
                f"pas_config.{name}={given} is not of the plan in the file",
                why=f"a step of it has {own}",
                hint="leave it out; without --op, --module and --against other numbers of "
                "microbatches are shown",
            )


def _of_file(asked: PlanSearch, options: argparse.Namespace) -> Request:
    """What questions are asked of, of the plan in a file."""
    # One graph and one stage of ZeRO: those of the plan.
    (variant,) = asked.variants.listed
    plan = load_plan(SavedOptions(load_plan=str(options.plan)), variant.graph, variant.config)
    _check_microbatches(plan, asked.options)
    settings = asked.options_for(variant)
    return request_of_plan(variant.graph, variant.config, settings, asked.hardware, plan)


def _check_asked(asked: PlanSearch, options: argparse.Namespace) -> None:
    """Refuse what cannot be explained before the search, which takes its time."""
    if options.most < 1:
        raise ConfigError(
            f"--most {options.most} leaves no choice to show", hint="show at least one"
        )
    sizes = None if options.against is None else read_sizes(options.against)
    # Their operators have the same names, and their ranks are as many.
    for variant in asked.variants.listed[-1:]:
        if options.op is not None:
            check_operator(variant.graph, options.op)
        if options.module is not None:
            operators_of(variant.graph, options.module)
        if sizes is not None:
            options_on(variant.graph, variant.config, asked.options_for(variant), sizes)


def _print_choices(console: Console, title: str, told: Explanation) -> None:
    """What could be done otherwise, and what binds."""
    console.print(choice_table(title, told.choices))
    if told.left_out:
        console.print(
            f"and {told.left_out} more, which promise less: --most shows them", soft_wrap=True
        )
    console.print(f"What binds: {told.binds}", soft_wrap=True)


def choice_table(title: str, choices: Iterable[Choice]) -> Table:
    """Choices with the step they allow, relative to the plan's, and their memory; ``*`` marks what
    the plan does.
    """
    listed = list(choices)
    # Relative to what the plan does.
    base = next(choice.step_s for choice in listed if choice.chosen)
    table = new_table(title, "", "choice", "step", "against the plan", "peak memory", "")
    for choice in listed:
        if choice.step_s == float("inf"):
            table.add_row("", choice.name, "", "", "", "no plan does this")
            continue
        change, peak = f"{choice.step_s / base - 1:+.1%}", amount(choice.peak_bytes, "B")
        fits = "" if choice.fits else "does not fit"
        table.add_row(
            "*" if choice.chosen else "",
            choice.name,
            amount(choice.step_s, "s"),
            change,
            peak,
            fits,
        )
    return table


def comparison_table(left: Candidate, right: Candidate) -> Table:
    """Two plans side by side: where their time goes, and their memory."""
    assert left.cost is not None and right.cost is not None
    table = new_table(
        "Time by part, on the rank with most",
        "",
        f"the plan: {left.title}",
        f"the best on: {right.title}",
    )
    for name, *seconds in side_by_side(left, right):
        table.add_row(name, *(amount(value, "s") for value in seconds))
    table.add_row(
        "peak memory", amount(left.cost.peak_bytes, "B"), amount(right.cost.peak_bytes, "B")
    )
    return table


def read_sizes(text: str) -> dict[str, int]:
    """Read ``pp=2,tp=4`` as a mapping. Raises :class:`ConfigError` for anything else."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"{text!r} does not say the sizes of axes", hint="for example tp=8, or pp=2,tp=4"
            )
        sizes[axis] = int(size)
    return sizes


def read_sizes_listed(text: str) -> list[int]:
    """Read ``1,2,4`` as numbers. Raises :class:`ConfigError` for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{text!r} does not list sizes of a microbatch", hint="for example 1,2,4")
    return [int(part) for part in parts]


def read_batch_dims(text: str) -> dict[str, int]:
    """Read ``input_ids=0,labels=0`` as a mapping. Raises :class:`ConfigError` for anything else."""
    pairs = [part.strip().partition("=") for part in text.split(",")]
    if not all(path and dim.isdecimal() for path, _, dim in pairs):
        raise ConfigError(
            f"{text!r} does not say dims of inputs", hint="for example input_ids=0,labels=0"
        )
    return {path: int(dim) for path, _, dim in pairs}


def run_plan(options: argparse.Namespace) -> int:
    """Run ``plan``."""
    # Targets are checked before a search that takes minutes.
    if options.out is not None:
        check_target(options.out, "--out")
    if options.html is not None:
        check_target(options.html, "--html", "plan.html")
    asked, _ = _asked(options)
    found = asked.run()
    console = make_console()
    # First the tables, then the files.
    table, left_out = candidate_table(found, None if options.all else MOST_SHOWN)
    console.print(table)
    if left_out is not None:
        console.print(left_out, soft_wrap=True)
    searched = asked.settled(found)
    plan, graph = searched.plan, searched.variant.graph
    save(asked.options, plan)
    assert (
        plan.certificate is not None and found.answer is not None and found.answer.cost is not None
    )
    console.print(str(plan.certificate), soft_wrap=True)
    _say_what_slows(console, _request(asked, found, searched))
    if found.answer.cost.extrapolated:
        console.print(found.answer.cost.beyond, soft_wrap=True)
    if found.answer.cost.assumed:
        console.print(found.answer.cost.assumes, soft_wrap=True)
    if returns_more_than_loss(graph, asked.config):
        console.print(
            "what the model returns beside its loss is whole on every rank: --set "
            "outputs=loss leaves it out",
            soft_wrap=True,
        )
    if plan.batch is not None:
        where = ", ".join(f"dim {dim} of {path}" for path, dim in plan.batch.dims.items())
        console.print(f"a step of a unit: {plan.batch} samples ({where})", soft_wrap=True)
    for note in plan.notes:
        if note.axis in plan.loops:
            console.print(note.reason, soft_wrap=True)
    if plan.zero_stage is not None:
        console.print(
            f"stage of ZeRO: {plan.zero_stage} (use_zero='auto' takes it from the plan)",
            soft_wrap=True,
        )
    if plan.imbalance is not None:
        console.print(
            "experts: the busiest rank is assumed to get "
            f"{imbalance_text(plan.imbalance)} times an even share (--imbalance)",
            soft_wrap=True,
        )
    if options.out is not None:
        write_file(options.out, plan.dumps().encode())
        console.print(f"plan: {options.out}", soft_wrap=True)
    if options.html is not None:
        sections = [certificate_section(plan.certificate), candidate_section(found)]
        certificate = plan.certificate
        saved = f"{certificate.gap:.2%}, by the bound for {certificate.covers}"
        facts = [("could be saved at most", saved)]
        facts += [("a step of a unit", f"{plan.batch} samples")] if plan.batch is not None else []
        limit_gb = asked.options.memory_limit_gb
        request = _request(asked, found, searched)
        # The files that a compile of this plan writes are a part of the page.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how work is dealt out: the page shows it
            compiled = compile_graph(
                request.graph, find_policy("autodist").apply, request.config,
                policy_name=plan.policy, plan=plan, version=__version__,
            )  # fmt: skip
        details = Details.of(
            compiled, found.answer.cost, asked.hardware,
            optimizer=request.options.optimizer_memory, times=load_times(request.options.hardware),
        )  # fmt: skip
        text = page(
            graph.name,
            plan,
            found.answer.cost,
            asked.hardware,
            num_units=asked.config.num_units,
            memory_bytes=None if limit_gb is None else limit_gb * 1e9,
            stored=stored_layouts(compiled),
            details=details,
            sections=sections,
            facts=facts,
        )
        write_file(options.html, text.encode())
        console.print(f"page: {options.html}", soft_wrap=True)
    return 0


MOST_SHOWN, MOST_REFUSED = 10, 3
"""Rows of the table on the terminal, as searches for several sizes and stages try hundreds of
plans; and how many of them are of what was refused, unless there is room for more.
"""


def candidate_table(found: SearchResult, most: int | None) -> tuple[Table, str | None]:
    """What a search tried, best first, and what it refused: at most ``most`` rows, of which one
    stands for all that was refused for the same reason. The text under it says what is left out.
    """
    table = new_table("Plans", *CANDIDATE_COLUMNS)
    rows = candidate_rows(found)
    tried, refused = rows[: len(rows) - len(found.refused)], rows[len(rows) - len(found.refused) :]
    if most is None:
        most = len(rows)
    else:
        alike: dict[str, list[str]] = {}
        for title, reason in found.refused.items():
            alike.setdefault(reason, []).append(title)
        refused = [(_and_more(titles), "", "", "", why) for why, titles in alike.items()]
    num_tried = min(len(tried), most - min(len(refused), MOST_REFUSED))
    num_refused = min(len(refused), most - num_tried)
    for row in (*tried[:num_tried], *refused[:num_refused]):
        table.add_row(*row)
    told = {reason for *_, reason in refused[:num_refused]}
    parts = (
        (len(tried) - num_tried, "that take longer"),
        (sum(reason not in told for reason in found.refused.values()), "refused"),
    )
    left_out = " and ".join(f"{count} more {what}" for count, what in parts if count)
    where = "--all prints them, and the files of --out and --html have them"
    return table, f"{left_out}: {where}" if left_out else None


def _and_more(titles: Sequence[str]) -> str:
    """The first title, and how many more there are."""
    return titles[0] if len(titles) == 1 else f"{titles[0]}, and {len(titles) - 1} more"


def certificate_section(certificate: Certificate) -> Section:
    """The section of a page that says how far from the best a plan can be, and why no further."""
    rows = [(sentence,) for sentence in certificate.proof]
    return Section(
        title="How far from the best",
        text=f"{certificate.claim}.",
        columns=("what the bound rests on",),
        rows=rows,
    )


def candidate_section(found: SearchResult) -> Section:
    """The section of a page that lists what a search tried."""
    ended = f" The search ended by {found.interrupted}." if found.interrupted else ""
    text = (
        f"{found.seconds:.1f} s.{ended} Predicted times are by the model of stages; audited ones "
        "of the program emitted."
    )
    return Section(
        title="What was tried",
        text=text,
        picture=bars(_rival_bars(found), "s", left=RIVAL_LABEL),
        columns=CANDIDATE_COLUMNS,
        rows=candidate_rows(found),
    )


RIVAL_LETTERS, RIVAL_LABEL, RIVALS_SHOWN = 40, 300, 12
"""Letters of the label of a candidate, the width that they need, and how many have a bar."""


def _rival_bars(found: SearchResult) -> list[Bar]:
    """The step of the best candidate of each title, the fastest first."""
    best: dict[str, Candidate] = {}
    for candidate in found.tried:
        best.setdefault(candidate.title, candidate)
    shown = sorted(best.items(), key=lambda item: item[1].step_s)[:RIVALS_SHOWN]
    return [
        Bar(
            title if len(title) <= RIVAL_LETTERS else f"{title[: RIVAL_LETTERS - 1]}…",
            {"a step, predicted" if rival.cost is None else "a step, audited": rival.step_s},
        )
        for title, rival in shown
    ]


CANDIDATE_COLUMNS = ("plan", "step", "at least", "peak memory", "")


def candidate_rows(found: SearchResult) -> list[tuple[str, ...]]:
    """A row for the candidates of every title, the best of them, and for what was refused."""
    rows: list[tuple[str, ...]] = []
    # Candidates of one title differ in their placement.
    by_title: dict[str, list[Candidate]] = {}
    for candidate in found.tried:
        by_title.setdefault(candidate.title, []).append(candidate)
    for title, (best, *others) in by_title.items():
        step, least = (
            amount(best.step_s, "s"),
            amount(max(best.bound_s, found.arithmetic_bound_s), "s"),
        )
        peak, how = (
            ("", "predicted")
            if best.cost is None
            else (amount(best.cost.peak_bytes, "B"), "audited")
        )
        if best.compared_s != best.step_s:
            how += f"; {amount(best.compared_s, 's')} with each message by itself"
        if others:
            slowest = amount(max(candidate.step_s for candidate in others), "s")
            how += f"; {len(others)} more placed otherwise, up to {slowest}"
        if found.simpler is not None and found.simpler.title == title:
            how += "; taken, as it is simpler"
        rows.append((in_sizes(title), step, least, peak, how))
    refused = ((in_sizes(title), "", "", "", reason) for title, reason in found.refused.items())
    return [*rows, *refused]
