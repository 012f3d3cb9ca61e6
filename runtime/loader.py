"""Loading generated files: check the bytes, then execute exactly those bytes."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path
from types import ModuleType

from shardwright.runtime.errors import LoadError
from shardwright.runtime.manifest import Manifest, code_file, read_file, sha256
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.ranks.failures import GENERATED
from shardwright.runtime.ranks.world import current_world

_serial = itertools.count()


def load_class(directory: Path | str, rank: int | None = None) -> type[ParallelModule]:
    """The class generated for a rank, from the files in ``directory``.

    ``rank`` is a rank of the world (default: the current one); units run the same files, so it loads those of plan rank
    ``rank % plan_ngpus``. Nothing is executed before its digest is checked, and no bytecode cache is involved.

    Raises :class:`LoadError` if a file is missing or edited, if the files are of another version, or if the ranks of the
    current world do not divide into units.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    if rank is None:
        world = current_world()
        if world.size % manifest.plan_ngpus:
            raise LoadError(
                f"{directory} was compiled for {manifest.plan_ngpus} ranks, but {world.size} are running",
                why=f"its mesh is {manifest.mesh}; the number of ranks must be a multiple of {manifest.plan_ngpus}",
                hint=f"start it with torchrun --nproc_per_node={manifest.plan_ngpus}, or compile for another plan_ngpus",
            )
        rank = world.rank
    name = code_file(rank % manifest.plan_ngpus)
    source = _checked_source(directory, name, manifest)
    module = _execute(directory / name, source)
    loaded = getattr(module, manifest.class_name, None)
    if not (isinstance(loaded, type) and issubclass(loaded, ParallelModule)):
        raise LoadError(
            f"{directory / name} defines no ParallelModule named {manifest.class_name!r}",
            hint="give the class its name back, or compile again with reuse='override'",
        )
    loaded.compute_config = manifest.config
    loaded.use_order = manifest.use_order
    return loaded


def unload(loaded: type[ParallelModule]) -> None:
    """Let go of the module that defines a loaded class, as soon as nothing uses the class any more. Of what it still runs,
    tracebacks show no lines.
    """
    module = sys.modules.pop(loaded.__module__)
    linecache.cache.pop(str(module.__file__), None)


def _checked_source(directory: Path, name: str, manifest: Manifest) -> bytes:
    """The bytes of a code file, if they are those the manifest stands for."""
    source = read_file(directory, name)
    expected = manifest.files.get(name)
    if sha256(source) != expected:
        raise LoadError(
            f"{directory / name} is not the file that was generated",
            why=f"its sha256 is {sha256(source)[:12]}..., the manifest has {expected[:12] if expected else 'none'}...",
            hint=f"if the edit is meant, accept it with `shardwright accept {directory}`; "
            "otherwise compile again with reuse='override'",
        )
    return source


def _execute(path: Path, source: bytes) -> ModuleType:
    """Run checked bytes as a module of its own, registered under a unique name so that classes and tracebacks find it."""
    module = ModuleType(f"{GENERATED}{next(_serial)}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    text = source.decode()
    # Without a modification time the entry is not compared with the file: tracebacks show what was executed.
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        del sys.modules[module.__name__]
        if isinstance(error, Exception):
            raise LoadError(
                f"{path} fails when it is loaded", why=f"{type(error).__name__}: {error}", hint="see the traceback above"
            ) from error
        raise
    return module
