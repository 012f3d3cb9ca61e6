"""The line on a terminal that says what a command is doing."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import shardwright
from shardwright.frontend.cli import main as command_line
from shardwright.frontend.cli.progress_line import ProgressLine
from shardwright.frontend.cli.progress_text import ProgressText
from shardwright.frontend.search_plan import PlanSearch
from shardwright.runtime.activity import activity, listening, tell
from shardwright.runtime.checkpoint.merge_files import merge_checkpoint


class Heard:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def begin(self, words: str) -> None:
        self.words.append(f"{words} begins")

    def tell(self, words: str, share: float | None) -> None:
        assert share is None or share >= 0
        self.words.append(words)

    def end(self) -> None:
        self.words.append("ends")


def test_long_calls_say_what_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heard, x = Heard(), {"input": torch.randn(4, 8)}
    config = shardwright.ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, pas_config={"time_limit_s": 60.0}
    )
    with listening(heard):
        PlanSearch.of(nn.Linear(8, 8), x, config).run()
    began = [words for words in heard.words if words.endswith(("begins", "ends"))]
    assert began == ["tracing begins", "ends", "searching begins", "ends"]
    assert any(re.match(r"audit of .*=2", words) for words in heard.words)
    heard.words.clear()
    alone = shardwright.ComputeConfig(plan_ngpus=1, runtime_ngpus=1)

    def save(rank: int) -> None:
        module = shardwright.parallelize(nn.Linear(8, 8), x, "dp", alone)
        shardwright.save_checkpoint(tmp_path / "saved", module).wait()

    shardwright.run_ranks(1, save)
    with listening(heard), activity("merging"):
        merge_checkpoint(tmp_path / "saved", tmp_path / "merged")
    assert "writing model.safetensors" in heard.words


def test_the_line_is_drawn_and_wiped_away() -> None:
    drawn = io.StringIO()
    line = ProgressLine(Console(file=drawn, force_terminal=True, width=100))
    with listening(line):
        with activity("compiling Net"):
            tell("trace")
            with activity("searching"):
                tell("dp=2; best so far 1 ms", 0.5)
                assert line._progress is not None
                line._progress.refresh()
                assert line._progress.tasks[0].total == 1
            assert line._progress.tasks[0].total is None, "what follows has no share yet"
        assert line._progress is None
        with pytest.raises(ValueError), activity("merging"):
            raise ValueError
    assert line._progress is None and line._titles == []
    text = drawn.getvalue()
    assert "searching: dp=2; best so far 1 ms" in text and text.endswith("\x1b[2K")


LONG = "3 of 12, units of 4 ranks, microbatches of 2: pp=8 x dp=4 x tp=2"
FOUND = "; best so far 8.02 s, pp=8 x dp=8, zb_h1, stages that differ, recompute"


def test_bar_clock_and_the_best_plan_have_their_place_on_a_narrow_terminal() -> None:
    drawn = io.StringIO()
    line = ProgressLine(Console(file=drawn, force_terminal=True, width=80))
    with listening(line), activity("searching"):
        tell(f"{LONG}{FOUND}", 0.5)
        assert line._progress is not None
        line._progress.refresh()
        tell("x" * 200)
        assert line._progress.tasks[0].description == f"searching: {'x' * 37}…"
    frames = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue()))
    (frame,) = (text for text in frames if "3 of 12" in text)
    assert re.search(
        r"^. searching: 3 of 12, uni…; best so far 8.02 s, pp… ━{9,10}\S* *━* 0:00:0\d$", frame
    ), frame


def test_lines_of_text_are_cut_too_and_a_pipe_that_was_closed_ends_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(ProgressText()), activity("searching"):
        tell(f"{LONG}{FOUND}")
        told = capsys.readouterr().err.splitlines()[-1]
        assert len(told) == 100 and "…; best so far 8.02 s, pp=8 x dp=8" in told
        reader, writer = os.pipe()
        os.close(reader)
        with monkeypatch.context() as patched, os.fdopen(writer, "wb", 0) as pipe:
            patched.setattr(sys, "stderr", io.TextIOWrapper(pipe, write_through=True))
            with pytest.raises(BrokenPipeError):
                print("it is closed", file=sys.stderr, flush=True)
            tell("goes on")


def test_without_a_terminal_what_takes_long_says_so_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with command_line._progress(), activity("searching"):
        tell("tp=2", 0.5)
        now[0] += command_line.SECONDS_BETWEEN_LINES
        tell("tp=4")
        tell("tp=8")
        now[0] += command_line.SECONDS_BETWEEN_LINES
        tell("tp=16")
    assert capsys.readouterr() == ("", "searching: tp=4\nsearching: tp=16\n")


def test_without_a_terminal_some_commands_tell_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with listening(ProgressText()):
        tell("of another rank")
        with activity("calibrating for about 30 s"):
            tell("memory", 0.1)
            tell("memory", 0.2)
            tell("all_reduce of 2 ranks, node", 0.5)
    assert capsys.readouterr() == (
        "",
        "calibrating for about 30 s\n"
        "calibrating for about 30 s: memory\n"
        "calibrating for about 30 s: all_reduce of 2 ranks, node\n",
    )
