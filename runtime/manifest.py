"""The manifest: what a directory of generated files is, and the digests its files must have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwright import __version__
from shardwright.runtime.arguments import checked
from shardwright.runtime.checkpoint.tensor_files import digest_file
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import COMPILE_AGAIN, LoadError
from shardwright.runtime.file_digests import ChunkDigests
from shardwright.runtime.input_readers import InputReader
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.layout import Mesh
from shardwright.runtime.module.declarations import Declaration
from shardwright.runtime.module.weights import CONSTANTS_FILE, WEIGHTS_FILE
from shardwright.runtime.swap import write_file

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
"""Raised when files of an earlier format cannot be loaded any more."""


def code_file(rank: int) -> str:
    """The name of the file of plan rank ``rank``."""
    return f"gencode{rank}.py"


@dataclass(frozen=True)
class Manifest:
    """What ``manifest.json`` says.

    ``key``: the digest of what was asked for (traced graph, config, policy, versions).
    ``class_name``: of the generated class. ``mesh``: of one unit; there is one code file per rank
    of it. ``files``: name to hex sha256 of every file made.
    ``chunks``: of large files, which ranks read in part, also the digests of their chunks.
    ``tensors``: parameters, buffers and constants by name, in the order of the original
    ``named_parameters()``.
    ``use_order``: the parameters in the order in which forward first uses them; backward reaches
    them in the reverse one.
    ``request``: the config and whatever else the compiler needs to recognise its own work, as JSON.
    ``zero_stage``: of ZeRO, where the config leaves it to the plan. ``work``: which part of one
    device's arithmetic each rank does, as the compiler has found it. ``inputs``: which ranks of a
    unit read which tensor of a sample; ``None`` if nobody has noted it.
    """

    key: str
    class_name: str
    mesh: Mesh
    policy: str
    files: Mapping[str, str]
    tensors: Mapping[str, Declaration]
    chunks: Mapping[str, ChunkDigests] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    use_order: tuple[str, ...] = ()
    zero_stage: int | None = None
    work: Mapping[str, Any] | None = None
    inputs: tuple[InputReader, ...] | None = None
    format_version: int = FORMAT_VERSION
    shardwright_version: str = __version__
    torch_version: str = field(default_factory=lambda: str(torch.__version__))

    @property
    def plan_ngpus(self) -> int:
        """The number of ranks of a unit."""
        return self.mesh.size

    @property
    def config(self) -> ComputeConfig | None:
        """What it was compiled with, the plan's choices included; ``None`` for files that no
        compile made.
        """
        asked = self.request.get("config")
        if asked is None:
            return None
        config = ComputeConfig.from_json(asked)
        return config if self.zero_stage is None else config.with_zero(self.zero_stage)

    def digests_of(self, name: str) -> ChunkDigests | None:
        """What the chunks of a file must be; ``None`` if this says nothing of the file."""
        if name not in self.files:
            return None
        return self.chunks.get(name, ChunkDigests(None, (self.files[name],)))

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": self.format_version,
            "shardwright_version": self.shardwright_version,
            "torch_version": self.torch_version,
            "key": self.key,
            "class_name": self.class_name,
            "mesh": self.mesh.to_json(),
            "policy": self.policy,
            "files": dict(sorted(self.files.items())),
            "chunks": {name: digests.to_json() for name, digests in sorted(self.chunks.items())},
            "tensors": {name: declaration.to_json() for name, declaration in self.tensors.items()},
            "use_order": list(self.use_order),
            **({"zero_stage": self.zero_stage} if self.zero_stage is not None else {}),
            **({"work": dict(self.work)} if self.work is not None else {}),
            **(
                {"inputs": [reader.to_json() for reader in self.inputs]}
                if self.inputs is not None
                else {}
            ),
            "request": dict(self.request),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The reverse of :meth:`to_json`; ``KeyError``, ``TypeError`` or ``ValueError`` where it is
        not one.
        """
        return cls(
            key=data["key"],
            class_name=data["class_name"],
            mesh=Mesh.from_json(data["mesh"]),
            policy=data["policy"],
            files=dict(data["files"]),
            tensors={
                name: Declaration.from_json(name, item) for name, item in data["tensors"].items()
            },
            chunks={
                name: ChunkDigests.from_json(item) for name, item in data.get("chunks", {}).items()
            },
            request=dict(data["request"]),
            use_order=tuple(data.get("use_order", ())),
            zero_stage=data.get("zero_stage"),
            work=data.get("work"),
            inputs=tuple(map(InputReader.from_json, data["inputs"])) if "inputs" in data else None,
            format_version=data["format_version"],
            shardwright_version=data["shardwright_version"],
            torch_version=data["torch_version"],
        )

    def write(self, directory: Path) -> None:
        """Write it into ``directory`` with a digest of itself, replacing an older one
        atomically.
        """
        content = self.to_json()
        write_file(
            directory / MANIFEST_FILE,
            (json.dumps({"sha256": _digest(content), **content}, indent=1) + "\n").encode(),
        )

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of ``directory``, of a version that this installation can load.

        Raises :class:`LoadError` if it is missing, damaged or of another version.
        """
        path = directory / MANIFEST_FILE
        try:
            data = parse_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise LoadError(
                f"{directory} holds no compiled module",
                why=f"there is no {MANIFEST_FILE}",
                hint="compile first, with shardwright.parallelize or `shardwright compile`, or "
                "copy the directory to this node",
            ) from None
        except (ValueError, OSError) as error:
            raise _damaged(path, getattr(error, "strerror", None) or str(error)) from error
        check_versions(path, data)
        # Old manifests have no digest of their own.
        written = data.pop("sha256", None)
        if written is not None and written != _digest(data):
            raise _damaged(path, "its sha256 is not that of what was written")
        try:
            return cls.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(path, f"{type(error).__name__}: {error}") from error


def check_versions(path: Path, data: Any) -> None:
    """Refuse a manifest of another format, another minor version of shardwright, or another major
    version of torch.

    Generated code calls the runtime, whose interface may change with a minor version before 1.0;
    torch keeps the functions that generated code calls within a major version.
    """
    if not isinstance(data, dict):
        raise _damaged(path, "it is not a JSON object")
    checks = (
        ("format_version", str(FORMAT_VERSION), 1, "format version"),
        ("shardwright_version", __version__, 2, "shardwright"),
        ("torch_version", str(torch.__version__), 1, "torch"),
    )
    for field_name, installed, num_parts, title in checks:
        if field_name not in data:
            raise _damaged(path, f"it has no {field_name}")
        # Patch releases do not change what files mean.
        made_with = str(data[field_name])
        if made_with.split(".")[:num_parts] != installed.split(".")[:num_parts]:
            raise LoadError(
                f"{path.parent} was compiled with another version of shardwright"
                if field_name != "torch_version"
                else f"{path.parent} was compiled with another version of torch",
                why=f"its {title} is {made_with}, here it is {installed}",
                hint=f"install the version it was made with, or {COMPILE_AGAIN}",
            )


@checked
def accept(directory: Path | str) -> list[str]:
    """Make the code and the values in ``directory``, as they are now, the ones the manifest stands
    for. Returns the names that changed.

    Raises :class:`LoadError` if a file is missing or is no valid Python.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    files = dict(manifest.files)
    # Code that does not parse is refused before anything is accepted.
    for rank in range(manifest.plan_ngpus):
        name = code_file(rank)
        source = read_file(directory, name)
        try:
            compile(source, str(directory / name), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            what = f"{directory / name} is not valid Python"
            raise LoadError(what, why=str(error), hint="fix it, then accept again") from error
        files[name] = sha256(source)
    chunks = dict(manifest.chunks)
    # Values may be edited as well.
    for name in (WEIGHTS_FILE, CONSTANTS_FILE):
        path = directory / name
        if name in files and path.exists():
            files[name], chunks[name] = digest_file(path), ChunkDigests.of_file(path)
    changed = [name for name, digest in files.items() if manifest.files.get(name) != digest]
    if changed:
        replace(manifest, files=files, chunks=chunks).write(directory)
    return changed


def sha256(data: bytes) -> str:
    """The hex digest that manifests hold."""
    return hashlib.sha256(data).hexdigest()


def read_file(directory: Path, name: str) -> bytes:
    """The bytes of a file that the manifest promises; :class:`LoadError` if it is not there."""
    try:
        return (directory / name).read_bytes()
    except FileNotFoundError:
        raise LoadError(
            f"{directory / name} is missing",
            why=f"{MANIFEST_FILE} lists it",
            hint=f"copy the whole directory to this node, or {COMPILE_AGAIN}",
        ) from None
    except OSError as error:
        raise LoadError(
            f"{directory / name} cannot be read",
            why=error.strerror,
            hint=COMPILE_AGAIN,
        ) from error


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())


def _damaged(path: Path, why: str) -> LoadError:
    return LoadError(f"{path} is damaged", why=why, hint=COMPILE_AGAIN)
