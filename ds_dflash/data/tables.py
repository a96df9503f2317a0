"""Parquet and Arrow files as groups of rows, each group read when it is asked for."""

from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow as pa
import pyarrow.parquet

from ds_dflash.errors import UserError


class TableFile:
    """A file's columns and the number of rows in each of its groups (row groups, record batches)."""

    def __init__(self, groups: "Groups", columns: list[str], group_sizes: list[int]) -> None:
        self._groups = groups
        self.columns = columns
        self.group_sizes = group_sizes

    def read(self, group: int, columns: tuple[str, ...]) -> list[dict[str, Any]]:
        """The rows of one group, with those of `columns` that the file has; keys that hold null are left out."""
        table = self._groups.read(group, [name for name in columns if name in self.columns])
        return [without_nulls(row) for row in datasets.Dataset(table).to_list()]


class Groups(Protocol):
    """Gives one group of rows."""

    def read(self, group: int, columns: list[str]) -> pa.Table: ...


class ParquetGroups:
    """Row groups, decoded when read."""

    def __init__(self, file: pyarrow.parquet.ParquetFile) -> None:
        self._file = file

    def read(self, group: int, columns: list[str]) -> pa.Table:
        return self._file.read_row_group(group, columns=columns)


class ArrowGroups:
    """Record batches, memory-mapped."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches

    def read(self, group: int, columns: list[str]) -> pa.Table:
        return pa.Table.from_batches([self._batches[group]]).select(columns)


def open_table(path: Path) -> TableFile:
    """Opens a .parquet or .arrow file (Arrow's file or stream format); raises UserError where it is neither."""
    try:
        return _open_parquet(path) if path.suffix == ".parquet" else _open_arrow(path)
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: not a readable {path.suffix[1:]} file ({reason}).") from None


def _open_parquet(path: Path) -> TableFile:
    file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    return TableFile(ParquetGroups(file), file.schema_arrow.names, sizes)


def _open_arrow(path: Path) -> TableFile:
    mapped = pa.memory_map(str(path))
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(mapped).read_all()
    batches = table.to_batches()
    return TableFile(ArrowGroups(batches), table.schema.names, [batch.num_rows for batch in batches])


def without_nulls(value: Any) -> Any:
    """The value without keys that hold null: a table fills every key that any of its rows has into all of them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and not (value and isinstance(value[0], int)):  # token ids are many and hold no keys
        return [without_nulls(item) for item in value]
    return value
