"""Where rows come from: a file, a directory or a dataset of the Hub becomes a list of files and where each row lies.

JSON is read by us and not through Arrow: Arrow's inference wants one schema for all rows, fills keys that a row does
not have with null (which changes what a chat template prints) and reports no line. One pass over JSON parses every row
once, so that bad JSON is reported before any work and the columns are those of all rows; it keeps only each row's place
(24 bytes). The row is parsed again by the process that tokenises it. Parquet and Arrow files keep their own schemas,
so files of one dataset may differ in columns; a row's place there is its row group or record batch and its number.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
from datasets.data_files import FILES_TO_IGNORE
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.errors import HFValidationError, HTTPError  # the base of what its HTTP library raises

from ds_dflash.data.tables import TableFile, open_table
from ds_dflash.errors import UserError

JSON_SUFFIXES = (".json", ".jsonl")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = JSON_SUFFIXES + TABLE_SUFFIXES
HUB_SECONDS = 10.0
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Source:
    """The files of one dataset, in the order of its rows; `name` is how the user wrote it."""

    name: str
    files: tuple[Path, ...]

    def digest(self) -> str:
        """A hash of the files' bytes and order; neither their place nor their times count. Streams every file."""
        total = hashlib.sha256()
        for path in self.files:
            try:
                with path.open("rb") as file:
                    total.update(path.suffix.encode() + hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror}).") from None
        return total.hexdigest()


@dataclass(frozen=True)
class RowPlaces:
    """Where each row lies, arrays of [rows]: its file, its place there and the place's extent.

    In JSON, place and extent are the offset and the number of bytes; in a table, the group and the row within it.
    """

    file: np.ndarray
    place: np.ndarray
    extent: np.ndarray
    columns: frozenset[str]


def resolve_source(source: str) -> Source:
    """The files behind a path or a Hub name; raises UserError where there are none of a kind that is read."""
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{source}: files of rows end in {', '.join(SUFFIXES)}, not in {path.suffix!r}.")
        return Source(source, (path,))
    if path.is_dir():
        return Source(source, tuple(_saved_files(path) or _directory_files(source, path)))
    if HUB_NAME.fullmatch(source) and not source.endswith(SUFFIXES):
        return Source(source, tuple(_hub_files(source)))
    raise UserError(f"{source}: no such file or directory, and it is not the name of a dataset on the Hub either.")


def _saved_files(directory: Path) -> list[Path]:
    """The files of a directory that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote; else none."""
    splits = directory / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text())["splits"]
        return _saved_files(directory / _training_split(str(directory), names))
    state = directory / "state.json"
    if not state.is_file():
        return []
    return [directory / entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]


def _directory_files(source: str, directory: Path) -> list[Path]:
    """The training split's files, by the conventions of `datasets` for file and directory names."""
    names = [path.name for path in directory.rglob("*") if path.name not in FILES_TO_IGNORE]
    kinds = [kind for kind in (JSON_SUFFIXES, TABLE_SUFFIXES) if any(name.endswith(kind) for name in names)]
    if not kinds:
        raise UserError(f"{source}: the directory holds no file that ends in {', '.join(SUFFIXES)}.")
    if len(kinds) > 1:  # `datasets` would take the more frequent kind and leave the rest out
        raise UserError(f"{source}: the directory holds both JSON and table files; name a file or a directory of one.")
    return [Path(name) for name in _builder_files(source, str(directory.resolve()))]


def _hub_files(source: str) -> list[Path]:
    files = []
    try:
        HfApi().dataset_info(source, timeout=HUB_SECONDS)  # `datasets` itself would try for half a minute
        for url in _builder_files(source, source):
            place: Any = HfFileSystem().resolve_path(url)
            files.append(
                hf_hub_download(place.repo_id, place.path_in_repo, repo_type="dataset", revision=place.revision)
            )
    except (HTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{source}: no such file or directory, and the Hub gave no dataset of that name ({reason})."
        ) from None
    return [Path(name) for name in files]


def _builder_files(source: str, location: str) -> list[str]:
    try:
        builder = datasets.load_dataset_builder(location)
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{source}: no dataset is found there ({reason}).") from None
    splits = builder.config.data_files or {}
    names = [name for name in splits[_training_split(source, list(splits))] if name.endswith(SUFFIXES)]
    if not names:
        raise UserError(f"{source}: no file of the training split ends in {', '.join(SUFFIXES)}.")
    return names


def _training_split(source: str, names: list[str]) -> str:
    if "train" in names or len(names) == 1:
        return "train" if "train" in names else str(names[0])
    listed = ", ".join(map(str, names)) or "none"
    raise UserError(f"{source}: there is no split `train` among its splits ({listed}); name the files of one.")


def locate_rows(source: Source) -> RowPlaces:
    """Places and columns of all rows; raises UserError for unreadable files, naming line and column in JSON."""
    columns: set[str] = set()
    places: list[np.ndarray] = []
    for number, path in enumerate(source.files):
        find = _json_places if path.suffix in JSON_SUFFIXES else _table_places
        found = np.fromiter(chain.from_iterable(find(path, columns.update)), np.int64).reshape(-1, 2)
        places.append(np.column_stack([np.full(len(found), number), found]))
    table = np.concatenate(places)
    if not len(table):
        raise UserError(f"{source.name}: the dataset is empty.")
    return RowPlaces(table[:, 0], table[:, 1], table[:, 2], frozenset(columns))


AddColumns = Callable[[Any], None]


def _json_places(path: Path, add_columns: AddColumns) -> Iterator[tuple[int, int]]:
    with path.open("rb") as file:
        if path.suffix == ".json" and file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
            yield from _array_places(path, add_columns)
            return
        file.seek(0)
        yield from _line_places(path, file, add_columns)


def _line_places(path: Path, file: BinaryIO, add_columns: AddColumns) -> Iterator[tuple[int, int]]:
    offset = 0
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            try:
                row = json.loads(text.rstrip())
            except json.JSONDecodeError as error:
                raise _bad_json(path, number, error.colno, error.msg) from None
            except UnicodeDecodeError as error:
                raise _bad_json(path, number, error.start + 1, "this byte is not UTF-8") from None
            _add_row(path, number, 1, row, add_columns)
            yield offset + len(line) - len(text), len(text)
        offset += len(line)


def _array_places(path: Path, add_columns: AddColumns) -> Iterator[tuple[int, int]]:
    """Rows of one JSON array, each where it stands in the file; the file's text is held in memory."""
    text = _read_text(path)
    decoder, scan = json.JSONDecoder(), re.compile(r"[\ufeff \t\r\n]*")
    at = scan.match(text).end() + 1  # type: ignore[union-attr]
    seen, offset = 0, 0
    closed = re.compile(r"[ \t\r\n]*\]").match(text, at)
    while not closed:
        begin = scan.match(text, at).end()  # type: ignore[union-attr]
        try:
            row, end = decoder.raw_decode(text, begin)
        except json.JSONDecodeError as error:
            raise _bad_json(path, error.lineno, error.colno, error.msg) from None
        _add_row(path, *_line_and_column(text, begin), row, add_columns)
        offset += len(text[seen:begin].encode())
        size = len(text[begin:end].encode())
        yield offset, size
        seen, offset = end, offset + size
        closed = re.compile(r"[ \t\r\n]*\]").match(text, end)
        comma = re.compile(r"[ \t\r\n]*,").match(text, end)
        if not closed and not comma:
            raise _bad_json(path, *_line_and_column(text, end), "expecting a comma or the array's end")
        at = comma.end() if comma else end
    rest = scan.match(text, closed.end()).end()  # type: ignore[union-attr]
    if rest != len(text):
        raise _bad_json(path, *_line_and_column(text, rest), "extra data behind the array")


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise _bad_json(path, line, column, "this byte is not UTF-8") from None


def _line_and_column(text: str, at: int) -> tuple[int, int]:
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def _add_row(path: Path, line: int, column: int, row: Any, add_columns: AddColumns) -> None:
    if not isinstance(row, dict):
        raise _bad_json(path, line, column, f"a row is an object, and this is {type(row).__name__}")
    add_columns(row)


def _bad_json(path: Path, line: int, column: int, message: str) -> UserError:
    return UserError(f"{path}: line {line}, column {column}: {message}.")


def _table_places(path: Path, add_columns: AddColumns) -> Iterator[tuple[int, int]]:
    table = open_table(path)
    add_columns(table.columns)
    for group, rows in enumerate(table.group_sizes):
        yield from ((group, row) for row in range(rows))


class RowReader:
    """Reads rows by their places; each process that it is sent to opens the files for itself."""

    def __init__(self, files: tuple[Path, ...], columns: tuple[str, ...]) -> None:
        self._files = files
        self._columns = columns
        self._open: dict[int, BinaryIO | TableFile] = {}
        self._group: tuple[int, int] | None = None
        self._rows: list[dict[str, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_group": None, "_rows": []}

    def read(self, number: int, place: int, extent: int) -> dict[str, Any]:
        """The row of file `number` there, by `RowPlaces`; a table's row group stays in memory until another's turn."""
        file = self._file(number)
        if isinstance(file, TableFile):
            if self._group != (number, place):
                self._group, self._rows = (number, place), file.read(place, self._columns)
            return self._rows[extent]
        file.seek(place)
        return json.loads(file.read(extent))

    def _file(self, number: int) -> BinaryIO | TableFile:
        if number not in self._open:
            path = self._files[number]
            self._open[number] = open_table(path) if path.suffix in TABLE_SUFFIXES else path.open("rb")
        return self._open[number]
