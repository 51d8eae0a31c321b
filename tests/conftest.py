"""Fixtures that several rooms share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.recording import RecordingEngine
from zenflow_compile.runtime import copies


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    """Each test compiles its classes anew, whatever the tests before it compiled; no test resets Dynamo itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def asynchronous_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of tests are small: their copies are as asynchronous as those of large ones."""
    monkeypatch.setattr(copies, "INLINE_BYTES", 0)


@pytest.fixture
def recording() -> Iterator[Callable[..., RecordingEngine]]:
    """Makes recording engines over a module's parameters and unregisters them afterwards."""
    made: list[RecordingEngine] = []

    def make(module: nn.Module, **keywords: object) -> RecordingEngine:
        made.append(RecordingEngine(module.named_parameters(), **keywords))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()
