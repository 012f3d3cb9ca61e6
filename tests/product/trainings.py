"""``shardwright train`` on real processes: parity with one device, signals, lost ranks, restarts.

    python tests/product/trainings.py parity          # plans on 2 and 4 ranks against one device
    python tests/product/trainings.py stops           # SIGTERM, SIGUSR1, SIGKILL, other ranks

``parity``: models of transformers and one by hand, every plan, in float64: losses and norms of all
steps under the bound of parity. Ranks are threads. ``stops``: jobs of gloo processes that are
stopped or killed at a step and started again on another number of ranks, under another plan; the
losses of all steps are those of a run that nobody stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "_lib"))

import torch  # noqa: E402
import transformers  # noqa: E402
from parity import BOUND  # noqa: E402
from precision import float64_casts  # noqa: E402
from training_runs import alone, by_step, records, rows, run, settings  # noqa: E402

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {}),
    "dp 4": (4, {"microbatch": 1}),
    "zero2 2": (2, {"parallel__use_zero": 2, "microbatch": 2}),
    "zero3 2": (2, {"parallel__use_zero": 3}),
    "zero3 4": (4, {"parallel__use_zero": 3, "microbatch": 1}),
    "tp 2": (2, {"parallel__policy": "tp"}),
    "tp 2 x 2 units": (4, {"parallel__policy": "tp", "parallel__plan_ngpus": 2, "microbatch": 2}),
    "data 2": (2, {"parallel__policy": "data"}),
    "pp 2": (2, {"parallel__policy": "pp", "microbatch": 2}),
    "pp 2 x 2 units, zero1": (
        4,
        {
            "parallel__policy": "pp", "parallel__plan_ngpus": 2, "microbatch": 2,
            "parallel__use_zero": 1,
        },
    ),
    "hybrid 2 x tp 2": (4, {"parallel__policy": "hybrid", "microbatch": 2}),
}  # fmt: skip

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 16}
FAMILIES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=2
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=16, n_positions=8, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, intermediate_size=32, num_key_value_heads=2
    ),
    "mistral": lambda: transformers.MistralConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=2
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **SIZES, intermediate_size=32, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "opt": lambda: transformers.OPTConfig(
        **SIZES, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, max_position_embeddings=16
    ),
    "bloom": lambda: transformers.BloomConfig(
        hidden_size=16, n_layer=2, n_head=4, vocab_size=16
    ),
    "gemma": lambda: transformers.GemmaConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=2, head_dim=8
    ),
    "phi": lambda: transformers.PhiConfig(**SIZES, intermediate_size=32),
    "stablelm": lambda: transformers.StableLmConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=4
    ),
}  # fmt: skip


def family(name: str = "llama") -> torch.nn.Module:
    """What ``model.function`` names."""
    made: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]())
    return made.double()


class Numbered(torch.nn.Module):
    """A model of transformers on one device, told the number of labels of the whole batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        count = labels[..., 1:].ne(-100).sum()
        result = self.model(
            input_ids=input_ids, labels=labels, use_cache=False, num_items_in_batch=count
        )
        loss: torch.Tensor = result.loss
        return loss


def parity(folder: Path, only: str | None) -> bool:
    """Every family under every plan; the worst relative difference of a loss or a norm."""
    sys.modules["trainings"] = sys.modules[__name__]
    ok = True
    for name in FAMILIES:
        if only not in (None, name):
            continue
        with float64_casts():
            reference = settings(folder / name / "alone")
            torch.manual_seed(0)
            expected = alone(reference, Numbered(family(name)), rows())
            for plan, (num_ranks, changes) in PLANS.items():
                chosen = settings(
                    folder / name / plan.replace(" ", "-"),
                    model__function="trainings:family", model__arguments={"name": name}, **changes,
                )  # fmt: skip
                try:
                    with open(os.devnull, "w") as quiet:
                        told, sys.stdout = sys.stdout, quiet
                        try:
                            run(num_ranks, chosen)
                        finally:
                            sys.stdout = told
                    worst = _worst(by_step(chosen), expected)
                except Exception as error:
                    print(f"{name:10} {plan:24} FAILED {type(error).__name__}: {error}", flush=True)
                    ok = False
                    continue
                equal = worst <= BOUND
                ok &= equal
                print(
                    f"{name:10} {plan:24} {worst:.1e} {'equal' if equal else 'DIFFERS'}", flush=True
                )
    return ok


def _worst(ours: dict[int, Any], theirs: dict[int, Any]) -> float:
    assert ours.keys() == theirs.keys(), (sorted(ours), sorted(theirs))
    return max(
        abs(mine - its) / abs(its)
        for step, pair in theirs.items()
        for mine, its in zip(ours[step], pair, strict=True)
    )


RUN = """
model: {function: "training_runs:tagger"}
data: {function: "training_runs:rows"}
global_batch: 12
clip_norm: 0.5
optimizer: {options: {lr: 1.0e-2, eps: 1.0e-4, weight_decay: 0.1}}
schedule: {name: cosine, warmup_steps: 2}
checkpoints: {every_steps: 5}
hooks: {on_step_end: "trainings_hooks:pause"}
"""

HOOKS = """
import time
def pause(run, record):
    time.sleep(0.1)  # as long as a step of a real model, so that a signal meets one
"""

JOBS = (
    # ranks, settings, what ends it, after which step
    (2, ("--parallel.policy", "tp"), signal.SIGTERM, 4),
    (3, ("--microbatch", "2"), signal.SIGUSR1, 11),
    (2, ("--parallel.policy", "pp", "--microbatch", "3"), signal.SIGKILL, 18),
    (4, ("--parallel.use_zero", "3"), signal.SIGKILL, 27),
    (1, (), None, 40),
)


def stops(folder: Path) -> bool:
    """A run that is ended several times and changes its ranks and plan each time."""
    steps = JOBS[-1][-1]
    (folder / "run.yaml").write_text(RUN)
    (folder / "trainings_hooks.py").write_text(HOOKS)
    path = os.pathsep.join(
        (str(folder), str(ROOT / "tests" / "_lib"), os.environ.get("PYTHONPATH", ""))
    )
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    chosen = settings(folder / "out")
    ok = True
    for number, (num_ranks, flags, how, after) in enumerate(JOBS):
        command = [
            sys.executable, "-m", "shardwright", "train", "-c", "run.yaml", "--output", "out",
            "--steps", str(steps), "--num_ranks", str(num_ranks), *flags,
        ]  # fmt: skip
        log = folder / f"job{number}.txt"
        with log.open("w") as out:
            job = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
            if how is not None:
                _wait_for_step(chosen, after, job)
                # Only one rank is killed; the others must end by themselves, in words.
                target = _children(job.pid)[-1] if how == signal.SIGKILL else job.pid
                os.kill(target, how)
            code = job.wait(timeout=300)
        expected = {None: (0,), signal.SIGKILL: (1, 137)}.get(how, (75,))
        fine = code in expected
        ok &= fine
        text = log.read_text()
        words = "has ended with" in text if how == signal.SIGKILL else "Traceback" not in text
        ok &= words
        name = "to its end" if how is None else signal.Signals(how).name
        last = max((r["step"] for r in records(chosen)), default=0)
        print(
            f"{num_ranks} ranks {' '.join(flags):40} {name}: exit code {code}, step {last}, "
            f"{'as it should' if fine and words else 'WRONG, see below'}",
            flush=True,
        )
        if not (fine and words):
            print(text)
    torch.manual_seed(0)
    from training_runs import tagger

    whole = settings(folder / "alone", global_batch=12, steps=steps)
    worst = _worst(by_step(chosen), alone(whole, tagger(), rows()))
    print(f"all {steps} steps against one device: {worst:.1e}")
    return ok and worst <= BOUND


def _wait_for_step(chosen: Any, step: int, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and job.poll() is None:
        try:
            if any(record["step"] >= step for record in records(chosen)):
                return
        except (OSError, json.JSONDecodeError):
            pass
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(number) for number in text.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("parity", "stops"))
    parser.add_argument("--family", choices=tuple(FAMILIES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if options.what == "parity":
            ok = parity(place, options.family)
        else:
            ok = stops(place)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
