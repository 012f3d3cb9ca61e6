"""Tables of published runs: from cells to rows.

A table is a CSV with the columns of ``published/README.md``. Tables spell the same thing in many
ways; these two rows say the same run:

    model,gpu,gpus,seq,mbs,gbs,precision,recompute,tokens_per_s_per_gpu
    LLAMA3-8B,H100,8,8192,1,128,FP8,full,12000
    meta-llama/Llama-3-8B,NVIDIA H100 80GB HBM3,8,"8,192",1,128,float8,true,12000

A cell that cannot be read, or that another cell contradicts, makes its row one that is left out,
with the reason (``Row.fault``). A file that is no such table is an error.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from published_models import Sizes, built_by_sizes, is_named, known_sizes, meant
from published_runs import BUT_THE_LAST, LATER_MEGATRON, PRESETS, SEQUENCE_PARALLEL, Row

from shardwright.runtime.errors import ConfigError, did_you_mean

TIMES = ("iter_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
"""Columns that tell the time of a step; a table has one of them at least."""

NEEDED = ("gpu", "gpus", "seq", "mbs", "gbs")
"""Columns without which no row says a run."""

COLUMNS = (
    *NEEDED,
    *TIMES,
    *("id", "source", "source_path", "date", "model", "params_b", "active_params_b"),
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "experts", "top_k", "moe_ffn"),
    *("precision", "tp", "pp", "cp", "ep", "etp", "vp", "dp", "fsdp", "zero"),
    *("recompute", "schedule", "mfu_pct", "mem_gib", "derived", "notes"),
)
"""All columns that are known."""

NOTHING = ("", "-", "n/a", "na", "nan", "null")
"""What a table writes where it says nothing, whatever the case of its letters."""

STUDIES = {
    "vtrain data/ground_truth_single": "vTrain, one node",
    "vtrain": "vTrain, several nodes",
    "2104.04473": "Megatron-LM 2021",
    "2205.05198": "Megatron-LM 2022",
    "llm-foundry": "llm-foundry",
    "megatron-bridge": "Megatron-Bridge",
    "nemo": "NeMo",
    "torchtitan without torch.compile": "torchtitan, not compiled",
    "torchtitan": "torchtitan",
}
"""Names of studies by what stands in the source of a row; the first that does counts."""

MEGATRON_VOCAB = 51200
"""The vocabulary of GPT-2, padded, where a table has none."""

GPT2_VOCAB = 50257
"""The vocabulary of GPT-2."""

RECOMPUTED = {
    **dict.fromkeys(("", "none", "no", "false", "0"), "none"),
    **dict.fromkeys(("full", "yes", "true", "1"), "full"),
    "selective": "selective",
}
"""What a row computes again, by the words of tables."""

SPLIT_SEQUENCES = (*LATER_MEGATRON, "torchtitan")
"""The beginnings of studies whose tensor parallelism always splits the sequence, too. torchtitan's
plan of a Llama has ``SequenceParallel`` for its norms (``parallelize_llama.py``).
"""

SCHEDULES = ("", "1f1b", "interleaved", "interleaved 1f1b", "1f1b interleaved")
"""Schedules of pipelines that rows can have, as tables write them."""


class Cells:
    """The cells of one line, with what cannot be read among them (``faults``)."""

    def __init__(self, line: Mapping[str, str]) -> None:
        self._line = line
        self.faults: list[str] = []

    def text(self, key: str) -> str:
        text = (self._line.get(key) or "").strip()
        return "" if text.lower() in NOTHING else text

    def has(self, key: str) -> bool:
        """Whether the table has this column."""
        return key in self._line

    def number(self, key: str) -> float:
        """A positive number; 0 where the table says nothing."""
        text = self.text(key)
        if not text:
            return 0.0
        try:
            number = float(text.replace(",", ""))
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.faults.append(f"{key} says {text!r}, which is no positive number")
            return 0.0
        return number

    def count(self, key: str, default: int = 1, least: int = 1) -> int:
        """A whole number."""
        text = self.text(key)
        if not text:
            return default
        try:
            number = float(text.replace(",", ""))
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number != int(number) or number < least:
            self.faults.append(f"{key} says {text!r}, which is no whole number from {least}")
            return default
        return int(number)


def read_tables(paths: Sequence[Path]) -> list[Row]:
    """The rows of these tables, each under a name of its own.

    Raises:
        ConfigError: a file that cannot be read, or is no table of runs.
    """
    rows: dict[str, Row] = {}
    for row in (row for path in paths for row in read_rows(path)):
        name, count = row.name, 1
        while name in rows:
            count += 1
            name = f"{row.name} ({count})"
        rows[name] = replace(row, name=name)
    return list(rows.values())


def read_rows(path: Path) -> list[Row]:
    """The rows of a table.

    Raises:
        ConfigError: the file cannot be read, or is no table of runs.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = [line for line in csv.reader(file) if any(cell.strip() for cell in line)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "give a CSV file in UTF-8, with the columns of benchmarks/published/README.md"
        raise ConfigError(f"cannot read the table {path}", why=str(error), hint=hint) from error
    header = [name.strip().lower() for name in lines[0]] if lines else []
    _check_header(path, header)
    rows = []
    for number, cells in enumerate(lines[1:], 1):
        row = _row(dict(zip(header, cells, strict=False)), f"{path.stem} {number}")
        if len(cells) != len(header):
            fault = f"the line has {len(cells)} cells for {len(header)} columns"
            row = replace(row, fault=fault)
        rows.append(row)
    return rows


def _check_header(path: Path, header: Sequence[str]) -> None:
    where, hint = str(path), "the columns are described in benchmarks/published/README.md"
    if not header:
        raise ConfigError("a table without a line", where=where, hint=hint)
    missing = [name for name in NEEDED if name not in header]
    if not any(name in header for name in TIMES):
        missing.append(" or ".join(TIMES))
    separators = {";": "semicolons", "\t": "tabs"}
    parted = [name for mark, name in separators.items() if len(header) == 1 and mark in header[0]]
    if parted:
        raise ConfigError(
            f"the table has {parted[0]} between its cells",
            where=where,
            hint=f"write it with commas, and numbers with points; {hint}",
        )
    if missing:
        raise ConfigError(
            f"the table lacks columns: {', '.join(missing)}",
            where=where,
            why=f"its first line names {', '.join(map(repr, header))}",
            hint=f"name them in the first line, with commas between; {hint}",
        )
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise ConfigError(
            f"the table has columns twice: {', '.join(twice)}",
            where=where,
            hint="rename or remove one of each",
        )


def unread_columns(path: Path) -> str | None:
    """What to say of columns of a table that are not known here; nothing if all are."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = [name.strip().lower() for name in next(csv.reader(file), [])]
    unknown = [name for name in header if name and name not in COLUMNS]
    if not unknown:
        return None
    absent = tuple(name for name in COLUMNS if name not in header)
    said = ", ".join(name + _column_meant(name, absent) for name in unknown)
    return f"{path}: columns that are not read, as if they were not there: {said}"


def _column_meant(name: str, absent: tuple[str, ...]) -> str:
    """What to add to a column that is not known, of those that the table has not: the one that is a
    word of its name (``tp`` of ``tp size``), or that is near.
    """
    words = re.split(r"[^a-z0-9]+", name)
    parts = tuple(known for known in absent if known in words)
    hint = did_you_mean(parts[0] if parts else name, absent) or ""
    return f" ({hint})" if hint.startswith("did you mean") else ""


def _row(line: Mapping[str, str], fallback: str) -> Row:
    cells = Cells(line)
    model = cells.text("model") or ("" if cells.has("model") else "GPT")
    gpu = gpu_of(cells.text("gpu"))
    study, tp = study_of(cells, gpu), cells.count("tp")
    sizes = _sizes(cells, model, tp)
    row = Row(
        name=cells.text("id") or fallback,
        study=study,
        model=model,
        sizes=sizes,
        experts=sizes.experts,
        gpu=gpu,
        gpus=cells.count("gpus", 0),
        precision=_precision_of(cells),
        recipe=cells.text("precision"),
        tp=tp,
        pp=cells.count("pp"),
        cp=cells.count("cp"),
        ep=cells.count("ep"),
        etp=cells.count("etp"),
        chunks=cells.count("vp"),
        zero=cells.count("zero", 3 if cells.count("fsdp", 0, 0) > 1 else 0, 0),
        microbatch=cells.count("mbs", 0),
        batch=cells.count("gbs", 0),
        recompute=_recompute_of(cells, study),
        iter_s=0.0,
        peak_bytes=2**30 * cells.number("mem_gib"),
        notes=cells.text("notes"),
    )
    row = replace(row, iter_s=_seconds_of(cells, row))
    _check_model(cells, row)
    _check_plan(cells, row)
    return replace(row, fault=cells.faults[0] if cells.faults else None)


def _sizes(cells: Cells, model: str, tp: int) -> Sizes:
    """What the table says of the model; the rest by its name."""
    known = known_sizes(model)
    layers, hidden, heads = (
        cells.count(key, getattr(known, key)) for key in ("layers", "hidden", "heads")
    )
    ffn = cells.count("ffn", known.ffn or cells.count("moe_ffn", 0) or 4 * hidden)
    return Sizes(
        layers,
        hidden,
        heads,
        cells.count("kv_heads", known.kv_heads or heads),
        ffn,
        cells.count("vocab", known.vocab or _vocab_of(cells, tp)),
        cells.count("seq", 0),
        cells.count("experts", known.experts, 0),
        cells.count("top_k", known.top_k),
        cells.count("moe_ffn", known.moe_ffn or ffn),
        # Megatron's kernel for scale, mask and softmax takes batches of four heads.
        cells.count("mbs", 0) * heads // tp % 4 == 0,
    )


def gpu_of(text: str) -> str:
    """The device under the name of :data:`PRESETS`, if it is one of them: "NVIDIA H100 80GB HBM3"
    is an "H100". Cards with other rates of the same name are not ("H100 PCIe").
    """
    upper = text.upper().replace("_", " ")
    if text in PRESETS or re.search(r"PCIE|NVL\b", upper):
        return text
    chips = "|".join(name for name in PRESETS if " " not in name)
    found = re.findall(rf"(?<![A-Z0-9])({chips})(?![A-Z0-9])", upper)
    if len(found) != 1:
        return text
    memory = re.search(r"\b(40|80) ?GB?\b", upper)
    with_memory = f"{found[0]} {memory[1]}GB" if memory else ""
    return with_memory if with_memory in PRESETS else str(found[0])


def study_of(cells: Cells, gpu: str) -> str:
    """The study of a row. NeMo's releases are studies of their own."""
    source = cells.text("source")
    lowered = source.lower()
    name = next((name for part, name in STUDIES.items() if part in lowered), source)
    if name == "NeMo":
        said = " ".join(cells.text(key) for key in ("source", "source_path", "date"))
        release = re.search(r"\b2\d\.\d\d\b", said)
        name = f"NeMo {release[0]}" if release else name
    return f"{name or 'no source'}, {gpu or 'no GPU'}"


def _is_of_vtrain(cells: Cells) -> bool:
    return "vtrain" in cells.text("source").lower()


def _vocab_of(cells: Cells, tp: int) -> int:
    """The vocabulary of a row whose table has none.

    vTrain's is GPT-2's (``vocab_size`` of its repository's ``src/config.py``). Megatron pads it to
    128 rows for each rank of tp. With one rank the runs are those of a head without padding.
    """
    if not _is_of_vtrain(cells):
        return MEGATRON_VOCAB
    return GPT2_VOCAB if tp == 1 else -(-GPT2_VOCAB // (128 * tp)) * 128 * tp


def _recompute_of(cells: Cells, study: str) -> str:
    """What a row computes again, and whether its tensor parallelism is that of sequences.

    In vTrain's runs the last stage of a pipeline computes nothing again (its repository,
    ``src/predictor.py``, ``create_layer_graph``).
    """
    text = cells.text("recompute")
    # "selective + sequence parallel"
    word, *others = (part.strip() for part in re.split(r"[,+]", text.lower()))
    kind = RECOMPUTED.get(word)
    if kind is None or any(part != SEQUENCE_PARALLEL for part in others):
        cells.faults.append(
            f"recompute says {text!r}; none, full and selective (the core of attention) are known"
        )
        kind = "none"
    tensor_parallel, stages = cells.text("tp") not in ("", "1"), cells.text("pp") not in ("", "1")
    left_out = kind == "full" and stages and _is_of_vtrain(cells)
    in_sequence = others or (tensor_parallel and study.startswith(SPLIT_SEQUENCES))
    words = (kind, BUT_THE_LAST * left_out, SEQUENCE_PARALLEL * bool(in_sequence))
    return ", ".join(word for word in words if word)


def _precision_of(cells: Cells) -> str:
    """The dtype of products. The tables call several recipes FP8; on Blackwell MX scales whole
    blocks in hardware, at the rate of float8.
    """
    text = cells.text("precision")
    upper = text.upper()
    if re.search(r"FP8|FLOAT8", upper) and "FP4" not in upper:
        return "float8_e4m3fn"
    if text and not re.search(r"BF16|BFLOAT16|FP16|FLOAT16", upper):
        cells.faults.append(f"precision {text!r} has no rate here; bf16, fp16 and fp8 have")
    return "bfloat16"


def _seconds_of(cells: Cells, row: Row) -> float:
    """The seconds of a step: as the table says, or by the tokens or the operations of a second."""
    seconds, tokens = cells.number("iter_s"), cells.number("tokens_per_s_per_gpu")
    flops = 1e12 * cells.number("tflops_per_gpu")
    if tokens and row.gpus:
        told = row.batch * row.sizes.seq / (tokens * row.gpus)
        if seconds and not 0.9 < seconds / told < 1.1:
            cells.faults.append(f"iter_s says {seconds:g} s, and tokens_per_s_per_gpu {told:.4g} s")
        return seconds or told
    # Whether others count what is computed again, or attention by half, a rate does not say.
    if not seconds and flops and row.gpus and row.study.startswith("Megatron-LM 2021"):
        return _seconds_at(row, flops)
    return seconds


def _seconds_at(row: Row, flops_per_s: float) -> float:
    """Seconds of a step from the rate that a paper gives: equation 3 of Narayanan et al. 2021,
    which counts a recomputed forward.
    """
    s, sizes = row.sizes.seq, row.sizes
    layers = 96 * row.batch * s * sizes.layers * sizes.hidden**2
    terms = 1 + s / (6 * sizes.hidden) + sizes.vocab / (16 * sizes.layers * sizes.hidden)
    return layers * terms / (row.gpus * flops_per_s)


def _check_model(cells: Cells, row: Row) -> None:
    """A model of an unknown name is built by its sizes, so all of these must be there."""
    if is_named(row.model):
        return
    needed = ["layers", "hidden", "heads", "ffn", "vocab", *(["top_k"] if row.experts else [])]
    absent = [name for name in needed if not cells.text(name)]
    if row.experts and cells.text("moe_ffn"):
        absent = [name for name in absent if name != "ffn"]
    if absent:
        # With these sizes a name is but a label.
        hint = meant(row.model) if {"layers", "hidden", "heads"} <= set(absent) else ""
        cells.faults.append(
            f"model {row.model!r} is not known here{hint}, and the table leaves out "
            f"{', '.join(absent)}; with all sizes it is built as a {built_by_sizes(row.experts)}"
        )


def _check_plan(cells: Cells, row: Row) -> None:
    """Cells that contradict each other, or say a plan that rows cannot."""
    schedule = cells.text("schedule")
    if schedule.lower() not in SCHEDULES:
        cells.faults.append(f"the schedule {schedule!r} is not known; 1F1B and interleaved are")
    elif "interleaved" in schedule.lower() and row.chunks == 1:
        cells.faults.append("the schedule is interleaved, and vp does not say by how much")
    if row.pp == 1 and row.chunks > 1:
        cells.faults.append(
            f"vp says {row.chunks}, and with pp=1 there is no pipeline to interleave"
        )
    if row.zero > 3:
        cells.faults.append(f"zero says {row.zero}; there are stages 0 to 3")
    degrees = f"tp={row.tp} pp={row.pp} cp={row.cp}"
    absent = [name for name in ("tp", "pp", "cp") if not cells.has(name)]
    if absent:
        degrees += f" (the table has no column {', '.join(absent)})"
    for key in ("dp", "fsdp"):
        size = cells.count(key, 0, 0)
        if size > 1 and row.gpus and size not in (row.copies, row.copies * row.cp):
            why = f"{key} says {size}, and {row.gpus} GPUs with {degrees} leave {row.copies}"
            cells.faults.append(why)
    if re.search(r"offload(ing)?:? true", row.notes.lower()):
        cells.faults.append("what is on the host meanwhile has no price here (offload)")
