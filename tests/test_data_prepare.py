"""The prepared dataset: built once whoever asks, found again, never half there; its figures."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from data_fixtures import (
    CHATML,
    END,
    THINKING,
    Preparer,
    assert_every_row_is_accounted_for,
    chat,
    make_tokenizer,
    write_jsonl,
)
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_dflash.data import cache, describe, histogram, show
from ds_dflash.data.build import BatchEncoder, account, to_table
from ds_dflash.data.cache import build_once
from ds_dflash.data.encode import EncodedRow
from ds_dflash.data.rows import RowDroppedError
from ds_dflash.errors import UserError

ROWS = [chat("hi", "The answer is four." * (1 + i % 7)) for i in range(300)]
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture
def preparer(tmp_path: Path, tokenizer_path: Path) -> Preparer:
    return Preparer(tmp_path, tokenizer_path)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


# Found again


def test_the_second_call_builds_nothing_and_gives_the_same(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = preparer.rows(ROWS)
    monkeypatch.setattr("ds_dflash.data.cache.build", None)
    second = preparer.rows(ROWS)
    assert second.fingerprint == first.fingerprint
    assert second.accounting == first.accounting
    assert np.array_equal(second.lengths, first.lengths)


def test_the_key_changes_with_every_input_and_not_with_places(preparer: Preparer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    base = preparer(source).fingerprint
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(source, moved)
    copy = tmp_path / "tokenizer"
    shutil.copytree(preparer.tokenizer_path, copy)
    assert preparer(moved, tokenizer_path=copy, num_proc=1).fingerprint == base
    variants = [
        preparer(write_jsonl(tmp_path / "other.jsonl", ROWS[:3])),
        preparer(source, max_length=99),
        preparer(source, supervise="last"),
        preparer(source, chat_template=CHATML),
        preparer(source, chat_template=CHATML + " "),
        preparer(source, vocab_size=1000),
        preparer(source, tokenizer_path=make_tokenizer(tmp_path / "larger", CHATML, vocab_size=300)),
    ]
    keys = {base, *(variant.fingerprint for variant in variants)}
    assert len(keys) == len(variants) + 1


def test_a_changed_template_file_of_the_tokenizer_is_seen(preparer: Preparer, tmp_path: Path) -> None:
    copy = tmp_path / "tokenizer"
    shutil.copytree(preparer.tokenizer_path, copy)
    before = preparer.rows(ROWS[:1], tokenizer_path=copy)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>\\n", "<|im_end|>"))
    after = preparer.rows(ROWS[:1], tokenizer_path=copy)
    assert preparer.texts(before)[0][0] == preparer.texts(after)[0][0].replace(END, END + "\n")


def test_a_changed_source_is_seen_at_the_same_path_and_size(preparer: Preparer) -> None:
    texts = [preparer.texts(preparer.rows([chat("hi", answer)]))[0][1] for answer in ("four", "five")]
    assert texts == [["four" + END], ["five" + END]]


def test_a_damaged_dataset_is_refused(preparer: Preparer) -> None:
    prepared = preparer.rows(ROWS)
    (prepared.directory / "accounting.json").write_text(json.dumps({**prepared.accounting, "rows_kept": 5}))
    with pytest.raises(UserError, match="damaged"):
        preparer.rows(ROWS)
    (table,) = (prepared.directory / "table").glob("*.arrow")
    table.unlink()
    with pytest.raises(UserError, match="damaged"):
        preparer.rows(ROWS)


# Built once, whoever asks


def prepare_slowly(preparer: Preparer, source: str, log: Path, start: Any, changes: dict[str, Any]) -> None:
    """A process that prepares, and logs what it does."""
    original = cache.build

    def build(*arguments: Any, **options: Any) -> None:
        with log.open("a") as file:
            file.write("build\n")
        time.sleep(0.5)
        original(*arguments, **options)

    cache.build = build  # this process is a fork
    start.wait()
    try:
        outcome = preparer(source, **changes).fingerprint
    except UserError as error:
        outcome = f"refused: {error}"
    with log.open("a") as file:
        file.write(outcome + "\n")


def outcomes_of_three_at_once(preparer: Preparer, source: str, log: Path, **changes: Any) -> list[str]:
    start = FORK.Event()
    processes = [FORK.Process(target=prepare_slowly, args=(preparer, source, log, start, changes)) for _ in range(3)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return log.read_text().splitlines()


def test_of_three_processes_one_builds_and_the_others_wait_for_it(preparer: Preparer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    built, *outcomes = outcomes_of_three_at_once(preparer, source, tmp_path / "log")
    assert built == "build"
    assert outcomes == [preparer(source).fingerprint] * 3


def test_those_who_waited_for_a_refused_dataset_do_not_try_it_again(preparer: Preparer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", [chat("hi")])
    built, *outcomes = outcomes_of_three_at_once(preparer, source, tmp_path / "log")
    assert built == "build"
    assert len(outcomes) == 3
    assert len(set(outcomes)) == 1
    assert "no_supervised_tokens" in outcomes[0]
    assert "no_supervised_tokens" in preparer.refusal(source)  # a later call does try


def build_until_killed(preparer: Preparer, source: str, marks: Path) -> None:
    def encode(self: BatchEncoder, batch: dict[str, list[int]]) -> Any:
        (marks / str(os.getpid())).touch()
        time.sleep(600)

    BatchEncoder.__call__ = encode  # type: ignore[method-assign]  # this process is a fork
    preparer(source, num_proc=2)


def test_a_killed_build_leaves_nothing_that_looks_finished_or_goes_on(preparer: Preparer, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    marks = tmp_path / "marks"
    marks.mkdir()
    builder = FORK.Process(target=build_until_killed, args=(preparer, source, marks))
    builder.start()
    wait_for(lambda: len(list(marks.iterdir())) == 2, "two processes at work")
    (leftover,) = preparer.cache.glob("*.building")
    assert not leftover.with_suffix("").exists()
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    wait_for(lambda: not any(is_running(int(mark.name)) for mark in marks.iterdir()), "its processes ended")
    FileLock(leftover.with_suffix(".lock")).acquire(timeout=10).lock.release()
    (preparer.cache / "0123.building").mkdir()  # of another dataset, whose build died too
    assert_every_row_is_accounted_for(preparer(source), len(ROWS))
    assert not list(preparer.cache.glob("*.building"))


def test_a_build_of_another_dataset_that_is_going_on_is_left_alone(preparer: Preparer) -> None:
    other = preparer.cache / "0123"
    other.with_suffix(".building").mkdir(parents=True)
    with FileLock(other.with_suffix(".lock")):
        preparer.rows(ROWS[:2])
        assert other.with_suffix(".building").exists()


def test_an_interrupted_build_leaves_no_directory(tmp_path: Path) -> None:
    def interrupted(directory: Path) -> None:
        (directory / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "cache" / "abc", interrupted)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_the_number_of_processes_changes_nothing(preparer: Preparer) -> None:
    rows = [*ROWS, chat("no answer")]
    one = preparer.rows(rows, cache_dir=preparer.directory / "one", num_proc=1)
    two = preparer.rows(rows, cache_dir=preparer.directory / "two", num_proc=2)
    assert one.fingerprint == two.fingerprint
    assert one.accounting == two.accounting
    assert one.table.to_dict() == two.table.to_dict()


def test_nothing_is_left_in_the_cache_but_the_dataset_and_its_lock(preparer: Preparer) -> None:
    prepared = preparer.rows(ROWS)
    names = {path.name for path in preparer.cache.iterdir()}
    assert names == {prepared.fingerprint, f"{prepared.fingerprint}.lock"}
    assert {path.name for path in prepared.directory.iterdir()} == {"table", "accounting.json"}


# Lengths and rows


def test_lengths_are_read_without_decoding_a_row(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    preparer.rows(ROWS)

    def refuse(*_: Any) -> None:
        raise AssertionError("a row was decoded")

    monkeypatch.setattr(datasets.Dataset, "__getitem__", refuse)
    monkeypatch.setattr(datasets.Dataset, "__iter__", refuse)
    prepared = preparer.rows(ROWS)
    assert prepared.lengths.dtype == np.int32
    assert prepared.lengths.shape == (len(ROWS),)
    monkeypatch.undo()
    assert prepared.lengths.tolist() == [len(row["input_ids"]) for row in prepared.table]


def test_rows_are_those_of_the_table_in_the_order_asked_for(preparer: Preparer) -> None:
    rows = [*ROWS, chat("no answer")] * 8  # several record batches, and rows that are dropped between
    prepared = preparer.rows(rows)
    assert len(prepared.table.data.table.column("length").chunks) > 1
    indices = np.random.default_rng(0).permutation(len(prepared))[:200]
    for index, (input_ids, loss_mask) in zip(indices, prepared.rows(indices), strict=True):
        row = prepared.table[int(index)]
        assert (input_ids.dtype, loss_mask.dtype) == (np.int64, np.bool_)
        assert input_ids.tolist() == row["input_ids"]
        assert loss_mask.tolist() == row["loss_mask"]
    with pytest.raises(IndexError):
        prepared.rows([len(prepared)])


# Accounting


@given(st.lists(st.one_of(st.integers(1, 40), st.sampled_from(["empty", "too_short"])), min_size=1, max_size=60))
@settings(deadline=None, max_examples=50)
def test_rows_in_are_rows_kept_and_dropped(outcomes: list[int | str]) -> None:
    results: list[EncodedRow | RowDroppedError] = [
        RowDroppedError(outcome, "why")
        if isinstance(outcome, str)
        else EncodedRow(np.arange(outcome, dtype=np.int32), np.arange(outcome) % 3 == 0, outcome % 2)
        for outcome in outcomes
    ]
    figures = account(to_table(results))
    lengths = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert figures["rows_in"] == len(outcomes) == figures["rows_kept"] + sum(figures["dropped"].values())
    assert figures["tokens"] == sum(lengths)
    assert figures["supervised_tokens"] == sum((length + 2) // 3 for length in lengths)
    assert figures["rows_truncated"] == sum(length % 2 for length in lengths)
    for reason in figures["dropped"]:
        assert figures["first_dropped"][reason] == f"row {outcomes.index(reason) + 1}: why"


def test_the_description_adds_up(preparer: Preparer) -> None:
    prepared = preparer.rows([*ROWS[:8], chat("no answer"), chat("hi", "long " * 300)])
    text = describe(prepared)
    assert "10 in = 9 kept + 1 dropped" in text
    assert "dropped 1 as no_supervised_tokens; first: row 9: no message has the role assistant" in text
    assert f"tokens: {prepared.lengths.sum()}" in text
    assert "max 256" in text


def test_shown_rows_have_their_supervised_tokens_in_colour(preparer: Preparer) -> None:
    prepared = preparer.rows([chat("hi", "The answer 🎉", "so?", "yes"), *ROWS], chat_template=THINKING)
    text = show(prepared, preparer.tokenizer, 2)
    assert f"assistant\n\033[32mThe answer 🎉{END}\033[0m\n" in text
    assert text.count("--- row") == 2
    assert show(prepared, preparer.tokenizer, 10_000).count("--- row") == len(prepared)


def test_the_histogram_is_a_picture(preparer: Preparer, tmp_path: Path) -> None:
    histogram(preparer.rows(ROWS), tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
