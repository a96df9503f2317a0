"""A prepared dataset on disk: an Arrow table of `input_ids`, `loss_mask` and `length`, memory-mapped.

The lengths are one column, read as one array without touching any row. Rows are slices of the mapped buffers, copied
once into arrays; no Python lists are made.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ds_dflash.errors import UserError

ACCOUNTING_FILE = "accounting.json"
TABLE_DIRECTORY = "table"
TABLE_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_())), ("length", pa.int32())]
)


class PreparedDataset:
    """Rows of token ids with their supervision masks.

    `lengths` int32 [rows]; `accounting`: what became of every row of the source (see `report.describe`);
    `fingerprint`: equal for equal sources, tokenizer, template and settings; `table`: the Hugging Face dataset itself.
    """

    def __init__(self, directory: Path) -> None:
        """Opens what `prepare` wrote; raises UserError where files of it are missing or damaged."""
        self.directory = directory
        self.fingerprint = directory.name
        try:
            self.accounting: dict[str, Any] = json.loads((directory / ACCOUNTING_FILE).read_text())
            self.table = datasets.Dataset.load_from_disk(str(directory / TABLE_DIRECTORY))
        except (OSError, pa.ArrowInvalid, json.JSONDecodeError) as error:
            raise _damaged(directory, str(error).splitlines()[0]) from None
        if len(self.table) != self.accounting["rows_kept"]:
            raise _damaged(directory, f"{len(self.table)} rows where {self.accounting['rows_kept']} were written")
        columns = self.table.data.table
        self.lengths: np.ndarray = columns.column("length").to_numpy().astype(np.int32, copy=False)
        self._ids: list[pa.ListArray] = columns.column("input_ids").chunks
        self._masks: list[pa.ListArray] = columns.column("loss_mask").chunks
        self._first_rows = np.cumsum([0] + [len(chunk) for chunk in self._ids])

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, indices: Iterable[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """`input_ids` int64 [length] and `loss_mask` bool [length] of each row asked for, in that order."""
        return [self._row(int(index)) for index in indices]

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        chunk = int(np.searchsorted(self._first_rows, index, side="right")) - 1
        row = index - int(self._first_rows[chunk])
        input_ids = _items(self._ids[chunk], row).to_numpy().astype(np.int64)
        return input_ids, _items(self._masks[chunk], row).to_numpy(zero_copy_only=False)


def _items(lists: pa.ListArray, row: int) -> pa.Array:
    first, last = lists.offsets[row].as_py(), lists.offsets[row + 1].as_py()
    return lists.values.slice(first, last - first)


def _damaged(directory: Path, reason: str) -> UserError:
    return UserError(f"{directory}: the prepared dataset is damaged ({reason}); delete the directory to build it anew.")
