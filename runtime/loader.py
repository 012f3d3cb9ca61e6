"""Loading generated files: check the bytes, then execute exactly those bytes."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from types import CodeType, ModuleType

from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import COMPILE_AGAIN, LoadError
from shardwright.runtime.manifest import Manifest, code_file, read_file, sha256
from shardwright.runtime.module.parallel_module import ParallelModule
from shardwright.runtime.module.weights import CONSTANTS_FILE, WEIGHTS_FILE
from shardwright.runtime.ranks.failures import GENERATED
from shardwright.runtime.ranks.world import current_world

_serial = itertools.count()


@checked
def load_class(directory: Path | str, rank: int | None = None) -> type[ParallelModule]:
    """The class generated for a rank, from the files in ``directory``.

    ``rank`` is a rank of the world (default: the current one); units run the same files, so it
    loads those of plan rank ``rank % plan_ngpus``. Nothing is executed before its digest is
    checked, and no bytecode cache is involved.

    Raises :class:`LoadError` if a file is missing or edited, if the files are of another version,
    or if the ranks of the current world do not divide into units.
    """
    directory = Path(directory)
    # The manifest says which bytes are right; these are read, checked and executed.
    manifest = Manifest.read(directory)
    if rank is None:
        world = current_world()
        if world.size % manifest.plan_ngpus:
            raise LoadError(
                f"{directory} was compiled for {manifest.plan_ngpus} ranks, but {world.size} "
                "are running",
                why=f"its mesh is {manifest.mesh}; the number of ranks must be a multiple of "
                f"{manifest.plan_ngpus}",
                hint=f"start it with torchrun --nproc_per_node={manifest.plan_ngpus}, or compile "
                "for another plan_ngpus",
            )
        rank = world.rank
    name = code_file(rank % manifest.plan_ngpus)
    source = _checked_source(directory, name, manifest)
    module, lines, code = _execute(directory / name, source)
    loaded = getattr(module, manifest.class_name, None)
    if not (isinstance(loaded, type) and issubclass(loaded, ParallelModule)):
        _release(module.__name__, directory / name, lines)
        raise LoadError(
            f"{directory / name} defines no ParallelModule named {manifest.class_name!r}",
            hint=f"give the class its name back, or {COMPILE_AGAIN}",
        )
    # What the file does not say itself.
    loaded.compute_config = manifest.config
    loaded.use_order = manifest.use_order
    listed = {file: manifest.digests_of(file) for file in (WEIGHTS_FILE, CONSTANTS_FILE)}
    loaded.weight_digests = {
        file: digests for file, digests in listed.items() if digests is not None
    }
    _let_go_with_class(module, directory / name, lines, loaded, keeps=_reads(code, loaded.__name__))
    return loaded


def _checked_source(directory: Path, name: str, manifest: Manifest) -> bytes:
    """The bytes of a code file, if they are those the manifest stands for."""
    source = read_file(directory, name)
    expected = manifest.files.get(name)
    if sha256(source) != expected:
        raise LoadError(
            f"{directory / name} is not the file that was generated",
            why=f"its sha256 is {sha256(source)[:12]}..., the manifest has "
            f"{expected[:12] if expected else 'none'}...",
            hint=f"if the edit is meant, accept it with `shardwright accept {directory}`; "
            "otherwise compile again with reuse='override'",
        )
    return source


def _execute(path: Path, source: bytes) -> tuple[ModuleType, Lines, CodeType]:
    """Run checked bytes as a module of its own, registered under a unique name so that its class
    and tracebacks find it.

    See [Note: A module lives as long as its class].
    """
    _release_unused()
    module = ModuleType(f"{GENERATED}{next(_serial)}_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    # Before it runs, so that a traceback of its first line shows the source that was checked, even
    # if the file has changed since.
    lines = _shown(path, source.decode())
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except BaseException as error:
        _release(module.__name__, path, lines)
        if isinstance(error, Exception):
            raise LoadError(
                f"{path} fails when it is loaded",
                why=f"{type(error).__name__}: {error}",
                hint="see the traceback above",
            ) from error
        raise
    return module, lines, code


# [Note: A module lives as long as its class] A generated class finds its module in ``sys.modules``,
# and tracebacks find its lines in ``linecache``. A program that compiles or loads again and again
# must not collect them all. So the module does not hold its class, but looks for it when it is
# asked for it, and when the class is gone, module and lines go with it: when the next file is
# loaded, as the collector of garbage, which finds that the class is gone, may run while somebody
# goes through ``sys.modules``. Only a file that was edited so that its own code reads the class by
# name keeps both for good.


def _let_go_with_class(
    module: ModuleType, path: Path, lines: Lines, loaded: type, *, keeps: bool
) -> None:
    """Release a module when its class is gone. ``keeps``: the module holds the class."""
    name, reference = loaded.__name__, weakref.ref(loaded)
    # Module and class hold each other. Without this the class would live as long as ``sys.modules``
    # has the module, which is for ever.
    if not keeps:
        del module.__dict__[name]

        def find(wanted: str) -> type:
            found = reference() if wanted == name else None
            if found is None:
                raise AttributeError(f"module {module_name!r} has no attribute {wanted!r}")
            return found

        module_name = module.__name__
        module.__dict__["__getattr__"] = find
    weakref.finalize(loaded, _unused.append, (module.__name__, path, lines)).atexit = False


Lines = tuple[int, None, list[str], str]
"""An entry of ``linecache``. Without a modification time it is not compared with the file: what was
executed is shown.
"""

_lock = threading.Lock()
_unused: deque[tuple[str, Path, Lines]] = deque()  # modules whose class is gone
_lines: dict[Path, list[Lines]] = {}
"""What lives of each file, in the order of loading; tracebacks show the lines of the last one."""


def _shown(path: Path, text: str) -> Lines:
    """Let tracebacks show these lines of a file."""
    lines: Lines = (len(text), None, text.splitlines(keepends=True), str(path))
    with _lock:
        _lines[path] = [*_lines.get(path, ()), lines]
        linecache.cache[str(path)] = lines
    return lines


def _release_unused() -> None:
    """Forget the modules whose class is gone."""
    while _unused:
        _release(*_unused.popleft())


def _release(module_name: str, path: Path, lines: Lines) -> None:
    """Forget a module. Of what was loaded before from the same file tracebacks show the lines
    again.
    """
    sys.modules.pop(module_name, None)
    with _lock:
        living = [entry for entry in _lines.pop(path, ()) if entry is not lines]
        if living:
            _lines[path] = living
            linecache.cache[str(path)] = living[-1]
        else:
            linecache.cache.pop(str(path), None)


def _reads(code: CodeType, name: str) -> bool:
    """Whether a function or class in ``code``, at any depth, may read the global ``name``."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(name in found.co_names or _reads(found, name) for found in inner)
