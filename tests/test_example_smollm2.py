"""examples/smollm2: the real target and the real chats (marker `real`: 100 MB from the package registry, cached)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_dflash.config import load_settings

pytestmark = pytest.mark.real

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2"
TEXT = "In 2024, 12345 + 67 = 3½.\n\n  def café(x):  # it's 日本"


@pytest.fixture(scope="session", autouse=True)
def example_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        yield


@pytest.fixture(scope="session")
def get_target(example_on_path: None) -> ModuleType:
    return importlib.import_module("get_target")


@pytest.fixture(scope="session")
def make_data(example_on_path: None) -> ModuleType:
    return importlib.import_module("make_data")


@pytest.fixture(scope="session")
def gguf_file(get_target: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return get_target.extract_gguf(tmp_path_factory.mktemp("gguf") / "target.gguf")


@pytest.fixture(scope="session")
def target(get_target: ModuleType, gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted") / "target"
    get_target.convert(gguf_file, directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(target: Path) -> Any:
    return AutoTokenizer.from_pretrained(target, padding_side="left")


def loaded_from_gguf(loader: Any, gguf_file: Path, **arguments: Any) -> Any:
    return loader.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, **arguments)


@pytest.fixture(scope="session")
def model(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target)


def test_the_converted_target_is_the_one_that_transformers_loads_from_gguf(
    model: Any, tokenizer: Any, gguf_file: Path
) -> None:
    reference = loaded_from_gguf(AutoModelForCausalLM, gguf_file, dtype=torch.float32)
    ours, theirs = model.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.inference_mode():
        torch.testing.assert_close(model(**inputs).logits, reference(**inputs).logits, rtol=0, atol=1e-4)


def test_the_converted_target_foresees_plain_english(model: Any, tokenizer: Any) -> None:
    """A wrong order of the query and key rows, common to both loaders, would show here."""
    inputs = tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt")
    with torch.inference_mode():
        next_token = model(**inputs).logits[0, -1].argmax()
    assert tokenizer.decode(next_token) == " Rome"


def test_numbers_are_split_into_single_digits_before_the_byte_level_split(tokenizer: Any) -> None:
    backend: Tokenizer = tokenizer.backend_tokenizer
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("in 2024, 3½")]
    assert pieces == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "3", "Â½"]
    assert tokenizer.tokenize(" ½") == ["Ġ", "Â½"]


def test_apart_from_the_digit_split_the_tokenizer_is_the_one_that_transformers_loads(
    tokenizer: Any, gguf_file: Path
) -> None:
    reference = loaded_from_gguf(AutoTokenizer, gguf_file)
    text = TEXT.replace("½", "")
    assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert tokenizer.chat_template == reference.chat_template
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)


def test_decoding_gives_back_the_text(tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_role_markers_in_the_template_are_single_tokens_and_a_system_prompt_is_put_in(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    assert ids.count(1) == ids.count(2) == 3
    assert tokenizer.decode(ids) == rendered


def test_a_conversion_that_fails_leaves_no_target_behind(
    get_target: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_half_way(gguf_file: Path, directory: Path) -> None:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise RuntimeError("killed")

    monkeypatch.setattr(get_target, "convert", fail_half_way)
    monkeypatch.setattr(get_target, "extract_gguf", lambda destination, cache: destination)
    with pytest.raises(RuntimeError, match="killed"):
        get_target.get_target(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_each_chat_occurs_once_and_in_the_same_order_every_time(make_data: ModuleType) -> None:
    chats = [text.lower() for text in make_data.read_chats()]
    assert len(chats) > 4000
    assert len(set(chats)) == len(chats)  # so no held-out chat is trained on
    assert chats == [text.lower() for text in make_data.read_chats()]


def test_a_row_is_kept_only_if_it_ended_and_renders_to_what_the_target_wrote(
    make_data: ModuleType, tokenizer: Any
) -> None:
    prompt = make_data.chat_prompt("How are you, on a scale of 1 to 10?")
    ended = [*tokenizer.encode("I'm at 9½."), tokenizer.eos_token_id]
    cut = tokenizer.encode("I'm at 9½.")
    two_tokens_for_one = [*tokenizer.encode("I'm a"), *tokenizer.encode("t 9."), tokenizer.eos_token_id]
    rows, dropped = make_data.build_rows([prompt] * 3, [ended, cut, two_tokens_for_one], tokenizer)
    assert rows == [[*prompt, {"role": "assistant", "content": "I'm at 9½."}]]
    assert sum(dropped.values()) == 2


def test_padding_after_an_answer_is_cut_and_its_own_end_of_turn_kept(make_data: ModuleType) -> None:
    assert make_data.until_end([5, 6, 2, 2, 2], 2) == [5, 6, 2]
    assert make_data.until_end([5, 6, 7], 2) == [5, 6, 7]


def test_answers_in_a_padded_batch_are_those_of_each_prompt_alone(
    make_data: ModuleType, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_data, "MAX_NEW_TOKENS", 6)
    prompts = [make_data.chat_prompt(text) for text in ("Hi!", "What did you do at the seaside, and with whom?")]
    batch = [tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"] for prompt in prompts]
    together = make_data.generate_batch(model, tokenizer, batch)
    alone = [make_data.generate_batch(model, tokenizer, [prompt])[0] for prompt in batch]
    assert together == alone


def test_generation_that_was_stopped_goes_on_with_the_batches_that_are_missing(
    make_data: ModuleType, target: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [make_data.chat_prompt(f"Question {'really ' * n}?") for n in range(6)]
    calls: list[int] = []

    def stop_at_second_batch(model: Any, tokenizer: Any, batch: list[list[int]]) -> list[list[int]]:
        calls.append(len(batch))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [[ids[-5], 2] for ids in batch]

    monkeypatch.setattr(make_data, "BATCH_SIZE", 2)
    monkeypatch.setattr(make_data, "generate_batch", stop_at_second_batch)
    with pytest.raises(KeyboardInterrupt):
        make_data.generate_answers(prompts, target, tokenizer, tmp_path)
    answers = make_data.generate_answers(prompts, target, tokenizer, tmp_path)
    assert calls == [2, 2, 2, 2]
    assert all(len(answer) == 2 for answer in answers)
    assert make_data.generate_answers(prompts, target, tokenizer, tmp_path) == answers
    assert calls == [2, 2, 2, 2]


def test_the_mask_token_of_the_example_settings_is_one_that_no_text_holds(tokenizer: Any) -> None:
    settings = load_settings(EXAMPLE / "config.json")
    assert settings.drafter.mask_token_id == tokenizer.convert_tokens_to_ids("<empty_output>")
