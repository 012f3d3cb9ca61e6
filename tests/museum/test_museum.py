"""Every published fault of the museum is refused where it is, right programs and rules are not, and
``docs/museum.md`` says what is said.
"""

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mutations as m
import pytest
import random_plans
from museum import EXHIBITS, ROOMS, Exhibit, InRule
from museum_models import CASES, program_of

from shardwright.compiler.passes.lower_stages import verify_pipeline
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.runtime.errors import InternalError

PAGE = Path(__file__).parents[2] / "docs" / "museum.md"
BEGIN, END = "<!-- exhibits -->\n", "<!-- end of the exhibits -->\n"
RULES = [exhibit for exhibit in EXHIBITS if isinstance(exhibit.written, InRule)]


def ids(exhibit: Exhibit) -> str:
    return exhibit.title.replace(" ", "-")


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=ids)
def test_a_published_fault_is_refused_where_it_is(exhibit: Exhibit) -> None:
    assert exhibit.place in exhibit.written.verdict()


@pytest.mark.parametrize("name", CASES)
def test_the_programs_are_right(name: str) -> None:
    program = program_of(name)
    if isinstance(program, PipelineProgram):
        verify_pipeline(program)
    else:
        verify_program(program)


@pytest.mark.parametrize("exhibit", [e for e in RULES if e.written.mutation], ids=ids)
def test_the_rules_are_right(exhibit: Exhibit) -> None:
    assert isinstance(exhibit.written, InRule)
    report = exhibit.written.proof(mutated=False)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 6))]
)
def test_good_random_plans_raise_no_alarm(block: int) -> None:
    """Plans on one mesh, over units, and in stages; tests/product/random_plans.py tries many
    more.
    """
    for seed in range(4 * block, 4 * (block + 1)):
        name = random_plans.MODELS[seed // 2 % len(random_plans.MODELS)]
        random_plans.refused(name, seed)


def test_the_sources() -> None:
    """Threads of GitHub with their numbers, of many systems."""
    sources = {source for exhibit in EXHIBITS for source in exhibit.sources}
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+/(issues|pull)/\d+", source) for source in sources)
    assert len(EXHIBITS) >= 45 and len(sources) >= 60
    assert len({source.split("/")[1] for source in sources}) >= 20


# ------------------------------------------------------------------------------------------------
# faults that nobody has published


def refused(mutation: m.PipelineMutation, match: str) -> None:
    program = program_of("pipeline")
    assert isinstance(program, PipelineProgram)
    with pytest.raises(InternalError, match=match):
        verify_pipeline(mutation(program))


def test_crossings_that_do_not_fit() -> None:
    refused(m.one_way("x"), "x crosses from stage 0 to stage 1 without its gradient")
    refused(lambda p: replace(p, crossings=()), "missing: x from stage 0 to 1")
    refused(lambda p: replace(p, crossings=p.crossings * 2), "missing: none")

    def elsewhere(program: PipelineProgram) -> PipelineProgram:
        (crossing,) = program.crossings
        return replace(program, crossings=(replace(crossing, received=crossing.sent),))

    refused(elsewhere, r"x crosses from stage 0 to stage 1 as .*, stage 1 has it as")


def test_parameters_that_are_not_those_of_the_graph() -> None:
    program = program_of("tp")
    assert isinstance(program, Program)
    first, *rest = program.declarations
    for declarations, match in (
        (tuple(rest), "embedding_weight of the graph is not declared"),
        (
            (replace(first, value=replace(first.value, requires_grad=False)), *rest),
            "embedding_weight is declared with requires_grad = False, the graph has True",
        ),
    ):
        with pytest.raises(InternalError, match=match):
            verify_program(replace(program, declarations=declarations))


def test_calls_that_are_not_those_of_the_graph() -> None:
    program = program_of("tp")
    assert isinstance(program, Program)
    call = m.compute(program, "dropout")
    first, *rest = call.op.args
    for op, match in (
        (replace(call.op, args=(first, *rest[::-1])), "dropout is computed with other arguments"),
        (replace(call.op, grad_enabled=False), "with grad_enabled = False, its strategies ask for"),
        (call.op.with_args(axes=("tp",), p=0.2), "with p = 0.2, its strategies ask for p = 0.1"),
    ):
        with pytest.raises(InternalError, match=match):
            verify_program(m.swapped(program, call, replace(call, op=op)))


# ------------------------------------------------------------------------------------------------
# the page


def links(exhibit: Exhibit) -> Iterator[str]:
    """The threads as links, such as ``[hpcaitech/ColossalAI #4927](https://...)``."""
    for source in exhibit.sources:
        owner, repository, _, number = source.split("/")
        yield f"[{owner}/{repository} #{number}](https://github.com/{source})"


def rendered(exhibit: Exhibit) -> str:
    """The section of one exhibit."""
    happened = textwrap.fill(exhibit.happened, 100, break_on_hyphens=False)
    algebra = textwrap.fill(
        f"In the algebra: {exhibit.algebra}. shardwright says:", 100, break_on_hyphens=False
    )
    threads = ",\n".join(links(exhibit))
    message = exhibit.written.verdict()
    return (
        f"### {exhibit.title}\n\n{happened}\n{threads}\n\n{algebra}\n\n```text\n{message}\n```\n\n"
    )


def test_the_page(golden: Callable[[str, str], None]) -> None:
    """The part between the marks is written from the table, messages included."""
    rooms = "".join(f"## {room.title}\n\n{''.join(map(rendered, room.exhibits))}" for room in ROOMS)
    head, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    golden("../../docs/museum.md", f"{head}{BEGIN}\n{rooms}{END}{tail}")
    assert f"{len(EXHIBITS)} published faults" in head
