"""``make demo``: compile a small GPT for two ranks, look at what was generated, train it, compare
with one device.

Run it alone: ``python examples/demo.py``. It starts the two ranks itself, with torchrun and gloo on
the CPU. The files that it makes stay in ``.shardwright/demo`` for you to read. The next run
replaces them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from byte_text import VOCAB_SIZE, batches
from gpt import GPT
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

import shardwright

NUM_RANKS, NUM_STEPS, BATCH_SIZE, SEQ_LENGTH = 2, 20, 8, 64
LEARNING_RATE = 3e-3
FOLDER = Path(".shardwright", "demo")
CONFIG = shardwright.ComputeConfig(plan_ngpus=NUM_RANKS, runtime_ngpus=NUM_RANKS)


def make_model() -> GPT:
    """The model as its author wrote it, in float64 so that the comparison shows algebra and not
    rounding.
    """
    torch.manual_seed(0)
    return GPT(
        VOCAB_SIZE, max_length=SEQ_LENGTH, hidden_size=128, num_layers=2, num_heads=4
    ).double()


def dummy_args() -> dict[str, torch.Tensor]:
    """Arguments of ``forward`` of the shapes to compile for."""
    return {"tokens": torch.zeros(BATCH_SIZE, SEQ_LENGTH, dtype=torch.int64)}


def compile_model(reuse: str, load_module: bool) -> torch.nn.Module | None:
    """Compile for tensor parallelism, or with ``reuse="match"`` find that it was compiled before;
    load this rank's part if asked to.
    """
    return shardwright.parallelize(
        make_model(),
        dummy_args(),
        "tp",
        CONFIG,
        gen_savedir=FOLDER,
        reuse=reuse,
        load_module=load_module,
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The loss of every step. The same loop on one device and on many."""
    losses = []
    for tokens in batches(NUM_STEPS, BATCH_SIZE, SEQ_LENGTH):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_rank() -> None:
    """What torchrun starts twice."""
    dist.init_process_group("gloo")
    model = compile_model("match", load_module=True)
    optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, CONFIG, lr=LEARNING_RATE)
    losses = train(model, optimizer)
    if dist.get_rank() == 0:
        (FOLDER / "losses.json").write_text(json.dumps(losses))
    dist.barrier()  # no rank leaves while another still talks to it
    dist.destroy_process_group()


def run_ranks() -> list[float]:
    """Start the ranks and return the losses that they saw."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={NUM_RANKS}",
    ]
    subprocess.run(
        [*torchrun, __file__, "--rank"],
        check=True,
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
    losses: list[float] = json.loads((FOLDER / "losses.json").read_text())
    return losses


def excerpt(source: str, num_lines: int = 75) -> tuple[str, int]:
    """A generated file from ``forward`` on, and the number of the first line."""
    lines = source.splitlines()
    start = next(
        index for index, line in enumerate(lines) if line.lstrip().startswith("def forward")
    )
    return "\n".join(lines[start : start + num_lines]), start + 1


def report(console: Console, one: list[float], many: list[float]) -> None:
    """Both losses side by side, and the largest difference."""
    table = Table(
        "step", "one device", f"{NUM_RANKS} ranks, tp", "difference", title="Loss on the same text"
    )
    for step in sorted({0, 1, 2, *range(4, NUM_STEPS, 5), NUM_STEPS - 1}):
        table.add_row(
            str(step + 1),
            f"{one[step]:.12f}",
            f"{many[step]:.12f}",
            f"{abs(one[step] - many[step]):.1e}",
        )
    console.print(table)
    console.print(
        f"largest difference over {NUM_STEPS} steps: "
        f"[bold]{max(abs(a - b) for a, b in zip(one, many, strict=True)):.1e}[/]\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help="run as one rank of the job")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank:
        return run_rank()

    console = Console(soft_wrap=True)
    console.print(
        Panel(
            "A GPT written for one device ([bold]examples/gpt.py[/]), trained on "
            f"{NUM_RANKS} ranks.",
            expand=False,
        )
    )
    start = time.perf_counter()
    compile_model("override", load_module=False)
    files = sorted(FOLDER.rglob("gencode*.py"))
    console.print(
        f"Compiled in {time.perf_counter() - start:.1f} s into one source file per rank. "
        f"A part of {files[0].name}:\n"
    )
    text, first_line = excerpt(files[0].read_text())
    console.print(
        Syntax(text, "python", line_numbers=True, start_line=first_line, background_color="default")
    )

    console.print(
        f"\nTraining {NUM_STEPS} steps on one device, then on {NUM_RANKS} ranks under "
        "torchrun ...\n"
    )
    model = make_model()
    one = train(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    report(console, one, run_ranks())

    console.print("The files stay, for you to read (the next run replaces them):")
    for path in (*files, files[0].with_name("plan.json")):
        console.print(f"  {path}", highlight=False)
    console.print()

    tools = os.path.relpath(Path(sys.executable).parent)
    console.print("Next:")
    console.print("  a Hugging Face GPT-2, unmodified, its logits cut over two ranks:")
    console.print(
        f"    {tools}/torchrun --nproc-per-node 2 examples/train_gpt2.py --policy tp --check"
    )
    console.print(
        "  a 7B Llama compiled for 8 ranks on this machine, in seconds and without its weights:"
    )
    console.print(f"    {tools}/python examples/compile_offline.py")
    console.print("  your own model: docs/getting-started.md")


if __name__ == "__main__":
    main()
