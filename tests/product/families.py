"""Tiny models of all model folders of the installed transformers, under ``tp`` and ``data`` on 2
ranks, against one device.

    python tests/product/families.py run --out DIR [--only llama t5] [--minutes 60] [--tests
    CHECKOUT] python tests/product/families.py table --out DIR [--markdown docs/models.md]

``run`` writes one line of JSON per folder to ``DIR/families.jsonl`` and goes on where an earlier
run has stopped. Each folder runs in a child process with a limit. Models and inputs come from
Hugging Face's own testers where ``--tests`` names a checkout of their repository (wheels and source
distributions do not have them), else from a recipe (``tests/_lib/tiny_families.py``), which does
not reach every model. Everything is float64. ``tp`` plans for a machine that is as slow as the
models are small, as on one of the presets no channel of so small a convolution would be split. A
model that is refused with labels or masks is tried without them. Where a refusal names inputs to
declare as constants, the model is tried with those. Six folders have a model of the package
``timm``, which needs ``torchvision`` and ``pillow``; without them they do not run.

``table`` counts the outcomes, prints them, and writes the page. Of folders that ``DIR`` has no row
for, it keeps what the page says.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import re
import resource
import signal
import sys
import tempfile
import textwrap
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "_lib"))

import family_settings
import tiny_families
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    conv_flop_count,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import shardwright.frontend.verification.trained_ranks as rank_runs
import shardwright.frontend.verification.verify as verification
from shardwright.runtime.errors import InternalError, ShardwrightError

POLICIES = ("tp", "data")
RANKS = 2
CPU_LIMIT_S, WALL_LIMIT_S = 90, 900
TRIALS: tuple[dict[str, bool], ...] = ({}, {"mask": False}, {"mask": False, "labels": False})
"""What a folder is tried with, one after the other until it is equal."""
SLOW_MACHINE = {
    "format": 1,
    "name": "slow",
    "num_devices": RANKS,
    "device": {
        "name": "slow",
        "memory_bytes": 2**34,
        "flops_per_s": {"float64": 1e9, "float32": 1e9},
        "bytes_per_s": 1e12,
        "launch_s": 0.0,
        "matmul_efficiency": 1.0,
    },
    "tiers": [{"name": "links", "sizes": "all", "latency_s": 0.0, "bytes_per_s": 1e9}],
}
"""The hardware ``tp`` plans for. It does one operation in the time that a byte takes; an A100 does
65. But convolutions of real models do 10 to 100 times as many operations per byte as tiny ones.
"""
_MOST_CONSTANTS = 6
_LONGEST_REASON = 120
MOST_CLASSES = 4


# models and inputs


def folders() -> list[str]:
    """All model folders of the installed transformers."""
    root = Path(transformers.__file__).parent / "models"
    return sorted(path.name for path in root.iterdir() if any(path.glob("modeling_*.py")))


def models_of(folder: str) -> list[type[nn.Module]]:
    """The classes that may stand for a folder, best first."""
    package = importlib.import_module(f"transformers.models.{folder}")
    names = sorted(found.name for found in pkgutil.iter_modules(package.__path__))
    files = [name for name in names if name.startswith("modeling_")]
    classes = [
        model
        for name in files
        for model in tiny_families.classes_of(
            importlib.import_module(f"transformers.models.{folder}.{name}")
        )
    ]
    if not classes:
        raise LookupError("no model with a config")
    first = family_settings.CLASSES.get(folder)
    return sorted(
        classes,
        key=lambda model: (
            model.__name__ != first,
            tiny_families.place(model.__name__),
            classes.index(model),
        ),
    )


def of_recipe(
    folder: str, *, mask: bool = True, labels: bool = True
) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs by the recipe: of the best classes the first that one device runs.
    Raises what the best met.
    """
    errors: list[Exception] = []
    for model in models_of(folder)[:MOST_CLASSES]:
        try:
            return tiny_families.working(model, mask=mask, labels=labels)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def of_tester(
    folder: str, tests: Path, *, mask: bool = True, labels: bool = True
) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs by a tester of Hugging Face. Raises :class:`LookupError` if the folder
    has none.
    """
    for path in sorted((tests / "tests" / "models" / folder).glob("test_modeling_*.py")):
        module = importlib.import_module(f"tests.models.{folder}.{path.stem}")
        for case in vars(module).values():
            is_case = (
                inspect.isclass(case)
                and issubclass(case, unittest.TestCase)
                and case.__module__ == module.__name__
            )
            if not is_case or not hasattr(case, "all_model_classes"):
                continue
            test = case(next(name for name in dir(case) if name.startswith("test_")))
            test.setUp()
            if not hasattr(test, "model_tester") or not test.all_model_classes:
                continue
            return _from_tester(test, mask=mask, labels=labels)
    raise LookupError(f"no tester for {folder}")


def _from_tester(test: Any, *, mask: bool, labels: bool) -> tuple[nn.Module, dict[str, Any]]:
    if isinstance(getattr(test.model_tester, "batch_size", None), int):
        test.model_tester.batch_size = tiny_families.BATCH
    config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
    model = min(test.all_model_classes, key=lambda found: tiny_families.place(found.__name__))
    given = test._prepare_for_class(dict(inputs), model, return_labels=labels)
    known = inspect.signature(model.forward).parameters
    given = {name: value for name, value in given.items() if value is not None and name in known}
    if not mask:
        given = {name: value for name, value in given.items() if "attention_mask" not in name}
    tiny_families.without_chance(config)
    return tiny_families.built(model, config), given


class Summed(nn.Module):
    """A loss of whatever floating tensors a model returns. ``has_infinite``: some elements are
    minus infinity, as scores of what is padding; they count as zeros.
    """

    def __init__(self, model: nn.Module, *, has_infinite: bool = False) -> None:
        super().__init__()
        self.model, self.has_infinite = model, has_infinite

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """The sum of means of sines of all results."""
        found = list(_floating(self.model(**inputs)))
        if self.has_infinite:
            found = [x.masked_fill(x.isinf(), 0.0) for x in found]
        return torch.stack([(3 * x + 0.5).sin().mean() for x in found]).sum()


def _floating(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        if result.is_floating_point() and result.numel():
            yield result
    elif isinstance(result, Mapping):
        for name, value in result.items():
            if not re.search("past|cache|attentions", str(name)):
                yield from _floating(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from _floating(value)


# one folder


# Kernels of the CPU that torch does not count.
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Counting(TorchDispatchMode):
    """FLOPs of the products that run in this thread, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if func._overloadpacket is torch.ops.aten.convolution_backward:
            self.flops += flops_of_convolution_gradients(*args)
        elif func._overloadpacket is _ATTENTION:
            self.flops += sdpa_flop_count(*(x.shape for x in args[:3]))
        elif func._overloadpacket is _ATTENTION_BACKWARD:
            self.flops += sdpa_backward_flop_count(*(x.shape for x in args[:4]))
        elif count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


def flops_of_convolution_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: list[bool],
) -> int:
    """Each gradient takes as much as the convolution. (torch counts the gradient of a weight in
    groups as if there were one group.)
    """
    once = conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)
    return once * sum(wanted[:2])


class _Watching:
    """Counts FLOPs of one device and of each rank, and times compiles, while ``verify`` runs."""

    def __init__(self) -> None:
        self.one, self.ranks, self.compile_s = 0, [], 0.0
        self._places = (
            (rank_runs, "_train", self._train),
            (verification, "reference_run", self._reference),
            (verification, "compile_into", self._compile),
        )

    def __enter__(self) -> _Watching:
        self._old = [getattr(owner, name) for owner, name, _ in self._places]
        for owner, name, new in self._places:
            setattr(owner, name, new)
        return self

    def __exit__(self, *exception: object) -> None:
        for (owner, name, _), old in zip(self._places, self._old, strict=True):
            setattr(owner, name, old)

    def _train(self, module: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        with _Counting() as counting:
            result = self._old[0](module, config, *args, **kwargs)
        if config.plan_ngpus == RANKS:
            self.ranks.append(counting.flops)
        return result

    def _reference(self, *args: Any, **kwargs: Any) -> Any:
        with _Counting() as counting:
            result = self._old[1](*args, **kwargs)
        self.one = self.one or counting.flops
        return result

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = self._old[2](*args, **kwargs)
        self.compile_s = self.compile_s or time.process_time() - start
        return result


def compare(model: nn.Module, given: dict[str, Any], policy: str) -> dict[str, Any]:
    """``verify`` under one policy: its outcome, and what it took to get there."""
    constants: dict[str, Any] = {}
    while True:
        with _Watching() as watch, _hardware_file() as hardware:
            options = {"hardware": hardware} if policy == "tp" else {}
            found = _outcome(model, given, policy, constants, options)
        asked = [name for name in found.pop("asks_for", []) if name not in constants]
        if not asked or len(constants) > _MOST_CONSTANTS:
            break
        constants |= {name: _leaf(given, name) for name in asked}
    if watch.one and watch.ranks:
        found["flops_share"] = round(max(watch.ranks) / watch.one, 3)
    constants |= dict.fromkeys(found.pop("found", []))
    return {**found, "constants": sorted(constants), "compile_s": round(watch.compile_s, 2)}


@contextmanager
def _hardware_file() -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(SLOW_MACHINE, file)
        file.flush()
        yield file.name


def _outcome(
    model: nn.Module,
    given: dict[str, Any],
    policy: str,
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    config = {
        "plan_ngpus": RANKS,
        "runtime_ngpus": RANKS,
        "constants": constants,
        "pas_config": options,
    }
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            report = verification.verify(model, given, policy, config, steps=1)
    except Exception as error:
        named = isinstance(error, ShardwrightError) and not isinstance(error, InternalError)
        declare = re.search(r"constants=\{(.*?)\}\); else", str(error))
        asks = re.findall(r'"([^"]+)": \[', declare[1]) if declare else []
        return {
            "outcome": "refused" if named else "crashed",
            "text": _text(error),
            "asks_for": asks,
        }
    found = {name for one in said for name in _names_found(str(one.message))}
    if report.ok:
        return {"outcome": "equal", "found": sorted(found)}
    return {"outcome": "differs", "text": str(report)[:1500], "found": sorted(found)}


def _names_found(message: str) -> list[str]:
    """The inputs that a notice says were taken for constants."""
    said = re.match(r"forward reads the values of (.*?): those of the dummy arguments", message)
    return said[1].split(", ") if said else []


def _text(error: BaseException) -> str:
    where = re.sub(r"/\S*/(transformers|torch)/", r"\1/", str(error))
    return f"{type(error).__name__}: {where}"[:700]


def _leaf(given: Mapping[str, Any], path: str) -> Any:
    found: Any = given
    for part in path.split("."):
        found = found[part]
    return found


def try_folder(folder: str, tests: Path | None) -> Iterator[dict[str, Any]]:
    """What is known of a folder, each time more is."""
    row: dict[str, Any] = {"folder": folder}
    start = time.process_time()
    for trial in TRIALS:
        row["trial"] = trial
        try:
            model, given = _made(folder, tests, trial)
            row["model"] = type(model).__name__
            model, given = _with_loss(model, given)
        except Exception as error:
            row.setdefault("not_run", _text(error))
            break
        row |= {policy: compare(model, given, policy) for policy in POLICIES}
        row["cpu_s"] = round(time.process_time() - start, 1)
        yield row
        if all(row[policy]["outcome"] != "refused" for policy in POLICIES):
            break
    yield {**row, "cpu_s": round(time.process_time() - start, 1), "done": True}


def _made(
    folder: str, tests: Path | None, trial: Mapping[str, bool]
) -> tuple[nn.Module, dict[str, Any]]:
    if tests is not None:
        try:
            return of_tester(folder, tests, **trial)
        except LookupError:  # newer than the checkout
            pass
    return of_recipe(folder, **trial)


def _with_loss(model: nn.Module, given: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """A model whose result is a loss with gradients, and its arguments. Raises :class:`ValueError`
    if there is none.
    """
    result = model(**given)
    loss = (
        result["loss"] if isinstance(result, Mapping) and result.get("loss") is not None else None
    )
    if loss is None or loss.ndim:
        has_infinite = any(bool(x.isinf().any()) for x in _floating(result))
        model, given = Summed(model, has_infinite=has_infinite).train(), {"inputs": given}
        loss = model(**given)
    if not bool(torch.isfinite(loss)):
        raise ValueError("the loss of one device is not finite")
    if not loss.requires_grad:
        raise ValueError("the loss of one device has no gradients")
    return model, given


# all folders


def run(arguments: argparse.Namespace) -> None:
    """Every folder that has no row yet, each in a child."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    path = out / "families.jsonl"
    wanted, known = arguments.only or folders(), rows_of(path)
    todo = [folder for folder in wanted if folder not in known or arguments.again]
    if arguments.retry:
        todo += [
            folder for folder in wanted if folder in known and outcome_of(known[folder]) != "equal"
        ]
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    # What most children need, imported once.
    for word in (
        "auto.modeling_auto",
        "llama.modeling_llama",
    ):
        importlib.import_module(f"transformers.models.{word}")
    for number, folder in enumerate(todo, 1):
        if time.monotonic() > deadline:
            break
        row = in_child(folder, arguments.tests, out)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(todo)} {folder} {summary(row)}", flush=True)


def in_child(folder: str, tests: Path | None, out: Path) -> dict[str, Any]:
    """The row of a folder; what a child had found when it met a limit."""
    part = out / f".{folder}.json"
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))
            for row in try_folder(folder, tests):
                part.with_suffix(".new").write_text(json.dumps(row))
                part.with_suffix(".new").replace(part)
        finally:
            os._exit(0)
    start = time.monotonic()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() - start > WALL_LIMIT_S:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.1)
    row = json.loads(part.read_text()) if part.exists() else {"folder": folder}
    part.unlink(missing_ok=True)
    if not row.pop("done", False):
        row["not_run"] = row.get("not_run", f"more than {CPU_LIMIT_S} s of CPU, or killed")
    return row


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of every folder."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["folder"]: row for row in rows}


def outcome_of(row: Mapping[str, Any]) -> str:
    """``equal``, ``refused``, ``differs``, ``crashed``, or ``not run``: the worst of both
    policies.
    """
    outcomes = {row[policy]["outcome"] for policy in POLICIES if policy in row}
    if not outcomes:
        return "not run"
    return next(word for word in ("crashed", "differs", "refused", "equal") if word in outcomes)


def summary(row: Mapping[str, Any]) -> str:
    """One line for people."""
    outcome = outcome_of(row)
    texts = [row[policy].get("text", "") for policy in POLICIES if policy in row]
    why = next(filter(None, texts), row.get("not_run", ""))
    return f"{outcome} {row.get('cpu_s', 0)} s" + (f" {why[:150]!r}" if outcome != "equal" else "")


# the table


def table(arguments: argparse.Namespace) -> None:
    """Count, print, and write the page, which keeps the rows that were not made anew."""
    rows = rows_of(arguments.out / "families.jsonl")
    if arguments.markdown and arguments.markdown.exists():
        rows = rows_of_page(arguments.markdown.read_text()) | rows
    counts = Counter(map(outcome_of, rows.values()))
    tried = sum(counts.values()) - counts["not run"]
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    print(f"equal: {counts['equal'] / max(tried, 1):.1%} of {tried} folders that one device runs")
    if arguments.markdown:
        arguments.markdown.write_text(page(rows, counts, tried))


def rows_of_page(text: str) -> dict[str, dict[str, Any]]:
    """The rows of a page, as far as the page tells them."""
    rows, heading = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:].lower()
        cells = [cell.strip(" *") for cell in line.strip("|").split(" | ")]
        # The names of folders are of small letters; headings and rulers of tables are not.
        if not line.startswith("| ") or cells[0] == "folder" or not heading:
            continue
        row: dict[str, Any] = {"folder": cells[0]}
        if heading == "equal":
            _, row["model"], tp, data, seconds, constants = cells
            names = [f"inputs.{name}" for name in constants.split(", ") if name]
            facts = {"outcome": "equal", "constants": names}
            row["tp"] = {**facts, "flops_share": float(tp), "compile_s": float(seconds[:-2])}
            row["data"] = {**facts, "flops_share": float(data)}
        elif heading == "not run":
            row["not_run"] = cells[1]
        else:
            row |= {"model": cells[1], "why": cells[2], "tp": {"outcome": heading}}
        rows[cells[0]] = row
    return rows


def page(rows: Mapping[str, dict[str, Any]], counts: Counter[str], tried: int) -> str:
    """The page of models."""
    groups: dict[str, list[str]] = {}
    for folder, row in sorted(rows.items()):
        groups.setdefault(outcome_of(row), []).append(folder)
    lines = [
        "# Models",
        "",
        "<!-- made by tests/product/families.py, which says how to make it again -->",
        "",
        (
            f"{len(rows)} of the {len(folders())} model folders of transformers "
            f"{transformers.__version__} were tried: a tiny"
        ),
        (
            f"model of each, in float64, one training step under `tp` and `data` on {RANKS} "
            "ranks, held to one device. The column"
        ),
        (
            "*model* says which class stands for the folder; of some it is a part, as the recipe "
            "makes no inputs for the whole."
        ),
        "",
        "| outcome | folders | what it means |",
        "|---|---|---|",
        f"| equal | {counts['equal']} | loss, gradients and parameters are those of one device |",
        (
            f"| refused | {counts['refused']} | an error says what cannot be compiled, where, "
            "and what to do |"
        ),
        f"| differs | {counts['differs']} | numbers are not those of one device |",
        f"| crashed | {counts['crashed']} | an error that is not in words |",
        (
            f"| not run | {counts['not run']} | the recipe makes no model, or no inputs that one "
            "device takes |"
        ),
        "",
        f"Of the {tried} that one device runs, {counts['equal'] / max(tried, 1):.0%} are equal.",
        "",
        (
            "*FLOPs* is the share of one device's products that the busiest rank computes: 0.5 "
            "is an even split, 1 is none."
        ),
        (
            "`tp` planned for a machine that is as slow as these models are small: on real "
            "machines it leaves such small"
        ),
        "convolutions whole ([hardware.md](hardware.md#which-channels-tp-splits)).",
        (
            "*compile* is CPU seconds for `tp`. *constants* are inputs whose values are compiled "
            "in: found, or declared in `ComputeConfig(constants=...)`,"
        ),
        (
            "because sizes follow from their values. (Tables of sizes that were found are listed "
            "since 2026-11-29.) Rows were made at different times, some beside other work. In most "
            "of them attention by torch's CPU kernel is not among the products: the sweep counts "
            "it since 2026-11-28."
        ),
        "",
        *_unsplit(rows),
        "## Equal",
        "",
        "| folder | model | FLOPs, tp | FLOPs, data | compile | constants |",
        "|---|---|---|---|---|---|",
        *(_equal_line(folder, rows[folder]) for folder in groups.get("equal", [])),
        "",
    ]
    for outcome in ("refused", "differs", "crashed"):
        found = groups.get(outcome, [])
        if found:
            lines += [f"## {outcome.capitalize()}", "", "| folder | model | why |", "|---|---|---|"]
            lines += [
                f"| {folder} | {rows[folder].get('model', '')} | {_why(rows[folder])} |"
                for folder in found
            ]
            lines.append("")
    if missing := groups.get("not run"):
        lines += ["## Not run", "", "| folder | what it lacks |", "|---|---|"]
        lines += [f"| {folder} | {_not_run(rows[folder])} |" for folder in missing]
        lines.append("")
    return wrapped("\n".join(lines))


def wrapped(text: str) -> str:
    """Wrap lines of prose at 100 columns."""
    blocks = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("- "):
            lines = [line for item in lines for line in _filled(item, "  ")]
        elif not lines[0].startswith(("|", "#", "<")):
            lines = _filled(" ".join(lines), "")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _filled(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


UNSPLIT = 1.3 / RANKS
"""The share of one device's products from which a folder is named as split too little."""


def _unsplit(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The folders that are equal, and of which a rank computes far more than its part."""
    equal = [row for row in rows.values() if outcome_of(row) == "equal"]
    lines = [
        (
            f"Shares above {UNSPLIT} are hollow, and bold: the numbers are right, and ranks "
            "compute much that others compute, too. They are in"
        ),
        "",
    ]
    for policy in POLICIES:
        found = sorted(
            row["folder"] for row in equal if row[policy].get("flops_share", 0) > UNSPLIT
        )
        lines.append(f"- {len(found)} of {len(equal)} under `{policy}`: {', '.join(found) or '-'}")
    return [*lines, "", *_NO_SAMPLE, ""]


_NO_SAMPLE = (
    "What belongs to no sample, all ranks compute under `data`, as those of DDP do: the relative "
    "positions of SEW-D. They are fewer here than in its real config, where 512 of them are "
    "projected in every layer. Beside 4 sounds of 0.1 s that is most of the work, and the share is "
    "0.89; beside 16 sounds of 0.4 s it is 0.59, and it goes on falling with the batch.",
)

_TIMM = "the package timm, and a backbone of it that is small"
_SESSION = "no forward for training: it takes an inference session"
_CODEC = "its two models of sound want sizes that fit each other; the recipe does not find them"
MISSING = {
    "auto": "nothing: it has no model of its own",
    "dinat": "the package natten",
    "edgetam": _TIMM,
    "edgetam_video": _SESSION,
    "esmfold2": "nine inputs of a molecule that the recipe does not make",
    "fast_vlm": _TIMM,
    "gemma4_assistant": "a config that passes its own check: its default text part does not",
    "higgs_audio_v2_tokenizer": "the package torchaudio, whose wheel wants the libraries of CUDA",
    "jev": "marks, options and kinds of questions of one prompt, which is no batch",
    "layoutlmv2": "the package detectron2",
    "neucodec": _CODEC,
    "omdet_turbo": "names of classes and tasks as text, with how many belong to each sample",
    "pe_audio_video": _TIMM,
    "pe_video": _TIMM,
    "perception_lm": _TIMM,
    "sam2_video": _SESSION,
    "sam3_tracker_video": _SESSION,
    "sam3_video": _SESSION,
    "timm_backbone": _TIMM,
    "tvp": "a batch: its positions fit one sample only",
    "vibevoice": "an object that schedules noise, and masks of sounds",
    "xcodec": _CODEC,
    "xcodec2": _CODEC,
}
"""What the recipe lacks for a folder, where that is known."""


def _equal_line(folder: str, row: Mapping[str, Any]) -> str:
    shares = [_share_text(row[policy].get("flops_share", 0)) for policy in POLICIES]
    constants = ", ".join(name.removeprefix("inputs.") for name in row["tp"]["constants"])
    return (
        f"| {folder} | {row['model']} | {' | '.join(shares)} | {row['tp']['compile_s']:.1f} s | "
        f"{constants} |"
    )


def _share_text(share: float) -> str:
    return f"**{share:.2f}**" if share > UNSPLIT else f"{share:.2f}"


def _not_run(row: Mapping[str, Any]) -> str:
    """Why a folder did not run, on one line."""
    if row["folder"] in MISSING:
        return MISSING[row["folder"]]
    text = re.sub(r"\s+", " ", str(row.get("not_run", ""))).replace("|", "/")
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _why(row: Mapping[str, Any]) -> str:
    if "why" in row:
        return str(row["why"])
    text = next(row[policy]["text"] for policy in POLICIES if "text" in row[policy])
    if differing := [line for line in text.splitlines() if line.endswith(" differ")]:
        return "; ".join(re.sub(r"\s{2,}", " ", line) for line in differing)
    first = text.splitlines()[0].partition(": ")[2]
    where = next(
        (line.partition("where:")[2].strip() for line in text.splitlines() if "where:" in line), ""
    )
    return (
        f"{first} ({Path(where.partition(' in ')[0]).name})".replace("|", "/")
        if where
        else first.replace("|", "/")
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="try folders")
    running.add_argument("--only", nargs="+", metavar="FOLDER")
    running.add_argument("--minutes", type=float, default=float("inf"))
    running.add_argument("--tests", type=Path, help="a checkout of Hugging Face's repository")
    running.add_argument("--again", action="store_true", help="also folders that have a row")
    running.add_argument(
        "--retry",
        action="store_true",
        help="also, after all others, folders whose row is not equal",
    )
    showing = commands.add_parser("table", help="count outcomes, and write the page")
    showing.add_argument("--markdown", type=Path)
    for command in (running, showing):
        command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if getattr(arguments, "tests", None):
        sys.path.insert(0, str(arguments.tests))
    {"run": run, "table": table}[arguments.command](arguments)


if __name__ == "__main__":
    main()
