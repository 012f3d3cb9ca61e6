"""The code in the README and in docs/ is Python, and runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from spawn import run_script

import shardwright
from shardwright.frontend.cli.main import main
from shardwright.policies import known_policies
from shardwright.runtime.ranks.threads import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("frontend", "compiler", "policies", "runtime", "benchmarks", "examples")
LINKING = [
    *sorted(ROOT.glob("*.md")),
    *sorted(page for folder in ("docs", *FOLDERS) for page in (ROOT / folder).rglob("*.md")),
]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run_as_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str) -> None:
    """Import ``source`` from a file in ``tmp_path``, as a user's module, with that folder as the
    working directory.
    """
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_python(page: Path) -> None:
    for block in blocks(str(page.relative_to(ROOT))):
        compile(block.replace("(..., ", "("), str(page), "exec")


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page ends in, as GitHub makes it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" in target:
            continue
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_first_compile_of_getting_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "docs/getting-started.md"
    run_as_module(tmp_path, monkeypatch, blocks(page)[0], "my_module")
    first, _ = sorted(tmp_path.rglob("gencode*.py"))
    assert main(["inspect", str(first.parent)]) == 0
    printed = first.read_text() + capsys.readouterr().out
    for text in re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL):
        for line in text.splitlines():
            assert line in printed


def test_getting_started_verifies_and_writes_down_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = blocks("docs/getting-started.md")
    alone = [page[0], *(block for block in page if ".verify(" in block or "dump=" in block)]
    assert len(alone) == 3
    run_as_module(tmp_path, monkeypatch, "".join(alone), "guide_verify")
    written = {path.name for path in (tmp_path / "passes").iterdir()}
    assert {"00-trace.txt", "05-emit.txt"} <= written


def test_the_policies_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, page = blocks("docs/getting-started.md")[0], "docs/custom-policies.md"
    policies = "\n".join(
        re.sub(
            r"\"?(my_policy|every_verb|mine)\"?, (config|four|own)\)",
            r"\1, \2, load_module=False, instance_name='\1')",
            block,
        )
        for block in blocks(page)
    )
    monkeypatch.setattr(known_policies, "_registered", dict(known_policies._registered))
    run_as_module(tmp_path, monkeypatch, f"{first}\nmodel = Net()\n{policies}", "guide_policy")
    shown = re.findall(r"```text\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)[0]
    without_lines = re.sub(r"[a-z_]+\.py:\d+", "", capsys.readouterr().out)
    assert re.sub(r"[a-z_]+\.py:\d+", "", shown) in without_lines
    sources = {path.parent.name: path.read_text() for path in tmp_path.rglob("gencode0.py")}
    assert "[256/tp, 64]" in sources["my_policy"]
    assert (
        '"up.weight", "[256/tp, 64] G(dp)"' in sources["every_verb"]
        and '"up.bias", "[256]' in sources["every_verb"]
    )
    assert '"up.bias", "[256]"' in sources["mine"]


@pytest.mark.slow
def test_text_is_generated_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = (block for block in blocks("docs/getting-started.md") if "generate" in block)
    monkeypatch.chdir(tmp_path)
    # Transformers loads its modules late, and not by several threads at once.
    assert transformers.GPT2LMHeadModel

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        names: dict[str, Any] = {
            "torch": torch,
            "shardwright": shardwright,
            "transformers": transformers,
        }
        exec(source, names)
        original = names["original"]
        assert original.forward.__self__ is names["parallel"]
        del original.forward
        return names["tokens"], original.generate(names["ids"], use_cache=False, max_new_tokens=8)

    (found, expected), (on_the_other, _) = run_ranks(2, run)
    assert (
        found.shape == (2, 11) and torch.equal(found, expected) and torch.equal(on_the_other, found)
    )


def test_the_registered_function_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_module(
        tmp_path, monkeypatch, "\n".join(blocks("docs/register-op.md")), "guide_register_op"
    )


def test_the_readme_trains_on_two_ranks(tmp_path: Path) -> None:
    training, project, trainer = blocks("README.md")
    assert trainer == blocks("docs/trainers.md")[0], "the test of that page runs it"
    for name, block in (("train.py", training), ("my_project.py", project)):
        (tmp_path / name).write_text(block)
    run_script(2, tmp_path, "train.py")
    assert len(list(tmp_path.rglob("gencode*.py"))) == 2
    generated = next(tmp_path.rglob("gencode0.py")).read_text().replace("        ", "")
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert shown in generated


@pytest.mark.slow
def test_getting_started_trains_on_two_ranks(tmp_path: Path) -> None:
    compiled, loaded, training = blocks("docs/getting-started.md")[:3]
    data = "torch.manual_seed(0)\nbatches = [torch.randn(2, 8, 64) for _ in range(3)]\n"
    leaving = "dist.barrier()\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text("\n".join((compiled, loaded, data, training, leaving)))
    run_script(2, tmp_path, "train.py")


@pytest.mark.slow
def test_the_pipeline_of_the_guide_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("docs/pipelines.md")[0])
    run_script(2, tmp_path, "train.py")
    assert "1F0 1B0" in next(tmp_path.rglob("gencode1.py")).read_text()


def test_the_schedules_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("docs/pipelines.md")[2], "guide", "exec"), {})
    assert "1f1b bubble 27%, microbatches held (4, 3, 2, 1)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_searches_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The searches run with less to choose from where it searches longest."""
    monkeypatch.chdir(tmp_path)
    entry = zoo.get("gpt2")
    names: dict[str, Any] = {"model": entry.build().float(), "dummy_args": entry.inputs()}
    first, models, second, third = blocks("docs/autodist.md")
    first = first.replace("\n)", "\n    load_module=False,\n)")
    second = second.replace(
        '{"global_batch": 256}',
        '{"global_batch": 256, "microbatch": [4], "zero": [1], "num_stages": 1}',
    )
    second = second.replace(
        '"saved", config)', '"saved", config, load_module=False, instance_name="saved")'
    )
    for block in (first, models, second, third):
        exec(block, names)
    llama, inputs = names["make_llama"]()
    assert llama.device.type == "meta" and inputs["input_ids"].shape == (4, 2048)
    assert len(list(tmp_path.rglob("gencode*.py"))) == 16 and (tmp_path / "plan.json").exists()
    assert names["found"].gap == 0 and names["found"].plan.mesh.size == 8
