"""Reads, encodes and writes all rows of a source, and counts what became of each.

Tokenising is `datasets.map` over the places of rows (24 bytes a row), with processes; a process reads and parses the
rows that it encodes. Every row comes out, dropped ones empty and with their reason; what is kept is then written once
more as the final table. So the tokens are written twice, and no more than a batch of rows is held in memory.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ds_dflash.data.encode import EncodedRow, EncodeSettings, RowEncoder
from ds_dflash.data.prepared import ACCOUNTING_FILE, TABLE_DIRECTORY, TABLE_SCHEMA
from ds_dflash.data.processes import count_processes, pool_of
from ds_dflash.data.rows import RowDroppedError, columns_of, recognise_format
from ds_dflash.data.sources import RowPlaces, RowReader, Source, locate_rows
from ds_dflash.errors import UserError

BATCH_ROWS = 128  # rows that are tokenised by one call, and about what a process holds in memory
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
RESULT_SCHEMA = pa.schema([*TABLE_SCHEMA, ("tokens_cut", pa.int64()), ("reason", pa.string()), ("detail", pa.string())])


def build(
    directory: Path,
    source: Source,
    tokenizer_path: Path,
    settings: EncodeSettings,
    *,
    num_proc: int | None,
    trust_remote_code: bool,
) -> None:
    """Writes the prepared dataset into an empty directory; raises UserError."""
    places = locate_rows(source)
    format_name = recognise_format(places.columns, source.name)
    tokenizer = load_tokenizer(tokenizer_path, trust_remote_code)
    reader = RowReader(source.files, columns_of(format_name))
    encoder = RowEncoder(tokenizer, format_name, settings, tokenizer_path)
    scratch = directory / "scratch"
    scratch.mkdir()
    results = _encode_all(places, BatchEncoder(reader, encoder), scratch, num_proc)
    accounting = {"format": format_name, **account(results.data.table)}
    if not accounting["rows_kept"]:
        raise UserError(f"{source.name}: nothing is left of {len(results)} rows: {explain_drops(accounting)}.")
    kept = np.flatnonzero(results.data.column("reason").is_null().to_numpy())
    table = results.select_columns(TABLE_SCHEMA.names)
    if len(kept) < len(results):
        table = table.select(kept)
    table.save_to_disk(str(directory / TABLE_DIRECTORY))
    (directory / ACCOUNTING_FILE).write_text(json.dumps(accounting, indent=2))
    shutil.rmtree(scratch)


def load_tokenizer(tokenizer_path: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory; raises UserError where none can be read."""
    try:
        return AutoTokenizer.from_pretrained(
            str(tokenizer_path), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{tokenizer_path}: no tokenizer can be loaded from there ({reason}).") from None


class BatchEncoder:
    """The function that `datasets.map` applies: places of rows to a table of `RESULT_SCHEMA`."""

    def __init__(self, reader: RowReader, encoder: RowEncoder) -> None:
        self._reader = reader
        self._encoder = encoder

    def __call__(self, batch: dict[str, list[int]]) -> pa.Table:
        places = zip(batch["file"], batch["place"], batch["extent"], strict=True)
        return to_table(self._encoder.encode([self._reader.read(*place) for place in places]))


def to_table(results: list[EncodedRow | RowDroppedError]) -> pa.Table:
    """A row of `RESULT_SCHEMA` for every result; a dropped one is empty and has a reason."""
    empty = EncodedRow(np.zeros(0, np.int32), np.zeros(0, bool), 0)
    rows = [empty if isinstance(result, RowDroppedError) else result for result in results]
    lengths = np.array([len(row.input_ids) for row in rows], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    dropped = [result if isinstance(result, RowDroppedError) else None for result in results]
    columns = [
        pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows])),
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([row.loss_mask for row in rows]))),
        pa.array(lengths),
        pa.array([row.tokens_cut for row in rows], pa.int64()),
        pa.array([None if drop is None else drop.reason for drop in dropped], pa.string()),
        pa.array([None if drop is None else drop.detail for drop in dropped], pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=RESULT_SCHEMA)


def _encode_all(places: RowPlaces, encode: BatchEncoder, scratch: Path, num_proc: int | None) -> datasets.Dataset:
    table = datasets.Dataset.from_dict({"file": places.file, "place": places.place, "extent": places.extent})
    rows = len(table)
    processes = min(count_processes(rows) if num_proc is None else num_proc, rows)
    with pool_of(processes):
        return table.map(
            encode,
            batched=True,
            batch_size=BATCH_ROWS,
            writer_batch_size=BATCH_ROWS,
            remove_columns=table.column_names,
            features=datasets.Features.from_arrow_schema(RESULT_SCHEMA),
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(scratch / "rows.arrow"),
            new_fingerprint="0" * 16,  # its own would hash the tokenizer; nobody looks this one up
            desc="Tokenising",
        )


def account(results: pa.Table) -> dict[str, Any]:
    """What became of all rows, from a table of `RESULT_SCHEMA`: rows_in = rows_kept + the sum of dropped."""
    reasons = results.column("reason")
    dropped = {item["values"]: item["counts"] for item in reasons.drop_null().value_counts().to_pylist()}
    kept = reasons.is_null().to_numpy()
    lengths = results.column("length").to_numpy()[kept]
    supervised = sum(pc.sum(chunk.values).as_py() or 0 for chunk in results.column("loss_mask").chunks)
    tokens = int(lengths.sum(dtype=np.int64))
    return {
        "rows_in": len(results),
        "rows_kept": int(kept.sum()),
        "dropped": dict(sorted(dropped.items(), key=lambda item: -item[1])),
        "first_dropped": {reason: _first_dropped(results, reason) for reason in dropped},
        "rows_truncated": int((results.column("tokens_cut").to_numpy()[kept] > 0).sum()),
        "tokens_cut": int(results.column("tokens_cut").to_numpy()[kept].sum()),
        "tokens": tokens,
        "supervised_tokens": int(supervised),
        "supervised_share": supervised / tokens if tokens else 0.0,
        "lengths": length_figures(lengths),
    }


def _first_dropped(results: pa.Table, reason: str) -> str:
    row = pc.index(results.column("reason"), reason).as_py()
    return " ".join(f"row {row + 1}: {results.column('detail')[row].as_py()}".split())  # errors may have lines


def length_figures(lengths: np.ndarray) -> dict[str, float]:
    """Smallest, largest, mean and quantiles of lengths in tokens, [rows]; nothing for no rows."""
    if not len(lengths):
        return {}
    quantiles = np.quantile(lengths, QUANTILES, method="lower")
    named = {f"p{round(100 * q)}": int(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
    return {"min": int(lengths.min()), **named, "max": int(lengths.max()), "mean": float(lengths.mean())}


def explain_drops(accounting: dict[str, Any]) -> str:
    """Reasons with their counts and the first row dropped for each, in one line."""
    first = accounting["first_dropped"]
    return "; ".join(f"{count} {reason} ({first[reason]})" for reason, count in accounting["dropped"].items())
