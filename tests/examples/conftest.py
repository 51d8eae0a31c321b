"""A text that even a tiny model learns within seconds, and a tiny model with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.stdlib_text import Text
from tests.support.small_texts import REVIEWS, repeating, save_tiny_model


@pytest.fixture(scope="session")
def repeating_text() -> Text:
    return repeating()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of 2 layers and its tokenizer."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    folder = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rated sentences, as in the package: number, rating, sentence."""
    path = tmp_path_factory.mktemp("reviews") / "reviews.tsv"
    path.write_text("\n".join(f"{number}\t{rating}\t{text}" for number, (rating, text) in enumerate(REVIEWS)) + "\n")
    return path
