"""CUDA devices on a build of torch without CUDA, with real values: for finding what would fail on
GPUs.

:func:`install` gives this process :data:`NUM_DEVICES` devices, ``cuda:0`` and on. Their tensors are
ordinary ones, with CUDA's dispatch key and the host's memory (``fake_cuda.cpp``), so views,
storages, ``.data``, autograd and optimizers do what they do on a GPU: operators refuse tensors of
two devices, the CUDA list of autocast holds, a backward runs in a thread of its device, and
generators belong to a device. The kernels are the CPU's, so values are equal to those on a CPU bit
by bit.

:mod:`fake_nccl` has a process group that refuses what NCCL refuses. What neither shows: streams and
their races, the kernels that only GPUs have, speed, memory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

NUM_DEVICES = 8
SOURCE = Path(__file__).with_name("fake_cuda.cpp")


def compiler() -> str | None:
    """The C++ compiler that builds the device, ``None`` without one."""
    found = os.environ.get("CXX", "g++")
    return found if subprocess.run(["which", found], capture_output=True).returncode == 0 else None


def build() -> Path:
    """The compiled device, from an earlier call where the source and torch are the same."""
    source = SOURCE.read_bytes()
    digest = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"shardwright_fake_cuda_{os.getuid()}_{digest}.so"
    if not library.exists():
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        paths = [
            part
            for path in cpp_extension.library_paths()
            for part in (f"-L{path}", f"-Wl,-rpath,{path}")
        ]
        with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as made:
            pass
        command = [
            compiler() or "g++",
            "-shared",
            "-fPIC",
            "-O0",
            "-w",
            "-std=c++20",
            *includes,
            str(SOURCE),
            "-o",
            made.name,
        ]
        subprocess.run([*command, *paths, "-lc10", "-ltorch_cpu", "-ltorch"], check=True)
        os.replace(made.name, library)
    return library


def install() -> None:
    """Give this process CUDA devices, for the rest of its life. It must not have had a backward
    before.
    """
    torch.ops.load_library(build())
    ours: Any = torch.ops.fake_cuda
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = cuda.is_initialized = cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.device_count = lambda: NUM_DEVICES
    cuda.current_device = ours.device
    cuda.set_device = lambda device: ours.set_device(_index(device))
    cuda.synchronize = lambda device=None: ours.synchronise()
    cuda.default_generators = tuple(ours.default_generator(index) for index in range(NUM_DEVICES))
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        uuid=f"GPU-{_index(device)}", name="fake", major=9, minor=0, total_memory=2**34
    )
    cuda.get_device_name = lambda device=None: "fake"
    cuda.Event = _Event
    storage: Any = torch.UntypedStorage  # which makes none of a device that torch was not built for
    on_cpu = storage.clone
    storage.clone = lambda self: (
        on_cpu(self) if self.device.type == "cpu" else _bytes_of(self).clone().untyped_storage()
    )
    storage.cpu = lambda self: (
        self if self.device.type == "cpu" else _bytes_of(self).cpu().untyped_storage()
    )


class _Event:
    """A moment of the one stream there is, whose work is done when its call returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._moment_s = 0.0

    def record(self) -> None:
        self._moment_s = time.perf_counter()

    def synchronize(self) -> None:
        torch.ops.fake_cuda.synchronise()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return (end._moment_s - self._moment_s) * 1e3


def synchronisations() -> list[str]:
    """What the host has waited for the device since the last call: operators, ``to host``, ``to
    device``.
    """
    return list(torch.ops.fake_cuda.synchronisations())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),)
    )


def _index(device: torch.device | int | str | None) -> int:
    if device is None:
        return int(torch.ops.fake_cuda.device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.ops.fake_cuda.device()) if index is None else index
