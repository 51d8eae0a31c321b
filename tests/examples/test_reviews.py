"""Sentences become prompts whose next token is the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.reviews import Reviews, read_reviews
from tests.support.small_texts import REVIEWS

RATED = {text: rating > 0 for rating, text in REVIEWS if rating}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tiny_model)
    return found


def texts_of(reviews: Reviews, tokenizer: PreTrainedTokenizerBase, steps: int) -> list[str]:
    found = []
    for step in range(steps):
        batch = reviews.training_batch(step, 8)
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True):
            found.append(tokenizer.decode(ids[mask.bool()]))
    return found


def test_prompts_end_where_the_answer_follows(reviews: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    task = Reviews(reviews, tokenizer, tokens=64, held_out=16)
    batch = task.training_batch(0, 8)
    assert batch.input_ids.shape == batch.attention_mask.shape == (8, 64)
    for ids, mask, label in zip(batch.input_ids, batch.attention_mask, batch.labels, strict=True):
        count = int(mask.sum())
        assert mask.tolist() == [0] * (64 - count) + [1] * count
        text = tokenizer.decode(ids[mask.bool()])
        assert text.startswith("Review: The film is ")
        assert text.endswith("\nSentiment:")
        sentence = text.removeprefix("Review: ").removesuffix("\nSentiment:")
        assert label == task.label_tokens[RATED[sentence]]
    words = [tokenizer.decode([each]) for each in task.label_tokens]
    assert " negative".startswith(words[0])
    assert " positive".startswith(words[1])


def test_long_sentences_are_cut_before_the_question(reviews: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    batch = Reviews(reviews, tokenizer, tokens=12, held_out=16).training_batch(0, 8)
    assert batch.attention_mask.all()
    assert all(tokenizer.decode(ids).endswith("\nSentiment:") for ids in batch.input_ids)


def test_seeds_order_the_same_sentences(reviews: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    one, other = (Reviews(reviews, tokenizer, tokens=64, held_out=16, seed=seed) for seed in (0, 1))
    first, second = texts_of(one, tokenizer, 10), texts_of(other, tokenizer, 10)
    assert first != second
    assert sorted(first) == sorted(second)  # an epoch of 80 sentences
    assert texts_of(one, tokenizer, 10) == first
    again = [one.training_batch(step, 8).input_ids for step in (10, 0)]
    assert not torch.equal(*again)
    held_out = [
        tokenizer.decode(ids[mask.bool()])
        for batch in one.held_out_batches(5)
        for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)
    ]
    assert len(held_out) == 16
    assert not set(held_out) & set(first)


def test_too_few_sentences_are_refused(reviews: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="has 96 rated sentences, and held_out=96 of them are not trained on"):
        Reviews(reviews, tokenizer, held_out=96)


def test_tokenizer_must_tell_the_answers_apart(reviews: Path) -> None:
    class Blind:
        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            return {"input_ids": [7]}

    with pytest.raises(ValueError, match="begins ' negative' and ' positive' with the same token"):
        Reviews(reviews, Blind(), held_out=16)  # type: ignore[arg-type]


def test_prompts_of_all_words_need_room(reviews: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"tokens=3 must be more than \d+, which a prompt has without its sentence"):
        Reviews(reviews, tokenizer, tokens=3, held_out=16)


def test_positions_are_those_without_padding(reviews: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    batch = Reviews(reviews, tokenizer, tokens=64, held_out=16).training_batch(0, 8)
    for mask, positions in zip(batch.attention_mask, batch.position_ids, strict=True):
        count = int(mask.sum())
        assert positions[64 - count :].tolist() == [*range(count)]
        assert positions[: 64 - count].eq(0).all()


def test_sentences_that_come_twice_count_once(tmp_path: Path) -> None:
    path = tmp_path / "twice.tsv"
    path.write_text("1\t2.0\tGood\n2\t-1.0\tBad\n\n3\t1.0\tGood")
    assert read_reviews(path) == [("Good", 2.0), ("Bad", -1.0)]


@pytest.mark.parametrize(
    "line", ["2\tnan\tGood", "2\tgood\tGood", "2\t1.0", "2\t1.0\t ", "2\t1.0\tGood\tindeed", "text"]
)
def test_lines_of_another_form_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.tsv"
    path.write_text(f"1\t2.0\tGood\n{line}\n")
    with pytest.raises(ValueError, match=r"bad\.tsv, line 2: .* must be a number, a rating and a sentence, with tabs"):
        read_reviews(path)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.tsv"
    path.write_bytes(b"1\t2.0\tOl\xe9")
    with pytest.raises(ValueError, match=r"latin\.tsv is not UTF-8"):
        read_reviews(path)
