"""What cannot be traced: the error names the line and the remedy, and the module is as it was."""

from __future__ import annotations

import functools
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from interpret import run_graph
from torch import Tensor, nn

from shardwright.compiler.ops.register import register_op
from shardwright.compiler.trace import trace
from shardwright.runtime.errors import TraceError
from shardwright.runtime.training.asked_gradients import watch_asked_gradients

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Apply(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return self.function(self.inner(x))


def error_of(function: object, **dims: object) -> str:
    module = Apply(function)
    state, weight = set(vars(module)), module.inner.weight
    with pytest.raises(TraceError) as caught:
        trace(module, {"x": X}, **dims)
    assert (
        set(vars(module)) == state
        and module.inner.weight is weight
        and type(weight) is nn.Parameter
    )
    assert not isinstance(torch.nn.Module.__dict__.get("training"), property)
    return str(caught.value)


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def item(x: Tensor) -> Tensor:
    return x * x.max().item()


def loops(x: Tensor) -> Tensor:
    for index in x.argmax(-1).tolist():
        x = x + index
    return x


def nonzero(x: Tensor) -> Tensor:
    return x[(x > 0).nonzero()[:, 0]]


def mask_select(x: Tensor) -> Tensor:
    return x[x > 0]


def first_rows(x: Tensor) -> Tensor:
    return x[: int(x.sum())]


def repeats(x: Tensor) -> Tensor:
    return x.repeat_interleave(x.argmax(-1), 0)


def formats(x: Tensor) -> Tensor:
    print(f"{x.sum():.3f}")
    return x


def to_numpy(x: Tensor) -> Tensor:
    return x + x.detach().numpy().sum()


@pytest.mark.parametrize(
    ("function", "name", "remedy"),
    [
        (
            branches,
            "__bool__",
            "choose between results with torch.where, apply a mask whether it masks anything "
            "or not",
        ),
        (item, "item", "keep it a tensor: x * y.max() computes what x * y.max().item() does"),
        (loops, "tolist", "compute with torch's own operators on the tensor"),
        (
            first_rows,
            "__int__",
            "use the tensor itself as an index (x[(torch.arange(n) + k) % n] is",
        ),
        (nonzero, "nonzero", "keep all elements, and give those that do not count the weight 0"),
        (
            mask_select,
            "__getitem__",
            "keep all elements, and give those that do not count the weight 0",
        ),
        (repeats, "repeat_interleave", "pass output_size=, the sum of the repeats"),
        (to_numpy, "numpy", "compute with torch's own operators on the tensor"),
        (formats, "__format__", "leave printing out of forward, or print what it returns"),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_values_are_needed(function: object, name: str, remedy: str, dynamic: bool) -> None:
    text = error_of(function, dynamic_dims={"x": {0: "rows"}} if dynamic else None)
    first, where, why, hint = text.split("\n")
    assert first == f"{name}() needs the values of a tensor while tracing"
    line = function.__code__.co_firstlineno
    assert any(f"{__file__}:{line + offset} in (root) (Apply)" in where for offset in (1, 2)), where
    unsized = (
        "the size of what it returns depends on values; "
        if name in ("nonzero", "__getitem__")
        else ""
    )
    assert (
        why == f"  why:   {unsized}the traced graph must be right for all inputs, and no values "
        "exist while tracing"
    )
    assert hint.startswith(f"  try:   {remedy}")
    assert hint.endswith("; or put the code into a function, and register_op it with fake=")


ELSEWHERE = nn.Linear(4, 4)


def converts(x: Tensor) -> Tensor:
    ELSEWHERE.double()
    return x


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


def doubles_rows(x: Tensor) -> Tensor:
    return torch.vmap(Doubles.apply)(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (item, "item() needs the values of a tensor"),
        (nonzero, "nonzero() needs the values of a tensor"),
        (to_numpy, "numpy() needs the values of a tensor"),
        (converts, "forward converts weight of a Linear"),
        (doubles_rows, "forward calls Doubles under torch.vmap"),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_refusal_that_forward_swallows(function: object, words: str, fails: bool) -> None:
    def swallows(x: Tensor) -> Tensor:
        try:
            return function(x)
        except Exception:
            if fails:
                raise ValueError("cannot do it") from None
            return 2 * x

    assert error_of(swallows).startswith(words)


def test_an_error_of_torch_may_be_swallowed() -> None:
    def falls_back(x: Tensor) -> Tensor:
        try:
            return x.view(5, 5)
        except RuntimeError:
            return 2 * x

    module = Apply(falls_back)
    assert trace(module, {"x": X}).ops[-1].target == "mul"


def skips_at_random(x: Tensor) -> Tensor:
    if torch.rand([]) < 0.1:
        return x
    return x * 2


def skips_by_number(x: Tensor) -> Tensor:
    return x if torch.empty(()).uniform_(0, 1).item() < 0.1 else x * 2


def skips_by_value(x: Tensor) -> Tensor:
    return x if torch.rand([]) < x.mean() else x * 2


@pytest.mark.parametrize(
    ("function", "drawn"),
    [(skips_at_random, True), (skips_by_number, True), (skips_by_value, False)],
)
def test_what_is_skipped_at_random(function: object, drawn: bool) -> None:
    _, where, why, hint = error_of(function).split("\n")
    assert __file__ in where
    assert why.endswith("what this draws differs from call to call") == drawn
    assert (
        hint.startswith(
            "  try:   set the rate at which something is skipped at random to 0 (layerdrop=0.0)"
        )
        == drawn
    )


def test_a_module_is_not_converted_in_forward() -> None:
    class Router(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.inner, self.dtype = nn.Linear(4, 2).double(), dtype

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.to(self.dtype)(x.to(self.dtype))

    assert [op.target for op in trace(Router(torch.float64), {"x": X}).ops] == ["linear"]
    with pytest.raises(TraceError) as caught:
        trace(Router(torch.float16), {"x": X})
    first, where, why, hint = str(caught.value).split("\n")
    assert first == "forward converts weight of a Linear from torch.float64 to torch.float16"
    assert __file__ in where
    assert why == "  why:   it would be of another dtype after the first call than before"
    assert (
        hint == "  try:   convert the module before compiling, or cast in forward what it is given"
    )


@register_op("* -> *")
def scaled_by_largest(x: Tensor) -> Tensor:
    return x * x.max().item()


def test_a_registered_function_that_reads_values_wants_a_fake() -> None:
    text = error_of(scaled_by_largest)
    assert text.startswith("scaled_by_largest() needs the values of a tensor while tracing")
    assert text.endswith(
        "  try:   pass fake= to register_op, a function that is called instead and returns "
        "empty tensors like the results"
    )


def test_a_place_without_dims_is_an_index() -> None:
    """What the hint for ``x[int(i)]`` says, and what the value of a constant may do."""

    class Largest(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert f"{torch.tensor(0.5):.2f}" == "0.50"
            return x[x[:, 0].argmax()] + x[1, x[0].argmax()]

    x = torch.randn(3, 4, dtype=torch.float64)
    graph = trace(Largest(), {"x": x})
    torch.testing.assert_close(run_graph(graph, Largest(), {"x": x}), Largest()(x))


def test_tensor_hooks() -> None:
    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * 2)
        return x

    assert error_of(hooked).startswith(
        "forward calls register_hook() on a tensor, which tracing would lose\n"
    )


def test_gradients_taken_in_forward() -> None:
    """Also where a parallel module has been made before, and looks at such calls."""
    watch_asked_gradients()

    def penalty(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return grad**2

    text = error_of(penalty)
    assert (
        text.startswith(f"forward calls torch.autograd.grad()\n  where: {__file__}:")
        and "register_op" in text
    )

    def backward(x: Tensor) -> Tensor:
        x.sum().backward()
        return x

    assert error_of(backward).startswith("forward calls Tensor.backward()\n")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors() -> None:
    def multiplies(x: Tensor) -> Tensor:
        sparse = torch.sparse_coo_tensor(
            torch.tensor([[0, 1], [2, 0]]), torch.ones(2, dtype=x.dtype), (3, 3)
        )
        return torch.sparse.mm(sparse, x)

    text = error_of(multiplies)
    assert (
        text.startswith(f"sparse_coo_tensor() makes a sparse tensor\n  where: {__file__}:")
        and "index_add" in text
    )
    assert error_of(lambda x: x.to_sparse()).startswith("to_sparse() makes a sparse tensor\n")


KEPT: list[Tensor] = []


def test_a_tensor_kept_from_an_earlier_call() -> None:
    def keeps(x: Tensor) -> Tensor:
        KEPT[:] = KEPT or [torch.arange(4, dtype=x.dtype)]
        return x + KEPT[0]

    trace(Apply(keeps), {"x": X})
    what = "forward uses a tensor that it kept outside of the module in an earlier call"
    assert error_of(keeps).startswith(f"{what}\n  where: {__file__}:")
    KEPT.clear()


def test_data_assignment() -> None:
    def assigns(x: Tensor) -> Tensor:
        x.data = x.data + 1
        return x

    assert error_of(assigns).startswith("forward assigns to x.data\n")


def test_local_autograd_functions() -> None:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

    text = error_of(lambda x: Local.apply(x))
    assert (
        "cannot be imported by generated code" in text
        and "move it to the top level of a module" in text
    )


def test_a_failing_forward(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [caplog.handler]
    )
    text = error_of(lambda x: x @ torch.zeros(7, 7, dtype=torch.float64))
    assert text.startswith("forward of Apply failed while it was traced: RuntimeError: ")
    assert f"  where: {__file__}:" in text
    assert not caplog.records, "torch would log a traceback of its own"


def test_backward_hooks() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module[0].register_full_backward_hook(lambda *args: None)
    with pytest.raises(TraceError) as caught:
        trace(module, {"input": X.float()})
    assert str(caught.value) == (
        "the module 0 (Linear) has a backward hook, which tracing would lose\n"
        "  try:   remove the hook before compiling, or write its effect as a "
        "torch.autograd.Function"
    )


def test_gradient_hooks_of_parameters() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        module = nn.Linear(4, 4)
        getattr(module.weight, register)(lambda grad: None)
        with pytest.raises(
            TraceError, match="the parameter weight has a gradient hook, which tracing would lose\n"
        ):
            trace(module, {"input": X.float()})


def test_lazy_modules() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(
        TraceError,
        match="0.weight is not initialized\n  try:   call the lazy module once before compiling it",
    ):
        trace(module, {"input": X.float()})


def test_what_would_be_trained_and_is_no_parameter() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [nn.Linear(4, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    with pytest.raises(TraceError) as caught:
        trace(Hides(), {"x": X.float()})
    first, where, why, hint = str(caught.value).split("\n")
    assert (
        first == "forward uses a tensor that requires gradients and is no parameter of the module"
    )
    assert f"  where: {__file__}:" in where
    assert why == "  why:   its shape is [4, 4]; as a constant it would never be trained"
    assert hint == (
        "  try:   make it an nn.Parameter of a module, keep modules in nn.ModuleList or "
        "nn.ModuleDict instead of a list or "
        "dict, or detach() it"
    )

    class Attribute(nn.Module):
        def __init__(self, detached: bool) -> None:
            super().__init__()
            self.scale, self.detached = (
                torch.ones(4, dtype=torch.float64, requires_grad=True),
                detached,
            )

        def forward(self, x: Tensor) -> Tensor:
            with torch.set_grad_enabled(not self.detached):
                return x * self.scale

    with pytest.raises(TraceError, match="is no parameter of the module: scale\n"):
        trace(Attribute(detached=False), {"x": X})
    trace(Attribute(detached=True), {"x": X})


def test_dummy_arguments_without_names() -> None:
    with pytest.raises(TraceError) as caught:
        trace(nn.Linear(4, 4), (X,))
    assert str(caught.value) == (
        "the dummy arguments of Linear.forward are a dict from its arguments' names to examples\n"
        "  why:   they are a tuple\n"
        "  try:   for example {'input': ...}"
    )


def test_hooks_of_state_dicts_are_named() -> None:
    hooked, extra = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    hooked[0].register_state_dict_post_hook(lambda *args: None)
    with pytest.warns(UserWarning) as caught:
        trace(hooked, {"input": X.float()})
    assert [str(warning.message) for warning in caught] == [
        "the state dict hooks of 0 (Linear): a compiled module saves and loads tensors only, "
        "under their names; "
        "apply them to merged state dicts"
    ]

    class Versioned(nn.Linear):
        def get_extra_state(self) -> int:
            return 2

    extra = Versioned(4, 4)
    with pytest.warns(
        UserWarning,
        match=r"the extra state of \(root\) \(Versioned\): .*; save it beside the checkpoint",
    ):
        trace(extra, {"input": X.float()})


def test_numbers_that_forward_changes_are_named() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.ready = 0, False

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.ready = True
            return x * self.calls

    module = Counts()
    with pytest.warns(UserWarning) as caught:
        trace(module, {"x": X})
    assert [str(warning.message) for warning in caught] == [
        f"forward changes Counts.{name} from {before} to {after}; the compiled module does "
        "in every call what it does in the "
        "first one: keep what changes from call to call in a buffer"
        for name, before, after in (("calls", 0, 1), ("ready", False, True))
    ]
    assert module.calls == 0 and module.ready is False


def test_state_changed_by_forward_is_restored() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []
            self.calls = {"count": 0}
            self.register_buffer("cache", None)

        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(x.sum())
            self.calls["count"] += 1
            self.last = x
            return x * 2

    module = Remembers()
    trace(module, {"x": X})
    assert module.losses == [] and module.calls == {"count": 0} and not hasattr(module, "last")


class Scaled(torch.autograd.Function):
    """Takes what is no tensor and no number."""

    @staticmethod
    def forward(ctx: object, x: Tensor, by: object) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


@pytest.mark.parametrize(
    ("argument", "kind", "remedy"),
    [
        (
            {"by": 2},
            "dict",
            "pass tensors, numbers, strings, dtypes and tuples of these, of an object or "
            "dict what is used of it",
        ),
        (
            nn.Linear(4, 4),
            "Linear",
            "call the module outside, or in a function under torch.utils.checkpoint, which "
            "is traced through",
        ),
    ],
)
def test_arguments_that_no_file_can_hold(argument: object, kind: str, remedy: str) -> None:
    text = error_of(lambda x: Scaled.apply(x, argument))
    first, where, why, hint = text.split("\n")
    assert first == f"Scaled() got an argument of type {kind}, which a graph cannot hold"
    assert f"{__file__}:" in where and where.endswith("in (root) (Apply)")
    assert (
        why == "  why:   a call is written into the generated file, with tensors, numbers, strings "
        "and tuples"
    )
    assert hint == f"  try:   {remedy}"


def test_a_table_that_a_lookup_shortens() -> None:
    module = nn.Embedding(8, 4, max_norm=1.0)
    with pytest.raises(TraceError) as caught:
        trace(module, {"input": torch.zeros(2, 3, dtype=torch.int64)})
    assert str(caught.value).startswith("embedding() changes one of its arguments in place\n")
    assert str(caught.value).endswith(
        "leave out max_norm, and after optimizer.step() let torch.renorm shorten the rows of "
        "the table"
    )


@pytest.mark.parametrize(
    ("owner", "name", "title", "function"),
    [
        (torch.Tensor, "exp", "torch.Tensor.exp", lambda x: x.exp()),
        (torch, "relu", "torch.relu", lambda x: torch.relu(x)),
        # A call by another name of the operator: files write it as F.relu, which calls torch.relu.
        (torch, "relu", "torch.relu", lambda x: x.relu()),
        (F, "silu", "torch.nn.functional.silu", lambda x: F.silu(x)),
    ],
)
def test_a_function_of_torch_that_the_program_has_replaced(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, title: str, function: object
) -> None:
    """What it multiplies by would be multiplied by twice: in the graph, and in what files call."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def tripled(*args: object) -> Tensor:
        return original(*args) * 3

    monkeypatch.setattr(owner, name, tripled)
    what, where, why, hint = error_of(function).split("\n")
    assert what == f"{title} has been replaced by {name}(), and forward calls torch's own"
    assert "test_refused.py:" in where
    assert why == (
        f"  why:   generated files call torch's functions by name, and would run {name}() for it"
    )
    assert hint == (
        "  try:   put torch's function back before the module is compiled; in the model, call "
        f"{name}() by its own name"
    )
