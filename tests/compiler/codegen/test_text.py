"""Long lines are broken the way ``ruff format`` breaks them."""

import ast
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from shardwright.compiler.codegen.text import (
    Line,
    _tokens,
    layout_lines,
    names_read,
    split_commas,
    wrap,
    wrap_statement,
)

A, B, C = "a" * 20, "b" * 20, "c" * 20

LONG = [
    f"x = f({A}, {B})",
    f"x = f({A}, {B}, {C})",
    f"x = f({A}, g({A}, {B}, {C}), {B})",
    f"xxxxxxxxxxx = {A} * {B}",
    f"x = {A}{A} + {B}{B}",
    f"{A}, {B} = g({A}, 1)",
    f"{A}, {B} = gg({A}{A})",
    f"x = {A}[:, {B}:{B}]",
    f'x = gg("a, (b", {A}, {B})',
    f"xx = {A} if self.training else {B}",
    f"x = [{A}, {B}, 1]",
    f"self.check({A}, {{}}, {B})",
]


@pytest.mark.parametrize("code", LONG)
def test_breaks_are_those_of_the_formatter(code: str) -> None:
    lines = wrap_statement(code, 48)
    assert len(lines) > 1
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "48", "-"]
    formatted = subprocess.run(
        command, input=code, capture_output=True, text=True, check=True
    ).stdout
    assert formatted == "\n".join(lines) + "\n"


def test_a_return_breaks_inside_its_value() -> None:
    assert wrap_statement(f"return gg({A}, {B}, 1)", 48) == [
        "return gg(",
        f"    {A},",
        f"    {B},",
        "    1,",
        ")",
    ]
    assert wrap_statement(f"return gg({A}, {B})", 48) == ["return gg(", f"    {A}, {B}", ")"]


def test_short_statements_stay() -> None:
    assert wrap_statement("x = f(a)", 48) == ["x = f(a)"]
    assert wrap("def forward(self):", 48) == ["def forward(self):"]


def test_headers_break_one_argument_a_line() -> None:
    assert wrap(f"def forward(self, {A}, {B}):", 40) == [
        "def forward(", "    self,", f"    {A},", f"    {B},", "):",
    ]  # fmt: skip


def test_commas_inside_strings_and_brackets_do_not_count() -> None:
    assert split_commas('"a, b", (c, d), {"e": [f, g]}, h') == [
        '"a, b"',
        "(c, d)",
        '{"e": [f, g]}',
        "h",
    ]


def test_names_that_a_line_reads() -> None:
    assert names_read('x = f(tp, dim=0, layout="[4/dp, 8]", y=self.ep)') == {"f", "tp", "self"}
    assert names_read("x = a.view(2 * tp.local_size(3))") == {"a", "tp"}


def test_guards_open_once_for_neighbours() -> None:
    guard = ("with torch.no_grad()",)
    lines = [
        Line("a = 1", "one", guard),
        Line("b = 2", "", guard),
        Line("c = 3"),
        Line("d = 4", "", (*guard, "if self.training")),
    ]
    assert layout_lines(lines, 4) == [
        "    with torch.no_grad():",
        "        a = 1  # one",
        "        b = 2",
        "    c = 3",
        "    with torch.no_grad():",
        "        if self.training:",
        "            d = 4",
    ]


def test_a_comment_that_does_not_fit_stands_above() -> None:
    long = "x" * 100
    assert layout_lines([Line(f"{long} = 1", "a comment of some length")], 4) == [
        "    # a comment of some length",
        f"    {long} = 1",
    ]
    parts = ["y" * 70, "z" * 70]
    assert layout_lines([Line("x = 1", "  ".join(parts))], 4) == [
        f"    # {parts[0]}",
        f"    # {parts[1]}",
        "    x = 1",
    ]


GENERATED = sorted((Path(__file__).parents[2] / "golden").glob("gpt.*.py"))
SIGNS = [
    "x = a ** -1.5e-05 // b",
    "y: int = 0x1F + 1_000j - .5",
    "a @= (c := d) != e <= f >> 2",
    r"""f(b'\'', r'\d', "it's")[..., ::-1]""",
]


@pytest.mark.parametrize(
    "path", [*GENERATED, None], ids=lambda path: path.name if path else "signs"
)
def test_tokens_are_those_of_python(path: Path | None) -> None:
    lines = (
        [line.split("  # ")[0].strip() for line in path.read_text().splitlines()] if path else SIGNS
    )
    statements = [line for line in lines if '"""' not in line and is_python(line)]
    assert len(statements) > len(lines) // 2
    for line in statements:
        tokens = tokenize.generate_tokens(iter([line]).__next__)
        expected = [
            (token.start[1], token.end[1], token.string) for token in tokens if token.string
        ]
        assert [(start, end, text) for start, end, text, _ in _tokens(line)] == expected, line


def is_python(line: str) -> bool:
    try:
        ast.parse(line)
    except SyntaxError:  # a line of a longer statement or text
        return False
    return True
