"""Fixtures for the tests of frameworks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integrations.compare import forget_accelerate

os.environ["HF_HUB_OFFLINE"] = "1"  # before Transformers is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def no_state_of_other_tests() -> Iterator[None]:
    """Accelerate keeps its settings for the process, and reads some from variables that the Trainer sets."""

    def reset() -> None:
        forget_accelerate()
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]

    reset()
    yield
    reset()
