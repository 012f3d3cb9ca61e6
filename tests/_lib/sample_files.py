"""Tar shards and other files of samples, for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_tar(path: Path, samples: Mapping[str, Mapping[str, bytes]]) -> Path:
    """A shard with the samples, each a mapping from extension to bytes."""
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for extension, data in members.items():
                info = tarfile.TarInfo(f"{key}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def numbered_shards(folder: Path, num_shards: int, samples_each: int, first: int = 0) -> Path:
    """A folder of shards whose samples are numbers from ``first`` on."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        start = first + shard * samples_each
        samples = {
            f"s{number:05d}": {"cls": b"%d" % number, "txt": f"text {number}".encode()}
            for number in range(start, start + samples_each)
        }
        write_tar(folder / f"shard-{shard:03d}.tar", samples)
    return folder
