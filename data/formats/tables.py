"""Parquet and arrow files, read by Hugging Face datasets, which must be installed for them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from shardwright.data.formats.source_files import Paths, fingerprint_of, listed
from shardwright.runtime.arguments import checked
from shardwright.runtime.errors import ConfigError, DataError, brief_text


class Tables:
    """The rows of parquet or arrow files, by index; numbers are tensors.

    ``paths``: a file, a folder, or a list, all of one kind. ``columns``: those that are read; all
    by default.
    """

    @checked
    def __init__(self, paths: Paths, *, columns: list[str] | None = None) -> None:
        found = listed(paths, (".parquet", ".arrow"), "parquet or arrow file")
        kinds = {path.suffix for path in found}
        if len(kinds) > 1:
            raise DataError(
                "parquet and arrow files do not make one source",
                why=", ".join(str(path) for path in found[:4]),
                hint="name files of one kind",
            )
        datasets = _datasets()
        try:
            if kinds == {".parquet"}:
                rows = datasets.Dataset.from_parquet([str(path) for path in found])
            else:
                parts = [datasets.Dataset.from_file(str(path)) for path in found]
                rows = datasets.concatenate_datasets(parts)
        except Exception as error:
            raise DataError(
                f"{found[0]} and the files beside it cannot be read",
                why=f"{type(error).__name__}: {brief_text(error)}",
            ) from error
        if columns is not None:
            missing = sorted(set(columns) - set(rows.column_names))
            if missing:
                raise DataError(
                    f"{found[0]} has no column {missing[0]!r}",
                    why=f"its columns are {', '.join(rows.column_names)}",
                )
            rows = rows.select_columns(columns)
        self._rows = rows.with_format("torch")
        # The number of rows is known of all files together, which is enough to tell that data
        # changed.
        counts = [len(rows), *([0] * (len(found) - 1))]
        self.fingerprint = fingerprint_of("table", found, counts)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        return row

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Several rows at once, as torch's DataLoader asks for them."""
        rows: list[dict[str, Any]] = self._rows.__getitems__(indices)
        return rows


def _datasets() -> Any:
    try:
        return import_module("datasets")
    except ImportError as error:
        raise ConfigError(
            "parquet and arrow files are read by Hugging Face datasets",
            why="it is not installed here",
            hint="pip install datasets",
        ) from error
