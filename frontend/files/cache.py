"""Directories of generated files: where they are, what they were made from, and how they change.

A directory is recognised by content. Its manifest holds the key of the request it was made for: the
digest of the freshly traced graph, what ``register_op`` was told of its operators, the config, the
policy, the files its options name, the versions of shardwright and torch, and the source of
shardwright, which changes between versions too. An edited model has another digest, so it is never
served code of what it was. Initial weights are outside the key; their files have digests of their
own.

What torch is set to when a model is compiled (default dtype, autocast, attention kernels, ...) is
in the key as far as the traced graph depends on it. Versions of solvers are not: they choose among
plans that are all proved.

A directory changes as a whole: everything is written beside it, checked, and swapped in. A compile
that fails, or a process that is killed, leaves what was there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.printer import print_dtype, print_size
from shardwright.compiler.plan.check import input_paths
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.plan_file import check_plan_file
from shardwright.frontend.files.locks import WRITE_HINT
from shardwright.frontend.files.weight_files import Tensors
from shardwright.runtime.activity import tell
from shardwright.runtime.checkpoint.tensor_files import digest_tensors, write_tensors
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import COMPILE_AGAIN, ConfigError, LoadError, PlanError
from shardwright.runtime.file_digests import ChunkDigests
from shardwright.runtime.json_text import parse_json
from shardwright.runtime.manifest import MANIFEST_FILE, Manifest, code_file, read_file, sha256
from shardwright.runtime.module.weights import CONSTANTS_FILE, WEIGHTS_FILE
from shardwright.runtime.swap import (
    recover_folder,
    remove_unfinished,
    write_file,
    write_folder,
    writing,
)

PLAN_FILE = "plan.json"
PROOFS_FILE = "proofs.json"
"""The digests of the annotations that were proved. It is no part of what was made: no manifest
lists it.
"""


def generated_directory(gen_savedir: Path | str, cls: type[Any], instance_name: str | None) -> Path:
    """The absolute path ``<gen_savedir>/_parallel_modules/<module>/<class>/<instance>``."""
    instance = "_" if instance_name is None else instance_name
    if not isinstance(instance, str) or not re.fullmatch(r"\w[\w.-]*", instance):
        raise ConfigError(
            "instance_name is a name for a folder",
            why=f"it is {instance!r}",
            hint="letters, digits, '_', '-' and '.', the first one no '-' or '.'",
        )
    qualname = re.sub(r"[^\w.]", "", cls.__qualname__)  # the class of a function has <locals> in it
    return (
        Path(gen_savedir).absolute() / "_parallel_modules" / _module_name(cls) / qualname / instance
    )


def _module_name(cls: type[Any]) -> str:
    """The module of a class; for one defined in the running script, the name it has when it is
    imported instead.
    """
    if cls.__module__ != "__main__":
        return cls.__module__
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec:
        return str(spec.name)
    return Path(file).stem if file else cls.__module__


def read_plan(directory: Path) -> Plan:
    """The plan of a directory. Raises :class:`LoadError` if it is missing or damaged, or is not
    what the code was made of.
    """
    try:
        # The plan is a file that people edit; its digest tells.
        text, written = (
            read_file(directory, PLAN_FILE),
            Manifest.read(directory).files.get(PLAN_FILE),
        )
        data = parse_json(text)
        check_plan_file(data)
        if written is not None and sha256(text) != written:
            raise ValueError("its sha256 is not that of what was written")
    except ValueError as error:
        why = error.what if isinstance(error, PlanError) else str(error)
        hint = COMPILE_AGAIN
        raise LoadError(f"{directory / PLAN_FILE} is damaged", why=why, hint=hint) from error
    return Plan.from_json(data)


SOURCE_FOLDERS = ("codegen_templates", "compiler", "frontend", "policies", "runtime")
"""What of this package decides how a program is made, and what it calls."""


@functools.cache
def source_digest() -> str:
    """The digest of the source of this package: another one for every commit and every edit that
    may matter.
    """
    content = hashlib.sha256()
    for folder in SOURCE_FOLDERS:
        for name, data in _source_files(resources.files("shardwright") / folder, folder):
            content.update(f"{name} {len(data)} ".encode() + data)
    return content.hexdigest()


def _source_files(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of all files in a folder, in one order, without those that Python makes."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir() and item.name != "__pycache__":
            yield from _source_files(item, f"{path}/{item.name}")
        # Presets of machines and templates decide what is made as much as code does.
        elif item.name.rpartition(".")[2] in ("py", "json", "jinja"):
            yield f"{path}/{item.name}", item.read_bytes()


@dataclass(frozen=True)
class Request:
    """What a compile is recognised by. ``graph``: the digest of the graph as traced. ``policy``:
    its name or import path.
    ``inputs``: the tensors among the dummy arguments, by path, in words.
    ``files``: those that options of the policy name, to the digests of their contents.
    ``operators``: those of ``register_op``, to the digests of what they bring to a program.
    ``source``: the digest of this package.
    """

    graph: str
    config: ComputeConfig
    policy: str
    shardwright_version: str
    torch_version: str = str(torch.__version__)
    inputs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    operators: Mapping[str, str] = field(default_factory=dict)
    source: str = field(default_factory=source_digest)

    def key(self) -> str:
        """One digest of all of it."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "config": self.config.to_json(),
            "policy": self.policy,
            "shardwright_version": self.shardwright_version,
            "torch_version": self.torch_version,
            "source": self.source,
            "inputs": dict(self.inputs),
            **({"files": dict(self.files)} if self.files else {}),
            **({"operators": dict(self.operators)} if self.operators else {}),
        }

    def differences(self, made_for: Mapping[str, Any]) -> str:
        """What differs from the request for which a directory was made, in words."""
        # Inputs or the model, the config field by field, versions, files, operators.
        words = _inputs_changed(self.inputs, made_for.get("inputs", self.inputs))
        # The graph follows from the inputs too. With other ones, it tells nothing of the model.
        if made_for.get("graph") != self.graph and not words:
            # Digests only: which part of the model has changed is not known.
            words.append("the model, or a value among its dummy arguments, changed")
        config, other = self.config.to_json(), made_for.get("config", {})
        words += [
            f"{name} is {config[name]!r}, was {other.get(name)!r}"
            for name in config
            if config[name] != other.get(name)
        ]
        for name in ("policy", "shardwright_version", "torch_version"):
            mine = self.to_json()[name]
            if made_for.get(name) != mine:
                words.append(f"{name} is {mine!r}, was {made_for.get(name)!r}")
        if (
            made_for.get("source") != self.source
            and made_for.get("shardwright_version") == self.shardwright_version
        ):
            words.append("shardwright itself has changed, within one version")
        words += [
            f"the file {name} has changed"
            for name in _changed(self.files, made_for.get("files", {}))
        ]
        operators = _changed(self.operators, made_for.get("operators", {}))
        words += [f"what register_op says of {name} has changed" for name in operators]
        return "; ".join(words)


def describe_inputs(graph: IRGraph) -> dict[str, str]:
    """The tensors that a module is given, by path: ``{"x": "f32[4, 8]"}``."""
    described = {}
    for path, value in input_paths(graph).items():
        sizes = ", ".join(print_size(size) for size in value.shape)
        described[path] = f"{print_dtype(value.dtype)}[{sizes}]"
    return described


def _inputs_changed(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """What is said of each input that is not as it was."""
    words = []
    for path in _changed(now, before):
        if path not in before:
            words.append(f"the dummy arguments have a tensor {path!r}, and had none")
        elif path not in now:
            words.append(f"the dummy arguments have no tensor {path!r}, and had one")
        else:
            words.append(f"dummy argument {path!r} is {now[path]}, was {before[path]}")
    return words


def _changed(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """The keys of either mapping whose values differ."""
    return [name for name in dict.fromkeys((*now, *before)) if now.get(name) != before.get(name)]


@dataclass(frozen=True)
class Stored:
    """What a directory holds now: files and their ``manifest``, nothing, or nothing usable, and
    ``problem`` says why.
    """

    directory: Path
    manifest: Manifest | None = None
    problem: LoadError | None = None

    @classmethod
    def read(cls, directory: Path) -> Stored:
        """Look at a directory; what a killed process left half made or half swapped is put right
        first. Hold its lock.
        """
        # A process may have been killed between two renames.
        recover_folder(directory)
        # Under the lock nobody else writes here, so what is unfinished belongs to nobody.
        remove_unfinished(directory, alone=True)
        if not directory.exists():
            return cls(directory)
        try:
            manifest = Manifest.read(directory)
        except LoadError as error:
            return cls(directory, problem=error)
        missing = [
            name
            for name in (*map(code_file, range(manifest.plan_ngpus)), PLAN_FILE)
            if not (directory / name).is_file()
        ]
        if missing:
            path = directory / missing[0]
            problem = LoadError(
                f"{path} is a folder" if path.is_dir() else f"{path} is missing",
                why=f"{MANIFEST_FILE} lists it",
                hint=f"copy the whole directory, or {COMPILE_AGAIN}",
            )
            return cls(directory, problem=problem)
        return cls(directory, manifest)

    @property
    def is_empty(self) -> bool:
        """Whether there are no files, whole or broken."""
        return self.manifest is None and self.problem is None

    def matches(self, request: Request) -> bool:
        """Whether the files are what ``request`` would make, initial weights aside."""
        return self.manifest is not None and self.manifest.key == request.key()

    def holds(self, name: str, digest: str) -> bool:
        """Whether the file is there and was written with this digest."""
        return (
            self.manifest is not None
            and self.manifest.files.get(name) == digest
            and (self.directory / name).is_file()
        )


def read_proofs(directory: Path) -> set[str]:
    """The digests of the annotations that compiles into a directory have proved; none where the
    file says nothing.
    """
    try:
        data = json.loads((directory / PROOFS_FILE).read_bytes())
    except (OSError, ValueError):
        return set()
    return {item for item in data if isinstance(item, str)} if isinstance(data, list) else set()


def store_proofs(directory: Path, digests: Collection[str]) -> None:
    """Remember more proofs, if the directory takes files: without them, the next compile proves
    again.
    """
    if digests:
        known = sorted({*read_proofs(directory), *digests})
        with suppress(OSError):
            write_file(directory / PROOFS_FILE, (json.dumps(known, indent=1) + "\n").encode())


def weights_match(stored: Stored, tensors: Mapping[str, Tensors]) -> bool:
    """Whether the stored weight files hold exactly these tensors; ``tensors`` by file name."""
    for name, of_file in tensors.items():
        listed = stored.manifest is not None and name in stored.manifest.files
        if listed != bool(of_file) or (of_file and not stored.holds(name, digest_tensors(of_file))):
            return False
    return True


@contextmanager
def replacing(stored: Stored) -> Iterator[Path]:
    """A fresh folder that takes the place of the directory when the block ends well. Files that are
    not ours move along. Hold the lock of the directory.
    """
    directory = stored.directory
    with (
        writing("generated files", directory, WRITE_HINT),
        write_folder(directory, alone=True) as fresh,
    ):
        yield fresh
        # Everything else in the folder is the user's, and moves along.
        ours = {
            MANIFEST_FILE,
            PLAN_FILE,
            WEIGHTS_FILE,
            CONSTANTS_FILE,
            *(stored.manifest.files if stored.manifest else ()),
        }
        for path in sorted(directory.iterdir()) if directory.exists() else ():
            is_ours = path.name in ours or re.fullmatch(r"gencode\d+\.py", path.name)
            if not is_ours and path.is_dir():
                shutil.copytree(path, fresh / path.name, copy_function=keep_file)
            elif not is_ours:
                keep_file(path, fresh / path.name)


def store(
    stored: Stored, manifest: Manifest, files: Mapping[str, str], tensors: Mapping[str, Tensors]
) -> Manifest:
    """Write all files, check them and make them the directory. Returns the manifest with the
    digests of what was written.

    Weight files that the directory already holds are kept, not written again.
    """
    with replacing(stored) as fresh:
        digests = {}
        # Each file with its digest.
        for index, (name, text) in enumerate(files.items()):
            tell(f"write {name}, {index + 1:,} of {len(files):,} files", index / len(files))
            data = text.encode()
            (fresh / name).write_bytes(data)
            digests[name] = sha256(data)
        of_tensors, chunks = _store_tensors(stored, fresh, tensors)
        manifest = replace(manifest, files=digests | of_tensors, chunks=chunks)
        manifest.write(fresh)
        # Ranks differ in coordinates only, so one file tells whether the code parses.
        compile(
            files[code_file(0)], str(stored.directory / code_file(0)), "exec", dont_inherit=True
        )
        Manifest.read(fresh)
    return manifest


def store_weights(stored: Stored, tensors: Mapping[str, Tensors]) -> Manifest:
    """Replace the weight files of a directory and nothing else. Returns the new manifest."""
    old = stored.manifest
    assert old is not None
    with replacing(stored) as fresh:
        digests = {name: digest for name, digest in old.files.items() if name not in tensors}
        for name in digests:
            keep_file(stored.directory / name, fresh / name)
        of_tensors, chunks = _store_tensors(stored, fresh, tensors)
        manifest = replace(old, files=digests | of_tensors, chunks=chunks)
        manifest.write(fresh)
    return manifest


def _store_tensors(
    stored: Stored, fresh: Path, tensors: Mapping[str, Tensors]
) -> tuple[dict[str, str], dict[str, ChunkDigests]]:
    """The digests of the weight files, as wholes and by chunks."""
    old = stored.manifest
    digests: dict[str, str] = {}
    chunks: dict[str, ChunkDigests] = {}
    for name, of_file in tensors.items():
        if not of_file:
            continue
        # The same weights as before: the file is linked, not written.
        if old is not None and name in old.files and stored.holds(name, digest_tensors(of_file)):
            keep_file(stored.directory / name, fresh / name)
            digests[name] = old.files[name]
            chunks |= {name: old.chunks[name]} if name in old.chunks else {}
            continue
        record = write_tensors(fresh / name, of_file, flushes=False, chunked=True)
        assert record.sha256 is not None and record.chunks is not None
        digests[name], chunks[name] = record.sha256, record.chunks
    return digests, chunks


def keep_file(source: Path | str, target: Path | str) -> None:
    """Give a file a second name if the file system can do that; otherwise copy it."""
    try:
        # Folders of one model differ by little, and weights are large: a link costs no bytes.
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
