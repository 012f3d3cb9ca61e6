"""A model whose every name, key and constant is given, and the shape of the files generated for it
without them.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis.strategies as st
import plans
import torch
from hypothesis.strategies import SearchStrategy
from parity import assert_close_tree
from torch import Tensor, nn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.known_policies import find_policy
from shardwright.runtime import structure
from shardwright.runtime.atoms import Atom
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks


class Colour(enum.Flag):
    """Members, and a combination that has no name of its own."""

    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    value: Any


@dataclass(frozen=True)
class Texts:
    """What is called how. ``layers`` is a list of layers, in each of which are a module ``inner``,
    a parameter ``scale`` and a buffer ``count``; ``words`` is an embedding. ``sample``, ``deep``
    and ``loss`` are keys of dicts that go in and come out. ``cls`` and ``file``: the class, and the
    file its source claims to be. ``axis``: of the mesh. ``constant`` is returned.
    """

    layers: str = "layers"
    inner: str = "inner"
    scale: str = "scale"
    count: str = "count"
    words: str = "words"
    sample: Any = "x"
    deep: Any = "ids"
    loss: Any = "loss"
    cls: str = "Model"
    file: str = "model.py"
    axis: str = "tp"
    constant: Any = 1.0


PLAIN = Texts()
NAMES = (
    "layers",
    "inner",
    "scale",
    "count",
    "words",
    "sample",
    "deep",
    "loss",
    "cls",
    "file",
    "axis",
)
AWKWARD = (
    *(
        '"',
        "'",
        '"""',
        "\\",
        "a\\",
        "a\nb",
        "\r",
        "a\r\n    raise",
        "\x0c",
        "\u2028x",
        "\x85",
        "\x00",
        "\u202e",
        "é",
        "ﬁ",
        "½",
    ),
    *(
        "class",
        "None",
        "__class__",
        "__dict__",
        "__x",
        "_x",
        "self",
        "torch",
        "F",
        "math",
        "dist",
        "block",
        "layer",
        "float",
    ),
    *(
        "01",
        "²",
        "7",
        "a b",
        "a  b",
        " ",
        "#",
        "# fmt: off",
        "{layer}",
        "{0}",
        "}",
        "{{ seed }}",
        "%s",
        "␂nan",
        "a-b",
    ),
    *(
        '"); raise SystemExit("',
        "\nimport os\n",
        "forward",
        "weights",
        "mesh",
        "rank",
        "x",
        "ids",
        "tp",
        "हिन्दी",
    ),
    *(
        "x" * 130,
        "long name " * 15,
        "Model",
        "Segment",
        "all_reduce",
        "embedding",
        "axis_",
        "operand_0",
        "x1",
        "loss",
        "nan",
    ),
)
"""Texts that have broken something somewhere, or could."""
AXES = tuple(t for t in AWKWARD if t.isidentifier() and t != "ﬁ") + (
    "layers_inner",
    "sample_leaves",
    "linear",
    "h",
    "S",
    "N",
)
CONSTANTS = (
    *(
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        0.0,
        1e300,
        5e-324,
        10**4200,
        -(2**70),
        True,
        None,
        1j,
        complex(-0.0, math.nan),
    ),
    *(
        complex(math.inf, -0.0),
        "a\nb",
        '"',
        "{layer}",
        "",
        b"\x00'",
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
    ),
    *(
        slice(None, 3),
        slice(1, None, -2),
        ...,
        range(1, 9, 2),
        (),
        (1,),
        [(), [1.5]],
        {1: 2, "1 ": {None: (-0.0,)}},
    ),
    *(
        {(1, "a"): {1.5: True}},
        Colour.RED,
        Colour.RED | Colour.BLUE,
        Pair(1, "'"),
        Record({"\\": -0.0}),
    ),
)

SOURCE = """
def forward(self, sample):
    x = sample[texts.sample] + self._modules[texts.words](sample["more"][texts.deep])
    for layer in self._modules[texts.layers]:
        x = layer(x)
    x = torch.where(x > 1e9, texts.constant if isinstance(texts.constant, float) else 0.0, x)
    return {texts.loss: x.square().mean(), "constant": texts.constant}


def layer_forward(self, x):
    h = torch.tanh(self._modules[texts.inner](x)) * self._parameters[texts.scale]
    self._buffers[texts.count].add_(1)
    h = nn.functional.dropout(h, 0.0, self.training)
    return x + h @ self._modules["down"].weight + self._buffers[texts.count]
"""


def model_of(texts: Texts) -> nn.Module:
    """The model. What it computes does not depend on the names."""
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "texts": texts}
    exec(compile(SOURCE, texts.file.replace("\x00", "\\0"), "exec"), scope)
    layer_class = type("Layer", (nn.Module,), {"forward": scope["layer_forward"]})
    generator = torch.Generator().manual_seed(0)

    def layer() -> nn.Module:
        made = layer_class()
        made._modules.update({texts.inner: nn.Linear(6, 7), "down": nn.Linear(6, 7, bias=False)})
        made._parameters[texts.scale] = nn.Parameter(torch.empty(7))
        made._buffers[texts.count] = torch.zeros(())
        return made

    model = type(
        texts.cls.replace("\x00", "\\0"),
        (nn.Module,),
        {"forward": scope["forward"], "__module__": __name__},
    )()
    model._modules.update(
        {texts.words: nn.Embedding(9, 6), texts.layers: nn.ModuleList([layer(), layer()])}
    )
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
            )
    return model


def sample_of(texts: Texts) -> dict[str, Any]:
    """The arguments of its forward."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    return {
        "sample": {
            texts.sample: x,
            "more": {texts.deep: torch.randint(9, (4,), generator=generator)},
        }
    }


def harmless(texts: Texts) -> Texts:
    """The constants, under harmless names."""
    return dataclasses.replace(PLAIN, constant=texts.constant)


def with_axis(plan: Plan, axis: str) -> Plan:
    """A plan of ``tp`` on a mesh whose only axis is called ``axis``."""

    def renamed(layout: Layout) -> Layout:
        rename = {"tp": axis}
        dims = tuple(
            tuple(Atom(a.segments, tuple(rename.get(n, n) for n in a.axes)) for a in dim)
            for dim in layout.dims
        )
        return Layout(
            dims,
            *(
                tuple(rename.get(n, n) for n in names)
                for names in (layout.partial, layout.grad_partial)
            ),
        )

    return dataclasses.replace(
        plan,
        mesh=Mesh(((axis, plan.mesh.size),)),
        strategies={
            op: dict(zip([axis], found.values(), strict=False))
            for op, found in plan.strategies.items()
        },
        stored={fqn: renamed(layout) for fqn, layout in plan.stored.items()},
        notes=(),
        policy=f"policy {axis}",
    )


def skeleton(source: str) -> str:
    """What a file does, whatever things are called: its syntax tree with names numbered by their
    first use, strings left out, and reads of weights alike.
    """
    return ast.dump(_Skeleton().visit(ast.parse(source)), indent=1)


class _Skeleton(ast.NodeTransformer):
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def _number(self, name: str) -> str:
        return f"n{self.numbers.setdefault(name, len(self.numbers))}"

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._number(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._number(node.arg))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = "C"
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self.numbers = self.numbers, {}  # variables are those of one method
        node.name = "method"
        found = self.generic_visit(node)
        self.numbers = outer
        return found

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("S") if isinstance(node.value, str) else node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        keys = [key and ast.Constant("key") for key in node.keys]
        return ast.Dict(keys, [self.visit(value) for value in node.values])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        assert [type(part).__name__ for part in node.values].count("FormattedValue") == 1
        return ast.Constant("layered")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and _root(node.func.value) == "self":
            if node.func.attr == "weights":
                return ast.Name("W", ast.Load())
            called = (
                node.func.attr if not node.func.attr.endswith(("_block", "_block_2")) else "block"
            )
            node.func = ast.Name(called, ast.Load())
            return ast.Call(
                node.func,
                [self.visit(a) for a in node.args],
                [self.visit(k) for k in node.keywords],
            )
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if _root(node) in ("self", "block") and node.attr not in ("training", "device", "draw"):
            return ast.Name("W", ast.Load())
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return (
            ast.Name("W", ast.Load())
            if _root(node) in ("self", "block")
            else self.generic_visit(node)
        )


def _root(node: ast.AST) -> str | None:
    """The variable at the start of a chain of attributes, items and calls of ``self.weights``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "weights"
    ):
        return _root(node.func.value)
    return node.id if isinstance(node, ast.Name) else None


def same_constant(found: Any, expected: Any) -> bool:
    """Whether two constants are alike to their types, the signs of zeros, and NaN."""
    if isinstance(expected, int) and abs(expected) > 10**4250:  # which has no decimal text
        return bool(found == expected)
    return type(found) is type(expected) and repr(found) == repr(expected)


def compiled(texts: Texts, policy: str = "tp") -> Compiled:
    """The model under those names: split over two ranks by ``tp``, or in two stages by ``pp``."""
    graph = plans.traced(model_of(texts), sample_of(texts))
    if policy == "pp":
        starts = {"stage_starts": [f"{texts.layers}.1"]}
        return plans.compile_with(graph, "pp", 2, use_end2end=True, pas_config=starts)
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    plan = find_policy("tp").apply(plans.annotated(graph), config).plan
    return plans.compile_plan(graph, with_axis(plan, texts.axis))


def check_shape(texts: Texts, policy: str = "tp") -> None:
    """The files have the statements that they have under harmless names, and no others."""
    files, expected = (compiled(each, policy).files for each in (texts, harmless(texts)))
    for rank in range(2):
        assert skeleton(files[f"gencode{rank}.py"]) == skeleton(expected[f"gencode{rank}.py"])


def check_numbers(texts: Texts, directory: Path) -> None:
    """Two ranks compute what one device does, and return the constant as it is."""
    model, sample, made = model_of(texts), sample_of(texts), compiled(texts)
    plans.write(directory, made, model)
    loss = model(**sample)[texts.loss]
    loss.backward()

    def rank(_: int) -> tuple[Tensor, Any, dict[str, Tensor | None]]:
        module = load_class(directory)()
        found = module(**sample)
        found[texts.loss].backward()
        return (
            found[texts.loss].detach(),
            found["constant"],
            {name: p.grad for name, p in module.named_parameters()},
        )

    results = run_ranks(2, rank)
    layouts = {
        d.value.fqn: d.layout for d in made.program.declarations if d.value.fqn in results[0][2]
    }
    pieces = {
        str(fqn): ([grads[fqn] for *_, grads in results], layout) for fqn, layout in layouts.items()
    }
    outcome = plans.Outcome(results[0][0], pieces, [], made.plan.mesh)
    assert all(same_constant(constant, texts.constant) for _, constant, _ in results)
    assert_close_tree({"loss": outcome.loss}, {"loss": loss.detach()})
    assert_close_tree(outcome.gradients, {name: p.grad for name, p in model.named_parameters()})


SIGNS = tuple("\"'\\\n\r{}# ")


def texts() -> SearchStrategy[Texts]:
    """Names of all kinds. Those of modules have no dot in them, and are not ``training``, for torch
    has it so.
    """
    free = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    some = st.one_of(
        st.sampled_from(AWKWARD), free, st.text(st.sampled_from(SIGNS), min_size=1, max_size=5)
    )
    name = some.filter(lambda text: "." not in text and text not in ("training", "down"))
    keys = st.one_of(
        some,
        st.integers(),
        st.none(),
        st.booleans(),
        st.floats(),
        st.binary(max_size=2),
        st.just((1, "a")),
    )
    leaves = st.one_of(
        st.sampled_from(CONSTANTS),
        st.floats(),
        st.complex_numbers(),
        st.integers(),
        some,
        st.binary(max_size=9),
    )
    constants = st.recursive(
        leaves,
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(some, inner), st.tuples(inner)),
        max_leaves=4,
    )
    made = st.builds(
        Texts,
        layers=name,
        inner=name,
        scale=name,
        count=name,
        words=name,
        sample=keys.filter(lambda key: str(key) != "more"),
        deep=keys,
        loss=keys.filter(lambda key: str(key) != "constant"),
        cls=some,
        file=some,
        axis=st.sampled_from(AXES),
        constant=constants.filter(_has_paths_of_its_own),
    )
    return made.filter(lambda t: t.layers != t.words and len({t.inner, t.scale, t.count}) == 3)


def _has_paths_of_its_own(constant: Any) -> bool:
    """Whether the joined keys of every leaf differ, which results must."""
    paths: list[str] = []
    structure.map_leaves(constant, lambda path, leaf: paths.append(path))
    return len(set(paths)) == len(paths)
