"""Fixtures for the tests of frameworks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before Transformers is imported
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def no_state_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its settings for the process, and reads some from variables that Trainer sets."""
    from accelerate.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            monkeypatch.delenv(name)

    reset()
    yield
    reset()
