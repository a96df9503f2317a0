"""Builds a prepared dataset once and finds it again.

A dataset lives in `cache_dir/FINGERPRINT`, the hash of everything that its rows depend on: the bytes of the source
files and of the tokenizer's files, the chat template, the settings and `CODE_VERSION`. Whoever finds no such directory
takes the lock `FINGERPRINT.lock` of the file system, builds in `FINGERPRINT.building` and renames that when it is
whole; all others wait on the lock and then load. The system drops the lock of a process that dies, and the next build
removes what it left. Every process reads the source files once, to hash them.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout

from ds_dflash.data.build import build
from ds_dflash.data.encode import EncodeSettings
from ds_dflash.data.prepared import PreparedDataset
from ds_dflash.data.sources import resolve_source
from ds_dflash.data.template import read_template_setting
from ds_dflash.errors import UserError

CODE_VERSION = 1  # raise it with every change that alters the rows of any dataset
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
    "*.tiktoken",
    "tokenization_*.py",
)
SUPERVISE = ("assistant", "last", "all")
POLL_SECONDS = 0.2


def prepare(
    source: str,
    *,
    tokenizer_path: str | Path,
    max_length: int,
    supervise: str,
    chat_template: str | None,
    cache_dir: Path,
    num_proc: int | None,
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
) -> PreparedDataset:
    """The tokens, masks and lengths of a source's rows, built now or found in the cache.

    `source`: a .json, .jsonl, .parquet or .arrow file, a directory of such or of `Dataset.save_to_disk`, or a dataset
    of the Hub; where it has splits, `train`. `max_length`: tokens a row is cut to. `supervise`: "assistant", "last" or
    "all". `chat_template`: a file, the text, or None for the tokenizer's own. `num_proc`: processes that tokenise,
    None: by the number of rows. `vocab_size`: rows with ids outside the target's vocabulary are dropped.
    Any number of processes may call this at once; one builds. Raises UserError.
    """
    assert supervise in SUPERVISE, supervise
    assert max_length > 0, max_length
    tokenizer_path = Path(tokenizer_path)
    if not tokenizer_path.is_dir():
        raise UserError(f"{tokenizer_path}: no such directory, where the target's tokenizer should be.")
    files = resolve_source(source)
    settings = EncodeSettings(max_length, supervise, read_template_setting(chat_template), vocab_size)
    key = {
        "version": CODE_VERSION,
        "source": files.digest(),
        "tokenizer": _tokenizer_digest(tokenizer_path),
        **asdict(settings),
    }
    directory = Path(cache_dir) / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    build_once(
        directory,
        lambda building: build(
            building, files, tokenizer_path, settings, num_proc=num_proc, trust_remote_code=trust_remote_code
        ),
    )
    return PreparedDataset(directory)


def _tokenizer_digest(directory: Path) -> str:
    total = hashlib.sha256()
    for path in sorted({path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)}):
        if path.is_file():
            with path.open("rb") as file:
                total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def build_once(directory: Path, build_into: Callable[[Path], None]) -> None:
    """Makes sure that `directory` is there and whole, whoever builds it.

    A UserError of the builder is also raised by those who were waiting for it: they would only meet it again.
    """
    if directory.exists():
        return
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory.parent).close()
    except OSError as error:
        raise UserError(f"data.cache_dir {directory.parent}: cannot be written ({error.strerror}).") from None
    came = time.time()
    failure = directory.with_suffix(".failed")
    with _lock_of(directory).acquire(poll_interval=POLL_SECONDS):
        if directory.exists():
            return
        if failure.exists() and failure.stat().st_mtime > came:
            raise UserError(failure.read_text(encoding="utf-8"))
        failure.unlink(missing_ok=True)
        _remove_leftovers(directory)
        building = directory.with_suffix(".building")
        building.mkdir()
        try:
            build_into(building)
            os.rename(building, directory)
        except UserError as error:
            failure.write_text(str(error), encoding="utf-8")
            raise
        finally:
            shutil.rmtree(building, ignore_errors=True)


def _lock_of(directory: Path) -> FileLock:
    return FileLock(directory.with_suffix(".lock"))


def _remove_leftovers(directory: Path) -> None:
    """Removes what builds left that died; the lock of `directory` is held."""
    for leftover in directory.parent.glob("*.building"):
        if leftover.stem == directory.name:
            shutil.rmtree(leftover)
            continue
        try:
            with _lock_of(leftover).acquire(blocking=False):
                shutil.rmtree(leftover, ignore_errors=True)
        except Timeout:
            continue  # somebody is at work there
