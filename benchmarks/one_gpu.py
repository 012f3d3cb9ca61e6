"""Everything that one GPU can show: what is right, how fast it is, how well it was predicted.

    python benchmarks/one_gpu.py compile FOLDER     on any machine: no GPU is needed
    python benchmarks/one_gpu.py run FOLDER         on the GPU: ortools is not needed
    python benchmarks/one_gpu.py                    both, as `make gpu` does

Compile both with ``--stand-in`` for a machine without a GPU: then the CPU runs small models, which
shows that the program works and nothing of speed.

1. Plans of four ranks, each rank a thread that shares the device: dp, ZeRO, tp, 2d, pp, cp, ep, in
   float64 against the model alone on the CPU; ring attention and experts in bfloat16, where a GPU
   has kernels of its own. Checkpoints from CPU to GPU ranks and back. Autocast with scaled losses.
   CUDA graphs.
2. Steps of generated code for one rank beside eager and compiled PyTorch: time, memory, MFU.
3. A dozen plans of one rank: peaks within 2 % of the prediction, steps in the predicted order, on
   the hardware as ``shardwright calibrate`` measures it in the same run.

It prints a line for each and a verdict; the exit status tells whether all is well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import one_gpu_attention
import one_gpu_exact
import one_gpu_plans
import torch
from one_gpu_tables import Line

import shardwright
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware, preset_names
from shardwright.frontend.calibrate.calibrate import calibrate

PEAK_BOUND = 0.02
"""How far a predicted peak may be from the measured one."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=("compile", "run", "both"), default="both")
    parser.add_argument("folder", nargs="?", type=Path, help="of compiled files")
    parser.add_argument(
        "--stand-in", action="store_true", help="small models on the CPU (the default without GPU)"
    )
    parser.add_argument(
        "--hardware", type=Path, metavar="FILE", help="keep what is calibrated in this file"
    )
    options = parser.parse_args()
    if options.action != "both" and options.folder is None:
        parser.error("a folder is missing")
    # Another machine has the GPU for which ``compile`` compiles.
    has_gpu = torch.cuda.is_available() or options.action == "compile"
    stand_in = options.stand_in or not has_gpu
    size = one_gpu_plans.STAND_IN if stand_in else one_gpu_plans.ON_GPU
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if options.action != "run":
            compile_all(folder, size)
        if options.action == "compile":
            return 0
        device = torch.device("cpu" if stand_in else "cuda")
        return run(folder, size, device, options.hardware)


def compile_all(folder: Path, size: one_gpu_plans.Size) -> None:
    """Compile all plans into the folder."""
    start = time.perf_counter()
    (folder / "exact").mkdir(parents=True, exist_ok=True)
    one_gpu_exact.compile_plans(folder / "exact")
    one_gpu_plans.compile_plans(folder / "plans", size)
    print(f"compiled into {folder} in {time.perf_counter() - start:.0f} s", flush=True)


def run(
    folder: Path, size: one_gpu_plans.Size, device: torch.device, kept: Path | None = None
) -> int:
    """Try everything on the device; the exit status. ``kept``: a file for what is calibrated."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU, which stands in"
    print(f"torch {torch.__version__} on {name}", flush=True)
    start = time.perf_counter()
    wrong = []
    count = 0
    for line in _lines(folder, size, device, kept):
        print(line, flush=True)
        count += 1
        wrong += [] if line.right else [line.name]
    seconds = time.perf_counter() - start
    print(f"{count - len(wrong)} of {count} are right, after {seconds:.0f} s")
    if wrong:
        print("wrong:", "; ".join(wrong))
    return bool(wrong)


def _lines(
    folder: Path, size: one_gpu_plans.Size, device: torch.device, kept: Path | None
) -> Iterator[Line]:
    exact, plans = folder / "exact", folder / "plans"
    for part in (
        one_gpu_exact.plans,
        one_gpu_exact.kernels,
        one_gpu_attention.attention_blocks,
        one_gpu_attention.attention_times,
        one_gpu_exact.checkpoints,
        one_gpu_exact.low_precision,
        one_gpu_exact.cuda_graphs,
    ):
        yield from _without_stopping(part.__name__, lambda part=part: part(exact, device))
    start = time.perf_counter()
    hardware = calibrate(device.type, 1, quick=device.type == "cpu")
    if kept is not None:
        kept.write_text(hardware.dumps())
    dtype = str(size.dtype).removeprefix("torch.")
    flops_per_s = hardware.device.peak_flops_per_s(dtype)
    yield Line(
        "calibrate",
        f"{flops_per_s / 1e12:.3g} TFLOP/s of {dtype}, "
        f"{hardware.device.bytes_per_s / 1e9:.0f} GB/s, after {time.perf_counter() - start:.0f} s",
    )
    preset = _preset(device)
    if preset is not None:
        flops_per_s = preset.device.peak_flops_per_s(dtype)
    # On the one rank of a world that has the device.
    for name, alone in (
        ("kernels", lambda: one_gpu_plans.kernels(plans, size, device, flops_per_s)),
        ("plans", lambda: one_gpu_plans.plans(plans, size, device, hardware, preset, PEAK_BOUND)),
    ):
        lines = shardwright.run_ranks(
            1,
            lambda rank, name=name, alone=alone: list(_without_stopping(name, alone)),
            device=device,
        )
        yield from lines[0]


def _preset(device: torch.device) -> Hardware | None:
    """The hardware that comes with shardwright, of a GPU of this name."""
    if device.type == "cpu":
        return None
    words = torch.cuda.get_device_name(device).lower().replace("-", " ").split()
    names = [name for name in preset_names() if name.split("-")[0] in words]
    return load_hardware(names[0]) if len(names) == 1 else None


def _without_stopping(name: str, part: Callable[[], Iterable[Line]]) -> Iterator[Line]:
    """The lines of a part; where it raises, a line that says so, and the next part has its turn."""
    try:
        yield from part()
    except Exception as error:
        traceback.print_exc()
        yield Line(name, f"stopped by {type(error).__name__}: {error}", False)


if __name__ == "__main__":
    sys.exit(main())
