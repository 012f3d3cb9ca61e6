"""The commands that search for plans: ``plan`` finds one, writes it and shows it; ``explain`` says
why.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import pytest
import zoo

from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.cli.main import main
from shardwright.frontend.cli.searches import candidate_table
from shardwright.frontend.search_plan import PlanSearch
from shardwright.policies.autodist.candidates.mesh_requests import PlacedModel
from shardwright.policies.autodist.candidates.results import Candidate, SearchResult
from shardwright.runtime.layout import Mesh

MODELS = """
import sys
sys.path.insert(0, {lib!r})
import zoo
def make():
    entry = zoo.get("mlp")
    return entry.build(), entry.inputs()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    (tmp_path / "plan_models.py").write_text(MODELS.format(lib=str(Path(zoo.__file__).parent)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(line: str, expected: int = 0) -> str:
        code = main(line.split())
        out, err = capsys.readouterr()
        assert code == expected, err or out
        return out if code == 0 else err

    return run


def test_plan(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    settings = (
        "--set use_end2end=true --set pas_config.num_microbatches=2 --set "
        "pas_config.memory_limit_gb=1"
    )
    request = f"plan plan_models:make --plan-ngpus 2 {settings}"
    shown = run(f"{request} --out plan.json --html plan.html")
    table, *rest = shown.split("\nplan: ")
    assert rest == ["plan.json\npage: plan.html\n"]
    assert (
        "pp=2, 1f1b" in table and "audited" in table and "per step on a100-80gb, at least" in table
    )
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.policy == "autodist" and plan.certificate is not None
    page = (tmp_path / "plan.html").read_text()
    assert str(plan.certificate) in shown and all(
        f"<td>{escape(reason)}</td>" in page for reason in plan.certificate.proof
    )
    parts = ("How far from the best", "What was tried", "could be saved at most", "limit, 1 GB")
    assert all(part in page for part in parts)
    run(
        "verify plan_models:make --policy saved --plan-ngpus 2 --steps 1 --set use_end2end=true "
        "--set pas_config.load_plan=plan.json"
    )


def test_simulate_has_the_limit_of_the_policy(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    request = "simulate plan_models:make --plan-ngpus 2 --html simulated.html --policy"
    run(f"{request} autodist --set pas_config.memory_limit_gb=3")
    assert "limit, 3 GB" in (tmp_path / "simulated.html").read_text()
    run(f"{request} autodist --set pas_config.mem_constraint=2")
    assert "limit, 2 GB" in (tmp_path / "simulated.html").read_text()
    run(f"{request} tp --hardware h100")
    assert "limit, 3 GB" not in (tmp_path / "simulated.html").read_text()


def test_what_is_said_twice(run) -> None:  # type: ignore[no-untyped-def]
    split = (
        '--set pas_config.mesh={"dp":2} --set pas_config.pin={"down":{"dp":"batch"}} --out '
        "plan.json"
    )
    assert "per step on h100" in run(
        f"plan plan_models:make --plan-ngpus 2 --set pas_config.hardware=h100 {split}"
    )
    assert json.loads(Path("plan.json").read_text())["dims"]["down"] == {"dp": "batch"}
    assert "on h100" in run(
        "simulate plan_models:make --policy autodist --plan-ngpus 2 --set pas_config.hardware=h100"
    )
    assert "on h100" in run("simulate plan_models:make --policy tp --plan-ngpus 2 --hardware h100")
    assert run(
        "plan plan_models:make --plan-ngpus 2 --hardware h100 --set pas_config.hardware=a100-80gb",
        expected=1,
    ) == (
        "error: --hardware and --set pas_config.hardware say different things\n"
        "  why:   'h100' and 'a100-80gb'\n"
        "  try:   leave out one of them; --hardware is enough\n"
    )


def test_a_machine_that_is_too_small(run) -> None:  # type: ignore[no-untyped-def]
    shown = run(
        "plan plan_models:make --plan-ngpus 2 --set pas_config.memory_limit_gb=1e-9", expected=1
    )
    assert shown.startswith("error: no plan for 2 ranks fits on a100-80gb\n")
    shown = run("plan plan_models:make --plan-ngpus 2 --hardware a10", expected=1)
    assert "did you mean 'a100" in shown or "one of" in shown


def test_the_stage_of_zero_and_the_size_of_a_microbatch_are_searched(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ranks = "--plan-ngpus 1 --runtime-ngpus 2 --set use_zero=auto"
    asked = f"{ranks} --global-batch 8 --microbatch 2,4 --batch-dims x=0,target=0"
    shown = run(f"plan plan_models:make {asked} --out plan.json --html plan.html")
    assert "one rank, microbatches of 2, ZeRO-3" in shown
    assert (
        "searched one by one: microbatches of 2 and 4 samples, units of 1 rank alone, stages 0, 1, "
        "2 and 3 of ZeRO" in shown
    )
    assert "a step of a unit: 1 microbatch of 4 samples (dim 0 of x, dim 0 of target)\n" in shown
    assert "stage of ZeRO: 2 (use_zero='auto' takes it from the plan)\n" in shown
    assert "1 microbatch of 4 samples" in (tmp_path / "plan.html").read_text()
    saved = f"plan_models:make --policy saved {ranks} --set pas_config.load_plan=plan.json"
    run(f"verify {saved} --steps 1")
    compiled = run(f"compile {saved}")
    assert "\na step of a unit: 1 microbatch of 4 samples\n" in compiled
    (directory,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    shown = run(f"inspect {directory}")
    assert (
        "batch    1 microbatch of 4 samples in a unit" in shown
        and "zero     stage 2, as the plan says" in shown
    )
    assert "What would help" in run(f"explain plan_models:make {asked}")
    for wrong, words in (
        (
            "--global-batch 8 --microbatch 2;4",
            "error: '2;4' does not list sizes of a microbatch\n  try:   for example 1,2,4",
        ),
        (
            "--batch-dims x",
            "error: 'x' does not say dims of inputs\n  try:   for example input_ids=0,labels=0",
        ),
        ("--set pas_config.load_plan=a.json", "error: a search has no use for load_plan\n"),
    ):
        assert run(f"plan plan_models:make {ranks} {wrong}", expected=1).startswith(words)


def test_a_long_table_says_what_it_leaves_out() -> None:
    plan = Plan(Mesh((("tp", 2),)))
    candidates = [
        Candidate(f"plan {i}", plan, float(i), (PlacedModel(plan, 0.0, "", ""),)) for i in range(4)
    ]
    found = SearchResult(others=candidates, refused={f"refused {i}": "too large" for i in range(3)})
    table = candidate_table(found, most=2)
    more = "all: in the certificate of --out, and on --html"
    assert [list(column.cells) for column in (table.columns[0], table.columns[-1])] == [
        [
            "plan 0",
            "plan 1",
            "and 2 more that take longer",
            "refused 0",
            "refused 1",
            "and 1 more refused",
        ],
        ["predicted", "predicted", more, "too large", "too large", more],
    ]
    assert candidate_table(found).row_count == 7


def test_candidates_of_one_title_have_one_row() -> None:
    plan = Plan(Mesh((("tp", 2),)))
    times = {"alone": [1.5], "alike": [1.0, 3.0, 2.0]}
    candidates = [
        Candidate(title, plan, s, (PlacedModel(plan, 0.0, "", ""),))
        for title, of in times.items()
        for s in of
    ]
    table = candidate_table(SearchResult(others=candidates))
    assert [
        list(column.cells) for column in (table.columns[0], table.columns[1], table.columns[-1])
    ] == [
        ["alike", "alone"],
        ["1 s", "1.5 s"],
        ["predicted; 2 more placed otherwise, up to 3 s", "predicted"],
    ]


def test_explain(run) -> None:  # type: ignore[no-untyped-def]
    request = "explain plan_models:make --plan-ngpus 2"
    shown = run(request)
    assert (
        "What would help" in shown
        and "links of twice the rate" in shown
        and "memory without limit" in shown
    )
    shown = run(f"{request} --op down --module down --against tp=2")
    assert "Dims of its rule: " in shown and " is batch" in shown
    assert "Operator down" in shown and "Module down" in shown and "as planned" in shown
    assert "peak memory" in shown and "computing" in shown
    lines = [line for line in shown.splitlines() if line.startswith("*")]
    assert len(lines) == 2 and all("+0.0%" in line for line in lines)


def test_what_cannot_be_answered_or_written_is_refused_before_the_search(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    def searched(*_: object) -> None:
        raise AssertionError("the search began")

    monkeypatch.setattr(PlanSearch, "run", searched)
    monkeypatch.setattr("shardwright.policies.autodist.autodist_policy.search_each", searched)
    explain, folder = "explain plan_models:make --plan-ngpus 2", tmp_path / "folder"
    folder.mkdir()
    for line, words in (
        (
            f"{explain} --op dwn",
            "error: the model has no operator 'dwn'\n  try:   did you mean 'down'?\n",
        ),
        (
            f"{explain} --module dwn",
            "error: no operator belongs to module 'dwn'\n  try:   did you mean 'down'?\n",
        ),
        (
            f"{explain} --against tp=4",
            "error: the mesh tp=4 has 4 ranks\n"
            "  why:   plan_ngpus=2\n"
            "  try:   make the product of the sizes equal to plan_ngpus\n",
        ),
        (
            f"{explain} --against pp=2",
            "error: policy 'autodist' has num_stages but no num_microbatches\n"
            "  why:   a pipeline is planned for the number of samples of a step\n"
            "  try:   give num_microbatches\n",
        ),
        (
            f"{explain} --against tp4",
            "error: 'tp4' does not say the sizes of axes\n  try:   for example tp=8, or "
            "pp=2,tp=4\n",
        ),
        (
            f"{explain} --most 0",
            "error: --most 0 leaves no choice to show\n  try:   show at least one\n",
        ),
        (
            "plan plan_models:make --plan-ngpus 2 --out none/plan.json",
            _unwritable("--out none/plan.json"),
        ),
        (
            "plan plan_models:make --plan-ngpus 2 --html none/plan.html",
            _unwritable("--html none/plan.html"),
        ),
        (
            "simulate plan_models:make --policy tp --plan-ngpus 2 --html none/a.html",
            _unwritable("--html none/a.html"),
        ),
        (
            "plan plan_models:make --plan-ngpus 2 --set pas_config.save_plan=none/a",
            _unwritable("save_plan none/a"),
        ),
        (
            "compile plan_models:make --policy autodist --plan-ngpus 2 --set "
            "pas_config.save_plan=none/a",
            _unwritable("save_plan none/a"),
        ),
        (
            "plan plan_models:make --plan-ngpus 2 --out folder",
            "error: --out folder is a folder\n  try:   name a file, for example folder/plan.json\n",
        ),
    ):
        assert run(line, expected=1) == words
    assert not list(folder.iterdir())


def _unwritable(what: str) -> str:
    why, hint = "none: No such file or directory", "make the folder, or name a file in another one"
    return f"error: {what} cannot be written\n  why:   {why}\n  try:   {hint}\n"
