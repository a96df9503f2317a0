"""Files, formats and columns; bad input in one sentence; rows that are dropped, each under its reason."""

import json
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
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

ROW = chat("What is the capital of France?", "Paris.")


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture
def preparer(tmp_path: Path, tokenizer_path: Path) -> Preparer:
    return Preparer(tmp_path, tokenizer_path)


# Formats


def test_conversations_of_sharegpt_are_chats(preparer: Preparer) -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "The answer."},
        ]
    }
    ((text, supervised),) = preparer.texts(preparer.rows([row]))
    assert text == (
        f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\nhi{END}\n<|im_start|>assistant\nThe answer.{END}\n"
    )
    assert supervised == ["The answer." + END]


def test_a_response_and_the_end_of_text_are_supervised_behind_a_plain_prompt(preparer: Preparer) -> None:
    rows = [{"prompt": "two and ", "response": "two"}, {"prompt": "two and ", "response": f"four{END}"}]
    prepared = preparer.rows(rows)
    assert preparer.texts(prepared) == [
        ("two and two" + END, ["two" + END]),
        ("two and four" + END, ["four" + END]),
    ]
    everything = preparer.rows(rows, supervise="all")
    assert all(mask.all() for _, mask in everything.rows([0, 1]))


def test_a_prompt_of_messages_is_a_chat(preparer: Preparer) -> None:
    prompt = ROW["messages"][:1]
    rows = [{"prompt": prompt, "response": "Paris."}, {"prompt": prompt, "response": ROW["messages"][1:]}]
    assert [supervised for _, supervised in preparer.texts(preparer.rows(rows))] == [["Paris." + END]] * 2


def test_text_is_supervised_whole_and_ended_once(preparer: Preparer) -> None:
    prepared = preparer.rows([{"text": "The quick"}, {"text": "brown fox" + END}])
    assert preparer.texts(prepared) == [
        ("The quick" + END, ["The quick" + END]),
        ("brown fox" + END, ["brown fox" + END]),
    ]


def test_tokens_pass_unchanged_with_their_mask(preparer: Preparer) -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8, 9]}]
    (ids, mask), (other_ids, other_mask) = preparer.rows(rows).rows([0, 1])
    assert (ids.dtype, mask.dtype) == (np.int64, np.bool_)
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7], [False, True, True])
    assert (other_ids.tolist(), other_mask.tolist()) == ([8, 9], [True, True])


def test_tools_reach_the_template_as_objects_or_as_json_text(preparer: Preparer) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [{**ROW, "tools": tools}, {**ROW, "tools": json.dumps(tools)}, {**ROW, "tools": None}, ROW]
    texts = [text for text, _ in preparer.texts(preparer.rows(rows, chat_template=THINKING))]
    assert texts[0] == texts[1]
    assert ["# Tools" in text for text in texts] == [True, True, False, False]


def test_unknown_columns_are_listed_with_what_is_accepted(preparer: Preparer) -> None:
    source = write_jsonl(preparer.directory / "rows.jsonl", [{"question": "?", "answer": "!"}])
    sentence = preparer.refusal(source)
    assert all(name in sentence for name in ("`answer`", "`question`", "`messages`", "`prompt` with `response`"))


def test_columns_of_two_formats_are_refused_even_if_a_late_row_has_the_second(preparer: Preparer) -> None:
    source = write_jsonl(preparer.directory / "rows.jsonl", [ROW] * 5 + [{"text": "The quick"}])
    assert "`messages`, `text`" in preparer.refusal(source)


# Files


def test_a_column_that_only_some_rows_have_drops_no_row(preparer: Preparer) -> None:
    rows = [{**ROW, "note": "only here"}] + [chat("hi", f"The answer is {i}.") for i in range(200)]
    rows[50]["messages"][0]["name"] = "Ada"
    rows[60]["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    rows[70]["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}]
    rows[80]["id"] = 7
    rows[90]["id"] = "seven"
    prepared = preparer.rows(rows)
    assert_every_row_is_accounted_for(prepared, 201)
    assert len(prepared) == 201
    assert preparer.texts(prepared)[200][1] == ["The answer is 199." + END]


def test_keys_that_other_rows_have_are_not_seen_by_the_template(preparer: Preparer) -> None:
    template = CHATML.replace("message.content +", "(message | length | string) + message.content +")
    rows = [chat("hi", "first"), chat("hi", "first")]
    rows[1]["messages"][0]["extra"] = {"deep": None}
    as_lines = preparer.rows(rows, chat_template=template)
    table = preparer.directory / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(table)
    as_table = preparer(table, chat_template=template)
    assert "2hi" in preparer.texts(as_lines)[0][0]
    assert [text for text, _ in preparer.texts(as_table)] == [text for text, _ in preparer.texts(as_lines)]


def test_every_kind_of_file_gives_the_same_rows(preparer: Preparer) -> None:
    rows = [chat("hi 🎉", f"The answer is {i}.") for i in range(30)]
    directory = preparer.directory
    table = datasets.Dataset.from_list(rows)
    expected = preparer.texts(preparer.rows(rows))
    (directory / "rows.json").write_text("\ufeff" + json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    pyarrow.parquet.write_table(table.data.table, directory / "rows.parquet", row_group_size=7)
    with pa.ipc.new_file(directory / "rows.arrow", table.data.table.schema) as writer:
        writer.write_table(table.data.table, max_chunksize=11)
    table.save_to_disk(str(directory / "saved"), num_shards=3)
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(directory / "splits"))
    for name in ("rows.json", "rows.parquet", "rows.arrow", "saved", "splits"):
        assert preparer.texts(preparer(directory / name)) == expected, name


def test_a_directory_gives_its_training_files_in_order(preparer: Preparer) -> None:
    directory = preparer.directory / "chats"
    directory.mkdir()
    for i, name in enumerate(("train-0.jsonl", "train-1.jsonl", "test.jsonl")):
        write_jsonl(directory / name, [chat("hi", f"The answer is {i}.")])
    (directory / "README.md").write_text("# Chats")
    texts = preparer.texts(preparer(directory))
    assert [supervised for _, supervised in texts] == [["The answer is 0." + END], ["The answer is 1." + END]]


def test_files_of_one_directory_may_differ_in_columns(preparer: Preparer) -> None:
    directory = preparer.directory / "chats"
    directory.mkdir()
    datasets.Dataset.from_list([ROW]).to_parquet(directory / "a.parquet")
    datasets.Dataset.from_list([{**ROW, "tools": "[]"}]).to_parquet(directory / "b.parquet")
    assert_every_row_is_accounted_for(preparer(directory), 2)


# Bad input


@pytest.mark.parametrize("source", ["no/such", "no/such.jsonl", "/no/such/directory", "nothing"])
def test_a_missing_path_is_named(preparer: Preparer, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert preparer.refusal(source).startswith(f"{source}: no such file or directory")


GOOD = json.dumps(ROW)


@pytest.mark.parametrize(
    ("name", "text", "line", "column"),
    [
        ("cut.jsonl", GOOD + "\n\n" + GOOD[:-5] + "\n" + GOOD, 3, 0),
        ("number.jsonl", GOOD + "\n7\n", 2, 1),
        ("two.jsonl", GOOD + "\n" + GOOD + GOOD, 2, len(GOOD) + 1),
        ("pretty.jsonl", "{\n", 1, 0),
        ("object.json", '{\n"a": 1}', 1, 2),
        ("array.json", "[" + GOOD + ",\n  {'a': 1}]", 2, 4),
        ("open.json", "[" + GOOD, 1, len(GOOD) + 2),
        ("comma.json", "[" + GOOD + ",\n]", 2, 1),
        ("behind.json", "[" + GOOD + "]\n x", 2, 2),
        ("numbers.json", "[\n 7]", 2, 2),
    ],
)
def test_bad_json_is_named_by_file_line_and_column(
    preparer: Preparer, name: str, text: str, line: int, column: int
) -> None:
    path = preparer.directory / name
    path.write_text(text)
    sentence = preparer.refusal(path)
    assert sentence.startswith(f"{path}: line {line}, column {column or ''}")


def test_a_byte_that_is_not_utf8_is_named_by_line_and_column(preparer: Preparer) -> None:
    for name, before in (("a.jsonl", b'{"text": "a"}\n{"text": "'), ("a.json", b'[{"text": "a"},\n {"text": "')):
        path = preparer.directory / name
        path.write_bytes(before + b'\xff"}\n]')
        column = len(before.split(b"\n")[1]) + 1
        assert preparer.refusal(path).startswith(f"{path}: line 2, column {column}: this byte is not UTF-8")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_damaged_table_is_named(preparer: Preparer, name: str) -> None:
    path = preparer.directory / name
    path.write_bytes(b"ARROW1 but not really")
    assert str(path) in preparer.refusal(path)


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", ""), ("b.jsonl", "\n\n"), ("c.json", "[]"), ("d.json", " [ ] ")]
)
def test_an_empty_dataset_is_refused(preparer: Preparer, name: str, text: str) -> None:
    path = preparer.directory / name
    path.write_text(text)
    assert preparer.refusal(path) == f"{path}: the dataset is empty."


def test_other_files_and_directories_without_rows_are_refused(preparer: Preparer) -> None:
    path = preparer.directory / "rows.csv"
    path.write_text("a,b")
    assert ".jsonl" in preparer.refusal(path)
    empty = preparer.directory / "empty"
    empty.mkdir()
    assert ".jsonl" in preparer.refusal(empty)
    for split in ("test", "validation"):
        write_jsonl(empty / f"{split}.jsonl", [ROW])
    assert "no split `train`" in preparer.refusal(empty)


def test_a_directory_of_mixed_files_is_refused_rather_than_read_in_part(preparer: Preparer) -> None:
    directory = preparer.directory / "mixed"
    directory.mkdir()
    write_jsonl(directory / "a.jsonl", [ROW])
    datasets.Dataset.from_list([ROW, ROW]).to_parquet(directory / "b.parquet")
    assert "both JSON and table files" in preparer.refusal(directory)


def test_a_cache_directory_that_cannot_be_written_is_named(preparer: Preparer) -> None:
    source = write_jsonl(preparer.directory / "rows.jsonl", [ROW])
    assert preparer.refusal(source, cache_dir=Path(source) / "cache").startswith(f"data.cache_dir {source}/cache: ")


def test_a_prompt_of_messages_needs_a_template(preparer: Preparer) -> None:
    source = write_jsonl(preparer.directory / "rows.jsonl", [{"prompt": ROW["messages"][:1], "response": "Paris."}])
    plain = make_tokenizer(preparer.directory / "plain", None)
    assert "no chat template" in preparer.refusal(source, tokenizer_path=plain)


def test_a_missing_or_broken_tokenizer_or_template_is_named(preparer: Preparer) -> None:
    source = write_jsonl(preparer.directory / "rows.jsonl", [ROW])
    assert "no such directory" in preparer.refusal(source, tokenizer_path="/no/such")
    empty = preparer.directory / "empty"
    empty.mkdir()
    assert str(empty) in preparer.refusal(source, tokenizer_path=empty)
    plain = make_tokenizer(preparer.directory / "plain", None)
    assert "no chat template" in preparer.refusal(source, tokenizer_path=plain)
    assert "neither a file nor" in preparer.refusal(source, chat_template="no_such.jinja")
    assert "does not compile" in preparer.refusal(source, chat_template="{% for message in %}")


def test_a_template_is_taken_from_a_file_or_from_text(preparer: Preparer) -> None:
    path = preparer.directory / "template.jinja"
    path.write_text(THINKING)
    prepared = [preparer.rows([ROW], chat_template=setting) for setting in (str(path), THINKING)]
    assert prepared[0].fingerprint == prepared[1].fingerprint
    assert "<think>" in preparer.texts(prepared[0])[0][0]


# Dropped rows


def test_every_dropped_row_is_counted_under_its_reason(preparer: Preparer) -> None:
    role = {"role": "user", "content": "hi"}
    rows = [
        ROW,
        {"messages": []},
        {"messages": None},
        {"tools": []},
        {"messages": "not JSON"},
        {"messages": [role, {"content": "no role"}]},
        {"messages": [role, {"role": "assistant", "content": 7}]},
        {"messages": [role, {"role": "assistant", "content": "half \ud800 a pair"}]},
        {"messages": [role]},
        chat("hi " * 300, "Paris."),
    ]
    path = preparer.directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = preparer(path)
    assert_every_row_is_accounted_for(prepared, len(rows))
    assert prepared.accounting["dropped"] == {
        "bad_messages": 4,
        "empty": 3,
        "no_supervised_tokens": 1,
        "truncated_away": 1,
    }
    assert prepared.accounting["first_dropped"]["bad_messages"].startswith("row 5: ")


def test_tokens_are_dropped_for_a_wrong_mask_or_vocabulary(preparer: Preparer) -> None:
    rows = [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2, 3], "loss_mask": [1, 1]},
        {"input_ids": [1, 2, 400]},
        {"input_ids": [1, -2, 3]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]},
        {"input_ids": [7]},
        {"input_ids": ["a", "b"]},
        {"input_ids": [[1], [2, 3]]},
        {"input_ids": []},
    ]
    prepared = preparer.rows(rows, vocab_size=400)
    assert_every_row_is_accounted_for(prepared, len(rows))
    assert prepared.accounting["dropped"] == {
        "outside_vocabulary": 2,
        "too_short": 2,
        "bad_tokens": 2,
        "mask_length_differs": 1,
        "no_supervised_tokens": 1,
        "empty": 1,
    }


def test_a_prompt_longer_than_max_length_is_dropped_and_a_long_answer_is_cut(preparer: Preparer) -> None:
    rows = [chat("hi", "four " * 100), chat("four " * 100, "Paris.")]
    prepared = preparer.rows(rows, max_length=32)
    assert_every_row_is_accounted_for(prepared, 2)
    assert prepared.accounting["dropped"] == {"truncated_away": 1}
    assert prepared.accounting["rows_truncated"] == 1
    ((ids, mask),) = prepared.rows([0])
    assert len(ids) == len(mask) == prepared.lengths[0] == 32
    assert (mask[:-1] & mask[1:]).any()


def test_a_dataset_of_which_nothing_is_left_is_refused_with_the_reasons(preparer: Preparer) -> None:
    source = write_jsonl(preparer.directory / "rows.jsonl", [chat("hi"), {"messages": []}, chat("so?")])
    refusing = "{{ raise_exception('not\\nthis') }}"
    assert "bad_messages (row 1: the chat template refuses them: not this)" in preparer.refusal(
        source, chat_template=refusing
    )
    sentence = preparer.refusal(source)
    assert "2 no_supervised_tokens (row 1: " in sentence
    assert "1 empty (row 2: " in sentence
